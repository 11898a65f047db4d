"""Who this process is, as other ranks are told of it."""

from __future__ import annotations

import os
from typing import Final

from mcr_plus.core.proc import read_stat
from mcr_plus.membership.rules import Process

DIED: Final = "process has died"
"""What is seen of a rank whose process has ended without a word."""
STOPPED: Final = "stopped"
"""What is seen of a rank whose process is stopped."""


def own_process(host: str, number: int) -> Process:
    """This process, as other ranks are told of it. `host`: the name of its host; `number`: see `Process`."""
    own = read_stat(os.getpid())
    return Process(os.getpid(), own[1] if own else "", f"{host} {_namespace()}", number)


def is_visible(own: Process, process: Process) -> bool:
    """Whether a process is in the same /proc as `own`, that of the caller."""
    return process.place == own.place and bool(own.started)


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
