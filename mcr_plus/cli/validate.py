"""`mcr-plus validate`: check a pipeline file without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from mcr_plus.cli.output import print_json


def validate(
    file: Annotated[Path, typer.Argument(help="A pipeline YAML file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check FILE, its tables and algorithms; print the pipeline it stands for, defaults filled in."""
    from mcr_plus.backends.msccl.catalog import kept
    from mcr_plus.config import dump, load
    from mcr_plus.selection.checks import checked_tables, use_algorithms

    config = load(file)
    with kept():
        use_algorithms(config)
        checked_tables(config)
    resolved = dump(config)
    if as_json:
        print_json(resolved)
    else:
        print(yaml.safe_dump(resolved, sort_keys=False), end="")
