"""Small programs on simulated devices in every order: no race, no deadlock, the right results."""

from __future__ import annotations

import pytest
from device_programs import Program, four, libraries, one, two
from device_settings import SETTINGS
from interleavings import explore

SMALL = [
    *(
        (one, f"{library}, {how}", 2)
        for library in ("nccl", "gloo")
        for how in ("plain", "fused", "int8_block")
    ),
    (two, "nccl, plain", 2),
    (two, "nccl, fused", 2),
    (libraries, "nccl, fused", 2),
    (four, "nccl, fused", 2),
]
LARGE = [
    (two, "gloo, fused", 2),
    (two, "nccl, int8_block", 2),
    (libraries, "nccl, plain", 2),
    (one, "nccl, plain", 3),
    (one, "nccl, fused", 3),
]


def check(program: Program, name: str, size: int, *, reduced: bool = True) -> int:
    found = explore(SETTINGS[name], program, size, most=20_000, reduced=reduced)
    count = f"{found.runs} runs and {found.cut} cut short, {len(found.states)} states"
    print(f"{program.__name__}, {name}, {size} ranks: {count}, no race, no deadlock")
    assert not found.problems, found.problems[:3]
    assert found.is_complete
    return found.runs


@pytest.mark.parametrize(("program", "name", "size"), SMALL)
def test_every_order(program: Program, name: str, size: int) -> None:
    check(program, name, size)


@pytest.mark.parametrize(("program", "name", "size"), LARGE)
def test_every_order_of_larger_programs(program: Program, name: str, size: int) -> None:
    check(program, name, size)


@pytest.mark.parametrize("name", ["nccl, plain", "nccl, fused"])
def test_a_run_that_is_cut_short_misses_nothing(name: str) -> None:
    assert check(one, name, 2, reduced=False) >= check(one, name, 2)
