"""`mcr-plus simulate`: run a program on a cluster that is not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mcr_plus.cli.output import print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcr_plus.bucketing.scaling import ClusterCosts
    from mcr_plus.simulate.foretell import ForetoldJob

_MOST: Final = 6  # ranges of ranks in a text


def simulate(
    script: Annotated[Path, typer.Argument(help="A Python program of torch.distributed or mcr_plus.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Number of ranks.")] = ...,  # type: ignore[assignment]  # required
    topology: Annotated[Path, typer.Option(help="cluster.yaml: nodes and links.")] = ...,  # type: ignore[assignment]
    config: Annotated[
        Path | None, typer.Option("--config", help="Pipeline YAML of the ranks; its table has costs.")
    ] = None,
    measured_on: Annotated[
        Path | None, typer.Option(help="cluster.yaml of the table's cluster, if it differs.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, help="Optimizer steps after which a rank ends; 0: all of the program.")
    ] = 4,
    runs: Annotated[int, typer.Option(min=1, help="About how many ranks to run.")] = 64,
    all_ranks: Annotated[bool, typer.Option("--all", help="Run all ranks.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Ranks that run at a time.")] = None,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds that a rank may take.")] = 300.0,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure the tensors' peak.")] = True,
    compute: Annotated[
        float, typer.Option(min=0.0, help="Factor of the computation's time, for faster processors.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Run SCRIPT on -n ranks that are not there; check their operations, and foretell a step."""
    from mcr_plus.errors import InvalidArgument
    from mcr_plus.simulate.foretell import foretell
    from mcr_plus.simulate.running import SimulatedProgram

    if not script.is_file():
        raise typer.BadParameter(f"{script}: no such file", param_hint="SCRIPT")
    costs = _costs(config, topology, measured_on)
    if config is not None:
        os.environ["MCR_CONFIG"] = str(config.absolute())
    hosts = tuple(f"node{rank // costs.topology.ranks_per_node}" for rank in range(ranks))
    program = SimulatedProgram(
        script, args or [], hosts, steps, memory, jobs or len(os.sched_getaffinity(0)), timeout
    )
    try:
        found = foretell(program, costs, most=runs, all_ranks=all_ranks, scale=compute)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        print_json(_document(found))
    else:
        _print(found)
    if found.timeline is None:
        raise typer.Exit(1)


def _costs(config: Path | None, topology: Path, measured_on: Path | None) -> ClusterCosts:
    from mcr_plus.bucketing.scaling import ClusterCosts, from_table
    from mcr_plus.bucketing.topology import Topology
    from mcr_plus.config.reader import load
    from mcr_plus.tables.table import load_table

    here = Topology.load(topology)
    tables = () if config is None else load(config).tables
    measured = [each for ref in tables for each in from_table(load_table(ref.resolve()))]
    there = None if measured_on is None else Topology.load(measured_on)
    guessed = there is None and bool(measured) and bool(here.medium.rates)
    if guessed:
        typer.echo(f"{topology}: assumed to describe the table's links, too", err=True)
    return ClusterCosts(measured, here, there, guessed)


def _document(found: ForetoldJob) -> dict[str, Any]:
    timeline = found.timeline
    document: dict[str, Any] = {
        "ranks": found.ranks,
        "problems": [{"text": each.text, "ranks": list(each.ranks)} for each in found.problems],
        "grounds": found.grounds,
        "roles": [
            {
                "ranks": list(each.ranks), "ran": list(each.ran),
                "operations": each.operations, "peak_bytes": each.peak, "resident_bytes": each.resident,
            }
            for each in found.roles
        ],
        "notes": list(found.notes),
    }  # fmt: skip
    if timeline is not None:
        document |= {
            "step_ms": 1e3 * timeline.step_s,
            "compute_ms": 1e3 * timeline.compute_s,
            "exposed_ms": 1e3 * timeline.exposed_s,
            "exposed": {name: 1e3 * seconds for name, seconds in timeline.exposed.items()},
            "bound_ms": 1e3 * timeline.bound,
            "bound_by": timeline.bound_by,
            "links_ms": {link: 1e3 * seconds for link, seconds in found.links.items()},
            "how": timeline.how,
        }
    return document


def _print(found: ForetoldJob) -> None:
    from mcr_plus.core.units import about

    timeline = found.timeline
    for each in found.problems[:20]:
        typer.echo(f"problem: {each.text}")
    if timeline is not None:
        typer.echo(
            f"step: {1e3 * timeline.step_s:.2f} ms on {found.ranks} ranks (costs: {timeline.how}); "
            f"computation {1e3 * timeline.compute_s:.2f} ms, exposed communication "
            f"{1e3 * timeline.exposed_s:.2f} ms; lower bound {1e3 * timeline.bound:.2f} ms, set by "
            f"{timeline.bound_by}"
        )
        busy = [f"{link} {1e3 * seconds:.2f} ms" for link, seconds in found.links.items()]
        typer.echo(f"links in use, of the busiest rank: {', '.join(busy) or 'none'}")
        waits = sorted(timeline.exposed.items(), key=lambda pair: -pair[1])[:8]
        if waits:
            print_table("exposed", ("operation", "ms"), [(name, f"{1e3 * each:.2f}") for name, each in waits])
    print_table(
        "roles",
        ("ranks", "ran", "operations", "peak of tensors", "process"),
        [
            (
                f"{len(each.ranks)}: {_ranges(each.ranks)}", _ranges(each.ran), str(each.operations),
                "" if each.peak is None else about(each.peak), about(each.resident),
            )
            for each in found.roles
        ],
    )  # fmt: skip
    typer.echo(found.grounds)
    for text in found.notes:
        typer.echo(f"note: {text}", err=True)


def _ranges(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text, such as 0-7 16-23, shortened if there are many ranges."""
    starts = [rank for at, rank in enumerate(ranks) if not at or rank != ranks[at - 1] + 1]
    ends = [rank for at, rank in enumerate(ranks) if at + 1 == len(ranks) or ranks[at + 1] != rank + 1]
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return " ".join(texts if len(texts) <= _MOST else [*texts[:_MOST], "…"])
