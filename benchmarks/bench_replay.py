"""A captured step of examples/gpt, foretold for hosts and racks, beside its replay there.

    python benchmarks/bench_replay.py --rate 200mbit --rounds 3

The step is captured on two hosts, and all_reduces of gloo are measured there; on two in two racks, how much
longer a message takes between racks. From these the step is foretold (bucketing/network) under five plans
of buckets on two, four and eight hosts in a rack and on two racks of two and of four, whose uplinks have the
rate of a host.
Then it is replayed there under the same plans, computing replaced by sleeping, so that two cores are enough
for all ranks. The report goes to benchmarks/results/replay_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import harness
import torch
from bench_scaling import FITTED, TWO, Setting, _least
from bench_scaling import topology as links
from harness import HARDWARE, ROOT, Dated, Hardware, Rate, Rounds
from hosts import need_hosts
from racks import Racks

import mcr_plus as mcr
from mcr_plus.bucketing.advise import advise
from mcr_plus.bucketing.buckets import buckets_of
from mcr_plus.bucketing.costs import OVERHEAD
from mcr_plus.bucketing.network import simulate
from mcr_plus.bucketing.programs import BucketPlan, PlannedBucket
from mcr_plus.bucketing.saved import SavedBucket, SavedPlan
from mcr_plus.bucketing.scaling import ClusterCosts, Measured
from mcr_plus.bucketing.step import CapturedStep, ComputeEvent, ReadyEvent
from mcr_plus.bucketing.topology import Topology
from mcr_plus.tables.cost import TimeCurve, placed
from mcr_plus.tuning.replay import ReplayRequest, run

sys.path.insert(0, str(ROOT / "examples" / "common"))
from corpus import VOCABULARY
from transformer import LanguageModel, Shape

APART: Final = Setting("2 racks of 1", 2, 1)
SETTINGS: Final = (
    TWO,
    Setting("4 hosts", 1, 4),
    Setting("2 racks of 2", 2, 2),
    Setting("8 hosts", 1, 8),
    Setting("2 racks of 4", 2, 4),
)
LIBRARY: Final = "gloo"
BATCH: Final = 4  # windows of a rank
STEPS: Final = 8
LIMIT_S: Final = 300.0
HEAD: Final = ("hosts", "buckets of", "number", "foretold, ms", "replayed, ms", "error", "costs")
SMALL: Final = 64  # bytes, whose time is latency
ROUNDS: Final = 2  # of an all_reduce of two ranks


def captured() -> dict[str, Any] | None:
    """On two ranks: the step, and microseconds of all_reduces by bytes."""
    torch.set_num_threads(1)
    stages: list[dict[str, Any]] = [{"fuse": {}}, {"select": {}}, {"dispatch": {}}]
    with mcr.init({"version": 1, "backends": [LIBRARY], "pipeline": stages}) as comm:
        shape = Shape()
        model = LanguageModel(shape, 0)
        model, optimizer = mcr.wrap(model, torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True))
        random = torch.Generator().manual_seed(comm.rank)
        with mcr.capture(model, optimizer, steps=5) as step:
            for _ in range(7):
                windows = torch.randint(VOCABULARY, (BATCH, shape.sequence + 1), generator=random)
                optimizer.zero_grad()
                model(windows).text.backward()
                optimizer.step()
        times = {str(size): _averaged(comm, size) for size in [*FITTED, 16 << 20]}
        small = _averaged(comm, SMALL)
        return {"step": step.step.text(), "times": times, "small": small} if comm.rank == 0 else None


def _averaged(comm: mcr.Communicator, size: int) -> float:
    """Microseconds of an all_reduce as gradients have it: of averages."""
    values = torch.zeros(size // 4)
    return _least(
        lambda: comm.all_reduce(values, mcr.AVG), comm.barrier, lambda value: comm.all_reduce(value, mcr.MAX)
    )


def latency() -> float | None:
    """On two ranks: microseconds of a small all_reduce."""
    torch.set_num_threads(1)
    with mcr.init({"version": 1, "backends": [LIBRARY]}) as comm:
        small = _averaged(comm, SMALL)
        return small if comm.rank == 0 else None


def topology(setting: Setting, rate: str, between_racks: float) -> Topology:
    """The cluster of a setting; `between_racks`: seconds that a message takes longer there."""
    found = links(setting, rate)
    if found.links.rack is None or between_racks <= 0:
        return found
    return found.changed([f"rack.latency={1e6 * between_racks:.3f}us"])


def replayed(step: str, config: str) -> dict[str, Any] | None:
    """On ranks: the answer of a replay."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        run(ReplayRequest(step, str(answer), config, "sleep", STEPS))
        return json.loads(answer.read_text()) if answer.exists() else None


def on_hosts(
    setting: Setting, rate: str, program: Callable[..., Any], *arguments: Any, per_host: int = 1
) -> Any:
    with Racks(setting.racks, setting.hosts, rate, rate) as racks:

        def launch(words: Sequence[str]) -> None:
            racks.torchrun([sys.executable, *words], per_host=per_host, timeout=LIMIT_S)

        return harness.on_ranks(launch, program, *arguments)


def plans(step: CapturedStep, costs: ClusterCosts, ranks: int) -> dict[str, list[PlannedBucket]]:
    """Five plans by name."""
    events = step.roles[0].events
    sizes = {each.param: each.nbytes for each in events if isinstance(each, ReadyEvent)}
    found = {f"{limit} MiB": buckets_of(sizes, limit << 20, LIBRARY) for limit in (1, 4, 25)}
    found["each alone"] = [PlannedBucket((name,), LIBRARY) for name in sizes]
    found["searched"] = list(advise(step, costs, ranks=ranks).plan.buckets or ())
    return found


def written(folder: Path, name: str, step: CapturedStep, ranks: int, buckets: Sequence[PlannedBucket]) -> str:
    """The path of a pipeline with these buckets."""
    made = tuple(SavedBucket(params=each.params, library=LIBRARY) for each in buckets)
    stem = f"{name.replace(' ', '_')}.{ranks}"
    SavedPlan(model=step.model, ranks=ranks, buckets=made).save(folder / f"{stem}.json")
    path = folder / f"{stem}.yaml"
    path.write_text(
        f"version: 1\nbackends: [{LIBRARY}]\n"
        f"pipeline:\n  - fuse: {{plan: {stem}.json}}\n  - select: {{}}\n  - dispatch: {{}}\n"
    )
    return str(path)


@harness.program
def main(
    rate: Rate = "200mbit", rounds: Rounds = 3, hardware: Hardware = HARDWARE, output: Dated = None
) -> None:
    need_hosts(mpi=False)
    found = on_hosts(TWO, rate, captured)
    longer = 1e-6 * (on_hosts(APART, rate, latency) - found["small"]) / ROUNDS
    rows: list[list[str]] = []
    errors: list[float] = []
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "step.json").write_text(found["step"])
        step = CapturedStep.load(folder / "step.json")
        curve = TimeCurve.through({int(size): us for size, us in found["times"].items()})
        known = [Measured("all_reduce", LIBRARY, placed(2, 2, 1), curve)]
        for setting in SETTINGS:
            ranks = setting.racks * setting.hosts
            costs = ClusterCosts(known, topology(setting, rate, longer), topology(TWO, rate, longer))
            tried = plans(step, costs, ranks)
            answers: dict[str, list[dict[str, Any]]] = {}
            for _ in range(rounds):
                for plan, buckets in tried.items():
                    config = written(folder, plan, step, ranks, buckets)
                    answer = on_hosts(setting, rate, replayed, str(folder / "step.json"), config)
                    answers.setdefault(plan, []).append(answer)
            for plan, buckets in tried.items():
                timeline = simulate(step, BucketPlan(buckets, LIBRARY), costs, ranks=ranks, overhead=OVERHEAD)
                measured = median(each["step_ms"] for each in answers[plan])
                errors.append(1e3 * timeline.step_s / measured - 1)
                shares += [each["cpu_share"] for each in answers[plan]]
                rows.append(
                    [
                        setting.name, plan, str(len(buckets)), f"{1e3 * timeline.step_s:.0f}",
                        f"{measured:.0f}", f"{100 * errors[-1]:+.1f} %", timeline.how,
                    ]
                )  # fmt: skip
    size = [abs(each) for each in errors]
    text = harness.page(
        "A step that is foretold and replayed",
        harness.command(),
        f"medians of {rounds} replays of {STEPS} steps; computing {1e3 * _computed(step):.0f} ms, slept; "
        f"costs measured on two hosts at {rate}",
        harness.markdown(list(HEAD), rows),
        f"Errors: {100 * mean(size):.1f} % on average, {100 * max(size):.1f} % at most. A rank took "
        f"{100 * median(shares):.0f} % of a core in the median, {100 * max(shares):.0f} % at most.",
    )
    harness.write(text, output, f"replay_{hardware}")


def _computed(step: CapturedStep) -> float:
    return sum(each.seconds for each in step.roles[0].events if isinstance(each, ComputeEvent))


if __name__ == "__main__":
    main()
