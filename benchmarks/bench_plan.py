"""`fuse: {plan: auto}` between two hosts: what was foretold, and what the step then took, beside buckets by
size.

    python benchmarks/bench_plan.py --rate 1gbit --rounds 3

Two network namespaces joined by a link of that rate, one rank on each, train the transformer of examples/gpt
on random bytes. Each job is a trial of its own: it measures, searches, and tries both plans in turns, so that
the two times are of one run; every setting has a turn in every round. Beside it, the search alone for 500
gradients and three libraries. The report goes to benchmarks/results/plan_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import sys
from functools import partial
from statistics import median
from typing import Any, Final

import harness
import numpy as np
import torch
from harness import HARDWARE, ROOT, Dated, Hardware, Rate, Rounds
from two_hosts import TwoHosts, need_two_hosts

import mcr_plus as mcr
from mcr_plus.bucketing.costs import BucketCurve, prices
from mcr_plus.bucketing.search import search

sys.path.insert(0, str(ROOT / "examples" / "common"))
from corpus import VOCABULARY
from transformer import LanguageModel, Shape

BATCHES: Final = (8, 4, 1)  # windows of a rank
PROGRESS: Final = ("caller", "thread")
STEPS: Final = 24  # the trial ends with the 23rd
GRADIENTS: Final = 500


def trial(batch: int, progress: str) -> dict[str, Any] | None:
    """On ranks: the report of a trial."""
    torch.set_num_threads(1)
    stages: list[dict[str, Any]] = [
        {"fuse": {"plan": "auto"}}, {"select": {}}, {"dispatch": {"progress": progress}},
    ]  # fmt: skip
    with mcr.init({"version": 1, "backends": ["mpi", "gloo"], "pipeline": stages}) as comm:
        shape = Shape()
        model = LanguageModel(shape, 0)
        model, optimizer = mcr.wrap(model, torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True))
        random = torch.Generator().manual_seed(comm.rank)
        for _ in range(STEPS):
            windows = torch.randint(VOCABULARY, (batch, shape.sequence + 1), generator=random)
            optimizer.zero_grad()
            model(windows).text.backward()
            optimizer.step()
        return mcr.plan_report() if comm.rank == 0 else None


def searches(rounds: int) -> list[list[str]]:
    """Rows: seconds of a search, how far its plan may be above the best one, and the number of buckets."""
    rows = []
    for seed in range(rounds):
        draw = np.random.default_rng(seed)
        ready = np.sort(draw.random(GRADIENTS)) * 0.3
        curves = [
            BucketCurve.through({4096: (latency, share), 1 << 20: (whole, share)})
            for latency, whole, share in ((1e-4, 9e-3, 0.3), (2e-4, 10e-3, 0.1), (5e-5, 12e-3, 0.5))
        ]
        of = prices(draw.integers(1000, 200_000, GRADIENTS).tolist(), 64, curves, 50e-6)
        found = search(ready, 0.32, of)
        seconds = min(harness.seconds(partial(search, ready, 0.32, of)) for _ in range(3))
        rows.append([f"{seconds:.2f}", f"{100 * found.gap:.1f} %", str(len(found.buckets)), str(found.exact)])
    return rows


def row_of(name: str, reports: list[dict[str, Any]]) -> list[str]:
    """Medians of the trials of one setting, and the errors of what was foretold."""
    searched, by_size = ("measured_ms", "baseline_ms")
    middle = {
        key: median(each[key] for each in reports) for key in (searched, by_size, "foretold_ms", "bound_ms")
    }
    errors = [
        abs(each[foretold] / each[measured] - 1)
        for each in reports
        for foretold, measured in (("foretold_ms", searched), ("foretold_baseline_ms", by_size))
    ]
    kept = [each["chosen"] for each in reports]
    buckets = "/".join(str(len(each["buckets"])) for each in reports)
    return [
        name,
        f"{middle[by_size]:.0f}",
        f"{middle[searched]:.0f}",
        f"{median(each[searched] / each[by_size] for each in reports):.2f}",
        f"{middle['foretold_ms']:.0f}",
        f"{middle['bound_ms']:.0f}",
        f"{100 * median(errors):.0f} %, {100 * max(errors):.0f} %",
        f"{kept.count('searched')} of {len(kept)}",
        buckets,
    ]


@harness.program
def main(
    rate: Rate = "1gbit", rounds: Rounds = 3, hardware: Hardware = HARDWARE, output: Dated = None
) -> None:
    need_two_hosts()
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    with TwoHosts(rate) as hosts:
        launch = harness.on_both(hosts)
        for _ in range(rounds):
            for batch in BATCHES:
                for progress in PROGRESS:
                    found.setdefault((batch, progress), []).append(
                        harness.on_ranks(launch, trial, batch, progress)
                    )
    head = [
        "windows, progress", "by size, ms", "searched, ms", "/ by size", "foretold, ms", "bound, ms",
        "errors of both, median and largest", "searched plan stays", "buckets kept",
    ]  # fmt: skip
    rows = [row_of(f"{batch}, {progress}", reports) for (batch, progress), reports in found.items()]
    text = harness.page(
        "Buckets that are searched in the job",
        harness.command(),
        "medians of the trials; each compares both plans in turns, by the slowest rank",
        f"### A step of examples/gpt over a link of {rate}, two hosts",
        harness.markdown(head, rows),
        f"### The search alone: {GRADIENTS} gradients, three libraries",
        harness.markdown(["seconds", "at most above the best", "buckets", "exact"], searches(3)),
    )
    harness.write(text, output, f"plan_{hardware}-two-hosts")


if __name__ == "__main__":
    main()
