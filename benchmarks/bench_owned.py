"""Muon on an FSDP2 model: whole matrices on one owner each, beside gathers of every gradient on every rank.

    python benchmarks/bench_owned.py --ranks 4 --hidden 256 --layers 4
    python benchmarks/bench_owned.py --busy 2                            # beside two busy processes
    python benchmarks/bench_owned.py --hosts 2 --rate 1gbit              # bytes between two hosts, too

The transformer of examples/gpt is sharded by `fully_shard`, block by block; its matrices are trained by
`torch.optim.Muon`, the rest by AdamW on shards. Ways, each with a model of its own, in turns in one job:

- "full_tensor, gloo" and "full_tensor, mcr": every rank gathers every gradient by `full_tensor()`, updates
  every matrix, and keeps its shard of the result, as programs without owners do; FSDP2 over torch's gloo or
  over mcr_plus.
- "owned": `mcr.owned(model).optimizer(torch.optim.Muon)`; "owned, overlapped": with `mcr.fsdp(owned=)`.

A step is forward pass, backward pass and optimizers, on the slowest rank. "Optimizer": the same of the step
of Muon alone. Bytes are those that leave the hosts' interfaces.
All ways train on the same text; "difference" is the largest of any parameter from one process that adds up
the ranks' gradients in float64. The report goes to benchmarks/results/owned_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import sys
from math import prod
from statistics import median
from time import perf_counter
from typing import Annotated, Any, Final

import harness
import torch
import torch.distributed as dist
import typer
from bench_beside import busy
from bench_replay import on_hosts
from bench_scaling import TWO
from harness import HARDWARE, ROOT, Dated, Hardware, Rate
from hosts import need_hosts
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import mcr_plus as mcr

sys.path += [str(ROOT / "examples" / name) for name in ("gpt", "common")]
from corpus import read_corpus
from outer_steps import sent_bytes
from transformer import LanguageModel, Shape

WAYS: Final = ("full_tensor, gloo", "full_tensor, mcr", "owned", "owned, overlapped")
LR: Final = 2e-3


class FullTensors(torch.optim.Optimizer):
    """Muon that gathers every gradient on every rank."""

    def __init__(self, parameters: list[Any]) -> None:
        super().__init__(parameters, {})
        self.sharded: list[Any] = parameters
        self.whole = [torch.nn.Parameter(each.full_tensor().detach()) for each in self.sharded]
        self.muon = torch.optim.Muon(self.whole, lr=LR)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        for each, whole in zip(self.sharded, self.whole, strict=True):
            whole.grad = each.grad.full_tensor()
        self.muon.step()
        for each, whole in zip(self.sharded, self.whole, strict=True):
            part = distribute_tensor(whole.detach(), each.device_mesh, each.placements, src_data_rank=None)
            each._local_tensor.copy_(part._local_tensor)


class Trained:
    """A model that is trained in one of the ways."""

    def __init__(self, way: str, shape: Shape, mesh: DeviceMesh, memory: str | None) -> None:
        self.model = LanguageModel(shape, 0)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.owned = None
        if way.startswith("full"):
            if way.endswith("mcr"):
                mcr.fsdp(self.model, tag=way)
            matrices = mcr.owned(self.model).matrices
            inside = {id(each.parameter) for each in matrices}
            self.muon: torch.optim.Optimizer = FullTensors([each.parameter for each in matrices])
            others: Any = [each for each in self.model.parameters() if id(each) not in inside]
        else:
            self.owned = mcr.owned(self.model, memory=memory)
            self.muon = self.owned.optimizer(torch.optim.Muon, lr=LR)
            mcr.fsdp(self.model, owned=self.owned if way.endswith("overlapped") else None, tag=way)
            others = self.owned.others
        self.others = torch.optim.AdamW(list(others), lr=LR, fused=True)

    def step(self, batch: Any) -> tuple[float, float]:
        """Return the seconds of a step, and those of Muon's in it."""
        began = perf_counter()
        self.model(batch).text.backward()
        before = perf_counter()
        self.muon.step()
        after = perf_counter()
        self.others.step()
        self.muon.zero_grad()
        self.others.zero_grad()
        return perf_counter() - began, after - before


def trained(
    sizes: dict[str, int], windows: int, steps: int, memory: str | None, per_host: int
) -> dict[str, Any] | None:
    """On ranks: milliseconds by way, bytes and differences. `per_host`: 0 on one host."""
    torch.set_num_threads(1)
    config: Any = {"version": 1, "numerics": {"sums": "exact"}}
    dist.init_process_group("mcr", pg_options=config)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    of_gloo: Any = dist.new_group(backend="gloo")
    gloo = DeviceMesh.from_group(of_gloo, "cpu")
    mesh = init_device_mesh("cpu", (ranks,))
    shape = Shape(**sizes)
    corpus = read_corpus(None, shape.sequence, 0)
    models = {way: Trained(way, shape, gloo if way.endswith("gloo") else mesh, memory) for way in WAYS}
    took: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for step in range(steps):
        for way, each in models.items():
            dist.barrier()
            took[way].append(each.step(corpus.windows(step, rank, windows)))
    answer: dict[str, Any] = {}
    for way, times in took.items():
        slowest = torch.tensor(times[steps // 5 :], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        answer[way] = [1e3 * median(column.tolist()) for column in slowest.T]
    owned = models["owned"].owned
    assert owned is not None
    found = differences(models, owned, shape, corpus, windows, steps, ranks)
    for way in WAYS:
        answer[way].append(found[way])
    answer["owners"] = owned.describe()
    if per_host:
        answer["bytes"] = moved(models["owned"], owned, corpus.windows(0, rank, windows), per_host)
    dist.destroy_process_group()
    return answer if rank == 0 else None


def moved(trained: Trained, owned: Any, batch: Any, per_host: int) -> list[int]:
    """Return the bytes that leave hosts in a step of the optimizer, and the least with these owners."""
    trained.model(batch).text.backward()
    dist.barrier()
    before = sent_bytes(within=False)
    trained.muon.step()
    dist.barrier()
    sent = torch.tensor((sent_bytes(within=False) - before) // per_host)
    dist.all_reduce(sent)
    least = 0
    for each in owned.matrices:
        for rank in each.layout.ranks:
            if rank // per_host != each.owner // per_host:
                # A part of the gradient to the owner, and the same part of the weights back.
                least += 2 * each.parameter.itemsize * prod(each.layout.local_shape(rank))
    return [int(sent), least]


def differences(
    models: dict[str, Trained], owned: Any, shape: Shape, corpus: Any, windows: int, steps: int, ranks: int
) -> dict[str, float]:
    """Largest difference of each way from one process, on the first steps that this rank repeats."""
    ours = LanguageModel(shape, 0)
    matrices = {each.name for each in owned.matrices}
    named = dict(ours.named_parameters())
    muon = torch.optim.Muon([named[name] for name in matrices], lr=LR)
    adam = torch.optim.AdamW(
        [each for name, each in named.items() if name not in matrices], lr=LR, fused=True
    )
    for step in range(steps):
        sums = {name: torch.zeros_like(each, dtype=torch.float64) for name, each in named.items()}
        for rank in range(ranks):
            ours.zero_grad()
            ours(corpus.windows(step, rank, windows)).text.backward()
            for name, each in named.items():
                assert each.grad is not None
                sums[name] += each.grad.double()
        for name, each in named.items():
            each.grad = sums[name].float() / ranks
        muon.step()
        adam.step()
    return {
        way: max(
            float((each.full_tensor() - named[name]).detach().abs().max())
            for name, each in trained.model.named_parameters()
            if isinstance(each, DTensor)
        )
        for way, trained in models.items()
    }


HEAD: Final = [
    "way",
    "step, ms",
    "full_tensor, gloo / this",
    "optimizer, ms",
    "full_tensor, gloo / this",
    "difference",
]


@harness.program
def main(
    ranks: Annotated[int, typer.Option(min=2, help="Half of them on each host, if there are two.")] = 4,
    hosts: Annotated[int, typer.Option(min=1, max=2)] = 1,
    rate: Rate = "1gbit",
    hidden: Annotated[int, typer.Option(min=4, help="Width of the model.")] = Shape().hidden,
    layers: Annotated[int, typer.Option(min=1)] = Shape().layers,
    sequence: Annotated[int, typer.Option(min=1, help="Bytes of a window.")] = 64,
    windows: Annotated[int, typer.Option(min=1, help="Of a rank in a step.")] = 2,
    steps: Annotated[int, typer.Option(min=5)] = 40,
    memory: Annotated[str, typer.Option(help="Of `mcr.owned`.")] = "256MiB",
    busy_processes: Annotated[int, typer.Option("--busy", min=0, help="So many beside the job.")] = 0,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    """Compare the ways, on one host or two."""
    sizes = {"hidden": hidden, "layers": layers, "sequence": sequence}
    arguments: list[Any] = [sizes, windows, steps, memory]
    with busy(busy_processes):
        if hosts == 1:
            found = harness.on_ranks(harness.here(ranks), trained, *arguments, 0)
        else:
            need_hosts(mpi=False)
            found = on_hosts(TWO, rate, trained, *arguments, ranks // 2, per_host=ranks // 2)
    base = found[WAYS[0]]
    table = [
        [way, f"{step:.0f}", f"{base[0] / step:.2f}", f"{muon:.1f}", f"{base[1] / muon:.2f}", f"{far:.1e}"]
        for way, (step, muon, far) in ((way, found[way]) for way in WAYS)
    ]
    harness.show(HEAD, table)
    lines = [found["owners"]]
    where = "one host" if hosts == 1 else f"two hosts, {rate}"
    if "bytes" in found:
        sent, least = found["bytes"]
        lines.append(
            f"{sent:,} bytes leave hosts in a step of the optimizer, {sent / least:.3f} of the least with "
            "headers"
        )
    print(*lines, sep="\n")
    text = harness.page(
        f"Muon on FSDP2, {ranks} ranks",
        harness.command(),
        f"examples/gpt with {hidden} channels and {layers} layers, {windows} windows of {sequence} bytes per "
        f"rank; {where}; medians of {steps} steps, beside {busy_processes} busy processes",
        harness.markdown(HEAD, table),
        "\n".join(["```", *lines, "```"]),
    )
    harness.write(text, output, f"owned_{hardware}" + ("-two-hosts" if hosts == 2 else ""))


if __name__ == "__main__":
    main()
