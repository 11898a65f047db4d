"""`mcr.compile`: gradients equal the eager model's and become ready part by part."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import mcr_plus as mcr
from mcr_plus.bucketing.compiled import CompiledCall, GraphPart, blocks
from mcr_plus.bucketing.step import ReadyEvent
from mcr_plus.training import reducer
from mcr_plus.training import wrap as wrapping

WIDTH = 8
LAYERS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = self.up(x)
        if self.breaks:
            torch._dynamo.graph_break()
        total: torch.Tensor = x + self.down(torch.tanh(middle))
        return total


class Model(nn.Module):
    """Blocks between an embedding and a head that is tied to it; `norm` has a buffer."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(()))
        self.recomputes = self.repeats = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in [*self.blocks, *self.blocks] if self.repeats else self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        logits: torch.Tensor = nn.functional.linear(self.norm(x) * self.scale, self.embedding.weight)
        return logits


def model_of(kind: str) -> Model:
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = Model()
    model.recomputes, model.repeats = kind == "checkpoints", kind == "shared blocks"
    if kind == "graph break":
        block: Any = model.blocks[1]
        block.breaks = True
    if kind == "frozen":
        model.blocks[1].requires_grad_(False)
    return model


def ready_in(model: nn.Module) -> list[str]:
    """Return a list that collects the names of parameters as their gradients become ready."""
    seen: list[str] = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    return seen


def passes(model: nn.Module, twin: nn.Module, sizes: Sequence[int]) -> None:
    """Run the same backward passes on both models; raise if gradients differ."""
    for size in sizes:
        batch = torch.randint(11, (size, 3), generator=torch.Generator().manual_seed(size))
        for each in (model, twin):
            each.zero_grad()
            each(batch).square().sum().backward()
        for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            if other.grad is None:
                assert param.grad is None, name
            else:
                torch.testing.assert_close(param.grad, other.grad, msg=partial("{}: {}".format, name))


def parts_of(names: Sequence[str]) -> list[str]:
    """Return the parts (0, 1, 2, or the head) of gradients in the order in which they become ready."""

    def part(name: str) -> str:
        if name.startswith("blocks."):
            return name.split(".")[1]
        return "head" if name.startswith("norm") else "0"  # the embedding is in the first part

    return [key for key, _ in groupby(map(part, names))]


def compared(kind: str, cuts: Any, sizes: Sequence[int], backend: str = "aot_eager") -> list[str]:
    """Compare a model with its eager twin; return the order in which parts become ready in the last pass."""
    model = model_of(kind)
    if backend == "inductor":
        model.double()  # fused operators round otherwise, which sums of large gradients show in float32
    twin = copy.deepcopy(model)
    assert mcr.compile(model, cuts=cuts, backend=backend) is model
    seen = ready_in(model)
    passes(model, twin, sizes)
    with torch.no_grad():
        x = torch.arange(3)[None]
        torch.testing.assert_close(model.eval()(x), twin.eval()(x), rtol=1e-4, atol=1e-4)
    return parts_of(seen[-(len(seen) // len(sizes)) :])


def test_gradients_are_those_of_the_model_and_ready_part_after_part() -> None:
    assert compared("checkpoints", "blocks", [4]) == ["head", "2", "1", "0"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo reads after a break
@pytest.mark.parametrize("kind", ["plain", "frozen", "graph break", "shared blocks"])
def test_every_kind_of_model_has_its_own_gradients(kind: str) -> None:
    ready = {
        name: compared(kind, cuts, [4, 6, 6, 9])
        for name, cuts in (("blocks", "blocks"), ("named", ["blocks.1"]), ("none", "none"))
    }
    if kind == "plain":
        assert ready["blocks"] == ["head", "2", "1", "0"]
        half = [{"0": 0, "1": 0}.get(part, 1) for part in ready["named"]]  # a part's in any order
        assert half == sorted(half, reverse=True)
        assert set(half) == {0, 1}
        half = [{"0": 0, "1": 0}.get(part, 1) for part in ready["none"]]
        assert half != sorted(half, reverse=True)
    if kind == "frozen":
        assert ready["blocks"] == ["head", "2", "0"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # by Inductor's own imports
@pytest.mark.filterwarnings("ignore:Skipping serialization of skipfiles_inline")  # of torch 2.6
@pytest.mark.parametrize("kind", ["plain", "checkpoints"])
def test_inductor_compiles_parts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compared(kind, "blocks", [4, 6], "inductor") == ["head", "2", "1", "0"]


@pytest.mark.long
def test_parts_are_compiled_by_themselves_and_evaluation_is_not_cut() -> None:
    compiled: list[int] = []

    def counts(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(len(graph.graph.find_nodes(op="placeholder")))
        return graph.forward

    x = torch.ones(2, 4)
    for cuts, expected in (("blocks", 3), (["0"], 2), ([], 1), ("auto", 1)):
        compiled.clear()
        layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()]
        model = mcr.compile(nn.Sequential(*layers), cuts=cuts, backend=counts, fullgraph=True)
        names = list(model.state_dict())
        model(x).sum().backward()
        assert len(compiled) == expected
        with torch.no_grad():
            model(x)
        assert len(compiled) == expected + 1
        assert list(model.state_dict()) == names
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other._compiled_call_impl is None
            assert torch.equal(other(x), model(x))
    call = model._compiled_call_impl
    assert isinstance(call, CompiledCall)
    call.set_cuts(["2", "0"])
    model(x).sum().backward()
    assert [part.after for part in call.parts()] == [(), ("0",), ("2",)]
    call.set_cuts([])
    assert [len(part.parameters) for part in call.parts()] == [6]


def test_blocks_are_the_children_of_containers() -> None:
    nested = nn.ModuleDict(
        {
            "stages": nn.Sequential(
                nn.Sequential(Block(), Block()), nn.ReLU(), nn.Sequential(nn.Sequential(Block()), Block())
            ),
            "heads": nn.ModuleList([nn.Linear(2, 2)]),
        }
    )
    assert blocks(nested) == ["stages.0.0", "stages.0.1", "stages.2.1"]
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "2"]
    assert blocks(nn.Linear(2, 2)) == []


@pytest.mark.filterwarnings("ignore")  # from imports of other backends
def test_invalid_arguments_of_compile_are_refused() -> None:
    model = model_of("plain")
    for cuts, said in (
        (["blocks.7"], r"no module 'blocks.7'; modules: embedding, blocks, blocks.0, .*"),
        ("block", "got 'block', expected 'auto', 'none', 'blocks' or a list"),
    ):
        with pytest.raises(ValueError, match=said):
            mcr.compile(model, cuts=cuts)
    with pytest.raises(ValueError, match=r"no 'induktor'; known: .*inductor"):
        mcr.compile(model, backend="induktor")
    with pytest.raises(ValueError, match=r"expected only with backend='inductor', got 'aot_eager'"):
        mcr.compile(model, backend="aot_eager", mode="max-autotune")
    with pytest.raises(ValueError, match=r"is the result of torch\.compile"):
        mcr.compile(cast("nn.Module", torch.compile(model, backend="eager")))
    with pytest.raises(ValueError, match=r"expected a torch.nn.Module, got function"):
        mcr.compile(cast("Any", blocks))
    assert model._compiled_call_impl is None


# -- on ranks -----------------------------------------------------------------------------------------------


def trained(plan: str, cuts: str, wrap_first: bool, steps: int) -> dict[str, Any]:
    """Run on ranks: the report, and the gradients' error against an eager twin's mean over ranks."""
    torch.set_num_threads(1)
    stages: list[dict[str, Any]] = [
        {"fuse": {"plan": plan, "bucket": "2KiB"}},
        {"select": {}},
        {"dispatch": {}},
    ]
    worst = 0.0
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages}) as comm:
        model: Any = model_of("plain")
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if wrap_first:
            mcr.wrap(model, optimizer)
        mcr.compile(model, cuts=cuts, backend="aot_eager", fullgraph=True)
        if not wrap_first:
            mcr.wrap(model, optimizer)
        for step in range(steps):
            twin.zero_grad()
            optimizer.zero_grad()
            for turn in range(2 if step < 3 else 1):  # only the last turn is averaged
                batches = [
                    torch.randint(
                        11, (4, 3), generator=torch.Generator().manual_seed(9 * step + turn + 99 * rank)
                    )
                    for rank in range(comm.size)
                ]
                if turn == 0 and step < 3:
                    with mcr.no_sync(model):  # broadcasts no buffers
                        model.scale.fill_(1.0)
                        model(batches[comm.rank]).square().mean().backward()
                else:
                    model.scale.fill_(1.0 + comm.rank)  # broadcast from the first rank
                    model(batches[comm.rank]).square().mean().backward()
                for batch in batches:
                    (twin(batch).square().mean() / comm.size).backward()
            for param, mean in zip(model.parameters(), twin.parameters(), strict=True):
                if mean.grad is None:
                    assert param.grad is None
                else:
                    worst = max(worst, float((param.grad - mean.grad).abs().max() / mean.grad.abs().max()))
        buckets = wrapping._wrapped[model].reducer.buckets
        call = model._compiled_call_impl
        report = mcr.plan_report()
    return {"report": report, "worst": worst, "buckets": buckets, "cuts": call.cuts}


@pytest.mark.long
@pytest.mark.parametrize("wrap_first", [True, False])
def test_gradients_of_a_model_compiled_in_parts_are_averaged(wrap_first: bool) -> None:
    one, other = run_ranks(trained, 2, args=["size", "blocks", wrap_first, 4], via="torch")
    assert one.value["buckets"] == other.value["buckets"]
    assert max(one.value["worst"], other.value["worst"]) < 1e-5
    assert one.value["buckets"][0][0].startswith(("norm", "unused"))


@pytest.mark.long
@pytest.mark.parametrize("plan", ["size", "auto"])
def test_cuts_are_chosen_in_the_job_alike_on_all_ranks(plan: str) -> None:
    results = [
        each.value for each in run_ranks(trained, 2, args=[plan, "auto", plan == "auto", 37], via="torch")
    ]
    report = results[0]["report"]
    assert [each["report"] for each in results] == [report] * 2
    assert max(each["worst"] for each in results) < 1e-5
    assert set(report["tried_ms"]) == {"whole", "blocks"} | ({"searched"} if plan == "auto" else set())
    assert report["chosen"] in report["tried_ms"]
    assert report["cuts_known"] == 3
    for each in results:
        assert each["cuts"] == report["cuts"]
        assert each["buckets"] == report["buckets"]


class Slow:
    """A stand-in for the compiled call of a model of `LAYERS` layers: some cuts make its forward pass slow.

    The reducer's clock gains a second in each slow pass: far more than a busy machine adds to the others.
    """

    def __init__(self, model: nn.Module, slow: str) -> None:
        self.places = tuple(str(layer) for layer in range(LAYERS))
        self.is_auto, self.cuts, self.slow = True, tuple[str, ...](), slow
        self.prefix = ""  # of the layers' names
        self.ahead = 0.0  # seconds
        setattr(reducer, "perf_counter", lambda: time.perf_counter() + self.ahead)  # noqa: B010 - in a rank
        model.register_forward_pre_hook(self.wait)

    def set_cuts(self, cuts: Sequence[str]) -> None:
        self.cuts = tuple(place for place in self.places if place in cuts)

    def wait(self, *_: object) -> None:
        if self.slow == ("blocks" if self.cuts else "whole"):
            self.ahead += 1.0

    def parts(self) -> list[GraphPart]:
        assert self.cuts == self.places
        return [
            GraphPart(
                (str(layer - 1),) if layer else (),
                (f"{self.prefix}{layer}.weight", f"{self.prefix}{layer}.bias"),
            )
            for layer in range(LAYERS)
        ]


def chosen(slow: str, plan: str) -> tuple[dict[str, Any], list[list[str]], tuple[str, ...]]:
    """Run on ranks; return the report of a trial, the buckets, and the cuts after it."""
    torch.set_num_threads(1)
    stages: list[dict[str, Any]] = [{"fuse": {"plan": plan}}, {"select": {}}, {"dispatch": {}}]
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages}) as comm:
        model: Any = nn.Sequential(*[nn.Linear(20, 20) for _ in range(LAYERS)])
        call = Slow(model, slow)
        mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        own = wrapping._wrapped[model].reducer
        own.use(call)  # type: ignore[arg-type]
        for step in range(1 + 8 + 9 * (3 if plan == "auto" else 2) + 1):
            assert mcr.plan_report() is None or step > 8 + 9 * 2
            model.zero_grad()
            model(torch.full((2, 20), float(comm.rank))).sum().backward()
            torch.testing.assert_close(model[-1].bias.grad, torch.full((20,), 2.0))
        report = mcr.plan_report()
        assert report is not None
        return report, own.buckets, call.cuts


@pytest.mark.short("whole")
@pytest.mark.parametrize(
    ("slow", "plan", "expected"),
    [("whole", "size", "blocks"), ("blocks", "size", "whole"), ("blocks", "auto", None)],
)
def test_the_faster_cuts_stay_alike_on_all_ranks(slow: str, plan: str, expected: str | None) -> None:
    results = run_ranks(chosen, 2, args=[slow, plan], via="torch")
    first, other = (each.value for each in results)
    assert first == other
    report, buckets, cuts = first
    assert expected is None or report["chosen"] == expected
    assert report["buckets"] == buckets
    assert report["cuts"] == cuts
    assert report["cuts_known"] == LAYERS - 1
    assert cuts == ([] if expected == "whole" else ["0", "1", "2"] if expected == "blocks" else cuts)
    if plan == "auto":
        assert set(report["tried_ms"]) == {"whole", "blocks", "searched"}
        assert 0 < report["compute_ms"] < report["bound_ms"] <= report["foretold_ms"] * (1 + 1e-9)


class Branching(nn.Module):
    """Layers, and one more that only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(20, 20) for _ in range(LAYERS)])
        self.extra = nn.Linear(20, 20)
        self.uses_extra = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.extra(x) if self.uses_extra else x


def branched(when: str, plan: str) -> tuple[float, list[str], list[str]]:
    """Run on ranks: a trial of cuts of a model with a layer that the first rank does not use meanwhile.

    Returns how far gradients are from their mean over ranks in any pass, the names of the parameters in
    buckets after the trial, and of all.
    """
    torch.set_num_threads(1)
    stages: list[dict[str, Any]] = [
        {"fuse": {"plan": plan}},
        {"select": {}},
        {"dispatch": {"timeout": "20s"}},
    ]
    worst = 0.0
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages}) as comm:
        torch.manual_seed(1)
        model = Branching()
        call = Slow(model, "whole")
        call.prefix = "body."
        mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        own = wrapping._wrapped[model].reducer
        own.use(call)  # type: ignore[arg-type]
        passes = 1 + 8 + 9 * (3 if plan == "auto" else 2)
        for number in range(passes + 3):
            model.uses_extra = comm.rank == 1 if when == "on rank 1" else number in (0, passes, passes + 2)
            model.zero_grad()
            model(torch.full((2, 20), 1.0 + comm.rank)).sum().backward()
            for param in model.parameters():
                if param.grad is not None:
                    mean = param.grad.clone()
                    comm.all_reduce(mean, mcr.AVG)
                    worst = max(worst, float((param.grad - mean).abs().max()))
        assert mcr.plan_report() is not None
        planned = sorted(name for bucket in own.buckets for name in bucket)
        return worst, planned, sorted(name for name, _ in model.named_parameters())


@pytest.mark.long
@pytest.mark.parametrize("plan", ["size", "auto"])
@pytest.mark.parametrize("when", ["later", "on rank 1"])
def test_gradients_missing_from_a_capture_are_averaged(when: str, plan: str) -> None:
    for result in run_ranks(branched, 2, args=[when, plan], via="torch"):
        worst, planned, names = result.value
        assert worst == 0
        assert planned == names


def captured_compiled(when: str) -> list[Any]:
    """Run on ranks; return the numbers of graphs compiled in all and after a capture, and its events.

    `when`: the capture is the first use of the model, or comes after some steps.
    """
    torch.set_num_threads(1)
    compiled: list[int] = []

    def counts(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    stages: list[dict[str, Any]] = [{"select": {}}, {"dispatch": {}}]
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages}):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(LAYERS)])
        mcr.compile(model, cuts="none", backend=counts, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mcr.wrap(model, optimizer)

        def steps(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()

        if when == "later":
            steps(2)
        with mcr.capture(model, optimizer, steps=3) as step:
            steps(3)
        during = len(compiled)
        steps(2)
        ready = [event.param for event in step.roles[0].events if isinstance(event, ReadyEvent)]
        return [during, len(compiled), sorted(ready)]


@pytest.mark.long
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_capture_leaves_the_graph_whole(when: str) -> None:
    for result in run_ranks(captured_compiled, 2, args=[when], via="torch"):
        during, after, ready = result.value
        assert (during, after) == (1, 1)
        assert ready == sorted(f"{layer}.{what}" for layer in range(LAYERS) for what in ("weight", "bias"))
