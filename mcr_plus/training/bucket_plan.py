"""Plans buckets of gradients for the earliest end of the last all_reduce (`fuse: {plan: exact}`)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.costs import expected_us
from mcr_plus.core.kinds import AVG, dtype_name
from mcr_plus.errors import ConfigError
from mcr_plus.fusion.bucket import Bucket, Cost, Entry, earliest_finish

_OVERHEAD: Final = 50e-6  # seconds of a rank to issue an operation and wait for it


def all_reduce_costs(comm: Communicator, entries: Sequence[Entry], tag: str) -> dict[Hashable, Cost]:
    """Return the cost of an all_reduce for each set of gradients that may share a bucket.

    For the costs and errors, see `all_reduce_cost`; an entry's `like` is its dtype, device and policy.
    """
    total = dict.fromkeys((entry.like for entry in entries), 0)
    for entry in entries:
        total[entry.like] += entry.nbytes
    costs: dict[Hashable, Cost] = {}
    for like, nbytes in total.items():
        dtype, device, _ = cast("tuple[torch.dtype, torch.device, object]", like)
        costs[like] = all_reduce_cost(comm, dtype, nbytes, device.type, tag)
    return costs


def all_reduce_cost(comm: Communicator, dtype: torch.dtype, nbytes: int, device: str, tag: str) -> Cost:
    """Return the expected seconds of an all_reduce as a function of its bytes, up to `nbytes`.

    The seconds are those of a synchronous operation in the pipeline's tuning table, plus the overhead of
    issuing it. Raises `ConfigError` if the table has no times for it.
    """
    steps = max(2, 2 * int(np.ceil(np.log2(max(nbytes, 1024) / 512))))
    sizes = np.geomspace(512, max(nbytes, 1024), steps)
    numels = [int(size) // dtype.itemsize for size in sizes]
    times = [expected_us(comm, "all_reduce", dtype, n, op=AVG, device=device, tag=tag) for n in numels]
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        raise ConfigError(
            f"fuse: plan: exact: no expected times of all_reduce on {dtype_name(dtype)} over {comm.size} "
            "ranks; `mcr-plus tune` measures them, and `select: {table: FILE}` uses the result"
        )
    seconds = np.maximum.accumulate(known) * 1e-6 + _OVERHEAD

    def cost(nbytes: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.interp(nbytes, sizes, seconds)

    return cost


def earliest(entries: Sequence[Entry], costs: dict[Hashable, Cost], alignment: int) -> list[Bucket]:
    """Return the buckets of entries with measured `ready` times, in the order of their readiness.

    Entries with different `Entry.like`, which may not share a bucket, are planned independently, without
    regard to the sharing of the link.
    """
    ready = {entry.id: entry.ready for entry in entries}
    buckets = []
    for like, cost in costs.items():
        own = sorted((entry for entry in entries if entry.like == like), key=lambda entry: entry.ready)
        buckets += earliest_finish(own, cost, alignment=alignment)
    return sorted(buckets, key=lambda bucket: max(ready[member] for member in bucket.members))


def first_waiting(buckets: Sequence[Sequence[int]], seen: Sequence[int]) -> tuple[int, int] | None:
    """Return the first bucket that is ready before its predecessor, and the gradient that it waits for.

    `buckets`: indices of gradients, in the order of sending. `seen`: indices in the order in which gradients
    become ready; others follow at the end of the pass. Returns (number of the bucket, index), or None.
    """
    place = {index: at for at, index in enumerate(seen)}
    last = [max(members, key=lambda index: place.get(index, len(seen))) for members in buckets]
    ends = [place.get(index, len(seen)) for index in last]
    late = next((at for at in range(1, len(ends)) if ends[at] < ends[at - 1]), None)
    return None if late is None else (late, last[late - 1])
