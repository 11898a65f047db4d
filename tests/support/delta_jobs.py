"""What ranks do in the tests of the codec delta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import mcr_plus as mcr
from mcr_plus.kernels import delta as kernel

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8, torch.bool)
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def moved(values: torch.Tensor, seed: int, share: float) -> torch.Tensor:
    """A share of the elements moved by one step of their bits."""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.rand(values.shape, generator=draw) < share
    if values.dtype is torch.bool:
        return values ^ chosen
    kind = BITS[values.element_size()]
    return (values.view(kind) + chosen.to(kind)).view(values.dtype)


def first(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (numel * dtype.itemsize,), generator=draw)
    return bits.to(torch.uint8).view(dtype)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def every_kind(backends: list[str]) -> dict[str, Any]:
    """Each kind and dtype, call by call; returns what differed, and shares of the bytes."""
    wrong: list[str] = []
    shares: dict[str, list[float]] = {}
    with mcr.init(backends=backends) as comm:
        root, ranks = comm.size - 1, comm.size
        for dtype in DTYPES:
            for numel in (5003, 40_001):
                held = [first(dtype, numel, rank) for rank in range(ranks)]
                for call in range(4):
                    held = [moved(each, 10 * call + rank, 0.01) for rank, each in enumerate(held)]
                    what = f"{dtype} {numel} call {call}"
                    x = held[root].clone() if comm.rank == root else torch.zeros_like(held[root])
                    work = comm.broadcast(x, root, compress="delta", tag=f"b{dtype}{numel}", async_op=True)
                    assert work is not None
                    work.wait()
                    if not same(x, held[root]):
                        wrong.append(f"broadcast {what}")
                    info = work.info
                    assert (info.codec, info.bytes) == ("delta", x.nbytes), info
                    shares.setdefault(f"broadcast {call}", []).append(info.wire_bytes / x.nbytes)
                    out = torch.empty(ranks * numel, dtype=dtype)
                    comm.all_gather_into_tensor(
                        out, held[comm.rank], compress="delta", tag=f"i{dtype}{numel}"
                    )
                    if not same(out, torch.cat(held)):
                        wrong.append(f"all_gather_into_tensor {what}")
                    outs = [torch.empty(numel, dtype=dtype) for _ in range(ranks)]
                    comm.all_gather(outs, held[comm.rank], compress="delta", tag=f"l{dtype}{numel}")
                    if not all(same(*pair) for pair in zip(outs, held, strict=True)):
                        wrong.append(f"all_gather {what}")
        # Sizes that change from call to call, in the uneven form.
        for call in range(4):
            sizes = [1000 + 100 * rank + 7 * (call // 2) for rank in range(ranks)]
            parts = [moved(first(torch.float32, size, rank), call, 0.01) for rank, size in enumerate(sizes)]
            outs = [torch.empty_like(part) for part in parts]
            comm.all_gather_v(outs, parts[comm.rank], compress="delta", tag="v")
            if not all(same(*pair) for pair in zip(outs, parts, strict=True)):
                wrong.append(f"all_gather_v call {call}")
        # Several in flight under one tag.
        x = first(torch.bfloat16, 5000, 1)
        versions = [x := moved(x, call, 0.02) for call in range(5)]
        got = [version.clone() if comm.rank == 0 else torch.zeros_like(version) for version in versions]
        for work in [comm.broadcast(y, 0, compress="delta", tag="many", async_op=True) for y in got]:
            assert work is not None
            work.wait()
        if not all(same(*pair) for pair in zip(got, versions, strict=True)):
            wrong.append("several in flight")
        return {"wrong": wrong, "shares": shares, "state": sorted(mcr.state_dict())}


def damaged(kind: str) -> list[list[str]]:
    """A payload is damaged on rank 1 in the second call; what each call raised, on each rank."""
    apply, is_armed = kernel.apply, False

    def spoiled(wire: torch.Tensor, out: torch.Tensor) -> kernel.Header:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            wire = wire.clone()
            wire[100] ^= 1
        return apply(wire, out)

    with mcr.init(backends=["gloo"]) as comm:
        if comm.rank == 1:
            kernel.apply = spoiled
        x, raised, wrong = first(torch.bfloat16, 50_000, 0), [], []
        for call in range(5):
            x = moved(x, call, 0.01)
            is_armed = call == 1
            try:
                if kind == "broadcast":
                    out = x.clone() if comm.rank == 0 else torch.zeros_like(x)
                    comm.broadcast(out, 0, compress="delta", tag="t")
                    expected = x
                else:
                    out = torch.empty(comm.size * x.numel(), dtype=x.dtype)
                    mine = moved(x, comm.rank, 0.5)
                    comm.all_gather_into_tensor(out, mine, compress="delta", tag="t")
                    expected = torch.cat([moved(x, rank, 0.5) for rank in range(comm.size)])
                raised.append("")
                if not same(out, expected):
                    wrong.append(call)
            except mcr.BackendError as error:
                raised.append(str(error))
        return [raised, [str(call) for call in wrong]]


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except mcr.Unsupported as error:
        return str(error)
    return "accepted"


def refusals() -> list[str]:
    """Texts of errors."""
    with mcr.init(backends=["gloo"]) as comm:
        x, is_first = torch.zeros(4096), comm.rank == 0
        parts = [x] * comm.size if is_first else None
        calls = (
            lambda: comm.broadcast(x, 0, compress="delta"),
            lambda: comm.all_reduce(x, compress="delta", tag="t"),
            lambda: comm.scatter(x, parts, 0, compress="delta", tag="t"),
            lambda: comm.send(x, 1, compress="delta") if is_first else comm.recv(x, 0, compress="delta"),
            lambda: comm.broadcast(x.to(torch.complex64), 0, compress="delta", tag="t"),
        )
        return [refusal(call) for call in calls]


def hierarchical(inter: bool) -> dict[str, Any]:
    """A broadcast between two nodes of two ranks; the records of rank 0's and rank 2's steps."""
    stage: dict[str, Any] = {"kinds": ["broadcast"], "min": 0, "ranks_per_node": 2}
    if inter:
        stage["inter"] = {"compress": {"codec": "delta"}}
    config = {
        "version": 1,
        "backends": ["gloo"],
        "pipeline": [{"hierarchical": stage}, {"compress": {}}, {"select": {}}, {"dispatch": {}}],
    }
    with mcr.init(config) as comm:
        x, same_bits, records = first(torch.bfloat16, 40_000, 0), 0, []
        for call in range(4):
            x = moved(x, call, 0.01)
            out = x.clone() if comm.rank == 0 else torch.zeros_like(x)
            with mcr.record() as log:
                comm.broadcast(out, 0, tag="w", compress=None if inter else "delta")
            same_bits += same(out, x)
            records = [(each.group, each.codec or "", each.bytes, each.wire_bytes) for each in log.records]
        return {"same": same_bits, "records": records}
