"""Costs of operations on a cluster: measured, scaled from other ranks and links, or assumed.

    costs = Costs(from_table(table), topology)
    costs.of("all_reduce", 25 << 20, range(64), "gloo")     # Cost(seconds=0.31, share=0.2, how="scaled", …)

"measured": the table, the job's probe or the captured step has a time for these ranks, at this size or at two
close sizes around it. "scaled": the time comes from other numbers of ranks or other links, by the rounds of
the library's algorithms (`tables/scaling`), from another dtype, or from sizes far away. "assumed": only
latency and bandwidth of the links are known, or part of the time was not measured, such as a codec's
encoding.

Long because measurements, links and scaling must agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.bucketing.step import CapturedStep, IssueEvent, ReadyEvent
from mcr_plus.bucketing.topology import Rack, Topology, completed, crossed
from mcr_plus.compression.codec import PayloadCodec, make
from mcr_plus.core.kinds import dtype_name, plain_kind
from mcr_plus.errors import Unsupported
from mcr_plus.tables.cost import Estimate, TimeCurve, basis_bytes, placed, placement_of
from mcr_plus.tables.scaling import (
    Algorithm,
    LinkClass,
    Medium,
    Placement,
    Rounds,
    Stretched,
    algorithms,
    assumed,
    crossing,
)
from mcr_plus.tables.table import Table

How = Literal["measured", "scaled", "assumed"]
Floats = NDArray[np.float64]

CAPTURED: Final = "captured"
"""Library name for times from a captured step, which does not record the library."""
_NEAR: Final = 1.25  # sizes within this ratio count as equal
_GAP: Final = 16  # times between measured sizes of a larger ratio count as scaled
_OVERHEAD: Final = 10e-6  # assumed seconds of software overhead per round
_HEADERS: Final = 1.07  # largest ratio of bytes on the wire to bytes sent: 1538 of Ethernet for 1448 of TCP
_HOW: Final[tuple[How, ...]] = ("measured", "scaled", "assumed")  # best first


class Cost(NamedTuple):
    """Duration of an operation on its slowest rank, and the share of a core (0 to 1) that it takes.

    `how`, `share_how`: origins of `seconds` and `share`; an unmeasured share is 0 and "assumed".
    """

    seconds: float
    share: float
    how: How
    share_how: How = "assumed"


class Use(NamedTuple):
    """Cost and link use of an operation that runs alone.

    `busy`: used fraction (0 to 1) of the busiest link's rate, by class of links; 1 for the widest class if
    its rate is unknown. `flow`: bytes per second of one message on the most used class. `turn`: duration of
    one message, i.e. of the operation divided by the number of rounds.
    """

    cost: Cost
    busy: Mapping[LinkClass, float]
    flow: float
    turn: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Measured times of a library's operations of one kind, on ranks with the placement `at`.

    `curve`: microseconds over bytes, counted as in the table's key (`per_rank`: bytes of one rank).
    `shares`: ascending bytes, and the share of a core at each size; None if not measured. `dtype`, `device`:
    properties of the tensors; None if unspecified. `of_step`: the tensors are those of the captured step.
    `hosts`: node of each rank, numbered along the cluster; empty for consecutive nodes from the first one on.
    """

    kind: str
    library: str
    at: Placement
    curve: TimeCurve
    shares: tuple[Floats, Floats] | None = None
    per_rank: bool = False
    dtype: str | None = None
    device: str | None = None
    of_step: bool = False
    hosts: tuple[int, ...] = ()

    def estimate(self, nbytes: float) -> Estimate:
        """Return the estimated time at a size in the convention of `ClusterCosts.of`."""
        return self.curve.at(self._own(nbytes))

    def seconds(self, nbytes: float) -> float:
        """Return the seconds at a size in the convention of `ClusterCosts.of`."""
        return 1e-6 * self.estimate(nbytes).us

    def is_near(self, nbytes: float) -> bool:
        """Return whether a measured size is near this size, or two close measured sizes enclose this size."""
        return _is_near(self.curve.sizes, self._own(nbytes))

    def share(self, nbytes: float) -> tuple[float, How]:
        """Return the share of a core at a size, interpolated between measured sizes, and its origin."""
        if self.shares is None:
            return 0.0, "assumed"
        size = self._own(nbytes)
        how: How = "measured" if _is_near(self.shares[0], size) else "scaled"
        return float(np.interp(size, *self.shares)), how

    def how(self, like: Like) -> How:
        """Return the origin of the times for tensors like these.

        Times of another dtype apply to the same number of bytes. An unspecified dtype means float32, as in
        `tune` without `--dtypes`; an unspecified device means the CPU.
        """
        if self.of_step:
            return "measured"
        if (self.device or "cpu") != like.device:
            return "assumed"
        return "measured" if (self.dtype or "float32") == like.dtype else "scaled"

    def placed_in(self, rack: Rack | None) -> Placement:
        """Return the placement of the ranks on a cluster with such racks."""
        at = self.at
        if rack is None or at.racks > 1:
            return at
        if not self.hosts:
            return at._replace(
                racks=-(-at.nodes // rack.nodes), per_rack=min(rack.nodes * at.per_node, at.ranks)
            )
        counts = Counter(host // rack.nodes for host in self.hosts)
        return at._replace(racks=len(counts), per_rack=max(counts.values()))

    def _own(self, nbytes: float) -> float:
        return nbytes / self.at.ranks if self.per_rank else nbytes


class Like(NamedTuple):
    """Common dtype and device of tensors; None if unknown or mixed."""

    dtype: str | None
    device: str | None


def from_table(table: Table) -> list[Measured]:
    """Return the measurements of a table with known ranks and nodes, separate by dtype and device.

    The share of the core is the exposed time of asynchronous operations divided by the time of synchronous
    operations.
    """
    whole: dict[tuple[str, str, Placement, bool, Like], dict[int, float]] = {}
    exposed: dict[tuple[str, str, Placement, bool, Like], dict[int, float]] = {}
    for rule in table.rules:
        at = placement_of(rule.key, table.fingerprint)
        if at is None or rule.key.kind == "*":
            continue
        per_rank = basis_bytes(at.ranks, rule.key, at) == 1 and at.ranks > 1
        like = Like(rule.key.dtype, rule.key.device)
        for library, points in rule.measured.items():
            into = exposed if rule.key.async_op else whole
            into.setdefault((rule.key.kind, library, at, per_rank, like), {}).update(points)
    return [
        Measured(
            kind, library, at, TimeCurve.through(points), _shares(points, exposed.get(key, {})), per_rank,
            like.dtype, like.device,
        )
        for key, points in whole.items()
        if points
        for kind, library, at, per_rank, like in [key]
    ]  # fmt: skip


def _shares(whole: Mapping[int, float], exposed: Mapping[int, float]) -> tuple[Floats, Floats] | None:
    sizes = sorted(whole.keys() & exposed.keys())
    if not sizes:
        return None
    shares = [min(exposed[size] / whole[size], 1.0) for size in sizes]
    return np.array(sizes, np.float64), np.array(shares, np.float64)


def from_probe(step: CapturedStep) -> list[Measured]:
    """Return the job's own measurements of libraries (`plan.probe`) in the captured step."""
    at, like = placed(step.ranks, step.nodes, -(-step.ranks // step.nodes)), _like_of(step)
    found = []
    for library, probed in step.measured.items():
        sizes = np.array(probed.sizes, np.float64)
        curve = TimeCurve(sizes, np.maximum.accumulate(1e6 * np.array(probed.seconds)))
        shares = sizes, np.clip(np.array(probed.shares, np.float64), 0.0, 1.0)
        found.append(
            Measured(
                probed.kind, library, at, curve, shares,
                dtype=like.dtype, device=like.device, of_step=True,
            )
        )  # fmt: skip
    return found


def from_step(step: CapturedStep, library: str = CAPTURED) -> list[Measured]:
    """Return the durations of operations in a captured step, as measurements of `library`."""
    per_node, like = -(-step.ranks // step.nodes), _like_of(step)
    points: dict[tuple[str, tuple[int, ...]], dict[int, list[float]]] = {}
    for role in step.roles:
        for event in role.events:
            if isinstance(event, IssueEvent) and event.seconds is not None:
                hosts = tuple(rank // per_node for rank in event.group)
                of_size = points.setdefault((plain_kind(event.kind), hosts), {})
                of_size.setdefault(event.nbytes, []).append(1e6 * event.seconds)
    found = []
    for (kind, hosts), sizes in points.items():
        at = placed(len(hosts), len(set(hosts)), max(Counter(hosts).values()))
        found.append(
            Measured(
                kind, library, at, _curve(sizes),
                dtype=like.dtype, device=like.device, of_step=True, hosts=hosts,
            )
        )  # fmt: skip
    return found


def _like_of(step: CapturedStep) -> Like:
    """Return the common dtype and device of all gradients of a step."""
    likes = {
        each.like.partition(" ")[::2]
        for role in step.roles
        for each in role.events
        if isinstance(each, ReadyEvent)
    }
    dtypes, devices = {dtype for dtype, _ in likes}, {device for _, device in likes}
    return Like(dtypes.pop() if len(dtypes) == 1 else None, devices.pop() if len(devices) == 1 else None)


def _curve(times: Mapping[int, Sequence[float]]) -> TimeCurve:
    return TimeCurve.through(_apart({size: float(np.median(us)) for size, us in times.items()}))


def _joined(measured: Sequence[Measured], at: Placement) -> Measured:
    """Merge the measurements of groups of a captured step that have the same placement."""
    if len(measured) == 1:
        return replace(measured[0], at=at)
    times: dict[int, list[float]] = {}
    for each in measured:
        for size, us in zip(each.curve.sizes.tolist(), each.curve.times.tolist(), strict=True):
            times.setdefault(int(size), []).append(us)
    return replace(measured[0], at=at, curve=_curve(times))


def _is_near(sizes: Floats, size: float) -> bool:
    """Return whether a size is near one of `sizes`, or between two close sizes."""
    at = int(np.searchsorted(sizes, size))
    around = sizes[max(at - 1, 0) : at + 1]
    near = bool(np.any((around <= _NEAR * size) & (size <= _NEAR * around)))
    return near or (len(around) == 2 and bool(around[1] <= _GAP * around[0]))


def _apart(points: Mapping[int, float]) -> dict[int, float]:
    """Drop points that take longer than a point of almost the same size.

    Otherwise, of almost equal sizes, a disturbed measurement would give the curve a false slope.
    """
    kept: dict[int, float] = {}
    for size in sorted(points):
        last = next(reversed(kept), None)
        if last is None or size > _NEAR * last:
            kept[size] = points[size]
        elif points[size] <= kept[last]:
            del kept[last]
            kept[size] = points[size]
    return kept


@dataclass
class ClusterCosts:
    """Costs of operations on a cluster.

    Args:
        measured: measurements. Costs are for tensors like those of the captured step if `measured`
            contains it, else for float32 on the CPU. topology: target cluster. measured_on: measured
            cluster; None: its links equal those of `topology`. guessed: this is a guess, so times over links
            with a given rate are "assumed".
    """

    measured: Sequence[Measured]
    topology: Topology
    measured_on: Topology | None = None
    guessed: bool = False
    _known: dict[tuple[object, ...], Use] = field(default_factory=dict, repr=False)
    _placed: dict[tuple[str, str], list[Measured]] = field(default_factory=dict, repr=False)
    _slower: dict[float, ClusterCosts] = field(default_factory=dict, repr=False)

    def on(self, topology: Topology) -> ClusterCosts:
        """Return the costs on another cluster, from the same measurements.

        Raises:
            Unsupported: a link has another rate on that cluster, and its rate on the measured cluster is
                unknown.
        """
        before = self.measured_on or self.topology
        for each in self._usable:
            for link in crossed(each.placed_in(before.links.rack)):
                if before.rate(link) is None and topology.rate(link) not in (None, self.topology.rate(link)):
                    raise Unsupported(
                        f"{link}: its rate is unknown on the cluster where {each.kind} by {each.library} was "
                        "measured, so times cannot be scaled to another rate; expected it in the description "
                        "of that cluster (--measured-on)"
                    )
        return ClusterCosts(self.measured, topology, before, self.guessed)

    def of(
        self, kind: str, nbytes: int, group: Sequence[int], library: str, codec: str | None = None
    ) -> Cost:
        """Return the cost of an operation that runs alone; `nbytes` is counted as in `Signature.nbytes`.

        `library`: a name, or `name:algorithm`. `codec`: compresses the operation; None: no codec.

        Raises:
            Unsupported: costs of the library and rates of the links are unknown, or the codec has no fixed
                size.
            InvalidArgument: a rank is beyond the topology.
        """
        return self.use(kind, nbytes, self.topology.placement(group), library, codec).cost

    def use(self, kind: str, nbytes: int, to: Placement, library: str, codec: str | None = None) -> Use:
        """Return the cost (as `of` does) and the link use for ranks with this placement."""
        key = (kind, nbytes, to, library, codec)
        if key not in self._known:
            self._known[key] = self._use(kind, nbytes, to, library, codec)
        return self._known[key]

    def libraries(self) -> list[str]:
        """Return the libraries with measurements on the device of the tensors."""
        return list(dict.fromkeys(each.library for each in self._usable))

    def libraries_at(self, kind: str, to: Placement) -> list[str]:
        """Return the libraries with times of a kind on one host, or between hosts, as asked; else all.

        Times by the rates of links alone are shorter than measured ones, of libraries that may not go there.
        """
        found = [
            name for name in self.libraries()
            if any((each.at.nodes > 1) == (to.nodes > 1) for each in self._own(plain_kind(kind), name))
        ]  # fmt: skip
        return found or self.libraries()

    def _use(self, kind: str, nbytes: int, to: Placement, library: str, codec: str | None) -> Use:
        kind = plain_kind(kind)
        if to.slowest is not None:
            if to.slowest not in self._slower:
                topology = self.topology.of_slowest(to.slowest)
                self._slower[to.slowest] = replace(
                    self, topology=topology, measured_on=self.measured_on or self.topology,
                    _known={}, _placed={}, _slower={},
                )  # fmt: skip
            return self._slower[to.slowest].use(kind, nbytes, to._replace(slowest=None), library, codec)
        if to.ranks < 2:
            return Use(Cost(0.0, 0.0, "measured", "measured"), {}, 0.0)
        if codec is not None and codec != "none":
            use = self.use(kind, self._wire_bytes(codec, nbytes), to, library)
            return use._replace(cost=use.cost._replace(how="assumed"))  # encoding takes time, too
        cost, rounds = self._cost(kind, nbytes, to, library)
        if self.guessed and any((self.measured_on or self.topology).rate(link) for link in crossed(to)):
            cost = cost._replace(how="assumed")
        return _used(cost, rounds, self.topology.medium, to, nbytes)

    def _wire_bytes(self, codec: str, nbytes: int) -> int:
        return wire_bytes(codec, nbytes, self._like.dtype or "float32")

    def _cost(self, kind: str, nbytes: int, to: Placement, library: str) -> tuple[Cost, Rounds]:
        """Return the cost from the best available measurement; of several algorithms, the lowest cost."""
        after = self.topology.medium
        candidates = algorithms(kind, library)
        own = self._own(kind, library)
        here = [each for each in own if each.at == to] if self._is_here(to) else []
        # Best: measured on ranks with this placement.
        if here:
            found = here[0].estimate(nbytes)
            how: How = {"measured": "measured", "at_least": "assumed"}.get(found.figure, "scaled")  # type: ignore[assignment]
            if how == "measured" and not here[0].is_near(nbytes):
                how = "scaled"
            # If a table has no asynchronous operations, take shares from the job's probe.
            shared = next((each for each in here if each.shares is not None), here[0])
            share, share_how = shared.share(nbytes)
            cost = Cost(
                1e-6 * found.us, share,
                _weakest(how, here[0].how(self._like)), _weakest(share_how, shared.how(self._like)),
            )  # fmt: skip
            return cost, min((each(nbytes, to, after.shared) for each in candidates), key=len, default=())
        # Otherwise scale the closest measurement that an algorithm's rounds explain.
        for each in sorted(own, key=lambda each: _far(each.at, to)):
            scaled = [
                (seconds, algorithm)
                for algorithm in candidates
                if (seconds := self._scaled(each, algorithm, to, nbytes)) is not None
            ]
            if scaled:
                seconds, best = min(scaled, key=lambda pair: pair[0])
                share, share_how = each.share(nbytes)
                like = each.how(self._like)
                how = "scaled" if self._is_explained(each.at, to) else "assumed"
                cost = Cost(seconds, share, _weakest(how, like), _weakest("scaled", share_how, like))
                return cost, best(nbytes, to, after.shared)
        # Otherwise assume times from the latency and bandwidth of the links.
        known = [
            (seconds, algorithm)
            for algorithm in candidates or algorithms(kind, "")
            if (seconds := assumed(algorithm, nbytes, to, after, _OVERHEAD)) is not None
        ]
        if not known:
            raise Unsupported(
                f"{kind} by {library!r} of {to.ranks} ranks on {to.nodes} nodes: no measurement of it can be "
                f"scaled, and the topology has no {_missing(to, after)} link; expected its rate under `links`"
                f" (docs/planning.md), or a table; known: {', '.join(self.libraries()) or 'no library'}"
            )
        seconds, best = min(known, key=lambda pair: pair[0])
        return Cost(seconds, 0.0, "assumed"), best(nbytes, to, after.shared)

    def _own(self, kind: str, library: str) -> list[Measured]:
        """Return the measurements of a kind by a library, placed in racks; the most similar tensors first."""
        if (kind, library) not in self._placed:
            rack = (self.measured_on or self.topology).links.rack
            alone: list[Measured] = []
            groups: dict[Placement, list[Measured]] = {}
            for each in self._usable:
                if (each.kind, each.library) == (kind, library):
                    at = each.placed_in(rack)
                    if each.hosts:
                        groups.setdefault(at, []).append(each)
                    else:
                        alone.append(replace(each, at=at))
            found = [*alone, *(_joined(each, at) for at, each in groups.items())]
            self._placed[kind, library] = sorted(found, key=self._unlike)
        return self._placed[kind, library]

    def _unlike(self, each: Measured) -> tuple[int, bool]:
        """Return a sort key: how much the measured tensors differ from the requested ones.

        Of other dtypes, an unspecified dtype comes first: a table's rule for all other dtypes.
        """
        how = each.how(self._like)
        return _HOW.index(how), how != "measured" and each.dtype is not None

    @cached_property
    def _like(self) -> Like:
        """Dtype and device for which costs are requested."""
        found = next((each for each in self.measured if each.of_step), None)
        return Like("float32", "cpu") if found is None else Like(found.dtype, found.device)

    @cached_property
    def _usable(self) -> list[Measured]:
        """Measurements on the requested device, or on an unspecified one."""
        devices = (None, self._like.device)
        return [each for each in self.measured if self._like.device is None or each.device in devices]

    @cached_property
    def _media(self) -> tuple[Medium, Medium]:
        """Links of the measured cluster and of the target cluster."""
        before, after = (self.measured_on or self.topology).medium, self.topology.medium
        return completed(before, after), completed(after, before)

    def _is_here(self, to: Placement) -> bool:
        """Return whether ranks with this placement are connected like the measured ranks."""
        before, after = (self.measured_on or self.topology), self.topology
        return all(
            before.rate(link) == after.rate(link)
            and before.latency(link) == after.latency(link)
            and before.shared(link) == after.shared(link)
            for link in crossed(to)
        )

    def _is_explained(self, at: Placement, to: Placement) -> bool:
        """Return whether links crossed by both placements have known rates on both clusters or neither."""
        before, after = (self.measured_on or self.topology), self.topology
        both = set(crossed(at)) & set(crossed(to))
        return all((before.rate(link) is None) == (after.rate(link) is None) for link in both)

    def _scaled(self, each: Measured, algorithm: Algorithm, to: Placement, nbytes: int) -> float | None:
        """Return the seconds of an algorithm, scaled first to other links and then to other ranks."""
        before, after = self._media
        at = each.at if to.racks > 1 else each.at._replace(racks=1, per_rack=each.at.ranks)
        is_as_measured = at == each.at and self._is_here(at)
        measured = each.seconds if is_as_measured else _relinked(each, before, algorithm, at, after)
        if at == to:
            return measured(nbytes)
        # The NIC's header overhead cannot be derived from times over uplinks.
        over = after if at.racks == 1 else after._replace(rates={})
        return Stretched(algorithm, measured, at, over, to, after).seconds(nbytes)


def _weakest(*hows: How) -> How:
    return max(hows, key=_HOW.index)


def _relinked(
    each: Measured, before: Medium, algorithm: Algorithm, at: Placement, after: Medium
) -> Callable[[float], float]:
    """Return the seconds of measured operations by bytes, scaled to the links `after` and placement `at`.

    The rates determine the time of each round's bytes on the busiest link; the ranks' own work takes the
    rest. Over slower links, the ranks' own work overlaps with the transfer.
    """

    def seconds(nbytes: float) -> float:
        whole = each.seconds(nbytes)
        old, new = algorithm(nbytes, each.at, before.shared), algorithm(nbytes, at, after.shared)
        wire, other = _crossing(old, before), _crossing(new, after)
        if wire != other:
            growth = each.seconds(2 * nbytes) - whole
            headers = min(max(growth / wire, 1.0), _HEADERS) if wire else 1.0
            if other > wire:
                whole = max(whole, max(whole - growth, 0.0) + headers * other)
            else:
                whole = max(whole - headers * wire, 0.0) + headers * other
        return max(whole + _latency(new, after) - _latency(old, before), 0.0)

    return seconds


def _crossing(rounds: Rounds, medium: Medium) -> float:
    return sum(each.times * crossing(each, medium) for each in rounds)


def _latency(rounds: Rounds, medium: Medium) -> float:
    return sum(each.times * medium.latency(each) for each in rounds)


def wire_bytes(codec: str, nbytes: int, dtype: str = "float32") -> int:
    """Return the encoded bytes of `nbytes` bytes of a dtype.

    Raises:
        Unsupported: the encoded size depends on shapes, or the codec does not support the dtype.
    """
    made = make({"codec": codec})
    known = {dtype_name(each): each.itemsize for each in made.traits.dtypes}
    if dtype not in known:
        raise Unsupported(f"codec {codec!r} does not support {dtype}; supported: {', '.join(known)}")
    if not isinstance(made, PayloadCodec):
        raise Unsupported(
            f"codec {codec!r}: its size on the wire depends on shapes; expected one with a fixed rate"
        )
    return made.wire_nbytes(-(-nbytes // known[dtype]))


def _used(cost: Cost, rounds: Rounds, medium: Medium, to: Placement, nbytes: int) -> Use:
    busy: dict[LinkClass, float] = {}
    flow = 0.0
    most = 0.0
    if cost.seconds > 0:
        for link, rate in medium.rates.items():
            loads = sum(each.times * each.loads.get(link, 0.0) for each in rounds)
            if loads:
                busy[link] = min(loads / rate / cost.seconds, 1.0)
                if busy[link] > most:
                    most = busy[link]
                    each_flow = sum(
                        each.times * each.loads[link] / each.flows[link]
                        for each in rounds
                        if link in each.loads
                    )
                    flow = each_flow / cost.seconds
        if to.widest not in medium.rates:
            busy[to.widest] = 1.0
            flow = flow or max(nbytes, 1) / cost.seconds
    return Use(cost, busy, flow, cost.seconds / max(sum(each.times for each in rounds), 1))


def _far(at: Placement, to: Placement) -> tuple[float, ...]:
    """Return a sort key: distance of a measured placement, first by the widest link, then by numbers."""
    return (
        at.widest != to.widest,
        abs(np.log2(at.per_node / to.per_node)),
        abs(np.log2(at.ranks / to.ranks)),
    )


def _missing(to: Placement, medium: Medium) -> str:
    return " or ".join(link for link in crossed(to) if link not in medium.rates) or "such"
