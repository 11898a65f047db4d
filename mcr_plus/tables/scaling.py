"""Scale an operation's time with the number of ranks, by the rounds of messages in algorithms.

An algorithm is a sequence of rounds, and a round takes a latency plus the transfer time of the bytes on the
busiest link: α + bytes · β (Hockney 1994). From Thakur, Rabenseifner, Gropp 2005 and Chan et al. 2007, for n
ranks and s bytes, in the convention of `bytes` in tables:

    all_reduce       ring: 2(n-1) rounds of s/n;  doubling: log₂n of s;  NCCL's double tree, see below
    all_gather, reduce_scatter      ring: n-1 rounds of s/n
    broadcast, reduce               tree: log₂n rounds of s;  in parts: log₂n + n-1 rounds, 2(n-1)/n · s
    all_to_all       pairwise: n-1 rounds of s/n; rounds between nodes share a link of the node
    gather, scatter  n-1 messages of s/n of one rank
    send, barrier    1 round of s;  log₂n rounds of 0 bytes

`Stretched` needs neither α nor β. A measured time over size is the sum of the rounds at the measured number
of ranks. This determines the time of a round over its bytes, and thus the times at other numbers of ranks.
For times that are linear in size the result equals that of the formula. Only the part of a time that a link's
rate explains changes with the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from mcr_plus.core.kinds import COLLECTIVES, Collective, plain_kind

_OF_A_RING: Final = 0.92  # bandwidth of NCCL's trees
_CHAINED: Final = 0.2  # latency inside a node / latency between nodes: NCCL's table has 0.12 to 0.29

LinkClass = Literal["inside", "nic", "uplink"]
"""Links inside a node, between nodes and between racks."""


class Placement(NamedTuple):
    """Placement of a group's ranks: numbers of nodes and racks, and most ranks in a node and in a rack.

    `slowest`: rate of the slowest of their NICs, if it is another than usual.
    """

    ranks: int
    nodes: int
    per_node: int
    racks: int = 1
    per_rack: int = 0
    slowest: float | None = None

    @property
    def widest(self) -> LinkClass:
        """Outermost class of links that messages of the group cross."""
        return "uplink" if self.racks > 1 else "nic" if self.nodes > 1 else "inside"


class MessageRound(NamedTuple):
    """`times` equal rounds of messages.

    `loads`: bytes over the busiest link of each class in one round. `flows`: number of messages that share
    that link.
    """

    times: float
    loads: Mapping[LinkClass, float]
    flows: Mapping[LinkClass, float]

    @property
    def widest(self) -> LinkClass:
        """Outermost class of links that the messages cross."""
        return "uplink" if "uplink" in self.loads else "nic" if "nic" in self.loads else "inside"


Rounds = tuple[MessageRound, ...]
Shared = Callable[[LinkClass], bool]
"""Returns whether the ranks of a node share a link of a class."""
Algorithm = Callable[[float, Placement, Shared], Rounds]


def _ring(times: int) -> Algorithm:
    """Return a ring in rank order: each node and each rack sends to one neighbour."""

    def rounds(nbytes: float, at: Placement, shared: Shared) -> Rounds:  # noqa: ARG001
        return (_even(times * (at.ranks - 1), nbytes / at.ranks, at, dict.fromkeys(_classes(at), 1.0)),)

    return rounds


def _doubling(nbytes: float, at: Placement, shared: Shared) -> Rounds:
    """Return rounds of pairs at distances 1, 2, 4, …: inside nodes, between nodes, between racks."""
    extra = 2 if at.ranks & (at.ranks - 1) else 0  # two more rounds unless the number of ranks is 2^k
    inside = int(math.log2(at.per_node))
    across = int(math.log2(at.racks))
    between = int(math.log2(at.ranks)) - inside - across
    per_nic = at.per_node if shared("nic") else 1
    found = [
        MessageRound(inside, {"inside": nbytes}, {"inside": 1.0}),
        MessageRound(between, {"nic": per_nic * nbytes}, {"nic": per_nic}),
        MessageRound(
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
    """Return the rounds of a binomial tree; its longest path has one message of each round."""
    inside, across = _log2(at.per_node), _log2(at.racks)
    between = max(_log2(at.ranks) - inside - across, 0)
    links: tuple[tuple[int, tuple[LinkClass, ...]], ...] = (
        (inside, ("inside",)), (between, ("nic",)), (across, ("nic", "uplink")),
    )  # fmt: skip
    return tuple(
        MessageRound(count, dict.fromkeys(classes, nbytes), dict.fromkeys(classes, 1.0))
        for count, classes in links
        if count
    )


def _in_parts(nbytes: float, at: Placement, shared: Shared) -> Rounds:  # noqa: ARG001
    """Return the rounds of a scatter and a following all_gather."""
    rounds = _log2(at.ranks) + at.ranks - 1
    part = 2 * (at.ranks - 1) / at.ranks * nbytes / rounds if rounds else 0.0
    return (_even(rounds, part, at, dict.fromkeys(_classes(at), 1.0)),)


def _pairwise(nbytes: float, at: Placement, shared: Shared) -> Rounds:
    """Return the rounds of a pairwise exchange, with mean loads, because several rounds are in flight."""
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
    return (MessageRound(others, loads, {link: max(count / others, 1.0) for link, count in flows.items()}),)


def _from_one(nbytes: float, at: Placement, shared: Shared) -> Rounds:  # noqa: ARG001
    """Return the rounds of one rank that sends to, or receives from, each other rank."""
    links: tuple[tuple[int, tuple[LinkClass, ...]], ...] = (
        (at.per_node - 1, ("inside",)), (at.ranks - at.per_node, _classes(at)[1:] or ("nic",)),
    )  # fmt: skip
    return tuple(
        MessageRound(count, dict.fromkeys(classes, nbytes / at.ranks), dict.fromkeys(classes, 1.0))
        for count, classes in links
        if count
    )


def _double_tree(nbytes: float, at: Placement, shared: Shared) -> Rounds:  # noqa: ARG001
    """Return the rounds of NCCL's double binary tree: two pipelined trees, each with half of the bytes.

    The longest path has 2 log₂(nodes) messages between nodes ("Massively Scale Your Deep Learning Training
    with NCCL 2.4", NVIDIA 2019), and 2 (ranks of a node - 1) in the chain inside each node; the bytes on the
    busiest link are the same as with a ring, at 0.92 of the ring's bandwidth (`ncclTopoTuneModel` in NCCL's
    src/graph/tuning.cc, by which NCCL chooses between ring and tree). For measured times (their algorithm is
    not recorded), the factor 0.92 cancels.
    """
    if at.ranks < 2:
        return ()
    chain = at.per_node - 1
    steps = 2 * (chain if at.nodes == 1 else _log2(at.nodes) + _CHAINED * chain)
    part = 2 * (at.ranks - 1) / at.ranks * nbytes / _OF_A_RING / steps
    return (_even(steps, part, at, dict.fromkeys(_classes(at), 1.0)),)


def _message(nbytes: float, at: Placement, shared: Shared) -> Rounds:  # noqa: ARG001
    return (MessageRound(1, {at.widest: nbytes}, {at.widest: 1.0}),)


def _dissemination(nbytes: float, at: Placement, shared: Shared) -> Rounds:  # noqa: ARG001
    rounds = _log2(at.ranks)
    return (_even(rounds, 0.0, at, dict.fromkeys(_classes(at), 1.0)),) if rounds else ()


def _classes(at: Placement) -> tuple[LinkClass, ...]:
    """Return the classes of links that messages between neighbours cross."""
    found: list[LinkClass] = []
    if at.per_node > 1 or at.nodes == 1:
        found.append("inside")
    if at.nodes > 1:
        found.append("nic")
    if at.racks > 1:
        found.append("uplink")
    return tuple(found)


def _even(count: float, nbytes: float, at: Placement, flows: Mapping[LinkClass, float]) -> MessageRound:
    return MessageRound(count, dict.fromkeys(_classes(at), nbytes), flows)


def _log2(number: int) -> int:
    return max(number - 1, 0).bit_length()


def _algorithms_of(row: Collective) -> Mapping[str, Algorithm]:
    """Return the algorithms of libraries for a kind, by the parts that ranks send and receive."""
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
"""Further algorithms of one library for a kind. NCCL's for all_gather and reduce_scatter (rings, PAT) have a
latency that depends on the number of ranks."""
_HAS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "gloo": {"all_reduce": ("ring",), "broadcast": ("tree",)},
    "nccl": {"all_reduce": ("ring", "tree"), "broadcast": ("parts",)},
}
"""Algorithms of libraries with fewer than `_ALL`: torch calls gloo's ring; NCCL's rings are pipelined."""


def algorithms(kind: str, library: str) -> list[Algorithm]:
    """Return the algorithms of a library (`name` or `name:algorithm`) for a kind of operation; may be empty.

    Of the algorithms in `library`, only rings, doubling and trees have a formula.
    """
    name, _, chosen = library.partition(":")
    kind = plain_kind(kind)
    known = {**_ALL.get(kind, {}), **_OWN.get((name, kind), {})}
    if chosen:
        return [known[chosen]] if chosen in known else []
    return [known[each] for each in _HAS.get(name, {}).get(kind, tuple(known))]


class Medium(NamedTuple):
    """Known properties of links: bytes per second and latency (s) by class, and sharing within a node."""

    rates: Mapping[LinkClass, float]
    latencies: Mapping[LinkClass, float]
    shared: Shared

    def latency(self, round: MessageRound) -> float:
        """Return the latency in seconds of a message in a round."""
        return self.latencies.get(round.widest, 0.0)


def _is_shared(link: LinkClass) -> bool:
    return link != "inside"


_HEADERS: Final = 1.07
"""Largest ratio of bytes on the wire to bytes sent: Ethernet needs 1538 bytes for 1448 of TCP, 1.06."""
UNKNOWN: Final = Medium({}, {}, _is_shared)
"""Links of unknown rates; the ranks of a node share its link to other nodes."""


@dataclass(frozen=True)
class Stretched:
    """Times of one algorithm on a number of ranks, from measured times on another number.

    `measured`: seconds over bytes, for the placement `at` and the links `before`; results are for the
    placement `to` and the links `after`. Times on one node and on several nodes are not derived from each
    other.
    """

    algorithm: Algorithm
    measured: Callable[[float], float]
    at: Placement
    before: Medium
    to: Placement
    after: Medium

    def seconds(self, nbytes: float) -> float | None:
        """Return the seconds of an operation of `nbytes` bytes; None if the formula does not apply."""
        unit = self.algorithm(1.0, self.at, self.before.shared)
        count = sum(each.times for each in unit)
        link: LinkClass = "inside" if self.at.nodes == 1 else "nic"
        per_byte = sum(each.times * each.loads.get(link, 0.0) for each in unit) / count if count else 0.0
        if not count or (self.at.nodes == 1) != (self.to.nodes == 1):
            return None
        late = sum(each.times * self.before.latency(each) for each in unit) / count

        def lasting(load: float) -> float:
            """Return the measured seconds of a round with `load` bytes over the busiest link."""
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
        """Return the seconds in which the bytes of a round cross a link.

        A measured time is the sum of the link's part, which depends on the rate, and the ranks' part; over a
        slower link, both overlap. `lasting`: seconds of a round over bytes.
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


def crossing(round: MessageRound, medium: Medium) -> float:
    """Return the seconds in which a round's bytes cross the slowest link of known rate."""
    known = (load / medium.rates[link] for link, load in round.loads.items() if link in medium.rates)
    return max(known, default=0.0)


def assumed(
    algorithm: Algorithm, nbytes: float, to: Placement, medium: Medium, overhead: float = 0.0
) -> float | None:
    """Return the seconds computed from latency and bandwidth of links; None if those of a link are unknown.

    `overhead`: additional seconds of each round.
    """
    total = 0.0
    for each in algorithm(nbytes, to, medium.shared):
        if each.widest not in medium.rates:
            return None
        total += each.times * (crossing(each, medium) + medium.latency(each) + overhead)
    return total
