"""Anonymous memory of the ranks of a host: a nameless memfd that they open through /proc."""

from __future__ import annotations

import mmap
import os


def made(size: int, name: str) -> tuple[mmap.mmap | None, int | None, str]:
    """Create memory; return it, its descriptor, and the place for `mapped`, or nothing if creation fails."""
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        return None, None, ""
    try:
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
    except OSError:
        return None, descriptor, ""
    return memory, descriptor, f"{os.getpid()}:{descriptor}:{os.fstat(descriptor).st_ino}"


def mapped(place: str, size: int) -> mmap.mmap | None:
    """Map the memory at a place that `made` returned in another process; return None if that fails."""
    try:
        pid, number, inode = place.split(":")
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        # In another PID namespace, the number may belong to another process: compare the inode.
        status = os.fstat(descriptor)
        if status.st_ino != int(inode) or status.st_size != size:
            return None
        return mmap.mmap(descriptor, size)
    except OSError:
        return None
    finally:
        os.close(descriptor)
