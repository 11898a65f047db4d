"""Plan buckets of gradients so that the last all_reduce ends earliest (`fuse: {plan: exact}`)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.costs import expected_us
from mcr_plus.communicator.gradient_policy import GradientPolicy
from mcr_plus.compression.options import codec_of
from mcr_plus.compression.policy import refusal, resolve_options
from mcr_plus.compression.scheme_bytes import as_all_reduces
from mcr_plus.core.kinds import AVG, dtype_name
from mcr_plus.core.message import Signature
from mcr_plus.errors import ConfigError
from mcr_plus.fusion.bucket import Bucket, BucketEntry, Cost, earliest_finish
from mcr_plus.fusion.options import FuseOptions

_OVERHEAD: Final = 50e-6  # seconds that a rank takes to issue an operation and wait for it
_PARTS: Final = 4
_LEAST: Final = 1 << 20  # of a bucket, below which a link's latency counts


def default_limits(comm: Communicator, params: Sequence[torch.Tensor]) -> FuseOptions:
    """Return the limits of buckets for a pipeline without `fuse`.

    Between hosts a bucket takes long, and its library goes on while the program computes. So gradients that
    would all fit into one bucket, and be sent after the pass, are divided into about `_PARTS`.
    """
    usual = FuseOptions()
    if len({comm.hosts[rank] for rank in comm.ranks}) == 1:
        return usual
    part = sum(param.nbytes for param in params) // _PARTS
    return FuseOptions(bucket=min(usual.bucket, max(_LEAST, part)))


def all_reduce_costs(
    comm: Communicator, entries: Sequence[BucketEntry], params: Sequence[torch.Tensor], tag: str
) -> dict[Hashable, Cost]:
    """Return the cost of an all_reduce for each set of gradients that may share a bucket.

    `all_reduce_cost` describes the costs and errors. `like` of an entry is its dtype, device and policy, and
    `id` the index of its parameter in `params`. With a codec, the cost covers the operations that move
    payloads, but not the time of encoding.
    """
    sets: dict[Hashable, list[BucketEntry]] = {}
    for entry in entries:
        sets.setdefault(entry.like, []).append(entry)
    costs: dict[Hashable, Cost] = {}
    for like, members in sets.items():
        dtype, device, policy = cast("tuple[torch.dtype, torch.device, GradientPolicy]", like)
        nbytes = sum(entry.nbytes for entry in members)
        payloads = None
        if policy.encoded and nbytes:
            own = [params[entry.id] for entry in members]
            payloads = _payloads(comm, policy, own, dtype, device.type, tag)
        cost = all_reduce_cost(comm, dtype, nbytes, device.type, tag, dense=payloads is not None)
        if payloads is not None:
            operations, encoded = payloads
            cost = _of_operations(cost, operations, encoded / nbytes)
        costs[like] = cost
    return costs


def _of_operations(dense: Cost, operations: int, rate: float) -> Cost:
    """Return the cost of `operations` equal operations that together move `rate` times the bytes of one."""

    def cost(nbytes: NDArray[np.int64]) -> NDArray[np.float64]:
        return operations * dense((nbytes * (rate / operations)).astype(np.int64))

    return cost


def _payloads(
    comm: Communicator,
    policy: GradientPolicy,
    params: Sequence[torch.Tensor],
    dtype: torch.dtype,
    device: str,
    tag: str,
) -> tuple[int, int] | None:
    """Apply `as_all_reduces` to a bucket of these parameters; return None if no codec applies to it."""
    shapes = tuple(tuple(param.shape) for param in params)
    numel = sum(param.numel() for param in params)
    signature = Signature(
        "all_reduce", dtype, (numel,), numel * dtype.itemsize, comm.name, comm.size, device, AVG, None, tag,
        parts=shapes,
    )  # fmt: skip
    compress = policy.compress if isinstance(policy.compress, tuple) else None
    options = resolve_options(comm.config, signature.replace(compress=compress))
    if options is None or options.codec == "none":
        return None
    codec = codec_of(options)
    return None if refusal(codec, options, signature) else as_all_reduces(codec, signature)


def all_reduce_cost(
    comm: Communicator, dtype: torch.dtype, nbytes: int, device: str, tag: str, *, dense: bool = False
) -> Cost:
    """Return the expected time of an all_reduce, in seconds, as a function of its bytes, up to `nbytes`.

    The time is the tuning table's time for a synchronous operation of the pipeline, plus the overhead of
    issuing it. `dense`: without the pipeline's codec. Raises `ConfigError` if the table has no times for it.
    """
    steps = max(2, 2 * int(np.ceil(np.log2(max(nbytes, 1024) / 512))))
    sizes = np.geomspace(512, max(nbytes, 1024), steps)
    numels = [int(size) // dtype.itemsize for size in sizes]
    options: dict[str, Any] = {"op": AVG, "device": device, "tag": tag, "dense": dense}
    times = [expected_us(comm, "all_reduce", dtype, numel, **options) for numel in numels]
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


def earliest(entries: Sequence[BucketEntry], costs: dict[Hashable, Cost], alignment: int) -> list[Bucket]:
    """Return buckets of entries with measured `ready` times, in the order in which the buckets become ready.

    Entries with different `BucketEntry.like` may not share a bucket. They are planned independently, as if
    each kind had the link to itself.
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
    become ready; gradients that are not listed become ready last. Returns (number of the bucket, index), or
    None.
    """
    place = {index: at for at, index in enumerate(seen)}
    last = [max(members, key=lambda index: place.get(index, len(seen))) for members in buckets]
    ends = [place.get(index, len(seen)) for index in last]
    late = next((at for at in range(1, len(ends)) if ends[at] < ends[at - 1]), None)
    return None if late is None else (late, last[late - 1])
