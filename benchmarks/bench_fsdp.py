"""An FSDP2 model on two hosts: its steps and its loss with codecs of `mcr.fsdp`, beside gloo.

    python benchmarks/bench_fsdp.py --rate 1gbit --steps 300 --seeds 2

The transformer of examples/gpt is sharded by `fully_shard`, block by block, over two ranks on two hosts
(benchmarks/racks.py) with a link of the given rate. Each way trains the same model on the same text; the loss
is that of held-out windows at the end. Bytes are those of all_gathers of parameters and reduce_scatters of
gradients that a rank sends in a step, by the formulas of nccl-tests, encoded. The report goes to
benchmarks/results/fsdp_<hardware>-two-hosts_<yyyymm>.md.
"""

from __future__ import annotations

import atexit
import os
import sys
from statistics import mean, median
from time import perf_counter
from typing import Annotated, Any, Final

import harness
import torch
import torch.distributed as dist
import typer
from bench_replay import on_hosts
from bench_scaling import TWO
from harness import HARDWARE, ROOT, Dated, Hardware, Rate
from hosts import need_hosts
from torch.distributed.fsdp import fully_shard

import mcr_plus as mcr
from mcr_plus.api.record_table import communication

sys.path.insert(0, str(ROOT / "examples" / "common"))
from corpus import read_corpus
from transformer import LanguageModel, Shape

GLOO: Final = "torch's gloo"
INT4: Final = {"codec": "int4_block", "error_feedback": True}
WAYS: Final[dict[str, dict[str, Any]]] = {
    GLOO: {},
    "mcr_plus": {},
    "int8_block, int8_block": {"parameters": "int8_block", "gradients": "int8_block"},
    "int8_block, int4_block with error feedback": {"parameters": "int8_block", "gradients": INT4},
}
"""Codecs of parameters and of gradients, by the name of a way."""
HELD_OUT: Final = 16  # batches


def trained(way: str, steps: int, seed: int, sizes: dict[str, int], windows: int) -> dict[str, Any] | None:
    """On ranks: milliseconds of steps on the slowest rank, bytes sent in one, and the loss at the end.

    `sizes`: of the model's `Shape`; `windows`: of text, on each rank in a step.
    """
    torch.set_num_threads(1)
    if way == GLOO:
        dist.init_process_group("gloo")
    else:
        pipeline: list[dict[str, Any]] = [{"compress": {}}, {"select": {}}, {"dispatch": {"timeout": "60s"}}]
        dist.init_process_group("mcr", pg_options={"version": 1, "backends": ["gloo"], "pipeline": pipeline})
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape = Shape(**sizes)
    corpus = read_corpus(None, shape.sequence, seed)
    model = LanguageModel(shape, seed)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if WAYS[way]:
        mcr.fsdp(model, **WAYS[way])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    took = torch.empty(steps)

    def train(step: int) -> None:
        began = perf_counter()
        optimizer.zero_grad()
        model(corpus.windows(step, rank, windows)).text.backward()
        optimizer.step()
        took[step] = perf_counter() - began

    for step in range(steps - 1):
        train(step)
    sent = 0
    if way == GLOO:
        train(steps - 1)
    else:
        with mcr.record() as log:
            train(steps - 1)
        sent = sum(row.wire for row in communication(log.records, log.seconds))
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
    found = {"ms": 1e3 * median(took[steps // 5 :].tolist()), "loss": loss.item() / ranks, "sent": sent}
    return found if rank == 0 else None


def rows(found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """A row for every way; ratios are of one seed, the median of them."""
    rows = []
    for way, runs in found.items():
        pairs = list(zip(runs, found[GLOO], strict=True))
        sent = runs[0]["sent"]
        rows.append(
            [
                way,
                f"{median(each['ms'] for each in runs):.0f}",
                f"{median(other['ms'] / each['ms'] for each, other in pairs):.2f}",
                f"{sent / 1e6:.1f}" if sent else "",
                f"{mean(each['loss'] for each in runs):.3f}",
                f"{100 * mean(each['loss'] / other['loss'] - 1 for each, other in pairs):+.2f} %",
            ]
        )
    return rows


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
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    need_hosts(mpi=False)
    sizes = {"hidden": hidden, "sequence": sequence}
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        for way in WAYS:
            found.setdefault(way, []).append(on_hosts(TWO, rate, trained, way, steps, seed, sizes, windows))
    head = ["way", "step, ms", "gloo / this", "MB sent in a step", "loss", "loss / gloo's"]
    table = rows(found)
    harness.show(head, table)
    text = harness.page(
        f"FSDP2 over a link of {rate}, two hosts",
        harness.command(),
        f"examples/gpt with {hidden} channels, {windows} windows of {sequence} bytes per rank, "
        f"{steps} steps of {seeds} seeds; codecs of parameters, of gradients; "
        "a time is the median step of the slower rank",
        harness.markdown(head, table),
    )
    harness.write(text, output, f"fsdp_{hardware}-two-hosts")


if __name__ == "__main__":
    main()
