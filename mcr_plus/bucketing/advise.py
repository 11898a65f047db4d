"""Find the best buckets for a captured step, on this or another cluster, and predict the gains of changes.

    advice = advise(step, costs, ranks=4096)
    advice.timeline.step_s, advice.plan, advice.scaling, advice.what_ifs

Buckets come from `buckets`; all other figures are simulated (`network`). Every figure states whether its
costs were measured, scaled or assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final

import numpy as np

from mcr_plus import registry
from mcr_plus.bucketing.buckets import (
    Unit,
    best_library,
    buckets_of,
    in_order,
    libraries_of,
    searched,
    simulated,
    units_of,
)
from mcr_plus.bucketing.programs import BucketPlan, PlannedBucket
from mcr_plus.bucketing.scaling import CAPTURED, ClusterCosts, How
from mcr_plus.bucketing.simulation_result import Timeline
from mcr_plus.bucketing.step import CapturedStep, ComputeEvent, IssueEvent
from mcr_plus.errors import ConfigError, InvalidArgument, McrError, Unsupported, unknown

SECONDS: Final = 4.0
"""Time limit of all searches together, in seconds."""
_CODEC: Final = "int8_block"
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Scaled:
    """Predicted step time of the same plan on another number of ranks. `how`, `times_how`: see `Timeline`."""

    ranks: int
    step_s: float
    bound: float
    how: How
    times_how: How


@dataclass(frozen=True)
class WhatIf:
    """Prediction of the step after a change. `gain`: seconds saved per step."""

    change: str
    step_s: float
    gain: float
    how: How


@dataclass(frozen=True)
class PlanAdvice:
    """A plan for a step, and predictions.

    `bound`: lower bound of the step over all plans, in seconds; `timeline.bound` is the lower bound for the
    buckets of `plan`. `gap`: upper bound of the relative distance of `plan` to the best plan: from the search
    if there is one channel, else the distance to `bound` (`to_bound`), which may be unreachable. `exact`: the
    buckets are optimal. `others`: the step under other plans, by name. `scaling`: the step on other numbers
    of ranks. `what_ifs`: sorted by gain. `skipped`: changes that could not be simulated, with reasons.
    """

    plan: BucketPlan
    timeline: Timeline
    bound: float
    gap: float
    to_bound: bool
    exact: bool
    others: dict[str, Timeline]
    scaling: tuple[Scaled, ...]
    what_ifs: tuple[WhatIf, ...]
    skipped: tuple[str, ...]


def advise(
    step: CapturedStep,
    costs: ClusterCosts,
    *,
    ranks: int | None = None,
    what_ifs: Sequence[str] = (),
    codec: str | None = None,
    seconds: float = SECONDS,
) -> PlanAdvice:
    """Search for the best buckets on `ranks` ranks, and simulate the step with them and with other plans.

    Args:
        costs: costs of operations on the target topology. ranks: None for the captured number.
        what_ifs: further changes to try: `compress=CODEC` for gradients, `compute=0.8` to
            scale the computation time, or changes of `Topology.changed`. codec: compresses all buckets; the
            encoding time is unknown, so costs are assumed. seconds: time limit of all searches together;
            usual changes that would exceed it are skipped.

    Raises:
        ConfigError: a change is unknown. InvalidArgument, Unsupported: see `network.simulate`.
    """
    world = step.ranks if ranks is None else ranks
    if world > costs.topology.ranks:
        raise InvalidArgument(f"ranks: {world}, but the cluster has {costs.topology.ranks}")
    for change in what_ifs:
        _check_change(step, costs, change)
    # A third of the time is for the plan itself; the changes share the rest.
    end = perf_counter() + seconds
    found = searched(step, costs, world, until=perf_counter() + seconds / 3, codec=codec)
    plan = found.plan
    timeline = simulated(step, plan, costs, world)
    others = _others(step, costs, world, codec)
    scaling = tuple(_scaled(step, plan, costs, world))
    tried = [*what_ifs, *(change for change in _usual(step, costs, world, codec) if change not in what_ifs)]
    changed, skipped = [], []
    for number, change in enumerate(tried):
        now = perf_counter()
        if now > end and change not in what_ifs:
            skipped.append(f"{change}: skipped, as the searches have used their {seconds:g} s")
            continue
        try:
            until = now + (end - now) / (len(tried) - number)
            after = _changed(step, costs, world, change, plan, codec, until)
        except ConfigError:
            continue  # this cluster does not support this usual change
        except McrError as problem:
            skipped.append(f"{change}: {problem}")
            continue
        changed.append(WhatIf(change, after.step_s, timeline.step_s - after.step_s, after.how))
    known = (timeline, *others.values())
    bound = min(found.bound, *(each.step_s for each in known))
    return PlanAdvice(
        plan=plan,
        timeline=timeline,
        bound=bound,
        gap=timeline.step_s / bound - 1 if found.gap is None and bound else found.gap or 0.0,
        to_bound=found.gap is None,
        exact=found.exact,
        others=others,
        scaling=scaling,
        what_ifs=tuple(sorted(changed, key=lambda each: -each.gain)),
        skipped=tuple(skipped),
    )


# -- other plans, other clusters ----------------------------------------------------------------------------


def _others(step: CapturedStep, costs: ClusterCosts, world: int, codec: str | None) -> dict[str, Timeline]:
    """Return the timelines of the step as captured, and with the usual buckets compressed by `codec`."""
    plans: dict[str, BucketPlan | None] = {"as captured": None}
    units, base = units_of(step), best_library(costs)
    if units:
        library = next(iter(libraries_of(costs)), CAPTURED)
        for name, limit in [*((f"buckets of {limit} MiB", limit * _MIB) for limit in (1, 4, 25))]:
            plans[name] = BucketPlan(_usual_buckets(units, limit, library, codec), base)
        plans["each gradient alone"] = BucketPlan(_usual_buckets(units, 1, library, codec), base)
    found = {name: _known(step, plan, costs, world) for name, plan in plans.items()}
    return {name: each for name, each in found.items() if each is not None}


def _usual_buckets(units: Sequence[Unit], limit: int, library: str, codec: str | None) -> list[PlannedBucket]:
    """Return buckets of up to `limit` bytes; gradients of different units never share one."""
    return in_order(
        (unit.ready[bucket.params[-1]], bucket._replace(codec=codec))
        for unit in units
        for bucket in buckets_of(unit.sizes, limit, library)
    )


def _known(step: CapturedStep, plan: BucketPlan | None, costs: ClusterCosts, world: int) -> Timeline | None:
    """Return the step's timeline; None if the cost of an operation is unknown on these ranks."""
    try:
        return simulated(step, plan, costs, world)
    except Unsupported:
        return None


def _spreads(step: CapturedStep, ranks: int) -> bool:
    """Return whether the step can be simulated on `ranks` ranks.

    A step with a single role and a single group of all ranks can be simulated on any number of ranks, other
    steps on multiples of the captured number.
    """
    whole = tuple(range(step.ranks))
    groups = {each.group for role in step.roles for each in role.events if isinstance(each, IssueEvent)}
    return ranks % step.ranks == 0 or (len(step.roles) == 1 and groups <= {whole})


def _scaled(step: CapturedStep, plan: BucketPlan, costs: ClusterCosts, world: int) -> list[Scaled]:
    """Predict the step on 1, 2, 4, … ranks and on doublings of the captured number, up to `world`."""
    numbers = {step.ranks, world}
    for first in (1, step.ranks):
        while first < world:
            numbers.add(first)
            first *= 2
    return [
        Scaled(ranks, at.step_s, at.bound, at.how, at.times_how)
        for ranks in sorted(numbers)
        if ranks <= costs.topology.ranks and _spreads(step, ranks)
        if (at := _known(step, plan, costs, ranks)) is not None
    ]


def _usual(step: CapturedStep, costs: ClusterCosts, world: int, codec: str | None) -> list[str]:
    """Return the changes that are always tried: links twice as fast, and a codec."""
    links = costs.topology.links
    changes = []
    if links.nic is not None:
        changes.append(f"nic={2 * 8 * links.nic.rate / 1e9:g}Gbit/s")
    if links.rack is not None:
        changes.append(f"uplink={2 * 8 * links.rack.uplink / 1e9:g}Gbit/s")
    if links.inside is not None:
        changes.append(f"inside={2 * 8 * links.inside.rate / 1e9:g}Gbit/s")
    if units_of(step) and world > 1 and codec is None:
        changes.append(f"compress={_CODEC}")
    return changes


def _check_change(step: CapturedStep, costs: ClusterCosts, change: str) -> None:
    """Raise `ConfigError` for an unknown change."""
    name, _, value = (part.strip() for part in change.partition("="))
    if name == "compute":
        _factor(change, value)
    elif name == "compress":
        if value not in (known := registry.names("codecs")):
            raise ConfigError(f"{change}: {unknown('codec', value, known)}")
        if not units_of(step):
            raise ConfigError(f"{change}: the step sends no gradients to compress")
    else:
        costs.topology.changed([change])


def _changed(
    step: CapturedStep,
    costs: ClusterCosts,
    world: int,
    change: str,
    plan: BucketPlan,
    codec: str | None,
    until: float,
) -> Timeline:
    """Return the step after a change, with the best buckets for it. `plan`, `codec`: before the change."""
    name, _, value = (part.strip() for part in change.partition("="))
    if name == "compute":
        step = _faster(step, _factor(change, value))
    elif name == "compress":
        codec = value
    else:
        costs = costs.on(costs.topology.changed([change]))
    found = searched(step, costs, world, until=until, codec=codec, start=plan)
    after = simulated(step, found.plan, costs, world)
    return replace(after, how="assumed") if name == "compute" else after


def _factor(change: str, value: str) -> float:
    try:
        factor = float(value)
    except ValueError:
        factor = -1.0
    if not 0 < factor < np.inf:
        raise ConfigError(f"{change}: expected a factor of the computation time, such as compute=0.8")
    return factor


def _faster(step: CapturedStep, factor: float) -> CapturedStep:
    """Return the step with computation times multiplied by `factor`."""
    roles = tuple(
        replace(
            role,
            events=tuple(
                each._replace(seconds=factor * each.seconds) if isinstance(each, ComputeEvent) else each
                for each in role.events
            ),
        )
        for role in step.roles
    )
    return replace(step, roles=roles)
