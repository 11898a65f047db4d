"""fuse: small asynchronous operations of like signature travel as one.

A bucket is sent when it is full or the next operation does not fit. All open buckets of the group are sent,
in the order in which they were opened, when a member of any is waited for (or asked whether it is done), and
at `flush()`; so ranks may wait for their handles in different orders. These are facts of the program's order,
the same on all ranks, never a matter of time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from threading import get_ident
from typing import Final

import torch

from mcr_plus.config import FuseOptions
from mcr_plus.dispatch.operation import Operation
from mcr_plus.dispatch.stage import GroupRuntime
from mcr_plus.dispatch.work import Info, Work
from mcr_plus.interfaces import Context, Issue, Next
from mcr_plus.message import Message, Signature
from mcr_plus.units import format_size

# How many parts a rank's input and output have, None for one per rank of the group. In a bucket each part
# holds the members' parts, one behind another.
_PARTS: Final[dict[str, tuple[int | None, int | None]]] = {
    "all_reduce": (1, 1),
    "broadcast": (1, 1),
    "all_gather": (1, None),
    "reduce_scatter": (None, 1),
    "all_to_all": (None, None),
}
_IN_PLACE: Final = ("all_reduce", "broadcast")


class FuseStage:
    """Holds asynchronous operations back until it can send several as one.

    The places at which the program waits or flushes are part of its order: ranks that wait at different
    places send different buckets, which is an `OrderMismatch`.
    """

    def __init__(self, options: FuseOptions, context: Context) -> None:
        self._options = options
        self._runtime = context.runtime
        self._ranks = context.group.size
        self._memory = _Memory(options.memory)
        self._classes: dict[Signature, _Class] = {}
        if self._runtime is not None:
            self._runtime.engine.when_stuck.append(self._catch_up)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that this stage keeps."""
        return self._memory.kept

    def bind(self, signature: Signature, next: Next) -> Issue:
        """Bind to the buckets of operations like this one."""
        options, runtime = self._options, self._runtime
        if signature.kind not in options.kinds or signature.ranks == 1:
            return next(signature)
        if (reason := self._refusal(signature)) is not None:
            next.note(f"not fused: {reason}")
            return next(signature)
        next.note(
            f"fused with operations like it, up to {format_size(options.bucket)}; sent when full, when one "
            "of them is waited for, or by flush()"
        )
        alone = next(signature)
        if runtime is None:
            return alone
        like = signature.replace(shape=(), nbytes=None)
        if like not in self._classes:
            self._classes[like] = _Class(like, next, self._ranks, options, self._memory, runtime)
        return self._classes[like].member(signature.nbytes or 0, alone)

    def flush(self) -> None:
        """Send what the group holds back."""
        if self._runtime is not None:
            self._runtime.send_held()

    def _catch_up(self) -> None:
        """Send what is held back if a peer waits for it: it flushed where this rank cannot get to.

        Rank 1 waits for an all_reduce and then sends, rank 0 receives first and holds the all_reduce back.
        The peer tells what it has issued next; only if that is what would be sent here is it sent.
        """
        runtime = self._runtime
        if runtime is None or not runtime.held:
            return
        group, state, mine = runtime.state.group, runtime.state, runtime.held[0].digest()
        peers = (rank for rank in range(group.size) if rank != group.rank)
        if mine is not None and any(
            state.board.look(rank, state.sequence + 1).digest == mine for rank in peers
        ):
            runtime.send_held(runtime.held[0])  # that one alone: the peer's other buckets may be others

    def _refusal(self, signature: Signature) -> str | None:
        if not signature.async_op:
            return "it is waited for at once"
        if not signature.nbytes:
            return "it moves nothing"
        if signature.nbytes >= self._options.bucket:
            return f"it fills a bucket of {format_size(self._options.bucket)} by itself"
        return None


class _Class:
    """Operations that may share a bucket: all but their shapes is equal."""

    def __init__(
        self,
        like: Signature,
        next: Next,
        ranks: int,
        options: FuseOptions,
        memory: _Memory,
        runtime: GroupRuntime,
    ) -> None:
        assert like.dtype is not None
        self.like, self.dtype, self.memory, self.runtime = like, like.dtype, memory, runtime
        self.parts = tuple(ranks if count is None else count for count in _PARTS[like.kind])
        self.in_place = like.kind in _IN_PLACE
        self._limit = options.bucket
        self._first_limit = min(options.first_bucket or options.bucket, options.bucket)
        # What a bucket of b bytes (the larger of its input and output) may need of memory, relative to b.
        self.share = 1.0 if self.in_place else sum(self.parts) / max(self.parts)
        self.open: _Bucket | None = None
        self._next = next
        self._whole: dict[int, tuple[Signature, Issue]] = {}
        self._spaces: list[_Space] = []

    def member(self, nbytes: int, alone: Issue) -> Issue:
        """What issues one operation of `nbytes`; `alone` is the rest of the pipeline for it by itself."""
        runtime = self.runtime
        state, lock = runtime.state, runtime.engine.lock

        def issue(message: Message) -> Work:
            if get_ident() != state.owner:
                state.admit()
            if message.whole:
                return alone(message)
            with lock:
                bucket = self.open
                if bucket is None or bucket.nbytes + nbytes > bucket.limit:
                    bucket = self._opened(nbytes)
                    if bucket is None:
                        return alone(message)
                bucket.nbytes += nbytes
                bucket.messages.append(message)
                bucket.alone = alone
                work = Member(bucket, nbytes)
                if bucket.nbytes == bucket.limit:
                    runtime.send_held(bucket)
                return work

        return issue

    def _opened(self, nbytes: int) -> _Bucket | None:
        """A new bucket; None if too many have not been waited for, so that memory stays bounded."""
        first = self.open is None
        if not first:
            self.runtime.send_held(self.open)
        limit = max(self._first_limit, nbytes) if first else self._limit
        if not self.memory.reserve(int(limit * self.share)):
            return None
        self.open = bucket = _Bucket(self, limit)
        self.runtime.held.append(bucket)
        return bucket

    def whole(self, numel: int) -> tuple[Signature, Issue]:
        """The operation on `numel` elements in each part, and the rest of the pipeline bound to it."""
        found = self._whole.get(numel)
        if found is None:
            given, taken = (count * numel for count in self.parts)
            shape = taken if self.like.kind == "reduce_scatter" else given
            nbytes = max(given, taken) * self.dtype.itemsize
            signature = self.like.replace(shape=(shape,), nbytes=nbytes)
            found = self._whole[numel] = (signature, self._next(signature))
        return found

    def take(self, numel: int, device: torch.device) -> _Space:
        """Buffers for `numel` elements in each part: those of an earlier bucket, if they are large enough."""
        for index, space in enumerate(self._spaces):
            if space.numel >= numel:
                return self._spaces.pop(index)
        for space in self._spaces:  # too small: make way
            self.memory.kept -= space.nbytes
        self._spaces.clear()
        space = _Space(self, 1 << (numel - 1).bit_length(), device)
        self.memory.kept += space.nbytes
        return space

    def give_back(self, space: _Space) -> None:
        """Keep buffers for the next bucket."""
        self._spaces.append(space)


class _Memory:
    """How much buckets may need that have not been waited for, and what their buffers take.

    Reserving and releasing are facts of the program's order, so ranks agree on whether there is room.
    """

    def __init__(self, limit: int) -> None:
        self.kept = 0
        self._limit = limit
        self._reserved = 0

    def reserve(self, nbytes: int) -> bool:
        if self._reserved and self._reserved + nbytes > self._limit:
            return False
        self._reserved += nbytes
        return True

    def release(self, nbytes: int) -> None:
        self._reserved -= nbytes


class _Space:
    """Input and output of one bucket, flat; the same tensor where the operation works in place."""

    __slots__ = ("given", "nbytes", "numel", "taken")

    def __init__(self, like: _Class, numel: int, device: torch.device) -> None:
        given, taken = (count * numel for count in like.parts)
        self.numel = numel
        self.given = torch.empty(given, dtype=like.dtype, device=device)
        self.taken = self.given if like.in_place else torch.empty(taken, dtype=like.dtype, device=device)
        self.nbytes = self.given.nbytes + (0 if like.in_place else self.taken.nbytes)


class _Bucket:
    """Operations that are held back, and what they are sent as."""

    __slots__ = (
        "_space",
        "alone",
        "error",
        "like",
        "limit",
        "messages",
        "nbytes",
        "reserved",
        "then",
        "work",
    )

    def __init__(self, like: _Class, limit: int) -> None:
        self.like, self.limit = like, limit
        self.reserved = int(limit * like.share)
        self.nbytes = 0
        self.messages: list[Message] = []
        self.alone: Issue | None = None
        self.work: Work | None = None
        self.error: Exception | None = None
        self.then: list[Callable[[], None]] = []
        self._space: _Space | None = None

    def send(self) -> Exception | None:
        """See `Held`."""
        self.like.open = None
        try:
            if len(self.messages) == 1:
                assert self.alone is not None
                self.work = self.alone(self.messages[0])
                self.release()
            else:
                self.work = self._send_together()
            for function in self.then:
                self.work.then(function)
        except Exception as error:
            self.error = error
        self.then = []
        return self.error

    def digest(self) -> int | None:
        """See `Held`."""
        issue = self.alone if len(self.messages) == 1 else self.like.whole(sum(self._numels()))[1]
        operation: Operation | None = getattr(issue, "operation", None)
        return None if operation is None else operation.digest

    def _numels(self) -> list[int]:
        """Elements of each member in one part of the input."""
        return [message.inputs[0].numel() // self.like.parts[0] for message in self.messages]

    def _send_together(self) -> Work:
        like, messages, numels = self.like, self.messages, self._numels()
        (rows_in, rows_out), count, total = like.parts, len(messages), sum(numels)
        inputs = [message.inputs[0] for message in messages]
        self._space = space = like.take(total, inputs[0].device)
        given = space.given[: rows_in * total]
        taken = given if like.in_place else space.taken[: rows_out * total]
        _join(inputs, given, rows_in)
        outputs = inputs if like.in_place else [message.outputs[0] for message in messages]
        signature, issue = like.whole(total)
        work = issue(Message(signature, (given,), (taken,), fused=count))
        return work.then(lambda: _split(taken, numels, outputs, rows_out))

    def wait(self, timeout: float | timedelta | None) -> None:
        """Send if need be, and wait."""
        if self.work is None and self.error is None:
            self.like.runtime.send_held()
        if self.work is None:
            assert self.error is not None
            raise self.error
        self.release()  # to wait is a fact of the program; how it ends may differ between ranks
        self.work.wait(timeout)
        if self._space is not None:
            self.like.give_back(self._space)
            self._space = None

    def release(self) -> None:
        """Make room for other buckets."""
        self.like.memory.release(self.reserved)
        self.reserved = 0


class Member(Work):
    """The handle of one operation of a bucket."""

    __slots__ = ("_bucket", "_nbytes")

    def __init__(self, bucket: _Bucket, nbytes: int) -> None:
        self._bucket, self._nbytes = bucket, nbytes

    def wait(self, timeout: float | timedelta | None = None) -> None:  # noqa: D102
        self._bucket.wait(timeout)

    def is_completed(self) -> bool:
        """Whether the operation is done; sends its bucket, because nobody may ever wait for it."""
        bucket = self._bucket
        if bucket.work is None and bucket.error is None:
            bucket.like.runtime.send_held()
        return bucket.error is not None or (bucket.work is not None and bucket.work.is_completed())

    def probe(self) -> bool:  # noqa: D102
        bucket = self._bucket
        return bucket.error is not None or (bucket.work is not None and bucket.work.probe())

    def exception(self) -> BaseException | None:  # noqa: D102
        bucket = self._bucket
        return bucket.error or (None if bucket.work is None else bucket.work.exception())

    def then(self, function: Callable[[], None]) -> Work:  # noqa: D102
        bucket = self._bucket
        if bucket.work is None:
            bucket.then.append(function)
        else:
            bucket.work.then(function)
        return self

    @property
    def info(self) -> Info:
        """What became of the operation; sends its bucket, before which nobody knows."""
        bucket = self._bucket
        if bucket.work is None and bucket.error is None:
            bucket.like.runtime.send_held()
        if bucket.work is None:
            assert bucket.error is not None
            raise bucket.error
        whole = bucket.work.info
        share = self._nbytes / whole.bytes if whole.bytes else 1.0
        return replace(whole, bytes=self._nbytes, wire_bytes=round(whole.wire_bytes * share))


def _join(tensors: list[torch.Tensor], out: torch.Tensor, rows: int) -> None:
    """Copy part r of every tensor, one behind another, into part r of `out`."""
    if rows == 1:
        torch.cat([tensor.view(-1) for tensor in tensors], out=out)
    else:
        torch.cat([tensor.view(rows, -1) for tensor in tensors], 1, out=out.view(rows, -1))


def _split(whole: torch.Tensor, numels: list[int], outputs: list[torch.Tensor], rows: int) -> None:
    """The reverse of `_join`: `numels` elements of each part belong to each of the `outputs`."""
    if rows == 1:
        torch.split_with_sizes_copy(whole, numels, out=[tensor.view(-1) for tensor in outputs])
    else:
        parts = [tensor.view(rows, -1) for tensor in outputs]
        torch.split_with_sizes_copy(whole.view(rows, -1), numels, 1, out=parts)
