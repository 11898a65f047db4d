"""delta: without loss; what changed since the last call of the same operation.

Trainers that send weights to inference servers at every step find about 99 % of bfloat16 weights bit for bit
as before, since a change must exceed 2**-9 of a value to move it (Miahi and Belilovsky, "PULSE", 2026). They
send positions with values; most values move by one unit in the last place, for which 4 bits are enough.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from mcr_plus.compression.codec import PayloadCodec, Traits
from mcr_plus.compression.state import CompressorState
from mcr_plus.errors import BackendError, Unsupported
from mcr_plus.kernels import delta

_FLOAT8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES: Final = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16,
    torch.int32, torch.int64, torch.bool, *_FLOAT8, torch.complex64, torch.complex128,
)  # fmt: skip


class Delta(PayloadCodec):
    """Payloads of one call, which need nothing from earlier ones; `DeltaState` makes those of changes.

    Any dtype, by its bits: of up to 8 bytes, and complex ones as pairs of real numbers. On the CPU only.
    """

    name: ClassVar[str] = "delta"
    traits = Traits(
        lossless=True,
        cpu_only=True,
        fixed_rate=False,
        keeps_received=True,
        dtypes=DTYPES,
        min_numel=4096,  # below, the header may be more than 1 % of the values
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

    def kept_state(self) -> DeltaState:
        """See `Codec.kept_state`."""
        return DeltaState(self)

    def wire_numel(self, numel: int) -> int:
        """At most, for elements of 4 bytes; see `room`."""
        return self.room(numel, None)

    def room(self, numel: int, dtype: torch.dtype | None) -> int:
        """At most, for elements of `dtype`."""
        return delta.most_nbytes(*_real(numel, dtype or torch.float32)) if numel else 0

    def anchor_numel(self, numel: int, dtype: torch.dtype) -> int:
        """The length of a payload that holds all elements as they are."""
        return delta.dense_nbytes(*_real(numel, dtype)) if numel else 0

    def _is_native(self, dtype: torch.dtype) -> bool:
        return dtype in DTYPES

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> int:
        return delta.encode_anchor(_real_values(values), wire, 1)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        if not delta.header_of(wire).is_anchor:
            raise BackendError("a delta payload of changes was decoded without the values that they are for")
        values = torch.empty_like(out)
        delta.apply(wire, _real_values(values))
        out.copy_(values)

    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        values = torch.empty_like(total)
        self._decode(wire, values)
        total.add_(values, alpha=scale)


@dataclass
class _Held:
    """What both ends of a part hold; `values` are real."""

    values: torch.Tensor
    version: int
    digest: int
    is_whole: bool = True


class DeltaState(CompressorState):
    """The parts of one operation as they were last sent and received, by their numbers.

    The first call, and one with another number of values, sends anchors. After a payload that does not fit
    what is held, the next call asks for anchors, with the lengths of payloads that it exchanges.
    """

    one_at_a_time = True

    def __init__(self, codec: Delta) -> None:
        super().__init__(codec)
        self._delta = codec
        self._sent: dict[Hashable, _Held] = {}
        self._received: dict[Hashable, _Held] = {}
        self.is_damaged = False

    @property
    def nbytes(self) -> int:
        """Bytes that are kept between calls."""
        return sum(held.values.nbytes for each in (self._sent, self._received) for held in each.values())

    def encode_part(self, index: int, values: torch.Tensor, wire: torch.Tensor) -> int:
        """See `CompressorState.encode_part`."""
        return self._encode_part(index, values, wire)

    def encode_for(
        self, index: Hashable, values: torch.Tensor, wire: torch.Tensor, version: int, digest: int
    ) -> int:
        """As `encode_part`, for a receiver that holds this version with this digest, see `holding`."""
        held = self._sent.get(index)
        fits = held is not None and (held.version, held.digest) == (version, digest)
        return self._encode_part(index, values, wire, None if fits else version)

    def _encode_part(
        self, index: Hashable, values: torch.Tensor, wire: torch.Tensor, other: int | None = None
    ) -> int:
        """Write a payload; if the receiver holds an `other` version, all values under a higher number."""
        _check(values)
        if not values.numel():
            self._sent.pop(index, None)
            return 0
        values, held = _real_values(values), self._sent.get(index)
        changes = held is not None and other is None and _alike(held.values, values)
        if held is None or not changes:
            version = 1 + max(0 if held is None else held.version, other or 0)
            written = delta.encode_anchor(values, wire, version)
            digest = delta.header_of(wire).digest
            self._sent[index] = _Held(values.clone(), version, digest)
            return written
        versions = (held.version, held.version + 1)
        written = delta.encode(values, held.values, wire, versions, held.digest, update=True)
        held.version, held.digest = versions[1], delta.header_of(wire).digest
        return written

    def anchor_part(self, index: int, wire: torch.Tensor) -> int:
        """Write all values of a part as they are, after `encode_part`; returns `Delta.anchor_numel`."""
        held = self._sent.get(index)
        if held is None:
            return 0
        return delta.encode_anchor(held.values, wire, held.version, windowed=False)

    def holding(self, index: Hashable) -> tuple[int, int]:
        """The version of a received part and its digest, which is 0 if what is held is not usable."""
        held = self._received.get(index)
        return (0, 0) if held is None else (held.version, held.digest if held.is_whole else 0)

    def decode_part(
        self, index: Hashable, wire: torch.Tensor, out: torch.Tensor, own: int | None = None
    ) -> None:
        """See `CompressorState.decode_part`; raises `BackendError` for a payload that does not fit."""
        _check(out)
        if not out.numel():
            self._received.pop(index, None)
            return
        out = _real_view(out)
        if own is not None:
            out.copy_(self._sent[own].values)
            return
        held = self._received.get(index)
        if held is None or not _alike(held.values, out):
            version = 0 if held is None else held.version
            held = self._received[index] = _Held(torch.empty_like(out), version, 0, is_whole=False)
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


def _check(values: torch.Tensor) -> None:
    if values.is_cuda:
        raise Unsupported("codec delta: tensors on CUDA; it has kernels for the CPU only")


def _alike(held: torch.Tensor, values: torch.Tensor) -> bool:
    return held.numel() == values.numel() and held.dtype is values.dtype


def _real(numel: int, dtype: torch.dtype) -> tuple[int, int]:
    """How many real numbers so many values are, and the bytes of one."""
    return (2 * numel, dtype.itemsize // 2) if dtype.is_complex else (numel, dtype.itemsize)


def _real_view(values: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(values).view(-1) if values.is_complex() else values


def _real_values(values: torch.Tensor) -> torch.Tensor:
    """Flat values as real numbers that begin at a multiple of 8 bytes."""
    values = _real_view(values)
    return values.clone() if values.data_ptr() % 8 else values
