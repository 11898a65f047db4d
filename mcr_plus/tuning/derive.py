"""From measured points to a table: which way wins where, with as few changes as the figures justify.

For every kind the ways are chosen along the sizes by dynamic programming: the sum of the logarithms of
the times, plus a price for every change. So a change pays only if it saves more than the price, noise
does not make a patchwork, and nowhere is the choice slower than the best by more than the price allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from math import exp, log
from typing import Final

from mcr_plus.errors import Unsupported
from mcr_plus.message import KINDS
from mcr_plus.selection.fingerprint import Fingerprint
from mcr_plus.selection.table import BUILT_IN, CLEAR, REACH, Table, TableKey, TableRule
from mcr_plus.tuning.operations import Cell, Kind
from mcr_plus.tuning.plan import Request, by_size, nonsense
from mcr_plus.tuning.points import Point
from mcr_plus.tuning.statistics import Timing
from mcr_plus.units import Range

_CHANGE: Final = log(1.05)  # what a change must save, over all sizes of its range: less is within the noise
_UNPROVEN: Final = 0.2  # weight of a difference that the intervals do not bear out
_BITS: Final = 5
_FAR: Final = 32  # times as large: the first sizes that are measured are closer than this
_LATENCY: Final = 1024  # bytes

Timings = Mapping[int, Mapping[str, Timing]]


def derive(request: Request, points: Sequence[Point], fingerprint: Fingerprint, nodes: int) -> Table:
    """The table for `request.ranks` ranks on `nodes` hosts, of all points of the request's libraries.

    So kinds and sizes of earlier runs stay. Rules of further dtypes come first and name it; those of the
    first dtype hold for all others. Asynchronous operations have rules of their own where they were measured,
    by exposed time if that was. Times that cannot be are left out. A rule holds for no size that its way is
    not for, and for none far from what was measured: those are left to the built-in preference. Vector
    operations, which no algorithm does and which have no size, have rules of their own; a kind without a
    library for them gets no rules. Raises `Unsupported` if nothing was measured with a right result.
    """
    rules: list[TableRule] = []
    points = request.relevant(points)
    kinds: list[Kind] = [*request.kinds, *(point.cell.kind for point in points)]
    first = request.dtypes[0]
    others = dict.fromkeys([*request.dtypes[1:], *(point.cell.dtype for point in points)])
    for dtype in (*(name for name in others if name != first), first):
        for kind in dict.fromkeys(kinds):
            for async_op, timings in _manners(points, Cell(kind, 0, dtype)):
                key = TableKey(
                    kind,
                    dtype=None if dtype == first else dtype,
                    ranks=Range(request.ranks, request.ranks + 1),
                    nodes=Range(nodes, nodes + 1),
                    device="cpu",
                    async_op=async_op,
                )
                found = _rules(key, timings, request.spans)
                if f"{kind}_v" in KINDS:
                    apart = _rules(replace(key, kind=f"{kind}_v"), _libraries_of(timings), request.spans)
                    found = [*_without_end(apart), *found] if apart else []
                rules += found
    if not rules:
        raise Unsupported(f"nothing to choose from: {_why_none(points)}")
    return Table(tuple(rules), "<tuned>", dict(fingerprint))


def _why_none(points: Sequence[Point]) -> str:
    problems = dict.fromkeys(f"{p.cell.kind} on {p.way}: {p.problem}" for p in points if p.problem)
    return "; ".join(problems) or "no operation has been measured"


def _manners(points: Sequence[Point], like: Cell) -> list[tuple[bool | None, Timings]]:
    """(async_op of the rules, timings) for synchronous and asynchronous operations; None holds for both."""
    waited = _sensible(by_size(points, like, overlap=False))
    later = Cell(like.kind, 0, like.dtype, async_op=True)
    exposed = by_size(points, later, overlap=True) or _sensible(by_size(points, later, overlap=False))
    if not exposed:
        return [(None, waited)] if waited else []
    return [(flag, found) for flag, found in ((False, waited), (True, exposed)) if found]


def _sensible(timings: Timings) -> Timings:
    odd = nonsense(timings)
    left = {
        size: {way: timing for way, timing in found.items() if way not in odd.get(size, ())}
        for size, found in timings.items()
    }
    return {size: found for size, found in left.items() if found}


def _without_end(rules: Sequence[TableRule]) -> list[TableRule]:
    """The rules for operations without a size: these take the choice of the largest sizes measured."""
    return [*rules[:-2], replace(rules[-2], hi=None)] if rules[-1].backend == BUILT_IN else [*rules]


def _names_algorithm(way: str) -> bool:
    return ":" in way


def _libraries_of(timings: Timings) -> Timings:
    """Without algorithms, and without sizes at which nothing else was measured."""
    plain = {
        size: {way: timing for way, timing in found.items() if not _names_algorithm(way)}
        for size, found in timings.items()
    }
    return {size: found for size, found in plain.items() if found}


def _rules(key: TableKey, timings: Timings, spans: Mapping[str, Range]) -> list[TableRule]:
    """Rules for all sizes: what was measured where something was, `BUILT_IN` elsewhere; none without any."""
    rules: list[TableRule] = []
    end: int | None = 0
    for part in _stretches(timings):
        reach = _reach(key, part, first=not rules)
        if reach.lo > (end or 0):
            rules.append(TableRule(BUILT_IN, end or 0, reach.lo, key))
        pieces = _pieces(part, spans, reach)
        for way, run in groupby(pieces, lambda piece: piece[0]):
            sizes = [span for _, span in run]
            low, high = sizes[0].lo, sizes[-1].hi
            rule = TableRule(way, low, high, key, _measured(part, low, high))
            rules.append(replace(rule, reason=_reason(rule)))
        end = reach.hi
    if rules and end is not None:
        last = rules.pop() if rules[-1].backend == BUILT_IN else TableRule(BUILT_IN, end, None, key)
        rules.append(replace(last, hi=None))
    return rules


def _reason(rule: TableRule) -> str:
    """Why a rule stands against the medians of its sizes, if it does."""
    if all((rule.advantage(way) or CLEAR) >= CLEAR for way in rule.measured if way != rule.backend):
        return ""
    return "faster by no more than the figures scatter, or than a change of choice must save"


def _stretches(timings: Timings) -> list[Timings]:
    """The measured sizes in groups: neighbours that are far apart say nothing of what lies between them."""
    groups: list[dict[int, Mapping[str, Timing]]] = []
    last = None
    for size in sorted(timings):
        if last is None or size > _FAR * max(last, 1):
            groups.append({})
        groups[-1][size] = timings[size]
        last = size
    return list(groups)


def _reach(key: TableKey, timings: Timings, *, first: bool) -> Range:
    """The sizes that measured ones speak for; below a small one it is latency that counts."""
    if key.kind == "barrier":
        return Range(0)
    least, most = min(timings), max(timings)
    return Range(0 if first and least <= _LATENCY else least // REACH, REACH * most)


def _pieces(timings: Timings, spans: Mapping[str, Range], reach: Range) -> list[tuple[str, Range]]:
    """(way, sizes) that cover `reach` without a gap; `BUILT_IN` for sizes that no way measured is for."""
    sizes = sorted(timings)
    chosen = list(zip(sizes, choose([justified(timings[size]) for size in sizes]), strict=True))
    runs = [(way, [size for size, _ in run]) for way, run in groupby(chosen, lambda each: each[1])]
    wanted = {reach.lo: runs[0][0]}
    for (before, one), (after, other) in pairwise(runs):
        wanted[_change(timings, spans, one[-1], other[0], before, after)] = after
    ways = dict.fromkeys(way for found in timings.values() for way in found)
    ends = {end for way in ways if way in spans for end in (spans[way].lo, spans[way].hi) if end is not None}
    ends = {end for end in ends if end > reach.lo and reach.covers(end)}
    pieces, way = [], ""
    for low, high in pairwise([*sorted({*wanted, *ends}), reach.hi]):
        assert low is not None
        way, span = wanted.get(low, way), Range(low, high)
        able = [each for each in ways if each not in spans or spans[each].covers(low)]
        best = way if way in able else _fastest(able, timings, span) if able else BUILT_IN
        pieces.append((best, span))
    return pieces


def _change(
    timings: Timings, spans: Mapping[str, Range], low: int, high: int, before: str, after: str
) -> int:
    """Where one way gives place to another, between two measured sizes: where one is for no more, if so."""
    begins, ends = spans.get(after, Range(0)).lo, spans.get(before, Range(0)).hi
    if begins > low:
        return begins
    return ends if ends is not None and ends <= high else crossover(timings, low, high, before, after)


def _fastest(ways: Sequence[str], timings: Timings, span: Range) -> str:
    """Of some ways the best at the sizes measured in a range, or else next to it."""
    sizes = [size for size in timings if span.covers(size)] or _beside(timings, span)
    return min(ways, key=lambda way: sum(log(_of(timings[size], way)) for size in sizes))


def justified(timings: Mapping[str, Timing]) -> dict[str, float]:
    """How many times as slow as the best each way has been shown to be, for `choose`.

    That is where the confidence intervals leave a gap. What lies inside them counts for little: it decides
    only where it is the same over several sizes.
    """
    best = min(timings.values(), key=lambda timing: timing.p50)
    return {
        way: max(1.0, timing.low / best.high) * (timing.p50 / best.p50) ** _UNPROVEN
        for way, timing in timings.items()
    }


def choose(times: Sequence[Mapping[str, float]]) -> list[str]:
    """The way for each size in turn: least sum of log times plus a price for every change of way.

    `times`: by way, in any unit.
    """
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


def crossover(timings: Timings, low: int, high: int, before: str, after: str) -> int:
    """Where between two measured sizes `after` becomes as fast as `before`: lines in log-log.

    Rounded to five binary digits where that stays between the two: nothing is known more exactly.
    """
    gains = [log(_of(timings[size], before) / _of(timings[size], after)) for size in (low, high)]
    if gains[0] >= 0 or gains[1] <= 0:  # the change was made for the sake of neighbours
        share = 0.5 if gains[0] < 0 else 0.0
    else:
        share = -gains[0] / (gains[1] - gains[0])
    found = round(exp(log(max(low, 1)) * (1 - share) + log(high) * share))
    grain = 1 << max(found.bit_length() - _BITS, 0)
    return min(max(low + 1, round(found / grain) * grain), high)


def _of(timings: Mapping[str, Timing], way: str) -> float:
    """A way's time; one that was not measured there is taken to be twice as slow as the slowest."""
    return timings[way].p50 if way in timings else 2 * max(timing.p50 for timing in timings.values())


def _beside(timings: Timings, span: Range) -> list[int]:
    """The measured size below a range, and the one above it."""
    below = [size for size in timings if size < span.lo]
    above = [size for size in timings if span.hi is not None and size >= span.hi]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


def _measured(timings: Timings, low: int, high: int | None) -> dict[str, dict[int, float]]:
    """The figures of sizes in a range, and of the next one on either side."""
    span = Range(low, high)
    found: dict[str, dict[int, float]] = {}
    for size in sorted([*(size for size in timings if span.covers(size)), *_beside(timings, span)]):
        for way, timing in timings[size].items():
            found.setdefault(way, {})[size] = timing.p50
    return found
