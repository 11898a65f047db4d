"""Import and export of other libraries' tuning tables, as far as each format can express the rules.

    text, lost = export("openmpi", load_table("table.yaml"))
    table, lost = import_("nccl-csv", Path("nccl_tuner.conf").read_text(), "nccl_tuner.conf")

`lost` has one line, with its place, for each part that the other format cannot express, so no part is dropped
silently. An unknown name in a foreign file is a `ConfigError` that begins with `file:line:`.
"""

from __future__ import annotations

from mcr_plus import registry
from mcr_plus.config.names import kind_matches, stored_backend
from mcr_plus.errors import InvalidArgument, Unsupported, unknown
from mcr_plus.tables.interchange.exchange import Exported, Imported, TableFormat, algorithm_of
from mcr_plus.tables.table import Table


def export(format: str, table: Table, *, backend: str | None = None) -> Exported:
    """Write the rules of `backend` in another library's format; by default, of that library's backend.

    Raises `InvalidArgument` for an unknown format or backend.
    """
    target = table_format(format)
    return target.export(table, _backend(backend, target))


def is_empty(text: str) -> bool:
    """Return whether an exported text has no choice: only comments, a version, and a count of 0."""
    contents = {line.partition("#")[0].strip() for line in text.splitlines()}
    return contents <= {"", "0", "rule-file-version-2"}


def import_(format: str, text: str, name: str = "<text>", *, backend: str | None = None) -> Imported:
    """Read another library's format into a table whose choices are `backend` and its algorithms.

    `name` is used for the file in places and errors.

    Raises:
        ConfigError: the text is invalid.
        InvalidArgument: unknown format or backend.
    """
    source = table_format(format)
    return source.import_(text.removeprefix("\ufeff"), name, _backend(backend, source))


def summary(format: str, table: Table) -> list[str]:
    """Return lines that say for each kind of a format what an imported table has.

    The last one names the kinds without a rule that chooses an algorithm.
    """
    lines: list[str] = []
    without: list[str] = []
    for kind in table_format(format).collectives:
        rules = [rule for rule in table.rules if kind_matches(rule.key.kind, kind)]
        count = sum(bool(algorithm_of(rule.backend)) for rule in rules)
        if not count:
            without.append(kind)
            continue
        left = len(rules) - count
        more = f", {left} that leave{'s' * (left == 1)} the choice to the library" if left else ""
        lines.append(f"{kind}: {count} rule{'s' * (count > 1)} with an algorithm{more}")
    return [*lines, f"no rule with an algorithm: {', '.join(without)}"] if without else lines


def table_format(name: str) -> TableFormat:
    """Return the format of a name; raise `InvalidArgument` if the registry has none there."""
    try:
        return registry.checked("table_formats", name, TableFormat)
    except Unsupported as error:
        raise InvalidArgument(f"format: {error}") from None


def _backend(name: str | None, format: TableFormat) -> str:
    known, name = registry.names("backends"), stored_backend(name)
    if name is not None and name not in known:
        raise InvalidArgument(f"backend: {unknown('backend', name, known)}")
    return name or format.backend
