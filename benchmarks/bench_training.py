"""How well the examples train with codecs: the loss at the end, and the bytes on the wire, beside float32.

    python benchmarks/bench_training.py [--examples gpt,moe,dlrm] [--seeds 2] [--json FILE] [--plot FILE.png]

Two ranks train the same job with every method, from the same weights and with the same data. The final
loss is the mean over the last twentieth of the steps. Differences to float32 are between runs of one seed;
how much a method itself differs between seeds is shown beside it. Bytes are those that a rank sends while it
trains, by the formulas of nccl-tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Final

import harness
import numpy as np
import typer
from harness import ROOT, Json, Plot
from numpy.typing import NDArray

from mcr_plus.tuning.plot import check_available

TAIL: Final = 20  # the last of so many parts of the steps is the end
DLRM_BATCH: Final = 128
SMALL: Final = ["--layers", "2", "--hidden", "96", "--heads", "4", "--sequence", "32", "--lr", "1e-3"]


@dataclass(frozen=True)
class Example:
    """A job that ends within a minute on two cores."""

    steps: int
    options: Sequence[str]
    unit: str
    exchanges: bool = False  # has an all_to_all of floats
    matrices: bool = True  # hands its gradients over by parameter; otherwise as flat buffers
    adam: bool = True  # its optimizer is AdamW


EXAMPLES: Final = {
    "gpt": Example(1000, SMALL, "nats per byte"),
    "moe": Example(1000, [*SMALL, "--experts", "4", "--by-hand"], "nats per byte", exchanges=True),
    "dlrm": Example(
        1000,
        ["--holdout", "0", "--batch-size", str(DLRM_BATCH)],
        "nats per click",
        exchanges=True,
        matrices=False,
        adam=False,
    ),
}


@dataclass(frozen=True)
class Method:
    """What `compress` says for all_reduce, of gradients, and for all_to_all, of activations and theirs."""

    gradients: Mapping[str, Any] = field(default_factory=dict)
    exchange: Mapping[str, Any] = field(default_factory=dict)
    beta1: float | None = None  # of AdamW, where the codec has momentum, or delays values as momentum does

    @property
    def needs_matrices(self) -> bool:
        return self.gradients.get("codec") == "powersgd"

    def rules(self) -> list[dict[str, Any]]:
        """Biases and norms travel as they are; initial parameters and integers do anyway."""
        rules: list[dict[str, Any]] = []
        if self.gradients:
            compress = {**self.gradients, "exempt": {"max_ndim": 1}}
            rules.append({"match": {"kind": "all_reduce"}, "compress": compress})
        if self.exchange:
            rules.append({"match": {"kind": "all_to_all"}, "compress": dict(self.exchange)})
        return rules

    def config(self) -> dict[str, Any]:
        pipeline: list[dict[str, Any]] = [{"compress": {}}, {"select": {}}, {"dispatch": {"timeout": "120s"}}]
        return {"version": 1, "pipeline": pipeline, "rules": self.rules()}


FLOAT32: Final = "float32"
# Error feedback is for reductions. What is exchanged has none, so the sparse codec leaves it alone.
METHODS: Final = {
    FLOAT32: Method(),
    "bf16": Method({"codec": "bf16"}, {"codec": "bf16"}),
    "int8_block": Method({"codec": "int8_block"}, {"codec": "int8_block"}),
    "fp8_block": Method({"codec": "fp8_block"}, {"codec": "fp8_block"}),
    "int4_block + EF": Method({"codec": "int4_block", "error_feedback": True}, {"codec": "int4_block"}),
    "int2_block + EF": Method({"codec": "int2_block", "error_feedback": True}),
    "topk 25 % int2 + EF": Method(
        {"codec": "topk", "ratio": 0.25, "values": "int2", "chunk": 4096, "error_feedback": True}
    ),
    "topk momentum": Method(
        {"codec": "topk", "ratio": 0.18, "values": "int4", "chunk": 4096, "momentum_correction": True},
        beta1=0.0,
    ),
    "topk adam + EF": Method({"codec": "topk", "preset": "adam"}, beta1=0.5),
    "float32 beta1 0.5": Method(beta1=0.5),
    "topk 1 % + EF": Method({"codec": "topk", "ratio": 0.01, "error_feedback": True}),
    "powersgd 4 + EF": Method({"codec": "powersgd", "rank": 4, "error_feedback": True}),
}


@dataclass(frozen=True)
class Run:
    """One job."""

    example: str
    way: str  # the method
    seed: int
    wire: int  # bytes that a rank sent
    losses: list[float]  # by step

    @property
    def final(self) -> float:
        return mean(self.losses[-max(1, len(self.losses) // TAIL) :])


def train(name: str, method: str, seed: int, steps: int, folder: Path) -> Run:
    """Run an example's program on two ranks."""
    config = folder / "pipeline.yaml"
    config.write_text(json.dumps(METHODS[method].config()))
    words = [*EXAMPLES[name].options, "--steps", str(steps), "--seed", str(seed), "--config", str(config)]
    beta1 = METHODS[method].beta1
    if beta1 is not None:
        words += ["--beta1", str(beta1)]
    if name == "dlrm":
        words += ["--data", str(rows_for(steps, folder))]
    result = harness.train(harness.here(2), name, *words)
    sent = sum(row["wire"] for row in result["communication"])
    return Run(name, method, seed, sent, result["train_loss"]["steps"])


def rows_for(steps: int, folder: Path) -> Path:
    """As many generated rows as the steps read: what is learned by heart in a second pass says nothing."""
    path = folder / f"rows{steps}.tsv"
    if not path.exists():
        script = ROOT / "examples" / "dlrm" / "criteo.py"
        rows = ["--rows", str(steps * DLRM_BATCH), "--seed", "1"]
        subprocess.run([sys.executable, str(script), str(path), *rows], check=True)
    return path


# --- what came out ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    example: str
    way: str  # the method
    wire: float  # bytes relative to float32's
    finals: list[float]  # loss at the end, by seed
    differences: list[float]  # from float32 of the same seed, relative

    @property
    def difference(self) -> float:
        return mean(self.differences)


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """What the runs of each example and method come to, in their order; float32 must be among them."""
    plain = {(run.example, run.seed): run for run in runs if run.way == FLOAT32}
    rows = []
    for example, method in dict.fromkeys((run.example, run.way) for run in runs):
        own = [run for run in runs if (run.example, run.way) == (example, method)]
        beside = [plain[example, run.seed] for run in own]
        rows.append(
            Row(
                example,
                method,
                sum(run.wire for run in own) / sum(run.wire for run in beside),
                [run.final for run in own],
                [run.final / other.final - 1 for run, other in zip(own, beside, strict=True)],
            )
        )
    return rows


def spread(row: Row) -> float:
    """Range of a method's final losses over seeds, relative to their mean."""
    return (max(row.finals) - min(row.finals)) / mean(row.finals)


def print_tables(rows: Sequence[Row]) -> None:
    for example in dict.fromkeys(row.example for row in rows):
        lines = [
            [
                row.way,
                f"{row.wire:.3f}",
                f"{mean(row.finals):.4f}",
                f"{row.difference:+.2%}",
                " ".join(f"{each:+.2%}" for each in row.differences),
                f"{spread(row):.2%}",
            ]
            for row in rows
            if row.example == example
        ]
        head = ["way", "bytes on the wire", "final loss", "difference", "… by seed", "seeds apart"]
        harness.show(head, lines, f"{example}: loss in {EXAMPLES[example].unit}")


def smoothed(losses: Sequence[float], window: int) -> NDArray[np.float64]:
    """Means over `window` steps, each beginning at one of them."""
    return np.convolve(np.array(losses), np.full(window, 1 / window), mode="valid")


def plot(runs: Sequence[Run], path: Path) -> None:
    """A panel for each example, a curve for each method: means over 1/20 of the steps and over seeds."""
    examples = list(dict.fromkeys(run.example for run in runs))
    with harness.panels(path, len(examples), 4.3, 3.8) as figure:
        for axis, example in zip(figure.axes, examples, strict=True):
            for index, method in enumerate(METHODS):
                curves = [run.losses for run in runs if (run.example, run.way) == (example, method)]
                if not curves:
                    continue
                window = max(1, len(curves[0]) // TAIL)
                curve = np.mean([smoothed(losses, window) for losses in curves], axis=0)
                style = (
                    {"color": "black", "lw": 2.2}
                    if method == FLOAT32
                    else {"color": f"C{index - 1}", "lw": 1.2}
                )
                axis.plot(np.arange(window, len(curves[0]) + 1), curve, label=method, **style)
            axis.set_title(example)
            axis.set_xlabel("step")
            axis.set_ylabel(f"training loss, {EXAMPLES[example].unit}")
            axis.grid(alpha=0.25, lw=0.5)
        figure.axes[0].legend(frameon=False, fontsize=8)


def document(runs: Sequence[Run]) -> dict[str, Any]:
    return {"rows": [asdict(row) for row in rows_of(runs)], "runs": [asdict(run) for run in runs]}


@harness.program
def main(
    examples: str = ",".join(EXAMPLES),
    ways: Annotated[str, typer.Option(help=f"{FLOAT32} is always among them.")] = ",".join(METHODS),
    seeds: Annotated[int, typer.Option(help="How many each method is trained with.")] = 2,
    steps: Annotated[int | None, typer.Option(help="Of every job, instead of enough of them.")] = None,
    figures: Json = None,
    picture: Plot = None,
) -> None:
    names = harness.chosen(examples.split(","), EXAMPLES, "example")
    methods = dict.fromkeys([FLOAT32, *harness.chosen(ways.split(","), METHODS, "way")])
    if picture is not None:
        check_available(picture)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed, name, method in product(range(seeds), names, methods):
            example = EXAMPLES[name]
            if METHODS[method].needs_matrices and not example.matrices:
                continue
            if METHODS[method].beta1 is not None and not example.adam:
                continue
            runs.append(train(name, method, seed, steps or example.steps, Path(folder)))
            print(f"{name}  {method}  seed {seed}  final loss {runs[-1].final:.4f}", flush=True)
            harness.write_json(document(runs), figures)
    print_tables(rows_of(runs))
    if picture is not None:
        plot(runs, picture)


if __name__ == "__main__":
    main()
