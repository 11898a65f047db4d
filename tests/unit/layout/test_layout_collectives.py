"""Native collectives as plans: a rank's part in them, and the proof that they lead to the target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import layout_oracle as oracle
import numpy as np
import pytest
import torch
from layout_oracle import Side
from unit.layout.layout_mutants import native_mutants
from unit.layout.test_layouts import SETTINGS, judge

from mcr_plus.layout import Layout, proof
from mcr_plus.layout.native import GROUPS, NativeCollective, Room, keeps_bits, native, packed_volume
from mcr_plus.layout.survey import survey


def test_a_rank_alone_in_its_group_moves_nothing() -> None:
    source = oracle.boxes((8,), {0: [[(0, 2)]], 1: [[(2, 4)]], 2: [[(4, 8)]]})
    target = oracle.boxes((8,), {0: [[(0, 4)]], 1: [[(0, 4)]], 2: [[(4, 8)]]})
    plan = survey(source.layout, target.layout, 4).outcomes[0]
    assert plan.program.native is not None
    assert plan.program.native.groups == ((0, 1), (2,))
    assert plan.received.tolist() == [8, 8, 0]
    judge(source, target, SETTINGS[0])


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 7)])
def test_a_collective_counts_no_less_than_any_plan_must_move(shape: tuple[int, ...]) -> None:
    source, target = oracle.mesh(shape, range(3), ["P"]), oracle.mesh(shape, range(3), ["R"])
    found = survey(source.layout, target.layout, 4)
    assert found.outcomes[0].program.name == "all_reduce"
    assert int(found.outcomes[0].received.sum()) >= found.bound.total * 4


SHAPE: Final = (6, 4)
PAIRS: Final = {
    "all_gather of one group": (("S0",), ("R",), [0, 1, 2]),
    "all_gather by columns, in another order": (("S1",), ("R",), [2, 0]),
    "all_gather in groups": (("S0", "S1"), ("S0", "R"), [[0, 1], [4, 3], [2, 5]]),
    "reduce_scatter of one group": (("P",), ("S0",), [1, 2, 0]),
    "reduce_scatter by columns, in groups": (("P", "S0"), ("S1", "S0"), [[0, 1], [3, 2]]),
    "all_reduce of one group": (("P",), ("R",), [0, 1, 2]),
    "all_reduce in groups": (("S0", "P"), ("S0", "R"), [[0, 1], [3, 2]]),
    "all_gather along one axis": (("R", "S0"), ("R", "R"), [[0, 1, 2], [5, 4, 3]]),
    "all_gather along the other axis": (("S1", "R"), ("R", "R"), [[0, 1], [3, 2]]),
    "reduce_scatter along one axis": (("P", "R"), ("S0", "R"), [[0, 3], [1, 2]]),
    "all_reduce along one axis": (("P", "R"), ("R", "R"), [[0, 1, 2], [5, 4, 3]]),
    "all_reduce of slabs along one axis": (
        ("R", "P", "S0"),
        ("R", "R", "S0"),
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
    ),
}
BROADCASTS: Final = {
    "broadcast from a rank that keeps it": (
        oracle.mesh(SHAPE, [1], ["R"]),
        oracle.mesh(SHAPE, range(3), ["R"]),
    ),
    "broadcast to other ranks": (oracle.mesh(SHAPE, [2], ["R"]), oracle.mesh(SHAPE, [0, 1, 3], ["R"])),
    "broadcast of slabs": (
        oracle.mesh(SHAPE, [4, 1], ["S0"]),
        oracle.mesh(SHAPE, [[4, 0, 2], [5, 3, 1]], ["S0", "R"]),
    ),
}
NAMES: Final = [*PAIRS, *BROADCASTS]


def pair(name: str) -> tuple[Side, Side, NativeCollective]:
    if name in BROADCASTS:
        source, target = BROADCASTS[name]
    else:
        before, after, ranks = PAIRS[name]
        source, target = (oracle.mesh(SHAPE, ranks, each) for each in (before, after))
    one = native(source.layout, target.layout)
    assert one is not None
    assert name.startswith(one.kind)
    return source, target, one


@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_of_a_collective_is_found(name: str) -> None:
    source, target, one = pair(name)
    ranks = {*source.layout.ranks, *target.layout.ranks}
    assert proof.check_native(one, source.layout, target.layout, ranks) is None
    count = 0
    for what, mutant in native_mutants(one):
        assert proof.digest_of_groups(mutant) != proof.digest_of_groups(one)
        if what == "members swapped" and one.repeats:
            continue  # as good, if all ranks do so
        wrong = proof.check_native(mutant, source.layout, target.layout, ranks)
        assert wrong is not None, f"{name}: {what}: {mutant}"
        count += 1
    assert count >= 8


def test_a_collective_of_other_layouts_is_found() -> None:
    """The right groups for a pair are wrong for every other one."""
    known = [pair(name) for name in NAMES]
    for source, _, one in known:
        for before, after, other in known:
            ranks = {*before.layout.ranks, *after.layout.ranks}
            wrong = proof.check_native(one, before.layout, after.layout, ranks)
            assert one != other or wrong is None
            if source.layout.ranks != before.layout.ranks or one.kind != other.kind:
                assert wrong is not None


@pytest.mark.parametrize("name", BROADCASTS)
def test_a_broadcast_is_a_plan(name: str) -> None:
    source, target, _ = pair(name)
    found = survey(source.layout, target.layout, 4)
    assert found.plan.program.name == "broadcast"
    for setting in SETTINGS:
        judge(source, target, setting)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (oracle.mesh(SHAPE, [0], ["R"]), oracle.mesh(SHAPE, [0, 1], ["R"])),  # one message
        (oracle.mesh(SHAPE, [0, 1], ["R"]), oracle.mesh(SHAPE, range(4), ["R"])),  # two holders
        (oracle.mesh(SHAPE, [0, 1], ["S0"]), oracle.mesh(SHAPE, [0, 2, 3], ["S0"])),  # other borders
        (oracle.mesh(SHAPE, [0, 1], ["S0"]), oracle.mesh(SHAPE, [[1, 2, 3], [0, 4, 5]], ["S0", "R"])),
        (
            oracle.boxes((8,), {0: [[(0, 2)], [(6, 8)]]}),
            oracle.boxes((8,), {rank: [[(0, 2)]] for rank in range(3)}),
        ),
    ],
)
def test_other_redistributions_use_no_native_broadcast(source: Side, target: Side) -> None:
    assert native(source.layout, target.layout) is None


def test_a_broadcast_between_nodes_counts_a_crossing_for_each_receiver() -> None:
    source, target = BROADCASTS["broadcast to other ranks"]
    nodes = np.array([0, 0, 1, 0])  # the root is alone on its node
    found = {each.program.name: each for each in survey(source.layout, target.layout, 4, nodes).outcomes}
    nbytes = 4 * 24
    assert found["broadcast"].received.tolist() == [nbytes, nbytes, 0, nbytes]
    assert found["broadcast"].loads[:, 0, 4].sum() == 3 * nbytes
    assert found["gather"].loads[:, :, 4].sum() == nbytes


@pytest.mark.parametrize("name", PAIRS)
def test_parts_that_are_not_in_one_piece_are_packed(name: str) -> None:
    source, target, one = pair(name)
    whole = source if one.kind == "reduce_scatter" else target
    largest = max(held.size for held in whole.held.values())
    assert (
        packed_volume(one, source.layout, target.layout)
        == ("columns" in name or "S1" in PAIRS[name][0]) * largest
    )


def test_parts_of_rows_are_in_one_piece_behind_dimensions_of_one_element() -> None:
    for shape, dim in (((1, 6, 4), "S1"), ((1, 6, 4), "S2"), ((6, 1, 1), "S0"), ((2, 1, 6), "S2")):
        source, target = (oracle.mesh(shape, range(2), [each]) for each in (dim, "R"))
        one = native(source.layout, target.layout)
        assert one is not None
        apart = shape[: int(dim[1])] != (1,) * int(dim[1])
        assert packed_volume(one, source.layout, target.layout) == (12 if shape[0] == 2 else 24) * apart


def test_collectives_take_no_more_than_there_is_room_for() -> None:
    source, target, one = pair("all_gather by columns, in another order")
    rows = pair("all_gather of one group")
    layouts = source.layout, target.layout
    comm: Any = SimpleNamespace(ranks=(0, 1, 2), attached={})
    size = 4 * 24
    for memory, fits in ((None, True), (size, True), (size - 1, False)):
        assert Room(comm, memory).has(one, *layouts, 4) is fits
    assert Room(comm, 1).has(rows[2], rows[0].layout, rows[1].layout, 4)  # needs no buffer
    room = Room(comm, 2 * size - 1)
    room.take(one, *layouts, 4)
    assert not room.has(one, *layouts, 4)
    comm.attached[GROUPS] = {((rank,),): None for rank in range(40)}
    assert not Room(comm, None).has(one, *layouts, 4)  # which opens another one
    assert Room(comm, None).has(rows[2], rows[0].layout, rows[1].layout, 4)  # the group is the whole job
    comm.attached[GROUPS][one.groups] = None
    assert Room(comm, None).has(one, *layouts, 4)


@pytest.mark.parametrize(
    ("addends", "dtype", "op", "same"),
    [
        (2, torch.float32, "P", True),
        (2, torch.bfloat16, "P", True),
        (2, torch.bfloat16, "P(avg)", False),  # sums that overflow
        (3, torch.float32, "P", False),
        (3, torch.int64, "P", True),
        (3, torch.float64, "P(max)", False),
        (2, torch.float32, "P(min)", False),  # of zeros of both signs
        (2, torch.complex64, "P(product)", False),
        (2, torch.complex64, "P", True),
    ],
)
def test_several_groups_sum_alike_where_no_order_matters(
    addends: int, dtype: torch.dtype, op: str, same: bool
) -> None:
    grid = np.arange(2 * addends).reshape(addends, 2)
    source, target = (oracle.mesh(SHAPE, grid, each).layout for each in ((op, "R"), ("R", "R")))
    names = [each.program.name for each in survey(source, target, 4, None, dtype).outcomes]
    assert ("all_reduce" in names) is same
    assert names[-1] != "all_reduce"
    for before, after, ranks in (("P", "R", range(addends)), (("S0", "P"), ("S0", "R"), grid.T)):
        one = native(*(Layout.mesh(SHAPE, ranks, each) for each in (before, after)))
        assert one is not None  # no element is in two groups
        assert keeps_bits(one, source, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("op", ["P", "P(avg)", "P(max)", "P(min)", "P(product)"])
@pytest.mark.parametrize("addends", [2, 3])
def test_libraries_make_no_sums_that_they_would_round_several_times(
    addends: int, op: str, dtype: torch.dtype
) -> None:
    source, target = (oracle.mesh(SHAPE, range(addends), [each]).layout for each in (op, "R"))
    names = [each.program.name for each in survey(source, target, 4, None, dtype).outcomes]
    rounded = dtype.itemsize == 2 and (op == "P(avg)" or (op in ("P", "P(product)") and addends > 2))
    assert ("all_reduce" in names) is not rounded
