"""Topology of a cluster: nodes, ranks, and the links between them.

    nodes: 8
    ranks_per_node: 4
    cores: 2                                                # of a node, if ranks share them
    links:
      inside: {rate: 50GB/s, latency: 2us}                  # between ranks of a node; of each rank
      nic: {rate: 100Gbit/s, latency: 5us, per: node}       # between nodes; of each node, or of each rank
                                                            # rates: [10Gbit/s, 40Gbit/s]: of the first nodes
      rack: {nodes: 4, uplink: 200Gbit/s, latency: 2us}     # between racks of 4 nodes; of each rack

    topology = Topology.load("cluster.yaml").changed(["nic=400Gbit/s", "nodes=64"])

Rates are per direction. `latency` is added to a message that crosses the link; the default is 0. An omitted
link is no bottleneck, but costs over it cannot be assumed. Ranks are numbered node by node, and nodes rack by
rack.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from mcr_plus.config.document import Document, dict_document, read_document
from mcr_plus.config.options import validate
from mcr_plus.errors import ConfigError, InvalidArgument, short, unknown
from mcr_plus.tables.scaling import LinkClass, Medium, Placement

_RATES: Final = {
    "bit/s": 1 / 8, "kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "Tbit/s": 1e12 / 8,
    "B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12,
    "KiB/s": 2.0**10, "MiB/s": 2.0**20, "GiB/s": 2.0**30,
}  # fmt: skip
_LATENCIES: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_MOST: Final = 1 << 20  # maximum number of nodes, and of ranks per node

Scope = Literal["rank", "node"]


def parse_rate(value: object) -> float:
    """Return the bytes per second of text such as 100Gbit/s; raises `ValueError` with the expected form."""
    return _quantity(value, _RATES, "a rate with its unit, such as 100Gbit/s or 12.5GB/s", least=0.0)


def parse_latency(value: object) -> float:
    """Return the seconds of text such as 5us, or 0; raises `ValueError` with the expected form."""
    if value in (0, "0"):
        return 0.0
    return _quantity(value, _LATENCIES, "a latency with its unit, such as 5us", least=-1.0)


def _quantity(value: object, units: Mapping[str, float], expected: str, *, least: float) -> float:
    match = (
        re.fullmatch(r"(\d{1,19}(?:\.\d{1,19})?) ?(\S*)", value.strip()) if isinstance(value, str) else None
    )
    if match is None:
        raise ValueError(f"expected {expected}, got {short(value)}")
    number, unit = match.groups()
    if unit not in units:
        what = f"wrong unit {unit!r}" if unit else "the unit is missing"
        raise ValueError(f"{what} in {short(value)}; expected {expected}; known: {', '.join(units)}")
    found = float(number) * units[unit]
    if not found > least:
        raise ValueError(f"expected {expected}, above 0, got {short(value)}")
    return found


Rate = Annotated[float, BeforeValidator(parse_rate)]
Latency = Annotated[float, BeforeValidator(parse_latency)]
Count = Annotated[int, Field(ge=1, le=_MOST)]


class _ClusterPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NetworkLink(_ClusterPart):
    """A link: bytes per second in each direction, latency in seconds, and owner (each rank or each node)."""

    rate: Rate
    latency: Latency = 0.0
    per: Scope = "rank"


class Nic(NetworkLink):
    """The link between nodes. `rates`: of nodes from the first one on; further ones have `rate`."""

    per: Scope = "node"
    rates: list[Rate] = []

    def rate_of(self, node: int) -> float:
        """Return the rate of a node's link."""
        return self.rates[node] if node < len(self.rates) else self.rate


class Rack(_ClusterPart):
    """Racks of `nodes` nodes. `uplink`, `latency`: properties of each rack's link to other racks."""

    nodes: Count
    uplink: Rate
    latency: Latency = 0.0


class Links(_ClusterPart):
    """Links of a cluster; None for an unknown link."""

    inside: NetworkLink | None = None
    nic: Nic | None = None
    rack: Rack | None = None


class Topology(_ClusterPart):
    """Nodes with ranks, connected by links; the module's docstring has an example of a file.

    `cores`: number of ranks of a node that compute at full speed; None: all.
    """

    version: Literal[1] = 1
    nodes: Count
    ranks_per_node: Count = 1
    cores: Count | None = None
    links: Links = Links()
    _source: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """Read `cluster.yaml`. Raises `ConfigError` with file, line and the expected value."""
        return cls._of(read_document(path, versioned=False))

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Topology:
        """Return the topology described by a mapping with the keys of a file. Raises `ConfigError`."""
        return cls._of(dict_document(data, "topology"))

    @classmethod
    def _of(cls, document: Document) -> Topology:
        found = validate(cls, document.data, document, ())
        rack = found.links.rack
        if rack is not None and found.nodes % rack.nodes:
            text = f"racks of {rack.nodes} nodes do not divide {found.nodes} nodes; expected a divisor"
            raise document.error(("links", "rack", "nodes"), text)
        nic = found.links.nic
        if nic is not None and len(nic.rates) > found.nodes:
            text = f"{len(nic.rates)} rates; the cluster has {found.nodes} nodes"
            raise document.error(("links", "nic", "rates"), text)
        found._source = document.data
        return found

    def changed(self, changes: Sequence[str]) -> Topology:
        """Return the topology with changes: `nic=100Gbit/s`, `nic.latency=2us`, `rack.nodes=4`, `nodes=64`.

        The name of a link sets the link's rate, `nic` that of all nodes, and `uplink` the rate of racks. Only
        known links can be changed, since the effect of a change depends on the present value. Raises
        `ConfigError` that begins with the change.
        """
        found = self
        for change in changes:
            name, equals, value = (part.strip() for part in change.partition("="))
            keys = _KEYS.get(name)
            if not equals or not value:
                raise ConfigError(f"{change or repr(change)}: expected NAME=VALUE, such as nic=100Gbit/s")
            if keys is None:
                raise ConfigError(f"{change}: {unknown('name', name, sorted(_KEYS))}")
            if keys[0] == "links" and getattr(found.links, keys[1]) is None:
                raise ConfigError(
                    f"{change}: this cluster's {keys[1]} is unknown, so the effect of a change is, too; "
                    f"expected links.{keys[1]} in its description (cluster.yaml, --topology)"
                )
            data = _copied(found._source)
            where = data
            for key in keys[:-1]:
                where = where.setdefault(key, {})
            if name == "nic":  # of all nodes
                where.pop("rates", None)
            where[keys[-1]] = int(value) if value.isascii() and value.isdigit() else value
            found = Topology._of(dict_document(data, change))
        return found

    @property
    def is_full(self) -> bool:
        """Return whether ranks of a node share its cores."""
        return self.cores is not None and self.cores < self.ranks_per_node

    @property
    def ranks(self) -> int:
        """Largest number of ranks."""
        return self.nodes * self.ranks_per_node

    def placement(self, group: Sequence[int]) -> Placement:
        """Return the placement of these ranks. Raises `InvalidArgument` for a rank beyond the topology."""
        if group and not 0 <= min(group) <= max(group) < self.ranks:
            rank = min(group) if min(group) < 0 else max(group)
            raise InvalidArgument(
                f"rank {rank}: expected 0 to {self.ranks - 1}, those of {self.nodes} nodes with "
                f"{self.ranks_per_node} ranks each"
            )
        nodes = [rank // self.ranks_per_node for rank in group]
        racks = [0 if self.links.rack is None else node // self.links.rack.nodes for node in nodes]
        nic, slowest = self.links.nic, None
        if nic is not None and nic.rates and len(set(nodes)) > 1:
            own = set(map(nic.rate_of, nodes))
            slowest = None if own == {nic.rate} else min(own)
        return Placement(len(group), len(set(nodes)), _most(nodes), len(set(racks)), _most(racks), slowest)

    def of_slowest(self, rate: float) -> Topology:
        """Return the topology in which all nodes have a NIC of this rate."""
        assert self.links.nic is not None
        nic = self.links.nic.model_copy(update={"rate": rate, "rates": []})
        return self.model_copy(update={"links": self.links.model_copy(update={"nic": nic})})

    @property
    def medium(self) -> Medium:
        """Known properties of the links, in the form in which costs are scaled."""
        classes: tuple[LinkClass, ...] = ("inside", "nic", "uplink")
        rates: dict[LinkClass, float] = {
            link: rate for link in classes if (rate := self.rate(link)) is not None
        }
        return Medium(rates, {link: self.latency(link) for link in classes}, self.shared)

    def rate(self, link: LinkClass) -> float | None:
        """Return the bytes per second of a link; None if it is unknown."""
        if link == "uplink":
            return None if self.links.rack is None else self.links.rack.uplink
        found = self.links.inside if link == "inside" else self.links.nic
        return None if found is None else found.rate

    def latency(self, link: LinkClass) -> float:
        """Return the latency of a message over this link; a message between racks also crosses the NIC."""
        inside, nic, rack = self.links.inside, self.links.nic, self.links.rack
        if link == "inside":
            return 0.0 if inside is None else inside.latency
        own = 0.0 if nic is None else nic.latency
        return own + rack.latency if link == "uplink" and rack is not None else own

    def shared(self, link: LinkClass) -> bool:
        """Return whether the ranks of a node, or of a rack, share this link."""
        if link == "uplink":
            return True
        found = self.links.inside if link == "inside" else self.links.nic
        return (link == "nic") if found is None else found.per == "node"


def crossed(at: Placement) -> tuple[LinkClass, ...]:
    """Return the classes of links between ranks with this placement."""
    crosses: dict[LinkClass, bool] = {"inside": at.per_node > 1, "nic": at.nodes > 1, "uplink": at.racks > 1}
    return tuple(link for link in crosses if crosses[link])


def completed(medium: Medium, other: Medium) -> Medium:
    """Fill in unknown links of a cluster from another cluster."""
    absent = other.rates.keys() - medium.rates.keys()
    return Medium(
        {**other.rates, **medium.rates},
        {**medium.latencies, **{link: other.latencies[link] for link in absent}},
        lambda link: (other if link in absent else medium).shared(link),
    )


def _most(places: Sequence[int]) -> int:
    return max(Counter(places).values(), default=0)


def _copied(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in data.items()}


_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "nodes": ("nodes",),
    "ranks_per_node": ("ranks_per_node",),
    "inside": ("links", "inside", "rate"),
    "nic": ("links", "nic", "rate"),
    "uplink": ("links", "rack", "uplink"),
    **{
        f"{link}.{key}": ("links", link, key)
        for link in ("inside", "nic")
        for key in ("rate", "latency", "per")
    },
    **{f"rack.{key}": ("links", "rack", key) for key in ("nodes", "uplink", "latency")},
}
