"""Train a dense transformer, data parallel or tensor parallel.

    mcr-plus run -n 2 examples/gpt/train.py                      Python's documentation, pipeline.yaml
    mcr-plus run -n 2 examples/gpt/train.py --tensor-parallel    every layer spread over the ranks
    mcr-plus run -n 2 examples/gpt/train.py --compare            the same job on each library
    mcr-plus run -n 3 --min-ranks 2 --restart-failed 5 examples/gpt/train.py --elastic
                                                                 kill ranks: the others go on, they come back
    mcr-plus run -n 2 examples/gpt/train.py --sums exact         the same parameters on any number of ranks
    mcr-plus run -n 4 examples/gpt/train.py --optimizer muon --fsdp
                                                                 FSDP2, each matrix updated whole on one rank
    mcr-plus run -n 2 examples/gpt/train.py --local [--compare]  outer steps (mcr.local), for slow links

`../common` has what the examples share, the layers that are spread over ranks too (`tensor_parallel.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).parent.parent / "common"))  # what the examples share

import command_line
import elastic
import options
import outer_steps
import sharded
import tensor_parallel
import typer
from comparing import ROUNDS
from corpus import read_corpus
from libraries import JobError
from transformer import LanguageModel, Shape, read_shape

from mcr_plus.errors import McrError

HERE = Path(__file__).parent
BETA1 = 0.9  # of AdamW; ways of --local have their own


def main(
    tensor_parallel_: Annotated[
        bool, typer.Option("--tensor-parallel", help="spread every layer over the ranks")
    ] = False,
    elastic_: Annotated[
        bool, typer.Option("--elastic", help="go on when ranks are lost, and take them in again")
    ] = False,
    sums: Annotated[
        Literal["fast", "exact"],
        typer.Option(help="exact: --elastic, and the same parameters on any number of ranks"),
    ] = "fast",
    micro_batches: Annotated[
        int, typer.Option(min=1, help="of a step, on all ranks together, with --sums exact")
    ] = 4,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="shard the model over the ranks, by FSDP2")] = False,
    optimizer: Annotated[
        Literal["adamw", "muon"],
        typer.Option(help="muon: --fsdp, of matrices; the other parameters by AdamW"),
    ] = "adamw",
    local: Annotated[
        bool, typer.Option("--local", help="inner and outer steps; with --compare beside DDP and mcr.wrap")
    ] = False,
    way: Annotated[
        str, typer.Option(help=f"of --local: {', '.join(outer_steps.WAYS)}; several with commas")
    ] = outer_steps.USUAL,
    every: Annotated[int, typer.Option(min=1, help="inner steps from one outer step to the next")] = 30,
    fragments: Annotated[int, typer.Option(min=1, help="of the model, sent one by one")] = 2,
    delay: Annotated[int, typer.Option(min=0, help="steps that a fragment may be on its way")] = 2,
    mix: Annotated[float, typer.Option(help="share of the outer parameters in what follows")] = 1.0,
    warmup: Annotated[
        int, typer.Option(min=0, help="first steps with averaged gradients, which are not counted")
    ] = 0,
    data: options.Data = None,
    model: options.Model = None,
    layers: options.Layers = None,
    hidden: options.Hidden = None,
    heads: options.Heads = None,
    sequence: options.Sequence = None,
    batch: options.Batch = 8,
    steps: options.Steps = 200,
    lr: options.LearningRate = 5e-4,
    beta1: options.Beta1 = BETA1,
    seed: options.Seed = 0,
    double: options.Double = False,
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
    """Train a transformer over several ranks; say how well it learned and where the time went."""
    exact = sums == "exact"
    others = {
        "--tensor-parallel": tensor_parallel_,
        "--local": local,
        "--compare": compare,
        "--comms": comms != "mix",
        "--trace": trace is not None,
        "--record": record is not None,
        "--beta1": beta1 != BETA1,
    }
    given = {"layers": layers, "hidden": hidden, "heads": heads, "sequence": sequence}
    if fsdp or optimizer == "muon":
        _refuse("--fsdp", {**others, "--elastic": elastic_, "--sums": exact, "--optimizer": not fsdp})
        shape = read_shape(Shape, model, given)
        corpus = read_corpus(data, shape.sequence, seed)
        sharded.train(shape, corpus, config, batch, steps, lr, seed, optimizer == "muon")
        return
    if elastic_ or exact:
        _refuse("--sums exact" if exact else "--elastic", others)
        shape = read_shape(Shape, model, given)
        corpus = read_corpus(data, shape.sequence, seed)
        elastic.train(shape, corpus, config, batch, steps, lr, seed, micro_batches if exact else None)
        return
    if local:
        if tensor_parallel_ or comms != "mix" or trace or record or beta1 != BETA1:
            others_of_local = "--tensor-parallel, --comms, --trace, --record and --beta1"
            raise typer.BadParameter(f"goes with none of {others_of_local}", param_hint="--local")
        shape = read_shape(Shape, model, given)
        task = outer_steps.Task(shape, batch, steps, lr, seed, every, fragments, delay, mix, warmup)
        names = list(outer_steps.WAYS) if compare else [each.strip() for each in way.split(",")]
        try:
            outer_steps.start(task, read_corpus(data, shape.sequence, seed), names, json, plot)
        except (JobError, McrError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        return
    options.start(
        lambda: read_shape(Shape, model, given),
        tensor_parallel.build if tensor_parallel_ else lambda shape, seed, _: LanguageModel(shape, seed),
        options.Task(data, batch, steps, lr, seed, double, beta1=beta1),
        options.Plan(comms, config, compare, rounds, json, plot, trace, describe, record),
        shared=tensor_parallel_,
    )


def _refuse(given: str, others: dict[str, bool]) -> None:
    """Refuse options that do not go with another one, which is given."""
    for option in [name for name, is_given in others.items() if is_given]:
        what = "muon needs --fsdp" if option == "--optimizer" else f"does not go with {given}"
        raise typer.BadParameter(what, param_hint=option)


if __name__ == "__main__":
    command_line.run(main)
