"""Trains a language model over a transport, and the same one over every library in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from comparing import Columns, Comparison, comparisons, take_turns
from corpus import Corpus
from libraries import TITLES, JobError, TransportName, device_of, share_the_cores
from numpy.typing import NDArray
from parallel import Transport, open_transport
from reporting import RECORDED, Monitor, Observer, Outcome, ends, report_outcome
from rich.console import Console
from torch import nn
from transformer import LanguageModel, Losses

from mcr_plus.observe.record import Log
from mcr_plus.observe.record_table import communication

HELD_OUT_BATCHES = 8  # on each rank
COLUMNS: Columns = (("train loss", "final_loss", ".4f"), ("held out", "held_out_loss", ".4f"))

Build = Callable[[Transport], LanguageModel]


@dataclass(frozen=True)
class Job:
    """What to train on what, and how long."""

    build: Build
    corpus: Corpus
    batch: int  # windows of a step: on each rank, or on all together if it is shared
    shared: bool  # all ranks see the same batch and work on it together; nothing is data parallel
    steps: int
    lr: float
    dtype: torch.dtype
    device: str = "cpu"
    beta1: float = 0.9
    record: Path | None = None  # the folder of a recording


@dataclass(frozen=True)
class Result(Outcome):
    """What came out of training a language model."""

    held_out: float  # loss
    dropped: NDArray[np.float64]  # share of choices that experts had no room for, by step; empty without


# --- one run ----------------------------------------------------------------------------------------


class Step(NamedTuple):
    loss: float  # of this rank's windows
    dropped: tuple[float, ...]  # of each layer with experts
    seconds: float


def train(job: Job, comms: Transport, observe: Observer) -> Result:
    """One run of the job, the same on every rank."""
    device = device_of(job.device)
    model = job.build(comms).to(device, job.dtype)
    betas = (job.beta1, 0.999)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, betas=betas, fused=True)
    called = model if job.shared else comms.data_parallel(model, optimizer)
    stream, streams = (0, 1) if job.shared else (comms.rank, comms.world_size)
    tokens = job.batch * (job.corpus.window - 1) * streams
    steps: list[Step] = []
    with ExitStack() as until:
        log: Log | None = until.enter_context(comms.record(job.record))
        for number in range(job.steps):
            start = time.perf_counter()
            windows = job.corpus.windows(number, stream, job.batch).to(device)
            loss, shares = _step(called, optimizer, windows)
            steps.append(Step(loss, shares, time.perf_counter() - start))
            observe(len(steps) / job.steps, len(steps), loss, tokens / steps[-1].seconds)
            if len(steps) == RECORDED:
                until.close()
    recorded = sum(step.seconds for step in steps[:RECORDED])
    losses = [step.loss for step in steps]
    dropped = [mean(step.dropped) for step in steps if step.dropped]
    return Result(
        ranks=comms.world_size,
        losses=np.mean(comms.gather(losses), axis=0),
        things=tokens,
        seconds=sum(step.seconds for step in steps),
        step_seconds=median(step.seconds for step in steps),
        communication=[] if log is None else communication(log.records, recorded),
        log=log,
        held_out=_held_out(job, model, comms, stream, streams),
        dropped=np.mean(comms.gather(dropped), axis=0),
    )


def _step(
    called: nn.Module, optimizer: torch.optim.Optimizer, windows: torch.Tensor
) -> tuple[float, tuple[float, ...]]:
    optimizer.zero_grad()
    losses: Losses = called(windows)
    (losses.text + losses.penalty).backward()
    optimizer.step()
    return losses.text.item(), losses.dropped


@torch.no_grad()
def _held_out(job: Job, model: LanguageModel, comms: Transport, stream: int, streams: int) -> float:
    batches = job.corpus.held_out(stream, streams, job.batch, HELD_OUT_BATCHES)
    device = next(model.parameters()).device
    own = mean(model(windows.to(device)).text.item() for windows in batches)
    return float(mean(comms.gather(own)))


def run(name: TransportName, config: Path, job: Job, console: Console) -> Result:
    """The job over a library, which is left at the end."""
    device_of(job.device)  # before the library takes the current one
    comms = open_transport(name, config)
    share_the_cores(comms.world_size)
    console.quiet = comms.rank != 0
    try:
        with Monitor(console, TITLES[name], "tokens") as observe:
            result = train(job, comms, observe)
    except JobError:  # on all ranks alike, so they can part in good order
        comms.close()
        raise
    comms.close()
    return result


def report(result: Result, console: Console) -> None:
    """Print how well it learned, how fast it was, and where the time went."""
    facts = [
        ("held-out loss", f"{result.held_out:.4f}, on text that it has not seen; all losses in nats per byte")
    ]
    if len(result.dropped):
        first, last = ends(result.dropped)
        facts.append(("dropped", f"{first:.1%} → {last:.1%} of what tokens chose, for want of room"))
    report_outcome(result, facts, "tokens", console)


def document(result: Result, title: str) -> dict[str, Any]:
    """The report for programs."""
    dropped = dict(zip(("first", "last"), ends(result.dropped), strict=True)) if len(result.dropped) else None
    return result.document(title) | {
        "tokens_per_second": result.speed,
        "held_out_loss": result.held_out,
        "dropped": dropped,
    }


# --- the same job on every library ------------------------------------------------------------------


def compare(
    job: Job, rounds: int, config: Path, console: Console
) -> tuple[list[Comparison], dict[str, NDArray[np.float64]]]:
    """Run the job over every library, in rounds. The rows of the table, and the losses of the first round."""
    results, missing = take_turns(lambda name: run(name, config, job, console), rounds)
    rows = comparisons(results, missing, lambda result: {"held_out_loss": result.held_out})
    return rows, {TITLES[name]: runs[0].losses for name, runs in results.items() if runs}
