"""Options of the stage `select`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, InstanceOf, PlainSerializer, ValidationInfo

from mcr_plus.config.options import BytesOrNone, StageOptions
from mcr_plus.config.schema import TableRef, file_ref


def _table_ref(value: object, info: ValidationInfo) -> TableRef | None:
    if value is None or isinstance(value, TableRef):
        return value
    return file_ref(value, info, "table")


def _table_text(table: TableRef | None) -> str | None:
    return table.text if table else None


class SelectOptions(StageOptions):
    """Options of `select`.

    `table`: a table file, or None for the built-in one. `vector_size`: the size in bytes with which vector
    collectives are looked up, because their real size differs between ranks; None uses the rules for the
    largest sizes.
    `online`: True to continue measuring while the job runs. `refined`: the file for the results.
    """

    table: Annotated[
        InstanceOf[TableRef] | None, BeforeValidator(_table_ref), PlainSerializer(_table_text)
    ] = None
    vector_size: BytesOrNone = None
    online: bool = False
    refined: str | None = None

    def by_content(self) -> dict[str, Any]:
        """See `StageOptions.by_content`."""
        data = self.plain()
        if self.table is not None:
            data["table"] = self.table.digest()
        return data

    def files(self) -> Sequence[TableRef]:
        """See `StageOptions.files`."""
        return () if self.table is None else (self.table,)
