"""Areas of operations (intersections of rules' keys), and the rule that applies to an operation.

If keys of rules overlap, the order of the rules decides. An *area* is a key, or an intersection of several
keys. Every operation has a narrowest area that covers it. A key covers the operation if it includes this
area, so look-ups can be evaluated area by area.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

from mcr_plus.config.names import kind_matches
from mcr_plus.core.kinds import IN_PLACE, SHARED
from mcr_plus.core.units import Range
from mcr_plus.errors import ConfigError
from mcr_plus.tables.table import MAX_RULES, Curves, TableKey, TableRule

ALL_SIZES: Final = Range(0)
T = TypeVar("T")

# --- Keys that overlap ----------------------------------------------------------------------------------


class _Disjoint(Exception):
    """Two keys have no operation in common."""


def common_key(one: TableKey, other: TableKey) -> TableKey | None:
    """Return the key of the operations that both keys cover.

    None if there are no such operations, or if the keys count bytes differently and leave open the number of
    ranks, which determines the conversion.
    """
    common = _common(one, other)
    if common is None or one.basis == other.basis:
        return common and replace(common, basis=one.basis)
    return common if _comparable(common) else None


def overlap(one: TableKey, other: TableKey) -> bool:
    """Return whether both keys cover some operation, however they count bytes."""
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
    """Return the numbers that are in both ranges; None without any."""
    ends = [end for end in (one.hi, other.hi) if end is not None]
    lo, hi = max(one.lo, other.lo), min(ends, default=None)
    return None if hi is not None and hi <= lo else Range(lo, hi)


def single(numbers: Range | None) -> int | None:
    """Return the only number of a range; None if there are several."""
    return numbers.lo if numbers is not None and numbers.hi == numbers.lo + 1 else None


def counts_all_ranks(kind: str) -> bool:
    """Return whether bytes per rank differ from bytes in total for operations of a kind."""
    return kind == "*" or kind.removesuffix("_v") in SHARED


def _comparable(key: TableKey) -> bool:
    """Return whether bytes in total determine the bytes per rank."""
    return not counts_all_ranks(key.kind) or single(key.ranks) is not None


def narrow_first(keys: Iterable[TableKey]) -> list[TableKey]:
    """Sort keys so that no key follows a key that includes it; kinds stay together, `*` comes last."""
    ordered = list(keys)
    families = list(dict.fromkeys(_family(key.kind) for key in ordered))
    return sorted(ordered, key=lambda key: (key.kind == "*", families.index(_family(key.kind)), _width(key)))


def _family(kind: str) -> str:
    return kind.removesuffix("_v")


def _width(key: TableKey) -> tuple[object, ...]:
    """Return a sort key that grows with the width of each part of `key`."""
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
    """Return the keys and all of their intersections, narrow ones first.

    Raises `ConfigError`, which begins with `where`, for more than `limit` areas.
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
        """Return the choice, `name` or `name:algorithm`."""
        return None if self.rule is None else self.rule.backend


def cover(rules: Iterable[TableRule], area: TableKey) -> list[Piece]:
    """Return, for every size of an area's operations, the first rule that includes the size.

    The pieces are in order and cover all sizes. Rules whose bytes cannot be converted to the area's basis are
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
    """Return the sizes of a rule in the basis of `area`; None if they depend on the number of ranks."""
    sizes = rule.sizes
    if rule.key.basis == area.basis or sizes == ALL_SIZES or not counts_all_ranks(area.kind):
        return sizes
    ranks = single(area.ranks)
    if ranks is None or area.basis == "per_rank":
        return None
    return Range(sizes.lo * ranks, None if sizes.hi is None else sizes.hi * ranks)


def by_choice(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours with the same choice; the joined piece keeps the first rule."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].choice == piece.choice:
            joined[-1] = Piece(Range(joined[-1].sizes.lo, piece.sizes.hi), joined[-1].rule)
        else:
            joined.append(piece)
    return joined


def tile(rules: Sequence[TableRule], default: str, where: str) -> tuple[TableRule, ...]:
    """Make a table's rules from rules that may overlap and leave gaps; the first match wins.

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
    return tuple(needed(joined(tiled), where))


def needed(
    rules: Sequence[TableRule], where: str, keep: frozenset[TableKey] = frozenset()
) -> list[TableRule]:
    """Return the rules without keys that change no look-up; keys in `keep` always stay."""
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


def joined(rules: Sequence[TableRule]) -> list[TableRule]:
    """Join rules with the same choice that are adjacent in the list and in size."""
    joined: list[TableRule] = []
    for rule in rules:
        last = joined[-1] if joined else None
        if last is not None and (last.key, last.hi, last.backend) == (rule.key, rule.lo, rule.backend):
            reasons = dict.fromkeys(filter(None, [*last.reason.split("; "), *rule.reason.split("; ")]))
            measured = united(last.measured, rule.measured)
            joined[-1] = replace(last, hi=rule.hi, measured=measured, reason="; ".join(reasons))
        else:
            joined.append(rule)
    return joined


def united(one: Curves, other: Curves) -> dict[str, dict[int, float]]:
    """Return the points of both; `other` takes precedence."""
    names = dict.fromkeys([*one, *other])
    return {name: {**one.get(name, {}), **other.get(name, {})} for name in names}
