"""The thread that writes dumps on SIGUSR2, on requests of other ranks, and on failures.

A separate thread is needed because the program's thread may be in a call that does not return: Python runs
its signal handlers in the main thread, between two instructions. So faulthandler handles SIGUSR2 in C: it
writes to a pipe on which this thread sleeps. An idle watcher needs neither a core nor a lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from mcr_plus.core.proc import handles
from mcr_plus.hosts.dump_request import address_of, opened, received

_SIGNAL: Final = signal.SIGUSR2
_BEGINNING: Final = b"Stack (most recent call first)"
"""First bytes of faulthandler's report of a signal. The report arrives in several pieces."""
_PATIENCE: Final = 5.0  # seconds that a failing operation waits for its dump: a file system may hang


class DumpWatcher:
    """A thread that runs jobs: `on_signal()` on SIGUSR2, `on_request(text)` for another rank, and more."""

    def __init__(self, on_signal: Callable[[], None], on_request: Callable[[str], None]) -> None:
        self._on_signal, self._on_request = on_signal, on_request
        self._jobs: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._signals: int | None = None
        self._pipe: int | None = None
        self._socket = _opened(os.getpid())
        self._stopping = self._is_closed = False
        self._pid = os.getpid()
        self._before = signal.getsignal(_SIGNAL)
        if not handles(self._pid, _SIGNAL):
            self._signals, self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            faulthandler.register(_SIGNAL, file=self._pipe, all_threads=False)
        self._thread = threading.Thread(target=self._run, name="mcr_plus dumps", daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], None]) -> bool:
        """Run `job` in the thread and wait for it, some seconds at most; return whether it has run."""
        if self._pid != os.getpid() or not self._thread.is_alive():  # a forked child lacks the thread
            job()
            return True
        if threading.current_thread() is self._thread:
            job()
            return True
        done = threading.Event()
        self._jobs.append((job, done))
        os.eventfd_write(self._wake, 1)
        return done.wait(_PATIENCE)

    def stop(self) -> None:
        """End the thread; restore the default effect of SIGUSR2."""
        if self._pid != os.getpid():
            return
        if self._pipe is not None and signal.getsignal(_SIGNAL) is self._before:
            faulthandler.unregister(_SIGNAL)  # the program may have replaced the handler
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_PATIENCE)
        if not self._thread.is_alive():  # otherwise it hangs in a file system
            self._close()

    def abandon(self) -> None:
        """Drop the parent's resources in a forked child, which lacks the thread."""
        if self._is_closed:
            return
        if self._pipe is not None and signal.getsignal(_SIGNAL) is self._before:
            faulthandler.unregister(_SIGNAL)  # the program may have replaced the handler
        self._close()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        for descriptor in (self._wake, self._signals, self._pipe):
            if descriptor is not None:
                os.close(descriptor)
        self._is_closed = True

    def _run(self) -> None:
        poller = select.poll()
        listening = None if self._socket is None else self._socket.fileno()
        for descriptor in (self._wake, self._signals, listening):
            if descriptor is not None:
                poller.register(descriptor, select.POLLIN)
        while not self._stopping:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            while self._jobs:
                job, done = self._jobs.popleft()
                try:
                    job()
                finally:
                    done.set()
            if self._signals in ready and self._signals is not None:
                pieces = []
                with contextlib.suppress(BlockingIOError):
                    while piece := os.read(self._signals, 1 << 16):
                        pieces.append(piece)
                if _BEGINNING in b"".join(pieces):
                    self._on_signal()
            if listening in ready and self._socket is not None:
                for text in received(self._socket):
                    self._on_request(text)


def _opened(process: int) -> socket.socket | None:
    try:
        return opened(address_of(process))
    except OSError:  # an earlier job of this process has not ended
        return None
