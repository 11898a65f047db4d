"""A store whose waits end when a rank that may have to write the value is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from torch.distributed import DistError

from mcr_plus.core.c10d import Store, WrappedStore, look, put
from mcr_plus.core.deadline import Deadline, until
from mcr_plus.errors import McrError

if TYPE_CHECKING:
    from mcr_plus.errors import PeerLost

T = TypeVar("T")
_FIRST_NAP: Final = 0.0002
_LONGEST_NAP: Final = 0.01
_NAP_SHARE: Final = 0.1  # share of the wait so far: a value is found that much later
_LOSS_SHOWS: Final = 0.3  # s after a store error within which the death that caused it shows
_LOOKS_AFTER: Final = 0.1  # s; most values arrive sooner


class WatchedStore(WrappedStore):
    """Store that waits for values itself: torch's client does not watch the ranks' processes."""

    def __init__(self, store: Store, timeout: float, lost: Callable[[], PeerLost | None]) -> None:
        """`timeout`: limit of `get` and `wait` in s. `lost`: returns the error if a rank is lost by now."""
        super().__init__(store)
        self._timeout = timeout
        self._lost = lost

    @property
    def unwatched(self) -> Store:
        """The underlying store."""
        return self._store

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        data = value.encode() if isinstance(value, str) else value
        self._asked(lambda: put(self._store, key, data))

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key])
        return self._asked(lambda: self._store.get(key))

    def look(self, key: str) -> bytes | None:
        """Return the present value, None without one."""
        return self._asked(lambda: look(self._store, key))

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these keys exist."""
        return self._asked(lambda: self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys exist.

        Raises `PeerLost` once a rank is lost, and `DistError`, as torch's stores do, after `timeout`.
        """
        deadline, looks = Deadline(self._timeout if timeout is None else timeout), Deadline(_LOOKS_AFTER)
        began = time.monotonic()
        while not self.check(keys):
            if looks.passed():
                looks = Deadline(_LOOKS_AFTER)
                error = self._lost()
                # A last value of that rank may have been on its way.
                if error is not None and not self.check(keys):
                    raise error
            if deadline.passed():
                raise DistError(f"wait timeout, keys: {', '.join(keys[:3])}")
            waited = time.monotonic() - began
            time.sleep(min(max(_FIRST_NAP, _NAP_SHARE * waited), _LONGEST_NAP))

    def _asked(self, request: Callable[[], T]) -> T:
        """Return the store's answer; raise `PeerLost` if the store was lost with the rank that served it."""
        try:
            return request()
        except McrError:  # an error stored as a value
            raise
        except RuntimeError:
            error = until(self._lost, Deadline(_LOSS_SHOWS), _LONGEST_NAP)
            if error is None:
                raise
            raise error from None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of `get` and `wait`."""
        self._timeout = timeout.total_seconds()
        self._store.set_timeout(timeout)


def unwatched(store: Store) -> Store:
    """Return the underlying store, whether its waits are watched or not."""
    return store.unwatched if isinstance(store, WatchedStore) else store
