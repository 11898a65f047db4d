"""`OperationHook`: what observes the operations of a process, and is told of each event by the engine."""

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
    """A wait of the program: for what, in which thread, and since when (`time.time_ns()`)."""

    work: IssuedWork
    thread: int
    began: int


@dataclass(eq=False)
class Noted:
    """What is remembered of an operation that was waited for for long, or has failed.

    Attributes:
        sequence: its number; 0 for sends and receives.
        frames: of the program's thread then, the innermost first: name, file, line.
        began, ended: of the wait, in `time.time_ns()`; `ended` is None while it goes on.
        error: text of the error; empty unless it has failed.
    """

    sequence: int
    frames: Sequence[tuple[str, str, int]]
    began: int
    ended: int | None = None
    error: str = ""


class OperationHook:
    """Base class of observers of operations: recording, metrics, dumps, capture; every method does nothing.

    `Engine.add_hook` binds each event to the hooks that override its method, so an event without hooks costs
    one look at an empty tuple. Methods are called by the thread to which the event happens, and do not raise.
    """

    @property
    def holds(self) -> bool:
        """True if buckets of gradients must be sent one after another at the end of the backward pass."""
        return False

    def bound(self, group: Group, issue: Issue) -> Issue:  # noqa: ARG002
        """Return what issues the program's operations of a signature in place of `issue`.

        Called when a call is bound; a hook that defines it is added and removed by `Runtime.add_hook`.
        """
        return issue

    def issued(self, work: IssuedWork) -> None:
        """`work` is being issued. This, `waits` and `ended` come in pairs with `work.t_issue` … `t_done`."""

    def waits(self, work: IssuedWork) -> None:
        """The program begins to wait for `work`."""

    def waits_long(self, work: IssuedWork) -> None:
        """The calling thread has waited for `work` for more than a second, and goes on waiting."""

    def ended(self, work: IssuedWork) -> None:
        """`work` is complete, or has failed with `work.error`; its tensors are still there."""

    def fails(self, work: IssuedWork, error: BaseException) -> Callable[[], None] | None:  # noqa: ARG002
        """`work` is about to fail with `error`. Returns what is to be called once its group has failed."""
        return None

    def ready(self, param: torch.Tensor) -> None:
        """The gradient of a parameter is ready to be sent."""

    def carries(self, params: Sequence[torch.Tensor]) -> None:
        """The next operation carries the gradients of these parameters."""


_EVENTS: Final = ("bound", "issued", "waits", "waits_long", "ended", "fails", "ready", "carries")


class Hooks:
    """The hooks of a process; of each event, the methods to call, as attributes of its name."""

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
        """Call these from now on."""
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
