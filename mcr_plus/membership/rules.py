"""Rules for who continues after a failure: a function of the proposals of an epoch's members.

The function is pure, so that `tests/unit/membership/test_membership_model.py` can check it with all
interleavings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from mcr_plus.errors import phrase_ranks

Refusal = Literal["absent", "living", "minority", "few", "argument"]
_STOPS_ELSEWHERE: Final = ("dead", "stopped")
"""States in which a rank cannot continue on the other side of a partition."""
ON_NOTICE: Final = "on notice"
"""Reason why a member does not continue that was told to leave."""
_CERTAINTY: Final = ("named", "silent", "stopped", "dead")
"""States of a lost rank, by rising certainty; an observation of its process counts more than silence."""


class Process(NamedTuple):
    """The process of a rank.

    Attributes:
        pid, started: pid and start time, which identify it among the processes of its place.
        place: equal for ranks that see each other in /proc.
        number: the rank that its launcher gave it. Ranks of later epochs are in the order of these numbers,
            so that a process that replaces a lost one gets its rank.
    """

    pid: int
    started: str
    place: str
    number: int


@dataclass(frozen=True)
class Proposal:
    """Proposal of one member of an epoch.

    Attributes:
        lost: member → state (`dead`, `stopped`, `silent`) as this member sees it.
        named: members that the program has declared lost.
        least: minimum number of ranks with which the job may continue; None for a majority of the members.
        patient: take newcomers in, and wait for them while there are fewer than `least`.
        done: group → number up to which all its operations have completed here.
        problem: why the arguments of this member's call are wrong; empty if they are right.
        leaves: whether the member has notice to leave, and is needed only if too few others are left.
    """

    lost: Mapping[int, str] = field(default_factory=dict)
    named: tuple[int, ...] = ()
    least: int | None = None
    patient: bool = False
    done: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    leaves: bool = False

    def plain(self) -> dict[str, Any]:
        """Return the proposal as JSON data."""
        return {**vars(self), "lost": {str(rank): state for rank, state in self.lost.items()}}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Proposal:
        """Create a proposal from JSON data."""
        lost = {int(rank): state for rank, state in plain["lost"].items()}
        return cls(**{**plain, "lost": lost, "named": tuple(plain["named"])})


@dataclass(frozen=True)
class Decision:
    """Decision on what all members of an epoch do next.

    Attributes:
        stay: members that continue; empty if the attempt is refused.
        join: processes that are taken in.
        lost: member → reason why it does not continue.
        done: group → number up to which all its operations are complete on all members that stay.
        refusal, text: kind and text of a refusal; None and empty without one.
    """

    stay: tuple[int, ...] = ()
    join: tuple[Process, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)
    done: Mapping[str, int] = field(default_factory=dict)
    refusal: Refusal | None = None
    text: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the decision as JSON data."""
        return {**vars(self), "lost": {str(rank): why for rank, why in self.lost.items()}}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Decision:
        """Create a decision from JSON data."""
        return cls(
            **{
                **plain,
                "stay": tuple(plain["stay"]),
                "join": tuple(Process(*process) for process in plain["join"]),
                "lost": {int(rank): why for rank, why in plain["lost"].items()},
            }
        )


def decide(
    size: int,
    proposals: Mapping[int, Proposal],
    seen: Mapping[int, str],
    newcomers: Sequence[Process] = (),
    *,
    expired: bool = False,
) -> Decision | None:
    """Return the decision of an epoch of `size` members; None while it must wait for more proposals.

    `proposals`: proposals made so far, by member. `seen`: states of lost members as the caller sees them.
    `expired`: whether the time for proposals is over; then nobody is waited for.

    A member without a proposal is waited for until some member has found it lost. Of members with a proposal,
    the dead are left out. If some of them do not reach each other, those that most others reach continue.
    They must be more than half of the members that may still run and do not leave on notice, or `least`. A
    minority waits for members that may run and have not proposed: one member that hears nobody must not stop
    a majority.
    """
    if (wrong := _wrong_argument(proposals, seen)) is not None:
        return wrong
    lost = _lost(proposals, seen)
    absent = [rank for rank in range(size) if rank not in proposals and rank not in lost]
    # A member without a proposal may still run, so wait for it, or refuse once the time is over.
    if absent:
        if not expired:
            return None
        verbs = "lives and has" if len(absent) == 1 else "live and have"
        text = f"{phrase_ranks(absent)} {verbs} not called it"
        return Decision(refusal="absent", text=text)
    reached = _within_reach({rank: each for rank, each in proposals.items() if lost.get(rank) != "dead"})
    least = min((each.least for each in proposals.values() if each.least is not None), default=None)
    # Ranks with notice stay if the job could not continue without them: others may have died meanwhile.
    stay = [rank for rank in reached if not proposals[rank].leaves]
    if not stay or len(stay) + len(newcomers) < (least or 1):
        stay = reached
    leavers = [rank for rank in reached if rank not in stay]
    # Only a majority may continue: otherwise two partitions could both continue.
    if least is None:
        running = [
            rank
            for rank in range(size)
            if rank in stay or (lost.get(rank) not in _STOPS_ELSEWHERE and rank not in leavers)
        ]
        if 2 * len(stay) <= len(running):
            apart = [rank for rank in running if rank not in stay]
            if not expired and any(rank not in proposals for rank in apart):
                return None
            text = (
                f"{len(stay)} of {len(running)} ranks that may be running are within reach, no majority; "
                f"{phrase_ranks(apart)} may have gone on without them (min_ranks={len(stay)} would allow it)"
            )
            return Decision(refusal="minority", text=text)
    elif len(stay) + len(newcomers) < least:
        if any(each.patient for each in proposals.values()) and not expired:
            return None
        number = len(stay) + len(newcomers)
        text = f"{'1 rank is' if number == 1 else f'{number} ranks are'} left, fewer than min_ranks={least}"
        return Decision(refusal="few", text=text)
    # Operations are complete on all staying members up to the smallest number that any of them has.
    groups = {name for rank in stay for name in proposals[rank].done}
    done = {
        name: min(proposals[rank].done[name] for rank in stay if name in proposals[rank].done)
        for name in sorted(groups)
    }
    found = {**lost, **dict.fromkeys(leavers, ON_NOTICE)}
    left = {rank: found.get(rank, "out of reach") for rank in range(size) if rank not in stay}
    return Decision(tuple(sorted(stay)), tuple(newcomers), left, done)


def members_after(members: Sequence[Process], decision: Decision) -> tuple[Process, ...]:
    """Return the members of the next epoch, by rank."""
    both = [*(members[rank] for rank in decision.stay), *decision.join]
    return tuple(sorted(both, key=lambda process: process.number))


def _wrong_argument(proposals: Mapping[int, Proposal], seen: Mapping[int, str]) -> Decision | None:
    for rank, proposal in sorted(proposals.items()):
        if proposal.problem:
            return Decision(refusal="argument", text=f"rank {rank}: {proposal.problem}")
        living = [named for named in proposal.named if named in proposals and seen.get(named) != "dead"]
        if living:
            text = f"rank {rank} has named living ranks as dead: {phrase_ranks(living)}"
            return Decision(refusal="living", text=text)
    return None


def _lost(proposals: Mapping[int, Proposal], seen: Mapping[int, str]) -> dict[int, str]:
    """Return the state of each member that cannot be waited for, as seen with the most certainty."""
    lost: dict[int, str] = {}
    named = (dict.fromkeys(proposal.named, "named") for proposal in proposals.values())
    for found in (*named, *(proposal.lost for proposal in proposals.values()), seen):
        for rank, state in found.items():
            lost[rank] = max(lost.get(rank, "named"), state, key=_CERTAINTY.index)
    return lost


def _within_reach(proposals: Mapping[int, Proposal]) -> list[int]:
    """Return the ranks that continue if some do not reach each other: first those that most others reach.

    A stopped rank that has proposed runs again; a rank that is silent for another may stay so for long.
    """

    def apart(one: int, other: int) -> bool:
        return proposals[one].lost.get(other) == "silent" or proposals[other].lost.get(one) == "silent"

    def others(rank: int) -> int:
        return sum(apart(rank, other) for other in proposals)

    together: list[int] = []
    for rank in sorted(proposals, key=lambda rank: (others(rank), rank)):
        if not any(apart(rank, other) for other in together):
            together.append(rank)
    return together
