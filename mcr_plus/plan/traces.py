"""Reads steps from traces of torch's profiler: Kineto's JSON, and execution traces beside it.

    step = load_step(["rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz"])

What a trace says is taken over: when gradients became ready, which operations were issued, how long they
took. What it does not say is inferred:

- A step is a range `ProfilerStep`, or goes from the end of an `Optimizer.step` to that of the next.
- With kernels, times are those of the GPU: an event of the host comes when all kernels that were launched
  before it have ended.
- The program waits for an operation where it is idle until the operation ends. Where the operation ended
  while the program computed, it waits at the place where it does so in other steps or on other ranks; if
  there is none, with the next operation that it waits for, or before `Optimizer.step`.
- An operation carries the gradients that became ready first, or last, of those that are not sent yet, if
  these have its number of bytes together.
"""

from __future__ import annotations

import bisect
import json
import logging
import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.errors import ConfigError, InvalidArgument, short
from mcr_plus.plan.json_stream import members
from mcr_plus.plan.step import Issue, Mark, Need, RankStep, Ready, Source, Step, Wait, model_hash

_log = logging.getLogger("mcr_plus")
Floats = NDArray[np.float64]

_LISTS: Final = ("traceEvents", "nodes")
_ROUNDING: Final = 1e-6  # seconds: traces count microseconds from 1970
_LARGEST: Final = 1e18  # microseconds: 30,000 years
_ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
_KINDS: Final = {
    "allreduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce", "allgather": "all_gather",
    "reducescatter": "reduce_scatter", "alltoall": "all_to_all", "alltoallv": "all_to_all",
    "gather": "gather",
    "scatter": "scatter", "barrier": "barrier", "monitoredbarrier": "barrier", "send": "send", "recv": "recv",
    "isend": "send", "irecv": "recv",
}  # fmt: skip
_NO_OPERATIONS: Final = {"wait", "init", "coalesced", "startcoalescing", "endcoalescing"}
_ITEMSIZES: Final = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "long": 8, "long int": 8, "int": 4, "short": 2,
    "byte": 1, "char": 1, "unsigned char": 1, "signed char": 1, "bool": 1, "short int": 2,
}  # fmt: skip
_NO_DTYPES: Final = ("", "TensorList", "Scalar", "ScalarList")
_DTYPES: Final = {
    "float": "float32", "double": "float64", "half": "float16", "long": "int64", "long int": "int64",
    "int": "int32", "unsigned char": "uint8", "signed char": "int8",
}  # fmt: skip
_NESTED: Final = re.compile(r"^(c10d|nccl|gloo|mcr|ucc|mpi)::?|^record_param_comms$")
_LAUNCH: Final = re.compile("Launch|Memcpy|Memset")
_KERNEL: Final = re.compile(r"nccl(?:Dev)?Kernel_?(\w*?)(?:_|\(|$)", re.IGNORECASE)


def load_step(paths: str | Path | Sequence[str | Path]) -> Step:
    """Read a step: the JSON that `Step.save` wrote, or the traces of all ranks of a job.

    `paths`: a file, a folder of files that end with `.json` or `.json.gz`, or a list of these. Of each rank
    one Kineto trace, with shapes recorded (`record_shapes=True`) or with the execution trace of the same run
    beside it. Files are read piece by piece. What could not be read exactly is in `Step.notes`, and logged.

    Raises:
        ConfigError: a file cannot be read, is truncated or no trace; times are negative or steps overlap;
            ranks are missing or are there twice; there is no backward pass. With the file and the place.
    """
    listed = [paths] if isinstance(paths, (str, Path)) else list(paths)
    files = [file for path in listed for file in _files(Path(path))]
    if not files:
        raise ConfigError(
            f"{', '.join(map(str, listed)) or 'no files'}: no trace; expected .json or .json.gz"
        )
    traces: list[_Trace] = []
    graphs: list[_Graph] = []
    for file in files:
        found = _read(file)
        if found is None:
            if len(files) > 1:
                raise ConfigError(f"{file}: a step among traces; expected it alone, for it has all ranks")
            return Step.load(file)
        (traces if isinstance(found, _Trace) else graphs).append(found)  # type: ignore[arg-type]
    notes = _Notes()
    _join(traces, graphs)
    _number(traces, notes)
    return _merged(traces, "et" if graphs else "kineto", notes)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [file for file in path.iterdir() if file.name.endswith((".json", ".json.gz"))]
    return sorted(
        found, key=lambda file: [int(part) if part.isdigit() else part for part in _parts(file.name)]
    )


def _parts(name: str) -> list[str]:
    return re.split(r"(\d+)", name)  # so that 10 comes after 9


class _Notes:
    """What could not be read exactly, counted."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, text: str) -> None:
        self._counts[text] += 1

    def texts(self) -> list[str]:
        return [text if count == 1 else f"{text} ({count} times)" for text, count in self._counts.items()]


# -- reading ------------------------------------------------------------------------------------------------


class _Range(NamedTuple):
    """A range of the host, in seconds."""

    begin: float
    end: float
    thread: Any
    name: str
    args: dict[str, Any]


@dataclass
class _Trace:
    """What is kept of a Kineto trace; times in seconds since `base`, which is in microseconds."""

    path: Path
    base: float | None = None
    about: dict[str, Any] = field(default_factory=dict)
    rank: int = -1
    pid: Any = None
    steps: list[_Range] = field(default_factory=list)
    optimizer: list[_Range] = field(default_factory=list)
    gradients: list[_Range] = field(default_factory=list)
    modules: list[_Range] = field(default_factory=list)
    communication: list[_Range] = field(default_factory=list)
    busy: dict[Any, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    launches: dict[int, tuple[float, Any]] = field(default_factory=dict)
    kernels: list[tuple[int, float, float]] = field(default_factory=list)  # correlation, begin, end
    remote: list[_Range] = field(default_factory=list)  # kernels of communication
    first: float = math.inf
    last: float = 0.0


@dataclass
class _Graph:
    """What is kept of an execution trace: arguments of operations as Kineto names them, by `rf_id`."""

    path: Path
    pid: Any = None
    args: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, list[int]] = field(default_factory=dict)


def _read(path: Path) -> _Trace | _Graph | None:
    """Read a file; None if it is a step that `Step.save` wrote."""
    trace, graph = _Trace(path), _Graph(path)
    kinds: set[str] = set()
    about: dict[str, Any] = {}
    for key, value, place in members(path, _LISTS):
        if key == "traceEvents":
            kinds.add(key)
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: byte {place}: {short(value)}; expected an event")
            _take_event(trace, value, place)
        elif key == "nodes":
            kinds.add(key)
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: byte {place}: {short(value)}; expected a node")
            _take_node(graph, value)
        elif key in ("version", "roles") and not kinds:
            return None
        else:
            about[key] = value
    if kinds == {"nodes"}:
        graph.pid = about.get("pid")
        return graph
    if kinds != {"traceEvents"}:
        raise ConfigError(
            f"{path}: no events; expected a trace of torch's profiler (traceEvents), an execution trace "
            "(nodes) or a step that `step.save` wrote"
        )
    trace.about = about
    return trace


def _seconds(trace: _Trace, event: dict[str, Any], place: int) -> tuple[float, float]:
    """Beginning and end of an event, in seconds since the first event of the file."""
    for name in ("ts", "dur"):
        value: Any = event.get(name, 0 if name == "dur" else None)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST
        if not good or (name == "dur" and value < 0):
            raise ConfigError(
                f"{trace.path}: byte {place}: {name} of event {short(event.get('name'))}: {short(value)}; "
                "expected microseconds that are not negative"
            )
    ts, duration = event["ts"], event.get("dur", 0)
    trace.base = ts if trace.base is None else trace.base
    begin = float(ts - trace.base) / 1e6
    return begin, begin + float(duration) / 1e6


def _take_event(trace: _Trace, event: dict[str, Any], place: int) -> None:
    if event.get("ph") != "X":
        return
    kind, name, args = event.get("cat"), event.get("name"), event.get("args")
    if not isinstance(name, str) or kind in ("Trace", "gpu_user_annotation", "overhead"):
        return
    args = args if isinstance(args, dict) else {}
    begin, end = _seconds(trace, event, place)
    thread = event.get("tid")
    if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
        _take_kernel(trace, name, begin, end, args)
        return
    trace.first, trace.last = min(trace.first, begin), max(trace.last, end)
    if kind in ("cuda_runtime", "cuda_driver", "hip_runtime"):
        if isinstance(number := args.get("correlation"), int) and _LAUNCH.search(name):
            trace.launches[number] = (begin, thread)
        return
    found = _Range(begin, end, thread, name, args)
    if name.startswith("ProfilerStep#"):
        trace.steps.append(found)
    elif name.startswith("Optimizer.step#"):
        trace.optimizer.append(found)
        trace.pid = event.get("pid")
    elif name == _ACCUMULATE:
        trace.gradients.append(found)
        trace.pid = event.get("pid")
    elif name.startswith("nn.Module: "):
        trace.modules.append(found._replace(args={}))
    elif _NESTED.match(name):
        trace.communication.append(found)
    elif kind == "cpu_op":
        trace.busy[thread].extend((begin, end))


def _take_kernel(trace: _Trace, name: str, begin: float, end: float, args: dict[str, Any]) -> None:
    number = args.get("correlation")
    if "nccl" in name.lower() or "Collective name" in args:
        trace.remote.append(_Range(begin, end, number, name, args))
    else:
        trace.kernels.append((number if isinstance(number, int) else -1, begin, end))


def _take_node(graph: _Graph, node: dict[str, Any]) -> None:
    name = node.get("name")
    if not isinstance(name, str):
        return
    inputs = _mapping(node.get("inputs"))
    if "process_group:init" in name:
        for text in inputs.get("values", []):
            try:
                groups = json.loads(text)
            except (TypeError, ValueError):
                continue
            for group in groups if isinstance(groups, list) else ():
                if isinstance(group, dict) and group.get("ranks"):
                    graph.groups[str(group.get("pg_name"))] = group["ranks"]
        return
    if name != _ACCUMULATE and not _NESTED.match(name):
        return
    attrs = {each.get("name"): each.get("value") for each in node.get("attrs", ()) if isinstance(each, dict)}
    number = attrs.get("rf_id")
    if not isinstance(number, int):
        return
    shapes, types = inputs.get("shapes", []), inputs.get("types", [])
    found: dict[str, Any] = {
        "Input Dims": shapes,
        "Input type": [
            match[1] if (match := re.search(r"Tensor\(([^)]*)\)", str(each))) else "" for each in types
        ],
        "bytes": max(_tensor_bytes(inputs), _tensor_bytes(_mapping(node.get("outputs")))),
    }
    renamed = {
        "collective_name": "Collective name", "dtype": "dtype", "in_msg_nelems": "In msg nelems",
        "out_msg_nelems": "Out msg nelems", "pg_name": "Process Group Name", "pg_size": "Group size",
    }  # fmt: skip
    found |= {ours: attrs[theirs] for theirs, ours in renamed.items() if theirs in attrs}
    start, stride, size = (attrs.get(key) for key in ("global_rank_start", "global_rank_stride", "pg_size"))
    if isinstance(start, int) and isinstance(stride, int) and isinstance(size, int) and stride > 0:
        found["Process Group Ranks"] = [start + stride * index for index in range(size)]
    graph.args[number] = found


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tensor_bytes(tensors: dict[str, Any]) -> int:
    """Bytes of tensors in the `values` of a node: [id, storage, offset, elements, itemsize, device] each."""

    def total(value: Any) -> int:
        if not isinstance(value, list):
            return 0
        if len(value) == 6 and isinstance(value[5], str) and all(isinstance(each, int) for each in value[:5]):
            return int(value[3] * value[4])
        return sum(total(each) for each in value)

    return max((total(value) for value in tensors.get("values", []) or []), default=0)


def _join(traces: Sequence[_Trace], graphs: Sequence[_Graph]) -> None:
    """Add the arguments of execution traces to the events of the Kineto traces of the same processes."""
    if not traces:
        raise ConfigError(
            f"{graphs[0].path}: an execution trace has no times; expected the Kineto trace of the "
            "same run beside it"
        )
    for graph in graphs:
        same = [trace for trace in traces if trace.pid == graph.pid]
        ids = {
            args.get("Record function id")
            for trace in same
            for each in (trace.communication, trace.gradients)
            for *_, args in each
        }
        if len(same) != 1 or not ids & graph.args.keys():
            raise ConfigError(
                f"{graph.path}: no Kineto trace of this run (process {graph.pid}, the same rf_id); expected "
                "both traces of one profile, whose events have a 'Record function id'"
            )
        (trace,) = same
        ranks = {"pg_config": [{"pg_name": name, "ranks": of} for name, of in graph.groups.items()]}
        trace.about["distributedInfo"] = ranks | _mapping(trace.about.get("distributedInfo"))
        for each in (trace.communication, trace.gradients):
            each[:] = [
                found._replace(args=graph.args.get(found.args.get("Record function id", -1), {}) | found.args)
                for found in each
            ]


def _number(traces: list[_Trace], notes: _Notes) -> None:
    """Find out the rank of each trace; raises if some are missing or there twice."""
    sizes = set()
    for index, trace in enumerate(traces):
        info = _mapping(trace.about.get("distributedInfo"))
        if isinstance(info.get("world_size"), int):
            sizes.add(info["world_size"])
        in_name = re.search(r"(?:rank|worker)[_\-.]?(\d+)", trace.path.name, re.IGNORECASE)
        if isinstance(info.get("rank"), int):
            trace.rank = info["rank"]
        elif in_name:
            trace.rank = int(in_name[1])
        else:
            trace.rank = index
            if len(traces) > 1:
                notes.add("a trace does not say its rank; it is the place in the order of files")
    seen: dict[int, _Trace] = {}
    for trace in traces:
        if trace.rank in seen:
            raise ConfigError(
                f"{trace.path}: rank {trace.rank} is in {seen[trace.rank].path} too; expected it once"
            )
        seen[trace.rank] = trace
    world = max([*sizes, len(traces), *(rank + 1 for rank in seen)])
    if missing := sorted(set(range(world)) - seen.keys()):
        named = ", ".join(map(str, missing[:8])) + ", …" * (len(missing) > 8)
        raise ConfigError(
            f"{traces[0].path}: no trace of rank {named}; expected one of each of the job's {world} ranks"
        )
    traces.sort(key=lambda trace: trace.rank)


def _merged(traces: Sequence[_Trace], source: Source, notes: _Notes) -> Step:
    drafts = {trace.rank: _Reader(trace, len(traces), notes).drafts() for trace in traces}
    places = _usual_places([draft for of_rank in drafts.values() for draft in of_rank])
    per_rank = {rank: [draft.step(places) for draft in of_rank] for rank, of_rank in drafts.items()}
    least = min(len(steps) for steps in per_rank.values())
    if any(len(steps) != least for steps in per_rank.values()):
        notes.add(f"ranks have traced different numbers of steps; the last {least} of each count")
        per_rank = {rank: steps[len(steps) - least :] for rank, steps in per_rank.items()}
    if least < 3:
        notes.add(
            f"only {least} step{'s are' if least > 1 else ' is'} in the traces; times are no medians of many"
        )
    _check_models(per_rank, traces)
    hosts = {trace.about.get("host_name") for trace in traces}
    params = [
        (mark.event.param, (mark.event.nbytes,), mark.event.like)
        for step in per_rank[0][-1:]
        for mark in step.marks
        if isinstance(mark.event, Ready)
    ]
    ours = any(each.name.startswith("mcr:") for trace in traces for each in trace.communication)
    try:
        step = Step.merged(
            per_rank, nodes=len(hosts), model=model_hash(params), source=source, by_caller=ours, least=1,
            notes=notes.texts(),
        )  # fmt: skip
    except InvalidArgument as error:
        raise ConfigError(f"{traces[0].path}: {error}") from None
    for text in step.notes:
        _log.warning("%s: %s", traces[0].path, text)
    return step


def _check_models(per_rank: Mapping[int, Sequence[RankStep]], traces: Sequence[_Trace]) -> None:
    """Raise `ConfigError` if ranks have other models although all of them do the same.

    Where all operations are of all ranks, gradients are averaged over them. A rank may lack some, but no two
    ranks have some each that the other one lacks.
    """
    last = {rank: steps[-1].marks for rank, steps in per_rank.items() if steps}
    groups = {mark.event.group for marks in last.values() for mark in marks if isinstance(mark.event, Issue)}
    if groups != {tuple(range(len(traces)))}:
        return
    shapes = {
        rank: Counter(
            f"{mark.event.like} [{mark.event.param.partition('[')[2]}"
            for mark in marks
            if isinstance(mark.event, Ready)
        )
        for rank, marks in last.items()
    }
    (first, own), *others = shapes.items()
    for rank, theirs in others:
        if (more := theirs - own) and (less := own - theirs):
            raise ConfigError(
                f"{traces[rank].path}: rank {rank} has a gradient {next(iter(more))}, and rank {first} has "
                f"{next(iter(less))} instead; expected traces of one model"
            )


# -- one rank -----------------------------------------------------------------------------------------------


@dataclass
class _Operation:
    """An operation that the program issues. Times in seconds; `started`, `done`: of its execution.

    `parts`: the arguments of its ranges, from the outermost.
    """

    begin: float
    end: float
    thread: Any
    names: list[str]
    parts: list[dict[str, Any]]
    started: float | None = None
    done: float | None = None

    def take(self, found: _Range) -> None:
        """Add what a range inside it says."""
        self.names.append(found.name)
        self.parts.append(found.args)

    def get(self, key: str) -> Any:
        """An argument, of the outermost range that has it."""
        return next((part[key] for part in self.parts if part.get(key) not in (None, "", [])), None)


class _Draft(NamedTuple):
    """A step of a rank in which not all waits have their place yet; times on the clock of the trace.

    `last`: the beginning of the optimizer. `waits`: of each operation, see `_Reader._wait`.
    """

    began: float
    ended: float
    last: float
    marks: list[Mark]
    waits: list[tuple[float | None, float]]

    def place(self, since: float) -> int:
        """How many marks come before a wait."""
        return bisect.bisect_right([mark.begin for mark in self.marks], since)

    def step(self, places: Mapping[tuple[int, int], int]) -> RankStep:
        """The step, with waits that are not visible at their usual places."""
        count = len(self.marks)
        visible = sorted((since, until) for since, until in self.waits if since is not None)
        marks = [(index, mark) for index, mark in enumerate(self.marks, start=1)]
        for number, (since, until) in enumerate(self.waits):
            if since is None and (place := places.get((number, count))) is not None:
                since = until = self.marks[place - 1].end
            elif since is None:  # with the next one that is visible, or for the optimizer
                since = next((begin for begin, end in visible if end >= until), max(self.last, until))
                until, place = max(since, until), self.place(since)
            else:
                place = self.place(since)
            marks.append((place, Mark(Wait(number), "", since, until)))
        marks.sort(key=lambda each: (each[0], isinstance(each[1].event, Wait)))
        ready = [index for index, (_, mark) in enumerate(marks) if isinstance(mark.event, Ready)]
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


def _usual_places(drafts: Sequence[_Draft]) -> dict[tuple[int, int], int]:
    """After how many marks a program waits for its operations, by their number and that of all marks."""
    seen: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for draft in drafts:
        for number, (since, _) in enumerate(draft.waits):
            if since is not None:
                seen[number, len(draft.marks)][draft.place(since)] += 1
    return {key: counts.most_common(1)[0][0] for key, counts in seen.items()}


class _Reader:
    """Makes the steps of one rank of its trace."""

    def __init__(self, trace: _Trace, ranks: int, notes: _Notes) -> None:
        self._trace = trace
        self._notes = notes
        info = _mapping(trace.about.get("distributedInfo"))
        configs = [each for each in info.get("pg_config", ()) if isinstance(each, dict) and each.get("ranks")]
        self._groups: dict[str, tuple[int, ...]] = {
            str(each.get("pg_name")): tuple(each["ranks"]) for each in configs
        }
        self._world = tuple(range(ranks))
        launched = [
            (trace.launches[number][0], begin, end)
            for number, begin, end in trace.kernels
            if number in trace.launches
        ]
        kernels = np.array(sorted(launched), np.float64).reshape(-1, 3)
        self._on_gpu = len(kernels) > 0
        self._launched = kernels[:, 0]
        self._ended = np.maximum.accumulate(kernels[:, 2])
        self._operations = self._issued()
        self._busy = _union(kernels[:, 1:]) if self._on_gpu else self._host_busy()

    def _at(self, host: float) -> float:
        """When an event of the host comes for the stream that computes: after what was launched before."""
        index = int(np.searchsorted(self._launched, host, side="right"))
        return max(host, float(self._ended[index - 1])) if index else host

    def _host_busy(self) -> Floats:
        """The time in which the threads that train compute, or issue operations."""
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

    def _issued(self) -> list[_Operation]:
        """The operations, in the order of their issue; ranges inside another belong to it."""
        trace = self._trace
        found: list[_Operation] = []
        elsewhere: list[_Range] = []  # execution by threads of the library
        issuers = {each.thread for each in trace.communication if not each.name.startswith("gloo:")}
        for each in sorted(trace.communication, key=lambda r: (str(r.thread), r.begin, -r.end)):
            last = found[-1] if found and found[-1].thread == each.thread else None
            inside = last is not None and each.begin <= last.end
            if inside and last is not None:
                last.take(each)
                if each.name.startswith("gloo:"):
                    last.started, last.done = each.begin, each.end
            elif each.name.startswith("gloo:") and issuers:
                elsewhere.append(each)
            elif _plain(each) not in _NO_OPERATIONS | {""}:
                found.append(_Operation(each.begin, each.end, each.thread, [each.name], [each.args]))
                if each.name.startswith("gloo:"):
                    found[-1].started, found[-1].done = each.begin, each.end
        found.sort(key=lambda operation: operation.begin)
        self._complete_by_threads(found, elsewhere)
        self._complete_by_kernels(found)
        return sorted(found, key=lambda operation: operation.begin)

    @staticmethod
    def _complete_by_threads(found: Sequence[_Operation], elsewhere: Sequence[_Range]) -> None:
        """Give operations the times in which a thread of the library has run them.

        The profiler numbers a range when it is made, which is inside the call: it follows the call's own.
        """
        calls = sorted(
            (number, index)
            for index, operation in enumerate(found)
            if isinstance(number := operation.get("Record function id"), int)
        )
        numbers = [number for number, _ in calls]
        for each in sorted(elsewhere, key=lambda r: r.begin):
            at = bisect.bisect_left(numbers, each.args.get("Record function id", -1)) - 1
            waiting: Iterable[_Operation] = [found[calls[at][1]]] if at >= 0 else found
            for operation in waiting:
                same = _KINDS.get(_plain(each)) == _KINDS.get(_plain_name(operation.names[0]))
                if operation.done is None and same and operation.begin <= each.end:
                    operation.take(each)
                    operation.started, operation.done = each.begin, each.end
                    break

    def _complete_by_kernels(self, found: list[_Operation]) -> None:
        """Give operations the times of their kernels, which they have launched or whose id they have."""
        trace = self._trace
        begins = [operation.begin for operation in found]
        known = {part.get("External id"): operation for operation in found for part in operation.parts}
        known.pop(None, None)
        for kernel in sorted(trace.remote, key=lambda r: r.begin):
            at, thread = trace.launches.get(kernel.thread, (None, None))
            operation = None
            if at is not None:
                around = [
                    found[index]
                    for index in range(bisect.bisect_right(begins, at) - 1, -1, -1)[:64]
                    if found[index].thread == thread and at <= found[index].end
                ]
                operation = around[0] if around else None
            operation = operation or known.get(kernel.args.get("External id"))
            if operation is None:
                begin = kernel.begin if at is None else at
                named = _KERNEL.search(kernel.name)
                args = {"Collective name": named[1] if named else kernel.name} | kernel.args
                found.append(
                    _Operation(begin, begin, thread, [kernel.name], [args], kernel.begin, kernel.end)
                )
                continue
            operation.take(kernel._replace(name=operation.names[0]))
            operation.started = kernel.begin if operation.started is None else operation.started
            operation.done = kernel.end

    # -- steps ------------------------------------------------------------------------------------

    def drafts(self) -> list[_Draft]:
        """The steps of this rank; the first from the beginning of the trace, without ranges of steps."""
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

    def _draft(self, begin: float, end: float) -> _Draft:
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
            issued, kind = self._at(operation.begin), self._kind(operation)
            nbytes, group = self._bytes(operation, kind), self._group(operation, kind)
            key = self._key(operation, kind, group)
            counts[key] += 1
            carried: tuple[str, ...] = ()
            if kind in ("all_reduce", "reduce_scatter"):
                known = [
                    index for index in unsent if times[index] <= issued + _ROUNDING and ready[index].nbytes
                ]
                chosen = _carried([ready[index].nbytes for index in known], nbytes)
                carried = tuple(ready[known[index]].param for index in chosen)
                issued = max([issued, *(times[known[index]] for index in chosen)])  # not before, by rounding
                unsent = [index for index in unsent if ready[index].param not in carried]
            seconds = None
            if operation.started is not None and operation.done is not None:
                seconds = operation.done - operation.started
            event = Issue(number, kind, nbytes, group, None, None, carried)
            away = issued if self._on_gpu else max(operation.end, issued)
            marks.append(Mark(event, "", issued, away, seconds, f"{key}#{counts[key]}"))
            waits.append(self._wait(operation, away, ended))
        marks.sort(key=lambda mark: (mark.begin, isinstance(mark.event, Issue)))
        return _Draft(began, ended, last, marks, waits)

    def _wait(self, operation: _Operation, issued: float, ended: float) -> tuple[float | None, float]:
        """From when to when the program waits for an operation; see the top of this module.

        None, and a time after which it waits, where it does not wait visibly.
        """
        done = operation.done
        asks = operation.get("Concrete Inputs")
        at_once = isinstance(asks, list) and "False" in asks[-2:]
        index = int(np.searchsorted(self._busy[:, 1], issued if done is None else done, side="right"))
        before = float(self._busy[index - 1, 1]) if index else issued
        resumed = float(self._busy[index, 0]) if index < len(self._busy) else ended
        if done is None:  # by a library that does not say when it is
            return (issued, min(max(resumed, issued), ended)) if at_once else (None, issued)
        idle, done = max(before, issued), min(max(done, issued), ended)
        if at_once:
            return issued, done
        return (idle, done) if idle <= done <= resumed + _ROUNDING else (None, done)

    def _needs(self, begin: float, end: float) -> list[Mark]:
        found: dict[str, float] = {}
        for each in sorted(self._trace.modules, key=lambda r: r.begin):
            if begin <= each.begin < end:
                found.setdefault(each.name.removeprefix("nn.Module: "), self._at(each.begin))
        return [Mark(Need(name), "", at, at) for name, at in found.items()]

    def _ready(self, index: int, found: _Range) -> Ready:
        dims, kind = found.args.get("Input Dims"), found.args.get("Input type")
        shape = dims[0] if isinstance(dims, list) and dims and isinstance(dims[0], list) else None
        dtype = str(kind[0]) if isinstance(kind, list) and kind else "float"
        where = "cuda" if self._on_gpu else "cpu"
        if shape is None or not dtype or not all(isinstance(each, int) for each in shape):
            self._notes.add("a gradient without a shape counts as empty; expected record_shapes=True")
            return Ready(f"gradient {index}", 0, f"float32 {where}")
        plain = dtype.removeprefix("c10::").lower()
        nbytes = math.prod(shape) * self._itemsize(plain)
        sizes = ", ".join(map(str, shape))
        return Ready(f"gradient {index} [{sizes}]", nbytes, f"{_DTYPES.get(plain, plain)} {where}")

    def _itemsize(self, dtype: str | None) -> int:
        name = (dtype or "").removeprefix("c10::").lower()
        if name in _ITEMSIZES or name.startswith("float8"):
            return _ITEMSIZES.get(name, 1)
        if name:
            self._notes.add(f"an unknown dtype, {short(name)}, counts as 4 bytes")
        return 4

    def _kind(self, operation: _Operation) -> str:
        called = operation.get("Collective name")
        for name in [*operation.names, called]:
            kind = _KINDS.get(_plain_name(str(name)))
            if kind == "all_to_all" and operation.get("In split size") not in (None, "[]"):
                return "all_to_all_v"
            if kind is not None:
                return kind
        name = called or operation.names[0]
        self._notes.add(f"an unknown operation, {short(name)}, counts as a barrier")
        return "barrier"

    def _bytes(self, operation: _Operation, kind: str) -> int:
        """The larger of input and output."""
        if kind == "barrier":
            return 0
        counted = [operation.get(key) for key in ("In msg nelems", "Out msg nelems")]
        if known := [each for each in counted if isinstance(each, int)]:
            return max(known) * self._itemsize(operation.get("dtype"))
        nbytes = int(operation.get("bytes") or 0) or max(map(self._part_bytes, operation.parts))
        if not nbytes:
            self._notes.add(
                f"an operation, {kind}, without shapes counts as empty; expected record_shapes=True"
            )
        both = any("base" in name or "into" in name for name in operation.names) or operation.get("bytes")
        of_one = kind in ("all_gather", "gather", "reduce_scatter", "scatter") and not both
        return nbytes * len(self._group(operation, kind)) if of_one else nbytes

    def _part_bytes(self, args: dict[str, Any]) -> int:
        """Bytes of the largest argument."""
        dims, types = args.get("Input Dims"), args.get("Input type")
        if not isinstance(dims, list) or not isinstance(types, list):
            return 0
        elements = max((_elements(each) for each in dims), default=0)
        dtypes = [each for each in types if each not in _NO_DTYPES]
        return elements * self._itemsize(dtypes[0] if dtypes else None) if elements else 0

    def _group(self, operation: _Operation, kind: str) -> tuple[int, ...]:
        if kind in ("send", "recv"):
            return self._ends(operation, kind)
        ranks = operation.get("Process Group Ranks")
        if isinstance(ranks, str):
            try:
                ranks = json.loads(ranks)
            except ValueError:  # of more than 30 ranks, only some are written
                ranks = None
        if isinstance(ranks, list) and ranks and all(isinstance(rank, int) for rank in ranks):
            return self._inside(ranks)
        if (known := self._groups.get(str(operation.get("Process Group Name")))) is not None:
            return self._inside(known)
        size = operation.get("Group size")
        if len(self._groups) > 1 and size != len(self._world):
            self._notes.add("an operation whose group is not in the trace counts as one of all ranks")
        return self._world

    def _inside(self, ranks: Iterable[int]) -> tuple[int, ...]:
        kept = tuple(ranks)
        if any(not 0 <= rank < len(self._world) for rank in kept):
            raise ConfigError(
                f"{self._trace.path}: a group of ranks {short(list(kept))}; expected ranks below "
                f"{len(self._world)}, of which there are traces"
            )
        return kept

    def _ends(self, operation: _Operation, kind: str) -> tuple[int, ...]:
        """Sender and receiver."""
        me = self._trace.rank
        peer = operation.get("Dst Rank" if kind == "send" else "Src Rank")
        asks = operation.get("Concrete Inputs")
        if peer is None and isinstance(asks, list) and len(asks) > 2 and str(asks[2]).isdigit():
            peer = int(asks[2])
        if not isinstance(peer, int) or not 0 <= peer < len(self._world):
            self._notes.add(f"a {kind} whose peer is not in the trace counts as one with nobody")
            return (me,)
        return (me, peer) if kind == "send" else (peer, me)

    @staticmethod
    def _key(operation: _Operation, kind: str, group: tuple[int, ...]) -> str:
        if kind in ("send", "recv"):
            return f"{'>'.join(map(str, group))}{kind if len(set(group)) == 1 else ''}"
        return f"{operation.get('Process Group Name') or ''} {group}"


def _plain(found: _Range) -> str:
    """The name of the operation of a range; empty if it has none."""
    return _plain_name(str(found.args.get("Collective name") or found.name))


def _plain_name(name: str) -> str:
    """`allgather` for `c10d::_allgather_base_` or `nccl:all_gather_into_tensor_coalesced`."""
    name = re.sub(r"^(c10d|nccl|gloo|mcr|ucc|mpi)::?", "", name).lower()
    name = re.sub(r"_(base|coalesced|into_tensor|tensor|single|any_source)(?=_|$)", "", name)
    return "" if name == "record_param_comms" else name.replace("_", "")


def _elements(dims: Any) -> int:
    """Elements of an argument: of a tensor, or of all tensors of a list."""
    if not isinstance(dims, list) or not dims:
        return 0
    if all(isinstance(each, int) for each in dims):
        return math.prod(dims)
    return sum(_elements(each) for each in dims)


def _carried(sizes: Sequence[int], nbytes: int) -> range:
    """Which gradients an operation carries: the first or the last ones that have its bytes together."""
    total = np.cumsum(np.array([0, *sizes], np.int64))
    count = int(np.searchsorted(total, nbytes))
    if nbytes and count <= len(sizes) and total[count] == nbytes:
        return range(count)
    begin = int(np.searchsorted(total, total[-1] - nbytes))
    return range(begin, len(sizes)) if nbytes and total[begin] == total[-1] - nbytes else range(0)


def _union(spans: Floats) -> Floats:
    """Intervals that do not touch, in order: the union of spans of beginning and end."""
    if not len(spans):
        return np.empty((0, 2))
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    first = np.append(True, spans[1:, 0] > ends[:-1])
    last = np.append(first[1:], True)
    return np.stack([spans[first, 0], ends[last]], axis=1)
