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
        program: indices of those in no installed library, the lines of the program; of the innermost if there
            are none.
        call: the function of mcr_plus that the program has called and that has not returned; empty if none.
    """

    frames: tuple[tuple[str, str, int], ...] = ()
    program: tuple[int, ...] = ()
    call: str = ""


def stack_of(frame: FrameType | None, limit: int = 24) -> Stack:
    """The stack that ends in `frame`: at most `limit` frames, one of them the program's if it has any."""
    found: list[tuple[str, str, int]] = []
    program: list[int] = []
    call, depth = "", 0
    while frame is not None and depth < _DEPTH and (len(found) < limit or not program):
        code = frame.f_code
        file = code.co_filename
        if file.startswith(_PACKAGE):
            if not found:
                call = code.co_name
        elif len(found) < limit or not file.startswith(_OTHERS):
            del found[limit - 1 :]
            if not file.startswith(_OTHERS):
                program.append(len(found))
            found.append((code.co_name, file, frame.f_lineno or 0))
        frame, depth = frame.f_back, depth + 1
    return Stack(tuple(found), tuple(program) or (0,) * bool(found), call)


def site_of(frame: FrameType | None) -> Site | None:
    """The line of the program that a stack ends in; None if it has none. It costs about a microsecond."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OTHERS):
            return file, frame.f_lineno or 0, frame.f_code.co_name
        frame = frame.f_back
    return None
