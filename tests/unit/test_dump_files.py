"""Dumps without a job: file names, bad files, where frames end, and faults among more ranks than two."""

from __future__ import annotations

import copy
import ctypes
import itertools
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import typer
from command import mcr_plus

import mcr_plus as mcr
from mcr_plus.board.base import GroupBoard
from mcr_plus.cli import diagnose as cli
from mcr_plus.config.reader import dump, fingerprint, load
from mcr_plus.core import stacks
from mcr_plus.core.group import Group
from mcr_plus.core.message import Signature
from mcr_plus.core.stacks import Frame, call_site, frames_of, waiting_frames
from mcr_plus.engine.group_state import GroupState
from mcr_plus.errors import ConfigError, InvalidArgument, McrError, PeerLost
from mcr_plus.observe import files, snapshot
from mcr_plus.observe.diagnosis import DiagnosedFault, diagnose
from mcr_plus.observe.dumps import read_folder
from mcr_plus.observe.files import files_of, write_dump
from mcr_plus.observe.flight_record import flight_record
from mcr_plus.observe.options import observe_options, observed
from mcr_plus.observe.snapshot import GroupSnapshot, Snapshot, SnapshotEntry

SECOND = 10**9


def _signature(kind: Any = "all_reduce", numel: int = 4, **changes: Any) -> Signature:
    plain = Signature(kind, torch.float32, (numel,), 4 * numel, "world", 3, reduce_op="SUM", backend="gloo")
    return plain.replace(**changes)


def _entry(
    number: int, signature: Signature | None = None, *, late: float = 0.0, **changes: Any
) -> SnapshotEntry:
    """An operation issued at second `number`, or so much later; complete unless `changes` say otherwise."""
    issued = int((number + late) * SECOND)
    return SnapshotEntry(number, _signature() if signature is None else signature, issued, **changes)


def _waiting(number: int, signature: Signature | None = None, line: int = 7) -> SnapshotEntry:
    frames = [Frame("step", "train.py", line)]
    return _entry(number, signature, state="started", frames=frames, waited=2.0, waits=True)


def _message(kind: str, peer: int | None, tag: int, **changes: Any) -> SnapshotEntry:
    return SnapshotEntry(0, _signature(kind, reduce_op=None), SECOND, peer=peer, match_tag=tag, **changes)


def _write(
    folder: Path,
    ranks: dict[int, list[GroupSnapshot]],
    *,
    size: int = 3,
    error: McrError | None = None,
    away: dict[int, str] | None = None,
    **about: Any,
) -> None:
    for rank, groups in ranks.items():
        place = [Frame("forward", "model.py", 10 + rank)]
        taken = Snapshot(SECOND, "SIGUSR2", groups, [("MainThread", place)], error)
        known = {
            "job": "j", "rank": rank, "world_size": size, "host": "a", "hosts": ["a"] * size, "pid": 1,
            "written_by": rank, "processes": {str(each): status for each, status in (away or {}).items()},
        }  # fmt: skip
        write_dump(files_of(f"{folder}/", rank), flight_record(taken, {**known, **about}))


def _world(
    rank: int, entries: list[SnapshotEntry], messages: list[SnapshotEntry] | None = None, size: int = 3
) -> GroupSnapshot:
    issued = max((each.number for each in entries), default=0)
    found = GroupSnapshot("world", tuple(range(size)), rank, issued, entries=entries)
    found.messages = messages or []
    return found


def _status(folder: Path) -> int:
    """The exit status of `mcr-plus diagnose`."""
    try:
        cli.diagnose(folder)
    except typer.Exit as end:
        return end.exit_code
    return 0


def _found(folder: Path, ranks: dict[int, list[GroupSnapshot]], **about: Any) -> list[DiagnosedFault]:
    _write(folder, ranks, **about)
    return diagnose(read_folder(folder))


# -- faults ---------------------------------------------------------------------------------------


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    done = [_entry(number) for number in range(1, 20)]
    assert not _found(tmp_path, {rank: [_world(rank, done)] for rank in range(3)})
    assert _status(tmp_path) == 0


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_scripts_learn_of_faults_by_the_status(arguments: list[str], tmp_path: Path) -> None:
    ranks = {
        rank: [_world(rank, [_entry(1)] if rank == 2 else [_entry(1), _waiting(2)])] for rank in range(3)
    }
    for name in ("dumps", "empty"):
        (tmp_path / name).mkdir()
    _write(tmp_path / "dumps", ranks)
    answer = mcr_plus("diagnose", str(tmp_path / "dumps"), *arguments)
    assert answer.returncode == 1
    assert "missing" in answer.stdout
    for folder, why in ((tmp_path / "none", "no such folder"), (tmp_path / "empty", "no dumps")):
        answer = mcr_plus("diagnose", str(folder), *arguments)
        assert (answer.returncode, answer.stdout) == (2, "")
        assert why in answer.stderr


def test_the_minority_of_ranks_differs(tmp_path: Path) -> None:
    usual, other = _waiting(2), _waiting(2, _signature(reduce_op="MAX"))
    ranks = {rank: [_world(rank, [_entry(1), other if rank == 1 else usual])] for rank in range(3)}
    (finding,) = _found(tmp_path, ranks)
    assert (finding.fault, finding.ranks, finding.sequence) == ("reduce op", (1,), 2)
    assert [place.rank for place in finding.waiting] == [0, 2]
    assert "rank 0 issued all_reduce SUM" in finding.text
    assert "rank 1 issued all_reduce MAX" in finding.text


@pytest.mark.parametrize(
    ("fault", "changes"),
    [
        ("kind", {"kind": "broadcast", "reduce_op": None, "root": 0}),
        ("dtype", {"dtype": torch.float64}),
        ("size", {"shape": (5,)}),
        ("tag", {"tag": "mlp"}),
        ("options", {"async_op": True}),
    ],
)
def test_each_property_that_ranks_share_has_a_name(
    fault: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    other = _waiting(1, _signature(**changes))
    ranks = {rank: [_world(rank, [other if rank == 2 else _waiting(1)])] for rank in range(3)}
    (finding,) = _found(tmp_path, ranks)
    assert (finding.fault, finding.ranks) == (fault, (2,))


def test_several_ranks_are_missing(tmp_path: Path) -> None:
    ranks = {0: [_world(0, [_entry(1), _waiting(2)])], **{r: [_world(r, [_entry(1)])] for r in (1, 2)}}
    (finding,) = _found(tmp_path, ranks)
    assert (finding.fault, finding.ranks) == ("missing", (1, 2))
    assert finding.text.startswith("ranks 1, 2 have not issued all_reduce SUM float32[4]")
    assert [place.frame and place.frame.line for place in finding.at] == [11, 12]


@pytest.mark.parametrize(
    ("waited", "error", "fault"),
    [(0.1, None, "behind"), (0.1, mcr.PeerLost("gone"), "missing"), (1.5, None, "missing")],
)
def test_a_rank_for_which_others_wait_a_moment_is_behind(
    waited: float, error: McrError | None, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dump of a healthy job, or one of a failure, at which others have not waited for long either."""
    waiting = replace(_waiting(2), waited=waited)
    ranks = {0: [_world(0, [_entry(1), waiting], size=2)], 1: [_world(1, [_entry(1)], size=2)]}
    (finding,) = _found(tmp_path, ranks, size=2, error=error)
    assert (finding.fault, finding.ranks, finding.sequence) == (fault, (1,), 2)
    status = _status(tmp_path)
    assert status == (0 if fault == "behind" else 1)
    assert ("no fault yet" in capsys.readouterr().out) == (fault == "behind")


def test_a_waiting_rank_is_no_cause(tmp_path: Path) -> None:
    """Rank 2 waits for rank 1, which waits for rank 0: that one is to blame alone."""
    pair = GroupSnapshot("pair", (1, 2), 0, 0)
    waits = GroupSnapshot("pair", (1, 2), 1, 1, entries=[_waiting(1)])
    chain = {0: [_world(0, [])], 1: [_world(1, [_waiting(1)]), pair], 2: [_world(2, []), waits]}
    chain[0][0].ranks = chain[1][0].ranks = chain[2][0].ranks = (0, 1)
    del chain[2][0]
    (finding,) = _found(tmp_path, chain)
    assert (finding.fault, finding.ranks, finding.group) == ("missing", (0,), "world")


def test_two_groups_in_another_order(tmp_path: Path) -> None:
    def groups(rank: int, mine: str) -> list[GroupSnapshot]:
        names = ("a", "b")
        return [
            GroupSnapshot(
                name, (0, 1), rank, int(name == mine), entries=[_waiting(1)] if name == mine else []
            )
            for name in names
        ]

    (finding,) = _found(tmp_path, {0: groups(0, "a"), 1: groups(1, "b")}, size=2)
    assert (finding.fault, finding.ranks) == ("group", (1,))
    assert "rank 1 waits in group 'b'" in finding.text


def test_a_lost_rank_explains_what_waits_for_it(tmp_path: Path) -> None:
    ranks = {rank: [_world(rank, [_entry(1), _waiting(2)])] for rank in (0, 2)}
    for rank in ranks:
        ranks[rank][0].peers = {1: 1}
    (finding,) = _found(tmp_path, ranks, away={1: "silent"})
    assert (finding.fault, finding.ranks) == ("silent", (1,))
    assert "has not issued" in finding.text
    assert [place.rank for place in finding.waiting] == [0, 2]


def test_a_stopped_rank_that_goes_on_when_the_job_ends_has_not_issued_what_it_was_waited_for(
    tmp_path: Path,
) -> None:
    first = _world(0, [_entry(1), _waiting(2)], size=2)
    first.peers = {1: 1}
    _write(tmp_path, {1: [_world(1, [_entry(1), _entry(2), _entry(3)], size=2)]}, size=2)
    (finding,) = _found(tmp_path, {0: [first]}, size=2, away={1: "stopped"})
    assert (finding.fault, finding.ranks, finding.sequence) == ("stopped", (1,), 2)
    assert "it has not issued all_reduce" in finding.text


def test_a_rank_that_has_ended_is_no_fault(tmp_path: Path) -> None:
    assert not _found(tmp_path, {rank: [_world(rank, [_entry(1)])] for rank in (0, 2)}, away={1: "dead"})


def test_a_rank_that_is_late_as_a_rule_is_slow(tmp_path: Path) -> None:
    ranks = {r: [_world(r, [_entry(n, late=0.02 * (r == 2)) for n in range(1, 11)])] for r in range(3)}
    (finding,) = _found(tmp_path, ranks)
    assert (finding.fault, finding.ranks) == ("slow", (2,))
    assert "10 of 10 operations" in finding.text
    assert "20 ms" in finding.text


def test_hosts_have_clocks_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        entries = [_entry(number, late=5.0 * rank) for number in range(1, 11)]
        _write(tmp_path, {rank: [_world(rank, entries, size=2)]}, size=2, host=f"h{rank}")
    assert not diagnose(read_folder(tmp_path))


def test_operations_that_no_rank_lacks_are_stuck(tmp_path: Path) -> None:
    (finding,) = _found(tmp_path, {rank: [_world(rank, [_waiting(1)])] for rank in range(3)})
    assert (finding.fault, finding.ranks) == ("stuck", ())


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ([], "there has been no receive"),
        ([_message("recv", 0, 5, state="started")], "only with tag 5"),
        ([_message("recv", 0, 3)], "its last receive"),
        ([_message("recv", 0, 3, state="started")], None),
        ([_message("recv", None, 3, state="started")], None),
    ],
)
def test_a_send_without_its_receive(theirs: list[SnapshotEntry], why: str | None, tmp_path: Path) -> None:
    send = _message("send", 1, 3, state="started", waits=True)
    found = _found(tmp_path, {0: [_world(0, [], [send], 2)], 1: [_world(1, [], theirs, 2)]}, size=2)
    if why is None:
        assert [finding.fault for finding in found] == []
        return
    (finding,) = found
    assert (finding.fault, finding.ranks) == ("message", (1,))
    assert why in finding.text


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "record", "text"),
    [
        ("d/rank_", "d/rank_3", "d/rank.3.json"),
        ("d/", "d/rank_3", "d/rank.3.json"),
        ("d/trace", "d/trace3", "d/3.json"),
        ("nccl_trace_rank_", "nccl_trace_rank_3", "nccl_trace_rank.3.json"),
        ("d/_", "d/_3", "d/3.json"),
    ],
)
def test_names_of_files(path: str, record: str, text: str) -> None:
    found = files_of(path, 3)
    assert (str(found.record), str(found.text)) == (record, text)
    prefix = record[:-1].rpartition("/")[2]
    assert prefix not in text.rpartition("/")[2]  # torch's tools would take it for another dump


def test_a_folder_gets_the_usual_names(tmp_path: Path) -> None:
    assert files_of(tmp_path, 0).record == tmp_path / "rank_0"
    with pytest.raises(InvalidArgument, match="path"):
        files_of("a\0b", 0)
    with pytest.raises(InvalidArgument, match="path: expected the path of a file, got 3"):
        files_of(3, 0)  # type: ignore[arg-type]


def test_both_files_are_the_same_plain_data(tmp_path: Path) -> None:
    _write(tmp_path, {0: [_world(0, [_waiting(1)], [_message("send", 1, 3, state="started")])]})
    record = pickle.loads((tmp_path / "rank_0").read_bytes())
    assert json.loads((tmp_path / "rank.0.json").read_text()) == json.loads(json.dumps(record))
    assert sorted(os.listdir(tmp_path)) == ["rank.0.json", "rank_0"]


def test_partial_writes_are_never_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, {0: [_world(0, [_entry(1)])]})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        _write(tmp_path, {0: [_world(0, [_entry(1), _entry(2)])]})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_bad_files_are_left_out_and_named(tmp_path: Path) -> None:
    _write(tmp_path, {0: [_world(0, [_entry(1)])]}, size=7)
    good = json.loads((tmp_path / "rank.0.json").read_text())

    def altered(**changes: Any) -> str:
        data = copy.deepcopy(good)
        data["mcr"].update(changes)
        return json.dumps(data)

    (tmp_path / "rank.1.json").write_text(altered(rank=1)[:-400])
    (tmp_path / "rank.2.json").write_text(altered(rank=2, format=99))
    (tmp_path / "rank.3.json").write_text(altered(rank=3, job="another", time_ns=1))
    (tmp_path / "rank.4.json").write_text('{"entries": []}')
    (tmp_path / "rank.5.json").write_text(altered(rank=5, groups=[]))
    (tmp_path / "rank.6.json").write_text(altered(rank=6, time_ns=10**400))
    folder = read_folder(tmp_path)
    assert (list(folder.dumps), folder.absent) == ([0], [1, 2, 3, 4, 5, 6])
    for file, why in {
        1: "cut off or damaged", 2: "format 99 of another version; expected 1", 3: "of another job",
        4: "no dump of mcr_plus", 5: "not a dump", 6: "not a dump: a number of",
    }.items():  # fmt: skip
        assert any(f"rank.{file}.json" in problem and why in problem for problem in folder.problems), why


def _nodes(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values inside plain data."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield (*path, key)
        yield from _nodes(value, (*path, key))


@pytest.mark.parametrize("wrong", [None, -1, 10**9, 1e400, "", "x", [], [[]], {}, {"x": []}], ids=repr)
def test_invalid_values_are_refused_or_shown(tmp_path: Path, wrong: Any) -> None:
    """Each value of a file in turn: it is left out with a reason, or diagnosed, and nothing else happens."""
    lost = PeerLost("rank 2: process has died", [2], seen="process has died")
    sends = [_message("send", 1, 3, state="started", waits=True), _message("recv", None, 4, waits=True)]
    entries = [_entry(1), _waiting(2, _signature("broadcast", root=1, reduce_op=None, tag="t"))]
    ranks = {0: [_world(0, entries, sends)], 1: [_world(1, [_entry(1)])]}
    _write(tmp_path, ranks, error=lost, away={2: "dead"})
    file = tmp_path / "rank.0.json"
    good = json.loads(file.read_text())
    for *path, last in _nodes(good):
        bad = copy.deepcopy(good)
        node = bad
        for key in path:
            node = node[key]
        node[last] = wrong
        file.write_text(json.dumps(bad))
        folder = read_folder(tmp_path)
        assert 1 in folder.dumps or 0 in folder.dumps  # `job` and `time_ns` say which is the last job
        assert len(folder.absent) <= 3
        if 0 not in folder.dumps:
            assert any("rank.0.json" in problem for problem in folder.problems), (path, last)
        for finding in diagnose(folder):
            json.dumps(finding.plain())


def test_a_pipe_is_no_dump(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank.0.json")  # to open it would be to wait for a writer
    with pytest.raises(InvalidArgument, match="not a regular file"):
        read_folder(tmp_path)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_umask_says_who_may_read_dumps(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        _write(tmp_path, {0: [_world(0, [_entry(1)])]})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~mask}


def test_folders_without_dumps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no such folder"):
        read_folder(tmp_path / "missing")
    with pytest.raises(InvalidArgument, match=r"no dumps.*no JSON files"):
        read_folder(tmp_path)
    _write(tmp_path, {0: [_world(0, [_entry(1)])]})
    (tmp_path / "copy.json").write_bytes((tmp_path / "rank.0.json").read_bytes())
    with pytest.raises(InvalidArgument, match="a second dump of rank 0"):
        read_folder(tmp_path)


def test_the_folder_of_others_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(McrError, match="not a folder of this user"):
        files.make_private(str(tmp_path / "link"))
    files.make_private(str(tmp_path / "own"))
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700


# -- what is dumped -------------------------------------------------------------------------------


def test_ranks_begin_with_the_same_operation() -> None:
    """Also where one has issued some more: the first number that all of them show."""

    def first(own: int, most: int) -> int:
        state = GroupState(Group("world", (0, 1), 0), GroupBoard(), ring=80)
        state.sequence = own
        return snapshot._first(state, most)

    assert first(80, 80) == 1
    assert {first(own, 1007) for own in range(1000, 1007)} == {930}
    assert all(first(own, own) > own - 80 for own in range(81, 300))


@pytest.mark.parametrize("by_text", [True, False])
def test_frames_of_another_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_text: bool) -> None:
    """Python 3.11 may end where a thread makes objects of frames that another one runs in."""
    monkeypatch.setattr(stacks, "_OTHERS_BY_TEXT", by_text)
    if by_text:
        monkeypatch.setattr(sys, "_current_frames", Mock(side_effect=AssertionError("makes objects")))
    file, ended = str(tmp_path / "schön☃ 𝄞.py"), threading.Event()
    scope: dict[str, Any] = {"wait": ended.wait}
    exec(compile("def größe():\n    def inner():\n        wait()\n\n    inner()", file, "exec"), scope)
    thread = threading.Thread(target=scope["größe"])
    thread.start()
    try:
        expected = [Frame("inner", file, 3), Frame("größe", file, 5)]
        assert thread.ident is not None
        ends = time.monotonic() + 20
        while [each for each in frames_of(thread.ident) if each.filename == file] != expected:
            assert time.monotonic() < ends, frames_of(thread.ident)
        assert [each.filename for each in frames_of(thread.ident, 2)][-1] == file
    finally:
        ended.set()
        thread.join()
    assert frames_of(thread.ident) == []


@pytest.mark.skipif(not stacks._OTHERS_BY_TEXT, reason="another Python creates frame objects instead")
def test_frames_while_threads_of_libraries_enter_python() -> None:
    """Their states are in Python's list before they are complete."""
    libc, ended, entered = ctypes.CDLL(None), threading.Event(), itertools.count()
    enter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: next(entered) * 0)

    def start() -> None:
        thread = ctypes.c_ulong()
        for _ in range(5000):
            if not libc.pthread_create(ctypes.byref(thread), None, enter, None):
                libc.pthread_join(thread, None)  # before `enter` goes
        ended.set()

    starter = threading.Thread(target=start)
    starter.start()
    seen = 0
    while not ended.is_set():
        assert starter.ident is not None
        seen += any(frame.name == "start" for frame in frames_of(starter.ident))
    starter.join()
    assert next(entered) > 1000
    assert seen


def test_other_threads_are_read_by_text_where_python_may_end() -> None:
    assert (sys.version_info[:2] in ((3, 11), (3, 12))) == stacks._OTHERS_BY_TEXT


def test_frames_are_of_the_program() -> None:
    frames = waiting_frames(3)
    assert [frames[0].name, len(frames)] == ["test_frames_are_of_the_program", 3]
    assert frames[0].filename == __file__
    assert frames_of(threading.get_ident())[0].name == frames[0].name
    assert frames_of(12345) == []
    torch_first = [Frame("wait", "/x/lib/python3.11/site-packages/torch/d.py", 1), Frame("step", "t.py", 2)]
    assert call_site(torch_first) == torch_first[1]
    assert call_site(torch_first[:1]) == torch_first[0]
    assert call_site([]) is None


def test_a_process_alone_dumps_too(tmp_path: Path) -> None:
    with pytest.raises(mcr.NotInitialized):
        mcr.dump(tmp_path)
    with mcr.init({"version": 1, "observe": {"ring": 2}}):
        for _ in range(3):
            mcr.all_reduce(torch.ones(4))
        path = mcr.dump(f"{tmp_path}/a_")
        with pytest.raises(McrError, match="cannot be written"):
            mcr.dump("/dev/null/x/")
    entries = pickle.loads(Path(path).read_bytes())["entries"]
    assert [entry["collective_seq_id"] for entry in entries] == [2, 3]
    assert {entry["profiling_name"] for entry in entries} == {"gloo:all_reduce"}


# -- options --------------------------------------------------------------------------------------


def test_options_are_read_and_not_compared() -> None:
    config = load({"version": 1, "observe": {"dump": "dumps", "ring": 10}})
    assert observed(config) == observe_options()(dump="dumps", ring=10)
    assert load(dump(config)) == config
    assert "observe" not in dump(load(None))
    assert fingerprint(config) == fingerprint(load(None))


@pytest.mark.parametrize(
    ("observe", "problem"),
    [
        ({"dumps": "x"}, "observe.dumps: unknown key 'dumps'"),
        ({"ring": -1}, "observe.ring: expected a number of at least 0, got -1"),
        ({"ring": 10**7}, "observe.ring: expected a number of at most 1000000"),
        ({"dump": ""}, "observe.dump: expected a string of at least 1 characters"),
        ({"dump": 7}, "observe.dump: expected a string, got 7"),
        ([], "observe: expected a mapping"),
    ],
)
def test_bad_options_are_refused(observe: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load({"version": 1, "observe": observe})
    assert problem in str(error.value)


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"observe.dump: expected a folder.*'/dev/null/x': Not a directory"):
        mcr.init({"version": 1, "observe": {"dump": "/dev/null/x"}})
    monkeypatch.setenv("MCR_DUMP", "/dev/null/y")
    with pytest.raises(ConfigError, match="MCR_DUMP: expected a folder"):
        mcr.init()
