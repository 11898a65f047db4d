"""Groups of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Group:
    """A set of ranks: global ranks in group order, and which of them this process is."""

    name: str
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def local(self) -> dict[int, int]:
        """Global rank → group rank."""
        return {rank: index for index, rank in enumerate(self.ranks)}

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """Group ranks of the others."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)
