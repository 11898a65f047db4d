"""The tensors of a module or a state dict, and flat buffers of their bits, for weight synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

import torch

from mcr_plus.core.kinds import dtype_name
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.kernels.digest import digest

Source = torch.nn.Module | Mapping[str, torch.Tensor]
_WIDTHS: Final = (1, 2, 4, 8)


class Entry(NamedTuple):
    """A tensor as ranks compare it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"'{self.name}' of shape {list(self.shape)}, {self.dtype}"


def named_tensors(source: Source) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module, or the tensors of a mapping; those that share memory once.

    Complex tensors appear as real ones with a last dimension of 2. Raises `InvalidArgument` for values that
    have no bits of their own on this rank.
    """
    if isinstance(source, torch.nn.Module):
        pairs: Iterator[tuple[str, object]] = iter([*source.named_parameters(), *source.named_buffers()])
    elif isinstance(source, Mapping):
        pairs = iter(source.items())
    else:
        raise InvalidArgument(f"sync: expected a module or a mapping of tensors, got {short(source)}")
    found: list[tuple[str, torch.Tensor]] = []
    seen: set[object] = set()
    for name, value in pairs:
        tensor = _real(name, value)
        if tensor.numel():
            place = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype)
            if place in seen:
                continue
            seen.add(place)
        found.append((name, tensor))
    if not found:
        raise InvalidArgument(f"sync: {type(source).__name__} has no tensors")
    return found


def _real(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(f"sync: '{name}' is {short(value)}; expected tensors alone")
    if type(value).__name__ == "DTensor":
        raise InvalidArgument(
            f"sync: '{name}' is a DTensor, of which this rank has a part; expected whole tensors: "
            "mcr.redistribution brings them together"
        )
    if value.is_meta or value.layout is not torch.strided or value.is_quantized:
        what = "on the device meta" if value.is_meta else "sparse or quantized"
        raise InvalidArgument(f"sync: '{name}' is {what}; expected a dense tensor with values")
    if torch.nn.parameter.is_lazy(value):
        raise InvalidArgument(f"sync: '{name}' has no shape yet; expected a model that has run once")
    tensor = value.detach()
    if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise InvalidArgument(
            f"sync: '{name}' is expanded, so that its elements share memory; expected a copy"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(f"sync: '{name}' is a conjugated view; expected resolve_conj() of it")
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.element_size() not in _WIDTHS:
        raise InvalidArgument(f"sync: '{name}' is {dtype_name(tensor.dtype)}; expected 1 to 8 bytes a value")
    return tensor


class Weights:
    """Where the tensors of a source lie in flat buffers, one for each dtype, in the order of the source.

    Buffers are on the CPU. They are read and written tensor by tensor, whatever their strides and devices.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.entries = [_entry(name, tensor) for name, tensor in named_tensors(source)]
        sizes: dict[str, int] = {}
        self._places: list[tuple[str, int, int]] = []
        self._dtypes: dict[str, torch.dtype] = {}
        for (_, tensor), entry in zip(named_tensors(source), self.entries, strict=True):
            at = sizes.get(entry.dtype, 0)
            self._places.append((entry.dtype, at, tensor.numel()))
            self._dtypes[entry.dtype] = tensor.dtype
            sizes[entry.dtype] = at + tensor.numel()
        self.sizes = list(sizes.values())
        self.dtypes = list(self._dtypes.values())
        self._index = {name: number for number, name in enumerate(sizes)}
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
            self.entries, [_entry(*each) for each in named], "at mcr.sync it had", "now it has"
        )
        if difference is not None:
            raise InvalidArgument(f"sync: the weights have changed: {difference}; call mcr.sync again")
        with torch.no_grad():
            for (_, tensor), (dtype, at, numel) in zip(named, self._places, strict=True):
                copy(tensor, buffers[self._index[dtype]][at : at + numel].view(tensor.shape))


def _entry(name: str, tensor: torch.Tensor) -> Entry:
    return Entry(name, tuple(tensor.shape), dtype_name(tensor.dtype))


def first_difference(first: Sequence[Entry], second: Sequence[Entry], one: str, other: str) -> str | None:
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
    return digest(torch.tensor([each - (1 << 64) if each >> 63 else each for each in digests], device="cpu"))
