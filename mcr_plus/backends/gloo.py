"""gloo, through torch's ProcessGroupGloo built on the job's own store.

The default process group of the program is neither needed nor touched. gloo runs operations on its own
threads; waiting ranks yield at once, because those threads need the cores.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from mcr_plus.backends.base import NATIVE, Availability, Backend, Channel, Poll, Start, Support
from mcr_plus.backends.emulation import local_reduce
from mcr_plus.core import c10d
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import REDUCING, ReduceOp, dtype_name
from mcr_plus.core.message import Message, Signature
from mcr_plus.errors import OrderMismatch, Unsupported
from mcr_plus.rendezvous.network import host_address
from mcr_plus.rendezvous.world import World

# Dtypes that gloo reduces; others are moved as bytes, and every rank reduces them in the same order.
_REDUCES: Final = (
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
_SLACK: Final = timedelta(seconds=30)  # gloo's own timeout must not expire before ours

_EMULATIONS: Final = {
    "reduce_scatter": "all_to_all, then each rank reduces its part",
    "reduce_scatter_v": "all_to_all_v, then each rank reduces its part",
    "all_gather_v": "all_to_all_v of the same tensor to all ranks",
    "gather_v": "all_to_all_v with nothing for ranks other than the root",
    "scatter_v": "all_to_all_v with nothing from ranks other than the root",
}


def _available() -> bool:
    return dist.is_available() and dist.is_gloo_available()


class GlooBackend(Backend):
    """One device (loopback on a single host) shared by all groups of the job."""

    name = "gloo"
    on_stream = False
    has_algorithms = False
    spins = 1

    def __init__(self, world: World) -> None:
        self._world = world
        self._timeout = timedelta(seconds=world.timeout) + _SLACK
        self._groups: list[Any] = []
        address = "127.0.0.1" if world.single_host else host_address()
        self._device: Any = c10d.ProcessGroupGloo.create_device(hostname=address)

    @classmethod
    def library_version(cls) -> str:
        """The version of torch: gloo has none of its own."""
        return f"gloo of torch {torch.__version__.partition('+')[0]}"

    @classmethod
    def availability(cls) -> Availability:
        """gloo comes with torch on Linux and macOS."""
        if _available():
            return Availability(True, f"torch {torch.__version__}")
        return Availability(
            False,
            reason="this build of torch has no gloo",
            remedy="install a build of torch with torch.distributed (any Linux wheel)",
        )

    @classmethod
    def supports(cls, signature: Signature) -> Support:
        """All operations; those that gloo lacks are built from all_to_all or all_gather."""
        if signature.algorithm is not None:
            return Support("no", f"algorithm '{signature.algorithm}'; gloo has none to choose from")
        if signature.device != "cpu":
            return Support("emulated", "staged through host memory")
        kind = signature.kind
        if kind in ("all_reduce", "reduce"):
            if _gloo_reduces(signature):
                native = signature.reduce_op != "AVG"
                return NATIVE if native else Support("emulated", "SUM, then divided by the number of ranks")
            return Support("emulated", "all_gather, then each rank reduces in rank order")
        how = _EMULATIONS.get(kind)
        return Support("emulated", how) if how else NATIVE

    @classmethod
    def descriptors(cls, size: int) -> int:
        """See `Backend`: a connection to each peer."""
        return size - 1

    def open(self, group: Group) -> Channel:
        """See `Backend.open`."""
        if self._world.store is None:
            raise Unsupported("backend gloo needs the store of a running job")
        store = c10d.PrefixStore(f"gloo/{group.name}", self._world.store_of(group))
        process_group = c10d.gloo_group(
            store, group.rank, group.size, devices=[self._device], threads=2, timeout=self._timeout
        )
        self._groups.append(process_group)
        return _GlooChannel(process_group, group, self._timeout, self._groups)

    def progress(self) -> None:
        """No-op: gloo has threads of its own."""

    def close(self, clean: bool) -> None:
        """See `Backend.close`.

        Destroying a group joins its threads. With a stuck operation that would block until gloo's own
        timeout, so the groups are never destroyed then, not even at the end of the interpreter.
        """
        if not clean:
            self.abandon()
        self._groups.clear()
        self._device = None  # its thread and its files go with the last group
        del self._world  # the end of the process uses this object, but not the closed world

    def abandon(self) -> None:
        """Never destroy the groups: also in a forked child, which does not have their threads."""
        for group in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        _stuck.extend(self._groups)

    def before_exit(self) -> None:
        """Keep the end of the process from becoming an abort.

        A thread that still waits for a peer wakes up when the peer closes its connection. If the interpreter
        ends at that moment, the thread is killed inside C++ code, for which std::terminate aborts the process
        (pytorch #190489). With another handler such a thread sleeps until the process ends. Also, gloo's own
        threads continue while C++ libraries destroy their globals, which sometimes corrupts the heap and
        makes the process spin for ever: so the process ends at once after the interpreter.
        """
        if _stuck:
            try:
                cxx, libc = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
                cxx._ZSt13set_terminatePFvvE(ctypes.cast(libc.pause, ctypes.c_void_p))
                libc.fflush(None)
                libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)  # called as _exit(status)
            except (OSError, AttributeError):
                pass  # other C and C++ libraries: an abort is possible


_stuck: list[Any] = []


def _gloo_reduces(signature: Signature) -> bool:
    return signature.dtype in _REDUCES


def _opts(options: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(options, name, value)
    return options


_NATIVE_OP: Final[dict[str, Any]] = {
    "SUM": c10d.ReduceOp.SUM,
    "AVG": c10d.ReduceOp.SUM,
    "PRODUCT": c10d.ReduceOp.PRODUCT,
    "MIN": c10d.ReduceOp.MIN,
    "MAX": c10d.ReduceOp.MAX,
    "BAND": c10d.ReduceOp.BAND,
    "BOR": c10d.ReduceOp.BOR,
    "BXOR": c10d.ReduceOp.BXOR,
}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as flat bytes, as gloo can move every dtype."""
    # Not reshape(-1): a contiguous tensor of one element may have any stride, which `view` refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _GlooChannel(Channel):
    def __init__(self, process_group: Any, group: Group, timeout: timedelta, open_ones: list[Any]) -> None:
        # None once closed. No other object keeps gloo's group alive: the last reference destroys it.
        self._pg: Any = process_group
        self._open_ones = open_ones
        self._running: set[object] = set()  # operations not known to be complete
        self._group = group
        self._timeout = timeout
        self._sent: dict[tuple[int | None, int], int] = {}  # messages so far, by peer and tag

    def close(self) -> None:
        self._open_ones.remove(self._pg)
        self._pg = None

    def release(self) -> None:
        """Close it while other ranks may still use theirs: gloo destroys a group without them.

        Destroying waits for pending operations, so with any left the group stays until the job ends.
        """
        if not self._running:
            self.close()

    def _poll(self, work: Any, finish: Callable[[], None] | None = None) -> Poll:
        """Return the poll of a c10d work; `wait` on a finished one only raises its error."""
        running = self._running
        running.add(work)

        def poll() -> bool:
            if not work.is_completed():
                return False
            running.discard(work)
            work.wait()
            if finish is not None:
                finish()
            return True

        return poll

    def bind(self, signature: Signature) -> Start:
        if signature.kind in REDUCING:
            binder = getattr(self, f"_{signature.kind}")
            start: Start = binder(signature, signature.reduce_op)
            return start
        bound: Start = getattr(self, f"_{signature.kind}")(signature)
        return bound

    # -- reductions -------------------------------------------------------------------------------

    def _all_reduce(self, signature: Signature, op: ReduceOp) -> Start:
        if not _gloo_reduces(signature):
            return self._gather_and_reduce(signature, op, root=None)
        options = _opts(c10d.AllreduceOptions(), reduceOp=_NATIVE_OP[op], timeout=self._timeout)
        size = self._group.size

        def start(message: Message) -> Poll:
            out = message.outputs[0]
            if out is not message.inputs[0]:
                out.copy_(message.inputs[0])
            work = self._pg.allreduce([out.view(-1)], options)
            return self._poll(work, (lambda: _divide(out, size)) if op == "AVG" else None)

        return start

    def _reduce(self, signature: Signature, op: ReduceOp) -> Start:
        root = signature.root or 0
        if not _gloo_reduces(signature):
            return self._gather_and_reduce(signature, op, root)
        options = _opts(
            c10d.ReduceOptions(), reduceOp=_NATIVE_OP[op], rootRank=root, rootTensor=0, timeout=self._timeout
        )
        size, is_root = self._group.size, self._group.rank == root

        def start(message: Message) -> Poll:
            value = message.inputs[0]
            # gloo uses the tensors of other ranks as scratch; our operations preserve their input.
            target = message.outputs[0] if is_root else value.clone()
            if is_root and target is not value:
                target.copy_(value)
            work = self._pg.reduce([target.view(-1)], options)
            return self._poll(work, (lambda: _divide(target, size)) if op == "AVG" and is_root else None)

        return start

    def _gather_and_reduce(self, signature: Signature, op: ReduceOp, root: int | None) -> Start:
        assert signature.dtype is not None
        reduce_parts = local_reduce(op, signature.dtype)
        size = self._group.size
        wanted = root is None or root == self._group.rank

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0] if wanted else None
            parts = value.new_empty((size, value.numel()))
            work = self._gather_bytes(parts, value)

            def finish() -> None:
                if out is not None:
                    reduce_parts(parts, out.view(-1))

            return self._poll(work, finish)

        return start

    def _gather_bytes(self, output: torch.Tensor, value: torch.Tensor) -> Any:
        options = _opts(c10d.AllgatherOptions(), timeout=self._timeout)
        return self._pg._allgather_base(_bytes(output), _bytes(value), options)

    def _reduce_scatter(self, signature: Signature, op: ReduceOp) -> Start:
        assert signature.dtype is not None
        reduce_parts, size = local_reduce(op, signature.dtype), self._group.size

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            parts = torch.empty_like(value)
            work = self._exchange(parts, value, [], [])
            return self._poll(work, lambda: reduce_parts(parts.view(size, -1), out.view(-1)))

        return start

    def _reduce_scatter_v(self, signature: Signature, op: ReduceOp) -> Start:
        assert signature.dtype is not None
        reduce_parts, size, rank = local_reduce(op, signature.dtype), self._group.size, self._group.rank

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            counts = list(message.input_counts or ())
            parts = value.new_empty(size * counts[rank])
            work = self._exchange(parts, value, [counts[rank]] * size, counts)
            return self._poll(work, lambda: reduce_parts(parts.view(size, -1), out.view(-1)))

        return start

    # -- data movement ----------------------------------------------------------------------------

    def _exchange(
        self, output: torch.Tensor, value: torch.Tensor, output_counts: list[int], input_counts: list[int]
    ) -> Any:
        """all_to_all of flat tensors, counts in elements; empty lists mean equal parts."""
        width = value.element_size()
        return self._pg.alltoall_base(
            _bytes(output),
            _bytes(value),
            [count * width for count in output_counts],
            [count * width for count in input_counts],
            _opts(c10d.AllToAllOptions(), timeout=self._timeout),
        )

    def _broadcast(self, signature: Signature) -> Start:
        root = signature.root or 0
        options = _opts(c10d.BroadcastOptions(), rootRank=root, rootTensor=0, timeout=self._timeout)

        def start(message: Message) -> Poll:
            return self._poll(self._pg.broadcast([_bytes(message.outputs[0])], options))

        return start

    def _all_gather(self, signature: Signature) -> Start:  # noqa: ARG002 - binders share a shape
        def start(message: Message) -> Poll:
            return self._poll(self._gather_bytes(message.outputs[0], message.inputs[0]))

        return start

    def _all_gather_v(self, signature: Signature) -> Start:  # noqa: ARG002
        size = self._group.size

        def start(message: Message) -> Poll:
            value, counts = message.inputs[0].view(-1), list(message.output_counts or ())
            copies = value.repeat(size)
            return self._poll(self._exchange(message.outputs[0], copies, counts, [value.numel()] * size))

        return start

    def _all_to_all(self, signature: Signature) -> Start:  # noqa: ARG002
        def start(message: Message) -> Poll:
            return self._poll(self._exchange(message.outputs[0], message.inputs[0], [], []))

        return start

    def _all_to_all_v(self, signature: Signature) -> Start:  # noqa: ARG002
        def start(message: Message) -> Poll:
            output_counts, input_counts = list(message.output_counts or ()), list(message.input_counts or ())
            return self._poll(
                self._exchange(message.outputs[0], message.inputs[0], output_counts, input_counts)
            )

        return start

    def _gather(self, signature: Signature) -> Start:
        root, size = signature.root or 0, self._group.size
        options = _opts(c10d.GatherOptions(), rootRank=root, timeout=self._timeout)
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            targets = [list(_bytes(message.outputs[0]).chunk(size))] if is_root else []
            return self._poll(self._pg.gather(targets, [_bytes(message.inputs[0])], options))

        return start

    def _scatter(self, signature: Signature) -> Start:
        root, size = signature.root or 0, self._group.size
        options = _opts(c10d.ScatterOptions(), rootRank=root, timeout=self._timeout)
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            sources = [list(_bytes(message.inputs[0]).chunk(size))] if is_root else []
            return self._poll(self._pg.scatter([_bytes(message.outputs[0])], sources, options))

        return start

    def _gather_v(self, signature: Signature) -> Start:
        root, size, rank = signature.root or 0, self._group.size, self._group.rank

        def start(message: Message) -> Poll:
            value = message.inputs[0].view(-1)
            counts = list(message.output_counts or ()) if rank == root else [0] * size
            out = message.outputs[0] if rank == root else value.new_empty(0)
            to_root = [value.numel() if peer == root else 0 for peer in range(size)]
            return self._poll(self._exchange(out, value, counts, to_root))

        return start

    def _scatter_v(self, signature: Signature) -> Start:
        root, size, rank = signature.root or 0, self._group.size, self._group.rank

        def start(message: Message) -> Poll:
            out = message.outputs[0].view(-1)
            counts = list(message.input_counts or ()) if rank == root else [0] * size
            value = message.inputs[0] if rank == root else out.new_empty(0)
            from_root = [out.numel() if peer == root else 0 for peer in range(size)]
            return self._poll(self._exchange(out, value, from_root, counts))

        return start

    def _send(self, signature: Signature) -> Start:
        sent, running = self._sent, self._running

        def start(message: Message) -> Poll:
            value, peer, tag = message.inputs[0], message.peer, message.match_tag
            number = sent[peer, tag] = sent.get((peer, tag), 0) + 1
            send = self._pg.send
            works = [send([_header(signature, value, number)], peer, tag * _SLOTS)]
            if value.numel():
                works.append(send([_bytes(value)], peer, _slot(tag, number)))
            return _WatchedSend(works, running)

        return start

    def _recv(self, signature: Signature) -> Start:
        group, running = self._group, self._running

        def start(message: Message) -> Poll:
            return _WatchedReceive(self._pg, group, signature, message, running)

        return start

    def _barrier(self, signature: Signature) -> Start:  # noqa: ARG002
        options = _opts(c10d.BarrierOptions(), timeout=self._timeout)

        def start(message: Message) -> Poll:  # noqa: ARG001
            return self._poll(self._pg.barrier(options))

        return start


class _Watchers:
    """Threads that each block on one gloo work; idle ones are reused.

    gloo's sends and receives cannot be polled, and a wait with a timeout closes the connection when it
    expires. The data moves without these threads, which only detect completion.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Callable[[], None]]] = []

    def run(self, task: Callable[[], None]) -> None:
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            # A daemon, so that a work that never ends does not keep the process alive.
            Thread(target=self._work, args=(inbox,), name="mcr-gloo-watch", daemon=True).start()
        inbox.put(task)

    def _work(self, inbox: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            inbox.get()()
            self._idle.append(inbox)


_watchers = _Watchers()


class _Watched:
    """The poll of a send or receive. The first poll starts the watching thread."""

    def __init__(self, running: set[object]) -> None:
        self._state: Literal["new", "watched", "done"] = "new"
        self._error: Exception | None = None
        self._running = running
        running.add(self)

    def __call__(self) -> bool:
        if self._state == "new":
            self._state = "watched"
            _watchers.run(self._watch)
        if self._state != "done":
            return False
        if self._error is not None:
            raise self._error
        return True

    def _watch(self) -> None:
        try:
            self._finish()
        except Exception as error:
            self._error = error
        self._running.discard(self)
        self._state = "done"

    def _finish(self) -> None:
        raise NotImplementedError


class _WatchedSend(_Watched):
    """The poll of a message and of the header sent before it."""

    def __init__(self, works: list[Any], running: set[object]) -> None:
        super().__init__(running)
        self._works = works

    def _finish(self) -> None:
        for work in self._works:
            work.wait()


class _WatchedReceive(_Watched):
    """Receives the header first: gloo accepts any dtype, and aborts if a message is too long."""

    source: int
    arriving = False  # the header has arrived

    def __init__(
        self, pg: Any, group: Group, signature: Signature, message: Message, running: set[object]
    ) -> None:
        super().__init__(running)
        self._pg: Any = pg
        self._group = group
        self._signature = signature
        self._target = message.outputs[0]
        self._tag = message.match_tag
        self._header = torch.empty(_HEADER.size, dtype=torch.uint8)
        header, slot = [self._header], self._tag * _SLOTS
        if message.peer is None:
            self._work = pg.recv_anysource(header, slot)
        else:
            self.source = message.peer
            self._work = pg.recv(header, message.peer, slot)
        self()  # the message must be received even without polls

    def _finish(self) -> None:
        pg, self._pg = self._pg, None  # a handle kept by the program must not keep gloo's group alive
        self._work.wait()
        self.arriving = True
        if not hasattr(self, "source"):
            self.source = self._work._source_rank()
        number, nbytes, dtype, text = _HEADER.unpack(self._header.numpy().tobytes())
        target, group = self._target, self._group
        if (nbytes, dtype) != (target.nbytes, _dtype_text(target)):
            raise OrderMismatch(
                f"message #{number} with tag {self._tag} in group '{group.name}': rank {self.source} issued "
                f"{_text(text)} ({nbytes} bytes); rank {group.rank} issued {self._signature.describe()} "
                f"({target.nbytes} bytes)"
            )
        if nbytes:
            pg.recv([_bytes(target)], self.source, _slot(self._tag, number)).wait()


# A header: number of the message between two ranks under a tag, bytes, dtype, description.
_HEADER: Final = struct.Struct("<QQ16s192s")
_SLOTS: Final = 2**7  # gloo's tags per tag of ours: one for headers, the others for messages in turn


def _slot(tag: int, number: int) -> int:
    """Return gloo's tag of message `number`; receives may read their headers in any order."""
    return tag * _SLOTS + 1 + number % (_SLOTS - 1)


def _header(signature: Signature, value: torch.Tensor, number: int) -> torch.Tensor:
    text = signature.describe().encode()[:192]
    return torch.frombuffer(
        bytearray(_HEADER.pack(number, value.nbytes, _dtype_text(value), text)), dtype=torch.uint8
    )


def _dtype_text(tensor: torch.Tensor) -> bytes:
    return dtype_name(tensor.dtype).encode().ljust(16, b"\0")


def _text(record: bytes) -> str:
    return record.rstrip(b"\0").decode(errors="replace")


def _divide(tensor: torch.Tensor, size: int) -> None:
    tensor.div_(size)
