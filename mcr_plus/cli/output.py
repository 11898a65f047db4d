"""How commands print: tables for people, aligned text for pipes, one JSON document for programs.

On a terminal there is colour, unless NO_COLOR is set.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Sequence[str]


def print_json(document: object) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(document, indent=2))


def print_error(text: str) -> None:
    """Print what went wrong on stderr, every line with our name before it."""
    for line in text.splitlines():
        _print_line(Text.assemble(("mcr-plus:", "bold red"), f" {line}"), stderr=True)


def print_written(path: Path, what: str) -> None:
    """Say on stderr what a file that a command has written holds: stdout is for what was asked for."""
    _print_line(Text.assemble((str(path), "bold"), f": {what}"), stderr=True)


def print_result(text: str) -> None:
    """Print the line that an answer comes down to."""
    _print_line(Text(text, "bold green"))


def _print_line(line: Text, *, stderr: bool = False) -> None:
    """One line, however long: not wrapped, and without colour anywhere but on a terminal."""
    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal:
        console.print(line, soft_wrap=True)
    else:
        print(line.plain, file=console.file)


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
    table = Table(title=title, title_justify="left", header_style="bold cyan")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
