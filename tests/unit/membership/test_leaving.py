"""Who continues if members leave on notice, for every combination of leavers, deaths and `min_ranks`."""

from __future__ import annotations

from itertools import product

import pytest

from mcr_plus.membership.rules import ON_NOTICE, Process, Proposal, decide

NEWCOMER = Process(9, "", "here", 9)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_leavers_go_unless_too_few_would_be_left(size: int) -> None:
    states = list(product(("stays", "leaves", "dead", "dead later"), repeat=size))
    for ranks, least, joins in product(states, (None, *range(1, size + 1)), (0, 1)):
        proposals = {
            rank: Proposal(leaves=how == "leaves", least=least)
            for rank, how in enumerate(ranks)
            if how != "dead"
        }
        seen = {rank: "dead" for rank, how in enumerate(ranks) if how.startswith("dead")}
        living = [rank for rank in range(size) if rank not in seen]
        if not proposals:
            continue
        others = [rank for rank in living if ranks[rank] == "stays"]
        enough = bool(others) and len(others) + joins >= (least or 1)
        expected = others if enough else living
        found = decide(size, proposals, seen, [NEWCOMER] * joins, expired=True)
        assert found is not None
        if len(expected) + joins < (least or 1) or (not expected and least is None):
            assert found.refusal in ("few", "minority")
        elif expected:
            assert found.refusal is None, found
            assert found.stay == tuple(expected)
            lost = {rank: "dead" if rank in seen else ON_NOTICE for rank in range(size)}
            assert found.lost == {rank: why for rank, why in lost.items() if rank not in expected}


def test_leavers_do_not_count_in_the_majority() -> None:
    leave = Proposal(leaves=True)
    found = decide(4, {0: Proposal(), 1: leave, 2: leave, 3: leave}, {})
    assert found is not None
    assert found.stay == (0,)
    # Rank 2 is silent for all others, and may run on the other side of a partition.
    found = decide(3, {0: Proposal(lost={2: "silent"}), 1: leave}, {2: "silent"}, expired=True)
    assert found is not None
    assert found.refusal == "minority"
