"""A rank with a gloo that sends flipped bits, by flip_on_wire.c: `verify_on_wire.py OPERATIONS LOG`.

Prints as JSON, for each operation, the number of flips and the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import mcr_plus as mcr
from mcr_plus.job.init import current

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("", "support"))  # of a program

from jobs.reliability import verify_jobs as jobs


def main(operations: int, log: Path) -> list[list[object]]:
    """Run operations of large payloads, one after another."""
    torch.set_num_threads(1)
    found: list[list[object]] = []
    with mcr.init(jobs.config("gloo")) as comm:
        channel, flips = jobs.verified("gloo"), 0
        for number in range(operations):
            kind = jobs.KINDS[number % len(jobs.KINDS)]
            message = jobs.case(kind, comm.rank, comm.size, 70_000, torch.float32, number % 2, "gloo")
            raised = ""
            poll = channel.bind(message.signature)(message)
            try:
                with current().engine.lock:
                    while not poll():
                        current().engine.progress()
            except mcr.DataCorrupted as error:
                raised = (
                    f"{error.operation.split()[0]} {error.source}->{error.rank} {error.library} {error.block}"
                )
            comm.barrier()  # no rank is in the next operation
            total = log.read_text().count("flip") if log.exists() else 0
            comm.barrier()
            found.append([kind, total - flips, raised])
            flips = total
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), Path(sys.argv[2]))))
