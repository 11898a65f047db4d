"""Reductions of special values in every dtype: one contract on all libraries, see docs/reproducible.md.

The values of an element are a combination of special values, one for each rank; its place says which. A
tensor of some thousand elements has all combinations. A result is right if some order of the ranks has it;
`sums: fixed` and `exact`, MIN, MAX and integers leave one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import permutations
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from jobs.reproducible.test_sums import LIBRARIES
from ranks import run_ranks
from reference import Array, Failures
from unit.test_ordered_sums import exact_sum

import mcr_plus as mcr
from mcr_plus.backends.emulation import divide
from mcr_plus.backends.shm.reduce_kernels import apply
from mcr_plus.backends.shm.reductions import kernels_for
from mcr_plus.core.kinds import COMPLEX, DTYPES, FLOATS, INTEGERS, MOVED, REDUCE_OPS, REDUCIBLE, dtype_name

NAN: Final = float("nan")
ARITHMETIC: Final = ("SUM", "AVG", "PRODUCT")


@cache
def specials(dtype: torch.dtype) -> torch.Tensor:
    """Return the values that are combined."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        integers = [limits.min, limits.max, limits.min // 2 or 128, 0, 1, limits.max - 1, 7]
        return torch.tensor(integers, dtype=dtype)
    info = torch.finfo(dtype)
    finite = [1.0, -3.0, info.max, -info.max, info.tiny, -info.smallest_normal * info.eps]
    real = [NAN, -NAN, 0.0, -0.0, float("inf"), -float("inf"), *finite]
    if not dtype.is_complex:
        return torch.tensor(real, dtype=torch.float64).to(dtype)
    pairs = [[real[at], real[(5 * at + 3) % len(real)]] for at in range(len(real))]
    return torch.view_as_complex(torch.tensor(pairs, dtype=torch.float64)).to(dtype)


@cache
def combinations(dtype: torch.dtype, ranks: int) -> torch.Tensor:
    """Return all combinations, one a row: the values of all ranks."""
    pool = specials(dtype)
    numbers = torch.arange(len(pool) ** ranks)
    return torch.stack([pool[numbers // len(pool) ** rank % len(pool)] for rank in range(ranks)], 1)


def trees(leaves: tuple[int, ...]) -> Iterator[Any]:
    """Return all binary trees over leaves in this order."""
    if len(leaves) == 1:
        yield leaves[0]
    for cut in range(1, len(leaves)):
        for left in trees(leaves[:cut]):
            for right in trees(leaves[cut:]):
                yield left, right


def orders(ranks: int) -> list[Any]:
    return [tree for order in permutations(range(ranks)) for tree in trees(order)]


def by_halves(ranks: int, begin: int = 0) -> Any:
    """Return the tree of `sums: fixed`."""
    if ranks == 1:
        return begin
    half = 1 << (ranks - 1).bit_length() - 1
    return by_halves(half, begin), by_halves(ranks - half, begin + half)


def wide(values: torch.Tensor) -> Array:
    """Return values in the type in which they are combined: complex ones as pairs, half types in float32."""
    values = torch.view_as_real(values) if values.is_complex() else values
    found: Array = (values.float() if values.dtype in (torch.float16, torch.bfloat16) else values).numpy()
    return found


def rounded(values: Array, dtype: torch.dtype) -> Array:
    return wide(torch.from_numpy(values).to(dtype)) if dtype in (torch.float16, torch.bfloat16) else values


def combined(op: str, dtype: torch.dtype, a: Array, b: Array) -> Array:
    if dtype is torch.bool:
        op = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}.get(op, op)
    if op in ("MIN", "MAX") and dtype in FLOATS:
        best: Array = (np.minimum if op == "MIN" else np.maximum)(a, b)
        negative = (np.signbit(a) | np.signbit(b)) if op == "MIN" else np.signbit(a) & np.signbit(b)
        return np.where((a == 0) & (b == 0), np.where(negative, -0.0, 0.0).astype(a.dtype), best)
    if op == "PRODUCT" and dtype.is_complex:
        (ar, ai), (br, bi) = (each.T for each in (a, b))
        product: Array = np.stack([ar * br - ai * bi, ar * bi + ai * br], 1)
        return product
    ufuncs = {
        "SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum,
        "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
    }  # fmt: skip
    found: Array = ufuncs[op](a, b)
    return found


def along(tree: Any, op: str, dtype: torch.dtype, rows: Array, *, each: bool) -> Array:
    """Return the reduction along a tree; `each`: every sum is rounded to the dtype, not the last alone."""
    if isinstance(tree, int):
        values: Array = rows[:, tree]
        return values
    found = combined(op, dtype, *(along(side, op, dtype, rows, each=each) for side in tree))
    return rounded(found, dtype) if each else found


def mean(total: Array, ranks: int, dtype: torch.dtype) -> Array:
    if dtype in INTEGERS:
        wider = total.astype(np.int64)
        found: Array = (wider // ranks + ((wider < 0) & (wider % ranks != 0))).astype(total.dtype)
        return found
    return rounded(total / total.dtype.type(ranks), dtype)


def bits(values: Array) -> Array:
    """Return integers, equal if values are: all NaN are one, zeros of both signs are two."""
    values = np.ascontiguousarray(values)
    if values.dtype.kind != "f":
        return values.astype(np.int64)
    values = np.where(np.isnan(values), np.array(NAN, values.dtype), values)
    return values.view(f"i{values.dtype.itemsize}").astype(np.int64)


@cache
def allowed(op: str, dtype: torch.dtype, ranks: int, sums: str) -> list[Array]:
    """Return the possible bits of each combination, as arrays of all combinations."""
    rows = wide(combinations(dtype, ranks))
    adds = (dtype.is_floating_point or dtype.is_complex) and op in ARITHMETIC
    half = dtype in (torch.float16, torch.bfloat16)
    with np.errstate(all="ignore"):
        if not adds:
            totals = [along(by_halves(ranks), op, dtype, rows, each=False)]
        elif sums == "exact" and op != "PRODUCT" and not dtype.is_complex:
            columns = combinations(dtype, ranks).double().tolist()
            found = torch.tensor([exact_sum(column, dtype) for column in columns], dtype=torch.float64)
            totals = [wide(found.to(dtype))]
        elif sums != "fast":
            totals = [rounded(along(by_halves(ranks), op, dtype, rows, each=False), dtype)]
        else:
            ways = (False, True) if half else (False,)
            totals = [
                rounded(along(tree, op, dtype, rows, each=each), dtype)
                for tree in orders(ranks) for each in ways
            ]  # fmt: skip
        if op == "AVG":
            totals = [mean(total, ranks, dtype) for total in totals]
        return list(np.unique(np.stack([bits(total) for total in totals]), axis=0))


def chosen(dtype: torch.dtype, ranks: int, numel: int, salt: int) -> torch.Tensor:
    """Return the combination of each element."""
    count = len(combinations(dtype, ranks))
    step = next(each for each in (7919, 7907, 7901) if count % each)
    return (torch.arange(numel) * step + salt * 104_729) % count


def wrong(
    found: torch.Tensor, which: torch.Tensor, op: str, dtype: torch.dtype, ranks: int, sums: str
) -> str:
    """Return what is wrong with a result in words; empty if nothing is."""
    got = bits(wide(found))
    good = np.zeros(got.shape, bool)
    for one in allowed(op, dtype, ranks, sums):
        good |= got == one[which]
    if good.all():
        return ""
    place = int(np.argwhere(~good.reshape(len(which), -1).all(1))[0][0])
    row = combinations(dtype, ranks)[which[place]].tolist()
    return f"{(~good).sum()} of {good.size}; at {place}: {found[place].item()} of {row}"


Run = Callable[[torch.Tensor], "tuple[torch.Tensor, slice] | None"]
"""Runs an operation on a rank's values; returns the result and which part of the whole it is."""


def runs(calls: Any, op: Any, salt: int, *, torchs: bool, **options: Any) -> Iterator[tuple[str, Run]]:
    """Return the kinds; `calls` is a communicator, or `torch.distributed`."""
    comm = mcr.world() if torchs else calls
    me, ranks, root = comm.rank, comm.size, salt % comm.size

    def all_reduce(x: torch.Tensor) -> Any:
        work = calls.all_reduce(x, op, async_op=bool(salt % 2), **options)
        if work is not None:
            work.wait()
        return x, slice(None)

    def reduce(x: torch.Tensor) -> Any:
        calls.reduce(x, root, op, **options)
        return (x, slice(None)) if me == root else None

    def reduce_scatter(x: torch.Tensor) -> Any:
        share = len(x) // ranks
        out = torch.empty(share, dtype=x.dtype)
        calls.reduce_scatter_tensor(out, x, op, **options)
        return out, slice(me * share, (me + 1) * share)

    yield from (("all_reduce", all_reduce), ("reduce", reduce), ("reduce_scatter", reduce_scatter))


def check(
    failures: Failures, name: str, kinds: Iterator[tuple[str, Run]], op: str, dtype: torch.dtype, numel: int,
    salt: int, sums: str = "fast",
) -> None:  # fmt: skip
    """Check one case of each kind."""
    me, ranks = mcr.world().rank, mcr.world().size
    for kind, run in kinds:
        whole = numel * (ranks if kind == "reduce_scatter" else 1)
        which = chosen(dtype, ranks, whole, salt)
        found = run(combinations(dtype, ranks)[which][:, me].clone(memory_format=torch.contiguous_format))
        if found is not None:
            problem = wrong(found[0], which[found[1]], op, dtype, ranks, sums) if numel else ""
            failures.check(f"{name} {kind} {op} {sums} {dtype} {numel} salt {salt}", problem)


def natively(
    config: dict[str, Any] | None, backends: list[str | None], dtypes: list[str], sizes: dict[str, int]
) -> dict[str, Any]:
    """Run on ranks: mcr's own calls; `sizes`: how many cases of each size."""
    failures = Failures()
    with mcr.init(config) as comm:
        for dtype in (dtype for dtype in DTYPES if dtype_name(dtype) in dtypes):
            for op in REDUCE_OPS:
                if dtype not in REDUCIBLE[op]:
                    refused(comm, failures, op, dtype, backends)
                    continue
                adds = op in ARITHMETIC and (dtype.is_floating_point or dtype.is_complex)
                orders = [
                    "fast",
                    *["fixed"] * adds,
                    *["exact"] * (adds and dtype in FLOATS and op != "PRODUCT"),
                ]
                for backend, sums in ((backend, sums) for backend in backends for sums in orders):
                    if sums != "fast" and ":" in (backend or ""):
                        continue
                    for numel, count in sizes.items():
                        for salt in range(count):
                            how = {"backend": backend, "sums": sums}
                            kinds = runs(comm, op, salt, torchs=False, **how)
                            if ":" in (backend or ""):
                                kinds = iter([next(kinds)])  # an algorithm of all_reduce
                            check(failures, str(backend), kinds, op, dtype, int(numel), salt, sums)
    return failures.report()


def refused(
    comm: mcr.Communicator, failures: Failures, op: str, dtype: torch.dtype, backends: list[str | None]
) -> None:
    """Check that all libraries refuse an operation for one reason, at once and before any data is sent."""
    text = f"reduce op {op} on {dtype_name(dtype)}; {op} is defined on "
    for backend in backends:
        x = torch.zeros(comm.size, dtype=torch.uint8).to(dtype)
        for name, run in runs(comm, op, 0, torchs=False, backend=backend):
            failures.raises(f"{backend} {name} {op}", partial(run, x), mcr.Unsupported, text)


def by_torch(libraries: list[str], dtypes: list[str], sizes: dict[str, int]) -> dict[str, Any]:
    """Run on ranks: the calls of torch.distributed."""
    failures = Failures()
    for library in libraries:
        dist.init_process_group("mcr", pg_options={"version": 1, "backends": [library]})
        for dtype in (dtype for dtype in DTYPES if dtype_name(dtype) in dtypes):
            for op in REDUCE_OPS:
                if dtype.is_complex and (op not in ("SUM", "AVG") or dtype not in COMPLEX):
                    continue  # dist.all_reduce itself refuses them, or passes on the parts of complex32
                torchs = getattr(dist.ReduceOp, op)
                cases = [(int(size), salt) for size, count in sizes.items() for salt in range(count)]
                for numel, salt in cases:
                    kinds = runs(dist, torchs, salt, torchs=True)
                    if dtype in REDUCIBLE[op]:
                        check(failures, f"torch over {library}", kinds, op, dtype, numel, salt)
                    else:
                        call = partial(next(kinds)[1], torch.zeros(3).to(dtype))
                        failures.raises(f"torch {op} {dtype}", call, mcr.Unsupported, f"reduce op {op} on")
        dist.destroy_process_group()
    return failures.report()


FEW: Final = {0: 1, 1: 3, 3: 2, 1000: 1}
MANY: Final = {0: 1, 1: 12, 3: 8, 1000: 2, 70_001: 1}
PARTS: Final = {
    "some": ["float32", "bfloat16", "uint8", "bool", "float8_e4m3fn"],
    "floats": ["float64", "float32"],
    "halves": ["float16", "bfloat16"],
    "complex": [dtype_name(dtype) for dtype in COMPLEX],
    "integers": [dtype_name(dtype) for dtype in (*INTEGERS, torch.bool)],
    "moved": [dtype_name(dtype) for dtype in MOVED],
}
VIA: Final[Any] = "mpi" if "mpi" in LIBRARIES else "torch"


def _passes(function: Callable[..., Any], ranks: int, *args: Any) -> None:
    for result in run_ranks(function, ranks, args=list(args), via=VIA, timeout=500):
        assert result.value["failures"] == [], f"rank {result.rank}: {result.value['failed']} failed"
        assert result.value["cases"] > 20


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_library_keeps_the_contract(ranks: int, part: str) -> None:
    _passes(natively, ranks, None, LIBRARIES, PARTS[part], FEW if part == "some" else MANY)


@pytest.mark.long
@pytest.mark.parametrize("part", [part for part in PARTS if part not in ("some", "moved")])
def test_algorithms_keep_the_contract(part: str) -> None:
    _passes(natively, 3, None, ["msccl:ring", "msccl:all_pairs"], PARTS[part], MANY)


@pytest.mark.long
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("part", [part for part in PARTS if part != "some"])
def test_steps_keep_the_contract(part: str, library: str) -> None:
    steps = {"kinds": ["all_reduce", "reduce_scatter"], "min": 0, "ranks_per_node": 2}
    pipeline = [{"hierarchical": steps}, {"select": {}}, {"dispatch": {}}]
    config = {"version": 1, "backends": [library], "pipeline": pipeline}
    _passes(natively, 4, config, [None], PARTS[part], MANY)


@pytest.mark.long
@pytest.mark.parametrize("part", [part for part in PARTS if part != "moved"])
def test_torchs_calls_keep_the_contract(part: str) -> None:
    _passes(by_torch, 3, LIBRARIES, PARTS[part], FEW if part == "some" else MANY)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_means_of_integers_are_cut_whatever_the_number_of_ranks(dtype: torch.dtype) -> None:
    """Also beyond the range of the dtype, in kernels of shared memory and in what other libraries use."""
    limits = torch.iinfo(dtype)
    values = [limits.min, limits.max, 0, 1, 100]
    for ranks in (2, 127, 128, 200, 256, 300, 40_000):
        wanted = [abs(value) // ranks * (1 if value > 0 else -1) for value in values]
        total = torch.tensor(values, dtype=dtype)
        divide(total, ranks)
        assert total.tolist() == wanted, ranks
        total = torch.tensor(values, dtype=dtype)
        apply(kernels_for(dtype, "AVG").divide, total.data_ptr(), total.data_ptr(), ranks, total.numel())
        assert total.tolist() == wanted, ranks
