"""Stage `fuse`: sends small asynchronous operations that differ only in size as one operation.

Operations of different tags have separate buckets, because rules, records and rank comparison use the tag.

A bucket is sent when it is full or the next operation does not fit. All open buckets of the group are sent,
oldest first (newest first with `order: priority`), when the program waits for any member or polls it, and at
`flush()`. So ranks may wait for their handles in different orders. Sending depends only on the program's
order of operations, which is the same on all ranks, never on time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from threading import get_ident
from typing import Any

import torch

from mcr_plus.core import streams
from mcr_plus.core.message import Message, Signature, bucket_text
from mcr_plus.core.streams import Streams
from mcr_plus.core.units import format_size
from mcr_plus.core.work import Info, Work
from mcr_plus.engine.group_runtime import GroupRuntime
from mcr_plus.fusion.buffers import BucketBuffer, BucketLayout, BufferBudget, join, prepare, split
from mcr_plus.fusion.options import FuseOptions
from mcr_plus.pipeline.pipeline import Pipeline
from mcr_plus.pipeline.stage import Context, Issue, Next, Stage
from mcr_plus.pipeline.treatment import Treatment


class FuseStage(Stage):
    """Stage that collects asynchronous operations in buckets, and sends each bucket as one operation.

    Waits and flushes count as part of the program's order: if ranks wait at different places, their buckets
    differ, which raises `OrderMismatch`.
    """

    Options = FuseOptions

    def __init__(self, options: FuseOptions, context: Context) -> None:
        self._options = options
        self._runtime = context.runtime
        self._ranks = context.group.size
        self._memory = _MemoryLimit(options.memory)
        self._budget = BufferBudget(options.memory)
        self._groups: dict[Signature, _FusionGroup] = {}
        self._dry_run = Pipeline(replace(context, runtime=None))
        if self._runtime is not None:
            self._runtime.state.when_stuck.append(self._flush_if_a_peer_waits)
            self._runtime.caches.append(self._groups.clear)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that this stage has allocated."""
        return self._budget.nbytes

    def bind(self, signature: Signature, next: Next) -> Issue:
        """Bind to the buckets of the operation's fusion group."""
        options, runtime = self._options, self._runtime
        if signature.kind not in options.kinds or signature.ranks == 1:
            return next(signature)
        treatment = next.treatment(signature)
        if (reason := self._refusal(signature, treatment)) is not None:
            next.note(f"not fused: {reason}")
            return next(signature)
        next.note(
            "fused with operations that differ only in size, not in tag, up to "
            f"{format_size(options.bucket)}; sent when full, when one of them is waited for, or by flush(); "
            "what is a bucket already (of mcr.wrap, DDP's hook or a coalesced call) is sent as it is",
            lambda: {"fused": True},
        )
        unfused = next(signature)
        if runtime is None:
            return unfused
        like = signature.replace(shape=(), nbytes=None, compress=treatment.compress)
        if like not in self._groups:
            assert like.dtype is not None
            prepare(signature.device)
            layout = BucketLayout(
                like.kind, self._ranks, like.dtype, self._budget, next.treatment(like).alignment
            )
            self._groups[like] = _FusionGroup(
                like, next, layout, options, self._memory, runtime, self._dry_run
            )
        return self._groups[like].member(signature, unfused)

    def flush(self) -> None:
        """Send the group's open buckets."""
        if self._runtime is not None:
            self._runtime.flush_pending()

    def _flush_if_a_peer_waits(self) -> None:
        """Send the first open bucket if a peer has sent it, and this rank blocks before its own flush.

        Example: rank 1 waits for an all_reduce and then sends, while rank 0 receives first and has the
        all_reduce in an open bucket. The bucket is sent only if its digest equals the digest that the peer
        has published for its next operation.
        """
        runtime = self._runtime
        if runtime is None or not runtime.pending:
            return
        group, state, first = runtime.state.group, runtime.state, runtime.pending[0]
        digests = first.digests()
        peers = (rank for rank in range(group.size) if rank != group.rank)
        if digests and any(state.board.read(rank, state.sequence + 1).digest in digests for rank in peers):
            runtime.flush_pending(first)  # the peer's later buckets may have other members

    def _refusal(self, signature: Signature, treatment: Treatment) -> str | None:
        if signature.key is not None:
            return "it is a bucket already, and sent as it is"
        if not signature.async_op:
            return "it is waited for at once"
        if not signature.nbytes:
            return "it moves nothing"
        if treatment.keeps:
            return "its codec keeps state between calls of this operation"
        if signature.nbytes >= self._options.bucket:
            return f"it fills a bucket of {format_size(self._options.bucket)} by itself"
        return None


class _FusionGroup:
    """Group of operations that may share a bucket: their signatures differ only in shape."""

    def __init__(
        self,
        like: Signature,
        next: Next,
        layout: BucketLayout,
        options: FuseOptions,
        memory: _MemoryLimit,
        runtime: GroupRuntime,
        dry_run: Pipeline,
    ) -> None:
        self.memory, self.runtime, self.layout = memory, runtime, layout
        self._limit = options.bucket
        self._newest_first = options.order == "priority"
        self._first_limit = min(options.first_bucket or options.bucket, options.bucket)
        self.open: _OpenBucket | None = None
        self._like = like
        self._next = next
        self._dry_run = dry_run
        self._bound: dict[tuple[int, ...], tuple[Signature, Issue]] = {}
        self._digests: dict[Signature, frozenset[int]] = {}

    def member(self, signature: Signature, unfused: Issue) -> Issue:
        """Return the `Issue` that adds operations of this signature to a bucket.

        `unfused`: the rest of the pipeline for a single operation. In-place operations need no message.
        """
        runtime, layout = self.runtime, self.layout
        state, lock = runtime.state, runtime.engine.lock
        nbytes = signature.nbytes or 0
        numel = nbytes // layout.numel(layout.dtype.itemsize)
        needed = layout.numel(layout.steps([numel])[0]) * layout.dtype.itemsize
        in_place, on_device = layout.in_place, signature.device != "cpu"

        def add_to_bucket(source: torch.Tensor, target: torch.Tensor | None = None) -> Work:
            if get_ident() != state.owner:
                state.check_thread()
            with lock:
                bucket = self.open
                if bucket is None or bucket.nbytes + needed > bucket.limit:
                    bucket = self._opened(needed)
                    if bucket is None:
                        return unfused(Message(signature, (source,), (source if target is None else target,)))
                if not bucket.numels:
                    bucket.first, bucket.unfused = signature, unfused
                bucket.nbytes += needed
                bucket.numels.append(numel)
                bucket.inputs.append(source)
                if not in_place:
                    bucket.outputs.append(target)
                if on_device:
                    bucket.note_stream(source.device)
                work = bucket.handles.get(nbytes)
                if work is None:
                    work = bucket.handles[nbytes] = FusedWork(bucket, nbytes)
                if bucket.nbytes >= bucket.limit:
                    runtime.flush_pending(bucket)
                return work

        def start(message: Message) -> Work:
            if message.already_bucketed or message.after is not None or message.prepare is not None:
                return unfused(message)  # already a bucket, or its values are not ready
            return add_to_bucket(message.inputs[0], message.outputs[0])

        return Issue(start, start_in_place=add_to_bucket if in_place else None)

    def _opened(self, nbytes: int) -> _OpenBucket | None:
        """Open a new bucket; return None if the memory limit of pending buckets is reached."""
        first = self.open is None
        if not first:
            self.runtime.flush_pending(self.open)
        limit = max(self._first_limit, nbytes) if first else self._limit
        if not self.memory.reserve(int(limit * self.layout.share)):
            return None
        self.open = bucket = _OpenBucket(self, limit)
        pending = self.runtime.pending
        pending.insert(0 if self._newest_first else len(pending), bucket)
        return bucket

    def bound(self, numels: Sequence[int]) -> tuple[Signature, Issue]:
        """Return the signature and the bound `Issue` of a bucket; `numels`: elements per part of each member.

        Called only when the bucket is sent, which is at the same place in the program on all ranks.
        """
        key = tuple(numels)
        bound = self._bound.get(key)
        if bound is None:
            signature = self.bucket_signature(numels)
            self.runtime.count()
            bound = self._bound[key] = signature, self._next(signature)
        return bound

    def bucket_signature(self, numels: Sequence[int]) -> Signature:
        """Return the signature of a bucket; `numels`: elements per part of each member."""
        layout = self.layout
        total = sum(layout.steps(numels))
        nbytes = layout.numel(total) * layout.dtype.itemsize
        call = f"bucket of {bucket_text(numels)}"
        return self._like.replace(shape=layout.shape(total), nbytes=nbytes, call=call)

    def digests(self, signature: Signature) -> frozenset[int]:
        """Return the digests that peers would publish for an operation: one for each part in this group.

        This is a dry run: real binds must happen at the same places on all ranks, and this rank may be the
        only caller.
        """
        digests = self._digests.get(signature)
        if digests is None:
            notes = self._dry_run.bind(signature).notes
            parts = [note.signature for note in notes if note.stage == "dispatch"]
            digests = frozenset(part.digest() for part in parts if part.group == signature.group)
            self._digests[signature] = digests
        return digests


class _MemoryLimit:
    """Memory limit of buckets that have not been waited for.

    Reservations follow the program's order, so all ranks come to the same result.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reserved = 0

    def reserve(self, nbytes: int) -> bool:
        if self._reserved and self._reserved + nbytes > self._limit:
            return False
        self._reserved += nbytes
        return True

    def release(self, nbytes: int) -> None:
        self._reserved -= nbytes


class _OpenBucket:
    """Bucket of pending operations, and the operation that carries them.

    Members of equal size share a handle, because all complete with the bucket. `first` and `unfused`: the
    first member's signature and the rest of its pipeline, used if there is no second member.
    """

    __slots__ = (
        "_buffer",
        "_streams",
        "error",
        "first",
        "group",
        "handles",
        "inputs",
        "is_done",
        "limit",
        "nbytes",
        "numels",
        "on_device",
        "outputs",
        "reserved",
        "then",
        "unfused",
        "work",
    )

    def __init__(self, group: _FusionGroup, limit: int) -> None:
        self.group, self.limit = group, limit
        self.reserved = int(limit * group.layout.share)
        self.nbytes = 0
        self.numels: list[int] = []  # elements of each member, in one part of the input
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[Any] = self.inputs if group.layout.in_place else []
        self.handles: dict[int, FusedWork] = {}
        self.first: Signature | None = None
        self.unfused: Issue | None = None
        self.is_done = False
        self.work: Work | None = None
        self.error: Exception | None = None
        self.then: list[Callable[[], None]] = []
        self._buffer: BucketBuffer | None = None
        self._streams: list[Any] = []  # device streams on which members were issued
        self.on_device = False

    def note_stream(self, device: torch.device) -> None:
        """Note the stream on which a member was issued, because the bucket may be sent on another stream."""
        stream = streams.streams_of(device).current()
        self.on_device = True
        if stream not in self._streams:
            self._streams.append(stream)

    def send(self) -> Exception | None:
        """See `PendingBucket`."""
        self.group.open = None
        try:
            if self._streams:
                self._follow_members(self.inputs[0].device)
            self.work = self._send_unfused() if len(self.numels) == 1 else self._send_fused()
            for function in self.then:
                self.work.then(function)
        except Exception as error:
            self.error = error
        self.then, self.inputs, self.outputs = [], [], []
        return self.error

    def _follow_members(self, device: torch.device) -> None:
        """Order the current stream after the members' streams, which may still write values."""
        here = streams.streams_of(device).current()
        for stream in self._streams:
            if stream != here:
                here.wait_stream(stream)

    def digests(self) -> frozenset[int]:
        """See `PendingBucket`."""
        assert self.first is not None
        is_fused = len(self.numels) > 1
        return self.group.digests(self.group.bucket_signature(self.numels) if is_fused else self.first)

    def _send_unfused(self) -> Work:
        assert self.first is not None
        assert self.unfused is not None
        self.release()
        return self.unfused(Message(self.first, (self.inputs[0],), (self.outputs[0],)))

    def _send_fused(self) -> Work:
        layout, numels, outputs = self.group.layout, self.numels, self.outputs
        steps = layout.steps(numels)
        total = sum(steps)
        self._buffer = buffer = layout.take(total, self.inputs[0].device)
        source, target = layout.views(buffer, total)
        join(self.inputs, numels, source, layout.input_parts, steps)
        signature, issue = self.group.bound(numels)
        work = issue(Message(signature, (source,), (target,), fused=len(numels), already_bucketed=True))
        return work.then(lambda: split(target, numels, outputs, layout.output_parts, steps))

    def wait(self, timeout: float | timedelta | None) -> None:
        """Send the bucket if it is still pending, and wait for it."""
        if self.work is None and self.error is None:
            self.group.runtime.flush_pending()
        self.release()  # before the wait: all ranks get here, but the wait may fail on some
        if self.work is None:
            assert self.error is not None
            raise self.error
        self.work.wait(timeout)
        self.is_done = True
        if self._buffer is not None:
            self.group.layout.give_back(self._buffer)
            self._buffer = None

    def release(self) -> None:
        """Release the memory reserved for the bucket."""
        self.group.memory.release(self.reserved)
        self.reserved = 0


class FusedWork(Work):
    """Handle of the operations of one size in a bucket."""

    __slots__ = ("_bucket", "_nbytes")

    def __init__(self, bucket: _OpenBucket, nbytes: int) -> None:
        self._bucket, self._nbytes = bucket, nbytes

    def wait(self, timeout: float | timedelta | None = None) -> None:  # noqa: D102
        bucket = self._bucket
        if not bucket.is_done:
            bucket.wait(timeout)
        elif bucket.on_device and bucket.work is not None:
            bucket.work.wait(timeout)  # orders the stream of this call, too

    def is_completed(self) -> bool:
        """Return True if the operation is complete. Sends the bucket, because the program may only poll."""
        bucket = self._bucket
        if bucket.work is None and bucket.error is None:
            bucket.group.runtime.flush_pending()
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
    def streams(self) -> Streams | None:  # noqa: D102
        return None if self._bucket.work is None else self._bucket.work.streams

    @property
    def info(self) -> Info:
        """Description of the operation; reading it sends the bucket, which sets backend and codec."""
        bucket = self._bucket
        if bucket.work is None and bucket.error is None:
            bucket.group.runtime.flush_pending()
        if bucket.work is None:
            assert bucket.error is not None
            raise bucket.error
        info = bucket.work.info
        share = self._nbytes / info.bytes if info.bytes else 1.0
        return replace(info, bytes=self._nbytes, wire_bytes=round(info.wire_bytes * share))

    def __repr__(self) -> str:
        if self._bucket.work is not None:
            return super().__repr__()
        error = self._bucket.error
        state = f"failed, {type(error).__name__}" if error else "held back in a bucket that has not been sent"
        return (
            f"<Work: operation of {self._nbytes} bytes in group {self._bucket.group._like.group!r}: {state}>"
        )
