"""The members of a job, epoch by epoch, as they are agreed on in the job's store.

An epoch has members, which are numbered. They leave it together: each writes a proposal, one of them writes
the decision, and whoever is a member of the next epoch goes on there. A decision is written once
(`compare_set`), so that all read the same one, whoever has made it. Keys, within the part of the store that
the first epoch had for itself:

    epoch<n>/leaving                         some member has begun to leave the epoch
    epoch<n>/attempt<a>/proposal/<rank>      what a member brings to the decision
    epoch<n>/attempt<a>/decision             leads to epoch n+1, or is refused, and attempt a+1 follows
    members                                  of epoch 0, where newcomers may come
    ended                                    nobody is taken in any more
    newcomer/<k>                             a process that waits to be taken in; `newcomers` counts them

The store must outlive the ranks that are lost: that of `mcr-plus run` or of torchrun's agent does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.core.deadline import Deadline
from mcr_plus.errors import LaunchError
from mcr_plus.liveness.proc import state_of
from mcr_plus.membership.rules import Decision, Process, Proposal, decide, members_after

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store

_FIRST_NAP: Final = 0.001
_LONGEST_NAP: Final = 0.02
_LOOK_EVERY: Final = 0.5  # seconds between two looks of a newcomer at the ranks' processes


@dataclass
class Roster:
    """The members of one epoch, as one of them has them.

    Attributes:
        root: the part of the job's store in which all epochs of the job are.
        epoch: its number.
        members: their processes, by rank.
        rank: of this process.
        passport: of a newcomer, what must be equal (version, configuration).
        attempt: number of the next attempt to leave the epoch; equal on members that have called as often.
    """

    root: Store
    epoch: int
    members: tuple[Process, ...]
    rank: int
    passport: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 0
    _read: int = 0  # newcomers whose requests have been read
    _waiting: dict[int, Process] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The name of the epoch's own part of the store."""
        return f"epoch{self.epoch}"

    def settle(
        self,
        proposal: Proposal,
        seen: Callable[[], Mapping[int, str]],
        timeout: float,
    ) -> tuple[Decision, tuple[Process, ...]]:
        """Decide with the other members who goes on; collective over those that are not lost.

        `seen`: returns the states of lost members as this process sees them now. After `timeout` seconds the
        attempt is refused on all members that have called this.

        Returns the decision and the members of the next epoch, in the order of their ranks; none where it is
        refused. Raises `LaunchError` if the store does not answer.
        """
        place = f"{self.place}/attempt{self.attempt}"
        self.attempt += 1
        try:
            return self._settle(place, proposal, seen, Deadline(timeout))
        except LaunchError:
            raise
        except RuntimeError as error:
            raise LaunchError(
                f"the job's store does not answer, so that ranks cannot agree on who goes on: {error}"
            ) from error

    def _settle(
        self, place: str, proposal: Proposal, seen: Callable[[], Mapping[int, str]], deadline: Deadline
    ) -> tuple[Decision, tuple[Process, ...]]:
        self.root.set(f"{self.place}/leaving", "")
        self.root.set(f"{place}/proposal/{self.rank}", json.dumps(proposal.plain()))
        proposals = {self.rank: proposal}
        key, nap = f"{place}/decision", _FIRST_NAP
        while not self.root.check([key]):
            lost = dict(seen())
            expired = deadline.passed()
            # One member decides, so that not all read everything; the next one does if it is lost.
            if expired or all(rank in lost or rank in proposal.named for rank in range(self.rank)):
                self._read_proposals(place, proposals)
                newcomers = list(self.newcomers())
                found = decide(len(self.members), proposals, lost, newcomers, expired=expired)
                if found is not None:
                    members = members_after(self.members, found)
                    self.root.compare_set(key, "", json.dumps([found.plain(), members]))
                    break
            time.sleep(nap)
            nap = min(1.5 * nap, _LONGEST_NAP)
        return _read(self.root.get(key))

    def announce(self) -> None:
        """Publish the members, for newcomers."""
        self.root.set("members", json.dumps(self.members))

    def end(self) -> None:
        """Take nobody in any more: processes that wait go away."""
        self.root.set("ended", "")

    @property
    def is_being_left(self) -> bool:
        """Whether a member has begun to leave this epoch."""
        return self.root.check([f"{self.place}/leaving"])

    def _read_proposals(self, place: str, proposals: dict[int, Proposal]) -> None:
        for rank in range(len(self.members)):
            key = f"{place}/proposal/{rank}"
            if rank not in proposals and self.root.check([key]):
                proposals[rank] = Proposal.read(json.loads(self.root.get(key)))

    def newcomers(self) -> Sequence[Process]:
        """Processes that wait to be taken in, and may be; others are told why not."""
        total = self.root.add("newcomers", 0)
        while self._read < total:
            number = self._read
            key = f"newcomer/{number}"
            if not self.root.check([key]):  # counted, and not written yet
                break
            self._read += 1
            asked = json.loads(self.root.get(key))
            if (problem := _difference(self.passport, asked["passport"])) is not None:
                self.root.set(f"newcomer/{number}/refused", problem)
            else:
                self._waiting[number] = Process(*asked["process"])
        return list(self._waiting.values())

    def following(self, members: tuple[Process, ...], rank: int) -> Roster:
        """The roster of the next epoch. `rank`: of this process in it."""
        waiting = {number: each for number, each in self._waiting.items() if each not in members}
        return Roster(self.root, self.epoch + 1, members, rank, self.passport, 0, self._read, waiting)


def _difference(ours: Mapping[str, str], theirs: Mapping[str, Any]) -> str | None:
    """The first entry in which a newcomer differs from the job; None if there is none."""
    for name, value in ours.items():
        if theirs.get(name) != value:
            return f"{name} is {theirs.get(name)!r} here and {value!r} in the job"
    return None


def _has_died(process: Process, own: Process) -> bool:
    """Whether a process has died, as far as that shows here."""
    same = process.place == own.place and bool(own.started)
    return same and state_of(process.pid, process.started) == "dead"


def _read(text: bytes) -> tuple[Decision, tuple[Process, ...]]:
    decision, members = json.loads(text)
    return Decision.read(decision), tuple(Process(*member) for member in members)


def join(
    root: Store, newcomer: Process, passport: Mapping[str, str], timeout: float
) -> tuple[int, tuple[Process, ...]] | None:
    """Wait until the members of a job take this process in.

    Returns the number of the first epoch in which it is a member, and its members; None if the job has ended.
    Raises `LaunchError` if they refuse it, are all lost, or do not take it in within `timeout` seconds.
    """
    deadline, looks, nap = Deadline(timeout), Deadline(_LOOK_EVERY), _FIRST_NAP
    members: tuple[Process, ...] = ()
    try:
        number = root.add("newcomers", 1) - 1
        asked = {"process": newcomer, "passport": dict(passport)}
        root.set(f"newcomer/{number}", json.dumps(asked))
        epoch = attempt = 0
        while True:
            key = f"epoch{epoch}/attempt{attempt}/decision"
            if root.check([key]):
                decision, members = _read(root.get(key))
                if newcomer in decision.join:
                    return epoch + 1, members
                epoch, attempt = (epoch, attempt + 1) if decision.refusal else (epoch + 1, 0)
                continue
            if root.check(["ended"]):
                return None
            if looks.passed():
                looks = Deadline(_LOOK_EVERY)
                if epoch == 0 and root.check(["members"]):
                    members = tuple(Process(*member) for member in json.loads(root.get("members")))
                if members and all(_has_died(member, newcomer) for member in members):
                    raise LaunchError(
                        "all ranks of the job have died, and what they had computed is lost with them; start "
                        "the job again, from a checkpoint if there is one"
                    )
            refused = f"newcomer/{number}/refused"
            if root.check([refused]):
                raise LaunchError(f"the job has not taken this process in: {root.get(refused).decode()}")
            if deadline.passed():
                raise LaunchError(
                    f"the job has not taken this process in within {timeout:g} s; ranks take newcomers in "
                    "between two steps of mcr.elastic"
                )
            time.sleep(nap)
            nap = min(1.5 * nap, 0.1)
    except LaunchError:
        raise
    except RuntimeError as error:
        raise LaunchError(f"the job's store does not answer: {error}") from error
