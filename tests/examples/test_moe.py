"""The mixture-of-experts example: gating against one token at a time, and the job on real ranks."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import by_hand
import experts
import numpy as np
import options
import parallel
import pytest
import torch
import typer
from corpus import Corpus
from example_runs import EXAMPLES, RANKS_ENV, TINY, alone, launch
from experts import ExpertShape, balance_loss, build, gate
from libraries import JobError
from ranks import run_ranks
from torch import Tensor, nn
from transformer import LanguageModel, parameters, read_shape

from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- gating -------------------------------------------------------------------------------------------


def routed(logits: Any, top_k: int, capacity: int) -> tuple[list[tuple[int, int, float]], list[int], int]:
    """(expert, token, weight), by expert and token, first choices by expert, and how many were dropped."""
    tokens, count = logits.shape
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    queues: list[list[tuple[int, int, float]]] = [[] for _ in range(count)]
    first, dropped = [0] * count, 0
    for choice in range(top_k):
        for token in range(tokens):
            best = np.argsort(-probabilities[token])[:top_k].tolist()
            expert = best[choice]
            weight = probabilities[token, expert]
            if top_k == 2:
                weight /= probabilities[token, best].sum()
            first[expert] += choice == 0
            if len(queues[expert]) < capacity:
                queues[expert].append((expert, token, weight))
            else:
                dropped += 1
    return [each for queue in queues for each in sorted(queue)], first, dropped


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(("tokens", "count", "capacity"), [(1, 2, 1), (17, 5, 3), (40, 8, 5), (30, 3, 100)])
def test_gating_is_that_of_one_token_at_a_time(top_k: int, tokens: int, count: int, capacity: int) -> None:
    logits = np.random.default_rng(tokens).standard_normal((tokens, count)) * 2
    expected, first, dropped = routed(logits, top_k, capacity)
    gated = gate(torch.from_numpy(logits), top_k)
    routing = by_hand.choices(gated.chosen, gated.weights, count, capacity)
    of_expert = torch.arange(count).repeat_interleave(routing.kept).tolist()
    assert [(e, t) for e, t, _ in expected] == list(zip(of_expert, routing.token.tolist(), strict=True))
    np.testing.assert_allclose([weight for _, _, weight in expected], routing.weight)
    assert routing.first.tolist() == first
    assert routing.dropped == dropped
    np.testing.assert_allclose(gated.importance, torch.from_numpy(logits).softmax(1).mean(0))


def test_balance_is_the_formula() -> None:
    """Switch, equation 4: N · Σ f_i · P_i."""
    first, importance = torch.tensor([5, 0, 3]), torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    expected = 3 * (5 / 8 * 0.5 + 0 + 3 / 8 * 0.3)
    assert balance_loss(first, importance).item() == pytest.approx(expected)
    assert balance_loss(torch.tensor([4, 4]), torch.tensor([0.5, 0.5])).item() == 1


# --- the layer ----------------------------------------------------------------------------------------


class Alone:
    """A transport of one rank, without a library."""

    rank, world_size, expert = 0, 1, None

    def all_to_all(self, x: Tensor, received: list[int], sent: list[int], tag: str) -> Tensor:
        assert received == sent == [len(x)]
        return x

    def replicate(self, x: Tensor, tag: str) -> Tensor:
        return x

    def all_reduce(self, x: Tensor, tag: str) -> Tensor:
        return x

    def data_parallel(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        return model

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def record(self, folder: Path | None = None) -> nullcontext[None]:
        assert folder is None
        return nullcontext()

    def close(self) -> None: ...


SMALL = {"layers": 2, "hidden": 12, "heads": 2, "sequence": 9, "experts": 6, "moe_every": 1}


def small(**changes: Any) -> ExpertShape:
    return read_shape(ExpertShape, None, {**SMALL, "capacity": 100.0, **changes})


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_token_gets_its_experts_answers_or_nothing(top_k: int) -> None:
    shape = small(top_k=top_k, capacity=0.7)
    layer = build(shape, 3, Alone()).double().blocks[0].feed_forward
    assert isinstance(layer, experts.Experts)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    tokens = x.flatten(0, 1)
    expected = torch.zeros_like(tokens)
    room = math.ceil(0.7 * top_k * 14 / 6)
    kept, _, dropped = routed(layer.gate(tokens).detach().numpy(), top_k, room)
    for expert, token, weight in kept:
        expected[token] += weight * layer.own[expert](tokens[token : token + 1]).output[0]
    output, _, share = layer(x)
    assert dropped > 0
    assert share == pytest.approx(dropped / (14 * top_k))
    torch.testing.assert_close(output.flatten(0, 1), expected)


def test_every_second_layer_has_experts() -> None:
    def layers(**changes: Any) -> list[bool]:
        model = build(small(layers=5, **changes), 0, Alone())
        return [isinstance(block.feed_forward, experts.Experts) for block in model.blocks]

    assert layers(moe_every=2) == [False, True, False, True, False]
    assert layers(moe_every=1) == [True] * 5


def text() -> Corpus:
    return Corpus(np.random.default_rng(5).integers(0, 256, 2000, dtype=np.uint8), "noise", 9, seed=4)


def keep_gradients(model: LanguageModel, shape: ExpertShape, rank: int, ranks: int) -> dict[str, Any]:
    """Return the model's gradients as lists, experts under the numbers they have among all."""
    own = shape.experts // ranks
    found = {}
    for name, parameter in model.named_parameters():
        head, _, tail = name.partition(".own.")
        if tail:
            number, _, tail = tail.partition(".")
            name = f"{head}.own.{int(number) + rank * own}.{tail}"
        found[name] = None if parameter.grad is None else parameter.grad.tolist()
    return found


def starve(model: LanguageModel) -> LanguageModel:
    """Have all tokens choose the first expert: most ranks get no row at all."""
    blocks: Any = model.blocks  # the annotations do not tell the type of a ModuleList's items
    for block in blocks:
        nn.init.zeros_(block.feed_forward.gate.weight)
    return model


VARIANTS: dict[str, dict[str, Any]] = {"top 1": {}, "top 2": {"top_k": 2}, "starved": {}}


def train_small(comms: parallel.Transport, variant: str, windows: list[int]) -> dict[str, Any]:
    """Three steps: their losses, and the gradients of the last. `windows`: streams of the batch.

    Over ours by `mcr.expert`; over torch.distributed, and in one process, by hand.
    """
    shape = small(**VARIANTS[variant])
    model = build(shape, 7, comms).double()
    if variant == "starved":
        starve(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    called = comms.data_parallel(model, optimizer)
    corpus, losses = text(), []
    for step in range(3):
        optimizer.zero_grad()
        batch = torch.cat([corpus.windows(step, stream, 3) for stream in windows])
        found = called(batch)
        (found.text + found.penalty).backward()
        optimizer.step()
        losses.append([found.text.item(), float(torch.as_tensor(found.penalty).detach())])
    return {
        "losses": np.mean(comms.gather(losses), axis=0).tolist(),
        "gradients": keep_gradients(model, shape, comms.rank, comms.world_size),
    }


def on_this_rank() -> dict[str, dict[str, Any]]:
    """Run on ranks: every variant over ours, then over torch.distributed."""
    torch.set_num_threads(1)
    found = {}
    for name, opened in (
        ("ours", lambda: parallel.McrTransport(backends=["gloo"])),
        ("torch", parallel.TorchTransport),
    ):
        for variant in VARIANTS:
            comms = opened()
            found[f"{name}, {variant}"] = train_small(comms, variant, [comms.rank])
            comms.close()
    return found


@pytest.mark.short("2")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_as_one_process_with_all_experts(ranks: int) -> None:
    """Losses, balance included, and the gradients of gates, experts and all else."""
    results = run_ranks(on_this_rank, ranks, via="torch", env=RANKS_ENV, timeout=120)
    for variant in VARIANTS:
        single = train_small(Alone(), variant, list(range(ranks)))
        for name in ("ours", "torch"):
            seen: set[str] = set()
            for result in results:
                found = result.value[f"{name}, {variant}"]
                np.testing.assert_allclose(found["losses"], single["losses"], rtol=1e-12)
                for parameter, gradient in found["gradients"].items():
                    expected = single["gradients"][parameter]
                    np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-14)
                    seen.add(parameter)
            assert seen == set(single["gradients"])


# --- shapes -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_large_shape_builds_without_memory() -> None:
    """The model has the parameters of the paper (13 B, over a vocabulary of words) and of README.md."""
    shape = read_shape(ExpertShape, EXAMPLES / "moe" / "ds_moe_350m.yaml", {})
    with torch.device("meta"):
        model = build(shape, 0, Alone())
    h = 1024
    norms, attention, fed = 2 * 2 * h, 4 * h * h + 4 * h, 8 * h * h + 5 * h
    layers = 24 * (norms + attention) + 12 * fed + 12 * (128 * fed + 128 * h)
    assert parameters(model) == (256 + 2048) * h + layers + 2 * h
    assert f"{parameters(model):,}" in (EXAMPLES / "moe" / "README.md").read_text()


BAD = {
    "layers: 2\nexpert: 4\n": r"bad\.yaml:2: expert: unknown key 'expert'.*known: .*experts",
    "hidden: wide\n": r"bad\.yaml:1: hidden: expected a whole number, got 'wide'",
    "capacity: 0\n": r"bad\.yaml:1: capacity: expected a number above 0.0, got 0",
    "top_k: 3\n": r"bad\.yaml: top_k 3: expected 1 or 2",
    "hidden: 30\nheads: 4\n": r"bad\.yaml: hidden 30 does not divide by 4 heads",
    "- 1\n": r"bad\.yaml:1: document: expected a mapping",
}


def started(given: dict[str, Any], file: Path | None = None, **plan: Any) -> int:
    """Return the exit status of the command, in this process."""
    chosen: Any = {
        "comms": "gloo", "config": Path("none.yaml"), "compare": False, "rounds": 1,
        "json": None, "plot": None, "trace": None, "describe": None,
    }  # fmt: skip
    task = options.Task(plan.pop("data", None), batch=2, steps=1, lr=0.1, seed=0, double=False)
    with pytest.raises(typer.Exit) as end:
        options.start(
            lambda: read_shape(ExpertShape, file, given), build, task, options.Plan(**(chosen | plan))
        )
    return end.value.exit_code


@pytest.mark.parametrize("content", BAD)
def test_a_bad_shape_is_a_line(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    assert started({}, file) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert re.search(BAD[content], lines[0])


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "shape.yaml"
    file.write_text("layers: 3\nhidden: 64\n")
    shape = read_shape(ExpertShape, file, {"layers": 5, "hidden": None, "experts": 4})
    assert (shape.layers, shape.hidden, shape.experts, shape.heads) == (5, 64, 4, 8)


def test_experts_that_do_not_divide_are_refused() -> None:
    comms: Any = SimpleNamespace(rank=0, world_size=4)
    with pytest.raises(JobError, match="6 experts do not divide by 4 ranks"):
        build(small(), 0, comms)


# --- real ranks ---------------------------------------------------------------------------------------


@pytest.mark.long
@needs_mpi
def test_two_ranks_train_and_report(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("out.json", "loss.png", "trace.json")]
    written = ("--json", files[0], "--plot", files[1], "--trace", files[2])
    done = launch("moe", *TINY, "--layers", 2, "--experts", 4, "--top-k", 2, *written)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens/s" in done.stdout
    document = json.loads(files[0].read_text())
    losses = document["train_loss"]["steps"]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert 0 < document["held_out_loss"] < 6
    rows = {(row["kind"], row["tag"]): row for row in document["communication"]}
    exchanges = {("all_to_all_v", f"moe.{name}") for name in ("dispatch", "combine")}
    exchanges.add(("all_to_all", "moe.counts"))
    assert exchanges | {("all_reduce", "gradients")} <= rows.keys()
    assert {rows[key]["backend"] for key in exchanges} == {"mpi"}
    # Forward and backward, but for counts; one layer of the two has experts.
    assert rows["all_to_all", "moe.counts"]["count"] == 6
    assert [rows["all_to_all_v", f"moe.{name}"]["count"] for name in ("dispatch", "combine")] == [12, 12]
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files[2].read_text())


@pytest.mark.long
@needs_mpi
def test_all_libraries_train_the_same_experts(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = launch("moe", *TINY, "--layers", 2, "--experts", 4, "--compare", "--rounds", 2, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads(path.read_text())["runs"]
    assert [run["rounds"] for run in runs] == [2] * 5
    assert [run["max_difference"] for run in runs] == [0] * 5


@pytest.mark.long
@needs_mpi
def test_ranks_refuse_together() -> None:
    done = launch("moe", *TINY, "--experts", 3)
    assert done.returncode == 1
    assert "error: 3 experts do not divide by 2 ranks" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_text_is_a_line() -> None:
    done = alone("moe", "--data", "none.txt")
    assert done.returncode == 1
    assert done.stderr == "error: none.txt: No such file or directory\n"
