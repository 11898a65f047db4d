"""Codecs by link for a pipeline whose hosts have unlike links.

    python benchmarks/bench_plan_links.py --steps 20

A transformer in three stages on three hosts (network namespaces), whose links carry 10, 100 and 1000 Mbit/s:
without codecs, with each codec on all links, and with codecs that `choose_codecs` picks for each link out of
several. First and last stage share the embedding, and add up its gradient, by a codec too. All messages go
over gloo. The ways take turns step by step. *Loss*: from a model that was trained 500 steps without codecs,
200 steps whose learning rate falls to 0, on the same batches, on one host; the mean of the last half, beside
that without codecs. From the random start, losses differ by several per cent for any rounding, for hundreds
of steps.
The report goes to benchmarks/results/plan-links_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Annotated, Any, Final

import harness
import torch
import typer
from harness import HARDWARE, ROOT, Dated, Hardware
from hosts import need_hosts
from racks import Racks

import mcr_plus as mcr
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.codecs import CodecChoice
from mcr_plus.plans.foretell import cluster_costs, foretell
from mcr_plus.plans.language import ModelPlan
from mcr_plus.plans.links import measure_links
from mcr_plus.plans.named import hybrid
from mcr_plus.plans.proof import prove
from mcr_plus.plans.run import ParallelModel, parallelize
from mcr_plus.plans.search import choose_codecs

sys.path.insert(0, str(ROOT / "examples" / "common"))
from corpus import read_corpus
from transformer import LanguageModel, Losses, Shape

SHAPE: Final = Shape(layers=3, hidden=128, heads=4, sequence=64)
CONFIG: Final = {"version": 1, "backends": ["gloo"]}
BATCH: Final = 16
MICRO_BATCHES: Final = 8
RATES: Final = ("10mbit", "100mbit", "1000mbit")
CODECS: Final[Mapping[str, CodecChoice]] = {
    "bf16": "bf16", "int8_block": "int8_block", "int4_block": "int4_block",
    "int4_block, hadamard": {"codec": "int4_block", "hadamard": True}, "int2_block": "int2_block",
}  # fmt: skip
BEFORE: Final = 500  # steps without codecs, before losses are compared
RATE: Final = 1e-3
MOST: Final = 0.01  # of the loss
ALLOWED: Final[Mapping[str, tuple[str, ...]]] = {
    "by link, to int4_block": ("bf16", "int8_block", "int4_block, hadamard"),
    "by link, to int2_block": ("bf16", "int8_block", "int4_block, hadamard", "int2_block"),
}


Job = tuple[ParallelModel, torch.optim.Optimizer]


def model() -> LanguageModel:
    made = LanguageModel(SHAPE, 0)
    made.bytes.weight.mcr_shared = True  # type: ignore[attr-defined]
    return made


def text(losses: Losses) -> torch.Tensor:
    return losses.text


def made_by(profile: Profile, ways: Mapping[str, Mapping[int, CodecChoice]]) -> dict[str, Job]:
    """Pipelines with the codecs of each way, by `ModelPlan.codecs`."""
    jobs: dict[str, Job] = {}
    for name, codecs in ways.items():
        part, plan = model(), planned(profile)
        plan.codecs = {int(tensor): codec for tensor, codec in codecs.items()}  # keys of JSON are text
        optimizer = torch.optim.AdamW(part.parameters(), lr=RATE)
        jobs[name] = parallelize(part, optimizer, plan, loss=text), optimizer
    return jobs


def planned(profile: Profile) -> ModelPlan:
    stages = len(RATES)
    return hybrid(profile, stages, stages=stages, micro_batches=MICRO_BATCHES)


def profiled(comm: mcr.Communicator, batch: torch.Tensor) -> Profile:
    own = None
    if comm.rank == 0:
        whole = model()
        optimizer = torch.optim.AdamW(whole.parameters(), lr=RATE)
        own = mcr.profile(whole, batch, optimizer=optimizer, loss=text).model_dump_json()
    return Profile.model_validate_json(mcr.broadcast_object(own, 0))


def losses_on_rank(ways: Mapping[str, Mapping[int, CodecChoice]], steps: int) -> Any:
    """The loss of each way at the end, on rank 0; after the same steps without codecs."""
    torch.set_num_threads(1)
    with mcr.init(CONFIG, timeout=120) as comm:
        corpus = read_corpus(None, SHAPE.sequence, 0)
        profile = profiled(comm, corpus.windows(0, 0, BATCH))
        ((first, optimizer),) = made_by(profile, {"none": {}}).values()
        for step in range(BEFORE):
            first.step(corpus.windows(step, 0, BATCH))
            optimizer.step()
        begin = mcr.broadcast_object((first.state_dict(), first.optimizer_state_dict()), 0)
        found = {}
        for name, (parallel, optimizer) in made_by(profile, ways).items():
            parallel.load_state_dict(deepcopy(begin[0]))
            parallel.load_optimizer_state_dict(deepcopy(begin[1]))
            losses = []
            for number, step in enumerate(range(BEFORE, BEFORE + steps)):
                optimizer.param_groups[0]["lr"] = RATE * (1 - number / steps)
                losses.append(float(parallel.step(corpus.windows(step, 0, BATCH))))
                optimizer.step()
            found[name] = mean(losses[-(steps // 2) :])
    return None if comm.rank else found


def on_rank(steps: int) -> Any:
    """Of each way its name, codecs, foretold seconds and seconds, on rank 0; and names of blocks."""
    torch.set_num_threads(1)
    with mcr.init(CONFIG, timeout=120) as comm:
        corpus = read_corpus(None, SHAPE.sequence, 0)
        profile = profiled(comm, corpus.windows(0, 0, BATCH))
        cluster = measure_links()
        nic = cluster.links.nic
        assert nic is not None
        proved, costs = prove(planned(profile)), cluster_costs(cluster)
        moved = sorted({0, *(each.tensor for each in proved.transfers)})
        ways: dict[str, dict[int, CodecChoice]] = {"none": {}}
        ways |= {name: dict.fromkeys(moved, way) for name, way in CODECS.items()}
        for name, names in ALLOWED.items():
            choose_codecs(proved, costs, [CODECS[each] for each in names])
            ways[name] = dict(proved.plan.codecs)
        said = {}
        for name, codecs in ways.items():
            proved.plan.codecs = codecs
            said[name] = foretell(proved, costs).step_s
        ways = mcr.broadcast_object(ways, 0)  # choices depend on measured codecs
        jobs = made_by(profile, ways)
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for step in range(steps):
            for name, (parallel, optimizer) in jobs.items():
                mcr.barrier()
                begin = perf_counter()
                parallel.step(corpus.windows(step, 0, BATCH))
                times[name].append(perf_counter() - begin)
                optimizer.step()
    if comm.rank:
        return None
    rows = [(name, codecs, said[name], times[name]) for name, codecs in ways.items()]
    blocks = [block.name for block in profile.blocks]
    return {"rates": [8e-6 * rate for rate in nic.rates], "rows": rows, "blocks": blocks}


def main(
    steps: Annotated[int, typer.Option("--steps", min=8)] = 20,
    losses: Annotated[int, typer.Option("--losses", min=2, help="Steps to compare losses after.")] = 200,
    kept: Annotated[Path | None, typer.Option(help="Times of an earlier run.")] = None,
    output: Dated = None, hardware: Hardware = HARDWARE,
) -> None:  # fmt: skip
    need_hosts(mpi=False)
    done: dict[str, Any] = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    if "rows" not in done:
        with Racks(1, len(RATES), RATES) as hosts:
            done |= harness.on_ranks(lambda words: started(hosts, words), on_rank, steps)
        harness.write_json(done, kept)
    rows = done["rows"]
    ways = {name: codecs for name, codecs, *_ in rows}
    loss = harness.on_ranks(harness.here(len(RATES)), losses_on_rank, ways, losses)
    seconds = {name: median(times) for name, _, _, times in rows}
    lines = []
    for name, _, said, _ in rows:
        chosen = "; ".join(
            f"{done['blocks'][int(tensor) - 1] if int(tensor) else 'sums of gradients'}: {named_codec(codec)}"
            for tensor, codec in ways[name].items()
        )
        lines.append(
            (
                name, chosen if name in ALLOWED else "", f"{1e3 * said:.0f}", f"{1e3 * seconds[name]:.0f}",
                f"{seconds['none'] / seconds[name]:.2f}", f"{loss[name]:.4f}",
                f"{100 * (loss[name] / loss['none'] - 1):+.2f} %",
            )
        )  # fmt: skip
    found = (
        f"Measured: {', '.join(f'{rate:.1f}' for rate in done['rates'])} Mbit/s. {compared(seconds, loss)}"
    )
    head = ("codecs", "chosen", "foretold ms", "median ms", "faster", "loss", "change")
    note = (__doc__ or "").split("\n\n", 2)[2].rsplit("The report", 1)[0].strip()
    page = harness.page("Codecs by link", harness.command(), note, harness.markdown(head, lines), found)
    harness.show(head, lines)
    print(found)
    harness.write(page, output, f"plan-links_{hardware}")


def named_codec(choice: CodecChoice) -> str:
    return next(name for name, codec in CODECS.items() if codec == choice)


def compared(seconds: Mapping[str, float], loss: Mapping[str, float]) -> str:
    """The fastest codecs by link beside the fastest one on all links, of those whose loss is small."""
    small = [name for name in seconds if loss[name] <= (1 + MOST) * loss["none"]]
    single = min((name for name in small if name not in ALLOWED), key=lambda name: seconds[name])
    by_link = min((name for name in small if name in ALLOWED), key=lambda name: seconds[name], default=None)
    said = f"With at most {MOST:.0%} more loss, {single} is the fastest on all links"
    if by_link is None:
        return f"{said}, and no choice by link has so little."
    one, other = (seconds[name] / seconds[by_link] for name in ("none", single))
    return f"{said}. {by_link.capitalize()}: {other:.2f} times as fast, and {one:.2f} times as no codec."


def started(hosts: Racks, words: Sequence[str]) -> None:
    hosts.torchrun([sys.executable, *words])


if __name__ == "__main__":
    harness.program(main)()
