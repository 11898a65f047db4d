"""The beginning of a process beside ranks: its order (arguments), and its detachment from the rank."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final

NOTHING_LEFT: Final = 3
"""Exit status of a process whose order another process has taken."""


def taken_order() -> Any:
    """Return the order from standard input; exit if another process has read it.

    Processes that share a file as their standard input share the position in it, so one of them gets all.
    """
    text = sys.stdin.buffer.read()
    if not text:
        os._exit(NOTHING_LEFT)
    return json.loads(text)


def detach() -> None:
    """Go on in a child that nobody has to wait for, without the standard streams; this process ends."""
    if os.fork():
        os._exit(0)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.close(nothing)
