"""`mcr-plus bench`: time operations on every library, through the pipeline, and in torch.distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mcr_plus.cli import measuring
from mcr_plus.cli.output import print_json, print_table, print_written
from mcr_plus.cli.run import ViaChoice

ROW_KEYS = (
    "kind", "backend", "bytes", "ranks", "dtype", "p20_us", "p50_us", "p80_us", "algbw_GBps", "busbw_GBps",
    "verified",
)  # fmt: skip


def bench(
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", min=1, help="Number of ranks.")] = None,
    kinds: Annotated[str | None, typer.Option(help="Operations, such as all_reduce,all_to_all.")] = None,
    smallest: Annotated[str, typer.Option("--min", help="Smallest size.")] = "8",
    largest: Annotated[str, typer.Option("--max", help="Largest size.")] = "64MiB",
    backends: Annotated[str | None, typer.Option(help="Backends to time; all by default.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of the elements.")] = "float32",
    config: Annotated[Path | None, typer.Option("--config", help="Pipeline YAML of `tuned`.")] = None,
    against: Annotated[str | None, typer.Option(help="`torch`: also time torch.distributed's gloo.")] = None,
    passes: Annotated[int, typer.Option(min=1, help="Passes over all sizes; the median of each counts.")] = 1,
    budget: Annotated[str | None, typer.Option(help="Stop after this time, such as 60s.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the curves, as .png, .svg or .pdf.")] = None,
    bind: Annotated[bool, typer.Option("--bind/--no-bind", help="Pin each rank to a core.")] = True,
    via: Annotated[ViaChoice, typer.Option(help="Launcher of the ranks.")] = ViaChoice.auto,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Verify operations, then time all libraries in turns in one job; `tuned` is the pipeline's choice."""
    from mcr_plus.config.reader import load
    from mcr_plus.core.units import parse_duration
    from mcr_plus.msccl.catalog import kept
    from mcr_plus.selection.checks import checked_tables, use_algorithms
    from mcr_plus.tuning.worker import TuningJob

    low, high = measuring.sizes(smallest, largest)
    measuring.check_plot(plot)
    if against not in (None, "torch"):
        raise typer.BadParameter(f"unknown {against!r}; known: torch", param_hint="--against")
    pipeline = load({"version": 1} if config is None else config)
    with kept():
        use_algorithms(pipeline)
        checked_tables(pipeline)
    selected = measuring.backend_names(backends, pipeline, files="`algorithms:` of --config")
    dtypes = measuring.dtype_names(dtype, "--dtype")
    if len(dtypes) > 1:
        raise typer.BadParameter(f"expected one type, got {dtype}", param_hint="--dtype")
    job = TuningJob(
        "bench",
        measuring.kinds(kinds, ("all_reduce",)),
        low,
        high,
        dtypes,
        selected or pipeline.backends,
        measuring.number(budget, parse_duration, "--budget"),
        progress=not as_json,
        bind=bind,
        config=None if config is None else str(config.absolute()),
        against_torch=against == "torch",
        passes=passes,
    )
    answer = measuring.answer_of(job, ranks, via)
    if answer is None:
        return
    rows = [{key: row[key] for key in ROW_KEYS} for row in answer["rows"]]
    if plot is not None:
        from mcr_plus.tuning.plot import plot_rows

        panels = plot_rows(rows, plot)
        print_written(plot, f"{panels} panel{'' if panels == 1 else 's'}, one for each operation")
    if as_json:
        print_json(rows)
    else:
        _print(rows)
    problems = {
        (row["backend"], row["kind"], row["problem"]) for row in answer["rows"] if not row["verified"]
    }
    for candidate, kind, problem in sorted(problems):
        typer.echo(f"left out: {candidate} on {kind}: {problem}", err=True)


def _print(rows: list[dict[str, Any]]) -> None:
    from mcr_plus.core.units import size_words

    for kind in dict.fromkeys(row["kind"] for row in rows):
        shown = [
            (
                size_words(row["bytes"]),
                row["backend"],
                *(f"{row[name]:.2f}" for name in ("p20_us", "p50_us", "p80_us")),
                *(f"{row[name]:.3g}" for name in ("algbw_GBps", "busbw_GBps")),
            )
            for row in rows
            if row["kind"] == kind and row["verified"]
        ]
        columns = ("size", "backend", "p20 µs", "p50 µs", "p80 µs", "algbw GB/s", "busbw GB/s")
        print_table(f"{kind}, {rows[0]['ranks']} ranks, {rows[0]['dtype']}", columns, shown)
