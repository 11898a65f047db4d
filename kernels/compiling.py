"""Compile kernels: one process per host at a time; log long compilations and notify watchers.

with preparing("int8_block"): ...    around code that compiles kernels, or loads compiled ones
watchers                             called when this process begins and ends compiling or loading
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import Final

from mcr_plus.core.environment import kernel_folders, numba_settings, package_version

watchers: Final[list[Callable[[bool], None]]] = []
"""Called with True when this process begins to compile or load kernels, with False when it has ended, in any
thread."""

_PACKAGE: Final = Path(__file__).parent.parent
_LONG_S: Final = 2.0  # longer compilations are logged
_PROCESSOR: Final = (
    "model name",
    "flags",
    "CPU ",
    "Features",
)  # in /proc/cpuinfo; others differ between reads
_PATIENCE_S: Final = 120.0  # limit of a wait for another compiling process, which may have been stopped
_NAP_S: Final = 0.05
_log = logging.getLogger("mcr_plus")
_depth = 0
_depth_lock = threading.Lock()
_silent = False  # True: log nothing
_loaded: set[Path] = set()  # notes for kernels that this process has compiled or loaded
_known: set[str] = set()  # names that have been logged
_armed = False  # a timer will log the current compilation unless it ends soon
_armed_lock = threading.Lock()


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Context of a compilation: notifies the watchers, and logs the compilation if it takes long."""
    with watched(), _logged(what):
        yield


@contextmanager
def preparing(what: str) -> Iterator[None]:
    """Context of the first use of kernels, after which numba's cache on disk contains them.

    Until then, one process at a time enters the context; the others load the kernels that it has compiled.
    """
    note = _note_of(what)
    if note is None:
        with _logged(what):
            yield
        return
    if note in _loaded:
        yield
        return
    if _noted(note):
        with watched():  # under load, loading may take long, too
            yield
        _loaded.add(note)
        return
    with watched(), _alone(note):
        if _noted(note):  # by the process for which this one has waited
            yield
            _loaded.add(note)
            return
        with _logged(what):
            yield
        with contextlib.suppress(OSError):
            note.write_text(_state())
            _loaded.add(note)


def say_nothing() -> None:
    """Log nothing in this process: the caller reports compilations itself."""
    global _silent
    _silent = True


@contextmanager
def watched() -> Iterator[None]:
    """Context of a compilation, or of a wait for another process's compilation: notifies the watchers."""
    _deeper(1)
    try:
        yield
    finally:
        _deeper(-1)


def _deeper(by: int) -> None:
    """Count compiling threads; watchers are notified when the first begins and when the last ends."""
    global _depth
    with _depth_lock:  # held during notification, since another thread may begin to compile
        _depth += by
        changes = _depth == (1 if by > 0 else 0)
        for watcher in watchers if changes else ():
            watcher(by > 0)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Context of a compilation: logs a long one, once for each name; nested contexts log nothing."""
    global _armed
    with _armed_lock:
        mine = not (_silent or _armed or what in _known)
        _armed |= mine
    if not mine:
        yield
        return
    timer = threading.Timer(_LONG_S, _say, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _armed = False


def _say(what: str) -> None:
    _known.add(what)
    folder = cache_folder()
    where = f"once; kept in {folder}" if folder else "each time: no folder for them can be written"
    # A warning appears in the output of every job, which would otherwise seem to hang.
    _log.warning("compiling kernels, now those of %s (%s); `mcr-plus warmup` does it beforehand", what, where)


@cache
def cache_folder() -> Path | None:
    """Return the folder of compiled kernels, chosen by numba's rules; None if no folder is writable."""
    named, general = kernel_folders()
    usual = (Path(__file__).parent / "__pycache__", general / "numba")
    for folder in (Path(named),) if named else usual:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    return None


@cache
def compiler() -> str:
    """Return text that changes if all kernels need compilation; numba is not imported for it."""
    versions = (package_version(each) for each in ("numba", "llvmlite"))
    try:
        with open("/proc/cpuinfo") as file:
            lines = takewhile(str.strip, file)  # of the first processor
            processor = blake2b(
                "".join(each for each in lines if each.startswith(_PROCESSOR)).encode()
            ).hexdigest()
    except OSError:
        processor = platform.processor()
    return " ".join((*versions, platform.python_version(), processor, *numba_settings()))


@cache
def _state() -> str:
    """Return text that changes if kernels may need compilation, or any source of the package changes."""
    places = os.walk(_PACKAGE, followlinks=True)  # some of its folders are links
    files = (f"{folder}/{name}" for folder, _, names in places for name in names if name.endswith(".py"))
    found = map(os.stat, files)
    sources = sum(each.st_mtime_ns + each.st_size for each in found)
    return f"{compiler()} {sources}\n"


def _note_of(what: str) -> Path | None:
    """Return the file that the compiling process locks, and to which it then writes `_state`."""
    folder = cache_folder()
    return folder and folder / f"mcr_plus-{blake2b(what.encode(), digest_size=6).hexdigest()}.lock"


def _noted(note: Path) -> bool:
    try:
        return note.read_text() == _state()
    except OSError:
        return False


@contextmanager
def _alone(note: Path) -> Iterator[None]:
    """Exclude other processes until their wait times out; has no effect if files cannot be locked."""
    try:
        descriptor = os.open(note, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and not _noted(note):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_NAP_S)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)
