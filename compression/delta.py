"""Codec `delta`: sends, without loss, the changes since the last call of the same operation.

When trainers send weights to inference servers at every step, about 99 % of bfloat16 weights are bitwise
unchanged, because a change of less than 2**-9 of a value is lost in rounding (Miahi and Belilovsky, "PULSE",
2026). PULSE sends positions with values. Most values change by one unit in the last place, for which 4 bits
are enough.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import ClassVar, Final, TypeGuard

import torch

from mcr_plus.compression.codec import CodecOptions, PayloadCodec, Traits
from mcr_plus.compression.copies import Copies, Copy, HeldValues
from mcr_plus.compression.state import CompressorState
from mcr_plus.config.options import BytesOrNone
from mcr_plus.core import kinds
from mcr_plus.errors import BackendError
from mcr_plus.kernels import delta

DTYPES: Final = (torch.float32, *(each for each in kinds.DTYPES if each is not torch.float32))
"""Supported dtypes; kernels are prepared with the first."""


class DeltaOptions(CodecOptions):
    """Options of delta.

    Attributes:
        keep: limit, in bytes, of the kept tensors of all tags of a group in this process. The least recently
            used tensors are dropped first, and sent in full at their next use. None allows half of the host's
            memory, divided among the job's ranks on the host.
    """

    keep: BytesOrNone = None


class Delta(PayloadCodec):
    """Codec whose payloads need no earlier call; `DeltaState` makes payloads of changes.

    It encodes the bits of any dtype of up to 8 bytes, and complex dtypes as pairs of real numbers. Tensors on
    a GPU are encoded and decoded there; the host waits, because it must know the lengths of payloads.
    """

    Options = DeltaOptions
    options: DeltaOptions
    name: ClassVar[str] = "delta"
    traits = Traits(
        lossless=True,
        needs_triton=True,
        fixed_rate=False,
        keeps_received=True,
        dtypes=DTYPES,
        min_numel=4096,  # with fewer elements, the header may exceed 1 % of the values
        kinds=frozenset(
            {
                "broadcast",
                "all_gather",
                "all_gather_v",
                "scatter",
                "scatter_v",
                "send",
                "recv",
            }
        ),
    )

    def prepare(self, dtype: torch.dtype | None) -> None:
        """See `Codec.prepare`."""
        for width in delta.WIDTHS if dtype is None else (_real(1, dtype)[1],):
            delta.prepare(width)

    def kept_state(self, copies: Copies) -> DeltaState:
        """See `Codec.kept_state`."""
        return DeltaState(self, copies)

    def wire_numel(self, numel: int) -> int:
        """Return the maximum for elements of 4 bytes; see `room`."""
        return self.room(numel, None)

    def room(self, numel: int, dtype: torch.dtype | None) -> int:
        """Return the maximum for elements of `dtype`."""
        return delta.most_nbytes(*_real(numel, dtype or torch.float32)) if numel else 0

    def anchor_numel(self, numel: int, dtype: torch.dtype) -> int:
        """Return the length of a payload that holds all elements unencoded."""
        return delta.dense_nbytes(*_real(numel, dtype)) if numel else 0

    def _is_native(self, dtype: torch.dtype) -> bool:
        return dtype in DTYPES

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> int:
        return delta.encode_anchor(_real_values(values), wire, 1)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        if not delta.header_of(wire).is_anchor:
            raise BackendError("a delta payload of changes was decoded without the values that it changes")
        values = torch.empty_like(out)
        delta.apply(wire, _real_values(values))
        out.copy_(values)

    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        values = torch.empty_like(total)
        self._decode(wire, values)
        total.add_(values, alpha=scale)


class DeltaState(CompressorState):
    """Parts of one operation as last sent and received, by part number.

    The first call, and each call with a different number of values, sends anchors: payloads of all values.
        After a payload that does not fit the held values, or if the held values have been dropped, the next
        call requests anchors while it exchanges payload lengths. Messages of each peer and tag (the `key`)
        have their own parts.
    """

    one_at_a_time = True

    def __init__(self, codec: Delta, copies: Copies) -> None:
        super().__init__(codec)
        self._delta, self._copies = codec, copies
        self._parts: dict[Hashable, Copy] = {}  # key None: the parts of a collective
        self.is_damaged = False

    def begin_call(self) -> bool:
        """See `CompressorState.begin_call`."""
        copy = self._copy(None)
        was_dropped = self._copies.begin(copy) and bool(copy.received)
        asks, self.is_damaged = was_dropped or self.is_damaged, False
        return asks

    def end_call(self) -> None:
        """See `CompressorState.end_call`."""
        self._end(self._copy(None))

    def encode_part(self, index: int, values: torch.Tensor, wire: torch.Tensor) -> int:
        """See `CompressorState.encode_part`."""
        return self._encode_part(self._copy(None), index, values, wire)

    def encode_for(
        self, key: Hashable, values: torch.Tensor, wire: torch.Tensor, version: int, digest: int
    ) -> int:
        """Encode a part for the receiver of a message; the receiver holds `version` with `digest`."""
        copy = self._copy(key)
        self._copies.begin(copy)
        held = copy.sent.get(0)
        fits = held is not None and (held.version, held.digest) == (version, digest)
        written = self._encode_part(copy, 0, values, wire, None if fits else version)
        self._end(copy)
        return written

    def _encode_part(
        self, copy: Copy, index: int, values: torch.Tensor, wire: torch.Tensor, other: int | None = None
    ) -> int:
        """Write a payload; all values, as a higher version, if the receiver holds version `other`."""
        if not values.numel():
            copy.sent.pop(index, None)
            return 0
        values, held = _real_values(values), copy.sent.get(index)
        if held is None or other is not None or not _alike(held.values, values):
            version = 1 + max(0 if held is None else held.version, other or 0)
            written = delta.encode_anchor(values, wire, version)
            digest = delta.header_of(wire).digest
            with torch.inference_mode(False):  # later calls may run outside inference mode
                copy.sent[index] = HeldValues(values.clone(), version, digest)
            return written
        versions = (held.version, held.version + 1)
        written = delta.encode(values, held.values, wire, versions, held.digest, update=True)
        held.version, held.digest = versions[1], delta.header_of(wire).digest
        return written

    def anchor_part(self, index: int, wire: torch.Tensor) -> int:
        """Write all values of a part unencoded, after `encode_part`; return `Delta.anchor_numel`."""
        held = self._copy(None).sent.get(index)
        if held is None:
            return 0
        assert held.values is not None
        return delta.encode_anchor(held.values, wire, held.version, windowed=False)

    def expect(self, key: Hashable) -> tuple[int, int]:
        """Return the held version and digest of a message's tensor, the base for a payload of changes.

        The values are kept until `decode_message`. The digest is 0 if the values are not usable.
        """
        copy = self._copy(key)
        self._copies.begin(copy)
        held = copy.received.get(0)
        return (0, 0) if held is None else (held.version, held.digest if held.is_whole else 0)

    def decode_message(self, key: Hashable, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of a received message to `out`. Raises what `decode_part` raises."""
        copy = self._copy(key)
        try:
            self._decode_part(copy, 0, wire, out)
        finally:
            self._end(copy)

    def decode_part(self, index: int, wire: torch.Tensor, out: torch.Tensor, own: int | None = None) -> None:
        """See `CompressorState.decode_part`. Raises `BackendError` for a payload that does not fit."""
        self._decode_part(self._copy(None), index, wire, out, own)

    def _decode_part(
        self, copy: Copy, index: int, wire: torch.Tensor, out: torch.Tensor, own: int | None = None
    ) -> None:
        if not out.numel():
            copy.received.pop(index, None)
            return
        out = _real_view(out)
        if own is not None:
            values = copy.sent[own].values
            assert values is not None
            out.copy_(values)
            return
        held = copy.received.get(index)
        if held is None or not _alike(held.values, out):
            version = 0 if held is None else held.version
            with torch.inference_mode(False):
                held = copy.received[index] = HeldValues(torch.empty_like(out), version, 0, is_whole=False)
        assert held.values is not None
        try:
            head = delta.header_of(wire)
            delta.follow(head, held.version, held.digest if held.is_whole else None)
            held.is_whole = False
            delta.apply(wire, held.values)
        except BackendError:
            held.is_whole, held.version, self.is_damaged = False, 0, True
            raise
        held.version, held.digest, held.is_whole = head.target, head.digest, True
        out.copy_(held.values)

    def _copy(self, key: Hashable) -> Copy:
        copy = self._parts.get(key)
        if copy is None:
            # Messages need no kept version, because both ends state the version that they hold.
            forget = None if key is None else partial(self._parts.pop, key, None)
            copy = self._parts[key] = Copy(forget=forget)
        return copy

    def _end(self, copy: Copy) -> None:
        self._copies.end(copy, self._delta.options.keep)


def _alike(held: torch.Tensor | None, values: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return held is not None and held.numel() == values.numel() and held.dtype is values.dtype


def _real(numel: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the number of real numbers in `numel` values, and the bytes of each."""
    return (2 * numel, dtype.itemsize // 2) if dtype.is_complex else (numel, dtype.itemsize)


def _real_view(values: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(values).view(-1) if values.is_complex() else values


def _real_values(values: torch.Tensor) -> torch.Tensor:
    """Return flat values as real numbers that begin at a multiple of 8 bytes."""
    values = _real_view(values)
    return values.clone() if values.data_ptr() % 8 else values
