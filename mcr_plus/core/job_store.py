"""The key-value store of a job: a part of one of torch's stores, with signed values and watched waits.

torch's stores have no authentication: any process that can connect to the port can read and write all keys.
Therefore ranks sign the values that they exchange there, and refuse values with a wrong signature: addresses
that gloo connects to, the processes of the ranks, their shared memory. Counters are not signed: an attacker
who changes them can block a job, as can one who removes keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from torch.distributed import DistError

from mcr_plus.core.c10d import PrefixStore, Store, look, put
from mcr_plus.core.deadline import Deadline, until
from mcr_plus.errors import LaunchError, McrError

if TYPE_CHECKING:
    from mcr_plus.core.group import Group
    from mcr_plus.errors import PeerLost

T = TypeVar("T")
_TAG: Final = hashlib.sha256().digest_size
_FIRST_NAP: Final = 0.0002
_LONGEST_NAP: Final = 0.01
_NAP_SHARE: Final = 0.1  # share of the wait so far: a value is found that much later
_LOSS_SHOWS: Final = 0.3  # s after a store error within which the death that caused it shows
_LOOKS_AFTER: Final = 0.1  # s; most values arrive sooner


def seal(secret: bytes, what: str, value: bytes) -> bytes:
    """Return `value` preceded by a signature of it and of its name `what`; unchanged without a secret."""
    return _sign(secret, what, value) + value if secret else value


def unseal(secret: bytes, what: str, sealed: bytes) -> bytes | None:
    """Return the value passed to `seal`; None if the signature has another secret or name."""
    if not secret:
        return sealed
    tag, value = sealed[:_TAG], sealed[_TAG:]
    return value if hmac.compare_digest(tag, _sign(secret, what, value)) else None


def unsigned(sealed: bytes) -> bytes:
    """Return the value passed to `seal` without checking the signature, for ranks without the secret."""
    return sealed[_TAG:]


def _sign(secret: bytes, what: str, value: bytes) -> bytes:
    # The length of the name first, so that its end cannot be taken for the beginning of the value.
    name = what.encode()
    return hmac.digest(secret, len(name).to_bytes(8, "little") + name + value, "sha256")


class JobStore(Store):
    """A part of a store. Values are signed if there is a secret; counters are not, nor can they be read.

    With `lost`, the store waits for values itself, because torch's client does not watch the ranks'
    processes: waits end when a rank that may have to write the value is lost.
    """

    def __init__(
        self,
        store: Store,
        secret: bytes = b"",
        name: str = "",
        *,
        timeout: float = 0.0,
        lost: Callable[[], PeerLost | None] | None = None,
    ) -> None:
        """Create the store over one of torch's, or over a `JobStore`, which signs values unless this does.

        `name`: unique among the users of the secret; values signed for another name are refused. `timeout`:
        limit of watched `get` and `wait` in s. `lost`: returns the error if a rank is lost by now.
        """
        super().__init__()
        self._store: Store = store
        self._key = hmac.digest(secret, name.encode(), "sha256") if secret else b""
        if isinstance(store, JobStore):
            self._store, self._key = store._store, self._key or store._key
        self._timeout = timeout
        self._lost = lost

    @property
    def inner(self) -> Store:
        """Return the store that receives the requests."""
        return self._store

    @property
    def secret(self) -> bytes:
        """Secret of the ranks that share this store; empty if values are not signed."""
        return hmac.digest(self._key, b"objects", "sha256") if self._key else b""

    def part(self, name: str) -> JobStore:
        """Return an unwatched part with its own name; values of one part are refused in another."""
        return JobStore(PrefixStore(name, self._store), self._key, name)

    def signed(self, secret: bytes, name: str) -> JobStore:
        """Return this part with values signed by `secret`, watched like this one."""
        return JobStore(self._store, secret, name, timeout=self._timeout, lost=self._lost)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        sealed = seal(self._key, key, value.encode() if isinstance(value, str) else value)
        self._asked(lambda: put(self._store, key, sealed))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write a value if the present one is `expected_value` ('': none); return the resulting value.

        If values are signed, `expected_value` must be empty.
        """
        if not self._key:
            return self._store.compare_set(key, expected_value, desired_value)
        if expected_value:
            raise ValueError("compare_set: signed values can only be written where there is none")
        sealed: Any = seal(self._key, key, desired_value.encode())
        self._store.compare_set(key, "", sealed)
        return self._unsealed(key, self._store.get(key))

    def get(self, key: str) -> bytes:
        """Wait for a value; raises `LaunchError` if no rank of this job has signed it."""
        if self._lost is not None:
            self.wait([key])
        return self._asked(lambda: self._unsealed(key, self._store.get(key)))

    def look(self, key: str) -> bytes | None:
        """Return the present value, None without one; raise as `get` does."""

        def found() -> bytes | None:
            sealed = look(self._store, key)
            return None if sealed is None else self._unsealed(key, sealed)

        return self._asked(found)

    def _unsealed(self, key: str, sealed: bytes) -> bytes:
        value = unseal(self._key, key, sealed)
        if value is None:
            raise LaunchError(
                f"'{key}' in the job's store was not written by a rank of this job, or MCR_SECRET differs "
                "between ranks"
            )
        return value

    def add(self, key: str, value: int) -> int:
        """Add to a counter; return its new value."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these keys exist."""
        return self._asked(lambda: self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys exist.

        If watched, raises `PeerLost` once a rank is lost, and `DistError`, as torch's stores do, after
        `timeout`.
        """
        if self._lost is None:
            self._store.wait(keys, *(() if timeout is None else (timeout,)))
            return
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

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it existed."""
        return self._store.delete_key(key)

    def list_keys(self) -> list[str]:
        """Return the keys of this part; none if this torch cannot list them (before 2.10)."""
        try:
            return list(self._store.list_keys()) if hasattr(self._store, "list_keys") else []
        except IndexError:  # the parent store has a key with the exact name of the part
            return []

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of `get` and `wait`."""
        self._timeout = timeout.total_seconds()
        self._store.set_timeout(timeout)

    def _asked(self, request: Callable[[], T]) -> T:
        """Return the store's answer; raise `PeerLost` if the store was lost with the rank that served it."""
        try:
            return request()
        except McrError:  # an error stored as a value
            raise
        except RuntimeError:
            if self._lost is None:
                raise
            error = until(self._lost, Deadline(_LOSS_SHOWS), _LONGEST_NAP)
            if error is None:
                raise
            raise error from None


class GroupStore(JobStore):
    """The job's store as one group uses it, with a note of the keys that this rank has written.

    A key is never removed while a rank of the group may still read it: the rank that leaves last removes all
    keys. A counter has several writers, and is noted by the group's rank 0.
    """

    def __init__(self, store: JobStore, group: Group) -> None:
        """`group`: a group that includes this process."""
        super().__init__(store, timeout=store._timeout, lost=store._lost)
        self._group = group
        self._written: set[str] = set()

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._written.add(key)
        super().set(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write a value if the present one is `expected_value`; return the resulting value."""
        self._written.add(key)
        return super().compare_set(key, expected_value, desired_value)

    def add(self, key: str, value: int) -> int:
        """Add to a counter; return its new value."""
        if self._group.rank == 0:
            self._written.add(key)
        return super().add(key, value)

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it existed."""
        self._written.discard(key)
        return super().delete_key(key)

    def leave(self) -> None:
        """Note that this rank reads no more values; the last rank to do so removes the keys of all.

        Call it once. If a rank never does, or the store does not answer, the keys stay.
        """
        group, written = self._group, json.dumps(sorted(self._written))
        lists = [f"left/{group.name}/{rank}" for rank in range(group.size)]
        count = f"left/{group.name}/ranks"
        with contextlib.suppress(RuntimeError):
            self.set(lists[group.rank], written)
            if self.add(count, 1) < group.size:
                return
            for key in lists:
                for each in json.loads(self.get(key)):
                    self.delete_key(each)
                self.delete_key(key)
            self.delete_key(count)
