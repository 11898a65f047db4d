"""What dispatch needs of a library whose operations are verified, without the kernels that verify them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING

from mcr_plus.backends.base import Channel, Poll, Start

if TYPE_CHECKING:
    from collections.abc import Callable

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


class SteppedChannel(Channel):
    """A channel whose operations consist of several, of which any wait starts the next."""

    @abstractmethod
    def bind_every(self, signature: Signature, every: int) -> Start:
        """`bind`, where every so many operations of the signature are verified; none for 0.

        Sends and receives follow the group's option: the two ends of a message may match different rules.
        """

    @abstractmethod
    def needs_polls(self, beside: Poll | None) -> bool:
        """Whether operations other than the one of this poll may be held up without polls.

        Under the engine's lock.
        """


def bound_every(channel: Channel, every: int) -> Callable[[Signature], Start]:
    """The `bind` of a channel for a stage whose option `verify` is `every`."""
    return partial(channel.bind_every, every=every) if isinstance(channel, SteppedChannel) else channel.bind
