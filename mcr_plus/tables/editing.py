"""Operations on tables: merge several, compare two, shrink one, and tile overlapping rules into a table.

    merge([load_table("two_ranks.yaml"), load_table("four_ranks.yaml")])
    diff(load_table("monday.yaml"), load_table("tuesday.yaml"))     # a list of Change
    shrink(load_table("long.yaml"))

If keys of rules overlap, the order of the rules decides. This module works by *areas*: an area is one of the
keys, or the intersection of some. Every operation has a narrowest area that covers it, and the keys that
cover the operation are those that include this area, so a look-up can be evaluated area by area.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, NamedTuple, TypeVar

from mcr_plus.config.names import kind_matches
from mcr_plus.core.kinds import IN_PLACE, SHARED
from mcr_plus.core.units import Range, format_size
from mcr_plus.errors import ConfigError, InvalidArgument, short
from mcr_plus.tables.cost import Curve
from mcr_plus.tables.fingerprint import Fingerprint, merged
from mcr_plus.tables.table import (
    MAX_RULES,
    Basis,
    Curves,
    Table,
    TableKey,
    TableRule,
    parse_table,
)
from mcr_plus.tables.writing import size_name, table_text

SCALE: Final = ("ranks", "nodes", "ranks_per_node")
"""Facts of a fingerprint that are keys of rules too."""

ALL_SIZES: Final = Range(0)
Prefer = Literal["first", "last"]
T = TypeVar("T")


def checked(table: Table) -> Table:
    """Return the table after the checks of a table file; raises `ConfigError` if it fails them."""
    bare = replace(table, rules=tuple(replace(rule, measured={}) for rule in table.rules))
    parse_table(table_text(bare), table.name)
    return table


# --- Keys that overlap ----------------------------------------------------------------------------------


class _Disjoint(Exception):
    """Two keys have no operation in common."""


def common_key(one: TableKey, other: TableKey) -> TableKey | None:
    """Return the key of the operations that both keys cover.

    None if there are none, or if the keys count bytes differently and the number of ranks, which would relate
    the two, is open.
    """
    common = _common(one, other)
    if common is None or one.basis == other.basis:
        return common and replace(common, basis=one.basis)
    return common if _comparable(common) else None


def overlap(one: TableKey, other: TableKey) -> bool:
    """Whether both keys cover some operation, however they count its bytes."""
    return _common(one, other) is not None


def _common(one: TableKey, other: TableKey) -> TableKey | None:
    try:
        common = TableKey(
            _common_kind(one.kind, other.kind),
            _common_value(one.dtype, other.dtype),
            _common_range(one.ranks, other.ranks),
            _common_range(one.nodes, other.nodes),
            _common_range(one.ranks_per_node, other.ranks_per_node),
            _common_value(one.device, other.device),
            _common_value(one.in_place, other.in_place),
            _common_value(one.async_op, other.async_op),
        )
    except _Disjoint:
        return None
    if common.kind == "*" or common.in_place is None:
        return common
    return replace(common, in_place=None) if common.in_place == (common.kind in IN_PLACE) else None


def _common_kind(one: str, other: str) -> str:
    if kind_matches(one, other):
        return other
    if kind_matches(other, one):
        return one
    raise _Disjoint


def _common_value(one: T | None, other: T | None) -> T | None:
    if one is None or other is None or one == other:
        return other if one is None else one
    raise _Disjoint


def _common_range(one: Range | None, other: Range | None) -> Range | None:
    if one is None or other is None:
        return other if one is None else one
    common = intersection(one, other)
    if common is None:
        raise _Disjoint
    return common


def intersection(one: Range, other: Range) -> Range | None:
    """Return the numbers that are in both ranges; None if there are none."""
    ends = [end for end in (one.hi, other.hi) if end is not None]
    lo, hi = max(one.lo, other.lo), min(ends, default=None)
    return None if hi is not None and hi <= lo else Range(lo, hi)


def single(numbers: Range | None) -> int | None:
    """Return the only number of a range; None if there are several."""
    return numbers.lo if numbers is not None and numbers.hi == numbers.lo + 1 else None


def counts_all_ranks(kind: str) -> bool:
    """Whether bytes per rank differ from bytes in total, for operations of a kind."""
    return kind == "*" or kind.removesuffix("_v") in SHARED


def _comparable(key: TableKey) -> bool:
    """Whether bytes in total determine the bytes per rank."""
    return not counts_all_ranks(key.kind) or single(key.ranks) is not None


def narrow_first(keys: Iterable[TableKey]) -> list[TableKey]:
    """Sort keys so that none follows a key that includes it; kinds together, `*` last."""
    ordered = list(keys)
    families = list(dict.fromkeys(_family(key.kind) for key in ordered))
    return sorted(ordered, key=lambda key: (key.kind == "*", families.index(_family(key.kind)), _width(key)))


def _family(kind: str) -> str:
    return kind.removesuffix("_v")


def _width(key: TableKey) -> tuple[object, ...]:
    """A sort key that grows with every part in which a key is wider than another."""
    ranges = (key.ranks, key.nodes, key.ranks_per_node)
    plain = (key.dtype, key.device, key.in_place, key.async_op)
    parts: list[object] = [not key.kind.endswith("_v"), *(value is None for value in plain)]
    for value in ranges:
        if value is None:
            parts.append((1, 0, 0))
        else:
            parts.append(
                (0, float("inf"), -value.lo) if value.hi is None else (0, value.hi - value.lo, value.lo)
            )
    return tuple(parts)


def areas(keys: Iterable[TableKey], where: str = "<rules>", limit: int = MAX_RULES) -> list[TableKey]:
    """Return the keys and all intersections of some of them, narrow ones first.

    Raises `ConfigError`, which begins with `where`, if there are more than `limit`.
    """
    known = dict.fromkeys(keys)
    new = list(known)
    while new:
        key = new.pop()
        for other in list(known):
            common = common_key(key, other) if other != key else key
            if common is not None and common not in known:
                known[common] = None
                new.append(common)
        if len(known) > limit:
            what = f"keys have more than {limit} intersections; expected fewer keys, or nested ones"
            raise ConfigError(f"{where}: rules: {what}")
    return narrow_first(known)


# --- Assignment of sizes to rules -----------------------------------------------------------------------


class Piece(NamedTuple):
    """A range of sizes and the rule that applies to it, or None."""

    sizes: Range
    rule: TableRule | None

    @property
    def choice(self) -> str | None:
        """`name` or `name:algorithm`."""
        return None if self.rule is None else self.rule.backend


def cover(rules: Iterable[TableRule], area: TableKey) -> list[Piece]:
    """Return the rule for every size of the operations of an area: the first rule that includes it.

    The pieces are in order and cover all sizes. Rules whose bytes cannot be converted to the area's are
    omitted, unless they apply to all sizes.
    """
    taken: list[Piece] = []
    free = [ALL_SIZES]
    for rule in rules:
        sizes = _sizes_in(rule, area) if rule.key.includes(area) else None
        if sizes is None:
            continue
        shares = [(gap, intersection(gap, sizes)) for gap in free]
        taken += [Piece(share, rule) for _, share in shares if share is not None]
        free = [rest for gap, share in shares for rest in _without(gap, share)]
        if not free:
            break
    return sorted([*taken, *(Piece(gap, None) for gap in free)], key=lambda piece: piece.sizes.lo)


def _without(gap: Range, share: Range | None) -> Iterator[Range]:
    if share is None:
        yield gap
        return
    if gap.lo < share.lo:
        yield Range(gap.lo, share.lo)
    if share.hi is not None and share.hi != gap.hi:
        yield Range(share.hi, gap.hi)


def _sizes_in(rule: TableRule, area: TableKey) -> Range | None:
    """The sizes of a rule as an area counts them; None if that depends on the number of ranks."""
    sizes = rule.sizes
    if rule.key.basis == area.basis or sizes == ALL_SIZES or not counts_all_ranks(area.kind):
        return sizes
    ranks = single(area.ranks)
    if ranks is None or area.basis == "per_rank":
        return None
    return Range(sizes.lo * ranks, None if sizes.hi is None else sizes.hi * ranks)


def by_choice(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours that make the same choice; each keeps its first rule."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].choice == piece.choice:
            joined[-1] = Piece(Range(joined[-1].sizes.lo, piece.sizes.hi), joined[-1].rule)
        else:
            joined.append(piece)
    return joined


def tile(rules: Sequence[TableRule], default: str, where: str) -> tuple[TableRule, ...]:
    """Make the rules of a table from rules that may overlap and leave gaps: the first that matches wins.

    Sizes of a key without a rule go to `default`. Raises `ConfigError`, which begins with `where`, if the
    keys have too many intersections.
    """
    tiled = []
    for area in areas((rule.key for rule in rules), where):
        near = next((rule.place for rule in rules if area.includes(rule.key)), "")
        for sizes, rule in by_choice(cover(rules, area)):
            place = near if rule is None else rule.place
            choice = default if rule is None else rule.backend
            tiled.append(TableRule(choice, sizes.lo, sizes.hi, area, place=place))
    return tuple(_needed(_joined(tiled), where))


def _needed(
    rules: Sequence[TableRule], where: str, keep: frozenset[TableKey] = frozenset()
) -> list[TableRule]:
    """The rules without keys whose removal changes no look-up; keys in `keep` always stay."""
    keys = list(dict.fromkeys(rule.key for rule in rules))
    left = list(rules)
    known = areas(keys, where)
    for key in narrow_first(key for key in keys if key not in keep):
        related = [other for other in keys if overlap(key, other)]
        if any(common_key(key, other) is None for other in related):
            continue
        near = [rule for rule in left if rule.key in related]
        rest = [rule for rule in near if rule.key != key]
        if all(_decisions(near, area) == _decisions(rest, area) for area in known if key.includes(area)):
            left = [rule for rule in left if rule.key != key]
    return left


def _decisions(rules: Sequence[TableRule], area: TableKey) -> list[tuple[Range, str | None]]:
    return [(piece.sizes, piece.choice) for piece in by_choice(cover(rules, area))]


# --- Shrinking ------------------------------------------------------------------------------------------


def shrink(table: Table) -> Table:
    """Return a table with fewer rules and the same choice for every operation.

    Neighbouring rules of a key with the same choice become one, with the measurements of both. A key without
    measurements is removed if other rules make the same choices for all of its operations. If rules of two
    keys are interleaved and choose differently, only adjacent rules are joined.
    """
    rules = list(table.rules)
    while (fewer := _shrunk(rules, table.name)) != rules:  # a removed key may have separated others
        rules = fewer
    return checked(replace(table, rules=tuple(rules)))


def _shrunk(rules: Sequence[TableRule], where: str) -> list[TableRule]:
    measured = frozenset(rule.key for rule in rules if rule.measured)
    needed = _needed(rules, where, measured)
    ordered = _ordered(_groups(needed, 0))
    return _joined(needed if ordered is None else [rule for group in ordered for rule in group.by_size()])


def _joined(rules: Sequence[TableRule]) -> list[TableRule]:
    """Join rules that are adjacent, in the list and in size, and make the same choice."""
    joined: list[TableRule] = []
    for rule in rules:
        last = joined[-1] if joined else None
        if last is not None and (last.key, last.hi, last.backend) == (rule.key, rule.lo, rule.backend):
            reasons = dict.fromkeys(filter(None, [*last.reason.split("; "), *rule.reason.split("; ")]))
            measured = _united(last.measured, rule.measured)
            joined[-1] = replace(last, hi=rule.hi, measured=measured, reason="; ".join(reasons))
        else:
            joined.append(rule)
    return joined


def _united(one: Curves, other: Curves) -> dict[str, dict[int, float]]:
    """The points of both; `other` takes precedence."""
    names = dict.fromkeys([*one, *other])
    return {name: {**one.get(name, {}), **other.get(name, {})} for name in names}


# --- The order of keys ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """The rules of one key in one of several tables, with their positions there."""

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

    def precedes(self, other: _Group) -> bool:
        """Whether this group must come first in a table with both."""
        if not overlap(self.key, other.key):
            return False
        narrower = other.key.includes(self.key) and not self.key.includes(other.key)
        return narrower or (self.source == other.source and self._shadows(other))

    def _shadows(self, other: _Group) -> bool:
        """Whether a rule here takes operations from a later rule of `other` with another choice."""
        return any(
            at < behind
            and rule.backend != later.backend
            and (self.key.basis != other.key.basis or intersection(rule.sizes, later.sizes) is not None)
            for at, rule in self.rules
            for behind, later in other.rules
        )


def _groups(rules: Sequence[TableRule], source: int) -> list[_Group]:
    by_key: dict[TableKey, list[tuple[int, TableRule]]] = {}
    for index, rule in enumerate(rules):
        by_key.setdefault(rule.key, []).append((index, rule))
    return [_Group(key, source, tuple(members)) for key, members in by_key.items()]


def _ordered(groups: Sequence[_Group]) -> list[_Group] | None:
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
    """Return one table with the rules of all.

    If fingerprints differ in `ranks`, `nodes` or `ranks_per_node`, rules without these keys get the numbers
    of their table's fingerprint, so that they do not conflict. Narrow rules come first. Rules of one key in
    two tables must make the same choices, unless `prefer` selects one of them. The fingerprint states every
    value of the facts that all tables state; the result is strict if one of the tables is.

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
    groups: list[_Group] = []
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
            f"{names}: strict, but the tables state no fact in common, so the merged one would refuse "
            "nothing; expected fingerprints in all of them, or strict: false"
        )
    return checked(Table(rules, "<merged>", facts, strict))


def _scaled(table: Table, prints: Sequence[Fingerprint]) -> list[TableRule]:
    """The rules of a table, with the facts in which it differs from the others as keys."""
    own: dict[str, Range] = {}
    for name in SCALE:
        stated = table.fingerprint.get(name, ())
        if len(stated) == 1 and stated[0].isdigit() and len({facts.get(name) for facts in prints}) > 1:
            own[name] = Range(int(stated[0]), int(stated[0]) + 1)
    return [replace(rule, key=_restricted(rule.key, own)) for rule in table.rules]


def _restricted(key: TableKey, own: dict[str, Range]) -> TableKey:
    """The key, with `own` for the numbers it leaves open."""
    return TableKey(
        key.kind, key.dtype, key.ranks or own.get("ranks"), key.nodes or own.get("nodes"),
        key.ranks_per_node or own.get("ranks_per_node"), key.device, key.in_place, key.async_op, key.basis,
    )  # fmt: skip


def _add(groups: list[_Group], new: Sequence[_Group], prefer: Prefer | None) -> None:
    """Add the groups of the next table to those of earlier ones."""
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


def _remeasured(one: _Group, other: _Group, prefer: Prefer | None) -> _Group:
    """The first of two groups with the same choices, with the measurements of both."""
    counterparts = {rule.lo: rule.measured for _, rule in other.rules}
    rules = []
    for at, rule in one.rules:
        older, newer = rule.measured, counterparts[rule.lo]
        both = _united(older, newer) if prefer == "last" else _united(newer, older)
        rules.append((at, replace(rule, measured=both)))
    return replace(one, rules=tuple(rules))


def _entangled(groups: Sequence[_Group]) -> ConfigError:
    for index, one in enumerate(groups):
        for other in groups[index + 1 :]:
            if one.precedes(other) and other.precedes(one):
                what = f"{one.key} and {other.key} ({other.place}) are interleaved"
                return ConfigError(f"{one.place}: rules: {what}; expected the rules of each key together")
    places = ", ".join(group.place for group in groups)
    return ConfigError(f"<merged>: rules: no order puts narrow keys first ({places}); expected nested keys")


# --- Comparing ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One difference between two tables: of the choices for `key` and `sizes`, or of a `fact`.

    `before` and `after` are choices (or values of the fact), None if a table has none. `only_in`: only this
    table has the key; the other's choice, if any, is that of its wider rules. `before_us` and `after_us` are
    expected microseconds of one operation of `at` bytes, each from the measurements of its own table; None if
    nothing was measured around that size.
    """

    before: str | None
    after: str | None
    key: TableKey | None = None
    sizes: Range = ALL_SIZES
    only_in: Literal["first", "second"] | None = None
    at: int | None = None
    before_us: float | None = None
    after_us: float | None = None
    fact: str | None = None

    def span(self) -> str:
        """The range of sizes as in files: `64KiB..1MiB`."""
        return f"{format_size(self.sizes.lo)}..{'' if self.sizes.hi is None else format_size(self.sizes.hi)}"

    def expected(self) -> str:
        """The expected times, as `17 µs → 12 µs at 64KiB`; empty if neither was measured."""
        if self.at is None or (self.before_us is None and self.after_us is None):
            return ""
        return f"{_microseconds(self.before_us)} → {_microseconds(self.after_us)} at {size_name(self.at)}"

    def __str__(self) -> str:
        """The change in one line: `all_reduce 64KiB..: mpi → gloo (17 µs → 12 µs at 64KiB)`."""
        where = self.fact if self.key is None else f"{self.key} {self.span()}"
        notes = [f"key only in the {self.only_in} table" if self.only_in else "", self.expected()]
        behind = "; ".join(note for note in notes if note)
        return f"{where}: {self.before or '-'} → {self.after or '-'}{f' ({behind})' if behind else ''}"


def _microseconds(time: float | None) -> str:
    return "-" if time is None else f"{time:.4g} µs"


def diff(a: Table, b: Table) -> list[Change]:
    """Return the different choices of two tables, the keys that only one has, and facts that differ.

    Shadowed rules are not compared: tables with the same choice for every operation differ in keys at most.
    If one counts bytes per rank and the other in total, and the number of ranks is open, each is compared
    with rules of its own basis.
    """
    own = (a.by_key(), b.by_key())
    known = areas([*own[0], *own[1]], f"{a.name}, {b.name}")
    changes = {key: _changes(a, b, key, _only_in(key, own)) for key in known}
    real = [change for key in known if key in own[0] or key in own[1] for change in changes[key]]
    for key in known:
        if key not in own[0] and key not in own[1]:
            changes[key] = [change for change in changes[key] if not any(_implies(c, change) for c in real)]
    return [*(change for key in known for change in changes[key]), *_fact_changes(a, b)]


def _only_in(
    key: TableKey, own: tuple[dict[TableKey, list[TableRule]], dict[TableKey, list[TableRule]]]
) -> Literal["first", "second"] | None:
    if (key in own[0]) == (key in own[1]):
        return None
    return "first" if key in own[0] else "second"


def _implies(wide: Change, narrow: Change) -> bool:
    """Whether a change of a key implies the change of a part of it."""
    assert wide.key is not None
    assert narrow.key is not None
    return (
        (wide.before, wide.after) == (narrow.before, narrow.after)
        and wide.key.includes(narrow.key)
        and wide.key.basis == narrow.key.basis
        and intersection(wide.sizes, narrow.sizes) == narrow.sizes
    )


def _changes(a: Table, b: Table, key: TableKey, only_in: Literal["first", "second"] | None) -> list[Change]:
    changes: list[Change] = []
    for sizes, before, after in _side_by_side(cover(a.rules, key), cover(b.rules, key)):
        if before == after and only_in is None:
            continue
        last = changes[-1] if changes else None
        if last is not None and (last.before, last.after, last.sizes.hi) == (before, after, sizes.lo):
            changes[-1] = replace(last, sizes=Range(last.sizes.lo, sizes.hi))
        else:
            changes.append(Change(before, after, key, sizes, only_in))
    return [_timed(change, a, b) for change in changes]


def _side_by_side(
    one: Sequence[Piece], other: Sequence[Piece]
) -> Iterator[tuple[Range, str | None, str | None]]:
    """Split the sizes at the bounds of both, and yield each range with the choices of both."""
    bounds = sorted({piece.sizes.lo for piece in (*one, *other)})
    for lo, hi in pairwise([*bounds, None]):
        assert lo is not None
        choices = [next(p.choice for p in pieces if p.sizes.covers(lo)) for pieces in (one, other)]
        yield Range(lo, hi), choices[0], choices[1]


def _timed(change: Change, a: Table, b: Table) -> Change:
    """The change with expected times, at the median of the measured sizes in its range."""
    assert change.key is not None
    points = [_points(a, change.key, change.before), _points(b, change.key, change.after)]
    if not any(points):
        return change
    shared = set(points[0]) & set(points[1]) if all(points) else set()
    inside = sorted(size for size in shared or {*points[0], *points[1]} if change.sizes.covers(size))
    at = inside[len(inside) // 2] if inside else change.sizes.lo
    return replace(change, at=at, before_us=_expected(points[0], at), after_us=_expected(points[1], at))


def _points(table: Table, key: TableKey, choice: str | None) -> dict[int, float]:
    """The measurements of a choice under a key: microseconds by bytes."""
    rules = [rule for rule in table.rules if rule.key == key and choice is not None]
    return {size: time for rule in rules for size, time in rule.measured.get(choice or "", {}).items()}


def _expected(points: dict[int, float], size: int) -> float | None:
    if not points:
        return None
    estimate = Curve.through(points).at(size)
    return None if estimate.extrapolated else estimate.us


def _fact_changes(a: Table, b: Table) -> list[Change]:
    facts = [_facts(a), _facts(b)]
    names = dict.fromkeys([*facts[0], *facts[1]])
    pairs = {name: (facts[0].get(name), facts[1].get(name)) for name in names}
    return [Change(old, new, fact=name) for name, (old, new) in pairs.items() if old != new]


def _facts(table: Table) -> dict[str, str]:
    stated = {name: ", ".join(sorted(values)) for name, values in table.fingerprint.items()}
    return {**stated, "strict": str(table.strict).lower()}
