"""`mcr-plus replay`: the operations of a step for real, computing replaced by sleeping."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import mcr_plus
from ports import free_ports
from ranks import run_ranks
from steps import step_of

import mcr_plus as mcr
import mcr_plus.tuning.replay as replaying
from mcr_plus.bucketing.saved import SavedBucket, SavedPlan
from mcr_plus.bucketing.step import CapturedStep, ComputeEvent, IssueEvent, Role, WaitEvent
from mcr_plus.config.document import write_text
from mcr_plus.tuning.operations import BenchCase, OpUnderTest
from mcr_plus.tuning.replay import Replay, ReplayRequest, _ReplayClock, run

STAGES: list[dict[str, Any]] = [{"fuse": {}}, {"select": {}}, {"dispatch": {}}]
GRADIENTS = [("head.bias", 40, 0.004), ("head.weight", 4000, 0.006), ("body.0.weight", 80_000, 0.01)]


def sent(path: str) -> list[Any]:
    """Run a step of a wrapped model on ranks; return kind, bytes and tag of its operations.

    Also returns the dtypes of the program's own operations.
    """
    dtypes: list[str] = []

    class Seen(OpUnderTest):
        def __init__(self, comm: mcr.Communicator, case: BenchCase) -> None:
            dtypes.append(case.dtype)
            super().__init__(comm, case)

    setattr(replaying, "OpUnderTest", Seen)  # noqa: B010 - mypy
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": STAGES}) as comm:
        replay = Replay(CapturedStep.load(path), comm, "sleep")
        if any(True for _ in replay.model.parameters()):
            mcr.wrap(replay.model, torch.optim.SGD(replay.model.parameters(), lr=0.0))
        for _ in range(2):
            replay.step()
        with mcr.record() as log:
            replay.step()
        return [[[each.kind, each.bytes, each.tag] for each in log.records], dtypes]


def replayed(path: str, config: str | None) -> list[Any]:
    """Run on ranks; return the answer of rank 0 (None on others), and the operations of one more step."""
    answer = Path(path).with_name("answer.json")
    run(ReplayRequest(path, str(answer), config, "sleep", 5))
    with mcr.init() as comm:
        replay = Replay(CapturedStep.load(path), comm, "sleep")
        with mcr.record() as log:
            replay.step()
        operations = [(record.kind, record.bytes) for record in log.records]
    return [json.loads(answer.read_text()) if comm.rank == 0 else None, operations]


def test_buckets_of_a_plan_are_sent_while_the_rest_sleeps(tmp_path: Path) -> None:
    step = step_of(GRADIENTS, forward=0.02, after=0.005, seconds=0.001)
    step.save(tmp_path / "step.json")
    buckets = (("head.bias", "head.weight"), ("body.0.weight",))
    made = tuple(SavedBucket(params=names, library="gloo") for names in buckets)
    SavedPlan(model=step.model, ranks=2, buckets=made).save(tmp_path / "buckets.json")
    write_text(
        tmp_path / "run.yaml",
        "version: 1\npipeline:\n  - fuse: {plan: buckets.json}\n  - select: {}\n  - dispatch: {}\n",
    )
    first, _ = run_ranks(replayed, 2, args=[str(tmp_path / "step.json"), str(tmp_path / "run.yaml")])
    answer = first.value[0]
    assert answer["plan"]["buckets"] == [list(names) for names in buckets]
    assert answer["plan"]["libraries"] == ["gloo", "gloo"]
    assert answer["compute_ms"] == pytest.approx(45)
    assert answer["step_ms"] >= 45  # sleeps are never shorter
    assert answer["ranks"] == answer["captured_ranks"] == 2


@pytest.mark.long
def test_operations_of_the_program_keep_kind_group_and_size(tmp_path: Path) -> None:
    """Two ranks of one host and their copies: an exchange of all, and one of pairs."""
    everyone = (0, 1)
    events = (
        ComputeEvent("forward", 0.001),
        IssueEvent(0, "all_to_all", 4096, everyone, "moe"),
        ComputeEvent("forward", 0.001),
        WaitEvent(0),
        IssueEvent(1, "all_gather_v", 1024, everyone),
        WaitEvent(1),
        IssueEvent(2, "made_up", 8, everyone),
        WaitEvent(2),
    )
    step = CapturedStep(2, 1, "0" * 16, 0.003, 0.0, (Role(everyone, events),))
    step.save(tmp_path / "step.json")
    for ranks in (2, 3):  # the step of one group of equal ranks fits any number
        results = run_ranks(replayed, ranks, args=[str(tmp_path / "step.json"), None])
        for result in results:
            kinds = [kind for kind, _ in result.value[1]]
            assert kinds == ["all_to_all", "all_gather", "barrier"]
            sizes = dict(result.value[1])
            assert sizes["all_to_all"] <= 4096 < sizes["all_to_all"] + 4 * ranks
    halves = (Role((0,), events[:1]), Role((1,), (ComputeEvent("other", 0.002),)))
    uneven = CapturedStep(2, 1, "0" * 16, 0.003, 0.0, halves)
    uneven.save(tmp_path / "uneven.json")
    with pytest.raises(AssertionError, match="multiple of the 2 captured ranks"):
        run_ranks(replayed, 3, args=[str(tmp_path / "uneven.json"), None])


@pytest.mark.long
def test_messages_go_from_one_rank_to_the_other_in_every_copy(tmp_path: Path) -> None:
    """A pipeline of two stages: activations one way, their gradients the other; and two copies of it."""
    there, back = (0, 1), (1, 0)
    first = (
        ComputeEvent("forward", 0.001), IssueEvent(0, "send", 400, there), WaitEvent(0),
        IssueEvent(1, "recv", 400, back), WaitEvent(1), ComputeEvent("backward", 0.001),
    )  # fmt: skip
    second = (
        IssueEvent(0, "recv", 400, there), WaitEvent(0), ComputeEvent("both", 0.001),
        IssueEvent(1, "send", 400, back), WaitEvent(1),
    )  # fmt: skip
    CapturedStep(2, 1, "0" * 16, 0.003, 0.0, (Role((0,), first), Role((1,), second))).save(
        tmp_path / "step.json"
    )
    for ranks in (2, 4):
        results = run_ranks(replayed, ranks, args=[str(tmp_path / "step.json"), None], via="torch")
        for rank, result in enumerate(results):
            kinds = ["send", "recv"] if rank % 2 == 0 else ["recv", "send"]
            assert result.value[1] == [[kind, 400] for kind in kinds]
    anyone = (IssueEvent(0, "recv", 400, (0,)), WaitEvent(0))
    CapturedStep(2, 1, "0" * 16, 0.003, 0.0, (Role((0, 1), anyone),)).save(tmp_path / "any.json")
    with pytest.raises(AssertionError, match="a message without two ends"):
        run_ranks(replayed, 2, args=[str(tmp_path / "any.json"), None], via="torch")


def test_the_outcome_of_a_pass_is_sent_once(tmp_path: Path) -> None:
    """A captured step has one next to its gradients, and `mcr.wrap` sends one in the replay."""
    whole = (0, 1)
    step = step_of(GRADIENTS, forward=0.002, seconds=0.001)
    (role,) = step.roles
    outcome = (IssueEvent(7, "all_reduce", 20, whole, "gradients"), WaitEvent(7))
    events = (*role.events[:-1], *outcome, role.events[-1])
    replace(step, roles=(Role(whole, events),)).save(tmp_path / "step.json")
    first, _ = run_ranks(sent, 2, args=[str(tmp_path / "step.json")], via="torch")
    assert [(kind, tag) for kind, _, tag in first.value[0]] == 2 * [("all_reduce", "gradients")]


def test_operations_have_the_tag_and_the_dtype_of_the_program(tmp_path: Path) -> None:
    whole = (0, 1)
    events = (
        IssueEvent(0, "all_to_all", 4096, whole, "moe.dispatch", dtype="bfloat16"),
        WaitEvent(0),
        IssueEvent(1, "all_gather", 4096, whole, "tp"),
        WaitEvent(1),
    )
    CapturedStep(2, 1, "0" * 16, 0.003, 0.0, (Role(whole, events),)).save(tmp_path / "step.json")
    for result in run_ranks(sent, 2, args=[str(tmp_path / "step.json")], via="torch"):
        assert result.value == [
            [["all_to_all", 4096, "moe.dispatch"], ["all_gather", 4096, "tp"]], ["bfloat16", "float32"],
        ]  # fmt: skip


def test_rests_end_when_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may end late; delays between operations are no part of computing."""
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        assert seconds > 0
        now += seconds + 0.0002  # late, as every sleep

    monkeypatch.setattr(replaying, "time", SimpleNamespace(perf_counter=lambda: now, sleep=sleep))
    clock = _ReplayClock("sleep")
    for _ in range(100):
        clock.rest(0.001)
        now += 0.0003
    assert now == pytest.approx(100.1 + 0.0002 + 0.0003)  # 30 ms and more later with rests of their own
    now += 0.01
    began = now
    clock.rest(0.005)
    assert now - began == pytest.approx(0.005 + 0.0002)


@pytest.mark.long
def test_under_a_launcher_every_process_is_a_rank(tmp_path: Path) -> None:
    step_of(GRADIENTS, forward=0.002, seconds=0.001).save(tmp_path / "step.json")
    (tmp_path / "run.yaml").write_text(
        "version: 1\nbackends: [gloo]\npipeline:\n  - fuse: {}\n  - select: {}\n  - dispatch: {}\n"
    )
    words = ["replay", tmp_path / "step.json", "--config", tmp_path / "run.yaml", "--steps", 3, "--json"]
    command = [sys.executable, "-m", "mcr_plus.cli.main", *map(str, words)]
    place = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [each.communicate(timeout=300)[0] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0]
    assert json.loads(said[0])["ranks"] == 2
    assert said[1] == ""


def test_bad_usage_is_a_line(tmp_path: Path) -> None:
    step = step_of(GRADIENTS, seconds=0.001)
    step.save(tmp_path / "step.json")
    (tmp_path / "cut.json").write_text(step.text()[:100])
    for words, said in (
        ((tmp_path / "none.json", "-n", 2), "none.json"),
        ((tmp_path / "cut.json", "-n", 2), "cut.json"),
        ((tmp_path / "step.json",), "-n"),
        ((tmp_path / "step.json", "-n", 2, "--compute", "dream"), "dream"),
    ):
        answer = mcr_plus("replay", *words)
        assert answer.returncode == 2
        assert said in answer.stderr
        assert "Traceback" not in answer.stderr
