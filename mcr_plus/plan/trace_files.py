"""Reads Kineto's JSON and execution traces, piece by piece: of each rank, what steps are made of."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from mcr_plus.errors import ConfigError, short
from mcr_plus.plan.json_stream import members

_LISTS: Final = ("traceEvents", "nodes")
_LARGEST: Final = 1e18  # microseconds: 30,000 years
_ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
_NESTED: Final = re.compile(r"^(c10d|nccl|gloo|mcr|ucc|mpi)::?|^record_param_comms$")
_LAUNCH: Final = re.compile("Launch|Memcpy|Memset")


class Notes:
    """What could not be read exactly, counted."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, text: str) -> None:
        """Count a text once more."""
        self._counts[text] += 1

    def texts(self) -> list[str]:
        """The texts, each once, with how often it was counted."""
        return [text if count == 1 else f"{text} ({count} times)" for text, count in self._counts.items()]


class Range(NamedTuple):
    """A range of the host, in seconds."""

    begin: float
    end: float
    thread: Any
    name: str
    args: dict[str, Any]


@dataclass
class Trace:
    """What is kept of a Kineto trace; times in seconds since `base`, which is in microseconds."""

    path: Path
    base: float | None = None
    about: dict[str, Any] = field(default_factory=dict)
    rank: int = -1
    pid: Any = None
    steps: list[Range] = field(default_factory=list)
    optimizer: list[Range] = field(default_factory=list)
    gradients: list[Range] = field(default_factory=list)
    modules: list[Range] = field(default_factory=list)
    communication: list[Range] = field(default_factory=list)
    busy: dict[Any, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    launches: dict[int, tuple[float, Any]] = field(default_factory=dict)
    kernels: list[tuple[int, float, float]] = field(default_factory=list)  # correlation, begin, end
    remote: list[Range] = field(default_factory=list)  # kernels of communication
    first: float = math.inf
    last: float = 0.0


@dataclass
class Graph:
    """What is kept of an execution trace: arguments of operations as Kineto names them, by `rf_id`."""

    path: Path
    pid: Any = None
    args: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, list[int]] = field(default_factory=dict)


def read_file(path: Path) -> Trace | Graph | None:
    """Read a file; None if it is a step that `Step.save` wrote."""
    trace, graph = Trace(path), Graph(path)
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


def _seconds(trace: Trace, event: dict[str, Any], place: int) -> tuple[float, float]:
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


def _take_event(trace: Trace, event: dict[str, Any], place: int) -> None:
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
    found = Range(begin, end, thread, name, args)
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


def _take_kernel(trace: Trace, name: str, begin: float, end: float, args: dict[str, Any]) -> None:
    number = args.get("correlation")
    if "nccl" in name.lower() or "Collective name" in args:
        trace.remote.append(Range(begin, end, number, name, args))
    else:
        trace.kernels.append((number if isinstance(number, int) else -1, begin, end))


def _take_node(graph: Graph, node: dict[str, Any]) -> None:
    name = node.get("name")
    if not isinstance(name, str):
        return
    inputs = mapping(node.get("inputs"))
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
        "bytes": max(_tensor_bytes(inputs), _tensor_bytes(mapping(node.get("outputs")))),
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


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a mapping, else an empty one."""
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


def join_graphs(traces: Sequence[Trace], graphs: Sequence[Graph]) -> None:
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
        trace.about["distributedInfo"] = ranks | mapping(trace.about.get("distributedInfo"))
        for each in (trace.communication, trace.gradients):
            each[:] = [
                found._replace(args=graph.args.get(found.args.get("Record function id", -1), {}) | found.args)
                for found in each
            ]


def number_ranks(traces: list[Trace], notes: Notes) -> None:
    """Find out the rank of each trace; raises if some are missing or there twice."""
    sizes = set()
    for index, trace in enumerate(traces):
        info = mapping(trace.about.get("distributedInfo"))
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
    seen: dict[int, Trace] = {}
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
