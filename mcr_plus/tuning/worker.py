"""Rank of a tuning or benchmark job: `python -m mcr_plus.tuning.worker REQUEST.json`.

`mcr-plus tune` and `mcr-plus bench` write the request, start the ranks and read the answer of rank 0. Inside
an existing job (mpirun over several hosts) the commands themselves are ranks.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import mcr_plus as mcr
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.config.names import backend_name
from mcr_plus.core.c10d import HashStore, PrefixStore
from mcr_plus.core.kinds import Kind
from mcr_plus.errors import Unsupported
from mcr_plus.job import init as runtime
from mcr_plus.rendezvous.world import World
from mcr_plus.tables.fingerprint import fingerprint_here
from mcr_plus.tables.statistics import algorithm_bandwidth, bus_bandwidth
from mcr_plus.tables.writing import save_table
from mcr_plus.tuning.algorithms import check_sizes, compared, left_out, needed, spans
from mcr_plus.tuning.build_table import build_table
from mcr_plus.tuning.load import busy_words, scatter_words, used_share
from mcr_plus.tuning.measure import CaseOutcome, Effort, Meter
from mcr_plus.tuning.measurements import MeasurementFile, Sample, median_of_repeats
from mcr_plus.tuning.operations import TORCH, TUNED, BenchCase, whole_size
from mcr_plus.tuning.pace import Pace, left_out_sizes, sampling_seconds, unmeasured
from mcr_plus.tuning.plan import TableRequest, Task, coverage, impossible, next_task, whole_grid

COMMENT: Final = (
    "Measured by mcr-plus tune; times are median microseconds of the slowest rank. Those of rules with",
    "async: true are exposed times: the time beyond a concurrent computation of the operation's length.",
)
NEEDED: Final = "Configurations that name this table need algorithms"
REACHES: Final = (
    "Rules reach from half of the smallest size measured to twice the largest one; sizes with the",
    "built-in preference (backend: built-in) were not measured.",
)
_COMBINATIONS: Final = "combinations of operation, manner and size"
_LINE_EVERY: Final = 10.0  # seconds
_INCOMPLETE: Final = "Incomplete: the budget ended before all sizes were measured; tune again to continue."


@dataclass(frozen=True)
class TuningJob:
    """Parameters of a tuning or benchmark job; plain data. Sizes in bytes, durations in seconds.

    `output`: the table file (tune). `answer`: the file for the results that the command prints. `backends`:
    backends or algorithms (`msccl:ring`) to compare, None for all. `algorithms`: algorithm files.
    `bind`: pin each rank to its own core while it measures. `config`, `against_torch`, `passes` (over all
    sizes): for bench only.
    """

    what: str
    kinds: tuple[Kind, ...]
    smallest: int
    largest: int
    dtypes: tuple[str, ...] = ("float32",)
    backends: tuple[str, ...] | None = None
    budget: float | None = None
    answer: str = ""
    progress: bool = True
    output: str = ""
    measurements: str = ""
    fresh: bool = False
    asynchronous: bool = True
    overlap: bool = True
    strict: bool = False
    bind: bool = True
    config: str | None = None
    against_torch: bool = False
    passes: int = 1
    algorithms: tuple[str, ...] = ()
    effort: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str) -> TuningJob:
        """Read a request from a file."""
        data = json.loads(Path(path).read_text())
        lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
        return cls(**{**data, **lists})


def run(job: TuningJob) -> None:
    """Run one rank of the job."""
    torch.set_num_threads(1)
    config: Any = job.config
    if config is None:
        config = {"version": 1, **({"algorithms": list(job.algorithms)} if job.algorithms else {})}
        if job.what == "tune":
            config["pipeline"] = [{"select": {}}, {"dispatch": {}}]
    with mcr.init(config, backends=None if job.config else _libraries(job)) as comm:
        {"tune": _tune, "bench": _bench}[job.what](job, comm)


class _Core:
    """Pins this thread to a core, so that ranks do not end up on the same core after a library's threads ran.

    Libraries create their threads inside `unpinned`, so these threads are not pinned. No thread is pinned if
    ranks share cores, or if a rank is alone on its host.
    """

    def __init__(self, world: World, *, wanted: bool) -> None:
        mine = [rank for rank, host in enumerate(world.hosts) if host == world.hosts[world.rank]]
        self._all = os.sched_getaffinity(0)
        share = len(self._all) // len(mine)
        bound = wanted and share and len(mine) > 1
        self._own = {sorted(self._all)[share * mine.index(world.rank)]} if bound else self._all

    @contextmanager
    def unpinned(self) -> Iterator[None]:
        """Release the thread in this block, and pin it again afterwards."""
        os.sched_setaffinity(0, self._all)
        try:
            yield
        finally:
            os.sched_setaffinity(0, self._own)


def _meter(comm: Communicator, job: TuningJob, effort: Effort) -> Meter:
    core = _Core(runtime.current().world, wanted=job.bind)

    def open_group() -> Communicator:
        with core.unpinned():
            group = mcr.new_group(list(comm.ranks))
            for name in _libraries(job) or mcr.get_backends():
                with suppress(Unsupported):  # some libraries create threads at the first operation
                    group.barrier(backend=name)
            return group

    return Meter(open_group, open_group(), effort)


def _libraries(job: TuningJob) -> list[str] | None:
    """Return the backends to start, None for all."""
    names = [str(backend_name(candidate)) for candidate in job.backends or ()]
    return list(dict.fromkeys(names)) or None


def _candidates(job: TuningJob) -> list[str]:
    return list(job.backends or mcr.get_backends())


# -- tune -----------------------------------------------------------------------------------------


def _tune(job: TuningJob, comm: Communicator) -> None:
    world = runtime.current().world
    candidates = _candidates(job)
    request = TableRequest(
        job.kinds,
        job.smallest,
        job.largest,
        comm.size,
        tuple(candidate for candidate in candidates if ":" not in candidate),
        job.dtypes,
        job.asynchronous,
        job.overlap,
        {kind: compared(candidates, kind, comm.size) for kind in job.kinds},
    )
    request = replace(request, spans=spans(request.algorithms))
    check_sizes(request)
    here = _fingerprint(world)
    # Only rank 0 has the file and decides every task; ranks without earlier samples follow.
    kept = MeasurementFile(Path(job.measurements), here, fresh=job.fresh) if comm.rank == 0 else None
    samples: list[Sample] = list(kept.samples) if kept is not None else []
    effort = _effort(comm, request, samples, job)
    meter = _meter(comm, job, effort)
    comm.barrier()  # ranks that are still starting would count as load
    warnings = busy_words(comm.all_gather_object(used_share()))
    if comm.rank == 0:
        print("\n".join(warnings), file=sys.stderr, end="\n" if warnings else "", flush=True)
    began, lost = time.monotonic(), _core_losses()
    pace = Pace(request, effort.seconds, job.budget)
    further = 0
    # Save every sample at once, so that an interrupted run can continue from the file.
    with _progress(job, comm.rank, f"tuning {', '.join(candidates)}", _COMBINATIONS) as advance:
        while (task := _agreed_task(comm, samples, pace)) is not None:
            started, before = time.monotonic(), coverage(request, samples)
            outcome = meter.measure(task.case, request.candidates_for(task.case), overlap=task.overlap)
            new = _samples(task, outcome)
            samples += new
            if kept is not None:
                kept.add(new)
            pace.took(task, time.monotonic() - started)
            after = coverage(request, samples)
            further += after == before
            advance(_describe(task.case), *after, further)
    # Preemptions of the worst rank: the slowest rank determines every time.
    rates = comm.all_gather_object((_core_losses() - lost) / max(time.monotonic() - began, 1e-3))
    if comm.rank == 0:
        table = replace(build_table(request, samples, here, len(set(world.hosts))), strict=job.strict)
        left = next_task(request, samples, further=False)
        files = needed(table, job.algorithms)
        late = scatter_words(median_of_repeats(request.relevant(samples)), max(rates))
        if odd := impossible(request, samples):
            late.append(f"Left out, since larger sizes took far less time: {'; '.join(odd)}.")
        comment = [*COMMENT, *REACHES, *warnings, *late]
        if files:
            comment.append(f"{NEEDED}: [{', '.join(files)}]")
        if left is not None:
            comment.append(_INCOMPLETE)
        save_table(table, job.output, comment=comment)
        used = [sample.document() for sample in request.relevant(samples)]
        left_out_files = left_out(request, job.algorithms)
        remaining = unmeasured(whole_grid(request), samples)
        answer = {
            "points": used,
            "complete": left is None,
            "algorithms": files,
            "left_out": left_out_files,
            "warnings": [*warnings, *late],
            "late_warnings": late,  # not printed yet
            "coverage": coverage(request, samples),
            "seconds_left": sum(map(pace.expected, remaining)),
            "left_out_sizes": left_out_sizes(request, samples, pace.expected),
            "missing": [kind for kind in job.kinds if kind not in {sample["kind"] for sample in used}],
        }
        Path(job.answer).write_text(json.dumps(answer))


def _core_losses() -> int:
    """Return the number of involuntary context switches of this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _effort(comm: Communicator, request: TableRequest, samples: Sequence[Sample], job: TuningJob) -> Effort:
    """Return the limits of sampling. Rank 0 decides, because only rank 0 has the samples of earlier runs."""
    effort = Effort(**job.effort)
    seconds = sampling_seconds(request, samples, job.budget, effort.seconds) if comm.rank == 0 else None
    return replace(effort, seconds=comm.broadcast_object(seconds, comm.ranks[0]))


def _agreed_task(comm: Communicator, samples: Sequence[Sample], pace: Pace) -> Task | None:
    """Return the next task. Rank 0 decides, because only rank 0 has the clock and the earlier samples."""
    task = pace.next_task(samples) if comm.rank == 0 else None
    found: Task | None = comm.broadcast_object(task, comm.ranks[0])
    return found


def _samples(task: Task, outcome: CaseOutcome) -> list[Sample]:
    timed = [
        Sample(task.case, candidate, task.overlap, timing) for candidate, timing in outcome.timings.items()
    ]
    return timed + [
        Sample(task.case, candidate, task.overlap, None, why) for candidate, why in outcome.excluded.items()
    ]


def _fingerprint(world: World) -> dict[str, tuple[str, ...]]:
    hosts = Counter(world.hosts)
    return fingerprint_here(
        world.libraries, ranks=world.size, nodes=len(hosts), ranks_per_node=max(hosts.values())
    )


# -- bench ----------------------------------------------------------------------------------------


def _bench(job: TuningJob, comm: Communicator) -> None:
    candidates = [*_candidates(job), TUNED]
    if job.against_torch:
        import torch.distributed as dist

        store = PrefixStore("bench", runtime.current().world.store or HashStore())
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
        candidates.append(TORCH)
    meter = _meter(comm, job, Effort(**job.effort))
    cases = _cases(job, comm.size)
    samples: list[Sample] = []
    began = time.monotonic()
    total = job.passes * len(cases)
    with _progress(job, comm.rank, f"timing {', '.join(candidates)}", "timings of a size") as advance:
        for done, case in enumerate(cases * job.passes, 1):
            spent = job.budget is not None and time.monotonic() - began > job.budget
            if comm.broadcast_object(spent, comm.ranks[0]):
                break
            samples += _samples(Task(case), meter.measure(case, candidates))
            advance(_describe(case), done, total)
    if job.against_torch:
        import torch.distributed as dist

        dist.destroy_process_group()
    if comm.rank == 0:
        rows = [_row(sample, comm.size) for sample in median_of_repeats(samples)]
        Path(job.answer).write_text(json.dumps({"rows": rows}))


def _cases(job: TuningJob, ranks: int) -> list[BenchCase]:
    dtype, sizes = job.dtypes[0], [job.smallest]
    while 2 * sizes[-1] <= job.largest:
        sizes.append(2 * sizes[-1])
    cases = [
        BenchCase(kind, whole_size(kind, size, dtype, ranks), dtype) for kind in job.kinds for size in sizes
    ]
    return list(dict.fromkeys(cases))


def _row(sample: Sample, ranks: int) -> dict[str, Any]:
    case, timing = sample.case, sample.timing
    figures: dict[str, Any] = dict.fromkeys(("p20_us", "p50_us", "p80_us", "algbw_GBps", "busbw_GBps"))
    if timing is not None:
        figures = {
            "p20_us": timing.p20,
            "p50_us": timing.p50,
            "p80_us": timing.p80,
            "algbw_GBps": algorithm_bandwidth(case.nbytes, timing.p50),
            "busbw_GBps": bus_bandwidth(case.kind, case.nbytes, timing.p50, ranks),
        }
    about = {
        "kind": case.kind,
        "backend": sample.candidate,
        "bytes": case.nbytes,
        "ranks": ranks,
        "dtype": case.dtype,
    }
    return {**about, **figures, "verified": timing is not None, "problem": sample.problem}


# -- progress -------------------------------------------------------------------------------------


def _describe(case: BenchCase) -> str:
    return f"{case.kind} {case.nbytes} B{' async' if case.async_op else ''}"


def progress_line(title: str, what: str, unit: str, done: int, total: int, further: int = 0) -> str:
    """Return a line of progress: `done` of `total` items named `unit`, and `further` additional ones."""
    more = f", and {further} further measurement{'' if further == 1 else 's'}" if further else ""
    return f"{title}: {what}; {done} of {total} {unit}{more}"


def _lines(title: str, unit: str) -> Callable[..., None]:
    printed = time.monotonic()

    def advance(what: str, done: int, total: int, further: int = 0) -> None:
        nonlocal printed
        if time.monotonic() - printed > _LINE_EVERY:
            printed = time.monotonic()
            print(progress_line(title, what, unit, done, total, further), file=sys.stderr, flush=True)

    return advance


@contextmanager
def _progress(job: TuningJob, rank: int, title: str, unit: str) -> Iterator[Callable[..., None]]:
    """Yield a function that shows progress: a bar on rank 0's terminal, or lines without a terminal."""
    console = Console()
    if rank != 0 or not job.progress:
        yield lambda *_: None
        return
    if not console.is_terminal:
        yield _lines(title, unit)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        shown = bar.add_task(title, total=None)

        def advance(what: str, done: int, total: int, further: int = 0) -> None:
            words = progress_line(title, what, unit, done, total, further)
            bar.update(shown, completed=done, total=total, description=words)

        yield advance


if __name__ == "__main__":
    run(TuningJob.read(sys.argv[1]))  # `mcr-plus run` prints the errors of all ranks, merged
