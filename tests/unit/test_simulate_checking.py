"""Faults in the order of operations are found; the oracle is an interpreter that shares no code."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from mcr_plus.simulate.checking import OrderProblem, problems
from mcr_plus.simulate.cluster import FoldedJob
from mcr_plus.simulate.folding import RankFolding
from mcr_plus.simulate.records import AwaitedCall, EndedStep, IssuedCall, RecordedEvent, RecordedRank

Groups = Sequence[tuple[int, ...]]


def call(kind: str, group: int, nbytes: int, line: int, **more: object) -> IssuedCall:
    made = IssuedCall(
        0.001, kind, group, nbytes, nbytes, "float32", None, None, None, 0, None, "gloo", f"train.py:{line}"
    )
    return made._replace(**more)  # type: ignore[arg-type]


def correct(draw: random.Random, ranks: int) -> dict[int, RecordedRank]:
    """Return a job in which all ranks follow one order of all operations, with late waits."""
    some = [draw.sample(range(ranks), draw.randrange(2, ranks + 1)) for _ in range(draw.randrange(1, 4))]
    groups = list(dict.fromkeys([tuple(range(ranks)), *(tuple(sorted(each)) for each in some)]))
    records = {rank: RecordedRank(rank) for rank in range(ranks)}
    own: dict[int, list[tuple[int, ...]]] = {}
    for rank, record in records.items():
        record.created = [(group, "train.py:1") for group in groups]
        record.groups = [(group, 0) for group in groups if rank in group]
        own[rank] = [group for group in groups if rank in group]
    calls = Counter[int]()
    late: dict[int, list[int]] = {rank: [] for rank in records}

    def issue(rank: int, event: IssuedCall, waits: bool) -> None:
        records[rank].events.append(event)
        late[rank].append(calls[rank])
        calls[rank] += 1
        while late[rank] and (waits or draw.random() < 0.2):
            number = late[rank].pop(0)
            records[rank].events.append(AwaitedCall(0.001, number))

    for line in range(10, 10 + draw.randrange(4, 14)):
        group = draw.choice(groups)
        waits, size = draw.random() < 0.6, 4 * draw.randrange(1, 4)
        if draw.random() < 0.35:
            sender, receiver = draw.sample(group, 2)
            for rank, kind, peer in ((sender, "send", receiver), (receiver, "recv", sender)):
                place = own[rank].index(group)
                issue(rank, call(kind, place, size, line, peer=group.index(peer)), waits)
        else:
            kind, root = draw.choice([("all_reduce", None), ("all_gather", None), ("broadcast", 0)])
            for rank in group:
                issue(rank, call(kind, own[rank].index(group), size, line, root=root), waits)
    for rank, record in records.items():
        record.events += [AwaitedCall(0.001, number) for number in late[rank]]
        record.events.append(EndedStep(0.001))
    return records


def broken(draw: random.Random, record: RecordedRank) -> RecordedRank:
    """Return a rank's record with one operation swapped with another, dropped, doubled or changed."""
    units: list[list[RecordedEvent]] = []  # operations, each with the waits that follow it
    number = -1
    names: list[int] = []
    for event in record.events:
        if isinstance(event, IssuedCall):
            number += 1
            names.append(number)
            units.append([event])
        elif units:
            units[-1].append(event)
    way, at = (
        draw.choice(["swap", "swap", "swap", "swap", "drop", "double", "size", "kind"]),
        draw.randrange(len(units)),
    )
    order = list(range(len(units)))
    issued = [unit[0] for unit in units if isinstance(unit[0], IssuedCall)]
    if way == "swap" and len(units) > 1:
        other = draw.choice([each for each in order if each != at])
        order[at], order[other] = order[other], order[at]
    elif way == "drop":
        order.remove(at)
    elif way == "double":
        order.insert(at, at)
    elif way == "size":
        issued[at] = issued[at]._replace(nbytes=issued[at].own + 4, own=issued[at].own + 4)
    elif issued[at].kind in ("all_reduce", "all_gather"):
        changed = {"all_reduce": "all_gather", "all_gather": "all_reduce"}
        issued[at] = issued[at]._replace(kind=changed[issued[at].kind])
    # Waits follow the operation that they followed; each is for the first copy of its operation.
    events: list[RecordedEvent] = []
    new: dict[int, int] = {}
    waits: list[int] = []
    for count, unit in enumerate(order):
        new.setdefault(unit, count)
        events.append(issued[unit])
        waits += [each.call for each in units[unit][1:] if isinstance(each, AwaitedCall)]
        ready = [each for each in dict.fromkeys(waits) if each in new]
        events += [AwaitedCall(0.001, new[each]) for each in ready]
        waits = [each for each in waits if each not in new]
    return replace(record, events=[*events, EndedStep(0.001)])


def is_faulty(records: Mapping[int, RecordedRank]) -> bool:
    """Run all ranks by turns; whether operations that meet differ, some never meet, or ranks wait forever."""
    arrived: dict[tuple[object, ...], dict[int, deque[tuple[object, ...]]]] = {}
    members: dict[tuple[object, ...], tuple[int, ...]] = {}
    done = Counter[tuple[object, ...]]()
    at = dict.fromkeys(records, 0)
    tickets: dict[int, list[tuple[tuple[object, ...], int]]] = {rank: [] for rank in records}
    sent = Counter[tuple[int, tuple[object, ...]]]()
    moved = True
    while moved:
        moved = False
        for rank, record in records.items():
            while at[rank] < len(record.events):
                event = record.events[at[rank]]
                if isinstance(event, IssuedCall):
                    group, number = record.groups[event.group]
                    facts: tuple[object, ...] = (event.kind, event.nbytes, event.root)
                    key: tuple[object, ...] = (group, number)
                    ranks = group
                    if event.peer is not None:
                        ends = (rank, group[event.peer])
                        ranks = ends if event.kind == "send" else ends[::-1]
                        key, facts = (*key, *ranks), (event.nbytes,)
                    members[key] = ranks
                    arrived.setdefault(key, {}).setdefault(rank, deque()).append(facts)
                    tickets[rank].append((key, sent[rank, key]))
                    sent[rank, key] += 1
                elif isinstance(event, AwaitedCall):
                    key, turn = tickets[rank][event.call]
                    if done[key] <= turn:
                        break
                at[rank] += 1
                moved = True
        for key, queues in arrived.items():
            while all(queues.get(rank) for rank in members[key]):
                if len({queues[rank].popleft() for rank in members[key]}) > 1:
                    return True
                done[key] += 1
                moved = True
    left = any(queue for queues in arrived.values() for queue in queues.values())
    return left or any(at[rank] < len(record.events) for rank, record in records.items())


def checked(records: Mapping[int, RecordedRank]) -> list[OrderProblem]:
    folding = RankFolding(len(records), lambda _: records, len(records))
    return problems(FoldedJob(records, folding.fold(), folding))


def test_correct_jobs_have_no_problems() -> None:
    for seed in range(60):
        records = correct(random.Random(seed), 3 + seed % 4)
        assert not is_faulty(records), seed
        assert not checked(records), seed


@pytest.mark.parametrize("first", [0, 100])
def test_faults_are_named_with_their_rank_and_line(first: int) -> None:
    """A hundred faults each; an injected change that breaks nothing does not count."""
    faults, harmless, seed = 0, 0, 10_000 * first
    kinds = Counter[str]()
    while faults < 100:
        seed += 1
        draw = random.Random(seed)
        records = correct(draw, 3 + seed % 4)
        rank = draw.choice([each for each in records if len(records[each].events) > 2])
        records[rank] = broken(draw, records[rank])
        found = checked(records)
        if is_faulty(records):
            faults += 1
            assert found, seed
            assert any(rank in each.ranks and "at train.py:" in each.text for each in found), (seed, found)
            kinds[found[0].text.split()[0]] += 1
        else:
            harmless += 1
            assert not found, (seed, found)
    assert harmless > 10
    assert kinds["operation"] > 10
    assert kinds["message"] > 5
    assert kinds["ranks"] > 5  # wait for each other


def test_the_circle_has_each_rank_and_its_operation() -> None:
    records = {rank: RecordedRank(rank) for rank in range(3)}
    for rank, record in records.items():
        record.groups = [((0, 1, 2), 0)]
        record.created = [((0, 1, 2), "train.py:1")]
        record.events = [
            call("send", 0, 8, 5, peer=(rank + 1) % 3), AwaitedCall(0.0, 0),
            call("recv", 0, 8, 6, peer=(rank - 1) % 3), AwaitedCall(0.0, 1),
        ]  # fmt: skip
    (found,) = checked(records)
    assert sorted(found.ranks) == [0, 1, 2] or len(found.ranks) == 1  # equal ranks are simulated once
    assert "send of 8 B float32 at train.py:5 of (0, 1)" in found.text


def test_groups_that_ranks_make_differently_are_named() -> None:
    records = {rank: RecordedRank(rank) for rank in range(4)}
    for rank, record in records.items():
        record.groups = [((0, 1, 2, 3), 0)]
        record.created = [((0, 1, 2, 3), "a.py:1"), ((0, 1) if rank < 3 else (0, 2), "a.py:2")]
        record.events = [call("barrier", 0, 0, 9), AwaitedCall(0.0, 0)]
    found = checked(records)
    assert [each.ranks for each in found] == [(0, 3)]
    assert "the group (0, 1) at a.py:2, rank 3 the group (0, 2) at a.py:2" in found[0].text


def pipeline(rank: int, tensor: int, stages: int, world: int, odd: int | None = None) -> RecordedRank:
    """Return a rank of tensor-parallel groups in stages, of which one rank does something else."""
    record = RecordedRank(rank)
    copies = world // tensor // stages
    of_tensor = [tuple(range(first, first + tensor)) for first in range(0, world, tensor)]
    depth = world // stages
    of_stage = [tuple(range(first, world, depth)) for first in range(depth)]
    record.created = [(group, "m.py:1") for group in [tuple(range(world)), *of_tensor, *of_stage]]
    own = [of_tensor[rank // tensor], of_stage[rank % depth]]
    record.groups = [(own[0], 0), (own[1], 0)]
    stage = rank // depth
    events: list[RecordedEvent] = []

    def add(event: IssuedCall) -> None:
        number = sum(isinstance(each, IssuedCall) for each in events)
        events.extend([event, AwaitedCall(0.001, number)])

    if stage:
        add(call("recv", 1, 64, 10, peer=stage - 1))
    add(call("all_reduce", 0, 64 + 4 * (rank == odd), 11))
    if stage < stages - 1:
        add(call("send", 1, 64, 12, peer=stage + 1))
    record.events = [*events, EndedStep(0.001)]
    assert copies * tensor * stages == world
    return record


def test_few_ranks_of_a_large_job_stand_for_all() -> None:
    world, ran = 512, dict[int, RecordedRank]()

    def run(ranks: Sequence[int]) -> Mapping[int, RecordedRank]:
        ran.update({rank: pipeline(rank, 4, 8, world) for rank in ranks if rank not in ran})
        return ran

    folding = RankFolding(world, run, 64)
    stands = folding.fold()
    everyone = {rank: pipeline(rank, 4, 8, world) for rank in range(world)}
    whole = RankFolding(world, lambda _: everyone, world)
    whole.fold()
    assert all(whole.events[rank] == whole.events[int(stands[rank])] for rank in range(world))
    assert len(ran) < 40
    assert not problems(FoldedJob(ran, stands, folding))


def test_a_fold_that_is_wrong_is_found_by_the_check_if_operations_do_not_meet() -> None:
    """Rank 12 is in the middle of its groups and does not run; its neighbour 15 is the last of its own."""
    world, ran = 64, dict[int, RecordedRank]()

    def run(ranks: Sequence[int]) -> Mapping[int, RecordedRank]:
        ran.update({rank: pipeline(rank, 4, 4, world, odd=3) for rank in ranks if rank not in ran})
        return ran

    folding = RankFolding(world, run, 32)
    found = problems(FoldedJob(ran, folding.fold(), folding))
    assert found
    assert any({0, 3} <= {*each.ranks} for each in found)


def test_families_are_disjoint_groups_of_one_size() -> None:
    folding = RankFolding(8, lambda _: {}, 8)
    families = folding.families
    for group in [(0, 1), (2, 3), (4, 5), (6, 7), (0, 2, 4, 6), (1, 3, 5, 7), (0, 7)]:
        families.add(group)
    assert [family.size for family in families.all] == [8, 2, 4, 2]
    assert np.array_equal(families.all[1].owner, [0, 0, 1, 1, 2, 2, 3, 3])
    assert np.array_equal(families.all[2].place, [0, 0, 1, 1, 2, 2, 3, 3])
    assert np.array_equal(families.all[3].owner, [0, -1, -1, -1, -1, -1, -1, 0])
