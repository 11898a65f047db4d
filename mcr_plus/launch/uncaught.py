"""Report a rank's uncaught exceptions to `mcr-plus run`.

The launcher prints one message for all ranks with the same failure: for an error of ours the line of the
user's program that raised it, for any other exception the whole traceback.

    python uncaught.py RUNNER FILE ARGS…           RUNNER: `python`, or `mpi4py` as in `python -m mpi4py`
    python uncaught.py RUNNER -m MODULE ARGS…

runs a program and reports its exceptions, even if the program cannot be compiled or fails before it imports
mcr_plus. This module uses the standard library only: `import mcr_plus` imports it, and the program decides
when to import mcr_plus and torch.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import runpy
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

_PACKAGE: Final = Path(__file__).parents[1]
_PROCESS: Final = os.getpid()
_PATHS: Final = ("stdlib", "platstdlib", "purelib", "platlib")


def report_to(channel: str) -> None:
    """Install an excepthook that writes exceptions to a named pipe of the launcher instead of stderr.

    Does nothing in a program that has installed another hook.
    """
    default = sys.excepthook
    if default is not sys.__excepthook__:
        return

    rank = os.getpid()

    def report(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        # Failures of forked processes do not count for this rank.
        if os.getpid() != rank or not _reported(channel, value, trace, time.monotonic()):
            default(kind, value, trace)

    sys.excepthook = report


def _reported(
    channel: str, value: BaseException, trace: TracebackType | None, when: float, *, shown: bool = False
) -> bool:
    """Write an exception to the launcher's pipe, once; return whether it has been written.

    `shown`: True if the program has already printed the exception.
    """
    global _last
    if value is _last:
        return True
    try:
        report = description(value, trace)
        report |= {"pid": os.getpid(), "time": when, "shown": shown}
        with open(os.open(channel, os.O_WRONLY | os.O_CLOEXEC), "wb") as pipe:
            pipe.write(json.dumps(report).encode() + b"\n")
    except Exception:
        return False
    _last = value
    return True


_last: BaseException | None = None  # the last reported exception


def description(error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    """Return the report about an exception; JSON-serializable.

    `error`: the kind and the first line of the message. `text`: the whole message of an error of ours or of
    `sys.exit`, otherwise None. `place`, `source`: file and line of the user's program that raised the error,
    and the text of the line; None if unknown. `traceback`: the lines of the whole traceback.
    """
    words = _words(error)
    report: dict[str, Any] = {"time": time.monotonic(), "error": words.splitlines()[0].rstrip(": ")}
    if isinstance(error, SystemExit):
        text = _text(error.code)
        return report | {"text": text, "traceback": text.splitlines(), "place": None, "source": None}
    frames = [
        traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False)
        for frame, line in traceback.walk_tb(trace)
    ]
    try:
        lines = "".join(traceback.format_exception(type(error), error, trace)).splitlines()
        if sys.version_info < (3, 12):  # later versions write near names themselves
            _add_near_names(lines, error)
    except BaseException:  # raised by the exception's own methods, or while loading a module's source
        places = [f'  File "{each.filename}", line {each.lineno}, in {each.name}' for each in frames]
        lines = ["Traceback (most recent call last):", *places, *words.splitlines()]
    ours = "\n".join([words, *_notes(error), *_cause(error)]) if _is_ours(error) else None
    report |= {"traceback": lines, "text": ours, "place": None, "source": None}
    if (frame := _frame_of_user(frames)) is not None:
        report["place"] = f"{_shown(frame.filename)}:{frame.lineno}, in {frame.name}"
        with contextlib.suppress(Exception):
            report["source"] = frame.line
    return report


def _add_near_names(lines: list[str], error: BaseException | None) -> None:
    """Add to each `AttributeError` of a chain the attribute nearly named, as Python's own output has it."""
    for _ in range(len(lines)):  # a chain may be circular
        if isinstance(error, AttributeError) and error.name is not None and error.obj is not None:
            said, near = (
                f"AttributeError: {error}",
                difflib.get_close_matches(error.name, dir(error.obj), n=1),
            )
            hint = "".join(f". Did you mean: '{each}'?" for each in near)
            lines[:] = [line + hint if line == said else line for line in lines]
        if error is not None:
            error = error.__cause__ or error.__context__


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {_text(error)}"


def _text(value: object) -> str:
    """Return `str(value)`, or Python's replacement text if `str` raises."""
    try:
        return str(value)
    except BaseException:
        return "<exception str() failed>"


def _is_ours(error: BaseException) -> bool:
    """Return whether an error is an `McrError`; False if mcr_plus has not been imported."""
    errors = sys.modules.get("mcr_plus.errors")
    return errors is not None and isinstance(error, errors.McrError)


def _notes(error: BaseException) -> list[str]:
    notes = error.__dict__.get("__notes__")
    return [_text(note) for note in notes] if isinstance(notes, (list, tuple)) else []


def _cause(error: BaseException) -> list[str]:
    cause = error.__cause__
    return [] if cause is None else [f"caused by {_words(cause)}"]


def _frame_of_user(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost frame outside libraries and mcr_plus; without one, outside mcr_plus."""
    outside = [frame for frame in frames if not _within(frame.filename, [_PACKAGE])]
    outside = [frame for frame in outside if not _is_runner(Path(frame.filename))]
    installed = [Path(sysconfig.get_path(name)) for name in _PATHS]
    own = [frame for frame in outside if not _within(frame.filename, installed)]
    return next(reversed(own or outside), None)


def _is_runner(path: Path) -> bool:
    """Return whether a file only runs programs, such as runpy (`python -m`) and mpi4py."""
    return str(path).startswith("<frozen") or path.name == "runpy.py" or path.parent.name == "mpi4py"


def _within(name: str, folders: Sequence[Path]) -> bool:
    return any(Path(name).is_relative_to(folder) for folder in folders)


def _shown(name: str) -> str:
    """Return a path; inside the working directory, a relative path."""
    with contextlib.suppress(ValueError, OSError):  # outside of it, or the working directory is gone
        return str(Path(name).relative_to(Path.cwd()))
    return name


def run_program(runner: str, words: Sequence[str]) -> None:
    """Run a program, see the head of this file; its exceptions propagate."""
    is_module = words[0] == "-m"
    if not getattr(sys.flags, "safe_path", False):  # otherwise Python has added no folder
        sys.path[0] = str(Path.cwd() if is_module else Path(words[0]).resolve().parent)
    if runner == "mpi4py":
        from mpi4py.run import main

        # It takes `__file__` from the command line, where Python makes it absolute.
        sys.argv = [runner, *(words if is_module else (str(Path(words[0]).absolute()), *words[1:]))]
        main()
        return
    # After the last line, `__main__` stays the program's module, as with `python` but not with runpy's
    # functions, because threads and atexit functions of the program still run.
    sys.modules["__main__"] = program = ModuleType("__main__")
    if is_module:
        sys.argv = list(words[1:])
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    import zipfile

    sys.argv, path = list(words), Path(words[0]).absolute()
    if path.is_dir() or zipfile.is_zipfile(path):
        runpy.run_path(str(path), run_name="__main__")
        return
    program.__file__ = str(path)
    exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), program.__dict__)


def _end_with(error: BaseException, channel: str | None, when: float) -> None:
    """End like Python after an uncaught exception, but without the frames of the program's runner.

    The program's own hook (such as rich's or IPython's) gets the program's frames; the launcher does not
    repeat the hook's output.
    """
    trace = error.__traceback__
    while trace is not None and (trace.tb_frame.f_globals is globals() or _is_runner(Path(_file(trace)))):
        trace = trace.tb_next
    if trace is None:  # the program could not run: for example, the file does not compile
        trace = error.__traceback__
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, trace)
    if channel is not None:
        _reported(channel, error, trace, when, shown=True)


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename


def main() -> int | None:
    """Run the program of the command line; return the exit status after an exception."""
    pid, _, pipe = os.environ.get("MCR_JOB_ERRORS", "").partition(":")
    channel = pipe if pid == str(os.getpid()) else None
    if channel is not None:
        report_to(channel)
    try:
        run_program(sys.argv[1], sys.argv[2:])
    except BaseException as error:  # BaseException: includes asyncio.CancelledError
        when = time.monotonic()
        if os.getpid() != _PROCESS:  # failures of a forked process do not count for this rank
            channel = None
        if not isinstance(error, SystemExit):
            _end_with(error, channel, when)
        elif isinstance(error.code, int | None) or not (channel and _reported(channel, error, None, when)):
            raise
        if isinstance(error, KeyboardInterrupt):  # already printed; Python then ends by SIGINT
            sys.excepthook = lambda *_: None
            raise
        return 1
    return None


if __name__ == "__main__":
    sys.exit(main())
