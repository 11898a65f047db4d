"""Buckets of a file, and of the state that a job has saved, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn

import mcr_plus as mcr
from mcr_plus.bucketing import auto_plan
from mcr_plus.bucketing.auto_plan import AutoPlan, Captured
from mcr_plus.bucketing.saved import SavedBucket, SavedPlan, digests
from mcr_plus.bucketing.search import FoundPlan
from mcr_plus.bucketing.step import model_hash
from mcr_plus.config.reader import load
from mcr_plus.core.kinds import dtype_name
from mcr_plus.training import wrap as wrapping

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")


def network(width: int = 5) -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2))


def plan_of(model: Any, ranks: int, *buckets: tuple[str, ...], library: str | None = "gloo") -> SavedPlan:
    named = [(name, param.shape, dtype_name(param.dtype)) for name, param in model.named_parameters()]
    made = [SavedBucket(params=names, library=library) for names in buckets]
    return SavedPlan(model=model_hash(named), ranks=ranks, buckets=tuple(made))


def stages(plan: str) -> list[dict[str, Any]]:
    return [{"fuse": {"plan": plan}}, {"select": {}}, {"dispatch": {"timeout": "20s"}}]


def trained_by(file: str, width: int = 5) -> list[Any]:
    """Run on ranks: the buckets, the report, the libraries in use, and the largest error of gradients."""
    torch.set_num_threads(1)
    with mcr.init({"version": 1, "pipeline": stages(file)}) as comm:
        model = network(width)
        model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        twin = network(width)
        worst = 0.0
        with mcr.record() as log:
            for step in range(3):
                optimizer.zero_grad()
                inputs = [torch.full((4, 3), 1.0 + step + rank) for rank in range(comm.size)]
                model(inputs[comm.rank]).square().mean().backward()
                found = []
                for each in inputs:
                    twin.zero_grad()
                    twin(each).square().mean().backward()
                    found.append([param.grad.double().numpy().copy() for param in twin.parameters()])
                for param, *theirs in zip(model.parameters(), *found, strict=True):
                    mean = np.mean(theirs, axis=0)
                    worst = max(worst, float(np.abs(param.grad.double().numpy() - mean).max()))
        sent = [record.backend for record in log.records if record.tag == "gradients"]
        buckets = wrapping._wrapped[model].reducer.buckets
        return [buckets, mcr.plan_report(), sent[: len(buckets)], worst]


def test_buckets_of_a_file_are_used_from_the_first_pass_on(tmp_path: Path) -> None:
    # 1.weight is ready after 2.weight, so that the second bucket waits for the first.
    buckets = (("2.bias", "1.weight"), ("2.weight",), ("0.bias", "0.weight", "1.bias"))
    plan = plan_of(network(), 2, *buckets)
    file = tmp_path / "plan.json"
    plan.save(file)
    assert SavedPlan.load(file) == plan
    for rank, result in enumerate(run_ranks(trained_by, 2, args=[str(file)])):
        used, report, sent, worst = result.value
        assert result.stderr.count("bucket 1 waits for '1.weight' in bucket 0") == (rank == 0)
        assert used == [list(names) for names in buckets]
        assert report == {"plan": "file", "buckets": used, "libraries": ["gloo"] * 3, "codecs": [None] * 3}
        assert sent == ["gloo"] * 3
        assert worst < 1e-5


def mixed(file: str) -> list[Any]:
    """Run on ranks; return the buckets, the report, and gradients as sums of both ranks' inputs.

    The second layer has another dtype, the third one is used by rank 1 alone, the fourth by no rank.
    """
    torch.set_num_threads(1)
    with mcr.init({"version": 1, "pipeline": stages(file)}) as comm:
        torch.manual_seed(3)
        model = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(4))
        model[1].double()
        wrapped, _ = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        for step in range(2):
            model.zero_grad()
            x = torch.full((2, 3), 1.0 + step + comm.rank)
            loss = model[0](x).sum() + model[1](x.double()).sum()
            if comm.rank == 1:
                loss = loss + model[2](x).sum()
            loss.backward()
            found.append([None if p.grad is None else p.grad.double().tolist() for p in model.parameters()])
        return [wrapping._wrapped[wrapped].reducer.buckets, mcr.plan_report(), found]


def test_unused_gradients_follow_the_plan_and_dtypes_are_parted(tmp_path: Path) -> None:
    model = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(4))
    model[1].double()
    plan = plan_of(model, 2, ("2.weight",), ("1.weight", "0.weight"))
    plan = plan.model_copy(update={"unused": ("3.weight",)})
    plan.save(tmp_path / "plan.json")
    buckets = [["2.weight"], ["1.weight"], ["0.weight"], ["3.weight"]]
    for rank, result in enumerate(run_ranks(mixed, 2, args=[str(tmp_path / "plan.json")])):
        used, report, found = result.value
        assert used == buckets
        assert report == {
            "plan": "file", "buckets": buckets, "libraries": ["gloo", "gloo", "gloo", None],
            "codecs": [None] * 4,
        }  # fmt: skip
        assert result.stderr.count("is sent as 2, since its gradients have several dtypes") == (rank == 0)
        for step, grads in enumerate(found):
            inputs = [2.0 * (1 + step + other) for other in range(2)]  # a row has two samples
            expected = [sum(inputs) / 2, sum(inputs) / 2, inputs[1] / 2]
            for grad, value in zip(grads, expected, strict=False):
                assert np.allclose(grad, np.full((3, 3), value))
            assert grads[3] is None


def refused(folder: str) -> list[str]:
    """Run on ranks; return the error of `mcr.wrap` with each of the folder's plans."""
    found = []
    for file in sorted(Path(folder).iterdir()):
        with mcr.init({"version": 1, "pipeline": stages(str(file))}):
            model = network()
            with pytest.raises(mcr.ConfigError) as error:
                mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
            found.append(str(error.value))
    return found


@pytest.mark.long
def test_a_plan_of_something_else_is_refused_on_all_ranks(tmp_path: Path) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"ranks": 3}, "the plan is for 3 ranks, and this job has 2"),
        ({"model": "0" * 16}, "shapes or dtypes of parameters differ"),
        ({"buckets": [{"params": NAMES[:5]}]}, "parameter '2.bias' of this model is not in the plan"),
        ({"buckets": [{"params": [*NAMES, "3.bias"]}]}, "'3.bias' is in the plan, but not among"),
        ({"buckets": [{"params": [*NAMES, "0.bias"]}]}, "parameter '0.bias' is in two buckets"),
        ({"buckets": [{"params": NAMES, "library": "nccl"}]}, "'nccl' is not among those of this job"),
    ]
    good = plan_of(network(), 2, NAMES).model_dump(mode="json")
    changes += [
        ({"nodes": 2}, "the plan is for 2 nodes, and this job has 1"),
        ({"ranks_per_node": 1}, "the plan is for 1 ranks per node, and this job has 2"),
        ({"tables": ["0123456789"]}, "made with other tables: digests 01234567, and here none"),
    ]
    for number, (change, _) in enumerate(changes):
        (tmp_path / f"plan{number}.json").write_text(json.dumps(good | change))
    for result in run_ranks(refused, 2, args=[str(tmp_path)]):
        for number, ((_, said), message) in enumerate(zip(changes, result.value, strict=True)):
            assert said in message
            assert f"plan{number}.json" in message


def with_table(plan: str, table: str) -> str:
    """Run on ranks; return the error of wrapping a model under a plan and a table."""
    pipeline: list[dict[str, Any]] = [
        {"fuse": {"plan": plan}},
        {"select": {"table": table}},
        {"dispatch": {}},
    ]
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": pipeline}):
        model = network()
        try:
            mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except mcr.ConfigError as error:
            return str(error)
        return ""


def test_a_plan_is_for_the_tables_that_it_was_made_with(tmp_path: Path) -> None:
    table, file = tmp_path / "table.yaml", tmp_path / "plan.json"
    table.write_text("version: 1\nrules:\n  - {kind: all_reduce, bytes: 0.., backend: gloo}\n")
    config = load({"version": 1, "pipeline": [{"select": {"table": str(table)}}, {"dispatch": {}}]})
    plan = plan_of(network(), 2, NAMES).model_copy(update={"tables": digests(config)})
    plan.save(file)
    assert SavedPlan.load(file) == plan
    args = [str(file), str(table)]
    assert [each.value for each in run_ranks(with_table, 2, args=args, via="torch")] == ["", ""]
    table.write_text(table.read_text() + "# of another day\n")
    for result in run_ranks(with_table, 2, args=args, via="torch"):
        assert "the plan was made with other tables: digests " in result.value


@pytest.mark.long
def test_a_plan_for_more_ranks_is_refused_on_one(tmp_path: Path) -> None:
    plan_of(network(), 8, NAMES).save(tmp_path / "plan.json")
    (result,) = run_ranks(refused, 1, args=[str(tmp_path)])
    assert "the plan is for 8 ranks, and this job has 1" in result.value[0]


class Swapping(nn.Module):
    """Two layers whose order depends on the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.swapped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.a(self.b(x)) if self.swapped else self.b(self.a(x))
        return y


def reordered(plan: str) -> float:
    """Run on ranks: gradients come in another order in the last passes; return their errors."""

    def apart(_: AutoPlan, captured: Captured, __: Any) -> FoundPlan:
        return FoundPlan([(at, at + 1, 0) for at in range(len(captured.order))], 1.0, 0.5, True)

    torch.set_num_threads(1)
    worst = 0.0
    with (
        patch.object(AutoPlan, "_searched", apart),
        patch.object(auto_plan, "MARGIN", -9.0),  # whatever it takes, the searched plan stays
        mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages(plan)}) as comm,
    ):
        torch.manual_seed(3)
        model = Swapping()
        mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        passes = 24 if plan == "auto" else 3
        for number in range(passes + 3):
            model.swapped = number >= passes
            model.zero_grad()
            model(torch.full((2, 4), 1.0 + comm.rank)).square().sum().backward()
            for param in model.parameters():
                assert param.grad is not None
                mean = param.grad.clone()
                comm.all_reduce(mean, mcr.AVG)
                worst = max(worst, float((param.grad - mean).abs().max()))
        assert len(wrapping._wrapped[model].reducer.buckets) == 2
    return worst


@pytest.mark.parametrize("plan", ["auto", "file"])
def test_later_change_of_order_is_logged_once_and_keeps_the_plan(plan: str, tmp_path: Path) -> None:
    if plan == "file":
        file = tmp_path / "plan.json"
        plan_of(Swapping(), 2, ("b.weight",), ("a.weight",)).save(file)
        plan = str(file)
    for rank, result in enumerate(run_ranks(reordered, 2, args=[plan])):
        assert result.value == 0
        assert result.stderr.count("are kept, but gradients become ready in another order") == (rank == 0)
        assert result.stderr.count("bucket 1 waits for 'b.weight' in bucket 0") == (rank == 0)


def elsewhere() -> list[Any]:
    """Run on ranks: load a state with the plan of a job of as many ranks on two nodes."""
    found: list[Any] = []
    model = network()
    saved = plan_of(model, 2, NAMES).model_dump(mode="json")
    for change in ({"nodes": 1, "ranks_per_node": 2}, {"nodes": 2, "ranks_per_node": 1}):
        with mcr.init({"version": 1, "pipeline": stages("auto")}):
            state = mcr.state_dict()
            state["plans"] = {"world": {saved["model"]: saved | change}}
            mcr.load_state_dict(state)
            model = network()
            mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
            found.append(wrapping._wrapped[model].reducer._auto is None)
    return found


@pytest.mark.long
def test_a_plan_of_other_nodes_is_planned_anew() -> None:
    for result in run_ranks(elsewhere, 2):
        assert result.value == [True, False]


def test_files_that_are_no_plan_are_refused_with_their_place(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan_of(network(), 2, NAMES).save(file)
    good = file.read_text()
    for content, said in (
        ("{", ":1: document: invalid JSON"),
        ("", ":1: document: invalid JSON"),
        ("\xff", ":1: document: invalid JSON"),
        ("[]", ":1: document: input should be an object, got []"),
        (good.replace('"version": 1', '"version": 2'), ":1: version: input should be 1, got 2"),
        (good.replace('"model"', '"more"'), ":1: model: field required"),
        (
            good.replace(f'"{NAMES[0]}"', "1"),
            ":3: buckets[0].params[0]: input should be a valid string, got 1",
        ),
    ):
        file.write_text(content, encoding="latin-1")
        for place in (None, "run.yaml:3: fuse.plan"):
            with pytest.raises(mcr.ConfigError) as error:
                SavedPlan.load(file, place)
            start = f"{file}{said}" if place is None else f"{place}: plan.json{said}"
            assert str(error.value).startswith(start), (str(error.value), start)
            assert str(error.value).endswith("expected a plan that `mcr-plus plan -o` wrote")


def resumed(late: bool) -> list[Any]:
    """Run on ranks: a trial, and then a job that has loaded its state, before or after wrapping.

    Returns both reports, and whether the second job went on with a trial; then the same for another model.
    """

    def one_by_one(_: AutoPlan, captured: Captured, libraries: Any) -> FoundPlan:
        return FoundPlan(
            [(at, at + 1, at % len(libraries)) for at in range(len(captured.order))], 1.0, 0.5, True
        )

    torch.set_num_threads(1)
    found: list[Any] = []
    state: Any = None
    # Whichever is faster stays; this test only asks that one is kept.
    with patch.object(AutoPlan, "_searched", one_by_one), patch.object(auto_plan, "ROUNDS", 1):
        for width, passes in ((5, 14), (5, 2), (6, 2)):
            with mcr.init({"version": 1, "pipeline": stages("auto")}) as comm:
                model = network(width)
                if state is not None and not late:
                    mcr.load_state_dict(state)
                model, _ = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
                if state is not None and late:
                    mcr.load_state_dict(state)
                for _ in range(passes):
                    model(torch.full((4, 3), 1.0 + comm.rank)).square().mean().backward()
                reducer = wrapping._wrapped[model].reducer
                found += [mcr.plan_report(), reducer._auto is not None, reducer.buckets]
                state = mcr.state_dict() if state is None else state
    return found


@pytest.mark.long
@pytest.mark.parametrize("late", [False, True])
def test_loaded_state_restores_the_plan_without_a_trial(late: bool) -> None:
    first, other = run_ranks(resumed, 2, args=[late])
    assert first.value == other.value
    tried, going_on, chosen, report, again, used, anew, begun, _ = first.value
    assert tried["chosen"] in ("searched", "by size")
    assert not going_on
    assert report == {
        "plan": "state", "buckets": chosen, "libraries": tried["libraries"], "codecs": tried["codecs"],
    }  # fmt: skip
    assert used == chosen == tried["buckets"]
    assert not again
    assert anew is None
    assert begun  # another model is planned again
