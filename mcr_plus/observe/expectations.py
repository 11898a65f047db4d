"""Times that the job's tuning tables predict for its recorded operations."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from mcr_plus.config.schema import Config
from mcr_plus.core.kinds import plain_kind
from mcr_plus.errors import McrError
from mcr_plus.observe.explain import explained
from mcr_plus.observe.record import Record, size_class

_MOST: Final = 24  # rows: explaining one takes some milliseconds
_ITEMSIZE: Final = 16  # bytes; a multiple of every dtype's size


def expectations(records: Sequence[Record], config: Config, nodes: int) -> list[dict[str, Any]]:
    """Return rows for the operations that took longest in total, by kind, size class, tag, library and ranks.

    A row has `kind`, `size_class`, `tag`, `backend`, `ranks`, `is_async`, `bytes` (the median), `count`, and
    two mappings: `job`, by the job's configuration, and `usual`, by a configuration that names no library
    and no table. Each mapping has `expected_us` of the chosen library and `alternatives` (choice →
    microseconds; only comparable figures), and is empty if the operation cannot be explained. Operations with
    codecs have no row: tables hold uncompressed operations.
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record.error is None and record.codec is None and record.ranks > 1:
            key = (
                record.kind, size_class(record.bytes), record.tag, record.backend, record.ranks,
                record.is_async, record.dtype,
            )  # fmt: skip
            groups.setdefault(key, []).append(record)

    def seconds(group: Sequence[Record]) -> float:
        return sum(record.t_done - record.t_issue for record in group)

    rows = []
    for key, group in sorted(groups.items(), key=lambda item: -seconds(item[1]))[:_MOST]:
        kind, size, tag, backend, ranks, is_async, dtype = key
        nbytes = int(median(record.bytes for record in group)) // _ITEMSIZE * _ITEMSIZE
        options: dict[str, Any] = {
            "tag": tag, "ranks": ranks, "nodes": min(nodes, ranks), "async_op": is_async,
            "dtype": "uint8" if dtype == "none" else dtype,
        }  # fmt: skip
        rows.append(
            {
                "kind": kind, "size_class": size, "tag": tag, "backend": backend, "ranks": ranks,
                "is_async": is_async, "bytes": nbytes, "count": len(group),
                "job": _explained(kind, nbytes, config=config, **options),
                "usual": _explained(kind, nbytes, config={"version": 1}, **options),
            }
        )  # fmt: skip
    return rows


def _explained(kind: str, nbytes: int, **options: Any) -> dict[str, Any]:
    try:  # tables list no sizes of vector collectives: use the plain kind, which is close
        document = explained(plain_kind(kind), nbytes, **options).document
    except McrError:  # such as a library that has failed since
        return {}
    alternatives = document["alternatives"] or {}
    comparable = {
        choice: each["expected_us"]
        for choice, each in alternatives.items()
        if each.get("expected_us") is not None and each.get("figure") in ("measured", "extrapolated")
    }
    chosen = document["backends"][0] if document["backends"] else ""
    return {
        "expected_us": comparable.get(chosen, document["expected_us"]),
        "alternatives": comparable,
    }
