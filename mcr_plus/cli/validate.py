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
    """Check FILE, its tables and algorithms; print the pipeline it stands for, defaults filled in.

    Of a tuning table, which FILE may be too, only what it is is printed.
    """
    from mcr_plus.backends.msccl.catalog import kept
    from mcr_plus.config import dump, is_table, load
    from mcr_plus.document import Mistakes, read_document
    from mcr_plus.selection.checks import checked_tables, use_algorithms

    if is_table(read_document(file)):
        _table(file, as_json)
        return
    config = load(file)
    mistakes = Mistakes()
    with kept():
        mistakes.kept(lambda: use_algorithms(config), None)
        mistakes.kept(lambda: checked_tables(config), [])
    mistakes.tell()
    if as_json:
        print_json(dump(config))
    else:
        print(yaml.safe_dump(dump(config, units=True), sort_keys=False), end="")


def _table(file: Path, as_json: bool) -> None:
    from mcr_plus.selection.table import load_table

    rules = len(load_table(file).rules)
    if as_json:
        print_json({"table": str(file), "rules": rules})
        return
    print(f"{file}: a tuning table of {rules} rule{'' if rules == 1 else 's'}, without mistakes")
    print(f"A configuration names it: `select: {{table: {file}}}`; `mcr-plus table show {file}` shows it.")
