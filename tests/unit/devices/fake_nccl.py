"""A library with NCCL's C ABI that works on host memory, and streams to go with it, for ranks in one process.

Its functions are C function pointers with prototypes copied from nccl.h, so arguments are marshalled as for
the real library. Streams run in order, an operation runs once all its ranks have reached it, and
`Simulator.run` reports when nothing more can run: a deadlock on a GPU is a deadlock here.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_void_p
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from unit.devices.device_model import Entry, FakeStream, FakeStreams, Machine, Shared
from unit.devices.race_detector import Range

__all__ = ("FakeStreams", "Simulator")
MOST_ENTRIES = 1024  # in a stream; CUDA's launches wait then
DTYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    4: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}


class CUniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


# nccl.h, version 2.14, and ncclCommRevoke of 2.29: results and arguments
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (c_int, POINTER(c_int)),
    "ncclGetErrorString": (c_void_p, c_int),
    "ncclGetLastError": (c_void_p, c_void_p),
    "ncclGetUniqueId": (c_int, POINTER(CUniqueId)),
    "ncclCommInitRank": (c_int, POINTER(c_void_p), c_int, CUniqueId, c_int),
    "ncclCommFinalize": (c_int, c_void_p),
    "ncclCommDestroy": (c_int, c_void_p),
    "ncclCommAbort": (c_int, c_void_p),
    "ncclCommRevoke": (c_int, c_void_p, c_int),
    "ncclCommGetAsyncError": (c_int, c_void_p, POINTER(c_int)),
    "ncclAllReduce": (c_int, c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclReduce": (c_int, c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_int, c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllGather": (c_int, c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "ncclReduceScatter": (c_int, c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclSend": (c_int, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_int, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclGroupStart": (c_int,),
    "ncclGroupEnd": (c_int,),
}


@dataclass(eq=False)
class Task:
    """One NCCL call: its name and arguments without communicator and stream.

    `turn` pairs it with the other ranks' calls: the n-th collective of a communicator, or the n-th message of
    a direction.
    """

    comm: Comm
    name: str
    args: tuple[Any, ...]
    turn: tuple[Any, ...]
    unit: Unit | None = None

    def ranges(self) -> tuple[list[Range], list[Range]]:
        """Return the memory that the task reads and writes on its rank."""
        size = self.comm.size

        def at(address: int | None, count: int, dtype: int) -> list[Range]:
            return [(address, address + count * DTYPES[dtype].itemsize)] if address else []

        if self.name in ("Send", "Recv"):
            place = at(*self.args[:3])
            return (place, []) if self.name == "Send" else ([], place)
        source, target, count, dtype = self.args[:4]
        read = at(source, count * (size if self.name == "ReduceScatter" else 1), dtype)
        written = at(target, count * (size if self.name == "AllGather" else 1), dtype)
        if self.name in ("Reduce", "Broadcast"):
            is_root = self.args[-1] == self.comm.rank
            reads, writes = (True, is_root) if self.name == "Reduce" else (is_root, True)
            return read if reads else [], written if writes else []
        return read, written


@dataclass(eq=False)
class Unit(Entry):
    """Calls that run together."""

    tasks: list[Task] = field(default_factory=list)


@dataclass(eq=False)
class Comm:
    """One rank's communicator. Tests may set `state` to an error."""

    handle: int
    identity: bytes
    size: int
    rank: int
    home: int  # the rank of the job
    state: int = 0
    connected: set[tuple[Any, ...]] = field(default_factory=set)
    later: list[Callable[[], object]] = field(default_factory=list)  # its pending work


class Simulator(Machine):
    """All ranks' communicators. `fails` maps a function's name to its result code.

    `blocked`: calls on the program's thread that may have waited for peers. `nonblocking`: the effect of
    NCCL_COMM_BLOCKING=0.
    """

    def __init__(self, version: int = 23203) -> None:
        super().__init__()
        self.version = version
        self.calls: list[tuple[Any, ...]] = []  # name, communicator's rank, arguments
        self.fails: dict[str, int] = {}
        self.last_error = b"the last error"
        self.blocked: list[str] = []
        self.nonblocking = False
        self.comms: dict[int, Comm] = {}
        self.members: dict[bytes, dict[int, Comm]] = defaultdict(dict)
        self.closed: list[tuple[str, int]] = []
        self._thread = threading.local()
        self._turns: dict[tuple[Any, ...], int] = defaultdict(int)
        self._posted: dict[tuple[Any, ...], Task] = {}
        self._texts: list[Any] = []

    def library(self, *without: str) -> Any:
        """Return an object to use as a CDLL; `without` names missing functions."""

        class Library:
            pass

        library = Library()
        for name, types in PROTOTYPES.items():
            if name not in without:
                setattr(library, name, CFUNCTYPE(*types)(self._handler(name)))
        return library

    def _handler(self, name: str) -> Any:
        method = getattr(self, f"_{name}", None)

        def call(*args: Any) -> int:
            with self.lock:
                if name in self.fails:
                    return self.fails[name]
                result: int = method(*args) if method is not None else self._post(name, *args)
                return result

        return call

    # -- texts, communicators ---------------------------------------------------------------------

    def _text(self, text: bytes) -> int:
        buffer = ctypes.create_string_buffer(text)
        self._texts.append(buffer)
        return ctypes.addressof(buffer)

    def _ncclGetVersion(self, version: Any) -> int:  # noqa: N802 - the library's names
        version[0] = self.version
        return 0

    def _ncclGetErrorString(self, code: int) -> int:  # noqa: N802
        return self._text(f"error {code}".encode())

    def _ncclGetLastError(self, comm: int) -> int:  # noqa: N802
        return self._text(self.last_error)

    def _ncclGetUniqueId(self, identity: Any) -> int:  # noqa: N802
        self._ids = getattr(self, "_ids", 0) + 1
        ctypes.memset(identity, self._ids, 128)
        return 0

    def _ncclCommInitRank(self, comm: Any, size: int, identity: CUniqueId, rank: int) -> int:  # noqa: N802
        key = bytes(identity)
        handle = 1000 + len(self.comms)
        if size > 1:
            self._may_wait("ncclCommInitRank")
        new = Comm(handle, key, size, rank, self.here())
        self.comms[handle] = self.members[key][rank] = new
        comm[0] = handle
        return self._when(new, lambda: None)

    def _ncclCommGetAsyncError(self, handle: int, state: Any) -> int:  # noqa: N802
        comm = self.comms[handle]
        state[0] = 7 if comm.later else comm.state
        if comm.later:
            comm.later.pop(0)()
        return 0

    def _when(self, comm: Comm, function: Callable[[], object]) -> int:
        """Do it, or return that it is in progress."""
        if not self.nonblocking:
            function()
            return 0
        comm.later.append(function)
        return 7

    def _may_wait(self, what: str) -> None:
        if not (self.in_background or self.nonblocking):
            self.blocked.append(what)

    def _close(self, how: str, handle: int) -> int:
        self.closed.append((how, handle))
        return 0

    def _ncclCommFinalize(self, handle: int) -> int:  # noqa: N802
        return self._when(self.comms[handle], lambda: self._close("finalize", handle))

    def _ncclCommDestroy(self, handle: int) -> int:  # noqa: N802
        return 4 if self.comms[handle].later else self._close("destroy", handle)

    def _ncclCommAbort(self, handle: int) -> int:  # noqa: N802
        return self._close("abort", handle)

    def _ncclCommRevoke(self, handle: int, flags: int) -> int:  # noqa: N802
        assert flags == 0, "the only flags that there are"
        return self._close("revoke", handle)

    # -- calls ------------------------------------------------------------------------------------

    @property
    def _grouped(self) -> list[tuple[FakeStream, Task]]:
        if not hasattr(self._thread, "grouped"):
            self._thread.grouped, self._thread.depth = [], 0
        grouped: list[tuple[FakeStream, Task]] = self._thread.grouped
        return grouped

    def _ncclGroupStart(self) -> int:  # noqa: N802
        self._grouped  # noqa: B018 - makes it
        self.calls.append(("GroupStart",))
        self._thread.depth += 1
        return 0

    def _ncclGroupEnd(self) -> int:  # noqa: N802
        self.calls.append(("GroupEnd",))
        self._thread.depth -= 1
        return self._flush() if self._thread.depth == 0 else 0

    def _post(self, name: str, *args: Any) -> int:
        comm, stream = self.comms[args[-2]], self.streams[args[-1] - 1]
        if comm.later:
            return 4
        kind, place = name.removeprefix("nccl"), args[:-2]
        if kind in ("Send", "Recv"):
            ends = (comm.rank, place[3]) if kind == "Send" else (place[3], comm.rank)
            key: tuple[Any, ...] = (comm.identity, *ends, kind)
        else:
            key = (comm.identity, comm.rank)
        self._turns[key] += 1
        task = Task(comm, kind, place, (*key, self._turns[key]))
        self.calls.append((task.name, comm.rank, *task.args))
        self.trace.append(task.name)
        self._grouped.append((stream, task))
        return self._flush() if self._thread.depth == 0 else 0

    def _flush(self) -> int:
        grouped, self._thread.grouped = self._grouped, []
        result = 0
        for stream in dict.fromkeys(stream for stream, _ in grouped):
            unit = Unit(stream, tasks=[task for other, task in grouped if other is stream])
            for task in unit.tasks:
                self._connect(task)
            if sum(not entry.done for entry in stream.entries[stream.at :]) > MOST_ENTRIES:
                self._may_wait("a full stream")
            result = self._when(unit.tasks[0].comm, partial(self._enqueue, stream, unit))
        return result

    def _connect(self, task: Task) -> None:
        """Connect ranks at the first use of an algorithm (chosen by size) or of a peer."""
        is_message = task.name in ("Send", "Recv")
        key = (task.name, task.args[3]) if is_message else (task.name, *task.args[2:])
        if key not in task.comm.connected and task.comm.size > 1:
            self._may_wait(f"{task.name} on rank {task.comm.rank}")
        task.comm.connected.add(key)

    def _enqueue(self, stream: FakeStream, unit: Unit) -> None:
        reads, writes = list[Range](), list[Range]()
        for task in unit.tasks:
            task.unit = unit
            self._posted[task.turn] = task
            for found, all_of_them in zip(task.ranges(), (reads, writes), strict=True):
                all_of_them.extend(found)
        self.detector.order(stream.number, self.host())
        self.detector.launch(stream.number, unit.tasks[0].name, reads, writes)
        stream.add(unit, tuple(task.name for task in unit.tasks))
        self.share(self._shared(unit.tasks[0].comm))

    def _shared(self, comm: Comm) -> Shared:
        """Return the calls of a communicator's ranks, for queries of their arrival."""
        members = self.members[comm.identity]
        is_known = len(members) == comm.size
        return Shared(comm.identity, frozenset(each.home for each in members.values()) if is_known else None)

    # -- running ----------------------------------------------------------------------------------

    def _partners(self, task: Task) -> list[Task | None]:
        """Return the calls that run together with one, in rank order; None for missing calls."""
        identity, *ends, number = task.turn
        if task.name not in ("Send", "Recv"):
            return [self._posted.get((identity, rank, number)) for rank in range(task.comm.size)]
        return [self._posted.get((identity, *ends[:2], kind, number)) for kind in ("Send", "Recv")]

    def matched(self, entry: Entry) -> Sequence[Entry] | None:
        if not isinstance(entry, Unit):
            return (entry,)
        found: dict[Unit, None] = {entry: None}
        todo = [entry]
        while todo:
            for task in todo.pop().tasks:
                for partner in self._partners(task):
                    if partner is None or partner.unit is None:
                        self.lacking = self._shared(task.comm)
                        return None
                    if partner.unit not in found:
                        found[partner.unit] = None
                        todo.append(partner.unit)
        if len({unit.stream for unit in found}) < len(found):
            self.lacking = Shared("anything")
            return None  # a call that waits for a later one of its own stream
        return sorted(found, key=lambda unit: unit.stream.cuda_stream)

    def execute(self, entries: Sequence[Entry]) -> None:
        ran = set[int]()
        for task in (task for entry in entries if isinstance(entry, Unit) for task in entry.tasks):
            if id(task) in ran:
                continue
            partners = [each for each in self._partners(task) if each is not None]
            ran.update(map(id, partners))
            if task.name in ("Send", "Recv"):
                _deliver(*partners)
            else:
                _execute(partners)
        super().execute(entries)


def _deliver(send: Task, recv: Task) -> None:
    address, count, dtype, _ = send.args
    target, expected, kind, _ = recv.args
    assert (expected, kind) == (count, dtype), "a message of another size than expected"
    ctypes.memmove(target, address, count * DTYPES[dtype].itemsize)


def memory(address: int, count: int, dtype: int) -> torch.Tensor:
    """`count` elements at `address`."""
    kind = DTYPES[dtype]
    return torch.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), dtype=kind)


def _reduced(parts: list[torch.Tensor], op: int) -> torch.Tensor:
    stacked = torch.stack(parts)
    if op == 4:
        return stacked.mean(0)
    functions = {0: torch.sum, 1: torch.prod, 2: torch.amax, 3: torch.amin}
    result: torch.Tensor = functions[op](stacked, 0)  # type: ignore[operator]
    return result.to(stacked.dtype)


def _execute(tasks: list[Task]) -> None:
    """Run one collective, given every rank's call, in rank order."""
    first = tasks[0]
    assert all(task.name == first.name and task.args[2:] == first.args[2:] for task in tasks), "calls differ"
    count, dtype, *rest = first.args[2:]
    size = len(tasks)
    if first.name == "Broadcast":
        parts = [memory(tasks[rest[0]].args[0], count, dtype).clone()]
    else:
        scale = size if first.name == "ReduceScatter" else 1
        parts = [memory(task.args[0], count * scale, dtype).clone() for task in tasks]
    for rank, task in enumerate(tasks):
        target = task.args[1]
        if first.name == "AllReduce" or (first.name == "Reduce" and rank == rest[1]):
            memory(target, count, dtype).copy_(_reduced(parts, rest[0]))
        elif first.name == "Broadcast":
            memory(target, count, dtype).copy_(parts[0])
        elif first.name == "AllGather":
            memory(target, count * size, dtype).copy_(torch.cat(parts))
        elif first.name == "ReduceScatter":
            memory(target, count, dtype).copy_(_reduced(parts, rest[0]).view(size, count)[rank])
