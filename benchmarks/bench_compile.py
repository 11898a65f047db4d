"""A compiled model between two hosts: where its graph is cut, beside the whole graph and DDPOptimizer.

    python benchmarks/bench_compile.py --rate 1gbit --rounds 5

Two network namespaces joined by a link of that rate, one rank on each, train the transformer of examples/gpt
on random bytes, compiled by Inductor into a fresh cache. Four models are trained in one job, in turns of
some steps, every round in another order:

    cuts and buckets    mcr.compile(cuts="auto") and mcr.wrap under `fuse: {plan: auto}`, after the trial
    all cuts            mcr.compile(cuts="blocks") and mcr.wrap, likewise: the trial is of its buckets alone
    whole graph         mcr.compile(cuts="none") and mcr.wrap, likewise
    DDPOptimizer        torch's DDP over gloo, compiled: torch cuts the graph at its buckets

A time is the median step of the slower rank. The report goes to
benchmarks/results/compile_<hardware>-two-hosts_<yyyymm>.md.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from statistics import median
from typing import Annotated, Any, Final

import harness
import torch
import torch.distributed as dist
import typer
from harness import HARDWARE, ROOT, Dated, Hardware, Rounds
from torch.nn.parallel import DistributedDataParallel
from two_hosts import TwoHosts, need_two_hosts

import mcr_plus as mcr

sys.path.insert(0, str(ROOT / "examples" / "common"))
from corpus import VOCABULARY
from transformer import LanguageModel, Shape

OURS, BLOCKS, WHOLE, TORCH = "cuts and buckets", "all cuts", "whole graph", "DDPOptimizer"
CUTS: Final = {OURS: "auto", BLOCKS: "blocks", WHOLE: "none"}
TRIAL: Final = 38  # steps, until cuts and buckets are chosen
STEPS: Final = 6  # of a turn


class Training:
    """A model that is trained on random windows, and the times of its steps."""

    def __init__(self, comm: mcr.Communicator, name: str, batch: int) -> None:
        self.comm, self.batch, self.shape = comm, batch, Shape()
        self.random = torch.Generator().manual_seed(comm.rank)
        model = LanguageModel(self.shape, 0)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
        self.model: Any = model
        if name == TORCH:
            self.model = torch.compile(DistributedDataParallel(model))
        else:
            mcr.compile(model, cuts=CUTS[name])
            mcr.wrap(model, self.optimizer)

    def turn(self, steps: int) -> float:
        """Milliseconds of a step: the median of `steps`, after one that is not counted; slower rank."""
        times = []
        for _ in range(1 + steps):
            windows = torch.randint(VOCABULARY, (self.batch, self.shape.sequence + 1), generator=self.random)
            self.comm.barrier()
            began = time.perf_counter()
            self.optimizer.zero_grad()
            self.model(windows).text.backward()
            self.optimizer.step()
            times.append(time.perf_counter() - began)
        slower = torch.tensor(times[1:], dtype=torch.float64)
        self.comm.all_reduce(slower, mcr.MAX)
        return 1e3 * float(slower.median())


def trained(batch: int, rounds: int) -> dict[str, Any] | None:
    """On ranks: milliseconds of a step by candidate and round, and the report of the trial."""
    torch.set_num_threads(1)
    stages: list[dict[str, Any]] = [
        {"fuse": {"plan": "auto"}},
        {"select": {}},
        {"dispatch": {"timeout": "900s"}},
    ]
    with mcr.init({"version": 1, "backends": ["mpi", "gloo"], "pipeline": stages}) as comm:
        harness.join_gloo(comm)
        ours = Training(comm, OURS, batch)
        ours.turn(TRIAL)
        report = mcr.plan_report()
        candidates = {OURS: ours, **{name: Training(comm, name, batch) for name in (BLOCKS, WHOLE, TORCH)}}
        candidates[BLOCKS].turn(TRIAL)
        candidates[WHOLE].turn(TRIAL)
        candidates[TORCH].turn(STEPS)
        times = harness.in_turns(candidates, rounds, lambda each: each.turn(STEPS))
        dist.destroy_process_group()
        return {"times": times, "report": report} if comm.rank == 0 else None


@harness.program
def main(
    rates: Annotated[list[str] | None, typer.Option("--rate", help="Of the link; 1gbit without.")] = None,
    rounds: Rounds = 5,
    batch: Annotated[int, typer.Option(min=1, help="Windows of a rank.")] = 4,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    need_two_hosts()
    parts = []
    with tempfile.TemporaryDirectory() as cache:
        # A compilation that was ended leaves broken files, so that every run has a cache of its own.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for rate in rates or ["1gbit"]:
            with TwoHosts(rate) as hosts:
                found = harness.on_ranks(harness.on_both(hosts), trained, batch, rounds)
            parts += described(rate, batch, found["times"], found["report"])
    text = harness.page(
        "Where a compiled graph is cut",
        harness.command(),
        "a time is the median step of the slower rank, in turns; ratios are the median of those of a round; "
        f"load average {os.getloadavg()[1]:.0f}",
        *parts,
    )
    harness.write(text, output, f"compile_{hardware}-two-hosts")


def described(rate: str, batch: int, times: dict[str, list[float]], report: dict[str, Any]) -> list[str]:
    """The parts of the report about one link."""
    rows = [
        [
            name,
            f"{median(each):.0f}",
            f"{min(each):.0f}-{max(each):.0f}",
            f"{median(ours / other for ours, other in zip(times[OURS], each, strict=True)):.2f}",
        ]
        for name, each in times.items()
    ]
    tried = [[name, f"{ms:.0f}"] for name, ms in report["tried_ms"].items()]
    return [
        f"### A compiled step of examples/gpt over a link of {rate}, two hosts, {batch} windows per rank",
        harness.markdown(["way", "ms", "range over rounds", "cuts and buckets / this"], rows),
        "The trial:",
        harness.markdown(["what", "ms"], tried),
        f"Chosen: {report['chosen']}, {len(report['cuts'])} cuts of {report['cuts_known']} and "
        f"{len(report['buckets'])} buckets; foretold {report['foretold_ms']:.0f} ms, bound "
        f"{report['bound_ms']:.0f}, computing {report['compute_ms']:.0f}; a cut costs "
        f"{report['cut_ms']:.1f} ms.",
    ]


if __name__ == "__main__":
    main()
