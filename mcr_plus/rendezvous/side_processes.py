"""The small processes beside ranks (`mcr_plus.hosts`): how they are started, without a long wait.

On a busy host a process may begin late, and a rank that waited for it would hold up all others.
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
_EACH: Final = 3.0  # seconds
_NAP: Final = 0.002
_late: list[subprocess.Popen[bytes]] = []  # of those that were not waited for any longer


def command(module: str) -> list[str]:
    """The command that runs `main` of a module, with the standard library and this package alone."""
    program = f"import sys; sys.path.insert(0, sys.argv[1]); from {module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", program, _ROOT]


def start_once(module: str, order: Mapping[str, Any], descriptors: Sequence[int]) -> str:
    """Start a process that ends as soon as its child has the order; returns why it has not, empty if it has.

    If it takes long, another one is started: the first of them to read takes the order, and the other one
    ends (`mcr_plus.hosts.arguments`). So one that was not waited for any longer may still do its work.
    Raises `OSError` if no process can be made.
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
    """Wait for a process that is about to end; not for long."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EACH)
    reap_later([process])


def reap_later(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Have those that have not ended reaped by one of the next calls, once they have."""
    _late[:] = [each for each in (*_late, *processes) if each.poll() is None]


@contextlib.contextmanager
def _readable(order: Mapping[str, Any]) -> Iterator[int]:
    """A file from which an order is read, of any length, without a writer that would have to wait."""
    descriptor = os.memfd_create("mcr_plus order", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(json.dumps(order).encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
