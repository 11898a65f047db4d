"""Where a thread is in the user's program: its Python frames outside mcr_plus."""

from __future__ import annotations

import os
import sysconfig
from types import FrameType
from typing import Final, NamedTuple

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DEPTH: Final = 400  # frames that are looked at
_LIBRARIES: Final = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_OTHERS: Final = (*_LIBRARIES, _PACKAGE, "<")

Site = tuple[str, int, str]
"""File, line and function."""


class Stack(NamedTuple):
    """The frames of a thread, as (function, file, line).

    Attributes:
        frames: those outside mcr_plus, innermost first.
        line: index of the line of the program, the innermost in no installed library; -1 without frames.
        call: the function of mcr_plus that the program has called and that has not returned; empty if none.
    """

    frames: tuple[tuple[str, str, int], ...] = ()
    line: int = -1
    call: str = ""


def stack_of(frame: FrameType | None, limit: int = 16) -> Stack:
    """The stack that ends in `frame`, with at most `limit` frames, of which one is the program's line."""
    found: list[tuple[str, str, int]] = []
    line, call, depth = -1, "", 0
    while frame is not None and depth < _DEPTH and (len(found) < limit or line < 0):
        code = frame.f_code
        file = code.co_filename
        if file.startswith(_PACKAGE):
            if not found:
                call = code.co_name
        elif len(found) < limit or _is_program(file):
            if line < 0 and _is_program(file):
                line = min(len(found), limit - 1)
                del found[limit - 1 :]
            found.append((code.co_name, file, frame.f_lineno or 0))
        frame, depth = frame.f_back, depth + 1
    return Stack(tuple(found), line if line >= 0 else min(0, len(found) - 1), call)


def site_of(frame: FrameType | None) -> Site | None:
    """The line of the program that a stack ends in; None if it has none. It costs about a microsecond."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OTHERS):
            return file, frame.f_lineno or 0, frame.f_code.co_name
        frame = frame.f_back
    return None


def _is_program(file: str) -> bool:
    return not file.startswith(_OTHERS)
