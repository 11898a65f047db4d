"""`mcr-plus plan`: search for the best buckets of a captured step, and predict the step time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcr_plus.cli.output import print_json, print_table, print_written

if TYPE_CHECKING:
    from mcr_plus.bucketing.advise import PlanAdvice
    from mcr_plus.bucketing.scaling import ClusterCosts
    from mcr_plus.bucketing.step import CapturedStep
    from mcr_plus.config.schema import Config


def plan(
    step: Annotated[
        list[Path] | None,
        typer.Argument(help="A step.json, or traces: of all ranks (files or a folder), or of one."),
    ] = None,
    parallel: Annotated[
        Path | None,
        typer.Option(help="Instead, a profile of a model: search for stages, data and tensor parallelism."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="With --parallel: most bytes of a rank, such as 2GiB.")
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(help="With --parallel: allowed between ranks, as bf16 or '{codec: topk, ratio: 0.1}'."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Pipeline YAML; its table has costs.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks; by default those of the step.")
    ] = None,
    topology: Annotated[Path | None, typer.Option(help="cluster.yaml: nodes and links.")] = None,
    measured_on: Annotated[
        Path | None, typer.Option(help="cluster.yaml of the measured cluster, if it differs.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="A change, such as nic=100Gbit/s, compress=int8_block or compute=0.8."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the plan: pipeline YAML, or with --parallel JSON."),
    ] = None,
    emit: Annotated[
        Path | None, typer.Option(help="With --parallel: write the plan for torch's own engines as JSON.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a report as HTML.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Search for the best buckets of a captured step; predict its time, a bound, and gains of changes.

    With --parallel, search for a plan of a whole model on a cluster.
    """
    if parallel is not None:
        from mcr_plus.cli.parallel_plan import plan_parallel

        given = {"STEP": step, "--measured-on": measured_on, "--what-if": what_if}
        for name in [name for name, value in given.items() if value]:
            raise typer.BadParameter("does not go with --parallel", param_hint=name)
        plan_parallel(parallel, config, ranks, topology, memory, codec, output, emit, report, as_json=as_json)
        return
    if not step or memory is not None or codec or emit is not None:
        what = "--memory, --codec and --emit are for the latter"
        raise typer.BadParameter(f"expected a step, or --parallel with a profile; {what}")
    _plan_step(step, config, ranks, topology, measured_on, what_if or (), output, report, as_json=as_json)


def _plan_step(
    step: list[Path], config: Path | None, ranks: int | None, topology: Path | None, measured_on: Path | None,
    what_if: Sequence[str], output: Path | None, report: Path | None, *, as_json: bool,
) -> None:  # fmt: skip
    from mcr_plus.bucketing.advise import advise
    from mcr_plus.bucketing.traces import load_step
    from mcr_plus.config.reader import load
    from mcr_plus.errors import InvalidArgument, McrError

    if report is not None:
        _check_report(report)
    pipeline = load({"version": 1} if config is None else config)
    captured = load_step(step, ranks)
    if output is not None:
        _check_output(output, captured)
    if config is not None:
        captured = replace(captured, by_caller=_by_caller(pipeline))
    try:
        costs = _costs(captured, pipeline, topology, measured_on)
        codec, notes = _codec(captured, pipeline)
        captured = replace(captured, notes=(*captured.notes, *notes))
        advice = advise(captured, costs, ranks=ranks, what_ifs=what_if, codec=codec)
    except McrError as error:
        _print_notes(captured)  # for example, an unknown operation may be the reason
        if not isinstance(error, InvalidArgument):
            raise
        hint = "" if topology is not None else " (--topology describes a larger cluster)"
        raise typer.BadParameter(f"{error}{hint}") from None
    if costs.guessed:
        warning = f"{topology}: assumed to describe the measured links, too; --measured-on describes others"
        typer.echo(warning, err=True)
    document = _document(captured, advice)
    if output is not None:
        _write_plan(output, pipeline, captured, advice)
    if report is not None:
        from mcr_plus.bucketing.report import html_report
        from mcr_plus.config.document import write_text

        write_text(report, html_report(captured, advice, f"Plan for {', '.join(map(str, step))}"))
    if as_json:
        print_json(document)
        return
    _print(advice)
    _print_notes(captured)
    for path, what in ((output, "the plan"), (report, "the report")):
        if path is not None:
            print_written(path, what)


def _check_report(path: Path) -> None:
    import importlib.util

    from mcr_plus.errors import BackendUnavailable

    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path}: no such folder", param_hint="--report")
    if path.is_dir():
        raise typer.BadParameter(f"{path}: a folder; expected a file", param_hint="--report")
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("--report needs matplotlib; pip install 'mcr_plus[plot]' brings it")


def _check_output(path: Path, step: CapturedStep) -> None:
    """Raise a usage error for `-o` if the plan could not be written, or if no job could use the plan."""
    from mcr_plus.bucketing.programs import gradients_of

    problem = None
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = f"{path}: expected a file in a folder that exists"
    elif step.source != "hooks":
        problem = "traces contain no parameter names, so no model could use the plan; use `mcr.capture`"
    elif len({gradients_of(step, role) for role in step.roles}) > 1:
        problem = "ranks send different gradients, but `fuse: {plan: FILE}` requires the same on all ranks"
    if problem is not None:
        raise typer.BadParameter(problem, param_hint="-o")


def _by_caller(pipeline: Config) -> bool:
    """Return whether operations of one of the pipeline's libraries progress only in calls of the program."""
    from mcr_plus import registry
    from mcr_plus.backends import is_polled
    from mcr_plus.engine.options import DispatchOptions

    options = pipeline.options("dispatch")
    if isinstance(options, DispatchOptions) and options.progress == "thread":
        return False
    return any(map(is_polled, pipeline.backends or registry.names("backends")))


def _codec(step: CapturedStep, pipeline: Config) -> tuple[str | None, list[str]]:
    """Return the gradients' codec (None if it cannot be predicted), and notes on omissions."""
    from mcr_plus.bucketing.scaling import wire_bytes
    from mcr_plus.bucketing.step import ReadyEvent
    from mcr_plus.compression.options import CompressOptions
    from mcr_plus.errors import Unsupported

    options = pipeline.options("compress")
    codec = options.codec if isinstance(options, CompressOptions) else "none"
    notes = [
        f"{rule.place}: the prediction ignores the codec of this rule"
        for rule in pipeline.rules
        if isinstance(pipeline.options("compress", rule), CompressOptions)
        and pipeline.options("compress", rule) != options
    ]
    if codec == "none":
        return None, notes
    dtypes = {
        each.like.split()[0] for role in step.roles for each in role.events if isinstance(each, ReadyEvent)
    }
    try:
        for dtype in dtypes:
            wire_bytes(codec, 1 << 20, dtype)
    except Unsupported as error:
        return None, [*notes, f"the prediction ignores the codec of the configuration: {error}"]
    return codec, notes


def _costs(
    step: CapturedStep, pipeline: Config, topology: Path | None, measured_on: Path | None
) -> ClusterCosts:
    from mcr_plus.bucketing.scaling import ClusterCosts, from_probe, from_step, from_table
    from mcr_plus.bucketing.topology import Topology
    from mcr_plus.config.names import backend_name
    from mcr_plus.tables.table import load_table

    of_tables = (each for ref in pipeline.tables for each in from_table(load_table(ref.resolve())))
    measured = [
        each
        for each in (*of_tables, *from_probe(step))
        if pipeline.backends is None or backend_name(each.library) in pipeline.backends
    ]
    captured_on = Topology.of({"nodes": step.nodes, "ranks_per_node": -(-step.ranks // step.nodes)})
    here = captured_on if topology is None else Topology.load(topology)
    there = None if measured_on is None else Topology.load(measured_on)
    guessed = there is None and bool(here.medium.rates)
    return ClusterCosts([*measured, *from_step(step)], here, there, guessed)


def _document(step: CapturedStep, advice: PlanAdvice) -> dict[str, Any]:
    timeline = advice.timeline
    return {
        "step_ms": 1e3 * timeline.step_s,
        "bound_ms": 1e3 * advice.bound,
        "bound_by": timeline.bound_by,
        "compute_ms": 1e3 * timeline.compute_s,
        "exposed_ms": 1e3 * timeline.exposed_s,
        "exposed": {name: 1e3 * seconds for name, seconds in timeline.exposed.items()},
        "how": timeline.how,
        "times_how": timeline.times_how,
        "ranks": timeline.ranks,
        "captured_ms": 1e3 * step.seconds,
        "captured_ranks": step.ranks,
        "gap": advice.gap,
        "gap_of": "bound" if advice.to_bound else "search",
        "exact": advice.exact,
        "buckets": [list(bucket.params) for bucket in advice.plan.buckets or ()],
        "libraries": [bucket.library for bucket in advice.plan.buckets or ()],
        "plans": {
            name: {"step_ms": 1e3 * each.step_s, "how": each.how, "times_how": each.times_how}
            for name, each in advice.others.items()
        },
        "scaling": [
            {
                "ranks": at.ranks, "step_ms": 1e3 * at.step_s, "bound_ms": 1e3 * at.bound, "how": at.how,
                "times_how": at.times_how,
            }
            for at in advice.scaling
        ],
        "what_if": [
            {"change": each.change, "step_ms": 1e3 * each.step_s, "gain_ms": 1e3 * each.gain, "how": each.how}
            for each in advice.what_ifs
        ],
        "unknown": list(timeline.unknown),
        "notes": [*step.notes, *advice.skipped],
    }  # fmt: skip


def _write_plan(path: Path, pipeline: Config, step: CapturedStep, advice: PlanAdvice) -> None:
    """Write the pipeline with the plan to a file, and the buckets to a second file beside it."""
    import yaml

    from mcr_plus.bucketing.buckets import unused_in
    from mcr_plus.bucketing.saved import SavedBucket, SavedPlan, digests
    from mcr_plus.bucketing.scaling import CAPTURED
    from mcr_plus.config.document import write_text
    from mcr_plus.config.reader import dump, load
    from mcr_plus.fusion.options import FuseOptions
    from mcr_plus.msccl.catalog import kept
    from mcr_plus.selection.checks import checked_tables, use_algorithms

    data = dump(_moved(pipeline, path.absolute().parent), units=True)
    if advice.plan.buckets:
        beside = path.with_suffix(".buckets.json")
        buckets = tuple(
            SavedBucket(params=bucket.params, library=None if bucket.library == CAPTURED else bucket.library)
            for bucket in advice.plan.buckets
        )
        SavedPlan(
            model=step.model,
            ranks=advice.timeline.ranks,
            tables=digests(pipeline) or None,
            unused=unused_in(step) or None,
            buckets=buckets,
        ).save(beside)
        for stage in data["pipeline"]:
            if "fuse" in stage:
                stage["fuse"]["plan"] = beside.name
                break
        else:
            data["pipeline"].insert(0, {"fuse": {"plan": beside.name}})
    write_text(path, "# Written by mcr-plus plan.\n" + yaml.safe_dump(data, sort_keys=False))
    # Read everything back as a job would, so that a plan that no job accepts fails here.
    written = load(path)
    with kept():
        use_algorithms(written)
        checked_tables(written)
    for options in written.all_options:
        if isinstance(options, FuseOptions) and (ref := options.plan_file) is not None:
            SavedPlan.load(ref.resolve(), ref.place)


def _moved(pipeline: Config, folder: Path) -> Config:
    """Return the pipeline with file paths relative to `folder`."""
    from mcr_plus.config.schema import TableRef

    def moved(ref: Any) -> Any:
        if Path(ref.text).is_absolute():
            return ref
        text = os.path.relpath((ref.folder / ref.text).absolute(), folder)
        return replace(ref, text=text, folder=folder)

    def changed(part: Any) -> Any:
        refs = {name: moved(value) for name, value in part.options if isinstance(value, TableRef)}
        return replace(part, options=part.options.model_copy(update=refs)) if refs else part

    return replace(
        pipeline,
        pipeline=tuple(map(changed, pipeline.pipeline)),
        rules=tuple(replace(rule, overrides=tuple(map(changed, rule.overrides))) for rule in pipeline.rules),
        algorithms=tuple(map(moved, pipeline.algorithms)),
    )


def _print_notes(step: CapturedStep) -> None:
    for text in step.notes:
        typer.echo(f"note: {text}", err=True)


def _print(advice: PlanAdvice) -> None:
    from mcr_plus.bucketing.report import costs_of, summary

    typer.echo(summary(advice))
    plans = [("searched", advice.timeline), *advice.others.items()]
    print_table(
        "plans",
        ("", "step ms", "exposed ms", "costs"),
        [
            (name, f"{1e3 * each.step_s:.1f}", f"{1e3 * each.exposed_s:.1f}", costs_of(each))
            for name, each in plans
        ],
    )
    print_table(
        "step over ranks",
        ("ranks", "step ms", "bound ms", "costs"),
        [
            (str(at.ranks), f"{1e3 * at.step_s:.1f}", f"{1e3 * at.bound:.1f}", costs_of(at))
            for at in advice.scaling
        ],
    )
    print_table(
        "what if",
        ("change", "step ms", "gain ms", "costs"),
        [
            (each.change, f"{1e3 * each.step_s:.1f}", f"{1e3 * each.gain:.1f}", each.how)
            for each in advice.what_ifs
        ],
    )
    for text in advice.skipped:
        typer.echo(f"left out: {text}", err=True)
