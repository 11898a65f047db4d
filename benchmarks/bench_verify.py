"""Verified payloads: flipped bits that are found, and what verification costs.

    python benchmarks/bench_verify.py --flips 1000 --rounds 5

*Flips*: three ranks run random operations of all kinds, dtypes and sizes, handed to the library below the
engine; in most of them a bit flips on a random rank, in what is sent or in what has arrived. One is found if
all ranks raise `DataCorrupted` with the same operation, ranks, library and block.
*Cost*: calls without verification, with every one and with one in ten verified, in turns, two ranks; the
least time of each, as other processes only ever add to it (up to 1 MiB a mean of 20 calls; of one in ten,
above, of 10). Before that, the time of checksums of memory. The report goes to
benchmarks/results/verify_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Annotated, Any, Final

import harness
import torch
import typer
from harness import HARDWARE, ROOT, Dated, Hardware

import mcr_plus as mcr
from mcr_plus.dispatch.verify.flows import Blocks

sys.path.append(str(ROOT / "tests" / "support"))
import verify_jobs

LIBRARIES: Final = ("msccl", "gloo", "mpi")
COSTS: Final = (8, 1 << 20, 64 << 20)  # bytes
OPTIONS: Final[dict[str, str | int]] = {"off": "off", "every": "every", "one in 10": 10}


def flipped(backend: str, seed: int, operations: int) -> dict[str, Any] | None:
    """Counts of flips, of those found, and of alarms without one."""
    own = verify_jobs.many_flips(backend, seed, operations)
    with mcr.init(backends=["gloo"]) as comm:
        every = comm.all_gather_object(own)
        if comm.rank:
            return None
    flips = found = alarms = 0
    for each in zip(*every, strict=True):
        raised = [one[5] for one in each]
        if any(one[4] for one in each):
            flips += 1
            found += bool(raised[0]) and all(one == raised[0] for one in raised)
        else:
            alarms += any(raised)
    return {"operations": len(own), "flips": flips, "found": found, "alarms": alarms}


def speeds() -> list[list[str]]:
    """Checksums of memory of some sizes, by one thread: bytes, microseconds, GB/s."""
    rows = []
    torch.set_num_threads(1)
    for nbytes in (8, 64 << 10, 1 << 20, 64 << 20):
        blocks, value = Blocks(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
        call = partial(blocks.of, value)
        best = min(harness.seconds(call, 1 if nbytes > 1 << 20 else 20) for _ in range(30))
        rows.append([str(nbytes), f"{1e6 * best:.2f}", f"{nbytes / best / 1e9:.1f}"])
    return rows


def costs(backend: str, rounds: int) -> dict[str, Any] | None:
    """Microseconds of calls, by round."""
    torch.set_num_threads(1)

    def calls(verify: str | int) -> dict[str, float]:
        found = {}
        with mcr.init(verify_jobs.config(backend, verify=verify)) as comm:
            peer = 1 - comm.rank
            for nbytes in COSTS:
                tensor, part = torch.zeros(nbytes // 4), torch.zeros(max(1, nbytes // 8))
                gathered = torch.zeros(part.numel() * comm.size)

                def message(tensor: torch.Tensor = tensor, peer: int = peer) -> None:
                    comm.send(tensor, peer) if comm.rank == 0 else comm.recv(tensor, peer)

                for name, call in (
                    ("all_reduce", partial(comm.all_reduce, tensor)),
                    ("broadcast", partial(comm.broadcast, tensor, 0)),
                    ("all_gather", partial(comm.all_gather_into_tensor, gathered, part)),
                    ("send", message),
                ):
                    samples, repeats = (30, 20)
                    if nbytes > 1 << 20:
                        samples, repeats = (6, 1) if isinstance(verify, str) else (2, verify)
                    harness.seconds(call, 2)
                    times = []
                    for _ in range(samples):
                        comm.barrier()
                        times.append(harness.seconds(call, repeats))
                    slowest = torch.tensor([1e6 * min(times)])
                    comm.all_reduce(slowest, mcr.MAX)
                    found[f"{name} {nbytes}"] = float(slowest)
        return found

    turns = harness.in_turns(OPTIONS, rounds, calls)
    is_first = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0"
    return turns if is_first else None


@harness.program
def main(
    flips: Annotated[int, typer.Option(help="Operations of each library, most with a flipped bit.")] = 1000,
    rounds: Annotated[int, typer.Option(help="Of the costs, in turns.")] = 5,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    parts: list[str] = []
    rows = []
    for library in LIBRARIES if flips else ():
        found = harness.on_ranks(harness.here(3), flipped, library, 11, flips)
        rows.append([library, *(str(found[key]) for key in ("operations", "flips", "found", "alarms"))])
    if rows:
        head = ["library", "operations", "with a flipped bit", "found, alike on all ranks", "false alarms"]
        parts += ["### Flipped bits, three ranks", harness.markdown(head, rows)]
    if rounds:
        table = harness.markdown(["bytes", "µs", "GB/s"], speeds())
        parts += ["### Checksums of memory, one thread, the least of 30", table]
    rows = []
    for library in LIBRARIES if rounds else ():
        turns = harness.on_ranks(harness.here(2), costs, library, rounds)
        for name in turns["off"][0]:
            off, every, tenth = (min(turn[name] for turn in turns[key]) for key in OPTIONS)
            more, times = f"{every - off:+.1f}", f"{every / off:.2f}"
            rows.append([library, name, *(f"{each:.1f}" for each in (off, every, tenth)), more, times])
    if rows:
        head = ["library", "call (bytes)", *(f"{key}, µs" for key in OPTIONS), "every - off", "every / off"]
        parts += ["### Cost, two ranks, the least of all turns", harness.markdown(head, rows)]
    note = f"{rounds} turns; load average {os.getloadavg()[1]:.0f}"
    text = harness.page("Verified payloads", harness.command(), note, *parts)
    harness.write(text, output, f"verify_{hardware}")


if __name__ == "__main__":
    main()
