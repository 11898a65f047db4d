"""The one job of a process, and the end of the process: in order, after an exception, or in a fork."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from mcr_plus import registry
from mcr_plus.backends import backend_class
from mcr_plus.errors import McrError

if TYPE_CHECKING:
    from mcr_plus.backends.base import Backend
    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.job.hooks import JobHook
    from mcr_plus.job.runtime import Runtime


class ProcessJob:
    """The process's one runtime, and the end of its libraries with the process.

    Attributes:
        runtime: the last runtime that `init` has made, also after `finalize`; None before.
        communicator: communicator of all ranks, between `init` and `finalize`.
        crashed: whether an exception has reached the interpreter.
        all_ended: whether all ranks have ended the job together. Only then may a library function be called
            that waits for the other ranks.
        backends: backends to call at the end of the process, by id.
        disabled: names of libraries that some rank no longer calls.
        hooks: hooks of capabilities; created for the first job.
        leave_dropped: leaves the groups of torch.distributed that the program has dropped; set by the torch
            backend.
    """

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.communicator: Communicator | None = None
        self.crashed = False
        self.all_ended = True
        self.backends: dict[int, Backend] = {}
        self.disabled: set[str] = set()
        self.hooks: tuple[JobHook, ...] = ()
        self.leave_dropped: Callable[[], None] = lambda: None
        self._has_handlers = False

    def begin(self, runtime: Runtime) -> None:
        """Make `runtime` the process's runtime."""
        self.runtime, self.communicator, self.all_ended = runtime, runtime.communicator, False
        self.backends.update({id(backend): backend for backend in runtime.engine.backends})

    def unfinished(self) -> list[str | None]:
        """Return the hooks' warnings at the orderly end of the runtime."""
        return [hook.unfinished() for hook in self.hooks]

    def hooks_closing(self) -> None:
        """Tell the hooks that the runtime's operations have ended, or that the job cannot begin."""
        for hook in self.hooks:
            hook.closing()

    def hooks_closed(self) -> None:
        """Tell the hooks that the runtime has ended."""
        for hook in self.hooks:
            hook.closed()

    def install_handlers(self) -> None:
        """Create the hooks, and install the handlers of exit, uncaught exceptions and forks; once."""
        if self._has_handlers:
            return
        self._has_handlers = True
        self.hooks = tuple(cast("type[JobHook]", hook)() for hook in registry.installed("hooks"))
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._after_fork)
        previous = sys.excepthook

        def note_crash(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            self.crashed = True
            previous(kind, value, trace)

        sys.excepthook = note_crash

    def _at_exit(self) -> None:
        """End the job in order if the program has; wait for no rank that will not come."""
        self.leave_dropped()
        runtime = self.runtime
        # An excepthook that the program installed later may not call ours. Interactive shells continue.
        self.crashed |= hasattr(sys, "last_value") and not hasattr(sys, "ps1")
        if runtime is not None and self.crashed:
            runtime.crash()
        elif runtime is not None:
            with contextlib.suppress(McrError):
                self.all_ended &= runtime.closed
                runtime.leave(runtime.communicator)
            if not self.all_ended and not runtime.superseded:  # the others do not end with this rank
                runtime.wait_for_all_to_end()
        for backend in self.backends.values():
            backend.before_exit()
        if self.all_ended and not self.crashed:
            for backend in self.backends.values():
                if backend.name not in self.disabled:
                    backend.finalize()
                else:
                    backend.leave_launcher()
            if all(backend.name != "mpi" for backend in self.backends.values()):
                _end_unused_mpi(waits="mpi" not in self.disabled)

    def _after_fork(self) -> None:
        """Take the forked child out of the job."""
        atexit.unregister(self._at_exit)
        for hook in self.hooks:
            hook.abandon()
        if self.runtime is not None:
            self.runtime.abandon()
            self.runtime = None


def _end_unused_mpi(*, waits: bool) -> None:
    """End MPI if it only carried the address of the job's store. `waits`: also wait for the other ranks."""
    if "mpi4py.MPI" in sys.modules:
        mpi: Any = backend_class("mpi")
        (mpi.end_library if waits else mpi.leave_unfinalized)()


job = ProcessJob()
