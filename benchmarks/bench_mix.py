"""The examples' communication on one host: the mix of MPI and gloo against the one with shared memory.

    python benchmarks/bench_mix.py --rounds 5 --output results/mix_HARDWARE_YYYYMM.md

Runs the DLRM and the mixture of experts on two ranks in turns, with `pipeline.yaml` and with `one_host.yaml`.
`waited` is the time of a step in which the program waited for an operation; `in flight` adds up all
operations from their issue to their end, whatever ran beside them.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from mcr_plus.environment import cores
from mcr_plus.selection.fingerprint import cpu_name

ROOT: Final = Path(__file__).resolve().parent.parent
EXAMPLES: Final = {"dlrm": ["--steps", "200"], "moe": ["--steps", "40", "--batch", "1"]}
MIXES: Final = {"mpi and gloo": "pipeline.yaml", "with msccl": "one_host.yaml"}
FIGURES: Final = ("waited", "in flight", "step")
HEAD: Final = ["example", "mix", *(f"{figure} ms" for figure in FIGURES), "waited", "in flight", "step"]


def run(example: str, config: str) -> dict[str, float]:
    """Milliseconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        script = ROOT / "examples" / example / "train.py"
        options = [*EXAMPLES[example], "--config", str(script.parent / config), "--json", str(answer)]
        command = [sys.executable, "-m", "mcr_plus.cli.main", "run", "-n", "2", str(script), *options]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        found: dict[str, Any] = json.loads(answer.read_text())
    step = 1e3 * found["seconds"] / found["steps"]
    rows = found["communication"]
    waited, share = (sum(row[key] for row in rows) for key in ("waited", "share"))
    return {"waited": step * waited, "in flight": step * share, "step": 1e3 * found["step_seconds"]}


def main() -> None:
    """Run all, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--examples", default=",".join(EXAMPLES))
    parser.add_argument("--output", type=Path, help="also write a report to this file")
    options = parser.parse_args()
    rows = []
    for example in options.examples.split(","):
        found: dict[str, list[dict[str, float]]] = {mix: [] for mix in MIXES}
        for _ in range(options.rounds):
            for mix, config in MIXES.items():
                found[mix].append(run(example, config))
        middle = {mix: {f: median(each[f] for each in runs) for f in FIGURES} for mix, runs in found.items()}
        first = middle[next(iter(MIXES))]
        for mix, figures in middle.items():
            ratios = (f"{first[figure] / figures[figure]:.2f} ×" for figure in FIGURES)
            rows.append([example, mix, *(f"{figures[figure]:.2f}" for figure in FIGURES), *ratios])
    table = Table(*HEAD)
    for row in rows:
        table.add_row(*row)
    Console(width=130).print(table)
    if options.output is not None:
        lines = [HEAD, ["---"] * len(HEAD), *rows]
        about = (
            f"{cpu_name()}, {cores()} cores, Python {platform.python_version()}, torch {torch.__version__}"
        )
        heading = f"# The examples' communication with and without shared memory ({date.today():%Y-%m-%d})"
        command = f"    python benchmarks/bench_mix.py {shlex.join(sys.argv[1:])}"
        note = f"{about}; 2 ranks, medians of {options.rounds} runs in turns."
        table_text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        options.output.write_text(f"{heading}\n\n{command}\n\n{note}\n\n{table_text}\n")


if __name__ == "__main__":
    main()
