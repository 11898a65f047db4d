"""`mcr-plus plan --parallel`: search for a plan of a whole model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mcr_plus.cli.output import print_json, print_table, print_written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcr_plus.bucketing.topology import Topology
    from mcr_plus.config.schema import Config
    from mcr_plus.plans.codecs import CodecChoice
    from mcr_plus.plans.search import FoundModelPlan, SearchResult


def plan_parallel(
    profile: Path, config: Path | None, ranks: int | None, topology: Path | None, memory: str | None,
    codecs: list[str] | None, output: Path | None, emitted: Path | None, report: Path | None, *,
    as_json: bool,
) -> None:  # fmt: skip
    """Print the best plans of a profile; write the best one, and a picture of it."""
    from mcr_plus.bucketing.topology import Topology
    from mcr_plus.config.reader import load
    from mcr_plus.core.units import parse_size
    from mcr_plus.errors import InvalidArgument, Unsupported
    from mcr_plus.plans.blocks import Profile
    from mcr_plus.plans.foretell import cluster_costs
    from mcr_plus.plans.search import search

    if topology is None:
        raise typer.BadParameter("expected a cluster.yaml with nodes and links", param_hint="--topology")
    for path, hint in ((output, "-o"), (emitted, "--emit"), (report, "--report")):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise typer.BadParameter(f"{path}: expected a file in a folder that exists", param_hint=hint)
    cluster = Topology.load(topology)
    try:
        most = None if memory is None else parse_size(memory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--memory") from None
    allowed = _codecs(codecs or ())
    pipeline = load({"version": 1} if config is None else config)
    ranks = ranks or cluster.ranks
    origin = f"{ranks} ranks, costs from {_origin(cluster, topology, ranks, pipeline)}"
    try:
        costs = cluster_costs(cluster, pipeline)
        result = search(Profile.load(profile), ranks, costs, memory=most, codecs=allowed)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None
    except Unsupported as error:  # an operation without a cost
        raise typer.BadParameter(f"{error} ({origin})") from None
    written = _write(result.plans[0], output, emitted, report)
    if as_json:
        print_json({"ranks": ranks, "origin": origin, **_document(result)})
        return
    typer.echo(origin)
    _print(result)
    for path, what in written:
        print_written(path, what)


def _codecs(texts: Sequence[str]) -> list[CodecChoice]:
    from mcr_plus.errors import ConfigError
    from mcr_plus.plans.codecs import parse_codec

    try:
        return [parse_codec(each) for each in texts]
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--codec") from None


def _write(
    best: FoundModelPlan, output: Path | None, emitted: Path | None, report: Path | None
) -> list[tuple[Path, str]]:
    """Write the files that are asked for; return their paths, and what they are."""
    from mcr_plus.errors import InvalidArgument, Unsupported
    from mcr_plus.plans.plan_file import save_plan

    written: list[tuple[Path, str]] = []
    if output is not None:
        save_plan(best.plan.plan, output)
        written.append((output, "the plan"))
    if emitted is not None:
        from mcr_plus.plans.emit import emit

        try:
            emit(best.plan.plan).save(emitted)
        except (InvalidArgument, Unsupported) as error:
            raise typer.BadParameter(f"the best plan: {error}", param_hint="--emit") from None
        written.append((emitted, "the plan for torch's engines"))
    if report is not None:
        from mcr_plus.config.document import write_text
        from mcr_plus.plans.picture import plan_page

        write_text(report, plan_page(best.plan, best.step))
        written.append((report, "the picture"))
    return written


def _origin(cluster: Topology, path: Path, ranks: int, pipeline: Config) -> str:
    """Return where costs come from: tables, and links."""
    from mcr_plus.bucketing.topology import crossed

    tables = ", ".join(table.text for table in pipeline.tables) or "built-in tables"
    links = crossed(cluster.placement(range(min(ranks, cluster.ranks))))
    unknown = [link for link in links if cluster.rate(link) is None]
    how = f"for the links of {path.name}, assumed to be those measured" if unknown != [*links] else "unscaled"
    return f"{tables}, {how}" + (f"; {path.name} has no rate of {', '.join(unknown)}" if unknown else "")


def _document(result: SearchResult) -> dict[str, Any]:
    return {
        "bound_ms": 1e3 * result.bound,
        "gap": result.gap,
        "tried": result.tried,
        "plans": [
            {
                **each.choice._asdict(),
                "stages": [[stage.start, stage.stop] for stage in each.choice.stages],
                "step_ms": 1e3 * each.step,
                "model_ms": 1e3 * each.seconds,
                "peak_bytes": each.peak,
                "codecs": each.plan.plan.codecs if each.allowed else {},
            }
            for each in result.plans
        ],
    }


def _print(result: SearchResult) -> None:
    from mcr_plus.core.units import about

    def row(each: FoundModelPlan) -> tuple[str, ...]:
        return f"{1e3 * each.step:.1f}", f"{1e3 * each.seconds:.1f}", about(each.peak), str(each.choice)

    best = result.plans[0]
    typer.echo(
        f"step {1e3 * best.step:.1f} ms, at most {about(best.peak)} on a rank; bound "
        f"{1e3 * result.bound:.1f} ms, gap {100 * result.gap:.0f} %; {result.tried} combinations"
    )
    print_table("plans", ("step ms", "model ms", "memory", "plan"), list(map(row, result.plans)))
    for number, stage in enumerate(best.choice.stages):
        names = [best.profile.blocks[index].name for index in (stage.start, stage.stop - 1)]
        again = len(set(stage) & set(best.choice.recompute))
        more = f", {again} recomputed" if again else ""
        codec = best.plan.plan.codecs.get(stage.stop) if best.allowed else None
        more += f"; to the next one with {codec}" if codec is not None else ""
        typer.echo(f"stage {number}: {' to '.join(dict.fromkeys(names))}{more}")
    if best.allowed and (codec := best.plan.plan.codecs.get(0)) is not None:
        typer.echo(f"sums of gradients with {codec}")
    if whole := [block.name for block in best.profile.blocks if "batch" not in block.axes]:
        typer.echo(f"no data parallelism or micro-batches: {', '.join(whole)} cannot be cut along `batch`")
