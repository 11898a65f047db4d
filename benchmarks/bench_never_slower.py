"""What `never_slower` leaves of a codec's cost on one host: all_reduce on two ranks, codecs against none.

    mcr-plus run -n 2 benchmarks/bench_never_slower.py [--output FILE.md] [--json FILE]

Every codec has had its first trial before it is timed. Ways take turns within one run; a ratio is that of
the medians of the turns to the mean of those of the three ways without a codec, whose own show the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from bench_overhead import median, take_turns
from mpi4py import MPI
from rich.console import Console
from rich.table import Table

import mcr_plus as mcr
from mcr_plus.environment import cores
from mcr_plus.selection.fingerprint import cpu_name
from mcr_plus.units import format_size

SIZES = {16 << 10: 50, 256 << 10: 20, 4 << 20: 3, 32 << 20: 1}  # bytes → calls in a turn
CODECS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"codec": "bf16"},
    "int8_block": {"codec": "int8_block"},
    "fp8_block": {"codec": "fp8_block"},
    "int4_block + feedback": {"codec": "int4_block", "error_feedback": True},
    "none, second": {},
    "sign1 + feedback": {"codec": "sign1", "error_feedback": True},
    "topk + feedback": {"codec": "topk", "error_feedback": True},
    "randk + feedback": {"codec": "randk", "error_feedback": True},
    "powersgd + feedback": {"codec": "powersgd", "error_feedback": True},
    "int_shared": {"codec": "int_shared"},
    "exp_window": {"codec": "exp_window"},
    "none, third": {},
}
TRIAL = 40  # calls after which every codec has been decided about


def turn(comm: mcr.Communicator, tensor: torch.Tensor, calls: int, tag: str) -> Callable[[], None]:
    """`calls` synchronous all_reduces; the mean keeps the values as they are."""

    def run() -> None:
        for _ in range(calls):
            comm.all_reduce(tensor, mcr.AVG, tag=tag)

    return run


def measure(rounds: int) -> dict[str, dict[str, Any]]:
    """Ratio to uncompressed and the codec that is in use, by size and way."""
    found: dict[str, dict[str, Any]] = {}
    rules = [
        {"match": {"tag": name}, "compress": {**options, "never_slower": True}}
        for name, options in CODECS.items()
        if options
    ]
    with mcr.init({"rules": rules}) as comm:
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {mine[comm.rank % len(mine)]})
        for nbytes, calls in SIZES.items():
            tensor = torch.randn(64, nbytes // 256)
            ways: dict[str, tuple[Callable[[], Any], int]] = {}
            used: dict[str, str | None] = {}
            for name in CODECS:
                turn(comm, tensor, TRIAL, name)()
                with mcr.record() as log:
                    turn(comm, tensor, 1, name)()
                used[name] = log.records[-1].codec
                ways[name] = (turn(comm, tensor, 1, name), calls)
            medians = {name: median(values) for name, values in take_turns(ways, rounds).items()}
            none = mean(medians[name] for name, options in CODECS.items() if not options)
            ratios = {name: [medians[name] / none, used[name]] for name in CODECS}
            found[format_size(nbytes)] = {**ratios, "none, us": none}
    return found


def rows_of(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Lines of the table."""
    rows = []
    for name in CODECS:
        cells = [results[size][name] for size in results]
        rows.append([name, *(f"{ratio:.3f} ({codec or 'off'})" for ratio, codec in cells)])
    return [*rows, ["none, µs", *(f"{results[size]['none, us']:.1f}" for size in results)]]


def text_of(names: Sequence[str], rows: Sequence[Sequence[str]], rounds: int) -> str:
    """The report as Markdown."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(
        [
            f"# never_slower on one host ({date.today():%Y-%m-%d})",
            "",
            f"    mcr-plus run -n 2 benchmarks/bench_never_slower.py --rounds {rounds}",
            "",
            f"{cpu_name()}, {cores()} cores, Python {platform.python_version()}, torch {torch.__version__}. "
            "AVG all_reduce of float32; ratios of medians to the mean of those of the ways without a codec, "
            "and what was in use at the beginning. Wanted: at most 1.03.",
            "",
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--output", type=Path, help="also write a report to this file")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(options.rounds)
    if MPI.COMM_WORLD.rank != 0:
        return
    names, rows = ["time / time uncompressed", *results], rows_of(results)
    table = Table(*names)
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)
    if options.output is not None:
        options.output.write_text(text_of(names, rows, options.rounds))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
