"""A group of ranks in gloo: its operations, native or built from others."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Set
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch

from mcr_plus.backends.base import BlockingPoll, Channel, Corrupted, Poll, Start
from mcr_plus.backends.emulation import divide, local_reduce
from mcr_plus.backends.gloo.keys import compares_keys, exchanged, keyed
from mcr_plus.backends.gloo.messages import SLOTS, WatchedReceive, WatchedSend, bytes_of, parts_of, slot_of
from mcr_plus.backends.gloo.swap import Swaps, swaps, tag_of
from mcr_plus.core import c10d
from mcr_plus.core.buffers import Pool
from mcr_plus.core.deadline import Deadline
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import REDUCING, ReduceOp
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.sockets import Sockets, shut_down, torn, unacknowledged
from mcr_plus.core.threads import all_wait

# Dtypes that gloo reduces. Other dtypes are moved as bytes, and every rank reduces them in the same order.
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


_ASLEEP: Final = 0.03  # s for which threads must be seen waiting to count as idle
_UNACKNOWLEDGED: Final = 0.6  # s; TCP retransmits after 0.2 and 0.6 s


def gloo_reduces(signature: Signature) -> bool:
    """Return whether gloo reduces the dtype of a signature."""
    return signature.dtype in _REDUCES


def _opts(options: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(options, name, value)
    return options


class _Started(BlockingPoll):
    """Poll of a gloo collective."""

    __slots__ = ("_finish", "_running", "_work")

    def __init__(self, work: Any, running: set[object], finish: Callable[[], None] | None) -> None:
        self._work, self._running, self._finish = work, running, finish

    def __call__(self) -> bool:
        work = self._work
        if not work.is_completed():
            return False
        self._running.discard(work)
        work.wait()  # only raises its error
        if self._finish is not None:
            self._finish()
        return True

    def block(self, seconds: float) -> None:
        """See `BlockingPoll`. gloo waits on a condition; its timeout error does not affect the operation."""
        with contextlib.suppress(Exception):
            self._work.wait(timedelta(milliseconds=max(1, round(1e3 * seconds))))  # 0 would mean no limit


class GlooChannel(Channel):
    """The operations of a gloo group."""

    def __init__(
        self,
        process_group: Any,
        group: Group,
        timeout: timedelta,
        open_ones: list[GlooChannel],
        connections: Sockets,
        workers: Set[str],
        pool: Pool,
        hosts: int = 1,
    ) -> None:
        """`open_ones`: the backend's open channels.

        `connections`: connections to the peers. `workers`: threads, including all threads that run
        operations. `pool`: memory for received data that is not a result. `hosts`: number of hosts of the
        ranks.
        """
        # None once closed. Only this attribute keeps gloo's group alive: dropping the last reference destroys
        # it.
        self._pg: Any = process_group
        self._open_ones = open_ones
        self._running: set[object] = set()  # operations not known to be complete
        self._swaps = Swaps(group.rank, self._running)
        self._group, self._hosts, self._pool = group, hosts, pool
        self._timeout = timeout
        self._connections = connections
        self._workers = workers
        self._stopped = False
        self._asleep: Deadline | None = None  # time since which the workers have been waiting
        self._sent: dict[tuple[int | None, int], int] = {}  # number of messages so far, by peer and tag

    def close(self) -> None:
        """See `Channel`."""
        self._open_ones.remove(self)
        if self._stopped and not self.is_idle:
            self.keep()
            stuck.append(self)
            return
        self.drop()

    def drop(self) -> None:
        """Drop and so destroy gloo's group, which waits for operations, see `is_idle`."""
        self._pg = None

    @property
    def is_idle(self) -> bool:
        """Return whether gloo has ended all operations, with or without an error."""
        running = tuple(self._running)  # a copy: other threads may remove operations
        ended = {work for work in running if isinstance(work, c10d.Work) and work.is_completed()}
        self._running -= ended
        return not self._running

    def silent_failure(self) -> str:
        """See `Channel`.

        gloo waits for a peer behind a cut link until gloo's own timeout. After about one in 25 broken
        connections it also does so for an operation that is complete on all other ranks.
        """
        # If there are more connections, another thread has opened some meanwhile.
        if len(self._connections) == self._group.size - 1 and torn(self._connections):
            return "a connection to another rank is broken"
        peer = unacknowledged(self._connections, _UNACKNOWLEDGED)
        return f"the connection to {peer} has acknowledged nothing for {_UNACKNOWLEDGED:g} s" if peer else ""

    def stop_operations(self) -> bool:
        """See `Channel`.

        After a broken connection, gloo may let an operation wait for a message until its timeout. Once all
        connections are closed no message can arrive, and once all threads wait, arrived messages have been
        processed.
        """
        if not self._stopped:
            self._stopped = True
            with contextlib.suppress(RuntimeError, AttributeError):  # older versions of torch
                self._pg.abort()
            shut_down(self._connections)
        if self.is_idle:
            return True
        if not all_wait(self._workers):
            self._asleep = None
        elif self._asleep is None:
            self._asleep = Deadline(_ASLEEP)
        return self._asleep is not None and self._asleep.passed()

    def keep(self) -> None:
        """Keep gloo's group alive without other references, until `let_go`."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pg))

    def let_go(self) -> None:
        """Undo `keep`, and drop the group."""
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._pg))
        self.drop()

    def release(self) -> None:
        """Close this rank's part while other ranks may still use theirs: gloo destroys a group locally.

        Destroying waits for pending operations, so a group with pending operations stays until the job ends.
        """
        if not self._running or self._stopped:
            self.close()

    def _poll(self, work: Any, finish: Callable[[], None] | None = None) -> Poll:
        """Return the poll of a c10d work."""
        self._running.add(work)
        return _Started(work, self._running, finish)

    def bind(self, signature: Signature) -> Start:
        """See `Channel`."""
        if signature.kind in REDUCING:
            binder = getattr(self, f"_{signature.kind}")
            start: Start = binder(signature, signature.reduce_op)
            return start
        bound: Start = getattr(self, f"_{signature.kind}")(signature)
        return bound

    def bind_checked(self, signature: Signature, every: int, corrupted: Corrupted) -> Start | None:  # noqa: ARG002
        """See `Channel`. A message's header states whether it carries checksums."""
        bind = self._send if signature.kind == "send" else self._recv
        return bind(signature, corrupted)

    # -- reductions -------------------------------------------------------------------------------

    def _all_reduce(self, signature: Signature, op: ReduceOp) -> Start:
        if not gloo_reduces(signature):
            return self._gather_and_reduce(signature, op, root=None)
        options = _opts(c10d.AllreduceOptions(), reduceOp=_NATIVE_OP[op], timeout=self._timeout)
        if compares_keys(signature) and self._group.size == 2:
            return exchanged(signature, self._group.rank, self._pool, self._exchange, self._poll)
        if compares_keys(signature):
            reduce = lambda keys: self._pg.allreduce([keys], options)  # noqa: E731
            return keyed(signature, self._pool, reduce, self._poll)
        size = self._group.size

        def start(message: Message) -> Poll:
            out = message.outputs[0]
            if out is not message.inputs[0]:
                out.copy_(message.inputs[0])
            work = self._pg.allreduce([out.view(-1)], options)
            return self._poll(work, partial(divide, out, size) if op == "AVG" else None)

        return start

    def _reduce(self, signature: Signature, op: ReduceOp) -> Start:
        root = signature.root or 0
        if not gloo_reduces(signature):
            return self._gather_and_reduce(signature, op, root)
        options = _opts(
            c10d.ReduceOptions(), reduceOp=_NATIVE_OP[op], rootRank=root, rootTensor=0, timeout=self._timeout
        )
        size, is_root = self._group.size, self._group.rank == root
        if compares_keys(signature):
            reduce = lambda keys: self._pg.reduce([keys], options)  # noqa: E731
            return keyed(signature, self._pool, reduce, self._poll, wanted=is_root)

        def start(message: Message) -> Poll:
            value = message.inputs[0]
            finish: Callable[[], None] | None = None
            if is_root:
                target = message.outputs[0]
                if op == "AVG":
                    finish = partial(divide, target, size)
            else:  # gloo uses tensors as scratch memory; our operations preserve their input
                lease = self._pool.lease(value.device)
                target, finish = lease.tensor(value.numel(), value.dtype), lease.release
            if target is not value:
                target.view(-1).copy_(value.view(-1))
            return self._poll(self._pg.reduce([target.view(-1)], options), finish)

        return start

    def _gather_and_reduce(self, signature: Signature, op: ReduceOp, root: int | None) -> Start:
        assert signature.dtype is not None
        reduce_parts = local_reduce(op, signature.dtype)
        size = self._group.size
        wanted = root is None or root == self._group.rank

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0] if wanted else None
            lease = self._pool.lease(value.device)
            parts = lease.tensor(size * value.numel(), value.dtype).view(size, -1)
            work = _gather_bytes(self._pg, parts, value, self._timeout)

            def finish() -> None:
                if out is not None:
                    reduce_parts(parts, out.view(-1))
                lease.release()

            return self._poll(work, finish)

        return start

    def _reduce_scatter(self, signature: Signature, op: ReduceOp) -> Start:
        assert signature.dtype is not None
        reduce_parts, size, tag = local_reduce(op, signature.dtype), self._group.size, tag_of(signature)
        is_swap = swaps(signature, self._hosts)

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            lease = self._pool.lease(value.device)
            parts = lease.tensor(value.numel(), value.dtype)

            def finish() -> None:
                reduce_parts(parts.view(size, -1), out.view(-1))
                lease.release()

            if is_swap:
                return self._swaps.halves(self._pg, tag, value, parts, finish)
            return self._poll(self._exchange(parts, value, [], []), finish)

        return start

    def _reduce_scatter_v(self, signature: Signature, op: ReduceOp) -> Start:
        assert signature.dtype is not None
        reduce_parts, size, rank = local_reduce(op, signature.dtype), self._group.size, self._group.rank

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            counts = list(message.input_counts or ())
            lease = self._pool.lease(value.device)
            parts = lease.tensor(size * counts[rank], value.dtype)
            work = self._exchange(parts, value, [counts[rank]] * size, counts)

            def finish() -> None:
                reduce_parts(parts.view(size, -1), out.view(-1))
                lease.release()

            return self._poll(work, finish)

        return start

    # -- data movement ----------------------------------------------------------------------------

    def _exchange(
        self, output: torch.Tensor, value: torch.Tensor, output_counts: list[int], input_counts: list[int]
    ) -> Any:
        """Run all_to_all of flat tensors, with counts in elements; empty lists mean equal parts."""
        width = value.element_size()
        return self._pg.alltoall_base(
            bytes_of(output),
            bytes_of(value),
            [count * width for count in output_counts],
            [count * width for count in input_counts],
            _opts(c10d.AllToAllOptions(), timeout=self._timeout),
        )

    def _broadcast(self, signature: Signature) -> Start:
        root = signature.root or 0
        options = _opts(c10d.BroadcastOptions(), rootRank=root, rootTensor=0, timeout=self._timeout)

        def start(message: Message) -> Poll:
            return self._poll(self._pg.broadcast([bytes_of(message.outputs[0])], options))

        return start

    def _all_gather(self, signature: Signature) -> Start:
        if signature.ranks == 2:
            is_swap, tag, rank = swaps(signature, self._hosts), tag_of(signature), self._group.rank

            def exchange(message: Message) -> Poll:
                sent, parts = bytes_of(message.inputs[0]), bytes_of(message.outputs[0]).view(2, -1)
                other = parts[1 - rank]
                if parts[rank].data_ptr() != sent.data_ptr():
                    parts[rank].copy_(sent)
                if is_swap:
                    return self._swaps.start(self._pg, tag, sent, other)
                counts = [sent.numel(), 0] if rank else [0, sent.numel()]
                return self._poll(self._exchange(other, sent, counts, counts))

            return exchange  # gloo's own all_gather takes longer

        def start(message: Message) -> Poll:
            work = _gather_bytes(self._pg, message.outputs[0], message.inputs[0], self._timeout)
            return self._poll(work)

        return start

    def _all_gather_v(self, signature: Signature) -> Start:  # noqa: ARG002
        size = self._group.size

        def start(message: Message) -> Poll:
            value, counts = message.inputs[0].view(-1), list(message.output_counts or ())
            lease = self._pool.lease(value.device)
            copies = lease.tensor(size * value.numel(), value.dtype)
            copies.view(size, -1).copy_(value)
            work = self._exchange(message.outputs[0], copies, counts, [value.numel()] * size)
            return self._poll(work, lease.release)

        return start

    def _all_to_all(self, signature: Signature) -> Start:
        tag, is_swap = tag_of(signature), swaps(signature, self._hosts)

        def start(message: Message) -> Poll:
            if is_swap:
                return self._swaps.halves(self._pg, tag, message.inputs[0], message.outputs[0])
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
            targets = [list(bytes_of(message.outputs[0]).chunk(size))] if is_root else []
            return self._poll(self._pg.gather(targets, [bytes_of(message.inputs[0])], options))

        return start

    def _scatter(self, signature: Signature) -> Start:
        root, size = signature.root or 0, self._group.size
        options = _opts(c10d.ScatterOptions(), rootRank=root, timeout=self._timeout)
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            sources = [list(bytes_of(message.inputs[0]).chunk(size))] if is_root else []
            return self._poll(self._pg.scatter([bytes_of(message.outputs[0])], sources, options))

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

    def _send(self, signature: Signature, corrupted: Corrupted | None = None) -> Start:
        """Start a send; with `corrupted`, messages carry checksums, see `Channel.bind_checked`."""
        sent, running = self._sent, self._running
        checksums: Callable[[torch.Tensor], torch.Tensor] | None = None
        if corrupted is not None:
            from mcr_plus.kernels.checksum import of_blocks  # imported here: needs numba

            checksums = of_blocks

        def start(message: Message) -> Poll:
            value, peer, tag = message.inputs[0], message.peer, message.match_tag
            number = sent[peer, tag] = sent.get((peer, tag), 0) + 1
            words = None if checksums is None else checksums(value)
            header, *parts = parts_of(signature, value, number, words)
            pg, slot = self._pg, slot_of(tag, number)
            works = [pg.send([header], peer, tag * SLOTS), *(pg.send([part], peer, slot) for part in parts)]
            return WatchedSend(works, running)

        return start

    def _recv(self, signature: Signature, corrupted: Corrupted | None = None) -> Start:
        """Start a receive; `corrupted` as for `_send`."""
        group, running = self._group, self._running

        def start(message: Message) -> Poll:
            return WatchedReceive(self._pg, group, signature, message, running, corrupted)

        return start

    def _barrier(self, signature: Signature) -> Start:  # noqa: ARG002
        options = _opts(c10d.BarrierOptions(), timeout=self._timeout)

        def start(message: Message) -> Poll:  # noqa: ARG001
            return self._poll(self._pg.barrier(options))

        return start


stuck: Final[list[GlooChannel]] = []
"""Closed channels that still hold an operation that gloo has not ended."""


def _gather_bytes(pg: Any, output: torch.Tensor, value: torch.Tensor, timeout: timedelta) -> Any:
    options = _opts(c10d.AllgatherOptions(), timeout=timeout)
    return pg._allgather_base(bytes_of(output), bytes_of(value), options)
