"""Train a DLRM on click logs, its all_to_all on one library and its all_reduce on another.

    mcr-plus run -n 2 examples/dlrm/train.py                     the bundled rows, pipeline.yaml
    mcr-plus run -n 2 examples/dlrm/train.py --data train.txt    Criteo's own
    mcr-plus run -n 2 examples/dlrm/train.py --compare           the same job on each library

mpirun, torchrun and srun start it as well. `model.py` has the communication, `criteo.py` the data.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
import typer
from criteo import Batch, DataError, Reader
from model import DLRM, Comms, Handle, ModelConfig, loss
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from torch import distributed as dist

import mcr_plus as mcr
from mcr_plus.errors import BackendUnavailable, McrError

HERE = Path(__file__).parent
RECORDED = 2000  # steps whose communication is noted, so that a long run does not fill the memory
STYLE: Any = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "title_justify": "left"}
WINDOW = 10  # steps at the start and at the end whose mean loss is reported

# --- transports: the one job on several libraries ---------------------------------------------------


class Record(Protocol):
    """What mcr_plus notes of an operation, as far as it is shown here."""

    @property
    def kind(self) -> str: ...
    @property
    def tag(self) -> str | None: ...
    @property
    def backend(self) -> str: ...
    @property
    def bytes(self) -> int | None: ...  # None where the ranks' sizes differ, as in an uneven all_to_all
    @property
    def t_issue(self) -> float: ...
    @property
    def t_done(self) -> float: ...


class Log(Protocol):
    @property
    def records(self) -> Sequence[Record]: ...

    def save(self, path: str) -> None: ...


@dataclass(frozen=True)
class Recording:
    """The library's log, and what it cannot know."""

    log: Log
    sent: Counter[str] = field(default_factory=Counter)  # bytes this rank gave to all_to_all, by tag


class Transport(Comms, Protocol):
    """The model's `Comms`, and what the job around it needs."""

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, on every rank."""
        ...

    def record(self) -> AbstractContextManager[Recording | None]:
        """Note all operations inside, if the library can."""
        ...

    def close(self) -> None: ...


class McrTransport:
    """mcr_plus: the libraries are chosen by `config`, or are just `backends`."""

    def __init__(self, config: Path | None = None, backends: list[str] | None = None) -> None:
        mcr.init(None if config is None else str(config), backends=backends)
        self.rank = mcr.get_rank()
        self.world_size = mcr.get_world_size()
        self._sent: Counter[str] = Counter()

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        tag: str,
    ) -> None:
        self._sent[tag] += input.nbytes
        mcr.all_to_all_single(output, input, output_split_sizes, input_split_sizes, tag=tag)

    def all_reduce(self, tensor: Tensor, tag: str) -> Handle:
        return cast(Handle, mcr.all_reduce(tensor, tag=tag, async_op=True))

    def gather(self, value: Any) -> list[Any]:
        return list(mcr.all_gather_object(value))

    @contextmanager
    def record(self) -> Iterator[Recording]:
        with mcr.record() as log:
            recording = Recording(log)
            self._sent = recording.sent
            yield recording
        self._sent = Counter()

    def close(self) -> None:
        mcr.finalize()


class TorchTransport:
    """torch.distributed with gloo, which mcr_plus is measured against."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if "MASTER_ADDR" in os.environ:  # torchrun
            dist.init_process_group("gloo")
        else:
            self._join_through_mcr()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def _join_through_mcr(self) -> None:
        """mpirun gives torch no address to meet at; mcr_plus finds the ranks, and they agree on a file."""
        with mcr.init():
            rank, size = mcr.get_rank(), mcr.get_world_size()
            if rank == 0:
                self._folder = tempfile.TemporaryDirectory(prefix="dlrm-")
            folder = mcr.broadcast_object(self._folder.name if self._folder else None, src=0)
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        tag: str,  # noqa: ARG002
    ) -> None:
        dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes)

    def all_reduce(self, tensor: Tensor, tag: str) -> Handle:  # noqa: ARG002
        return cast(Handle, dist.all_reduce(tensor, async_op=True))

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def record(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        dist.destroy_process_group()
        if self._folder:
            self._folder.cleanup()


TransportName = Literal["torch", "gloo", "mpi", "mix"]
TITLES: dict[TransportName, str] = {
    "torch": "torch.distributed gloo",
    "gloo": "mcr_plus gloo",
    "mpi": "mcr_plus mpi",
    "mix": "mcr_plus mix",
}


def open_transport(name: TransportName, config: Path) -> Transport:
    """Join the other ranks; raises McrError when the library is not there."""
    if name == "torch":
        return TorchTransport()
    return McrTransport(config) if name == "mix" else McrTransport(backends=[name])


# --- metrics ----------------------------------------------------------------------------------------


def auc(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Chance that a random positive scores above a random negative, a tie counting half; nan if undefined."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]  # equal scores share their mean rank
    positives = int(np.sum(labels == 1))
    negatives = len(labels) - positives
    if not positives or not negatives:
        return math.nan
    rank_sum = float(ranks[labels == 1].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def log_loss(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Mean binary cross entropy of the logits `scores`; nan without rows."""
    return float(np.mean(np.logaddexp(0, scores) - labels * scores)) if len(labels) else math.nan


def accuracy(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Share of rows on the right side of one half; nan without rows."""
    return float(np.mean((scores > 0) == (labels == 1))) if len(labels) else math.nan


@dataclass(frozen=True)
class CommunicationRow:
    """All operations of one kind, tag and backend in the training steps of rank 0."""

    kind: str
    tag: str
    backend: str
    count: int
    bytes: int
    p50_us: float
    share: float  # of the step time; what overlaps with computing or other operations counts in full


def communication(recording: Recording, seconds: float) -> list[CommunicationRow]:
    """Sum up by kind, tag and backend what was recorded in `seconds` of training, the longest first."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in recording.log.records:
        groups.setdefault((record.kind, record.tag or "", record.backend), []).append(record)
    rows = []
    for key, group in groups.items():
        times = [record.t_done - record.t_issue for record in group]
        sizes = [record.bytes for record in group if record.bytes is not None]
        total = sum(sizes) if sizes else recording.sent[key[1]]
        rows.append(CommunicationRow(*key, len(group), total, median(times) * 1e6, sum(times) / seconds))
    return sorted(rows, key=lambda row: -row.share)


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


@dataclass(frozen=True)
class Result:
    """What came out, the same on every rank but for the times and the log."""

    ranks: int
    losses: NDArray[np.float64]  # of the global batch, by step
    labels: NDArray[np.float32]  # of the held-out rows of all ranks
    scores: NDArray[np.float32]
    seconds: float  # spent training
    samples_per_second: float  # in the median step
    communication: list[CommunicationRow]
    log: Log | None

    @property
    def first(self) -> float:
        return float(self.losses[: self._window].mean())

    @property
    def last(self) -> float:
        return float(self.losses[-self._window :].mean())

    @property
    def _window(self) -> int:
        return max(1, min(WINDOW, len(self.losses) // 2))


class Step(NamedTuple):
    part: float  # of the global batch's mean loss, from this rank's rows
    rows: int  # of the global batch
    seconds: float  # reading included


Observer = Callable[[float, int, float, float], None]  # fraction done, step, loss, samples/s


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
        steps, recording = self._train()
        recorded = sum(step.seconds for step in steps[:RECORDED])
        labels, scores = self._evaluate()
        return Result(
            ranks=self.comms.world_size,
            losses=np.sum(self.comms.gather([step.part for step in steps]), axis=0),
            labels=labels,
            scores=scores,
            seconds=sum(step.seconds for step in steps),
            samples_per_second=median(step.rows for step in steps) / median(step.seconds for step in steps),
            communication=communication(recording, recorded) if recording else [],
            log=recording.log if recording else None,
        )

    def _train(self) -> tuple[list[Step], Recording | None]:
        steps: list[Step] = []
        with ExitStack() as until:
            recording = until.enter_context(self.comms.record())
            start = time.perf_counter()
            for batch in islice(self._passes(), self.job.steps):
                part = self._step(batch)
                end = time.perf_counter()
                steps.append(Step(part, sum(batch.sizes), end - start))
                start = end
                self._show(steps, len(batch.labels))
                if len(steps) == RECORDED:
                    until.close()
        return steps, recording

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
        part = loss(self.model(batch.dense, batch.sparse, batch.sizes), batch.labels, batch.sizes)
        part.backward()  # type: ignore[no-untyped-call]
        self.model.wait_for_gradients()
        self.optimizer.step()
        return part.item()

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
            scores.append(self.model(batch.dense, batch.sparse, batch.sizes))
        gathered = self.comms.gather((torch.cat(labels).numpy(), torch.cat(scores).numpy()))
        return np.concatenate([own for own, _ in gathered]), np.concatenate([own for _, own in gathered])


# --- what is shown ----------------------------------------------------------------------------------


class Monitor:
    """A progress bar on a terminal, and elsewhere a line at every tenth."""

    def __init__(self, console: Console, title: str) -> None:
        self.console = console
        self.title = title
        self.tenth = 0
        self.smooth: float | None = None
        status = TextColumn(
            "step {task.fields[step]}  loss {task.fields[loss]}  {task.fields[rate]} samples/s"
        )
        columns = (TextColumn(title), BarColumn(), status, TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task(title, total=1.0, step=0, loss="-", rate="-")

    def __enter__(self) -> Observer:
        self.bar.start()
        return self.update

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, fraction: float, step: int, value: float, rate: float) -> None:
        self.smooth = value if self.smooth is None else 0.9 * self.smooth + 0.1 * value
        loss_text, rate_text = f"{self.smooth:.4f}", f"{rate:,.0f}"
        self.bar.update(self.task, completed=fraction, step=step, loss=loss_text, rate=rate_text)
        if not self.console.is_terminal and int(10 * fraction) > self.tenth:
            self.tenth = int(10 * fraction)
            place = f"{self.title}  {fraction:4.0%}  step {step}"
            self.console.print(f"{place}  loss {loss_text}  {rate_text} samples/s")


def run(transport: Transport, title: str, job: Job, console: Console) -> Result:
    """The job over `transport`, which is closed at the end."""
    share_the_cores(transport.world_size)
    console.quiet = transport.rank != 0
    with Monitor(console, title) as observe:
        result = Trainer(job, transport, observe).run()
    transport.close()
    return result


def share_the_cores(ranks: int) -> None:
    """Ranks of one machine that each start a thread per core get in each other's way."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def report(result: Result, console: Console) -> None:
    """Print how well it learned, how fast it was, and where the time went."""
    console.print(f"\ntrain loss    {result.first:.4f} → {result.last:.4f} over {len(result.losses)} steps")
    if len(result.labels):
        known = (result.labels, result.scores)
        console.print(
            f"held out      {len(result.labels)} rows: loss {log_loss(*known):.4f}, "
            f"accuracy {accuracy(*known):.1%}, AUC {auc(*known):.4f}"
        )
    console.print(
        f"speed         {result.samples_per_second:,.0f} samples/s over {result.ranks} rank(s), median step\n"
    )
    if result.communication:
        console.print(communication_table(result.communication))


def communication_table(rows: Sequence[CommunicationRow]) -> Table:
    caption = "operations that overlap with others count in full"
    table = Table(title="Communication of rank 0 while training", caption=caption, **STYLE)
    for name in ("op", "tag", "backend"):
        table.add_column(name, no_wrap=True)
    for name in ("count", "MiB", "p50 µs", "% of step"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (f"{row.count:,}", f"{row.bytes / 2**20:,.1f}", f"{row.p50_us:,.0f}", f"{row.share:.1%}")
        table.add_row(row.kind, row.tag, row.backend, *numbers)
    return table


def document(result: Result, title: str) -> dict[str, Any]:
    """The report for programs."""
    return {
        "transport": title,
        "ranks": result.ranks,
        "steps": len(result.losses),
        "seconds": result.seconds,
        "samples_per_second": result.samples_per_second,
        "train_loss": {"first": result.first, "last": result.last, "steps": result.losses.tolist()},
        "held_out": {
            "rows": len(result.labels),
            "loss": _known(log_loss(result.labels, result.scores)),
            "accuracy": _known(accuracy(result.labels, result.scores)),
            "auc": _known(auc(result.labels, result.scores)),
        },
        "communication": [vars(row) for row in result.communication],
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


# --- the same job on every library ------------------------------------------------------------------

# Two ranks add the same two numbers, so all libraries must give the same bits. More ranks may be added in
# any order; the difference, 1e-7 or so, grows by a thousand once it turns a ReLU on or off.
TOLERANCE = 1e-5
DISAGREE = (
    f"losses differ by more than {TOLERANCE:g}. On two ranks some library computed something wrong; on more "
    "it may be rounding, as they add in different orders: --double tells which."
)


@dataclass(frozen=True)
class Comparison:
    """One row of `--compare`."""

    transport: str
    ranks: int | None = None
    samples_per_second: float | None = None
    speedup: float | None = None
    final_loss: float | None = None
    auc: float | None = None
    max_difference: float | None = None  # of a step's loss from the first row's
    missing: str | None = None  # why the library did not run


def difference(losses: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Largest |a - b| of two series of losses, divided by |b| where that is above 1."""
    return float(np.max(np.abs(losses - reference) / np.maximum(1, np.abs(reference))))


def compare(job: Job, config: Path, console: Console) -> list[Comparison]:
    """Run the job over every transport, one after the other, in these processes."""
    rows: list[Comparison] = []
    reference: Result | None = None
    for name, title in TITLES.items():
        try:
            transport = open_transport(name, config)
        except BackendUnavailable as error:
            rows.append(Comparison(title, missing=str(error)))
            continue
        result = run(transport, title, job, console)
        reference = reference or result
        rows.append(_compared(title, result, reference))
    return rows


def _compared(title: str, result: Result, reference: Result) -> Comparison:
    return Comparison(
        title,
        ranks=result.ranks,
        samples_per_second=result.samples_per_second,
        speedup=result.samples_per_second / reference.samples_per_second,
        final_loss=result.last,
        auc=_known(auc(result.labels, result.scores)),
        max_difference=difference(result.losses, reference.losses),
    )


def agree(rows: Iterable[Comparison]) -> bool:
    """Whether every library that ran came to the same losses, up to the order of summation."""
    return all(row.max_difference is None or row.max_difference <= TOLERANCE for row in rows)


def report_comparison(rows: Sequence[Comparison], console: Console) -> None:
    console.print()
    console.print(comparison_table(rows))
    for row in rows:
        if row.missing is not None:
            console.print(f"{row.transport} did not run: {row.missing}", markup=False, soft_wrap=True)
    console.print(f"losses agree to {TOLERANCE:g} in every step" if agree(rows) else DISAGREE)


def comparison_table(rows: Iterable[Comparison]) -> Table:
    table = Table(title="The same job on each library", **STYLE)
    table.add_column("library", no_wrap=True)
    for name in ("samples/s", "speed-up", "final loss", "AUC", "max loss diff"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = (
            _cell(row.samples_per_second, ",.0f"),
            _cell(row.speedup, ".2f"),
            _cell(row.final_loss, ".5f"),
            _cell(row.auc, ".4f"),
            _cell(row.max_difference, ".1e"),
        )
        table.add_row(row.transport, *cells)
    return table


def _cell(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


# --- command line -----------------------------------------------------------------------------------


def main(
    data: Annotated[Path, typer.Option(help="Criteo TSV, plain or gzipped")] = HERE / "sample.tsv.gz",
    config: Annotated[Path, typer.Option(help="pipeline of the mix")] = HERE / "pipeline.yaml",
    comms: Annotated[TransportName, typer.Option(help="library to run on")] = "mix",
    compare_all: Annotated[
        bool, typer.Option("--compare", help="run on every library; status 1 if losses differ")
    ] = False,
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
    holdout: Annotated[float, typer.Option(min=0.0, max=0.5, help="fraction of rows to test on")] = 0.1,
    eval_rows: Annotated[int, typer.Option(min=1, help="test on at most so many rows")] = 100_000,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the results; - is stdout")] = None,
    trace: Annotated[Path | None, typer.Option(help="write rank 0's Chrome/Perfetto trace")] = None,
) -> None:
    """Train a DLRM over several ranks; say how well it learned and where the time went."""
    if trace and (compare_all or comms == "torch"):
        raise typer.BadParameter("goes with neither --compare nor --comms torch", param_hint="--trace")
    console = Console(stderr=json_path == Path("-"), highlight=False)
    dtype = torch.float64 if double else torch.float32
    model = ModelConfig(embedding_dim, table_rows, dtype=dtype, seed=seed)
    job = Job(data, model, batch_size, lr, epochs, steps, holdout, eval_rows)
    try:
        if compare_all:
            raise typer.Exit(run_compare(job, config, console, json_path))
        run_once(comms, job, config, console, json_path, trace)
    except (DataError, McrError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def run_once(
    name: TransportName, job: Job, config: Path, console: Console, json_path: Path | None, trace: Path | None
) -> None:
    title = TITLES[name]
    result = run(open_transport(name, config), title, job, console)
    report(result, console)
    if console.quiet:  # one rank is enough
        return
    if trace and result.log:
        result.log.save(str(trace))
    if json_path:
        write_json(document(result, title), json_path)


def run_compare(job: Job, config: Path, console: Console, json_path: Path | None) -> int:
    """The exit status: 1 if losses differ."""
    rows = compare(job, config, console)
    report_comparison(rows, console)
    same = agree(rows)
    if json_path and not console.quiet:
        content = {"tolerance": TOLERANCE, "same": same, "runs": [vars(row) for row in rows]}
        write_json(content, json_path)
    return 0 if same else 1


def write_json(content: dict[str, Any], path: Path) -> None:
    text = json.dumps(content, indent=1) + "\n"
    if path == Path("-"):
        sys.stdout.write(text)
    else:
        path.write_text(text)


if __name__ == "__main__":
    typer.run(main)
