"""Base classes of codecs: traits, options, encoding and decoding."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from pydantic import BaseModel

from mcr_plus import registry
from mcr_plus.config.options import NoOptions, StageOptions
from mcr_plus.core.kinds import KINDS, REDUCING, ReduceOp, dtype_name
from mcr_plus.errors import Unsupported

if TYPE_CHECKING:
    from mcr_plus.compression.copies import Copies
    from mcr_plus.compression.state import CompressorState

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

MOVED: Final = tuple(kind for kind in KINDS if kind not in REDUCING and kind != "barrier")
"""Kinds of operations that move values without reducing them."""
ENCODED: Final = frozenset({*MOVED, "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v"})
"""Kinds with a scheme. Other kinds are not compressed, whatever their row in `core.kinds` says."""


class CodecOptions(StageOptions):
    """Base of a codec's options: immutable, without unknown keys or conversions between types."""


@dataclass(frozen=True)
class Traits:
    """Properties of a codec, from which the compress stage composes collectives.

    Attributes:
        additive: the library may sum payloads (see `Codec.rounds`).
        elementwise: a payload has one element per value, in the same place.
        unbiased: the mean of many encodings of a value equals the value.
        lossless: decoding gives the same bits.
        fixed_rate: a payload's length depends only on the number of elements.
        sparse: a payload has few of the elements; the other elements decode to zero.
        needs_error_feedback: without error feedback, training does not converge to the same loss.
        dtypes: supported dtypes; all are converted to float32 unless the codec overrides this.
        alignment: separately encoded parts should begin at multiples of this number of elements.
        min_numel: tensors with fewer elements are sent unencoded.
        kinds: the supported kinds of operations, None for all.
        cpu_only: only tensors on the CPU are supported.
        keeps_received: a payload is a change to a value that sender and receiver both keep.
        needs_triton: kernels for GPUs need Triton.
    """

    additive: bool = False
    elementwise: bool = False
    unbiased: bool = False
    lossless: bool = False
    fixed_rate: bool = True
    sparse: bool = False
    needs_error_feedback: bool = False
    dtypes: tuple[torch.dtype, ...] = FLOATS
    alignment: int = 1
    min_numel: int = 1
    kinds: frozenset[str] | None = None
    cpu_only: bool = False
    keeps_received: bool = False
    needs_triton: bool = False


@dataclass(frozen=True)
class AdditiveRound:
    """Native all_reduce of an additive codec: its buffer and reduce op."""

    dtype: torch.dtype
    numel: int
    op: ReduceOp = "SUM"


class Codec(ABC):
    """Base class of all codecs. A codec class is registered, and constructed with validated `Options`.

    One object serves one operation or bucket, so it may keep state between calls.
    """

    Options: ClassVar[type[BaseModel]] = NoOptions
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    """Presets by name: the options of codec and stage that `preset: NAME` sets."""
    name: ClassVar[str]
    traits: Traits

    def __init__(self, options: BaseModel | None = None) -> None:
        self.options = self.Options() if options is None else options

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options!r})"

    def config(self) -> dict[str, Any]:
        """Return the JSON mapping that names this codec in a configuration or a call; see `make`."""
        return {"codec": self.name, **self.options.model_dump(mode="json", by_alias=True)}

    def caution(self, feedback: str | None) -> str | None:  # noqa: ARG002
        """Return a warning if this codec is known to reduce quality when it compresses gradients.

        `feedback`: the name of the error compensation, as in `CompressOptions.feedback`.
        """
        return None

    def enter(self, rank: int, key: str) -> None:  # noqa: B027 - most codecs do not need it
        """Set this rank in the group and the key of the operation, once before the first call.

        `key` is equal on all ranks, and seeds random numbers.
        """

    def kept_state(self, copies: Copies) -> CompressorState | None:  # noqa: ARG002
        """Return a new state that replaces a codec with `keeps_received`; None for other codecs.

        `copies`: the group's copies, which account for the memory of the state.
        """
        return None

    def prepare(self, dtype: torch.dtype | None) -> None:  # noqa: B027
        """Compile the kernels for a dtype of the values; None compiles them for all dtypes."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a restart needs, by name; equal on all ranks, and not copied."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:  # noqa: B027
        """Restore the tensors that `state` returned."""

    def refusal(self, shapes: Sequence[tuple[int, ...]]) -> str | None:  # noqa: ARG002
        """Return the reason why the codec cannot compress tensors of these shapes together; None if it can.

        The answer depends only on shapes and options, so all ranks get the same answer.
        """
        return None

    def rounds(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> tuple[AdditiveRound, ...]:
        """Return the native all_reduces that replace one all_reduce of concatenated tensors of these shapes.

        Only for additive codecs. `ranks`: number of ranks.
        """
        raise NotImplementedError

    def exchange(
        self,
        values: torch.Tensor,
        shapes: Sequence[tuple[int, ...]],
        wires: Sequence[torch.Tensor],
        ranks: int,
        left: torch.Tensor | None,
    ) -> Iterator[None]:
        """Turn `values` into their sum over ranks; yield before each round is reduced.

        Only for additive codecs.

        Args:
            values: flat and contiguous, with a dtype in `traits.dtypes`; overwritten when the iterator ends.
            shapes: shapes of the tensors concatenated in `values`.
            wires: one flat tensor per round, filled before the yield and read after it.
            ranks: the number of ranks.
            left: flat float32, equal to `values`; subtracting this rank's decoded contribution leaves its
                residual. None without error feedback.
        """
        raise NotImplementedError


class PayloadCodec(Codec):
    """Codec that encodes tensors into flat payloads of `wire_dtype` and back.

    Payloads are the same on every device. They depend only on the values, the options and, for some codecs,
    on `enter` and the number of earlier calls.

    A subclass implements `wire_numel`, `_encode`, `_decode` and `_accumulate` on contiguous flat float32
    tensors and exact payloads; the public methods take any strides, shapes and `traits.dtypes`.
    """

    wire_dtype: torch.dtype = torch.uint8

    # -- to be written ----------------------------------------------------------------------------

    @abstractmethod
    def wire_numel(self, numel: int) -> int:
        """Return the number of elements of a payload of `numel` values; the maximum if not `fixed_rate`."""

    @abstractmethod
    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> int | None:
        """Write the payload of flat float32 `values`; return the length in elements if not `fixed_rate`."""

    @abstractmethod
    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Overwrite `out`, flat float32, with the payload's values."""

    @abstractmethod
    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        """Add `scale` times the payload's values to `total`, flat float32."""

    # -- to be used -------------------------------------------------------------------------------

    def wire_nbytes(self, numel: int, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of a payload of `numel` values; the maximum if not `fixed_rate`."""
        return self.room(numel, dtype) * self.wire_dtype.itemsize

    def room(self, numel: int, dtype: torch.dtype | None) -> int:  # noqa: ARG002
        """Return `wire_numel` for values of `dtype`; None if the dtype is not known."""
        return self.wire_numel(numel)

    def anchor_numel(self, numel: int, dtype: torch.dtype) -> int:
        """Return the number of elements of an unencoded payload of all values (`keeps_received`)."""
        raise NotImplementedError

    def encode(self, values: torch.Tensor, wire: torch.Tensor) -> int:
        """Write the payload of `values` to the beginning of `wire`; return the length in elements.

        Args:
            values: any shape and strides, of a dtype in `traits.dtypes`.
            wire: flat and contiguous, of `wire_dtype` on the same device, at least
                `wire_numel(values.numel())` long, beginning at a multiple of 4 bytes.

        Raises `Unsupported` for another dtype, or a payload that is too short.
        """
        room = self.room(values.numel(), values.dtype)
        self._check(values, wire, room)
        if not values.numel():
            return 0
        written = self._encode(self._flat(values), wire[:room])
        return room if written is None else written

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Write a payload's values to `out`, of any shape and strides and a dtype in `traits.dtypes`.

        Raises `Unsupported` for another dtype, or a payload that is too short.
        """
        self._check(out, wire, self.wire_numel(out.numel()) if self.traits.fixed_rate else 0)
        if not out.numel():
            return
        wire = self._exact(wire, out.numel())
        if self._is_native(out.dtype) and out.is_contiguous():
            self._decode(wire, out.view(-1))
        else:
            flat = torch.empty(out.numel(), dtype=self._through(out.dtype), device=out.device)
            self._decode(wire, flat)
            out.copy_(flat.view(out.shape))

    def decode_accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float = 1.0) -> None:
        """Add `scale` times a payload's values to `total`: float32, flat and contiguous."""
        if total.numel():
            self._accumulate(self._exact(wire, total.numel()), total, scale)

    def encode_rest(self, values: torch.Tensor, decay: float, rest: torch.Tensor, wire: torch.Tensor) -> int:
        """Write the payload of `decay` × `rest` + `values`, and the encoding error to `rest`.

        Non-finite errors become zero. Codecs override this method if one pass over memory is enough.

        Args:
            values: flat, of a dtype in `traits.dtypes`.
            decay: the factor of `rest`.
            rest: flat float32, of the size of `values`; overwritten.
            wire: as in `encode`, like the returned length.
        """
        if decay != 1.0:
            rest.mul_(decay)
        written = self.encode(rest.add_(values), wire)
        self.decode_accumulate(wire[:written], rest, -1.0)
        drop_unless_finite(rest)
        return written

    def sum_payloads(
        self, wires: torch.Tensor | Sequence[torch.Tensor], total: torch.Tensor, scale: float
    ) -> None:
        """Write `scale` × the sum of the payloads, added in order, to `total`: float32, flat, contiguous."""
        if scale == 1.0:  # decoding the first payload saves a pass over zeros
            self.decode(wires[0], total)
            wires = wires[1:]
        else:
            total.zero_()
        for wire in wires:
            self.decode_accumulate(wire, total, scale)

    def reduce(
        self,
        wires: torch.Tensor | Sequence[torch.Tensor],
        total: torch.Tensor,
        wire: torch.Tensor,
        *,
        skip: int,
        scale: float = 1.0,
    ) -> int:
        """Decode, sum and encode: write the payload of `total` + `scale` × all of `wires` to `wire`.

        Args:
            wires: a tensor with one payload per row, at multiples of 4 bytes; a list if not `fixed_rate`.
            total: as for `decode_accumulate`; holds the sum afterwards.
            wire: as in `encode`, like the returned length.
            skip: the row to omit, -1 for none.
            scale: the factor of decoded values.
        """
        for row, each in enumerate(wires):
            if row != skip:
                self.decode_accumulate(each, total, scale)
        return self.encode(total, wire)

    def clear(self, wire: torch.Tensor, values: torch.Tensor) -> None:
        """Zero the elements of flat float32 `values` that a payload holds. For sparse codecs."""
        raise NotImplementedError

    def rounds(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> tuple[AdditiveRound, ...]:  # noqa: ARG002, D102
        return (AdditiveRound(self.wire_dtype, self.wire_numel(sum(map(math.prod, shapes)))),)

    def exchange(  # noqa: D102
        self,
        values: torch.Tensor,
        shapes: Sequence[tuple[int, ...]],  # noqa: ARG002 - concatenated, they are encoded as one
        wires: Sequence[torch.Tensor],
        ranks: int,  # noqa: ARG002
        left: torch.Tensor | None,
    ) -> Iterator[None]:
        (wire,) = wires
        self.encode(values, wire)
        if left is not None:
            self.decode_accumulate(wire, left, -1.0)
        yield
        self.decode(wire, values)

    # -- helpers ----------------------------------------------------------------------------------

    def _is_native(self, dtype: torch.dtype) -> bool:
        """Return True if `_encode` and `_decode` take this dtype without conversion."""
        return dtype is torch.float32

    def _exact(self, wire: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the payload without the unused end of its slot."""
        return wire[: self.wire_numel(numel)] if self.traits.fixed_rate else wire

    def _through(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self._is_native(dtype) else torch.float32

    def _flat(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._through(values.dtype)).reshape(-1)

    def _check(self, values: torch.Tensor, wire: torch.Tensor, room: int) -> None:
        if values.dtype not in self.traits.dtypes:
            known = ", ".join(map(dtype_name, self.traits.dtypes))
            raise Unsupported(f"codec {self.name}: {dtype_name(values.dtype)}; expected one of {known}")
        if wire.dtype is not self.wire_dtype or wire.numel() < room:
            raise Unsupported(
                f"codec {self.name}: a payload of {values.numel()} values is {room} × "
                f"{dtype_name(self.wire_dtype)}, got {wire.numel()} × {dtype_name(wire.dtype)}"
            )


def drop_unless_finite(residual: torch.Tensor) -> None:
    """Set non-finite elements to zero."""
    # On the host, a sum is a cheap first check. On a GPU, reading a sum would wait for the device.
    if residual.is_cuda or not torch.isfinite(residual.sum()):
        torch.nan_to_num_(residual, 0.0, 0.0, 0.0)


def make(config: Mapping[str, Any]) -> Codec:
    """Return the codec of a mapping such as `{"codec": "int4_block", "hadamard": True}`; see `Codec.config`.

    Raises `Unsupported` for an unknown codec, and pydantic's `ValidationError` for invalid options.
    """
    options = dict(config)
    factory: Any = registry.get("codecs", options.pop("codec"))
    codec: Codec = factory(factory.Options(**options))
    return codec
