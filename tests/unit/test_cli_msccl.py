"""`mcr-plus msccl`: the output and exit status of each command."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msccl_samples as samples
import pytest
import typer
from command import mcr_plus

from mcr_plus.msccl.generators import GENERATORS
from mcr_plus.msccl.writer import write_algorithm

msccl = partial(mcr_plus, "msccl")


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    path = tmp_path / "ring.xml"
    answer = msccl("generate", "all_reduce_ring", "-n", 3, "-o", path)
    assert (answer[0], answer[1]) == (0, "")
    assert str(path) in answer[2]  # the written file
    return path


@pytest.fixture
def wrong(ring: Path) -> Path:
    path = ring.with_name("wrong.xml")
    path.write_text(ring.read_text().replace('type="rrs"', 'type="rcs"'))
    return path


def test_verify_prints_a_summary_of_a_file(ring: Path) -> None:
    assert msccl("verify", ring) == (
        0,
        f"{ring}: allreduce of 3 ranks, in place: 12 messages, 5 rounds\n"
        f"{ring}: allreduce of 3 ranks, out of place: 12 messages, 5 rounds\n",
        "",
    )


def test_verify_continues_after_a_refusal(ring: Path, wrong: Path) -> None:
    answer = msccl("verify", wrong, ring)
    assert answer.returncode == 1
    assert answer.stdout.splitlines()[0] == f"{wrong}: refused"
    assert len(answer.stdout.splitlines()) == 3
    assert all(line.startswith(f"{wrong}:") for line in answer.stderr.splitlines())


def test_verify_prints_each_file_when_it_is_done(
    ring: Path, wrong: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mcr_plus.cli import msccl as command

    verified, printed = command._verified, list[str]()

    def watched(file: Path, slots: int) -> dict[str, Any]:
        printed.append(capsys.readouterr().out)
        return verified(file, slots)

    monkeypatch.setattr(command, "_verified", watched)
    with pytest.raises(typer.Exit):
        command.verify([ring, wrong, ring])
    first, second, third = printed
    assert first == ""
    assert second.startswith(f"{ring}: allreduce of 3 ranks")
    assert third == f"{wrong}: refused\n"


@pytest.mark.parametrize("words", [("validate",), ("table", "show"), ("msccl", "verify"), ("msccl", "show")])
def test_irregular_files_are_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    fifo = tmp_path / "it.xml"
    os.mkfifo(fifo)
    for path in (fifo, "/dev/zero"):
        answer = mcr_plus(*words, path)
        assert answer.returncode == (1 if words[-1] == "verify" else 2)
        assert f"{path}: cannot read: not a regular file" in answer.stderr


def test_verify_with_one_slot(ring: Path) -> None:
    answer = msccl("verify", ring, "--slots", 1)
    assert answer.returncode == 1
    assert "deadlock with queues of 1" in answer.stderr


def test_verify_takes_folders(ring: Path, wrong: Path) -> None:
    answer = msccl("verify", ring.parent)
    assert answer.returncode == 1
    assert answer.stdout.splitlines()[0].startswith(f"{ring}: allreduce of 3 ranks")
    assert f"{wrong}: refused" in answer.stdout.splitlines()
    (ring.parent / "empty").mkdir()
    assert "no *.xml in the folder" in msccl("verify", ring.parent / "empty").stderr


def test_verify_names_a_chunk_as_the_file_does(tmp_path: Path) -> None:
    """A file for calls in place may name only the input."""
    ring = samples.ring(2)
    path = tmp_path / "it.xml"
    write_algorithm(replace(ring, out_of_place=False), path)
    path.write_text(path.read_text().replace('"o"', '"i"').replace('type="rrs"', 'type="rs"'))
    path.write_text(path.read_text().replace('type="rrcs"', 'type="rcs"'))
    assert "o[0] (i[0] in place) ends as" in msccl("verify", path).stderr


def test_verify_as_json(ring: Path, wrong: Path) -> None:
    answer = msccl("verify", ring, wrong, "--json")
    assert (answer.returncode, answer.stderr) == (1, "")
    good, bad = json.loads(answer.stdout)
    assert good["verified"]
    assert [report["in_place"] for report in good["reports"]] == [True, False]
    assert not bad["verified"]
    assert bad["problems"][0].startswith(f"{wrong}:")


def test_a_file_that_is_no_algorithm_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "it.xml"
    path.write_text("version: 1\n")
    answer = msccl("verify", path)
    assert (answer.returncode, answer.stdout) == (1, f"{path}: refused\n")
    assert answer.stderr.startswith(f"{path}:1: document: not whole, valid XML")
    assert msccl("show", path).returncode == 2


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "none.xml"),
        ("verify",),
        ("verify", "ring.xml", "--slots", 0),
        ("show", "ring.xml", "--rank", 3),
        ("generate",),
        ("generate", "all_reduce_ring"),
        ("generate", "all_reduce_ring", "-n", 1),
        ("generate", "all_reduce_ring", "-n", 2, "--root", 0),
        ("generate", "all_reduce_hierarchical", "-n", 6, "--group", 4),
        ("generate", "broadcast_tree", "-n", 2, "--root", 2),
        ("generate", "all_reduce_ring", "-n", 2, "-o", "none/it.xml"),
    ],
)
def test_bad_usage(words: tuple[object, ...], ring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ring.parent)
    answer = msccl(*words)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr


def test_an_unknown_algorithm_gets_a_suggestion() -> None:
    assert "all_reduce_ring" in msccl("generate", "all_reduce_rnig", "-n", 2).stderr.split("mean")[-1]


def test_show_draws_a_row_for_each_round(ring: Path) -> None:
    assert msccl("show", ring).stdout == (
        "all_reduce_ring: allreduce of 3 ranks, 3 chunks, in place\n"
        "round  rank 0               rank 1               rank 2\n"
        "1      i[0] → 1             i[1] → 2             i[2] → 0\n"
        "2      2 + i[2] → 1         0 + i[0] → 2         1 + i[1] → 0\n"
        "3      2 + i[1] → o[1] → 1  0 + i[2] → o[2] → 2  1 + i[0] → o[0] → 0\n"
        "4      2 → o[0] → 1         0 → o[1] → 2         1 → o[2] → 0\n"
        "5      2 → o[2]             0 → o[0]             1 → o[1]\n\n"
    )


def test_show_one_rank_by_thread_block(tmp_path: Path) -> None:
    path = tmp_path / "it.xml"
    assert msccl("generate", "broadcast_tree", "-n", 4, "-o", path).returncode == 0
    assert msccl("show", path, "--rank", 2).stdout == (
        "broadcast_tree: broadcast of 4 ranks, 1 chunk, in place\n"
        "round  tb 0 from 0  tb 1 to 3\n"
        "2      0 → o[0]\n"
        "3                   o[0] → 3\n\n"
    )


def test_show_lists_steps_that_never_run(ring: Path) -> None:
    answer = msccl("show", ring, "--slots", 1)
    assert "never  2 + i[2] → 1" in answer.stdout
    assert answer.stderr.startswith(f"refused: {ring}:")
    assert "deadlock" in answer.stderr
    assert msccl("show", ring).stderr == ""


def test_generate_names_an_exceeded_limit_of_the_verifier() -> None:
    told = msccl("generate", "gather_direct", "-n", 182).stderr
    assert "expected at most 180 for 182 ranks: the verifier follows 32768 contributions" in told


def test_show_as_json(ring: Path) -> None:
    shown = json.loads(msccl("show", ring, "--rank", 1, "--json").stdout)
    assert (shown["rounds"], len(shown["steps"])) == (5, 5)
    assert shown["steps"][2] == {
        "rank": 1, "tb": 0, "step": 2, "round": 3, "type": "rrcs", "receive": 0, "send": 2, "channel": 0,
        "src": "i[2]", "dst": "o[2]",
    }  # fmt: skip


def test_generate_prints_a_file_that_verifies(tmp_path: Path) -> None:
    for name, generator in GENERATORS.items():
        options = ["--group", 2] if "group" in generator.options else []
        answer = msccl("generate", name, "-n", 4, *options)
        path = tmp_path / f"{name}.xml"
        path.write_text(answer.stdout)
        assert msccl("verify", path).returncode == 0


def test_generate_lists_all() -> None:
    listed = msccl("generate", "--list").stdout
    assert [line.split()[0] for line in listed.splitlines()[2:] if line] == list(GENERATORS)
