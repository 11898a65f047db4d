"""The planner itself: simulations and plans for 4096 ranks, and what capturing and replaying cost.

    python benchmarks/bench_planner.py --rounds 5
    python benchmarks/bench_planner.py --hard

A made-up step has 500 gradients of 4 KiB to 4 MiB; its costs are by the links of a cluster of 512 nodes of 8
ranks, 16 nodes in a rack, and by three libraries measured on two nodes. *simulate*: one step on 4096 ranks
with shared links, with one bucket per gradient and with buckets of 25 MiB. *plan*: all that `mcr-plus plan`
computes for it. Then two ranks of this host train a small model with steps of about 100 ms: without capture,
while a step is captured (`hold=False`), and after the capture, in turns; and a captured step is replayed by
sleeping, whose CPU time is that of a rank. The report goes to
benchmarks/results/planner_<hardware>_<yyyymm>.md. With --hard, six sets of gradients that are harder to
search: their seconds and proved gaps go to benchmarks/results/planner_hard_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import harness
import numpy as np
import torch
import typer
from harness import HARDWARE, Dated, Hardware, Rounds

import mcr_plus as mcr
from mcr_plus.bucketing.advise import advise
from mcr_plus.bucketing.buckets import buckets_of, simulated
from mcr_plus.bucketing.costs import OVERHEAD, prices
from mcr_plus.bucketing.costs import BucketCurve as Bucketed
from mcr_plus.bucketing.programs import BucketPlan
from mcr_plus.bucketing.scaling import ClusterCosts, Measured
from mcr_plus.bucketing.search import search
from mcr_plus.bucketing.step import CapturedStep, ComputeEvent, Event, IssueEvent, ReadyEvent, Role, WaitEvent
from mcr_plus.bucketing.topology import Topology
from mcr_plus.tables.cost import TimeCurve, placed
from mcr_plus.tuning.replay import ReplayRequest, run

GRADIENTS: Final = 500
RANKS: Final = 4096
LIBRARIES: Final = {"gloo": (2e-4, 9e-10), "mpi": (5e-5, 1.2e-9), "nccl": (3e-5, 8e-11)}  # seconds, per byte
WIDTH: Final = 1400
LAYERS: Final = 6
BATCH: Final = 64
CAPTURED: Final = 5
REPLAYED: Final = 20


def made_up_step() -> CapturedStep:
    """A step of two ranks on two nodes."""
    draw = np.random.default_rng(0)
    sizes = (4 * np.exp(draw.uniform(np.log(1 << 10), np.log(1 << 20), GRADIENTS)).astype(int)).tolist()
    names = tuple(f"w{number}" for number in range(GRADIENTS))
    events: list[Event] = [ComputeEvent("forward", 0.2)]
    for name, nbytes in zip(names, sizes, strict=True):
        events += [ComputeEvent("backward", 0.4 / GRADIENTS), ReadyEvent(name, nbytes, "float32 cpu")]
    events += [IssueEvent(0, "all_reduce", sum(sizes), (0, 1), "gradients", None, names), WaitEvent(0)]
    return CapturedStep(2, 2, "0" * 16, 0.6, 0.0, (Role((0, 1), tuple(events)),))


def costs() -> ClusterCosts:
    links = {
        "inside": {"rate": "200GB/s"}, "nic": {"rate": "100Gbit/s", "latency": "3us", "per": "node"},
        "rack": {"nodes": 16, "uplink": "400Gbit/s"},
    }  # fmt: skip
    sizes = np.geomspace(4, 1 << 31, 40)
    shares = (sizes, np.full(40, 0.1))
    measured = [
        Measured("all_reduce", name, placed(2, 2, 1), TimeCurve(sizes, 1e6 * (late + each * sizes)), shares)
        for name, (late, each) in LIBRARIES.items()
    ]
    return ClusterCosts(measured, Topology.of({"nodes": RANKS // 8, "ranks_per_node": 8, "links": links}))


def planning(rounds: int) -> list[list[str]]:
    """Rows: what, the goal, and seconds of CPU time, the first call apart, which compiles kernels."""
    step, of = made_up_step(), costs()
    sizes = {each.param: each.nbytes for each in step.roles[0].events if isinstance(each, ReadyEvent)}
    rows = []
    for name, limit in (("each gradient alone", 1), ("buckets of 25 MiB", 25 << 20)):
        plan = BucketPlan(buckets_of(sizes, limit, "nccl"), "nccl")
        simulated(step, plan, of, RANKS)
        times = [harness.seconds(partial(simulated, step, plan, of, RANKS)) for _ in range(rounds)]
        rows.append([f"simulate, {name}", "≤ 1 s", f"{median(times):.2f}"])
    advise(step, of, ranks=RANKS, seconds=0.5)
    rows.append(["plan", "≤ 10 s", f"{harness.seconds(lambda: advise(step, of, ranks=RANKS)):.1f}"])
    return rows


def searches() -> list[list[str]]:
    """Rows: a set of gradients, seconds, the proved gap, and by how much a longer search is shorter."""
    rows = []
    for seed in range(6):
        draw = np.random.default_rng(seed)
        sizes = [int(each) for each in np.exp(draw.uniform(np.log(1 << 10), np.log(8 << 20), GRADIENTS))]
        total = sum(sizes)
        pace = 8e-9 * total / GRADIENTS * float(draw.choice([0.7, 1.0, 1.5]))
        times = np.cumsum(draw.uniform(0, pace, GRADIENTS))
        points = [int(each) for each in np.geomspace(4, 1.1 * total, 40)]
        curves = [
            Bucketed.through({each: (late + slope * each, share * min(1.0, each / 1e6)) for each in points})
            for late, slope, share in ((1e-4, 8e-9, 0.1), (3e-4, 5e-9, 0.35), (2e-3, 3.5e-9, 0.6))
        ]
        of = prices(sizes, 1, curves, OVERHEAD)
        search(times, float(times[-1]), of)
        began = time.perf_counter()
        found = search(times, float(times[-1]), of)
        took = time.perf_counter() - began
        longer = search(times, float(times[-1]), of, seconds=30.0)
        better = f"{100 * (found.step / longer.step - 1):.1f} %"
        rows.append([str(seed), f"{took:.1f}", f"{100 * found.gap:.1f} %", better])
    return rows


def capturing(rounds: int, path: str) -> dict[str, list[float]]:
    """On ranks: milliseconds of steps without, during and after a capture. The step is saved."""
    torch.set_num_threads(1)
    with mcr.init({"version": 1, "backends": ["gloo"]}) as comm:
        layers: list[Any] = []
        for _ in range(LAYERS):
            layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
        model: Any = torch.nn.Sequential(*layers)
        model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(comm.rank))

        def steps() -> float:
            """Milliseconds of a step, by the slowest rank."""
            times = []
            for _ in range(CAPTURED):
                began = time.perf_counter()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                times.append(1e3 * (time.perf_counter() - began))
            slowest = torch.tensor(median(times))
            comm.all_reduce(slowest, mcr.MAX)
            return float(slowest)

        steps()
        found: dict[str, list[float]] = {"without": [], "during": [], "after": []}
        for _ in range(rounds):
            found["without"].append(steps())
            with mcr.capture(model, optimizer, steps=CAPTURED, hold=False) as captured:
                found["during"].append(steps())
            if comm.rank == 0:
                captured.save(path)
            found["after"].append(steps())
        return found


def replayed(step: str) -> dict[str, Any] | None:
    """On ranks: seconds of CPU and of the clock that a rank takes to replay steps by sleeping."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        run(ReplayRequest(step, str(answer), None, "sleep", REPLAYED))
        return json.loads(answer.read_text()) if answer.exists() else None


@harness.program
def main(
    rounds: Rounds = 5,
    hard: Annotated[
        bool, typer.Option("--hard", help="Hard searches alone, and a page of their own.")
    ] = False,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    if hard:
        head = ["set", "seconds", "gap", "a search of up to 30 s is shorter by"]
        note = f"{GRADIENTS} gradients, three libraries whose shares of the core grow with size"
        text = harness.page(
            "Hard searches of buckets", harness.command(), note,
            "Communication takes about as long as computing, or longer. The gap is proved by the bound:",
            harness.markdown(head, searches()),
        )  # fmt: skip
        harness.write(text, output, f"planner_hard_{hardware}")
        return
    launch = harness.here(2)
    rows = planning(rounds)
    with tempfile.TemporaryDirectory() as folder:
        step = str(Path(folder, "step.json"))
        found = harness.on_ranks(launch, capturing, rounds, step)
        answer = harness.on_ranks(launch, replayed, step)
    without = found["without"]
    for name, goal in (("during", "≤ 1 %"), ("after", "0 %")):
        ratios = [100 * (a / b - 1) for a, b in zip(found[name], without, strict=True)]
        figures = f"{median(ratios):+.1f} % ({min(ratios):+.1f} to {max(ratios):+.1f})"
        rows.append([f"step of {median(without):.0f} ms, {name} a capture", goal, figures])
    share = f"{100 * answer['cpu_share']:.0f} %"
    rows.append(
        [f"CPU of a rank that replays steps of {answer['step_ms']:.0f} ms by sleeping", "≤ 20 %", share]
    )
    head = ["what", "wanted", "measured (seconds, unless a unit is given)"]
    note = f"{GRADIENTS} gradients, {RANKS} ranks, three libraries; two ranks of this host for the others"
    harness.write(
        harness.page(
            "The planner", harness.command(), note, harness.markdown(head, rows),
        ),
        output, f"planner_{hardware}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
