"""Ranks that die, stop or do not come: the others learn in time which ranks they are, and end well.

`ulfm` is Open MPI with fault tolerance: its launcher does not end the survivors of a dead rank. `torch`
starts ranks without a launcher.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.launch.test_launch import END_LIMIT_S, Start, folder, gone, is_loopback, leftovers, start
from ranks import RankResult, Via, has_come, meet, run_ranks, stop_until, wait_for_ranks

import mcr_plus as mcr
from mcr_plus.launch import loopback, scratch
from mcr_plus.rendezvous.mpi_launcher import mpi_flavour, mpi_usable

DEADLINE_S = 3.0  # of operations with ranks that live and do not come
LONG_S = 90.0  # the deadline of jobs with lost ranks; no test waits for it
LIMIT_S = 45.0  # on a machine with much else to do; benchmarks/bench_failures.py measures
START_LIMIT_S = 240.0
VICTIM = 1

__all__ = ["folder", "start"]  # fixtures

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")


def _has_fault_tolerance() -> bool:
    launcher = mpi_flavour() if mpi_usable() else None
    return launcher is not None and launcher.flavour == "openmpi" and launcher.major >= 5


survivors = pytest.mark.parametrize(
    "via",
    [
        pytest.param(
            "ulfm", marks=pytest.mark.skipif(not _has_fault_tolerance(), reason="needs Open MPI 5 or later")
        ),
        "torch",
    ],
)


def configuration(deadline: float = DEADLINE_S, progress: str = "caller") -> dict[str, Any]:
    dispatch = {"timeout": f"{deadline}s", "progress": progress}
    return {"version": 1, "pipeline": [{"select": {}}, {"dispatch": dispatch}]}


def libraries(via: str) -> list[str]:
    return ["gloo", "msccl"] if via == "torch" else ["mpi", "gloo", "msccl"]


# -- on ranks -------------------------------------------------------------------------------------


def _stop() -> None:
    """SIGSTOP, until the survivors have been told; then this process ends."""
    stop_until("told", 2, "KILL")


def _raise() -> None:
    raise ValueError("the reason it failed")


FAULTS: dict[str, Callable[[], object]] = {
    "never calls": lambda: wait_for_ranks("told", 2),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": _stop,
    "exits": lambda: sys.exit(0),
    "raises": _raise,
}


def fault(name: str, victim: int, via: str, progress: str) -> dict[str, dict[str, Any]]:
    """Run on ranks: one drops out; the others wait for it in every way, each in a group of its own."""
    deadline = LONG_S if name in ("SIGKILL", "SIGSTOP") else DEADLINE_S
    mcr.init(configuration(deadline, progress=progress), backends=libraries(via))
    everyone = list(range(mcr.get_world_size()))
    forms: dict[str, Callable[[mcr.Communicator, str], Callable[[], object]]] = {
        "sync": lambda group, backend: lambda: group.all_reduce(torch.ones(4), backend=backend),
        "async": lambda group, backend: lambda: _start(group, backend).wait(),
        "persistent": lambda group, backend: group.persistent("all_reduce", torch.ones(4), backend=backend),
        "receive": lambda group, backend: lambda: group.recv(torch.ones(4), victim, backend=backend),
    }
    waits = {}
    for backend in libraries(via):
        for form, prepare in forms.items():
            group = mcr.new_group(everyone)
            waits[f"{backend} {form}"] = (group, prepare(group, backend))
            group.all_reduce(torch.ones(4), backend=backend)
    meet("before the fault", len(everyone))
    if mcr.get_rank() == victim:
        FAULTS[name]()
        return {}
    with ThreadPoolExecutor(len(waits)) as pool:
        futures = {name: pool.submit(_attempt, *wait) for name, wait in waits.items()}
        found = {name: future.result() for name, future in futures.items()}
    has_come("told")
    return found


def _start(group: mcr.Communicator, backend: str) -> mcr.Work:
    work = group.all_reduce(torch.ones(4), async_op=True, backend=backend)
    assert work is not None
    return work


def _attempt(group: mcr.Communicator, run: Callable[[], object]) -> dict[str, Any]:
    group.take_over()
    began = time.monotonic()
    try:
        run()
    except mcr.McrError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
    return {"error": None, "text": "", "seconds": time.monotonic() - began}


def patience(via: str) -> list[dict[str, Any]]:
    """Run on ranks: rank 1 comes late; rank 0 gives up first, and waits again."""
    mcr.init(configuration(LONG_S), backends=libraries(via))
    found = []
    for backend in libraries(via):
        value = torch.full((4,), float(mcr.get_rank() + 1))
        mcr.all_reduce(torch.ones(4), backend=backend)
        mcr.barrier(backend=backend)
        began = time.monotonic()
        if mcr.get_rank() == 1:
            wait_for_ranks(f"gave up {backend}", 1)
        work = mcr.all_reduce(value, async_op=True, backend=backend)
        assert work is not None
        text, gave_up = "", 0.0
        if mcr.get_rank() == 0:
            try:
                work.wait(timeout=0.2)
            except mcr.CommTimeout as error:
                text, gave_up = str(error), time.monotonic() - began
            has_come(f"gave up {backend}")
        work.wait()
        found.append({"text": text, "gave up": gave_up, "value": value.tolist()})
        mcr.all_reduce(value, backend=backend)
    return found


def departures(via: str) -> dict[str, dict[str, Any]]:
    """Run on ranks: ranks 1 and 2 leave in good order; then rank 0 sends to them and receives from them."""
    mcr.init(configuration(LONG_S), backends=libraries(via))
    rank = mcr.get_rank()
    groups = {
        (form, backend): mcr.new_group([0, 1, 2])
        for form in ("sent before", "receive", "send", "any of two", "any of none")
        for backend in libraries(via)
    }
    for (form, backend), group in groups.items():
        if form == "sent before" and rank == 1:
            group.isend(torch.arange(5.0), 0, backend=backend)
    mcr.barrier()
    if rank == 1:
        has_come("its end")
        mcr.finalize()
        return {}
    wait_for_ranks("its end", 1)
    time.sleep(0.2)  # it has left by then, or leaves while it is waited for
    found = {}
    for (form, backend), group in groups.items():
        if rank == 0:
            found[f"{backend} {form}"] = _attempt_message(form, backend, group)
        elif form == "any of two":
            group.send(torch.full((5,), 2.0), 0, backend=backend)
    if rank == 2:
        mcr.finalize()
    return found


def _attempt_message(form: str, backend: str, group: mcr.Communicator) -> dict[str, Any]:
    value = torch.full((5,), -1.0)
    if form == "send":
        outcome = _attempt(group, lambda: group.send(torch.ones(1 << 22), 1, backend=backend))
    else:
        source = None if "any" in form else 1
        outcome = _attempt(group, lambda: group.recv(value, source, backend=backend))
    return {**outcome, "value": value.tolist()}


def exits(status: int | None) -> dict[str, Any]:
    """Run on ranks: rank 1 leaves the block of the world by `sys.exit`; return the error of rank 0."""
    found: dict[str, Any] = {}
    with suppress(SystemExit), mcr.init(configuration(LONG_S)) as world:
        mcr.all_reduce(torch.ones(3))
        if world.rank == 1:
            sys.exit(status)
        found = _attempt(world, lambda: mcr.all_reduce(torch.ones(3)))
    return found


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (0, "rank 1 has left without issuing it"),
        (None, "rank 1 has left"),
        (3, "left the job after an error"),
    ],
)
def test_an_exit_with_success_is_no_error(status: int | None, why: str) -> None:
    first, _ = run_ranks(exits, 2, args=[status], via="torch", timeout=START_LIMIT_S)
    assert first.value["error"] == "BackendError"
    assert why in first.value["text"]


@pytest.mark.short("raises-1-ulfm", "SIGKILL-1-torch")
@survivors
@pytest.mark.parametrize(
    ("name", "victim"),
    # Under mpirun rank 0 is the server of the job's store.
    [*((name, VICTIM) for name in FAULTS), ("SIGKILL", 0), ("SIGSTOP", 0)],
)
def test_survivors_report_the_missing_ranks(name: str, victim: int, via: Via) -> None:
    check_survivors(name, victim, via, "caller")


@pytest.mark.long
def test_messages_of_ranks_that_have_left() -> None:
    via: Via = "mpi" if mpi_usable() else "torch"
    first, *_ = run_ranks(
        departures, 3, args=[via], via=via, timeout=START_LIMIT_S, check=False, teardown=True
    )
    assert first.returncode == 0, first.stderr
    for form, outcome in first.value.items():
        if "sent before" in form or "two" in form:
            expected = [2.0] * 5 if "two" in form else [0.0, 1.0, 2.0, 3.0, 4.0]
            assert (outcome["error"], outcome["value"]) == (None, expected), (form, outcome)
        else:
            assert outcome["error"] == "BackendError", (form, outcome)
            assert outcome["seconds"] <= LIMIT_S, (form, outcome)
            assert "rank 1 has left" in outcome["text"], (form, outcome)
            assert ("rank 2 has left" in outcome["text"]) == ("none" in form), (form, outcome)


@pytest.mark.long
@pytest.mark.skipif(not mpi_usable(), reason="needs MPI")
@pytest.mark.parametrize("name", ["never calls", "SIGKILL"])
def test_survivors_report_missing_ranks_beside_a_progress_thread(name: str) -> None:
    via: Via = "ulfm" if _has_fault_tolerance() else "mpi"
    if via == "mpi" and name == "SIGKILL":
        pytest.skip("this MPI's launcher ends the job when a rank dies")
    check_survivors(name, VICTIM, via, "thread")


def check_survivors(name: str, victim: int, via: Via, progress: str) -> None:
    args = [name, victim, via, progress]
    results = run_ranks(fault, 3, args=args, via=via, timeout=START_LIMIT_S, check=False, teardown=True)
    others = [result for result in results if result.rank != victim]
    assert [result.returncode for result in others] == [0, 0], _endings(results)
    expected = ("PeerLost",) if name in ("SIGKILL", "SIGSTOP") else ("CommTimeout", "BackendError")
    for result in others:
        assert len(result.value) == 4 * len(libraries(via))
        for form, outcome in result.value.items():
            assert outcome["error"] in expected, (form, outcome)
            assert outcome["seconds"] <= LIMIT_S, (form, outcome)
            assert re.search(rf"rank {victim}\b|ranks: \[{victim}\]", outcome["text"]), (form, outcome)
            assert ("recv" if "receive" in form else "all_reduce") in outcome["text"], (form, outcome)


def _endings(results: list[RankResult]) -> str:
    return "\n".join(
        f"rank {result.rank}: {result.returncode}\n{result.stderr[-2000:]}" for result in results
    )


@pytest.mark.long
@pytest.mark.parametrize("via", [pytest.param("mpi", marks=needs_mpi), "torch"])
def test_wait_can_be_repeated_after_its_timeout(via: Via) -> None:
    first, second = run_ranks(patience, 2, args=[via], via=via, timeout=START_LIMIT_S)
    for mine, theirs in zip(first.value, second.value, strict=True):
        assert 0.2 <= mine["gave up"] < LIMIT_S
        assert "missing ranks: [1]" in mine["text"]
        assert mine["value"] == theirs["value"] == [3.0] * 4


# -- ends -----------------------------------------------------------------------------------------

_EXIT = """
import sys
import torch
import mcr_plus as mcr

via, ending = sys.argv[1:]
comm = mcr.init(backends=["gloo", "msccl"] if via == "torch" else ["mpi", "gloo", "msccl"])
for backend in mcr.get_backends():
    x = torch.ones(1024)
    mcr.all_reduce(x, backend=backend)
    work = mcr.all_reduce(x, async_op=True, backend=backend)
    work.wait()
    mcr.new_group([1, 0]).broadcast(x, 0, backend=backend)
    if comm.rank == 0:
        mcr.isend(x, 1, backend=backend)
    else:
        mcr.recv(x, 0, backend=backend)
    mcr.all_reduce(x, async_op=True, backend=backend)
if ending == "finalize":
    mcr.finalize()
print("end", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "count",
    [int(os.environ.get("MCR_TEST_EXITS", "1")), pytest.param(50, marks=pytest.mark.slow, id="50")],
)
@pytest.mark.parametrize("ending", ["finalize", "no finalize"])
@pytest.mark.parametrize("via", [pytest.param("mpi", marks=needs_mpi), "torch"])
def test_job_with_pending_operations_exits_cleanly(tmp_path: Path, via: str, ending: str, count: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(_EXIT)
    command = [
        sys.executable,
        "-m",
        "mcr_plus.cli.main",
        "run",
        "-n",
        "2",
        "--via",
        via,
        str(program),
        via,
        ending,
    ]
    runs = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(count)]
    assert [run.returncode for run in runs] == [0] * count, [run.stderr for run in runs if run.returncode]
    assert [run.stdout for run in runs] == ["end\nend\n"] * count
    said = re.compile(r"rank [01]: asynchronous operations were never waited for: .*\n")
    assert [said.sub("", run.stderr) for run in runs] == [""] * count
    assert [len(said.findall(run.stderr)) for run in runs] == [2] * count


_KILLED = """
import os, signal, time
import torch
import mcr_plus as mcr

comm = mcr.init()
value = torch.ones(1 << 18)
for backend in mcr.get_backends():
    mcr.all_reduce(value, backend=backend)
print(f"up rank={comm.rank} pid={os.getpid()}", flush=True)
for _ in range(100_000):
    for backend in mcr.get_backends():
        mcr.all_reduce(value, backend=backend)
"""


@pytest.mark.long
@pytest.mark.parametrize("via", [pytest.param("mpi", marks=needs_mpi), "torch"])
def test_kill_9_in_the_middle_leaves_nothing(start: Start, folder: Path, tmp_path: Path, via: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(_KILLED)
    run = start("-n", "3", "--via", via, str(program))
    pids = run.wait_until_up(3)
    job = run.job()
    listening = [entry for pid in scratch.processes_of(job) for entry in loopback.listeners(pid)]
    assert listening, "nothing listens: this test looks at the wrong processes"
    assert [entry for entry in listening if not is_loopback(entry.address)] == []
    os.kill(pids[VICTIM], signal.SIGKILL)
    assert run.wait(END_LIMIT_S) == 1
    assert f"rank {VICTIM} of 3 failed: it was killed by SIGKILL" in run.text()
    assert gone(pids)
    assert scratch.processes_of(job) == []
    assert leftovers(folder, run) == []


_LEAVES = f"""
import sys
sys.path.append({str(Path(__file__).parents[2] / "support")!r})
import programs
programs.end_together(first=1)
import torch
import mcr_plus as mcr

comm = mcr.init()
value = torch.ones(4)
if sys.argv[1] == "in a block":
    with comm:
        mcr.all_reduce(value)
        if comm.rank == 1:
            sys.exit(3)
        mcr.all_reduce(value)
mcr.all_reduce(value)
if comm.rank == 1:
    sys.exit(3)
mcr.all_reduce(value)
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["in a block", "outside"])
@pytest.mark.parametrize("via", [pytest.param("mpi", marks=needs_mpi), "torch"])
def test_launcher_names_the_rank_that_left_first(start: Start, tmp_path: Path, via: str, how: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(_LEAVES)
    run = start("-n", "3", "--via", via, str(program), how)
    assert run.wait() == 1
    assert "rank 1 has" in run.text()
    told = [line for line in run.text().splitlines() if line.startswith("mcr-plus:")]
    assert told[0] == "mcr-plus: rank 1 of 3 failed: it exited with status 3, without a word"
