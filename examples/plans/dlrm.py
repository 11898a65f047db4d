"""Train a DLRM by a plan of the whole model.

mcr-plus run -n 4 examples/plans/dlrm.py --plan auto              the plan that a search finds for this host
mcr-plus run -n 4 examples/plans/dlrm.py --plan tables_parallel   tables dealt to ranks; others: --help
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
from criteo import DataError, Reader
from libraries import JobError
from model import ModelConfig
from plan_models import TablesChain
from torch.nn import functional

SAMPLE = Path(__file__).parent.parent / "dlrm" / "sample.tsv.gz"


def main(
    plan: training.PlanOption = "auto",
    data: Annotated[Path, typer.Option(help="Criteo TSV, plain or gzipped")] = SAMPLE,
    embedding_dim: Annotated[int, typer.Option(min=1)] = 16,
    table_rows: Annotated[int, typer.Option(min=2, help="rows of each embedding table")] = 10_000,
    batch: training.Batch = 128,
    steps: training.Steps = 20,
    lr: options.LearningRate = 0.1,
    seed: options.Seed = 0,
    memory: training.Memory = None,
    codec: training.Codecs = None,
    topology: training.Cluster = None,
    report: training.Report = None,
    output: training.Output = None,
    json: training.Json = None,
) -> None:
    """Train a DLRM by a plan; print what was foretold and measured."""

    def task() -> training.Task:
        try:
            read = Reader(data, batch_size=batch, table_rows=table_rows).train()
            batches = [((b.dense, b.sparse), b.labels) for b in read if len(b.labels) == batch]
        except DataError as error:
            raise JobError(str(error)) from None
        if not batches:
            raise JobError(f"{data}: expected at least {batch} rows to train on")
        config = ModelConfig(embedding_dim, table_rows, seed=seed)
        return training.Task(
            lambda: TablesChain(config), functional.binary_cross_entropy_with_logits,
            lambda step: batches[step % len(batches)], partial(torch.optim.SGD, lr=lr),
        )  # fmt: skip

    training.start(task, plan, steps, memory, codec, topology, report, output, json)


if __name__ == "__main__":
    command_line.run(main)
