"""Which ranks of a group share a node, and the groups inside it that steps run in: plans over plain numbers.

A group of N nodes with L ranks each has ranks (j, i): local index i on node j. A rank is in these groups:

    in         the ranks of its node, for what comes first
    across     the ranks with its local index, one on every node
    back       the ranks of its node once more, for what comes last

`in` and `back` have the same ranks. They are two because a library starts the operations of a group in their
order: in one group the next operation's first step would wait for this one's last step, and with it for the
link between the nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mcr_plus.config import Config, HierarchicalOptions
from mcr_plus.errors import ConfigError
from mcr_plus.message import Group

if TYPE_CHECKING:
    from collections.abc import Hashable

Part = Literal["in", "across", "back"]


@dataclass(frozen=True)
class Nodes:
    """`ranks[j][i]`: the group rank with local index i on node j. `node`, `index`: this process's j and i."""

    ranks: tuple[tuple[int, ...], ...]
    node: int
    index: int

    @property
    def count(self) -> int:
        """How many nodes there are: N."""
        return len(self.ranks)

    @property
    def size(self) -> int:
        """How many ranks a node has: L."""
        return len(self.ranks[0])

    def groups(self, part: str) -> Sequence[tuple[int, ...]]:
        """The group ranks of every group of a part."""
        return list(zip(*self.ranks, strict=True)) if part == "across" else self.ranks

    def place(self, rank: int) -> tuple[int, int]:
        """Node and local index of a group rank."""
        return next((j, node.index(rank)) for j, node in enumerate(self.ranks) if rank in node)


def nodes_of(config: Config, hosts: Sequence[str], group: Group) -> Nodes | str:
    """The nodes of a group, as its rank sees them; or why its operations take no steps.

    `hosts`: of all ranks of the job. Raises `ConfigError` if the configuration's nodes are not those of a
    job of that many ranks.
    """
    options = check_nodes(config, len(hosts))
    if options is None:
        return "the pipeline has no stage hierarchical"
    found: dict[Hashable, list[int]] = {}
    for rank, in_job in enumerate(group.ranks):
        found.setdefault(_node(options, hosts, in_job), []).append(rank)
    sizes = Counter(map(len, found.values()))
    if len(found) == 1:
        return f"all {group.size} ranks are on one node"
    if len(sizes) > 1:
        many = " and ".join(f"{count} of {size}" for size, count in sorted(sizes.items()))
        return f"nodes have different numbers of ranks: {many}"
    if 1 in sizes:
        return "every node has one rank"
    ranks = tuple(map(tuple, found.values()))
    node = next((j for j, members in enumerate(ranks) if group.rank in members), 0)
    return Nodes(ranks, node, ranks[node].index(group.rank) if group.rank in ranks[node] else 0)


def check_nodes(config: Config, size: int) -> HierarchicalOptions | None:
    """Return the stage's options; raises `ConfigError` unless its nodes are of a job of `size` ranks."""
    spec = next((spec for spec in config.pipeline if spec.name == "hierarchical"), None)
    if spec is None or not isinstance(spec.options, HierarchicalOptions):
        return None
    listed = sum(map(len, spec.options.nodes or ()))
    if spec.options.nodes is not None and listed != size:
        raise ConfigError(
            f"{spec.place}: hierarchical.nodes: {listed} ranks are listed; expected all {size} of this job"
        )
    return spec.options


def inner_groups(config: Config, hosts: Sequence[str], group: Group) -> Mapping[Part, Group]:
    """The groups that this rank is in; none where operations take no steps, or this rank is no member."""
    nodes = nodes_of(config, hosts, group)
    if isinstance(nodes, str) or group.rank < 0:
        return {}
    node, index = nodes.ranks[nodes.node], nodes.index
    across = tuple(members[index] for members in nodes.ranks)
    return {
        "in": _inner(group, f"node{nodes.node}", node, index),
        "across": _inner(group, f"across{index}", across, nodes.node),
        "back": _inner(group, f"node{nodes.node}/back", node, index),
    }


def _inner(group: Group, name: str, members: Sequence[int], rank: int) -> Group:
    return Group(f"{group.name}/{name}", tuple(group.ranks[member] for member in members), rank)


def _node(options: HierarchicalOptions, hosts: Sequence[str], rank: int) -> Hashable:
    if options.nodes is not None:
        return next(index for index, node in enumerate(options.nodes) if rank in node)
    return rank // options.ranks_per_node if options.ranks_per_node is not None else hosts[rank]
