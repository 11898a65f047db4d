"""The time of a call in this checkout and in another one: all_reduce by library and size.

    python benchmarks/bench_checkouts.py --beside CHECKOUT [--rounds 5]

Every round starts two ranks of each checkout and library in turn, by `mcr-plus run`, and takes the median of
batches of calls on the slower rank. Two checkouts cannot share a process, so a round of one is seconds apart
from that of the other: the ratio is the median of the ratios of rounds, with their range. The report goes to
benchmarks/results/checkouts_<hardware>_<yyyymm>.md.
"""

# Nothing of the checkouts is imported here but on ranks: each has its own.

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import typer

ROOT: Final = Path(__file__).resolve().parents[1]
LIBRARIES: Final = ("default", "msccl", "mpi", "gloo")
SIZES: Final = {8: 400, 1 << 10: 400, 64 << 10: 100, 1 << 20: 20, 16 << 20: 3}
"""Bytes, and the calls of a batch."""
BATCHES: Final = 15
LIMIT_S: Final = 300


def rank(library: str, answer: Path) -> None:
    """On a rank: microseconds of a call by size."""
    import torch

    import mcr_plus as mcr

    torch.set_num_threads(1)
    names = None if library == "default" else [library]
    with mcr.init(backends=names) as comm:
        found = {}
        for nbytes, calls in SIZES.items():
            x = torch.ones(nbytes // 4)
            times = []
            for _ in range(BATCHES + 1):
                comm.barrier()
                began = time.perf_counter()
                for _ in range(calls):
                    comm.all_reduce(x, mcr.MAX)
                times.append(1e6 * (time.perf_counter() - began) / calls)
            slower = torch.tensor([median(times[1:])], dtype=torch.float64)
            comm.all_reduce(slower, mcr.MAX)
            found[nbytes] = slower.item()
        if comm.rank == 0:
            answer.write_text(json.dumps(found))


def job(tree: Path, library: str) -> dict[int, float]:
    """One job of two ranks in a checkout."""
    # torch would load this checkout's backend by the name that it was installed with.
    environment = os.environ | {"PYTHONPATH": str(tree), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with tempfile.TemporaryDirectory(prefix="mcr-checkouts-") as folder:
        answer = Path(folder, "answer.json")
        words = [str(Path(__file__).resolve()), "--rank", library, str(answer)]
        line = [sys.executable, "-m", "mcr_plus.cli.main", "run", "-n", "2", *words]
        subprocess.run(line, env=environment, cwd=tree, check=True, timeout=LIMIT_S)
        return {int(size): us for size, us in json.loads(answer.read_text()).items()}


def main(beside: Annotated[Path, typer.Option(help="Another checkout.")], rounds: int = 5) -> None:
    from harness import HARDWARE, command, markdown, page, write

    from mcr_plus.core.units import format_size

    other = beside.resolve()
    times: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for turn in range(rounds + 1):
        for library in LIBRARIES:
            trees = (other, ROOT) if turn % 2 else (ROOT, other)
            found = {tree: job(tree, library) for tree in trees}
            for size in SIZES if turn else ():  # the first round compiles kernels
                times[library, size].append((found[other][size], found[ROOT][size]))
    rows = []
    for (library, size), pairs in times.items():
        ratios = sorted(ours / theirs for theirs, ours in pairs)
        before, now = (median(values) for values in zip(*pairs, strict=True))
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        rows.append(
            [library, format_size(size), f"{before:.4g}", f"{now:.4g}", f"{median(ratios):.3f}", spread]
        )
    head = ["libraries", "bytes", f"{other.name}, µs", "this one, µs", "ratio", "of single rounds"]
    note = f"two ranks, all_reduce of float32, synchronous; medians of {rounds} rounds in turns."
    write(
        page("Calls in two checkouts", command(), note, markdown(head, rows)), None, f"checkouts_{HARDWARE}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], Path(sys.argv[3]))
    else:
        from harness import program

        program(main)()
