"""What several operations of a kind need to travel as one: buffers, and the way in and out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Final

import torch

# How many parts a rank's input and output have, None for one per rank of the group. In a bucket each part
# holds the members' parts, one behind another.
_PARTS: Final[dict[str, tuple[int | None, int | None]]] = {
    "all_reduce": (1, 1),
    "broadcast": (1, 1),
    "all_gather": (1, None),
    "reduce_scatter": (None, 1),
    "all_to_all": (None, None),
}
_IN_PLACE: Final = ("all_reduce", "broadcast")


@dataclass
class Stock:
    """Bytes of the buffers that exist, and from how many on none are kept."""

    limit: int
    nbytes: int = 0


class Layout:
    """How operations of a kind lie in a bucket on `ranks` ranks, and the buffers kept for that.

    `given`, `taken`: parts of a rank's input and output. `in_place`: they are the same memory.
    `alignment`: every member begins at a multiple of so many elements, with zeros before it. `stock`:
    counts the bytes of all buffers that exist, of other layouts too, and bounds what is kept.
    """

    def __init__(self, kind: str, ranks: int, dtype: torch.dtype, stock: Stock, alignment: int = 1) -> None:
        self.alignment = alignment
        self.given, self.taken = (ranks if count is None else count for count in _PARTS[kind])
        self.in_place = kind in _IN_PLACE
        self.kind, self.dtype = kind, dtype
        self._stock = stock
        self._spaces: list[Space] = []

    @property
    def share(self) -> float:
        """What a bucket of b bytes, the larger of its input and output, needs of memory, relative to b."""
        return 1.0 if self.in_place else (self.given + self.taken) / max(self.given, self.taken)

    def shape(self, numel: int) -> tuple[int]:
        """The shape in the signature of one operation on `numel` elements in each part."""
        return (numel * (self.taken if self.kind == "reduce_scatter" else self.given),)

    def numel(self, numel: int) -> int:
        """The payload of one operation on `numel` elements in each part, in elements."""
        return numel * max(self.given, self.taken)

    def steps(self, numels: Sequence[int]) -> Sequence[int]:
        """Elements from the beginning of each member to that of the next."""
        alignment = self.alignment
        return numels if alignment == 1 else [-(-numel // alignment) * alignment for numel in numels]

    def take(self, numel: int, device: torch.device) -> Space:
        """Buffers for `numel` elements in each part: those of an earlier bucket, if they are large enough."""
        for index, space in enumerate(self._spaces):
            if space.numel >= numel:
                return self._spaces.pop(index)
        for space in self._spaces:  # too small: make way
            self._stock.nbytes -= space.nbytes
        self._spaces.clear()
        space = Space(self, 1 << (numel - 1).bit_length(), device)
        self._stock.nbytes += space.nbytes
        return space

    def views(self, space: Space, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The input and output of an operation on `numel` elements in each part; one tensor if in place."""
        source = space.source[: self.given * numel]
        return source, source if self.in_place else space.target[: self.taken * numel]

    def give_back(self, space: Space) -> None:
        """Keep buffers for the next bucket, if there is room for them."""
        if self._stock.nbytes <= self._stock.limit:
            self._spaces.append(space)
        else:
            self._stock.nbytes -= space.nbytes


class Space:
    """Input and output of one bucket, flat; the same tensor where the operation works in place."""

    __slots__ = ("nbytes", "numel", "source", "target")

    def __init__(self, layout: Layout, numel: int, device: torch.device) -> None:
        self.numel = numel
        self.source = torch.empty(layout.given * numel, dtype=layout.dtype, device=device)
        self.target = self.source
        self.nbytes = self.source.nbytes
        if not layout.in_place:
            self.target = torch.empty(layout.taken * numel, dtype=layout.dtype, device=device)
            self.nbytes += self.target.nbytes


@cache
def _pack() -> ModuleType:
    """Where this happens on the host; with it comes a compiler, which other jobs do without."""
    from mcr_plus.kernels import pack

    pack.prepare()
    return pack


def prepare(device: str) -> None:
    """Compile what `join` and `split` need, before an operation's deadline runs."""
    if device == "cpu":
        _pack()


def join(
    tensors: Sequence[torch.Tensor], numels: Sequence[int], out: torch.Tensor, rows: int, steps: Sequence[int]
) -> None:
    """Copy part r of every tensor, of `numels` elements, one behind another, into part r of `out`.

    `steps`: from the beginning of each to that of the next; what lies between becomes zero.
    """
    if out.is_cpu:
        _pack().gather(tensors, numels, out, rows, steps)
        return
    parts = [tensor.view(rows, -1) for tensor in tensors]
    if steps is not numels:
        gaps = [step - numel for step, numel in zip(steps, numels, strict=True)]
        parts = [torch.nn.functional.pad(part, (0, gap)) for part, gap in zip(parts, gaps, strict=True)]
    torch.cat(parts, 1, out=out.view(rows, -1))


def split(
    whole: torch.Tensor,
    numels: Sequence[int],
    outputs: Sequence[torch.Tensor],
    rows: int,
    steps: Sequence[int],
) -> None:
    """The reverse of `join`."""
    if whole.is_cpu:
        _pack().scatter(whole, numels, outputs, rows, steps)
        return
    parts = [tensor.view(rows, -1) for tensor in outputs]
    if steps is numels:
        torch.split_with_sizes_copy(whole.view(rows, -1), list(numels), 1, out=parts)
        return
    for part, padded in zip(parts, whole.view(rows, -1).split(list(steps), 1), strict=True):
        part.copy_(padded[:, : part.shape[1]])
