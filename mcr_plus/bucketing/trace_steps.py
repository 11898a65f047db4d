"""Read the steps in a rank's trace: gradients, operations and waits in program order."""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.bucketing.step import IssueEvent, Mark, NeedEvent, RankStep, ReadyEvent, WaitEvent
from mcr_plus.bucketing.trace_files import Notes, Trace, TraceRange
from mcr_plus.bucketing.trace_operations import Arguments, TracedOperation, operations
from mcr_plus.errors import ConfigError

Floats = NDArray[np.float64]

_ROUNDING: Final = 1e-6  # seconds; traces count microseconds from 1970
_DTYPES: Final = {
    "float": "float32", "double": "float64", "half": "float16", "long": "int64", "long int": "int64",
    "int": "int32", "unsigned char": "uint8", "signed char": "int8",
}  # fmt: skip


class Draft(NamedTuple):
    """A step of a rank before all waits are placed; times on the clock of the trace.

    `last`: start of the optimizer's step. `waits`: wait for each operation, see `Reader._wait`.
    """

    began: float
    ended: float
    last: float
    marks: list[Mark]
    waits: list[tuple[float | None, float]]

    def place(self, since: float) -> int:
        """Return the number of marks before a wait."""
        return bisect.bisect_right([mark.begin for mark in self.marks], since)

    def step(self, places: Mapping[tuple[int, int], int]) -> RankStep:
        """Return the step, with invisible waits at their usual places."""
        count = len(self.marks)
        visible = sorted((since, until) for since, until in self.waits if since is not None)
        marks = [(index, mark) for index, mark in enumerate(self.marks, start=1)]
        issued = {mark.event.id: index for index, mark in marks if isinstance(mark.event, IssueEvent)}
        for number, (since, until) in enumerate(self.waits):
            usual = places.get((number, count), 0)
            if since is None and usual >= issued[number]:
                since = until = self.marks[usual - 1].end
                place = usual
            elif since is None:  # at the next visible wait, or before the optimizer
                since = next((begin for begin, end in visible if end >= until), max(self.last, until))
                until, place = max(since, until), self.place(since)
            else:
                place = self.place(since)
            marks.append((max(place, issued[number]), Mark(WaitEvent(number), "", since, until)))
        marks.sort(key=lambda each: (each[0], isinstance(each[1].event, WaitEvent)))
        ready = [index for index, (_, mark) in enumerate(marks) if isinstance(mark.event, ReadyEvent)]
        first, last = (ready[0], ready[-1]) if ready else (len(marks), len(marks))
        return RankStep(
            self.ended - self.began,
            tuple(
                mark._replace(
                    computed="forward" if index <= first else "backward" if index <= last else "optimizer",
                    begin=mark.begin - self.began, end=mark.end - self.began,
                )
                for index, (_, mark) in enumerate(marks)
            ),
            "optimizer",
        )  # fmt: skip


def usual_places(drafts: Sequence[Draft]) -> dict[tuple[int, int], int]:
    """Return the usual number of marks before each wait, by (index of operation, number of marks)."""
    seen: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for draft in drafts:
        for number, (since, _) in enumerate(draft.waits):
            if since is not None:
                seen[number, len(draft.marks)][draft.place(since)] += 1
    return {key: counts.most_common(1)[0][0] for key, counts in seen.items()}


class Reader:
    """Reader of one rank's steps from its trace."""

    def __init__(self, trace: Trace, ranks: int, notes: Notes) -> None:
        self._trace = trace
        self._notes = notes
        self._arguments = Arguments(trace, ranks, notes)
        rows = trace.launches.last(trace.launched_by)
        spans = np.array(trace.kernels, np.float64).reshape(-1, 2)[rows >= 0]
        kernels = np.column_stack([trace.launches.begins(rows[rows >= 0]), spans])
        kernels = kernels[np.lexsort(kernels.T[::-1])]
        self._on_gpu = len(kernels) > 0
        self._launched = kernels[:, 0]
        self._ended = np.maximum.accumulate(kernels[:, 2])
        self._modules = {name: np.sort(np.array(begins)) for name, begins in trace.modules.items()}
        self._operations = operations(trace)
        self._busy = _union(kernels[:, 1:]) if self._on_gpu else self._host_busy()

    def _at(self, host: float) -> float:
        """Return the time of a host event on the computing stream: after all kernels launched earlier."""
        index = int(np.searchsorted(self._launched, host, side="right"))
        return max(host, float(self._ended[index - 1])) if index else host

    def _host_busy(self) -> Floats:
        """Return the intervals in which the training threads compute or issue operations."""
        trace = self._trace
        threads = {each.thread for each in (*trace.optimizer, *trace.gradients)}
        threads |= {operation.thread for operation in self._operations}
        spans = [
            np.frombuffer(trace.busy[thread]).reshape(-1, 2) for thread in threads if thread in trace.busy
        ]
        calls = [(each.begin, each.end) for each in trace.gradients]
        calls += [(each.begin, each.end) for each in self._operations]
        spans.append(np.array(calls, np.float64).reshape(-1, 2))
        return _union(np.concatenate(spans))

    # -- steps ------------------------------------------------------------------------------------

    def drafts(self) -> list[Draft]:
        """Return the steps of this rank; without step ranges, the first step begins with the trace."""
        trace = self._trace
        ranges = sorted((each.begin, each.end) for each in trace.steps)
        if not ranges:
            ends = sorted(each.end for each in trace.optimizer)
            if not ends:
                self._notes.add("neither steps nor an optimizer in a trace; all of it counts as one step")
                ends = [trace.last]
            ranges = list(zip([min(trace.first, ends[0]), *ends], ends, strict=False))
        for (_, end), (begin, _) in pairwise(ranges):
            if begin < end - _ROUNDING:
                raise ConfigError(
                    f"{trace.path}: a step begins {1e3 * (end - begin):.3f} ms before the last one ends; "
                    "expected steps that do not overlap"
                )
        return [self._draft(begin, end) for begin, end in ranges]

    def _draft(self, begin: float, end: float) -> Draft:
        began, ended = self._at(begin), self._at(end)
        optimizer = [self._at(each.begin) for each in self._trace.optimizer if begin <= each.begin < end]
        last = optimizer[0] if optimizer else ended
        gradients = sorted(
            (each for each in self._trace.gradients if begin <= each.end < end), key=lambda r: r.end
        )
        ready = [self._ready(index, each) for index, each in enumerate(gradients)]
        times = [self._at(each.end) for each in gradients]
        marks = [Mark(event, "", at, at) for event, at in zip(ready, times, strict=True)]
        marks += self._needs(begin, end)
        unsent = list(range(len(ready)))
        counts: Counter[str] = Counter()
        waits: list[tuple[float | None, float]] = []
        for number, operation in enumerate(each for each in self._operations if begin <= each.begin < end):
            issued, kind = self._at(operation.begin), self._arguments.kind(operation)
            nbytes = self._arguments.nbytes(operation, kind)
            group = self._arguments.group(operation, kind)
            key = self._arguments.key(operation, kind, group)
            counts[key] += 1
            carried: tuple[str, ...] = ()
            if kind in ("all_reduce", "reduce_scatter"):
                known = [
                    index for index in unsent if times[index] <= issued + _ROUNDING and ready[index].nbytes
                ]
                chosen = _carried([ready[index].nbytes for index in known], nbytes)
                carried = tuple(ready[known[index]].param for index in chosen)
                issued = max([issued, *(times[known[index]] for index in chosen)])  # despite rounding
                unsent = [index for index in unsent if ready[index].param not in carried]
            seconds = None
            if operation.started is not None and operation.done is not None:
                seconds = operation.done - operation.started
            event = IssueEvent(number, kind, nbytes, group, None, None, carried)
            away = issued if self._on_gpu else max(operation.end, issued)
            marks.append(Mark(event, "", issued, away, seconds, f"{key}#{counts[key]}"))
            waits.append(self._wait(operation, away, ended))
        marks.sort(key=lambda mark: (mark.begin, isinstance(mark.event, IssueEvent)))
        return Draft(began, ended, last, marks, waits)

    def _wait(self, operation: TracedOperation, issued: float, ended: float) -> tuple[float | None, float]:
        """Return the start and end of the program's wait for an operation; see the docstring of `traces`.

        If the wait is not visible, the start is None, and the end is a time before the wait.
        """
        done = operation.done
        at_once = "False" in (operation.get("Concrete Inputs") or [])[-2:]
        index = int(np.searchsorted(self._busy[:, 1], issued if done is None else done, side="right"))
        before = float(self._busy[index - 1, 1]) if index else issued
        resumed = float(self._busy[index, 0]) if index < len(self._busy) else ended
        if done is None:  # the library does not record the end
            return (issued, min(max(resumed, issued), ended)) if at_once else (None, issued)
        idle, done = max(before, issued), min(max(done, issued), ended)
        if at_once:
            return issued, done
        return (idle, done) if idle <= done <= resumed + _ROUNDING else (None, done)

    def _needs(self, begin: float, end: float) -> list[Mark]:
        found: list[tuple[float, str]] = []
        for name, begins in self._modules.items():
            first = int(np.searchsorted(begins, begin))
            if first < len(begins) and begins[first] < end:
                found.append((float(begins[first]), name.removeprefix("nn.Module: ")))
        found.sort(key=lambda each: each[0])
        return [
            Mark(NeedEvent(name), "", at, at)
            for at, name in ((self._at(since), name) for since, name in found)
        ]

    def _ready(self, index: int, found: TraceRange) -> ReadyEvent:
        dims, kind = found.args.get("Input Dims"), found.args.get("Input type")
        shape = dims[0] if dims and isinstance(dims[0], list) else None
        dtype = kind[0] if kind else "float"
        where = "cuda" if self._on_gpu else "cpu"
        if shape is None or not dtype or not all(isinstance(each, int) for each in shape):
            self._notes.add("a gradient without a shape counts as empty; expected record_shapes=True")
            return ReadyEvent(f"gradient {index}", 0, f"float32 {where}")
        plain = dtype.removeprefix("c10::").lower()
        nbytes = math.prod(shape) * self._arguments.itemsize(plain)
        sizes = ", ".join(map(str, shape))
        return ReadyEvent(f"gradient {index} [{sizes}]", nbytes, f"{_DTYPES.get(plain, plain)} {where}")


def _carried(sizes: Sequence[int], nbytes: int) -> range:
    """Return the gradients that an operation carries: the first or last ones with as many bytes in total."""
    total = np.cumsum(np.array([0, *sizes], np.int64))
    count = int(np.searchsorted(total, nbytes))
    if nbytes and count <= len(sizes) and total[count] == nbytes:
        return range(count)
    begin = int(np.searchsorted(total, total[-1] - nbytes))
    return range(begin, len(sizes)) if nbytes and total[begin] == total[-1] - nbytes else range(0)


def _union(spans: Floats) -> Floats:
    """Return the union of (start, end) spans as ordered disjoint intervals."""
    if not len(spans):
        return np.empty((0, 2))
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    first = np.append(True, spans[1:, 0] > ends[:-1])
    last = np.append(first[1:], True)
    return np.stack([spans[first, 0], ends[last]], axis=1)
