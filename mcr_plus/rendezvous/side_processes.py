"""Start of the small processes beside ranks (`mcr_plus.hosts`), with a bounded wait.

On a busy host a process may begin late, and a rank that waited for it would delay all others.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mcr_plus.core.deadline import Deadline

_ROOT: Final = str(Path(__file__).resolve().parents[2])
_TRIES: Final = 2
_EACH: Final = 3.0  # s to wait for each start
_NAP: Final = 0.002
_late: list[subprocess.Popen[bytes]] = []  # processes that were not waited for any longer


def command(module: str) -> list[str]:
    """Return the command that runs `main` of a module with only the standard library and this package."""
    program = f"import sys; sys.path.insert(0, sys.argv[1]); from {module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", program, _ROOT]


def start_once(module: str, order: Mapping[str, Any], descriptors: Sequence[int]) -> str:
    """Start a process that ends once its child has the order; return why it has not, or ''.

    If that takes long, another process is started. The first of them to read takes the order, and the other
    ends (`mcr_plus.hosts.arguments`). So a process that was not waited for any longer may still do its work.
    Raises `OSError` if no process can be started.
    """
    begun: list[subprocess.Popen[bytes]] = []
    try:
        with _readable(order) as text:
            for _ in range(_TRIES):
                begun.append(
                    subprocess.Popen(
                        command(module),
                        stdin=text,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,
                        pass_fds=descriptors,
                    )
                )
                deadline = Deadline(_EACH)
                while not deadline.passed():
                    statuses = [each.poll() for each in begun]
                    if 0 in statuses:
                        return ""
                    if None not in statuses:
                        return f"the process has ended with status {statuses[-1]}"
                    time.sleep(_NAP)
    finally:
        reap_later(begun)
    return f"the process has not begun within {_TRIES * _EACH:g} s, and may begin later"


def wait_for(process: subprocess.Popen[bytes]) -> None:
    """Wait briefly for a process that is about to end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EACH)
    reap_later([process])


def reap_later(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Let a later call reap the processes that have not ended yet."""
    _late[:] = [each for each in (*_late, *processes) if each.poll() is None]


@contextlib.contextmanager
def _readable(order: Mapping[str, Any]) -> Iterator[int]:
    """Return a file from which an order of any length is read, so that no writer has to wait."""
    descriptor = os.memfd_create("mcr_plus order", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(json.dumps(order).encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
