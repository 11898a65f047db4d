"""Beside other work: all_reduce by every library while something else wants the cores.

    python benchmarks/bench_beside.py                             everything, about an hour
    python benchmarks/bench_beside.py --parts operations --cases 0,1 --ranks 2 --rounds 5
    python benchmarks/bench_beside.py --mpich .venv-mpich/bin/python --json FILE --output results/beside_X.md

Cases: so many busy processes (0, 1, 2, 4); `quota`: no other process, but a cgroup that may use 1.5 cores;
`loaders`: two DataLoader workers of rank 0 that prepare batches. Every case is a job of its own in which all
candidates take turns, in an order drawn anew for each round. A turn is an operation that is not counted, a
barrier, and some that are; an operation counts as its slowest rank's time. `--mpich`: the interpreter of
another environment, in which raw MPICH takes its turns beside torch's gloo.

The examples (`--parts examples`) train beside the same, with the default configuration and with torch's gloo,
in turns; the figure is gloo's step over ours.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any, Final

import harness
import numpy as np
import torch
import torch.distributed as dist
import typer
from harness import Call, Json, Output, Rounds

import mcr_plus as mcr
from mcr_plus.core.units import format_size, parse_size

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
    around: AbstractContextManager[list[str]] = quota(QUOTA) if case == "quota" else nullcontext([])
    with around as prefix:
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


def candidates(names: Sequence[str], tensor: torch.Tensor) -> dict[str, Call]:
    """How to sum `tensor` over the ranks, by name; those that are here."""
    found: dict[str, Call] = {
        DEFAULT: lambda: mcr.all_reduce(tensor),
        **{name: partial(mcr.all_reduce, tensor, backend=name) for name in mcr.get_backends()},
        TORCH: lambda: dist.all_reduce(tensor),
    }
    if "mpi" in found:
        from mpi4py import MPI

        library = "Open MPI" if "Open MPI" in MPI.Get_library_version() else "MPICH"
        view = tensor.numpy()
        found[f"raw {library}"] = lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, view)
    return {name: candidate for name, candidate in found.items() if not names or name in names}


def measure(
    case: str, names: Sequence[str], sizes: Sequence[int], rounds: int, most: int
) -> list[dict[str, Any]] | None:
    """On ranks: the rows of one case."""
    torch.set_num_threads(1)
    communicator = mcr.init()
    rank = communicator.rank
    harness.join_gloo(communicator)
    rows: list[dict[str, Any]] = []
    with ExitStack() as until:
        batches: Iterator[torch.Tensor] | None = None
        if rank == 0 and case == "loaders":
            batches = until.enter_context(loaders(2))
        elif rank == 0 and case.isdigit():
            until.enter_context(busy(int(case)))
        for nbytes in sizes:
            tensor = torch.zeros(max(1, nbytes // 4))
            calls = most if nbytes < LARGE else max(1, most // 5)

            def one(candidate: Call, calls: int = calls) -> torch.Tensor:
                if batches is not None:
                    for _ in range(2):
                        next(batches)
                return turn(candidate, calls)

            for name, turns in harness.in_turns(candidates(names, tensor), rounds, one).items():
                mine = torch.cat(turns)
                dist.all_reduce(mine, dist.ReduceOp.MAX)
                p50, p95 = (1e6 * float(each) for each in np.percentile(mine.numpy(), [50, 95]))
                rows.append(
                    {"bytes": nbytes, "way": name, "p50": p50, "p95": p95, "mean": 1e6 * float(mine.mean())}
                )
    dist.destroy_process_group()
    mcr.finalize()
    return rows if rank == 0 else None


def turn(candidate: Call, calls: int) -> torch.Tensor:
    """Seconds of each of so many calls on this rank."""
    candidate()
    dist.barrier()
    stamps = [time.perf_counter()]
    for _ in range(calls):
        candidate()
        stamps.append(time.perf_counter())
    return torch.tensor(stamps, dtype=torch.float64).diff()


def operations(
    case: str, ranks: int, mpich: Path | None, candidates: Sequence[str], *settings: Any
) -> list[dict[str, Any]]:
    """The rows of one case and number of ranks."""
    found: list[dict[str, Any]] = []
    for python, names in (
        (sys.executable, candidates),
        *([(str(mpich), ["raw MPICH", TORCH])] if mpich else ()),
    ):
        with surroundings(case) as prefix:
            rows = harness.on_ranks(harness.here(ranks, python, prefix), measure, case, names, *settings)
        # torch's gloo takes its turns in each job, and counts where ours are.
        counted = [row for row in rows if python == sys.executable or row["way"] != TORCH]
        found += [{"case": case, "ranks": ranks, **row} for row in counted]
    return found


# --- examples -------------------------------------------------------------------------------------------


def example(name: str, candidate: str, case: str, steps: int | None) -> float:
    """Seconds of an example's median step: what a run begins with counts in none."""
    words = list(EXAMPLES[name])
    if steps is not None:
        words[1] = str(steps)
    with tempfile.TemporaryDirectory() as folder, surroundings(case) as prefix, ExitStack() as until:
        config = Path(folder, "default.yaml")
        config.write_text("version: 1\n")
        if case.isdigit():
            until.enter_context(busy(int(case)))
        elif case == "loaders":
            until.enter_context(consumed(until.enter_context(loaders(2))))
        to = ["--comms", "torch"] if candidate == TORCH else ["--comms", "mix", "--config", str(config)]
        return float(harness.train(harness.here(2, prefix=prefix), name, *words, *to)["step_seconds"])


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


def examples(case: str, names: Sequence[str], rounds: int, steps: int | None) -> list[dict[str, Any]]:
    """A row for each example: the medians of rounds in turns."""
    rows = []
    for name in names:
        found: dict[str, list[float]] = {DEFAULT: [], TORCH: []}
        for number in range(rounds):
            order = [DEFAULT, TORCH] if number % 2 else [TORCH, DEFAULT]
            for candidate in order:
                found[candidate].append(example(name, candidate, case, steps))
        ours, theirs = median(found[DEFAULT]), median(found[TORCH])
        ratios = sorted(b / a for a, b in zip(found[DEFAULT], found[TORCH], strict=True))
        rows.append(
            {
                "case": case, "example": name, "default": ours, "torch": theirs, "ratio": theirs / ours,
                "lowest": ratios[0], "highest": ratios[-1],
            }
        )  # fmt: skip
    return rows


# --- what came out --------------------------------------------------------------------------------------


def summary(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line for each case and number of ranks: the default against torch's gloo over all sizes."""
    lines = []
    for case, ranks in dict.fromkeys((row["case"], row["ranks"]) for row in rows):
        own = {
            (row["way"], row["bytes"]): row for row in rows if (row["case"], row["ranks"]) == (case, ranks)
        }
        sizes = [size for candidate, size in own if candidate == DEFAULT and (TORCH, size) in own]
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
    "beside", "ranks", "torch gloo / default, geometric mean of medians", "… worst size", "… of means",
    "default's p95 / torch gloo's, worst size", f"… above {P95_LIMIT}",
]  # fmt: skip


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


def report(found: Mapping[str, Any], line: str) -> str:
    """The figures as a page."""
    parts = [f"Skipped: {case}: {reason}" for case, reason in found["skipped"].items()]
    if found["operations"]:
        parts.append(harness.markdown(SUMMARY_HEAD, summary(found["operations"])))
        for heading, head, lines in sections(found["operations"]):
            parts += [f"## {heading}", harness.markdown(head, lines)]
    if found["examples"]:
        parts += ["## Examples: a step with torch's gloo over one with the default configuration"]
        parts.append(harness.markdown(EXAMPLES_HEAD, example_lines(found["examples"])))
    note = "all_reduce of float32, median / p95 of single operations in µs, candidates in turns."
    return harness.page("Beside other work", line, note, *parts)


@harness.program
def main(
    parts: str = ",".join(PARTS),
    cases: str = ",".join(CASES),
    ranks: str = "2,4",
    sizes: str = SIZES,
    ways: Annotated[str, typer.Option(help=f"Such as {DEFAULT},msccl,{TORCH}; all without it.")] = "",
    rounds: Rounds = 15,
    calls: Annotated[int, typer.Option(help="Of a turn; a fifth of it for large sizes.")] = 20,
    examples_: Annotated[str, typer.Option("--examples")] = ",".join(EXAMPLES),
    example_rounds: int = 3,
    steps: Annotated[int | None, typer.Option(help="Of an example.")] = None,
    mpich: Annotated[Path | None, typer.Option(help="Python of an environment with MPICH.")] = None,
    figures: Json = None,
    output: Output = None,
) -> None:
    """Run all, and report."""
    found: dict[str, Any] = {"operations": [], "examples": [], "skipped": {}}
    wanted = harness.chosen(parts.split(","), PARTS, "part")
    nbytes = [parse_size(size) for size in sizes.split(",")]
    for case in harness.chosen(cases.split(","), CASES, "case"):
        if reason := why_not(case):
            found["skipped"][title(case)] = reason
            print(f"skipped {title(case)}: {reason}")
            continue
        if "operations" in wanted:
            for count in map(int, ranks.split(",")):
                rows = operations(case, count, mpich, ways.split(",") if ways else [], nbytes, rounds, calls)
                found["operations"] += rows
                for heading, head, lines in sections(rows):
                    harness.show(head, lines, heading, width=150)
        if "examples" in wanted:
            rows = examples(
                case, harness.chosen(examples_.split(","), EXAMPLES, "example"), example_rounds, steps
            )
            found["examples"] += rows
            harness.show(EXAMPLES_HEAD, example_lines(rows), title(case), width=150)
        harness.write_json(found, figures)
        if output is not None:
            harness.write(report(found, harness.command()), output)
    if found["operations"]:
        harness.show(SUMMARY_HEAD, summary(found["operations"]), width=150)


if __name__ == "__main__":
    main()
