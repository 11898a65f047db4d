"""Ranks that sleep while they wait: when they sleep, which ranks wake them, and that none sleeps for ever."""

from __future__ import annotations

import math
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.backends.shm.wakeup import give_way, may_yield, ring
from mcr_plus.core.environment import quota_cores
from mcr_plus.core.work import JointWork, Work
from mcr_plus.job.process import job
from mcr_plus.rendezvous.mpi_launcher import mpi_usable
from mcr_plus.waiting.futex import Wakeups
from mcr_plus.waiting.policy import Pause, WaitStrategy
from mcr_plus.waiting.rescheduling import ReschedulingThread

LONG = 600.0  # seconds; no test sleeps for so long, or for half of it
RANKS = (3, 4, 7)  # of the job, on one host


@pytest.fixture
def bells() -> list[Wakeups]:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    return [Wakeups(memory, RANKS, rank) for rank in RANKS]


# -- bells ------------------------------------------------------------------------------------------------


def asleep(sleeper: Wakeups, awaited: tuple[int, ...]) -> threading.Thread:
    """Return a thread that sleeps until it is rung."""
    sleeper.arm(awaited)
    thread = threading.Thread(target=sleeper.sleep, args=(LONG,))
    thread.start()
    return thread


@pytest.mark.parametrize("by_compiled_code", [False, True])
def test_the_awaited_rank_wakes_the_sleeper(bells: list[Wakeups], by_compiled_code: bool) -> None:
    first, second, third = bells
    thread = asleep(first, (4,))
    assert second.wanted[0]
    assert not third.wanted[0]
    third.ring()
    ring(third.table)
    assert thread.is_alive()
    ring(second.table) if by_compiled_code else second.ring()
    thread.join(LONG / 2)
    assert not thread.is_alive()
    assert not second.wanted[0]


def test_a_ring_between_arming_and_sleeping_is_not_lost(bells: list[Wakeups]) -> None:
    first, second, third = bells
    first.arm((4, 7))
    third.ring()
    began = time.monotonic()
    first.sleep(LONG)
    assert time.monotonic() - began < LONG / 2
    second.ring()  # first has rung: no rank sleeps, and nothing happens
    assert not second.wanted[0]


def test_other_threads_of_a_rank_are_woken(bells: list[Wakeups]) -> None:
    threads = [asleep(bells[0], (4,)) for _ in range(2)]
    bells[0].ring_own()
    for thread in threads:
        thread.join(LONG / 2)
        assert not thread.is_alive()


def test_ranks_of_other_hosts_have_no_bell(bells: list[Wakeups]) -> None:
    bells[0].arm((0, 5, 3))
    assert not any(each.wanted[0] for each in bells)
    none = Wakeups(None, RANKS, 4)
    assert not none
    assert not none.wanted[0]
    assert none.table == 0
    ring(none.table)


def test_no_ring_is_lost_however_threads_meet(bells: list[Wakeups]) -> None:
    """Two sides hand a counter to each other; each sleeps for long until the other has incremented it."""
    counts, turns = [0, 0], 3000

    def side(me: int) -> None:
        for turn in range(turns):
            if me == 1:
                while counts[0] <= turn:
                    bells[1].arm((3,))
                    if counts[0] <= turn:
                        bells[1].sleep(LONG)
            counts[me] += 1
            ring(bells[me].table)
            while me == 0 and counts[1] <= turn:
                bells[0].arm((4,))
                if counts[1] <= turn:
                    bells[0].sleep(LONG)

    threads = [threading.Thread(target=side, args=(me,), daemon=True) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG / 2)
    assert counts == [turns, turns]


# -- observed load -----------------------------------------------------------------------------------------


def seen(tmp_path: Path, text: str) -> int:
    (tmp_path / "file").write_text(text)
    return os.open(tmp_path / "file", os.O_RDONLY)


def waiting(policy: Any = "auto", **options: Any) -> WaitStrategy:
    found = WaitStrategy(policy, **options)
    os.close(found._loadavg)
    found._loadavg = -1
    return found


def test_sleeping_ranks_are_not_counted_as_running(tmp_path: Path, bells: list[Wakeups]) -> None:
    """Three ranks share two cores. Three threads run: all of them, or one and two strangers."""
    found = waiting(ranks=3, bells=bells[0])
    found._cores, found.own_cores = 2, False
    found._loadavg = seen(tmp_path, "0.5 0.4 0.3 3/200 4711\n")
    for now in (100.0, 100.005, 100.01):
        found.check_load(now, 0.0, 0.0)
        assert found.calm
    for sleeper in bells[1:]:
        sleeper.arm((3,))
    assert bells[0].asleep() == 2
    found.check_load(100.015, 0.0, 0.0)
    found.check_load(100.02, 0.0, 0.0)  # 5 ms later: checks of ranks that yield lie a time slice apart
    assert not found.calm
    bells[0].ring()
    assert bells[0].asleep() == 0
    found.check_load(101.0, 0.0, 0.0)
    assert found.calm


def test_slow_first_reads_of_loadavg_do_not_disable_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[WaitStrategy] = []
    slow = 4

    def slow_at_first(waiting: WaitStrategy) -> bool:
        reads.append(waiting)
        if len(reads) < slow:
            time.sleep(0.001)
        return False

    monkeypatch.setattr(WaitStrategy, "_too_many_run", slow_at_first)
    found = WaitStrategy("auto")
    assert found._loadavg >= 0
    found.close()
    slow = 100
    assert WaitStrategy("auto")._loadavg == -1


def test_a_yield_that_costs_the_core_is_the_last_before_a_check(bells: list[Wakeups]) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])  # on the same core
    try:
        deadline = time.monotonic() + LONG / 2
        while may_yield(bells[0].table) and time.monotonic() < deadline:
            give_way(bells[0].table)
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)
    assert not may_yield(bells[0].table)
    assert may_yield(bells[1].table)
    bells[0].set_calm(calm=True)
    assert may_yield(bells[0].table)


@pytest.mark.parametrize("policy", ["auto", "yield"])
def test_polls_yield_at_the_beginning_of_a_wait_alone(policy: Any, bells: list[Wakeups]) -> None:
    """Ranks that yield all the time can starve others (decision 16); `wait: yield` wants it."""
    found = waiting(policy, bells=bells[0])
    found.own_cores = False
    pause = Pause(found, True, False, RANKS)
    for waited, yields in ((0.001, True), (0.003, policy == "yield"), (0.001, True)):
        pause.idle(waited)  # a wait of the engine
        found.check_load(100.0, 0.0, 0.0)
        assert found.yields == may_yield(bells[0].table) == yields
    found.may_yield(0.003)  # the program polls
    assert found.yields == may_yield(bells[0].table) == (policy == "yield")


def test_more_threads_than_cores_end_the_calm_for_a_while(tmp_path: Path) -> None:
    found = waiting()
    found.check_load(100.0, 0.0, 0.0)
    assert found.calm
    found._loadavg = seen(tmp_path, f"0.5 0.4 0.3 {found._cores + 1}/200 4711\n")
    found.check_load(101.0, 0.0, 0.0)
    assert found.calm  # it may be for a moment
    found.check_load(102.0, 0.0, 0.0)
    assert found.calm  # and for another one
    found.check_load(102.001, 0.0, 0.0)
    assert not found.calm
    found.check_load(102.012, 0.0, 0.0)  # once the load is forgotten, one check is enough
    assert not found.calm
    os.close(found._loadavg)
    found._loadavg = seen(tmp_path, f"0.5 0.4 0.3 {found._cores}/200 4711\n")
    found.check_load(102.013, 0.0, 0.0)
    assert not found.calm
    found.check_load(103.0, 0.0, 0.0)
    assert found.calm
    found.close()


def test_a_core_that_is_lost_while_polling_ends_the_calm() -> None:
    found = waiting()
    found.check_load(100.0, 0.001, 0.00099)
    assert found.calm
    found.check_load(100.0, 0.002, 0.001)
    assert not found.calm


def test_a_peer_that_waits_for_a_core_ends_the_calm(tmp_path: Path) -> None:
    found = waiting()
    descriptor = seen(tmp_path, "5000000 1000000 7\n")
    found._peers = {descriptor: (0.0, 0)}
    found.check_load(100.0, 0.0, 0.0)
    assert found.calm  # the first check has nothing to compare with
    (tmp_path / "file").write_text("5000000 51000000 8\n")
    found.check_load(100.1, 0.0, 0.0)
    assert not found.calm
    found.check_load(101.0, 0.0, 0.0)
    assert found.calm
    found.close()


def test_explicit_wait_policies_override_measured_load(bells: list[Wakeups]) -> None:
    for policy, calm, sleeps in (
        ("spin", True, False),
        ("yield", True, False),
        ("sleep", False, True),
        ("auto", True, False),
    ):
        found = waiting(policy, bells=bells[0])
        assert found.calm == calm
        assert Pause(found, True, True, RANKS).before(time.monotonic(), 0.0) == sleeps
        assert not Pause(found, False, False, RANKS).before(time.monotonic(), 0.0)  # no rank would ring
    short = waiting(short=True, bells=bells[0])
    short.check_load(100.0, 0.0, 0.0)
    assert Pause(short, True, True, RANKS).before(time.monotonic(), 0.0)


def test_ranks_that_share_cores_are_no_other_work(tmp_path: Path, bells: list[Wakeups]) -> None:
    found = waiting(ranks=1000, bells=bells[0])
    for runnable, calm in ((1000, True), (1001, False)):
        os.close(found._loadavg) if found._loadavg >= 0 else None
        found._loadavg = seen(tmp_path, f"0.5 0.4 0.3 {runnable}/2000 4711\n")
        found.check_load(100.0, 0.001, 0.0)
        found.check_load(100.001, 0.001, 0.0)
        assert found.calm == calm
        assert may_yield(bells[0].table) == calm
    found.close()


def test_quotas_of_cgroups_are_cores(tmp_path: Path) -> None:
    own = tmp_path / "proc/self/cgroup"
    own.parent.mkdir(parents=True)
    own.write_text("9:name=systemd:/\n4:cpu,cpuacct:/box\n0::/slice/box\n")
    assert quota_cores(tmp_path) == math.inf
    two = tmp_path / "sys/fs/cgroup/slice"
    (two / "box").mkdir(parents=True)
    (two / "cpu.max").write_text("250000 100000\n")
    (two / "box/cpu.max").write_text("max 100000\n")
    assert quota_cores(tmp_path) == 2.5
    one = tmp_path / "sys/fs/cgroup/cpu/box"
    one.mkdir(parents=True)
    (one / "cpu.cfs_quota_us").write_text("-1\n")
    (one / "cpu.cfs_period_us").write_text("100000\n")
    assert quota_cores(tmp_path) == 2.5
    (one / "cpu.cfs_quota_us").write_text("150000\n")
    assert quota_cores(tmp_path) == 1.5
    assert quota_cores(tmp_path / "nowhere") == math.inf


# -- on ranks ---------------------------------------------------------------------------------------------


def configuration(timeout: str = "60s") -> dict[str, Any]:
    return {"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"wait": "sleep", "timeout": timeout}}]}


def many(backends: list[str], calls: int) -> dict[str, Any]:
    """Run on ranks: operations in quick succession; all ranks sleep in between."""
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    with mcr.init(configuration(), backends=backends) as comm:
        rank, size = comm.rank, comm.size
        for backend in backends:
            for call in range(calls):
                x = torch.full((1 + call % 5,), float(rank + call))
                comm.all_reduce(x, backend=backend)
                assert x[-1] == size * call + size * (size - 1) / 2
            large = [torch.full((1 << 19,), rank + 1.0 + place) for place in range(3)]
            works = [comm.all_reduce(each, backend=backend, async_op=True) for each in large]
            y = torch.full((3,), float(rank))
            if size > 1:
                comm.send(y, (rank + 1) % size, backend=backend) if rank % 2 == 0 else None
                z = torch.empty(3)
                comm.recv(z, (rank - 1) % size, backend=backend)
                comm.send(y, (rank + 1) % size, backend=backend) if rank % 2 else None
                assert z[0] == (rank - 1) % size
            for work in works:
                assert work is not None
                work.wait()
            for place, each in enumerate(large):
                assert each[0] == each[-1] == size * (size + 1) / 2 + size * place
    return {"switches": resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switches}


@pytest.mark.parametrize("ranks", [2, 4])
def test_sleeping_waits_give_correct_results_and_wake_every_rank(ranks: int) -> None:
    backends = ["msccl", "mpi"] if mpi_usable() else ["msccl"]
    for result in run_ranks(many, ranks, args=[backends, 300]):
        assert result.value["switches"] > 100


def test_looks_at_a_library_with_threads_become_rare_in_a_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    found = WaitStrategy("auto")
    pause = Pause(found, False, False, ())
    for waited in (0.0025, 0.064, 0.128, 100.0):
        pause.idle(waited)
    found.close()
    assert slept == pytest.approx([20e-6, 0.5e-3, 1e-3, 2e-3])


def naps(wait: str) -> list[int]:
    """Run small operations on ranks for two seconds; return their number and the number of sleeps.

    For longer where it has slept rarely, but with `spin`: where much else runs, few operations are done.
    """
    stages = [{"select": {}}, {"dispatch": {"wait": wait}}]
    with mcr.init({"version": 1, "pipeline": stages}, backends=["msccl"]) as comm:
        is_over, calls, end = torch.zeros(2), 0, time.monotonic() + 2.0
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        slept = 0
        while not is_over[0]:
            slept = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switches
            late = time.monotonic() - end
            is_over[0] = float(late > (0.0 if slept > 150 or wait == "spin" else 30.0))
            comm.all_reduce(is_over, mcr.MIN)
            calls += 1
        return [calls, slept]


@pytest.mark.long
def test_waits_sleep_beside_other_work() -> None:
    """Waits sleep by default; with `spin` they never do. The other work takes all cores."""
    busy = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(busy, stdin=subprocess.DEVNULL) for _ in range(os.cpu_count() or 1)]
    try:
        counts = {
            wait: [result.value for result in run_ranks(naps, 2, args=[wait], via="torch")]
            for wait in ("auto", "spin")
        }
    finally:
        for other in others:
            other.kill()
            other.wait()
    slept = {wait: sum(times for _, times in found) for wait, found in counts.items()}
    assert slept["auto"] > 200, counts
    assert slept["spin"] < slept["auto"] / 4, counts


def deserted(how: str) -> str:
    """Run on ranks: the last one dies or stops while the others sleep; return the others' errors."""
    comm = mcr.init(configuration("3s"), backends=["msccl"])
    x = torch.ones(4)
    comm.all_reduce(x)
    if comm.rank == comm.size - 1:
        comm.all_reduce(x)  # the others are in the loop below
        if how == "stops":
            end = ["sh", "-c", f"sleep 8; kill -9 {os.getpid()}"]
            quiet = subprocess.DEVNULL
            subprocess.Popen(end, stdin=quiet, stdout=quiet, stderr=quiet)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGSTOP if how == "stops" else signal.SIGKILL)
    try:
        for _ in range(2):
            comm.all_reduce(x)
    except mcr.McrError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.short("dies")
@pytest.mark.parametrize(
    ("how", "told"), [("dies", "PeerLost.*rank 2 has died"), ("stops", "PeerLost.*rank 2 is stopped")]
)
def test_sleeping_ranks_detect_dead_and_stopped_peers(how: str, told: str) -> None:
    results = run_ranks(deserted, 3, args=[how], via="torch", check=False)
    for result in results[:2]:
        assert result.value is not None
        assert re.search(told, result.value), result.value


def test_other_work_is_remembered_for_longer_the_longer_it_lasts() -> None:
    waiting = WaitStrategy("auto")
    with mock.patch.object(waiting, "_too_many_run", return_value=True):
        spans, now = [], 100.0
        while now < 103.0:  # rare waits that see other work for long enough to count
            waiting.check_load(now, 0.0, 0.0)
            waiting.check_load(now + 1e-3, 0.0, 0.0)
            assert not waiting.calm
            spans.append(round(waiting._busy_until - (now + 1e-3), 3))
            now = waiting._busy_until + 1e-3
        assert spans[0] == 0.01
        assert spans == sorted(spans)
        assert spans[-1] == 0.3
        waiting.check_load(now + 10.0, 0.0, 0.0)  # after a while without waits the count begins again
        waiting.check_load(now + 10.001, 0.0, 0.0)
        assert round(waiting._busy_until - (now + 10.001), 3) == 0.01
    waiting.close()


def test_a_second_waiter_returns_once_the_first_has_copied_the_results_out() -> None:
    begun, go_on = threading.Event(), threading.Event()
    copied = []

    def copy_out() -> None:
        begun.set()
        assert go_on.wait(LONG)
        copied.append(True)

    def waited(work: Work) -> list[bool]:
        work.wait()
        return list(copied)

    work = JointWork([], "all_reduce", nbytes=16).then(copy_out)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(waited, work)
        assert begun.wait(LONG)
        second = pool.submit(waited, work)
        early, _ = wait([second], 0.2)
        go_on.set()
        assert not early
        assert first.result(LONG) == second.result(LONG) == [True]


# -- relays ----------------------------------------------------------------------------------------------


def test_hand_overs_of_several_threads_all_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcr_plus.waiting.rescheduling._LONGEST", LONG)  # one without an answer is seen
    relay, turns = ReschedulingThread(), 500

    def call() -> None:
        for _ in range(turns):
            relay.hand_over()

    threads = [threading.Thread(target=call, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG / 2)
        assert not thread.is_alive()
    relay.close()
    assert not relay._thread.is_alive()


def test_an_answer_that_came_too_late_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcr_plus.waiting.rescheduling._LONGEST", LONG)
    relay = ReschedulingThread()
    relay._number = 1  # a hand-over that has given up
    relay._answers.put(1)
    relay.hand_over()
    assert relay._answers.empty()
    relay.close()


def test_a_handler_of_a_signal_may_end_relays() -> None:
    """A program may leave its job on SIGTERM; the signal comes anywhere in a hand-over."""
    relays: list[ReschedulingThread] = []
    before = signal.signal(signal.SIGALRM, lambda *_: relays.pop().close())
    try:
        for turn in range(200):
            relay = ReschedulingThread()
            relays.append(relay)
            signal.setitimer(signal.ITIMER_REAL, 200e-6 + 7e-6 * turn)
            while relays:
                relay.hand_over()
            assert not relay._thread.is_alive()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("seconds", [30e-6, 10e-3])
def test_relays_are_rare_while_another_thread_has_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, bells: list[Wakeups], seconds: float
) -> None:
    """Each relay would wait until the thread frees the interpreter; only relays and calls take time."""
    now, relays = 100.0, 0
    monkeypatch.setattr("mcr_plus.waiting.policy.time", mock.Mock(monotonic=lambda: now))
    found = waiting("sleep", bells=bells[0])

    def hand_over() -> None:
        nonlocal now, relays
        now, relays = now + seconds, relays + 1

    found._relay = mock.Mock(hand_over=hand_over)
    while now < 110.0:
        found.relay()
        now += 500e-6
    share = relays * seconds / 10.0
    assert share < 0.03 if seconds > 1e-3 else share > 0.05
    monkeypatch.setattr(found._relay, "hand_over", lambda: None)
    now += 10.0
    found.relay()
    before = found._next_relay
    now += 500e-6
    found.relay()
    assert found._next_relay > before, "as often as before"


def _interrupted_relays() -> list[Any]:
    """Run on ranks: a handler of a signal raises during a relay, after the operation."""
    mcr.init({"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"wait": "sleep"}}]})
    value, runtime = torch.arange(3.0) + mcr.get_rank(), job.runtime
    assert runtime is not None
    engine = runtime.engine
    usual, raised, results = engine.waiting.relay, 0, []

    def relay() -> None:
        raise TimeoutError("the program's")

    mcr.all_reduce(torch.zeros(3))  # by the slow path, as the first of its kind
    calls: list[Callable[[torch.Tensor], object]] = [
        mcr.all_reduce,
        lambda x: mcr.all_gather_into_tensor(torch.empty(6), x),
    ]
    for call in calls:
        call(value.clone())
        for _ in range(3):
            mcr.barrier()
            with mock.patch.object(engine.waiting, "relay", relay):
                try:
                    call(value.clone())
                except TimeoutError:
                    raised += 1
            out = value.clone()
            mcr.all_reduce(out)
            results.append(out.tolist())
    mcr.finalize()
    assert engine.waiting.relay == usual
    return [raised, results, engine.failed]


def test_an_exception_during_a_relay_does_not_fail_the_operation() -> None:
    for result in run_ranks(_interrupted_relays, 2):
        raised, results, failed = result.value
        assert raised > 0
        assert results == [[1.0, 3.0, 5.0]] * 6
        assert not failed


def test_relays_only_beside_other_work(bells: list[Wakeups]) -> None:
    calm, asleep = waiting(bells=bells[0]), waiting("sleep", bells=bells[0])
    alone = waiting("sleep")  # on its host: it has no bells
    for each in (calm, asleep, alone):
        each.relay()
    assert calm._relay is None
    for each in (asleep, alone):
        assert each._relay is not None
        thread = each._relay._thread
        each.close()
        assert not thread.is_alive()
