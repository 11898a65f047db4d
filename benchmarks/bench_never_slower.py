"""What `never_slower` leaves of a codec's cost on one host: all_reduce on two ranks, codecs against none.

    mcr-plus run -n 2 benchmarks/bench_never_slower.py [--json FILE]

Every codec has had its trials before it is timed. Ways take turns within one run; a ratio is that of the
medians of the turns; the first way, which is none again, shows what noise makes of it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_overhead import median, take_turns
from mpi4py import MPI
from rich.console import Console
from rich.table import Table

import mcr_plus as mcr
from mcr_plus.units import format_size

SIZES = {16 << 10: 50, 256 << 10: 20, 4 << 20: 3, 32 << 20: 1}  # bytes → calls in a turn
CODECS: dict[str, dict[str, Any]] = {
    "none again": {},
    "bf16": {"codec": "bf16"},
    "int8_block": {"codec": "int8_block"},
    "fp8_block": {"codec": "fp8_block"},
    "int4_block + feedback": {"codec": "int4_block", "error_feedback": True},
    "sign1 + feedback": {"codec": "sign1", "error_feedback": True},
    "topk + feedback": {"codec": "topk", "error_feedback": True},
    "randk + feedback": {"codec": "randk", "error_feedback": True},
    "powersgd + feedback": {"codec": "powersgd", "error_feedback": True},
    "int_shared": {"codec": "int_shared"},
    "exp_window": {"codec": "exp_window"},
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
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
        for nbytes, calls in SIZES.items():
            tensor = torch.randn(64, nbytes // 256)
            ways: dict[str, tuple[Callable[[], Any], int]] = {
                "none": (turn(comm, tensor, calls, "none"), calls)
            }
            used: dict[str, str | None] = {}
            for name in CODECS:
                turn(comm, tensor, TRIAL, name)()
                with mcr.record() as log:
                    turn(comm, tensor, 1, name)()
                used[name] = log.records[-1].codec
                ways[name] = (turn(comm, tensor, calls, name), calls)
            medians = {name: median(values) for name, values in take_turns(ways, rounds).items()}
            found[format_size(nbytes)] = {
                name: [medians[name] / medians["none"], used[name]] for name in CODECS
            } | {"none, us": medians["none"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(options.rounds)
    if MPI.COMM_WORLD.rank != 0:
        return
    table = Table("time / time uncompressed", *results)
    for name in CODECS:
        cells = [results[size][name] for size in results]
        table.add_row(name, *(f"{ratio:.3f} ({codec or 'off'})" for ratio, codec in cells))
    table.add_row("none, µs", *(f"{results[size]['none, us']:.1f}" for size in results))
    Console(width=110).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
