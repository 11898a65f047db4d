"""The CSV of NCCL's example tuner plugin (since NCCL 2.27.5), read from NCCL_TUNER_CONFIG_FILE.

    allreduce,0,65535,ring,ll,2,1,8
    allreduce,65536,18446744073709551615,ring,simple,8,-1,-1

A line has collective, smallest and largest size (both included), algorithm, protocol, channels, nodes and
ranks, and optionally numPipeOps and regBuff; -1 means any, and the default number of channels. The first
matching line wins. Sizes count as in tables: the larger of a rank's input and output.

Choices are `nccl:algorithm/protocol/channels`, such as `nccl:ring/simple/8`; `nccl:ring/simple` keeps the
default number of channels. A line with numPipeOps or regBuff becomes a choice with it, such as
`nccl:ring/ll128/numPipeOps=4` or `nccl:tree/simple/2/regBuff=1`. Tables do not look these up, so lines for
usual operations (one at a time, in buffers that are not registered) come before those for others.

The plugin's own parser reads an unknown name (`AllReduce` too) as allreduce, ring or simple, and a header
without # as a line; it skips lines with too few fields. Here all of these are skipped and reported. Numbers
are read as the plugin reads them, up to the first other character, and the first ten fields that are not
empty; what a user may not expect is reported. The plugin runs operations without a matching line on one
channel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from mcr_plus.core.units import MAX_INTEGER, Range
from mcr_plus.errors import short, unknown
from mcr_plus.tables.areas import Piece, areas, intersection
from mcr_plus.tables.interchange.exchange import (
    Exported,
    Exporter,
    ForeignCollective,
    Imported,
    TableFormat,
    algorithm_of,
    imported,
    mistake,
    reporting,
)
from mcr_plus.tables.table import Table, TableKey, TableRule

COLLECTIVES: Final = {
    "all_reduce": ForeignCollective("allreduce"),
    "broadcast": ForeignCollective("broadcast"),
    "reduce": ForeignCollective("reduce"),
    "all_gather": ForeignCollective("allgather"),
    "reduce_scatter": ForeignCollective("reducescatter"),
}
ALGORITHMS: Final = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS: Final = ("ll", "ll128", "simple")

_KINDS: Final = {collective.name: kind for kind, collective in COLLECTIVES.items()}
_LARGEST: Final = (1 << 64) - 1  # the plugin's largest size_t
_LONGEST: Final = 255
_FIELDS: Final = (
    "collective", "min_bytes", "max_bytes", "algorithm", "protocol", "channels", "nNodes", "nRanks",
    "numPipeOps", "regBuff",
)  # fmt: skip
_REQUIRED: Final = 8
_SIZES: Final = ("min_bytes", "max_bytes")
_NUMBERS: Final = (*_SIZES, *_FIELDS[5:])
_USUAL: Final = {"numPipeOps": 1, "regBuff": 0}
_PASSED: Final = {"numPipeOps": range(1, 1 << 31), "regBuff": range(2)}  # passed by NCCL
_LIBRARY: Final = "NCCL's tuner"


def export(table: Table, backend: str) -> Exported:
    """Write the rules of a table that the format can express, and report the others."""
    out = Exporter(table, backend, _LIBRARY, COLLECTIVES, ("ranks", "nodes"), numbers=True)
    lines: list[str] = []
    for kind in COLLECTIVES:
        keys = [TableKey(kind, ranks=rule.key.ranks, nodes=rule.key.nodes) for rule in out.rules(kind)]
        known = areas(keys, table.name)
        for area in known:
            wider = [other for other in known if other.includes(area)]
            nested = all(wide.includes(narrow) for narrow, wide in pairwise(wider))
            lines += _lines(out, kind, area, wider[1] if nested and len(wider) > 1 else None)
    longest = max((line.count(",") + 1 for line in lines), default=_REQUIRED)
    return out.exported([f"# {','.join(_FIELDS[:longest])}", *lines])


def _lines(out: Exporter, kind: str, area: TableKey, wider: TableKey | None) -> Iterator[str]:
    """Yield the lines of one number of nodes and ranks, except those made redundant by lines of `wider`."""
    later = [] if wider is None else out.pieces_of(kind, wider)
    for sizes, rule in out.pieces_of(kind, area):
        if rule is None or any(_implies(piece, sizes, rule) for piece in later):
            continue
        algorithm = algorithm_of(rule.backend)
        if not algorithm:
            out.report(
                rule, "no line can select NCCL's own choice: a wider line applies, or else one channel"
            )
        elif (fields := _parse(algorithm)) is None:
            expected = "algorithm/protocol/channels, such as ring/simple/8 or tree/ll"
            out.report(rule, f"unknown algorithm {algorithm!r}; expected {expected}")
        else:
            largest = _LARGEST if sizes.hi is None else sizes.hi - 1
            numbers = [-1 if number is None else number.lo for number in (area.nodes, area.ranks)]
            row = (COLLECTIVES[kind].name, sizes.lo, largest, *fields[:3], *numbers, *fields[3:])
            yield ",".join(str(field) for field in row)


def _implies(piece: Piece, sizes: Range, rule: TableRule) -> bool:
    return piece.choice == rule.backend and intersection(piece.sizes, sizes) == sizes


def _parse(algorithm: str) -> list[str] | None:
    """Return the fields of `ring/simple/8/numPipeOps=4`; None if NCCL has no such algorithm."""
    names, protocols = "|".join(ALGORITHMS), "|".join(PROTOCOLS)
    conditions = "".join(rf"((?:/{field}=\d{{1,20}})?)" for field in _USUAL)
    form = rf"({names})/({protocols})(?:/(-1|[1-9]\d{{0,8}}))?{conditions}"
    match = re.fullmatch(form, algorithm, re.ASCII)
    if match is None:
        return None
    fields = [(value or "-1").rpartition("=")[2] for value in match.groups()]
    return fields[: 5 if match[5] else 4 if match[4] else 3]


def import_(text: str, name: str, backend: str) -> Imported:
    """Read the lines into a table, without those that the plugin misreads; `ConfigError` if none is left."""
    rules: list[TableRule] = []
    lost: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.startswith("#") and line.strip():
            with reporting(lost):
                rules.append(_rule(line, name, number, backend, lost))
    rules.sort(key=_is_special)
    return imported(rules, lost, backend, name)


def _is_special(rule: TableRule) -> bool:
    """Return whether a choice has other conditions than those of usual operations."""
    conditions = (part.partition("=") for part in rule.backend.split("/"))
    return any(name in _USUAL and int(value) != _USUAL[name] for name, _, value in conditions)


def _row(line: str, name: str, number: int, lost: list[str]) -> dict[str, str]:
    """Split a line as `strtok` does, which skips empty fields."""
    if (length := len(line.encode())) > _LONGEST:
        raise mistake(name, number, f"{length} characters; expected at most {_LONGEST}")
    given = line.split(",")
    fields = [field.strip(" \t") for field in given if field]
    if len(fields) < _REQUIRED:
        expected = f"{_REQUIRED} to {len(_FIELDS)} ({','.join(_FIELDS)})"
        raise mistake(name, number, f"{len(fields)} fields; expected {expected}")
    row: dict[str, str] = dict(zip(_FIELDS, fields, strict=False))
    if "" in given[: len(row)]:
        moved = ", ".join(f"{field}={value}" for field, value in [*row.items()][given.index("") :])
        lost.append(f"{name}:{number}: the plugin skips empty fields, and reads here {moved}")
    if more := fields[len(row) :]:
        lost.append(f"{name}:{number}: the plugin skips what follows {_FIELDS[-1]}: {short(','.join(more))}")
    return row


def _rule(line: str, name: str, number: int, backend: str, lost: list[str]) -> TableRule:
    row = _row(line, name, number, lost)
    for field, known in (("collective", tuple(_KINDS)), ("algorithm", ALGORITHMS), ("protocol", PROTOCOLS)):
        if row[field] not in known:
            raise mistake(name, number, unknown(field, row[field], known))
    numbers = {field: _number(field, row.get(field, "-1"), name, number, lost) for field in _NUMBERS}
    lo, hi = numbers["min_bytes"], numbers["max_bytes"]
    if lo >= MAX_INTEGER:
        raise mistake(name, number, f"min_bytes: no operation has {lo} bytes")
    if hi < lo:
        raise mistake(name, number, f"max_bytes: {hi} is below min_bytes, {lo}")
    for field in _FIELDS[5:8]:
        if numbers[field] < 1 and numbers[field] != -1:
            what = f"expected -1 or a whole number from 1 on, got {short(row[field])}"
            raise mistake(name, number, f"{field}: {what}")
    channels, nodes, ranks = (numbers[field] for field in _FIELDS[5:8])
    conditions = [(field, numbers[field]) for field in _USUAL]
    for field, value in conditions:
        if value != -1 and value not in _PASSED[field]:
            passed = "0 or 1" if field == "regBuff" else "a number from 1 on"
            raise mistake(name, number, f"{field}: NCCL passes {passed}, so {value} never applies")
    key = TableKey(_KINDS[row["collective"]], ranks=_only(ranks), nodes=_only(nodes))
    parts = [row["algorithm"], row["protocol"], *([] if channels == -1 else [str(channels)])]
    parts += [f"{field}={value}" for field, value in conditions if value != -1]
    end = hi + 1 if hi < MAX_INTEGER else None
    return TableRule(f"{backend}:{'/'.join(parts)}", lo, end, key, place=f"{name}:{number}")


def _number(field: str, text: str, name: str, number: int, lost: list[str]) -> int:
    """Read a number as `strtoull` or `atoi` does, and report it if that is not the whole text."""
    match = re.match(r"\s*([+-]?\d+)", text, re.ASCII)
    value, rest = (int(match[1]), text[match.end() :].lstrip()) if match else (0, "")
    if field in _SIZES:
        value = min(value % (_LARGEST + 1) if value < 0 else value, _LARGEST)
    elif abs(value) >> 31:
        raise mistake(name, number, f"{field}: expected a number of 32 bits, got {short(text)}")
    if match is None or value != int(match[1]) or not (rest == "" or rest.startswith("#")):
        lost.append(f"{name}:{number}: {field}: the plugin reads {short(text)} as {value}")
    return value


def _only(number: int) -> Range | None:
    return None if number == -1 else Range(number, number + 1)


FORMAT: Final = TableFormat("nccl", COLLECTIVES, export, import_)
