"""Parts shared by the formats: results, selection of the rules to export, and `VARIABLE=value` text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

from mcr_plus.config.names import kind_matches
from mcr_plus.core.kinds import IN_PLACE, KINDS, VECTOR
from mcr_plus.core.units import Range
from mcr_plus.errors import ConfigError
from mcr_plus.tables.areas import (
    ALL_SIZES,
    Piece,
    areas,
    by_choice,
    counts_all_ranks,
    cover,
    single,
    tile,
)
from mcr_plus.tables.table import BUILT_IN, Basis, Table, TableKey, TableRule
from mcr_plus.tables.writing import checked, key_items

_MOST_NUMBERS = 64  # rows written for one rule that applies to several numbers of ranks


class Exported(NamedTuple):
    """Text in another library's format, and a line with place for each omitted part of the table."""

    text: str
    lost: tuple[str, ...]


class Imported(NamedTuple):
    """A table, and a line with place for each omitted part of the text."""

    table: Table
    lost: tuple[str, ...]


@dataclass(frozen=True)
class ForeignCollective:
    """A library's name of a kind, and its convention of counting bytes.

    `sized` False: the library selects an algorithm as for 0 bytes, so one choice applies to all sizes.
    """

    name: str
    basis: Basis = "total"
    sized: bool = True


@dataclass(frozen=True)
class TableFormat:
    """One format: the default backend of its rules, its collectives by kind, and its functions.

    `export(table, backend)` and `import_(text, name, backend)`; `name` is used for the file in errors.
    """

    backend: str
    collectives: Mapping[str, ForeignCollective]
    export: Callable[[Table, str], Exported]
    import_: Callable[[str, str, str], Imported]


def mistake(name: str, line: int, what: str) -> ConfigError:
    """Return an error that begins with `file:line:`."""
    return ConfigError(f"{name}:{line}: {what}")


def algorithm_of(choice: str | None) -> str:
    """Return the algorithm of `name:algorithm`; empty if the library chooses."""
    return (choice or "").partition(":")[2]


# --- Out ------------------------------------------------------------------------------------------------


class Exporter:
    """The rules of a table that a format can express, and a report of the others.

    Rules of other backends are omitted. `expressible` lists the keys that the format can express: a rule with
    other keys is widened to all of their values, and has lower precedence than every rule that is expressed
    exactly. `numbers`: the format has single numbers of ranks and nodes only, no ranges.
    """

    def __init__(
        self,
        table: Table,
        backend: str,
        library: str,
        collectives: Mapping[str, ForeignCollective],
        expressible: Sequence[str],
        *,
        numbers: bool = False,
    ) -> None:
        """Select the rules of `backend` from a table."""
        self._lost = [(-1, line) for line in facts_without_place(table)]
        self._index = {id(rule): index for index, rule in enumerate(table.rules)}
        self._backend, self._library = backend, library
        self._collectives, self._expressible, self._numbers = collectives, expressible, numbers
        self._kinds_in_table = {rule.key.kind for rule in table.rules}
        self._exact: dict[str, list[TableRule]] = {kind: [] for kind in collectives}
        self._widened: dict[str, list[TableRule]] = {kind: [] for kind in collectives}
        self._origin: dict[int, tuple[TableRule, str]] = {}  # by id: several rules may be equal
        self._used: set[int] = set()
        for rule in table.rules:
            self._take(rule)

    def rules(self, kind: str) -> list[TableRule]:
        """Return the rules for a kind with the keys that the format can express; the first match wins."""
        return self._exact[kind] + self._widened[kind]

    def has_rule_for(self, kind: str) -> bool:
        """Return whether a rule has exactly this kind."""
        return any(rule.key.kind == kind for rule in self.rules(kind))

    def states_default(self, kind: str, rule: TableRule | None) -> bool:
        """Return whether a rule leaves exactly this kind to the library and an import would not add it."""
        if rule is None or rule.key.kind != kind or algorithm_of(rule.backend):
            return False
        base = kind.removesuffix("_v")
        return base == kind or not any(algorithm_of(other.backend) for other in self._exact.get(base, ()))

    def pieces(self, kind: str, ranks: Range | None = None, device: str | None = None) -> list[Piece]:
        """Return the rule for every size of a kind, in the library's basis of bytes."""
        collective = self._collectives[kind]
        area = TableKey(kind, ranks=ranks, device=device, basis=collective.basis)
        return self.pieces_of(kind, area)

    def pieces_of(self, kind: str, area: TableKey) -> list[Piece]:
        """Return the rule for every size of an area of a kind."""
        pieces = cover(self.rules(kind), area)
        if not self._collectives[kind].sized:
            pieces = [Piece(ALL_SIZES, self._only(kind, pieces))]
        self._used.update(id(piece.rule) for piece in pieces)
        return by_choice(pieces)

    def report(self, rule: TableRule, what: str) -> None:
        """Report an omitted part of a rule, once."""
        source = self._origin.get(id(rule), (rule, ""))[0]
        line = (self._index[id(source)], f"{_where(source)}: {what}")
        if line not in self._lost:
            self._lost.append(line)

    def exported(self, lines: Iterable[str]) -> Exported:
        """Return the joined lines, and the report of losses."""
        written = list(lines)  # the generator reports losses
        restricted: dict[int, tuple[TableRule, str, bool]] = {}
        for rule in (rule for rules in self._widened.values() for rule in rules):
            source, inexpressible = self._origin[id(rule)]
            used = id(rule) in self._used or restricted.get(id(source), (source, "", False))[2]
            restricted[id(source)] = (source, inexpressible, used)
        for source, inexpressible, used in restricted.values():
            how = "written without it" if used else "left out, because another rule applies there"
            self.report(source, f"{self._library} cannot express `{inexpressible}`; {how}")
        lost = tuple(line for _, line in sorted(self._lost, key=lambda entry: entry[0]))
        return Exported("".join(f"{line}\n" for line in written), lost)

    def _take(self, rule: TableRule) -> None:
        name, _, algorithm = rule.backend.partition(":")
        if name == BUILT_IN:
            self.report(rule, f"not written; {self._library} chooses instead of the built-in preference")
            return
        if name != self._backend:
            self.report(rule, f"not written; only rules of {self._backend} are")
            return
        kinds = [kind for kind in KINDS if _covers(rule.key, kind)]
        absent = [kind for kind in kinds if kind not in self._collectives and self._is_reached(rule, kind)]
        if absent and algorithm:
            self.report(rule, f"{self._library} has no rules for {', '.join(absent)}")
        if rule.key.kind == "*" and not algorithm:
            self.report(rule, f"left to {self._library}, for which nothing is written")
        for kind in kinds:
            if kind in self._collectives:
                self._take_for(rule, kind)

    def _is_reached(self, rule: TableRule, kind: str) -> bool:
        """Return whether a look-up of a kind may reach this rule; one without a size needs an open end."""
        if rule.key.kind == kind or kind not in VECTOR:
            return True
        return rule.hi is None and kind not in self._kinds_in_table

    def _take_for(self, rule: TableRule, kind: str) -> None:
        taken = rule
        if kind in VECTOR and rule.key.kind != kind:
            if rule.hi is not None:
                return
            taken = replace(rule, lo=0)  # a look-up without a size matches the rule without an end
        counted = _counted(taken, kind, self._collectives[kind].basis)
        if counted is None:
            basis = "per rank" if rule.key.basis == "total" else "in total"
            self.report(
                rule, f"{self._library} counts the bytes of {kind} {basis}, which depends on the ranks"
            )
            return
        inexpressible = {
            name: value
            for name, value in key_items(rule.key).items()
            if name not in ("kind", "basis", "in_place", *self._expressible)
        }
        for key, more in self._reduced(counted.key):
            reduced = replace(counted, key=key)
            text = ", ".join(f"{name}: {_shown(value)}" for name, value in (inexpressible | more).items())
            self._origin[id(reduced)] = (rule, text)
            (self._widened if text else self._exact)[kind].append(reduced)

    def _reduced(self, key: TableKey) -> Iterator[tuple[TableKey, dict[str, object]]]:
        """Yield keys that the format can express, each with the inexpressible ranges of ranks and nodes."""
        omitted: dict[str, object] = {}
        ranges: dict[str, list[Range | None]] = {}
        for name, value in (("ranks", key.ranks), ("nodes", key.nodes)):
            ranges[name] = [None]
            if name in self._expressible and value is not None:
                ranges[name] = [*_numbers(value)] or [None] if self._numbers else [_from_one(value)]
                omitted |= {name: value} if self._numbers and ranges[name] == [None] else {}
        device = key.device if "device" in self._expressible else None
        for ranks, nodes in product(ranges["ranks"], ranges["nodes"]):
            yield TableKey(key.kind, ranks=ranks, nodes=nodes, device=device, basis=key.basis), omitted

    def _only(self, kind: str, pieces: Sequence[Piece]) -> TableRule | None:
        """Return the single rule for all sizes of a kind that the library looks up without a size."""
        different = by_choice(pieces)
        if len(different) == 1:
            return pieces[0].rule
        if kind in VECTOR:
            applied, other = pieces[-1].rule, pieces[:-1]  # also without a size here: the rule without an end
            other = [piece for piece in other if piece.rule is not None and piece.rule.key.kind == kind]
        elif kind == "barrier":
            applied, other = pieces[0].rule, pieces[1:]
        else:
            applied, other = None, list(pieces)
        for piece in other:
            if piece.rule is not None:
                self._used.add(id(piece.rule))
                self.report(
                    piece.rule, f"{self._library} ignores the size of {kind}, so one choice applies to all"
                )
        return applied


def rank_cells(rules: Iterable[TableRule]) -> list[Range | None]:
    """Return the ranges of ranks with the same rules, in order; `[None]` if no rule has ranks."""
    ranges = [rule.key.ranks for rule in rules if rule.key.ranks is not None]
    ends = (end for ranks in ranges for end in (ranks.lo, ranks.hi))
    bounds = sorted({end for end in ends if end is not None and end > 1})
    if not bounds:
        return [None]
    return [Range(lo or 0, hi) for lo, hi in pairwise([0, *bounds, None])]


def facts_without_place(table: Table) -> Iterator[str]:
    """Yield report lines for parts of a table that no format supports and no choice depends on."""
    if table.fingerprint:
        yield f"{table.name}: the fingerprint ({', '.join(table.fingerprint)})"
    if table.strict:
        yield f"{table.name}: strict"
    measured = sum(bool(rule.measured) for rule in table.rules)
    if measured:
        yield f"{table.name}: the measurements of {measured} rule{'s' if measured > 1 else ''}"
    reasons = sum(bool(rule.reason) for rule in table.rules)
    if reasons:
        yield f"{table.name}: the reasons of {reasons} rule{'s' if reasons > 1 else ''}"


def _where(rule: TableRule) -> str:
    return f"{rule.place or '<table>'}: {rule.key} {rule.span()}: {rule.backend}"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _covers(key: TableKey, kind: str) -> bool:
    return kind_matches(key.kind, kind) and key.in_place in (None, kind in IN_PLACE)


def _from_one(numbers: Range) -> Range | None:
    """Return the range, from 0 instead of 1, because no job has 0 ranks; None if it contains all numbers."""
    lo = 0 if numbers.lo <= 1 else numbers.lo
    return None if (lo, numbers.hi) == (0, None) else Range(lo, numbers.hi)


def _numbers(numbers: Range) -> Iterator[Range]:
    """Yield a range for every number of a range; nothing if there are too many."""
    if numbers.hi is not None and numbers.hi - numbers.lo <= _MOST_NUMBERS:
        for number in range(max(numbers.lo, 1), numbers.hi):
            yield Range(number, number + 1)


def _counted(rule: TableRule, kind: str, basis: Basis) -> TableRule | None:
    """Return the rule in bytes of another basis; None if these depend on an open number of ranks."""
    key = replace(rule.key, basis=basis)
    if rule.key.basis == basis or rule.sizes == ALL_SIZES or not counts_all_ranks(kind):
        return replace(rule, key=key)
    ranks = single(rule.key.ranks)
    if ranks is None:
        return None
    ends = (rule.lo, rule.hi)
    if basis == "total":
        lo, hi = (None if end is None else end * ranks for end in ends)
    else:  # the total is `ranks` times the bytes per rank
        lo, hi = (None if end is None else -(-end // ranks) for end in ends)
    return None if lo is None or lo == hi else replace(rule, key=key, lo=lo, hi=hi)


# --- In -------------------------------------------------------------------------------------------------


@contextmanager
def reporting(lost: list[str]) -> Iterator[None]:
    """Add a `ConfigError` to what is lost: a mistake costs its line or rule, not the file."""
    try:
        yield
    except ConfigError as error:
        lost.append(str(error))


def imported(rules: Sequence[TableRule], lost: list[str], backend: str, name: str) -> Imported:
    """Make a table of rules that are sorted by precedence, and may overlap and leave gaps.

    Sizes and vector forms that the text leaves to the library go to `backend`, without an algorithm.
    """
    if not rules:
        raise mistake(name, 1, "; ".join(["no rules that a table can express; expected at least one", *lost]))
    every = [*_vector_forms(rules, backend), *rules]
    order = list(dict.fromkeys(rule.key.kind.removesuffix("_v") for rule in rules))
    tiled = sorted(tile(every, backend, name), key=lambda rule: _position(rule.key.kind, order))
    used = {
        id(piece.rule) for area in areas((rule.key for rule in every), name) for piece in cover(every, area)
    }
    lost += [f"{rule.place}: out of reach behind others" for rule in rules if id(rule) not in used]
    return Imported(checked(Table(tuple(tiled), name)), tuple(lost))


def _position(kind: str, order: Sequence[str]) -> tuple[bool, int]:
    """Return the sort key of a kind: its order in the text, with `*` last."""
    return kind == "*", order.index(kind.removesuffix("_v"))


def _vector_forms(rules: Sequence[TableRule], backend: str) -> Iterator[TableRule]:
    """Yield rules to put first for vector forms, which a kind covers in tables but not in the library."""
    for kind, place in {rule.key.kind: rule.place for rule in reversed(rules)}.items():
        vector = f"{kind}_v"
        if vector in VECTOR:
            for rule in rules:
                if rule.key.kind == vector:
                    yield rule
                elif rule.key.kind == "*":
                    yield replace(rule, key=replace(rule.key, kind=vector))
            yield TableRule(backend, 0, None, TableKey(vector), place=place)


class Assignment(NamedTuple):
    """A line of the form `VARIABLE=value`; `variable` is empty for a value alone."""

    line: int
    variable: str
    value: str


_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(\"[^\"]*\"|'[^']*'|\S*)(.*)", re.ASCII)


def _joined(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a shell's text with the number of each; a backslash at the end joins two."""
    first, joined = 1, ""
    for number, line in enumerate(text.splitlines(), 1):
        goes_on = line.endswith("\\") and not (joined or line).lstrip().startswith("#")
        joined += line.removesuffix("\\") if goes_on else line
        if not goes_on:
            yield first, joined
            first, joined = number + 1, ""
    if joined:
        yield first, joined


def assignments(text: str) -> Iterator[Assignment]:
    """Yield the lines of an environment; `export` and quotes are optional, and `#` begins a comment line.

    As in a shell, a value without quotes ends at a space, what follows is yielded by itself, and a line that
    ends with a backslash goes on in the next one.
    """
    for number, raw in _joined(text):
        line = "" if raw.lstrip().startswith("#") else raw.strip()
        while line:
            match = _ASSIGNMENT.fullmatch(line)
            variable, value, line = match.groups() if match else ("", line, "")
            if len(value) > 1 and value[0] in "\"'" and value[-1] == value[0]:
                value = value[1:-1]
            yield Assignment(number, variable, value)
            line = line.strip()
