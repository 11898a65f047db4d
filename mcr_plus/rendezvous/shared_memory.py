"""Whether ranks of a host have enough memory to share for MPI: with too little, it ends without a word."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")
MPICH_RANK: Final = 5 << 18  # bytes that MPICH 5 writes for each rank: with less, MPI_Init ends in a SIGBUS
_REMEDY: Final = "docker run --shm-size=1g; mount -o remount,size=1g /dev/shm"


def lacking_shared_memory(folder: Path, needed: int, who: str) -> str:
    """Say what is missing if `folder` has less than `needed` bytes free for `who`; empty if it has them."""
    try:
        there = os.statvfs(folder)
    except OSError:  # there is none: MPI uses another place
        return ""
    free = there.f_bavail * there.f_frsize
    if free >= needed:
        return ""
    return (
        f"{folder} has {free / (1 << 20):.1f} MiB free; {who} needs {needed / (1 << 20):.1f} MiB. "
        f"Enlarge it ({_REMEDY})"
    )
