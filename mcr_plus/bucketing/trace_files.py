"""Read Kineto's JSON and execution traces incrementally: the data of one rank's steps."""

# Long because profilers of several versions write events and sizes in several forms.

from __future__ import annotations

import gzip
import json
import math
import re
import sys
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.bucketing.json_stream import (
    LABEL,
    LIST,
    NUMBER,
    TEXT,
    TEXTS,
    FieldForm,
    FilePlace,
    is_whole,
    members,
    within,
)
from mcr_plus.bucketing.step import MOST_BYTES, MOST_RANKS
from mcr_plus.errors import ConfigError, short

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Thread = int | str | None

_LISTS: Final = ("traceEvents", "nodes")
_LARGEST: Final = 1e18  # microseconds: 30,000 years
_MOST_KEPT: Final = 1 << 20
_MOST_ELEMENTS: Final = MOST_BYTES // 8  # of 8 bytes each
_DEEPEST: Final = 8  # largest nesting of lists of sizes
_ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
_NESTED: Final = re.compile(r"^(c10d|nccl|gloo|mcr|ucc|mpi)::?|^record_param_comms$")
_LAUNCH: Final = re.compile("Launch|Memcpy|Memset")


def _are_ranks(value: object) -> bool:
    return isinstance(value, list) and all(map(is_whole, value))


def _are_sizes(value: object, deepest: int = _DEEPEST) -> bool:
    """Return whether a value is a list of a tensor's sizes, or a nested list of sizes."""
    if not isinstance(value, list) or not deepest:
        return False
    elements = 1
    for each in value:
        if is_whole(each):
            elements *= each
            if each < 0 or max(each, elements) > _MOST_ELEMENTS:
                return False
        elif not _are_sizes(each, deepest - 1):
            return False
    return True


_COUNT: Final = within(0, _MOST_ELEMENTS)
_SIZES: Final = FieldForm(f"lists of sizes, of at most {_MOST_ELEMENTS:,} elements", _are_sizes)
_RANKS: Final = FieldForm(
    "a list of ranks, or its text", lambda value: isinstance(value, str) or _are_ranks(value)
)
_ABOUT: Final = {"rank": within(0, MOST_RANKS - 1), "world_size": within(1, MOST_RANKS), "pg_config": LIST}
_GROUP: Final = {"pg_name": LABEL, "ranks": _RANKS, "group_size": within(0, MOST_RANKS)}
_GRADIENT: Final = {"Input Dims": _SIZES, "Input type": TEXTS, "Record function id": NUMBER}
_OPERATION: Final = _GRADIENT | {
    "Concrete Inputs": TEXTS, "Collective name": TEXT, "dtype": TEXT, "In msg nelems": _COUNT,
    "Out msg nelems": _COUNT,
    "In split size": FieldForm("a text or a list", lambda v: isinstance(v, (str, list))),
    "Process Group Name": LABEL, "Process Group Ranks": _RANKS, "Group size": NUMBER, "Src Rank": NUMBER,
    "Dst Rank": NUMBER, "External id": LABEL, "correlation": NUMBER,
}  # fmt: skip
_TENSORS: Final = {"values": LIST, "shapes": _SIZES, "types": LIST}
_ATTRS: Final = {
    "rf_id": NUMBER, "collective_name": TEXT, "dtype": TEXT, "in_msg_nelems": _COUNT,
    "out_msg_nelems": _COUNT, "pg_name": LABEL, "pg_size": within(0, MOST_RANKS),
    "global_rank_start": NUMBER, "global_rank_stride": NUMBER,
}  # fmt: skip


class Notes:
    """Messages about data that could not be read exactly, with counts."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, text: str) -> None:
        """Count a message."""
        self._counts[text] += 1

    def texts(self) -> list[str]:
        """Return each message once, with its count."""
        return [text if count == 1 else f"{text} ({count} times)" for text, count in self._counts.items()]


class TraceRange(NamedTuple):
    """A range of the host, or a kernel: start and end in seconds, byte offset, and used arguments."""

    begin: float
    end: float
    thread: Thread
    name: str
    byte: int
    args: dict[str, Any]


class Launches:
    """Calls that launch kernels: number shared with the kernel, start time, and thread."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._begins = array("d")
        self._threads = array("q")
        self._numbered: dict[Thread, int] = {}
        self._named: list[Thread] = []

    def add(self, number: int, begin: float, thread: Thread) -> None:
        """Add a call."""
        self._numbers.append(number)
        self._begins.append(begin)
        if thread not in self._numbered:
            self._numbered[thread] = len(self._named)
            self._named.append(thread)
        self._threads.append(self._numbered[thread])

    def last(self, numbers: Sequence[int]) -> Ints:
        """Return the row of the last call with each number; -1 without a call."""
        known, wanted = np.array(self._numbers, np.int64), np.array(numbers, np.int64)
        if not len(known):
            return np.full(len(wanted), -1)
        order = np.argsort(known, kind="stable")
        rows = order[np.searchsorted(known, wanted, side="right", sorter=order) - 1]
        return np.where(known[rows] == wanted, rows, -1)

    def begins(self, rows: Ints) -> Floats:
        """Return the start times of calls."""
        return np.array(self._begins, np.float64)[rows]

    def call(self, row: int) -> tuple[float, Thread]:
        """Return the start time and the thread of a call."""
        return self._begins[row], self._named[self._threads[row]]


@dataclass
class Trace:
    """Stored data of a Kineto trace. Times are seconds since `base`, which is in microseconds.

    Frequent events (there may be millions) are stored as numbers only; of other events, at most 1,048,576 are
    stored.
    """

    path: Path
    base: float | None = None
    rank: int = -1  # -1: unknown
    world: int = 0  # 0: unknown
    host: str | None = None
    pid: int | str | None = None
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kept: int = 0
    steps: list[TraceRange] = field(default_factory=list)
    optimizer: list[TraceRange] = field(default_factory=list)
    gradients: list[TraceRange] = field(default_factory=list)
    modules: dict[str, array[float]] = field(default_factory=dict)  # start times of their calls
    communication: list[TraceRange] = field(default_factory=list)
    busy: dict[Thread, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    launches: Launches = field(default_factory=Launches)
    kernels: array[float] = field(default_factory=lambda: array("d"))  # start and end of each
    launched_by: array[int] = field(default_factory=lambda: array("q"))  # numbers shared with their launches
    remote: list[TraceRange] = field(default_factory=list)  # kernels of communication
    first: float = math.inf
    last: float = 0.0


@dataclass
class Graph:
    """Stored data of an execution trace: arguments of operations by `rf_id`, under Kineto's names."""

    path: Path
    pid: int | str | None = None
    args: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    world: int = 0  # 0: unknown


def read_file(path: Path) -> Trace | Graph | None:
    """Read a trace; returns None if the file is a step written by `CapturedStep.save`."""
    trace, graph = Trace(path), Graph(path)
    kinds: set[str] = set()
    if _begins_as_chakra(path):
        raise _is_chakra(path)
    try:
        for key, value, byte in members(path, _LISTS):
            if key in _LISTS:
                kinds.add(key)
            if key == "traceEvents":
                _take_event(trace, value, byte)
            elif key == "nodes":
                _take_node(graph, value, byte)
            elif key in ("version", "roles", "workload_graph") and not kinds:
                if key == "workload_graph" or isinstance(value, str):
                    raise _is_chakra(path)
                return None
            else:
                _take_about(trace, graph, key, value, byte)
    except RecursionError:  # nesting just below the limit of `members`
        raise ConfigError(f"{path}: not JSON that can be read: nested too deeply") from None
    if kinds == {"nodes"}:
        return graph
    if kinds != {"traceEvents"}:
        raise ConfigError(
            f"{path}: no events; expected a trace of torch's profiler (traceEvents), an execution trace "
            "(nodes) or a step that `step.save` wrote"
        )
    return trace


def _is_chakra(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: a Chakra trace has operations and what they depend on, but not when gradients were ready; "
        "expected the traces of torch's profiler that it was converted from, or a step of `mcr.capture`"
    )


def _begins_as_chakra(path: Path) -> bool:
    """Return whether a file begins like Chakra's protobuf: a length, then fields 1 and 2 of this length.

    The fields are the version and the attributes of `GlobalMetadata`; JSON begins with neither.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            data = file.read(1 << 16)
    except (OSError, EOFError, zlib.error):
        return False  # `members` reports the reason
    end, at = _varint(data, 0)
    end += at
    if at == end or len(data) < end:
        return False
    while at < end:
        tag = data[at]
        length, at = _varint(data, at + 1)
        at += length
        if tag not in (0x0A, 0x12):
            return False
    return at == end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint of protobuf's wire format, and the offset after it."""
    value = shift = 0
    while at < len(data) and shift < 32:
        value, shift, at = value | (data[at] & 0x7F) << shift, shift + 7, at + 1
        if data[at - 1] < 0x80:
            break
    return value, at


def _take_about(trace: Trace, graph: Graph, key: str, value: Any, byte: int) -> None:
    """Store members of a file that are neither events nor nodes."""
    if key == "distributedInfo":
        place = FilePlace(trace.path, byte, key)
        about = place.fields(value, _ABOUT)
        trace.rank, trace.world = about.get("rank", -1), about.get("world_size", 0)
        trace.groups = _groups(place, about.get("pg_config", []))
    elif key in ("host_name", "pid"):
        forms = {"host_name": TEXT, "pid": LABEL}
        about = FilePlace(trace.path, byte, "the file").fields({key: value}, forms)
        trace.host = about.get("host_name", trace.host)
        graph.pid = about.get("pid", graph.pid)


def _groups(place: FilePlace, found: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of groups by name; groups without ranks in the file are omitted."""
    groups: dict[str, tuple[int, ...]] = {}
    for each in found:
        group = place.fields(each, _GROUP, "pg_config")
        if ranks := _ranks(group.get("ranks")):
            groups[str(group.get("pg_name"))] = ranks
    return groups


def _ranks(found: Any) -> tuple[int, ...]:
    """Return ranks from a list or its text; empty for truncated text (the profiler keeps 30 ranks)."""
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            return ()
    return tuple(found) if found and _are_ranks(found) else ()


# -- events -------------------------------------------------------------------------------------------------


def _seconds(trace: Trace, event: dict[str, Any], place: FilePlace) -> tuple[float, float]:
    """Return the start and end of an event, in seconds since the first event of the file."""
    for name in ("ts", "dur"):
        value: Any = event.get(name, 0 if name == "dur" else None)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST
        if not good or (name == "dur" and value < 0):
            raise place.wrong(name, value, "microseconds that are not negative")
    ts, duration = event["ts"], event.get("dur", 0)
    trace.base = ts if trace.base is None else trace.base
    begin = float(ts - trace.base) / 1e6
    return begin, begin + float(duration) / 1e6


def _take_event(trace: Trace, event: Any, byte: int) -> None:
    if not isinstance(event, dict):
        raise ConfigError(f"{trace.path}: byte {byte}: {short(event)}; expected an event")
    kind, name = event.get("cat"), event.get("name")
    if event.get("ph") != "X" or not isinstance(name, str):
        return
    if kind in ("Trace", "gpu_user_annotation", "overhead"):
        return
    place = FilePlace(trace.path, byte, "event", name)
    begin, end = _seconds(trace, event, place)
    if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
        _take_kernel(trace, event, place, begin, end)
        return
    trace.first, trace.last = min(trace.first, begin), max(trace.last, end)
    if kind in ("cuda_runtime", "cuda_driver", "hip_runtime"):
        number = _number(event, place) if _LAUNCH.search(name) else None
        if number is not None:
            trace.launches.add(number, begin, _label(event, "tid", place))
    elif name.startswith("nn.Module: "):
        _take_module(trace, place, name, begin)
    else:
        _take_range(trace, event, place, begin, end)


def _take_module(trace: Trace, place: FilePlace, name: str, begin: float) -> None:
    if name not in trace.modules:
        place.fields({"name": name}, {"name": TEXT})
        _count(trace, place)
        trace.modules[name] = array("d")
    trace.modules[name].append(begin)


def _take_range(trace: Trace, event: dict[str, Any], place: FilePlace, begin: float, end: float) -> None:
    name: str = event["name"]
    if (listed := _list_of(trace, name)) is not None:
        kept, forms = listed
        _count(trace, place)
        args = _arguments(event, place, forms)
        kept.append(TraceRange(begin, end, _label(event, "tid", place), sys.intern(name), place.byte, args))
        if kept is trace.optimizer or kept is trace.gradients:
            trace.pid = _label(event, "pid", place)
    elif event.get("cat") == "cpu_op":
        thread = _label(event, "tid", place)
        if thread not in trace.busy:
            _count(trace, place)
        spans = trace.busy[thread]
        if not spans or begin < spans[-2] or end > spans[-1]:  # most ranges are inside their predecessor
            spans.extend((begin, end))


def _list_of(trace: Trace, name: str) -> tuple[list[TraceRange], Mapping[str, FieldForm]] | None:
    """Return the list that stores events with this name, and the forms of the arguments that are used."""
    if name.startswith("ProfilerStep#"):
        return trace.steps, {}
    if name.startswith("Optimizer.step#"):
        return trace.optimizer, {}
    if name == _ACCUMULATE:
        return trace.gradients, _GRADIENT
    return (trace.communication, _OPERATION) if _NESTED.match(name) else None


def _count(trace: Trace, place: FilePlace) -> None:
    """Count an event that is stored with its arguments; raises `ConfigError` beyond the limit."""
    trace.kept += 1
    if trace.kept > _MOST_KEPT:
        raise ConfigError(
            f"{trace.path}: byte {place.byte}: more than {_MOST_KEPT:,} steps, gradients, operations, "
            "modules and threads; expected a trace of fewer steps"
        )


def _label(event: dict[str, Any], name: str, place: FilePlace) -> Thread:
    """Return the id of a thread or a process."""
    value: Thread = place.fields(event, {name: LABEL}).get(name)
    return value


def _number(event: dict[str, Any], place: FilePlace) -> int | None:
    """Return the number that a kernel and its launch share."""
    value: int | None = place.fields(event.get("args"), {"correlation": NUMBER}, "args").get("correlation")
    return value


def _arguments(event: dict[str, Any], place: FilePlace, forms: Mapping[str, FieldForm]) -> dict[str, Any]:
    args = place.fields(event.get("args"), forms, "args")
    if ranks := _ranks(args.pop("Process Group Ranks", None)):
        args["Process Group Ranks"] = ranks
    return args


def _take_kernel(trace: Trace, event: dict[str, Any], place: FilePlace, begin: float, end: float) -> None:
    name, args = event["name"], event.get("args")
    if "nccl" in name.lower() or (isinstance(args, dict) and "Collective name" in args):
        _count(trace, place)
        args = _arguments(event, place, _OPERATION)
        trace.remote.append(TraceRange(begin, end, None, sys.intern(name), place.byte, args))
    elif (number := _number(event, place)) is not None:
        trace.kernels.extend((begin, end))
        trace.launched_by.append(number)


# -- nodes --------------------------------------------------------------------------------------------------


def _take_node(graph: Graph, node: Any, byte: int) -> None:
    if not isinstance(node, dict):
        raise ConfigError(f"{graph.path}: byte {byte}: {short(node)}; expected a node")
    name = node.get("name")
    if not isinstance(name, str):
        return
    place = FilePlace(graph.path, byte, "node", name)
    if "process_group:init" in name:
        _take_groups(graph, place, _tensors(node, "inputs", place))
    elif name == _ACCUMULATE or _NESTED.match(name):
        attrs = _attrs(node, place)
        if "rf_id" in attrs:
            if len(graph.args) == _MOST_KEPT:
                raise ConfigError(
                    f"{graph.path}: byte {byte}: more than {_MOST_KEPT:,} gradients and operations; expected "
                    "a trace of fewer steps"
                )
            graph.args[attrs["rf_id"]] = _named_as_kineto(node, attrs, place)


def _take_groups(graph: Graph, place: FilePlace, inputs: dict[str, Any]) -> None:
    """Store the groups in the text argument of a group's creation; the group of all ranks has no list."""
    for text in inputs.get("values", []):
        try:
            groups = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            continue
        groups = groups if isinstance(groups, list) else []
        graph.groups |= _groups(place, groups)
        sizes = [place.fields(each, _GROUP, "pg_config").get("group_size", 0) for each in groups]
        graph.world = max([graph.world, *sizes])


def _attrs(node: dict[str, Any], place: FilePlace) -> dict[str, Any]:
    """Return the attributes of a node, by name."""
    listed = node.get("attrs") or []
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise place.wrong("attrs", listed, "a list of objects")
    named = {each["name"]: each.get("value") for each in listed if isinstance(each.get("name"), str)}
    return place.fields(named, _ATTRS, "attrs")


def _named_as_kineto(node: dict[str, Any], attrs: dict[str, Any], place: FilePlace) -> dict[str, Any]:
    inputs = _tensors(node, "inputs", place)
    types = [
        re.search(r"Tensor\(([^)]*)\)", each) for each in inputs.get("types", []) if isinstance(each, str)
    ]
    found: dict[str, Any] = {
        "Input Dims": inputs.get("shapes", []),
        "Input type": [match[1] if match else "" for match in types],
        "bytes": max(_tensor_bytes(each) for each in (inputs, _tensors(node, "outputs", place))),
    }
    if found["bytes"] > MOST_BYTES:
        raise place.wrong("values", found["bytes"], "tensors of at most 1 PiB together")
    renamed = {
        "collective_name": "Collective name", "dtype": "dtype", "in_msg_nelems": "In msg nelems",
        "out_msg_nelems": "Out msg nelems", "pg_name": "Process Group Name", "pg_size": "Group size",
    }  # fmt: skip
    found |= {kineto: attrs[name] for name, kineto in renamed.items() if name in attrs}
    size = attrs.get("pg_size", 0)
    start, stride = (attrs.get(f"global_rank_{which}", -1) for which in ("start", "stride"))
    if size and start >= 0 and stride > 0:
        last = start + stride * (size - 1)
        if last >= MOST_RANKS:
            raise place.wrong("ranks", last, f"ranks below {MOST_RANKS:,}")
        found["Process Group Ranks"] = range(start, last + 1, stride)
    return found


def _tensors(node: dict[str, Any], name: str, place: FilePlace) -> dict[str, Any]:
    """Return the inputs or outputs of a node; empty for the plain lists of schemas before 1.1."""
    found = node.get(name)
    return {} if isinstance(found, list) else place.fields(found, _TENSORS, name)


def _tensor_bytes(tensors: dict[str, Any]) -> int:
    """Return the bytes of tensors in `values`: each is [id, storage, offset, elements, itemsize, device]."""

    def total(value: Any) -> int:
        if not isinstance(value, list):
            return 0
        if len(value) == 6 and isinstance(value[5], str) and all(map(is_whole, value[:5])):
            return max(0, int(value[3] * value[4]))
        return sum(total(each) for each in value)

    return max((total(value) for value in tensors.get("values", [])), default=0)
