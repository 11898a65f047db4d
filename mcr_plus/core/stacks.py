"""Python frames of a thread outside mcr_plus: the thread's place in the user's program."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Final, NamedTuple

FRAMES: Final = 32
"""Most frames of a thread in a dump."""
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DEPTH: Final = 400  # frames to search
_LIBRARIES: Final = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_OTHERS: Final = (*_LIBRARIES, _PACKAGE, "<")
_is_program: Final[dict[str, bool]] = {}  # file → whether it belongs to the program
_INSTALLED: Final = re.compile(r"^<|/(site|dist)-packages/|/lib/python3\.\d+/")  # on any machine
# Python 3.11 may end with SIGSEGV if a thread reads frame objects of another running thread, as profilers
# have found too; 3.12 creates frames in the same way. There, frames come from the function by which
# faulthandler writes one thread's. Its functions for all threads end Python 3.11 in the same way if a thread
# of a library, such as gloo's, enters Python meanwhile: its state is in the list before it is complete.
_OTHERS_BY_TEXT: Final = (3, 11) <= sys.version_info < (3, 13)
_MOST_THREADS: Final = 10_000
_MOST_WORDS: Final = 40
_LINE: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPED: Final = re.compile(r"\\(?:x(..)|u(....)|U(.{8}))")

Site = tuple[str, int, str]
"""File, line and function."""
Position = tuple[CodeType, int]
"""Place in a function: its code, and the offset of the instruction. Finding the line takes longer."""


class Frame(NamedTuple):
    """A function that has not returned: its name, its file, and its current line."""

    name: str
    filename: str
    line: int


class Stack(NamedTuple):
    """The frames of a thread.

    Attributes:
        frames: frames outside mcr_plus, innermost first.
        program: indices of frames outside installed libraries, the program's lines; if there are none, of the
            innermost frame.
        call: the function of mcr_plus that the program is in; `mcr_plus` if that is not public, such as a
            hook called by torch; empty if the program is not in mcr_plus.
    """

    frames: tuple[Frame, ...] = ()
    program: tuple[int, ...] = ()
    call: str = ""


def stack_of(frame: FrameType | None, limit: int = 24) -> Stack:
    """Return the stack that ends in `frame`: at most `limit` frames, one of them the program's if it has any.

    Only for frames of the calling thread, or of a thread that has ended; `stack_in` is for others.
    """
    return _stack(_walked(frame), limit)


def stack_in(thread: int, limit: int = 24) -> Stack:
    """Return the stack of any thread, by its `threading.get_ident()`; empty if it has ended."""
    if thread == threading.get_ident():
        return stack_of(sys._getframe(1), limit)
    if _OTHERS_BY_TEXT:
        return _stack(_frames_by_text(thread), limit)
    return stack_of(sys._current_frames().get(thread), limit)


def _walked(frame: FrameType | None) -> Iterator[Frame]:
    for _ in range(_DEPTH):
        if frame is None:
            return
        yield Frame(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno or 0)
        frame = frame.f_back


def _frames_by_text(thread: int) -> Iterator[Frame]:
    """Yield the innermost 100 frames of a thread as faulthandler writes them."""
    try:
        with open(os.memfd_create("mcr_plus"), "rb") as file:
            time.sleep(0)  # threads that wait for the GIL now get it; later ones leave it for 5 ms
            if not (state := _state_of(thread)):
                return
            _python()[0]._Py_DumpTraceback(file.fileno(), state)
            file.seek(0)
            text = file.read().decode("ascii", "replace")
    except (OSError, AttributeError):  # no file descriptor is left; a Python without this function
        return
    for line in text.splitlines()[1:]:
        found = _LINE.match(line)
        if found is None:
            return
        file_name, number, name = found.groups()
        yield Frame(_unescaped(name), _unescaped(file_name), int(number))


def _state_of(thread: int) -> int:
    """Return the address of a thread's state, which stays while the caller has the GIL; 0 if it has ended."""
    python, offset = _python()
    state = python.PyInterpreterState_ThreadHead(python.PyInterpreterState_Get())
    for _ in range(_MOST_THREADS):
        if not state or ctypes.c_ulong.from_address(state + offset).value == thread:
            break
        state = python.PyThreadState_Next(state)
    return state or 0


@cache
def _python() -> tuple[ctypes.PyDLL, int]:
    """Return Python's C functions, and the offset of the identity in a thread's state."""
    python = ctypes.PyDLL(None)
    for name in (
        "ThreadState_Get",
        "InterpreterState_Get",
        "InterpreterState_ThreadHead",
        "ThreadState_Next",
    ):
        getattr(python, f"Py{name}").restype = ctypes.c_void_p
    for name in ("InterpreterState_ThreadHead", "ThreadState_Next"):
        getattr(python, f"Py{name}").argtypes = (ctypes.c_void_p,)
    python._Py_DumpTraceback.argtypes = (ctypes.c_int, ctypes.c_void_p)
    own = (ctypes.c_ulong * _MOST_WORDS).from_address(python.PyThreadState_Get())
    return python, 8 * list(own).index(threading.get_ident())


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text)


def _stack(frames: Iterable[Frame], limit: int) -> Stack:
    found: list[Frame] = []
    program: list[int] = []
    call = ""
    for frame in frames:
        if len(found) >= limit and program:
            break
        if frame.filename.startswith(_PACKAGE):
            # Our function that the program called, even if other libraries' frames lie further inside.
            within = not program and (call or not found)
            if within and not (call and frame.name.startswith("<")):  # a generator has no name
                call = frame.name
        elif len(found) < limit or not frame.filename.startswith(_OTHERS):
            del found[limit - 1 :]
            if not frame.filename.startswith(_OTHERS):
                program.append(len(found))
            found.append(frame)
    call = "mcr_plus" if call.startswith("_") else call
    return Stack(tuple(found), tuple(program) or (0,) * bool(found), call)


def waiting_frames(limit: int = FRAMES) -> list[Frame]:
    """Return the frames of the calling thread, innermost first, without those of mcr_plus.

    For waiting code of mcr_plus: the first frame is then the line of the program, or of torch, that called
    the operation. Takes some microseconds.
    """
    return list(stack_of(sys._getframe(1), limit).frames)


def frames_of(thread: int, limit: int = FRAMES) -> list[Frame]:
    """Return the frames of any thread, by its `threading.get_ident()`; empty if it has ended."""
    return list(stack_in(thread, limit).frames)


def call_site(frames: Sequence[Frame]) -> Frame | None:
    """Return the one frame to show if space is short: the innermost one outside installed packages.

    The frames may come from another machine, so packages are recognised by the names of folders.
    """
    own = (frame for frame in frames if not _INSTALLED.search(frame.filename))
    return next(own, frames[0] if frames else None)


def position_of(frame: FrameType | None) -> Position | None:
    """Return the program's innermost position in a stack; None without one. Takes half a microsecond."""
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        is_program = _is_program.get(file)
        if is_program is None:
            is_program = _is_program[file] = not file.startswith(_OTHERS)
        if is_program:
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def site_at(position: Position) -> Site:
    """Return the line of a position."""
    code, offset = position
    lines = (line for start, end, line in code.co_lines() if start <= offset < end)
    return code.co_filename, next(lines, None) or 0, code.co_name
