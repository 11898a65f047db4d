"""Check of free shared memory for MPI, which otherwise exits without a message."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")
MPICH_RANK: Final = 5 << 18  # bytes that MPICH 5 writes for each rank: with less, MPI_Init ends in a SIGBUS
_REMEDY: Final = "docker run --shm-size=1g; mount -o remount,size=1g /dev/shm"


def lacking_shared_memory(folder: Path, needed: int, user: str) -> str:
    """Return an error text if `folder` has less than `needed` bytes free for `user`; else ''."""
    try:
        there = os.statvfs(folder)
    except OSError:  # no such folder: MPI uses another one
        return ""
    free = there.f_bavail * there.f_frsize
    if free >= needed:
        return ""
    return (
        f"{folder} has {free / (1 << 20):.1f} MiB free; {user} needs {needed / (1 << 20):.1f} MiB. "
        f"Enlarge it ({_REMEDY})"
    )
