"""How the time of an operation changes with the number of ranks: the algorithms' rounds of messages.

An algorithm is a sequence of rounds, and a round takes a latency and the time in which the bytes of the
busiest link cross it: α + bytes · β (Hockney 1994). From Thakur, Rabenseifner, Gropp 2005 and Chan et al.
2007, for n ranks and s bytes, by the convention that `bytes` has in tables:

    all_reduce       ring: 2(n-1) rounds of s/n;  doubling: log₂n of s;  NCCL's double tree, see below
    all_gather, reduce_scatter      ring: n-1 rounds of s/n
    broadcast, reduce               tree: log₂n rounds of s;  in parts: log₂n + n-1 rounds, 2(n-1)/n · s
    all_to_all       pairwise: n-1 rounds of s/n, of which those between nodes share a link of the node
    gather, scatter  n-1 messages of s/n of one rank
    send, barrier    1 round of s;  log₂n rounds of nothing

`Stretched` needs neither α nor β. A measured time over size is one of rounds of the measured number of ranks,
so it has the time of a round over its bytes in it, from which other numbers of ranks are computed. For
times that are straight lines over size the result is the formula's. Only the part of a time that a link's
rate explains changes with the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from mcr_plus.core.kinds import COLLECTIVES, Collective, plain_kind

_OF_A_RING: Final = 0.92  # bandwidth of NCCL's trees
_CHAINED: Final = 0.2  # a message inside a node, in those between nodes: NCCL's table has 0.12 to 0.29

LinkClass = Literal["inside", "nic", "uplink"]
"""Links inside a node, between nodes and between racks."""


class Placement(NamedTuple):
    """How the ranks of a group lie: on so many nodes and racks, and at most so many in one of each."""

    ranks: int
    nodes: int
    per_node: int
    racks: int = 1
    per_rack: int = 0

    @property
    def widest(self) -> LinkClass:
        """The links with the longest way that messages of the group cross."""
        return "uplink" if self.racks > 1 else "nic" if self.nodes > 1 else "inside"


class Round(NamedTuple):
    """`times` rounds: bytes over the busiest link of each class in one of them, and messages sharing it."""

    times: float
    loads: Mapping[LinkClass, float]
    flows: Mapping[LinkClass, float]

    @property
    def widest(self) -> LinkClass:
        """The links with the longest way that its messages cross."""
        return "uplink" if "uplink" in self.loads else "nic" if "nic" in self.loads else "inside"


Rounds = tuple[Round, ...]
Shared = Callable[[LinkClass], bool]
"""Whether the ranks of a node share a link of this class."""
Algorithm = Callable[[float, Placement, Shared], Rounds]


def _ring(times: int) -> Algorithm:
    """A ring in the order of ranks: each node and each rack has one neighbour that it sends to."""

    def rounds(nbytes: float, at: Placement, shared: Shared) -> Rounds:  # noqa: ARG001
        return (_even(times * (at.ranks - 1), nbytes / at.ranks, at, dict.fromkeys(_classes(at), 1.0)),)

    return rounds


def _doubling(nbytes: float, at: Placement, shared: Shared) -> Rounds:
    """Pairs of ranks at distances 1, 2, 4, …: first inside nodes, then between nodes, then between racks."""
    extra = 2 if at.ranks & (at.ranks - 1) else 0  # two more rounds unless there are 2^k ranks
    inside = int(math.log2(at.per_node))
    across = int(math.log2(at.racks))
    between = int(math.log2(at.ranks)) - inside - across
    per_nic = at.per_node if shared("nic") else 1
    found = [
        Round(inside, {"inside": nbytes}, {"inside": 1.0}),
        Round(between, {"nic": per_nic * nbytes}, {"nic": per_nic}),
        Round(
            across,
            {"nic": per_nic * nbytes, "uplink": max(at.per_rack, 1) * nbytes},
            {"nic": per_nic, "uplink": max(at.per_rack, 1)},
        ),
    ]
    kept = [each for each in found if each.times > 0]
    if extra:
        kept.append(_even(extra, nbytes, at, dict.fromkeys(_classes(at), 1.0)))
    return tuple(kept)


def _tree(nbytes: float, at: Placement, shared: Shared) -> Rounds:  # noqa: ARG001
    """A binomial tree; its longest path has a message of each round."""
    inside, across = _log2(at.per_node), _log2(at.racks)
    between = max(_log2(at.ranks) - inside - across, 0)
    links: tuple[tuple[int, tuple[LinkClass, ...]], ...] = (
        (inside, ("inside",)), (between, ("nic",)), (across, ("nic", "uplink")),
    )  # fmt: skip
    return tuple(
        Round(count, dict.fromkeys(classes, nbytes), dict.fromkeys(classes, 1.0))
        for count, classes in links
        if count
    )


def _in_parts(nbytes: float, at: Placement, shared: Shared) -> Rounds:  # noqa: ARG001
    """Scatter, then all_gather."""
    rounds = _log2(at.ranks) + at.ranks - 1
    part = 2 * (at.ranks - 1) / at.ranks * nbytes / rounds if rounds else 0.0
    return (_even(rounds, part, at, dict.fromkeys(_classes(at), 1.0)),)


def _pairwise(nbytes: float, at: Placement, shared: Shared) -> Rounds:
    """Every rank with every other one; the mean load of a round, since libraries have several in flight."""
    others = at.ranks - 1
    if not others:
        return ()
    flows: dict[LinkClass, float] = {}
    if at.per_node > 1:
        flows["inside"] = (at.per_node - 1) * (at.per_node if shared("inside") else 1)
    if at.nodes > 1:
        flows["nic"] = (at.ranks - at.per_node) * (at.per_node if shared("nic") else 1)
    if at.racks > 1:
        flows["uplink"] = (at.ranks - at.per_rack) * at.per_rack
    loads: dict[LinkClass, float] = {
        link: count / others * nbytes / at.ranks for link, count in flows.items()
    }
    return (Round(others, loads, {link: max(count / others, 1.0) for link, count in flows.items()}),)


def _from_one(nbytes: float, at: Placement, shared: Shared) -> Rounds:  # noqa: ARG001
    """One rank sends to, or receives from, each other one."""
    links: tuple[tuple[int, tuple[LinkClass, ...]], ...] = (
        (at.per_node - 1, ("inside",)), (at.ranks - at.per_node, _classes(at)[1:] or ("nic",)),
    )  # fmt: skip
    return tuple(
        Round(count, dict.fromkeys(classes, nbytes / at.ranks), dict.fromkeys(classes, 1.0))
        for count, classes in links
        if count
    )


def _double_tree(nbytes: float, at: Placement, shared: Shared) -> Rounds:  # noqa: ARG001
    """NCCL's double binary tree: up and down two trees of nodes, each with half of the bytes, in a pipeline.

    It takes 2 log₂(nodes) messages between nodes ("Massively Scale Your Deep Learning Training with NCCL
    2.4", NVIDIA 2019), and 2 (ranks of a node - 1) in the chain inside each node; its bytes on the busiest
    link are those of a ring, at 0.92 of its bandwidth (`ncclTopoTuneModel` in NCCL's src/graph/tuning.cc, by
    which NCCL chooses between both). A measured time does not show which of both it was, so that the 0.92
    cancels there.
    """
    if at.ranks < 2:
        return ()
    chain = at.per_node - 1
    steps = 2 * (chain if at.nodes == 1 else _log2(at.nodes) + _CHAINED * chain)
    part = 2 * (at.ranks - 1) / at.ranks * nbytes / _OF_A_RING / steps
    return (_even(steps, part, at, dict.fromkeys(_classes(at), 1.0)),)


def _message(nbytes: float, at: Placement, shared: Shared) -> Rounds:  # noqa: ARG001
    return (Round(1, {at.widest: nbytes}, {at.widest: 1.0}),)


def _dissemination(nbytes: float, at: Placement, shared: Shared) -> Rounds:  # noqa: ARG001
    rounds = _log2(at.ranks)
    return (_even(rounds, 0.0, at, dict.fromkeys(_classes(at), 1.0)),) if rounds else ()


def _classes(at: Placement) -> tuple[LinkClass, ...]:
    """The classes of links that messages between neighbours cross."""
    found: list[LinkClass] = []
    if at.per_node > 1 or at.nodes == 1:
        found.append("inside")
    if at.nodes > 1:
        found.append("nic")
    if at.racks > 1:
        found.append("uplink")
    return tuple(found)


def _even(count: float, nbytes: float, at: Placement, flows: Mapping[LinkClass, float]) -> Round:
    return Round(count, dict.fromkeys(_classes(at), nbytes), flows)


def _log2(number: int) -> int:
    return max(number - 1, 0).bit_length()


def _algorithms_of(row: Collective) -> Mapping[str, Algorithm]:
    """Return the algorithms that libraries have for a kind, by the parts that ranks send and receive."""
    match row.sends, row.receives:
        case "none", "none":
            return {"dissemination": _dissemination}
        case ("none", _) | (_, "none"):
            return {"message": _message}
        case "each", "each":
            return {"pairwise": _pairwise}
        case "one", "one":
            if not row.rooted:
                return {"ring": _ring(2), "doubling": _doubling}
            return {"tree": _tree} if row.reduces else {"tree": _tree, "parts": _in_parts}
    return {"linear": _from_one} if row.rooted else {"ring": _ring(1)}


_ALL: Final[Mapping[str, Mapping[str, Algorithm]]] = {
    kind: _algorithms_of(row) for kind, row in COLLECTIVES.items()
}
_OWN: Final[Mapping[tuple[str, str], Mapping[str, Algorithm]]] = {
    ("nccl", "all_reduce"): {"tree": _double_tree}
}
"""Algorithms of one library for a kind. NCCL's for all_gather and reduce_scatter (rings, PAT) have a latency
by the number of ranks."""
_HAS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "gloo": {"all_reduce": ("ring",), "broadcast": ("tree",)},
    "nccl": {"all_reduce": ("ring", "tree"), "broadcast": ("parts",)},
}
"""Where a library has fewer algorithms than `_ALL`: torch calls gloo's ring; NCCL's rings are pipelined."""


def algorithms(kind: str, library: str) -> list[Algorithm]:
    """The algorithms of a library (`name` or `name:algorithm`) for a kind of operation; maybe none.

    Of those that `library` may name, only rings, doubling and trees are known.
    """
    name, _, chosen = library.partition(":")
    kind = plain_kind(kind)
    known = {**_ALL.get(kind, {}), **_OWN.get((name, kind), {})}
    if chosen:
        return [known[chosen]] if chosen in known else []
    return [known[each] for each in _HAS.get(name, {}).get(kind, tuple(known))]


class Medium(NamedTuple):
    """The known facts of links: bytes per second and seconds by class, and the links that a node shares."""

    rates: Mapping[LinkClass, float]
    latencies: Mapping[LinkClass, float]
    shared: Shared

    def latency(self, round: Round) -> float:
        """Seconds from a message's start to its arrival in a round."""
        return self.latencies.get(round.widest, 0.0)


def _is_shared(link: LinkClass) -> bool:
    return link != "inside"


_HEADERS: Final = 1.07
"""Bytes on the wire for each byte sent, at most: 1538 of Ethernet for 1448 of TCP are 1.06."""
UNKNOWN: Final = Medium({}, {}, _is_shared)
"""Nothing is known of the links, but that the ranks of a node share its link to others."""


@dataclass(frozen=True)
class Stretched:
    """Times of one algorithm at a number of ranks, from those that were measured at another.

    `measured`: seconds over bytes, of ranks that lay as `at` in `before`; the result is for `to` in `after`.
    Times inside nodes and between nodes are not made of each other.
    """

    algorithm: Algorithm
    measured: Callable[[float], float]
    at: Placement
    before: Medium
    to: Placement
    after: Medium

    def seconds(self, nbytes: float) -> float | None:
        """Seconds of an operation of so many bytes; None where the formula does not apply."""
        unit = self.algorithm(1.0, self.at, self.before.shared)
        count = sum(each.times for each in unit)
        link: LinkClass = "inside" if self.at.nodes == 1 else "nic"
        per_byte = sum(each.times * each.loads.get(link, 0.0) for each in unit) / count if count else 0.0
        if not count or (self.at.nodes == 1) != (self.to.nodes == 1):
            return None
        late = sum(each.times * self.before.latency(each) for each in unit) / count

        def lasting(load: float) -> float:
            """Seconds of a round with so many bytes over the link that was measured."""
            return self.measured(load / per_byte if per_byte else 0.0) / count

        total = 0.0
        for each in self.algorithm(nbytes, self.to, self.after.shared):
            if "uplink" in each.loads and "uplink" not in self.after.rates:
                return None
            own = max(self._over(name, load, link, lasting) for name, load in each.loads.items())
            total += each.times * max(own + self.after.latency(each) - late, 0.0)
        return total

    def _over(
        self, name: LinkClass, load: float, link: LinkClass, lasting: Callable[[float], float]
    ) -> float:
        """Seconds in which the bytes of a round cross a link.

        What the measured link takes of a measured time depends on its rate, and the rest on the ranks; over
        a slower link, the ranks have time for theirs meanwhile. `lasting`: seconds of a round over bytes.
        """
        before, after = self.before.rates.get(link), self.after.rates.get(name)
        whole, twice = lasting(load), lasting(2 * load)
        late = max(2 * whole - twice, 0.0)
        wire = 1.0 if before is None or not load else min(max((twice - whole) * before / load, 1.0), _HEADERS)
        if name != link:
            return late + (wire * load / after if after is not None else 0.0)
        if before is None or after is None or before == after:
            return whole
        if after < before:
            return max(whole, late + wire * load / after)
        return max(whole - wire * load / before, 0.0) + wire * load / after


def crossing(round: Round, medium: Medium) -> float:
    """Seconds in which the bytes of a round cross the slowest of the links whose rate is known."""
    known = (load / medium.rates[link] for link, load in round.loads.items() if link in medium.rates)
    return max(known, default=0.0)


def assumed(
    algorithm: Algorithm, nbytes: float, to: Placement, medium: Medium, overhead: float = 0.0
) -> float | None:
    """Seconds by latency and bandwidth of links alone; None where those of a link are not known.

    `overhead`: seconds that each round takes beside.
    """
    total = 0.0
    for each in algorithm(nbytes, to, medium.shared):
        if each.widest not in medium.rates:
            return None
        total += each.times * (crossing(each, medium) + medium.latency(each) + overhead)
    return total
