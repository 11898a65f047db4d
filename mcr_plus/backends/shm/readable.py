"""Probe whether ranks can read each other's memory by process_vm_readv(2), when a segment is opened.

The kernel asks for the right to trace a process, which Yama's `ptrace_scope`, seccomp filters and namespaces
of users and processes may refuse. So each rank reads a random number in the memory of every peer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

PROCESS_AT: Final = 72
"""Offset in a rank's line of its pid, the address of its number, and the number."""
VERDICT_AT: Final = 96
READS: Final = 1
"""Verdict: this rank reads the memory of all peers."""
REFUSED: Final = 2
_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_uint64), ("length", ctypes.c_size_t))


class Probe:
    """This rank's number, for peers to read, and what this rank finds at peers."""

    def __init__(self, memory: mmap.mmap, rank: int, lines: Sequence[int]) -> None:
        """Publish the number in this rank's line; peers may probe after a synchronisation."""
        self._memory, self._rank, self._lines = memory, rank, lines
        self._number = ctypes.c_uint64(int.from_bytes(os.urandom(8), "little"))
        words = os.getpid(), ctypes.addressof(self._number), self._number.value
        struct.pack_into("=3Q", memory, lines[rank] + PROCESS_AT, *words)

    def run(self) -> str:
        """Read the numbers of all peers, and publish the verdict; return why a peer cannot be read, or ''."""
        problem = ""
        for rank, line in enumerate(self._lines):
            if rank != self._rank and not problem:
                pid, address, number = struct.unpack_from("=3Q", self._memory, line + PROCESS_AT)
                found, problem = read(pid, address)
                if not problem and found != number:
                    problem = f"process {pid} is not a rank of this job: ranks are in several PID namespaces"
        verdict = REFUSED if problem else READS
        struct.pack_into("=Q", self._memory, self._lines[self._rank] + VERDICT_AT, verdict)
        return problem


def read(pid: int, address: int) -> tuple[int, str]:
    """Return the 64-bit integer at `address` of a process, and '' or why it cannot be read."""
    found, libc = ctypes.c_uint64(), ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return 0, "the C library has no process_vm_readv"
    here, there = _Range(ctypes.addressof(found), 8), _Range(address, 8)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if libc.process_vm_readv(pid, ctypes.byref(here), one, ctypes.byref(there), one, none) == 8:
        return found.value, ""
    code = ctypes.get_errno()
    hint = _forbidden() if code == errno.EPERM else ""
    return 0, f"process_vm_readv: {os.strerror(code)}{hint and f' ({hint})'}"


def why_not() -> str:
    """Return why ranks of this user would not read each other's memory, or ''; for `mcr-plus doctor`."""
    number = ctypes.c_uint64()
    return read(os.getpid(), ctypes.addressof(number))[1] or _forbidden()


def _forbidden() -> str:
    scope = _YAMA.read_text().strip() if _YAMA.exists() else "0"
    allowed = scope == "0" or (scope in ("1", "2") and os.geteuid() == 0)
    return "" if allowed else f"{_YAMA} is {scope}, and 0 would allow it"
