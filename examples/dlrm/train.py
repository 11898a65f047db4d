"""Train a DLRM on click logs.

    mcr-plus run -n 2 examples/dlrm/train.py                     the bundled rows, libraries by default
    mcr-plus run -n 2 examples/dlrm/train.py --data train.txt    Criteo's own
    mcr-plus run -n 2 examples/dlrm/train.py --compare           the same job on each library

`--config examples/dlrm/pipeline.yaml` has every all_to_all on one library and every all_reduce on another.

mpirun, torchrun and srun start it as well. `model.py` has the communication, `transports.py` the
libraries it goes to, `criteo.py` the data, `report.py` the figures, `../common` what examples share.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import StringIO
from itertools import chain, count, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "common"))  # what the examples share

import command_line
import numpy as np
import torch
import typer
from comparing import ROUNDS, Comparison, comparisons, report_comparison, speedup, take_turns
from criteo import Batch, DataError, Reader
from libraries import TITLES, JobError, TransportName, device_of, share_the_cores
from model import DLRM, ModelConfig, loss
from numpy.typing import NDArray
from report import COLUMNS, Result, auc, document, report
from reporting import RECORDED, Monitor, Observer, known, write_json
from rich.console import Console
from transports import Transport, open_transport

from mcr_plus.core.units import format_size
from mcr_plus.errors import McrError
from mcr_plus.observe.record import Log
from mcr_plus.observe.record_table import communication
from mcr_plus.tuning.load import busy_words, used_share

HERE = Path(__file__).parent
SHORT = 60  # steps of a job that only tells how fast a library is

# --- the job ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What to train on, and how long."""

    data: Path
    model: ModelConfig
    batch_size: int
    lr: float
    epochs: int
    steps: int | None
    holdout: float
    eval_rows: int
    record: Path | None = None


class Step(NamedTuple):
    part: float  # of the global batch's mean loss, from this rank's rows
    rows: int  # of the global batch
    seconds: float  # reading included


class Trainer:
    """One run of a job over a transport."""

    def __init__(self, job: Job, comms: Transport, observe: Observer) -> None:
        self.job = job
        self.comms = comms
        self.observe = observe
        self.epoch = 0
        self.reader = Reader(
            job.data,
            batch_size=job.batch_size,
            table_rows=job.model.table_rows,
            holdout=job.holdout,
            rank=comms.rank,
            world_size=comms.world_size,
        )
        self.model = DLRM(job.model, comms)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=job.lr)

    def run(self) -> Result:
        steps, log = self._train()
        recorded = sum(step.seconds for step in steps[:RECORDED])
        labels, scores = self._evaluate()
        return Result(
            ranks=self.comms.world_size,
            losses=np.sum(self.comms.gather([step.part for step in steps]), axis=0),
            labels=labels,
            scores=scores,
            things=median(step.rows for step in steps),
            seconds=sum(step.seconds for step in steps),
            step_seconds=median(step.seconds for step in steps),
            communication=[] if log is None else communication(log.records, recorded),
            log=log,
        )

    def _train(self) -> tuple[list[Step], Log | None]:
        steps: list[Step] = []
        with ExitStack() as until:
            log = until.enter_context(self.comms.record(self.job.record))
            start = time.perf_counter()
            for batch in islice(self._passes(), self.job.steps):
                part = self._step(batch)
                end = time.perf_counter()
                steps.append(Step(part, sum(batch.sizes), end - start))
                start = end
                self._show(steps, len(batch.labels))
                if len(steps) == RECORDED:
                    until.close()
        return steps, log

    def _passes(self) -> Iterator[Batch]:
        """The file again and again: `epochs` times, or without end if it is `steps` that count."""
        for epoch in count() if self.job.steps else range(self.job.epochs):
            self.epoch = epoch
            batches = self.reader.train()
            first = next(batches, None)
            if first is None:
                raise DataError(f"{self.job.data}: no rows to train on")
            yield from chain([first], batches)

    def _step(self, batch: Batch) -> float:
        self.model.zero_gradients()
        part = loss(self._logits(batch), batch.labels.to(self.job.model.device), batch.sizes)
        part.backward()
        self.model.wait_for_gradients()
        self.optimizer.step()
        return part.item()

    def _logits(self, batch: Batch) -> torch.Tensor:
        device = self.job.model.device
        logits: torch.Tensor = self.model(batch.dense.to(device), batch.sparse.to(device), batch.sizes)
        return logits

    def _show(self, steps: Sequence[Step], own_rows: int) -> None:
        """The loss shown is that of this rank's rows: it costs no communication."""
        step = steps[-1]
        passes = (self.epoch + self.reader.fraction_read) / self.job.epochs
        fraction = len(steps) / self.job.steps if self.job.steps else passes
        own_loss = step.part * step.rows / max(own_rows, 1)
        self.observe(fraction, len(steps), own_loss, step.rows / step.seconds)

    @torch.no_grad()
    def _evaluate(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Labels and logits of the held-out rows, of all ranks."""
        labels, scores = [torch.empty(0)], [torch.empty(0)]
        for batch in self.reader.held_out(self.job.eval_rows) if self.job.holdout else ():
            labels.append(batch.labels)
            scores.append(self._logits(batch).cpu())
        gathered = self.comms.gather((torch.cat(labels).numpy(), torch.cat(scores).numpy()))
        return np.concatenate([own for own, _ in gathered]), np.concatenate([own for _, own in gathered])


def run(transport: Transport, title: str, job: Job, console: Console) -> Result:
    """The job over `transport`, which is closed at the end."""
    share_the_cores(transport.world_size)
    console.quiet = transport.rank != 0
    with Monitor(console, title, "samples") as observe:
        result = Trainer(job, transport, observe).run()
    transport.close()
    return result


def compare(
    job: Job,
    rounds: int,
    config: Path | None,
    console: Console,
    names: Sequence[TransportName] = tuple(TITLES),
) -> list[Comparison]:
    """Run the job over every library of `names`, in rounds, in these processes."""
    results, missing = take_turns(
        lambda name: run(open_transport(name, config), TITLES[name], job, console), rounds, names
    )
    return comparisons(results, missing, lambda result: {"auc": known(auc(result.labels, result.scores))})


# --- command line -----------------------------------------------------------------------------------


def main(
    data: Annotated[Path, typer.Option(help="Criteo TSV, plain or gzipped")] = HERE / "sample.tsv.gz",
    config: Annotated[
        Path | None, typer.Option(help="pipeline; without one mcr_plus chooses the libraries")
    ] = None,
    comms: Annotated[TransportName, typer.Option(help="library to run on")] = "mix",
    compare_all: Annotated[
        bool, typer.Option("--compare", help="run on every library; status 1 if losses differ")
    ] = False,
    against_torch: Annotated[
        bool,
        typer.Option("--against-torch", help="say how fast torch.distributed's gloo is, and who served what"),
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=1, help="of --compare: every library runs once in each")
    ] = ROUNDS,
    steps: Annotated[
        int | None, typer.Option(min=1, help="train so many batches; overrides --epochs")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="passes over the data")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="rows of a step, over all ranks")] = 128,
    lr: Annotated[float, typer.Option(min=0.0)] = 0.1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    embedding_dim: Annotated[int, typer.Option(min=1)] = 16,
    table_rows: Annotated[int, typer.Option(min=2, help="rows of each embedding table")] = 10_000,
    double: Annotated[bool, typer.Option("--double", help="compute in float64")] = False,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="train on CPUs or on CUDA devices")] = "cpu",
    holdout: Annotated[float, typer.Option(min=0.0, max=0.5, help="fraction of rows to test on")] = 0.1,
    eval_rows: Annotated[int, typer.Option(min=1, help="test on at most so many rows")] = 100_000,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the results; - is stdout")] = None,
    trace: Annotated[Path | None, typer.Option(help="write rank 0's Chrome/Perfetto trace")] = None,
    record: Annotated[Path | None, typer.Option(help="write a folder for mcr-plus report")] = None,
) -> None:
    """Train a DLRM over several ranks; say how well it learned and where the time went."""
    for option, path in (("--trace", trace), ("--record", record)):
        if path and (compare_all or comms == "torch"):
            raise typer.BadParameter("goes with neither --compare nor --comms torch", param_hint=option)
    console = Console(stderr=json_path == Path("-"), highlight=False)
    dtype = torch.float64 if double else torch.float32
    try:
        model = ModelConfig(embedding_dim, table_rows, dtype=dtype, device=device_of(device), seed=seed)
        job = Job(data, model, batch_size, lr, epochs, steps, holdout, eval_rows, record)
        if compare_all:
            rows = compare(job, rounds, config, console)
            raise typer.Exit(report_comparison(rows, "samples", COLUMNS, console, json_path))
        result = run_once(comms, job, config, console, json_path, trace)
        if against_torch:
            _say_against_torch(job, result, config, console)
    except (DataError, JobError, McrError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def run_once(
    name: TransportName,
    job: Job,
    config: Path | None,
    console: Console,
    json_path: Path | None,
    trace: Path | None,
) -> Result:
    title = TITLES[name]
    result = run(open_transport(name, config), title, job, console)
    report(result, console)
    if not console.quiet:  # one rank is enough
        if trace and result.log:
            result.log.save(str(trace))
        if json_path:
            write_json(document(result, title), json_path)
    return result


def _say_against_torch(job: Job, result: Result, config: Path | None, console: Console) -> None:
    """The speed of a short job in turns with torch.distributed's gloo, and which library took what."""
    used = used_share()  # on all ranks, so that none begins meanwhile
    short = replace(job, steps=SHORT, holdout=0.0)
    theirs, ours = compare(short, ROUNDS, config, Console(file=StringIO()), ("torch", "mix"))
    lines = [
        "",
        f"Compared with torch.distributed: {SHORT} steps of the same job on each, {ROUNDS} times in turns",
        "samples/s, the median of these runs (slowest–fastest)",
    ]
    for row in (theirs, ours):
        if row.missing is not None or row.speed_range is None:
            raise JobError(f"{row.transport} did not run: {row.missing}")
        slowest, fastest = row.speed_range
        lines.append(f"  {row.transport:24}{row.speed:>8,.0f}  ({slowest:,.0f}–{fastest:,.0f})")
    same = speedup(ours) == "no difference"
    verdict = "no difference, for the ranges overlap" if same else f"{speedup(ours)} × as fast"
    lines.append(f"  {ours.transport}: {verdict}.")
    lines.append(
        f"Compare these two with each other alone: the {result.speed:,.0f} samples/s above are of "
        f"{len(result.losses)} steps at another time."
    )
    if busy_words([used]):
        lines.append(
            f"This host was busy ({used:.0%} of its processor time, before the rounds): figures scatter."
        )
    console.print("\n".join([*lines, "", *_choices(result, config)]), soft_wrap=True)


def _choices(result: Result, config: Path | None) -> list[str]:
    """Which libraries took what, how to ask why, and what to try next."""
    kinds: dict[str, list[str]] = {}
    for row in result.communication:
        kinds.setdefault(row.backend, []).append(row.kind)
    served = [f"{backend} took {', '.join(dict.fromkeys(names))}" for backend, names in kinds.items()]
    option = "" if config is None else f" --config {config}"
    lines = [f"Libraries: {'; '.join(served)}."] if served else []
    records = [] if result.log is None else result.log.records
    largest = max(
        (each for each in records if each.kind == "all_reduce"), key=lambda each: each.bytes, default=None
    )
    if largest is not None:
        size = f"{format_size(largest.bytes)} --async --tag {largest.tag}"
        lines.append(f"Why:       mcr-plus explain all_reduce {size}{option}")
    lines.append(f"Next:      mcr-plus run -n {result.ranks} examples/dlrm/train.py --compare{option}")
    return lines


if __name__ == "__main__":
    command_line.run(main)
