"""`mcr-plus report`: a page about a recorded job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mcr_plus.cli.output import print_written


def report(
    folder: Annotated[Path, typer.Argument(help="That mcr.record(path) has written.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The HTML file to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write a page: a step's timeline, its operations, choices, codecs, late ranks, and what to change."""
    from mcr_plus.errors import phrase_ranks
    from mcr_plus.observe.report.page import write_report

    job = write_report(folder, output)
    count = len(job.ranks)
    print_written(output, f"{job.count:,} operations of {count} rank{'' if count == 1 else 's'}")
    if job.missing:
        typer.echo(f"no recording of {phrase_ranks(job.missing)}", err=True)
