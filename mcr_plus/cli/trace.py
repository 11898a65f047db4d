"""`mcr-plus trace`: merge the recorded traces of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mcr_plus.cli.output import print_written

app = typer.Typer(no_args_is_help=True, help="Merge traces of ranks.")


@app.callback()
def _commands() -> None:
    """Keep `merge` a subcommand: typer would accept a single command without its name."""


@app.command()
def merge(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE|FOLDER...", help="Of log.save() or of torch's profiler.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The trace to write.")] = ...,  # type: ignore[assignment]  # required
    hta: Annotated[
        Path | None,
        typer.Option(help="Also write a file of each rank for HolisticTraceAnalysis into FOLDER."),
    ] = None,
) -> None:
    """Merge the traces of several ranks, with one clock, for Perfetto or chrome://tracing."""
    from mcr_plus.observe.traces import described, merge_traces

    merged = merge_traces(files, output, hta=hta)
    count = len(merged.ranks)
    print_written(output, f"{merged.events} events of {count} rank{'' if count == 1 else 's'}")
    for line in described(merged):
        typer.echo(line, err=True)
