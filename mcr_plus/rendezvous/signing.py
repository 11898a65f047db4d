"""Protection of a job against other users: a secret of its ranks, and a store with values signed by it.

torch's stores have no authentication: any process that can connect to the port can read and write all keys.
Therefore ranks sign the values that they exchange there, and refuse values with a wrong signature: addresses
that gloo connects to, the processes of the ranks, their shared memory. Counters are not signed: an attacker
who changes them can block a job, as can one who removes keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from typing import Any, Final

from mcr_plus.core.c10d import PrefixStore, Store, WrappedStore, look, put
from mcr_plus.core.proc import boot_id
from mcr_plus.errors import LaunchError

_NAME: Final = "mcr_plus_secret"
_BYTES: Final = 32
_TAG: Final = hashlib.sha256().digest_size


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


class SignedStore(WrappedStore):
    """A store in which values are signed; counters are not, and cannot be read as values."""

    def __init__(self, store: Store, secret: bytes, part: str) -> None:
        """`part`: a name unique among the users of the secret; values signed for another part are refused."""
        super().__init__(store)
        self._secret = hmac.digest(secret, part.encode(), "sha256")

    @property
    def secret(self) -> bytes:
        """Secret of the ranks that share this store."""
        return hmac.digest(self._secret, b"objects", "sha256")

    def part(self, name: str) -> SignedStore:
        """Return a part of the store under its own name; values of one part are refused in another."""
        return SignedStore(PrefixStore(name, self._store), self._secret, name)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        put(self._store, key, seal(self._secret, key, value.encode() if isinstance(value, str) else value))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write a value unless the key has one, and return the result; `expected_value` must be empty."""
        if expected_value:
            raise ValueError("compare_set: signed values can only be written where there is none")
        sealed: Any = seal(self._secret, key, desired_value.encode())
        self._store.compare_set(key, "", sealed)
        return self.get(key)

    def get(self, key: str) -> bytes:
        """Wait for a value; raises `LaunchError` if no rank of this job has signed it."""
        return self._unsealed(key, self._store.get(key))

    def look(self, key: str) -> bytes | None:
        """Return the present value, None without one; raise as `get` does."""
        sealed = look(self._store, key)
        return None if sealed is None else self._unsealed(key, sealed)

    def _unsealed(self, key: str, sealed: bytes) -> bytes:
        value = unseal(self._secret, key, sealed)
        if value is None:
            raise LaunchError(
                f"'{key}' in the job's store was not written by a rank of this job, or MCR_SECRET differs "
                "between ranks"
            )
        return value


class SecretOffer:
    """A secret that rank 0 holds in memory, where processes of the same user on the same host can read it."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(_BYTES)
        self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.write(self._descriptor, self.secret)

    @property
    def place(self) -> str:
        """Place of the secret; the place itself is not secret."""
        return f"{os.getpid()}:{self._descriptor}:{_processes()}"

    def close(self) -> None:
        """Withdraw the offer, after all ranks have read it or failed to."""
        os.close(self._descriptor)


def _processes() -> str:
    """Return an identifier equal for processes that see each other in `/proc`: boot id and PID namespace."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot_id()} {namespace}"


def read_offer(place: str) -> bytes:
    """Read the secret at a `SecretOffer.place`, which an attacker may have written.

    Raises `LaunchError` unless the kernel reports that the memory belongs to this user.
    """
    problem = f"the job's secret cannot be read from process {place.partition(':')[0][:20]!r}"
    try:
        process, descriptor, where = place.split(":", 2)
        pid, number = int(process), int(descriptor)
        if where != _processes():
            raise LaunchError(f"{problem}: it is on another host, or in another container")
        path = f"/proc/{pid}/fd/{number}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            raise LaunchError(f"{problem}: that is something else")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_uid != os.geteuid():
                raise LaunchError(f"{problem}: it belongs to another user")
            return os.pread(file, _BYTES, 0)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise LaunchError(f"{problem}: {error}") from error


def address_of(store: Any) -> str:
    """Return the address of one of torch's stores, empty if it has none."""
    return str(getattr(_innermost(store), "host", ""))


def place_of(store: Any) -> str:
    """Return address and port of one of torch's stores, for messages."""
    found = _innermost(store)
    return f"{found.host}:{found.port}" if hasattr(found, "host") else "the job's store"


def _innermost(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
