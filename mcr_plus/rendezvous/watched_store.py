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
_NAP_SHARE: Final = 0.1  # of the wait so far: a value is found that much late
_LOSS_SHOWS: Final = 0.3  # seconds after an error of the store in which the death behind it shows
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
        data = value.encode() if isinstance(value, str) else value
        self._asked(lambda: put(self._store, key, data))

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key])
        return self._asked(lambda: self._store.get(key))

    def look(self, key: str) -> bytes | None:
        """The value that there is now, None without one."""
        return self._asked(lambda: look(self._store, key))

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys are there."""
        return self._asked(lambda: self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys are there.

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
        """The store's answer; raises `PeerLost` if the store was lost with the rank that had it."""
        try:
            return request()
        except McrError:  # of what was in the store
            raise
        except RuntimeError:
            error = until(self._lost, Deadline(_LOSS_SHOWS), _LONGEST_NAP)
            if error is None:
                raise
            raise error from None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` and `wait` wait."""
        self._timeout = timeout.total_seconds()
        self._store.set_timeout(timeout)


def unwatched(store: Store) -> Store:
    """The store itself, whether its waits are watched or not."""
    return store.unwatched if isinstance(store, WatchedStore) else store
