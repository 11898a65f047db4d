"""The state of an open group in this process."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mcr_plus.board.base import Failure
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.fast_calls import fast_calls
from mcr_plus.engine.closing import forget

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from mcr_plus.backends.base import Channel
    from mcr_plus.communicator.arrays import ArrayStreams
    from mcr_plus.communicator.coalesced import CoalescedCalls
    from mcr_plus.communicator.job import RunningJob
    from mcr_plus.communicator.objects import SignedObjects
    from mcr_plus.config.schema import Config
    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Signature
    from mcr_plus.engine.group_runtime import GroupRuntime
    from mcr_plus.engine.group_state import BackendChannel, GroupState
    from mcr_plus.pipeline.pipeline import BoundChain, Pipeline


def _no_handle() -> None:
    return None


def give_up(channels: Iterable[Channel]) -> None:
    """Free the reserved resources of channels that may never be closed."""
    for channel in channels:
        channel.give_up()


def release_unused(channels: Mapping[str, BackendChannel]) -> None:
    """Close channels that no operation has used, where closing needs no peer."""
    give_up(each.channel for each in channels.values())
    for each in channels.values():
        each.channel.release()


@dataclass(eq=False)
class OpenGroup:
    """State of a group that is open in this process.

    Only the program keeps the group's `Communicator` alive. When the program drops it, the group stays open
    until all ranks have dropped their communicator, because processes collect garbage at different times.

    Attributes:
        secret: signs objects that ranks send to each other.
        parts: the groups inside this one, for the hierarchical stage.
        inner: True if the group is a part of another group and closes with it.
        follows: True if the group is opened again in the next world.
        chains: the bound pipeline of each signature.
        messages: the bound pipelines of sends and receives; each rank binds them on its own.
        plans: bound operations of all kinds, by call arguments.
        fast: the same in compiled code, see `fast_calls`; None without it.
        numbers: counters of higher layers, by name; successors inherit them.
    """

    group: Group
    pipeline: Pipeline
    runtime: GroupRuntime
    config: Config
    secret: bytes = field(repr=False)
    inner: bool = False
    follows: bool = False
    parts: list[OpenGroup] = field(default_factory=list)
    chains: dict[Signature, BoundChain] = field(default_factory=dict)
    messages: dict[Signature, BoundChain] = field(default_factory=dict)
    plans: dict[Any, Any] = field(default_factory=dict)
    fast: Any = field(default_factory=fast_calls)
    numbers: dict[str, int] = field(default_factory=dict)
    _handle: Callable[[], Communicator | None] = _no_handle

    def __post_init__(self) -> None:
        self.runtime.caches.extend((self.chains.clear, self.messages.clear, self.forget_plans))

    def forget_plans(self) -> None:
        """Bind all calls of the program again."""
        self.plans.clear()
        if self.fast is not None:
            self.fast.clear()

    @cached_property
    def arrays(self) -> ArrayStreams:
        """Streams of operations on arrays of other libraries."""
        from mcr_plus.communicator.arrays import ArrayStreams  # imported here: most programs use tensors

        return ArrayStreams(self.runtime.engine.lock)

    @cached_property
    def coalesced(self) -> CoalescedCalls:
        """Coalesced calls, and their buffers."""
        from mcr_plus.communicator.coalesced import CoalescedCalls  # imported here, as below: seldom used

        return CoalescedCalls(self.group, self.pipeline, self.config.options("compress") is not None)

    @cached_property
    def objects(self) -> SignedObjects:
        """Pickler and unpickler of objects."""
        from mcr_plus.communicator.objects import SignedObjects

        return SignedObjects(self.group, self.secret)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers kept for later operations."""
        packed = self.coalesced.buffer_bytes if "coalesced" in vars(self) else 0
        return self.pipeline.buffer_bytes + packed

    def finish_arrays(self) -> None:
        """Wait until no array is needed any more, after the last operation has ended on the host."""
        if "arrays" in vars(self):
            self.arrays.finish()

    @property
    def name(self) -> str:
        """The group's name, equal on all its ranks."""
        return self.group.name

    @property
    def state(self) -> GroupState:
        """The group's state in this process."""
        return self.runtime.state

    @property
    def all(self) -> Sequence[OpenGroup]:
        """Group and its parts, in closing order."""
        return (*reversed(self.parts), self)

    @property
    def is_dropped(self) -> bool:
        """True if the program has dropped its communicator."""
        return self._handle() is None and not self.inner

    def communicator(self, job: RunningJob) -> Communicator:
        """Return the communicator that the program uses, or a new one if the program has dropped it."""
        communicator = self._handle()
        if communicator is None:
            communicator = Communicator(job, self)
            self._handle = weakref.ref(communicator)
        return communicator

    def forget_attached(self, clean: bool) -> None:
        """Drop the attached objects of higher layers; attached groups close like dropped groups.

        Objects with a method `end_with_group`, such as owners of threads, end first; `clean` tells them
        whether the group ends in order.
        """
        if (communicator := self._handle()) is not None:
            for each in list(communicator.attached.values()):
                if (end := getattr(each, "end_with_group", None)) is not None:
                    end(clean)
            communicator.attached.clear()

    def take_over(self) -> None:
        """See `Communicator.take_over`."""
        for group in self.all:
            group.state.take_over()

    def shut(self, clean: bool) -> None:
        """Close the group's channels at the end of the job. No operation may be pending."""
        self.forget_attached(clean)
        self.runtime.forget()
        if not clean:
            give_up(each.channel for each in self.runtime.channels.values())
        for each in self.runtime.channels.values() if clean else ():
            each.channel.close()

    def shut_alone(
        self, clean: bool, *, together: bool = False, off: Collection[str] = ()
    ) -> dict[str, Channel]:
        """Close the group in this process, while other ranks may still use it.

        Returns the idle channels left open, by library: closing them would wait for other ranks, unless all
        ranks close the group `together`. `off`: libraries that must not be called, the same on all ranks.
        """
        state = self.state
        state.publish()
        idle = not forget(self.runtime.engine, state)
        if clean and state.failure is None:
            state.board.mark_closed()
        else:
            state.board.mark_failed(Failure(0, "it left the group after an error"))
        self.runtime.forget()
        left = {}
        channels = {name: each for name, each in self.runtime.channels.items() if name not in off}
        for name, each in channels.items() if clean and idle else ():
            if together:
                each.channel.close()
            elif each.channel.closes_alone:
                each.channel.release()
            else:
                left[name] = each.channel
        if not (clean and idle):
            give_up(each.channel for each in self.runtime.channels.values())
        state.close()
        state.board.close()
        return left
