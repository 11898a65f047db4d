"""Make redistribution plans: choose by cost, agree in the group, and prove each plan before data is sent."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from mcr_plus.communicator.costs import expected_us
from mcr_plus.core.kinds import REDUCIBLE
from mcr_plus.core.units import about
from mcr_plus.errors import BackendError, InvalidArgument, Unsupported
from mcr_plus.layout import proof
from mcr_plus.layout.addends import to_itself
from mcr_plus.layout.agreement import agree_on_specs
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.messages import ExchangePart
from mcr_plus.layout.native import NativeCollective, Room, may_reduce
from mcr_plus.layout.program import (
    LOADS,
    ExchangeProgram,
    MessageCosts,
    VolumeBound,
    bound,
    cheapest,
    load,
    native_load,
    programs,
)
from mcr_plus.layout.regions import Ints, as_ints
from mcr_plus.selection.options import SelectOptions

if TYPE_CHECKING:
    from mcr_plus.communicator.communicator import Communicator

ValueT = TypeVar("ValueT")

MOST_STEPS: Final = 3
ALONE: Final = 1 << 20
"""Bytes from which a tensor may have a native collective of its own if there are several tensors."""
_TAG: Final = "redistribute"
_COSTS: Final = "costs of layouts"
_LARGE: Final = 4 << 20  # bytes of an all_to_all whose latency is negligible


class Spec(NamedTuple):
    """A tensor to redistribute. `name`: name in error texts; empty for a single tensor."""

    name: str
    source: Layout
    target: Layout
    dtype: torch.dtype


class Chosen(NamedTuple):
    """Program of one tensor, and this rank's part of each of its steps."""

    program: ExchangeProgram
    parts: Sequence[ExchangePart]


@dataclass(frozen=True)
class RedistributionPlan:
    """Plan of a redistribution, agreed on and proved by all ranks of the group.

    Attributes:
        specs: the tensors.
        chosen: program of each tensor.
        loads: [tensors, steps, 6] maximum loads over ranks, in the order of `LOADS`.
        nodes: node of each rank of the job; None for one node.
        call: name of the plan in the signatures of its operations, by which different plans on ranks are
            detected; equal for equal layouts, dtypes and options.
    """

    specs: Sequence[Spec]
    chosen: Sequence[Chosen]
    loads: NDArray[np.int64]
    nodes: Ints | None
    call: str

    @property
    def steps(self) -> int:
        """Number of consecutive exchanges."""
        return max((len(each.program.steps) for each in self.chosen), default=0)

    def take(self, which: Sequence[int]) -> RedistributionPlan:
        """Return the plan of some of the tensors."""
        specs = [self.specs[index] for index in which]
        chosen = [self.chosen[index] for index in which]
        return RedistributionPlan(specs, chosen, self.loads[list(which)], self.nodes, self.call)

    def bounds(self) -> list[VolumeBound]:
        """Return for each tensor the least volume of any plan, in elements."""
        return [bound(spec.source, spec.target, self.nodes) for spec in self.specs]

    def describe(self) -> str:
        """Return a description of the plan: the tensors, their steps, and the bytes on the fullest rank."""
        lines = []
        for spec, each, loads in zip(self.specs, self.chosen, self.loads, strict=True):
            name = f"{spec.name}: " if spec.name else ""
            least = bound(spec.source, spec.target, self.nodes).fullest * spec.dtype.itemsize
            lines.append(f"{name}{spec.source} -> {spec.target}: {each.program.name}")
            one = each.program.native
            if one is not None:
                sizes = ", ".join(map(str, sorted({len(group) for group in one.groups})))
                groups = f"{len(one.groups)} groups" if len(one.groups) > 1 else "one group"
                sent, received = loads[0, [0, 1]] + loads[0, [3, 4]]
                lines.append(
                    f"  in {groups} of {sizes} ranks: at most {about(int(sent))} sent, "
                    f"{about(int(received))} received by a rank"
                )
            for step, row in zip(each.program.steps, loads, strict=False):
                sent, received, partners, far_sent, far_received, far_partners = row.tolist()
                lines.append(
                    f"  to {step.target.name}: at most {about(sent + far_sent)} sent, "
                    f"{about(received + far_received)} received by a rank, {partners + far_partners} partners"
                )
            lines.append(f"  bound: {about(least)} received by a rank")
        return "\n".join(lines)

    __str__ = describe


def make_plan(
    comm: Communicator,
    specs: Sequence[Spec],
    wrong: str | None,
    *,
    room: Room | None = None,
    lossy: bool = False,
    options: str = "",
    among: Sequence[Spec] | None = None,
) -> RedistributionPlan:
    """Choose a program for each tensor, agree with the other ranks of the group, and prove this rank's parts.

    Collective. `wrong`: the error in this rank's arguments, if any. All ranks raise if any rank passes
    `wrong`, or if specs or `options` differ between ranks. `room`: budget for native collectives, reduced by
    the chosen ones; None: no limit of bytes. `lossy`: a codec is requested; only programs that keep replicas
    equal bit for bit are allowed. `among`: all tensors of the call, if `specs` holds only one dtype.
    """
    for spec in specs:
        wrong = wrong or _refused(comm, spec)
    digest = agree_on_specs(comm, specs, options, wrong, specs if among is None else among)
    specs = [Spec(spec.name, *to_itself(spec.source, spec.target), spec.dtype) for spec in specs]
    nodes = nodes_of(comm)
    rank = comm.ranks[comm.rank]
    made = _Known(None if lossy else nodes)
    found = [made.programs(spec, index) for index, spec in enumerate(specs)]
    found = [
        [each for each in some if each.native is None or may_reduce(each.native, spec.source, spec.dtype)]
        for spec, some in zip(specs, found, strict=True)
    ]
    if len(specs) > 1:  # small tensors share exchanges
        found = [
            some
            if spec.source.volume * spec.dtype.itemsize >= ALONE
            else [each for each in some if each.steps]
            for spec, some in zip(specs, found, strict=True)
        ]
    # Every rank knows only its own loads: agree on the largest before comparing costs.
    different = {
        id(program): (spec, program) for spec, some in zip(specs, found, strict=True) for program in some
    }
    number_of = {key: number for number, key in enumerate(different)}  # equal on all ranks
    ranks = comm.attached.get("unheard", (rank,))

    def of_ranks() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = np.zeros((len(ranks), len(different), MOST_STEPS, len(LOADS)), np.int64)
        for each, loads in zip(ranks, found, strict=True):
            for at, (spec, program) in enumerate(different.values()):
                if program.native is not None:
                    loads[at, 0] = native_load(program.native, spec.source, each, spec.dtype.itemsize, nodes)
                for step, part in enumerate(made.parts(program, each)):
                    loads[at, step] = load(part, spec.dtype.itemsize, nodes)
        return found.max(axis=0), _crossing(comm, ranks, found, nodes)

    loads, crossing = _agree_on_loads(comm, *once(comm, ("loads", digest), of_ranks), len(ranks), nodes)
    seconds = costs_of(comm, nodes).seconds(loads, crossing.max(axis=0)).sum(axis=1)
    total = crossing[..., 0].sum(axis=(0, 2))
    # Infinite costs exclude programs that would leave replicas with different bits.
    if lossy:
        for at, (_, program) in enumerate(different.values()):
            if loads[at].any() and not keeps_replicas(program):
                seconds[at] = np.inf
    # Choose in the order of tensors: earlier tensors have the first claim on the budget.
    chosen, kept = [], np.zeros((len(specs), MOST_STEPS, len(LOADS)), np.int64)
    room = room or Room(comm, None)
    for at, (spec, some) in enumerate(zip(specs, found, strict=True)):
        places = [number_of[id(each)] for each in some]
        best = _cheapest(spec, some, seconds[places], total[places], room)
        kept[at] = loads[number_of[id(best)]]
        chosen.append(Chosen(best, made.parts(best, rank)))
    _prove(comm, specs, chosen)
    return RedistributionPlan(specs, chosen, kept, nodes, f"redistribution {digest:x}")


def once(comm: Communicator, key: Hashable, make: Callable[[], ValueT]) -> ValueT:
    """Return what `make` computes of all ranks: in a simulation, the first simulated rank for all."""
    found: MutableMapping[Any, ValueT] | None = comm.attached.get("found")
    if found is None:
        return make()
    key = (key, comm.ranks)
    return found[key] if key in found else found.setdefault(key, make())


def _cheapest(
    spec: Spec,
    some: Sequence[ExchangeProgram],
    seconds: NDArray[np.float64],
    crossing: NDArray[np.int64],
    room: Room,
) -> ExchangeProgram:
    """Return the cheapest program of a tensor whose native collectives fit into `room`.

    Raises `Unsupported` if no program is left because the others would make replicas differ (infinite costs).
    """
    pair = spec.source, spec.target, spec.dtype.itemsize
    usable = [
        at
        for at, program in enumerate(some)
        if np.isfinite(seconds[at]) and (program.native is None or room.has(program.native, *pair))
    ]
    if usable:
        best = some[usable[cheapest(seconds[usable].tolist(), crossing[usable].tolist())]]
        if best.native is not None:
            room.take(best.native, *pair)
        return best
    raise Unsupported(
        f"compress: {_named(spec)}a replica of {spec.target} would keep exact values that others get from "
        "the codec; pass compress=False to send exact values"
    )


class _Known:
    """Cache of programs and parts, as several tensors may have the same pair of layouts."""

    def __init__(self, nodes: Ints | None) -> None:
        self._nodes = nodes
        self._programs: dict[tuple[Any, ...], list[ExchangeProgram]] = {}
        self._parts: dict[tuple[int, int], list[ExchangePart]] = {}

    def programs(self, spec: Spec, index: int) -> list[ExchangeProgram]:
        turn = index if spec.source.has_replicas or spec.target.has_replicas or spec.source.is_partial else 0
        key = (spec.source, spec.target, spec.dtype.itemsize, turn)
        if key not in self._programs:
            itemsize = spec.dtype.itemsize
            self._programs[key] = programs(spec.source, spec.target, itemsize, self._nodes, turn)
        return self._programs[key]

    def parts(self, program: ExchangeProgram, rank: int) -> list[ExchangePart]:
        key = (id(program), rank)
        if key not in self._parts:
            self._parts[key] = program.parts(rank)
        return self._parts[key]


def keeps_replicas(program: ExchangeProgram) -> bool:
    """Return True if lossy steps of a program leave the replicas of an element with the same bits.

    A step may be lossy if exactly one rank receives or keeps each element; see `lossy_steps`.
    """
    return lossy_steps(program) > 0


def lossy_steps(program: ExchangeProgram) -> int:
    """Return the number of leading steps of a program that may use a codec; later steps are exact.

    Replicas would differ after a lossy step in which one rank keeps values that others receive. A native
    collective counts as one step, since all its ranks get the same bits. Exceptions: if several groups run
    it, an element may be in two of them; and the root of a broadcast keeps its exact values.
    """
    if program.native is not None:
        return int(len(program.native.groups) == 1 and program.native.kind != "broadcast")
    for number, step in enumerate(program.steps):
        if step.target.has_replicas:
            return number
    return len(program.steps)


def nodes_of(comm: Communicator) -> Ints | None:
    """Return the number of each rank's host, for all ranks of the job; None if the group is on one host."""
    hosts = comm.hosts
    if len({hosts[rank] for rank in comm.ranks}) == 1:
        return None
    order = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return as_ints([order[host] for host in hosts])


def costs_of(comm: Communicator, nodes: Ints | None) -> MessageCosts:
    """Return the costs of messages and bytes in this group, equal on all ranks because the tables are.

    Costs come from the all_to_all and send rows of the group's tuning table. Defaults apply if no table is
    named or a row is missing. An all_to_all of s bytes on n ranks, k of them on each node, sends n - 1
    messages of s / n bytes per rank; on several nodes, the n - k messages that cross the link determine its
    time.
    """
    known: MessageCosts | None = comm.attached.get(_COSTS)
    if known is None:
        known = comm.attached[_COSTS] = _costs(comm, _sharers(comm, nodes), nodes is not None)
    return known


def _costs(comm: Communicator, per_node: int, across: bool) -> MessageCosts:
    select = comm.stage_options("select")
    if not isinstance(select, SelectOptions) or select.table is None or comm.size < 2:
        return MessageCosts()
    peers = comm.size - per_node if across else comm.size - 1
    sizes = [2 * comm.size, _LARGE // torch.float32.itemsize // comm.size * comm.size]
    few, many = (expected_us(comm, "all_to_all", torch.float32, numel, tag=_TAG) for numel in sizes)
    if few is None or many is None or peers < 1:
        return MessageCosts()
    part = [numel * torch.float32.itemsize * peers / comm.size for numel in sizes]
    byte = max(many - few, 0.0) * 1e-6 / (part[1] - part[0])
    message = few * 1e-6 / peers
    send_us = expected_us(comm, "send", torch.float32, 2, tag=_TAG)
    send = 2 * message if send_us is None else send_us * 1e-6
    if across:
        return MessageCosts(far_message=message, far_byte=byte / per_node, far_send=send)
    return MessageCosts(message, byte, send=send)


def _sharers(comm: Communicator, nodes: Ints | None) -> int:
    return 1 if nodes is None else int(np.bincount(nodes[as_ints(comm.ranks)]).max())


def _named(spec: Spec) -> str:
    return f"{spec.name}: " if spec.name else ""


def _refused(comm: Communicator, spec: Spec) -> str | None:
    """Return the reason why a pair of layouts cannot be redistributed in the group; None if it can."""
    source, target, name = spec.source, spec.target, _named(spec)
    if source.shape != target.shape:
        return f"{name}source {source} and target {target} have different global shapes"
    members = set(comm.ranks)
    for what, layout in (("source", source), ("target", target)):
        outside = sorted(set(layout.ranks) - members)
        if outside:
            return (
                f"{name}{what} {layout}: rank {outside[0]}{comm.opened.group.of_job} is not in group "
                f"'{comm.name}' ({list(comm.ranks)})"
            )
    if target.is_partial and target != source:
        return f"{name}target {target}: values cannot be divided into addends, except for target == source"
    if source != target and (reduction := no_reduction(source, spec.dtype)) is not None:
        return f"{name}source {source}: {reduction}"
    try:
        source.check_source()
    except InvalidArgument as error:
        return f"{name}{error}"
    return None


def no_reduction(source: Layout, dtype: torch.dtype) -> str | None:
    """Return the name of the layout's reduction if the dtype does not support it; otherwise None."""
    if not source.is_partial:
        return None
    if source.op == "AVG" and dtype is torch.bool:
        return "means of bool"
    return None if dtype in REDUCIBLE[source.op] else f"{source.op} of {dtype}"


def _crossing(
    comm: Communicator, ranks: Sequence[int], of_ranks: NDArray[np.int64], nodes: Ints | None
) -> NDArray[np.int64]:
    """Return the bytes that leave and enter each node, [nodes, ..., 2]; `of_ranks`: [ranks, ..., 6]."""
    nodes_here = np.zeros(1, np.int64) if nodes is None else np.unique(nodes[as_ints(comm.ranks)])
    crossing = np.zeros((len(nodes_here), *of_ranks.shape[1:-1], 2), np.int64)
    if nodes is not None:
        np.add.at(crossing, np.searchsorted(nodes_here, nodes[as_ints(ranks)]), of_ranks[..., 3:5])
    return crossing


def _agree_on_loads(
    comm: Communicator, loads: NDArray[np.int64], crossing: NDArray[np.int64], known: int, nodes: Ints | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the maximum loads over ranks, and the bytes that cross, of all ranks.

    `loads`, `crossing`: those of `known` ranks: of this one, or in a simulation of all.
    """
    loads, crossing = loads.copy(), crossing.copy()
    if comm.size > 1 and loads.size:
        if nodes is not None:
            comm.all_reduce(torch.from_numpy(crossing), compress=False, tag=_TAG)
            crossing //= known  # each has added up what is known of all of these
        comm.all_reduce(torch.from_numpy(loads), "MAX", compress=False, tag=_TAG)
    return loads, crossing


def _prove(comm: Communicator, specs: Sequence[Spec], chosen: Sequence[Chosen]) -> None:
    """Check this rank's parts, and compare the order of boxes and the groups of collectives with each peer.

    Raises `BackendError` on all ranks if any check fails.
    """
    ranks = as_ints(sorted(comm.ranks))
    order = np.searchsorted(ranks, as_ints(comm.ranks))
    wrong: str | None = None
    sent, expected = [], []
    checked: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    groups: dict[tuple[NativeCollective, Layout, Layout], NDArray[np.int64]] = {}
    for spec, each in zip(specs, chosen, strict=True):
        if (native := each.program.native) is not None:
            pair = native, spec.source, spec.target
            if pair not in groups:
                wrong = wrong or proof.check_native(*pair, [comm.ranks[comm.rank]])
                groups[pair] = np.full(comm.size, proof.digest_of_groups(native))
            sent.append(groups[pair])
            expected.append(groups[pair])
        for step, part in zip(each.program.steps, each.parts, strict=True):
            if id(part) not in checked:
                wrong = wrong or proof.check(part, step.source, step.target)
                both = (proof.digests(part.sends, ranks)[order], proof.digests(part.receives, ranks)[order])
                checked[id(part)] = both
            sent.append(checked[id(part)][0])
            expected.append(checked[id(part)][1])
    if comm.size > 1 and sent:
        rows = torch.from_numpy(np.ascontiguousarray(np.stack(sent, axis=1)))
        theirs = torch.empty_like(rows)
        comm.all_to_all_single(theirs, rows, compress=False, tag=_TAG)
        differ = np.argwhere(theirs.numpy() != np.stack(expected, axis=1))
        if len(differ) and wrong is None and "unheard" not in comm.attached:
            peer, mine = comm.ranks[int(differ[0][0])], comm.ranks[comm.rank]
            wrong = f"rank {peer} would send other boxes, or in other groups, than rank {mine} expects"
        failed = torch.tensor([int(wrong is not None)], device="cpu")
        comm.all_reduce(failed, "MAX", compress=False, tag=_TAG)
        if failed.item():
            said = [text for text in comm.all_gather_object(wrong, tag=_TAG) if text is not None]
            wrong = said[0]
    if wrong is not None:
        raise BackendError(f"the proof of a plan failed, a bug in mcr_plus: {wrong}; nothing was sent")
