"""Redistributions on real ranks, compared with NumPy: each rank's cases and its report of failures.

Every rank can compute the values of all others, so expected local tensors need no communication. The file is
long because the cases of one launch share values, reports and pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import layout_oracle as oracle
import numpy as np
import reference
import torch
from layout_oracle import Side

import mcr_plus as mcr
from mcr_plus.layout import Layout, state
from mcr_plus.layout import program as programs
from mcr_plus.layout.mover import Mover
from mcr_plus.layout.program import MessageCosts

do: Final[Any] = mcr
do_state: Final[Any] = state
do_program: Final[Any] = programs
FLOATS: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PLAIN: Final = (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64)
HOLE: Final = 77
"""What lies between the elements of strided outputs, and must stay."""


class Report:
    """The number of cases that a rank has run, and the failed cases."""

    def __init__(self) -> None:
        self.cases = 0
        self.failures: list[str] = []

    def add(self, where: str, wrong: str | None) -> None:
        self.cases += 1
        if wrong is not None:
            self.failures.append(f"{where}: {wrong}")

    def value(self) -> dict[str, Any]:
        return {"cases": self.cases, "failures": self.failures[:20], "failed": len(self.failures)}


def job(backend: str) -> mcr.Communicator:
    """Return the job of the tests, on one library."""
    torch.set_num_threads(1)
    stages: list[dict[str, Any]] = [{"compress": {}}, {"select": {}}, {"dispatch": {"timeout": "60s"}}]
    return mcr.init({"version": 1, "backends": [backend], "pipeline": stages})


# -- values ---------------------------------------------------------------------------------------


def full(side: Side, dtype: torch.dtype, salt: int) -> list[reference.Array]:
    """Return the addends of the global tensor, flattened."""
    volume = int(np.prod(side.shape, dtype=np.int64))
    product = side.layout.op == "PRODUCT"
    return [
        reference.inputs(dtype, addend, (volume,), salt, product=product) for addend in range(side.addends)
    ]


def local(side: Side, rank: int, dtype: torch.dtype, salt: int) -> torch.Tensor | None:
    """Return a rank's local tensor of a source; None where it has no part."""
    if rank not in side.tensors:
        return None
    values = full(side, dtype, salt)[side.addend_of[rank]]
    return torch.tensor(values[side.tensors[rank]], dtype=dtype)


def expected(source: Side, target: Side, rank: int, dtype: torch.dtype, salt: int) -> reference.Array | None:
    """Return the local tensor that a rank must have in the target."""
    if rank not in target.tensors:
        return None
    ufunc = {"SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MAX": np.maximum, "MIN": np.minimum}
    op = source.layout.op
    addends = full(source, dtype, salt)
    result = addends[0]
    for addend in addends[1:]:
        result = ufunc[op](result, addend)
    if op == "AVG" and len(addends) > 1:
        whole = np.issubdtype(result.dtype, np.integer)  # integers are rounded towards zero
        result = np.trunc(result / len(addends)).astype(result.dtype) if whole else result / len(addends)
    return np.asarray(result[target.tensors[rank]])


def wrong(found: torch.Tensor | None, right: reference.Array | None, tolerance: float = 0.0) -> str | None:
    """Return the difference of a result from the right one."""
    if found is None or right is None:
        return None if found is None and right is None else f"got {found}, expected {right}"
    return reference.difference(found, right, tolerance)


def spread(tensor: torch.Tensor, how: int) -> torch.Tensor:
    """Return the same values with other strides: every second element, or transposed."""
    if how % 2 or tensor.dim() < 2:
        holes = torch.full((*tensor.shape, 2), HOLE, dtype=tensor.dtype)
        holes[..., 0] = tensor
        return holes[..., 0]
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def holes_kept(tensor: torch.Tensor) -> bool:
    """Return whether nothing was written between the elements of `spread(…, 1)`."""
    base = tensor._base
    assert base is not None
    return bool((base[..., 1] == torch.tensor(HOLE).to(tensor.dtype)).all())


# -- pairs ----------------------------------------------------------------------------------------


def pairs(number: int) -> Iterator[tuple[Side, Side]]:
    """Layouts on this many ranks: of all kinds, with idle ranks and empty parts, small and large tensors."""
    ranks = range(number)
    kinds = ("R", "P", "S0", "S1")
    for before, after in itertools.product(kinds, ("R", "S0", "S1")):
        yield oracle.mesh((7, 6), ranks, [before]), oracle.mesh((7, 6), ranks[::-1], [after])
    for before, after in itertools.product(("P", "S0", "R"), ("R", "S1")):  # larger than the pieces
        shape = (3, 32, 2048)
        yield oracle.mesh(shape, ranks, [before]), oracle.mesh(shape, ranks, [after])
    first, last = ranks[: number - 1], ranks[1:]
    for before, after in itertools.product(kinds, ("R", "S1")):
        yield oracle.mesh((5, 4), first, [before]), oracle.mesh((5, 4), last, [after])
        yield oracle.mesh((5, 4), [0], [before]), oracle.mesh((5, 4), [number - 1], [after])
        yield oracle.mesh((64, 2048), [number - 1], [before]), oracle.mesh((64, 2048), last, [after])
    unusual: tuple[tuple[int, ...], ...] = ((), (0,), (3, 0), (1, 1))
    for each, before in itertools.product(unusual, ("R", "P")):
        yield oracle.mesh(each, ranks, [before]), oracle.mesh(each, last, ["R"])
    yield oracle.mesh((2, 3), ranks, ["S0"]), oracle.mesh((2, 3), ranks, ["S1"])
    uneven = [5, *[0] * (number - 2), 2]
    yield oracle.sharded((7, 6), ranks, 0, uneven), oracle.sharded((7, 6), ranks[::-1], 0, uneven)
    ranges = [[(0, 9)], [(30, 42), (9, 10)], *[[] for _ in ranks[2:]]]
    ranges[-1].append((10, 30))
    runs = oracle.flat((7, 6), ranks, ranges)
    yield runs, oracle.mesh((7, 6), ranks, ["S1"])
    yield oracle.mesh((7, 6), ranks, ["P"]), runs
    halo = {rank: [[(max(0, 2 * rank - 1), min(2 * number, 2 * rank + 3)), (0, 5)]] for rank in ranks}
    yield oracle.mesh((2 * number, 5), ranks, ["S0"]), oracle.boxes((2 * number, 5), halo)
    some: dict[int, list[list[tuple[int, int]]]] = {rank: [] for rank in ranks}
    some[0] = [[(0, 4), (0, 6)], [(3, 7), (2, 3)]]
    some[1] = [[(2, 7), (0, 6)], [(0, 1), (0, 1)]]
    many = {rank: [[(0, 3), (1, 4)], [(2, 7), (0, 6)], [(0, 3), (1, 4)]] for rank in last}
    yield oracle.boxes((7, 6), some), oracle.boxes((7, 6), many)
    yield oracle.mesh((7, 6), ranks, ["P"]), oracle.boxes((7, 6), many)
    grid = {4: [[2, 0], [1, 3]], 6: [[2, 0, 5], [1, 3, 4]]}.get(number)
    if grid is not None:
        known = list(
            itertools.product(
                itertools.product(kinds, repeat=2), itertools.product(("R", "S0", "S1"), repeat=2)
            )
        )
        for one, other in known[::5]:
            yield oracle.mesh((5, 6), grid, one), oracle.mesh((5, 6), grid, other)
        for one, other in known[3::17]:
            yield oracle.mesh((64, 24, 64), grid, one), oracle.mesh((64, 24, 64), grid, other)


def everything(backend: str) -> dict[str, Any]:
    """Run on ranks: all pairs, in turns of dtypes, strides and ways to call."""
    report = Report()
    with job(backend) as comm:
        for index, (source, target) in enumerate(pairs(comm.size)):
            dtype = PLAIN[index % len(PLAIN)]
            one_pair(report, comm.rank, source, target, dtype, index)
        dtypes = (*FLOATS, torch.int32, torch.bool)
        for op, dtype in itertools.product(("avg", "max", "min", "product", "sum"), dtypes):
            if op == "avg" and dtype is torch.bool:
                continue
            source = oracle.mesh((6, 5), range(comm.size), [f"P({op})"])
            for after, index in (("R", 1), ("S0", 2), ("S1", 3)):
                target = oracle.mesh((6, 5), range(comm.size), [after])
                one_pair(report, comm.rank, source, target, dtype, index)
        rounded_once(report, comm.rank, comm.size)
        infinite_parts(report, comm.rank, comm.size)
    return report.value()


def rounded_once(report: Report, rank: int, number: int) -> None:
    """Halves are reduced in float32, in the order of addends, and rounded once: on any ranks."""
    ufuncs = {"sum": np.add, "avg": np.add, "product": np.multiply}
    for (op, ufunc), dtype in itertools.product(ufuncs.items(), (torch.bfloat16, torch.float16)):
        addends = [reference.rough(dtype, addend, 40).view(8, 5) for addend in range(number)]
        if op == "avg":
            addends[0][0], addends[1][0] = 40000, 50000  # their sum is no float16
        total = addends[0].float().numpy()
        for addend in addends[1:]:
            total = ufunc(total, addend.float().numpy())
        right = torch.from_numpy(total / np.float32(number) if op == "avg" else total).to(dtype)
        source = Layout.mesh((8, 5), range(number), ["P" if op == "sum" else f"P({op})"])
        for target, whole in (
            (Layout.replicated((8, 5), range(number)), right),
            (Layout.replicated((8, 5), [number - 1]), right if rank == number - 1 else None),
            (Layout.sharded((8, 5), range(number), 0), right.chunk(number)[rank] if number < 5 else None),
        ):
            found = mcr.redistribute(addends[rank], source, target)
            if whole is None:
                fine = found is None or number > 4
            else:
                fine = found is not None and torch.equal(found, whole)
            report.add(f"{op} of {dtype} to {target}", None if fine else f"{found}, not {whole}")


def infinite_parts(report: Report, rank: int, number: int) -> None:
    """Parts of complex numbers are added and divided by themselves: an infinite one leaves the other."""
    total = number * (number + 1) / 2
    for op, right in (("P", total), ("P(avg)", total / number)):
        x = torch.full((8, 5), complex(math.inf, rank + 1.0))
        source = Layout.mesh((8, 5), range(number), [op])
        for ranks in (range(number), [number - 1]):
            found = mcr.redistribute(x, source, Layout.replicated((8, 5), ranks))
            want = np.full((8, 5), complex(math.inf, right)) if rank in ranks else None
            report.add(f"{op} of complex numbers to {list(ranks)}", wrong(found, want))


def one_pair(report: Report, rank: int, source: Side, target: Side, dtype: torch.dtype, index: int) -> None:
    """A pair twice, with other values; how it is called depends on `index`."""
    for turn in (0, 1):
        how = index + turn
        salt = 2 * index + turn
        x = local(source, rank, dtype, salt)
        kept = None if x is None else x.clone()
        right = expected(source, target, rank, dtype, salt)
        if x is not None and how % 3 == 1:
            x = spread(x, how)
        out = None
        if right is not None and how % 4 > 1:
            out = torch.full(right.shape, HOLE, dtype=dtype)
            out = spread(out, 1) if how % 4 == 3 else out
        if how % 2:
            work = mcr.redistribute(x, source.layout, target.layout, out=out, async_op=True, dtype=dtype)
            work.wait()
            found = work.output
        else:
            found = mcr.redistribute(x, source.layout, target.layout, out=out, dtype=dtype)
        where = f"{source} -> {target}, {dtype}, {how}"
        tolerance = 0.02 if source.layout.op == "AVG" else 0.0
        report.add(where, wrong(found, right, tolerance))
        report.add(f"{where}: out", None if out is None or found is out else "another tensor is returned")
        if out is not None and how % 4 == 3:
            report.add(where, None if holes_kept(out) else "written between the elements of out")
        report.add(
            where, None if x is None or kept is None or torch.equal(x, kept) else "the source was changed"
        )


# -- calls ----------------------------------------------------------------------------------------


def calls(backend: str) -> dict[str, Any]:
    """Run on ranks: known plans, groups, memory that source and output share, many calls in flight."""
    report = Report()
    with job(backend) as comm:
        number, rank = comm.size, comm.rank
        plans_are_kept(report, rank, number)
        for group in (comm.ranks[::-1], comm.ranks[1:], comm.ranks[:1]):
            members = mcr.new_group(group)
            if rank not in group:
                continue
            for before, after in (("S0", "S1"), ("S1", "R"), ("P", "R"), ("P", "S0")):
                source, target = (oracle.mesh((6, 4), group, [each]) for each in (before, after))
                x = local(source, rank, torch.float32, 3)
                found = mcr.redistribute(x, source.layout, target.layout, group=members)
                where = f"group {group}, {before} -> {after}"
                report.add(where, wrong(found, expected(source, target, rank, torch.float32, 3)))
        source, target = (
            oracle.mesh((number, 4 * number), range(number), ["S0"]),
            oracle.mesh((number, 4 * number), range(number), ["S1"]),
        )
        memory = local(source, rank, torch.float32, 5)
        assert memory is not None
        out = memory.view(number, 4)
        mcr.redistribute(memory, source.layout, target.layout, out=out)
        report.add("in place", wrong(out, expected(source, target, rank, torch.float32, 5)))
        works = []
        for salt in range(6):  # of the same plan, so that buffers must not be shared
            for dtype in (torch.float32, torch.int64):
                x = local(source, rank, dtype, salt)
                works.append((salt, dtype, mcr.redistribute(x, source.layout, target.layout, async_op=True)))
        for salt, dtype, work in reversed(works):
            work.wait()
            report.add("in flight", wrong(work.output, expected(source, target, rank, dtype, salt)))
    return report.value()


def other_plans(backend: str) -> dict[str, Any]:
    """Run on ranks: one of them passes known layouts that differ from the others' layouts."""
    report = Report()
    with job(backend) as comm:
        ranks, last = list(comm.ranks), comm.size - 1
        side = 4 * comm.size
        rows, columns = (Layout.sharded((side, side), ranks, dim) for dim in (0, 1))
        swapped = Layout.sharded((side, side), [*ranks[1:], 0], 1)
        whole = Layout.replicated((side, side), ranks)
        x = torch.ones(rows.local_shape(comm.rank) or ())
        pairs = {
            "an exchange": ((x, rows, columns), (x, rows, swapped)),
            "a collective": ((x, rows, whole), (x.T.contiguous(), columns, whole)),
        }
        for name, (ours, theirs) in pairs.items():
            for async_op in (False, True):
                group = mcr.new_group(ranks)
                for each in (ours, theirs):
                    mcr.redistribute(*each, group=group)
                if async_op:
                    for each in (ours, theirs):
                        mcr.redistribute(*each, group=group, async_op=True).wait()
                found = "nothing was raised"
                try:
                    work = mcr.redistribute(
                        *(theirs if comm.rank == last else ours), group=group, async_op=async_op
                    )
                    if async_op:
                        work.wait()
                except mcr.OrderMismatch:
                    found = ""
                report.add(f"{name}, async {async_op}", found or None)
    return report.value()


def plans_are_kept(report: Report, rank: int, number: int) -> None:
    made = []
    make_plan = do_state.make_plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return make_plan(*args, **kwargs)

    do_state.make_plan = counted
    try:
        for turn in range(4):
            # equal layouts, made again
            source, target = (oracle.mesh((9, 8), range(number), [each]) for each in ("S0", "S1"))
            dtype = (torch.float32, torch.int32)[turn % 2]
            found = mcr.redistribute(local(source, rank, dtype, turn), source.layout, target.layout)
            report.add("known", wrong(found, expected(source, target, rank, dtype, turn)))
    finally:
        do_state.make_plan = make_plan
    report.add("plans are kept", None if len(made) == 2 else f"{len(made)} plans for two dtypes")


class Model(NamedTuple):
    """The tensors of a state, with their layouts."""

    sides: dict[str, tuple[Side, Side]]
    dtypes: dict[str, torch.dtype]


def model(number: int) -> Model:
    ranks = range(number)
    grid = np.arange(number).reshape(1, number)
    sides: dict[str, tuple[Side, Side]] = {}
    dtypes = {}
    kinds = (
        (["R", "S0"], ["R", "S1"]), (["S0", "S1"], ["R", "R"]), (["R", "P"], ["S1", "R"]),
        (["R", "R"], ["R", "S0"]), (["R", "P"], ["R", "R"]), (["S1", "S1"], ["S0", "S0"]),
    )  # fmt: skip
    for index, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)):
        for at, (before, after) in enumerate(kinds):
            shape = (5 + 9 * at, 6 + index)
            sides[f"{index}.{at}"] = oracle.mesh(shape, grid, before), oracle.mesh(shape, grid, after)
            dtypes[f"{index}.{at}"] = dtype
    sides["once"] = oracle.mesh((40, 6), [0], ["R"]), oracle.mesh((40, 6), ranks[1:], ["S1"])
    sides["back"] = oracle.mesh((40, 6), ranks[1:], ["S0"]), oracle.mesh((40, 6), [0], ["R"])
    sides["flat"] = (
        oracle.mesh((40, 6), ranks, ["S0"]),
        oracle.flat((40, 6), ranks, [[(0, 77)], [(77, 240)], *[[] for _ in ranks[2:]]]),
    )
    sides["none"] = oracle.mesh((0, 6), ranks, ["S0"]), oracle.mesh((0, 6), ranks, ["R"])
    dtypes.update(dict.fromkeys(("once", "back", "flat", "none"), torch.float32))
    return Model(sides, dtypes)


def states(backend: str) -> dict[str, Any]:
    """Run on ranks: many tensors of several dtypes at once, in one round and in many."""
    report = Report()
    buffers = {}
    with job(backend) as comm:
        known = model(comm.size)
        specs = {name: (source.layout, target.layout) for name, (source, target) in known.sides.items()}
        for memory in (None, "1MiB", "2KiB", 700):
            move = mcr.redistribution(specs, memory=memory)
            for turn in range(3):
                one_state(report, move, known, comm.rank, turn, f"memory {memory}, turn {turn}")
            buffers[str(memory)] = move.buffer_bytes
            move.release()
            report.add("release", None if move.buffer_bytes == 0 else "buffers were kept")
            one_state(report, move, known, comm.rank, 0, f"memory {memory}, after release")
            report.add("plans", None if len(move.plans) == 5 else f"{len(move.plans)} plans for 5 dtypes")
            report.add("plan", None if "bound" in move.plans[0].describe() else "no description")
        bounded(report, comm.rank, comm.size)
        bounded_together(report, comm.rank, comm.size)
    return {**report.value(), "buffers": buffers}


def bounded(report: Report, rank: int, number: int) -> None:
    """Buffers reach the permitted size if nothing is summed."""
    ranks = range(number)
    sides = {
        str(at): (oracle.mesh((70, 30), ranks, [before]), oracle.mesh((70, 30), ranks[::-1], [after]))
        for at, (before, after) in enumerate((("S0", "S1"), ("S1", "R"), ("S1", "S0"), ("S0", "R")))
    }
    # One dimension is no row: it may be cut anywhere.
    sides["long"] = (oracle.mesh((4099,), ranks, ["S0"]), oracle.mesh((4099,), ranks[::-1], ["S0"]))
    known = Model(sides, dict.fromkeys(sides, torch.float32))
    specs = {name: (source.layout, target.layout) for name, (source, target) in sides.items()}
    for memory in (2000, 3000, 10000):
        move = mcr.redistribution(specs, memory=memory)
        for turn in range(2):
            one_state(report, move, known, rank, turn, f"memory {memory}")
        size = move.buffer_bytes
        report.add(f"memory {memory}", None if size <= memory else f"buffers of {size} bytes")


def bounded_together(report: Report, rank: int, number: int) -> None:
    """Native collectives, exchanges and all dtypes have their buffers in the same memory."""
    ranks = range(number)
    shapes = {"a": (480, 1020), "b": (480, 1020), "c": (240, 1020), "x": (2048, 1024)}
    dtypes = {"a": torch.float32, "b": torch.int32, "c": torch.complex64, "x": torch.float32}
    whole = {name: torch.arange(shapes[name][1]).to(dtypes[name]).expand(shapes[name]) for name in shapes}
    specs = {
        name: (mcr.Layout.sharded(shape, ranks, 1), mcr.Layout.replicated(shape, ranks))
        for name, shape in shapes.items()
    }
    memory = 4 << 20  # each of the first three would fit
    move = mcr.redistribution(specs, memory=memory)
    state = {name: each.chunk(number, 1)[rank].clone() for name, each in whole.items()}
    for _ in range(2):
        for name, full in move(state).items():
            right = full is not None and torch.equal(full, whole[name])
            report.add(f"{name} of several dtypes", None if right else "wrong values")
    names = {each.program.native is not None for plan in move.plans for each in plan.chosen}
    report.add("kinds of programs", None if names == {True, False} else "expected native and other programs")
    size = move.buffer_bytes
    report.add("one memory", None if size <= memory else f"buffers of {size} bytes in {memory}")


def one_state(
    report: Report, move: mcr.Redistribution, known: Model, rank: int, turn: int, where: str
) -> None:
    source = {
        name: local(before, rank, known.dtypes[name], turn) for name, (before, _) in known.sides.items()
    }
    right = {
        name: expected(before, after, rank, known.dtypes[name], turn)
        for name, (before, after) in known.sides.items()
    }
    target = {
        name: spread(torch.full(each.shape, HOLE, dtype=torch.int64).to(known.dtypes[name]), index)
        for index, (name, each) in enumerate(right.items())
        if each is not None and index % 3 == 0
    }
    if turn % 2:
        work = move.start({name: each for name, each in source.items() if each is not None}, target)
        work.wait()
        found = work.outputs
    else:
        found = move(source, target if turn else None)
    for name, each in right.items():
        report.add(
            f"{where}, {name} {known.sides[name][0]} -> {known.sides[name][1]}", wrong(found[name], each)
        )
        if name in target and turn:
            report.add(where, None if found[name] is target[name] else f"{name} is another tensor")


# -- addends to themselves, and native collectives ------------------------------------------------


def kept_addends(backend: str) -> dict[str, Any]:
    """Run on ranks: from addends to the same addends every rank keeps its own, and no byte moves."""
    report = Report()
    with job(backend) as comm:
        grid = np.arange(comm.size).reshape(2, -1)
        layouts = [Layout.mesh((6, 4), comm.ranks, [each]) for each in ("P", "P(avg)", "P(max)")]
        layouts += [Layout.mesh((6, 4), grid, each) for each in (["P", "S0"], ["S1", "P"], ["P", "R"])]
        for layout in layouts:
            move = mcr.redistribution({"w": (layout, layout), "v": (layout, layout)})
            state: dict[str, torch.Tensor] = {}
            for turn in range(2):
                state = {
                    name: torch.full(layout.local_shape(comm.rank) or (), float(comm.rank + at + turn))
                    for at, name in enumerate("wv")
                }
                found = move(state)
                for name, x in state.items():
                    y = found[name]
                    same = y is not None and torch.equal(x, y)
                    report.add(f"{layout}", None if same else f"{x} has become {y}")
            report.add(f"{layout}", "bytes are moved" if move.plan.loads.any() else None)
            x = state["w"]
            again = mcr.redistribute(x, layout, layout, compress="bf16")
            report.add(f"{layout}", None if torch.equal(again, x) else f"{x} has become {again}")
    return report.value()


def native_collectives(backend: str) -> dict[str, Any]:
    """Run on ranks: collectives in groups of several sizes, and between local tensors of other shapes."""
    report = Report()
    chosen = []
    with job(backend) as comm:
        ranks, last = comm.ranks, comm.size - 1
        cut, end = 6 // last, 6 // last * last
        slabs = {rank: [[(cut * rank, cut * (rank + 1)), (0, 4)]] for rank in ranks[:last]}
        alone = {last: [[(end, end + 3), (0, 4)]]}
        whole = oracle.boxes((end + 3, 4), {**{key: [[(0, end), (0, 4)]] for key in slabs}, **alone})
        packed = [oracle.flat((6, 4), ranks, [[(0, 24)] for _ in ranks])]
        packed += [oracle.boxes((6, 4), {key: [[(0, 6), (0, 4)]] for key in ranks})]
        pairs_ = [(oracle.boxes((end + 3, 4), {**slabs, **alone}), whole)]
        pairs_ += [(oracle.mesh((6, 4), ranks, ["P"]), each) for each in packed]
        pairs_ += [
            (oracle.mesh((12, 4), ranks, ["S0"]), oracle.flat((12, 4), ranks, [[(0, 48)] for _ in ranks]))
        ]
        grid = [[0, 1], [3, 2]]
        along = (("S0", "R"), ("R", "R")), (("P", "R"), ("S1", "R")), (("R", "P"), ("R", "R"))
        if comm.size == 4:  # along one axis of a mesh, with replicas along the other
            pairs_ += [
                (oracle.mesh((6, 4), grid, before), oracle.mesh((6, 4), grid, after))
                for before, after in along
            ]
        for root, needers in ((last, ranks), (1, [rank for rank in ranks if rank != 1])):
            pairs_.append((oracle.mesh((6, 4), [root], ["R"]), oracle.mesh((6, 4), needers, ["R"])))
        for salt, (source, target) in enumerate(pairs_):
            move = mcr.redistribution({"w": (source.layout, target.layout)})
            x = local(source, comm.rank, torch.float32, salt)
            right = expected(source, target, comm.rank, torch.float32, salt)
            report.add(f"{source} -> {target}", wrong(move({"w": x})["w"], right))
            work = move.start({"w": x})
            work.wait()
            report.add(f"{source} -> {target}, started", wrong(work.output, right))
            chosen.append(move.plan.chosen[0].program.name)
        columns = oracle.mesh((64, 8 * comm.size), ranks, ["S1"])
        everywhere = oracle.mesh((64, 8 * comm.size), ranks, ["R"])
        x = local(columns, comm.rank, torch.float32, 1)
        right = expected(columns, everywhere, comm.rank, torch.float32, 1)
        for memory in ("256MiB", 4000):  # the gathered tensor has 2 KiB for each rank
            move = mcr.redistribution({"w": (columns.layout, everywhere.layout)}, memory=memory)
            report.add(f"memory {memory}", wrong(move({"w": x})["w"], right))
            size = move.buffer_bytes
            report.add(f"memory {memory}", None if size <= 4000 or memory != 4000 else f"{size} bytes")
    return {**report.value(), "chosen": chosen}


def other_groups(backend: str) -> dict[str, Any]:
    """Run on 4 ranks: one would run a collective in another order, or in other valid groups."""
    report = Report()
    with job(backend) as comm:
        grid = [[0, 1], [2, 3]]
        source, target = (Layout.mesh((8, 4), grid, each) for each in (["P", "R"], ["R", "R"]))
        right = do_program.native(source, target)
        x = torch.ones(8, 4)
        for groups in (((0, 2), (3, 1)), ((1, 2), (0, 3))):
            do_program.native = lambda *_, groups=groups: (
                right if comm.rank else replace(right, groups=groups)
            )
            said = "nothing was raised"
            try:
                mcr.redistribute(x, source, target, tag=f"{groups}")
            except mcr.BackendError as error:
                said = str(error)
            report.add(f"{groups}", None if "nothing was sent" in said else said)
        do_program.native = lambda *_: right
        found = mcr.redistribute(x, source, target)
        report.add("then the same", None if bool((found == 2).all()) else str(found))
    return report.value()


def under_a_codec(backend: str, stages: list[dict[str, Any]], rules: list[dict[str, Any]]) -> float:
    """Run on ranks; return the errors of a broadcast's results and source under a codec."""
    config = {"version": 1, "backends": [backend], "pipeline": stages, "rules": rules}
    with mcr.init(config) as comm:
        source, target = Layout.replicated((1031,), [0]), Layout.replicated((1031,), comm.ranks)
        values = torch.linspace(-1, 1, 1031)
        mine = values.clone()
        move = mcr.redistribution({"w": (source, target)})
        found = move({"w": mine} if comm.rank == 0 else {})["w"]
        assert found is not None
        assert move.plan.chosen[0].program.name == "broadcast"
        return max((found - values).abs().max().item(), (mine - values).abs().max().item())


# -- messages ------------------------------------------------------------------------------------


def by_messages(name: str, backend: str) -> dict[str, Any]:
    """Run another function of this module with messages in place of every all_to_all; counts the rounds."""
    count = patch.object(Mover, "next_match_tag", autospec=True, side_effect=Mover.next_match_tag)
    with patch.object(MessageCosts, "prefers_messages", return_value=True), count as counted:
        found: dict[str, Any] = globals()[name](backend)
    return {**found, "rounds": counted.call_count}


# -- codecs ---------------------------------------------------------------------------------------


def codecs(backend: str) -> dict[str, Any]:
    """Run lossy redistributions: replicas get equal bits near the exact values, or all ranks refuse."""
    report = Report()
    refused: list[str] = []
    with job(backend) as comm:
        ranks, rank = comm.ranks, comm.rank
        halves = ranks[: comm.size // 2 or 1], ranks[comm.size // 2 or 1 :]
        shape = (64, 2048)
        known = [
            (oracle.mesh(shape, ranks, [before]), oracle.mesh(shape, ranks, [after]))
            for before, after in itertools.product(("R", "P", "S0"), ("R", "S0", "S1"))
        ]
        known += [(oracle.mesh(shape, halves[0], ["S0"]), oracle.mesh(shape, halves[1], ["R"]))]
        known += [(oracle.mesh(shape, halves[0], ["S0"]), oracle.mesh(shape, ranks, ["R"]))]
        known += [(oracle.mesh(shape, halves[0], ["P"]), oracle.mesh(shape, halves[1], ["R"]))]
        for codec, (source, target) in itertools.product(("bf16", "int8_block"), known):
            where = f"{codec}, {source} -> {target}"
            x = local(source, rank, torch.float32, 11)
            right = expected(source, target, rank, torch.float32, 11)
            try:
                found = mcr.redistribute(x, source.layout, target.layout, compress=codec)
            except mcr.Unsupported as error:
                refused.append(f"{where}: {error}")
                continue
            scale = 1.0 if right is None else float(np.abs(right).max())
            report.add(where, wrong(found, right, 0.05 * scale))
            if target.layout.has_replicas:
                held = comm.all_gather_object(None if found is None else found.numpy().tobytes())
                bits = {each for each in held if each is not None}
                report.add(where, None if len(bits) == 1 else "replicas differ")
            again = mcr.redistribute(x, source.layout, target.layout)
            report.add(f"{where}, then exact", wrong(again, right))
    return {**report.value(), "refused": refused}


# -- bad input ------------------------------------------------------------------------------------

Bad = tuple[str, Callable[[int, int], Any], str, tuple[str, ...]]


def bad_calls(number: int) -> list[Bad]:
    """Name, call by rank and number of ranks, error, and the words of its message.

    The calls are wrong on one rank or on all.
    """
    shape, ranks = (6, 4), range(number)
    rows, columns = Layout.sharded(shape, ranks, 0), Layout.sharded(shape, ranks, 1)
    new = [Layout.sharded((11, 5), ranks, dim) for dim in (0, 1)]  # their plan is not known
    whole, sums = Layout.replicated(shape, ranks), Layout.mesh(shape, ranks, ["P"])
    some = Layout.sharded(shape, ranks[:2], 0)  # not on rank 2, if there is one
    gap = Layout.boxes(shape, {rank: [[(rank, rank + 1), (0, 4)]] for rank in ranks})
    last = number - 1

    def good(rank: int, layout: Layout = rows, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        held = layout.local_shape(rank)
        return None if held is None else torch.ones(held, dtype=dtype)

    def call(*args: Any, **options: Any) -> Any:
        return do.redistribute(*args, **options)

    def moved(source: dict[str, Any], target: Any = None, **options: Any) -> Any:
        return mcr.redistribution({"w": (rows, columns)}, **options)(source, target)

    wrong, unsupported = "InvalidArgument", "Unsupported"
    return [
        (
            "a gap",
            lambda r, n: call(good(r, gap), gap, rows),
            wrong,
            ("source", "boxes @", f"[({number}, 6), (0, 4)]"),
        ),
        (
            "a rank that is not there",
            lambda r, n: call(good(r), rows, Layout.replicated(shape, range(n + 1))),
            wrong,
            ("target", f"rank {number} is not in group 'world'"),
        ),
        (
            "other global shapes",
            lambda r, n: call(good(r), rows, Layout.replicated((6, 5), ranks)),
            wrong,
            ("[6, 4]", "[6, 5]"),
        ),
        (
            "other layouts on one rank",
            lambda r, n: call(good(r), rows, columns if r else whole),
            wrong,
            ("different layouts", "rank 0", "rank 1", "S1", "R @"),
        ),
        (
            "another dtype on one rank",
            lambda r, n: call(good(r, rows, torch.float64 if r == last else torch.float32), rows, columns),
            wrong,
            ("tensors of different dtypes: float32 on rank", f"; float64 on rank {last}"),
        ),
        (
            "another dtype of one of two tensors on one rank",
            lambda r, n: mcr.redistribution({"w": (rows, columns), "v": (rows, columns)})(
                {"w": good(r), "v": good(r, rows, torch.float64 if r == last else torch.float32)}
            ),
            wrong,
            ("v: ranks pass tensors of different dtypes: float32 on rank", f"; float64 on rank {last}"),
        ),
        (
            "another dtype of the first of three tensors, of which the others have both dtypes",
            lambda r, n: mcr.redistribution(dict.fromkeys("wvu", (rows, columns)))(
                {
                    "w": good(r, rows, torch.float64 if r == last else torch.float32),
                    "v": good(r),
                    "u": good(r, rows, torch.float64),
                }
            ),
            wrong,
            ("w: ranks pass tensors of different dtypes: float32 on rank", f"; float64 on rank {last}"),
        ),
        (
            "another dtype on one of the ranks with a part",
            lambda r, n: mcr.redistribution({"w": (rows, columns), "v": (some, rows)})(
                {"w": good(r), "v": good(r, some, torch.int32 if r == 0 else torch.float32)}
            ),
            wrong,
            ("v: ranks pass tensors of different dtypes: int32 on rank 0; float32 on rank 1",),
        ),
        (
            "no layouts for one of two tensors on one rank",
            lambda r, n: mcr.redistribution(
                {"w": (rows, columns)} | ({"v": (rows, columns)} if r == 0 else {})
            )({"w": good(r), "v": good(r)}),
            wrong,
            ("rank 0 passes v: S0", "rank 1 passes no layouts for 'v'"),
        ),
        (
            "a target that has no layouts",
            lambda r, n: moved({"w": good(r)}, {"w": good(r, columns), "v": good(r)}),
            wrong,
            ("target", "'v'"),
        ),
        (
            "a local tensor that is too small",
            lambda r, n: call(torch.ones(1, 4) if r == 1 else good(r), rows, columns),
            wrong,
            ("source S0", "[1, 4]", str(list(rows.local_shape(1) or ())), "on rank 1"),
        ),
        (
            "no local tensor",
            lambda r, n: call(None if r == 1 else good(r), rows, columns),
            wrong,
            ("source S0", "None", "on rank 1"),
        ),
        (
            "a local tensor too many",
            lambda r, n: call(torch.ones(6, 4), Layout.replicated(shape, [0]), columns),
            wrong,
            ("no part", "source R @1", "on rank"),
        ),
        (
            "an output of another shape",
            lambda r, n: call(good(r), rows, columns, out=torch.ones(3, 3)),
            wrong,
            ("target S1", "[3, 3]"),
        ),
        (
            "an output of another dtype",
            lambda r, n: call(good(r), rows, columns, out=good(r, columns, torch.float64)),
            wrong,
            ("float64", "float32"),
        ),
        (
            "an output that overlaps itself",
            lambda r, n: call(good(r), rows, columns, out=torch.ones(1).expand(columns.local_shape(r) or ())),
            wrong,
            ("target S1",),
        ),
        (
            "means of bool",
            lambda r, n: call(
                torch.ones(6, 4, dtype=torch.bool), Layout.mesh(shape, ranks, ["P(avg)"]), rows
            ),
            wrong,
            ("source P(avg) @", "means of bool"),
        ),
        (
            "the largest of complex numbers",
            lambda r, n: call(
                torch.ones(6, 4, dtype=torch.complex64), Layout.mesh(shape, ranks, ["P(max)"]), rows
            ),
            wrong,
            ("P(max)", "complex64"),
        ),
        ("a partial target", lambda r, n: call(good(r), rows, sums), wrong, ("target P @", "addends")),
        (
            "a tensor that needs gradients",
            lambda r, n: call(torch.ones(rows.local_shape(r) or (), requires_grad=True), rows, columns),
            wrong,
            ("source S0", "gradients", "detach"),
        ),
        (
            "no tensor",
            lambda r, n: call([1.0] if r == 0 else good(r), rows, columns),
            wrong,
            ("source", "list", "on rank 0"),
        ),
        (
            "a sparse tensor",
            lambda r, n: call(torch.ones(rows.local_shape(r) or ()).to_sparse(), rows, columns),
            "",
            ("sparse",),
        ),
        (
            "a wrong tensor where the plan is known",
            lambda r, n: call(torch.ones(3), *(Layout.sharded((9, 5), ranks, dim) for dim in (1, 0))),
            wrong,
            ("source S1", "[3]"),
        ),
        (
            "no source on one rank",
            lambda r, n: call(good(r, new[0]), None if r == last else new[0], new[1]),
            wrong,
            ("source: expected a Layout", "None"),
        ),
        (
            "a list as compression on one rank",
            lambda r, n: call(good(r, new[0]), *new, compress=["bf16"] if r == 0 else None),
            wrong,
            ("compress", "['bf16']"),
        ),
        ("no layout", lambda r, n: call(good(r), rows, "S1"), wrong, ("target", "'S1'")),
        (
            "no room for a row",
            lambda r, n: mcr.redistribution({"w": (rows, columns)}, memory=100),
            wrong,
            ("memory", "100", "256", "w"),
        ),
        (
            "no size",
            lambda r, n: mcr.redistribution({"w": (rows, columns)}, memory="much"),
            wrong,
            ("memory", "much"),
        ),
        ("no pair", lambda r, n: do.redistribution({"w": rows}), wrong, ("specs['w']", "source, target")),
        ("a state without a tensor", lambda r, n: moved({}), wrong, ("w: source S0", "None")),
        ("no state", lambda r, n: moved([1]), wrong, ("source", "mapping", "list")),  # type: ignore[arg-type]
        (
            "a state with a wrong tensor on one rank",
            lambda r, n: moved({"w": torch.ones(5) if r == last else good(r)}),
            wrong,
            ("w: source S0", "[5]", f"on rank {last}"),
        ),
        ("an unknown codec", lambda r, n: call(good(r), rows, columns, compress="int9"), "", ("int9",)),
        (
            "a codec where a replica keeps its own bits",
            lambda r, n: call(
                good(r, Layout.replicated(shape, [0])), Layout.replicated(shape, [0]), whole, compress="bf16"
            ),
            unsupported,
            ("compress", "replica", "R @"),
        ),
        (
            "a codec on one rank alone",
            lambda r, n: call(good(r), rows, columns, compress="bf16" if r == 0 else None),
            wrong,
            ("compress", "rank"),
        ),
        (
            "other memory on one rank",
            lambda r, n: moved({"w": good(r)}, memory="1MiB" if r else "2MiB"),
            wrong,
            ("memory",),
        ),
    ]


def refusals(backend: str) -> dict[str, Any]:
    """Run on ranks: make bad calls, each before a good one; return the errors and their messages."""
    said: dict[str, Any] = {}
    report = Report()
    with job(backend) as comm:
        source, target = (oracle.mesh((9, 5), comm.ranks, [each]) for each in ("S1", "S0"))
        for name, call, _, _ in bad_calls(comm.size):
            try:
                call(comm.rank, comm.size)
                said[name] = ("nothing", "")
            except mcr.McrError as error:
                said[name] = (type(error).__name__, str(error))
            found = mcr.redistribute(local(source, comm.rank, torch.float32, 1), source.layout, target.layout)
            report.add(f"after {name}", wrong(found, expected(source, target, comm.rank, torch.float32, 1)))
    return {**report.value(), "said": said}
