"""Compute the nodes of a group, and the inner groups that run the steps.

A group of N nodes with L ranks each has ranks (j, i): local index i on node j. A rank is a member of three
groups:

    intra      ranks of the same node, for the first step
    inter      ranks with the same local index, one on every node
    intra2     ranks of the same node again, for the last step

`intra` and `intra2` have the same ranks. They are separate because a library starts the operations of a
group in order: in a single group, the first step of the next operation would wait for the last step of this
one, and therefore for the link between nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mcr_plus.config.schema import Config
from mcr_plus.core.group import Group
from mcr_plus.errors import ConfigError
from mcr_plus.hierarchy.options import HierarchicalOptions

if TYPE_CHECKING:
    from collections.abc import Hashable

Part = Literal["intra", "inter", "intra2"]


@dataclass(frozen=True)
class Nodes:
    """Nodes of a group; `node` and `index` are this process's j and i.

    `ranks[j][i]`: group rank of local index i on node j. `in_job`: the group's ranks as ranks of the job.
    """

    ranks: tuple[tuple[int, ...], ...]
    node: int
    index: int
    in_job: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of nodes: N."""
        return len(self.ranks)

    @property
    def size(self) -> int:
        """Number of ranks per node: L."""
        return len(self.ranks[0])

    @property
    def are_subtrees(self) -> bool:
        """Whether the tree of `sums: fixed` has a tree of each node's ranks, and one over the nodes."""
        ranks = [rank for node in self.ranks for rank in node]
        return ranks == sorted(ranks) and self.size.bit_count() == 1

    def groups(self, part: Part) -> Sequence[tuple[int, ...]]:
        """Return the group ranks of every group of a part."""
        return list(zip(*self.ranks, strict=True)) if part == "inter" else self.ranks

    def group_name(self, part: Part) -> str:
        """Return the name of this process's group of a part; records and saved codec states use it."""
        names = {
            "intra": f"node{self.node}",
            "inter": f"across{self.index}",
            "intra2": f"node{self.node}/back",
        }
        return names[part]

    def place(self, rank: int) -> tuple[int, int]:
        """Return node and local index of a group rank."""
        return next((j, node.index(rank)) for j, node in enumerate(self.ranks) if rank in node)


def nodes_of(config: Config, hosts: Sequence[str], group: Group) -> Nodes | str:
    """Return the nodes of a group, or the reason why its operations are not decomposed.

    `hosts`: the host names of all ranks of the job. Raises `ConfigError` if the configuration lists a
    different number of ranks.
    """
    options = check_nodes(config, len(hosts))
    if options is None:
        return "the pipeline has no stage hierarchical"
    members_of: dict[Hashable, list[int]] = {}
    for rank, in_job in enumerate(group.ranks):
        members_of.setdefault(_node(options, hosts, in_job), []).append(rank)
    sizes = Counter(map(len, members_of.values()))
    if len(members_of) == 1:
        return f"all {group.size} ranks are on one node"
    if len(sizes) > 1:
        many = " and ".join(f"{count} of {size}" for size, count in sorted(sizes.items()))
        return f"nodes have different numbers of ranks: {many}"
    if 1 in sizes:
        return "every node has one rank"
    ranks = tuple(map(tuple, members_of.values()))
    node = next((j for j, members in enumerate(ranks) if group.rank in members), 0)
    index = ranks[node].index(group.rank) if group.rank in ranks[node] else 0
    return Nodes(ranks, node, index, group.ranks)


def may_have_nodes(config: Config, hosts: Sequence[str]) -> bool:
    """Return whether a job with ranks on these hosts can have groups of several nodes.

    Without nodes in the options, a job on one host has none, although the default pipeline has the stage.
    """
    options = config.options("hierarchical")
    if not isinstance(options, HierarchicalOptions):
        return False
    return len({*hosts}) > 1 or options.nodes is not None or options.ranks_per_node is not None


def check_nodes(config: Config, size: int) -> HierarchicalOptions | None:
    """Return the options of the stage; None if the pipeline lacks the stage.

    Raises `ConfigError` if the options list the ranks of nodes, but not exactly `size` ranks.
    """
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
    """Return this rank's inner groups; empty if operations are not decomposed or the rank is no member."""
    nodes = nodes_of(config, hosts, group)
    if isinstance(nodes, str) or group.rank < 0:
        return {}
    intra, inter = nodes.ranks[nodes.node], tuple(members[nodes.index] for members in nodes.ranks)
    places: dict[Part, tuple[tuple[int, ...], int]] = {
        "intra": (intra, nodes.index),
        "inter": (inter, nodes.node),
        "intra2": (intra, nodes.index),
    }
    return {
        part: Group(
            f"{group.name}/{nodes.group_name(part)}", tuple(group.ranks[member] for member in members), rank
        )
        for part, (members, rank) in places.items()
    }


def _node(options: HierarchicalOptions, hosts: Sequence[str], rank: int) -> Hashable:
    if options.nodes is not None:
        return next(index for index, node in enumerate(options.nodes) if rank in node)
    return rank // options.ranks_per_node if options.ranks_per_node is not None else hosts[rank]
