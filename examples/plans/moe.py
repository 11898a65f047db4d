"""Train a mixture of experts by a plan of the whole model.

mcr-plus run -n 4 examples/plans/moe.py --plan auto              the plan that a search finds for this host
mcr-plus run -n 4 examples/plans/moe.py --plan expert_parallel   experts dealt to ranks; others: --help
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

sys.path.extend(str(Path(__file__).parent.parent / each) for each in ("common", "moe", "dlrm"))

import command_line
import options
import torch
import training_by_plan as training
import typer
from corpus import read_corpus
from experts import ExpertShape
from plan_models import ExpertChain
from transformer import read_shape


def main(
    plan: training.PlanOption = "auto",
    data: options.Data = None,
    layers: options.Layers = None,
    hidden: options.Hidden = None,
    heads: options.Heads = None,
    sequence: options.Sequence = None,
    experts: Annotated[int | None, typer.Option(min=1, help="of a layer, on all ranks together")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, max=2, help="experts of a token")] = None,
    batch: training.Batch = 16,
    steps: training.Steps = 20,
    lr: options.LearningRate = 1e-3,
    seed: options.Seed = 0,
    memory: training.Memory = None,
    codec: training.Codecs = None,
    topology: training.Cluster = None,
    report: training.Report = None,
    output: training.Output = None,
    json: training.Json = None,
) -> None:
    """Train a mixture of experts by a plan; print what was foretold and measured."""
    given = {"layers": layers, "hidden": hidden, "heads": heads, "sequence": sequence}

    def task() -> training.Task:
        shape = read_shape(ExpertShape, None, {**given, "experts": experts, "top_k": top_k})
        corpus = read_corpus(data, shape.sequence, seed)
        return training.Task(
            lambda: ExpertChain(shape, seed), None, lambda step: corpus.windows(step, 0, batch),
            partial(torch.optim.AdamW, lr=lr),
        )  # fmt: skip

    training.start(task, plan, steps, memory, codec, topology, report, output, json)


if __name__ == "__main__":
    command_line.run(main)
