"""Identity of this process, as published to other ranks."""

from __future__ import annotations

import os
from typing import Final

from mcr_plus.core.proc import read_stat
from mcr_plus.membership.rules import Process

DIED: Final = "process has died"
"""Evidence for a rank whose process has ended without notice."""
STOPPED: Final = "stopped"
"""Evidence for a rank whose process is stopped."""


def own_process(host: str, number: int) -> Process:
    """Return this process's identity. `host`: the name of its host; `number`: see `Process`."""
    own = read_stat(os.getpid())
    return Process(os.getpid(), own[1] if own else "", f"{host} {_namespace()}", number)


def is_visible(own: Process, process: Process) -> bool:
    """Return whether a process is in the same /proc as `own`, the caller's process."""
    return process.place == own.place and bool(own.started)


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
