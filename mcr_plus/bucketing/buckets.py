"""Find the best buckets for a step's gradients: exactly for one channel, by local search for several.

    found = searched(step, costs, ranks, until=perf_counter() + 2)
    found.plan, found.bound

The search (`search`) models one channel. Gradients of different ranks or groups are searched separately; with
several libraries, a local search then changes single buckets while this makes the simulated step shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np

from mcr_plus.backends import is_polled
from mcr_plus.bucketing.costs import OVERHEAD, BucketCurve, groups, prices
from mcr_plus.bucketing.network import members, simulate
from mcr_plus.bucketing.programs import BucketPlan, PlannedBucket, sizes_of
from mcr_plus.bucketing.scaling import CAPTURED, ClusterCosts
from mcr_plus.bucketing.search import rest, search
from mcr_plus.bucketing.simulation_result import Timeline
from mcr_plus.bucketing.step import CapturedStep, ComputeEvent, IssueEvent, ReadyEvent, Role, WaitEvent
from mcr_plus.errors import Unsupported
from mcr_plus.fusion.bucket import BucketEntry, by_size
from mcr_plus.tables.scaling import Placement

_ALIGNMENT: Final = 64  # bytes
_POINTS: Final = 16  # points of a curve per doubling of the size
_TRIED: Final = 400  # maximum number of changes to try
_WORTH: Final = 1e-4  # smallest relative gain of the step that justifies a change
_CUTS: Final = 8  # a large bucket may be cut between this many parts


def simulated(step: CapturedStep, plan: BucketPlan | None, costs: ClusterCosts, world: int) -> Timeline:
    """Return the step's timeline on `world` ranks, with the overhead of issuing operations."""
    return simulate(step, plan, costs, ranks=world, overhead=OVERHEAD)


class Unit(NamedTuple):
    """Gradients that may share a bucket, because the same ranks send them in the same groups.

    `sizes`: bytes by name, in the order of readiness. `ready`: seconds of computation before each gradient.
    `until`: seconds of computation before the program waits for the last gradient. `computed`: total seconds
    of computation. `group`: captured ranks that send the gradients. Times come from the sending role with the
    longest computation.
    """

    sizes: dict[str, int]
    ready: dict[str, float]
    until: float
    computed: float
    group: tuple[int, ...]


class FoundBuckets(NamedTuple):
    """Result of a search.

    `gap`: upper bound of the plan's relative distance to the optimum of the model (None: only `bound` is
    available). `exact`: the plan is that optimum. `bound`: lower bound of the step over all plans, in
    seconds.
    """

    plan: BucketPlan
    gap: float | None
    exact: bool
    bound: float


class _UnitBuckets(NamedTuple):
    """Buckets of a unit with their ready times; for other fields see `FoundBuckets`."""

    buckets: list[tuple[float, PlannedBucket]]
    libraries: list[str]
    gap: float
    exact: bool
    bound: float


def searched(
    step: CapturedStep,
    costs: ClusterCosts,
    world: int,
    *,
    until: float,
    codec: str | None = None,
    start: BucketPlan | None = None,
) -> FoundBuckets:
    """Return the best plan: exact for one channel; for several, improved by a local search until `until`.

    `start`: a further starting point of the local search. `codec`: compresses all buckets.
    """
    units = units_of(step)
    library = best_library(costs)
    computed = max(computed_in(role) for role in step.roles)
    if not units:
        return FoundBuckets(BucketPlan(library=library), 0.0, True, computed)
    seconds = max(until - perf_counter(), 0.0) / 2 / len(units)
    parts = [_part(unit, costs, step.ranks, world, codec, seconds) for unit in units]
    plan = BucketPlan(in_order(each for part in parts for each in part.buckets), library)
    bound = max(computed, *(part.bound for part in parts))
    libraries = list(dict.fromkeys(name for part in parts for name in part.libraries))
    # The search models one channel that progresses without polling.
    polled = step.by_caller and any(map(is_polled, libraries))
    if len(parts) == len(libraries) == 1 and not polled:
        return FoundBuckets(plan, parts[0].gap, parts[0].exact, bound)
    if start is not None and start.buckets:
        coded = replace(start, buckets=[each._replace(codec=codec) for each in start.buckets])
        plan = min(plan, coded, key=lambda each: simulated(step, each, costs, world).step_s)
    if len(libraries) > 1 or polled:
        plan = _improved(step, plan, costs, world, libraries, until)
    return FoundBuckets(plan, None, False, bound)


def _part(
    unit: Unit, costs: ClusterCosts, captured: int, world: int, codec: str | None, seconds: float
) -> _UnitBuckets:
    """Return the best buckets of a unit, ignoring other operations."""
    names, nbytes, times = _grouped(unit)
    to = costs.topology.placement(members(unit.group, captured, world))
    curves = _curves(costs, to, sum(nbytes), codec)
    if not curves:
        raise Unsupported(
            "no library has a known cost for the all_reduces of gradients on these ranks; expected one of: a "
            "tuning table with all_reduce (--config), links with rates (--topology), a step captured under "
            "`fuse: {plan: auto}`"
        )
    libraries = list(curves)
    priced = prices(nbytes, 1, [each.cost for each in curves.values()], OVERHEAD)
    found = search(times, unit.until, priced, seconds=seconds)
    buckets = [
        (times[end - 1], PlannedBucket(tuple(sum(names[begin:end], ())), libraries[choice], codec))
        for begin, end, choice in found.buckets
    ]
    after, above = unit.computed - unit.until, 1 + max(each.above for each in curves.values())
    grouped = len(names) < len(unit.sizes)
    if len(libraries) == 1 and not grouped:
        return _UnitBuckets(buckets, libraries, found.gap, found.exact, (found.bound + after) / above)
    # Each library has its own channel, but all share the links, so this bound counts the busy time of the
    # links. Gradients of one group may still be sent separately. So for groups only the last gradient counts:
    # some operation must send it after it is ready.
    last = np.array([unit.sizes[names[-1][-1]]])
    ends = [unit.until, times[-1] + min(float(each.cost.times(last)[0]) for each in curves.values())]
    if not grouped:
        work = prices(nbytes, 1, [each.work for each in curves.values()], OVERHEAD)
        # If the shares of concurrent operations exceed one core, the excess is not lost.
        is_lost = sum(float(np.max(each.cost.shares)) for each in curves.values()) <= 1.0
        weights = None if is_lost else np.ones(1)
        ends.append(rest(np.array(times), unit.until, work.seconds, priced.lost, weights).bound)
    exact = found.exact and len(libraries) == 1 and not grouped
    return _UnitBuckets(buckets, libraries, found.gap, exact, (max(ends) + after) / above)


def in_order(buckets: Iterable[tuple[float, PlannedBucket]]) -> list[PlannedBucket]:
    """Return buckets of several units in the order of readiness, so that no bucket waits for a later one."""
    return [bucket for _, bucket in sorted(buckets, key=lambda pair: pair[0])]


def _improved(
    step: CapturedStep,
    plan: BucketPlan,
    costs: ClusterCosts,
    world: int,
    libraries: Sequence[str],
    until: float,
) -> BucketPlan:
    """Improve a plan by local search; every accepted change of a bucket makes the simulated step shorter."""
    best, tried = simulated(step, plan, costs, world).step_s, 0
    together = {name: number for number, unit in enumerate(units_of(step)) for name in unit.sizes}
    improved = True
    while improved:
        improved = False
        for buckets in _neighbours(list(plan.buckets or ()), libraries, together):
            tried += 1
            if tried > _TRIED or perf_counter() > until:
                return plan
            other = replace(plan, buckets=buckets)
            step_s = simulated(step, other, costs, world).step_s
            if step_s < best * (1 - _WORTH):
                best, plan, improved = step_s, other, True
                break
    return plan


def _neighbours(
    buckets: list[PlannedBucket], libraries: Sequence[str], unit: Mapping[str, int]
) -> Iterator[list[PlannedBucket]]:
    """Yield plans in which one bucket has another library, is joined with the next, or is cut in two.

    `unit`: the unit of each gradient; gradients of different units are never joined.
    """
    for at in reversed(range(len(buckets))):  # start with the last buckets, which are exposed
        before, bucket, behind = buckets[:at], buckets[at], buckets[at + 1 :]
        for library in libraries:
            if library != bucket.library:
                yield [*before, bucket._replace(library=library), *behind]
        if behind and unit[bucket.params[0]] == unit[behind[0].params[0]]:
            yield [*before, bucket._replace(params=bucket.params + behind[0].params), *behind[1:]]
        for place in _places(len(bucket.params)):
            first = bucket._replace(params=bucket.params[:place])
            for library in libraries:
                yield [*before, first, PlannedBucket(bucket.params[place:], library, bucket.codec), *behind]


def _places(count: int) -> list[int]:
    """Return the positions at which a bucket of `count` gradients may be cut: all, or a few if large."""
    return sorted({round(count * part / _CUTS) for part in range(1, _CUTS)} - {0, count})


def units_of(step: CapturedStep) -> list[Unit]:
    """Return the gradients of the step in units whose gradients may share a bucket."""
    carriers: dict[str, dict[int, tuple[int, ...]]] = {}
    for number, role in enumerate(step.roles):
        for each in role.events:
            if isinstance(each, IssueEvent):
                for name in each.gradients:
                    carriers.setdefault(name, {})[number] = each.group
    likes = {
        each.param: each.like for role in step.roles for each in role.events if isinstance(each, ReadyEvent)
    }
    sizes = sizes_of(step)
    alike: dict[tuple[str, tuple[tuple[int, tuple[int, ...]], ...]], dict[str, int]] = {}
    for name, of_role in carriers.items():
        if name in sizes:  # ready on some rank
            alike.setdefault((likes[name], tuple(sorted(of_role.items()))), {})[name] = sizes[name]
    found = []
    for (_, places), of_unit in alike.items():
        number, group = max(places, key=lambda place: computed_in(step.roles[place[0]]))
        found.append(_unit(step.roles[number], of_unit, group))
    return found


def unused_in(step: CapturedStep) -> tuple[str, ...]:
    """Return the parameters that the step's operations carry although no rank has a gradient for them."""
    sizes = sizes_of(step)
    carried = (
        name
        for role in step.roles
        for each in role.events
        if isinstance(each, IssueEvent)
        for name in each.gradients
    )
    return tuple(dict.fromkeys(name for name in carried if name not in sizes))


def _unit(role: Role, nbytes: Mapping[str, int], group: tuple[int, ...]) -> Unit:
    carrying = {each.id for each in role.events if isinstance(each, IssueEvent) and each.gradients}
    ready: dict[str, float] = {}
    done, until = 0.0, None
    for each in role.events:
        if isinstance(each, ComputeEvent):
            done += each.seconds
        elif isinstance(each, ReadyEvent) and each.param in nbytes:
            ready.pop(each.param, None)  # an accumulated gradient is ready with its last part
            ready[each.param] = done
        elif isinstance(each, WaitEvent) and each.id in carrying:
            until = done
    until = done if until is None else until
    for name in nbytes:
        ready.setdefault(name, until)  # ready only on other ranks: this rank sends zeros at the end
    return Unit({name: nbytes[name] for name in ready}, ready, until, done, group)


def computed_in(role: Role) -> float:
    """Return the seconds of computation of a role."""
    return sum(each.seconds for each in role.events if isinstance(each, ComputeEvent))


def _grouped(unit: Unit) -> tuple[list[tuple[str, ...]], list[int], list[float]]:
    """Return names, bytes and ready times in the order of readiness.

    If there are very many gradients, small neighbours form one entry.
    """
    names = list(unit.ready)
    ends = groups([unit.sizes[name] for name in names])
    kept = [tuple(names[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    nbytes = [sum(unit.sizes[name] for name in group) for group in kept]
    return kept, nbytes, [unit.ready[group[-1]] for group in kept]


class _Curves(NamedTuple):
    """Costs of all_reduces by a library.

    `work`: seconds for which the operations would fill their widest link. `above`: largest relative excess of
    the curve over the true costs between the points.
    """

    cost: BucketCurve
    work: BucketCurve
    above: float


def _curves(costs: ClusterCosts, to: Placement, nbytes: int, codec: str | None = None) -> dict[str, _Curves]:
    """Return, for each library, the costs of all_reduces up to `nbytes` on ranks with this placement."""
    doublings = max(1.0, np.log2(max(nbytes, 8) / 4))
    even = np.geomspace(4, max(nbytes, 8), int(_POINTS * doublings))
    found: dict[str, _Curves] = {}
    for library in libraries_of(costs, to):
        # Curves have corners at the measured sizes.
        corners = [each.curve.sizes for each in costs.measured if each.library == library]
        wanted = np.unique(np.concatenate([even, *corners]).astype(np.int64))
        sizes = wanted[(wanted >= 4) & (wanted <= max(nbytes, 8))].tolist()
        try:
            used = [costs.use("all_reduce", size, to, library, codec) for size in sizes]
        except Unsupported:  # this library's costs are unknown on these ranks
            continue
        points = {size: use.cost[:2] for size, use in zip(sizes, used, strict=True)}
        work = {
            size: (use.cost.seconds * use.busy.get(to.widest, 0.0), 0.0)
            for size, use in zip(sizes, used, strict=True)
        }
        curve = BucketCurve.through(points)
        between = [(low + high) // 2 for low, high in pairwise(sizes)]
        exact = np.array([costs.use("all_reduce", size, to, library, codec).cost.seconds for size in between])
        over = curve.times(np.array(between))[exact > 0] / exact[exact > 0] - 1
        found[library] = _Curves(curve, BucketCurve.through(work), float(over.max(initial=0.0)))
    return found


def libraries_of(costs: ClusterCosts, to: Placement | None = None) -> list[str]:
    """Return the libraries that may send buckets, there; `CAPTURED` only if no named library is available."""
    named = [each for each in costs.libraries() if each != CAPTURED] or costs.libraries()
    there = costs.libraries_at("all_reduce", to) if to else named
    return [each for each in named if each in there] or named


def best_library(costs: ClusterCosts) -> str:
    """Return the library for operations without gradients: the captured step's, if it has costs."""
    libraries = costs.libraries()
    return CAPTURED if CAPTURED in libraries or not libraries else libraries[0]


def buckets_of(sizes: Mapping[str, int], limit: int, library: str) -> list[PlannedBucket]:
    """Return buckets of up to `limit` bytes, in the order of `sizes`."""
    names = list(sizes)
    entries = [BucketEntry(at, nbytes) for at, nbytes in enumerate(sizes.values())]
    return [
        PlannedBucket(tuple(names[at] for at in each.members), library)
        for each in by_size(entries, limit=limit, alignment=_ALIGNMENT)
    ]
