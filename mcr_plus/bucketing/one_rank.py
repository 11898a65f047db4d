"""Extend one rank's trace to the step of a whole job; the other ranks are assumed to do the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from mcr_plus.bucketing.step import CapturedStep, Event, IssueEvent, Role, WaitEvent
from mcr_plus.bucketing.trace_files import Notes, Trace
from mcr_plus.bucketing.trace_operations import TracedOperation, operations
from mcr_plus.core.kinds import MESSAGES
from mcr_plus.errors import ConfigError, short

_MOST: Final = 1 << 16  # maximum number of ranks of the job

_Group = tuple[int, ...]


def ranks_of_job(trace: Trace, given: int | None, notes: Notes) -> int:
    """Return the number of ranks of a job, from its only trace or from `given`.

    `given`: the value of `--ranks`. Raises `ConfigError` if there are operations between ranks, and neither
    the trace nor `given` has the number of ranks.
    """
    issued = operations(trace) if not trace.world else []
    world = trace.world or max(map(_least_ranks, issued), default=1)
    if issued and world < 2:
        if given is None:
            raise ConfigError(
                f"{trace.path}: the trace has operations between ranks, such as {short(issued[0].names[0])}, "
                "but not the number of ranks; expected --ranks N (load_step: ranks=N), or the traces of all "
                "ranks"
            )
        world = given
        notes.add(f"assumed: the job has {world} ranks, by --ranks; the trace does not contain their number")
    elif issued:
        notes.add(f"assumed: the job has {world} ranks, as many as the largest group in the trace")
    elif not trace.world:
        trace.rank = 0  # ignore the rank in its name: there is no communication
    if world > _MOST:
        raise ConfigError(f"{trace.path}: one rank's trace of {world:,} ranks; expected at most {_MOST:,}")
    if trace.rank >= world:
        raise ConfigError(f"{trace.path}: the trace of rank {trace.rank} in a job of {world} ranks")
    return world


def of_all(step: CapturedStep, trace: Trace, world: int) -> CapturedStep:
    """Return the step of a job of `world` ranks, merged like `CapturedStep.merged` from the step of one rank.

    Groups of some ranks are repeated over the other ranks: (0, 2) also gives (1, 3), (4, 6), (5, 7). Raises
    `ConfigError` for groups that cannot be repeated.
    """
    (role,) = step.roles
    issued = [event for event in role.events if isinstance(event, IssueEvent)]
    left_out = {event.id for event in issued if event.kind in MESSAGES}
    kept = [
        event
        for event in role.events
        if not (isinstance(event, (IssueEvent, WaitEvent)) and event.id in left_out)
    ]
    groups = list(dict.fromkeys(event.group for event in issued if event.id not in left_out))
    members: dict[tuple[_Group, ...], list[int]] = {}
    if all(len(group) == world for group in groups):
        members[tuple(groups)] = list(range(world))
    else:
        for rank in range(world):
            own = tuple(_repeated(group, rank, trace, world) for group in groups)
            members.setdefault(own, []).append(rank)
    numbers: dict[tuple[int, _Group], int] = {}
    roles = []
    for own, ranks in members.items():
        of_rank = dict(zip(groups, own, strict=True))
        known = {
            event.id: numbers.setdefault((event.id, of_rank[event.group]), len(numbers))
            for event in kept
            if isinstance(event, IssueEvent)
        }
        roles.append(Role(tuple(ranks), tuple(_moved(event, of_rank, known) for event in kept)))
    others = "rank does" if world == 2 else f"{world - 1} ranks do"
    notes = [
        f"assumed: the other {others} the same as rank {trace.rank}, at the same times, and all are on one "
        "host; the durations of operations include waits for later ranks"
    ]
    if left_out:
        notes.append("sends and receives, and waits for them, are left out: their partners have no trace")
    return replace(step, ranks=world, roles=tuple(roles), notes=(*notes, *step.notes))


def _least_ranks(operation: TracedOperation) -> int:
    """Return the minimum number of ranks of an operation, from its arguments; 0 if unknown."""
    ranks = operation.get("Process Group Ranks")
    return max(operation.get("Group size") or 0, max(ranks) + 1 if ranks else 0)


def _repeated(group: _Group, rank: int, trace: Trace, world: int) -> _Group:
    """Return the group that corresponds to `group` on another rank."""
    size, first = len(group), min(group)
    if size in (1, world):
        return (rank,) if size == 1 else group
    stride = abs(group[1] - group[0])
    span = stride * size
    regular = stride > 0 and sorted(group) == list(range(first, first + span, stride))
    if not regular or world % span or first % span >= stride:
        raise ConfigError(
            f"{trace.path}: a group of ranks {short(list(group))} of {world}, and one rank's trace does not "
            "contain the groups of the others; expected the traces of all ranks"
        )
    begin = rank - rank // stride % size * stride
    return tuple(range(begin, begin + span, stride))


def _moved(event: Event, groups: Mapping[_Group, _Group], numbers: Mapping[int, int]) -> Event:
    if isinstance(event, IssueEvent):
        return event._replace(id=numbers[event.id], group=groups[event.group])
    return WaitEvent(numbers[event.id]) if isinstance(event, WaitEvent) else event
