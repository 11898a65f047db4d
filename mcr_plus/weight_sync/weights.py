"""The tensors of a module or a state dict, and flat buffers of their bits, for weight synchronisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from mcr_plus.core.kinds import dtype_name
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.kernels.digest import digest
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.regions import Boxes, Ints, meet_all
from mcr_plus.weight_sync.shards import HeldShard, ShardAssignment, held_by

Source = torch.nn.Module | Mapping[str, torch.Tensor]
Layouts = Mapping[str, Layout]
_WIDTHS: Final = (1, 2, 4, 8)


class TensorIdentity(NamedTuple):
    """A tensor of this rank, to find out whether it is another one later. `placements`: of a DTensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: str = ""

    def __str__(self) -> str:
        placed = f", placed as {self.placements}" if self.placements else ""
        return f"'{self.name}' of shape {list(self.shape)}, {self.dtype}{placed}"


class Named(NamedTuple):
    """A tensor as it was given, and its bits on this rank: a real tensor, whatever its strides and device."""

    entry: TensorIdentity
    given: torch.Tensor
    local: torch.Tensor


def named_tensors(source: Source) -> list[Named]:
    """Parameters and buffers of a module, or the tensors of a mapping; those that share memory once.

    Of a DTensor, this rank's local tensor. Complex tensors appear as real ones with a last dimension of 2.
    Raises `InvalidArgument` for values that have no bits of their own on this rank.
    """
    if isinstance(source, torch.nn.Module):
        pairs: Iterator[tuple[str, object]] = iter([*source.named_parameters(), *source.named_buffers()])
    elif isinstance(source, Mapping):
        pairs = iter(source.items())
    else:
        raise InvalidArgument(f"sync: expected a module or a mapping of tensors, got {short(source)}")
    found: list[Named] = []
    seen: set[object] = set()
    for name, value in pairs:
        tensor, placements = _real(name, value)
        if tensor.numel():
            place = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype)
            if place in seen:
                continue
            seen.add(place)
        entry = TensorIdentity(name, tuple(tensor.shape), dtype_name(tensor.dtype), placements)
        assert isinstance(value, torch.Tensor)
        found.append(Named(entry, value, tensor))
    if not found:
        raise InvalidArgument(f"sync: {type(source).__name__} has no tensors")
    return found


def _is_dtensor(value: object) -> bool:
    return type(value).__name__ == "DTensor"  # the class takes a second to import


def _real(name: str, value: object) -> tuple[torch.Tensor, str]:
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(f"sync: '{name}' is {short(value)}; expected tensors alone")
    placements = ""
    if _is_dtensor(value):
        whole: Any = value
        with torch.no_grad():
            placements, value = str(whole.placements), whole.to_local()
        assert isinstance(value, torch.Tensor)
    if value.is_meta or value.layout is not torch.strided or value.is_quantized:
        what = "on the device meta" if value.is_meta else "sparse or quantized"
        raise InvalidArgument(f"sync: '{name}' is {what}; expected a dense tensor with values")
    if torch.nn.parameter.is_lazy(value):
        raise InvalidArgument(f"sync: '{name}' has no shape yet; expected a model that has run once")
    tensor = value.detach()
    places = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel() and any(step == 0 and size > 1 for size, step in places):
        raise InvalidArgument(
            f"sync: '{name}' is expanded, so that its elements share memory; expected a copy"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(f"sync: '{name}' is a conjugated view; expected resolve_conj() of it")
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.element_size() not in _WIDTHS:
        raise InvalidArgument(f"sync: '{name}' is {dtype_name(tensor.dtype)}; expected 1 to 8 bytes a value")
    return tensor, placements


class _Local(NamedTuple):
    """What this rank holds of a tensor, and where each box begins in the local tensor.

    `places`: None where the local tensor is the only box. `is_packed`: see `Layout`.
    """

    held: HeldShard
    places: Ints | None = None
    is_packed: bool = False


class _Slice(NamedTuple):
    """A box of a local tensor, and where its elements lie in a buffer.

    `packed`: begin and end in the first dimension, and the extents, of the box of a packed tensor around it.
    """

    bounds: tuple[slice, ...]
    packed: tuple[int, int, tuple[int, ...]] | None
    buffer: int
    begin: int
    end: int

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The box as a view."""
        if self.packed is not None:
            begin, end, extents = self.packed
            local = local[begin:end].view(extents)
        return local[self.bounds]


class Weights:
    """The tensors of a rank, of which parts lie in flat buffers on the CPU once `lay` has been called.

    Tensors are read and written box by box, whatever their strides and devices.

    Attributes:
        held: what this rank holds of each tensor.
        is_whole: whether that is all of each.
        sizes, dtypes: of the buffers.
        numel, nbytes: of all buffers.
    """

    def __init__(self, source: Source, layout: Layouts | None = None, rank: int = 0) -> None:
        """`layout`: of tensors of which a rank of the job, `rank`, has parts, by name."""
        self.source = source
        named = named_tensors(source)
        layouts = _checked(layout, {each.entry.name for each in named}, rank)
        self.entries = [each.entry for each in named]
        self._locals = [_local(each, layouts.get(each.entry.name), rank) for each in named]
        self.held = [each.held for each in self._locals]
        self.is_whole = not layouts and not any(map(_is_dtensor, (each.given for each in named)))
        self._slices: list[list[_Slice]] = [[] for _ in named]
        self.sizes: list[int] = []
        self.dtypes: list[torch.dtype] = []
        self.numel = self.nbytes = 0

    def lay(self, parts: Sequence[ShardAssignment]) -> None:
        """Have a buffer for each of these parts."""
        self._slices = [[] for _ in self.held]
        number_of = {each.name: number for number, each in enumerate(self.held)}
        self.sizes, self.dtypes = [], [getattr(torch, part.dtype) for part in parts]
        for buffer, part in enumerate(parts):
            at = 0
            for name, boxes in part.boxes:
                number = number_of[name]
                self._slices[number] += _slices(self._locals[number], boxes, buffer, at)
                at += int(boxes.volumes.sum())
            self.sizes.append(at)
        self.numel = sum(self.sizes)
        self.nbytes = sum(n * dtype.itemsize for n, dtype in zip(self.sizes, self.dtypes, strict=True))

    def buffers(self) -> list[torch.Tensor]:
        """New buffers of zeros."""
        return [
            torch.zeros(n, dtype=dtype, device="cpu")
            for n, dtype in zip(self.sizes, self.dtypes, strict=True)
        ]

    def read(self, buffers: Sequence[torch.Tensor]) -> None:
        """Copy the tensors to buffers. Raises `InvalidArgument` if they have changed but for their values."""
        self._each(buffers, lambda tensor, view: view.copy_(tensor))

    def write(self, buffers: Sequence[torch.Tensor]) -> None:
        """Copy buffers to the tensors, in place; raises as `read`."""
        self._each(buffers, lambda tensor, view: tensor.copy_(view))

    def _each(
        self, buffers: Sequence[torch.Tensor], copy: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> None:
        named = named_tensors(self.source)
        difference = first_difference(
            self.entries, [each.entry for each in named], "at mcr.sync it had", "now it has"
        )
        if difference is not None:
            raise InvalidArgument(f"sync: the weights have changed: {difference}; call mcr.sync again")
        with torch.inference_mode():  # outside of which tensors that were made in it cannot be written
            for each, slices in zip(named, self._slices, strict=True):
                for one in slices:
                    view = one.of(each.local)
                    copy(view, buffers[one.buffer][one.begin : one.end].view(view.shape))


def _checked(layout: Layouts | None, names: set[str], rank: int) -> dict[str, Layout]:
    """The layouts of tensors of which this rank has a part; raises `InvalidArgument`."""
    if layout is None:
        return {}
    if not isinstance(layout, Mapping):
        raise InvalidArgument(f"sync: layout: expected a mapping of names to mcr.Layout, got {short(layout)}")
    for name, each in layout.items():
        if not isinstance(each, Layout):
            raise InvalidArgument(f"sync: layout[{name!r}]: expected an mcr.Layout, got {short(each)}")
        shape = each.local_shape(rank)
        if name not in names and shape is not None and np.prod(shape):
            raise InvalidArgument(
                f"sync: layout[{name!r}]: {each} gives rank {rank} a part, but there is no tensor '{name}'; "
                f"tensors: {short(sorted(names))}"
            )
    return {name: each for name, each in layout.items() if name in names}


def _local(named: Named, layout: Layout | None, rank: int) -> _Local:
    """What a rank holds by a layout, or by the placements of a DTensor; without either, all of the tensor."""
    name, local = named.entry.name, named.local
    if layout is None:
        if not _is_dtensor(named.given):
            is_complex = named.given.is_complex()
            return _Local(HeldShard(name, named.entry.shape, named.entry.dtype, is_complex=is_complex))
        layout = Layout.of(named.given)  # type: ignore[arg-type]
    if layout.is_partial:
        raise InvalidArgument(
            f"sync: '{name}' is an addend of a sum, by its layout {layout}; expected values: "
            "mcr.redistribute adds them up"
        )
    tail = (2,) if named.given.is_complex() else ()
    expected, found = layout.local_shape(rank), local.shape[: local.ndim - len(tail)]
    if expected is None or found != expected:
        part = "no part" if expected is None else f"a tensor of shape {list(expected)}"
        raise InvalidArgument(
            f"sync: '{name}': its layout, {layout}, gives rank {rank} {part}, and its local tensor has shape "
            f"{list(found)}"
        )
    own = layout.pieces(rank)
    places = np.concatenate([layout.places[own], np.zeros((len(own), len(tail)), np.int64)], axis=1)
    return _Local(held_by(name, layout, rank, named.entry.dtype, tail), places, layout.packed)


def _slices(local: _Local, boxes: Boxes, buffer: int, at: int) -> Iterator[_Slice]:
    """Where the elements of boxes, which lie one after another in a buffer from `at` on, are on this rank.

    A box that lies inside several boxes of the local tensor is in all of them.
    """
    ends = at + boxes.volumes.cumsum()
    own = local.held.bounds
    which, around, common = meet_all(boxes, own)
    lows, highs = (side - own.lows[around] for side in common)
    places = np.zeros_like(own.lows) if local.places is None else local.places
    if not local.is_packed:
        lows, highs = lows + places[around], highs + places[around]
    for number, box, low, high in zip(which.tolist(), around.tolist(), lows, highs, strict=True):
        packed = None
        if local.is_packed:
            extents = tuple((own.highs[box] - own.lows[box]).tolist())
            begin = int(places[box, 0])
            packed = begin, begin + math.prod(extents[: len(extents) + 1 - places.shape[1]]), extents
        end = int(ends[number])
        bounds = tuple(map(slice, low.tolist(), high.tolist()))
        yield _Slice(bounds, packed, buffer, end - int(boxes.volumes[number]), end)


def first_difference(first: Sequence[object], second: Sequence[object], one: str, other: str) -> str | None:
    """The first place in which two lists of tensors differ, in words; None if they are the same."""
    for number, (left, right) in enumerate(zip_longest(first, second)):
        if left != right:
            return f"tensor {number}: {one} {left or 'no more tensors'}, {other} {right or 'no more tensors'}"
    return None


def digest_of(buffers: Sequence[torch.Tensor]) -> list[int]:
    """The digest of each buffer."""
    return [digest(buffer) for buffer in buffers]


def combined(digests: Sequence[int]) -> int:
    """One digest for those of all buffers."""
    words = [each - (1 << 64) if each >> 63 else each for each in digests]
    return digest(torch.tensor(words, dtype=torch.int64, device="cpu"))
