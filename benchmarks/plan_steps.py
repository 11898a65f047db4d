"""Models for the benchmarks of plans, what they are measured by, and torch's own engines beside them."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from subprocess import DEVNULL
from typing import Any, Final, NamedTuple

import harness
import torch
from harness import MCR_PLUS, ROOT, Launch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from two_hosts import TwoHosts

import mcr_plus as mcr
from mcr_plus.bucketing.live_bytes import LiveBytes
from mcr_plus.bucketing.scaling import ClusterCosts, from_table
from mcr_plus.bucketing.topology import Topology
from mcr_plus.core.environment import cores
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.foretell import foretell
from mcr_plus.plans.language import ModelPlan
from mcr_plus.plans.memory import memory_of
from mcr_plus.plans.proof import ProvedPlan
from mcr_plus.plans.run import ParallelModel, parallelize
from mcr_plus.plans.whole import WholeModel, rows_of, tensors_in
from mcr_plus.tables.table import load_table

sys.path += [str(ROOT / "examples" / folder) for folder in ("common", "moe", "dlrm", "plans")]
from corpus import VOCABULARY
from criteo import DENSE, SPARSE
from experts import ExpertShape
from model import ModelConfig
from plan_models import ExpertChain, TablesChain
from transformer import LanguageModel, Losses, Shape

KINDS: Final = "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,send"
MICRO_BATCHES: Final = (4, 8)  # of torch's pipelines
ALONE: Final = "computation alone"


# --- models ---------------------------------------------------------------------------------------------


class Workload(NamedTuple):
    """A model, its loss, a batch, and the modules that FSDP2 shards apart from each other.

    `chain`: the model as modules of which each has the output of the one before, for torch's pipelines.
    """

    model: Callable[[], Any]
    loss: Callable[..., Tensor] | None
    batch: Any
    layers: Callable[[Any], Sequence[nn.Module]]
    chain: Callable[[Any], Sequence[nn.Module]] | None = None


class _Begin(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.bytes, self.positions = model.bytes, getattr(model, "positions", None)

    def forward(self, windows: Tensor) -> Tensor:
        x = self.bytes(windows[:, :-1])
        if self.positions is None:
            return functional.pad(x, (0, 1))
        placed: Tensor = x + self.positions.weight[: x.shape[1]]
        return placed


class _OneOutput(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.block(x).output
        return output


class _Logits(nn.Module):
    """Logits, and a penalty as in `ExpertChain`."""

    def __init__(self, norm: nn.Module, weight: Tensor) -> None:
        super().__init__()
        self.norm, self.weight = norm, nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        text, penalty = x.tensor_split([self.weight.shape[1]], dim=-1)
        return torch.cat([functional.linear(self.norm(text), self.weight), penalty], dim=-1)


def text(losses: Losses) -> Tensor:
    """The loss of the transformer."""
    return losses.text


def windows(rows: int, sequence: int, words: int = VOCABULARY) -> Tensor:
    """Random text."""
    return torch.randint(words, (rows, sequence + 1), generator=torch.Generator().manual_seed(1))


def transformer(shape: Shape) -> LanguageModel:
    """The transformer of the examples, as plans want it."""
    made = LanguageModel(shape, 0)
    made.bytes.weight.mcr_shared = True  # type: ignore[attr-defined]
    return made


def gpt() -> Workload:
    shape = Shape(layers=6, hidden=192, heads=4, sequence=96)
    return Workload(
        partial(transformer, shape), text, windows(16, shape.sequence), lambda model: model.blocks,
        lambda model: [
            _Begin(model), *map(_OneOutput, model.blocks), _Logits(model.norm, model.bytes.weight)
        ],
    )  # fmt: skip


def moe() -> Workload:
    shape = ExpertShape(layers=6, hidden=128, heads=4, sequence=96, experts=4, top_k=1)
    return Workload(
        partial(ExpertChain, shape, 0), None, windows(16, shape.sequence), lambda model: model.blocks,
        lambda model: [_Begin(model), *model.blocks, _Logits(model.loss.norm, model.loss.head.weight)],
    )  # fmt: skip


def dlrm() -> Workload:
    rows, config = 2048, ModelConfig(table_rows=2000)
    random = torch.Generator().manual_seed(1)
    dense = torch.rand(rows, DENSE, generator=random)
    sparse = torch.randint(config.table_rows, (rows, SPARSE), generator=random)
    labels = torch.rand(rows, generator=random).round()
    return Workload(
        partial(TablesChain, config), functional.binary_cross_entropy_with_logits, ((dense, sparse), labels),
        lambda model: [model.bottom, model.tables, model.top],
    )  # fmt: skip


WORKLOADS: Final[dict[str, Callable[[], Workload]]] = {each.__name__: each for each in (gpt, moe, dlrm)}


def profiled(work: Workload) -> Profile:
    """The profile of a model on rank 0, measured on all ranks at once. Collective."""
    model = work.model()
    own = mcr.profile(model, work.batch, optimizer=torch.optim.AdamW(model.parameters()), loss=work.loss)
    return Profile.model_validate_json(mcr.broadcast_object(own.model_dump_json(), 0))


# --- costs ----------------------------------------------------------------------------------------------


def tuned(target: Path, ranks: int, hosts: TwoHosts | None, budget: str) -> None:
    """Write a tuning table of these ranks, and of pairs of them."""
    starts: list[Callable[[list[str]], object]]
    words = [*MCR_PLUS, "tune", "--kinds", KINDS, "--min", "1KiB", "--max", "16MiB", "--budget", budget]
    if hosts is None:
        lines = [["-n", str(count)] for count in sorted({ranks, 2})]
        starts = [harness.run for _ in lines]
    else:  # all, and pairs: a rank on each host, both on one
        places = [(ranks // 2, None), (1, None), (2, 2)][: 1 if ranks == 2 else 3]
        starts = [partial(hosts.mpirun, per_host=each, ranks=some, stdout=DEVNULL) for each, some in places]
        lines = [[] for _ in starts]
    parts = [target.with_suffix(f".{number}.yaml") for number in range(len(starts))]
    for start, line, part in zip(starts, lines, parts, strict=True):
        start([*words, *line, "-o", str(part)])
    harness.run([*MCR_PLUS, "table", "merge", "-o", str(target), *map(str, parts)])


def launcher(ranks: int, hosts: TwoHosts | None) -> Launch:
    """Starts programs as so many ranks, on this host or on both."""
    return harness.here(ranks) if hosts is None else harness.on_both(hosts, per_host=ranks // 2)


def pipeline(table: str) -> dict[str, Any]:
    """The configuration by which operations take the library that a table has found to be the fastest."""
    return {"version": 1, "pipeline": [{"select": {"table": table}}, {"dispatch": {}}]}


def costs_of(table: str, ranks: int, hosts: int, rate: str | None) -> ClusterCosts:
    """What operations cost on these hosts; on one of their ranks."""
    cluster: dict[str, Any] = {"nodes": hosts, "ranks_per_node": ranks // hosts, "cores": cores()}
    if hosts > 1 and rate is not None:
        cluster["links"] = {"nic": {"rate": rate.replace("gbit", "Gbit/s").replace("mbit", "Mbit/s")}}
    return ClusterCosts(list(from_table(load_table(table))), Topology.of(cluster))


# --- steps ----------------------------------------------------------------------------------------------


class PlanFigures(NamedTuple):
    """Seconds of a step of a plan, and bytes of the fullest rank: `foretold` and `said`, and measured."""

    name: str
    foretold: float
    seconds: list[float]
    said: int
    peak: int


def built(work: Workload, plan: ModelPlan | ProvedPlan) -> ParallelModel:
    """A plan's model, which has run a step."""
    part = work.model()
    job = parallelize(part, torch.optim.AdamW(part.parameters()), plan, loss=work.loss)
    job.step(work.batch)
    return job


def measured(
    work: Workload, plans: Mapping[str, ModelPlan | ProvedPlan], costs: ClusterCosts, rounds: int,
    peers: Callable[[], Mapping[str, Callable[[], object]]] = dict,
) -> tuple[list[PlanFigures], dict[str, list[float]]]:  # fmt: skip
    """Figures of plans, and seconds of other steps that take turns with them. Collective."""
    jobs = {name: built(work, plan) for name, plan in plans.items()}
    others = peers()
    for step in others.values():
        step()  # which sets it up
    times = in_turns(
        {name: partial(job.step, work.batch) for name, job in jobs.items()} | dict(others), rounds
    )
    return figures(work, jobs, times, costs), {name: times[name] for name in others}


def in_turns(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of steps on the slowest rank."""

    def timed(step: Callable[[], object]) -> float:
        mcr.barrier()
        begin = time.perf_counter()
        step()
        return float(max(mcr.all_gather_object(time.perf_counter() - begin)))

    return harness.in_turns(steps, rounds, timed)


def figures(
    work: Workload, jobs: Mapping[str, ParallelModel], times: Mapping[str, list[float]], costs: ClusterCosts
) -> list[PlanFigures]:
    """Figures of jobs whose steps have been timed. Collective."""
    found = []
    for name, job in jobs.items():
        with LiveBytes() as live:
            live.add(work.batch)
            batch = live.now
            live.add([*job.parameters().values(), *(bucket.gradients for bucket in job.buckets)])
            live.add([bucket.shard for bucket in job.buckets if bucket.held != "whole"])
            job.step(work.batch)
        peaks = mcr.all_gather_object(live.peak - batch)
        uses = [memory_of(job.proved, rank) for rank in range(job.plan.ranks)]
        # No optimizer has made a step, so that it has no state yet.
        said = [use.peak - use.optimizer for use in uses]
        step = foretell(job.proved, costs).step_s
        found.append(PlanFigures(name, step, times[name], max(said), max(peaks)))
    return found


def row_of(each: PlanFigures) -> tuple[str, ...]:
    """A line of a table under `HEAD`."""
    seen = median(each.seconds)
    return (
        each.name, f"{1e3 * each.foretold:.0f}", f"{1e3 * seen:.0f}", f"{1e3 * min(each.seconds):.0f}",
        f"{each.foretold / seen:.2f}", f"{each.said / 2**20:.1f}", f"{each.peak / 2**20:.1f}",
        f"{each.said / each.peak:.2f}",
    )  # fmt: skip


HEAD: Final = (
    "way",
    "foretold ms",
    "median ms",
    "least ms",
    "ratio",
    "foretold MiB",
    "measured MiB",
    "ratio",
)


def alone(work: Workload, wrap: Callable[[nn.Module], Any] = lambda whole: whole) -> Callable[[], object]:
    """Passes of a rank's rows; `wrap` adds the communication."""
    ranks, items = mcr.get_world_size(), len(tensors_in(work.batch)[0])
    edges = [items * number // ranks for number in range(ranks + 1)]
    begin, end = edges[mcr.get_rank() :][:2]
    return _passes(WholeModel(work.model(), work.loss), rows_of(work.batch, items, begin, end), wrap)


def alone_seconds(profile: Profile, ranks: int, topology: Topology) -> float:
    """Seconds of `alone` by a profile."""
    fixed = sum(block.forward_fixed + block.backward_fixed for block in profile.blocks)
    whole = sum(block.forward + block.backward for block in profile.blocks)
    turns = max(ranks / topology.nodes / (topology.cores or math.inf), 1.0)
    return turns * (fixed + (whole - fixed) / ranks)


# --- what torch offers ----------------------------------------------------------------------------------


def torch_steps(
    comm: mcr.Communicator, work: Workload, profile: Profile
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Steps by torch's engines, over gloo with default settings."""
    ranks = comm.size
    yield "torch DDP", alone(work, DistributedDataParallel)
    mesh = init_device_mesh("cpu", (ranks,))
    yield "torch FSDP2", alone(work, partial(_sharded, mesh, work))
    if (cut := _tensor_parallel(work.model(), ranks, mesh)) is not None:
        yield "torch DTensor TP", _passes(WholeModel(cut, work.loss), work.batch)
    if work.chain is not None:
        stages = ModelPlan(profile, ranks).stages(ranks)
        for count in MICRO_BATCHES:
            for schedule in (Schedule1F1B, ScheduleGPipe):
                part = nn.Sequential(*(work.chain(work.model())[block] for block in stages[comm.rank]))
                yield (
                    f"torch {schedule.__name__.removeprefix('Schedule')}, {count} micro-batches",
                    _pipeline(comm, part, work, schedule, count),
                )


def _passes(
    whole: WholeModel, batch: Any, wrap: Callable[[nn.Module], Any] = lambda whole: whole
) -> Callable[[], object]:
    wrapped = wrap(whole)

    def step() -> None:
        whole.take(batch)
        wrapped.zero_grad()
        wrapped().backward()

    return step


def _sharded(mesh: Any, work: Workload, whole: nn.Module) -> Any:
    for layer in work.layers(whole.model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(whole, mesh=mesh)


def _tensor_parallel(model: Any, ranks: int, mesh: Any) -> nn.Module | None:
    """Megatron's cuts of attention and MLPs, without a change of what the forward passes compute in."""
    cuts: dict[str, Any] = {}
    for name, module in model.named_modules():
        if hasattr(module, "qkv"):
            module.heads //= ranks  # each rank has whole heads, as of weights in another order
            cuts |= {f"{name}.qkv": ColwiseParallel(), f"{name}.out": RowwiseParallel()}
        elif hasattr(module, "up"):
            cuts |= {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
        elif name in ("bottom", "top"):
            linears = [number for number, layer in enumerate(module) if isinstance(layer, nn.Linear)]
            for first, second in zip(linears[::2], linears[1::2], strict=False):
                cuts |= {f"{name}.{first}": ColwiseParallel(), f"{name}.{second}": RowwiseParallel()}
    return parallelize_module(model, mesh, cuts)


def _pipeline(
    comm: mcr.Communicator, part: nn.Module, work: Workload, schedule: Any, count: int
) -> Callable[[], object]:
    last = comm.size - 1
    stage = PipelineStage(part, comm.rank, comm.size, torch.device("cpu"))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        text = functional.cross_entropy(output[..., :VOCABULARY].flatten(0, 1), target.flatten())
        return text + output[..., VOCABULARY:].sum() / target.numel()

    run = schedule(stage, count, loss_fn=loss)
    batch = work.batch

    def step() -> None:
        part.zero_grad()
        losses: list[Tensor] = []
        target = {"target": batch[:, 1:], "losses": losses} if comm.rank == last else {}
        run.step(*([batch] if not comm.rank else []), **target)

    return step
