"""Train a transformer on some ranks, and serve it from others, which get new weights every few steps.

    mcr-plus run -n 4 examples/serve/train.py                ranks 0 and 1 train, ranks 2 and 3 write text
    mcr-plus run -n 4 examples/serve/train.py --compare      beside full_tensor and a broadcast
    mcr-plus run -n 3 examples/serve/train.py --servers 1

The ranks that train have the model by FSDP2 (`fully_shard`), the others by tensor parallel layers.
`serving.py` has their side, `../common` what examples share.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parent.parent / "common"))  # what the examples share

import command_line
import options
import torch
import typer
from corpus import Corpus, read_corpus
from libraries import JobError, McrTransport, share_the_cores
from reporting import Monitor, write_json
from rich.console import Console
from serving import Server, layout_of, share_of, whole_shapes
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformer import LanguageModel, Shape, read_shape

import mcr_plus as mcr
from mcr_plus.core.units import about
from mcr_plus.errors import McrError
from mcr_plus.layout.state import Redistribution

CLOSE = {torch.float32: 1e-4, torch.float64: 1e-9}  # largest difference of losses, relative
TAG = "weights"


@dataclass(frozen=True)
class Job:
    """What to train, on which ranks, and how often the others get it."""

    shape: Shape
    corpus: Corpus
    trainers: list[int]
    servers: list[int]
    batch: int
    steps: int
    every: int
    lr: float
    seed: int
    dtype: torch.dtype
    prompt: str
    length: int
    rounds: int  # of the comparison; 0: none

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of each parameter."""
        return whole_shapes(self.shape)

    @cached_property
    def held_out(self) -> Tensor:
        """Windows whose loss both sides compute."""
        return self.corpus.held_out(0, 1, self.batch, 1)[0]


@dataclass
class Found:
    """What a rank has seen: the loss of held-out text by update, seconds by step, and texts by update."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def specs(job: Job) -> dict[str, tuple[mcr.Layout, mcr.Layout]]:
    """Where each parameter lies on the ranks that train, as `fully_shard` cuts it, and where it is to lie."""
    return {
        name: (mcr.Layout.mesh(shape, job.trainers, ["S0"]), layout_of(name, shape, job.servers))
        for name, shape in job.shapes.items()
    }


# -- the ranks that train -----------------------------------------------------------------------------


class Trainer:
    """The model by FSDP2, and an update of the other ranks that may be in flight."""

    def __init__(self, job: Job, mesh: DeviceMesh) -> None:
        self.job = job
        self.model = LanguageModel(job.shape, job.seed).to(job.dtype)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=job.lr)
        self.update: mcr.Work | None = None

    @property
    def weights(self) -> dict[str, Tensor]:
        """This rank's shards, by the names of the parameters."""
        return {name: shard(parameter).to_local() for name, parameter in self.model.named_parameters()}

    def step(self, windows: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.model(windows).text
        loss.backward()
        self.finish()  # the optimizer changes what is being sent
        self.optimizer.step()
        return loss.item()

    def finish(self) -> None:
        """Wait for the update in flight."""
        if self.update is not None:
            self.update.wait()
            self.update = None

    @torch.no_grad()
    def loss(self, windows: Tensor) -> float:
        found: Tensor = self.model(windows).text
        self.model.reshard()  # type: ignore[operator] - which else only a backward pass does
        return found.item()


def shard(parameter: torch.nn.Parameter) -> DTensor:
    assert isinstance(parameter.data, DTensor)
    return parameter.data


def train(
    job: Job, _: mcr.Communicator, mesh: DeviceMesh, move: Redistribution, console: Console
) -> tuple[Trainer, Found]:
    """Train, and send the weights every few steps."""
    trainer, found = Trainer(job, mesh), Found()
    stream = job.trainers.index(mcr.get_rank())
    tokens = job.batch * job.shape.sequence * len(job.trainers)
    with Monitor(console, "train", "tokens") as observe:
        for step in range(job.steps):
            start = time.perf_counter()
            loss = trainer.step(job.corpus.windows(step, stream, job.batch))
            seconds = time.perf_counter() - start
            observe((step + 1) / job.steps, step + 1, loss, tokens / seconds)
            found.seconds.append(seconds)
            if (step + 1) % job.every == 0:
                trainer.update = move.start(trainer.weights)
                found.losses.append(trainer.loss(job.held_out))
        trainer.finish()
    return trainer, found


# -- the ranks that serve -----------------------------------------------------------------------------


def serve(
    job: Job, group: mcr.Communicator, _: DeviceMesh, move: Redistribution, console: Console
) -> tuple[Server, Found]:
    """Take the weights as they come, and write text with them."""
    server, found = Server(job.shape, group, job.dtype), Found()
    for step in range(job.every, job.steps + 1, job.every):
        move.start({}, server.weights).wait()  # started, as by the ranks that train
        found.losses.append(server.loss(job.held_out))
        found.texts.append(server.write(job.prompt, job.length, job.seed))
        line = " ".join(found.texts[-1].split())
        console.print(f"serve  step {step:4}  loss {found.losses[-1]:.4f}  {line}", soft_wrap=True)
    return server, found


# -- beside full tensors and a broadcast --------------------------------------------------------------


def compare(job: Job, side: Trainer | Server, move: Redistribution) -> dict[str, float]:
    """Median seconds of an update, on the slowest rank, by how it is sent: in turns."""
    seconds: dict[str, list[float]] = {"redistribution": [], "full_tensor + broadcast": []}
    for number in range(2 * job.rounds + 2):
        way = list(seconds)[(number + number // 2) % 2]  # a b b a …
        dist.barrier()
        start = time.perf_counter()
        if way == "redistribution":
            move(
                side.weights if isinstance(side, Trainer) else {},
                side.weights if isinstance(side, Server) else {},
            )
        else:
            _broadcast_all(job, side)
        slowest = max(mcr.all_gather_object(time.perf_counter() - start))
        if number > 1:  # the first of each is for what happens once
            seconds[way].append(slowest)
    return {way: median(values) for way, values in seconds.items()}


def _broadcast_all(job: Job, side: Trainer | Server) -> None:
    """Each parameter is gathered on the ranks that train, and broadcast; servers take their share."""
    if isinstance(side, Trainer):
        for parameter in side.model.parameters():
            dist.broadcast(shard(parameter).full_tensor(), 0)
        return
    number = job.servers.index(mcr.get_rank())
    for name, shape in job.shapes.items():
        whole = torch.empty(shape, dtype=job.dtype)
        dist.broadcast(whole, 0)
        share = share_of(name, whole, number, len(job.servers))
        side.weights[name].copy_(share.reshape_as(side.weights[name]))


# -- all ranks ----------------------------------------------------------------------------------------


def run(job: Job, console: Console) -> dict[str, Any]:
    """The job on this rank; returns the report for programs, the same on all ranks."""
    dist.init_process_group("mcr")  # its collectives, FSDP2's, are operations of the same job
    rank = mcr.get_rank()
    group, mesh = mcr.new_group(job.servers), DeviceMesh("cpu", job.trainers)
    move = mcr.redistribution(specs(job), tag=TAG)
    console.quiet = rank not in (job.trainers[0], job.servers[0])
    side, found = (train if rank in job.trainers else serve)(job, group, mesh, move, console)
    every = mcr.all_gather_object(found)
    seconds = compare(job, side, move) if job.rounds else {}
    dist.destroy_process_group()
    trained, served = every[job.trainers[0]], every[job.servers[0]]
    pairs = zip(trained.losses, served.losses, strict=True)
    size = job.dtype.itemsize
    needed = [each.received for each in move.plan.bounds()]
    return {
        "trainers": job.trainers,
        "servers": job.servers,
        "losses": {"trainers": trained.losses, "servers": served.losses},
        "difference": max(_difference(ours, theirs) for ours, theirs in pairs),
        "texts": served.texts,
        "step_seconds": median(trained.seconds),
        "weights_bytes": size * sum(math.prod(shape) for shape in job.shapes.values()),
        "needed_bytes": {str(each): size * sum(part.get(each, 0) for part in needed) for each in job.servers},
        "update_seconds": seconds,
    }


def _difference(ours: float, theirs: float) -> float:
    """Relative; infinite for losses that are none."""
    found = abs(ours / theirs - 1)
    return found if math.isfinite(found) else math.inf


def report(job: Job, result: dict[str, Any], console: Console) -> bool:
    """Print what came out; returns whether the servers had the weights of the trainers."""
    losses, close = result["losses"]["servers"], result["difference"] <= CLOSE[job.dtype]
    needed = ", ".join(about(each) for each in result["needed_bytes"].values())
    verdict = "as on the ranks that train" if close else "NOT as on the ranks that train"
    rows = {
        "held-out loss": f"{losses[0]:.4f} → {losses[-1]:.4f} on the ranks that serve, {len(losses)} updates",
        "check": f"{verdict}: these losses differ by {result['difference']:.1e} at most",
        "weights": f"{about(result['weights_bytes'])}, of which the ranks that serve need {needed}",
        "step": f"{result['step_seconds'] * 1e3:,.0f} ms in the median",
    }
    for way, seconds in result["update_seconds"].items():
        rows[f"update, {way}"] = f"{seconds * 1e3:,.1f} ms in the median of {job.rounds} in turns"
    width = max(map(len, rows)) + 3
    console.print()
    for name, text in rows.items():
        console.print(f"{name:{width}}{text}", soft_wrap=True)
    return close


def main(
    servers: Annotated[
        int | None, typer.Option(min=1, help="ranks that serve; half of all without it")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="steps between updates of the ranks that serve")] = 20,
    prompt: Annotated[str, typer.Option(help="what the ranks that serve continue")] = "The value of ",
    length: Annotated[int, typer.Option(min=1, help="bytes that they write each time")] = 60,
    compare: Annotated[bool, typer.Option("--compare", help="time full_tensor and broadcast too")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="of --compare")] = 10,
    data: options.Data = None,
    model: options.Model = None,
    layers: options.Layers = None,
    hidden: options.Hidden = None,
    heads: options.Heads = None,
    sequence: options.Sequence = None,
    batch: options.Batch = 8,
    steps: options.Steps = 100,
    lr: options.LearningRate = 2e-3,
    seed: options.Seed = 0,
    double: options.Double = False,
    config: Annotated[Path | None, typer.Option(help="pipeline; without one mcr_plus chooses")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the results; - is stdout")] = None,
) -> None:
    """Train on some ranks, serve from others, and say whether these had the same weights."""
    console = Console(stderr=json_path == Path("-"), highlight=False)
    given = {"layers": layers, "hidden": hidden, "heads": heads, "sequence": sequence}
    try:
        comms = McrTransport(config)
        share_the_cores(comms.world_size)
        trainers, serving = _sides(comms.world_size, servers)
        shape = read_shape(Shape, model, given)
        if shape.heads % len(serving):
            raise JobError(f"{shape.heads} heads do not divide by {len(serving)} ranks that serve")
        if steps < every:
            raise JobError(f"--steps {steps}: expected at least --every, {every}")
        job = Job(
            shape, read_corpus(data, shape.sequence, seed), trainers, serving, batch, steps, every, lr, seed,
            torch.float64 if double else torch.float32, prompt, length, rounds if compare else 0,
        )  # fmt: skip
        result = run(job, console)
        comms.close()
    except (JobError, McrError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    console.quiet = comms.rank != 0
    close = report(job, result, console)
    if json_path and comms.rank == 0:
        write_json(result, json_path)
    raise typer.Exit(int(not close))


def _sides(ranks: int, servers: int | None) -> tuple[list[int], list[int]]:
    """The ranks that train, and those that serve."""
    number = servers or max(1, ranks // 2)
    if number >= ranks:
        raise JobError(
            f"--servers {number}: expected at least one more rank, which trains; got {ranks} in all"
        )
    return list(range(ranks - number)), list(range(ranks - number, ranks))


if __name__ == "__main__":
    command_line.run(main)
