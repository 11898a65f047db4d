"""The rules of the issuer, model-checked: no deadlock with all of them, a known failure without any one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from random import Random
from typing import Final

import pytest
from unit.engine.model_check import (
    ALL_RULES,
    Op,
    Outcome,
    Program,
    Rules,
    Step,
    Verdict,
    check,
    makes_sense,
    programs,
    sample,
    spmd_programs,
)

TWO: Final = {"a": (0, 1), "b": (0, 1)}
THREE: Final = {"a": (0, 1, 2), "b": (0, 1), "c": (1, 2)}
CHAIN: Final = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}


def script(text: str) -> tuple[Step, ...]:
    """`+0 w0` issues operation 0, then waits for it; s: sync, b: block."""
    verbs = {"+": "issue", "w": "wait", "s": "sync", "b": "block"}
    return tuple(Step(verbs[word[0]], int(word[1:])) for word in text.split())  # type: ignore[arg-type]


def program(ops: Iterable[Op], *scripts: str, checked: bool = False) -> Program:
    return Program(TWO, tuple(ops), tuple(map(script, scripts)), checked)


def without(rule: str) -> Rules:
    return replace(ALL_RULES, **{rule: False})


def all_fine(name: str, found: Iterable[Program], at_least: tuple[int, int]) -> None:
    count = states = 0
    for each in found:
        verdict = check(each)
        assert verdict.outcome == "fine", f"{each.groups}\n{each}\n{verdict}"
        count += 1
        states += verdict.states
    print(f"{name}: {count} programs, {states} states, no deadlock, no mismatch")
    assert count >= at_least[0]
    assert states >= at_least[1]


# -- with all rules -------------------------------------------------------------------------------


@pytest.mark.short("2-1-", "2-2-")
@pytest.mark.parametrize("checked", [False, True], ids=["steady", "signatures compared"])
@pytest.mark.parametrize(
    ("ranks", "count", "messages", "at_least"),
    [
        (2, 1, True, (4, 20)),
        (2, 2, True, (480, 7_000)),
        (2, 3, False, (8_500, 290_000)),
        (3, 2, True, (2_000, 42_000)),
    ],
)
def test_no_program_deadlocks(
    ranks: int, count: int, messages: bool, checked: bool, at_least: tuple[int, int]
) -> None:
    groups = TWO if ranks == 2 else THREE
    found = programs(groups, count, checked=checked, messages=messages)
    all_fine(f"all programs of {count} operations on {ranks} ranks, {checked=}", found, at_least)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "count", "at_least"),
    [(3, 3, (800, 400_000)), pytest.param(2, 4, (14_000, 3_000_000), marks=pytest.mark.slow)],
)
def test_no_program_that_all_ranks_share_deadlocks(ranks: int, count: int, at_least: tuple[int, int]) -> None:
    groups = {name: tuple(range(ranks)) for name in "ab"}
    found = spmd_programs(groups, count, checked=True)
    all_fine(f"all programs of {count} operations that {ranks} ranks share", found, at_least)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "count", "runs", "at_least"),
    [("TWO", 4, 150, 30_000), ("TWO", 5, 30, 20_000), ("THREE", 4, 60, 20_000), ("CHAIN", 5, 60, 20_000)],
)
def test_no_sampled_program_deadlocks(name: str, count: int, runs: int, at_least: int) -> None:
    random = Random(f"{name} {count}")
    found = (sample(globals()[name], count, random) for _ in range(runs))
    all_fine(f"{runs} random programs of {count} operations on {name}", found, (runs, at_least))


@pytest.mark.slow
def test_no_sampled_program_deadlocks_in_a_long_run() -> None:
    random = Random(5)
    for groups in (TWO, THREE, CHAIN):
        all_fine(f"long, {groups}", (sample(groups, 5, random) for _ in range(300)), (300, 100_000))


# -- with a rule switched off ---------------------------------------------------------------------

H_A, H_B, S_A, S_B = Op("H", "a"), Op("H", "b"), Op("S", "a"), Op("S", "b")

KNOWN: Final[dict[str, tuple[Program, Outcome, str]]] = {
    # Two threads, or an order that depends on local time.
    "one_order": (
        program([H_A, H_A], "+0 +1", "+1 +0"),
        "mismatch",
        "rank 1: #1 H(a) paired with rank 0's #0 H(a)",
    ),
    # The classic: one rank blocks inside MPI before it launches the NCCL operation that the other waits for.
    "issue_never_blocks": (
        program([H_A, S_B], "+0 +1", "+1 s1 +0"),
        "deadlock",
        "rank 0 stands at issue #0 H(a): #0 started, #1 not issued; rank 1 stands at sync #1 S(b)",
    ),
    # Same order on both ranks: one sits in the stream library, the other's MPI operation needs its polling.
    "wait_progresses_all": (
        program([H_A, S_B], "+0 +1 s1", "+0 w0 +1"),
        "deadlock",
        "rank 0 stands at sync #1 S(b): #0 started, #1 started; rank 1 stands at wait #0 H(a): #0 under way",
    ),
    # A compressed all_reduce and a plain one after it: on the rank with late data the plain one overtakes.
    "queues": (
        program([H_B, Op("H", "a", after=0), H_A], "+0 +1 +2", "+0 w0 +1 +2"),
        "mismatch",
        "rank 1: #1 H(a) after #0 paired with rank 0's #2 H(a)",
    ),
    # The order between groups may differ from rank to rank; a shared stream makes it matter.
    "stream_per_group": (
        program([S_A, S_B], "+0 +1", "+1 +0"),
        "deadlock",
        "rank 0 stands at drain: #0 started, #1 started; rank 1 stands at drain: #1 started, #0 started",
    ),
    # The first all_reduce waits for its peer's signature; the send after it takes the stream.
    "messages_queue": (
        program([S_A, Op("S", "a", pair=(0, 1))], "+0 +1", "+0 +1", checked=True),
        "deadlock",
        "rank 0 stands at drain: #0 started, #1 started; rank 1 stands at drain: #0 started, #1 started",
    ),
}


def test_every_rule_has_its_counterexample() -> None:
    assert set(KNOWN) == {field.name for field in fields(Rules)}


@pytest.mark.parametrize("rule", KNOWN)
def test_disabling_a_rule_reproduces_its_documented_failure(rule: str) -> None:
    case, outcome, end = KNOWN[rule]
    verdict = check(case, without(rule))
    print(f"without {rule}:\n{case}\n{verdict}")
    assert verdict.outcome == outcome
    assert verdict.trace[-1].startswith(end)
    if rule != "one_order":  # which is about the program itself
        assert makes_sense(case)
        assert check(case).outcome == "fine"


@pytest.mark.parametrize("rule", KNOWN)
def test_without_a_rule_enumeration_finds_a_failure(rule: str) -> None:
    def failing() -> Iterable[tuple[Program, Verdict]]:
        rules = without(rule)
        for count in (1, 2, 3):
            for checked in (False, True):
                for each in programs(TWO, count, one_order=rules.one_order, checked=checked, messages=True):
                    if (verdict := check(each, rules)).outcome in ("deadlock", "mismatch"):
                        yield each, verdict

    smallest, verdict = next(iter(failing()))
    print(f"the smallest without {rule}:\n{smallest}\n{verdict}")
    assert len(smallest.ops) == 2


def test_compared_signatures_turn_every_wrong_order_into_an_error() -> None:
    outcomes = {check(each).outcome for each in programs(TWO, 2, one_order=False, checked=True)}
    assert outcomes == {"fine", "refused"}
    assert check(replace(KNOWN["one_order"][0], checked=True)).outcome == "refused"


# -- the limits of the rules ----------------------------------------------------------------------


def test_a_synchronisation_of_the_users_own_is_safe_where_ranks_wait_alike() -> None:
    assert check(program([H_A, S_B], "+0 +1 w1 b1", "+0 +1 w1 b1")).outcome == "fine"
    # Rank 0 sits in `.item()` and does not poll the operation that rank 1 waits for first.
    verdict = check(program([H_A, S_B], "+0 +1 w1 b1", "+0 w0 +1"))
    assert verdict.outcome == "deadlock"
    assert verdict.trace[-1].startswith("rank 0 stands at block #1 S(b)")


def test_comparing_a_first_signature_makes_the_wait_for_a_stream_operation_block() -> None:
    cpu = Op("H", "b", staged=False)
    case = program([S_A, cpu], "+0 w0 +1", "+1 w1 +0")
    assert check(case).outcome == "fine"
    verdict = check(replace(case, checked=True))
    assert verdict.trace[-1].startswith("rank 0 stands at wait #0 S(a): #0 deferred, #1 not issued")


def test_comparing_first_signatures_reorders_groups_on_a_shared_stream() -> None:
    # Both ranks have the same program. Libraries or devices that run one communicator at a time are such a
    # stream.
    case = program([S_A, S_B], "+0 +1", "+0 +1")
    assert check(case, without("stream_per_group")).outcome == "fine"
    assert check(replace(case, checked=True), without("stream_per_group")).outcome == "deadlock"


# -- the checker ----------------------------------------------------------------------------------


def test_the_checker_finds_a_deadlock_that_no_rule_can_cure() -> None:
    crossed = program([H_A, S_B], "+0 w0 +1", "+1 s1 +0")
    assert not makes_sense(crossed)
    assert check(crossed).trace == (
        "rank 0: issue #0 H(a)",
        "rank 1: issue #1 S(b)",
        "rank 0 stands at wait #0 H(a): #0 started, #1 not issued; "
        "rank 1 stands at sync #1 S(b): #1 started, #0 not issued",
    )


def test_the_checker_finds_an_operation_that_one_rank_never_issues() -> None:
    assert check(program([S_A], "+0", "")).outcome == "deadlock"
    assert check(program([S_A], "+0", ""), Rules(queues=False)).outcome == "deadlock"


def test_the_checker_does_not_flag_a_program_of_one_library() -> None:
    for rule in KNOWN:
        for op in (H_A, S_A):
            assert check(program([op, op], "+0 +1", "+0 s0 +1 s1"), without(rule)).outcome == "fine"


def test_three_ranks_in_overlapping_groups() -> None:
    ops = (Op("H", "a"), Op("S", "b"), Op("H", "c", after=0))
    ring = Program(CHAIN, ops, tuple(map(script, ("+0 +2 s2", "+0 w0 +1 s1", "+1 +2 w2"))))
    assert check(ring).outcome == "fine"
    assert check(ring, without("issue_never_blocks")).outcome == "fine"
    crossed = replace(ring, scripts=tuple(map(script, ("+0 w0 +2", "+1 s1 +0", "+2 w2 +1"))))
    assert check(crossed).outcome == "deadlock"


@pytest.mark.short("False-all")
@pytest.mark.parametrize("rules", [ALL_RULES, *map(without, KNOWN)], ids=["all rules", *KNOWN])
@pytest.mark.parametrize("checked", [False, True])
def test_the_reduction_changes_no_verdict(rules: Rules, checked: bool) -> None:
    for each in programs(TWO, 2, one_order=rules.one_order, checked=checked, messages=True):
        assert check(each, rules).outcome == check(each, rules, reduced=False).outcome, str(each)
