"""`mcr-plus run --min-ranks`: failed ranks are started again, others keep running, nothing is left over."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from jobs.launch.test_launch import END_LIMIT_S, SHARED_MEMORY, Run, Start, folder, gone, leftovers, start
from ranks import nursery

from mcr_plus.errors import LaunchError
from mcr_plus.launch import commands, scratch
from mcr_plus.launch.channels import Channels
from mcr_plus.launch.commands import Supervised

PROGRAMS = str(Path(__file__).with_name("restarting.py"))

__all__ = ["folder", "start"]  # fixtures


def starts(run: Run) -> list[tuple[int, int]]:
    """(rank, how often it had been started before) of every process, in order of ranks."""
    return sorted(
        (int(rank), int(again)) for rank, again in re.findall(r"start (\d+)\.(\d+) at=", run.text())
    )


def told(run: Run) -> list[str]:
    """Return the launcher's own lines."""
    return [line for line in run.text().splitlines() if line.startswith("mcr-plus:")]


def supervisor_of(run: Run) -> int:
    """Return the pid of a rank's supervisor."""
    for pid in scratch.processes_of(run.job()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"mcr_plus.launch.supervisor" in words:
            return pid
    raise AssertionError("no supervisor")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_a_killed_rank_is_started_again_and_the_others_live_on(start: Start, folder: Path) -> None:
    words = ["--min-ranks", "2", "--restart-failed", "3"]
    run = start("-n", "3", *words, nursery().python, PROGRAMS, "store")
    pids = run.wait_until_up(3)
    os.kill(pids[1], signal.SIGKILL)
    assert run.wait() == 0, run.text()
    assert starts(run) == [(0, 0), (1, 0), (2, 0)]  # the new process has printed what it read instead
    assert "read ['0 was here', '1 was here', '2 was here']\n" in run.text()
    assert told(run) == ["mcr-plus: rank 1 was killed by SIGKILL; started again (1 of 3)"]
    assert gone(pids)
    assert leftovers(folder, run) == []


@pytest.mark.long
def test_the_others_are_not_disturbed(start: Start, tmp_path: Path) -> None:
    run = start("-n", "3", "--min-ranks", "1", "--restart-failed", "2", PROGRAMS, "wait", str(tmp_path))
    pids = run.wait_until_up(3)
    os.kill(pids[0], signal.SIGTERM)
    os.kill(pids[2], signal.SIGKILL)
    again = {int(rank): int(pid) for rank, pid in run.wait_for(r"up rank=(\d+) pid=(\d+)\n", 5)[3:]}
    assert again.keys() == {0, 2}
    assert not gone({1: pids[1]})
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.text()
    assert starts(run) == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    assert sorted(line.partition("; ")[0] for line in told(run)) == [
        "mcr-plus: rank 0 was killed by SIGTERM",
        "mcr-plus: rank 2 was killed by SIGKILL",
    ]
    assert gone(again)


@pytest.mark.long
def test_restarts_are_used_up_and_the_job_goes_on(start: Start, tmp_path: Path) -> None:
    words = ["--min-ranks", "2", "--restart-failed", "1"]
    run = start("-n", "3", *words, nursery().python, PROGRAMS, "fail_and_wait", "3", str(tmp_path))
    run.wait_for("goes on")
    assert run.process.poll() is None
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.text()
    assert starts(run) == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert told(run) == [
        "mcr-plus: rank 1 exited with status 3; started again (1 of 1)",
        "mcr-plus: rank 1 exited with status 3; the job goes on with 2 ranks, no restarts are left",
    ]


@pytest.mark.long
def test_too_few_ranks_end_the_job(start: Start, folder: Path, tmp_path: Path) -> None:
    run = start("-n", "2", "--min-ranks", "2", PROGRAMS, "fail_and_wait", "7", str(tmp_path))
    assert run.wait() == 1
    assert told(run) == [
        "mcr-plus: rank 1 exited with status 7; the job ends: 1 rank left, at least 2 needed",
        "mcr-plus: rank 1 of 2 failed: it exited with status 7, without a word",
    ]
    assert leftovers(folder, run) == []


@pytest.mark.long
def test_a_rank_that_fails_at_once_is_not_started_again_and_again_at_once(start: Start) -> None:
    run = start("-n", "1", "--min-ranks", "1", "--restart-failed", "2", "-m", "no_such_module")
    assert run.wait() == 1
    assert len(told(run)) == 4
    run = start("-n", "2", "--min-ranks", "1", "--restart-failed", "2", PROGRAMS, "fail", "5", "6", "0")
    assert run.wait() == 0, run.text()
    times = [float(at) for at in re.findall(r"start 1\.\d at=(.*)", run.text())]
    assert len(times) == 3
    assert times[2] - times[0] > 1.5  # two seconds, but for how long the first one took to start


@pytest.mark.long
def test_a_rank_that_ended_with_0_is_not_started_again_and_counts(start: Start, tmp_path: Path) -> None:
    words = ["--min-ranks", "2", "--restart-failed", "1"]
    run = start("-n", "2", *words, PROGRAMS, "leave", str(tmp_path))
    pids = run.wait_until_up(2)
    wait_until(lambda: gone({0: pids[0]}))
    os.kill(pids[1], signal.SIGKILL)
    run.wait_for(r"start 1\.1")
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.text()
    assert starts(run) == [(0, 0), (1, 0), (1, 1)]


@pytest.mark.long
@pytest.mark.parametrize("then", ["nothing", "elastic", "reconfigure"])
def test_a_rank_that_nobody_takes_in_fails_a_job_that_goes_on_by_shrink(
    start: Start, tmp_path: Path, then: str
) -> None:
    words = ["--min-ranks", "1", "--restart-failed", "1"]
    run = start("-n", "2", *words, nursery().python, PROGRAMS, "shrinks", then, str(tmp_path))
    assert run.wait() == (then == "nothing"), run.text()
    assert sorted(re.findall(r"\d of \d\n", run.text())) == (
        ["0 of 1\n"] if then == "nothing" else ["0 of 2\n", "1 of 2\n"]
    )
    assert [line.partition(": nobody")[0] for line in told(run)] == [
        "mcr-plus: rank 1 was killed by SIGKILL; started again (1 of 1)",
        *["mcr-plus: rank 0 exited with status 0; the job ends"] * (then == "nothing"),
    ]


@pytest.mark.long
@pytest.mark.parametrize("program", ["wait", "stubborn"])
def test_kill_9_of_the_launcher_ends_ranks_and_leaves_nothing(
    start: Start, folder: Path, tmp_path: Path, program: str
) -> None:
    run = start("-n", "2", "--min-ranks", "1", "--restart-failed", "9", PROGRAMS, program, str(tmp_path))
    pids = run.wait_until_up(2)
    pids[-1] = supervisor_of(run)
    run.process.kill()
    wait_until(lambda: gone(pids))
    assert leftovers(folder, run) == []
    assert len(starts(run)) == 2


@pytest.mark.long
@pytest.mark.parametrize("program", ["wait", "stubborn"])
def test_kill_9_of_the_supervisor_ends_ranks_and_leaves_nothing(
    start: Start, folder: Path, tmp_path: Path, program: str
) -> None:
    run = start("-n", "2", "--min-ranks", "1", "--restart-failed", "9", PROGRAMS, program, str(tmp_path))
    pids = run.wait_until_up(2)
    os.kill(supervisor_of(run), signal.SIGKILL)
    assert run.wait(END_LIMIT_S) == 1
    assert gone(pids)
    assert told(run) == [
        "mcr-plus: the supervisor ended with status -9 before rank 0, 1 did; its last lines:"
    ]
    assert leftovers(folder, run) == []


@pytest.mark.long
def test_kill_9_of_all_processes_and_a_start_with_another_temporary_directory(
    start: Start, folder: Path, tmp_path: Path
) -> None:
    run = start("-n", "2", "--min-ranks", "1", "--restart-failed", "9", PROGRAMS, "wait", str(tmp_path))
    run.wait_until_up(2)
    job = run.job()
    everything = dict(enumerate([run.process.pid, *scratch.processes_of(job)]))
    assert len(everything) >= 4  # with the supervisor
    for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none acts on the death of another one
        for pid in everything.values():
            os.kill(pid, number)
    run.process.wait()
    wait_until(lambda: gone(everything))
    scratch.remove_stale()
    wait_until(lambda: not (SHARED_MEMORY / job).exists())  # another start may be about to remove it
    assert (folder / job).exists()


NO_PROCESS = (1 << 22) + 1  # above the largest pid


@pytest.mark.parametrize("left", ["launcher", "lock", "rank"])
def test_shared_memory_of_jobs_that_live_is_not_removed(left: str) -> None:
    """A launcher without a lock has an older version; a lock without a launcher is another container's."""
    pid = os.getpid() if left == "launcher" else NO_PROCESS
    shm = SHARED_MEMORY / f"mcr-job-{os.getuid()}-{pid}-{time.monotonic_ns():x}-{scratch.kernel()}"
    made = shm.with_name(f".{shm.name}")  # until it is held: other jobs remove leftovers
    made.mkdir(mode=0o700)
    try:
        with ExitStack() as holding:
            if left == "lock":
                holding.callback(os.close, lock := os.open(made, os.O_RDONLY))
                fcntl.flock(lock, fcntl.LOCK_EX)
            if left == "rank":
                named = os.environ | {scratch.JOB_VARIABLE: shm.name}
                rank = holding.enter_context(subprocess.Popen(["sleep", "600"], env=named))
                holding.callback(rank.kill)
            made.rename(shm)
            scratch.remove_stale()
            assert shm.exists()
        scratch.remove_stale()
        if left != "launcher":
            wait_until(lambda: not shm.exists())
    finally:
        for each in (made, shm):
            shutil.rmtree(each, ignore_errors=True)


def test_a_folder_that_was_made_again_before_it_could_be_locked_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launchers take a new folder for a stale one; the second comes once the owner has another folder."""
    folder = tmp_path / f"mcr-job-{os.getuid()}-{NO_PROCESS}-1"
    folder.mkdir()

    def lock(descriptor: int, operation: int) -> None:
        folder.rmdir()
        folder.mkdir()
        (folder / "of a job that lives").touch()

    monkeypatch.setattr(fcntl, "flock", lock)
    scratch._remove_if_stale(folder)
    assert [each.name for each in folder.iterdir()] == ["of a job that lives"]


def test_folders_of_other_hosts_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NFS, a host does not see the locks of another one on folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = scratch.kernel()
    with monkeypatch.context() as there:
        there.setattr(scratch, "boot_id", lambda: "another kernel")
        assert scratch.kernel() != own
        with scratch.create() as theirs:
            there.undo()
            os.close(theirs.locks[0])  # it does not show here
            ours = tmp_path / f"mcr-job-{os.getuid()}-{NO_PROCESS}-1-{own}"
            ours.mkdir()
            scratch.remove_stale()
            assert not ours.exists()
            assert theirs.root.is_dir()
            assert theirs.shm.is_dir()
            theirs.locks = theirs.locks[1:]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EBADF])
def test_a_folder_on_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def lock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", lock)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(LaunchError, match=r"mcr-job-.* cannot be locked: .*; set TMPDIR to a folder"):
        scratch.create()
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_segments_that_another_process_has_open_are_not_orphans() -> None:
    """The maps of another container's process cannot be read; the test stands for such a process."""
    path = SHARED_MEMORY / f"ucx_shm_posix_{os.getpid()}{time.monotonic_ns():x}"
    with path.open("wb") as file:
        try:
            for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK):
                fcntl.fcntl(file, fcntl.F_SETLEASE, kind)
        except OSError as error:
            path.unlink()
            pytest.skip(f"no leases: {error}")
        scratch.remove_orphaned_segments()
        assert path.exists()
    scratch.remove_orphaned_segments()
    wait_until(lambda: not path.exists())  # another start may have asked whether it is open


def test_a_job_whose_second_folder_cannot_be_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_shm_folder", lambda name: tmp_path / "missing" / name)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(LaunchError, match=r"folders .* cannot be made: .*No such file"):
        scratch.create()
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("program", ["wait", "stubborn"])
def test_a_signal_ends_all_ranks(
    start: Start, folder: Path, tmp_path: Path, program: str, number: signal.Signals
) -> None:
    run = start("-n", "2", "--min-ranks", "1", "--restart-failed", "9", PROGRAMS, program, str(tmp_path))
    pids = run.wait_until_up(2)
    run.process.send_signal(number)
    assert run.wait(END_LIMIT_S) == 128 + number
    assert gone(pids)
    assert told(run) == [f"mcr-plus: stopped by {number.name}; all ranks ended"]
    assert leftovers(folder, run) == []


@pytest.mark.long
def test_the_exception_of_a_rank_that_is_started_again_is_one_line(start: Start) -> None:
    words = ["--min-ranks", "1", "--restart-failed", "1", "--tag-output"]
    run = start("-n", "2", *words, PROGRAMS, "raises")
    assert run.wait() == 0, run.text()
    first, line, second = run.text().splitlines()
    assert (first, second) == ("[1] half a line 0", "[1] half a line 1")
    assert re.fullmatch(
        r"\[1\] mcr-plus: rank 1 ended with ValueError: the reason it failed "
        r"\(\S*restarting\.py:\d+, in raises\); started again \(1 of 1\)",
        line,
    )


@pytest.mark.long
def test_the_summary_is_of_the_last_process(start: Start) -> None:
    words = ["--min-ranks", "2", "--restart-failed", "1"]
    run = start("-n", "2", *words, PROGRAMS, "raises_always")
    assert run.wait() == 1
    again, ends, head = told(run)
    assert "ValueError: the reason of start 0 (" in again
    assert "ValueError: the reason of start 1 (" in ends
    assert head == "mcr-plus: rank 1 of 2 failed: it exited with status 1:"
    *_, summary = run.text().partition(head)
    assert summary.splitlines()[-1] == "  ValueError: the reason of start 1"
    assert run.text().count("Traceback") == 1


@pytest.mark.long
def test_whole_tracebacks_on_request(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCR_TRACEBACK", "1")
    run = start("-n", "2", "--min-ranks", "1", "--restart-failed", "1", PROGRAMS, "raises")
    assert run.wait() == 0, run.text()
    assert run.text().count("Traceback (most recent call last)") == 1
    assert told(run) == ["mcr-plus: rank 1 exited with status 1; started again (1 of 1)"]


NAMES = ("MCR_MIN_RANKS", "MCR_SECRET", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_PORT")


@pytest.mark.long
@pytest.mark.parametrize("given", [None, "known to the user alone"])
def test_variables_of_ranks(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    if given is not None:
        monkeypatch.setenv("MCR_SECRET", given)
    run = start(
        "-n", "2", "--min-ranks", "1", "--restart-failed", "1", PROGRAMS, "environment", str(tmp_path), *NAMES
    )
    run.wait_for("MASTER_PORT", 2)
    secrets = set(run.wait_for(r"MCR_SECRET=(.*)"))
    shown = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in scratch.processes_of(run.job()))
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.text()
    found = re.findall(r"(\d\.\d) (\w+)=(.*)", run.text())
    by_name = {name: {process: value for process, each, value in found if each == name} for name in NAMES}
    assert all(values.keys() == {"0.0", "1.0", "1.1"} for values in by_name.values())
    assert all(len(set(values.values())) == 1 for values in by_name.values())
    assert set(by_name["MCR_MIN_RANKS"].values()) == {"1"}
    assert set(by_name["WORLD_SIZE"].values()) == {"2"}
    (secret,) = secrets
    assert secret == given or (given is None and len(secret) == 64)
    assert b"restarting.py" in shown
    assert secret.encode() not in shown


def test_a_new_secret_for_every_job_and_nothing_of_the_job_around() -> None:
    around = {"MCR_MIN_RANKS": "7", "MCR_RESTARTS": "2", "MCR_SECRET": ""}
    with scratch.create() as folders:
        one, other = (
            commands.environment(around, folders, 2, config=None, terminal=None, supervised=Supervised(1))
            for _ in range(2)
        )
        plain = commands.environment(around, folders, 2, config=None, terminal=None)
    assert one["MCR_SECRET"] != other["MCR_SECRET"]
    assert one["MCR_MIN_RANKS"] == "1"
    assert not {"MCR_MIN_RANKS", "MCR_RESTARTS"} & plain.keys()


class Written:
    """Pipes of one rank, written here in an order of the test's choice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[bytes] = []
        self.channels = Channels(folder, 1, lambda *line: self.lines.append(line[2]), merge_errors=True)

    def write(self, name: str, *values: dict[str, Any]) -> None:
        with (self.folder / name).open("ab", buffering=0) as pipe:
            pipe.write(b"".join(json.dumps(value).encode() + b"\n" for value in values))


def of_wrapper(pid: int, code: int | None) -> dict[str, Any]:
    return {"rank": 0, "pid": pid, "code": code, "time": 1.0}


def of_supervisor(code: int, verdict: str, *, again: bool) -> dict[str, Any]:
    return {"rank": 0, "code": code, "time": 1.0, "verdict": verdict, "again": again}


def of_process(pid: int) -> dict[str, Any]:
    return {"pid": pid, "time": 1.0, "error": f"E: {pid}", "text": None, "place": None, "traceback": []}


def test_reports_that_are_read_late_belong_to_their_processes(tmp_path: Path) -> None:
    """The terminal was paused while the rank failed twice."""
    job = Written(tmp_path)
    job.write("error.0", of_process(11), of_process(12))
    job.write("status", of_wrapper(11, None), of_wrapper(11, 1), of_supervisor(1, "again", again=True))
    job.write("status", of_wrapper(12, None), of_wrapper(12, 1), of_supervisor(1, "over", again=False))
    job.channels.drain()
    job.channels.close()
    assert job.lines == [
        b"mcr-plus: rank 0 ended with E: 11; again\n",
        b"mcr-plus: rank 0 ended with E: 12; over\n",
    ]
    (state,) = job.channels.states
    assert (state.pid, state.code, state.report) == (12, 1, of_process(12))


def test_half_a_report_of_a_killed_process_is_dropped(tmp_path: Path) -> None:
    job = Written(tmp_path)
    job.write("status", of_wrapper(11, None))
    job.channels.drain()
    with (tmp_path / "error.0").open("ab", buffering=0) as pipe:
        pipe.write(b'{"pid": 11, "error": "E')
    job.write("status", of_supervisor(-signal.SIGKILL, "again", again=True), of_wrapper(12, None))
    job.channels.drain()
    report = of_process(12) | {"time": time.monotonic()}
    job.write("error.0", report)
    job.channels.drain()
    job.channels.close()
    assert job.lines == [b"mcr-plus: rank 0 was killed by SIGKILL; again\n"]
    assert job.channels.states[0].report == report
