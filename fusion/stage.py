"""fuse: small asynchronous operations of like signature travel as one.

A bucket is sent when it is full or the next operation does not fit. All open buckets of the group are sent,
in the order in which they were opened (or the reverse, `order: priority`), when a member of any is waited for
or asked whether it is done, and at `flush()`; so ranks may wait for their handles in different orders. These
are facts of the program's order, the same on all ranks, never a matter of time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from threading import get_ident
from typing import Any

import torch

from mcr_plus.compression.choice import alignment, between_nodes, chosen, in_a_bucket, keeps_something
from mcr_plus.config import FuseOptions, codec_of
from mcr_plus.dispatch.stage import GroupRuntime
from mcr_plus.dispatch.work import Info, Work
from mcr_plus.fusion.space import Layout, Space, Stock, join, prepare, split
from mcr_plus.interfaces import Context, Issue, Next
from mcr_plus.message import Message, Signature, bucket_text
from mcr_plus.pipeline import Pipeline
from mcr_plus.units import format_size


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
        self._stock = Stock(options.memory)
        self._classes: dict[Signature, _Class] = {}
        self._config = context.config
        self._explaining = Pipeline(replace(context, runtime=None))
        if self._runtime is not None:
            self._runtime.state.when_stuck.append(self._catch_up)
            self._runtime.caches.append(self._classes.clear)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that this stage keeps."""
        return self._stock.nbytes

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
        like = signature.replace(shape=(), nbytes=None, compress=in_a_bucket(self._config, signature))
        if like not in self._classes:
            assert like.dtype is not None
            blocks = alignment(self._config, like)
            prepare(signature.device)
            layout = Layout(like.kind, self._ranks, like.dtype, self._stock, blocks)
            self._classes[like] = _Class(like, next, layout, options, self._memory, runtime, self._explaining)
        return self._classes[like].member(signature, alone)

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
        group, state, mine = runtime.state.group, runtime.state, runtime.held[0].digests()
        peers = (rank for rank in range(group.size) if rank != group.rank)
        if mine and any(state.board.look(rank, state.sequence + 1).digest in mine for rank in peers):
            runtime.send_held(runtime.held[0])  # that one alone: the peer's other buckets may be others

    def _refusal(self, signature: Signature) -> str | None:
        if not signature.async_op:
            return "it is waited for at once"
        if not signature.nbytes:
            return "it moves nothing"
        found = (chosen(self._config, signature), between_nodes(self._config, signature))
        if any(each is not None and keeps_something(codec_of(each), each) for each in found):
            return "its codec keeps something from call to call, for this operation alone"
        if signature.nbytes >= self._options.bucket:
            return f"it fills a bucket of {format_size(self._options.bucket)} by itself"
        return None


class _Class:
    """Operations that may share a bucket: all but their shapes is equal."""

    def __init__(
        self,
        like: Signature,
        next: Next,
        layout: Layout,
        options: FuseOptions,
        memory: _Memory,
        runtime: GroupRuntime,
        explaining: Pipeline,
    ) -> None:
        self.memory, self.runtime, self.layout = memory, runtime, layout
        self._limit = options.bucket
        self._newest_first = options.order == "priority"
        self._first_limit = min(options.first_bucket or options.bucket, options.bucket)
        self.open: _Bucket | None = None
        self._like = like
        self._next = next
        self._explaining = explaining
        self._whole: dict[tuple[int, ...], tuple[Signature, Issue]] = {}
        self._digests: dict[Signature, frozenset[int]] = {}

    def member(self, signature: Signature, alone: Issue) -> Issue:
        """What issues operations like this one; `alone` is the rest of the pipeline for one by itself.

        It carries `hold`, which does the same for operations in place, without a message.
        """
        runtime, layout = self.runtime, self.layout
        state, lock = runtime.state, runtime.engine.lock
        nbytes = signature.nbytes or 0
        numel = nbytes // layout.numel(layout.dtype.itemsize)
        needed = layout.numel(layout.steps([numel])[0]) * layout.dtype.itemsize
        in_place = layout.in_place

        def hold(source: torch.Tensor, target: torch.Tensor | None = None) -> Work:
            if get_ident() != state.owner:
                state.admit()
            with lock:
                bucket = self.open
                if bucket is None or bucket.nbytes + needed > bucket.limit:
                    bucket = self._opened(needed)
                    if bucket is None:
                        return alone(Message(signature, (source,), (source if target is None else target,)))
                if not bucket.numels:
                    bucket.first, bucket.alone = signature, alone
                bucket.nbytes += needed
                bucket.numels.append(numel)
                bucket.inputs.append(source)
                if not in_place:
                    bucket.outputs.append(target)
                work = bucket.handles.get(nbytes)
                if work is None:
                    work = bucket.handles[nbytes] = Member(bucket, nbytes)
                if bucket.nbytes >= bucket.limit:
                    runtime.send_held(bucket)
                return work

        def issue(message: Message) -> Work:
            if message.whole or message.after is not None or message.prepare is not None:
                return alone(message)  # a bucket already, or its values are not there yet
            return hold(message.inputs[0], message.outputs[0])

        if in_place:
            issue.hold = hold  # type: ignore[attr-defined]
        return issue

    def _opened(self, nbytes: int) -> _Bucket | None:
        """A new bucket; None if too many have not been waited for, so that memory stays bounded."""
        first = self.open is None
        if not first:
            self.runtime.send_held(self.open)
        limit = max(self._first_limit, nbytes) if first else self._limit
        if not self.memory.reserve(int(limit * self.layout.share)):
            return None
        self.open = bucket = _Bucket(self, limit)
        held = self.runtime.held
        held.insert(0 if self._newest_first else len(held), bucket)
        return bucket

    def whole(self, numels: Sequence[int]) -> tuple[Signature, Issue]:
        """The operation on members of `numels` elements in each part, and the rest of the pipeline for it.

        For a bucket that is sent, as it is on all ranks at this place of the program.
        """
        key = tuple(numels)
        found = self._whole.get(key)
        if found is None:
            signature = self.whole_signature(numels)
            self.runtime.count()
            found = self._whole[key] = signature, self._next(signature)
        return found

    def whole_signature(self, numels: Sequence[int]) -> Signature:
        """That of a bucket of members of `numels` elements in each part."""
        layout = self.layout
        total = sum(layout.steps(numels))
        nbytes = layout.numel(total) * layout.dtype.itemsize
        call = f"bucket of {bucket_text(numels)}"
        return self._like.replace(shape=layout.shape(total), nbytes=nbytes, call=call)

    def digests(self, signature: Signature) -> frozenset[int]:
        """What peers would see in this group of an operation that is sent: of all that it is made of.

        Binds nothing, for this rank alone may ask, and ranks bind and forget at the same places.
        """
        found = self._digests.get(signature)
        if found is None:
            notes = self._explaining.bind(signature).notes
            sent = [note.signature for note in notes if note.stage == "dispatch"]
            found = frozenset(each.digest() for each in sent if each.group == signature.group)
            self._digests[signature] = found
        return found


class _Memory:
    """How much buckets may need that have not been waited for.

    Reserving and releasing are facts of the program's order, so ranks agree on whether there is room.
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


class _Bucket:
    """Operations that are held back, and what they are sent as.

    Members of a size share a handle: all are done when the bucket is. `first` and `alone` are the first
    member's signature and its way if it stays the only one.
    """

    __slots__ = (
        "_space",
        "alone",
        "error",
        "first",
        "handles",
        "inputs",
        "is_done",
        "like",
        "limit",
        "nbytes",
        "numels",
        "outputs",
        "reserved",
        "then",
        "work",
    )

    def __init__(self, like: _Class, limit: int) -> None:
        self.like, self.limit = like, limit
        self.reserved = int(limit * like.layout.share)
        self.nbytes = 0
        self.numels: list[int] = []  # of each member, in one part of the input
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[Any] = self.inputs if like.layout.in_place else []
        self.handles: dict[int, Member] = {}
        self.first: Signature | None = None
        self.alone: Issue | None = None
        self.is_done = False
        self.work: Work | None = None
        self.error: Exception | None = None
        self.then: list[Callable[[], None]] = []
        self._space: Space | None = None

    def send(self) -> Exception | None:
        """See `Held`."""
        self.like.open = None
        try:
            self.work = self._send_alone() if len(self.numels) == 1 else self._send_together()
            for function in self.then:
                self.work.then(function)
        except Exception as error:
            self.error = error
        self.then, self.inputs, self.outputs = [], [], []
        return self.error

    def digests(self) -> frozenset[int]:
        """See `Held`."""
        assert self.first is not None
        is_whole = len(self.numels) > 1
        return self.like.digests(self.like.whole_signature(self.numels) if is_whole else self.first)

    def _send_alone(self) -> Work:
        assert self.first is not None
        assert self.alone is not None
        self.release()
        return self.alone(Message(self.first, (self.inputs[0],), (self.outputs[0],)))

    def _send_together(self) -> Work:
        layout, numels, outputs = self.like.layout, self.numels, self.outputs
        steps = layout.steps(numels)
        total = sum(steps)
        self._space = space = layout.take(total, self.inputs[0].device)
        source, target = layout.views(space, total)
        join(self.inputs, numels, source, layout.given, steps)
        signature, issue = self.like.whole(numels)
        work = issue(Message(signature, (source,), (target,), fused=len(numels), whole=True))
        return work.then(lambda: split(target, numels, outputs, layout.taken, steps))

    def wait(self, timeout: float | timedelta | None) -> None:
        """Send if need be, and wait."""
        if self.work is None and self.error is None:
            self.like.runtime.send_held()
        self.release()  # to wait is a fact of the program; how it ends may differ between ranks
        if self.work is None:
            assert self.error is not None
            raise self.error
        self.work.wait(timeout)
        self.is_done = True
        if self._space is not None:
            self.like.layout.give_back(self._space)
            self._space = None

    def release(self) -> None:
        """Make room for other buckets."""
        self.like.memory.release(self.reserved)
        self.reserved = 0


class Member(Work):
    """The handle of the operations of one size in a bucket."""

    __slots__ = ("_bucket", "_nbytes")

    def __init__(self, bucket: _Bucket, nbytes: int) -> None:
        self._bucket, self._nbytes = bucket, nbytes

    def wait(self, timeout: float | timedelta | None = None) -> None:  # noqa: D102
        if not self._bucket.is_done:
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
