"""Torch's own tests for two backends: `python tests/torch_suite [--ranks 2,3] [--only 'test_ddp*']`.

mcr must pass the tests that gloo passes, except for the tests listed here with their reasons: they run once
more under the name of gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

SUITE: Final = Path(__file__).with_name("suite.py")
BACKENDS: Final = ("gloo", "mcr")
OUTCOMES: Final = ("pass", "fail", "skip")
EXPLAINED: Final[dict[str, str]] = {
    "test_accumulate_gradients_no_sync": "makes its model only if the backend's name is gloo, mpi or nccl",
    "test_accumulate_gradients_no_sync_allreduce_hook": "the same",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": "the same",
    "test_accumulate_gradients_no_sync_grad_is_view": "the same",
    "test_monitored_barrier_gloo": "dist.monitored_barrier refuses all names but gloo",
    "test_monitored_barrier_gloo_subgroup": "the same",
}
"""Tests that fail because of the backend's name, and pass under MCR_MASQUERADE=gloo."""


def run(
    backend: str, gate: str, ranks: int, patterns: list[str], **environment: str
) -> dict[str, dict[str, str]]:
    """Return the outcome of each test by its name."""
    command = [sys.executable, str(SUITE), backend, gate, str(ranks), *patterns]
    found = {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"test"'):
                told = json.loads(line)
                found[told["test"]] = told
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    return found


def main() -> int:
    """Print the table; 1 if a test fails on mcr that gloo passes, and no reason is known."""
    parser = argparse.ArgumentParser(description="torch's own tests for gloo and mcr, side by side")
    parser.add_argument("--ranks", default="2,3")
    parser.add_argument(
        "--gates", default="gloo,mpi", help="what torch takes the backend for while it chooses tests"
    )
    parser.add_argument("--only", nargs="*", default=[], help="patterns of names")
    options = parser.parse_args()
    table = Table("ranks", "gate", *(f"{name}: {what}" for name in BACKENDS for what in OUTCOMES))
    worse: list[str] = []
    for gate in options.gates.split(","):
        for ranks in map(int, options.ranks.split(",")):
            gloo, ours = (run(backend, gate, ranks, options.only) for backend in BACKENDS)
            counts = [Counter(each["outcome"] for each in found.values()) for found in (gloo, ours)]
            table.add_row(str(ranks), gate, *(str(count[what]) for count in counts for what in OUTCOMES))
            lost = [name for name in ours if gloo[name]["outcome"] == "pass" != ours[name]["outcome"]]
            again = run("gloo", gate, ranks, lost, MCR_MASQUERADE="gloo") if lost else {}
            for name in lost:
                why = EXPLAINED.get(name, ours[name]["why"])
                renamed = again[name]["outcome"]
                print(f"{ranks} ranks, {gate}: {name}: gloo passes, mcr fails: {why}; named gloo: {renamed}")
                if name not in EXPLAINED or renamed != "pass":
                    worse.append(name)
            for name in (name for name in ours if gloo[name]["outcome"] == "fail"):
                print(f"{ranks} ranks, {gate}: {name}: gloo fails, mcr: {ours[name]['outcome']}")
    Console(width=110).print(table)
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
