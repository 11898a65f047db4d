"""Output of commands: tables on a terminal, aligned text in a pipe, or one JSON document.

Terminals get colour, unless NO_COLOR is set. rich is imported for terminals only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from mcr_plus.tables import table as tables

Row = Sequence[str]


def print_json(document: object) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(document, indent=2))


def print_error(text: str) -> None:
    """Print an error to stderr, each line prefixed with `mcr-plus:`."""
    for line in text.splitlines():
        _print_line("mcr-plus:", "bold red", f" {line}", stderr=True)


def print_written(path: Path, what: str) -> None:
    """Report a written file and its content on stderr; stdout is reserved for results."""
    _print_line(str(path), "bold", f": {what}", stderr=True)


def rule_count(table: tables.Table) -> str:
    """Count a table's rules, as text: `3 rules, 2 of them for the built-in preference`."""
    from mcr_plus.tables.table import BUILT_IN

    count, defaults = len(table.rules), sum(rule.backend == BUILT_IN for rule in table.rules)
    built_in = f", {defaults} of them for the built-in preference" if defaults else ""
    return f"{count} rule{'' if count == 1 else 's'}{built_in}"


def print_result(text: str) -> None:
    """Print the result line, highlighted."""
    _print_line(text, "bold green")


def _print_line(text: str, style: str, rest: str = "", *, stderr: bool = False) -> None:
    """Print one line without wrapping: `text` (styled on a terminal), then `rest`."""
    stream = sys.stderr if stderr else sys.stdout
    if not stream.isatty():
        print(f"{text}{rest}", file=stream)
        return
    from rich.console import Console
    from rich.text import Text

    Console(stderr=stderr, highlight=False).print(Text.assemble((text, style), rest), soft_wrap=True)


def print_table(title: str, columns: Row, rows: Sequence[Row]) -> None:
    """Print a table: with borders on a terminal, otherwise as plain columns separated by two spaces."""
    if not sys.stdout.isatty():
        print("\n".join(plain_lines(title, columns, rows)))
        return
    from rich.console import Console

    Console().print(_drawn(title, columns, rows))


def plain_lines(title: str, columns: Row, rows: Sequence[Row]) -> list[str]:
    """Return the table as lines of text."""
    table = [columns, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return [title, *(line.rstrip() for line in lines), ""]


def _drawn(title: str, columns: Row, rows: Sequence[Row]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold cyan")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
