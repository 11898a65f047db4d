"""Beside other work: all_reduce by every library while something else wants the cores.

    python benchmarks/bench_beside.py                             everything, about an hour
    python benchmarks/bench_beside.py --parts operations --cases 0,1 --ranks 2 --rounds 5
    python benchmarks/bench_beside.py --mpich .venv-mpich/bin/python --json FILE --output results/beside_X.md

Cases: so many busy processes (0, 1, 2, 4); `quota`: no other process, but a cgroup that may use 1.5 cores;
`loaders`: two DataLoader workers of rank 0 that prepare batches. Every case is a job of its own in which all
ways take turns, in an order drawn anew for each round. A turn is an operation that is not counted, a barrier,
and some that are; an operation counts as its slowest rank's time. `--mpich`: the interpreter of another
environment, in which raw MPICH takes its turns beside torch's gloo.

The examples (`--parts examples`) train beside the same, with the default configuration and with torch's gloo,
in turns; the figure is gloo's step over ours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import date
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from mcr_plus.environment import cores
from mcr_plus.selection.fingerprint import cpu_name
from mcr_plus.units import format_size, parse_size

ROOT: Final = Path(__file__).resolve().parent.parent
CASES: Final = ("0", "1", "2", "4", "quota", "loaders")
PARTS: Final = ("operations", "examples")
SIZES: Final = "8,1KiB,64KiB,1MiB,16MiB"
QUOTA: Final = 1.5  # cores
PERIOD_US: Final = 100_000
TORCH: Final = "torch gloo"
DEFAULT: Final = "default"
OURS: Final = ("msccl", "mpi", "gloo")
LARGE: Final = 1 << 20  # bytes from which on a turn has fewer operations
BUSY: Final = "import time\nwhile True:\n    for _ in range(10**6): pass"
EXAMPLES: Final = {
    "dlrm": ["--steps", "150"],
    "moe": ["--steps", "15", "--batch", "1"],
    "gpt": ["--steps", "10", "--batch", "2"],
}
P95_LIMIT: Final = 1.2


# --- something else that wants the cores ----------------------------------------------------------------


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that compute and do nothing else."""
    started = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


class _Noise(torch.utils.data.IterableDataset[torch.Tensor]):
    """Batches that take a worker some milliseconds each, without end."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(1 << 18).sort().values


@contextmanager
def loaders(workers: int) -> Iterator[Iterator[torch.Tensor]]:
    """The batches of a DataLoader with so many workers."""
    loader = torch.utils.data.DataLoader(_Noise(), batch_size=None, num_workers=workers, prefetch_factor=4)
    batches = iter(loader)
    try:
        yield batches
    finally:
        del batches, loader


@contextmanager
def quota(limit: float) -> Iterator[list[str]]:
    """What to put before a command so that it and its children use no more than `limit` cores together.

    Raises `OSError` where this process may not make cgroups.
    """
    two, one = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu")
    root = two if (two / "cgroup.controllers").exists() else one
    folder = root / f"mcr-plus-bench-{os.getpid()}"
    folder.mkdir()
    try:
        if root == two:
            (folder / "cpu.max").write_text(f"{round(limit * PERIOD_US)} {PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(round(limit * PERIOD_US)))
        yield ["sh", "-c", f'echo $$ > {shlex.quote(str(folder / "cgroup.procs"))} && exec "$@"', "sh"]
    finally:
        for _ in range(50):  # the last of its processes may be about to end
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


@contextmanager
def surroundings(case: str) -> Iterator[list[str]]:
    """Everything around a job that a case is about; what to put before its command."""
    with ExitStack() as until:
        prefix: list[str] = []
        if case == "quota":
            prefix = until.enter_context(quota(QUOTA))
        yield prefix


def why_not(case: str) -> str:
    """Why a case cannot be had here, empty if it can."""
    if case != "quota":
        return ""
    try:
        with quota(QUOTA):
            return ""
    except OSError as error:
        return f"no cgroup with a quota: {error}"


# --- operations -----------------------------------------------------------------------------------------


def ways(names: Sequence[str], tensor: torch.Tensor) -> dict[str, Any]:
    """How to sum `tensor` over the ranks, by name; those that are here."""
    import torch.distributed as dist

    import mcr_plus as mcr

    found: dict[str, Any] = {
        DEFAULT: lambda: mcr.all_reduce(tensor),
        **{name: lambda name=name: mcr.all_reduce(tensor, backend=name) for name in mcr.get_backends()},
        TORCH: lambda: dist.all_reduce(tensor),
    }
    if "mpi" in found:
        from mpi4py import MPI

        library = "Open MPI" if "Open MPI" in MPI.Get_library_version() else "MPICH"
        view = tensor.numpy()
        found[f"raw {library}"] = lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, view)
    return {name: way for name, way in found.items() if not names or name in names}


def measure(options: Mapping[str, Any]) -> None:
    """A rank of a job that measures; rank 0 writes what it found to `options["answer"]`."""
    import torch.distributed as dist

    import mcr_plus as mcr

    torch.set_num_threads(1)
    communicator = mcr.init()
    rank, size = communicator.rank, communicator.size
    store = Path(options["folder"], f"store-{size}").as_uri()
    dist.init_process_group("gloo", store, rank=rank, world_size=size)
    rows: list[dict[str, Any]] = []
    with ExitStack() as until:
        batches: Iterator[torch.Tensor] | None = None
        if rank == 0 and options["case"] == "loaders":
            batches = until.enter_context(loaders(2))
        elif rank == 0 and options["case"].isdigit():
            until.enter_context(busy(int(options["case"])))
        for nbytes in options["sizes"]:
            tensor = torch.zeros(max(1, nbytes // 4))
            chosen = ways(options["ways"], tensor)
            calls = options["calls"] if nbytes < LARGE else max(1, options["calls"] // 5)
            times: dict[str, list[torch.Tensor]] = {name: [] for name in chosen}
            order = random.Random(nbytes)  # the same on all ranks
            for _ in range(options["rounds"]):
                for name in order.sample(list(chosen), len(chosen)):
                    if batches is not None:
                        for _ in range(2):
                            next(batches)
                    times[name].append(turn(chosen[name], calls))
            for name, turns in times.items():
                mine = torch.cat(turns)
                dist.all_reduce(mine, dist.ReduceOp.MAX)
                figures = [1e6 * each for each in np.percentile(mine.numpy(), [50, 95])]
                mean = 1e6 * float(mine.mean())
                rows.append(
                    {"bytes": nbytes, "way": name, "p50": figures[0], "p95": figures[1], "mean": mean}
                )
    if rank == 0:
        Path(options["answer"]).write_text(json.dumps(rows))
    dist.destroy_process_group()
    mcr.finalize()


def turn(way: Any, calls: int) -> torch.Tensor:
    """Seconds of each of so many calls on this rank."""
    import torch.distributed as dist

    way()
    dist.barrier()
    stamps = [time.perf_counter()]
    for _ in range(calls):
        way()
        stamps.append(time.perf_counter())
    return torch.tensor(stamps, dtype=torch.float64).diff()


def operations(case: str, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one case and number of ranks."""
    jobs = [(sys.executable, options.ways.split(",") if options.ways else [])]
    if options.mpich is not None:
        jobs.append((str(options.mpich), ["raw MPICH", TORCH]))
    found: list[dict[str, Any]] = []
    for python, names in jobs:
        with tempfile.TemporaryDirectory() as folder, surroundings(case) as prefix:
            answer = Path(folder, "answer.json")
            settings = {
                "case": case,
                "sizes": [parse_size(size) for size in options.sizes.split(",")],
                "ways": names,
                "calls": options.calls,
                "rounds": options.rounds,
                "folder": folder,
                "answer": str(answer),
            }
            line = [python, "-m", "mcr_plus.cli.main", "run", "-n", str(ranks), __file__, "--rank"]
            run([*prefix, *line, json.dumps(settings)])
            rows = json.loads(answer.read_text())
        # torch's gloo takes its turns in each job, and counts where ours are.
        counted = [row for row in rows if python == sys.executable or row["way"] != TORCH]
        found += [{"case": case, "ranks": ranks, **row} for row in counted]
    return found


def run(line: Sequence[str]) -> None:
    """Run a command; what it printed is shown only if it failed."""
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(line)}\n{done.stdout}{done.stderr}")


# --- examples -------------------------------------------------------------------------------------------


def example(name: str, way: str, case: str, steps: int | None) -> float:
    """Seconds of an example's median step: what a run begins with counts in none."""
    script = ROOT / "examples" / name / "train.py"
    words = list(EXAMPLES[name])
    if steps is not None:
        words[1] = str(steps)
    with tempfile.TemporaryDirectory() as folder, surroundings(case) as prefix, ExitStack() as until:
        answer, config = Path(folder, "answer.json"), Path(folder, "default.yaml")
        config.write_text("version: 1\n")
        if case.isdigit():
            until.enter_context(busy(int(case)))
        elif case == "loaders":
            batches = until.enter_context(loaders(2))
            words_of = until.enter_context(consumed(batches))
            del words_of
        to = ["--comms", "torch"] if way == TORCH else ["--comms", "mix", "--config", str(config)]
        line = [sys.executable, "-m", "mcr_plus.cli.main", "run", "-n", "2", str(script)]
        run([*prefix, *line, *words, *to, "--json", str(answer)])
        found: dict[str, Any] = json.loads(answer.read_text())
    return float(found["step_seconds"])


@contextmanager
def consumed(batches: Iterator[torch.Tensor]) -> Iterator[None]:
    """Batches are taken all the time, as a job does that trains on them."""
    import threading

    ended = threading.Event()

    def take() -> None:
        while not ended.wait(0.02):
            next(batches)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def examples(case: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each example: the medians of rounds in turns."""
    rows = []
    for name in options.examples.split(","):
        found: dict[str, list[float]] = {DEFAULT: [], TORCH: []}
        for number in range(options.example_rounds):
            order = [DEFAULT, TORCH] if number % 2 else [TORCH, DEFAULT]
            for way in order:
                found[way].append(example(name, way, case, options.steps))
        ours, theirs = median(found[DEFAULT]), median(found[TORCH])
        ratios = sorted(b / a for a, b in zip(found[DEFAULT], found[TORCH], strict=True))
        rows.append(
            {
                "case": case,
                "example": name,
                "default": ours,
                "torch": theirs,
                "ratio": theirs / ours,
                "lowest": ratios[0],
                "highest": ratios[-1],
            }
        )
    return rows


# --- what came out --------------------------------------------------------------------------------------


def summary(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line for each case and number of ranks: the default against torch's gloo over all sizes."""
    lines = []
    for case, ranks in dict.fromkeys((row["case"], row["ranks"]) for row in rows):
        own = {
            (row["way"], row["bytes"]): row for row in rows if (row["case"], row["ranks"]) == (case, ranks)
        }
        sizes = [size for way, size in own if way == DEFAULT and (TORCH, size) in own]
        if not sizes:
            continue
        faster = [own[TORCH, size]["p50"] / own[DEFAULT, size]["p50"] for size in sizes]
        tails = [own[DEFAULT, size]["p95"] / own[TORCH, size]["p95"] for size in sizes]
        means = [own[TORCH, size]["mean"] / own[DEFAULT, size]["mean"] for size in sizes]
        lines.append(
            [
                case,
                str(ranks),
                f"{geometric_mean(faster):.2f} ×",
                f"{min(faster):.2f} ×",
                f"{geometric_mean(means):.2f} ×",
                f"{max(tails):.2f}",
                f"{sum(tail > P95_LIMIT for tail in tails)} of {len(tails)}",
            ]
        )
    return lines


SUMMARY_HEAD: Final = [
    "beside",
    "ranks",
    "torch gloo / default, geometric mean of medians",
    "… worst size",
    "… of means",
    "default's p95 / torch gloo's, worst size",
    f"… above {P95_LIMIT}",
]


def sections(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """A table for each case and number of ranks: `median / p95` in µs."""
    for case, ranks in dict.fromkeys((row["case"], row["ranks"]) for row in rows):
        own = [row for row in rows if (row["case"], row["ranks"]) == (case, ranks)]
        names = list(dict.fromkeys(row["way"] for row in own))
        sizes = list(dict.fromkeys(row["bytes"] for row in own))
        cells = {(row["way"], row["bytes"]): f"{figure(row['p50'])} / {figure(row['p95'])}" for row in own}
        lines = [[format_size(size), *(cells.get((name, size), "") for name in names)] for size in sizes]
        yield f"{title(case)}, {ranks} ranks", ["bytes", *names], lines


def title(case: str) -> str:
    """A case in words."""
    if case == "quota":
        return f"within {QUOTA:g} cores"
    if case == "loaders":
        return "beside two DataLoader workers"
    return f"beside {case} busy processes" if case != "1" else "beside one busy process"


def figure(us: float) -> str:
    """Three digits."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


EXAMPLES_HEAD: Final = ["beside", "example", "default ms", "torch gloo ms", "speed-up", "lowest to highest"]


def example_lines(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [
            row["case"],
            row["example"],
            f"{1e3 * row['default']:.1f}",
            f"{1e3 * row['torch']:.1f}",
            f"{row['ratio']:.2f} ×",
            f"{row['lowest']:.2f} to {row['highest']:.2f}",
        ]
        for row in rows
    ]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    table = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def report(found: Mapping[str, Any], command: str) -> str:
    """The figures as a page."""
    about = f"{cpu_name()}, {cores()} cores, Python {sys.version.split()[0]}, torch {torch.__version__}"
    parts = [f"# Beside other work ({date.today():%Y-%m-%d})", f"    {command}"]
    parts.append(f"{about}. all_reduce of float32, median / p95 of single operations in µs, ways in turns.")
    parts += [f"Skipped: {case}: {reason}" for case, reason in found["skipped"].items()]
    if found["operations"]:
        parts.append(markdown(SUMMARY_HEAD, summary(found["operations"])))
        for heading, head, lines in sections(found["operations"]):
            parts += [f"## {heading}", markdown(head, lines)]
    if found["examples"]:
        parts += ["## Examples: a step with torch's gloo over one with the default configuration"]
        parts.append(markdown(EXAMPLES_HEAD, example_lines(found["examples"])))
    return "\n\n".join(parts) + "\n"


def show(console: Console, heading: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    table = Table(title=heading, title_justify="left")
    for name in head:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--ways", default="", help=f"such as {DEFAULT},msccl,{TORCH}; all without it")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20, help="of a turn; a fifth of it for large sizes")
    parser.add_argument("--examples", default=",".join(EXAMPLES))
    parser.add_argument("--example-rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of an example")
    parser.add_argument("--mpich", type=Path, help="Python of an environment with MPICH")
    parser.add_argument("--json", type=Path, help="also write all figures")
    parser.add_argument("--output", type=Path, help="also write a report to this file")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        measure(json.loads(options.rank))
        return
    console = Console(width=150)
    found: dict[str, Any] = {"operations": [], "examples": [], "skipped": {}}
    command = f"python benchmarks/bench_beside.py {shlex.join(arguments or sys.argv[1:])}"
    for case in options.cases.split(","):
        if reason := why_not(case):
            found["skipped"][title(case)] = reason
            console.print(f"skipped {title(case)}: {reason}")
            continue
        if "operations" in options.parts:
            for ranks in map(int, options.ranks.split(",")):
                rows = operations(case, ranks, options)
                found["operations"] += rows
                for section in sections(rows):
                    show(console, *section)
        if "examples" in options.parts:
            rows = examples(case, options)
            found["examples"] += rows
            show(console, title(case), EXAMPLES_HEAD, example_lines(rows))
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1))
        if options.output is not None:
            options.output.write_text(report(found, command))
    if found["operations"]:
        show(console, "", SUMMARY_HEAD, summary(found["operations"]))


if __name__ == "__main__":
    main()
