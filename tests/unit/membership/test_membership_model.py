"""Membership, model-checked: one membership and no stuck rank, and a known failure without any one rule."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Final

import pytest
from unit.membership.membership_model import Verdict, check
from unit.membership.membership_states import ALL_RULES, Rules, Setup


def without(rule: str) -> Rules:
    return replace(ALL_RULES, **{rule: False})


def fine(name: str, setup: Setup, rules: Rules = ALL_RULES) -> Verdict:
    verdict = check(setup, rules)
    print(f"{name}: {verdict.states} states; ends: {', '.join(sorted(verdict.ends))}")
    assert not verdict.problem, str(verdict)
    return verdict


# -- with all rules -------------------------------------------------------------------------------

FINE: Final[dict[str, tuple[Setup, int]]] = {
    "one of four ranks dies": (Setup(4, crashes=1), 700),
    "two of three die": (Setup(3, crashes=2, done=(2, 1, 3)), 1_300),
    "two of three die, deadlines at any moment": (Setup(3, crashes=2, early=True), 1_800),
    "two of three die, and are silent before": (Setup(3, crashes=2, silent_deaths=True), 6_000),
    "one of three dies, min_ranks=3": (Setup(3, crashes=1, least=3), 50),
    "two of three die, min_ranks=1": (Setup(3, crashes=2, least=1), 1_000),
    "one of three dies, each calls twice": (Setup(3, crashes=1, calls=1, early=True), 2_500),
    "one of three dies, the store fails a request": (Setup(3, crashes=1, failures=1), 200),
    "one of four is stopped": (Setup(4, stops=1), 3_000),
    "one of two dies, one is stopped": (Setup(2, crashes=1, stops=1), 200),
    "ranks are silent for others, twice": (Setup(3, lies=2), 4_000),
    "one of four is silent for another": (Setup(4, lies=1), 800),
    "a majority is silent for one rank": (Setup(3, lies=2, liar=0), 500),
    "one of three dies, one is silent": (Setup(3, crashes=1, lies=1), 4_000),
    "a newcomer, one of two dies": (Setup(2, crashes=1, newcomer=True), 1_000),
    "a newcomer, deadlines at any moment": (Setup(2, crashes=1, newcomer=True, early=True), 1_000),
    "a newcomer takes the place of one of three": (Setup(3, crashes=1, newcomer=True), 8_000),
    "a newcomer is stopped, or a rank": (Setup(2, stops=1, newcomer=True), 1_000),
    "a newcomer on another host, one of two dies": (
        Setup(2, crashes=1, newcomer=True, hosts=(1, 1, 0)),
        500,
    ),
    "a partition of three, with a store on each side": (Setup(3, crashes=1, sides=(0, 0, 1)), 500),
    "one of three dies, and one of two keepers": (
        Setup(3, crashes=1, keepers=2, keepers_die=1, early=True),
        2_000,
    ),
    "one of three dies, each calls twice, one of two keepers dies": (
        Setup(3, crashes=1, calls=1, keepers=2, keepers_die=1),
        1_000,
    ),
    "a partition of four into halves": (Setup(4, sides=(0, 0, 1, 1)), 40),
}

LONG: Final[dict[str, Setup]] = {
    "two of four ranks die": Setup(4, crashes=2),
    "three of four ranks die": Setup(4, crashes=3),
    "one of three dies, one is stopped": Setup(3, crashes=1, stops=1),
    "one of four dies, one is silent": Setup(4, crashes=1, lies=1),
    "one of four dies, one is stopped": Setup(4, crashes=1, stops=1),
    "two die, of three ranks and a newcomer": Setup(3, crashes=2, newcomer=True),
    "two die, of three ranks, and a newcomer on another host": Setup(
        3, crashes=2, newcomer=True, hosts=(1, 1, 1, 0)
    ),
    "one dies, one is stopped, of two ranks and a newcomer": Setup(2, crashes=1, stops=1, newcomer=True),
    "one of three dies, one is stopped, one is silent": Setup(3, crashes=1, stops=1, lies=1),
    "two of three ranks die, and two of three keepers": Setup(
        3, crashes=2, keepers=3, keepers_die=2, early=True
    ),
    "one of three dies, one of two keepers, one is silent": Setup(
        3, crashes=1, lies=1, keepers=2, keepers_die=1
    ),
    "a partition of four, of which two die": Setup(4, crashes=2, sides=(0, 0, 0, 1)),
}


@pytest.mark.short("one of three dies", "two of three die, and are silent", "ranks are silent for others")
@pytest.mark.parametrize("name", FINE)
def test_ranks_agree_and_none_is_stuck(name: str) -> None:
    setup, at_least = FINE[name]
    assert fine(name, setup).states >= at_least


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_ranks_agree_and_none_is_stuck_in_a_long_run(name: str) -> None:
    fine(name, LONG[name])


def test_survivors_continue_in_one_world() -> None:
    """Where ranks die and nothing else happens, all that live end in one world, whatever the interleaving."""
    assert fine("deaths alone", Setup(3, crashes=2)).ends == {"world of 1", "world of 2", "world of 3"}


def test_halves_of_a_partition_both_refuse() -> None:
    assert fine("halves", Setup(4, sides=(0, 0, 1, 1))).ends == {"minority"}


def test_the_majority_of_a_partition_goes_on() -> None:
    assert fine("two and one", Setup(3, sides=(0, 0, 1))).ends == {"minority", "world of 2"}


def test_a_rank_that_hears_nobody_stops_itself_alone() -> None:
    assert "world of 2" in fine("one hears nobody", Setup(3, lies=2, liar=0)).ends


# -- with a rule switched off ---------------------------------------------------------------------

# For each rule a job in which its absence shows, what goes wrong, and the steps that are in the trace.
KNOWN: Final[dict[str, tuple[Setup, str, tuple[str, ...]]]] = {
    # The deadlines of two ranks: one has come to "absent", and the other one to a decision meanwhile.
    "compare_set": (
        Setup(3, crashes=1, early=True),
        "another has read another decision",
        ("refused, absent", "(1, 2) go on"),
    ),
    # Each side of a partition has a store, as after the loss of the launcher's host.
    "majority": (
        Setup(3, sides=(0, 0, 1)),
        "split brain: ranks (0, 1) and (2,)",
        ("(0, 1) go on", "(2,) go on"),
    ),
    # Two of three living ranks have seen the death, and the third has not called yet.
    "waits_for_living": (
        Setup(4, crashes=1),
        "rank 3 runs, nobody has found it lost, and it is left out",
        ("(1, 2) go on",),
    ),
    # A rank leaves a build for a stop that is over by the time others look.
    "marker": (
        Setup(3, crashes=1, stops=1),
        "waited for until the deadline",
        ("leaves its build", "is stopped", "continues", "deadline"),
    ),
    # The same when one of the others has made the world already.
    "one_outcome": (
        Setup(3, lies=2),
        "waited for until the deadline",
        ("has made the world", "leaves its build", "deadline"),
    ),
    # A rank leaves the dead one out by itself; another one waits for it in the world of all three.
    "settles_again": (
        Setup(2, crashes=1, newcomer=True),
        "waited for until the deadline",
        ("goes on without them",),
    ),
    # Rank 1 proposes again under a number at which nobody else comes.
    "same_attempt": (
        Setup(3, crashes=1, failures=1),
        "waited for until the deadline",
        ("gets no answer from the store", "refused, absent"),
    ),
    # Rank 0 takes the request and dies; rank 1 knows nothing of it.
    "requests_stay": (Setup(2, crashes=1, newcomer=True), "the newcomer is not taken in", ("0 dies",)),
    # A rank that decides for the first time finds the request of a process that is a member by now.
    "knows_taken": (Setup(2, crashes=1, newcomer=True), "a process is two ranks", ("is taken in",)),
    # Rank 0 sees nobody else's proposal yet.
    "minority_waits": (
        Setup(3, lies=2, liar=0),
        "a majority that could go on is refused",
        ("refused, minority",),
    ),
    # The newcomer has the lowest rank and decides; it is not told of what dies on the other host.
    "tells_later": (
        Setup(3, crashes=2, newcomer=True, hosts=(1, 1, 1, 0)),
        "waited for until the deadline",
        ("1 dies", "2 dies", "refused, absent"),
    ),
    # A rank has gone by a decision that the others cannot read any more.
    "passes_on": (
        Setup(3, crashes=1, keepers=2, keepers_die=1, early=True),
        "another has read another decision",
        ("keeper 0 dies",),
    ),
    # Two ranks have written different decisions to the two keepers first.
    "one_order": (
        Setup(3, crashes=1, keepers=2, early=True),
        "another has read another decision",
        ("writes to keeper 0", "writes to keeper 1"),
    ),
    # The first keeper has died with one decision, and the second one got another meanwhile.
    "last_counts": (
        Setup(3, crashes=1, keepers=2, keepers_die=1, early=True),
        "another has read another decision",
        ("keeper 0 dies",),
    ),
    # What has ended the build is over, so that the rank takes its own error for one of another kind.
    "believes_error": (Setup(3, crashes=1, stops=1), "although that is over", ("is stopped",)),
}


def test_every_rule_has_its_counterexample() -> None:
    assert set(KNOWN) == {field.name for field in fields(Rules)}


@pytest.mark.short("last_counts")
@pytest.mark.parametrize("rule", KNOWN)
def test_disabling_a_rule_reproduces_its_failure(rule: str) -> None:
    setup, problem, steps = KNOWN[rule]
    verdict = check(setup, without(rule))
    print(f"without {rule}, {verdict.states} states:\n{verdict}")
    assert problem in verdict.problem
    for step in steps:
        assert any(step in line for line in verdict.trace), step


def test_without_one_attempt_a_failed_request_splits_the_job() -> None:
    setup = Setup(2, failures=1, lies=2, least=1, early=True)
    verdict = check(setup, without("same_attempt"))
    print(verdict)
    assert verdict.problem.startswith("split brain: ranks (0,) and (1,)")
    fine("the same with the rule", setup)


def test_without_one_outcome_an_unfinished_operation_counts_as_done() -> None:
    verdict = check(Setup(2, crashes=1, newcomer=True), without("one_outcome"))
    print(verdict)
    assert "operation 1 is done, and has done 0" in verdict.problem


# -- the limits of the rules ----------------------------------------------------------------------


@pytest.mark.long
def test_one_store_keeps_ranks_together_without_a_majority() -> None:
    """With one store the majority rule protects nothing: it is there for a store on each side."""
    fine("without a majority, one store", Setup(3, lies=2), without("majority"))
    fine("without a majority, one store, a death", Setup(3, crashes=1, lies=1), without("majority"))


def test_min_ranks_below_a_majority_splits_a_partition_with_two_stores() -> None:
    assert check(Setup(3, sides=(0, 0, 1), least=1)).problem.startswith("split brain")
    fine("min_ranks=2 of three in a partition", Setup(3, sides=(0, 0, 1), least=2))


def test_deaths_alone_need_no_compare_set() -> None:
    """One rank decides at a time, as long as nobody is suspected who lives and no deadline passes."""
    fine("without compare_set", Setup(3, crashes=2), without("compare_set"))


# -- the checker ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["", *KNOWN])
def test_the_reduction_changes_no_verdict(rule: str) -> None:
    rules = without(rule) if rule else ALL_RULES
    for setup in (
        Setup(3, crashes=1),
        Setup(2, crashes=1, early=True),
        Setup(2, stops=1),
        Setup(2, lies=1, crashes=1),
        Setup(2, newcomer=True),
        Setup(2, sides=(0, 1)),
    ):
        whole = check(replace(setup, fine=True), rules)
        reduced = check(setup, rules)
        assert bool(reduced.problem) == bool(whole.problem), f"{setup}\n{reduced}\n{whole}"
        if not reduced.problem:
            assert reduced.ends == whole.ends, str(setup)
