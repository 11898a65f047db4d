"""Tensors of a module or a state dict, and flat buffers of their bits, for weight synchronisation."""

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
    """Name, shape and dtype of a tensor, to notice a later change. `placements`: of a DTensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: str = ""

    def __str__(self) -> str:
        placed = f", placed as {self.placements}" if self.placements else ""
        return f"'{self.name}' of shape {list(self.shape)}, {self.dtype}{placed}"


class Named(NamedTuple):
    """A tensor as given, and its bits on this rank as a real tensor of any strides and device."""

    entry: TensorIdentity
    given: torch.Tensor
    local: torch.Tensor


def named_tensors(source: Source) -> list[Named]:
    """Return parameters and buffers of a module, or tensors of a mapping; tensors that share memory once.

    A DTensor counts as this rank's local tensor, a complex tensor as a real one with a last dimension of 2.
    Raises `InvalidArgument` for values without bits of their own on this rank.
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
    return type(value).__name__ == "DTensor"  # importing the class takes a second


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
    """This rank's shard of a tensor, and the position of each box in the local tensor.

    `places`: None if the local tensor is the only box. `is_packed`: see `Layout`.
    """

    held: HeldShard
    places: Ints | None = None
    is_packed: bool = False


class _Slice(NamedTuple):
    """A box of a local tensor, and the range of its elements in a buffer.

    `packed`: for a packed tensor, the range in the first dimension of the surrounding box, and its extents.
    """

    bounds: tuple[slice, ...]
    packed: tuple[int, int, tuple[int, ...]] | None
    buffer: int
    begin: int
    end: int

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of the local tensor."""
        if self.packed is not None:
            begin, end, extents = self.packed
            local = local[begin:end].view(extents)
        return local[self.bounds]


class Weights:
    """Tensors of a rank; after `lay`, parts of them are copied to and from flat buffers on the CPU.

    Tensors are read and written box by box, whatever their strides and devices.

    Attributes:
        held: this rank's shard of each tensor.
        is_whole: whether every tensor is whole on this rank.
        sizes, dtypes: number of elements and dtype of each buffer.
        numel, nbytes: elements and bytes of all buffers.
    """

    def __init__(self, source: Source, layout: Layouts | None = None, rank: int = 0) -> None:
        """Read the tensors' identities. `layout`: by name, the layouts of sharded tensors."""
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
        """Assign a buffer to each of these parts."""
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
        """Return new buffers of zeros."""
        return [
            torch.zeros(n, dtype=dtype, device="cpu")
            for n, dtype in zip(self.sizes, self.dtypes, strict=True)
        ]

    def read(self, buffers: Sequence[torch.Tensor]) -> None:
        """Copy the tensors to buffers. Raises `InvalidArgument` if anything but their values has changed."""
        self._each(buffers, lambda tensor, view: view.copy_(tensor))

    def write(self, buffers: Sequence[torch.Tensor]) -> None:
        """Copy buffers to the tensors, in place; raises like `read`."""
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
        with torch.inference_mode():  # outside of it, tensors made in inference mode cannot be written
            for each, slices in zip(named, self._slices, strict=True):
                for one in slices:
                    view = one.of(each.local)
                    copy(view, buffers[one.buffer][one.begin : one.end].view(view.shape))


def _checked(layout: Layouts | None, names: set[str], rank: int) -> dict[str, Layout]:
    """Return the layouts of tensors of which this rank has a part; raises `InvalidArgument`."""
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
    """Return a rank's shard by a layout or a DTensor's placements; without either, the whole tensor."""
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
    """Yield the local positions of boxes that lie one after another in a buffer from `at` on.

    A box that lies inside several boxes of the local tensor is yielded for each of them.
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
    """Describe the first place in which two lists of tensors differ; None if they are equal."""
    for number, (left, right) in enumerate(zip_longest(first, second)):
        if left != right:
            return f"tensor {number}: {one} {left or 'no more tensors'}, {other} {right or 'no more tensors'}"
    return None


def digest_of(buffers: Sequence[torch.Tensor]) -> list[int]:
    """Return the digest of each buffer."""
    return [digest(buffer) for buffer in buffers]


def combined(digests: Sequence[int]) -> int:
    """Return one digest for the digests of all buffers."""
    words = [each - (1 << 64) if each >> 63 else each for each in digests]
    return digest(torch.tensor(words, dtype=torch.int64, device="cpu"))
