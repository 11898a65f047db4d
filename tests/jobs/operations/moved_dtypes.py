"""Dtypes that operations move and do not reduce, compared by bytes: float8, unsigned integers, complex32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from ranks import own_rank
from reference import Failures, _mixed

import mcr_plus as mcr
from mcr_plus.core.kinds import MOVED
from mcr_plus.layout import Layout

ROWS: Final = 5


def value(dtype: torch.dtype, rank: int, numel: int, salt: int = 0) -> torch.Tensor:
    """Any bits at all, NaN among them."""
    raw = _mixed(rank, numel * dtype.itemsize, salt).astype(np.uint8)
    return torch.from_numpy(raw).view(dtype) if numel else torch.empty(0, dtype=dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    """Return the bytes to compare."""
    flat = tensor.clone(memory_format=torch.contiguous_format).as_strided((tensor.numel(),), (1,))
    found: list[int] = flat.view(torch.uint8).tolist() if flat.numel() else []
    return found


class Moves:
    """Runs all kinds that move data on a communicator."""

    def __init__(self, comm: mcr.Communicator, failures: Failures, dtype: torch.dtype, numel: int) -> None:
        self.comm, self.failures, self.dtype, self.numel = comm, failures, dtype, numel
        self.all = [value(dtype, rank, numel) for rank in range(comm.size)]
        self.mine = self.all[comm.rank]
        self.uneven = [value(dtype, rank, numel + rank, 1) for rank in range(comm.size)]

    def expect(self, what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        """Compare bytes."""
        self.failures.expect(
            f"{what} {self.dtype} {self.numel}", bits(found) == bits(wanted), bits(found)[:8]
        )

    def like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs, every other one strided."""
        return [
            torch.zeros(2 * each.numel(), dtype=self.dtype)[::2] if index % 2 else torch.zeros_like(each)
            for index, each in enumerate(tensors)
        ]

    def run(self, **options: Any) -> None:
        """Every kind once."""
        for name in ("rooted", "gathers", "exchanges", "messages"):
            getattr(self, name)(**options)

    def rooted(self, **options: Any) -> None:
        """Run operations from or to one rank."""
        comm, (root, number) = self.comm, (self.comm.ranks[-1], self.comm.size - 1)
        is_root = comm.rank == number
        sent = self.mine.clone()
        comm.broadcast(sent, root, **options)
        self.expect("broadcast", sent, self.all[number])
        told = comm.broadcast_object({"x": self.mine} if is_root else None, root)
        self.expect("broadcast_object", told["x"], self.all[number])
        if self.numel:
            sent = self.mine.clone()
            comm.persistent("broadcast", sent, src=root, **options)()
            self.expect("persistent broadcast", sent, self.all[number])
        for gather, scatter, parts in (
            (comm.gather, comm.scatter, self.all), (comm.gather_v, comm.scatter_v, self.uneven)
        ):  # fmt: skip
            found = self.like(parts)
            gather(parts[comm.rank], found if is_root else None, dst=root, **options)
            for each, wanted in zip(found if is_root else (), parts, strict=False):
                self.expect(gather.__name__, each, wanted)
            out = torch.zeros_like(parts[comm.rank])
            scatter(out, parts if is_root else None, src=root, **options)
            self.expect(scatter.__name__, out, parts[comm.rank])

    def gathers(self, **options: Any) -> None:
        """Gather all ranks' values on all ranks."""
        comm = self.comm
        out = torch.zeros(comm.size * self.numel, dtype=self.dtype)
        comm.all_gather_into_tensor(out, self.mine, **options)
        self.expect("all_gather_into_tensor", out, torch.cat(self.all))
        out.zero_()
        other = torch.zeros(comm.size * 3, dtype=torch.int32)
        comm.all_gather_coalesced([out, other], [self.mine, torch.arange(3).int()], **options)
        self.expect("all_gather_coalesced", out, torch.cat(self.all))
        for call, parts in ((comm.all_gather, self.all), (comm.all_gather_v, self.uneven)):
            found = self.like(parts)
            call(found, parts[comm.rank], **options)
            for each, wanted in zip(found, parts, strict=True):
                self.expect(call.__name__, each, wanted)

    def exchanges(self, **options: Any) -> None:
        """Parts of all to all."""
        comm, rank, size = self.comm, self.comm.rank, self.comm.size
        whole = [value(self.dtype, each, size * self.numel, 2) for each in range(size)]
        out = torch.zeros_like(whole[rank])
        comm.all_to_all_single(out, whole[rank], **options)
        self.expect(
            "all_to_all_single", out, torch.cat([each.view(size, self.numel)[rank] for each in whole])
        )
        sizes = [list(range(self.numel, self.numel + size))] * size  # rank r gets numel + r of each
        whole = [value(self.dtype, each, sum(sizes[each]), 3) for each in range(size)]
        cuts = np.cumsum([0, *sizes[0]]).tolist()
        parts = [[each[low:high] for low, high in pairwise(cuts)] for each in whole]
        wanted = [each[rank] for each in parts]
        out = torch.zeros(sum(each.numel() for each in wanted), dtype=self.dtype)
        comm.all_to_all_single(out, whole[rank], [each.numel() for each in wanted], sizes[rank], **options)
        self.expect("all_to_all_single with sizes", out, torch.cat(wanted))
        found = self.like(wanted)
        comm.all_to_all(found, parts[rank], **options)
        for each, right in zip(found, wanted, strict=True):
            self.expect("all_to_all", each, right)

    def messages(self, **options: Any) -> None:
        """Around a ring."""
        comm, size = self.comm, self.comm.size
        left, right = (comm.ranks[(comm.rank + step) % size] for step in (-1, 1))
        out = torch.zeros_like(self.mine)
        works = [comm.irecv(out, left, 7, **options), comm.isend(self.mine, right, 7, **options)]
        for work in works:
            work.wait()
        self.expect("messages", out, self.all[(comm.rank - 1) % size])


def refusals(comm: mcr.Communicator, failures: Failures, dtype: torch.dtype, **options: Any) -> None:
    """Reductions have no meaning, and say so before anything is sent."""
    x, name = value(dtype, comm.rank, 4 * comm.size), str(dtype).removeprefix("torch.")
    out = torch.zeros(4, dtype=dtype)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(x, **options),
        "max": lambda: comm.all_reduce(x, "MAX", **options),
        "reduce": lambda: comm.reduce(x, comm.ranks[0], **options),
        "coalesced": lambda: comm.all_reduce_coalesced([torch.ones(3), x], **options),
        "reduce_scatter": lambda: comm.reduce_scatter_tensor(out, x, **options),
    }
    for what, call in calls.items():
        failures.raises(f"{what} {dtype}", call, mcr.Unsupported, f"on {name}; ", "is defined on float64")


def walk(
    config: dict[str, Any] | None, backends: Sequence[str | None], sizes: Sequence[int], hosts: int = 1
) -> dict[str, Any]:
    """Run on ranks. `hosts`: on how many the ranks take themselves to be."""
    failures = Failures()
    elsewhere = mock.patch("mcr_plus.job.init.host_name", return_value=f"host{own_rank() % hosts}")
    with elsewhere if hosts > 1 else nullcontext():
        comm = mcr.init(config)
    with comm:
        for backend in backends:
            for dtype in MOVED:
                for numel in sizes:
                    Moves(comm, failures, dtype, numel).run(backend=backend)
                refusals(comm, failures, dtype, backend=backend)
        for dtype in MOVED:
            _redistributed(comm, failures, dtype)
    return failures.report()


def _redistributed(comm: mcr.Communicator, failures: Failures, dtype: torch.dtype) -> None:
    shape, ranks = (7, ROWS), list(comm.ranks)
    whole = value(dtype, 0, 35, 4).view(shape)
    rows, columns = (Layout.sharded(shape, ranks, dim) for dim in (0, 1))
    mine = whole[_range(7, comm.size, comm.rank)].clone()
    found = mcr.redistribute(mine, rows, Layout.replicated(shape, ranks))
    failures.expect(f"redistribute {dtype} to replicas", bits(found) == bits(whole))
    found = mcr.redistribute(mine, rows, columns)
    wanted = whole[:, _range(ROWS, comm.size, comm.rank)]
    failures.expect(f"redistribute {dtype} to columns", bits(found) == bits(wanted))
    if comm.size == 1:  # nothing to reduce
        return
    failures.raises(
        f"redistribute partial {dtype}",
        lambda: mcr.redistribute(
            whole, Layout.mesh(shape, ranks, ["P"]), Layout.replicated(shape, ranks)
        ),
        mcr.InvalidArgument, f"SUM of {dtype}",
    )  # fmt: skip


def _range(extent: int, size: int, rank: int) -> slice:
    """Return the part of a dimension that a rank has, as torch divides it."""
    width = -(-extent // size)
    return slice(min(rank * width, extent), min((rank + 1) * width, extent))


def mismatches(backend: str, kind: str) -> str:
    """Run on two ranks: two dtypes of the same size are not the same."""
    config = {"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "20s"}}]}
    comm = mcr.init(config)
    dtype = (torch.float8_e4m3fn, torch.float8_e5m2)[comm.rank]
    x = value(dtype, comm.rank, 6)
    try:
        if kind == "broadcast":
            comm.broadcast(x, comm.ranks[0], backend=backend)
        elif comm.rank == 0:
            comm.send(x, comm.ranks[1], 3, backend=backend)
            comm.barrier()
        else:
            comm.recv(x, comm.ranks[0], 3, backend=backend)
    except mcr.OrderMismatch as error:
        return str(error)
    except mcr.McrError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def by_torch() -> dict[str, Any]:
    """Run on ranks: torch.distributed over the backend `mcr`."""
    failures = Failures()
    dist.init_process_group("mcr")
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        everyone = [value(dtype, each, 6 * size) for each in range(size)]
        mine, joined = everyone[rank], torch.cat(everyone)

        def expect(what: str, found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype = dtype) -> None:
            failures.expect(f"dist {what} {dtype}", bits(found) == bits(wanted))

        x = mine.clone()
        dist.broadcast(x, 1)
        expect("broadcast", x, everyone[1])
        out = torch.zeros_like(joined)
        dist.all_gather_into_tensor(out, mine)
        expect("all_gather_into_tensor", out, joined)
        parts = list(torch.zeros_like(joined).chunk(size))
        dist.all_gather(parts, mine)
        expect("all_gather", torch.cat(parts), joined)
        out = torch.zeros_like(mine)
        dist.all_to_all_single(out, mine)
        expect("all_to_all_single", out, torch.cat([each.view(size, -1)[rank] for each in everyone]))
        dist.gather(mine, parts if rank == 0 else None, 0)
        out.zero_()
        dist.scatter(out, everyone if rank == 0 else None, 0)
        expect("scatter", out, mine)
        if rank == 0:
            dist.send(mine, 1)
        elif rank == 1:
            dist.recv(out, 0)
            expect("recv", out, everyone[0])
        if dtype.is_complex:  # torch passes sums as sums of float16 and refuses other reductions
            continue
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            failures.raises(
                f"dist all_reduce {dtype} {op}", partial(dist.all_reduce, mine, op), mcr.Unsupported,
                "is defined on float64",
            )  # fmt: skip
    dist.destroy_process_group()
    return failures.report()
