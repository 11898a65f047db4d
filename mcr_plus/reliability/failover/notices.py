"""Notices of disabled libraries in running processes: files that `mcr-plus doctor` reads on the same host.

From the first failure of a library until all libraries are back or their groups are closed, a process has a
file in the temporary directory, which only its user can read. Readers remove the files of killed processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from mcr_plus.core.environment import host_name
from mcr_plus.core.proc import read_stat, state_of

_PREFIX: Final = "mcr-off"


@dataclass(frozen=True)
class Notice:
    """A library that is off in a group. `since`: seconds since 1970."""

    pid: int
    rank: int
    group: str
    library: str
    takes_over: str
    reason: str
    since: float


_off: dict[object, Notice] = {}


def put(owner: object, rank: int, group: str, library: str, takes_over: str, reason: str) -> None:
    """Store that a library is off, for one channel of this process."""
    _off[owner] = Notice(os.getpid(), rank, group, library, takes_over, reason, time.time())
    _write()


def remove(owner: object) -> None:
    """Remove the notice of a channel: the library is back, or no longer used."""
    if _off.pop(owner, None) is not None:
        _write()


def running() -> list[Notice]:
    """Return the notices of all running processes of this user on this host."""
    found: list[Notice] = []
    here = _place()
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-{os.getuid()}-*"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor) as file:
                if os.fstat(descriptor).st_uid != os.getuid():
                    continue
                written = json.load(file)
            if written["place"] != here:
                continue
            if state_of(written["pid"], written["started"]) == "dead":
                path.unlink()
                continue
            found += [Notice(**each) for each in written["off"]]
    return sorted(found, key=lambda each: (each.library, each.group, each.rank))


def _write() -> None:
    """Replace the file of this process; errors, such as a full disk, do not disturb the job."""
    pid = os.getpid()
    stat = read_stat(pid)
    if stat is None:
        return
    # The start time distinguishes processes of other namespaces with the same pid.
    path = Path(tempfile.gettempdir(), f"{_PREFIX}-{os.getuid()}-{pid}-{stat[1]}")
    with contextlib.suppress(OSError):
        off = [asdict(each) for each in _off.values() if each.pid == pid]  # not from before a fork
        if not off:
            path.unlink(missing_ok=True)
            return
        half = path.with_name(f".{path.name}")
        half.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(half, flags, 0o600), "w") as file:
            json.dump({"pid": pid, "started": stat[1], "place": _place(), "off": off}, file)
        half.replace(path)


def _place() -> str:
    """Return the host and the pid namespace: pids are comparable only within both."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{host_name()} {namespace}"
