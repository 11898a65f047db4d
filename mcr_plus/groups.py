"""Groups as a process has them open: what they hold, and what is given back when they end."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mcr_plus.communicator import Communicator
from mcr_plus.dispatch.board import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from mcr_plus.config import Config
    from mcr_plus.dispatch.engine import GroupState
    from mcr_plus.dispatch.stage import GroupRuntime, Line
    from mcr_plus.interfaces import Channel
    from mcr_plus.message import Group, Signature
    from mcr_plus.pipeline import Bound, Pipeline
    from mcr_plus.runtime import Runtime


def _nobody() -> None:
    return None


def _nothing() -> None:
    pass


def give_up(channels: Iterable[Channel]) -> None:
    """Let channels that may never be closed free what they have in reserve."""
    for channel in channels:
        end: Callable[[], None] = getattr(channel, "give_up", _nothing)
        end()


def let_go(lines: Mapping[str, Line]) -> None:
    """Close channels that nothing has used, as far as no peer is needed for it."""
    give_up(line.channel for line in lines.values())
    for line in lines.values():
        end: Callable[[], None] = getattr(line.channel, "release", _nothing)
        end()


@dataclass(eq=False)
class OpenGroup:
    """A group that is open in this process.

    The program has a `Communicator` of it, which nothing else keeps alive. When the program drops that, the
    group stays open until all its ranks have dropped theirs: garbage is collected when each process likes to.

    Attributes:
        parts: the groups inside this one, for the hierarchical stage.
        inner: whether it is such a part itself, and ends with the group around it.
        chains: what signatures are bound to.
        messages: the same for sends and receives, which each rank binds by itself.
        plans: the same for all, by what calls pass.
    """

    group: Group
    pipeline: Pipeline
    runtime: GroupRuntime
    config: Config
    inner: bool = False
    parts: list[OpenGroup] = field(default_factory=list)
    chains: dict[Signature, Bound] = field(default_factory=dict)
    messages: dict[Signature, Bound] = field(default_factory=dict)
    plans: dict[Any, Any] = field(default_factory=dict)
    _handle: Callable[[], Communicator | None] = _nobody

    def __post_init__(self) -> None:
        self.runtime.caches.extend((self.chains.clear, self.messages.clear, self.plans.clear))

    @property
    def name(self) -> str:
        """The group's name, equal on all its ranks."""
        return self.group.name

    @property
    def state(self) -> GroupState:
        """What this process knows of the group."""
        return self.runtime.state

    @property
    def all(self) -> Sequence[OpenGroup]:
        """The group and its parts, in the order in which they are closed."""
        return (*reversed(self.parts), self)

    @property
    def is_dropped(self) -> bool:
        """Whether the program has let go of its communicator."""
        return self._handle() is None and not self.inner

    def communicator(self, job: Runtime) -> Communicator:
        """The communicator that the program has; another one if it has none any more."""
        found = self._handle()
        if found is None:
            found = Communicator(job, self)
            self._handle = weakref.ref(found)
        return found

    def take_over(self) -> None:
        """See `Communicator.take_over`."""
        for each in self.all:
            each.state.take_over()

    def shut(self, clean: bool) -> None:
        """Close the group's channels at the end of the job, once nothing is in flight."""
        self.runtime.forget()
        if not clean:
            give_up(line.channel for line in self.runtime.lines.values())
        for line in self.runtime.lines.values() if clean else ():
            line.channel.close()

    def shut_alone(
        self, clean: bool, *, together: bool = False, off: Collection[str] = ()
    ) -> dict[str, Channel]:
        """Close the group here while others may still use theirs.

        Returns the channels that are open still and idle, by library: those whose libraries would wait for
        the others, unless all ranks close the group `together`. `off`: libraries that are not to be called,
        the same on all ranks.
        """
        state = self.state
        state.publish()
        idle = not self.runtime.engine.forget(state)
        if clean and state.failure is None:
            state.board.mark_closed()
        else:
            state.board.mark_failed(Failure(0, "it left the group after an error"))
        self.runtime.forget()
        left = {}
        lines = {name: line for name, line in self.runtime.lines.items() if name not in off}
        for name, line in lines.items() if clean and idle else ():
            release = line.channel.close if together else getattr(line.channel, "release", None)
            if release is not None:
                release()
            else:
                left[name] = line.channel
        if not (clean and idle):
            give_up(line.channel for line in self.runtime.lines.values())
        state.close()
        state.board.close()
        return left
