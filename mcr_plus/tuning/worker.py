"""A rank of a tuning or benchmark job: `python -m mcr_plus.tuning.worker REQUEST.json`.

`mcr-plus tune` and `mcr-plus bench` write the request, start the ranks and read the answer of rank 0. In
a job that was started otherwise (mpirun over several hosts) the commands are ranks themselves.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import mcr_plus as mcr
from mcr_plus import runtime
from mcr_plus.c10d import HashStore, PrefixStore
from mcr_plus.communicator import Communicator
from mcr_plus.config import backend_name
from mcr_plus.errors import Unsupported
from mcr_plus.interfaces import World
from mcr_plus.selection.fingerprint import fingerprint_here
from mcr_plus.selection.writing import save_table
from mcr_plus.tuning.algorithms import check_sizes, compared, left_out, needed, spans
from mcr_plus.tuning.derive import derive
from mcr_plus.tuning.load import busy_words, scatter_words, used_share
from mcr_plus.tuning.measure import Effort, Meter, Outcome
from mcr_plus.tuning.operations import TORCH, TUNED, Cell, Kind, whole_size
from mcr_plus.tuning.plan import Request, Task, coverage, impossible, next_task, stages
from mcr_plus.tuning.points import Point, PointFile, settled
from mcr_plus.tuning.statistics import algorithm_bandwidth, bus_bandwidth

COMMENT: Final = (
    "Measured by mcr-plus tune; times are median microseconds of the slowest rank. Those of rules with",
    "async: true are exposed times: what is left beside a computation of the operation's own length.",
)
NEEDED: Final = "Configurations that name this table need algorithms"
REACHES: Final = (
    "Rules reach from half of the smallest size measured to twice the largest one; what is left to the",
    "built-in preference (backend: built-in) was not measured.",
)
_LINE_EVERY: Final = 10.0  # seconds
_INCOMPLETE: Final = "Not complete: the budget ended before every size was measured; tune again to go on."


@dataclass(frozen=True)
class Job:
    """What a tuning or benchmark job shall do; plain data. Sizes in bytes, durations in seconds.

    `output`: the table file (tune). `answer`: where rank 0 writes what the command prints. `backends`:
    those to compare, or algorithms of theirs (`msccl:ring`), None for all. `algorithms`: files of them.
    `bind`: each rank keeps to a core of its own while measuring. `config`, `against_torch`, `passes`
    (over all sizes): for bench alone.
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
    def read(cls, path: str) -> Job:
        """The request in a file."""
        data = json.loads(Path(path).read_text())
        lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
        return cls(**{**data, **lists})


def run(job: Job) -> None:
    """Be one rank of the job."""
    torch.set_num_threads(1)
    config: Any = job.config
    if config is None:
        config = {"version": 1, **({"algorithms": list(job.algorithms)} if job.algorithms else {})}
        if job.what == "tune":
            config["pipeline"] = [{"select": {}}, {"dispatch": {}}]
    with mcr.init(config, backends=None if job.config else _libraries(job)) as comm:
        {"tune": _tune, "bench": _bench}[job.what](job, comm)


class _Core:
    """A core that this thread keeps to: ranks must not meet on one after a library's threads have run.

    Those threads stay free: they come into being while the core is let go. Nothing is bound where ranks share
    cores, or where one is alone on its host.
    """

    def __init__(self, world: World, *, wanted: bool) -> None:
        mine = [rank for rank, host in enumerate(world.hosts) if host == world.hosts[world.rank]]
        self._all = os.sched_getaffinity(0)
        share = len(self._all) // len(mine)
        bound = wanted and share and len(mine) > 1
        self._own = {sorted(self._all)[share * mine.index(world.rank)]} if bound else self._all

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Not bound within, bound after."""
        os.sched_setaffinity(0, self._all)
        try:
            yield
        finally:
            os.sched_setaffinity(0, self._own)


def _meter(comm: Communicator, job: Job) -> Meter:
    core = _Core(runtime.current().world, wanted=job.bind)

    def open_group() -> Communicator:
        with core.let_go():
            group = mcr.new_group(list(comm.ranks))
            for name in _libraries(job) or mcr.get_backends():
                with suppress(Unsupported):  # some start their threads with the first operation
                    group.barrier(backend=name)
            return group

    return Meter(open_group, open_group(), Effort(**job.effort))


def _libraries(job: Job) -> list[str] | None:
    """The backends to start, None for all."""
    names = [str(backend_name(way)) for way in job.backends or ()]
    return list(dict.fromkeys(names)) or None


def _ways(job: Job) -> list[str]:
    return list(job.backends or mcr.get_backends())


# -- tune -----------------------------------------------------------------------------------------


def _tune(job: Job, comm: Communicator) -> None:
    world = runtime.current().world
    ways = _ways(job)
    request = Request(
        job.kinds,
        job.smallest,
        job.largest,
        comm.size,
        tuple(way for way in ways if ":" not in way),
        job.dtypes,
        job.asynchronous,
        job.overlap,
        {kind: compared(ways, kind, comm.size) for kind in job.kinds},
    )
    request = replace(request, spans=spans(request.algorithms))
    check_sizes(request)
    here = _fingerprint(world)
    kept = PointFile(Path(job.measurements), here, fresh=job.fresh) if comm.rank == 0 else None
    points: list[Point] = list(kept.points) if kept is not None else []
    meter = _meter(comm, job)
    comm.barrier()  # a rank that comes late would be seen as load
    warnings = busy_words(comm.all_gather_object(used_share()))
    if comm.rank == 0:
        print("\n".join(warnings), file=sys.stderr, end="\n" if warnings else "", flush=True)
    began, lost = time.monotonic(), _core_losses()
    spent = False
    with _progress(job, comm.rank, f"tuning {', '.join(ways)}", stages(request)) as advance:
        while (task := _agreed_task(comm, request, points, spent)) is not None:
            outcome = meter.measure(task.cell, request.ways_of(task.cell), overlap=task.overlap)
            new = _points(task, outcome)
            points += new
            if kept is not None:
                kept.add(new)
            spent = job.budget is not None and time.monotonic() - began > job.budget
            advance(_describe(task.cell))
    rates = comm.all_gather_object((_core_losses() - lost) / max(time.monotonic() - began, 1e-3))
    if comm.rank == 0:
        table = replace(derive(request, points, here, len(set(world.hosts))), strict=job.strict)
        left = next_task(request, points, further=False)
        files = needed(table, job.algorithms)
        late = scatter_words(settled(request.relevant(points)), max(rates))
        if odd := impossible(request, points):
            late.append(f"Left out, since larger sizes took far less time: {'; '.join(odd)}.")
        comment = [*COMMENT, *REACHES, *warnings, *late]
        if files:
            comment.append(f"{NEEDED}: [{', '.join(files)}]")
        if left is not None:
            comment.append(_INCOMPLETE)
        save_table(table, job.output, comment=comment)
        used = [point.document() for point in request.relevant(points)]
        told = left_out(request, job.algorithms)
        answer = {
            "points": used,
            "complete": left is None,
            "algorithms": files,
            "left_out": told,
            "warnings": [*warnings, *late],
            "late_warnings": late,  # not printed yet
            "coverage": coverage(request, points),
            "missing": [kind for kind in job.kinds if kind not in {point["kind"] for point in used}],
        }
        Path(job.answer).write_text(json.dumps(answer))


def _core_losses() -> int:
    """How often this thread has lost its core although it could have gone on."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _agreed_task(comm: Communicator, request: Request, points: list[Point], spent: bool) -> Task | None:
    """Rank 0 says what comes next: it alone has the points of earlier runs, and its clock counts."""
    task = None if spent else next_task(request, points) if comm.rank == 0 else None
    found: Task | None = comm.broadcast_object(task, comm.ranks[0])
    return found


def _points(task: Task, outcome: Outcome) -> list[Point]:
    timed = [Point(task.cell, way, task.overlap, timing) for way, timing in outcome.timings.items()]
    return timed + [Point(task.cell, way, task.overlap, None, why) for way, why in outcome.excluded.items()]


def _fingerprint(world: World) -> dict[str, tuple[str, ...]]:
    hosts = Counter(world.hosts)
    return fingerprint_here(
        world.libraries, ranks=world.size, nodes=len(hosts), ranks_per_node=max(hosts.values())
    )


# -- bench ----------------------------------------------------------------------------------------


def _bench(job: Job, comm: Communicator) -> None:
    ways = [*_ways(job), TUNED]
    if job.against_torch:
        import torch.distributed as dist

        store = PrefixStore("bench", runtime.current().world.store or HashStore())
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
        ways.append(TORCH)
    meter = _meter(comm, job)
    cells = _cells(job, comm.size)
    points: list[Point] = []
    began = time.monotonic()
    with _progress(job, comm.rank, f"timing {', '.join(ways)}", job.passes * len(cells)) as advance:
        for cell in cells * job.passes:
            spent = job.budget is not None and time.monotonic() - began > job.budget
            if comm.broadcast_object(spent, comm.ranks[0]):
                break
            points += _points(Task(cell), meter.measure(cell, ways))
            advance(_describe(cell))
    if job.against_torch:
        import torch.distributed as dist

        dist.destroy_process_group()
    if comm.rank == 0:
        rows = [_row(point, comm.size) for point in settled(points)]
        Path(job.answer).write_text(json.dumps({"rows": rows}))


def _cells(job: Job, ranks: int) -> list[Cell]:
    dtype, sizes = job.dtypes[0], [job.smallest]
    while 2 * sizes[-1] <= job.largest:
        sizes.append(2 * sizes[-1])
    cells = [Cell(kind, whole_size(kind, size, dtype, ranks), dtype) for kind in job.kinds for size in sizes]
    return list(dict.fromkeys(cells))


def _row(point: Point, ranks: int) -> dict[str, Any]:
    cell, timing = point.cell, point.timing
    figures: dict[str, Any] = dict.fromkeys(("p20_us", "p50_us", "p80_us", "algbw_GBps", "busbw_GBps"))
    if timing is not None:
        figures = {
            "p20_us": timing.p20,
            "p50_us": timing.p50,
            "p80_us": timing.p80,
            "algbw_GBps": algorithm_bandwidth(cell.nbytes, timing.p50),
            "busbw_GBps": bus_bandwidth(cell.kind, cell.nbytes, timing.p50, ranks),
        }
    about = {
        "kind": cell.kind,
        "backend": point.way,
        "bytes": cell.nbytes,
        "ranks": ranks,
        "dtype": cell.dtype,
    }
    return {**about, **figures, "verified": timing is not None, "problem": point.problem}


# -- progress -------------------------------------------------------------------------------------


def _describe(cell: Cell) -> str:
    return f"{cell.kind} {cell.nbytes} B{' async' if cell.async_op else ''}"


def _lines(title: str, total: int) -> Callable[[str], None]:
    done, told = 0, time.monotonic()

    def advance(what: str) -> None:
        nonlocal done, told
        done += 1
        if time.monotonic() - told > _LINE_EVERY:
            told = time.monotonic()
            print(f"{title}: {what}, {done} of {max(total, done)}", file=sys.stderr, flush=True)

    return advance


@contextmanager
def _progress(job: Job, rank: int, title: str, total: int) -> Iterator[Any]:
    """A bar on rank 0's terminal, or now and then a line where there is none; a call advances it."""
    console = Console()
    if rank != 0 or not job.progress:
        yield lambda _: None
        return
    if not console.is_terminal:
        yield _lines(title, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        shown = bar.add_task(title, total=total)

        def advance(what: str) -> None:
            done = bar.tasks[0].completed + 1
            bar.update(shown, advance=1, total=max(total, done), description=f"{title}: {what}")

        yield advance


if __name__ == "__main__":
    run(Job.read(sys.argv[1]))  # `mcr-plus run` tells what it raises, once for all ranks
