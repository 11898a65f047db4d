"""Base class `OperationHook`: an observer that the engine calls at each event of an operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import torch

    from mcr_plus.core.group import Group
    from mcr_plus.engine.issue import Issue
    from mcr_plus.engine.work import IssuedWork


class ProgramWait(NamedTuple):
    """A wait of the program: the operation, the thread, and the start (`time.time_ns()`)."""

    work: IssuedWork
    thread: int
    began: int


@dataclass(eq=False)
class Noted:
    """Record of an operation that was waited for for more than a second, or has failed.

    Attributes:
        sequence: the operation's number; 0 for sends and receives.
        frames: stack of the program's thread at that time, innermost first: name, file, line.
        began, ended: start and end of the wait in `time.time_ns()`; `ended` is None while the wait goes on.
        error: text of the error; empty if the operation has not failed.
    """

    sequence: int
    frames: Sequence[tuple[str, str, int]]
    began: int
    ended: int | None = None
    error: str = ""


class OperationHook:
    """Base class of observers (recording, metrics, dumps, capture); its methods do nothing.

    `Engine.add_hook` binds each event to the hooks that override its method, so an event without hooks costs
    one test of an empty tuple. A method runs in the thread of the event, and must not raise.
    """

    @property
    def holds(self) -> bool:
        """True if gradient buckets must be sent one after another at the end of the backward pass."""
        return False

    def bound(self, group: Group, issue: Issue) -> Issue:  # noqa: ARG002
        """Return a replacement for `issue`, which issues the program's operations of a signature.

        Called when a call is bound. A hook that defines it is added and removed by `Runtime.add_hook`.
        """
        return issue

    def issued(self, work: IssuedWork) -> None:
        """Called when `work` is issued. `issued`, `waits`, `ended` match `work.t_issue` … `work.t_done`."""

    def waits(self, work: IssuedWork) -> None:
        """Called when the program begins to wait for `work`."""

    def waits_long(self, work: IssuedWork) -> None:
        """Called when the calling thread has waited for `work` for more than a second and still waits."""

    def ended(self, work: IssuedWork) -> None:
        """Called when `work` is complete or has failed with `work.error`; its tensors still exist."""

    def fails(self, work: IssuedWork, error: BaseException) -> Callable[[], None] | None:  # noqa: ARG002
        """Called before `work` fails with `error`. Returns a function to call once the group has failed."""
        return None

    def ready(self, param: torch.Tensor) -> None:
        """Called when the gradient of a parameter is ready to be sent."""

    def carries(self, params: Sequence[torch.Tensor]) -> None:
        """Called before an operation that carries the gradients of these parameters."""


_EVENTS: Final = ("bound", "issued", "waits", "waits_long", "ended", "fails", "ready", "carries")


class Hooks:
    """The hooks of a process; for each event an attribute of its name holds the methods to call."""

    bound: tuple[Callable[[Group, Issue], Issue], ...]
    issued: tuple[Callable[[IssuedWork], None], ...]
    waits: tuple[Callable[[IssuedWork], None], ...]
    waits_long: tuple[Callable[[IssuedWork], None], ...]
    ended: tuple[Callable[[IssuedWork], None], ...]
    fails: tuple[Callable[[IssuedWork, BaseException], Callable[[], None] | None], ...]
    ready: tuple[Callable[[torch.Tensor], None], ...]
    carries: tuple[Callable[[Sequence[torch.Tensor]], None], ...]

    def __init__(self) -> None:
        self.use(())

    def use(self, hooks: tuple[OperationHook, ...]) -> None:
        """Replace the hooks to call."""
        self.all = hooks
        for event in _EVENTS:
            base = getattr(OperationHook, event)
            methods = tuple(getattr(each, event) for each in hooks if getattr(type(each), event) is not base)
            setattr(self, event, methods)
        self.timed = bool(self.issued or self.waits or self.ended)

    @property
    def holds(self) -> bool:
        """See `OperationHook.holds`."""
        return any(each.holds for each in self.all)
