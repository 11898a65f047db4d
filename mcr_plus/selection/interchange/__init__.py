"""Tuning tables of other libraries: read into ours, and written from ours, as far as each can express them.

    text, lost = export("openmpi", load_table("table.yaml"))
    table, lost = import_("nccl-csv", Path("nccl_tuner.conf").read_text(), "nccl_tuner.conf")

Nothing is dropped silently: `lost` has one line, with its place, for all that the other side cannot say. An
unknown name in a foreign file is a `ConfigError` that begins with `file:line:`.
"""

from __future__ import annotations

from typing import Final

from mcr_plus import registry
from mcr_plus.errors import InvalidArgument, unknown
from mcr_plus.selection.interchange import nccl, oneccl, openmpi, ucc
from mcr_plus.selection.interchange.exchange import Exported, Format, Imported
from mcr_plus.selection.table import Table

FORMATS: Final[dict[str, Format]] = {
    each.name: each for each in (nccl.FORMAT, openmpi.FORMAT, ucc.FORMAT, oneccl.FORMAT)
}


def export(format: str, table: Table, *, backend: str | None = None) -> Exported:
    """Write a table in another library's format: the rules of `backend`, the library's own by default.

    Raises `InvalidArgument` for an unknown format or backend.
    """
    found = _format(format)
    return found.export(table, _backend(backend, found))


def is_empty(text: str) -> bool:
    """Whether an exported text holds no choice: nothing but comments, a version, and a count of none."""
    said = {line.partition("#")[0].strip() for line in text.splitlines()}
    return said <= {"", "0", "rule-file-version-2"}


def import_(format: str, text: str, name: str = "<text>", *, backend: str | None = None) -> Imported:
    """Read another library's format into a table whose choices are `backend` and its algorithms.

    `name` stands for the file in places and errors. Raises `ConfigError` for what the text has wrong, and
    `InvalidArgument` for an unknown format or backend.
    """
    found = _format(format)
    return found.import_(text, name, _backend(backend, found))


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise InvalidArgument(f"format: {unknown('format', name, tuple(FORMATS))}")
    return FORMATS[name]


def _backend(name: str | None, format: Format) -> str:
    known = registry.names("backends")
    if name is not None and name not in known:
        raise InvalidArgument(f"backend: {unknown('backend', name, known)}")
    return name or format.backend
