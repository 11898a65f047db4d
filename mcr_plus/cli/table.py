"""`mcr-plus table`: merge, compare, shrink, show, import and export tuning tables."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcr_plus import registry
from mcr_plus.cli.output import print_error, print_json, print_table, print_written, rule_count
from mcr_plus.errors import unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcr_plus.tables.differences import Change
    from mcr_plus.tables.table import Curves, Table

_FAILED = 1

app = typer.Typer(no_args_is_help=True, help="Merge, compare, shrink, show, import and export tuning tables.")


class PreferChoice(str, Enum):
    """Values of `--prefer`."""

    first = "first"
    last = "last"


_FORMATS = "|".join(registry.TABLE_FORMATS)  # `names` would read all installed packages
Output = Annotated[Path | None, typer.Option("-o", "--output", help="The file to write; stdout by default.")]
Backend = Annotated[str | None, typer.Option(help="The backend of the rules.")]
TableFile = Annotated[Path, typer.Argument(metavar="TABLE", help="A table file.")]


@app.command()
def merge(
    tables: Annotated[list[Path], typer.Argument(metavar="TABLE...", help="The table files to merge.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The table file to write.")] = ...,  # type: ignore[assignment]  # required
    prefer: Annotated[
        PreferChoice | None, typer.Option(help="The table that takes precedence in a conflict.")
    ] = None,
) -> None:
    """Merge several tables, for instance those of different numbers of ranks or hosts."""
    from mcr_plus.tables.merging import merge as merge_tables
    from mcr_plus.tables.table import load_table
    from mcr_plus.tables.writing import save_table

    merged = merge_tables([load_table(path) for path in tables], prefer=prefer.value if prefer else None)
    save_table(merged, output, comment=[f"merged: {', '.join(path.name for path in tables)}"])
    print_written(output, rule_count(merged))


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A table file.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Another one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the differences between the choices of FIRST and SECOND; the status is always 0."""
    from mcr_plus.tables.differences import diff as compare
    from mcr_plus.tables.table import load_table

    changes = compare(load_table(first), load_table(second))
    if as_json:
        print_json([_plain(change) for change in changes])
    elif changes:
        columns = ("item", "bytes", "first", "second", "expected", "note")
        print_table(f"{first} → {second}", columns, [_row(change) for change in changes])
    else:
        print(f"{first} and {second} make the same choices")


@app.command()
def shrink(table: TableFile, output: Output = None) -> None:
    """Write TABLE with fewer rules and the same choices."""
    from mcr_plus.tables.merging import shrink as shrink_table
    from mcr_plus.tables.table import load_table

    _write(shrink_table(load_table(table)), output)


@app.command()
def show(table: TableFile) -> None:
    """Show the rules of TABLE, and their measurements."""
    from mcr_plus.tables.table import load_table

    loaded = load_table(table)
    if loaded.fingerprint:
        facts = [(name, ", ".join(values)) for name, values in loaded.fingerprint.items()]
        print_table("measured with", ("fact", "value"), facts)
    rows = [(str(rule.key), rule.span(), rule.backend, _times(rule.measured)) for rule in loaded.rules]
    title = f"{table}{' (strict)' if loaded.strict else ''}"
    print_table(title, ("operations", "bytes", "choice", "measured in µs"), rows)


@app.command()
def export(
    table: TableFile,
    format: Annotated[str, typer.Option(metavar=_FORMATS, help="The format to write.")] = ...,  # type: ignore[assignment]  # required
    output: Output = None,
    backend: Backend = None,
) -> None:
    """Write rules of TABLE in another library's format, with a line on stderr for each omission.

    Status 1 if a rule is not, or not fully, exported. If no rule can be exported, no file is written.
    """
    from mcr_plus.config.document import write_text
    from mcr_plus.tables.interchange import export as export_table
    from mcr_plus.tables.interchange import is_empty
    from mcr_plus.tables.interchange.exchange import facts_without_place
    from mcr_plus.tables.table import load_table

    _known("--format", "table_formats", format)
    backend = backend and _known("--backend", "backends", backend)
    loaded = load_table(table)
    text, lost = export_table(format, loaded, backend=backend)
    if is_empty(text):
        print_error(f"{table}: nothing can be exported as {format}: {_why_nothing(loaded, format, backend)}")
        raise typer.Exit(_FAILED)
    _report("not exported", lost)
    if output is None:
        print(text, end="")
    else:
        write_text(output, text)
        print_written(output, f"{format} of {table}")
    of_rules = len(lost) - sum(1 for _ in facts_without_place(loaded))
    if of_rules:
        lines = "line" if of_rules == 1 else f"{of_rules} lines"
        print_error(f"{table}: not all of its rules can be exported as {format}: see the {lines} above")
        raise typer.Exit(_FAILED)


def _why_nothing(table: Table, format: str, backend: str | None) -> str:
    """Return a summary of the reasons why a format can express none of the rules."""
    from mcr_plus.tables.interchange import table_format
    from mcr_plus.tables.table import BUILT_IN

    exported = backend or table_format(format).backend
    choices = [rule.backend.partition(":") for rule in table.rules]
    others = [name for name, _, _ in choices if name not in (exported, BUILT_IN)]
    algorithms = [algorithm for name, _, algorithm in choices if name == exported]
    counts = {
        "that leave sizes to the built-in preference": sum(name == BUILT_IN for name, _, _ in choices),
        f"for other backends than {exported} ({', '.join(sorted(set(others)))})": len(others),
        f"for {exported} without an algorithm": algorithms.count(""),
        f"for algorithms of {exported} that the format cannot express": sum(map(bool, algorithms)),
    }
    reasons = "; ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"of {len(choices)} rule{'' if len(choices) == 1 else 's'}, {reasons}"


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of another library.")],
    format: Annotated[str, typer.Option(metavar=_FORMATS, help="Its format.")] = ...,  # type: ignore[assignment]  # required
    output: Output = None,
    backend: Backend = None,
) -> None:
    """Convert FILE to a table; stderr gets a line for each omission and each kind of operation."""
    from mcr_plus.config.document import read_bytes
    from mcr_plus.errors import ConfigError
    from mcr_plus.tables.interchange import import_ as import_table
    from mcr_plus.tables.interchange import summary

    _known("--format", "table_formats", format)
    backend = backend and _known("--backend", "backends", backend)
    try:
        text = read_bytes(file, str(file)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}:1: not UTF-8 at byte {error.start}; expected text") from None
    table, lost = import_table(format, text, str(file), backend=backend)
    _report("not imported", lost)
    _report("imported", summary(format, table))
    _write(table, output, comment=[f"imported from {file.name} ({format})"])


def _known(option: str, kind: str, name: str) -> str:
    """Return the stored name of an option's value; raise `BadParameter` if the registry lacks it."""
    known, name = registry.names(kind), registry.stored_name(kind, name)
    if name not in known:
        raise typer.BadParameter(unknown(registry.label(kind), name, known), param_hint=option)
    return name


def _report(what: str, lost: Sequence[str]) -> None:
    for line in lost:
        print(f"{what}: {line}", file=sys.stderr)


def _write(table: Table, output: Path | None, comment: Sequence[str] = ()) -> None:
    from mcr_plus.tables.writing import save_table, table_text

    if output is None:
        print(table_text(table, comment=comment), end="")
    else:
        save_table(table, output, comment=comment)
        print_written(output, rule_count(table))


def _plain(change: Change) -> dict[str, Any]:
    from mcr_plus.tables.writing import key_items

    if change.key is None:
        return {"fact": change.fact, "before": change.before, "after": change.after}
    return {
        "key": key_items(change.key),
        "bytes": change.span(),
        "before": change.before,
        "after": change.after,
        "only_in": change.only_in,
        "at": change.at,
        "before_us": change.before_us,
        "after_us": change.after_us,
    }


def _row(change: Change) -> tuple[str, str, str, str, str, str]:
    what, span = (change.fact or "", "") if change.key is None else (str(change.key), change.span())
    note = f"key only in the {change.only_in}" if change.only_in else ""
    return what, span, change.before or "-", change.after or "-", change.expected(), note


def _times(measured: Curves) -> str:
    """Return the fastest and slowest time of every measured choice: `mpi 0.9 to 17, gloo 205 to 441`."""
    from mcr_plus.tables.writing import microseconds

    parts = []
    for choice, curve in measured.items():
        if not curve:
            continue
        ends = dict.fromkeys(microseconds(time) for time in (min(curve.values()), max(curve.values())))
        parts.append(f"{choice} {' to '.join(ends)}")
    return ", ".join(parts)
