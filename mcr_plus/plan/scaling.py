"""What operations cost on another cluster: measured times, scaled to other ranks and links, or assumed.

    costs = Costs(from_table(table), topology)
    costs.of("all_reduce", 25 << 20, range(64), "gloo")     # Cost(seconds=0.31, share=0.2, how="scaled", …)

"measured": the table, the job's probe or the captured step has the time for these ranks, at this size or
between two sizes near it. "scaled": times of other numbers of ranks or other links, by the rounds of the
library's algorithms (`tables/scaling`), or far from the measured sizes. "assumed": only latency and
bandwidth of the links are known, or something that was not measured has a part in the time, such as a
codec's encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.compression.codec import PayloadCodec, make
from mcr_plus.core.kinds import plain_kind
from mcr_plus.errors import Unsupported
from mcr_plus.plan.step import Issue, Step
from mcr_plus.plan.topology import Topology
from mcr_plus.tables.cost import Curve, Estimate, basis_bytes, placed, placement_of
from mcr_plus.tables.scaling import (
    Algorithm,
    LinkClass,
    Medium,
    Placement,
    Rounds,
    Stretched,
    algorithms,
    assumed,
)
from mcr_plus.tables.table import Table

How = Literal["measured", "scaled", "assumed"]
Floats = NDArray[np.float64]

CAPTURED: Final = "captured"
"""The library of times from a captured step, which does not name one."""
_FLOAT: Final = 4  # bytes of the values that codecs encode
_NEAR: Final = 1.25  # sizes that count as one, of operations in a captured step
_GAP: Final = 16  # between measured sizes; what is between those further apart counts as scaled
_OVERHEAD: Final = 10e-6  # seconds of software in a round, where nothing was measured


class Cost(NamedTuple):
    """Seconds of an operation on its slowest rank, and the share of a core (0 to 1) that it takes meanwhile.

    `how` the seconds are known, and `share_how` the share; a share that was never measured is 0, assumed.
    """

    seconds: float
    share: float
    how: How
    share_how: How = "assumed"


class Use(NamedTuple):
    """A cost, and what the operation uses of the links while it runs alone.

    `busy`: of the busiest link of each class whose rate is known, the part of its rate, 0 to 1; of the widest
    class, if its rate is not known, all. `flow`: bytes per second of one of its messages on the class that it
    uses most.
    """

    cost: Cost
    busy: Mapping[LinkClass, float]
    flow: float


@dataclass(frozen=True)
class Measured:
    """Measured times of a kind of operation by a library, of ranks that lay as `at`.

    `curve`: microseconds over bytes, which count by the basis of the table's key (`per_rank`: of one rank).
    `shares`: bytes, ascending, and the share of a core at each; None if it was not measured.
    """

    kind: str
    library: str
    at: Placement
    curve: Curve
    shares: tuple[Floats, Floats] | None = None
    per_rank: bool = False

    def estimate(self, nbytes: float) -> Estimate:
        """The time at a size of the operation in all."""
        return self.curve.at(self._own(nbytes))

    def is_near(self, nbytes: float) -> bool:
        """Whether it was measured at this size, or at two that are not far apart around it."""
        size, sizes = self._own(nbytes), self.curve.sizes
        at = int(np.searchsorted(sizes, size))
        around = sizes[max(at - 1, 0) : at + 1]
        near = bool(np.any((around <= _NEAR * size) & (size <= _NEAR * around)))
        return near or (len(around) == 2 and around[1] <= _GAP * around[0])

    def share(self, nbytes: float) -> float:
        """The share at a size, that of the nearest sizes."""
        return 0.0 if self.shares is None else float(np.interp(self._own(nbytes), *self.shares))

    def _own(self, nbytes: float) -> float:
        return nbytes / self.at.ranks if self.per_rank else nbytes


def from_table(table: Table) -> list[Measured]:
    """The measurements of a table in float32, or without a dtype, whose ranks and nodes are known.

    The share of the core is the exposed time of asynchronous operations over the whole one of synchronous.
    """
    whole: dict[tuple[str, str, Placement, bool], dict[int, float]] = {}
    exposed: dict[tuple[str, str, Placement, bool], dict[int, float]] = {}
    for rule in table.rules:
        at = placement_of(rule.key, table.fingerprint)
        if at is None or rule.key.dtype not in (None, "float32") or rule.key.kind == "*":
            continue
        per_rank = basis_bytes(at.ranks, rule.key, at) == 1 and at.ranks > 1
        for library, points in rule.measured.items():
            into = exposed if rule.key.async_op else whole
            into.setdefault((rule.key.kind, library, at, per_rank), {}).update(points)
    return [
        Measured(kind, library, at, Curve.through(points), _shares(points, exposed.get(key, {})), per_rank)
        for key, points in whole.items()
        if points
        for kind, library, at, per_rank in [key]
    ]


def _shares(whole: Mapping[int, float], exposed: Mapping[int, float]) -> tuple[Floats, Floats] | None:
    sizes = sorted(whole.keys() & exposed.keys())
    if not sizes:
        return None
    shares = [min(exposed[size] / whole[size], 1.0) for size in sizes]
    return np.array(sizes, np.float64), np.array(shares, np.float64)


def from_probe(step: Step) -> list[Measured]:
    """What the job has measured of libraries (`plan.probe`), if the captured step has it."""
    at = placed(step.ranks, step.nodes, -(-step.ranks // step.nodes))
    found = []
    for library, probed in step.measured.items():
        sizes = np.array(probed.sizes, np.float64)
        curve = Curve(sizes, np.maximum.accumulate(1e6 * np.array(probed.seconds)))
        shares = sizes, np.clip(np.array(probed.shares, np.float64), 0.0, 1.0)
        found.append(Measured(probed.kind, library, at, curve, shares))
    return found


def from_step(step: Step, library: str = CAPTURED) -> list[Measured]:
    """The seconds that operations of a captured step took, under the name of a library."""
    per_node = -(-step.ranks // step.nodes)
    points: dict[tuple[str, Placement], dict[int, list[float]]] = {}
    for role in step.roles:
        for event in role.events:
            if isinstance(event, Issue) and event.seconds is not None:
                nodes = [rank // per_node for rank in event.group]
                most = max(nodes.count(node) for node in set(nodes))
                at = placed(len(event.group), len(set(nodes)), most)
                points.setdefault((event.kind, at), {}).setdefault(event.nbytes, []).append(
                    1e6 * event.seconds
                )
    return [
        Measured(
            kind,
            library,
            at,
            Curve.through(_apart({size: float(np.median(us)) for size, us in sizes.items()})),
        )
        for (kind, at), sizes in points.items()
    ]


def _apart(points: Mapping[int, float]) -> dict[int, float]:
    """The points without those that take longer than another of about their size.

    A few operations of almost equal sizes, one of which was disturbed, would make a slope of that.
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
class Costs:
    """The costs of operations on a cluster.

    Args:
        measured: what is known. topology: the cluster that is asked about. measured_on: that on which was
            measured; without it, one with the same links. guessed: that these are the same is not known, so
            that times over links with a given rate are assumed.
    """

    measured: Sequence[Measured]
    topology: Topology
    measured_on: Topology | None = None
    guessed: bool = False
    _known: dict[tuple[object, ...], Use] = field(default_factory=dict, repr=False)

    def on(self, topology: Topology) -> Costs:
        """The costs on another cluster, of the same measurements."""
        return Costs(self.measured, topology, self.measured_on or self.topology, self.guessed)

    def of(
        self, kind: str, nbytes: int, group: Sequence[int], library: str, codec: str | None = None
    ) -> Cost:
        """What an operation costs that nothing else runs beside; `nbytes` as `Signature.nbytes` counts them.

        `library`: a name, or `name:algorithm`. `codec`: by which it is compressed.

        Raises:
            Unsupported: nothing is known of the library or of the links in question, or the codec has no
                fixed size.
            InvalidArgument: a rank is beyond the topology.
        """
        return self.use(kind, nbytes, self.topology.placement(group), library, codec).cost

    def use(self, kind: str, nbytes: int, to: Placement, library: str, codec: str | None = None) -> Use:
        """As `of`, for ranks that lie in this way, with the use of links."""
        key = (kind, nbytes, to, library, codec)
        if key not in self._known:
            self._known[key] = self._use(kind, nbytes, to, library, codec)
        return self._known[key]

    def libraries(self) -> list[str]:
        """The libraries of which something was measured."""
        return list(dict.fromkeys(each.library for each in self.measured))

    def _use(self, kind: str, nbytes: int, to: Placement, library: str, codec: str | None) -> Use:
        kind = plain_kind(kind)
        if to.ranks < 2:
            return Use(Cost(0.0, 0.0, "measured", "measured"), {}, 0.0)
        if codec is not None and codec != "none":
            cost, busy, flow = self.use(kind, wire_bytes(codec, nbytes), to, library)
            return Use(cost._replace(how="assumed"), busy, flow)  # encoding takes time, too
        cost, rounds = self._cost(kind, nbytes, to, library)
        if self.guessed and self._crossed(to) & self._before.rates.keys():
            cost = cost._replace(how="assumed")
        return _used(cost, rounds, self.topology.medium, to, nbytes)

    def _cost(self, kind: str, nbytes: int, to: Placement, library: str) -> tuple[Cost, Rounds]:
        """The least over the library's algorithms of the best that is known."""
        after = self.topology.medium
        ways = algorithms(kind, library)
        own = [each for each in self.measured if (each.kind, each.library) == (kind, library)]
        same = next((each for each in own if self._is_here(each.at, to)), None)
        if same is not None:
            found = same.estimate(nbytes)
            how: How = {"measured": "measured", "at_least": "assumed"}.get(found.figure, "scaled")  # type: ignore[assignment]
            if how == "measured" and not same.is_near(nbytes):
                how = "scaled"
            # Of a table without asynchronous operations, the probe of the job may have the shares.
            shared = next((e for e in own if e.shares is not None and self._is_here(e.at, to)), same)
            share_how: How = "assumed" if shared.shares is None else how
            cost = Cost(1e-6 * found.us, shared.share(nbytes), how, share_how)
            return cost, min((way(nbytes, to, after.shared) for way in ways), key=len, default=())
        for each in sorted(own, key=lambda each: _far(each.at, to)):
            scaled = [(us, way) for way in ways if (us := self._stretched(each, way, to, nbytes)) is not None]
            if scaled:
                us, best = min(scaled, key=lambda pair: pair[0])
                share_how = "assumed" if each.shares is None else "scaled"
                share = each.share(nbytes)
                return Cost(1e-6 * us, share, "scaled", share_how), best(nbytes, to, after.shared)
        known = [
            (seconds, way)
            for way in ways or algorithms(kind, "")
            if (seconds := assumed(way, nbytes, to, after, _OVERHEAD)) is not None
        ]
        if not known:
            raise Unsupported(
                f"{kind} by {library!r} of {to.ranks} ranks on {to.nodes} nodes: no measurement of it can be "
                f"scaled, and the topology has no {_missing(to, after)} link; known: "
                f"{', '.join(self.libraries()) or 'no library'}"
            )
        seconds, best = min(known, key=lambda pair: pair[0])
        return Cost(seconds, 0.0, "assumed"), best(nbytes, to, after.shared)

    def _crossed(self, to: Placement) -> set[LinkClass]:
        """The classes of links between ranks that lie in this way."""
        classes: dict[LinkClass, bool] = {
            "inside": to.per_node > 1, "nic": to.nodes > 1, "uplink": to.racks > 1
        }  # fmt: skip
        return {link for link, crosses in classes.items() if crosses}

    def _is_here(self, at: Placement, to: Placement) -> bool:
        if at[:3] != to[:3] or to.racks > 1:
            return False
        before, after = self._before, self.topology.medium
        link: LinkClass = to.widest
        return before.rates.get(link) == after.rates.get(link) and before.latencies == after.latencies

    def _stretched(self, each: Measured, way: Algorithm, to: Placement, nbytes: int) -> float | None:
        def measured(size: float) -> float:
            return 1e-6 * each.estimate(size).us

        seconds = Stretched(way, measured, each.at, self._before, to, self.topology.medium).seconds(nbytes)
        return None if seconds is None else 1e6 * seconds

    @property
    def _before(self) -> Medium:
        return (self.measured_on or self.topology).medium


def wire_bytes(codec: str, nbytes: int) -> int:
    """Bytes that a codec sends in place of so many of float32. Raises `Unsupported` if that is not fixed."""
    made = make({"codec": codec})
    if not isinstance(made, PayloadCodec):
        raise Unsupported(
            f"codec {codec!r}: its size on the wire depends on shapes; expected one with a fixed rate"
        )
    return made.wire_nbytes(-(-nbytes // _FLOAT))


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
    return Use(cost, busy, flow)


def _far(at: Placement, to: Placement) -> tuple[float, ...]:
    """How far measurements are from what is asked: first in what they share of links, then in numbers."""
    return (
        at.widest != to.widest,
        abs(np.log2(at.per_node / to.per_node)),
        abs(np.log2(at.ranks / to.ranks)),
    )


def _missing(to: Placement, medium: Medium) -> str:
    links: Iterable[LinkClass] = ("inside", "nic", "uplink")
    wanted = {"inside": to.per_node > 1, "nic": to.nodes > 1, "uplink": to.racks > 1}
    return " or ".join(link for link in links if wanted[link] and link not in medium.rates) or "such"
