"""The parts of torch.distributed that its stubs do not export, or describe wrongly.

torch.distributed imports them under a condition, so for type checkers they are not there; they are taken
from where they are defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

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
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "FileStore",
    "GatherOptions",
    "HashStore",
    "PrefixStore",
    "ProcessGroup",
    "ProcessGroupGloo",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "Store",
    "TCPStore",
    "Work",
    "gloo_group",
    "put",
]


def put(store: Store, key: str, value: bytes) -> None:
    """Set a key of a store to bytes; the stubs know text only."""
    store.set(key, value)  # type: ignore[arg-type]


def gloo_group(
    store: Store, rank: int, size: int, *, devices: Sequence[Any], threads: int, timeout: timedelta
) -> ProcessGroupGloo:
    """Create a gloo group on chosen devices; the stubs know neither the options' class nor this argument."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(devices)
    options._threads = threads
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)
