"""Read the operations in a rank's trace: times of issue and execution, and arguments."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mcr_plus.bucketing.step import MOST_BYTES
from mcr_plus.bucketing.trace_files import Notes, Thread, Trace, TraceRange
from mcr_plus.core.kinds import COLLECTIVES, MESSAGES, collective
from mcr_plus.errors import ConfigError, short

_KINDS: Final[Mapping[str, str]] = {
    **{name.replace("_", ""): row.kind for row in COLLECTIVES.values() for name in (row.kind, row.torch)},
    "alltoallv": "all_to_all",
    "monitoredbarrier": "barrier",
}
_NO_OPERATIONS: Final = {"wait", "init", "coalesced", "startcoalescing", "endcoalescing"}
_ITEMSIZES: Final = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "long": 8, "long int": 8, "int": 4, "short": 2,
    "byte": 1, "char": 1, "unsigned char": 1, "signed char": 1, "bool": 1, "short int": 2,
}  # fmt: skip
_NO_DTYPES: Final = ("", "TensorList", "Scalar", "ScalarList")
_DIGITS: Final = re.compile(r"[0-9]{1,9}$")
_KERNEL: Final = re.compile(r"nccl(?:Dev)?Kernel_?(\w*?)(?:_|\(|$)", re.IGNORECASE)


@dataclass
class TracedOperation:
    """An operation that the program issues. Times in seconds; `started`, `done`: start and end of execution.

    `parts`: arguments of its ranges, outermost first. `byte`: byte offset of the first range's event.
    """

    begin: float
    end: float
    thread: Thread
    names: list[str]
    parts: list[dict[str, Any]]
    byte: int
    started: float | None = None
    done: float | None = None

    def take(self, found: TraceRange) -> None:
        """Add the name and the arguments of an inner range."""
        self.names.append(found.name)
        self.parts.append(found.args)

    def get(self, key: str) -> Any:
        """Return an argument from the outermost range that has it."""
        return next((part[key] for part in self.parts if part.get(key) not in (None, "", [])), None)


def operations(trace: Trace) -> list[TracedOperation]:
    """Return the operations in the order of issue; inner ranges are merged into the outer range."""
    found: list[TracedOperation] = []
    elsewhere: list[TraceRange] = []  # executions by threads of the library
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
            found.append(
                TracedOperation(each.begin, each.end, each.thread, [each.name], [each.args], each.byte)
            )
            if each.name.startswith("gloo:"):
                found[-1].started, found[-1].done = each.begin, each.end
    found.sort(key=lambda operation: operation.begin)
    _complete_by_threads(found, elsewhere)
    _complete_by_kernels(found, trace)
    return sorted(found, key=lambda operation: operation.begin)


def _complete_by_threads(found: Sequence[TracedOperation], elsewhere: Sequence[TraceRange]) -> None:
    """Set the execution times of operations that a library's thread has run.

    The profiler numbers a range at its creation, inside the call, so the range's number is the next one after
    the call's number.
    """
    calls = sorted(
        (number, index)
        for index, operation in enumerate(found)
        if (number := operation.get("Record function id")) is not None
    )
    numbers = [number for number, _ in calls]
    for each in sorted(elsewhere, key=lambda r: r.begin):
        at = bisect.bisect_left(numbers, each.args.get("Record function id", -1)) - 1
        waiting: Iterable[TracedOperation] = [found[calls[at][1]]] if at >= 0 else found
        for operation in waiting:
            same = _KINDS.get(_plain(each)) == _KINDS.get(_plain_name(operation.names[0]))
            if operation.done is None and same and operation.begin <= each.end:
                operation.take(each)
                operation.started, operation.done = each.begin, each.end
                break


def _complete_by_kernels(found: list[TracedOperation], trace: Trace) -> None:
    """Set the execution times of operations from their kernels, matched by launch or by external id."""
    begins = [operation.begin for operation in found]
    known = {part.get("External id"): operation for operation in found for part in operation.parts}
    known.pop(None, None)
    kernels = sorted(trace.remote, key=lambda r: r.begin)
    rows = trace.launches.last([kernel.args.get("correlation", -1) for kernel in kernels])
    for kernel, row in zip(kernels, rows.tolist(), strict=True):
        at, thread = trace.launches.call(row) if row >= 0 else (None, None)
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
                TracedOperation(
                    begin, begin, thread, [kernel.name], [args], kernel.byte, kernel.begin, kernel.end
                )
            )  # fmt: skip
            continue
        operation.take(kernel._replace(name=operation.names[0]))
        operation.started = kernel.begin if operation.started is None else operation.started
        operation.done = kernel.end


class Arguments:
    """Reads the arguments of one rank's operations. `ranks`: ranks of the job; `notes`: takes assumptions."""

    def __init__(self, trace: Trace, ranks: int, notes: Notes) -> None:
        self._trace = trace
        self._notes = notes
        self._world = tuple(range(ranks))
        self._groups = trace.groups

    def itemsize(self, dtype: str | None) -> int:
        """Return the bytes of an element; 4, with a note, for an unknown dtype."""
        name = (dtype or "").removeprefix("c10::").lower()
        if name in _ITEMSIZES or name.startswith("float8"):
            return _ITEMSIZES.get(name, 1)
        if name:
            self._notes.add(f"an unknown dtype, {short(name)}, counts as 4 bytes")
        return 4

    def kind(self, operation: TracedOperation) -> str:
        """Return the kind of an operation; a barrier, with a note, for an unknown one."""
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

    def nbytes(self, operation: TracedOperation, kind: str) -> int:
        """Return the bytes of the input or the output, whichever is larger."""
        nbytes = 0 if kind == "barrier" else self._largest(operation, kind)
        if nbytes > MOST_BYTES:
            raise self._wrong(operation, f"{nbytes:,} bytes; expected at most 1 PiB")
        return nbytes

    def _largest(self, operation: TracedOperation, kind: str) -> int:
        counted = [operation.get(key) for key in ("In msg nelems", "Out msg nelems")]
        if known := [each for each in counted if each is not None]:
            return int(max(known)) * self.itemsize(operation.get("dtype"))
        nbytes = int(operation.get("bytes") or 0) or max(map(self._part_bytes, operation.parts))
        if not nbytes:
            self._notes.add(
                f"an operation, {kind}, without shapes counts as empty; expected record_shapes=True"
            )
        both = any("base" in name or "into" in name for name in operation.names) or operation.get("bytes")
        row = collective(kind)
        of_one = row.is_shared and row.sends != row.receives and not both
        return nbytes * len(self.group(operation, kind)) if of_one else nbytes

    def _part_bytes(self, args: dict[str, Any]) -> int:
        """Return the bytes of the largest argument."""
        dims, types = args.get("Input Dims"), args.get("Input type")
        if dims is None or types is None:
            return 0
        elements = max((_elements(each) for each in dims), default=0)
        dtypes = [each for each in types if each not in _NO_DTYPES]
        return elements * self.itemsize(dtypes[0] if dtypes else None) if elements else 0

    def group(self, operation: TracedOperation, kind: str) -> tuple[int, ...]:
        """Return the ranks of an operation; for sends and receives, sender and receiver."""
        if kind in MESSAGES:
            return self._ends(operation, kind)
        ranks = operation.get("Process Group Ranks")
        ranks = ranks or self._groups.get(str(operation.get("Process Group Name")))
        if ranks is not None:
            return self._inside(ranks, operation)
        size = operation.get("Group size")
        if len(self._groups) > 1 and size != len(self._world):
            self._notes.add("an operation whose group is not in the trace counts as one of all ranks")
        return self._world

    def _inside(self, ranks: Sequence[int], operation: TracedOperation) -> tuple[int, ...]:
        if any(not 0 <= rank < len(self._world) for rank in ranks):
            raise self._wrong(
                operation,
                f"a group of ranks {short(list(ranks))}; expected ranks below {len(self._world)}, of which "
                "there are traces",
            )
        found, me = tuple(ranks), self._trace.rank
        if found.count(me) != 1 or len({*found}) < len(found):
            raise self._wrong(
                operation, f"a group of ranks {short(list(found))}; expected each rank once, and rank {me}"
            )
        return self._world if found == self._world else found

    def _wrong(self, operation: TracedOperation, text: str) -> ConfigError:
        name = short(operation.names[0])
        return ConfigError(f"{self._trace.path}: byte {operation.byte}: event {name}: {text}")

    def _ends(self, operation: TracedOperation, kind: str) -> tuple[int, ...]:
        """Return the sender and the receiver; only this rank, with a note, if the peer is unknown."""
        me = self._trace.rank
        peer = operation.get("Dst Rank" if kind == "send" else "Src Rank")
        asks = operation.get("Concrete Inputs")
        if peer is None and asks and len(asks) > 2 and _DIGITS.match(asks[2]):
            peer = int(asks[2])
        if peer is None or not 0 <= peer < len(self._world):
            self._notes.add(f"a {kind} whose peer is not in the trace counts as one without a peer")
            return (me,)
        return (me, peer) if kind == "send" else (peer, me)

    def key(self, operation: TracedOperation, kind: str, group: tuple[int, ...]) -> str:
        """Return a name; all ranks issue the operations with this name in the same order."""
        if kind in MESSAGES:
            return f"{'>'.join(map(str, group))}{kind if len(set(group)) == 1 else ''}"
        named = "" if group is self._world else str(group)  # the text of all ranks may be long
        return f"{operation.get('Process Group Name') or ''} {named}"


def _plain(found: TraceRange) -> str:
    """Return the plain name of a range's operation; empty if it has none."""
    return _plain_name(str(found.args.get("Collective name") or found.name))


def _plain_name(name: str) -> str:
    """Return `allgather` for `c10d::_allgather_base_` or `nccl:all_gather_into_tensor_coalesced`."""
    name = re.sub(r"^(c10d|nccl|gloo|mcr|ucc|mpi)::?", "", name).lower()
    name = re.sub(r"_(base|coalesced|into_tensor|tensor|single|any_source)(?=_|$)", "", name)
    return "" if name == "record_param_comms" else name.replace("_", "")


def _elements(dims: Any) -> int:
    """Return the number of elements of an argument: a tensor, or a list of tensors."""
    if not isinstance(dims, list) or not dims:
        return 0
    if all(isinstance(each, int) for each in dims):
        return math.prod(dims)
    return sum(_elements(each) for each in dims)
