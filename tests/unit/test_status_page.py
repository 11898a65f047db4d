"""Status pages: their form, what readers make of broken ones, and the command without a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
from command import mcr_plus, mcr_plus_process

from mcr_plus.core import stacks
from mcr_plus.core.proc import read_stat, tracer_of
from mcr_plus.core.stacks import stack_of
from mcr_plus.errors import InvalidArgument
from mcr_plus.hosts import page as pages
from mcr_plus.hosts.page import LAYOUT, NAME, Page, Unreadable, page_of, read
from mcr_plus.observe.findings import clean, condition, findings
from mcr_plus.observe.job_status import GroupTraffic, Line, Member, ObservedJob, RankWait, survey
from mcr_plus.observe.status import Drawing, StatusThread


def about(**changes: Any) -> dict[str, Any]:
    """The description of a job of two ranks, of which this process is rank 0, and the other has died."""
    stat = read_stat(os.getpid())
    assert stat is not None
    described = {
        "job": f"unit{os.getpid()}",
        "rank": 0,
        "hosts": ["here", "here"],
        "processes": [[os.getpid(), stat[1]], [1, "0"]],
        "elsewhere": [],
        "began": time.time(),
    }
    return {**described, **changes}


def picture(**changes: Any) -> dict[str, Any]:
    drawn = {
        "at": time.monotonic(),
        "active": time.monotonic(),
        "waits": [],
        "frames": [["step", "/somewhere/train.py", 71]],
        "program": [0],
        "call": "",
        "groups": [],
        "more_groups": 0,
        "error": "",
        "elsewhere": {},
    }
    return {**drawn, **changes}


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page(about(), "9.8.7")
    yield made
    made.close()


def descriptor(page: Page) -> int:
    return page.descriptor


def mine() -> ObservedJob | None:
    return next((job for job in survey().jobs if job.id == f"unit{os.getpid()}"), None)


def test_the_latest_picture_is_read(page: Page) -> None:
    assert read(descriptor(page)).picture == {}
    for number in range(5):
        assert page.show({"number": number, "long": "x" * 1000 * (5 - number)})
        shown = read(descriptor(page))
        assert shown.version == "9.8.7"
        assert shown.picture["number"] == number
        assert shown.about["hosts"] == ["here", "here"]


def test_a_picture_that_is_too_large_leaves_the_one_before(page: Page) -> None:
    page.show({"number": 1})
    assert not page.show({"text": "x" * pages.PICTURE})
    assert read(descriptor(page)).picture == {"number": 1}


def test_a_writer_that_stopped_in_the_middle_leaves_the_picture_before(page: Page) -> None:
    page.show({"number": 1})
    place = page._places  # of picture 2
    page._memory[place : place + 8] = b'{"number'
    page._lengths[0] = 8
    assert read(descriptor(page)).picture == {"number": 1}


def test_only_its_user_may_open_it(page: Page) -> None:
    assert os.fstat(descriptor(page)).st_mode & 0o777 == 0o600


def test_another_form_names_both_versions(page: Page) -> None:
    page._memory[8:12] = (LAYOUT + 1).to_bytes(4, "little")
    with pytest.raises(
        Unreadable, match=rf"of mcr_plus 9\.8\.7, .* form {LAYOUT + 1}, .* reads form {LAYOUT}"
    ):
        read(descriptor(page))
    assert mine() is None
    assert "9.8.7" in survey().unreadable[os.getpid()]
    with pytest.raises(InvalidArgument, match=r"9\.8\.7"):
        survey(os.getpid())


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"x" * 4096, b"mcr_plus" + LAYOUT.to_bytes(4, "little") + b"\xff" * 4000],
)
def test_memory_of_that_name_that_is_no_page(content: bytes) -> None:
    number = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        os.write(number, content)
        assert os.getpid() in survey().unreadable
    finally:
        os.close(number)


@pytest.mark.parametrize(
    "changes",
    [
        {"waits": [{}]},
        {"waits": 5},
        {"groups": [{"name": "world"}]},
        {"frames": [["f", "file"]]},
        {"at": "noon"},
        {"program": None},
        {"program": [5]},
        {"waits": [{"group": "w", "number": 1, "missing": [[77, 0]], "missing_count": 1}]},
    ],
)
def test_malformed_pictures_are_refused(page: Page, changes: dict[str, Any]) -> None:
    page.show(picture(**changes))
    assert mine() is None
    assert "makes no sense" in survey().unreadable[os.getpid()]


@pytest.mark.parametrize(
    "changes", [{"job": 5}, {"rank": "x"}, {"processes": 3}, {"hosts": None}, {"began": []}]
)
def test_invalid_descriptions_are_refused(changes: dict[str, Any]) -> None:
    made = Page(about(**changes), "1")
    try:
        made.show(picture())
        assert "makes no sense" in survey().unreadable[os.getpid()]
    finally:
        made.close()


def test_a_rank_that_has_drawn_nothing_for_long_is_busy_and_a_dead_one_is_named(page: Page) -> None:
    page.show(picture(at=time.monotonic() - 60))
    job = mine()
    assert job is not None
    assert [member.state for member in job.members] == ["busy", "dead"]
    assert any("rank 1 (process 1 on here) has died" in text for text in findings(job))


@pytest.mark.long
def test_a_stop_while_a_page_is_drawn_makes_later_pictures_no_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the time of the processor that drawing takes."""
    third, drawn = threading.Event(), 0

    def drawing(_: Drawing, now: float) -> dict[str, Any]:
        nonlocal drawn
        drawn += 1
        if drawn == 1:
            time.sleep(1.0)  # stands for a stop, after which the next picture would be due in 500 s
        elif drawn == 3:
            third.set()
        return picture(at=now)

    monkeypatch.setattr(Drawing, "picture", drawing)
    thread = StatusThread(cast(Any, None), about())
    try:
        assert third.wait(60)
    finally:
        thread.close()


@pytest.mark.parametrize("number", [pytest.param(os.getpid(), id="own"), 1])
def test_the_page_of_a_process_is_its_own(number: int) -> None:
    """A child of a rank may hold the page of that."""
    made = Page(about(processes=[[number, "0"], [1, "0"]]), "1")
    try:
        made.show(picture())
        found = page_of(os.getpid())
        assert (None if found is None else found.picture["frames"]) == (
            [["step", "/somewhere/train.py", 71]] if number == os.getpid() else None
        )
    finally:
        made.close()
    assert page_of(os.getpid()) is None
    assert page_of(1 << 23) is None


def test_pages_end_with_their_jobs(page: Page) -> None:
    """Children of a rank that was forked hold its page after its death."""
    made = Page(about(job="all dead", processes=[[1, "0"], [1, "0"]]), "1")
    try:
        made.show(picture())
        assert all(job.id != "all dead" for job in survey().jobs)
    finally:
        made.close()


def test_a_child_of_a_rank_is_not_another_rank(page: Page) -> None:
    page.show(picture())
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(descriptor(page),)
    )
    try:  # it has the page from its start
        job = mine()
        assert job is not None
        assert job.member(0).pid == os.getpid()
        assert survey(os.getpid()).jobs[0].id == job.id
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait()


# -- sentences ------------------------------------------------------------------------------------


def waiting(*waits_for: int, seconds: float = 5.0, number: int = 42, **changes: Any) -> RankWait:
    wait = RankWait(
        "world", number, "all_reduce SUM float32[4]", "gloo", seconds, waits_for,
        dict.fromkeys(waits_for, number - 1), len(waits_for), True, 300.0,
    )  # fmt: skip
    return replace(wait, **changes)


def test_sentences_on_waits() -> None:
    lines = Line("step", "/somewhere/train.py", 71), Line("main", "/somewhere/train.py", 99)
    waits = Member(0, "a", 10, "waiting", 0.1, 0.1, (waiting(1),), "all_reduce", lines, lines)
    late = Member(1, "b", 11, "outside", 0.1, 7.0, (), "", (Line("load", "/somewhere/data.py", 12),))

    def said(*members: Member) -> list[str]:
        return findings(ObservedJob("j", "1", ("a", "b"), 60.0, members))

    assert said(waits, late) == [
        "rank 0 has waited 5 s for rank 1 in all_reduce SUM float32[4] (#42 in group 'world'), called at "
        "/somewhere/train.py:71 in step, called at /somewhere/train.py:99 in main",
        "rank 1 (process 11 on b) has been outside mcr_plus for 7 s, at /somewhere/data.py:12 in load; its "
        "last operation in group 'world' is #41",
    ]
    short = replace(waits, waits=(waiting(1, seconds=0.2),))
    assert said(short, late) == []
    assert len(said(short, replace(late, state="stopped"))) == 2
    everybody = replace(waits, waits=(waiting(),))
    assert said(everybody, late)[0].endswith("in main; all its ranks have issued it")
    message = replace(waits, waits=(waiting(number=0, operation="recv float32[5]"),))
    assert (
        "rank 0 has waited 5 s for any rank in recv float32[5] (in group 'world')" in said(message, late)[0]
    )
    other = replace(late, state="waiting", waits=(waiting(0, number=7),))
    assert said(waits, other)[2].startswith(
        "rank 1 (process 11 on b) waits itself, in all_reduce SUM float32[4] (#7 in group 'world')"
    )


def test_a_stopped_rank_is_described_with_its_remedy() -> None:
    """On this host by what has stopped it, on others by either; with its last operation, awaited or not."""
    line = Line("load", "/somewhere/data.py", 12)
    traffic = GroupTraffic("world", 2, (0, 1), 41, "broadcast float32[7]", 6.0, 0.0, 0.0, 0)
    older = replace(traffic, name="rows", issued=3, last="barrier", idle=60.0)
    unused = replace(traffic, name="new", issued=0, last="", idle=None)
    stopped = Member(
        1, "b", 11, "stopped", 2.5, 7.0, (), "", (line,), (line,), groups=(unused, older, traffic)
    )

    def said(member: Member, *here: int, wait: RankWait | None = None) -> str:
        first = Member(0, "a", 10, "outside")
        return condition(ObservedJob("j", "1", ("a", "b"), 60.0, (first, member), here), 1, wait)

    place = "last seen at /somewhere/data.py:12 in load"
    last = "its last operation is #41 in group 'world', broadcast float32[7]"
    assert said(stopped, 0, 1) == (
        f"rank 1 (process 11 on b) has been stopped for 2.5 s, by a signal, {place}; {last}; "
        "`kill -CONT 11` resumes it"
    )
    assert said(stopped, 0) == (
        f"rank 1 (process 11 on b) has been stopped for 2.5 s, by a signal or a debugger, {place}; {last}; "
        "`kill -CONT 11` on b resumes it"
    )
    traced = said(replace(stopped, tracer=77), 0, 1)
    assert ", by process 77, which traces it, last seen" in traced
    assert traced.endswith("; it goes on once process 77, such as a debugger, continues it or detaches")
    awaited = said(stopped, 1, wait=waiting(1, number=42))
    assert "; its last operation in group 'world' is #41, broadcast float32[7]; `kill" in awaited
    inside = said(replace(stopped, waits=(waiting(0),)), 1)
    assert "; it waited in all_reduce SUM float32[4] (#42 in group 'world'); `kill" in inside
    later = said(replace(stopped, waits=(waiting(0, number=40),)), 1)  # others have seen it go on
    assert f"; {last}; `kill" in later
    nothing = Member(1, "b", 11, "stopped")
    assert said(nothing, 1) == "rank 1 (process 11 on b) is stopped, by a signal; `kill -CONT 11` resumes it"


STOPS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
TRACED = f"import ctypes; assert ctypes.CDLL(None).ptrace(0, 0, None, None) == 0; {STOPS_ITSELF}"


@pytest.mark.parametrize("program", [STOPS_ITSELF, TRACED], ids=["by a signal", "by ptrace"])
def test_the_stopper_of_a_process_is_found(program: str) -> None:
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        try:
            found = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            assert found is not None
            if program == TRACED and found.si_code == os.CLD_EXITED:
                pytest.skip("ptrace is not permitted here")
            expected = {os.getpid(), threading.get_native_id()} if program == TRACED else {0}
            assert tracer_of(child.pid) in expected
        finally:
            os.kill(child.pid, signal.SIGKILL)  # `Popen` takes the stop of a traced child for its end
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert tracer_of(child.pid) == 0


def test_terminals_get_no_control_characters() -> None:
    assert clean("a\x1b[2Jb\nc é") == "a?[2Jb?c é"


# -- stacks ---------------------------------------------------------------------------------------


def test_the_line_of_the_program_is_the_innermost_in_no_library() -> None:
    found: list[FrameType] = []

    def key(value: Any) -> Any:
        found.append(sys._getframe())
        return value

    sorted([1], key=key)
    json.loads("{}", object_hook=key)
    for frame, name in zip(found, ("key", "key"), strict=True):
        stack = stack_of(frame, 3)
        assert stack.frames[0][0] == name
        assert stack.program[0] == 0
        assert stack.call == ""
        assert len(stack.frames) == 3
    decoder = found[1].f_back  # in the standard library, called from here
    stack = stack_of(decoder, 2)
    assert Path(stack.frames[stack.program[0]][1]) == Path(__file__)
    assert stack.program == (1,)
    assert stack_of(None) == ((), (), "")


def test_a_generator_of_the_library_is_named_by_what_it_calls() -> None:
    found: list[FrameType] = []
    scope: dict[str, Any] = {"note": lambda: found.append(sys._getframe(1))}
    text = "def inner():\n    note()\ndef steps():\n    return (inner() for _ in range(1))\n"
    exec(compile(text, Path(stacks.__file__).parent / "steps.py", "exec"), scope)
    list(scope["steps"]())
    assert stack_of(found[0]).call == "inner"


def test_the_call_is_the_function_that_the_program_has_called() -> None:
    """Not one below it that a library has called, such as a context manager that waits."""
    found: list[stacks.Stack] = []
    scope: dict[str, Any] = {"note": lambda: found.append(stack_of(sys._getframe(1)))}
    text = (
        "from contextlib import contextmanager\n"
        "@contextmanager\ndef _lock():\n    note()\n    yield\n"
        "def all_reduce():\n    with _lock():\n        return 1\n"
        "def _hook():\n    return all_reduce()\n"
    )
    exec(compile(text, Path(stacks.__file__).parent / "calls.py", "exec"), scope)
    scope["all_reduce"]()
    scope["_hook"]()
    stack, hook = found
    assert (stack.call, hook.call) == ("all_reduce", "mcr_plus")
    assert Path(stack.frames[stack.program[0]].filename) == Path(__file__)


# -- the command ----------------------------------------------------------------------------------


def test_no_job_and_wrong_processes() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert "there is no process" in mcr_plus("top", ended.pid, "--once").stderr
    answer = mcr_plus("top", os.getpid(), "--once")
    assert answer.returncode == 1
    assert f"process {os.getpid()} is no rank of a running job" in answer.stderr
    for words in (("top",), ("top", "--json"), ("top", "0", "--once"), ("top", "x", "--once")):
        assert mcr_plus(*words).returncode == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs processes of two users")
def test_a_process_of_another_user_is_refused_by_name() -> None:
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE, user="nobody", cwd="/")
    try:
        answer = mcr_plus("top", other.pid, "--once")
        assert answer.returncode == 1
        assert f"process {other.pid} belongs to nobody, and only that user can see its job" in answer.stderr
        assert "Traceback" not in answer.stderr
    finally:
        assert other.stdin is not None
        other.stdin.close()
        other.wait()


def test_the_command_imports_no_torch_and_shows_the_page(page: Page) -> None:
    page.show(picture())
    words = ["import sys", "sys.argv = ['mcr-plus', 'top', '--once', '--json']"]
    words += ["from mcr_plus.cli.main import app", "app(['top'])(standalone_mode=False)"]
    words += ["assert 'torch' not in sys.modules and 'numpy' not in sys.modules"]
    shown = subprocess.run(
        [sys.executable, "-c", "\n".join(words)], capture_output=True, text=True, check=True
    )
    jobs = {job["id"]: job for job in json.loads(shown.stdout)["jobs"]}
    assert jobs[f"unit{os.getpid()}"]["members"][0]["lines"][0] == {
        "function": "step",
        "file": "/somewhere/train.py",
        "line": 71,
    }
    assert "train.py:71 step" in mcr_plus_process("top", str(os.getpid()), "--once").stdout
