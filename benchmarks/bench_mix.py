"""The examples' communication on one host: the mix of MPI and gloo against the one with shared memory.

    python benchmarks/bench_mix.py --rounds 5 --output results/mix_HARDWARE_YYYYMM.md

Runs the DLRM and the mixture of experts on two ranks in turns, with `pipeline.yaml` and with `one_host.yaml`.
`waited` is the time of a step in which the program waited for an operation; `in flight` adds up all
operations from their issue to their end, whatever ran beside them.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Final

import harness
from harness import ROOT, Output, Rounds

EXAMPLES: Final = {"dlrm": ["--steps", "200"], "moe": ["--steps", "40", "--batch", "1"]}
MIXES: Final = {"mpi and gloo": "pipeline.yaml", "with msccl": "one_host.yaml"}
FIGURES: Final = ("waited", "in flight", "step")
HEAD: Final = ["example", "mix", *(f"{figure} ms" for figure in FIGURES), "waited", "in flight", "step"]


def run(example: str, config: str) -> dict[str, float]:
    """Milliseconds of a step."""
    path = ROOT / "examples" / example / config
    found = harness.train(harness.here(2), example, *EXAMPLES[example], "--config", str(path))
    step = 1e3 * found["seconds"] / found["steps"]
    rows = found["communication"]
    waited, share = (sum(row[key] for row in rows) for key in ("waited", "share"))
    return {"waited": step * waited, "in flight": step * share, "step": 1e3 * found["step_seconds"]}


@harness.program
def main(rounds: Rounds = 5, examples: str = ",".join(EXAMPLES), output: Output = None) -> None:
    rows = []
    for example in harness.chosen(examples.split(","), EXAMPLES, "example"):
        found = harness.in_turns(MIXES, rounds, partial(run, example))
        middle = {mix: {f: median(each[f] for each in runs) for f in FIGURES} for mix, runs in found.items()}
        first = middle[next(iter(MIXES))]
        for mix, figures in middle.items():
            ratios = (f"{first[figure] / figures[figure]:.2f} ×" for figure in FIGURES)
            rows.append([example, mix, *(f"{figures[figure]:.2f}" for figure in FIGURES), *ratios])
    harness.show(HEAD, rows, width=130)
    title = "The examples' communication with and without shared memory"
    note = f"2 ranks, medians of {rounds} runs in turns."
    harness.write_table(output, title, None, note, HEAD, rows)


if __name__ == "__main__":
    main()
