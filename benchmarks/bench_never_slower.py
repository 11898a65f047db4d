"""What `never_slower` leaves of a codec's cost on one host: all_reduce on two ranks, codecs against none.

    mcr-plus run -n 2 benchmarks/bench_never_slower.py [--output FILE.md] [--json FILE]

Every codec has had its first trial before it is timed. Candidates take turns within one run; a ratio is that
of the medians of the turns to the mean of those of the three candidates without a codec, whose own show the
noise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from statistics import mean, median
from typing import Any

import harness
import torch
from harness import Call, Json, Output, Rounds
from mpi4py import MPI

import mcr_plus as mcr
from mcr_plus.core.units import format_size

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
TRIAL = 200  # calls after which every codec has been decided about


def turn(comm: mcr.Communicator, tensor: torch.Tensor, calls: int, tag: str) -> Callable[[], None]:
    """`calls` synchronous all_reduces; the mean keeps the values as they are."""

    def run() -> None:
        for _ in range(calls):
            comm.all_reduce(tensor, mcr.AVG, tag=tag)

    return run


def measure(rounds: int) -> dict[str, dict[str, Any]]:
    """Ratio to uncompressed and the codec that is in use, by size and candidate."""
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
            candidates: dict[str, tuple[Call, int]] = {}
            used: dict[str, str | None] = {}
            for name in CODECS:
                turn(comm, tensor, TRIAL, name)()
                with mcr.record() as log:
                    turn(comm, tensor, 1, name)()
                used[name] = log.records[-1].codec
                candidates[name] = (turn(comm, tensor, 1, name), calls)
            medians = {
                name: median(values) for name, values in harness.take_turns(candidates, rounds).items()
            }
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


NOTE = (
    "AVG all_reduce of float32; ratios of medians to the mean of those of the candidates without a codec, "
    "and what was in use at the beginning. Wanted: at most 1.03."
)


@harness.program
def main(rounds: Rounds = 25, output: Output = None, figures: Json = None) -> None:
    torch.set_num_threads(1)
    results = measure(rounds)
    if MPI.COMM_WORLD.rank != 0:
        return
    head, rows = ["time / time uncompressed", *results], rows_of(results)
    harness.show(head, rows, width=110)
    harness.write_table(output, "never_slower on one host", MPI.COMM_WORLD.size, NOTE, head, rows)
    harness.write_json(results, figures)


if __name__ == "__main__":
    main()
