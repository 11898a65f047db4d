"""Train a 3-D convolutional network by a plan of the whole model.

mcr-plus run -n 4 examples/plans/cosmo.py --plan auto         the plan that a search finds for this host
mcr-plus run -n 4 examples/plans/cosmo.py --plan spatial      volumes in slabs; others: --help
mcr-plus run -n 4 examples/plans/cosmo.py --plan splitbrain   dense layers by columns
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

sys.path.extend(str(Path(__file__).parent.parent / each) for each in ("common", "cosmo"))

import command_line
import options
import torch
import training_by_plan as training
import typer
from fields import Fields
from network import Network
from torch.nn import functional


def main(
    plan: training.PlanOption = "auto",
    size: Annotated[int, typer.Option(min=2, help="points of a volume along each axis")] = 32,
    channels: Annotated[int, typer.Option(min=1, help="of the first convolution")] = 8,
    levels: Annotated[int, typer.Option(min=1, help="convolutions, each followed by a pooling")] = 3,
    batch: training.Batch = 8,
    steps: training.Steps = 20,
    lr: options.LearningRate = 4e-3,
    seed: options.Seed = 0,
    memory: training.Memory = None,
    codec: training.Codecs = None,
    topology: training.Cluster = None,
    report: training.Report = None,
    output: training.Output = None,
    json: training.Json = None,
) -> None:
    """Train a 3-D convolutional network by a plan; print what was foretold and measured."""

    def model() -> Network:
        torch.manual_seed(seed)
        return Network(channels, levels, None)

    def task() -> training.Task:
        fields = Fields(size, seed)
        return training.Task(
            model, functional.mse_loss, lambda step: fields.draw(0, step, batch),
            partial(torch.optim.Adam, lr=lr),
        )  # fmt: skip

    training.start(task, plan, steps, memory, codec, topology, report, output, json)


if __name__ == "__main__":
    command_line.run(main)
