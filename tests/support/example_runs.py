"""Runs of an example's train.py by `mcr-plus run`, on ranks forked from a process that has imported torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ranks import nursery

from mcr_plus.rendezvous.mpi_launcher import mpi_usable

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS_ENV = {"PYTHONPATH": os.pathsep.join(sys.path)}  # ranks find the examples' modules too
TINY = (
    *("--hidden", "16", "--heads", "2", "--sequence", "16"),
    *("--batch", "4", "--steps", "6", "--lr", "0.01"),
)


def launch(
    example: str, *arguments: object, ranks: int = 2, program: str = "train.py"
) -> subprocess.CompletedProcess[str]:
    """Run `mcr-plus run -n RANKS examples/EXAMPLE/PROGRAM ARGUMENTS`."""
    runner = ("-m", "mpi4py") if mpi_usable() else ()  # as `mcr-plus run` starts a Python file
    python = nursery().python
    command = [python, "-m", "mcr_plus.cli.main", "run", "-n", str(ranks), python, *runner]
    return _run([*command, str(EXAMPLES / example / program), *map(str, arguments)])


def alone(example: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the program in one process."""
    return _run([nursery().python, str(EXAMPLES / example / "train.py"), *map(str, arguments)])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as launchers set it
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
