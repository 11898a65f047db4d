"""Process group of torchft over mcr_plus.

torchft sets the members of the group by `configure`, or in versions from October 2026 on by `reconfigure`;
each time a new job of mcr_plus starts. If a rank is lost in between, operations fail within a second instead
of at the timeout. A process has one job, so groups inside a replica need another backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from mcr_plus.errors import BackendError, CommTimeout, LaunchError
from mcr_plus.torch_backend.process_group import McrProcessGroup

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store

_Wrapper: Any = object  # untyped: torchft may be missing
_missing: ImportError | None = None
try:
    _Wrapper = import_module("torchft.process_group").ProcessGroupWrapper
except ImportError as error:
    _missing = error

# Error texts of gloo, by which programs recognise a lost peer and a passed deadline.
_CLOSED: Final = "Connection closed by peer"
_LATE: Final = "timed out after"


class ProcessGroupMcr(_Wrapper):  # type: ignore[misc]
    """Process group for torchft's `Manager` whose operations run through a pipeline of mcr_plus.

    Args:
        timeout: the time that ranks wait for each other in `configure`, and the deadline of operations.
        config: path of a pipeline's YAML file, or a mapping of the same form; None uses MCR_CONFIG.

    Raises `ImportError` without torchft.
    """

    def __init__(
        self, timeout: timedelta = timedelta(seconds=60), config: str | Path | Mapping[str, Any] | None = None
    ) -> None:
        if _missing is not None:
            raise ImportError(
                f"mcr_plus.torchft needs torchft: pip install torchft-nightly ({_missing})"
            ) from _missing
        super().__init__(timeout)
        self._pg: McrProcessGroup | None
        self._config = config

    def _create_pg(self, store: Store, rank: int, world_size: int) -> McrProcessGroup:
        """Start a job of the ranks that share the store; collective over these ranks.

        Raises `Unsupported` if this process is in another job of mcr_plus, `ConfigError` if configurations
        differ, and `LaunchError`, worded like torch's store timeouts, if ranks do not connect in time.
        """
        try:
            return McrProcessGroup.begin(store, rank, world_size, self._timeout, self._config)
        except LaunchError as error:
            milliseconds = self._timeout.total_seconds() * 1000
            raise LaunchError(f"wait timeout after {milliseconds:.0f}ms: {error}") from error

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name under which `register` registers the group."""
        return "torchft-mcr"

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the next `configure`, and the deadline of operations."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def shutdown(self) -> None:
        """Leave the group without waiting for the other ranks, which may continue."""
        group, self._pg = self._pg, None
        if group is not None:
            group.abort()

    def errored(self) -> Exception | None:
        """Return the error that requires the group to be configured again, if any."""
        failure = None if self._pg is None else self._pg.failure
        if failure is None:
            return None
        error = BackendError(f"the group is aborted: {failure}")
        error.__cause__ = failure
        return error

    @contextmanager
    def _run_context(self) -> Iterator[None]:
        try:
            yield
        except BackendError as error:
            raise BackendError(f"{_CLOSED}: {error}") from error
        except CommTimeout as error:
            raise CommTimeout(f"{_LATE} {self._timeout}: {error}", error.missing) from error

    def _wrap_work(self, work: dist.Work, opts: object) -> dist.Work:  # noqa: ARG002 - torchft's signature
        return _Work(work, self)


class _Work(dist.Work):
    """Handle whose errors are worded like gloo's errors."""

    def __init__(self, work: dist.Work, group: ProcessGroupMcr) -> None:
        super().__init__()
        self._work, self._group = work, group

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._group._run_context():
            return self._work.wait() if timeout is None else self._work.wait(timeout)

    def synchronize(self) -> None:
        with self._group._run_context():
            self._work.synchronize()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = self._work.get_future()
        return future
