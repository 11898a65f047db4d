"""Operations that run again after a library has failed: every combination of two ranks' states."""

from __future__ import annotations

import itertools

import pytest

from mcr_plus.reliability.failover.rules import RankOperation, RankRecord, decide

OPEN = RankOperation(1, is_done=False, has_input=True, has_result=False)
DONE = [
    RankOperation(1, is_done=True, has_input=has_input, has_result=has_result)
    for has_input in (False, True)
    for has_result in (False, True)
]
STATES = [OPEN, *DONE, None]
"""Of an operation on a rank; None: complete, and not kept any more."""


def records_of_a_rank() -> list[RankRecord]:
    """Return up to three operations; the oldest ones may not be kept."""
    found = []
    for count in range(4):
        for states in itertools.product(STATES, repeat=count):
            kept = [state is not None for state in states]
            if kept == sorted(kept):
                operations = {number: each for number, each in enumerate(states) if each is not None}
                found.append(RankRecord(count, operations))
    return found


def test_every_pair_of_records() -> None:
    records = records_of_a_rank()
    verdicts = {"refused": 0, "sent": 0, "again": 0, "nothing": 0}
    for pair in itertools.product(records, repeat=2):
        verdict = decide(pair)
        is_done = [
            [
                number not in record.operations or record.operations[number].is_done
                for number in range(record.next)
            ]
            for record in pair
        ]
        longest = max(map(len, is_done))
        done_on_all = [
            all(number < len(each) and each[number] for each in is_done) for number in range(longest)
        ]
        assert all(done_on_all[: verdict.first]), (pair, verdict)
        assert verdict.first == longest or not done_on_all[verdict.first], (pair, verdict)
        impossible = False
        for number in range(verdict.first, longest):
            own = [record.operations.get(number) for record in pair if number < record.next]
            done = [each for each in own if each is None or each.is_done]
            sources = [
                rank
                for rank, record in enumerate(pair)
                if (each := record.operations.get(number)) is not None and each.is_done and each.has_result
            ]
            is_lost = any(each is None for each in own)
            has_inputs = all(each is not None and each.has_input for each in done)
            if done and (is_lost or not (sources or has_inputs)):
                impossible = True
            elif not verdict.refusal:
                assert verdict.sources.get(number) == (sources[0] if sources else None), (pair, verdict)
        assert bool(verdict.refusal) == impossible, (pair, verdict)
        verdicts["refused"] += bool(verdict.refusal)
        verdicts["sent"] += bool(verdict.sources and not verdict.refusal)
        verdicts["again"] += not verdict.refusal and not verdict.sources and verdict.first < longest
        verdicts["nothing"] += verdict.first == longest
    assert all(verdicts.values())


def test_a_refusal_names_the_ranks() -> None:
    gone = RankOperation(1, is_done=True, has_input=False, has_result=False)
    records = [RankRecord(1, {0: OPEN}), RankRecord(1, {0: gone}), RankRecord(2, {1: OPEN})]
    assert decide(records).refusal == (
        "rank 2 completed an operation that others have not, and its tensors have changed since"
    )


@pytest.mark.parametrize("other", [OPEN, *DONE])
def test_different_operations_do_not_run_again(other: RankOperation) -> None:
    records = [RankRecord(1, {0: OPEN}), RankRecord(1, {0: other._replace(digest=2)})]
    assert decide(records).refusal == "ranks have issued different operations"
