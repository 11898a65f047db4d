"""`mcr.capture` on real ranks, in programs with known times and operations."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

import mcr_plus as mcr
from mcr_plus.bucketing.step import CapturedStep, ComputeEvent, IssueEvent, NeedEvent, ReadyEvent, WaitEvent
from mcr_plus.job.init import current
from mcr_plus.training import wrap as wrapping

CONFIG: dict[str, Any] = {"version": 1, "backends": ["gloo"], "pipeline": [{"select": {}}, {"dispatch": {}}]}
FORWARD, BACKWARD = 0.004, 0.006
"""Seconds that a layer sleeps."""
SLOWER = 0.005  # seconds that the last layer of rank 1 sleeps longer in backward


class Asleep(torch.autograd.Function):
    """An identity that sleeps in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None


class Slow(nn.Module):
    """A linear layer of known times."""

    def __init__(self, backward: float) -> None:
        super().__init__()
        self.seconds = backward
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD)
        y: torch.Tensor = Asleep.apply(self.linear(x), self.seconds)  # type: ignore[no-untyped-call]
        return y


def plain(step: CapturedStep) -> list[Any]:
    return [[role.ranks, [[type(e).__name__, *e] for e in role.events]] for role in step.roles]


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the number of hooks of a model and its optimizer."""
    modules = sum(len(module._forward_pre_hooks) for module in model.modules())
    params = sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())
    steps = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return modules + params + steps


def captured(hold: bool) -> dict[str, Any]:
    """Run on ranks: a wrapped model of three layers, and operations of the program itself."""
    torch.set_num_threads(1)
    with mcr.init(CONFIG) as comm:
        torch.manual_seed(1)
        model: Any = nn.Sequential(
            *[Slow(BACKWARD + (SLOWER if index == 2 else 0) * comm.rank) for index in range(3)]
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = mcr.wrap(model, optimizer)
        pair = mcr.new_group([0, 1])
        before, apart = hooks_of(model, optimizer), 0.0
        calls, watched = [], []
        with mcr.capture(model, optimizer, steps=4, hold=hold) as step:
            for index in range(6):  # two more than are captured
                optimizer.zero_grad()
                loss = model(torch.full((2, 16), 1.0 + comm.rank + index)).sum()
                with mcr.no_sync(model):
                    loss.backward(retain_graph=True)
                loss.backward()
                mean = model[2].linear.weight.grad.clone()
                pair.all_reduce(mean, mcr.AVG)
                apart = max(apart, float((mean - model[2].linear.weight.grad).abs().max()))
                metric = torch.full((5,), float(comm.rank))
                work = mcr.all_reduce(metric, async_op=True, tag="metric")
                assert work is not None
                assert work.info.kind == "all_reduce"
                if comm.rank == 0:
                    mcr.send(metric * 0 + 7, 1, tag=3)
                else:
                    got = torch.empty(5)
                    mcr.recv(got, tag=3)
                    assert got.tolist() == [7.0] * 5
                work.wait()
                assert metric.tolist() == [1.0] * 5
                optimizer.step()
                calls.append(hooks_of(model, optimizer))
                watched.append(bool(current().engine.hooks.bound))
                with pytest.raises(mcr.InvalidArgument, match="block has ended"):
                    step.save("unfinished.json")
        buckets = wrapping._wrapped[model].reducer.buckets
        assert not current().engine.hooks.bound
        return {
            "step": plain(step.step), "seconds": step.seconds, "ranks": step.ranks, "nodes": step.nodes,
            "model": step.model, "apart": apart, "hooks": [before, *calls, hooks_of(model, optimizer)],
            "watched": watched, "buckets": buckets, "groups": len(current().groups),
            "fields": sorted(each.name for each in dataclasses.fields(step.step)),
        }  # fmt: skip


@pytest.mark.parametrize("hold", [True, False])
def test_captured_events_and_times_match_the_program(hold: bool) -> None:
    first, other = (each.value for each in run_ranks(captured, 2, args=[hold], via="torch"))
    for same in ("step", "seconds", "model", "buckets"):
        assert first[same] == other[same]
    assert first["apart"] == other["apart"] == 0.0
    assert (first["ranks"], first["nodes"]) == (2, 1)
    assert first["groups"] == 3  # world, the reducer's group, and the program's own
    for value in (first, other):
        before, *during, after = value["hooks"]
        assert during[:3] == [before + 3 + 3 + 2] * 3
        assert during[4] == before + 1  # the optimizer's own hook, which ends the last captured step
        assert after == before
        assert value["watched"] == [True] * 3 + [False] * 3
    assert [role for role, _ in first["step"]] == [[0], [1]]  # one sends, the other receives
    for rank, (_, events) in enumerate(first["step"]):
        check_events(events, rank, hold, first["buckets"])


def check_events(events: list[Any], rank: int, hold: bool, buckets: list[list[str]]) -> None:
    """Compare the events captured on a rank with the operations of `captured`."""
    ready: dict[str, float] = {}
    passed = 0.0
    for kind, *fields in events:
        if kind == ComputeEvent.__name__:
            passed += fields[1]
        elif kind == ReadyEvent.__name__:
            assert fields[0] not in ready
            assert fields[1:] == [16 * 16 * 4, "float32 cpu"]
            ready[fields[0]] = passed
    names = [f"{index}.linear.weight" for index in (2, 1, 0)]
    assert list(ready) == names
    # The first backward pass accumulates: its times are computing before the gradients are ready.
    backward = 3 * BACKWARD + SLOWER * rank
    expected = 3 * FORWARD + backward + SLOWER * rank
    for name in names:
        expected += BACKWARD
        assert expected <= ready[name] <= 2 * expected + 3  # others use the cores too
    needs = [fields[0] for kind, *fields in events if kind == NeedEvent.__name__]
    assert needs == [f"{index}.linear" for index in range(3)]
    issues = {fields[0]: IssueEvent(*fields) for kind, *fields in events if kind == IssueEvent.__name__}
    assert [
        fields[0] for kind, *fields in events if kind == WaitEvent.__name__ and fields[0] not in issues
    ] == []
    mine = [each for each in issues.values() if each.gradients]
    assert [list(each.gradients) for each in mine] == buckets
    assert all((each.kind, each.tag, *each.group) == ("all_reduce", "gradients", 0, 1) for each in mine)
    assert sum(each.nbytes for each in mine) >= 3 * 16 * 16 * 4
    rest = [(each.kind, each.tag, each.nbytes, *each.group) for each in issues.values() if not each.gradients]
    message = "recv" if rank else "send"
    assert rest[1:] == [
        ("all_reduce", None, 1024, 0, 1), ("all_reduce", "metric", 20, 0, 1), (message, None, 20, 0, 1),
    ]  # fmt: skip
    assert all(each.seconds is not None and 0 < each.seconds < 30 for each in issues.values())
    assert len({each.id for each in issues.values()}) == len(issues)
    kinds = [kind for kind, *_ in events]
    if hold:
        sent = [kinds[at:].index("IssueEvent") for at in range(len(kinds)) if kinds[at] == "ReadyEvent"]
        assert min(sent) > 0
        assert kinds.index("IssueEvent") > len(kinds) - 1 - kinds[::-1].index("ReadyEvent")


def refused() -> list[str]:
    """Run on ranks: make mistakes one after another in one job; return the errors of each rank."""
    torch.set_num_threads(1)
    told: list[str] = []
    with mcr.init({**CONFIG, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "90s"}}]}) as comm:
        model: Any = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hooks = hooks_of(model, optimizer)

        def run(loops: int, backward: bool = True, fails: str = "", **options: Any) -> None:
            began = time.monotonic()
            try:
                with mcr.capture(model, optimizer, **options):
                    for index in range(loops):
                        if fails and index == 2:
                            raise KeyError(fails)
                        if backward:
                            model(torch.ones(2, 4)).sum().backward()
                        optimizer.step()
                told.append("nothing")
            except (mcr.McrError, KeyError) as error:
                told.append(f"{type(error).__name__}: {error}")
            assert time.monotonic() - began < 45
            assert hooks_of(model, optimizer) == hooks
            assert not current().engine.hooks.bound
            check = torch.ones(2)  # the job continues
            mcr.all_reduce(check)
            assert check.tolist() == [float(comm.size)] * 2

        run(2)
        run(4 if comm.rank else 3)
        run(4, backward=False)
        run(3, steps=3 + comm.rank)
        run(3, steps=2)
        run(3, fails="of rank 1" if comm.rank else "")
        with mcr.capture(model, optimizer, steps=3):
            with pytest.raises(mcr.InvalidArgument, match="another capture is running"):
                mcr.capture(model, optimizer).__enter__()
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        told.append("nothing")
        run(3)
    return told


def test_failed_captures_raise_on_all_ranks_and_leave_nothing_behind() -> None:
    first, other = (each.value for each in run_ranks(refused, 2, via="torch"))
    expected = [
        "2 steps; expected at least 3",
        "rank 1 has 4 steps, and rank 0 3",
        "no backward pass",
        "rank 1 has steps=4, hold=True, and rank 0 steps=3, hold=True",
        "steps: 2; expected a number from 3",
    ]
    for told in (first, other):
        for what, text in zip(expected, told, strict=False):
            assert text.startswith("InvalidArgument: ")
            assert what in text
        assert told[6:] == ["nothing", "nothing"]
    assert first[5].startswith("BackendError: ")
    assert "its block of mcr.capture has ended with KeyError: 'of rank 1'" in first[5]
    assert other[5] == "KeyError: 'of rank 1'"


def test_a_capture_needs_a_job() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(mcr.NotInitialized), mcr.capture(model, optimizer):
        pass
    for wrong in [(3, optimizer), (model, model), (model, optimizer, "5"), (model, optimizer, True)]:
        with pytest.raises(mcr.InvalidArgument, match="expected"):
            mcr.capture(*wrong)  # type: ignore[arg-type]


def driven(backends: list[str]) -> list[Any]:
    """Run on ranks; return the libraries that the program must call, and the capture's text about the job."""
    torch.set_num_threads(1)
    with mcr.init({**CONFIG, "backends": backends}) as comm:
        model: Any = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mcr.wrap(model, optimizer)
        with mcr.capture(model, optimizer, steps=3) as step:
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        return [comm.polled_by_caller, step.by_caller]


@pytest.mark.long
def test_capture_records_whether_the_caller_polls_a_library() -> None:
    for backends, polled in ((["gloo"], []), (["mpi", "gloo"], ["mpi"])):
        for result in run_ranks(driven, 2, args=[backends]):
            assert result.value == [polled, bool(polled)]


def captured_apart() -> list[Any]:
    """Run on ranks: a trial of `plan: auto` in which the ranks' captures end in different passes.

    Returns the capture's text, the report of the trial, and the capture's libraries.
    """
    torch.set_num_threads(1)
    stages: list[dict[str, Any]] = [
        {"fuse": {"plan": "auto"}},
        {"select": {}},
        {"dispatch": {"timeout": "20s"}},
    ]
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages}) as comm:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = mcr.wrap(model, optimizer)

        def step(*, skipped: bool = False) -> None:
            model(torch.full((4, 8), 1.0 + comm.rank)).square().mean().backward()
            if not skipped:
                optimizer.step()

        for _ in range(6):
            step()
        said = ""
        captured = mcr.capture(model, optimizer, steps=4)
        try:
            with captured:
                for number in range(6):
                    step(skipped=comm.rank == 1 and number == 1)
        except mcr.InvalidArgument as error:
            said = str(error)
        for _ in range(20):
            step()
        measured = {name: each._asdict() for name, each in captured.measured.items()}
        return [said, mcr.plan_report(), measured]


@pytest.mark.long
def test_a_capture_that_ends_apart_leaves_the_trial_alike_on_all_ranks() -> None:
    first, other = (each.value for each in run_ranks(captured_apart, 2, via="torch"))
    assert first[1] == other[1]
    assert first[1]["chosen"] in ("searched", "by size")
    assert first[0] == other[0] == ""
    assert first[2] == other[2]
    (gloo,) = first[2].values()
    assert gloo["kind"] == "all_reduce"
    assert len(gloo["sizes"]) == len(gloo["seconds"]) == len(gloo["shares"])
    assert min(gloo["seconds"]) > 0
