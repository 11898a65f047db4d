"""Steps of three examples, foretold under six plans of buckets and measured, between two hosts.

    python benchmarks/bench_foretold.py --rates 1gbit,none --rounds 5

Two network namespaces joined by a link, one rank on each, train the models of examples/gpt, moe and dlrm on
random data, on MPI, with progress by the program or by a thread. A job captures a step and measures what
all_reduces cost (as `fuse: {plan: auto}` does), then takes its steps under six plans in turns: buckets of
1, 4 and 25 MiB, every gradient alone, those of `fuse: {plan: exact}` (at the same costs), and the searched
ones. From the captured step and the costs, all plans are foretold: with the costs as measured, and with two
factors, of the times and of the shares of the core, fitted to the measured steps of two plans (25 MiB, each
alone) and judged by the other four. The report goes to benchmarks/results/foretold_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Annotated, Any, Final

import harness
import numpy as np
import torch
import typer
from harness import HARDWARE, ROOT, Dated, Hardware, Rounds
from numpy.typing import NDArray
from two_hosts import TwoHosts, need_two_hosts

import mcr_plus as mcr
from mcr_plus.bucketing.advise import advise
from mcr_plus.bucketing.buckets import Unit, buckets_of, units_of
from mcr_plus.bucketing.costs import OVERHEAD
from mcr_plus.bucketing.network import simulate
from mcr_plus.bucketing.probe import probe
from mcr_plus.bucketing.programs import BucketPlan, PlannedBucket
from mcr_plus.bucketing.saved import SavedBucket, SavedPlan
from mcr_plus.bucketing.scaling import ClusterCosts, Measured, from_step
from mcr_plus.bucketing.step import CapturedStep
from mcr_plus.bucketing.topology import Topology
from mcr_plus.fusion.bucket import BucketEntry
from mcr_plus.tables.cost import TimeCurve, placed
from mcr_plus.training import reducer
from mcr_plus.training.bucket_plan import earliest

sys.path.insert(0, str(ROOT / "examples" / "common"))
sys.path.insert(0, str(ROOT / "examples" / "moe"))
sys.path.insert(0, str(ROOT / "examples" / "dlrm"))
import model as dlrm
from corpus import VOCABULARY
from criteo import DENSE, SPARSE
from experts import ExpertShape, build
from parallel import McrTransport
from transformer import LanguageModel, Shape

LIBRARY: Final = "mpi"
EXAMPLES: Final = ("gpt", "moe", "dlrm")
PROGRESS: Final = ("caller", "thread")
FITTED: Final = ("25 MiB", "each alone")
STEPS: Final = 5  # of a turn, of which the first one is not timed
WINDOWS: Final = 4  # of a rank
ROWS: Final = 1024  # of a rank
TIMES: Final = np.linspace(0.6, 1.6, 21)  # factors that are tried
SHARES: Final = np.linspace(0.0, 2.0, 21)
ALIGNMENT: Final = 64  # bytes, of gradients in a bucket
APART: Final = 0.03  # of plans whose order counts

Train = Callable[[], None]


# --- on ranks -------------------------------------------------------------------------------------------


class _Transport(McrTransport):
    """What the models of the examples need, of a job that has begun."""

    def __init__(self, comm: mcr.Communicator) -> None:
        self.rank, self.world_size = comm.rank, comm.size

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, received: list[int], sent: list[int], tag: str
    ) -> None:
        mcr.all_to_all_single(output, input, received, sent, tag=tag)


class _Averaged:
    """In place of DLRM's own buffers: `mcr.wrap` averages the gradients."""

    def __init__(self, module: torch.nn.Module, comms: object, tag: str) -> None:  # noqa: ARG002
        self._module = module

    def wait(self) -> None:
        """Do nothing."""

    def zero(self) -> None:
        self._module.zero_grad()


def _language_model(model: LanguageModel, rank: int) -> tuple[torch.nn.Module, Any, Train]:
    wrapped, optimizer = mcr.wrap(model, torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True))
    random = torch.Generator().manual_seed(rank)

    def train() -> None:
        windows = torch.randint(VOCABULARY, (WINDOWS, Shape().sequence + 1), generator=random)
        optimizer.zero_grad()
        losses = wrapped(windows)
        (losses.text + losses.penalty).backward()
        optimizer.step()

    return wrapped, optimizer, train


def _click_model(transport: Any, rank: int, size: int) -> tuple[torch.nn.Module, Any, Train]:
    dlrm.GradientBuffer = _Averaged  # type: ignore[misc, assignment]
    model = dlrm.DLRM(dlrm.ModelConfig(), transport)
    model.embedding.weight.mcr_skip = True  # type: ignore[attr-defined]
    wrapped, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    random = torch.Generator().manual_seed(rank)
    sizes = [ROWS] * size

    def train() -> None:
        dense = torch.rand(ROWS, DENSE, generator=random)
        sparse = torch.randint(10_000, (ROWS, SPARSE), generator=random)
        labels = torch.randint(2, (ROWS,), generator=random)
        model.zero_gradients()
        dlrm.loss(wrapped(dense, sparse, sizes), labels, sizes).backward()
        optimizer.step()

    return wrapped, optimizer, train


def _averaged(comm: mcr.Communicator, values: torch.Tensor, library: str | None) -> mcr.Work:
    work = comm.all_reduce(values, mcr.AVG, async_op=True, backend=library)
    assert work is not None
    return work


def made(example: str, comm: mcr.Communicator) -> tuple[torch.nn.Module, Any, Train]:
    """The wrapped model of an example, its optimizer, and a step."""
    transport: Any = _Transport(comm)
    if example == "gpt":
        return _language_model(LanguageModel(Shape(), 0), comm.rank)
    if example == "moe":
        return _language_model(build(ExpertShape(), 0, transport), comm.rank)
    return _click_model(transport, comm.rank, comm.size)


def costs_of(
    step: CapturedStep, curves: Mapping[str, Any], times: float = 1.0, shares: float = 1.0
) -> ClusterCosts:
    """The costs of two ranks on two hosts, with factors. `curves`: sizes, seconds and shares."""
    sizes = [int(size) for size in curves["sizes"]]
    us = {size: 1e6 * times * seconds for size, seconds in zip(sizes, curves["seconds"], strict=True)}
    share = np.clip(shares * np.array(curves["shares"]), 0.0, 1.0)
    known = Measured(
        "all_reduce", LIBRARY, placed(2, 2, 1), TimeCurve.through(us), (np.array(sizes, float), share)
    )
    return ClusterCosts([known, *from_step(step)], Topology.of({"nodes": 2, "ranks_per_node": 1}))


def exact(unit: Unit, costs: ClusterCosts) -> list[PlannedBucket]:
    """The buckets of `fuse: {plan: exact}`, with these costs in place of a table's."""
    entries = [
        BucketEntry(at, size, None, unit.ready[name]) for at, (name, size) in enumerate(unit.sizes.items())
    ]

    def cost(nbytes: NDArray[np.int64]) -> NDArray[np.float64]:
        seconds = [costs.of("all_reduce", int(each), unit.group, LIBRARY).seconds for each in nbytes]
        return np.array(seconds) + OVERHEAD

    names = list(unit.sizes)
    found = earliest(entries, {None: cost}, ALIGNMENT)
    return [PlannedBucket(tuple(names[member] for member in bucket.members), LIBRARY) for bucket in found]


def plans_of(step: CapturedStep, costs: ClusterCosts) -> dict[str, list[PlannedBucket]]:
    """Six plans by name."""
    (unit,) = units_of(step)  # without experts and tables, whose gradients are not averaged
    sizes = unit.sizes
    found = {f"{limit} MiB": buckets_of(sizes, limit << 20, LIBRARY) for limit in (1, 4, 25)}
    found["each alone"] = [PlannedBucket((name,), LIBRARY) for name in sizes]
    found["exact"] = exact(unit, costs)
    found["searched"] = list(advise(step, costs).plan.buckets or ())
    return found


def job(example: str, progress: str, rounds: int) -> dict[str, Any] | None:
    """On ranks: the captured step, the costs, and milliseconds of steps by plan."""
    torch.set_num_threads(1)
    stages: list[dict[str, Any]] = [{"fuse": {}}, {"select": {}}, {"dispatch": {"progress": progress}}]
    with mcr.init({"version": 1, "backends": [LIBRARY], "pipeline": stages}) as comm:
        wrapped, optimizer, train = made(example, comm)
        for _ in range(3):
            train()
        with mcr.capture(wrapped, optimizer, steps=5) as capture:
            for _ in range(7):
                train()
        step = capture.step
        nbytes = sum(sum(unit.sizes.values()) for unit in units_of(step))
        curve = probe(
            comm, torch.float32, torch.device("cpu"), nbytes, [LIBRARY],
            partial(_averaged, comm),
        )[LIBRARY]  # fmt: skip
        curves = {
            "sizes": curve.sizes.tolist(), "seconds": curve.seconds.tolist(), "shares": curve.shares.tolist()
        }  # fmt: skip
        plans = comm.broadcast_object(plans_of(step, costs_of(step, curves)) if comm.rank == 0 else None, 0)
        param = next(each for each in wrapped.parameters() if not getattr(each, "mcr_skip", False))
        own: Any = reducer.reducer_of(param)

        def turn(buckets: Sequence[PlannedBucket]) -> list[float]:
            saved = tuple(SavedBucket(params=each.params, library=LIBRARY) for each in buckets)
            own._adopt(SavedPlan(model=step.model, ranks=comm.size, buckets=saved))
            times = []
            for _ in range(STEPS):
                began = perf_counter()
                train()
                times.append(1e3 * (perf_counter() - began))
            slowest = torch.tensor(times[1:])
            comm.all_reduce(slowest, mcr.MAX)
            return slowest.tolist()

        times = harness.in_turns(plans, rounds, turn)
        if comm.rank:
            return None
        return {
            "step": step.text(),
            "curves": curves,
            "times": {name: [each for turn in turns for each in turn] for name, turns in times.items()},
            "plans": {name: [list(each.params) for each in buckets] for name, buckets in plans.items()},
        }


# --- what was foretold ----------------------------------------------------------------------------------


def foretold(step: CapturedStep, plan: Sequence[Sequence[str]], costs: ClusterCosts) -> float:
    """Milliseconds of the step under a plan."""
    buckets = [PlannedBucket(tuple(params), LIBRARY) for params in plan]
    return 1e3 * simulate(step, BucketPlan(buckets), costs, overhead=OVERHEAD).step_s


def fitted(error: Callable[[float, float], float]) -> tuple[float, float]:
    """The factors of times and shares with the least error."""
    return min(itertools.product(TIMES.tolist(), SHARES.tolist()), key=lambda pair: error(*pair))


def order(measured: Sequence[float], expected: Sequence[float]) -> list[int]:
    """For each pair of plans whose measured steps differ by more than noise: 1 if in order, otherwise -1."""
    pairs = itertools.combinations(zip(measured, expected, strict=True), 2)
    return [
        1 if (one[0] - other[0]) * (one[1] - other[1]) > 0 else -1
        for one, other in pairs
        if abs(one[0] / other[0] - 1) > APART
    ]


def judged(found: Mapping[str, Any]) -> dict[str, Any]:
    """The measured milliseconds by plan, those foretold with costs as measured and with fitted factors."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "step.json"
        path.write_text(found["step"])
        step = CapturedStep.load(path)
    measured = {name: median(times) for name, times in found["times"].items()}

    def by(times: float, shares: float, names: Sequence[str]) -> dict[str, float]:
        costs = costs_of(step, found["curves"], times, shares)
        return {name: foretold(step, found["plans"][name], costs) for name in names}

    def error(times: float, shares: float) -> float:
        found = by(times, shares, FITTED)
        return float(sum((each / measured[name] - 1) ** 2 for name, each in found.items()))

    factors = fitted(error)
    return {
        "measured": measured,
        "as measured": by(1.0, 1.0, list(measured)),
        "fitted": by(*factors, list(measured)),
        "factors": factors,
    }


def _percent(errors: Sequence[float]) -> str:
    return f"{100 * mean(errors):.1f} % on average, {100 * max(errors):.1f} % at most"


@harness.program
def main(
    rates: Annotated[
        str, typer.Option(help="Of the link, with commas between; none: no limit.")
    ] = "1gbit,none",
    examples: Annotated[str, typer.Option(help="Which, with commas between.")] = ",".join(EXAMPLES),
    rounds: Rounds = 5,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    need_two_hosts()
    names = harness.chosen(examples.split(","), EXAMPLES, "example")
    rows: list[list[str]] = []
    plain: list[float] = []
    fit: list[float] = []
    orders: list[int] = []
    ratios: list[float] = []
    for rate in rates.split(","):
        with TwoHosts(None if rate == "none" else rate) as hosts:
            launch = harness.on_both(hosts)
            for example, progress in itertools.product(names, PROGRESS):
                answer = judged(harness.on_ranks(launch, job, example, progress, rounds))
                measured = answer["measured"]
                for name, ms in measured.items():
                    errors = [answer[way][name] / ms - 1 for way in ("as measured", "fitted")]
                    plain.append(abs(errors[0]))
                    if name not in FITTED:
                        fit.append(abs(errors[1]))
                    rows.append(
                        [
                            f"{example}, {progress}, {rate}", name, f"{ms:.1f}",
                            f"{answer['as measured'][name]:.1f}", f"{100 * errors[0]:+.1f} %",
                            f"{answer['fitted'][name]:.1f}",
                            "fitted" if name in FITTED else f"{100 * errors[1]:+.1f} %",
                        ]
                    )  # fmt: skip
                orders += order(list(measured.values()), list(answer["fitted"].values()))
                ratios.append(measured["searched"] / min(measured.values()))
    head = [
        "example, progress, link",
        "buckets of",
        "measured, ms",
        "foretold, ms",
        "error",
        "fitted, ms",
        "error",
    ]
    summary = (
        f"Costs as measured: {_percent(plain)}. Fitted on two plans, the other four: {_percent(fit)}; rank "
        f"correlation (Kendall's tau) of the {len(orders)} pairs of plans that are more than "
        f"{100 * APART:.0f} % apart: {mean(orders or [0]):.2f}. "
        f"The searched plan took at most {max(ratios):.2f} times as long as the best of the six, "
        f"{mean(ratios):.2f} on average."
    )
    text = harness.page(
        "Steps that are foretold and measured",
        harness.command(),
        f"medians of {rounds} turns of {STEPS - 1} steps, by the slowest rank",
        harness.markdown(head, rows),
        summary,
    )
    harness.write(text, output, f"foretold_{hardware}-two-hosts")


if __name__ == "__main__":
    main()
