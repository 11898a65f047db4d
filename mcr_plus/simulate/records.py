"""Record of one simulated rank: its groups, operations, waits, steps and memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

GroupKey = tuple[tuple[int, ...], int]
"""Ranks of a group, and its number among the groups of these ranks."""


class IssuedCall(NamedTuple):
    """An operation that a rank issued.

    `seconds`: computation since the previous event. `group`: index in `RecordedRank.groups`. `root`, `peer`:
    group ranks; None if the kind has none. `match`: the number that pairs sends and receives. `library`:
    library, with its algorithm if one was chosen. `site`: file and line of the program. `nbytes` is None for
    sizes that may differ between ranks; then `own` are this rank's. `call`: the call that it is a part of, as
    ranks compare it; None if it is one by itself.
    """

    seconds: float
    kind: str
    group: int
    nbytes: int | None
    own: int
    dtype: str
    op: str | None
    root: int | None
    peer: int | None
    match: int
    tag: str | None
    library: str
    site: str
    call: str | None = None

    @property
    def words(self) -> str:
        """What the call does, with its place in the program."""
        op = f" {self.op}" if self.op else ""
        root = "" if self.root is None else f" root={self.root}"
        tag = f" tag={self.tag}" if self.tag else f" tag={self.match}" if self.match else ""
        return f"{self.kind}{op} of {self.own} B {self.dtype}{root}{tag} at {self.site}"


class AwaitedCall(NamedTuple):
    """A wait of the program; `call`: index of the operation among the rank's calls."""

    seconds: float
    call: int


class EndedStep(NamedTuple):
    """End of a step of the first optimizer."""

    seconds: float


RecordedEvent = IssuedCall | AwaitedCall | EndedStep


@dataclass
class RecordedRank:
    """What one rank did.

    Attributes:
        events: in program order. groups: the groups in which the rank issued operations.
        created: all groups of the program, also those of other ranks, with their places in the program.
        inner: groups of the stage `hierarchical` inside them.
        values: small values that the rank sent or broadcast, in order, by sender and receiver or group.
        missing: the rank whose value it lacked last, because that rank has not run.
        peak: largest sum of bytes of tensors; None if not measured. resident: growth of the process.
        modules: those of libraries that the program has imported.
        failure: traceback of the program; empty if it ended, or was stopped after enough steps.
    """

    rank: int
    events: list[RecordedEvent] = field(default_factory=list)
    groups: list[GroupKey] = field(default_factory=list)
    created: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    inner: list[tuple[int, ...]] = field(default_factory=list)
    values: dict[Any, Any] = field(default_factory=dict)
    missing: int | None = None
    peak: int | None = None
    resident: int = 0
    failure: str = ""
    output: str = ""
    modules: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return sum(isinstance(each, EndedStep) for each in self.events)
