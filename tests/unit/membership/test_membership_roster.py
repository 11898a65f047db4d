"""`EpochLog`: what members of a job write into its store and read there, with a store in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mcr_plus.core.c10d import HashStore
from mcr_plus.core.job_store import JobStore
from mcr_plus.errors import LaunchError
from mcr_plus.membership.epoch_log import EpochDecision, EpochLog, join
from mcr_plus.membership.rules import Process, Proposal

MEMBERS = tuple(Process(100 + number, "1", "host", number) for number in range(3))
NEWCOMER = Process(200, "1", "host", 2)


@pytest.fixture(autouse=True)
def dead(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The processes of these tests, which are made up, run; but for those in the set."""
    pids: set[int] = set()
    monkeypatch.setattr(
        "mcr_plus.membership.epoch_log.state_of", lambda pid, _: "dead" if pid in pids else "running"
    )
    return pids


def roster(store: Any, rank: int, members: tuple[Process, ...] = MEMBERS) -> EpochLog:
    return EpochLog(store, 0, members, rank)


def settle(member: EpochLog, lost: Mapping[int, str], timeout: float = 5.0) -> EpochDecision:
    return member.settle(Proposal(dict(lost), patient=True), lambda: lost, timeout)


def together(calls: Mapping[int, Any]) -> list[Any]:
    """The results of calls that wait for each other."""
    results: dict[Any, Any] = {}

    def run(key: Any, call: Any) -> None:
        results[key] = call()

    threads = [threading.Thread(target=run, args=each) for each in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[key] for key in calls]


def ask(store: JobStore, number: int, process: Process) -> None:
    store.set(f"newcomer/{number}", json.dumps({"process": process, "passport": {}}))


def test_members_read_one_decision() -> None:
    store = JobStore(HashStore())
    rosters = [roster(store, rank) for rank in (0, 1)]
    one, other = together({each.rank: lambda each=each: settle(each, {2: "dead"}) for each in rosters})
    assert one == other
    assert (one.decision.stay, one.members) == ((0, 1), MEMBERS[:2])
    assert rosters[0].is_being_left


def test_a_newcomer_is_taken_in_once_whoever_decides_next() -> None:
    store = JobStore(HashStore())
    store.add("newcomers", 1)
    ask(store, 0, NEWCOMER)
    first = [roster(store, rank) for rank in (0, 1)]
    settled, _ = together({each.rank: lambda each=each: settle(each, {2: "dead"}) for each in first})
    assert settled.members == (*MEMBERS[:2], NEWCOMER)
    assert settled.taken == (0,)
    # Rank 0, which has read the request, is lost; rank 1 and the newcomer have never read it.
    second = [first[1].following(settled, 1), EpochLog(store, 1, settled.members, 2, {}, settled.taken)]
    one, other = together({each.rank: lambda each=each: settle(each, {0: "dead"}) for each in second})
    assert one == other
    assert one.members == (MEMBERS[1], NEWCOMER)


def test_a_newcomer_that_has_died_is_not_taken_in(dead: set[int]) -> None:
    store = JobStore(HashStore())
    store.add("newcomers", 1)
    ask(store, 0, NEWCOMER)
    member = roster(store, 0)
    assert member.newcomers() == {0: NEWCOMER}
    dead.add(NEWCOMER.pid)
    assert member.newcomers() == {}


def test_a_process_that_died_before_its_request_was_written_holds_up_nobody() -> None:
    store = JobStore(HashStore())
    store.add("newcomers", 2)
    ask(store, 1, NEWCOMER)
    member = roster(store, 0)
    assert member.newcomers() == {1: NEWCOMER}
    ask(store, 0, MEMBERS[2])  # it was only slow
    assert set(member.newcomers().values()) == {NEWCOMER, MEMBERS[2]}


@pytest.mark.parametrize("what", ["mcr_plus", "torch", "the configuration", "the model", "the optimizer"])
def test_a_newcomer_that_differs_is_refused_by_name(what: str) -> None:
    names = ["mcr_plus", "torch", "the configuration", "the model", "the optimizer"]
    passport = dict.fromkeys(names, "1")
    store = JobStore(HashStore())
    member = EpochLog(store, 0, MEMBERS, 0, passport)
    refused = rf"has not taken this process in: {what} is '2' here and '1' in the job"
    with pytest.raises(LaunchError, match=refused):
        join(store, NEWCOMER, {**passport, what: "2"}, 5.0, lambda _: bool(member.newcomers()))
    assert member.newcomers() == {}


def test_a_request_of_another_form_disturbs_nobody() -> None:
    store = JobStore(HashStore())
    store.add("newcomers", 3)
    store.set("newcomer/0", json.dumps({"process": NEWCOMER}))
    store.set("newcomer/1", json.dumps({"process": NEWCOMER, "passport": 3}))
    ask(store, 2, NEWCOMER)
    assert roster(store, 0).newcomers() == {2: NEWCOMER}


def test_a_process_may_ask_again_after_it_was_lost() -> None:
    store = JobStore(HashStore())
    store.add("newcomers", 1)
    ask(store, 0, NEWCOMER)
    member = roster(store, 0, MEMBERS[:1])
    settled = settle(member, {})
    member = member.following(settled, 0)
    settled = settle(member, {1: "dead"})  # NEWCOMER, which runs on
    member = member.following(settled, 0)
    joined, last = together(
        {
            0: lambda: join(store, NEWCOMER, {}, 5.0),
            1: lambda: settle(member, {}) if _waits_for_newcomer(member) else None,
        }
    )
    assert joined == (3, last)
    assert last.taken == (0, 1)


def _waits_for_newcomer(member: EpochLog) -> bool:
    while not member.newcomers():
        pass
    return True


class FailingStore:
    """Fails once, when a rank looks for the decision."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._failures = iter([RuntimeError("connection reset")])

    def check(self, keys: list[str]) -> bool:
        if any(key.endswith("decision") for key in keys):
            for failure in self._failures:
                raise failure
        return self._store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_call_that_the_store_has_failed_belongs_to_the_same_attempt() -> None:
    store = JobStore(HashStore())
    other = roster(FailingStore(store), 1)
    with pytest.raises(LaunchError, match="connection reset"):
        settle(other, {2: "dead"})
    decided = settle(roster(store, 0), {2: "dead"})
    assert decided.decision.stay == (0, 1)
    assert settle(other, {0: "silent", 2: "dead"}) == decided
    assert other.attempt == 1


def test_a_death_that_a_rank_sees_while_it_waits_is_told_to_the_one_that_decides() -> None:
    store = JobStore(HashStore())
    blind, sees = roster(store, 0), roster(store, 1)
    looks: Iterator[dict[int, str]] = iter([{}] * 5)
    one, other = together(
        {
            0: lambda: blind.settle(Proposal(), dict, 5.0),
            1: lambda: sees.settle(Proposal(), lambda: next(looks, {2: "dead"}), 5.0),
        }
    )
    assert one == other
    assert (one.decision.stay, one.decision.lost) == ((0, 1), {2: "dead"})


@pytest.mark.parametrize("first", [True, False])
def test_the_outcome_of_a_build_is_what_was_said_first(first: bool) -> None:
    store = JobStore(HashStore())
    assert roster(store, 0).conclude(made=first) is first
    assert roster(store, 1).conclude(made=not first) is first
