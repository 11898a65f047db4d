"""The command line that the transformer examples share, and what becomes of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, cast

import torch
import typer
from comparing import report_comparison
from corpus import read_corpus
from curves import plot_losses
from libraries import TITLES, JobError, TransportName
from parallel import Transport
from reporting import write_json
from rich.console import Console
from training import COLUMNS, Job, compare, document, report, run
from transformer import LanguageModel, ShapeT, parameters

from mcr_plus.config.reader import load
from mcr_plus.errors import McrError
from mcr_plus.tuning.plot import check_available

# --- the model
Model = Annotated[Path | None, typer.Option(help="YAML file with sizes; the options below go before it")]
Layers = Annotated[int | None, typer.Option(min=1)]
Hidden = Annotated[int | None, typer.Option(min=1)]
Heads = Annotated[int | None, typer.Option(min=1)]
Sequence = Annotated[int | None, typer.Option(min=1, help="bytes that are read at once")]
# --- training
Data = Annotated[Path | None, typer.Option(help="text to learn; Python's own documentation without it")]
Batch = Annotated[int, typer.Option(min=1, help="windows of a step, on each rank")]
Steps = Annotated[int, typer.Option(min=1)]
LearningRate = Annotated[float, typer.Option(min=0.0)]
Beta1 = Annotated[float, typer.Option(min=0.0, max=0.9999, help="of AdamW; 0.5 with preset: adam of a codec")]
Seed = Annotated[int, typer.Option(min=0)]
Double = Annotated[bool, typer.Option("--double", help="compute in float64")]
# --- libraries
Comms = Annotated[TransportName, typer.Option(help="library to run on")]
Config = Annotated[Path, typer.Option(help="pipeline of the mix")]
Compare = Annotated[bool, typer.Option("--compare", help="run on every library; status 1 if losses differ")]
Rounds = Annotated[int, typer.Option(min=1, help="of --compare: every library runs once in each")]
# --- what to write
Json = Annotated[Path | None, typer.Option("--json", help="write the results; - is stdout")]
Plot = Annotated[Path | None, typer.Option(help="draw the losses; needs matplotlib")]
Trace = Annotated[Path | None, typer.Option(help="write rank 0's Chrome/Perfetto trace")]
Record = Annotated[Path | None, typer.Option(help="write a folder for mcr-plus report")]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="train on CPUs or on CUDA devices")]
Describe = Annotated[
    int | None,
    typer.Option(min=1, metavar="RANKS", help="only say how large the model is, on so many ranks"),
]


@dataclass(frozen=True)
class Task:
    """What to train on, and how."""

    data: Path | None
    batch: int
    steps: int
    lr: float
    seed: int
    double: bool
    device: str = "cpu"
    beta1: float = 0.9


@dataclass(frozen=True)
class Plan:
    """On which libraries, and what to write."""

    comms: TransportName
    config: Path
    compare: bool
    rounds: int
    json: Path | None
    plot: Path | None
    trace: Path | None
    describe: int | None
    record: Path | None = None

    def check(self) -> None:
        """Refuse before any training what could not be done after it."""
        for option, path in (("--trace", self.trace), ("--record", self.record)):
            if path and (self.compare or self.comms == "torch"):
                raise typer.BadParameter("goes with neither --compare nor --comms torch", param_hint=option)
        if self.compare or self.comms == "mix":
            load(self.config)
        if self.plot:
            check_available(self.plot)
        for path in (self.json, self.trace):
            if path and not path.absolute().parent.is_dir():
                raise JobError(f"{path}: no such folder")


def start(
    shape: Callable[[], ShapeT],
    build: Callable[[ShapeT, int, Transport], LanguageModel],
    task: Task,
    plan: Plan,
    *,
    shared: bool = False,
) -> None:
    """Do what the command line says and exit; `shared` is that of `Job`."""
    try:
        status = _do(shape(), build, task, plan, shared)
    except (JobError, McrError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    raise typer.Exit(status)


def _do(
    shape: ShapeT,
    build: Callable[[ShapeT, int, Transport], LanguageModel],
    task: Task,
    plan: Plan,
    shared: bool,
) -> int:
    plan.check()
    console = Console(stderr=plan.json == Path("-"), highlight=False)
    if plan.describe:
        return _describe(partial(build, shape, task.seed), plan.describe, console)
    job = Job(
        build=partial(build, shape, task.seed),
        corpus=read_corpus(task.data, shape.sequence, task.seed),
        batch=task.batch,
        shared=shared,
        steps=task.steps,
        lr=task.lr,
        beta1=task.beta1,
        dtype=torch.float64 if task.double else torch.float32,
        device=task.device,
        record=plan.record,
    )
    if plan.compare:
        rows, losses = compare(job, plan.rounds, plan.config, console)
        if plan.plot and not console.quiet:
            plot_losses(losses, plan.plot)
        return report_comparison(rows, "tokens", COLUMNS, console, plan.json)
    return _run_once(job, plan, console)


def _run_once(job: Job, plan: Plan, console: Console) -> int:
    title = TITLES[plan.comms]
    result = run(plan.comms, plan.config, job, console)
    report(result, console)
    if console.quiet:  # one rank is enough
        return 0
    if plan.trace and result.log:
        result.log.save(str(plan.trace))
    if plan.plot:
        plot_losses({title: result.losses}, plan.plot)
    if plan.json:
        write_json(document(result, title), plan.json)
    return 0


def _describe(build: Callable[[Transport], LanguageModel], ranks: int, console: Console) -> int:
    """Build on the meta device, where nothing takes memory: the whole, and what one of `ranks` has of it."""
    counts = []
    for world_size in (1, ranks):
        comms = cast(Transport, SimpleNamespace(rank=0, world_size=world_size))  # building sends nothing
        with torch.device("meta"):
            counts.append(parameters(build(comms)))
    whole, part = counts
    console.print(f"{whole:,} parameters, {part:,} of them on each of {ranks} rank(s)")
    return 0
