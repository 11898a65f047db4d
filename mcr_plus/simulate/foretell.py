"""Foretell the step of a program on a cluster: run few ranks, fold the others, check all, simulate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from mcr_plus.bucketing.scaling import ClusterCosts
from mcr_plus.bucketing.simulation_result import CLASSES, SimulationResult, Timeline
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.simulate.checking import OrderProblem, problems
from mcr_plus.simulate.cluster import FoldedJob
from mcr_plus.simulate.folding import RankFolding
from mcr_plus.simulate.records import IssuedCall
from mcr_plus.simulate.running import MEASURED_FROM, SimulatedProgram

_SMALL: Final = 16  # ranks of a job of which all are run
_AT_ONCE: Final = 8  # ranks of a problem that are run to prove it


@dataclass(frozen=True)
class SimulatedRole:
    """Ranks that do the same.

    `ran`: those that have run. `peak`: bytes of tensors; `resident`: growth of the process; both the largest
    of those that have run.
    """

    ranks: tuple[int, ...]
    ran: tuple[int, ...]
    operations: int
    peak: int | None
    resident: int


@dataclass(frozen=True)
class ForetoldJob:
    """What `foretell` found.

    `problems`: operations that do not fit together. `timeline`: None if there are any, or if the cost of an
    operation is unknown. `links`: seconds in which the operations of the busiest rank use each class of
    links. `grounds`: on what grounds ranks were folded.
    """

    ranks: int
    roles: tuple[SimulatedRole, ...]
    problems: tuple[OrderProblem, ...]
    timeline: Timeline | None
    links: Mapping[str, float]
    grounds: str
    notes: tuple[str, ...]


def foretell(
    program: SimulatedProgram,
    costs: ClusterCosts,
    *,
    most: int = 64,
    all_ranks: bool = False,
    scale: float = 1.0,
) -> ForetoldJob:
    """Run ranks of a program, check the operations of all ranks, and simulate a step.

    Args:
        most: about how many ranks to run. all_ranks: run all. scale: factor of the computation.

    Raises:
        BackendError: a rank has failed; the text has its rank and traceback.
        InvalidArgument: the topology has fewer ranks, or no rank communicates.
    """
    world = program.size
    if world > costs.topology.ranks:
        raise InvalidArgument(f"{world} ranks, and the topology has {costs.topology.ranks}")

    def run(ranks: Any) -> Mapping[int, Any]:
        program.run(ranks)
        return program.ran

    small = all_ranks or world <= _SMALL
    folding = RankFolding(world, run, world if small else most)
    stands = folding.fold()
    if small:
        stands = folding.refined(range(world))
    while True:
        job = FoldedJob(program.ran, stands, folding)
        found = problems(job)
        unproven = dict.fromkeys(rank for each in found for rank in each.ranks if rank not in program.ran)
        if not unproven or len(program.ran) >= most + _AT_ONCE:
            break
        stands = folding.refined(list(unproven)[:_AT_ONCE])
    roles = tuple(_roles(job))
    if not any(each.operations for each in roles):
        raise InvalidArgument(
            "the program issues no operation between ranks; expected torch.distributed or mcr_plus"
        )
    timeline, links = None, {}
    notes = [*_notes(program, unproven)]
    if not found:
        try:
            simulation = job.step(costs, MEASURED_FROM, scale)
            result = simulation.run()
            timeline, links = result.timeline(), _links(simulation, result)
        except Unsupported as error:  # what was checked is worth knowing without the time
            notes.append(f"no time: {error}")
    grounds = _grounds(folding, program)
    return ForetoldJob(world, roles, tuple(found), timeline, links, grounds, tuple(notes))


def _roles(job: FoldedJob) -> Iterator[SimulatedRole]:
    for number, ran in enumerate(job.ran):
        records = [job.records[rank] for rank in ran]
        yield SimulatedRole(
            tuple(np.flatnonzero(job.of_rank == number).tolist()),
            tuple(ran),
            sum(isinstance(each, IssuedCall) for each in records[0].events),
            max((each.peak for each in records if each.peak is not None), default=None),
            max(each.resident for each in records),
        )


def _links(simulation: Any, result: SimulationResult) -> dict[str, float]:
    """Return the seconds in which the operations of the busiest rank use each class of links."""
    found = dict.fromkeys(CLASSES, 0.0)
    for queues in result.queue_of:
        own = dict.fromkeys(CLASSES, 0.0)
        for queue in {int(each) for each in queues if each >= 0}:
            for use in simulation.uses[result.queues[queue]]:
                for link, busy in use.busy.items():
                    own[link] += use.cost.seconds * busy
        found = {link: max(found[link], own[link]) for link in CLASSES}
    return {link: seconds for link, seconds in found.items() if seconds}


def _grounds(folding: RankFolding, program: SimulatedProgram) -> str:
    if len(program.ran) == program.size:
        return "all ranks have run"
    words = ("", "first and last member", "first, last, odd and even member", "each member")
    split = [
        f"{words[level]} of {'all ranks' if family.size == program.size else f'the groups of {family.size}'}"
        for family, level in zip(folding.families.all, folding.levels, strict=True)
        if level
    ]
    others = f", split by {'; '.join(split)}" if split else ""
    return f"{len(program.ran)} ranks have run; the others are folded by the groups that they are in{others}"


def _notes(program: SimulatedProgram, unproven: Mapping[int, None]) -> Iterator[str]:
    steps = {record.steps for record in program.ran.values()}
    if steps == {0}:
        yield "no optimizer has stepped: the whole program counts as one step, with the measuring of memory"
    elif min(steps) <= MEASURED_FROM:
        yield f"only {min(steps)} steps: their times contain the measuring of memory"
    if len(steps) > 1:
        yield f"ranks have taken {' or '.join(map(str, sorted(steps)))} steps"
    if unproven:
        yield f"not run, but folded: ranks {list(unproven)[:_AT_ONCE]} of the problems"
    events = (event for record in program.ran.values() for event in record.events)
    if any(isinstance(each, IssuedCall) and each.kind == "recv" and each.peer is None for each in events):
        yield "receives from any rank are not checked"
