"""Small programs on simulated devices in every order: no race, no deadlock, the right results."""

from __future__ import annotations

from typing import Any

import pytest
from device_programs import Program, four, libraries, one, two
from device_settings import SETTINGS
from interleavings import Explored, explore

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
TOO_LARGE = [
    (one, "nccl, hierarchical, fused", 4),
    (one, "gloo, hierarchical, fused", 4),
]


def explored(program: Program, name: str, size: int, most: int = 20_000, **how: Any) -> Explored:
    found = explore(SETTINGS[name], program, size, most=most, **how)
    count = f"{found.runs} runs and {found.cut} cut short, {len(found.states)} states"
    print(f"{program.__name__}, {name}, {size} ranks: {count}, no race, no deadlock")
    assert not found.problems, found.problems[:3]
    return found


@pytest.mark.parametrize(("program", "name", "size"), SMALL)
def test_every_order(program: Program, name: str, size: int) -> None:
    assert explored(program, name, size).is_complete


@pytest.mark.parametrize(("program", "name", "size"), LARGE)
def test_every_order_of_larger_programs(program: Program, name: str, size: int) -> None:
    assert explored(program, name, size).is_complete


@pytest.mark.parametrize(("program", "name", "size"), TOO_LARGE)
def test_many_orders_of_programs_that_have_too_many(program: Program, name: str, size: int) -> None:
    assert explored(program, name, size, most=500, opened=True).runs > 0


@pytest.mark.parametrize("name", ["nccl, plain", "nccl, fused"])
def test_what_is_left_out_shows_nothing_new(name: str) -> None:
    """Beside all runs, which also check that states are what they are taken for."""
    everything = explored(one, name, 2, reduced=False, forgets=False)
    reduced = explored(one, name, 2, forgets=False)
    assert everything.is_complete
    assert reduced.is_complete
    assert everything.runs > reduced.runs + reduced.cut
    assert reduced.courses == everything.courses
    assert reduced.states <= everything.states
    assert explored(one, name, 2).courses >= everything.courses
