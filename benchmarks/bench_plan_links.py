"""Codecs by link for a pipeline whose hosts have unlike links.

    python benchmarks/bench_plan_links.py --steps 20

A transformer in three stages on three hosts (network namespaces), whose links carry 10, 100 and 1000 Mbit/s:
without codecs, with each codec on all links, and with codecs that `choose_codecs` picks for each link out of
several. All messages go over gloo. The ways take turns step by step. *Loss*: from a model that was trained
500 steps without codecs, 200 steps whose learning rate falls to 0, on the same batches; the mean of the last
half, beside that without codecs. Each way is trained in one process, which rounds what goes between stages
as the codecs do. From the random start, losses differ by several per cent for any rounding, for hundreds of
steps.
The report goes to benchmarks/results/plan-links_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
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
from torch import nn

import mcr_plus as mcr
from mcr_plus.core.environment import cores
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.codecs import CodecChoice, transfer_codec
from mcr_plus.plans.foretell import cluster_costs, foretell
from mcr_plus.plans.links import measure_links
from mcr_plus.plans.named import hybrid
from mcr_plus.plans.proof import prove
from mcr_plus.plans.run import parallelize
from mcr_plus.plans.search import choose_codecs

sys.path.insert(0, str(ROOT / "examples" / "common"))
from corpus import read_corpus
from transformer import Fed, LanguageModel, Losses, Shape

SHAPE: Final = Shape(layers=3, hidden=128, heads=4, sequence=64)
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


def model() -> LanguageModel:
    made = LanguageModel(SHAPE, 0)
    made.bytes.weight.mcr_shared = True  # type: ignore[attr-defined]
    return made


def text(losses: Losses) -> torch.Tensor:
    return losses.text


class Channel:
    """Rounds micro-batches as a codec does that sends them one after another."""

    def __init__(self, choice: CodecChoice) -> None:
        self.codec = transfer_codec(choice, "float32").codec

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._sent(each) for each in x.chunk(MICRO_BATCHES)])

    def _sent(self, x: torch.Tensor) -> torch.Tensor:
        sent = torch.empty_like(x, memory_format=torch.contiguous_format)
        wire = torch.empty(self.codec.wire_numel(x.numel()), dtype=self.codec.wire_dtype)
        self.codec.encode(x.flatten(), wire)
        self.codec.decode(wire, sent.view(-1))
        return sent


class Sent(torch.autograd.Function):
    """Sends values, and their gradient back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, channel: Channel) -> torch.Tensor:
        ctx.channel = channel
        return channel(x)

    @staticmethod
    def backward(ctx: Any, *dy: torch.Tensor) -> Any:
        return ctx.channel(dy[0]), None


def sent(channel: Channel, _module: nn.Module, _inputs: Any, fed: Fed) -> Fed:
    return fed._replace(output=Sent.apply(fed.output, channel))  # type: ignore[no-untyped-call]


def trained(
    codecs: Mapping[str, CodecChoice], steps: range, begin: Mapping[str, Any] | None = None
) -> tuple[list[float], dict[str, Any]]:
    """The losses of the steps in one process, with codecs after some blocks, and the state at the end.

    From `begin` on, the learning rate falls to 0.
    """
    made, corpus = model(), read_corpus(None, SHAPE.sequence, 0)
    optimizer = torch.optim.AdamW(made.parameters(), lr=RATE)
    if begin is not None:
        made.load_state_dict(begin["model"])
        optimizer.load_state_dict(deepcopy(begin["optimizer"]))
    for name, choice in codecs.items():
        made.get_submodule(name).register_forward_hook(partial(sent, Channel(choice)))
    losses = []
    for number, step in enumerate(steps):
        if begin is not None:
            optimizer.param_groups[0]["lr"] = RATE * (1 - number / len(steps))
        optimizer.zero_grad()
        loss = made(corpus.windows(step, 0, BATCH)).text
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {"model": made.state_dict(), "optimizer": optimizer.state_dict()}


def losses_on_rank(ways: Mapping[str, Mapping[str, CodecChoice]], steps: int) -> Any:
    """The loss of each way at the end, on rank 0. The ranks share the ways."""
    torch.set_num_threads(1)
    with mcr.init(timeout=3600) as comm:
        _, begin = trained({}, range(BEFORE))
        own = {}
        for name in list(ways)[comm.rank :: comm.size]:
            losses, _ = trained(ways[name], range(BEFORE, BEFORE + steps), begin)
            own[name] = mean(losses[-(steps // 2) :])
        found = {name: loss for part in mcr.all_gather_object(own) for name, loss in part.items()}
    return None if comm.rank else found


def on_rank(steps: int) -> Any:
    """Of each way its name, codecs by block, foretold seconds and seconds, on rank 0."""
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
            codecs = {
                parallel.plan.blocks[each - 1].name: parallel.plan.codecs[each]
                for each in moved
                if each in parallel.plan.codecs
            }
            jobs[name] = parallel, optimizer, codecs, foretell(proved, costs).step_s
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for step in range(steps):
            for name, (parallel, optimizer, *_) in jobs.items():
                mcr.barrier()
                begin = perf_counter()
                parallel.step(corpus.windows(step, 0, BATCH))
                times[name].append(perf_counter() - begin)
                optimizer.step()
    if comm.rank:
        return None
    rows = [(name, codecs, said, times[name]) for name, (_, _, codecs, said) in jobs.items()]
    return {"rates": [8e-6 * rate for rate in nic.rates], "rows": rows}


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
    loss = harness.on_ranks(harness.here(cores()), losses_on_rank, ways, losses)
    seconds = {name: median(times) for name, _, _, times in rows}
    lines = []
    for name, codecs, said, _ in rows:
        chosen = "; ".join(f"{block}: {named_codec(codec)}" for block, codec in codecs.items())
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
