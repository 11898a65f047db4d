"""MSCCL's language: algorithm files are read, written, generated, simulated and verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mcr_plus.msccl.algorithm import Algorithm

FILES: Final[dict[str, Algorithm]] = {}
"""Algorithms of the configuration's files in this process's job, by name; see `msccl.catalog`."""
_GENERATED_CHANNELS: Final = 1


def channels(ranks: int) -> int:
    """Return the largest number of queues between two ranks that an algorithm for `ranks` ranks needs."""
    used = [algorithm.channels for algorithm in FILES.values() if algorithm.ranks == ranks]
    return max([_GENERATED_CHANNELS, *used])
