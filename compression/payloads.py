"""`PayloadExchange`: move payloads by one library operation, or by two if payload lengths are unknown.

An exchange moves the payloads of one kind of operation, such as `all_gather` or `all_to_all`. Payloads of
known length are sent in slots of one library call. Payloads of other lengths are written consecutively; a
first operation exchanges their lengths, and the vector form of the kind moves the payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch

from mcr_plus.compression.codec import PayloadCodec
from mcr_plus.compression.state import CompressorState
from mcr_plus.core.buffers import Lease
from mcr_plus.core.kinds import Kind, collective, plain_kind
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.work import Work
from mcr_plus.errors import BackendError
from mcr_plus.pipeline.stage import Issue, Next

Write = Callable[[int, torch.Tensor], int]
"""Function that encodes part `index` into a wire and returns its length in elements, 0 if not needed."""

_WISH: Final = 1 << 62  # added to a length if the rank needs all values of all parts


@dataclass
class SentPayloads:
    """Payloads in flight: handles in order, and tensors that have the payloads once all are complete."""

    works: list[Work]
    received: torch.Tensor | list[torch.Tensor]


class PayloadExchange:
    """Exchange of payloads by operations of `kind`, bound once.

    `signature`: the signature of the compressed operation. `numel`: values per part if all parts are equal;
    None for a vector kind, whose sizes come with the message.
    """

    def __init__(
        self, kind: str, signature: Signature, numel: int | None, codec: PayloadCodec, rank: int, next: Next
    ) -> None:
        row = collective(kind)
        root = signature.root if row.rooted else None
        on_root = root is None or root == rank
        ranks = self._ranks = signature.ranks
        self._sends, self._receives = row.parts(ranks, root=on_root)
        self._in_place = kind == "broadcast"
        self._codec, self._numel, self._dtype = codec, numel, signature.dtype
        self._fixed = codec.traits.fixed_rate
        like = signature.replace(reduce_op=None, root=root, parts=None, key=None)
        many = max(row.parts(ranks))
        each = ranks if row.sends == "each" and not row.rooted else 1  # parts in a signature's shape
        self._lengths: tuple[Signature, Issue] | None = None
        if numel is not None and self._fixed:
            slot = self._slot = codec.wire_numel(numel)
            shape = (slot * each,)
            nbytes = slot * many * codec.wire_dtype.itemsize
            wire_signature = like.replace(kind=kind, dtype=codec.wire_dtype, shape=shape, nbytes=nbytes)
        else:
            wire_signature = like.replace(
                kind=_vector(kind), dtype=codec.wire_dtype, shape=(), nbytes=None, counts_agreed=False
            )
        # A broadcast is an all_gather to which only the root contributes. If receivers of a scatter may ask
        # for all values, its lengths are an all_to_all, which carries their requests to the root.
        self._asks = codec.traits.keeps_received and row.divides
        if not self._fixed:
            of_lengths = "all_to_all" if self._asks else "all_gather" if self._in_place else plain_kind(kind)
            has_root = not (self._in_place or self._asks)
            lengths = like.replace(
                kind=of_lengths,
                dtype=torch.int64,
                shape=(ranks if self._asks else each,),
                nbytes=8 * (many if has_root else ranks),
                root=root if has_root else None,
            )
            self._lengths = lengths, next(lengths)
            if kind == "broadcast":
                wire_signature = wire_signature.replace(root=None)
        self._wire_signature = wire_signature
        self._issue = next(wire_signature)
        self._rank, self._root = rank, root

    def send(
        self,
        write: Write,
        lease: Lease,
        rest: Mapping[str, Any],
        *,
        before: Callable[[], None] | None = None,
        after: Work | None = None,
        given: Sequence[int] = (),
        taken: Sequence[int] = (),
        state: CompressorState | None = None,
    ) -> SentPayloads:
        """Start a call: once `after` is complete, call `before`, `write` every part, then start the library.

        `rest`: the other fields of the messages. `given`, `taken`: values in each sent and received part, for
        vector kinds; empty on ranks that send or receive none. `state`: state of a codec with
        `keeps_received`, to answer ranks that ask for all values.
        """
        if not self._fixed:
            return self._send_unknown(write, lease, rest, before, after, given, taken, state)
        if self._numel is None:
            return self._send_counts(write, lease, rest, before, after, given, taken)
        slot, dtype = self._slot, self._codec.wire_dtype
        sent = lease.tensor(max(self._sends, self._in_place) * slot, dtype)
        target = sent if self._in_place else lease.tensor(self._receives * slot, dtype)

        def prepare() -> None:
            if before is not None:
                before()
            for index in range(self._sends):
                write(index, sent[index * slot : (index + 1) * slot])

        message = Message(
            self._wire_signature,
            (sent,) if self._sends or self._in_place else (),
            (target,) if self._receives else (),
            **rest,
            after=after,
            prepare=prepare,
        )
        return SentPayloads([self._issue(message)], target.view(-1, slot) if self._receives else [])

    def _send_counts(
        self,
        write: Write,
        lease: Lease,
        rest: Mapping[str, Any],
        before: Callable[[], None] | None,
        after: Work | None,
        given: Sequence[int],
        taken: Sequence[int],
    ) -> SentPayloads:
        codec = self._codec
        sizes = [codec.wire_numel(numel) if numel else 0 for numel in given]
        places = [codec.wire_numel(numel) if numel else 0 for numel in taken]
        sent, target = lease.tensor(sum(sizes), codec.wire_dtype), lease.tensor(sum(places), codec.wire_dtype)
        slots, received = _split(sent, sizes), _split(target, places)

        def prepare() -> None:
            if before is not None:
                before()
            for index, wire in enumerate(slots):
                if wire.numel():
                    write(index, wire)

        message = Message(
            self._wire_signature,
            (sent,) if self._sends else (),
            (target,) if self._receives else (),
            input_counts=tuple(sizes) if self._sends > 1 else None,
            output_counts=tuple(places) if self._receives > 1 else None,
            **rest,
            after=after,
            prepare=prepare,
        )
        return SentPayloads([self._issue(message)], received)

    def _send_unknown(
        self,
        write: Write,
        lease: Lease,
        rest: Mapping[str, Any],
        before: Callable[[], None] | None,
        after: Work | None,
        given: Sequence[int],
        taken: Sequence[int],
        state: CompressorState | None,
    ) -> SentPayloads:
        codec, lengths = self._codec, self._lengths
        assert lengths is not None
        # Payload lengths are not known, so both buffers have room for the longest payloads.
        sizes = [codec.room(numel, self._dtype) for numel in self._sizes(given, self._sends)]
        places = [codec.room(numel, self._dtype) for numel in self._sizes(taken, self._receives)]
        dtype = codec.wire_dtype
        sent, target = lease.tensor(sum(sizes), dtype), lease.tensor(sum(places), dtype)
        one_of_all, asks = self._in_place, self._asks
        ranks, root = self._ranks, self._root or 0
        sizes_of_both = (ranks, ranks) if asks else (self._sends, self._receives)
        if one_of_all:
            sizes_of_both = (1, ranks)
        with torch.inference_mode(False):  # other threads write them
            lengths_sent, lengths_received = (
                torch.zeros(size, dtype=torch.int64, device=sent.device) for size in sizes_of_both
            )
        received: list[torch.Tensor] = []

        def encode() -> None:
            if before is not None:
                before()
            wishes = state is not None and state.begin_call()
            at = 0
            for index in range(self._sends):
                written = write(index, sent[at:])
                lengths_sent[index] = written
                at += written
            if wishes:
                lengths_sent[root if asks else 0] += _WISH

        # The lengths are sent by a plain operation; only payloads are reported as compressed.
        signature, issue = lengths
        of_values = ("codec", "uncompressed_bytes")
        rest_of_lengths = {key: value for key, value in rest.items() if key not in of_values}
        first = issue(
            Message(
                signature,
                (lengths_sent,) if lengths_sent.numel() else (),
                (lengths_received,) if lengths_received.numel() else (),
                **rest_of_lengths,
                after=after,
                prepare=encode,
            )
        )
        message = Message(self._wire_signature, (), (), **rest, after=first, counts_known=False)

        def fill() -> None:
            counts, expected = lengths_sent.tolist(), lengths_received.tolist()
            if state is not None and asks:
                counts, expected = self._as_asked(state, sent, counts, expected, taken)
            elif state is not None:
                counts, expected = self._as_wished(state, sent, counts, expected, taken)
            if (
                any(not 0 <= length <= target.numel() for length in expected)
                or sum(expected) > target.numel()
            ):
                raise BackendError(
                    f"codec {codec.name}: payloads of {expected} bytes; too long for the values"
                )
            if self._sends or one_of_all:
                message.inputs = (sent[: sum(counts)],)
            if expected:
                message.outputs = (target[: sum(expected)],)
            message.input_counts = tuple(counts) if self._sends > 1 else None
            message.output_counts = tuple(expected) if len(expected) > 1 else None
            parts = _split(target, expected)
            received.extend([parts[root]] if one_of_all else parts)

        message.prepare = fill
        return SentPayloads([first, self._issue(message)], received)

    def _as_wished(
        self,
        state: CompressorState,
        sent: torch.Tensor,
        counts: list[int],
        expected: list[int],
        taken: Sequence[int],
    ) -> tuple[list[int], list[int]]:
        """Return the sent and received lengths; if a rank has requested all values, write anchors first."""
        wished = any(length >= _WISH for length in expected)
        counts = [length % _WISH for length in counts]
        expected = [length % _WISH for length in expected]
        if not wished:
            return counts, expected
        at = 0
        for index in range(self._sends):
            counts[index] = state.anchor_part(index, sent[at:])
            at += counts[index]
        numels = self._sizes(taken, self._receives)
        codec, dtype = self._codec, self._dtype
        assert dtype is not None
        if self._in_place:
            return counts, [
                codec.anchor_numel(numels[0], dtype) if rank == (self._root or 0) else 0
                for rank in range(len(expected))
            ]
        return counts, [codec.anchor_numel(numel, dtype) for numel in numels]

    def _as_asked(
        self,
        state: CompressorState,
        sent: torch.Tensor,
        given: list[int],
        arrived: list[int],
        taken: Sequence[int],
    ) -> tuple[list[int], list[int]]:
        """Return the lengths like `_as_wished`, but write anchors only for the requesting ranks of a scatter.

        `given`, `arrived`: the lengths that this rank sent to and received from each rank.
        """
        root = self._root or 0
        counts = [length % _WISH for length in given] if self._sends else []
        wishes = [length >= _WISH for length in arrived]
        if self._sends and any(wishes):
            parts = [part.clone() for part in _split(sent, counts)]
            at = 0
            for index, (part, wished) in enumerate(zip(parts, wishes, strict=True)):
                if wished:
                    counts[index] = state.anchor_part(index, sent[at:])
                else:
                    sent[at : at + counts[index]] = part
                at += counts[index]
        if given[root] < _WISH or self._rank == root:
            return counts, [arrived[root] % _WISH]
        assert self._dtype is not None
        return counts, [self._codec.anchor_numel(self._sizes(taken, 1)[0], self._dtype)]

    def _sizes(self, numels: Sequence[int], parts: int) -> list[int]:
        """Return the number of values in each part."""
        return list(numels) if self._numel is None else [self._numel] * parts


def _vector(kind: str) -> Kind:
    """Return the vector form of a kind."""
    plain = "all_gather" if kind == "broadcast" else plain_kind(kind)
    return f"{plain}_v"  # type: ignore[return-value]  # kinds with a vector form


def _split(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    ends = list(accumulate(sizes))
    return [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]
