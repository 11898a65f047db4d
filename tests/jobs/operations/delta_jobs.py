"""Programs of ranks in the tests of the codec delta."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

import mcr_plus as mcr
from mcr_plus.compression.copies import Copies
from mcr_plus.compression.delta import DeltaState
from mcr_plus.compression.stage import CompressStage
from mcr_plus.kernels import delta as kernel

DTYPES = (
    torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def moved(values: torch.Tensor, seed: int, share: float) -> torch.Tensor:
    """Move a share of the elements by one step of their bits."""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.rand(values.shape, generator=draw) < share
    if values.dtype is torch.bool:
        return values ^ chosen
    if values.is_complex():
        return torch.view_as_complex(moved(torch.view_as_real(values), seed, share))
    kind = BITS[values.element_size()]
    return (values.view(kind) + chosen.to(kind)).view(values.dtype)


def first(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (numel * dtype.itemsize,), generator=draw)
    return bits.to(torch.uint8).view(dtype)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def every_kind(backends: list[str]) -> dict[str, Any]:  # noqa: C901 - one job for all kinds
    """Run each kind and dtype, call by call; return the differences and the shares of bytes."""
    wrong: list[str] = []
    shares: dict[str, list[float]] = {}
    with mcr.init(backends=backends) as comm:
        root, ranks = comm.size - 1, comm.size
        for dtype in DTYPES:
            for numel in (5003, 40_001) if dtype is DTYPES[0] else (5003,):
                held = [first(dtype, numel, rank) for rank in range(ranks)]
                for call in range(3):
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
                    out = torch.empty_like(held[comm.rank])
                    parts = held if comm.rank == root else None
                    comm.scatter(out, parts, root, compress="delta", tag=f"s{dtype}{numel}")
                    if not same(out, held[comm.rank]):
                        wrong.append(f"scatter {what}")
                    # Each rank sends to the next, in a ring: each peer and tag has a state.
                    before = (comm.rank - 1) % ranks
                    out = torch.empty_like(held[before])
                    sent = comm.isend(held[comm.rank], (comm.rank + 1) % ranks, numel, compress="delta")
                    comm.recv(out, before, numel, compress="delta")
                    sent.wait()
                    if not same(out, held[before]):
                        wrong.append(f"recv {what}")
                    info = sent.info
                    assert (info.kind, info.codec, info.bytes) == ("send", "delta", out.nbytes), info
                    shares.setdefault(f"send {call}", []).append(info.wire_bytes / out.nbytes)
        # Test sizes that change from call to call, in the uneven form.
        for call in range(4):
            sizes = [1000 + 100 * rank + 7 * (call // 2) for rank in range(ranks)]
            parts = [moved(first(torch.float32, size, rank), call, 0.01) for rank, size in enumerate(sizes)]
            outs = [torch.empty_like(part) for part in parts]
            comm.all_gather_v(outs, parts[comm.rank], compress="delta", tag="v")
            if not all(same(*pair) for pair in zip(outs, parts, strict=True)):
                wrong.append(f"all_gather_v call {call}")
            out = torch.empty_like(parts[comm.rank])
            comm.scatter_v(out, parts if comm.rank == 0 else None, 0, compress="delta", tag="v")
            if not same(out, parts[comm.rank]):
                wrong.append(f"scatter_v call {call}")
        # Several messages are in flight under one tag.
        x = first(torch.bfloat16, 5000, 1)
        versions = [x := moved(x, call, 0.02) for call in range(5)]
        got = [version.clone() if comm.rank == 0 else torch.zeros_like(version) for version in versions]
        for work in [comm.broadcast(y, 0, compress="delta", tag="many", async_op=True) for y in got]:
            assert work is not None
            work.wait()
        if not all(same(*pair) for pair in zip(got, versions, strict=True)):
            wrong.append("several in flight")
        # Messages of two shapes share one tag.
        given = [part for version in versions for part in (version, version[:3000].contiguous())]
        taken = [torch.zeros_like(part) for part in given]
        if comm.rank < 2:
            other = 1 - comm.rank
            works = [comm.isend(part, other, 3, compress="delta") for part in given]
            works += [comm.irecv(part, other, 3, compress="delta") for part in taken]
            for work in works:
                work.wait()
            if not all(same(*pair) for pair in zip(given, taken, strict=True)):
                wrong.append("several messages in flight")
            # Messages without the codec lie between them; the second round waits for its sends one by one.
            for blocks in (False, True):
                given = [moved(part, 7 + blocks, 0.02) for part in given[:4]]
                taken = [torch.zeros_like(part) for part in given]
                codecs = ["delta", None, "delta", None]
                if comm.rank == 1:
                    works = [
                        comm.irecv(y, 0, 3, compress=codec) for y, codec in zip(taken, codecs, strict=True)
                    ]
                else:
                    works = []
                    for y, codec in zip(given, codecs, strict=True):
                        works.append(comm.isend(y, 1, 3, compress=codec))
                        if blocks:
                            works[-1].wait()
                for work in works:
                    work.wait()
                if comm.rank == 1 and not all(same(*pair) for pair in zip(given, taken, strict=True)):
                    wrong.append("messages with and without the codec in flight")
        return {"wrong": wrong, "shares": shares, "state": sorted(mcr.state_dict())}


def damaged(kind: str) -> list[list[str]]:
    """Damage a payload on rank 1 in the second call; return the error of each call on each rank."""
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
            of_ranks = [moved(x, rank, 0.5) for rank in range(comm.size)]
            expected = of_ranks[comm.rank]
            try:
                if kind == "broadcast":
                    expected, out = x, x.clone() if comm.rank == 0 else torch.zeros_like(x)
                    comm.broadcast(out, 0, compress="delta", tag="t")
                elif kind == "scatter":
                    out, parts = torch.empty_like(x), of_ranks if comm.rank == 0 else None
                    comm.scatter(out, parts, 0, compress="delta", tag="t")
                elif kind == "recv":
                    out = of_ranks[0].clone()
                    expected = out.clone()
                    if comm.rank == 0:
                        comm.send(out, 1, 7, compress="delta")
                    elif comm.rank == 1:
                        comm.recv(out.zero_(), 0, 7, compress="delta")
                else:
                    out = torch.empty(comm.size * x.numel(), dtype=x.dtype)
                    expected = torch.cat(of_ranks)
                    comm.all_gather_into_tensor(out, of_ranks[comm.rank], compress="delta", tag="t")
                raised.append("")
                if not same(out, expected):
                    wrong.append(call)
            except mcr.BackendError as error:
                raised.append(str(error))
        return [raised, [str(call) for call in wrong]]


def another_base() -> list[Any]:
    """The receiver of messages holds other bits, and a higher version, than the sender sent."""
    with mcr.init(backends=["gloo"]) as comm:
        x, found = first(torch.float32, 20_000, 0), []
        for call in range(4):
            x = moved(x, call, 0.01)
            out = torch.zeros_like(x)
            if comm.rank == 0:
                comm.send(x, 1, compress="delta")
                continue
            if call == 2:
                (state,) = [each for each in gc.get_objects() if isinstance(each, DeltaState)]
                ((_, copy),) = state._parts.items()
                held = copy.received[0]
                held.version, held.digest = 90, 123
            with mcr.record() as log:
                comm.recv(out, 0, compress="delta")
            found.append((same(out, x), max(each.wire_bytes for each in log.records) / x.nbytes))
        return found


def bounded(keep: int, tags: int) -> dict[str, Any]:
    """Use more tags in turns than fit in `keep` bytes; return the differences and the bytes of copies."""
    wrong: list[str] = []
    most = 0
    codec = {"codec": "delta", "keep": keep}
    with mcr.init(backends=["gloo"]) as comm:
        ranks, other = comm.size, 1 - comm.rank
        held = [
            [first(torch.bfloat16, 5003, 10 * tag + rank) for rank in range(ranks)] for tag in range(tags)
        ]

        def every(tag: int, what: str) -> None:
            nonlocal most
            parts, mine = held[tag], held[tag][comm.rank]
            x = parts[1].clone() if comm.rank == 1 else torch.zeros_like(mine)
            comm.broadcast(x, 1, compress=codec, tag=f"b{tag}")
            out, gathered = torch.empty_like(mine), torch.empty(ranks * mine.numel(), dtype=mine.dtype)
            comm.all_gather_into_tensor(gathered, mine, compress=codec, tag=f"g{tag}")
            comm.scatter(out, parts if comm.rank == 1 else None, 1, compress=codec, tag=f"s{tag}")
            taken = torch.empty_like(mine)
            works = []
            if comm.rank < 2:
                works = [
                    comm.isend(mine, other, tag, compress=codec),
                    comm.irecv(taken, other, tag, compress=codec),
                ]
            for work in works:
                work.wait()
            pairs = [(x, parts[1]), (gathered, torch.cat(parts)), (out, mine)]
            if works:
                pairs.append((taken, parts[other]))
            wrong.extend(f"{what} {tag} {number}" for number, each in enumerate(pairs) if not same(*each))
            most = max([most, *(each.nbytes for each in gc.get_objects() if isinstance(each, Copies))])

        for call in range(3):
            for tag in range(tags):
                held[tag] = [moved(each, call, 0.01) for each in held[tag]]
                every(tag, f"call {call}")
        works, outs = [], []
        for tag in range(tags):  # all in flight at once
            held[tag] = [moved(each, 77, 0.01) for each in held[tag]]
            outs.append(held[tag][1].clone() if comm.rank == 1 else torch.zeros_like(held[tag][1]))
            works.append(comm.broadcast(outs[-1], 1, compress=codec, tag=f"b{tag}", async_op=True))
        for tag, work in enumerate(works):
            assert work is not None
            work.wait()
            if not same(outs[tag], held[tag][1]):
                wrong.append(f"in flight {tag}")
        in_flight = [len(each._last) for each in gc.get_objects() if isinstance(each, CompressStage)]
        return {"wrong": wrong, "most": most, "bytes": held[0][0].nbytes, "in flight": sum(in_flight)}


def dropped_by_one(kind: str) -> dict[str, Any]:
    """One rank alone drops its copies: a receiver before call 2, the sender before call 4."""
    wrong, shares = [], []
    with mcr.init(backends=["gloo"]) as comm:
        x = first(torch.bfloat16, 20_000, 0)
        for call in range(6):
            x = moved(x, call, 0.01)
            if (comm.rank, call) in ((0, 2), (1, 4)):
                (state,) = [each for each in gc.get_objects() if isinstance(each, DeltaState)]
                for copy in list(state._parts.values()):
                    copy.drop()
            out = x.clone() if comm.rank == 1 else torch.zeros_like(x)
            parts = [moved(x, rank, 0.01) for rank in range(comm.size)]
            with mcr.record() as log:
                if kind == "broadcast":
                    comm.broadcast(out, 1, compress="delta", tag="t")
                elif kind == "scatter":
                    comm.scatter(out, parts if comm.rank == 1 else None, 1, compress="delta", tag="t")
                elif kind == "all_gather":
                    outs = [torch.empty_like(x) for _ in parts]
                    comm.all_gather(outs, parts[comm.rank], compress="delta", tag="t")
                    out = torch.cat(outs)
                elif comm.rank == 1:
                    comm.send(x, 0, compress="delta")
                elif comm.rank == 0:
                    comm.recv(out, 1, compress="delta")
            expected = {"scatter": parts[comm.rank], "all_gather": torch.cat(parts)}.get(kind, x)
            if comm.rank < 2 or kind != "recv":
                wrong += [] if same(out, expected) else [call]
            shares.append(max([each.wire_bytes for each in log.records], default=0) / x.nbytes)
        return {"wrong": wrong, "shares": shares}


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (mcr.Unsupported, mcr.InvalidArgument) as error:
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
            lambda: comm.gather(x, parts, 0, compress="delta", tag="t"),
            lambda: comm.scatter(x, parts, 0, compress="delta"),
            lambda: comm.recv(x, compress="delta"),
            lambda: comm.irecv(x, 1 - comm.rank, 1 << 21, compress="delta"),
        )
        return [refusal(call) for call in calls]


def hierarchical(inter: bool) -> dict[str, Any]:
    """Broadcasts between two nodes of two ranks: the steps of the last, and how often a rank encoded."""
    encoded, applied = [0], [0]

    def count(name: str, counter: list[int]) -> None:
        original = getattr(DeltaState, name)

        def counted(*args: Any, **options: Any) -> Any:
            counter[0] += 1
            return original(*args, **options)

        setattr(DeltaState, name, counted)

    count("encode_part", encoded)
    count("decode_part", applied)
    stage: dict[str, Any] = {"kinds": ["broadcast"], "min": 0, "ranks_per_node": 2}
    if inter:
        stage["inter"] = {"compress": {"codec": "delta"}}
    config = {
        "version": 1,
        "backends": ["gloo"],
        "pipeline": [{"hierarchical": stage}, {"compress": {}}, {"select": {}}, {"dispatch": {}}],
    }
    with mcr.init(config) as comm:
        root, same_bits, records = 1, 0, []
        x = first(torch.bfloat16, 40_001, 0)  # NaN payloads and signs of zero among them
        assert x.isnan().any()
        for call in range(4):
            x = moved(x, call, 0.01)
            out = x.clone() if comm.rank == root else torch.zeros_like(x)
            with mcr.record() as log:
                work = comm.broadcast(
                    out, root, tag="w", compress=None if inter else "delta", async_op=call == 1
                )
                if work is not None:
                    work.wait()
            same_bits += same(out, x)
            records = [(each.group, each.codec or "", each.bytes, each.wire_bytes) for each in log.records]
        return {"same": same_bits, "records": records, "encoded": encoded[0], "applied": applied[0]}


def in_inference_mode(codec: str) -> list[str]:
    """Run broadcasts and messages in turns inside and outside torch's inference mode; return differences."""
    wrong: list[str] = []
    with mcr.init(backends=["gloo"]) as comm:
        held = first(torch.bfloat16, 40_001, 3)
        for call in range(4):
            held = moved(held, call, 0.01)
            with torch.inference_mode(call % 2 == 0):
                x = held.clone() if comm.rank == 0 else torch.zeros_like(held)
                work = comm.broadcast(x, 0, compress=codec, tag="b", async_op=True)
                assert work is not None
                work.wait()
                wrong += [] if same(x, held) else [f"broadcast {call}"]
                if codec == "delta":
                    x = held.clone() if comm.rank == 0 else torch.zeros_like(held)
                    if comm.rank == 0:
                        comm.send(x, 1, tag=5, compress=codec)
                    else:
                        comm.recv(x, 0, tag=5, compress=codec)
                    wrong += [] if same(x, held) else [f"message {call}"]
    return wrong
