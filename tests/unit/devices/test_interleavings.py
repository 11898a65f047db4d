"""Small programs on simulated devices in every order: no race, no deadlock, the right results."""

from __future__ import annotations

from typing import Any

import pytest
from unit.devices.device_programs import Program, four, libraries, one, two
from unit.devices.device_settings import SETTINGS
from unit.devices.interleavings import Explored, explore

SMALL = [
    *(
        (one, f"{library}, {how}", 2)
        for library in ("nccl", "gloo")
        for how in ("plain", "fused", "int8_block")
    ),
    (two, "nccl, plain", 2),
    (two, "nccl, fused", 2),
    (two, "gloo, fused", 2),
    (libraries, "nccl, fused", 2),
    (four, "nccl, fused", 2),
]
LARGE = [
    (two, "gloo, plain", 2),
    (two, "nccl, int8_block", 2),
    (libraries, "nccl, plain", 2),
    (one, "nccl, plain", 3),
    (one, "nccl, fused", 3),
    (one, "gloo, plain", 3),
    (two, "nccl, fused", 3),
    (two, "gloo, fused", 3),
]
HIERARCHICAL = ("nccl, hierarchical, fused", "gloo, hierarchical, fused")


def explored(program: Program, name: str, size: int, most: int = 20_000, **how: Any) -> Explored:
    found = explore(SETTINGS[name], program, size, most=most, **how)
    count = f"{found.runs} runs and {found.cut} cut short, {len(found.states)} states"
    print(f"{program.__name__}, {name}, {size} ranks: {count}, no race, no deadlock")
    assert not found.problems, found.problems[:3]
    return found


@pytest.mark.short("one-nccl, ", "one-gloo, plain", "one-gloo, fused", "two-nccl, fused-2")
@pytest.mark.parametrize(("program", "name", "size"), SMALL)
def test_every_order(program: Program, name: str, size: int) -> None:
    assert explored(program, name, size).is_complete


@pytest.mark.long
@pytest.mark.parametrize(("program", "name", "size"), LARGE)
def test_every_order_of_larger_programs(program: Program, name: str, size: int) -> None:
    assert explored(program, name, size).is_complete


@pytest.mark.long
@pytest.mark.parametrize("rank", range(4))
def test_every_course_of_a_rank_of_two_nodes(rank: int) -> None:
    """Explore the second call; the first call, and calls over the host library, have too many orders."""
    assert explored(one, HIERARCHICAL[0], 4, after="one run", only=rank).is_complete


@pytest.mark.long
@pytest.mark.parametrize("name", HIERARCHICAL)
def test_many_orders_of_programs_that_have_too_many(name: str) -> None:
    assert explored(one, name, 4, most=200, after="opening").runs > 0


@pytest.mark.long
@pytest.mark.parametrize(("program", "name", "size"), [(one, "nccl, plain", 3), (two, "nccl, fused", 2)])
def test_courses_of_one_rank_do_not_depend_on_what_others_are_told(
    program: Program, name: str, size: int
) -> None:
    all_of_them = explored(program, name, size, after="one run").courses
    for rank in range(size):
        alone = explored(program, name, size, after="one run", only=rank).courses
        own, others = ({each for each in found if each[0] == rank} for found in (alone, all_of_them))
        assert own == others


@pytest.mark.long
@pytest.mark.parametrize("name", ["nccl, plain", "nccl, fused"])
def test_reduced_exploration_finds_the_same_states(name: str) -> None:
    """The full exploration also checks the notion of states."""
    everything = explored(one, name, 2, reduced=False, forgets=False)
    reduced = explored(one, name, 2, forgets=False)
    assert everything.is_complete
    assert reduced.is_complete
    assert everything.runs > reduced.runs + reduced.cut
    assert reduced.courses == everything.courses
    assert reduced.states <= everything.states
    assert explored(one, name, 2).courses >= everything.courses
