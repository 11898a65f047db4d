"""Captured training step: computation, ready times of gradients, and operations.

    step = Step.load("step.json")
    step.roles[0].events        # [Compute("layers.3", 0.012), Ready("layers.3.weight", …), Issue(…), Wait(…)]

The events of a rank are in program order; a `ComputeEvent` is the time between two other events. Ranks with
the same events form a role, with the times of the rank for which the others wait. `CapturedStep.save` writes
JSON of version 1. A step has at most 1,048,576 ranks, and an operation at most 1 PiB.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.config.document import write_text
from mcr_plus.core.kinds import KINDS, MESSAGES, ROOTED, VECTOR
from mcr_plus.errors import InvalidArgument

VERSION: Final = 1
MOST_RANKS: Final = 1 << 20  # files declare the number, and arrays of this length must fit into memory
MOST_BYTES: Final = 1 << 50  # per operation: sums must fit into 64 bits
_OF_ALL: Final = frozenset(KINDS).difference(ROOTED, MESSAGES)
_WARM: Final = 3.0  # multiple of the median; slower first steps are taken to compile
Source = Literal["hooks", "kineto", "et"]


class ComputeEvent(NamedTuple):
    """Seconds of computation between two other events, typical for the captured steps."""

    name: str
    seconds: float


class ReadyEvent(NamedTuple):
    """A parameter's gradient is ready to be sent. `like`: dtype and device, equal within a bucket."""

    param: str
    nbytes: int
    like: str


class NeedEvent(NamedTuple):
    """First use of a module's parameters in this step."""

    module: str


class IssueEvent(NamedTuple):
    """Start of an operation by the program.

    `seconds`: duration on the rank that waited least; None if unknown. `id`: equal on all participating
    ranks, and unique within a role. `nbytes`: counted as in `Signature.nbytes`; the value on this role if
    sizes differ between ranks. `group`: ranks of the job; for messages, the sender and the receiver.
    `gradients`: parameters whose gradients the operation carries, empty for the program's own operations. A
    plan replaces operations that carry gradients. `dtype`: its name; None if unknown.
    """

    id: int
    kind: str
    nbytes: int
    group: tuple[int, ...]
    tag: str | None = None
    seconds: float | None = None
    gradients: tuple[str, ...] = ()
    dtype: str | None = None


class WaitEvent(NamedTuple):
    """Wait of the program for an operation."""

    id: int


Event = ComputeEvent | ReadyEvent | NeedEvent | IssueEvent | WaitEvent


@dataclass(frozen=True)
class Role:
    """Ranks with the same events."""

    ranks: tuple[int, ...]
    events: tuple[Event, ...]


class Mark(NamedTuple):
    """An event of one step of one rank, in seconds from the beginning of the step on the rank's own clock.

    `computed`: name of the computation since the previous mark. Between `begin` and `end` the program issues
    an operation or waits, and does not compute. Fields of an `IssueEvent`: `id` is the rank's own number;
    `seconds` last until the end of the operation; `key` is equal on the operation's ranks, and unique within
    a step.
    """

    event: ReadyEvent | NeedEvent | IssueEvent | WaitEvent
    computed: str
    begin: float
    end: float
    seconds: float | None = None
    key: str = ""


class RankStep(NamedTuple):
    """One step of one rank: its seconds, its marks, and the name of the computation after the last mark."""

    seconds: float
    marks: tuple[Mark, ...]
    last: str = "end"


class Probed(NamedTuple):
    """The job's own measurement of one library.

    `sizes`: ascending bytes. `seconds`, `shares`: duration and share of a core at each size.
    """

    kind: str
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True)
class CapturedStep:
    """One step of all ranks.

    `ranks`, `nodes`: numbers of the job's ranks and hosts. `model`: hash of the names, shapes and
    dtypes of the parameters. `seconds`: measured time of the step, the median of the slowest rank.
    `spread`: (slowest - fastest) / median of the captured steps. `source`: origin of the record.
    `by_caller`: the program drives progress. `notes`: messages about data that a trace does not
    contain exactly. `measured`: the job's own measurements, by library.
    """

    ranks: int
    nodes: int
    model: str
    seconds: float
    spread: float
    roles: tuple[Role, ...]
    source: Source = "hooks"
    by_caller: bool = True
    notes: tuple[str, ...] = ()
    measured: Mapping[str, Probed] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> CapturedStep:
        """Read a file written by `save`.

        Raises:
            ConfigError: the file cannot be read, or is no step of version 1; the text has file, line and key.
        """
        from mcr_plus.bucketing.step_file import read  # only reading needs its models

        return read(Path(path))

    def save(self, path: str | Path) -> None:
        """Write the step as JSON, one event per line. Raises `ConfigError` if the file cannot be written."""
        write_text(Path(path), self.text())

    def text(self) -> str:
        """Return the step as JSON."""
        about: dict[str, Any] = {
            "version": VERSION, "source": self.source, "ranks": self.ranks, "nodes": self.nodes,
            "model": self.model, "seconds": self.seconds, "spread": self.spread, "by_caller": self.by_caller,
            "notes": self.notes,
        }  # fmt: skip
        if self.measured:
            about["measured"] = {name: probed._asdict() for name, probed in self.measured.items()}
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in about.items()]
        roles = [
            f'  {{"ranks": {json.dumps(role.ranks)}, "events": [\n   '
            + ",\n   ".join(json.dumps(_plain(event)) for event in role.events)
            + "\n  ]}"
            for role in self.roles
        ]
        return "{\n" + ",\n".join([*lines, ' "roles": [\n' + ",\n".join(roles) + "\n ]"]) + "\n}\n"

    @classmethod
    def merged(
        cls,
        per_rank: Mapping[int, Sequence[RankStep]],
        *,
        nodes: int,
        model: str,
        source: Source = "hooks",
        by_caller: bool = True,
        least: int = 3,
        notes: Iterable[str] = (),
    ) -> CapturedStep:
        """Merge several records of a step from all ranks of a job into one.

        Operations of different ranks are matched by `Mark.key`. The duration of an operation in a step is the
        minimum over ranks, since the other ranks have waited for the last rank. The result has the median
        duration over steps; for computation, see `_computing`. Only steps with the most frequent sequence of
        events are used, without first steps that take more than three times the median, since they compile.

        Raises:
            InvalidArgument: ranks have different numbers of steps, or fewer than `least`; no step has a
                gradient; or steps take no time.
        """
        counts = {rank: len(steps) for rank, steps in sorted(per_rank.items())}
        (first, count), *others = counts.items()
        for rank, other in others:
            if other != count:
                raise InvalidArgument(
                    f"rank {rank} has {other} steps, and rank {first} {count}; expected the same number of "
                    "steps on all ranks"
                )
        if count < least:
            raise InvalidArgument(f"{count} steps; expected at least {least}, each with an optimizer.step()")
        # The slowest rank determines a step, so its times show which of the first steps still compile.
        longest = [max(steps[index].seconds for steps in per_rank.values()) for index in range(count)]
        warm = next(i for i, seconds in enumerate(longest) if seconds <= _WARM * median(longest))
        middle = median(longest[warm:])
        usual = {rank: _usual(steps, warm) for rank, steps in sorted(per_rank.items())}
        if not any(
            isinstance(mark.event, ReadyEvent) for chosen in usual.values() for mark in chosen[0][1].marks
        ):
            raise InvalidArgument("no backward pass: no gradient became ready; expected one in every step")
        if middle <= 0:
            raise InvalidArgument("steps take no time; expected them to end later than they begin")
        fewest = min(len(chosen) for chosen in usual.values())
        if fewest < least:
            notes = (
                *notes,
                f"only {fewest} of {count} steps have the same events; times are medians of few samples",
            )
        # Number the operations: an id must be equal on all ranks of an operation.
        seconds = _shortest(usual)
        numbers = {key: number for number, key in enumerate(seconds)}
        spread = (max(longest[warm:]) - min(longest[warm:])) / middle
        slowest = max(median(each.seconds for _, each in chosen) for chosen in usual.values())
        return cls(
            ranks=len(per_rank), nodes=nodes, model=model, seconds=slowest, spread=spread,
            roles=_roles(usual, seconds, numbers), source=source, by_caller=by_caller, notes=tuple(notes),
        )  # fmt: skip


def model_hash(params: Iterable[tuple[str, Sequence[int], str]]) -> str:
    """Return a hash of 16 hexadecimal digits of the names, shapes and dtypes of parameters, in order."""
    text = repr([(name, tuple(shape), dtype) for name, shape, dtype in params])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# -- merging ------------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]
Chosen = list[tuple[int, RankStep]]
"""Steps with the same sequence of events, and their numbers."""


def _shape(step: RankStep) -> tuple[Any, ...]:
    """Return the events of a step, without fields that may differ between steps of a program."""
    marks = [
        (m.event._replace(nbytes=0) if isinstance(m.event, IssueEvent) else m.event, m.key)
        for m in step.marks
    ]
    return tuple(marks)


def _usual(steps: Sequence[RankStep], warm: int) -> Chosen:
    """Return the steps from `warm` on with the most frequent event sequence; in a tie, the later sequence."""
    shapes = [_shape(step) for step in steps]
    counted = Counter(reversed(shapes[warm:]))
    usual = counted.most_common(1)[0][0]
    return [(i, step) for i, step in enumerate(steps) if i >= warm and shapes[i] == usual]


def _shortest(usual: Mapping[int, Chosen]) -> dict[str, float | None]:
    """Return the seconds of every operation by key, in the order of the operation's first rank.

    A step is ignored if only some of the operation's ranks have the usual events: the last rank may be
    missing.
    """
    by_step: dict[str, dict[int, list[float]]] = {}
    for chosen in usual.values():
        for number, step in chosen:
            for mark in step.marks:
                if isinstance(mark.event, IssueEvent):
                    known = by_step.setdefault(mark.key, {})
                    if mark.seconds is not None:
                        known.setdefault(number, []).append(mark.seconds)
    shortest: dict[str, float | None] = {}
    for key, known in by_step.items():
        most = max(map(len, known.values()), default=0)
        times = [min(each) for each in known.values() if len(each) == most]
        shortest[key] = median(times) if times else None
    return shortest


def _events(
    chosen: Chosen, seconds: Mapping[str, float | None], numbers: Mapping[str, int], computing: Floats
) -> tuple[Event, ...]:
    """Return the events of a rank. `computing`: seconds before each mark, and after the last one."""
    steps = [step for _, step in chosen]
    events: list[Event] = []
    keys: dict[int, str] = {}
    for index, (mark, spent) in enumerate(zip(steps[0].marks, computing.tolist(), strict=False)):
        if spent > 0:
            events.append(ComputeEvent(mark.computed, spent))
        event = mark.event
        if isinstance(event, IssueEvent):
            keys[event.id] = mark.key
            sizes = [
                each.event.nbytes
                for step in steps
                if isinstance((each := step.marks[index]).event, IssueEvent)
            ]
            event = event._replace(id=numbers[mark.key], nbytes=int(median(sizes)), seconds=seconds[mark.key])
        elif isinstance(event, WaitEvent):
            event = WaitEvent(numbers[keys[event.id]])
        events.append(event)
    if computing[-1] > 0:
        events.append(ComputeEvent(steps[0].last, float(computing[-1])))
    return tuple(events)


def _alike(event: Event) -> Event:
    """Return the event without fields that may differ between ranks of a role."""
    return event._replace(nbytes=0) if isinstance(event, IssueEvent) and event.kind in VECTOR else event


def _roles(
    usual: Mapping[int, Chosen], seconds: Mapping[str, float | None], numbers: Mapping[str, int]
) -> tuple[Role, ...]:
    """Return roles of ranks with equal events."""
    alike: dict[tuple[Event, ...], list[int]] = {}
    for rank, chosen in usual.items():
        idle = np.zeros(len(chosen[0][1].marks) + 1)
        same = tuple(_alike(event) for event in _events(chosen, seconds, numbers, idle))
        alike.setdefault(same, []).append(rank)
    roles = []
    for ranks in alike.values():
        spent = {rank: _spent(usual[rank]) for rank in ranks}
        slowest = max(ranks, key=lambda rank: float(np.median(spent[rank].sum(axis=1))))
        computing = _computing({rank: usual[rank] for rank in ranks}, spent, slowest)
        roles.append(Role(tuple(ranks), _events(usual[slowest], seconds, numbers, computing)))
    return tuple(roles)


def _spent(chosen: Chosen) -> Floats:
    """Return the seconds of computation before each mark and after the last one: [steps, marks + 1]."""
    times = [[0.0, *(at for mark in step.marks for at in mark[2:4]), step.seconds] for _, step in chosen]
    ordered = np.maximum.accumulate(np.array(times), axis=1)  # overlaps are counted once
    spent: Floats = ordered[:, 1::2] - ordered[:, 0::2]
    return spent


def _computing(usual: Mapping[int, Chosen], spent: Mapping[int, Floats], slowest: int) -> Floats:
    """Return the seconds of computation of a role: before each mark, and after the last one.

    If all ranks of the role issue an operation and wait for it at once, they continue when the last rank
    arrives. So each part of a step between two such operations takes as long as on the slowest rank of that
    part; all parts together take no longer than the step. Times are medians over the steps, scaled so that
    parts and
    steps add up to their own medians: plain medians of skewed times add up to less. `slowest`: the rank to
    use if no step has the usual events on all ranks.
    """
    kept = set.intersection(*({number for number, _ in chosen} for chosen in usual.values()))
    ranks = list(usual) if kept else [slowest]
    rows = {rank: [not kept or number in kept for number, _ in usual[rank]] for rank in ranks}
    everywhere = np.stack([spent[rank][rows[rank]] for rank in ranks])  # [ranks, steps, marks + 1]
    took = {rank: np.array([step.seconds for _, step in usual[rank]]) for rank in ranks}
    longest = np.stack([took[rank][rows[rank]] for rank in ranks]).max(axis=0)
    starts = [0, *(index + 1 for index in _meetings(usual[slowest][0][1], frozenset(usual)))]
    lengths = np.diff([*starts, everywhere.shape[2]])
    parts = np.add.reduceat(everywhere, starts, axis=2)
    last = np.repeat(parts.argmax(axis=0), lengths, axis=1)
    path = np.take_along_axis(everywhere, last[None], axis=0)[0]
    path = path * np.minimum(1.0, longest / np.maximum(path.sum(axis=1), 1e-300))[:, None]
    whole = _adding_up(np.add.reduceat(path, starts, axis=1))
    typical = np.median(path, axis=0)
    known = np.add.reduceat(typical, starts)
    typical = np.where(np.repeat(known > 0, lengths), typical, path.mean(axis=0))
    known = np.add.reduceat(typical, starts)
    computing: Floats = typical * np.repeat(whole / np.where(known > 0, known, 1.0), lengths)
    return computing


def _meetings(step: RankStep, ranks: frozenset[int]) -> list[int]:
    """Return the indices of the marks at which the program waits for all of these ranks.

    The program waits for all ranks if it waits right after issuing an operation in which each rank needs all
    others.
    """
    return [
        index
        for index, (issued, mark) in enumerate(zip(step.marks, step.marks[1:], strict=False), start=1)
        if isinstance(mark.event, WaitEvent)
        and isinstance(issued.event, IssueEvent)
        and issued.event.id == mark.event.id
        and issued.event.kind in _OF_ALL
        and ranks <= set(issued.event.group)
    ]


def _adding_up(times: Floats) -> Floats:
    """Return the medians over rows, scaled so that their sum is the median of the rows' sums."""
    middle: Floats = np.median(times, axis=0)
    whole = float(middle.sum())
    return middle * (float(np.median(times.sum(axis=1))) / whole) if whole else middle


def _plain(event: Event) -> dict[str, Any]:
    return {"event": type(event).__name__.removesuffix("Event").lower(), **event._asdict()}
