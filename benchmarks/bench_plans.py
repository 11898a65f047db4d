"""Plans of a whole model: time and memory foretold and measured, and the plan that a search chooses.

    python benchmarks/bench_plans.py --ranks 2

The transformer of the examples (6 blocks) on ranks of this host, by each plan that fits, in turns; the step
is forward and backward passes with their communication, without the optimizer. Times of operations come from
a tuning table that is measured first (or `--table`), those of blocks from a profile on one rank while the
others wait. *Memory* is that of the fullest rank: bytes of tensors alive, beside what the profile foretells.
τ is Kendall's, of the order of plans. The report goes to benchmarks/results/plans_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, Final

import harness
import torch
import typer
from harness import HARDWARE, MCR_PLUS, ROOT, Dated, Hardware, Rounds

import mcr_plus as mcr
from mcr_plus.bucketing.live_bytes import LiveBytes
from mcr_plus.bucketing.scaling import ClusterCosts, from_table
from mcr_plus.bucketing.topology import Topology
from mcr_plus.core.environment import cores
from mcr_plus.core.units import about
from mcr_plus.errors import McrError
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.foretell import foretell
from mcr_plus.plans.memory import memory_of
from mcr_plus.plans.named import NAMED, named
from mcr_plus.plans.proof import ProvedPlan, prove
from mcr_plus.plans.run import ParallelModel, parallelize
from mcr_plus.plans.search import search
from mcr_plus.tables.table import load_table

sys.path.insert(0, str(ROOT / "examples" / "common"))
from corpus import VOCABULARY
from transformer import LanguageModel, Losses, Shape

SHAPE: Final = Shape(layers=6, hidden=192, heads=4, sequence=96)
BATCH: Final = 16
KINDS: Final = "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,send"


def model() -> LanguageModel:
    made = LanguageModel(SHAPE, 0)
    made.bytes.weight.mcr_shared = True  # type: ignore[attr-defined]
    return made


def text(losses: Losses) -> torch.Tensor:
    return losses.text


def plans(profile: Profile, costs: ClusterCosts, ranks: int) -> dict[str, ProvedPlan]:
    """Plans that fit the model, and the one that a search finds."""
    found = {"auto": search(profile, ranks, costs).plans[0].plan}
    for name in NAMED:
        with suppress(McrError):  # one for other models, or for fewer ranks
            found[name] = prove(named(name, profile, ranks))
    return found


def step_seconds(parallel: ParallelModel, batch: torch.Tensor) -> float:
    mcr.barrier()
    begin = time.perf_counter()
    parallel.step(batch)
    return float(max(mcr.all_gather_object(time.perf_counter() - begin)))


def on_rank(rounds: int, table: str) -> Any:
    """The rows of the table, on rank 0."""
    torch.set_num_threads(1)
    with mcr.init() as comm:
        found = measured(comm, rounds, table)
    return None if comm.rank else found


def measured(comm: mcr.Communicator, rounds: int, table: str) -> Any:
    batch = torch.randint(VOCABULARY, (BATCH, SHAPE.sequence + 1), generator=torch.Generator().manual_seed(1))
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters())
    own = None
    if comm.rank == 0:
        own = mcr.profile(whole, batch, optimizer=optimizer, loss=text).model_dump_json()
    profile = Profile.model_validate_json(mcr.broadcast_object(own, 0))
    host = Topology.of({"nodes": 1, "ranks_per_node": comm.size, "cores": cores()})
    costs = ClusterCosts(list(from_table(load_table(table))), host)
    jobs: dict[str, ParallelModel] = {}
    for name, plan in plans(profile, costs, comm.size).items():
        part = model()
        jobs[name] = parallelize(part, torch.optim.AdamW(part.parameters()), plan, loss=text)
        jobs[name].step(batch)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            times[name].append(step_seconds(job, batch))
    rows = []
    for name, job in jobs.items():
        with LiveBytes() as live:
            live.add([*job.parameters().values(), *(bucket.gradients for bucket in job.buckets)])
            live.add([bucket.shard for bucket in job.buckets if bucket.held != "whole"])
            job.step(batch)
        peaks = mcr.all_gather_object(live.peak)
        uses = [memory_of(job.proved, rank) for rank in range(comm.size)]
        # No optimizer has made a step, so that it has no state yet.
        said = [use.peak - use.optimizer for use in uses]
        step = foretell(job.proved, costs).step_s
        rows.append((name, step, median(times[name]), min(times[name]), max(said), max(peaks)))
    return rows


def tau(one: list[float], other: list[float]) -> float:
    """Return Kendall's τ: pairs in the same order minus the others, of all."""
    pairs = list(combinations(range(len(one)), 2))
    return sum(1 if (one[i] - one[j]) * (other[i] - other[j]) > 0 else -1 for i, j in pairs) / len(pairs)


def main(
    rounds: Rounds = 7, ranks: Annotated[int, typer.Option(min=2)] = 2,
    table: Annotated[Path | None, typer.Option(help="Tuning table of these ranks.")] = None,
    output: Dated = None, hardware: Hardware = HARDWARE,
) -> None:  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if table is None:
            table = Path(folder) / "table.yaml"
            tune = ["tune", "-o", str(table), "-n", str(ranks), "--kinds", KINDS, "--budget", "100s"]
            harness.run([*MCR_PLUS, *tune, "--max", "16MiB"])
        rows = harness.on_ranks(harness.here(ranks), on_rank, rounds, str(table))
    rows.sort(key=lambda row: row[2])
    errors = [abs(row[1] / row[2] - 1) for row in rows]
    lines = [
        (
            name, f"{1e3 * said:.0f}", f"{1e3 * seen:.0f}", f"{1e3 * least:.0f}", f"{said / seen:.2f}",
            about(peak), about(used), f"{peak / used:.2f}",
        )
        for name, said, seen, least, peak, used in rows
    ]  # fmt: skip
    head = ("way", "foretold ms", "median ms", "least ms", "ratio", "foretold memory", "measured", "ratio")
    best = rows[0][2]
    auto = next(row[2] for row in rows if row[0] == "auto")
    order = tau([row[1] for row in rows], [row[2] for row in rows])
    wrong = max(abs(row[4] / row[5] - 1) for row in rows)
    sums = (
        f"Times: mean error {mean(errors):.0%}, largest {max(errors):.0%}, τ {order:.2f}. Chosen plan / "
        f"best: {auto / best:.2f}. Memory: largest error {wrong:.0%}."
    )
    note = (__doc__ or "").split("\n\n", 2)[2].rsplit("The report", 1)[0].strip()
    page = harness.page(
        "Plans of a whole model", harness.command(), note, harness.markdown(head, lines), sums
    )
    harness.show(head, lines)
    print(sums)
    harness.write(page, output, f"plans_{hardware}")


if __name__ == "__main__":
    harness.program(main)()
