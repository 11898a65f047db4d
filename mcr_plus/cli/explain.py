"""`mcr-plus explain`: the way one operation would take through the pipeline, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from mcr_plus.cli.output import print_json


def explain(
    kind: Annotated[str, typer.Argument(help="The operation, for example all_reduce.")],
    nbytes: Annotated[str, typer.Argument(metavar="BYTES", help="Its size, for example 64KiB.")],
    dtype: Annotated[str, typer.Option(help="Type of the elements.")] = "float32",
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks take part.")] = 2,
    config: Annotated[Path | None, typer.Option("--config", help="Pipeline YAML.")] = None,
    tag: Annotated[str | None, typer.Option(help="The operation's tag, for rules.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the way an operation of KIND and BYTES would take, and why."""
    # imported here: torch takes seconds, and other commands do without it
    from mcr_plus.config import DTYPE_NAMES
    from mcr_plus.explanation import explain as explain_operation
    from mcr_plus.message import ALIASES, KINDS

    _check_known("kind", kind, (*KINDS, *ALIASES), "KIND")
    _check_known("dtype", dtype, DTYPE_NAMES, "--dtype")
    way = explain_operation(kind, _size(nbytes), dtype=dtype, ranks=ranks, config=config, tag=tag)
    if as_json:
        print_json(way)
    else:
        print(yaml.safe_dump(way, sort_keys=False), end="")


def _check_known(what: str, value: str, known: tuple[str, ...], place: str) -> None:
    from mcr_plus.errors import unknown

    if value not in known:
        raise typer.BadParameter(unknown(what, value, known), param_hint=place)


def _size(text: str) -> int:
    from mcr_plus.units import parse_size

    try:
        return parse_size(int(text) if text.isdigit() else text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="BYTES") from None
