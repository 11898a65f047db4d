"""oneCCL's environment variables CCL_<COLLECTIVE>, one per line.

    CCL_ALLREDUCE="recursive_doubling:0-8192;rabenseifner:8193-1048576;ring:1048577-max"
    CCL_BCAST=double_tree

A range is in bytes and includes both ends; a later entry overrides an earlier one, and an algorithm without a
range applies to all sizes. Sizes without an entry keep oneCCL's own choice, as with a plain `mpi` rule.
Choices are `mpi:algorithm` (or those of another backend that uses oneCCL). The format has no ranks, hosts or
dtypes. Bytes of allgather, allgatherv, reduce_scatter and alltoall are those of one rank; barrier and
alltoallv are looked up with 0 bytes. oneCCL itself reads `8K` as 8; sizes with a unit are errors here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from mcr_plus.core.units import MAX_INTEGER
from mcr_plus.errors import short, unknown
from mcr_plus.tables.interchange.exchange import (
    Assignment,
    Exported,
    Exporter,
    ForeignCollective,
    Imported,
    TableFormat,
    algorithm_of,
    assignments,
    imported,
    mistake,
    reporting,
)
from mcr_plus.tables.table import Basis, Table, TableKey, TableRule

_LIBRARY: Final = "oneCCL"
COLLECTIVES: Final = {
    "all_reduce": ForeignCollective("ALLREDUCE"),
    "broadcast": ForeignCollective("BCAST"),
    "reduce": ForeignCollective("REDUCE"),
    "all_gather": ForeignCollective("ALLGATHER", basis="per_rank"),
    "all_gather_v": ForeignCollective("ALLGATHERV", basis="per_rank"),
    "reduce_scatter": ForeignCollective("REDUCE_SCATTER", basis="per_rank"),
    "all_to_all": ForeignCollective("ALLTOALL", basis="per_rank"),
    "all_to_all_v": ForeignCollective("ALLTOALLV", sized=False),
    "barrier": ForeignCollective("BARRIER", sized=False),
}
_ALGORITHMS: Final = {
    "ALLREDUCE": "direct rabenseifner nreduce starlike ring ring_rma double_tree recursive_doubling 2d topo",
    "BCAST": "direct ring double_tree naive topo",
    "REDUCE": "direct rabenseifner ring tree double_tree topo",
    "ALLGATHER": "direct naive ring flat multi_bcast topo",
    "ALLGATHERV": "direct naive ring flat multi_bcast topo",
    "REDUCE_SCATTER": "direct naive ring topo",
    "ALLTOALL": "direct naive scatter topo",
    "ALLTOALLV": "direct naive scatter topo",
    "BARRIER": "direct ring",
}
ALGORITHMS: Final = {name: tuple(text.split()) for name, text in _ALGORITHMS.items()}
"""Algorithms of the releases 2021.x of oneCCL."""

_KINDS: Final = {collective.name: kind for kind, collective in COLLECTIVES.items()} | {
    "BROADCAST": "broadcast"
}
_SCALEOUT: Final = "_SCALEOUT"


def export(table: Table, backend: str) -> Exported:
    """Write the rules of a table that the format can express, and report the others."""
    out = Exporter(table, backend, _LIBRARY, COLLECTIVES, ())
    return out.exported(line for kind in COLLECTIVES for line in _lines(out, kind))


def _lines(out: Exporter, kind: str) -> Iterator[str]:
    name = COLLECTIVES[kind].name
    entries = []
    defaults: list[TableRule] = []
    for sizes, rule in out.pieces(kind):
        algorithm = algorithm_of(rule.backend) if rule is not None else ""
        if rule is None or not algorithm:
            defaults += [] if rule is None else [rule]
        elif algorithm not in ALGORITHMS[name]:
            known = ", ".join(ALGORITHMS[name])
            out.report(rule, f"{_LIBRARY} has no {name} algorithm {short(algorithm)}; known: {known}")
        elif (sizes.lo, sizes.hi) == (0, None):
            entries.append(algorithm)
        else:
            entries.append(f"{algorithm}:{sizes.lo}-{'max' if sizes.hi is None else sizes.hi - 1}")
    if entries:
        yield f'CCL_{name}="{";".join(entries)}"'
        return
    for rule in defaults:
        if out.states_default(kind, rule):
            out.report(rule, f"left to {_LIBRARY}, which no variable can express")


def import_(text: str, name: str, backend: str) -> Imported:
    """Read lines `CCL_<COLLECTIVE>=...` into a table; raises `ConfigError` if no rule is left."""
    rules: dict[str, list[TableRule]] = {}
    lost: list[str] = []
    for assignment in assignments(text):
        with reporting(lost):
            collective = _collective(assignment, name)
            if collective is None:
                what = (
                    f"{assignment.variable}: tables have no separate choice for communication between hosts"
                )
                raise mistake(name, assignment.line, what)
            kind = _KINDS[collective]
            own = _rules(assignment, COLLECTIVES[kind], kind, name, backend, lost)
            if earlier := rules.pop(kind, None):
                lost.append(
                    f"{earlier[0].place}: {kind} is set again in line {assignment.line}, which is taken"
                )
            rules[kind] = own
    return imported([rule for each in rules.values() for rule in each], lost, backend, name)


def _collective(assignment: Assignment, name: str) -> str | None:
    """Return the collective of a variable; None if the variable applies only to traffic between hosts."""
    if not assignment.variable:
        hint = "; a value has no spaces between its entries" * assignment.value.startswith(";")
        raise mistake(name, assignment.line, f"no VARIABLE=value: {short(assignment.value)}{hint}")
    known = [f"CCL_{collective}" for collective in _KINDS]
    if assignment.variable.removesuffix(_SCALEOUT) not in known:
        what = unknown("variable", assignment.variable, known)
        raise mistake(name, assignment.line, what)
    is_scaleout = assignment.variable.endswith(_SCALEOUT)
    return None if is_scaleout else assignment.variable.removeprefix("CCL_")


def _rules(
    assignment: Assignment, collective: ForeignCollective, kind: str, name: str, backend: str, lost: list[str]
) -> list[TableRule]:
    """Return the rules of one variable, the last entry first, because it overrides earlier ones."""
    place = f"{name}:{assignment.line}"
    rules = []
    for entry in assignment.value.removesuffix(";").split(";"):
        algorithm, colon, sizes = entry.partition(":")
        if algorithm not in ALGORITHMS[collective.name]:
            raise mistake(name, assignment.line, unknown("algorithm", algorithm, ALGORITHMS[collective.name]))
        lo, hi = _bounds(sizes, name, assignment.line) if colon else (0, None)
        whole = (lo, hi) == (0, None)
        if not collective.sized and not whole:
            if lo > 0:
                lost.append(f"{place}: {entry}: {collective.name} is looked up as if of 0 bytes")
                continue
            lo, hi = 0, None
        basis: Basis = "total" if (lo, hi) == (0, None) else collective.basis
        rules.append(TableRule(f"{backend}:{algorithm}", lo, hi, TableKey(kind, basis=basis), place=place))
    return _same_basis(rules[::-1])


def _same_basis(rules: list[TableRule]) -> list[TableRule]:
    """Return the rules with the key of the bounded ones, so that together they tile all sizes."""
    key = next((rule.key for rule in rules if rule.key.basis == "per_rank"), None)
    return [TableRule(r.backend, r.lo, r.hi, key or r.key, place=r.place) for r in rules]


def _bounds(text: str, name: str, line: int) -> tuple[int, int | None]:
    match = re.fullmatch(r"(\d{1,20})-(\d{1,20}|max)", text, re.ASCII)
    if match is None:
        raise mistake(name, line, f"expected bytes such as 0-8192 or 8193-max, got {short(text)}")
    lo = int(match.group(1))
    hi = None if match.group(2) == "max" else int(match.group(2))
    if hi is not None and hi < lo:
        raise mistake(name, line, f"{short(text)} is empty; expected the smaller size first")
    return lo, None if hi is None or hi >= MAX_INTEGER else hi + 1


FORMAT: Final = TableFormat("mpi", COLLECTIVES, export, import_)
