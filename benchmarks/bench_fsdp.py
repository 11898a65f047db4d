"""An FSDP2 model on two hosts: its steps and its loss with codecs of `mcr.fsdp`, beside gloo.

    python benchmarks/bench_fsdp.py --rate 1gbit --steps 300 --seeds 2
    python benchmarks/bench_fsdp.py --hidden 512 --sequence 16 --windows 1   # bound by the wire
    python benchmarks/bench_fsdp.py --dtype bfloat16 --lr 1e-6 --ways 'mcr_plus;delta, int8_block'
    python benchmarks/bench_fsdp.py --ways 'int8_block, int4_block with error feedback;nothing is sent'
    python benchmarks/bench_fsdp.py --per-host 2 --ways 'mcr_plus;in steps'

The transformer of examples/gpt is sharded by `fully_shard`, block by block, over two hosts
(benchmarks/racks.py) with one rank or several on each and a link of the given rate; each block has the next
one prefetched in the forward pass, and FSDP2 does the same in the backward pass. Each way trains the same
model on the same text, in turns; the loss is that of held-out windows at the end. Bytes are those that a
host's interface sends in a step, headers included. "In steps": with the stage `hierarchical`, and shared
memory inside hosts.

"Processor": of all threads of a rank in a step, gloo's among them; "alone": the same of forward and backward
passes without sharding, and AdamW on half of the parameters. "Wire": the bytes of a step over the rate. Where
each rank has a core and nothing else runs, a step that hides none of its wire takes about processor + wire,
and no step less than the larger of alone and wire, which other work on the machine changes little.
"Nothing is sent": FSDP2 on torch's `fake` process group, whose collectives end at once and leave results as
they are: the least that a step can take with any codec and library; its loss means nothing, and its time is
that of rank 0. The report goes to benchmarks/results/fsdp_<hardware>-two-hosts_<yyyymm>.md.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean, median
from time import perf_counter, process_time
from typing import Annotated, Any, Final

import harness
import torch
import torch.distributed as dist
import typer
from bench_replay import on_hosts
from bench_scaling import TWO
from harness import HARDWARE, ROOT, Dated, Hardware, Rate
from hosts import need_hosts
from racks import bits_per_second
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import mcr_plus as mcr

sys.path += [str(ROOT / "examples" / name) for name in ("gpt", "common")]
from corpus import Corpus, read_corpus
from outer_steps import sent_bytes
from transformer import LanguageModel, Shape

GLOO: Final = "torch's gloo"
NOTHING: Final = "nothing is sent"
INT4: Final = {"codec": "int4_block", "error_feedback": True}
WAYS: Final[dict[str, dict[str, Any]]] = {
    GLOO: {},
    "mcr_plus": {},
    "int8_block, int8_block": {"parameters": "int8_block", "gradients": "int8_block"},
    "int8_block, int4_block with error feedback": {"parameters": "int8_block", "gradients": INT4},
    "delta, int8_block": {"parameters": "delta", "gradients": "int8_block"},
    "in steps": {},
    "in steps, int8_block, int4_block with error feedback": {"parameters": "int8_block", "gradients": INT4},
    NOTHING: {},
}
"""Codecs of parameters and of gradients, by the name of a way."""
USUAL: Final = tuple(WAYS)[:4]
HELD_OUT: Final = 16  # batches
ALONE: Final = 20  # steps


def trained(way: str, steps: int, seed: int, settings: dict[str, Any]) -> dict[str, Any] | None:
    """On ranks: milliseconds of steps on the slowest rank, bytes sent in one, and the loss at the end.

    `settings`: the sizes of the model's `Shape`, `windows` of text on each rank in a step, `lr`, and `dtype`
    in which parameters are gathered.
    """
    torch.set_num_threads(1)
    if way == GLOO:
        dist.init_process_group("gloo")
    elif way == NOTHING:
        # Results are what was in memory before; numbers below the normal range would slow the passes down.
        torch.set_flush_denormal(True)
        ranks = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("fake", store=FakeStore(), rank=int(os.environ["RANK"]), world_size=ranks)
    else:
        pipeline: list[dict[str, Any]] = [{"compress": {}}, {"select": {}}, {"dispatch": {"timeout": "60s"}}]
        backends = ["gloo"]
        if way.startswith("in steps"):
            kinds, local = ["all_gather", "reduce_scatter"], {"backend": "msccl"}
            pipeline.insert(0, {"hierarchical": {"kinds": kinds, "local": local}})
            backends.append("msccl")
        dist.init_process_group("mcr", pg_options={"version": 1, "backends": backends, "pipeline": pipeline})
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape, windows = Shape(**settings["sizes"]), settings["windows"]
    corpus = read_corpus(None, shape.sequence, seed)
    alone = computing(corpus, LanguageModel(shape, seed), rank, windows)
    model = LanguageModel(shape, seed)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, settings["dtype"]), reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    layers: list[Any] = [model, *model.blocks]
    for module, following in pairwise(layers):
        module.set_modules_to_forward_prefetch([following])
    if way not in (GLOO, NOTHING):
        mcr.fsdp(model, **WAYS[way])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], fused=True)
    took, sent, processor = torch.empty(steps), torch.empty(steps), torch.empty(steps)
    for step in range(steps):
        began, before, spent = perf_counter(), sent_bytes(within=False), process_time()
        optimizer.zero_grad()
        model(corpus.windows(step, rank, windows)).text.backward()
        optimizer.step()
        took[step], sent[step] = perf_counter() - began, sent_bytes(within=False) - before
        processor[step] = process_time() - spent
    with torch.no_grad():
        losses = [model(batch).text.item() for batch in corpus.held_out(rank, ranks, windows, HELD_OUT)]
    loss = torch.tensor([mean(losses)])
    dist.all_reduce(loss)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    if way == GLOO:
        # torch 2.13's gloo may abort the process when FSDP's groups are destroyed (pytorch#190489).
        atexit.register(os._exit, 0)
    else:
        dist.destroy_process_group()
    counted = slice(steps // 5, None)  # of the first ones, libraries prepare themselves
    found = {
        "ms": 1e3 * median(took[counted].tolist()),
        "sent": mean(sent[counted].tolist()),
        "loss": loss.item() / ranks,
        "processor": 1e3 * median(processor[counted].tolist()),
        "alone": 1e3 * alone,
    }
    return found if rank == 0 else None


def computing(corpus: Corpus, model: LanguageModel, rank: int, windows: int) -> float:
    """Seconds of processor time of a step without communication: passes, and AdamW on half of the model."""
    half = [
        torch.nn.Parameter(param.detach().flatten()[param.numel() // 2 :].clone())
        for param in model.parameters()
    ]
    for param in half:
        param.grad = torch.full_like(param, 1e-3)
    optimizer = torch.optim.AdamW(half, lr=1e-6, fused=True)
    dist.barrier()
    times = []
    for step in range(ALONE):
        began = process_time()
        model.zero_grad()
        model(corpus.windows(step, rank, windows)).text.backward()
        optimizer.step()
        times.append(process_time() - began)
    return median(times[ALONE // 5 :])


HEAD: Final = [
    "way",
    "step, ms",
    "gloo / this",
    "MB sent in a step",
    "wire, ms",
    "processor, ms",
    "alone, ms",
    "processor + wire, ms",
    "gloo / this",
    "gloo / (alone + wire)",
    "loss",
    "loss / gloo's",
]


def rows(found: dict[str, list[dict[str, Any]]], rate: str) -> list[list[str]]:
    """A row for every way; ratios to gloo are of one seed, the median of them."""
    rows = []
    alone = min(each["alone"] for runs in found.values() for each in runs)
    plain = _without_overlap(found[GLOO], rate)
    for way, runs in found.items():
        pairs = list(zip(runs, found[GLOO], strict=True))
        sent = median(each["sent"] for each in runs)
        wire = 8e3 * sent / bits_per_second(rate)
        whole = _without_overlap(runs, rate)
        more = mean(each["loss"] / other["loss"] - 1 for each, other in pairs)
        loss = f"{mean(each['loss'] for each in runs):.3f}"
        losses = ["–", "–"] if way == NOTHING else [loss, f"{100 * more:+.2f} %"]
        rows.append(
            [
                way,
                " ".join(f"{each['ms']:.0f}" for each in runs),
                f"{median(other['ms'] / each['ms'] for each, other in pairs):.2f}",
                f"{sent / 1e6:.2f}",
                f"{wire:.0f}",
                f"{median(each['processor'] for each in runs):.0f}",
                f"{alone:.0f}",
                f"{whole:.0f}",
                f"{plain / whole:.2f}",
                f"{plain / (alone + wire):.2f}",
                *losses,
            ]
        )
    return rows


def _without_overlap(runs: Sequence[Mapping[str, float]], rate: str) -> float:
    """Milliseconds of processor and wire of a step, one after the other."""
    return median(each["processor"] + 8e3 * each["sent"] / bits_per_second(rate) for each in runs)


@harness.program
def main(
    rate: Rate = "1gbit",
    steps: Annotated[int, typer.Option(min=10, help="Steps of each way and seed.")] = 200,
    seeds: Annotated[int, typer.Option(min=1, help="Models and orders of the text.")] = 2,
    hidden: Annotated[int, typer.Option(min=4, help="Width of the model.")] = Shape().hidden,
    sequence: Annotated[int, typer.Option(min=1, help="Bytes of a window.")] = Shape().sequence,
    windows: Annotated[
        int, typer.Option(min=1, help="Of a rank in a step: few, so that the link counts.")
    ] = 2,
    lr: Annotated[float, typer.Option(min=0.0, help="Of AdamW.")] = 1e-3,
    dtype: Annotated[str, typer.Option(help="Of gathered parameters and of computing.")] = "float32",
    ways: Annotated[str, typer.Option(help="Separated by semicolons.")] = ";".join(USUAL),
    per_host: Annotated[int, typer.Option(min=1, help="Ranks on each host.")] = 1,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    need_hosts(mpi=False)
    names = harness.chosen(ways.split(";"), WAYS, "way")
    if GLOO not in names:
        names.insert(0, GLOO)
    sizes = {"hidden": hidden, "sequence": sequence}
    settings = {"sizes": sizes, "windows": windows, "lr": lr, "dtype": dtype}
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        for way in names:
            answer = on_hosts(TWO, rate, trained, way, steps, seed, settings, per_host=per_host)
            found.setdefault(way, []).append(answer)
            print(f"{way}  seed {seed}  {found[way][-1]['ms']:.0f} ms", flush=True)
    table = rows(found, rate)
    harness.show(HEAD, table)
    text = harness.page(
        f"FSDP2 over a link of {rate}, two hosts",
        harness.command(),
        f"examples/gpt with {hidden} channels, {windows} windows of {sequence} bytes per rank, {dtype}, "
        f"AdamW at {lr:g}, {steps} steps of {seeds} seeds, ranks on each host: {per_host}; "
        "codecs of parameters, of gradients; a time is the median step of the slower rank",
        harness.markdown(HEAD, table),
    )
    harness.write(text, output, f"fsdp_{hardware}-two-hosts")


if __name__ == "__main__":
    main()
