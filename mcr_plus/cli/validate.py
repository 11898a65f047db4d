"""`mcr-plus validate`: check a pipeline file without starting anything."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcr_plus.cli.output import print_json, rule_count

if TYPE_CHECKING:
    from mcr_plus.config.schema import TableRef


def validate(
    file: Annotated[Path, typer.Argument(help="A pipeline YAML file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check FILE, its tables, plans and algorithms, and print the resolved pipeline with defaults.

    For a tuning table, print one line with its number of rules. A note on stderr names codecs of gradients
    that are known to cost quality.
    """
    from mcr_plus.compression.policy import cautions, unusable
    from mcr_plus.config.document import Mistakes, read_document
    from mcr_plus.config.reader import dump, is_table, load
    from mcr_plus.fusion.options import FuseOptions
    from mcr_plus.msccl.catalog import kept
    from mcr_plus.selection.checks import checked_tables, named_tables, use_algorithms
    from mcr_plus.tables.table import load_table

    document = read_document(file)
    if is_table(document):
        _table(file, as_json)
        return
    mistakes = Mistakes()
    config = mistakes.collect(lambda: load(file), None)
    # An invalid configuration may still name tables: report mistakes in these tables, too.
    if config is None:
        for table in named_tables(document):
            mistakes.collect(partial(load_table, table), None)
        mistakes.raise_all()
        return
    # Algorithm files register their algorithms: undo that afterwards.
    with kept():
        mistakes.collect(lambda: use_algorithms(config), None)
        mistakes.collect(lambda: checked_tables(config), [])
    for options in config.all_options:
        if isinstance(options, FuseOptions) and (plan := options.plan_file) is not None:
            mistakes.collect(partial(_plan, plan), None)
    mistakes.raise_all()
    for note in [*unusable(config), *cautions(config)]:
        print(f"note: {note}", file=sys.stderr)
    if as_json:
        print_json(dump(config))
    else:
        import yaml

        print(yaml.safe_dump(dump(config, units=True), sort_keys=False), end="")


def _plan(file: TableRef) -> None:
    from mcr_plus.bucketing.saved import SavedPlan

    SavedPlan.load(file.resolve(), file.place)


def _table(file: Path, as_json: bool) -> None:
    from mcr_plus.tables.table import load_table

    table = load_table(file)
    if as_json:
        print_json({"table": str(file), "rules": len(table.rules)})
        return
    print(f"{file}: a tuning table of {rule_count(table)}, without mistakes")
    print(f"To use it: `select: {{table: {file}}}`; to show it: `mcr-plus table show {file}`.")
