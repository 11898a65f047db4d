"""Codecs by link for a pipeline whose hosts have unlike links.

    python benchmarks/bench_plan_links.py --steps 100

A transformer in three stages on three hosts (network namespaces), whose links carry 10, 100 and 1000 Mbit/s,
trained from the same start without codecs, with each codec on all links, and with codecs that
`choose_codecs` picks for each link out of several. All messages go over gloo. The ways take turns step by
step, on the same batches. *Loss* is the mean of the last quarter of the steps, beside that without codecs;
at this place of the training it differs by several per cent for any rounding.
The report goes to benchmarks/results/plan-links_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
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
from mcr_plus.plans.links import measure_links
from mcr_plus.plans.named import hybrid
from mcr_plus.plans.proof import prove
from mcr_plus.plans.run import parallelize
from mcr_plus.plans.search import choose_codecs

sys.path.insert(0, str(ROOT / "examples" / "common"))
from corpus import read_corpus
from transformer import LanguageModel, Losses, Shape

SHAPE: Final = Shape(layers=3, hidden=128, heads=4, sequence=64)
BATCH: Final = 16
MICRO_BATCHES: Final = 8
RATES: Final = ("10mbit", "100mbit", "1000mbit")
CODECS: Final[Mapping[str, CodecChoice]] = {
    "bf16": "bf16", "int8_block": "int8_block", "int4_block": "int4_block", "int2_block": "int2_block",
    "topk 0.1": {"codec": "topk", "ratio": 0.1, "values": "bf16"},
    "int4_block with feedback": {"codec": "int4_block", "error_feedback": True},
}  # fmt: skip
ALLOWED: Final[Mapping[str, tuple[str, ...]]] = {
    "by link, to int4_block": ("bf16", "int8_block", "int4_block"),
    "by link, to int2_block": ("bf16", "int8_block", "int4_block", "int2_block"),
}


def model() -> LanguageModel:
    made = LanguageModel(SHAPE, 0)
    made.bytes.weight.mcr_shared = True  # type: ignore[attr-defined]
    return made


def text(losses: Losses) -> torch.Tensor:
    return losses.text


def on_rank(steps: int) -> Any:
    """Of each way its name, codecs, foretold seconds, losses and seconds, on rank 0."""
    torch.set_num_threads(1)
    config = {"version": 1, "backends": ["gloo"]}
    with mcr.init(config, timeout=120) as comm:
        corpus = read_corpus(None, SHAPE.sequence, 0)
        whole = model()
        own = None
        if comm.rank == 0:
            optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
            own = mcr.profile(
                whole, corpus.windows(0, 0, BATCH), optimizer=optimizer, loss=text
            ).model_dump_json()
        profile = Profile.model_validate_json(mcr.broadcast_object(own, 0))
        cluster = measure_links()
        nic = cluster.links.nic
        assert nic is not None
        ways: dict[str, Any] = {"none": []}
        ways |= CODECS
        ways |= {name: [CODECS[each] for each in names] for name, names in ALLOWED.items()}
        jobs = {}
        for name, way in ways.items():
            proved = prove(hybrid(profile, comm.size, stages=comm.size, micro_batches=MICRO_BATCHES))
            costs = cluster_costs(cluster)
            if isinstance(way, list):
                choose_codecs(proved, costs, way)
            else:
                proved.plan.compress(..., way)
            part = model()
            optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
            parallel = parallelize(part, optimizer, proved.plan, loss=text)
            moved = sorted({each.tensor for each in proved.transfers})
            codecs = [str(parallel.plan.codecs.get(each, "none")) for each in moved]
            jobs[name] = parallel, optimizer, codecs, foretell(proved, costs).step_s
        losses: dict[str, list[float]] = {name: [] for name in jobs}
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for step in range(steps):
            for name, (parallel, optimizer, *_) in jobs.items():
                mcr.barrier()
                begin = perf_counter()
                losses[name].append(float(parallel.step(corpus.windows(step, 0, BATCH))))
                times[name].append(perf_counter() - begin)
                optimizer.step()
    if comm.rank:
        return None
    rows = [(name, codecs, said, losses[name], times[name]) for name, (_, _, codecs, said) in jobs.items()]
    return [8e-6 * rate for rate in nic.rates], rows


def main(
    steps: Annotated[int, typer.Option("--steps", min=8)] = 100, output: Dated = None,
    hardware: Hardware = HARDWARE,
) -> None:  # fmt: skip
    need_hosts(mpi=False)
    with Racks(1, len(RATES), RATES) as hosts:
        rates, rows = harness.on_ranks(lambda words: started(hosts, words), on_rank, steps)
    last = max(steps // 4, 1)
    base_loss, base = next((mean(row[3][-last:]), median(row[4])) for row in rows if row[0] == "none")
    lines = []
    for name, codecs, said, losses, times in rows:
        loss, seen = mean(losses[-last:]), median(times)
        change = f"{100 * (loss / base_loss - 1):+.2f} %"
        lines.append(
            (
                name, "; ".join(codecs) if name.startswith("by link") else "", f"{1e3 * said:.0f}",
                f"{1e3 * seen:.0f}", f"{base / seen:.2f}", f"{loss:.4f}", change,
            )
        )  # fmt: skip
    head = ("codecs", "chosen", "foretold ms", "median ms", "faster", "loss", "change")
    said = f"Measured: {', '.join(f'{rate:.1f}' for rate in rates)} Mbit/s."
    note = (__doc__ or "").split("\n\n", 2)[2].rsplit("The report", 1)[0].strip()
    page = harness.page("Codecs by link", harness.command(), note, harness.markdown(head, lines), said)
    harness.show(head, lines)
    print(said)
    harness.write(page, output, f"plan-links_{hardware}")


def started(hosts: Racks, words: Sequence[str]) -> None:
    hosts.torchrun([sys.executable, *words])


if __name__ == "__main__":
    harness.program(main)()
