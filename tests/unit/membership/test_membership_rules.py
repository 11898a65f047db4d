"""`decide`: who goes on after a failure, for proposals worked out by hand and for any others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcr_plus.membership.rules import Decision, Process, Proposal, decide, members_after

STATES: tuple[str, ...] = ("dead", "stopped", "silent")


def process(number: int, pid: int = 0) -> Process:
    return Process(pid or 100 + number, "1", "host", number)


def proposals(ranks: Sequence[int], lost: Mapping[int, str] | None = None) -> dict[int, Proposal]:
    """Of these ranks, which all see the same."""
    return {rank: Proposal(dict(lost or {})) for rank in ranks}


def decided(
    size: int,
    given_: Mapping[int, Proposal],
    seen: Mapping[int, str] | None = None,
    newcomers: Sequence[Process] = (),
    *,
    expired: bool = False,
) -> Decision:
    found = decide(size, given_, seen or {}, newcomers, expired=expired)
    assert found is not None
    return found


# -- who stays ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 7))
def test_a_majority_of_those_that_may_run_goes_on(size: int) -> None:
    """All states of the lost ranks: the dead and the stopped do not run elsewhere, the silent may."""
    for count in range(1, size + 1):
        for lost in combinations(range(size), size - count):
            here = [rank for rank in range(size) if rank not in lost]
            for states in product(STATES, repeat=len(lost)):
                found = decided(size, proposals(here, dict(zip(lost, states, strict=True))), expired=True)
                silent = states.count("silent")
                if count > silent:
                    assert found.refusal is None
                    assert found.stay == tuple(here)
                    assert found.lost == dict(zip(lost, states, strict=True))
                else:
                    assert found.refusal == "minority"
                    assert found.stay == ()


def test_at_most_one_side_of_a_partition_goes_on() -> None:
    """Also where one side has seen a rank die, and the other side has not."""
    for size in range(2, 7):
        for sides in product((0, 1), repeat=size):
            for dead in (None, *range(size)):
                verdicts = []
                for side in (0, 1):
                    here = [rank for rank in range(size) if sides[rank] == side and rank != dead]
                    lost = {rank: "silent" for rank in range(size) if sides[rank] != side}
                    if dead is not None and sides[dead] == side:
                        lost[dead] = "dead"
                    if here:
                        verdicts.append(decided(size, proposals(here, lost), expired=True))
                assert sum(verdict.refusal is None for verdict in verdicts) <= 1


def test_ranks_that_live_and_have_not_called_are_waited_for() -> None:
    assert decide(3, proposals([0, 1]), {}) is None
    refused = decided(3, proposals([0, 1]), expired=True)
    assert refused.refusal == "absent"
    assert refused.text == "rank 2 lives and has not called it"
    assert decided(3, proposals([0, 1]), {2: "dead"}).stay == (0, 1)


def test_a_loss_that_one_rank_has_seen_is_enough() -> None:
    found = decided(3, {0: Proposal(), 1: Proposal({2: "dead"})})
    assert (found.stay, found.lost) == ((0, 1), {2: "dead"})


def test_a_rank_that_has_died_since_its_proposal_is_left_out() -> None:
    found = decided(3, proposals([0, 1, 2]), {1: "dead"})
    assert (found.stay, found.lost) == ((0, 2), {1: "dead"})


def test_a_rank_that_was_stopped_and_has_proposed_goes_on() -> None:
    assert decided(3, {**proposals([0, 1], {2: "stopped"}), 2: Proposal()}).stay == (0, 1, 2)


def test_an_observed_process_counts_more_than_silence() -> None:
    for states in permutations(STATES, 2):
        given_ = {rank: Proposal({2: state}) for rank, state in enumerate(states)}
        expected = next(state for state in STATES if state in states)
        assert decided(3, given_).lost == {2: expected}


def test_the_order_in_which_proposals_were_read_decides_nothing() -> None:
    """Two of four: a majority of the three that may run if rank 2 is stopped, and none if it is silent."""
    given_ = {0: Proposal({2: "stopped", 3: "silent"}), 1: Proposal({2: "silent"})}
    assert decided(4, given_) == decided(4, dict(reversed(given_.items())))
    assert decided(4, given_).stay == (0, 1)


# -- ranks that do not reach each other -----------------------------------------------------------


def test_the_better_connected_of_two_separated_ranks_continues() -> None:
    given_ = proposals(range(4))
    given_[0] = Proposal({3: "silent"})
    given_[2] = Proposal({3: "silent"})
    assert decided(4, given_).stay == (0, 1, 2)
    assert decided(4, given_).lost == {3: "silent"}


def test_the_lower_rank_of_a_pair_continues() -> None:
    assert decided(4, {**proposals(range(3)), 3: Proposal({2: "silent"})}).stay == (0, 1, 2)


def test_two_equal_cliques_are_refused() -> None:
    given_ = {
        **proposals([0, 1], {2: "silent", 3: "silent"}),
        **proposals([2, 3], {0: "silent", 1: "silent"}),
    }
    refused = decided(4, given_)
    assert refused.refusal == "minority"
    assert "2 of 4 ranks" in refused.text


@pytest.mark.parametrize("size", [2, 3, 4])
def test_remaining_ranks_reach_each_other(size: int) -> None:
    """All graphs of who is silent for whom; nobody who stays is apart from another one that stays."""
    pairs = list(combinations(range(size), 2))
    for apart in product((False, True), repeat=len(pairs)):
        cut = [pair for pair, is_cut in zip(pairs, apart, strict=True) if is_cut]
        given_ = {
            rank: Proposal({other: "silent" for one, other in cut if one == rank}) for rank in range(size)
        }
        found = decided(size, given_)
        assert not any(one in found.stay and other in found.stay for one, other in cut)
        if found.refusal is None:  # nobody who could go on with all of them is left out
            for rank in set(range(size)) - set(found.stay):
                assert any(rank in pair and (set(pair) - {rank}) <= set(found.stay) for pair in cut)
        largest = max(
            len(group)
            for count in range(1, size + 1)
            for group in combinations(range(size), count)
            if not any(one in group and other in group for one, other in cut)
        )
        if 2 * largest <= size:
            assert found.refusal == "minority"


def test_a_rank_that_hears_nobody_waits_for_those_that_may_still_call() -> None:
    alone = {0: Proposal({1: "silent", 2: "silent"})}
    assert decide(3, alone, {}) is None
    assert decided(3, alone, expired=True).refusal == "minority"
    assert decided(3, {**alone, 1: Proposal(), 2: Proposal()}).stay == (1, 2)
    two = {0: Proposal({1: "silent"}), 1: Proposal({0: "silent"})}
    assert decided(2, two).refusal == "minority"  # nobody is left to wait for


# -- min_ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", [0, 1, 2, 3])
def test_min_ranks_takes_the_place_of_a_majority(silent: int) -> None:
    here = range(4 - silent)
    given_ = {rank: Proposal(dict.fromkeys(range(4 - silent, 4), "silent"), least=2) for rank in here}
    found = decided(4, given_)
    assert found.refusal == (None if len(here) >= 2 else "few")
    assert found.text == ("" if len(here) >= 2 else "1 rank is left, fewer than min_ranks=2")


def test_the_least_min_ranks_counts() -> None:
    given_ = {0: Proposal({2: "dead"}, least=3), 1: Proposal({2: "dead"}, least=2)}
    assert decided(3, given_).stay == (0, 1)
    assert decided(3, {0: given_[0], 1: Proposal()}, {2: "dead"}).refusal == "few"


def test_ranks_that_are_patient_wait_for_newcomers() -> None:
    given_ = {0: Proposal({1: "dead"}, least=2, patient=True)}
    assert decide(2, given_, {}) is None
    assert decided(2, given_, expired=True).refusal == "few"
    found = decided(2, given_, newcomers=[process(1)])
    assert (found.stay, found.join) == ((0,), (process(1),))


def test_newcomers_make_no_majority() -> None:
    refused = decided(2, proposals([0], {1: "silent"}), newcomers=[process(1), process(2)], expired=True)
    assert refused.refusal == "minority"


# -- arguments ------------------------------------------------------------------------------------


def test_ranks_that_the_program_names_are_not_waited_for() -> None:
    found = decided(3, {0: Proposal(named=(2,)), 1: Proposal()})
    assert (found.stay, found.lost) == ((0, 1), {2: "named"})
    assert decided(3, {0: Proposal(named=(2,)), 1: Proposal({2: "stopped"})}).lost == {2: "stopped"}


def test_a_named_rank_may_run_elsewhere() -> None:
    assert decided(2, {0: Proposal(named=(1,))}, expired=True).refusal == "minority"


def test_a_living_rank_cannot_be_named() -> None:
    given_ = {**proposals([1, 2]), 0: Proposal(named=(2,))}
    refused = decided(3, given_)
    assert (refused.refusal, refused.text) == ("living", "rank 0 has named living ranks as dead: rank 2")
    assert decided(3, given_, {2: "dead"}).stay == (0, 1)  # it has died since its proposal


def test_a_wrong_argument_of_one_rank_is_an_error_on_all() -> None:
    given_ = {**proposals([0, 1]), 2: Proposal(problem="dead: 9 is no rank")}
    assert decided(4, given_) == Decision(refusal="argument", text="rank 2: dead: 9 is no rank")


# -- what is done ---------------------------------------------------------------------------------


def test_done_is_what_all_that_stay_have_completed() -> None:
    given_ = {
        0: Proposal({3: "dead"}, done={"world": 7, "a": 3}),
        1: Proposal(done={"world": 5}),
        2: Proposal(done={"world": 6, "a": 4, "b": 1}),
    }
    assert decided(4, given_).done == {"a": 3, "b": 1, "world": 5}
    assert decided(4, given_, {1: "dead"}).done == {"a": 3, "b": 1, "world": 6}


# -- the next epoch -------------------------------------------------------------------------------


def test_ranks_are_in_the_order_of_their_launchers_numbers() -> None:
    members = [process(0), process(1), process(2), process(3)]
    decision = Decision(stay=(0, 2, 3), join=(process(1, pid=7),))
    after = members_after(members, decision)
    assert after == (process(0), process(1, pid=7), process(2), process(3))


# -- any proposals --------------------------------------------------------------------------------

Situation = tuple[int, dict[int, Proposal], dict[int, str], list[Process], bool]
few = settings(max_examples=60)
processes = st.builds(Process, st.integers(1, 9), st.text(max_size=3), st.text(max_size=3), st.integers(0, 9))
groups = st.dictionaries(st.sampled_from(["world", "a", "b"]), st.integers(0, 9))


def proposal_of(size: int, rank: int) -> st.SearchStrategy[Proposal]:
    others = [other for other in range(size) if other != rank]
    other = st.sampled_from(others) if others else st.nothing()
    return st.builds(
        Proposal,
        lost=st.dictionaries(other, st.sampled_from(STATES)) if others else st.just({}),
        named=st.lists(other, unique=True, max_size=1).map(tuple) if others else st.just(()),
        least=st.none() | st.integers(1, size),
        patient=st.booleans(),
        done=groups,
        problem=st.sampled_from(["", "", "", "", "wrong"]),
    )


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Arguments of `decide`; the caller is among those that have proposed, and nobody calls it dead."""
    size = draw(st.integers(1, 5))
    here = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
    caller = draw(st.sampled_from(here))
    given_ = {}
    for rank in here:
        proposal = draw(proposal_of(size, rank))
        lost = {other: "stopped" if other == caller and found == "dead" else found
                for other, found in proposal.lost.items()}  # fmt: skip
        given_[rank] = replace(proposal, lost=lost)
    others = [rank for rank in range(size) if rank != caller]
    seen = draw(st.dictionaries(st.sampled_from(others), st.sampled_from(STATES))) if others else {}
    return size, given_, seen, draw(st.lists(processes, max_size=2)), draw(st.booleans())


@few
@given(situations(), st.randoms(use_true_random=False))
def test_the_order_of_proposals_does_not_matter(situation: Situation, random: Random) -> None:
    size, given_, seen, newcomers, expired = situation
    items = list(given_.items())
    random.shuffle(items)
    one = decide(size, given_, seen, newcomers, expired=expired)
    assert decide(size, dict(items), seen, newcomers, expired=expired) == one


@few
@given(situations())
def test_after_the_timeout_the_decision_is_consistent(
    situation: Situation,
) -> None:
    size, given_, seen, newcomers, _ = situation
    found = decided(size, given_, seen, newcomers, expired=True)
    early = decide(size, given_, seen, newcomers)
    assert early is None or early == found  # a deadline only ends a wait
    if found.refusal is not None:
        assert (found.stay, found.join, found.lost, found.done) == ((), (), {}, {})
        assert found.text
        return
    assert set(found.stay) <= set(given_)
    assert set(found.stay) | set(found.lost) == set(range(size))
    assert not set(found.stay) & set(found.lost)
    assert found.join == tuple(newcomers)
    for name, number in found.done.items():
        assert number == min(given_[rank].done[name] for rank in found.stay if name in given_[rank].done)


@few
@given(situations(), st.data())
def test_more_knowledge_of_deaths_never_lets_the_dead_stay(situation: Situation, data: st.DataObject) -> None:
    size, given_, seen, newcomers, expired = situation
    before = decide(size, given_, seen, newcomers, expired=expired)
    dead = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    after = decide(size, given_, {**seen, **dict.fromkeys(dead, "dead")}, newcomers, expired=expired)
    if after is None:
        return
    assert not dead & set(after.stay)
    if (
        before is not None
        and before.refusal is None
        and not any(state == "silent" for each in given_.values() for state in each.lost.values())
    ):
        assert set(after.stay) <= set(before.stay)


@few
@given(situations())
def test_json_keeps_proposals_and_decisions(
    situation: Situation,
) -> None:
    size, given_, seen, newcomers, _ = situation
    for proposal in given_.values():
        assert Proposal.read(json.loads(json.dumps(proposal.plain()))) == proposal
    found = decided(size, given_, seen, newcomers, expired=True)
    assert Decision.read(json.loads(json.dumps(found.plain()))) == found
