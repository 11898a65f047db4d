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
    "ReduceOptions", "ReduceScatterOptions", "ScatterOptions", "Store", "TCPStore", "Work",
    "gloo_group", "look", "on_socket", "put",
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
    if (own := getattr(store, "look", None)) is not None:  # ours
        return own(key)  # type: ignore[no-any-return]
    # Torch's stores return the expected text for a missing key; nothing is written unless the value
    # equals it.
    found = store.compare_set(key, _ABSENT, _ABSENT)
    return None if found == _ABSENT.encode() else found


def put(store: Store, key: str, value: bytes) -> None:
    """Set a key of a store to bytes; the stubs allow only text."""
    store.set(key, value)  # type: ignore[arg-type]


def gloo_group(
    store: Store, rank: int, size: int, *, devices: Sequence[Any], threads: int, timeout: timedelta
) -> ProcessGroupGloo:
    """Create a gloo group on chosen devices; the stubs lack the options' class and this argument."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(devices)
    options._threads = threads
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)
