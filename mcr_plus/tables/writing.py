"""Write table files with one line per fact, so that `diff` shows each difference as a line."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

from mcr_plus.core.units import SIZE_UNITS, Range, format_size
from mcr_plus.errors import ConfigError
from mcr_plus.tables.table import Curves, Table, TableKey, TableRule, parse_table

_DIGITS = 4  # significant digits of a measured time


def table_text(table: Table, *, comment: Sequence[str] = ()) -> str:
    """Return the YAML text of a table; `parse_table` gives an equal table, with times rounded to four digits.

    `comment`: lines above the table.
    """
    above = (line for text in comment for line in text.splitlines() or [""])
    return "\n".join([*(f"# {line}".rstrip() for line in above), *_lines(table)]) + "\n"


def checked(table: Table) -> Table:
    """Return the table after the checks of a table file; raise `ConfigError` if it fails them."""
    bare = replace(table, rules=tuple(replace(rule, measured={}) for rule in table.rules))
    parse_table(table_text(bare), table.name)
    return table


def save_table(table: Table, path: str | Path, *, comment: Sequence[str] = ()) -> None:
    """Write a table file atomically: the old file is kept until the new one is complete.

    Raises `ConfigError` if the file cannot be written.
    """
    target = Path(path)
    temporary = target.parent / f".{target.name}.{secrets.token_hex(8)}"
    content = table_text(table, comment=comment).encode()
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot write: {error.strerror}") from None


def key_items(key: TableKey) -> dict[str, str | int | bool]:
    """Return the fields of a key as written in a rule, in order, `kind` first."""
    ranges = {"ranks": key.ranks, "nodes": key.nodes, "ranks_per_node": key.ranks_per_node}
    items: dict[str, str | int | bool | None] = {
        "kind": key.kind,
        "dtype": key.dtype,
        **{name: None if value is None else _counts(value) for name, value in ranges.items()},
        "device": key.device,
        "in_place": key.in_place,
        "async": key.async_op,
        "basis": None if key.basis == "total" else key.basis,
    }
    return {name: value for name, value in items.items() if value is not None}


def size_name(nbytes: int) -> str:
    """Return a size as the key of a mapping: `8B`, `64KiB`."""
    text = format_size(nbytes)
    return text if text.endswith(tuple(SIZE_UNITS)) else f"{text}B"


def _lines(table: Table) -> Iterator[str]:
    yield "version: 1"
    if table.fingerprint:
        yield "fingerprint:"
        for name, values in table.fingerprint.items():
            written = _plain(values)
            yield f"  {_yaml(name)}: {_yaml(written[0] if len(written) == 1 else written)}"
    if table.strict:
        yield "strict: true"
    yield "rules:"
    for rule in table.rules:
        yield from _rule_lines(rule)


def _plain(values: Sequence[str]) -> list[str | int]:
    """Return the values, as ints if all are integers that need no quotes and are read back as equal text."""
    whole = all(v.isdecimal() and v.isascii() and str(int(v)) == v for v in values)
    return [int(value) if whole else value for value in values]


def _rule_lines(rule: TableRule) -> Iterator[str]:
    first, *rest = [f"{name}: {_yaml(value)}" for name, value in key_items(rule.key).items()]
    yield f"  - {first}"
    for line in (*rest, f"bytes: {rule.span()}", f"backend: {_yaml(rule.backend)}"):
        yield f"    {line}"
    if rule.reason:
        yield f"    reason: {_yaml(rule.reason)}"
    if rule.measured:
        yield "    measured:"
        for choice, curve in rule.measured.items():
            yield f"      {_yaml(choice)}: {{{', '.join(_points(curve))}}}"


def _points(curve: Mapping[int, float]) -> list[str]:
    return [f"{size_name(size)}: {microseconds(time)}" for size, time in sorted(curve.items())]


def microseconds(time: float) -> str:
    """Return a time as written in tables: four significant digits, no exponent."""
    text = f"{Decimal(f'{time:.{_DIGITS}g}'):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def rounded(curves: Curves) -> dict[str, dict[int, float]]:
    """Return curves with the precision of a table file."""
    return {
        choice: {size: float(microseconds(time)) for size, time in sorted(curve.items())}
        for choice, curve in curves.items()
    }


def _counts(value: Range) -> str | int:
    if value.hi == value.lo + 1:
        return value.lo
    return str(value)


def _yaml(value: str | int | bool | list[str | int]) -> str:
    """Return a value as one line of YAML, in quotes only if necessary."""
    odd = not all(str(item).isprintable() for item in (value if isinstance(value, list) else [value]))
    import yaml  # imported here: most jobs write no table

    text: str = yaml.safe_dump(
        value, default_flow_style=True, default_style='"' if odd else None, width=10**6, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...").strip()
