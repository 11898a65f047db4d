"""gloo, through torch's ProcessGroupGloo built on the job's own store.

The user's default process group is neither needed nor touched. gloo runs operations on its own threads;
waiting ranks give way at once, because those threads need the cores.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from mcr_plus.backends.fold import fold
from mcr_plus.backends.local import done
from mcr_plus.errors import Unsupported
from mcr_plus.interfaces import NATIVE, Availability, Channel, Poll, Start, Support, World
from mcr_plus.launch.network import host_address
from mcr_plus.message import REDUCING, Group, Message, ReduceOp, Signature

# What gloo reduces itself; the rest is moved as bytes and folded by every rank in the same order.
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
_SLACK: Final = timedelta(seconds=30)  # gloo's own timeout must not come before ours

_EMULATIONS: Final = {
    "reduce_scatter": "all_to_all, then each rank folds its part",
    "reduce_scatter_v": "all_to_all_v, then each rank folds its part",
    "all_gather_v": "all_to_all_v of the same tensor to all ranks",
    "gather_v": "all_to_all_v with nothing for ranks other than the root",
    "scatter_v": "all_to_all_v with nothing from ranks other than the root",
}


def _available() -> bool:
    return dist.is_available() and dist.is_gloo_available()


class GlooBackend:
    """One device (loopback on a single host) shared by all groups of the job."""

    name = "gloo"
    on_stream = False
    spins = 1

    def __init__(self, world: World) -> None:
        self._world = world
        self._timeout = timedelta(seconds=world.timeout) + _SLACK
        self._groups: list[Any] = []
        address = "127.0.0.1" if world.single_host else host_address()
        self._device = dist.ProcessGroupGloo.create_device(hostname=address)

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
        """Everything on CPU tensors; what gloo lacks is built from all_to_all or all_gather."""
        if signature.algorithm is not None:
            return Support("no", f"algorithm '{signature.algorithm}'; gloo has none to choose from")
        if signature.device != "cpu":
            return Support("emulated", "staged through host memory")
        kind = signature.kind
        if kind in ("all_reduce", "reduce"):
            if _gloo_reduces(signature):
                native = signature.reduce_op != "AVG"
                return NATIVE if native else Support("emulated", "SUM, then divided by the number of ranks")
            return Support("emulated", "all_gather, then each rank folds in rank order")
        how = _EMULATIONS.get(kind)
        return Support("emulated", how) if how else NATIVE

    def open(self, group: Group) -> Channel:
        """See `Backend.open`."""
        if self._world.store is None:
            raise Unsupported("backend gloo needs the store of a running job")
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._timeout = self._timeout
        options._threads = 2
        store = dist.PrefixStore(f"gloo/{group.name}", self._world.store)
        process_group = dist.ProcessGroupGloo(store, group.rank, group.size, options)
        self._groups.append(process_group)
        return _GlooChannel(process_group, group, self._timeout)

    def progress(self) -> None:
        """gloo's threads need no help."""

    def close(self, clean: bool) -> None:
        """See `Backend.close`.

        Destroying a group joins its threads. With an operation stuck that would block until gloo's own
        timeout, so then the groups are left to the end of the process.
        """
        if not clean:
            _immortal.extend(self._groups)
        self._groups.clear()


_immortal: list[Any] = []


def _gloo_reduces(signature: Signature) -> bool:
    return signature.dtype in _REDUCES


def _opts(options: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(options, name, value)
    return options


_NATIVE_OP: Final[dict[str, Any]] = {
    "SUM": dist.ReduceOp.SUM,
    "AVG": dist.ReduceOp.SUM,
    "PRODUCT": dist.ReduceOp.PRODUCT,
    "MIN": dist.ReduceOp.MIN,
    "MAX": dist.ReduceOp.MAX,
    "BAND": dist.ReduceOp.BAND,
    "BOR": dist.ReduceOp.BOR,
    "BXOR": dist.ReduceOp.BXOR,
}


def _poll(work: Any, finish: Callable[[], None] | None = None) -> Poll:
    """Completion of a c10d work; `wait` on a finished one only raises its error."""

    def poll() -> bool:
        if not work.is_completed():
            return False
        work.wait()
        if finish is not None:
            finish()
        return True

    return poll


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as flat bytes: gloo moves every dtype this way."""
    # Not reshape(-1): a contiguous tensor of one element may have any stride, which `view` refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _GlooChannel:
    def __init__(self, process_group: Any, group: Group, timeout: timedelta) -> None:
        self._pg = process_group
        self._group = group
        self._timeout = timeout

    def close(self) -> None:
        self._pg = None

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
            return self._gather_and_fold(signature, op, root=None)
        options = _opts(c10d.AllreduceOptions(), reduceOp=_NATIVE_OP[op], timeout=self._timeout)
        call, size = self._pg.allreduce, self._group.size

        def start(message: Message) -> Poll:
            out = message.outputs[0]
            if out is not message.inputs[0]:
                out.copy_(message.inputs[0])
            work = call([out.view(-1)], options)
            return _poll(work, (lambda: _divide(out, size)) if op == "AVG" else None)

        return start

    def _reduce(self, signature: Signature, op: ReduceOp) -> Start:
        root = signature.root or 0
        if not _gloo_reduces(signature):
            return self._gather_and_fold(signature, op, root)
        options = _opts(
            c10d.ReduceOptions(), reduceOp=_NATIVE_OP[op], rootRank=root, rootTensor=0, timeout=self._timeout
        )
        call, size, is_root = self._pg.reduce, self._group.size, self._group.rank == root

        def start(message: Message) -> Poll:
            value = message.inputs[0]
            # gloo uses the tensor of other ranks as scratch; ours keep their input.
            target = message.outputs[0] if is_root else value.clone()
            if is_root and target is not value:
                target.copy_(value)
            work = call([target.view(-1)], options)
            return _poll(work, (lambda: _divide(target, size)) if op == "AVG" and is_root else None)

        return start

    def _gather_and_fold(self, signature: Signature, op: ReduceOp, root: int | None) -> Start:
        assert signature.dtype is not None
        reduce_parts = fold(op, signature.dtype)
        size = self._group.size
        wanted = root is None or root == self._group.rank

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0] if wanted else None
            parts = value.new_empty((size, value.numel()))
            work = self._gather_bytes(parts, value)

            def finish() -> None:
                if out is not None:
                    reduce_parts(parts, out.view(-1))

            return _poll(work, finish)

        return start

    def _gather_bytes(self, output: torch.Tensor, value: torch.Tensor) -> Any:
        options = _opts(c10d.AllgatherOptions(), timeout=self._timeout)
        return self._pg._allgather_base(_bytes(output), _bytes(value), options)

    def _reduce_scatter(self, signature: Signature, op: ReduceOp) -> Start:
        assert signature.dtype is not None
        reduce_parts, size = fold(op, signature.dtype), self._group.size

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            parts = torch.empty_like(value)
            work = self._exchange(parts, value, [], [])
            return _poll(work, lambda: reduce_parts(parts.view(size, -1), out.view(-1)))

        return start

    def _reduce_scatter_v(self, signature: Signature, op: ReduceOp) -> Start:
        assert signature.dtype is not None
        reduce_parts, size, rank = fold(op, signature.dtype), self._group.size, self._group.rank

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            counts = list(message.input_counts or ())
            parts = value.new_empty(size * counts[rank])
            work = self._exchange(parts, value, [counts[rank]] * size, counts)
            return _poll(work, lambda: reduce_parts(parts.view(size, -1), out.view(-1)))

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
        call = self._pg.broadcast

        def start(message: Message) -> Poll:
            return _poll(call([_bytes(message.outputs[0])], options))

        return start

    def _all_gather(self, signature: Signature) -> Start:  # noqa: ARG002 - binders share a shape
        def start(message: Message) -> Poll:
            return _poll(self._gather_bytes(message.outputs[0], message.inputs[0]))

        return start

    def _all_gather_v(self, signature: Signature) -> Start:  # noqa: ARG002
        size = self._group.size

        def start(message: Message) -> Poll:
            value, counts = message.inputs[0].view(-1), list(message.output_counts or ())
            copies = value.repeat(size)
            return _poll(self._exchange(message.outputs[0], copies, counts, [value.numel()] * size))

        return start

    def _all_to_all(self, signature: Signature) -> Start:  # noqa: ARG002
        def start(message: Message) -> Poll:
            return _poll(self._exchange(message.outputs[0], message.inputs[0], [], []))

        return start

    def _all_to_all_v(self, signature: Signature) -> Start:  # noqa: ARG002
        def start(message: Message) -> Poll:
            output_counts, input_counts = list(message.output_counts or ()), list(message.input_counts or ())
            return _poll(self._exchange(message.outputs[0], message.inputs[0], output_counts, input_counts))

        return start

    def _gather(self, signature: Signature) -> Start:
        root, size = signature.root or 0, self._group.size
        options = _opts(c10d.GatherOptions(), rootRank=root, timeout=self._timeout)
        call, is_root = self._pg.gather, self._group.rank == root

        def start(message: Message) -> Poll:
            targets = [list(_bytes(message.outputs[0]).chunk(size))] if is_root else []
            return _poll(call(targets, [_bytes(message.inputs[0])], options))

        return start

    def _scatter(self, signature: Signature) -> Start:
        root, size = signature.root or 0, self._group.size
        options = _opts(c10d.ScatterOptions(), rootRank=root, timeout=self._timeout)
        call, is_root = self._pg.scatter, self._group.rank == root

        def start(message: Message) -> Poll:
            sources = [list(_bytes(message.inputs[0]).chunk(size))] if is_root else []
            return _poll(call([_bytes(message.outputs[0])], sources, options))

        return start

    def _gather_v(self, signature: Signature) -> Start:
        root, size, rank = signature.root or 0, self._group.size, self._group.rank

        def start(message: Message) -> Poll:
            value = message.inputs[0].view(-1)
            counts = list(message.output_counts or ()) if rank == root else [0] * size
            out = message.outputs[0] if rank == root else value.new_empty(0)
            to_root = [value.numel() if peer == root else 0 for peer in range(size)]
            return _poll(self._exchange(out, value, counts, to_root))

        return start

    def _scatter_v(self, signature: Signature) -> Start:
        root, size, rank = signature.root or 0, self._group.size, self._group.rank

        def start(message: Message) -> Poll:
            out = message.outputs[0].view(-1)
            counts = list(message.input_counts or ()) if rank == root else [0] * size
            value = message.inputs[0] if rank == root else out.new_empty(0)
            from_root = [out.numel() if peer == root else 0 for peer in range(size)]
            return _poll(self._exchange(out, value, from_root, counts))

        return start

    def _send(self, signature: Signature) -> Start:  # noqa: ARG002
        call = self._pg.send

        def start(message: Message) -> Poll:
            return _Watched(call([_bytes(message.inputs[0])], message.peer, message.match_tag))

        return start

    def _recv(self, signature: Signature) -> Start:  # noqa: ARG002
        pg = self._pg

        def start(message: Message) -> Poll:
            target = [_bytes(message.outputs[0])]
            if message.peer is not None:
                return _Watched(pg.recv(target, message.peer, message.match_tag))
            return _WatchedAnySource(pg.recv_anysource(target, message.match_tag))

        return start

    def _barrier(self, signature: Signature) -> Start:  # noqa: ARG002
        options = _opts(c10d.BarrierOptions(), timeout=self._timeout)
        call = self._pg.barrier

        def start(message: Message) -> Poll:  # noqa: ARG001
            return _poll(call(options))

        return start


class _Watchers:
    """Threads that each block on one gloo work; idle ones are used again.

    gloo's sends and receives cannot be asked whether they are done, and a wait with a timeout closes the
    connection when it expires. The data moves without these threads: they only notice.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Callable[[], None]]] = []

    def run(self, task: Callable[[], None]) -> None:
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            # A daemon: a work that never ends must not keep the process.
            Thread(target=self._work, args=(inbox,), name="mcr-gloo-watch", daemon=True).start()
        inbox.put(task)

    def _work(self, inbox: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            inbox.get()()
            self._idle.append(inbox)


_watchers = _Watchers()


class _Watched:
    """Poll of a send or receive. The watching thread is started by the first poll."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._state: Literal["new", "watched", "done"] = "new"
        self._error: Exception | None = None

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
        self._state = "done"

    def _finish(self) -> None:
        self._work.wait()


class _WatchedAnySource(_Watched):
    """A receive from whoever sends first."""

    source: int

    def _finish(self) -> None:
        self._work.wait()
        self.source = self._work._source_rank()


def _divide(tensor: torch.Tensor, size: int) -> None:
    tensor.div_(size)
