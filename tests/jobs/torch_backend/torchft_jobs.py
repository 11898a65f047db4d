"""Programs with ProcessGroupMcr over a stand-in for torchft, for `test_torchft_group`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from mcr_plus.core.c10d import PrefixStore, TCPStore


class _Wrapper(dist.ProcessGroup):
    """What ProcessGroupMcr uses of torchft's ProcessGroupWrapper, before torchft had `reconfigure`."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._pg: Any = None
        self._timeout = timeout

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
        """Begin a group of the ranks that meet at `host:port/prefix`."""
        del replica_id
        self.abort()
        place, _, prefix = store_addr.partition("/")
        host, _, port = place.partition(":")
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=self._timeout)
        self._pg = self._create_pg(PrefixStore(prefix, store), rank, world_size)  # type: ignore[attr-defined]

    def abort(self) -> None:
        """End the group."""
        group, self._pg = self._pg, None
        if group is not None:
            group.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout."""
        self._timeout = timeout

    @contextmanager
    def _run_context(self) -> Iterator[None]:
        yield

    def allreduce(self, tensors: Any, opts: Any) -> Any:  # type: ignore[override]
        """Hand an operation on."""
        with self._run_context():
            return self._wrap_work(self._pg.allreduce(tensors, opts), opts)  # type: ignore[attr-defined]


def _group(timeout: float) -> Any:
    module: Any = ModuleType("torchft.process_group")
    module.ProcessGroupWrapper = _Wrapper
    sys.modules |= {"torchft": ModuleType("torchft"), "torchft.process_group": module}
    from mcr_plus.torchft import ProcessGroupMcr

    return ProcessGroupMcr(
        timedelta(seconds=timeout), {"version": 1, "pipeline": [{"select": {}}, {"dispatch": {}}]}
    )


def _error(group: Any) -> str:
    try:
        group.allreduce([torch.ones(2)], dist.ReduceOp.SUM).wait()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _sum(group: Any) -> float:
    x = torch.ones(2)
    group.allreduce([x], dist.ReduceOp.SUM).wait()
    return x[0].item()


def configured_again() -> dict[str, Any]:
    """Three ranks, of which rank 1 dies; the others go on, and then without one that has shut down."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    group = _group(20)
    group.configure(f"{address}/1", "replica", rank, 3)
    result: dict[str, Any] = {"name": group.getBackendName(), "sums": [_sum(group)], "fine": group.errored()}
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 1:
        store.wait(["past/0", "past/2"])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(f"past/{rank}", "1")
    while not (error := _error(group)):
        pass
    result |= {"lost": error, "errored": str(group.errored())}
    group.configure(f"{address}/2", "replica", rank // 2, 2)
    result["sums"].append(_sum(group))
    group.set_timeout(timedelta(seconds=0.5))
    if rank == 0:
        result["late"] = _error(group)
        store.set("late", "1")
        group.shutdown()
        return result
    store.wait(["late"])
    while not (error := _error(group)):
        pass
    result["left"] = error
    group.abort()
    group.configure(f"{address}/3", "replica", 0, 1)
    result["sums"].append(_sum(group))
    group.shutdown()
    return result
