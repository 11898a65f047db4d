"""What a rank under `mcr-plus run` does with an exception that nobody catches: it tells the launcher.

The launcher prints one message for all ranks that failed alike. Of an error of ours the message shows the
line of the user's program that it came from; of any other exception the whole traceback. Standard library
only, because `import mcr_plus` reads this.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from mcr_plus.errors import McrError

_PACKAGE: Final = Path(__file__).parents[1]
_PATHS: Final = ("stdlib", "platstdlib", "purelib", "platlib")


def report_to(channel: str) -> None:
    """Have uncaught exceptions reported through a named pipe of the launcher instead of printed.

    A program that has a hook of its own keeps it.
    """
    usual = sys.excepthook
    if usual is not sys.__excepthook__:
        return

    def report(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(value, Exception):  # Ctrl-C
            usual(kind, value, trace)
            return
        try:
            line = json.dumps(description(value, trace)).encode() + b"\n"
            with open(os.open(channel, os.O_WRONLY | os.O_CLOEXEC), "wb") as pipe:
                pipe.write(line)
        except Exception:  # whatever is wrong with the pipe or the exception: nothing may be lost
            usual(kind, value, trace)

    sys.excepthook = report


def description(error: Exception, trace: TracebackType | None) -> dict[str, Any]:
    """What the launcher is told about an exception; JSON-able.

    `text`: what it says. `place`, `source`: where in the user's program it came from, None if that is not
    known. `traceback`: all of it, a line each.
    """
    lines = "".join(traceback.format_exception(type(error), error, trace)).splitlines()
    found: dict[str, Any] = {"time": time.monotonic(), "traceback": lines, "text": None}
    if isinstance(error, McrError):
        found["text"] = "\n".join([f"{type(error).__name__}: {error}", *_notes(error), *_cause(error)])
    frame = _frame_of_user(traceback.extract_tb(trace))
    found["place"] = None if frame is None else f"{_shown(frame.filename)}:{frame.lineno}, in {frame.name}"
    found["source"] = None if frame is None else frame.line
    return found


def _notes(error: Exception) -> list[str]:
    notes = getattr(error, "__notes__", None)
    return [str(note) for note in notes] if isinstance(notes, (list, tuple)) else []


def _cause(error: Exception) -> list[str]:
    cause = error.__cause__
    return [] if cause is None else [f"caused by {type(cause).__name__}: {cause}"]


def _frame_of_user(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost frame that belongs to neither a library nor us; else the innermost that is not ours."""
    outside = [frame for frame in frames if not _within(frame.filename, [_PACKAGE])]
    outside = [frame for frame in outside if not _is_runner(Path(frame.filename))]
    installed = [Path(sysconfig.get_path(name)) for name in _PATHS]
    own = [frame for frame in outside if not _within(frame.filename, installed)]
    return next(reversed(own or outside), None)


def _is_runner(path: Path) -> bool:
    """Whether a file only runs programs, as `python -m` and mpi4py do."""
    return str(path).startswith("<frozen") or path.name == "runpy.py" or path.parent.name == "mpi4py"


def _within(name: str, folders: Sequence[Path]) -> bool:
    path = Path(name).absolute()
    return any(path.is_relative_to(folder) for folder in folders)


def _shown(name: str) -> str:
    """A path as short as it can be said."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name
