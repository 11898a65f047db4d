"""`mcr-plus trace`: merge the recorded traces of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mcr_plus.cli.output import print_written

app = typer.Typer(no_args_is_help=True, help="Merge traces that `log.save()` wrote.")


@app.callback()
def _commands() -> None:
    """Keep `merge` a subcommand: typer would run a single command without its name."""


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="One trace per rank.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The trace to write.")] = ...,  # type: ignore[assignment]  # required
) -> None:
    """Merge the traces of several ranks, for Perfetto or chrome://tracing."""
    from mcr_plus.api.traces import merge_traces

    events = merge_traces(files, output)
    print_written(output, f"{events} events of {len(files)} rank{'' if len(files) == 1 else 's'}")
