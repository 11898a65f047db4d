"""Train a 3-D convolutional network on volumes that are spread over the ranks.

    mcr-plus run -n 2 examples/cosmo/train.py              slabs of 32³ points, one for each rank
    mcr-plus run -n 2 examples/cosmo/train.py --check      beside the same network in one process
    mcr-plus run -n 4 examples/cosmo/train.py --mesh 2,2,1

It predicts the spectral index of Gaussian random fields, which `fields.py` draws; `network.py` has the
network, `../common` what examples share.
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parent.parent / "common"))  # what the examples share

import command_line
import numpy as np
import torch
import typer
from fields import SPREAD, Fields
from libraries import JobError, McrTransport, share_the_cores
from network import Network, spread
from reporting import RECORDED, Monitor, Observer, Outcome, report_outcome, write_json
from rich.console import Console
from torch.nn import functional

from mcr_plus import spatial
from mcr_plus.core.units import format_size
from mcr_plus.errors import McrError
from mcr_plus.observe.record import Log
from mcr_plus.observe.record_table import communication

TRAINED, HELD_OUT = 0, 1  # streams of fields
HELD_OUT_BATCHES = 8
CLOSE = 1e-9  # largest difference of losses and weights in float64, relative to the largest of them


@dataclass(frozen=True)
class Job:
    """What to train, and how long."""

    size: int
    mesh: tuple[int, int, int]
    channels: int
    levels: int
    batch: int
    steps: int
    lr: float
    seed: int
    check: bool


@dataclass(frozen=True)
class Result(Outcome):
    """What came out of training."""

    held_out: float  # root of the mean square error of the index
    halo_bytes: int  # that rank 0 exchanges in a step
    difference: float | None  # from the network in one process


class Trainer:
    """One network and its optimizer; `is_spread`: over the ranks, or whole in this process."""

    def __init__(self, job: Job, is_spread: bool) -> None:
        self.layout = spread(job.size, job.mesh, 2**job.levels)
        torch.manual_seed(job.seed)
        self.model = Network(job.channels, job.levels, self.layout if is_spread else None)
        self.model.to(torch.float64 if job.check else torch.float32)
        self.dtype = torch.float64 if job.check else torch.float32
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=job.lr)
        self.is_spread = is_spread

    def predict(self, fields: torch.Tensor) -> torch.Tensor:
        own = spatial.local_part(fields, self.layout) if self.is_spread else fields
        return self.model(own.to(self.dtype))

    def step(self, fields: torch.Tensor, targets: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = functional.mse_loss(self.predict(fields), targets.to(self.dtype))
        loss.backward()
        if self.is_spread:  # the dense layers' gradients are the same on all ranks already
            spatial.sum_gradients(self.model, tag="gradients")
        self.optimizer.step()
        return loss.item()


def train(job: Job, comms: McrTransport, observe: Observer) -> Result:
    """One run of the job, the same on every rank."""
    fields = Fields(job.size, job.seed)
    trainer = Trainer(job, is_spread=True)
    alone = Trainer(job, is_spread=False) if job.check else None
    losses: list[float] = []
    seconds: list[float] = []
    difference = 0.0
    with ExitStack() as until:
        log = until.enter_context(comms.record())
        for step in range(job.steps):
            batch = fields.draw(TRAINED, step, job.batch)
            start = time.perf_counter()
            losses.append(trainer.step(*batch))
            seconds.append(time.perf_counter() - start)
            if alone is not None:
                difference = max(difference, _relative(losses[-1], alone.step(*batch)))
            observe((step + 1) / job.steps, step + 1, losses[-1], job.batch / seconds[-1])
            if step + 1 == RECORDED:
                until.close()
    if alone is not None:
        pairs = zip(trainer.model.parameters(), alone.model.parameters(), strict=True)
        difference = max(difference, *(_difference(ours, theirs) for ours, theirs in pairs))
    recorded = seconds[:RECORDED]
    return Result(
        ranks=comms.world_size,
        losses=np.array(losses),
        things=job.batch,
        seconds=sum(seconds),
        step_seconds=median(seconds),
        communication=communication(log.records, sum(recorded)),
        log=log,
        held_out=_held_out(job, fields, trainer),
        halo_bytes=_halo_bytes(log, len(recorded)),
        difference=None if alone is None else max(comms.gather(difference)),
    )


def _relative(ours: float, theirs: float) -> float:
    return _finite(abs(ours - theirs) / max(abs(theirs), 1e-30))


@torch.no_grad()
def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return _finite(float((ours - theirs).abs().max() / theirs.abs().max()))


def _finite(difference: float) -> float:
    """`difference`, or infinity for nan, which `max` would leave out."""
    return difference if math.isfinite(difference) else math.inf


def _halo_bytes(log: Log, steps: int) -> int:
    return sum(each.bytes for each in log.records if each.tag == "halo") // max(steps, 1)


@torch.no_grad()
def _held_out(job: Job, fields: Fields, trainer: Trainer) -> float:
    squares = 0.0
    for number in range(HELD_OUT_BATCHES):
        batch, targets = fields.draw(HELD_OUT, number, job.batch)
        squares += functional.mse_loss(trainer.predict(batch), targets.to(trainer.dtype)).item()
    return SPREAD * math.sqrt(squares / HELD_OUT_BATCHES)


def run(job: Job, comms: McrTransport, console: Console) -> Result:
    share_the_cores(comms.world_size)
    console.quiet = comms.rank != 0
    with Monitor(console, "mcr_plus", "volumes") as observe:
        return train(job, comms, observe)


def report(result: Result, console: Console) -> None:
    facts = [
        ("error", f"{result.held_out:.3f} in the index, held out; always predicting the mean: {SPREAD:.3f}"),
        ("step", f"{result.step_seconds * 1e3:,.0f} ms in the median, drawing fields not included"),
        ("halos", f"{format_size(result.halo_bytes)} in each step on rank 0, forward and back"),
    ]
    if result.difference is not None:
        verdict = "as in one process" if result.difference <= CLOSE else "NOT as in one process"
        facts.append(("check", f"{verdict}: losses and weights differ by {result.difference:.1e} at most"))
    report_outcome(result, facts, "volumes", console)


def document(result: Result) -> dict[str, Any]:
    """The report for programs."""
    return result.document("mcr_plus") | {
        "held_out_error": result.held_out,
        "error_of_the_mean": SPREAD,
        "halo_bytes": result.halo_bytes,
        "difference": result.difference,
    }


def _mesh(text: str | None, ranks: int) -> tuple[int, int, int]:
    parts = [ranks, 1, 1] if text is None else [int(each) for each in text.split(",") if each.isdigit()]
    if len(parts) != 3 or math.prod(parts) != ranks:
        raise JobError(f"--mesh {text}: expected three numbers, such as {ranks},1,1, for {ranks} ranks")
    return parts[0], parts[1], parts[2]


def main(
    size: Annotated[int, typer.Option(min=2, help="points of a volume along each axis")] = 32,
    mesh: Annotated[
        str | None, typer.Option(help="ranks along each axis; all along the first if left out")
    ] = None,
    channels: Annotated[int, typer.Option(min=1, help="of the first convolution")] = 8,
    levels: Annotated[int, typer.Option(min=1, help="convolutions, each followed by a pooling")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="volumes of a step")] = 8,
    steps: Annotated[int | None, typer.Option(min=1, help="80, or 10 with --check")] = None,
    lr: Annotated[float, typer.Option(min=0.0)] = 4e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    check: Annotated[
        bool,
        typer.Option("--check", help="train one process's network too, in float64; status 1 if it differs"),
    ] = False,
    config: Annotated[Path | None, typer.Option(help="pipeline; without one mcr_plus chooses")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the results; - is stdout")] = None,
) -> None:
    """Train a network on volumes that are spread over several ranks; say how well it learned."""
    console = Console(stderr=json_path == Path("-"), highlight=False)
    try:
        comms = McrTransport(config)
        steps = steps or (10 if check else 80)
        job = Job(size, _mesh(mesh, comms.world_size), channels, levels, batch, steps, lr, seed, check)
        result = run(job, comms, console)
        comms.close()
    except (JobError, McrError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    report(result, console)
    if json_path and not console.quiet:
        write_json(document(result), json_path)
    raise typer.Exit(int(result.difference is not None and not result.difference <= CLOSE))


if __name__ == "__main__":
    command_line.run(main)
