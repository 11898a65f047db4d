"""The base classes of codecs: traits, options, encoding and decoding."""

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
"""Kinds whose values arrive as they were sent."""
ENCODED: Final = frozenset({*MOVED, "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v"})
"""Kinds with a scheme. A kind without one is not compressed, whatever its row in `core.kinds` says."""


class CodecOptions(StageOptions):
    """Base of a codec's option model: frozen, unknown keys refused, no conversion between types."""


@dataclass(frozen=True)
class Traits:
    """The properties of a codec by which the compress stage composes collectives from it.

    Attributes:
        additive: the library may sum its payloads (see `Codec.rounds`).
        elementwise: a payload has one element for each value, in the same place.
        unbiased: the mean over many encodings of a value is the value.
        lossless: decoding gives the same bits.
        fixed_rate: a payload's length follows from the number of elements alone.
        sparse: a payload holds few of the elements; the others decode to zero.
        needs_error_feedback: without it training does not converge to the same loss.
        dtypes: those it encodes; others than float32 go through float32 unless the codec overrides that.
        alignment: in elements; a part that is encoded by itself should begin at a multiple of it.
        min_numel: fewer elements are not worth encoding and travel as they are.
        kinds: the kinds of operations it can be used with, None for all.
        cpu_only: it takes tensors on the CPU only.
        keeps_received: payloads hold changes, for which both ends keep what the receiver has.
        needs_triton: on a GPU, where its kernels are Triton's.
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
    """One native all_reduce of an additive codec: its buffer, and how it is reduced."""

    dtype: torch.dtype
    numel: int
    op: ReduceOp = "SUM"


class Codec(ABC):
    """Base of all codecs. Registered as the class; built with its checked `Options`.

    One object serves one operation or bucket, so it may keep state between calls.
    """

    Options: ClassVar[type[BaseModel]] = NoOptions
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    """Options of the codec and of the stage that `preset: NAME` stands for, by name."""
    name: ClassVar[str]
    traits: Traits

    def __init__(self, options: BaseModel | None = None) -> None:
        self.options = self.Options() if options is None else options

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options!r})"

    def config(self) -> dict[str, Any]:
        """The mapping that names this codec in a configuration or a call; JSON-able, see `make`."""
        return {"codec": self.name, **self.options.model_dump(mode="json", by_alias=True)}

    def caution(self, feedback: str | None) -> str | None:  # noqa: ARG002
        """What is known to cost quality where gradients get this codec; None if nothing is.

        `feedback`: how the error is compensated, as `CompressOptions.feedback` names it.
        """
        return None

    def enter(self, rank: int, key: str) -> None:  # noqa: B027 - most codecs need none of it
        """Called once before the first call, with this rank in the group and a key of the operation.

        `key` is equal on all ranks. Codecs that draw random numbers draw them by it.
        """

    def kept_state(self, copies: Copies) -> CompressorState | None:  # noqa: ARG002
        """A new state that encodes and decodes instead of the codec, with `keeps_received`; else None.

        `copies`: those of the group, in which the state counts what it holds.
        """
        return None

    def prepare(self, dtype: torch.dtype | None) -> None:  # noqa: B027
        """Have kernels compiled that depend on the dtype of the values, or those of all dtypes for None."""

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors that must outlive a restart, by name; equal on all ranks, and not copied."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:  # noqa: B027
        """Restore the tensors that `state` returned."""

    def refusal(self, shapes: Sequence[tuple[int, ...]]) -> str | None:  # noqa: ARG002
        """The reason why the codec cannot compress tensors of these shapes, laid end to end; None if it can.

        Depends on nothing but the shapes and the options, so that all ranks get the same answer.
        """
        return None

    def rounds(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> tuple[AdditiveRound, ...]:
        """The native all_reduces that make up one all_reduce of tensors of these shapes, laid end to end.

        For additive codecs; `ranks` is how many there are.
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
        """Turn `values` into their sum over ranks; pauses before each round is reduced.

        For additive codecs.

        Args:
            values: flat, contiguous, a dtype of `traits.dtypes`; overwritten when the iterator ends.
            shapes: of the tensors that lie end to end in `values`; their sizes sum to its size.
            wires: one flat tensor per round, to be filled before the pause and read after it.
            ranks: how many there are.
            left: flat float32, equal to `values`: the decoded values of this rank's part of the sum are
                subtracted, which leaves its residual. None without error feedback.
        """
        raise NotImplementedError


class PayloadCodec(Codec):
    """A codec that encodes tensors into flat payloads of `wire_dtype` and back.

    Payloads are the same on every device, and depend on nothing but the values, the options and, where the
    codec says so, its `enter` and the number of earlier calls.

    A subclass writes `wire_numel`, `_encode`, `_decode` and `_accumulate`, which see contiguous flat float32
    tensors and exact payloads; the public methods take any strides, shapes and `traits.dtypes`.
    """

    wire_dtype: torch.dtype = torch.uint8

    # -- to be written ----------------------------------------------------------------------------

    @abstractmethod
    def wire_numel(self, numel: int) -> int:
        """Elements of `wire_dtype` that a payload of `numel` values has; at most, if not `fixed_rate`."""

    @abstractmethod
    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> int | None:
        """Write the payload of flat float32 `values`; returns its length in elements if not `fixed_rate`."""

    @abstractmethod
    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Overwrite `out`, flat float32, with the payload's values."""

    @abstractmethod
    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        """Add `scale` times the payload's values to `total`, flat float32."""

    # -- to be used -------------------------------------------------------------------------------

    def wire_nbytes(self, numel: int, dtype: torch.dtype | None = None) -> int:
        """Bytes of a payload of `numel` values; at most, if not `fixed_rate`."""
        return self.room(numel, dtype) * self.wire_dtype.itemsize

    def room(self, numel: int, dtype: torch.dtype | None) -> int:  # noqa: ARG002
        """As `wire_numel`, where the length depends on the dtype of the values, None if it is not known."""
        return self.wire_numel(numel)

    def anchor_numel(self, numel: int, dtype: torch.dtype) -> int:
        """Elements of a payload with all values as they are, for codecs with `keeps_received`."""
        raise NotImplementedError

    def encode(self, values: torch.Tensor, wire: torch.Tensor) -> int:
        """Write the payload of `values` to the beginning of `wire`; returns its length in elements.

        Args:
            values: any shape and strides, a dtype of `traits.dtypes`.
            wire: flat, contiguous, `wire_dtype`, on the same device, at least `wire_numel(values.numel())`
                long, beginning at a multiple of 4 bytes.

        Raises `Unsupported` for another dtype, or a payload that is too short.
        """
        room = self.room(values.numel(), values.dtype)
        self._check(values, wire, room)
        if not values.numel():
            return 0
        written = self._encode(self._flat(values), wire[:room])
        return room if written is None else written

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Write a payload's values to `out`, of any shape and strides and a dtype of `traits.dtypes`.

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
        """Write the payload of `decay` × `rest` + `values`, and leave in `rest` what the payload lacks.

        What is not finite in the end becomes zero in `rest`. Overridden where one pass over memory can do it.

        Args:
            values: flat, a dtype of `traits.dtypes`.
            decay: the factor of `rest`.
            rest: flat float32, of the size of `values`; overwritten.
            wire: as for `encode`, whose result is returned.
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
        """Write `scale` × the sum of the payloads, in their order, to `total`: float32, flat, contiguous."""
        if scale == 1.0:  # one pass less than adding to zeros
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
        """Decode, sum and encode: write to `wire` the payload of `total` + `scale` × all of `wires`.

        Args:
            wires: a payload in each row of a tensor, rows at multiples of 4 bytes; or, if not `fixed_rate`,
                a list of them.
            total: as for `decode_accumulate`; holds the sum afterwards.
            wire: as for `encode`, whose result is returned.
            skip: a row that is left out, -1 for none.
            scale: the factor of decoded values.
        """
        for row, each in enumerate(wires):
            if row != skip:
                self.decode_accumulate(each, total, scale)
        return self.encode(total, wire)

    def clear(self, wire: torch.Tensor, values: torch.Tensor) -> None:
        """Set the elements of flat float32 `values` that a payload holds to zero. For sparse codecs."""
        raise NotImplementedError

    def rounds(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> tuple[AdditiveRound, ...]:  # noqa: ARG002, D102
        return (AdditiveRound(self.wire_dtype, self.wire_numel(sum(map(math.prod, shapes)))),)

    def exchange(  # noqa: D102
        self,
        values: torch.Tensor,
        shapes: Sequence[tuple[int, ...]],  # noqa: ARG002 - end to end they are as good as one
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
        """Whether `_encode` and `_decode` take this dtype as it is."""
        return dtype is torch.float32

    def _exact(self, wire: torch.Tensor, numel: int) -> torch.Tensor:
        """A payload without the rest of its slot."""
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
    """Set what is not finite to zero."""
    # On the host a sum is one read; on a GPU looking at it would wait for the device.
    if residual.is_cuda or not torch.isfinite(residual.sum()):
        torch.nan_to_num_(residual, 0.0, 0.0, 0.0)


def make(config: Mapping[str, Any]) -> Codec:
    """The codec of a mapping such as `{"codec": "int4_block", "hadamard": True}`; see `Codec.config`.

    Raises `Unsupported` for an unknown codec, and pydantic's `ValidationError` for options it does not take.
    """
    options = dict(config)
    factory: Any = registry.get("codecs", options.pop("codec"))
    codec: Codec = factory(factory.Options(**options))
    return codec
