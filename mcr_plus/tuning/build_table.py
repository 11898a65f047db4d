"""Build a table from samples: the winner at each size, with few changes between sizes.

For every kind, dynamic programming chooses a candidate for each size: it minimises the sum of the logarithms
of the times, plus a price for every change. So a change pays only if it saves more than the price, and noise
does not cause changes. At no size is the choice slower than the best candidate by more than the price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from math import exp, log
from typing import Final

from mcr_plus.backends import is_polled
from mcr_plus.core.kinds import KINDS, Kind
from mcr_plus.core.units import Range
from mcr_plus.errors import Unsupported
from mcr_plus.tables import EAGER
from mcr_plus.tables.fingerprint import Fingerprint
from mcr_plus.tables.statistics import Timing
from mcr_plus.tables.table import BUILT_IN, CLEAR, REACH, Table, TableKey, TableRule
from mcr_plus.tuning.measurements import Sample
from mcr_plus.tuning.operations import BenchCase
from mcr_plus.tuning.plan import TableRequest, by_size, nonsense

_CHANGE: Final = log(1.05)  # a change must save more than this, over all sizes of its range
_UNPROVEN: Final = 0.2  # weight of a difference inside the confidence intervals
_BITS: Final = 5
_FAR: Final = 32  # ratio of sizes that are too far apart to interpolate; the first sizes are closer
_LATENCY: Final = 1024  # bytes
_BESIDE: Final = 10.0  # times as long may a message take that goes on while its ranks compute

Timings = Mapping[int, Mapping[str, Timing]]


def build_table(
    request: TableRequest, samples: Sequence[Sample], fingerprint: Fingerprint, nodes: int
) -> Table:
    """Return the table for `request.ranks` ranks on `nodes` hosts, from samples of the request's libraries.

    Kinds and sizes of earlier runs are kept. Rules of further dtypes come first and name the dtype; rules of
    the first dtype apply to all others. Asynchronous operations have their own rules if they were measured,
    by exposed time if available. Impossible times are left out. A rule never covers a size that its candidate
    does not support, or a size far from the measured sizes: there the built-in preference decides. Vector
        operations have their own rules, because they have no size and no algorithm supports them. A kind
        whose vector form no library supports gets no vector rules. Raises `Unsupported` if no sample has a
        correct result.
    """
    rules: list[TableRule] = []
    samples = request.relevant(samples)
    kinds: list[Kind] = [*request.kinds, *(sample.case.kind for sample in samples)]
    first = request.dtypes[0]
    others = dict.fromkeys([*request.dtypes[1:], *(sample.case.dtype for sample in samples)])
    for dtype in (*(name for name in others if name != first), first):
        for kind in dict.fromkeys(kinds):
            for async_op, timings in _manners(samples, BenchCase(kind, 0, dtype)):
                key = TableKey(
                    kind,
                    dtype=None if dtype == first else dtype,
                    ranks=Range(request.ranks, request.ranks + 1),
                    nodes=Range(nodes, nodes + 1),
                    device="cpu",
                    async_op=async_op,
                )
                table_rules = _rules(key, timings, request.spans)
                if f"{kind}_v" in KINDS:
                    apart = _rules(replace(key, kind=f"{kind}_v"), _libraries_of(timings), request.spans)
                    table_rules = [*_without_end(apart), *table_rules] if apart else []
                rules += table_rules
    if not rules:
        raise Unsupported(f"no candidate to choose from: {_why_none(samples)}")
    return Table(tuple(rules), "<tuned>", dict(fingerprint))


def _why_none(samples: Sequence[Sample]) -> str:
    problems = dict.fromkeys(f"{p.case.kind} on {p.candidate}: {p.problem}" for p in samples if p.problem)
    return "; ".join(problems) or "no operation has been measured"


def _manners(samples: Sequence[Sample], like: BenchCase) -> list[tuple[bool | None, Timings]]:
    """Return (async_op, timings) for synchronous and asynchronous operations; None stands for both."""
    waited = _sensible(by_size(samples, like, overlap=False))
    later = BenchCase(like.kind, 0, like.dtype, async_op=True)
    exposed = by_size(samples, later, overlap=True) or _sensible(by_size(samples, later, overlap=False))
    if not exposed:
        return [(None, waited)] if waited else []
    return [(flag, timings) for flag, timings in ((False, waited), (True, exposed)) if timings]


def _sensible(timings: Timings) -> Timings:
    odd = nonsense(timings)
    left = {
        size: {
            candidate: timing
            for candidate, timing in by_candidate.items()
            if candidate not in odd.get(size, ())
        }
        for size, by_candidate in timings.items()
    }
    return {size: by_candidate for size, by_candidate in left.items() if by_candidate}


def _without_end(rules: Sequence[TableRule]) -> list[TableRule]:
    """Extend the last choice to all sizes: operations without a size use the choice of the largest size."""
    return [*rules[:-2], replace(rules[-2], hi=None)] if rules[-1].backend == BUILT_IN else [*rules]


def _names_algorithm(candidate: str) -> bool:
    return ":" in candidate


def _libraries_of(timings: Timings) -> Timings:
    """Return the timings of libraries only, without sizes that were measured for algorithms only."""
    plain = {
        size: {
            candidate: timing for candidate, timing in by_candidate.items() if not _names_algorithm(candidate)
        }
        for size, by_candidate in timings.items()
    }
    return {size: by_candidate for size, by_candidate in plain.items() if by_candidate}


def _rules(key: TableKey, timings: Timings, spans: Mapping[str, Range]) -> list[TableRule]:
    """Return rules for all sizes, with `BUILT_IN` far from measured ones; none without timings."""
    rules: list[TableRule] = []
    end: int | None = 0
    for part in _stretches(timings):
        reach = _reach(key, part, first=not rules)
        if reach.lo > (end or 0):
            rules.append(TableRule(BUILT_IN, end or 0, reach.lo, key))
        allowed = _beside_computing(part, spans) if _is_far_message(key) else (part, spans)
        pieces = _pieces(*allowed, reach)
        for candidate, run in groupby(pieces, lambda piece: piece[0]):
            sizes = [span for _, span in run]
            low, high = sizes[0].lo, sizes[-1].hi
            rule = TableRule(candidate, low, high, key, _measured(part, low, high))
            rules.append(replace(rule, reason=_reason(rule)))
        end = reach.hi
    if rules and end is not None:
        last = rules.pop() if rules[-1].backend == BUILT_IN else TableRule(BUILT_IN, end, None, key)
        rules.append(replace(last, hi=None))
    return rules


def _is_far_message(key: TableKey) -> bool:
    return key.kind == "send" and key.nodes is not None and key.nodes.lo > 1


def _beside_computing(timings: Timings, spans: Mapping[str, Range]) -> tuple[Timings, Mapping[str, Range]]:
    """Leave out libraries that wait to be polled, where another one takes little longer for a message.

    Both ends of a message choose alike, whether they wait for it or compute meanwhile. The lower bound
    of a library's median counts: its threads may have to wait for a core, where ranks share cores. Libraries
    that are left out at all larger sizes end at the eager limit, and not where two sizes' times would cross.
    """
    found = dict(timings)
    for size, each in timings.items():
        threaded = {candidate: timing for candidate, timing in each.items() if not is_polled(candidate)}
        best = min(timing.p50 for timing in each.values())
        if size > EAGER and any(timing.low <= _BESIDE * best for timing in threaded.values()):
            found[size] = threaded
    polled = {candidate for each in timings.values() for candidate in each if is_polled(candidate)}
    larger = [polled & found[size].keys() for size in found if size > EAGER]
    if larger and not any(larger):
        end = EAGER + 1
        own = {candidate: spans.get(candidate, Range(0)) for candidate in polled}
        spans = {**spans, **{name: Range(span.lo, min(span.hi or end, end)) for name, span in own.items()}}
    return found, spans


def _reason(rule: TableRule) -> str:
    """Return the reason why a rule does not follow the medians of its sizes; '' if it does."""
    if all(
        (rule.advantage(candidate) or CLEAR) >= CLEAR
        for candidate in rule.measured
        if candidate != rule.backend
    ):
        return ""
    if _is_far_message(rule.key) and not is_polled(rule.backend):
        return "its messages go on while ranks compute; those of libraries without threads wait to be polled"
    return "faster by no more than the scatter of the figures, or than the least gain of a change"


def _stretches(timings: Timings) -> list[Timings]:
    """Split the measured sizes where neighbours are too far apart to interpolate between them."""
    groups: list[dict[int, Mapping[str, Timing]]] = []
    last = None
    for size in sorted(timings):
        if last is None or size > _FAR * max(last, 1):
            groups.append({})
        groups[-1][size] = timings[size]
        last = size
    return list(groups)


def _reach(key: TableKey, timings: Timings, *, first: bool) -> Range:
    """Return the sizes that the measured sizes represent; below a small size, latency dominates."""
    if key.kind == "barrier":
        return Range(0)
    least, most = min(timings), max(timings)
    return Range(0 if first and least <= _LATENCY else least // REACH, REACH * most)


def _pieces(timings: Timings, spans: Mapping[str, Range], reach: Range) -> list[tuple[str, Range]]:
    """Return (candidate, sizes) that cover `reach`; `BUILT_IN` for sizes that no candidate supports."""
    sizes = sorted(timings)
    chosen = list(zip(sizes, choose([justified(timings[size]) for size in sizes]), strict=True))
    runs = [
        (candidate, [size for size, _ in run]) for candidate, run in groupby(chosen, lambda choice: choice[1])
    ]
    choices = {reach.lo: runs[0][0]}
    for (before, one), (after, other) in pairwise(runs):
        choices[_change(timings, spans, one[-1], other[0], before, after)] = after
    candidates = dict.fromkeys(candidate for by_candidate in timings.values() for candidate in by_candidate)
    ends = {
        end
        for candidate in candidates
        if candidate in spans
        for end in (spans[candidate].lo, spans[candidate].hi)
        if end is not None
    }
    ends = {end for end in ends if end > reach.lo and reach.covers(end)}
    pieces, candidate = [], ""
    for low, high in pairwise([*sorted({*choices, *ends}), reach.hi]):
        assert low is not None
        candidate, span = choices.get(low, candidate), Range(low, high)
        able = [name for name in candidates if name not in spans or spans[name].covers(low)]
        best = candidate if candidate in able else _fastest(able, timings, span) if able else BUILT_IN
        pieces.append((best, span))
    return pieces


def _change(
    timings: Timings, spans: Mapping[str, Range], low: int, high: int, before: str, after: str
) -> int:
    """Return the size in (low, high] at which the choice changes: a limit of a candidate or a crossover."""
    begins, ends = spans.get(after, Range(0)).lo, spans.get(before, Range(0)).hi
    if begins > low:
        return begins
    return ends if ends is not None and ends <= high else crossover(timings, low, high, before, after)


def _fastest(candidates: Sequence[str], timings: Timings, span: Range) -> str:
    """Return the best candidate at the measured sizes in a range; without any, at the adjacent sizes."""
    sizes = [size for size in timings if span.covers(size)] or _beside(timings, span)
    return min(candidates, key=lambda candidate: sum(log(_of(timings[size], candidate)) for size in sizes))


def justified(timings: Mapping[str, Timing]) -> dict[str, float]:
    """Return the significant part of each candidate's slowdown relative to the best, for `choose`.

    Only the gap between confidence intervals counts in full. A difference inside them counts little, and
    decides only if it is the same over several sizes.
    """
    best = min(timings.values(), key=lambda timing: timing.p50)
    return {
        candidate: max(1.0, timing.low / best.high) * (timing.p50 / best.p50) ** _UNPROVEN
        for candidate, timing in timings.items()
    }


def choose(times: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the candidate for each size that minimises the sum of log times and prices of changes.

    `times`: by candidate, in any unit.
    """
    known = list(dict.fromkeys(candidate for slowdowns in times for candidate in slowdowns))
    best: dict[str, tuple[float, tuple[str, ...]]] = dict.fromkeys(known, (0.0, ()))
    for slowdowns in times:
        cheapest = min(best.values(), key=lambda state: state[0])
        step = {}
        for candidate, us in slowdowns.items():
            stay = best.get(candidate, (float("inf"), ()))
            cost, path = min(stay, (cheapest[0] + _CHANGE, cheapest[1]), key=lambda state: state[0])
            step[candidate] = (cost + log(us), (*path, candidate))
        best = step
    return list(min(best.values(), key=lambda state: state[0])[1])


def crossover(timings: Timings, low: int, high: int, before: str, after: str) -> int:
    """Return the size in (low, high] at which `after` becomes as fast as `before`, by log-log interpolation.

    The result is rounded to five binary digits, because the times are not more precise.
    """
    gains = [log(_of(timings[size], before) / _of(timings[size], after)) for size in (low, high)]
    if gains[0] >= 0 or gains[1] <= 0:  # the choice follows neighbouring sizes
        share = 0.5 if gains[0] < 0 else 0.0
    else:
        share = -gains[0] / (gains[1] - gains[0])
    exact = round(exp(log(max(low, 1)) * (1 - share) + log(high) * share))
    grain = 1 << max(exact.bit_length() - _BITS, 0)
    return min(max(low + 1, round(exact / grain) * grain), high)


def _of(timings: Mapping[str, Timing], candidate: str) -> float:
    """Return the time of a candidate; if it has none, twice the slowest candidate's time."""
    return (
        timings[candidate].p50 if candidate in timings else 2 * max(timing.p50 for timing in timings.values())
    )


def _beside(timings: Timings, span: Range) -> list[int]:
    """Return the largest measured size below a range, and the smallest above it."""
    below = [size for size in timings if size < span.lo]
    above = [size for size in timings if span.hi is not None and size >= span.hi]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


def _measured(timings: Timings, low: int, high: int | None) -> dict[str, dict[int, float]]:
    """Return medians by candidate and size, in a range and at the next size on either side."""
    span = Range(low, high)
    curves: dict[str, dict[int, float]] = {}
    for size in sorted([*(size for size in timings if span.covers(size)), *_beside(timings, span)]):
        for candidate, timing in timings[size].items():
            curves.setdefault(candidate, {})[size] = timing.p50
    return curves
