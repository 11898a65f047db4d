"""`sums: fixed` and `exact` beside `fast`: calls, one core, bytes between hosts, and steps of examples/gpt.

    python benchmarks/bench_sums.py

*Calls*: all_reduce of float32 on ranks of this host, by library, in turns; least and median of the turns. Two
ranks add in one order anyway. *One core*: the exact sum of several buffers, ours and a C++ one, whose
accumulators have three bins of 13 bits as in ReproBLAS (Demmel & Nguyen, 2015), compiled with -O3 for this
processor; in GB/s of addends. The C++ sum is reproducible and not exact. *Bytes*: what a network interface
sends for an all_reduce of 16 MiB between two network namespaces (as root). *Steps*: with gradients by `fast`,
`fixed`, with `accumulate="exact"`, and by `fast` with `observe: {digests: FOLDER}`, two backward passes each,
in turns. The report goes to
benchmarks/results/sums_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import harness
import torch
from harness import HARDWARE, ROOT, Call, Dated, Hardware, Rounds
from two_hosts import TwoHosts, why_not

import mcr_plus as mcr
from mcr_plus.backends.shm.reductions import SumTable
from mcr_plus.core.kinds import Sums
from mcr_plus.core.units import format_size

sys.path.insert(0, str(ROOT / "examples" / "common"))
from corpus import VOCABULARY
from transformer import LanguageModel, Shape

LIBRARIES: Final = ("msccl", "gloo", "mpi")
SUMS: Final[tuple[Sums, ...]] = ("fast", "fixed", "exact")
SIZES: Final = (64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes
GOALS: Final = {"fixed": {"msccl": 1.10, "gloo": 1.25, "mpi": 1.25}, "exact": {"msccl": 2.0}}
FROM: Final = {"fixed": {"msccl": 64 << 10}, "exact": {}}  # bytes from which the goal holds; 1 MiB otherwise
CALLERS: Final = (2, 4)  # ranks
BUFFERS: Final = (2, 4, 8)
NUMEL: Final = 1 << 20
STEP_WAYS: Final = ("fast", "fixed", "accumulate", "digests")
SENT: Final = 16 << 20
BINNED: Final = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
// The sum of `ranks` values for each of `count` elements, in three bins of 13 bits.
extern "C" void binned(float *out, const float *const *rows, int64_t ranks, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float largest = 0;
        for (int64_t r = 0; r < ranks; r++) largest = std::fmax(largest, std::fabs(rows[r][i]));
        uint32_t bits;
        std::memcpy(&bits, &largest, 4);
        int bin = ((int)(bits >> 23) + 12) / 13 * 13 + 11;  // biased exponent of 1.5 * 2^e of the first bin
        if (bin > 250 || bin < 40) {  // left out: the bins of very large and very small values
            out[i] = NAN;
            continue;
        }
        float sum[3], top[3];
        for (int k = 0; k < 3; k++) {
            uint32_t b = ((uint32_t)(bin - 13 * k) << 23) | 0x400000;
            std::memcpy(&top[k], &b, 4);
            sum[k] = top[k];
        }
        for (int64_t r = 0; r < ranks; r++) {
            float x = rows[r][i];
            for (int k = 0; k < 3; k++) {
                float before = sum[k];
                uint32_t odd;
                std::memcpy(&odd, &x, 4);
                odd |= 1;
                float y;
                std::memcpy(&y, &odd, 4);
                sum[k] = before + y;
                x -= sum[k] - before;
            }
        }
        out[i] = ((sum[2] - top[2]) + (sum[1] - top[1])) + (sum[0] - top[0]);
    }
}
"""


# --- on ranks -------------------------------------------------------------------------------------------


def calls(rounds: int) -> dict[str, dict[str, list[float]]] | None:
    """Microseconds of the slowest rank, by library and size, and by sums."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {}
    with mcr.init({"version": 1, "backends": list(LIBRARIES)}) as comm:

        def largest(value: float) -> float:
            return float(max(comm.all_gather_object(value)))

        for library in LIBRARIES:
            for nbytes in SIZES:
                x = torch.randn(nbytes // 4).mul_(1e-6)
                ways: dict[str, Call] = {
                    how: partial(mcr.all_reduce, x, mcr.AVG, backend=library, sums=how) for how in SUMS
                }
                spent = harness.slowest(ways, rounds, comm.barrier, largest, turn_s=0.05)
                found[f"{library} {nbytes}"] = spent
        is_first = comm.rank == 0
    return found if is_first else None


def steps(rounds: int, count: int) -> dict[str, list[float]] | None:
    """Milliseconds of a step on rank 0, medians of turns, by way."""
    torch.set_num_threads(1)
    ranks: list[int] = []

    def turn(way: str) -> float:
        config: dict[str, Any] = {"version": 1, "numerics": {"sums": "fixed" if way == "fixed" else "fast"}}
        if way == "digests":
            config["observe"] = {"digests": folder}
        with mcr.init(config) as comm:
            ranks.append(comm.rank)
            model = LanguageModel(Shape(), 0)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            mcr.wrap(model, optimizer, accumulate="exact" if way == "accumulate" else "fast")
            spent = []
            for _ in range(3 + count):
                windows = torch.randint(VOCABULARY, (4, Shape().sequence + 1))
                began = time.perf_counter()
                optimizer.zero_grad()
                for number in range(2):
                    with nullcontext() if number else mcr.no_sync(model):
                        model(windows).text.backward()
                optimizer.step()
                spent.append(1e3 * (time.perf_counter() - began))
        return median(spent[3:])

    with tempfile.TemporaryDirectory() as folder:
        found = harness.in_turns({way: way for way in STEP_WAYS}, rounds, turn)
    return found if ranks[0] == 0 else None


def sent() -> dict[str, int] | None:
    """Bytes that rank 0's interface sends for an all_reduce, by sums."""

    def counted() -> int:
        lines = Path("/proc/net/dev").read_text().splitlines()[2:]
        fields = (line.split(":") for line in lines)
        return sum(int(rest.split()[8]) for name, rest in fields if name.strip() != "lo")

    found = {}
    with mcr.init({"version": 1, "backends": ["gloo"]}) as comm:
        cases: list[tuple[str, Sums, torch.dtype]] = [(how, how, torch.float32) for how in SUMS]
        cases.append(("accumulate", "exact", torch.float64))
        for name, how, dtype in cases:
            x = torch.randn(SENT // 4, dtype=dtype)
            mcr.all_reduce(x, sums=how)
            comm.barrier()
            before = counted()
            for _ in range(5):
                mcr.all_reduce(x, sums=how)
            comm.barrier()
            found[name] = (counted() - before) // 5
        is_first = comm.rank == 0
    return found if is_first else None


# --- on one core ----------------------------------------------------------------------------------------


def one_core(rounds: int) -> list[list[str]]:
    """Rows: GB/s of addends of our exact sum and of the binned one in C++, and their ratio."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "binned.cpp"), Path(folder, "binned.so")
        source.write_text(BINNED)
        harness.run(["c++", "-O3", "-march=native", "-shared", "-fPIC", "-o", str(library), str(source)])
        binned = ctypes.CDLL(str(library)).binned
    binned.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    rows = []
    for ranks in BUFFERS:
        parts = torch.randn(ranks, NUMEL)
        out = torch.empty(NUMEL)
        table = SumTable("exact", torch.float32, "SUM", ranks)
        addresses = (ctypes.c_void_p * ranks)(*(row.data_ptr() for row in parts))
        ways = {
            "ours": partial(table.reduce, parts.view(-1), out),
            "C++": partial(binned, out.data_ptr(), addresses, ranks, NUMEL),
        }
        for way in ways.values():
            way()
            torch.testing.assert_close(out, parts.double().sum(0).float(), rtol=1e-5, atol=1e-5)
        spent = harness.in_turns(ways, rounds, lambda call: harness.seconds(call, 3))
        speed = {name: parts.nbytes / min(times) / 1e9 for name, times in spent.items()}
        cells = [f"{speed[name]:.2f}" for name in ways]
        rows.append([str(ranks), *cells, f"{speed['ours'] / speed['C++']:.2f}"])
    return rows


# --- the report -----------------------------------------------------------------------------------------


def call_rows(ranks: int, found: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    """Least microseconds, medians in brackets, and ratios of the least to those of `fast`."""
    rows = []
    for case, spent in found.items():
        library, nbytes = case.split()
        cells = [f"{min(spent[how]):.0f} ({median(spent[how]):.0f})" for how in SUMS]
        for how in SUMS[1:]:
            goal = GOALS[how].get(library)
            ratio = min(spent[how]) / min(spent["fast"])
            holds = goal is not None and int(nbytes) >= FROM[how].get(library, 1 << 20)
            cells.append(f"{ratio:.2f}" + (f" (goal {goal:.2f})" if holds else ""))
        rows.append([f"{ranks}", library, format_size(int(nbytes)), *cells])
    return rows


@harness.program
def main(
    rounds: Rounds = 9,
    step_rounds: int = 4,
    steps_: int = 12,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    launch = harness.here(2)
    called = [
        row
        for ranks in CALLERS
        for row in call_rows(ranks, harness.on_ranks(harness.here(ranks), calls, rounds))
    ]
    head = ["ranks", "library", "bytes", *SUMS, "fixed / fast", "exact / fast"]
    harness.show(head, called, "µs", width=140)
    core_head = ["buffers", "ours, GB/s", "C++, GB/s", "ours / C++"]
    core = one_core(rounds)
    harness.show(core_head, core, "exact sums on one core")
    spent = harness.on_ranks(launch, steps, step_rounds, steps_)
    step_head = ["way", "ms", "/ fast"]
    fast = min(spent["fast"])
    step = [
        [way, f"{min(times):.1f} ({median(times):.1f})", f"{min(times) / fast:.3f}"]
        for way, times in spent.items()
    ]
    harness.show(step_head, step, "a step of examples/gpt")
    wire = f"Bytes between hosts: not measured here ({why_not()})."
    if why_not() is None:
        with TwoHosts(None) as hosts:
            bytes_ = harness.on_ranks(harness.on_both(hosts), sent)
        wire_head = ["way", "bytes", "/ fast"]
        wire_rows = [[way, format_size(each), f"{each / bytes_['fast']:.2f}"] for way, each in bytes_.items()]
        harness.show(wire_head, wire_rows, f"sent for an all_reduce of {format_size(SENT)}")
        title = "## Bytes that rank 0's interface sends for an all_reduce of 16 MiB"
        wire = f"{title}\n\n{harness.markdown(wire_head, wire_rows)}"
    note = f"least of {rounds} turns ({step_rounds} for steps), medians in brackets."
    text = harness.page(
        "Sums in a fixed order, and exact ones", harness.command(), note,
        "## Calls: all_reduce AVG of float32, µs", harness.markdown(head, called),
        "## Exact sums on one core", harness.markdown(core_head, core),
        "## Steps of examples/gpt, two ranks, two backward passes", harness.markdown(step_head, step),
        wire,
    )  # fmt: skip
    harness.write(text, output, f"sums_{hardware}")


if __name__ == "__main__":
    main()
