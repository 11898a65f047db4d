"""Where a thread of the program stands: its Python frames, without those of mcr_plus itself."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Final, NamedTuple

FRAMES: Final = 32
"""How many frames are taken at most."""
_OWN: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED: Final = re.compile(r"^<|/(site|dist)-packages/|/lib/python3\.\d+/")


class Frame(NamedTuple):
    """A function that has not returned: its name, its file, and the line that it is at."""

    name: str
    filename: str
    line: int


def waiting_frames(limit: int = FRAMES) -> list[Frame]:
    """The frames of the calling thread, the innermost first, without those of mcr_plus.

    For code of mcr_plus that waits: the first frame is then the line of the program, or of torch, that called
    the operation. Takes some microseconds.
    """
    return _outside(sys._getframe(1), limit)


def frames_of(thread: int, limit: int = FRAMES) -> list[Frame]:
    """The same of any thread, by its `threading.get_ident()`; empty if it has ended."""
    return _outside(sys._current_frames().get(thread), limit)


def call_site(frames: Sequence[Frame]) -> Frame | None:
    """The frame to show where there is room for one: the innermost that is of no installed package."""
    own = (frame for frame in frames if not _INSTALLED.search(frame.filename))
    return next(own, frames[0] if frames else None)


def _outside(frame: FrameType | None, limit: int) -> list[Frame]:
    found: list[Frame] = []
    while frame is not None and len(found) < limit:
        code = frame.f_code
        if not code.co_filename.startswith(_OWN):
            found.append(Frame(code.co_name, code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return found
