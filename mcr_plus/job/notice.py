"""Notice that this rank is to leave its job: SIGTERM, or a file (`elastic: {notice: ...}`).

The signal's handler only sets a flag, so that a notice disturbs no operation. `mcr.elastic` looks between two
steps. Until then, from the beginning of `mcr.init`, notices are kept.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mcr_plus.core.environment import host_name, launch_environment
from mcr_plus.errors import ConfigError

if TYPE_CHECKING:
    from mcr_plus.config.schema import Config


class LeaveNotice:
    """The notice of this process.

    Attributes:
        reason: text that describes the notice; empty until this rank is told, by `told`.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._file: Path | None = None
        self._before: Callable[..., Any] | int | None = None
        self._handles = False

    def listen(self, config: Config | ConfigError, *, again: bool = False) -> Config | ConfigError:
        """Begin to take notices as `config` says; does nothing if they are taken. `again`: within a job.

        Returns `config`, or an error, which ranks compare: the file exists already, or this is not the main
        thread, in which alone Python handles signals.
        """
        options = None if isinstance(config, ConfigError) else config.elastic.notice
        if isinstance(config, ConfigError) or options is None or self.is_open:
            return config
        if options.file is not None:
            rank = str(launch_environment().rank)
            path = Path(options.file.replace("{rank}", rank).replace("{host}", host_name()))
            if path.exists() and not again:
                return ConfigError(
                    f"{config.name}: elastic.notice.file: {str(path)!r} exists before the job has begun, so "
                    f"rank {rank} would leave at once; remove the file, or start the job without this rank"
                )
            self._file = path
        if options.sigterm:
            if threading.current_thread() is not threading.main_thread():
                self._file = None
                return ConfigError(
                    f"{config.name}: elastic.notice: SIGTERM can be taken only if mcr.init is called in the "
                    "main thread; use `file: PATH`"
                )
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._handles = True
        return config

    def resume(self, config: Config) -> None:
        """Take notices again after `close`, within a job; raises `ConfigError` as `listen` returns it."""
        listened = self.listen(config, again=True)
        if isinstance(listened, ConfigError):
            raise listened

    @property
    def is_open(self) -> bool:
        """Whether notices are taken."""
        return self._handles or self._file is not None

    def told(self) -> bool:
        """Return whether this rank has been told to leave; further notices change nothing."""
        if not self.reason and self._file is not None and self._file.exists():
            self.reason = f"the file {str(self._file)!r}"
        return bool(self.reason)

    def close(self) -> None:
        """Take no more notices: SIGTERM has the effect again that it had before."""
        # A program's own later handler stays; Python lets the main thread alone change handlers.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._handles and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
        self._file, self._before, self._handles, self.reason = None, None, False, ""

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.reason = self.reason or "SIGTERM"


notice = LeaveNotice()
