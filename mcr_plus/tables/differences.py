"""Compare two tables.

    diff(load_table("monday.yaml"), load_table("tuesday.yaml"))     # a list of Change

The comparison uses the results of look-ups, not the text of rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from mcr_plus.core.units import Range, format_size
from mcr_plus.tables.areas import ALL_SIZES, Piece, areas, cover, intersection
from mcr_plus.tables.cost import TimeCurve
from mcr_plus.tables.table import Table, TableKey, TableRule
from mcr_plus.tables.writing import size_name


@dataclass(frozen=True)
class Change:
    """One difference between two tables: of the choices for `key` and `sizes`, or of a `fact`.

    `before` and `after` are choices (or values of the fact), None if a table has none. `only_in`: only this
    table has the key; the other table's choice, if any, comes from a wider key. `before_us` and `after_us`
    are expected microseconds of one operation of `at` bytes, each from the measurements of its own table;
    None without measurements around that size.
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
        """Return the range of sizes as in files: `64KiB..1MiB`."""
        return f"{format_size(self.sizes.lo)}..{'' if self.sizes.hi is None else format_size(self.sizes.hi)}"

    def expected(self) -> str:
        """Return the expected times, such as `17 µs → 12 µs at 64KiB`; empty if neither was measured."""
        if self.at is None or (self.before_us is None and self.after_us is None):
            return ""
        return f"{_microseconds(self.before_us)} → {_microseconds(self.after_us)} at {size_name(self.at)}"

    def __str__(self) -> str:
        """Return the change in one line: `all_reduce 64KiB..: mpi → gloo (17 µs → 12 µs at 64KiB)`."""
        where = self.fact if self.key is None else f"{self.key} {self.span()}"
        notes = [f"key only in the {self.only_in} table" if self.only_in else "", self.expected()]
        behind = "; ".join(note for note in notes if note)
        return f"{where}: {self.before or '-'} → {self.after or '-'}{f' ({behind})' if behind else ''}"


def _microseconds(time: float | None) -> str:
    return "-" if time is None else f"{time:.4g} µs"


def diff(a: Table, b: Table) -> list[Change]:
    """Return the different choices of two tables, keys that only one table has, and different facts.

    Shadowed rules are not compared, so tables with the same choice for every operation differ at most in
    keys. If one table counts bytes per rank and the other in total, and the number of ranks is open, each
    rule is compared with rules of its own basis.
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
    """Return whether a change of a wide key implies the change of a narrow one."""
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
    """Split the sizes at the bounds of both lists, and yield each range with both choices."""
    bounds = sorted({piece.sizes.lo for piece in (*one, *other)})
    for lo, hi in pairwise([*bounds, None]):
        assert lo is not None
        choices = [next(p.choice for p in pieces if p.sizes.covers(lo)) for pieces in (one, other)]
        yield Range(lo, hi), choices[0], choices[1]


def _timed(change: Change, a: Table, b: Table) -> Change:
    """Return the change with expected times, at the median of the measured sizes in its range."""
    assert change.key is not None
    points = [_points(a, change.key, change.before), _points(b, change.key, change.after)]
    if not any(points):
        return change
    shared = set(points[0]) & set(points[1]) if all(points) else set()
    inside = sorted(size for size in shared or {*points[0], *points[1]} if change.sizes.covers(size))
    at = inside[len(inside) // 2] if inside else change.sizes.lo
    return replace(change, at=at, before_us=_expected(points[0], at), after_us=_expected(points[1], at))


def _points(table: Table, key: TableKey, choice: str | None) -> dict[int, float]:
    """Return a choice's measurements for `key`, as {bytes: microseconds}."""
    rules = [rule for rule in table.rules if rule.key == key and choice is not None]
    return {size: time for rule in rules for size, time in rule.measured.get(choice or "", {}).items()}


def _expected(points: dict[int, float], size: int) -> float | None:
    if not points:
        return None
    estimate = TimeCurve.through(points).at(size)
    return None if estimate.extrapolated else estimate.us


def _fact_changes(a: Table, b: Table) -> list[Change]:
    facts = [_facts(a), _facts(b)]
    names = dict.fromkeys([*facts[0], *facts[1]])
    pairs = {name: (facts[0].get(name), facts[1].get(name)) for name in names}
    return [Change(old, new, fact=name) for name, (old, new) in pairs.items() if old != new]


def _facts(table: Table) -> dict[str, str]:
    stated = {name: ", ".join(sorted(values)) for name, values in table.fingerprint.items()}
    return {**stated, "strict": str(table.strict).lower()}
