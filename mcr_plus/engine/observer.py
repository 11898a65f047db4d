"""What an observer of the engine is told, and what is remembered of an operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
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


class Observer(Protocol):
    """Is told what happens to operations, by the thread to which it happens. It must not raise."""

    def waits_long(self, work: IssuedWork) -> None:
        """The calling thread has waited for `work` for more than a second, and goes on waiting."""
        ...

    def fails(self, work: IssuedWork, error: BaseException) -> Callable[[], None] | None:
        """`work` is about to fail with `error`. Returns what is to be called once its group has failed."""
        ...
