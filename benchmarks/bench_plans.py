"""Plans of a whole model: time and memory foretold and measured, the chosen plan, and torch's own engines.

    python benchmarks/bench_plans.py --ranks 4
    python benchmarks/bench_plans.py --ranks 4 --hosts 2 --rate 1gbit

Three models of the examples (gpt: 6 blocks, moe: 6 blocks with 4 experts, dlrm: 26 tables) on ranks of this
host, or of two network namespaces with half of the ranks and cores each, by each plan that fits, in turns. A
step is forward and backward passes with their communication, without the optimizer. Operations take the
library that a tuning table, measured first (or `--table`), has found to be the fastest, and its times are
those of the foretold steps; times of blocks come from a profile of rank 0 while all ranks measure one. Errors
are also given by the speed of the machine: passes of each rank's rows without communication, in the same
turns, over what the profile says of them. *Memory* is that of the fullest rank: bytes of tensors alive, and
what the profile foretells. τ is Kendall's, of the order of plans. Torch's engines (DDP, FSDP2, DTensor,
pipelines) run over gloo with default settings, one thread a rank. The report goes to
benchmarks/results/plans_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, Final

import harness
import plan_steps as steps
import torch
import typer
from harness import HARDWARE, Budget, Dated, Hardware, Rate, Rounds, Tables
from two_hosts import TwoHosts, need_two_hosts

import mcr_plus as mcr
from mcr_plus.errors import McrError
from mcr_plus.plans.language import ModelPlan
from mcr_plus.plans.named import NAMED, named
from mcr_plus.plans.proof import ProvedPlan, prove
from mcr_plus.plans.search import search

SAME: Final = {"spatial", "interlaced", "three_f_one_b"}
"""Plans made for other models, which are others of the twelve on these."""


def measured(model: str, table: str, hosts: int, rate: str, rounds: int) -> Any:
    """Figures of all plans, and seconds of computation alone and of torch's engines; on rank 0."""
    torch.set_num_threads(1)
    with mcr.init(steps.pipeline(table)) as comm:
        work = steps.WORKLOADS[model]()
        known = steps.profiled(work)
        costs = steps.costs_of(table, comm.size, hosts, rate)
        chosen = search(known, comm.size, costs).plans[0]
        plans: dict[str, ModelPlan | ProvedPlan] = {"auto": chosen.plan}
        for name in NAMED:
            with suppress(McrError):  # one for other models
                if name not in SAME:
                    plans[name] = prove(named(name, known, comm.size))

        def peers() -> dict[str, Callable[[], object]]:
            harness.join_gloo(comm)
            return {steps.ALONE: steps.alone(work), **dict(steps.torch_steps(comm, work, known))}

        rows, theirs = steps.measured(work, plans, costs, rounds, peers)
        alone = theirs.pop(steps.ALONE), steps.alone_seconds(known, comm.size, costs.topology)
    found = {"plans": rows, "torch": theirs, "auto": str(chosen.choice), "alone": alone}
    return found if comm.rank == 0 else None


def tau(one: list[float], other: list[float]) -> float:
    """Kendall's τ: pairs in the same order minus the others, of all."""
    pairs = list(combinations(range(len(one)), 2))
    return sum(1 if (one[i] - one[j]) * (other[i] - other[j]) > 0 else -1 for i, j in pairs) / len(pairs)


def section(model: str, found: Any) -> tuple[list[str], list[tuple[str, ...]]]:
    """The part of the report about a model, and the rows of its first table."""
    plans = sorted(
        (steps.PlanFigures(*each) for each in found["plans"]), key=lambda each: median(each.seconds)
    )
    seen = [median(each.seconds) for each in plans]
    speed = median(found["alone"][0]) / found["alone"][1]
    raw, errors = (
        [abs(factor * each.foretold / time - 1) for each, time in zip(plans, seen, strict=True)]
        for factor in (1.0, speed)
    )
    wrong = max(abs(each.said / each.peak - 1) for each in plans)
    auto = next(time for each, time in zip(plans, seen, strict=True) if each.name == "auto")
    best = min(time for each, time in zip(plans, seen, strict=True) if each.name != "auto")
    theirs = sorted((median(times), name) for name, times in found["torch"].items())
    rows = [steps.row_of(each) for each in plans]
    sums = (
        f"Chosen: {found['auto']}. Times: mean error {mean(raw):.0%}, largest {max(raw):.0%}; "
        f"times {speed:.2f}, as computation alone by its profile: {mean(errors):.0%}, "
        f"{max(errors):.0%}; τ {tau([each.foretold for each in plans], seen):.2f}. Chosen plan / best of "
        f"the others: {auto / best:.2f}; / best of torch's engines: {auto / theirs[0][0]:.2f}. Memory: "
        f"largest error {wrong:.0%}."
    )
    engines = [(name, f"{1e3 * time:.0f}", f"{1e3 * min(found['torch'][name]):.0f}") for time, name in theirs]
    tables = [harness.markdown(steps.HEAD, rows), harness.markdown(("way", "median ms", "least ms"), engines)]
    return [f"## {model}", *tables, sums], rows


def main(
    models: Annotated[list[str], typer.Option("--model", default_factory=lambda: list(steps.WORKLOADS))],
    rounds: Rounds = 7, ranks: Annotated[int, typer.Option(min=2)] = 4,
    hosts: Annotated[int, typer.Option(min=1, max=2)] = 1, rate: Rate = "1gbit",
    table: Tables = None, tune: Budget = "100s", output: Dated = None, hardware: Hardware = HARDWARE,
) -> None:  # fmt: skip
    harness.chosen(models, steps.WORKLOADS, "model")
    parts: list[str] = []
    with ExitStack() as stack:
        both = None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if hosts == 2:
            need_two_hosts()
            both = stack.enter_context(TwoHosts(rate))
            hardware += "-two-hosts"
        if table is None:
            table = folder / "table.yaml"
            steps.tuned(table, ranks, both, tune)
        for model in models:
            given = model, str(table.absolute()), hosts, rate, rounds
            text, rows = section(model, harness.on_ranks(steps.launcher(ranks, both), measured, *given))
            harness.show(steps.HEAD, rows, model)
            print(*text[-2:], sep="\n\n", flush=True)
            parts += text
    note = (__doc__ or "").split("\n\n", 2)[2].rsplit("The report", 1)[0].strip()
    page = harness.page("Plans of a whole model", harness.command(), note, *parts)
    harness.write(page, output, f"plans_{hardware}")


if __name__ == "__main__":
    harness.program(main)()
