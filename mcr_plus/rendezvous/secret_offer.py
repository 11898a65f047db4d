"""A secret of a job's ranks, which processes of the same user on the host can read from rank 0's memory.

With it, ranks sign what they exchange in the job's store (`core/job_store.py`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import Final

from mcr_plus.core.proc import boot_id
from mcr_plus.errors import LaunchError

_NAME: Final = "mcr_plus_secret"
_BYTES: Final = 32


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
