"""A store whose waits end when a rank that may have to write the value is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from torch.distributed import DistError

from mcr_plus.core.c10d import Store, WrappedStore, put
from mcr_plus.core.deadline import Deadline

if TYPE_CHECKING:
    from mcr_plus.errors import PeerLost

_FIRST_NAP: Final = 0.0002
_LONGEST_NAP: Final = 0.01
_LOOKS_AFTER: Final = 0.1  # seconds; most values are there sooner


class WatchedStore(WrappedStore):
    """Waits for values itself, instead of in torch's client, which knows nothing of the ranks' processes."""

    def __init__(self, store: Store, timeout: float, lost: Callable[[], PeerLost | None]) -> None:
        """`timeout`: seconds that `get` and `wait` wait. `lost`: the error if a rank is lost by now."""
        super().__init__(store)
        self._timeout = timeout
        self._lost = lost

    @property
    def unwatched(self) -> Store:
        """The store itself."""
        return self._store

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        put(self._store, key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys are there.

        Raises `PeerLost` once a rank is lost, and `DistError`, as torch's stores do, after `timeout`.
        """
        deadline, looks = Deadline(self._timeout if timeout is None else timeout), Deadline(_LOOKS_AFTER)
        nap = _FIRST_NAP
        while not self._store.check(keys):
            if looks.passed():
                looks = Deadline(_LOOKS_AFTER)
                error = self._lost()
                # A last value of that rank may have been on its way.
                if error is not None and not self._store.check(keys):
                    raise error
            if deadline.passed():
                raise DistError(f"wait timeout, keys: {', '.join(keys[:3])}")
            time.sleep(nap)
            nap = min(1.5 * nap, _LONGEST_NAP)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` and `wait` wait."""
        self._timeout = timeout.total_seconds()
        self._store.set_timeout(timeout)
