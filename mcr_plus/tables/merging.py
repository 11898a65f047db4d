"""Shrink a table, and merge several tables.

    merge([load_table("two_ranks.yaml"), load_table("four_ranks.yaml")])
    shrink(load_table("long.yaml"))

The first matching rule applies to an operation, so both functions put narrow keys before wide keys.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from mcr_plus.core.units import Range
from mcr_plus.errors import ConfigError, InvalidArgument, short
from mcr_plus.tables.areas import intersection, joined, needed, overlap, united
from mcr_plus.tables.fingerprint import Fingerprint, merged
from mcr_plus.tables.table import Basis, Table, TableKey, TableRule
from mcr_plus.tables.writing import checked

SCALE: Final = ("ranks", "nodes", "ranks_per_node")
"""Facts of a fingerprint that are also keys of rules."""

Prefer = Literal["first", "last"]

# --- Shrinking ------------------------------------------------------------------------------------------


def shrink(table: Table) -> Table:
    """Return a table with fewer rules and the same choice for every operation.

    Neighbouring rules of a key with the same choice become one, with the measurements of both. A key without
    measurements is removed if other rules make the same choices for all operations of the key. If rules of
    two keys are interleaved and choose differently, only adjacent rules are joined.
    """
    rules = list(table.rules)
    while (fewer := _shrunk(rules, table.name)) != rules:  # a removed key may have separated other keys
        rules = fewer
    return checked(replace(table, rules=tuple(rules)))


def _shrunk(rules: Sequence[TableRule], where: str) -> list[TableRule]:
    measured = frozenset(rule.key for rule in rules if rule.measured)
    left = needed(rules, where, measured)
    ordered = _ordered(_groups(left, 0))
    return joined(left if ordered is None else [rule for group in ordered for rule in group.by_size()])


# --- The order of keys ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _KeyRules:
    """Rules of one key in one of several tables, with their positions in that table."""

    key: TableKey
    source: int
    rules: tuple[tuple[int, TableRule], ...]

    @property
    def place(self) -> str:
        return self.rules[0][1].place or str(self.key)

    def by_size(self) -> list[TableRule]:
        return sorted((rule for _, rule in self.rules), key=lambda rule: rule.lo)

    def choices(self) -> tuple[Basis, list[tuple[int, int | None, str]]]:
        return self.key.basis, [(rule.lo, rule.hi, rule.backend) for rule in self.by_size()]

    def precedes(self, other: _KeyRules) -> bool:
        """Return whether this group must come before `other` in a table."""
        if not overlap(self.key, other.key):
            return False
        narrower = other.key.includes(self.key) and not self.key.includes(other.key)
        return narrower or (self.source == other.source and self._shadows(other))

    def _shadows(self, other: _KeyRules) -> bool:
        """Return whether a rule of this group shadows a later rule of `other` with another choice."""
        return any(
            at < behind
            and rule.backend != later.backend
            and (self.key.basis != other.key.basis or intersection(rule.sizes, later.sizes) is not None)
            for at, rule in self.rules
            for behind, later in other.rules
        )


def _groups(rules: Sequence[TableRule], source: int) -> list[_KeyRules]:
    by_key: dict[TableKey, list[tuple[int, TableRule]]] = {}
    for index, rule in enumerate(rules):
        by_key.setdefault(rule.key, []).append((index, rule))
    return [_KeyRules(key, source, tuple(members)) for key, members in by_key.items()]


def _ordered(groups: Sequence[_KeyRules]) -> list[_KeyRules] | None:
    """Sort groups topologically by `precedes`, otherwise stably; None if there is no such order."""
    behind: list[list[int]] = [[] for _ in groups]
    waits = [0] * len(groups)
    for index, group in enumerate(groups):
        for other, candidate in enumerate(groups):
            if index != other and group.precedes(candidate):
                behind[index].append(other)
                waits[other] += 1
    ready = [index for index, count in enumerate(waits) if count == 0]
    ordered = []
    while ready:
        index = heapq.heappop(ready)
        ordered.append(groups[index])
        for other in behind[index]:
            waits[other] -= 1
            if waits[other] == 0:
                heapq.heappush(ready, other)
    return ordered if len(ordered) == len(groups) else None


# --- Merging --------------------------------------------------------------------------------------------


def merge(tables: Sequence[Table], *, prefer: Prefer | None = None) -> Table:
    """Return one table with the rules of all tables.

    If fingerprints differ in `ranks`, `nodes` or `ranks_per_node`, rules without these keys get the numbers
    of their table's fingerprint, so that they do not conflict. Narrow rules come first. Rules of one key in
    two tables must make the same choices, unless `prefer` selects one of them. The fingerprint has every
    value of the facts that are in all tables; the result is strict if one of the tables is.

    Raises:
        ConfigError: rules of one key conflict, or rules of two keys are interleaved so that neither can come
            first (with both places), or the result fails the checks of a table.
        InvalidArgument: no table, or an unknown `prefer`.
    """
    if prefer not in (None, "first", "last"):
        raise InvalidArgument(f"prefer: unknown value {short(prefer)}; known: first, last")
    if not tables:
        raise InvalidArgument("tables: expected at least one table, got none")
    if len(tables) == 1:
        return tables[0]
    prints = [table.fingerprint for table in tables]
    groups: list[_KeyRules] = []
    for index, table in enumerate(tables):
        _add(groups, _groups(_scaled(table, prints), index), prefer)
    ordered = _ordered(groups)
    if ordered is None:
        raise _entangled(groups)
    rules = tuple(rule for group in ordered for _, rule in group.rules)
    strict = any(table.strict for table in tables)
    facts = merged(prints)
    if strict and not facts:
        names = ", ".join(table.name for table in tables if table.strict)
        raise ConfigError(
            f"{names}: strict, but the tables have no fact in common, so the merged one would accept every "
            "job; expected fingerprints in all of them, or strict: false"
        )
    return checked(Table(rules, "<merged>", facts, strict))


def _scaled(table: Table, prints: Sequence[Fingerprint]) -> list[TableRule]:
    """Return the rules of a table; facts in which the table differs from other tables become keys."""
    own: dict[str, Range] = {}
    for name in SCALE:
        stated = table.fingerprint.get(name, ())
        if len(stated) == 1 and stated[0].isdigit() and len({facts.get(name) for facts in prints}) > 1:
            own[name] = Range(int(stated[0]), int(stated[0]) + 1)
    return [replace(rule, key=_restricted(rule.key, own)) for rule in table.rules]


def _restricted(key: TableKey, own: dict[str, Range]) -> TableKey:
    """Return the key, with `own` for numbers that the key leaves open."""
    return TableKey(
        key.kind, key.dtype, key.ranks or own.get("ranks"), key.nodes or own.get("nodes"),
        key.ranks_per_node or own.get("ranks_per_node"), key.device, key.in_place, key.async_op, key.basis,
    )  # fmt: skip


def _add(groups: list[_KeyRules], new: Sequence[_KeyRules], prefer: Prefer | None) -> None:
    """Add the groups of the next table to the groups of earlier tables."""
    earlier = {replace(group.key, basis="total"): index for index, group in enumerate(groups)}
    for group in new:
        index = earlier.get(replace(group.key, basis="total"))
        if index is None:
            groups.append(group)
        elif groups[index].choices() == group.choices():
            groups[index] = _remeasured(groups[index], group, prefer)
        elif prefer is None:
            what = f"{group.key}: conflicts with {groups[index].place}"
            raise ConfigError(f"{group.place}: rules: {what}; expected the same, or --prefer first or last")
        elif prefer == "last":
            groups[index] = group


def _remeasured(one: _KeyRules, other: _KeyRules, prefer: Prefer | None) -> _KeyRules:
    """Return the first of two groups with the same choices, with the measurements of both."""
    counterparts = {rule.lo: rule.measured for _, rule in other.rules}
    rules = []
    for at, rule in one.rules:
        older, newer = rule.measured, counterparts[rule.lo]
        both = united(older, newer) if prefer == "last" else united(newer, older)
        rules.append((at, replace(rule, measured=both)))
    return replace(one, rules=tuple(rules))


def _entangled(groups: Sequence[_KeyRules]) -> ConfigError:
    for index, one in enumerate(groups):
        for other in groups[index + 1 :]:
            if one.precedes(other) and other.precedes(one):
                what = f"{one.key} and {other.key} ({other.place}) are interleaved"
                return ConfigError(f"{one.place}: rules: {what}; expected the rules of each key together")
    places = ", ".join(group.place for group in groups)
    return ConfigError(f"<merged>: rules: no order puts narrow keys first ({places}); expected nested keys")
