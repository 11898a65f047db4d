"""How commands print: tables for people, aligned text for pipes, one JSON document for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

Row = Sequence[str]


def print_json(document: object) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(document, indent=2))


def print_table(title: str, columns: Row, rows: Sequence[Row]) -> None:
    """Print a table: drawn on a terminal, plain columns two blanks apart anywhere else."""
    console = Console()
    if console.is_terminal:
        console.print(_drawn(title, columns, rows))
    else:
        print("\n".join(plain_lines(title, columns, rows)))


def plain_lines(title: str, columns: Row, rows: Sequence[Row]) -> list[str]:
    """The table as lines of text."""
    table = [columns, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return [title, *(line.rstrip() for line in lines), ""]


def _drawn(title: str, columns: Row, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
