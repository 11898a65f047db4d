"""`PeerLost`: what it holds, and when the error of an operation is one."""

from __future__ import annotations

import math
import mmap
import os
import pickle
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

import mcr_plus as mcr
from mcr_plus.board.base import Failure, GroupBoard
from mcr_plus.core.c10d import HashStore
from mcr_plus.core.group import Group
from mcr_plus.core.job_store import JobStore
from mcr_plus.core.proc import read_stat
from mcr_plus.engine.group_state import GroupState
from mcr_plus.engine.options import DispatchOptions
from mcr_plus.engine.peer_errors import FailedPeer, peer_error
from mcr_plus.engine.watchdog import LONG_WAIT, Watchdog
from mcr_plus.errors import following
from mcr_plus.hosts.findings import Findings
from mcr_plus.hosts.protocol import RankFinding, State
from mcr_plus.job.members import observed
from mcr_plus.membership.rules import Process
from mcr_plus.rendezvous import processes
from mcr_plus.rendezvous.identity import own_process
from mcr_plus.rendezvous.processes import Loss, Peers
from mcr_plus.rendezvous.world import World

LOST = mcr.PeerLost("rank 2 has died", [2], "all_reduce (#7)", "world", "process has died")


def work() -> Any:
    operation = SimpleNamespace(
        name=lambda sequence: f"all_reduce (#{sequence})",
        state=state(),
        backend="gloo",
        signature=SimpleNamespace(is_p2p=False),
    )
    waits = {
        "doubted_since": None,
        "compiling_turns": None,
        "compiling_seen": 0.0,
        "is_done": False,
        "poll": None,
    }
    return SimpleNamespace(operation=operation, sequence=7, message=SimpleNamespace(peer=None), **waits)


def state() -> GroupState:
    return GroupState(Group("world", (0, 1, 2), 0), GroupBoard())


def test_the_error_is_a_backend_error_and_survives_pickling() -> None:
    assert isinstance(LOST, mcr.BackendError)
    copy = pickle.loads(pickle.dumps(LOST))
    assert type(copy) is mcr.PeerLost
    assert (str(copy), copy.ranks, copy.operation, copy.group, copy.seen) == (
        "rank 2 has died",
        (2,),
        "all_reduce (#7)",
        "world",
        "process has died",
    )


def test_operations_impossible_after_a_loss_raise_the_loss() -> None:
    again = following(LOST, "not started")
    assert isinstance(again, mcr.PeerLost)
    assert (str(again), again.ranks, again.seen) == ("not started", (2,), "process has died")
    assert type(following(ValueError("other"), "not started")) is mcr.BackendError


def test_a_failed_group_raises_it_again() -> None:
    group = state()
    group.fail(LOST, 7)
    with pytest.raises(mcr.PeerLost, match="cannot be used after it has failed") as caught:
        group.check_thread()
    assert caught.value.ranks == (2,)


def test_lost_peers_are_named_before_those_that_have_only_failed() -> None:
    failed = [
        FailedPeer(4, "rank 1 has given up: it left", "it left"),
        FailedPeer(9, "rank 2 has died", seen="process has died"),
        FailedPeer(7, "rank 3 is out of reach", seen="no heartbeat for 0.8 s"),
    ]
    error = peer_error(work(), "text", failed)
    assert isinstance(error, mcr.PeerLost)
    assert error.ranks == (7, 9)
    assert error.seen == "process has died; no heartbeat for 0.8 s"
    assert (error.operation, error.group) == ("all_reduce (#7)", "world")


def test_a_loss_that_a_peer_reports_names_the_ranks_that_it_has_lost() -> None:
    record = Failure.unpacked(Failure(7, LOST.passed_on).packed())
    error = peer_error(work(), "text", [FailedPeer(4, f"rank 1 has given up: {record.text}", record.text)])
    assert isinstance(error, mcr.PeerLost)
    assert (error.ranks, error.seen) == ((2,), "reported by rank 4")
    assert error.passed_on == LOST.passed_on  # it does not grow with every rank


def test_many_lost_ranks_fit_into_a_record_that_is_cut() -> None:
    lost = mcr.PeerLost("text " * 1000, range(1000, 3000))
    record = Failure.unpacked(Failure(7, lost.passed_on).packed())
    error = peer_error(work(), "text", [FailedPeer(4, "", record.text)])
    assert isinstance(error, mcr.PeerLost)
    assert error.ranks == tuple(range(1000, 1060))


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ("OrderMismatch: text", mcr.OrderMismatch),
        ("CommTimeout: text", mcr.CommTimeout),
        ("ValueError: text", mcr.BackendError),
    ],
)
def test_other_failures_keep_their_kind(failure: str, kind: type[mcr.McrError]) -> None:
    assert type(peer_error(work(), "text", [FailedPeer(4, "", failure)])) is kind


def test_a_stopped_process_is_lost_after_its_grace_and_not_if_this_one_was_stopped_too() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            peers = _peers(child.pid, 0.5)
            os.kill(child.pid, signal.SIGSTOP)
            while peers.status(1) != "stopped":
                time.sleep(0.005)
            at = 100.0

            def lost_at(peers: Peers, moment: float) -> Loss | None:
                with mock.patch("time.monotonic", return_value=moment):
                    return peers.lost(1)

            assert [lost_at(peers, at + after) for after in (0.0, 0.2, 0.4)] == [None] * 3
            at += 60.0  # for a minute nothing has looked
            assert [lost_at(peers, at + after) for after in (0.0, 0.2, 0.4)] == [None] * 3
            assert lost_at(peers, at + 0.5) == Loss("stopped", "stopped")
            starved = _peers(child.pid, 0.5)  # of cores: a second, or more, passes between its looks
            assert [lost_at(starved, at + after) for after in (0.0, 1.0)] == [None] * 2
            assert lost_at(starved, at + 2.5) == Loss("stopped", "stopped")
            patient = _peers(child.pid, math.inf)
            assert [lost_at(patient, at + 0.1 * look) for look in range(1000)] == [None] * 1000
            os.kill(child.pid, signal.SIGCONT)
            while peers.status(1) == "stopped":
                time.sleep(0.005)
            assert lost_at(peers, at + 0.6) is None
        finally:
            child.kill()
        while peers.status(1) != "dead":
            time.sleep(0.005)
        assert peers.lost(1) == Loss("dead", "process has died")


def _peers(pid: int, grace: float) -> Peers:
    peers = Peers(0, ("host", "host"), None, 1.0, stop_grace=grace)
    stats = [read_stat(each) for each in (os.getpid(), pid)]
    for each, stat in zip((os.getpid(), pid), stats, strict=True):
        assert stat is not None
        peers.processes += (Process(each, stat[1], "here", 0),)
    return peers


# -- ranks of other hosts ---------------------------------------------------------------------------


class Elsewhere:
    """Rank 0 as it sees rank 1 on its host and rank 2 on another one, by what an agent publishes."""

    def __init__(self) -> None:
        own = read_stat(os.getpid())
        assert own is not None
        places = ("here", "here", "there")
        self.peers = Peers(0, places, None, 1.0)
        self.peers.processes = tuple(Process(os.getpid(), own[1], each, 0) for each in places)
        self.peers.patience, self.peers._enough, self.peers._late = 0.0, 1.5, 0.4
        self.findings = self.peers._findings = Findings(mmap.mmap(-1, Findings.size(3)), 3)
        self.watchdog = Watchdog(self.peers)

    def publish(self, state: State, age: float = 0.0, most: float | None = None) -> None:
        self.findings.publish([(2, RankFinding(state, age, age if most is None else most))])


@pytest.mark.parametrize("lives", [False, True])
def test_an_error_of_a_library_waits_for_a_beat_of_every_host_or_its_silence(lives: bool) -> None:
    """However long the agent is kept from running: its word decides, and no time."""
    seen = Elsewhere()
    seen.publish("running", 0.3)
    naps = []

    def nap(_: float) -> None:
        naps.append(time.monotonic())
        if len(naps) == 5:  # later, so that the beat is one that was sent after the doubt
            moment = mock.patch("time.monotonic_ns", return_value=time.monotonic_ns() + 10**9)
            with moment:
                seen.publish("running" if lives else "silent", 0.0 if lives else 1.5)

    with mock.patch("time.sleep", nap):
        error = seen.watchdog.library_error(work(), RuntimeError("connection reset"))
    assert len(naps) == 5
    assert isinstance(error, mcr.PeerLost) != lives
    assert "connection reset" in str(error)
    if isinstance(error, mcr.PeerLost):
        assert (error.ranks, error.seen) == ((2,), "no heartbeat for 1.5 s")


def test_a_beat_that_may_be_older_than_the_error_does_not_speak_for_its_host() -> None:
    seen = Elsewhere()
    seen.peers.suspect([2])
    later = mock.patch("time.monotonic_ns", return_value=time.monotonic_ns() + 10**9)
    with later:
        seen.publish("running", 0.0, most=1.0)  # its agent has not run for a second
        assert seen.peers.in_doubt([1, 2])
        seen.publish("running", 0.0)
        assert not seen.peers.in_doubt([1, 2])


@pytest.mark.parametrize("lives", [False, True])
def test_a_host_whose_beats_stop_after_one_that_spoke_for_it_is_in_doubt_again(lives: bool) -> None:
    """The agent of a host that ends may outlive the rank whose connection has torn by more than a beat."""
    seen = Elsewhere()
    seen.peers.suspect([2])
    with mock.patch("time.monotonic_ns", return_value=time.monotonic_ns() + 10**9):
        seen.publish("running", 0.0)
    assert not seen.peers.in_doubt([1, 2])
    seen.publish("running", 0.5)
    assert seen.peers.in_doubt([1, 2])
    if lives:
        with mock.patch("time.monotonic_ns", return_value=time.monotonic_ns() + 2 * 10**9):
            seen.publish("running", 0.0)
    else:
        seen.publish("running", 1.6)
    assert not seen.peers.in_doubt([1, 2])
    assert (seen.peers.lost(2) is None) == lives


@pytest.mark.parametrize("by_library", [False, True])
def test_a_host_that_becomes_silent_during_a_look_is_named_as_a_whole(by_library: bool) -> None:
    """A look at a rank may take requests to the store, so the next rank is looked at later."""
    seen = Elsewhere()
    seen.peers.processes = (seen.peers.processes[0], *2 * (seen.peers.processes[2],))

    def is_closed(_: GroupBoard, rank: int) -> bool:
        if rank == 2:
            seen.findings.publish([(each, RankFinding("silent", 0.7, 0.7)) for each in (1, 2)])
        return False

    with mock.patch.object(GroupBoard, "is_closed", is_closed):
        if by_library:
            error: Any = seen.watchdog.library_error(work(), RuntimeError("connection reset"))
        else:
            error = seen.watchdog.check(work(), 10 * LONG_WAIT)
    assert isinstance(error, mcr.PeerLost)
    assert (error.ranks, error.seen) == ((1, 2), "no heartbeat for 0.7 s")


def test_an_error_is_no_part_of_an_earlier_doubt() -> None:
    """A beat has come since that; none has since this one."""
    seen = Elsewhere()
    with mock.patch("time.monotonic", return_value=time.monotonic() - 5.0):
        seen.peers.suspect([2])
    seen.publish("running", 1.0)
    seen.peers.suspect([2])
    assert seen.peers.in_doubt([2])


@pytest.mark.parametrize(("heartbeat", "after"), [("auto", 1.4), (0.5, 0.5), (1.0, 1.0), (120.0, 120.0)])
def test_a_suspicion_shortens_no_limit_that_the_program_has_chosen(
    heartbeat: float | str, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "open_findings", lambda *_: Findings(mmap.mmap(-1, Findings.size(2)), 2))
    members = (own_process("here", 0), Process(1, "1", "there", 1))
    roster = SimpleNamespace(members=members, kept=None)
    world = World(0, 2, ("here", "there"), 1.0, JobStore(HashStore()), roster=cast("Any", roster))
    peers = observed(world, DispatchOptions(heartbeat=cast("Any", heartbeat)))
    findings = peers._findings
    assert findings is not None
    findings.publish([(1, RankFinding("running", 0.0, 0.0))])
    peers.suspect([1])
    for age, is_lost in ((after - 0.01, False), (after + 0.01, True)):
        findings.publish([(1, RankFinding("running", age, age))])
        assert (peers.lost(1) is not None) == is_lost, age
    assert peers.patience == pytest.approx(0.2 + min(1.4, after))  # of an error of a library


@pytest.mark.parametrize("leaver", [1, 2])
def test_ranks_that_have_left_without_a_word_are_lost_to_one_that_was_stopped(leaver: int) -> None:
    """All have issued the operation, and the store in which they say why they leave was lost to them."""
    seen, waiting = Elsewhere(), work()
    seen.publish("running")
    with mock.patch("time.monotonic", return_value=time.monotonic()):
        assert seen.watchdog.check(waiting, 10 * LONG_WAIT) is None
        if leaver == 1:
            seen.findings.leave(1)
        else:
            seen.publish("left")
        assert seen.watchdog.check(waiting, 10 * LONG_WAIT) is None  # its last message may be on its way
    waiting.doubted_since -= 0.2
    error = seen.watchdog.check(waiting, 10 * LONG_WAIT)
    assert isinstance(error, mcr.PeerLost)
    assert (error.ranks, error.seen) == ((leaver,), "has left")
    board = waiting.operation.state.board
    with mock.patch.object(board, "is_closed", return_value=True):  # in good order: what it has sent comes
        assert seen.watchdog.check(waiting, 10 * LONG_WAIT) is None
