"""Train a transformer with mixture-of-experts layers, its experts spread over the ranks.

    mcr-plus run -n 2 examples/moe/train.py                  Python's documentation, pipeline.yaml
    mcr-plus run -n 2 examples/moe/train.py --data book.txt --top-k 2
    mcr-plus run -n 2 examples/moe/train.py --compare        the same job on each library

`experts.py` has the gating and the layer, `../common` what the examples share.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).parent.parent / "common"))  # what the examples share

import command_line
import options
import typer
from comparing import ROUNDS
from experts import ExpertShape, build
from transformer import read_shape

HERE = Path(__file__).parent


def main(
    data: options.Data = None,
    model: options.Model = None,
    layers: options.Layers = None,
    hidden: options.Hidden = None,
    heads: options.Heads = None,
    sequence: options.Sequence = None,
    experts: Annotated[int | None, typer.Option(min=1, help="of a layer, over all ranks")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, max=2, help="experts of a token")] = None,
    capacity: Annotated[
        float | None, typer.Option(min=0.01, help="room of an expert, 1 being an even share")
    ] = None,
    moe_every: Annotated[int | None, typer.Option(min=1, help="every so many layers have experts")] = None,
    balance: Annotated[float | None, typer.Option(min=0.0, help="weight of the load-balancing loss")] = None,
    by_hand: Annotated[
        bool, typer.Option("--by-hand", help="send tokens by all_to_alls, not by mcr.expert")
    ] = False,
    batch: options.Batch = 8,
    steps: options.Steps = 200,
    lr: options.LearningRate = 1e-3,
    beta1: options.Beta1 = 0.9,
    seed: options.Seed = 0,
    double: options.Double = False,
    device: options.Device = "cpu",
    comms: options.Comms = "mix",
    config: options.Config = HERE / "pipeline.yaml",
    compare: options.Compare = False,
    rounds: options.Rounds = ROUNDS,
    json: options.Json = None,
    plot: options.Plot = None,
    trace: options.Trace = None,
    record: options.Record = None,
    describe: options.Describe = None,
) -> None:
    """Train a mixture of experts over several ranks; say how well it learned and where the time went."""
    given = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "sequence": sequence,
        "experts": experts,
        "top_k": top_k,
        "capacity": capacity,
        "moe_every": moe_every,
        "balance": balance,
        "by_hand": by_hand or None,
    }
    options.start(
        lambda: read_shape(ExpertShape, model, given),
        build,
        options.Task(data, batch, steps, lr, seed, double, device, beta1),
        options.Plan(comms, config, compare, rounds, json, plot, trace, describe, record),
    )


if __name__ == "__main__":
    command_line.run(main)
