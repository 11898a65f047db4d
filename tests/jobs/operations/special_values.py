"""Reductions of NaN, infinities, zeros of both signs and empty tensors, on ranks, against oracles in numpy.

Values depend on the rank and the position, because libraries cut vectors into segments and combine each of
them in another order. Results are compared with their signs; of NaN only that it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from ranks import own_rank
from reference import Array, Failures, _mixed, wide

import mcr_plus as mcr
from mcr_plus.core.kinds import COMPLEX, FLOATS, INTEGERS, REDUCIBLE
from mcr_plus.layout import Layout

NAN: Final = float("nan")
SPECIAL: Final = np.array([NAN, -NAN, 0.0, -0.0, 0.0, -0.0, 1.0, -1.0, 2.0, -2.0, np.inf, -np.inf, 0.5, -0.5])
FINITE: Final = SPECIAL[2:10]
DTYPES: Final = (*FLOATS, *COMPLEX)
OPS: Final = ("MAX", "MIN", "SUM", "PRODUCT", "AVG")
SHORT: Final = (0, 1, 7, 1000)
LONG: Final = 300_000
Reduce = Callable[[torch.Tensor], torch.Tensor]


def values(rank: int, numel: int, salt: int, dtype: torch.dtype, choices: Array = SPECIAL) -> Array:
    """Return the values of a rank. Six in seven are numbers, so that not all of a long vector is NaN."""
    bits = _mixed(rank, numel, salt)
    rare = bits >> np.uint64(40)
    found = choices[(bits % np.uint64(len(choices))).astype(np.int64)]
    common = FINITE[(rare % np.uint64(len(FINITE))).astype(np.int64)]
    chosen: Array = np.where(rare % np.uint64(7) > 2, common, found)
    if not dtype.is_complex:
        return chosen
    both = np.empty(numel, np.complex128)  # a sum with 1j would turn infinities into NaN
    both.real, both.imag = chosen, np.roll(chosen[::-1], 1)
    return both


def expected(parts: Sequence[Array], op: str) -> Array:
    """Return the expected result of a reduction."""
    stack = np.stack(parts)
    if op in ("MAX", "MIN"):
        best: Array = np.max(stack, 0) if op == "MAX" else np.min(stack, 0)
        zeros = stack == 0
        # All zeros count: a single zero of the right sign decides.
        wins = ~np.signbit(stack) if op == "MAX" else np.signbit(stack)
        has_winner = (zeros & wins).any(0)
        zero = np.where(has_winner, 1.0, -1.0) if op == "MAX" else np.where(has_winner, -1.0, 1.0)
        return np.where(best == 0, np.copysign(0.0, zero), best)
    total: Array = stack[0].copy()
    with np.errstate(invalid="ignore"):
        for part in stack[1:]:
            if op != "PRODUCT":
                total = total + part
            elif np.iscomplexobj(total):
                a, b, c, d = np.real(total), np.imag(total), np.real(part), np.imag(part)
                made = np.empty((*total.shape, 2), a.dtype)
                made[..., 0], made[..., 1] = a * c - b * d, a * d + b * c
                total = made.view(total.dtype)[..., 0]
            else:
                total = total * part
    if op == "AVG":
        parts_of = total.view(np.float64)  # components, since numpy divides complex numbers otherwise
        parts_of /= len(stack)
    return total


def problem(got: torch.Tensor, wanted: Array, allowed: float = 0.0, *, signs: bool = True) -> str | None:
    """Return the difference of a result in words; without `signs` zeros of both signs are equal."""
    if got.numel() != wanted.size:
        return f"{got.numel()} values, expected {wanted.size}"
    if got.numel() == 0:
        return None
    found, right = (np.ascontiguousarray(each).view(np.float64) for each in (wide(got).reshape(-1), wanted))
    with np.errstate(invalid="ignore"):
        equal = (found == right) | (np.abs(found - right) <= allowed * np.abs(right))
    if signs:
        equal &= np.signbit(found) == np.signbit(right)
    wrong = ~(equal | (np.isnan(found) & np.isnan(right)))
    if not wrong.any():
        return None
    where = int(np.nonzero(wrong)[0][0])
    return f"{int(wrong.sum())} of {wrong.size} wrong; at {where}: {found[where]}, expected {right[where]}"


class Cases:
    """The operations of a group."""

    def __init__(self, comm: mcr.Communicator, failures: Failures) -> None:
        self.comm, self.failures = comm, failures
        self.salt = 0

    def check(self, what: str, op: str, dtype: torch.dtype, numel: int, run: Callable[..., Any]) -> None:
        """Check one case. `run(tensor)` returns the result and its part of the whole, or None."""
        comm, self.salt = self.comm, self.salt + 1
        # The order of three complex factors decides whether the product is NaN, and the signs of its zeros.
        ordered = dtype.is_complex and op == "PRODUCT" and comm.size > 2
        choices = FINITE if ordered else SPECIAL
        parts = [values(rank, numel, self.salt, dtype, choices) for rank in range(comm.size)]
        found = run(torch.from_numpy(parts[comm.rank].copy()).to(dtype))
        if found is None:
            return
        result, part = found
        allowed = torch.finfo(dtype).eps if op == "AVG" else 0.0
        wrong = problem(result, expected(parts, op)[part], allowed, signs=not ordered)
        self.failures.check(f"{what} {op} {dtype} {numel}", wrong)

    def all(self, backend: str | None, op: Any, dtype: torch.dtype, count: int) -> None:
        """Check all kinds with `count` elements, or with `count` elements per rank for kinds that scatter."""
        if backend is not None and ":" in backend:  # algorithms of all_reduce
            run = self._whole(backend, op, dtype, count)[0]
            self.check(f"{backend} all_reduce", op, dtype, count, run)
            return
        cuts = [sum(count * (rank + 1) // 2 for rank in range(end)) for end in range(self.comm.size + 1)]
        for what, numel, run in (
            *((each.__name__, count, each) for each in self._whole(backend, op, dtype, count)),
            *(
                (each.__name__, count * self.comm.size, each)
                for each in self._parts(backend, op, dtype, count)
            ),
            ("reduce_scatter_v", cuts[-1], self._uneven(backend, op, dtype, cuts)),
        ):
            self.check(f"{backend} {what}", op, dtype, numel, run)

    def _whole(
        self, backend: str | None, op: Any, dtype: torch.dtype, count: int
    ) -> list[Callable[..., Any]]:
        comm, root = self.comm, self.comm.ranks[self.salt % self.comm.size]

        def all_reduce(x: torch.Tensor) -> Any:
            comm.all_reduce(x, op, backend=backend)
            return x, slice(None)

        def asynchronous(x: torch.Tensor) -> Any:
            work = comm.all_reduce(x, op, async_op=True, backend=backend)
            assert work is not None
            work.wait()
            return x, slice(None)

        def persistent(x: torch.Tensor) -> Any:
            comm.persistent("all_reduce", x, op=op, backend=backend)()
            return x, slice(None)

        def reduce(x: torch.Tensor) -> Any:
            before = x.clone()
            comm.reduce(x, root, op, backend=backend)
            if comm.ranks[comm.rank] == root:
                return x, slice(None)
            same = not count or torch.equal(x.view(torch.uint8), before.view(torch.uint8))
            self.failures.expect(f"reduce {op} {dtype} leaves the input", same)
            return None

        def coalesced(x: torch.Tensor) -> Any:
            comm.all_reduce_coalesced(list(x.split([count // 3, count - count // 3])), op, backend=backend)
            return x, slice(None)

        return [all_reduce, asynchronous, persistent, reduce, coalesced]

    def _parts(
        self, backend: str | None, op: Any, dtype: torch.dtype, count: int
    ) -> list[Callable[..., Any]]:
        comm, mine = self.comm, slice(self.comm.rank * count, (self.comm.rank + 1) * count)

        def reduce_scatter(x: torch.Tensor) -> Any:
            out = torch.empty(count, dtype=dtype)
            comm.reduce_scatter_tensor(out, x, op, backend=backend)
            return out, mine

        def of_list(x: torch.Tensor) -> Any:
            out = torch.empty(count, dtype=dtype)
            comm.reduce_scatter(out, list(x.view(comm.size, count).unbind()), op, backend=backend)
            return out, mine

        def together(x: torch.Tensor) -> Any:
            out = torch.empty(count, dtype=dtype)
            comm.reduce_scatter_coalesced([out], [x], op, backend=backend)
            return out, mine

        return [reduce_scatter, of_list, together]

    def _uneven(
        self, backend: str | None, op: Any, dtype: torch.dtype, cuts: list[int]
    ) -> Callable[..., Any]:
        own = slice(cuts[self.comm.rank], cuts[self.comm.rank + 1])

        def run(x: torch.Tensor) -> Any:
            out = torch.empty(own.stop - own.start, dtype=dtype)
            parts = [x[low:high] for low, high in pairwise(cuts)]
            self.comm.reduce_scatter_v(out, parts, op, backend=backend)
            return out, own

        return run


def walk(
    config: dict[str, Any] | None,
    backends: Sequence[str | None],
    sizes: Sequence[int],
    hosts: int = 1,
    dtypes: Sequence[str] = (),
) -> dict[str, Any]:
    """Run on ranks: every kind, op and dtype. `hosts`: on how many the ranks take themselves to be.

    `dtypes`: of ops other than MIN and MAX; all if there are none.
    """
    failures = Failures()
    name = f"host{own_rank() % hosts}"
    elsewhere = mock.patch("mcr_plus.job.init.host_name", return_value=name)
    with elsewhere if hosts > 1 else nullcontext():
        comm = mcr.init(config)
    with comm:
        cases = Cases(comm, failures)
        for backend in backends:
            for op in OPS:
                for dtype in DTYPES:
                    if dtype in REDUCIBLE[op] and (op in OPS[:2] or not dtypes or str(dtype)[6:] in dtypes):
                        for count in sizes:
                            cases.all(backend, op, dtype, count)
            if backend is None or ":" not in backend:
                integers(comm, failures, backend)
                half_means(comm, failures, backend)
        layouts(cases, max(sizes))
    return failures.report()


def integers(comm: mcr.Communicator, failures: Failures, backend: str | None) -> None:
    """Means of integers: their sum, which wraps around, divided by the ranks and rounded towards zero."""
    size = comm.size
    for dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        first = [[7, limits.max, limits.min, 1], [4, limits.max, limits.min, 0], [-8, 1, 2, 3], [-9, 5, 0, 1]]
        parts = [[each % (1 << limits.bits) for each in (first[rank % 4] * size)] for rank in range(size)]

        def signed(value: int, limits: Any = limits) -> int:
            value %= 1 << limits.bits
            return value - (1 << limits.bits) if value > limits.max else value

        totals = [signed(sum(column)) for column in zip(*parts, strict=True)]
        means = [abs(total) // size * (1 if total >= 0 else -1) for total in totals]
        mine = torch.tensor([signed(each) for each in parts[comm.rank]], dtype=dtype)
        whole = mine.clone()
        comm.all_reduce(whole, "AVG", backend=backend)
        failures.expect(f"{backend} AVG {dtype}", whole.tolist() == means, whole.tolist())
        later = mine.clone()
        comm.all_reduce_coalesced([later, torch.ones(2)], "AVG", backend=backend)
        failures.expect(f"{backend} AVG {dtype} coalesced", later.tolist() == means, later.tolist())
        rooted = mine.clone()
        comm.reduce(rooted, comm.ranks[0], "AVG", backend=backend)
        failures.expect(
            f"{backend} AVG {dtype} reduce",
            rooted.tolist() == (mine.tolist() if comm.rank else means),
            rooted,
        )
        out = torch.empty(4, dtype=dtype)
        comm.reduce_scatter_tensor(out, mine, "AVG", backend=backend)
        part = means[4 * comm.rank :][:4]
        failures.expect(f"{backend} AVG {dtype} reduce_scatter", out.tolist() == part, out.tolist())
    failures.raises(
        f"{backend} AVG bool",
        lambda: comm.all_reduce(torch.ones(2, dtype=torch.bool), "AVG", backend=backend),
        mcr.Unsupported, "AVG on bool",
    )  # fmt: skip


def half_means(comm: mcr.Communicator, failures: Failures, backend: str | None) -> None:
    """A mean is the sum, divided: beyond the range of the dtype the sum is infinite."""
    if comm.size < 2:
        return
    whole, part = torch.full((5 * comm.size,), 40000.0, dtype=torch.float16), torch.empty(5).half()
    comm.reduce_scatter_tensor(part, whole, "AVG", backend=backend)
    comm.all_reduce(whole, "AVG", backend=backend)
    for name, found in (("all_reduce", whole), ("reduce_scatter", part)):
        failures.expect(f"{backend} {name} AVG float16", bool(found.isinf().all()), found.tolist())


def layouts(cases: Cases, count: int) -> None:
    """Redistributions of partial values."""
    comm = cases.comm
    for op, name in (("MAX", "P(max)"), ("MIN", "P(min)")):
        for dtype in FLOATS:
            shape = (count,)
            source = Layout.mesh(shape, list(comm.ranks), [name])

            def run(x: torch.Tensor, to: str, source: Any = source, shape: Any = shape) -> Any:
                found = mcr.redistribute(x, source, Layout.mesh(shape, list(comm.ranks), [to]), group=comm)
                if to == "R":
                    return found, slice(None)
                begin = min(-(-shape[0] // comm.size) * comm.rank, shape[0])
                return found, slice(begin, begin + found.numel())

            for to in ("R", "S0"):
                cases.check(f"redistribute {name} to {to}", op, dtype, count, partial(run, to=to))


# -- other interfaces ----------------------------------------------------------------------------------


def other_interfaces(sizes: Sequence[int]) -> dict[str, Any]:
    """Run on ranks: torch's and Horovod's names for the same."""
    import mcr_plus.horovod as hvd

    failures = Failures()
    dist.init_process_group("mcr")
    others = dist.get_world_size() - 1
    ops = {"MAX": dist.ReduceOp.MAX, "MIN": dist.ReduceOp.MIN}
    cases = Cases(mcr.world(), failures)
    for name, op in ops.items():
        for dtype in FLOATS:
            for count in sizes:
                for what, run in _by_torch(op, dtype, count):
                    numel = count * (dist.get_world_size() if "scatter" in what else 1)
                    cases.check(f"dist {what}", name, dtype, numel, run)
    mine = torch.tensor([7, -8] if dist.get_rank() == 0 else [4, -9])
    dist.all_reduce(mine, dist.ReduceOp.AVG)
    means = [(7 + 4 * others) // (1 + others), -((8 + 9 * others) // (1 + others))]
    failures.expect("dist AVG int64", mine.tolist() == means, mine.tolist())
    dist.destroy_process_group()
    hvd.init()
    cases = Cases(mcr.world(), failures)
    for name, number in (("MAX", hvd.Max), ("MIN", hvd.Min)):
        for dtype in FLOATS:
            for count in sizes:

                def run(x: torch.Tensor, number: Any = number) -> Any:
                    return hvd.allreduce(x, op=number), slice(None)

                cases.check("hvd allreduce", name, dtype, count, run)
    hvd.shutdown()
    return failures.report()


def _by_torch(op: Any, dtype: torch.dtype, count: int) -> Iterator[tuple[str, Callable[..., Any]]]:
    rank = dist.get_rank()

    def all_reduce(x: torch.Tensor) -> Any:
        dist.all_reduce(x, op)
        return x, slice(None)

    def reduce(x: torch.Tensor) -> Any:
        dist.reduce(x, 0, op)
        return None if rank else (x, slice(None))

    def reduce_scatter(x: torch.Tensor) -> Any:
        out = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(out, x, op)
        return out, slice(rank * count, (rank + 1) * count)

    yield from (("all_reduce", all_reduce), ("reduce", reduce), ("reduce_scatter", reduce_scatter))
