"""From measured points to a table: which way wins where, with as few changes as the figures justify.

For every kind the ways are chosen along the sizes by dynamic programming: the sum of the logarithms of
the times, plus a price for every change. So a change pays only if it saves more than the price, noise
does not make a patchwork, and nowhere is the choice slower than the best by more than the price allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from math import exp, log
from typing import Final

from mcr_plus.selection.fingerprint import Fingerprint
from mcr_plus.selection.table import Table, TableKey, TableRule
from mcr_plus.tuning.operations import Cell
from mcr_plus.tuning.plan import Request, times_by_size
from mcr_plus.tuning.points import Point
from mcr_plus.units import Range

_CHANGE: Final = log(1.02)  # what a change must save, over all sizes of its range
_BITS: Final = 5
_P2P: Final = ("send", "recv")

Times = Mapping[int, Mapping[str, float]]


def derive(request: Request, points: Sequence[Point], fingerprint: Fingerprint, nodes: int) -> Table:
    """The table for `request.ranks` ranks on `nodes` hosts.

    Rules of further dtypes come first and name it; those of the first dtype hold for all others. Asynchronous
    operations have rules of their own where they were measured, by exposed time if that was.
    """
    rules: list[TableRule] = []
    first, *others = request.dtypes
    for dtype in (*others, first):
        for kind in request.kinds:
            named = _P2P if kind == "send" else (kind,)  # both ends of a message must choose alike
            for async_op, times in _manners(points, Cell(kind, 0, dtype)):
                for name in named:
                    key = TableKey(
                        name,
                        dtype=None if dtype == first else dtype,
                        ranks=Range(request.ranks, request.ranks + 1),
                        nodes=Range(nodes, nodes + 1),
                        device="cpu",
                        async_op=async_op,
                    )
                    rules += _rules(key, times)
    return Table(tuple(rules), "<tuned>", dict(fingerprint))


def _manners(points: Sequence[Point], like: Cell) -> list[tuple[bool | None, Times]]:
    """(async_op of the rules, times) for synchronous and asynchronous operations; None holds for both."""
    waited = times_by_size(points, like, overlap=False)
    later = Cell(like.kind, 0, like.dtype, async_op=True)
    exposed = times_by_size(points, later, overlap=True) or times_by_size(points, later, overlap=False)
    if not exposed:
        return [(None, waited)] if waited else []
    return [(flag, times) for flag, times in ((False, waited), (True, exposed)) if times]


def _rules(key: TableKey, times: Times) -> list[TableRule]:
    sizes = sorted(times)
    chosen = list(zip(sizes, choose([times[size] for size in sizes]), strict=True))
    runs = [(way, [size for size, _ in run]) for way, run in groupby(chosen, lambda each: each[1])]
    starts = [0]
    for (before, one), (after, other) in pairwise(runs):
        starts.append(crossover(times, one[-1], other[0], before, after))
    rules = []
    for index, (way, _) in enumerate(runs):
        low, high = starts[index], starts[index + 1] if index + 1 < len(runs) else None
        rules.append(TableRule(way, low, high, key, _measured(times, low, high)))
    return rules


def choose(times: Sequence[Mapping[str, float]]) -> list[str]:
    """The way for each size in turn: least sum of log times plus a price for every change of way."""
    known = list(dict.fromkeys(way for each in times for way in each))
    best: dict[str, tuple[float, tuple[str, ...]]] = dict.fromkeys(known, (0.0, ()))
    for each in times:
        cheapest = min(best.values(), key=lambda state: state[0])
        step = {}
        for way, us in each.items():
            stay = best.get(way, (float("inf"), ()))
            cost, path = min(stay, (cheapest[0] + _CHANGE, cheapest[1]), key=lambda state: state[0])
            step[way] = (cost + log(us), (*path, way))
        best = step
    return list(min(best.values(), key=lambda state: state[0])[1])


def crossover(times: Times, low: int, high: int, before: str, after: str) -> int:
    """Where between two measured sizes `after` becomes as fast as `before`: lines in log-log.

    Rounded to five binary digits where that stays between the two: nothing is known more exactly.
    """
    gains = [log(_of(times[size], before) / _of(times[size], after)) for size in (low, high)]
    if gains[0] >= 0 or gains[1] <= 0:  # the change was made for the sake of neighbours
        share = 0.5 if gains[0] < 0 else 0.0
    else:
        share = -gains[0] / (gains[1] - gains[0])
    found = round(exp(log(max(low, 1)) * (1 - share) + log(high) * share))
    grain = 1 << max(found.bit_length() - _BITS, 0)
    return min(max(low + 1, round(found / grain) * grain), high)


def _of(times: Mapping[str, float], way: str) -> float:
    """A way's time; one that was not measured there is taken to be twice as slow as the slowest."""
    return times.get(way, 2 * max(times.values()))


def _measured(times: Times, low: int, high: int | None) -> dict[str, dict[int, float]]:
    """The figures of sizes in a range, and of the next one on either side."""
    sizes = sorted(times)
    inside = [size for size in sizes if size >= low and (high is None or size < high)]
    before = [size for size in sizes if size < low][-1:]
    after = [size for size in sizes if high is not None and size >= high][:1]
    found: dict[str, dict[int, float]] = {}
    for size in (*before, *inside, *after):
        for way, us in times[size].items():
            found.setdefault(way, {})[size] = us
    return found
