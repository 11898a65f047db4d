"""Train a dense transformer by a plan of the whole model.

mcr-plus run -n 4 examples/plans/gpt.py --plan auto          the plan that a search finds for this host
mcr-plus run -n 4 examples/plans/gpt.py --plan one_f_one_b   a pipeline; other names: --help
mcr-plus run -n 4 examples/plans/gpt.py --plan auto --memory 60MiB --report plan.html
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "common"))

import command_line
import options
import torch
import training_by_plan as training
from corpus import read_corpus
from transformer import LanguageModel, Shape, read_shape


def main(
    plan: training.PlanOption = "auto",
    data: options.Data = None,
    layers: options.Layers = None,
    hidden: options.Hidden = None,
    heads: options.Heads = None,
    sequence: options.Sequence = None,
    batch: training.Batch = 16,
    steps: training.Steps = 20,
    lr: options.LearningRate = 5e-4,
    seed: options.Seed = 0,
    memory: training.Memory = None,
    codec: training.Codecs = None,
    topology: training.Cluster = None,
    report: training.Report = None,
    output: training.Output = None,
    json: training.Json = None,
) -> None:
    """Train a transformer by a plan; print what was foretold and measured."""
    given = {"layers": layers, "hidden": hidden, "heads": heads, "sequence": sequence}

    def model(shape: Shape) -> LanguageModel:
        made = LanguageModel(shape, seed)
        made.bytes.weight.mcr_shared = True  # type: ignore[attr-defined]
        return made

    def task() -> training.Task:
        shape = read_shape(Shape, None, given)
        corpus = read_corpus(data, shape.sequence, seed)
        return training.Task(
            lambda: model(shape), lambda losses: losses.text, lambda step: corpus.windows(step, 0, batch),
            partial(torch.optim.AdamW, lr=lr),
        )  # fmt: skip

    training.start(task, plan, steps, memory, codec, topology, report, output, json)


if __name__ == "__main__":
    command_line.run(main)
