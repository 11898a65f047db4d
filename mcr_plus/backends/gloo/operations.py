"""Operations of a gloo group, native or built from others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from mcr_plus.backends.base import BlockingPoll, Corrupted, Poll, Start
from mcr_plus.backends.emulation import divide, local_reduce
from mcr_plus.backends.gloo.keys import compares_keys, exchanged, keyed
from mcr_plus.backends.gloo.messages import SLOTS, WatchedReceive, WatchedSend, bytes_of, parts_of, slot_of
from mcr_plus.backends.gloo.swap import Swaps, swaps, tag_of
from mcr_plus.core import c10d
from mcr_plus.core.kinds import REDUCING, ReduceOp
from mcr_plus.core.message import Message, Signature

if TYPE_CHECKING:
    from mcr_plus.backends.gloo.channel import GlooChannel

# Dtypes that gloo reduces. Others are moved as bytes, and every rank reduces them in the same order.
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


def gloo_reduces(signature: Signature) -> bool:
    """Return whether gloo reduces the dtype of a signature."""
    return signature.dtype in _REDUCES


def _opts(options: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(options, name, value)
    return options


class _Started(BlockingPoll):
    """The poll of a gloo collective."""

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


class GlooOperations:
    """The operations of a gloo group, bound by its channel."""

    def __init__(self, channel: GlooChannel) -> None:
        self._channel, self._group, self._hosts = channel, channel.group, channel.hosts
        self._pool, self._timeout, self._running = channel.pool, channel.timeout, channel.running
        self._swaps = Swaps(self._group.rank, self._running)
        self._sent: dict[tuple[int | None, int], int] = {}  # number of messages so far, by peer and tag

    def bind(self, signature: Signature) -> Start:
        """See `Channel`."""
        binder = getattr(self, f"_{signature.kind}")
        bound: Start = (
            binder(signature, signature.reduce_op) if signature.kind in REDUCING else binder(signature)
        )
        return bound

    def bind_checked(self, signature: Signature, corrupted: Corrupted) -> Start:
        """See `Channel`. Message headers say whether a message carries checksums."""
        bind = self._send if signature.kind == "send" else self._recv
        return bind(signature, corrupted)

    def _poll(self, work: Any, finish: Callable[[], None] | None = None) -> Poll:
        """Return the poll of a c10d work."""
        self._running.add(work)
        return _Started(work, self._running, finish)

    # -- reductions -------------------------------------------------------------------------------

    def _all_reduce(self, signature: Signature, op: ReduceOp) -> Start:
        if not gloo_reduces(signature):
            return self._gather_and_reduce(signature, op, root=None)
        options = _opts(c10d.AllreduceOptions(), reduceOp=_NATIVE_OP[op], timeout=self._timeout)
        if compares_keys(signature) and self._group.size == 2:
            return exchanged(signature, self._group.rank, self._pool, self._exchange, self._poll)
        if compares_keys(signature):
            reduce = lambda keys: self._channel.pg.allreduce([keys], options)  # noqa: E731
            return keyed(signature, self._pool, reduce, self._poll)
        size = self._group.size

        def start(message: Message) -> Poll:
            out = message.outputs[0]
            if out is not message.inputs[0]:
                out.copy_(message.inputs[0])
            work = self._channel.pg.allreduce([out.view(-1)], options)
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
            reduce = lambda keys: self._channel.pg.reduce([keys], options)  # noqa: E731
            return keyed(signature, self._pool, reduce, self._poll, wanted=is_root)

        def start(message: Message) -> Poll:
            value = message.inputs[0]
            finish: Callable[[], None] | None = None
            if is_root:
                target = message.outputs[0]
                if op == "AVG":
                    finish = partial(divide, target, size)
            else:  # gloo uses its tensors as scratch; our operations preserve their input
                lease = self._pool.lease(value.device)
                target, finish = lease.tensor(value.numel(), value.dtype), lease.release
            if target is not value:
                target.view(-1).copy_(value.view(-1))
            return self._poll(self._channel.pg.reduce([target.view(-1)], options), finish)

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
            work = _gather_bytes(self._channel.pg, parts, value, self._timeout)

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
                return self._swaps.halves(self._channel.pg, tag, value, parts, finish)
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
        return self._channel.pg.alltoall_base(
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
            return self._poll(self._channel.pg.broadcast([bytes_of(message.outputs[0])], options))

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
                    return self._swaps.start(self._channel.pg, tag, sent, other)
                counts = [sent.numel(), 0] if rank else [0, sent.numel()]
                return self._poll(self._exchange(other, sent, counts, counts))

            return exchange  # gloo's own all_gather takes longer

        def start(message: Message) -> Poll:
            work = _gather_bytes(self._channel.pg, message.outputs[0], message.inputs[0], self._timeout)
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
                return self._swaps.halves(self._channel.pg, tag, message.inputs[0], message.outputs[0])
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
            return self._poll(self._channel.pg.gather(targets, [bytes_of(message.inputs[0])], options))

        return start

    def _scatter(self, signature: Signature) -> Start:
        root, size = signature.root or 0, self._group.size
        options = _opts(c10d.ScatterOptions(), rootRank=root, timeout=self._timeout)
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            sources = [list(bytes_of(message.inputs[0]).chunk(size))] if is_root else []
            return self._poll(self._channel.pg.scatter([bytes_of(message.outputs[0])], sources, options))

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
            pg, slot = self._channel.pg, slot_of(tag, number)
            works = [pg.send([header], peer, tag * SLOTS), *(pg.send([part], peer, slot) for part in parts)]
            return WatchedSend(works, running)

        return start

    def _recv(self, signature: Signature, corrupted: Corrupted | None = None) -> Start:
        """Start a receive; `corrupted` as for `_send`."""
        group, running = self._group, self._running

        def start(message: Message) -> Poll:
            return WatchedReceive(self._channel.pg, group, signature, message, running, corrupted)

        return start

    def _barrier(self, signature: Signature) -> Start:  # noqa: ARG002
        options = _opts(c10d.BarrierOptions(), timeout=self._timeout)

        def start(message: Message) -> Poll:  # noqa: ARG001
            return self._poll(self._channel.pg.barrier(options))

        return start


def _gather_bytes(pg: Any, output: torch.Tensor, value: torch.Tensor, timeout: timedelta) -> Any:
    options = _opts(c10d.AllgatherOptions(), timeout=timeout)
    return pg._allgather_base(bytes_of(output), bytes_of(value), options)
