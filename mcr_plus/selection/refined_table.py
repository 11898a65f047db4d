"""Convert results of online refinement to rules of a table, and write the table."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isqrt
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from mcr_plus.backends import table_sizes
from mcr_plus.core.units import Range
from mcr_plus.errors import ConfigError
from mcr_plus.selection.options import SelectOptions
from mcr_plus.tables.areas import by_choice, counts_all_ranks, cover, intersection
from mcr_plus.tables.fingerprint import Fingerprint, merged
from mcr_plus.tables.table import Curves, Query, Table, TableKey, TableRule
from mcr_plus.tables.writing import save_table

if TYPE_CHECKING:
    from mcr_plus.selection.online import Refinement

_log = logging.getLogger("mcr_plus")

_LARGEST: Final = 1 << 40
"""Largest size in bytes at which the built-in preference is evaluated if no table has a rule."""
_LEAST_US: Final = 1e-3
"""Smallest time in microseconds that a table can express."""


def check_target(options: SelectOptions) -> None:
    """Raise `ConfigError` now if the refined table could not be written at the end of the job."""
    folder = target_path(options).parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        what = "is not writable" if folder.is_dir() else "is not a folder"
        raise ConfigError(f"select: online: {folder} {what}; expected 'refined: FILE' in a writable folder")


def target_path(options: SelectOptions) -> Path:
    """Return the file to write. Relative paths are relative to the current working directory."""
    source = None if options.table is None else options.table.resolve().absolute()
    if options.refined is None:
        folder, stem = (Path.cwd(), "mcr_plus") if source is None else (source.parent, source.stem)
        return folder / f"{stem}.refined.yaml"
    target = Path(options.refined).absolute()
    if source is not None and options.table is not None and target.resolve() == source.resolve():
        raise ConfigError(
            f"{options.table.place}: refined: {options.refined!r} is the table itself, which is never "
            "overwritten; expected another file"
        )
    return target


@dataclass(frozen=True)
class RefinedTable:
    """Result of a trial: the choice, and median microseconds by candidate.

    `default`: returns the choice for a size without a rule in a table; None if no backend supports it.
    """

    query: Query
    choice: str
    measured: Mapping[str, float]
    default: Callable[[int], str | None]

    @property
    def key(self) -> TableKey:
        """Key of a rule for this operation, which also covers operations that differ only in size."""
        query = self.query
        ranks, nodes, per_node = (
            Range(number, number + 1) for number in (query.ranks, query.nodes, query.ranks_per_node)
        )
        return TableKey(query.kind, query.dtype, ranks, nodes, per_node, query.device, None, query.async_op)


def save_refined(refinements: Sequence[Refinement]) -> None:
    """Write the results of all trials, one file per path. Rank 0 writes the results of its groups.

    Without results no file is written. If a file cannot be written, a warning is logged.
    """
    writing = [refinement for refinement in refinements if refinement.writes]
    for path in dict.fromkeys(refinement.path for refinement in writing):
        of_path = [refinement for refinement in writing if refinement.path == path]
        learnt = [entry for refinement in of_path for entry in refinement.learnt()]
        if learnt:
            table = of_path[0].table
            source = "no table" if table is None else Path(table.name).name
            comment = f"{source}, refined while a job ran (select: {{online: true}})"
            try:
                save_table(refined_table(table, learnt, of_path[0].fingerprint()), path, comment=[comment])
            except ConfigError as error:  # the job itself has succeeded
                _log.warning("the results of online refinement are lost: %s", error)


def refined_table(table: Table | None, learnt: Sequence[RefinedTable], here: Fingerprint) -> Table:
    """Return `table` with the results of trials applied to operations like the observed ones.

    The results become rules before all other rules that cover these operations. The choice changes only in
    the octave of each observed size, from a power of two to the next; two sizes in an octave are separated at
    their geometric mean.
    """
    before = () if table is None else table.rules
    groups: dict[TableKey, list[RefinedTable]] = {}
    # The rules of a kind cover its vector form, so the rules of the vector form come first.
    for entry in sorted(learnt, key=lambda entry: not entry.query.kind.endswith("_v")):
        groups.setdefault(entry.key, []).append(entry)
    places: dict[int, list[TableRule]] = {}
    for key, entries in groups.items():
        place = next((index for index, rule in enumerate(before) if rule.key.includes(key)), len(before))
        places.setdefault(place, []).extend(_refined_rules(before, entries))
    rules: list[TableRule] = []
    for index, rule in enumerate(before):
        rules += [*places.get(index, ()), *([] if rule.key in groups else [rule])]
    rules += places.get(len(before), ())
    if table is None:
        return Table(tuple(rules), fingerprint=here)
    return replace(table, rules=tuple(rules), fingerprint=merged([table.fingerprint, here]))


def _refined_rules(before: Sequence[TableRule], learnt: Sequence[RefinedTable]) -> list[TableRule]:
    """Return the rules of one key. New rules override old ones; adjacent rules of equal choice merge."""
    first = learnt[0]
    old = [rule for rule in before if rule.key.includes(first.key)] or _preference(first)
    new = [
        rule
        for size, sizes in _ranges({entry.query.nbytes for entry in learnt}).items()
        for rule in _learnt_rule(first.key, sizes, [e for e in learnt if e.query.nbytes == size])
    ]
    figures: dict[str, dict[int, float]] = {}
    for sizes, rule in (*cover(old, first.key), *((rule.sizes, rule) for rule in new)):
        for choice, curve in _figures(rule, sizes, first.query).items():
            figures.setdefault(choice, {}).update(curve)
    whole = TableRule("", 0, None, first.key, figures)
    return [
        TableRule(
            rule.backend, sizes.lo, sizes.hi, first.key, _figures(whole, sizes, first.query), rule.reason
        )
        for sizes, rule in by_choice(cover([*new, *old], first.key))
        if rule is not None
    ]


def _preference(entry: RefinedTable) -> list[TableRule]:
    """Return the built-in preference as rules by octave; an unsupported octave copies the octave below."""
    starts = [0, *(1 << power for power in range(1, _LARGEST.bit_length()))]
    rules, choice = [], entry.choice
    for lo, hi in zip(starts, [*starts[1:], None], strict=True):
        choice = entry.default(lo) or choice
        rules.append(TableRule(choice, lo, hi, entry.key))
    return rules


def _learnt_rule(key: TableKey, sizes: Range, learnt: Sequence[RefinedTable]) -> Iterator[TableRule]:
    """Yield the rule of one size. If indistinguishable operations have different choices, medians decide.

    The rule covers the part of `sizes` that the choice supports. Yields nothing if that part is empty.
    """
    names = dict.fromkeys(name for entry in learnt for name in entry.measured)
    us = {name: median(entry.measured[name] for entry in learnt if name in entry.measured) for name in names}
    choice = min({entry.choice: None for entry in learnt}, key=lambda choice: us.get(choice, inf))
    size = learnt[0].query.nbytes
    measured: Curves = {}
    if size is not None:
        measured = {name: {size: max(us[name], _LEAST_US)} for name in names}
    if (held := intersection(sizes, table_sizes(choice))) is not None:
        yield TableRule(choice, held.lo, held.hi, key, measured)


def _ranges(sizes: Iterable[int | None]) -> dict[int | None, Range]:
    """Return the range of each size, in ascending order; the first range that covers a size applies.

    A range is the size's octave, or ends earlier at the geometric mean with the next size. Operations without
    a size have the range of all sizes.
    """
    ordered = sorted(size for size in sizes if size is not None)
    if not ordered:
        return {None: Range(0)}
    ranges: dict[int | None, Range] = {}
    for size, above in zip(ordered, [*ordered[1:], None], strict=True):
        lo = 1 << size.bit_length() >> 1
        hi = max(2 * lo, 1)
        ranges[size] = Range(lo, hi if above is None else min(hi, isqrt(size * above) + 1))
    return ranges


def _figures(rule: TableRule | None, sizes: Range, query: Query) -> Curves:
    """Return the measured times in a range of total bytes, both ends included."""
    if rule is None:
        return {}
    unit = query.ranks if rule.key.basis == "per_rank" and counts_all_ranks(query.kind) else 1
    curves = {}
    for choice, curve in rule.measured.items():
        points = {size * unit: us for size, us in curve.items()}
        inside = {s: us for s, us in points.items() if sizes.lo <= s and (sizes.hi is None or s <= sizes.hi)}
        if inside:
            curves[choice] = inside
    return curves
