"""Channels that stand in for a library's own: base classes, and which library takes over for another.

A capability wraps the channels of a group when that is opened (`registry.WRAPPERS`). The engine knows the
wrappers as what follows here, and nothing of failover or verification.
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
    """The poll of an operation of several steps."""

    __slots__ = ()

    @property
    @abstractmethod
    def current(self) -> Poll | None:
        """The poll of the step that it waits for; None if it waits for its turn."""

    @abstractmethod
    def __call__(self) -> bool:
        """See `Poll`."""


class PollOfEither:
    """The poll of an operation that one of two libraries runs, `library`; for failover."""

    __slots__ = ()
    library: str


class ChannelWrapper(Channel):
    """A channel that uses a library's own, and that the engine drives beside the library.

    Attributes:
        has_failover: another library takes over the collectives where this one fails.
    """

    has_failover = False

    @property
    def taken_over_by(self) -> str | None:
        """The library that has taken over; None while the first one works."""
        return None

    def bind_every(self, signature: Signature, every: int) -> Start:  # noqa: ARG002
        """`bind`, where every so many operations of the signature are verified; none for 0.

        Sends and receives follow the group's option: the two ends of a message may match different rules.
        """
        return self.bind(signature)

    def needs_polls(self, beside: Poll | None) -> bool:  # noqa: ARG002
        """Whether operations other than the one of this poll may be held up without polls.

        Under the engine's lock. True unless a subclass knows better.
        """
        return True

    @abstractmethod
    def tick(self) -> None:
        """Go on with what waits here; often, and under the engine's lock."""

    def on_library_off(self, backend: Backend, reason: str) -> None:
        """`backend` is not called any more in this process."""


def bound_every(channel: Channel, every: int) -> Callable[[Signature], Start]:
    """The `bind` of a channel for a stage whose option `verify` is `every`."""
    return partial(channel.bind_every, every=every) if isinstance(channel, ChannelWrapper) else channel.bind


def has_failover(channel: Channel | None, signature: Signature) -> bool:
    """Whether another library takes over an operation where this channel's fails: not sends and receives."""
    return isinstance(channel, ChannelWrapper) and channel.has_failover and not signature.is_p2p


def second_of(names: Sequence[str], name: str) -> str | None:
    """The library that takes over for `name`: the next one in this order, after the last one the first."""
    if name not in names:
        return None
    at = names.index(name)
    return next(iter((*names[at + 1 :], *names[:at])), None)
