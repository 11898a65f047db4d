"""Generated algorithms: every one is proved, and computes the right numbers, for 2 to 16 ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from unit.msccl.msccl_oracle import check

from mcr_plus.errors import InvalidArgument
from mcr_plus.msccl.algorithm import Algorithm
from mcr_plus.msccl.generators import GENERATORS
from mcr_plus.msccl.reader import parse_algorithm
from mcr_plus.msccl.verifier import verify, verify_all
from mcr_plus.msccl.writer import algorithm_text


def variants(name: str, ranks: int) -> Iterator[dict[str, int]]:
    """The options to try: every group, the first, second and last root."""
    options = GENERATORS[name].options
    if "group" in options:
        yield from ({"group": size} for size in range(1, ranks + 1) if ranks % size == 0)
    elif "root" in options:
        yield from ({"root": root} for root in sorted({0, 1, ranks - 1}))
    yield {}


def made(name: str, ranks: int, **options: int) -> Algorithm:
    return GENERATORS[name].make(ranks, **options)


@pytest.mark.short("all_reduce_all_pairs", "all_reduce_hierarchical")
@pytest.mark.parametrize("name", GENERATORS)
def test_generated_algorithms_are_proved_in_place_and_out_of_place(name: str) -> None:
    for ranks in range(2, 17):
        for options in variants(name, ranks):
            algorithm = made(name, ranks, **options)
            assert [report.in_place for report in verify_all(algorithm)] == [True, False]
            assert algorithm.collective == GENERATORS[name].collective


@pytest.mark.parametrize("name", GENERATORS)
def test_computes_the_right_numbers_in_any_order(name: str) -> None:
    for ranks in (2, 3, 4, 6):
        for options in variants(name, ranks):
            text = algorithm_text(made(name, ranks, **options))
            check(text, in_place=True, seeds=4)
            check(text, in_place=False, seeds=4)


@pytest.mark.parametrize("name", GENERATORS)
def test_generated_algorithms_round_trip_through_files(name: str) -> None:
    algorithm = made(name, 5)
    text = algorithm_text(algorithm)
    assert algorithm_text(parse_algorithm(text, "it.xml")) == text


def chunks_sent(name: str, ranks: int, **options: int) -> int:
    return verify(made(name, ranks, **options), in_place=True).sent


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_all_reduces_send_the_least_bytes(ranks: int) -> None:
    names = [name for name in GENERATORS if name.startswith("all_reduce")]
    assert [chunks_sent(name, ranks) for name in names] == [2 * (ranks - 1)] * 4


def test_groups_leave_fewer_and_longer_messages_between_them() -> None:
    algorithm = made("all_to_all_two_level", 8, group=4)
    between = [
        [step.count for step in block.steps if step.operation == "s"]
        for block in algorithm.programs[0].blocks
        if block.send >= 4
    ]
    assert between == [[4]]


def test_rounds_grow_as_documented() -> None:
    def rounds(name: str, ranks: int, **options: int) -> int:
        return verify(made(name, ranks, **options), in_place=True).rounds

    # a round is a step; where one thread block sends and receives, an exchange takes two
    assert [rounds("all_reduce_ring", ranks) for ranks in (2, 4, 16)] == [3, 7, 31]
    assert [rounds("all_reduce_halving_doubling", ranks) for ranks in (2, 4, 16)] == [4, 8, 19]
    assert rounds("all_gather_direct", 16) <= rounds("all_gather_ring", 16)
    assert [rounds("broadcast_tree", ranks) for ranks in (2, 4, 8, 16)] == [2, 4, 6, 8]


@pytest.mark.parametrize("name", GENERATORS)
def test_options_are_the_arguments_of_the_function(name: str) -> None:
    parameters = list(inspect.signature(GENERATORS[name].make).parameters)
    assert parameters == ["ranks", *GENERATORS[name].options]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("all_reduce_ring", {"ranks": 1}, "ranks: 1, expected at least 2"),
        ("broadcast_tree", {"ranks": 2, "root": 2}, "root: 2, expected a rank: 0 to 1"),
        (
            "all_reduce_hierarchical",
            {"ranks": 6, "group": 4},
            "group: 4, expected a divisor of 6: 1, 2, 3, 6",
        ),
    ],
)
def test_invalid_arguments_are_refused(name: str, arguments: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}$"):
        GENERATORS[name].make(**arguments)
