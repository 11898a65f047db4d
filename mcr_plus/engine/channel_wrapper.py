"""Base classes of channels that replace a library's own channel, for failover and verification.

A capability wraps the channels of a group when the group is opened (`registry.WRAPPERS`). The engine knows
wrappers only by the classes of this module; it knows nothing of failover or verification.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING

from mcr_plus.backends.base import Backend, Channel, Poll, Start

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mcr_plus.core.message import Signature


class SteppedPoll(ABC):
    """The poll of an operation that consists of several steps."""

    __slots__ = ()

    @property
    @abstractmethod
    def current(self) -> Poll | None:
        """The poll of the current step; None while the operation waits for its turn."""

    @abstractmethod
    def __call__(self) -> bool:
        """See `Poll`."""


class PollOfEither:
    """The poll of an operation that one of two libraries runs, `library`; for failover."""

    __slots__ = ()
    library: str


class ChannelWrapper(Channel):
    """A channel that uses a library's own channel, and that the engine drives beside the library.

    It has no persistent requests: a library's request has no steps, and cannot run on another library.

    Attributes:
        has_failover: another library takes over collectives that fail on this channel.
    """

    has_failover = False

    @property
    def taken_over_by(self) -> str | None:
        """The library that has taken over; None while the first library works."""
        return None

    def bind_every(self, signature: Signature, every: int) -> Start:  # noqa: ARG002
        """Bind as `bind` does, but verify every `every`-th operation of the signature; none if 0.

        Sends and receives follow the group's option: the two ends of a message may match different rules.
        """
        return self.bind(signature)

    def needs_polls(self, beside: Poll | None) -> bool:  # noqa: ARG002
        """Return whether operations other than the one with poll `beside` need polls to make progress.

        Called under the engine's lock. A subclass returns False where it can tell.
        """
        return True

    @abstractmethod
    def tick(self) -> None:
        """Advance the work that waits in this wrapper; called often, under the engine's lock."""

    def on_library_off(self, backend: Backend, reason: str) -> None:
        """Handle that `backend` has been switched off in this process."""


def bound_every(channel: Channel, every: int) -> Callable[[Signature], Start]:
    """Return the `bind` of a channel, for a stage that verifies every `every`-th operation."""
    return partial(channel.bind_every, every=every) if isinstance(channel, ChannelWrapper) else channel.bind


def has_failover(channel: Channel | None, signature: Signature) -> bool:
    """Return whether another library takes over if this channel fails; False for sends and receives."""
    return isinstance(channel, ChannelWrapper) and channel.has_failover and not signature.is_p2p


def second_of(names: Sequence[str], name: str) -> str | None:
    """Return the library that takes over for `name`: the next in `names`, cyclically."""
    if name not in names:
        return None
    at = names.index(name)
    return next(iter((*names[at + 1 :], *names[:at])), None)
