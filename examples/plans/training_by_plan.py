"""Train a model by a plan: chosen, named, or from a file; say what was foretold and what was measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import torch
import typer
from libraries import JobError
from torch import Tensor, nn

import mcr_plus as mcr
from mcr_plus.bucketing.scaling import ClusterCosts
from mcr_plus.bucketing.topology import Topology
from mcr_plus.core.units import about, parse_size
from mcr_plus.errors import InvalidArgument, McrError
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.codecs import CodecChoice, parse_codec
from mcr_plus.plans.foretell import cluster_costs, foretell
from mcr_plus.plans.language import ModelPlan
from mcr_plus.plans.links import measure_links
from mcr_plus.plans.memory import check_memory, memory_of
from mcr_plus.plans.named import NAMED, named
from mcr_plus.plans.picture import plan_page
from mcr_plus.plans.plan_file import SavedModelPlan, load_plan, plan_text, save_plan
from mcr_plus.plans.proof import ProvedPlan, prove
from mcr_plus.plans.search import search

PlanOption = Annotated[str, typer.Option("--plan", help=f"auto, FILE, or {', '.join(NAMED)}")]
Steps = Annotated[int, typer.Option(min=1)]
Batch = Annotated[int, typer.Option(min=1, help="items of a step, on all ranks together")]
Memory = Annotated[
    int | None, typer.Option(parser=parse_size, metavar="SIZE", help="most bytes of a rank, such as 200MiB")
]
Cluster = Annotated[
    Path | None,
    typer.Option("--topology", help="cluster.yaml; by default this host, or links measured between several"),
]
Codecs = Annotated[
    list[str] | None,
    typer.Option("--codec", help="of --plan auto between ranks, as bf16 or '{codec: topk, ratio: 0.1}'"),
]
Report = Annotated[Path | None, typer.Option(help="write a picture of the plan as HTML")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="write the plan, for --plan FILE")]
Json = Annotated[Path | None, typer.Option("--json", help="write the results")]


class Task(NamedTuple):
    """A model, its loss, and batches by step, equal on all ranks."""

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor] | None
    batch: Callable[[int], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]


def train(
    task: Task, plan: str, steps: int, memory: int | None, codecs: list[str] | None, topology: Path | None,
    report: Path | None, output: Path | None, results: Path | None,
) -> list[float]:  # fmt: skip
    """Return the losses of the steps, the same on all ranks."""
    torch.set_num_threads(1)
    with mcr.init() as comm:
        model = task.model()
        optimizer = task.optimizer(model.parameters())
        profile = _profile(task, model, optimizer)
        ranks = comm.size
        costs = cluster_costs(Topology.load(topology) if topology else _cluster(comm))
        proved = _proved(plan, profile, ranks, costs, memory, [parse_codec(each) for each in codecs or ()])
        parallel = mcr.parallelize(model, optimizer, proved, loss=task.loss)
        losses, seconds = [], []
        for step in range(steps):
            batch = task.batch(step)
            mcr.barrier()
            begin = perf_counter()
            losses.append(float(parallel.step(batch)))
            seconds.append(perf_counter() - begin)
            optimizer.step()
        measured = median(seconds[1:] or seconds)
        if comm.rank == 0:
            _report(proved, costs, losses, measured, report, output, results)
        return losses


def _profile(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> Profile:
    """Measure on all ranks at once, as they compute in a step, too; all have the profile of rank 0."""
    own = mcr.profile(model, task.batch(0), optimizer=optimizer, loss=task.loss)
    return Profile.model_validate_json(mcr.broadcast_object(own.model_dump_json(), 0))


def _cluster(comm: mcr.Communicator) -> Topology:
    if len(set(comm.hosts)) > 1:
        return measure_links()
    return Topology.of({"nodes": 1, "ranks_per_node": comm.size, "cores": os.cpu_count() or 1})


def _proved(
    plan: str, profile: Profile, ranks: int, costs: ClusterCosts, memory: int | None,
    codecs: list[CodecChoice],
) -> ProvedPlan:  # fmt: skip
    if plan == "auto":
        return prove(_searched(profile, ranks, costs, memory, codecs))
    is_name = plan in NAMED or "." not in plan
    proved = prove(named(plan, profile, ranks) if is_name else load_plan(plan, profile))
    if memory is not None:
        check_memory(proved, memory)
    return proved


def _searched(
    profile: Profile, ranks: int, costs: ClusterCosts, memory: int | None, codecs: list[CodecChoice]
) -> ModelPlan:
    """Search on rank 0; the others get the plan, or the error."""
    found: Any = None
    if mcr.get_rank() == 0:
        try:
            best = search(profile, ranks, costs, memory=memory, codecs=codecs).plans[0]
            print(f"found: {best.choice}")
            found = plan_text(best.plan.plan)
        except InvalidArgument as error:
            found = error
    found = mcr.broadcast_object(found, 0)
    if isinstance(found, InvalidArgument):
        raise found
    return SavedModelPlan.model_validate_json(found).plan(profile)


def _report(
    proved: ProvedPlan, costs: ClusterCosts, losses: list[float], measured: float, report: Path | None,
    output: Path | None, results: Path | None,
) -> None:  # fmt: skip
    plan = proved.plan
    foretold = foretell(proved, costs).step_s
    peak = max(memory_of(proved, rank).peak for rank in range(plan.ranks))
    print(
        f"plan {plan.name}: {len(plan.blocks)} blocks, {plan.micro_batches} micro-batches, {plan.ranks} ranks"
    )
    if plan.codecs:
        print(
            "codecs: "
            + ", ".join(
                f"{plan.blocks[t - 1].name if t else 'sums of gradients'}: {codec}"
                for t, codec in plan.codecs.items()
            )
        )
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps")
    print(f"passes of a step: foretold {1e3 * foretold:.1f} ms, measured {1e3 * measured:.1f} ms")
    print(f"memory of the fullest rank: foretold {about(peak)}")
    if report is not None:
        report.write_text(plan_page(proved, foretold))
    if output is not None:
        save_plan(plan, output)
    if results is not None:
        found = {
            "plan": plan.name,
            "losses": losses,
            "foretold_ms": 1e3 * foretold,
            "measured_ms": 1e3 * measured,
        }
        results.write_text(json.dumps({**found, "peak_bytes": peak}))


def start(task: Callable[[], Task], *arguments: Any) -> None:
    """Run `train`; report an error of the library or of the task in one line."""
    try:
        train(task(), *arguments)
    except (JobError, McrError) as error:
        if mcr.is_initialized() and mcr.get_rank():
            raise typer.Exit(1) from None
        raise typer.BadParameter(str(error)) from None
