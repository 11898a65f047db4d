"""The order of a process beside ranks: its arguments, which it reads first."""

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
