"""Parts of torch.distributed that its stubs omit or describe wrongly.

torch.distributed imports them conditionally, so type checkers do not see them; they are imported from their
defining modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from socket import socket
from typing import Any, Final

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    FileStore,
    GatherOptions,
    HashStore,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
    TCPStore,
    Work,
)

__all__ = [
    "TORCH", "AllToAllOptions", "AllgatherOptions", "AllreduceOptions", "BarrierOptions", "BroadcastOptions",
    "FileStore", "GatherOptions", "HashStore", "PrefixStore", "ProcessGroup", "ProcessGroupGloo", "ReduceOp",
    "ReduceOptions", "ReduceScatterOptions", "ScatterOptions", "Store", "TCPStore", "Work", "WrappedStore",
    "gloo_group", "keys_of", "look", "on_socket", "put",
]  # fmt: skip

TORCH: Final = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""Torch's version, for differences that no name reveals."""


def on_socket(listener: socket) -> dict[str, Any]:
    """Return arguments of `TCPStore` for a server on a bound, listening socket, which it takes."""
    arguments: dict[str, Any] = {"master_listen_fd": listener.detach()}
    if TORCH < (2, 8):  # the default server takes no socket there
        arguments["use_libuv"] = False
    return arguments


_ABSENT: Final = "mcr_plus: no value"


def look(store: Store, key: str) -> bytes | None:
    """Return the present value of a key in one request; None without a value.

    `get` after `check` would wait until the store's timeout if the key was removed in between.
    """
    if isinstance(store, WrappedStore):
        return store.look(key)
    # Torch's stores return the expected text for a missing key; nothing is written unless the value
    # equals it.
    found = store.compare_set(key, _ABSENT, _ABSENT)
    return None if found == _ABSENT.encode() else found


def keys_of(store: Store) -> list[str]:
    """Return the keys of a store, or of a part of one; none if this torch cannot list them (before 2.10)."""
    while isinstance(store, WrappedStore):
        store = store.wrapped
    try:
        return list(store.list_keys()) if hasattr(store, "list_keys") else []
    except IndexError:  # the parent store has a key with the exact name of the part
        return []


def put(store: Store, key: str, value: bytes) -> None:
    """Set a key of a store to bytes; the stubs allow only text."""
    store.set(key, value)  # type: ignore[arg-type]


class WrappedStore(Store):
    """A store that forwards every request to another store; base class of stores that change some."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    @property
    def wrapped(self) -> Store:
        """Return the store that receives the requests."""
        return self._store

    def get(self, key: str) -> bytes:
        """Wait for a value; raise the wrapped store's errors."""
        return self._store.get(key)

    def look(self, key: str) -> bytes | None:
        """Return the present value of a key; None without one."""
        return look(self._store, key)

    def add(self, key: str, value: int) -> int:
        """Add to a counter; return its new value."""
        return self._store.add(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write a value if the present one is `expected_value` ('': none); return the resulting value."""
        return self._store.compare_set(key, expected_value, desired_value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these keys are set."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys are set."""
        return self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was set."""
        return self._store.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of `get` and `wait`."""
        self._store.set_timeout(timeout)


def gloo_group(
    store: Store, rank: int, size: int, *, devices: Sequence[Any], threads: int, timeout: timedelta
) -> ProcessGroupGloo:
    """Create a gloo group on chosen devices; the stubs lack the options' class and this argument."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(devices)
    options._threads = threads
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)
