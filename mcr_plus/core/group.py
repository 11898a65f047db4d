"""Groups of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mcr_plus.errors import phrase_ranks


@dataclass(frozen=True)
class Group:
    """A set of ranks: global ranks in group order, and this process's rank among them."""

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
        """Group ranks of the other members."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    @cached_property
    def of_job(self) -> str:
        """Suffix of ranks in error texts: ` of the job`, or empty if group ranks equal ranks of the job."""
        return "" if self.ranks == tuple(range(self.size)) else " of the job"

    def named(self, *ranks: int) -> str:
        """Name group ranks in an error text, as ranks of the job: `rank 2 of the job`."""
        return f"{phrase_ranks([self.ranks[rank] for rank in ranks])}{self.of_job}"
