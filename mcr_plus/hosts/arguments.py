"""What a process beside ranks is to do, which it reads first."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final

NOTHING_LEFT: Final = 3
"""Exit status of a process in whose place another one has taken the order."""


def taken_order() -> Any:
    """The order, from standard input; the process ends where nothing of it is left.

    Processes that share a file as their standard input share the position in it: one of them gets all.
    """
    text = sys.stdin.buffer.read()
    if not text:
        os._exit(NOTHING_LEFT)
    return json.loads(text)
