"""The dense transformer: its text, its layers over ranks, and the code that all examples share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import command_line
import comparing
import numpy as np
import options
import parallel
import pytest
import tensor_parallel
import torch
import training
import typer
from corpus import Corpus, read_corpus
from example_runs import EXAMPLES, RANKS_ENV, TINY, launch
from libraries import TITLES, JobError, TransportName
from ranks import run_ranks
from rich.console import Console
from torch import nn
from torch.nn import functional
from transformer import LanguageModel, Shape, read_shape

from mcr_plus.errors import BackendUnavailable
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the text -----------------------------------------------------------------------------------------

COUNTED = np.arange(250, dtype=np.uint8)  # every byte says where it stands


def counted(sequence: int = 4, seed: int = 0) -> Corpus:
    return Corpus(COUNTED, "numbers", sequence, seed)


def test_windows_are_runs_of_the_text_that_is_not_held_out() -> None:
    corpus = counted()
    windows = torch.cat([corpus.windows(step, 0, 50) for step in range(40)])
    assert windows.shape == (2000, 5)
    assert windows.dtype == torch.int64
    assert (windows.diff(dim=1) == 1).all()
    assert set(windows[:, 0].tolist()) == set(range(221))  # up to the last that ends before byte 225


def test_windows_depend_on_seed_step_and_stream_alone() -> None:
    first = counted().windows(3, 1, 20)
    assert torch.equal(first, counted().windows(3, 1, 20))
    for other in (
        counted(seed=1).windows(3, 1, 20),
        counted().windows(4, 1, 20),
        counted().windows(3, 0, 20),
    ):
        assert not torch.equal(first, other)


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_held_out_text_is_the_tail_for_all_streams_together(streams: int) -> None:
    shares = [counted().held_out(stream, streams, 2, 4) for stream in range(streams)]
    assert {len(share) for share in shares} == {4}
    windows = torch.cat([batch for share in shares for batch in share])
    assert len(windows) == 8 * streams
    assert (windows.diff(dim=1) == 1).all()
    assert [int(windows.min()), int(windows.max())] == [225, 249]


def test_a_file_is_read_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(COUNTED.tobytes())
    assert torch.equal(read_corpus(path, 4, 0).windows(0, 0, 9), counted().windows(0, 0, 9))


def test_default_corpus_is_prose() -> None:
    text = bytes(read_corpus(None, 128, 0).trained)
    assert len(text) > 300_000
    assert b"statement" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"text: No such file or directory"),
        (b"", r"text: expected at least 50 bytes, .*; got 0"),
        (bytes(49), r"text: expected at least 50 bytes, for windows of 4 .*; got 49"),
    ],
)
def test_unusable_texts_are_refused_by_name(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JobError, match=message):
        read_corpus(path, 4, 0)
    with pytest.raises(JobError, match="Is a directory"):
        read_corpus(tmp_path, 4, 0)


# --- the model ----------------------------------------------------------------------------------------

SHAPE = Shape(layers=2, hidden=12, heads=6, sequence=9)


def text() -> Corpus:
    return Corpus(np.random.default_rng(5).integers(0, 256, 2000, dtype=np.uint8), "noise", 9, seed=4)


def test_no_byte_depends_on_later_ones() -> None:
    model = LanguageModel(SHAPE, 1).double()
    windows = text().windows(0, 0, 1)
    changed = windows.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 256
    seen = []
    for each in (windows, changed):
        found: list[torch.Tensor] = []
        handle = model.norm.register_forward_hook(lambda *call, found=found: found.append(call[2]))
        model(each)
        handle.remove()
        seen.append(found[0])
    assert torch.equal(seen[0][0, :5], seen[1][0, :5])
    assert not torch.equal(seen[0][0, 5:], seen[1][0, 5:])


def test_attention_is_that_of_torch() -> None:
    """A layer is compared with torch's own encoder layer with the same weights."""
    model = LanguageModel(SHAPE, 1).double()
    block: Any = model.blocks[0]
    theirs = nn.TransformerEncoderLayer(
        12, 6, 48, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    pairs = {
        "self_attn.in_proj_weight": block.attention.qkv.weight,
        "self_attn.in_proj_bias": block.attention.qkv.bias,
        "self_attn.out_proj.weight": block.attention.out.weight,
        "self_attn.out_proj.bias": block.attention.out.bias,
        "linear1.weight": block.feed_forward.up.weight,
        "linear1.bias": block.feed_forward.up.bias,
        "linear2.weight": block.feed_forward.down.weight,
        "linear2.bias": block.feed_forward.down.bias,
    }
    theirs.load_state_dict(pairs, strict=False)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    torch.testing.assert_close(block(x).output, theirs(x, src_mask=mask, is_causal=True))


def test_the_loss_is_of_the_next_byte() -> None:
    model = LanguageModel(SHAPE, 1).double()
    windows = text().windows(0, 0, 3)
    states: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda *call: states.append(call[2]))
    loss = model(windows).text
    chances = (states[0] @ model.bytes.weight.t()).log_softmax(-1)
    expected = -np.mean([chances[b, i, windows[b, i + 1]].item() for b in range(3) for i in range(9)])
    assert loss.item() == pytest.approx(expected)
    assert functional.cross_entropy(chances.flatten(0, 1), windows[:, 1:].flatten()).item() == pytest.approx(
        expected
    )


# --- tensor parallel ----------------------------------------------------------------------------------


def gradients(model: LanguageModel) -> dict[str, Any]:
    """Loss and gradients of the first batch."""
    losses = model(text().windows(0, 0, 4))
    losses.text.backward()
    found = {name: each.grad.tolist() for name, each in model.named_parameters() if each.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return {"loss": losses.text.item(), **found}


def on_this_rank() -> list[dict[str, Any]]:
    """Run on ranks: over ours, then over torch.distributed."""
    torch.set_num_threads(1)
    found = []
    for opened in (lambda: parallel.McrTransport(backends=["gloo"]), parallel.TorchTransport):
        comms = opened()
        found.append(gradients(tensor_parallel.build(SHAPE, 7, comms).double()))
        comms.close()
    return found


def whole(name: str, parts: Sequence[Any]) -> Any:
    """Return a gradient assembled from the ranks' gradients, which must be equal where nothing is sharded."""
    arrays = [np.array(part) for part in parts]
    if name.endswith(("qkv.weight", "qkv.bias")):  # q, k and v each have all ranks' heads
        return np.concatenate([np.stack(np.split(each, 3)) for each in arrays], axis=1).reshape(
            -1, *arrays[0].shape[1:]
        )
    if name.endswith(("up.weight", "up.bias")):
        return np.concatenate(arrays)
    if name.endswith(("out.weight", "down.weight")):
        return np.concatenate(arrays, axis=1)
    for each in arrays[1:]:
        np.testing.assert_array_equal(each, arrays[0])
    return arrays[0]


@pytest.mark.short("2")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_together_are_the_model_of_one_process(ranks: int) -> None:
    """Replicated parameters have the same gradient bits on all ranks; the shards add up to one model."""
    results = run_ranks(on_this_rank, ranks, via="torch", env=RANKS_ENV)
    single = gradients(LanguageModel(SHAPE, 7).double())
    for transport in range(2):
        for name, expected in single.items():
            together = whole(name, [result.value[transport][name] for result in results])
            np.testing.assert_allclose(together, expected, rtol=1e-10, atol=1e-14, err_msg=name)


def test_heads_that_do_not_divide_are_refused() -> None:
    comms: Any = SimpleNamespace(rank=0, world_size=4)
    with pytest.raises(JobError, match="6 heads do not divide by 4 ranks"):
        tensor_parallel.build(SHAPE, 0, comms)


# --- the command --------------------------------------------------------------------------------------


def started(**changes: Any) -> int:
    """Return the exit status of the command, in this process."""
    plan: Any = {
        "comms": "gloo", "config": Path("none.yaml"), "compare": False, "rounds": 2,
        "json": None, "plot": None, "trace": None, "describe": None,
    }  # fmt: skip
    task = options.Task(None, batch=2, steps=1, lr=0.1, seed=0, double=False)
    with pytest.raises(typer.Exit) as end:
        options.start(
            lambda: read_shape(Shape, None, {}),
            lambda shape, seed, _: LanguageModel(shape, seed),
            task,
            options.Plan(**(plan | changes)),
        )
    return end.value.exit_code


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"json": Path("none/out.json")}, "none/out.json: no such folder"),
        ({"trace": Path("none/out.json")}, "none/out.json: no such folder"),
        ({"plot": Path("none/out.png")}, "--plot: none/out.png: no such folder"),
        ({"plot": Path("out.txt")}, "unknown ending '.txt'"),
        ({"comms": "mix"}, "none.yaml: cannot read: "),
        ({"compare": True}, "none.yaml: cannot read: "),
    ],
)
def test_impossible_requests_are_refused_at_once(
    changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started(**changes) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]


def test_a_picture_without_matplotlib_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert started(plot=tmp_path / "loss.png") == 1
    assert "pip install 'mcr_plus[plot]'" in capsys.readouterr().err


def result(offset: float, seconds: float) -> training.Result:
    return training.Result(
        ranks=2, losses=np.array([5.0, 4.0]) + offset, things=100, seconds=1.0, step_seconds=seconds,
        communication=[], log=None, held_out=3.0, dropped=np.empty(0),
    )  # fmt: skip


@pytest.mark.parametrize("offset", [0.0, 1e-3])
def test_comparison_alternates_rounds_and_detects_a_differing_loss(
    offset: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MPI is not there; the mix is twice as fast, and wrong in its second round if there is an offset."""
    ran: list[str] = []

    def run(name: str, config: Path, job: training.Job, console: Console) -> training.Result:
        if name == "mpi":
            raise BackendUnavailable("no mpi")
        ran.append(name)
        last = name == "mix" and len(ran) == 5
        return result(offset if last else 0.0, 0.1 if name == "mix" else 0.2)

    monkeypatch.setattr(training, "run", run)
    config = EXAMPLES / "gpt" / "pipeline.yaml"
    assert started(compare=True, config=config, json=tmp_path / "out.json") == (1 if offset else 0)
    assert ran == ["torch", "gloo", "msccl", "mix", "mix", "msccl", "gloo", "torch"]
    output = capsys.readouterr().out
    assert "mcr_plus mpi did not run: no mpi" in output
    assert ("losses differ by more than 1e-05" in output) == bool(offset)
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["same"] == (not offset)
    runs = {run["transport"]: run for run in document["runs"]}
    assert list(runs) == list(TITLES.values())
    assert runs["mcr_plus pipeline"]["speedup"] == pytest.approx(2)
    assert runs["mcr_plus pipeline"]["speed_range"] == [1000, 1000]
    assert runs["mcr_plus pipeline"]["differs"]
    assert not runs["mcr_plus gloo"]["differs"]
    assert "no difference" in output
    assert runs["mcr_plus pipeline"]["tokens_per_second"] == pytest.approx(1000)
    assert runs["mcr_plus pipeline"]["max_difference"] == pytest.approx(offset / 5 if offset else 0, rel=0.3)
    assert runs["mcr_plus mpi"]["missing"] == "no mpi"


# The seconds of a step by library and round, and the verdict on each library's speed-up over the first.
SPEEDS: dict[str, tuple[dict[TransportName, list[float]], list[str]]] = {
    "apart": ({"torch": [0.2, 0.25, 0.3], "gloo": [0.1, 0.15, 0.19]}, ["-", "1.67"]),
    "slower": ({"torch": [0.1, 0.15, 0.19], "gloo": [0.2, 0.25, 0.3]}, ["-", "0.60"]),
    "overlapping": ({"torch": [0.2, 0.25, 0.3], "gloo": [0.1, 0.15, 0.2]}, ["-", "no difference"]),
    "one inside the other": ({"torch": [0.1, 0.2, 0.4], "gloo": [0.15, 0.15, 0.15]}, ["-", "no difference"]),
    "one round": ({"torch": [0.4], "gloo": [0.1]}, ["-", "-"]),
}


@pytest.mark.parametrize("case", SPEEDS)
def test_a_speed_up_is_claimed_beyond_the_spread_alone(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    seconds, said = SPEEDS[case]
    rounds = len(seconds["torch"])
    left = {name: iter(each) for name, each in seconds.items()}
    results, missing = comparing.take_turns(lambda name: result(0, next(left[name])), rounds, list(seconds))
    rows = comparing.comparisons(results, missing, lambda run: {"held_out_loss": run.held_out})
    assert [comparing.speedup(row) for row in rows] == said
    assert rows[1].speed_range == pytest.approx((100 / max(seconds["gloo"]), 100 / min(seconds["gloo"])))
    console = Console(width=150)
    assert comparing.report_comparison(rows, "tokens", training.COLUMNS, console, None) == 0
    printed = capsys.readouterr().out
    assert said[1] in printed
    assert ("--rounds 3" in printed) == (rounds == 1)


# --- real ranks ---------------------------------------------------------------------------------------


@pytest.mark.short("data")
@needs_mpi
@pytest.mark.parametrize(
    ("options_", "tags"),
    [((), {"gradients"}), (("--tensor-parallel",), {"tp.forward", "tp.backward"})],
    ids=["data", "tensor"],
)
def test_two_ranks_train_and_report(options_: Sequence[str], tags: set[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = launch("gpt", *TINY, "--layers", 1, *options_, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    losses = document["train_loss"]["steps"]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert document["dropped"] is None
    rows = {row["tag"]: row for row in document["communication"] if row["kind"] == "all_reduce"}
    assert set(rows) == tags
    if options_:  # one forward and one backward in each half of the block
        assert [row["count"] for row in rows.values()] == [12, 12]


@pytest.mark.long
@needs_mpi
def test_all_libraries_train_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    given = (*TINY, "--layers", 1, "--tensor-parallel", "--compare", "--rounds", 2)
    done = launch("gpt", *given, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads(path.read_text())["runs"]
    assert [run["max_difference"] for run in runs] == [0] * 5


@pytest.mark.long
@needs_mpi
@needs_mpi
def test_outer_steps_beside_ways_that_average_gradients(tmp_path: Path) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "losses.png"
    words = ["--local", "--compare", *TINY, "--steps", "12", "--every", "4", "--delay", "2"]
    done = launch("gpt", *words, "--json", report, "--plot", picture)
    assert done.returncode == 0, done.stderr
    runs = {run["way"]: run for run in json.loads(report.read_text())["runs"]}
    gradients = ["wrap int8", "wrap topk", "wrap powersgd"]
    assert list(runs) == ["ddp", "wrap", *gradients, "local", "local int4", "local int2", "local topk"]
    assert {run["rounds"] for way, run in runs.items() if way.startswith("local")} == {3}
    np.testing.assert_allclose(runs["wrap"]["losses"], runs["ddp"]["losses"], rtol=1e-5)
    for run in runs.values():
        assert run["losses"][0] == pytest.approx(runs["ddp"]["losses"][0], rel=1e-5)
        assert run["losses"][-1] < run["losses"][0]
        assert 0 < run["utilization"] <= 1
        assert run["seconds"] == sorted(run["seconds"])
    assert picture.stat().st_size > 10_000


@pytest.mark.long
def test_ways_of_outer_steps_that_are_not_known() -> None:
    done = launch("gpt", "--local", "--way", "local int5", *TINY)
    assert done.returncode == 1
    assert "--way 'local int5': expected one of ddp, wrap" in done.stderr + done.stdout


@pytest.mark.long
def test_ranks_refuse_together() -> None:
    done = launch("gpt", *TINY, "--heads", 1, "--tensor-parallel")
    assert done.returncode == 1
    assert "error: 1 heads do not divide by 2 ranks" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_of_an_example_reaches_the_hook_by_which_the_launcher_reports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = sys.excepthook

    def main(number: int = 1) -> None:
        assert sys.excepthook is seen
        raise ValueError(f"of step {number}")

    monkeypatch.setattr(sys, "argv", ["train.py", "--number", "3"])
    with pytest.raises(ValueError, match="of step 3"):
        command_line.run(main)


@pytest.mark.long
def test_exact_sums_give_the_same_parameters_on_any_number_of_ranks() -> None:
    ends = [launch("gpt", "--sums", "exact", *TINY, "--layers", 1, ranks=ranks) for ranks in (1, 2, 3, 4)]
    assert [end.returncode for end in ends] == [0] * 4, ends[0].stderr
    hashes = {end.stdout.partition("sha256 of the parameters ")[2] for end in ends}
    assert len(hashes) == 1
    assert len(hashes.pop().strip()) == 16
    done = launch("gpt", "--sums", "exact", "--micro-batches", 1, *TINY)
    assert done.returncode != 0
    assert "--micro-batches: expected at least one for each of 2 ranks, got 1" in done.stderr


@pytest.mark.long
def test_a_sharded_model_is_trained_by_muon() -> None:
    options = ["--optimizer", "muon", "--fsdp", *TINY, "--lr", "0.002"]
    ends = [launch("gpt", *options, "--steps", steps, ranks=3) for steps in (1, 40)]
    first, last = (float(end.stdout.split()[2]) for end in ends)
    assert last < first - 0.5


def test_muon_needs_shards() -> None:
    done = launch("gpt", "--optimizer", "muon", *TINY, ranks=1)
    assert done.returncode != 0
    assert "muon needs --fsdp" in done.stderr
