"""The members of a job, epoch by epoch, as recorded in the job's store.

An epoch has numbered members. They leave it together: each member writes a proposal, one of them writes the
decision, and the members of the next epoch continue there. A decision is written once (`compare_set`), so all
members read the same one, whichever member made it. Keys, within the part of the store that belonged to the
first epoch:

    epoch<n>/leaving                         a member has begun to leave the epoch
    epoch<n>/outcome                         whether the members have made the world of the epoch
    epoch<n>/attempt<a>/proposal/<rank>      a member's proposal for the decision
    epoch<n>/attempt<a>/decision             leads to epoch n+1, or is refused, and attempt a+1 follows
    members                                  the members of epoch 0, if newcomers may join
    training                                 a member reached `mcr.elastic`, or continued in another world
    takes_in                                 a member reached `mcr.elastic`, or took a new process in
    ended                                    nobody is taken in any more
    newcomer/<k>                             a process that waits to be taken in; `newcomers` counts them
    newcomer/<k>/...                         see `mcr_plus.membership.request`

Proposals are removed with the world of their epoch, see `job/epoch_change.py`; the other keys stay.

The store must outlive lost ranks. The stores of `mcr-plus run` and of torchrun's agent do, and so do the
keepers of the hosts (`mcr_plus.rendezvous.key_replicas`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from mcr_plus.core.deadline import Deadline
from mcr_plus.core.environment import min_ranks
from mcr_plus.core.proc import state_of
from mcr_plus.errors import LaunchError
from mcr_plus.membership.rules import Decision, Process, Proposal, decide, members_after

if TYPE_CHECKING:
    from mcr_plus.core.job_store import JobStore
    from mcr_plus.membership.request import JoinRequest

TRAINING: Final = "training"
"""Key that is set once a rank has reached `mcr.elastic`, or has continued in another world."""
TAKES_IN: Final = "takes_in"
"""Key that is set if restarted processes are taken in."""
_FIRST_NAP: Final = 0.001
_LONGEST_NAP: Final = 0.02
_MOST_NEWCOMERS: Final = 100_000  # a limit, since the counter in the store is not signed
_LOOK_EVERY: Final = 0.5  # s between a newcomer's checks of the ranks' processes


class ReplicatedStore(Protocol):
    """Interface of a store replicated on the hosts' keepers; keepers of lost hosts are left out."""

    def watch(self, is_cut_off: Callable[[str], bool], places: Collection[str]) -> None:
        """Leave out the keeper of a host in `places` that is cut off."""
        ...

    def part(self, name: str) -> Any:
        """Return a part of the store with keys of its own."""
        ...

    def leave(self) -> None:
        """Tell the keepers that this rank no longer needs them."""
        ...


class EpochDecision(NamedTuple):
    """Decision of an epoch's members.

    Attributes:
        decision: the result of `decide`.
        members: members of the next epoch, by rank; empty if the attempt was refused.
        taken: numbers of the requests of all newcomers taken in so far.
    """

    decision: Decision
    members: tuple[Process, ...]
    taken: tuple[int, ...]


@dataclass
class EpochLog:
    """The members of one epoch, from the point of view of one member.

    Attributes:
        root: the part of the job's store that holds all epochs of the job.
        epoch: number of the epoch.
        members: processes of the members, by rank.
        rank: rank of this process.
        passport: properties that must be equal for a newcomer (version, configuration).
        taken: numbers of the requests of newcomers taken in before this epoch.
        kept: the keepers that hold `root`, if no launcher's store does.
        attempt: number of the next attempt to leave the epoch; this member knows no decision of it.
        is_remnant: the members are those of the previous epoch, except some whose processes have died.
        precopies: newcomers receive the state before they are taken in, unless there are too few members.
    """

    root: JobStore
    epoch: int
    members: tuple[Process, ...]
    rank: int
    passport: Mapping[str, str] = field(default_factory=dict)
    taken: tuple[int, ...] = ()
    kept: ReplicatedStore | None = None
    attempt: int = 0
    is_remnant: bool = False
    precopies: bool = False
    _refused: set[int] = field(default_factory=set)
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
    ) -> EpochDecision:
        """Decide with the other members who continues; collective over the members that are not lost.

        `seen`: returns the states of lost members as this process sees them now. After `timeout` seconds the
        attempt is refused on all members that have called this.

        Raises `LaunchError` if the store does not answer. The next call belongs to the same attempt then:
        others may have decided it.
        """
        place = f"{self.place}/attempt{self.attempt}"
        try:
            settled = self._settle(place, proposal, seen, Deadline(timeout))
        except LaunchError:
            raise
        except RuntimeError as error:
            raise LaunchError(
                f"the job's store does not answer, so that ranks cannot agree on who goes on: {error}"
            ) from error
        self.attempt += 1
        return settled

    def _settle(
        self, place: str, proposal: Proposal, seen: Callable[[], Mapping[int, str]], deadline: Deadline
    ) -> EpochDecision:
        self.root.set(f"{self.place}/leaving", "")
        self._propose(place, proposal)
        key, nap = f"{place}/decision", _FIRST_NAP
        while not self.root.check([key]):
            lost = dict(seen())
            # The deciding member may be on another host, which does not see this host's processes.
            dead = {rank: state for rank, state in lost.items() if state == "dead"}
            if not dead.items() <= proposal.lost.items():
                proposal = replace(proposal, lost={**proposal.lost, **dead})
                self._propose(place, proposal)
            expired = deadline.passed()
            # One member decides, so that not all read everything; the next one does if it is lost.
            if expired or all(rank in lost or rank in proposal.named for rank in range(self.rank)):
                found = self._decision(
                    self._proposals(place), lost, patient=proposal.patient, expired=expired
                )
                if found is not None:
                    members = members_after(self.members, found)
                    joined = [number for number, each in self._waiting.items() if each in found.join]
                    taken = sorted({*self.taken, *joined})
                    return self._agreed(key, json.dumps([found.plain(), members, taken]))
            time.sleep(nap)
            nap = min(1.5 * nap, _LONGEST_NAP)
        return self._agreed(key, self.root.get(key).decode())

    def _decision(
        self, proposals: dict[int, Proposal], lost: dict[int, str], *, patient: bool, expired: bool
    ) -> Decision | None:
        """Return the result of `decide`; take in newcomers that lack the state too if ranks are too few."""
        waiting = self.newcomers() if patient else {}
        ready = {k: each for k, each in waiting.items() if not self.precopies or self.request(k).is_ready}
        size = len(self.members)
        found = decide(size, proposals, lost, list(ready.values()), expired=expired)
        if len(ready) < len(waiting) and (found is None or found.refusal == "few"):
            return decide(size, proposals, lost, list(waiting.values()), expired=expired)
        return found

    def request(self, number: int) -> JoinRequest:
        """Return the request of a newcomer."""
        from mcr_plus.membership.request import JoinRequest  # imported here: most jobs take nobody in

        return JoinRequest(self.root, number)

    def _agreed(self, key: str, text: str) -> EpochDecision:
        """Return the decision: the one already written, or `decision`.

        A decision that was read is also written before this rank acts on it: with several keepers, other
        members may have read nothing yet, and the keeper that holds the decision may now be lost.
        """
        self.root.compare_set(key, "", text)
        return _read(self.root.get(key))

    def announce(self) -> None:
        """Publish the members, for newcomers."""
        self.root.set("members", json.dumps(self.members))

    def note_training(self, *, takes_in: bool = False) -> None:
        """Tell a supervisor that a member trains from now on: its state is lost if all members are.

        `takes_in`: also that restarted processes are taken in.
        """
        if min_ranks() is not None:
            with suppress(RuntimeError):  # the store does not answer
                for key in [TRAINING, *[TAKES_IN] * takes_in]:
                    self.root.set(key, "")

    def end(self) -> None:
        """Stop taking processes in; waiting ones give up."""
        self.root.set("ended", "")

    def watch(self, is_cut_off: Callable[[str], bool]) -> None:
        """Leave out keepers whose host (a `Process.place`) is cut off, or has no member."""
        if self.kept is not None:
            self.kept.watch(is_cut_off, {process.place for process in self.members})

    @property
    def is_being_left(self) -> bool:
        """True if a member has begun to leave this epoch; raises `LaunchError` without an answer."""
        try:
            return self.root.check([f"{self.place}/leaving"])
        except RuntimeError as error:
            raise LaunchError(f"the job's store does not answer: {error}") from error

    def conclude(self, *, made: bool) -> bool:
        """Return whether the members have made the world of this epoch; the same on all of them.

        `made`: this member has made it, and knows that all others have; otherwise this member gives up. The
        first member to report decides. Raises `LaunchError` if the store does not answer.
        """
        key = f"{self.place}/outcome"
        try:
            self.root.compare_set(key, "", "made" if made else "left")
            return self.root.get(key) == b"made"
        except LaunchError:
            raise
        except RuntimeError as error:
            raise LaunchError(f"the job's store does not answer: {error}") from error

    def _propose(self, place: str, proposal: Proposal) -> None:
        self.root.set(f"{place}/proposal/{self.rank}", json.dumps(proposal.plain()))

    def _proposals(self, place: str) -> dict[int, Proposal]:
        """Return the proposals that members have made by now."""
        keys = {rank: f"{place}/proposal/{rank}" for rank in range(len(self.members))}
        return {
            rank: Proposal.read(json.loads(self.root.get(key)))
            for rank, key in keys.items()
            if self.root.check([key])
        }

    def newcomers(self) -> dict[int, Process]:
        """Return the waiting processes that may be taken in, by request; tell others why they may not."""
        if self.kept is not None:  # without a launcher's store, a new process has nowhere to ask
            return {}
        for number in range(min(self.root.add("newcomers", 0), _MOST_NEWCOMERS)):
            if number in self.taken or number in self._refused or number in self._waiting:
                continue
            key = self.request(number).key
            if not self.root.check([key]):  # counted but not written yet, or never if the process has died
                continue
            try:
                asked = json.loads(self.root.get(key))
                process, passport = Process(*asked["process"]), dict(asked["passport"])
            except (LaunchError, ValueError, TypeError, KeyError):  # another program's data
                self._refused.add(number)
                continue
            if (problem := _difference(self.passport, passport)) is not None:
                self._refused.add(number)
                self.root.set(f"{key}/refused", problem)
            else:
                self._waiting[number] = process
        own = self.members[self.rank]
        return {number: each for number, each in self._waiting.items() if not _has_died(each, own)}

    def following(self, settled: EpochDecision, rank: int) -> EpochLog:
        """Return the epoch log of the next epoch. `rank`: rank of this process in it."""
        waiting = {number: each for number, each in self._waiting.items() if number not in settled.taken}
        return EpochLog(
            self.root,
            self.epoch + 1,
            settled.members,
            rank,
            self.passport,
            settled.taken,
            self.kept,
            is_remnant=set(settled.decision.lost.values()) <= {"dead"} and not settled.decision.join,
            precopies=self.precopies,
            _refused=self._refused,
            _waiting=waiting,
        )


def _difference(ours: Mapping[str, str], theirs: Mapping[str, Any]) -> str | None:
    """Return the first entry in which a newcomer differs from the job; None if there is none."""
    for name, value in ours.items():
        if theirs.get(name) != value:
            return f"{name} is {theirs.get(name)!r} here and {value!r} in the job"
    return None


def _has_died(process: Process, own: Process) -> bool:
    """Return whether a process is seen from here to have died."""
    same = process.place == own.place and bool(own.started)
    return same and state_of(process.pid, process.started) == "dead"


def _read(text: bytes) -> EpochDecision:
    decision, members, taken = json.loads(text)
    return EpochDecision(Decision.read(decision), tuple(Process(*each) for each in members), tuple(taken))


def join(
    root: JobStore,
    newcomer: Process,
    passport: Mapping[str, str],
    timeout: float,
    meanwhile: Callable[[JoinRequest], bool] = lambda _: False,
) -> tuple[int, EpochDecision] | None:
    """Wait until the members of a job take this process in.

    `meanwhile` is called repeatedly with the request, and returns whether it made progress; if so, `timeout`
    starts again.

    Returns the number of the first epoch that includes this process, and the decision that took it in; None
    if the job has ended. Raises `LaunchError` if the members refuse it, are all lost, or do not take it in
    within `timeout` seconds.
    """
    from mcr_plus.membership.request import JoinRequest

    deadline, looks, nap = Deadline(timeout), Deadline(_LOOK_EVERY), _FIRST_NAP
    members: tuple[Process, ...] = ()
    try:
        number = root.add("newcomers", 1) - 1
        request = JoinRequest(root, number)
        root.set(request.key, json.dumps({"process": newcomer, "passport": dict(passport)}))
        epoch = attempt = 0
        while True:
            # Follow the decisions in order, because any of them may take this process in.
            key = f"epoch{epoch}/attempt{attempt}/decision"
            if root.check([key]):
                settled = _read(root.get(key))
                if number in settled.taken:
                    return epoch + 1, settled
                epoch, attempt = (epoch, attempt + 1) if settled.decision.refusal else (epoch + 1, 0)
                members = settled.members or members  # empty after a refusal
                continue
            if root.check(["ended"]):
                return None
            # Only living members can decide, so give up once all have died.
            if looks.passed():
                looks = Deadline(_LOOK_EVERY)
                if epoch == 0 and root.check(["members"]):
                    members = tuple(Process(*member) for member in json.loads(root.get("members")))
                if members and all(_has_died(member, newcomer) for member in members):
                    raise LaunchError(
                        "all ranks of the job have died, and what they had computed is lost with them; start "
                        "the job again, from a checkpoint if there is one"
                    )
            _check_refusal(request)
            if meanwhile(request):
                deadline, nap = Deadline(timeout), _FIRST_NAP
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


def _check_refusal(request: JoinRequest) -> None:
    refused = f"{request.key}/refused"
    if request.root.check([refused]):
        text = request.root.get(refused).decode()
        raise LaunchError(f"the job has not taken this process in: {text}")
