"""Change of a job's epoch, after a failure or to take newcomers in.

    leave_epoch()    decide with the other members who continues, and make the world of the next epoch
    join_job()       wait to be taken in, then make that world

See docs/design/membership.md for the protocol, and `mcr_plus.membership` for its rules.
"""

from __future__ import annotations

import atexit
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import TYPE_CHECKING, Final
from zlib import crc32

from mcr_plus.core.c10d import PrefixStore
from mcr_plus.core.environment import agent_has_store, host_name, launch_environment
from mcr_plus.core.job_store import JobStore
from mcr_plus.engine.closing import completed, release_waiting
from mcr_plus.errors import (
    BackendError,
    CommTimeout,
    InvalidArgument,
    LaunchError,
    McrError,
    NotInitialized,
    PeerLost,
    Revoked,
)
from mcr_plus.job import init
from mcr_plus.job.members import EpochWatch
from mcr_plus.job.notice import notice
from mcr_plus.job.process import job
from mcr_plus.membership.epoch_log import EpochLog, join
from mcr_plus.membership.request import JoinRequest
from mcr_plus.membership.rules import ON_NOTICE, Decision, Process, Proposal
from mcr_plus.rendezvous.identity import own_process
from mcr_plus.rendezvous.processes import Sight
from mcr_plus.rendezvous.store import exchange, join_store
from mcr_plus.rendezvous.store_connections import StoreRelease, met_in, own_server

if TYPE_CHECKING:
    from mcr_plus.job.runtime import Runtime

_log = logging.getLogger("mcr_plus")
_REMOVED_WITHIN: Final = 5.0  # s that the end of the process waits for `remove_world`
REMOVES: Final = "mcr_plus keys of the world before"
"""Name of the thread of `remove_world`."""
# Keys that stay in the store when a world is removed.
_MET: Final = re.compile(r"(?!come/\d+).*")  # place where the processes of `reconfigure` have met
_DECIDED: Final = re.compile(r"leaving|outcome|attempt\d+/decision|store")  # decisions, see `EpochLog`
_REFUSED: Final[Mapping[str, type[McrError]]] = {
    "absent": CommTimeout,
    "living": InvalidArgument,
    "argument": InvalidArgument,
}


@dataclass
class Regrouping:
    """Changes made by the last epoch.

    Attributes:
        epoch: number of the epoch; a job begins with epoch 0.
        members: processes of the members, by rank.
        former: previous rank of each member, by rank; None for newcomers.
        lost: a lost rank's number from its launcher → why it was lost (`dead`, `stopped`, `silent`, ...).
        done: group → number up to which all its operations are complete on all continuing ranks.
        seconds: time from the call to the new world.
    """

    epoch: int
    members: tuple[Process, ...]
    former: tuple[int | None, ...]
    lost: dict[int, str] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def joined(self) -> list[int]:
        """The newcomers' numbers from their launcher."""
        return [
            process.number
            for process, before in zip(self.members, self.former, strict=True)
            if before is None
        ]

    def take(self, decision: Decision, members: tuple[Process, ...]) -> None:
        """Apply a decision of the previous members; `members` are those after it."""
        self.epoch += 1
        for rank, why in decision.lost.items():
            if self.former[rank] is not None:
                self.lost[self.members[rank].number] = why
        former = dict(zip(self.members, self.former, strict=True))
        self.members, self.former = members, tuple(former.get(process) for process in members)
        for group, number in decision.done.items():
            self.done.setdefault(group, number)


def leave_epoch(
    runtime: Runtime, proposal: Proposal, timeout: float, what: str
) -> tuple[Runtime, Regrouping]:
    """Decide with the other members who continues, and make the world of the next epoch; collective over
    them.

    `runtime`: this process's runtime. `proposal`: this rank's proposal; lost ranks and completed operations
    are added here. `what`: the program's call, for messages. If a member is lost while the new world is made,
    the others decide again.

    Raises:
        NotInitialized: the job has one rank, and no store.
        CommTimeout: live ranks have not called this within `timeout` seconds. As with the next two errors,
            the old world stays as it is, and all ranks may call this again.
        InvalidArgument: `proposal` declares living ranks dead, or a rank has passed a wrong argument.
        BackendError: too few ranks are left.
        Revoked: the others have declared this rank lost.
        SystemExit: the others have continued without this rank, which leaves on notice.
        LaunchError: the job's store does not answer.
    """
    began = time.monotonic()
    roster = runtime.roster
    if roster is None:
        raise NotInitialized(f"{what}: this job has one rank and no store in which others could meet it")
    states = [state for state in runtime.engine.states if state.group.rank >= 0]
    done = {state.group.name: completed(runtime.engine, state) for state in states}
    for state in runtime.engine.states:
        if isinstance(state.failure, PeerLost):  # a `PeerLost` may come from another rank
            runtime.suspect(state.failure.ranks)
    changes = Regrouping(roster.epoch, roster.members, tuple(range(len(roster.members))))
    new = _go_on(runtime, roster, runtime.lost_ranks, replace(proposal, done=done), timeout, what, changes)
    roster.note_training()
    changes.seconds = time.monotonic() - began
    return new, changes


def _go_on(
    runtime: Runtime,
    roster: EpochLog,
    seen: Callable[[], Mapping[int, str]],
    proposal: Proposal,
    timeout: float,
    what: str,
    changes: Regrouping,
) -> Runtime:
    """Leave epochs until the members of one have made its world; note the decisions in `changes`.

    `seen`: returns the states of the lost members of `roster`'s epoch.
    """
    sight: Sight | None = None
    left: list[EpochLog] = []
    dead: set[Process] = set()
    with ExitStack() as ending:
        while True:
            lost = dict(seen())
            # End the waits of peers for operations of this rank before the decision.
            if not runtime.closed and (lost or runtime.engine.failed or proposal.named):
                release_waiting(runtime.engine, lost, what)
            settled = roster.settle(replace(proposal, lost=lost), seen, timeout)
            decision, members = settled.decision, settled.members
            if decision.refusal is not None:
                raise _REFUSED.get(decision.refusal, BackendError)(f"{what}: {decision.text}")
            if roster.rank in decision.stay:  # they remove the parts of the lost ranks
                remove_arrivals(runtime, decision)
            # The old agents' findings are needed until the new world has agents of its own.
            if sight is None and (sight := runtime.hand_over()) is not None:
                ending.callback(sight.close)
            changes.take(decision, members)
            if roster.rank not in decision.stay:
                why = decision.lost[roster.rank]
                text = (
                    f"the other ranks have continued without this one (epoch {changes.epoch}), "
                    f"which was {why}"
                )
                if why == ON_NOTICE:
                    number = launch_environment().rank
                    _log.info("%s: rank %d leaves on notice (%s)", what, number, notice.reason)
                close_world(runtime, text, decision)
                runtime.leave_keepers()
                raise SystemExit(0) if why == ON_NOTICE else Revoked(f"{what}: {text}")
            ranks = f"{len(members)} rank{'' if len(members) == 1 else 's'}"
            close_world(runtime, f"epoch {changes.epoch} has begun, with {ranks}", decision)
            left.append(roster)
            dead |= {roster.members[rank] for rank, why in decision.lost.items() if why == "dead"}
            roster = roster.following(settled, members.index(roster.members[roster.rank]))
            watch = EpochWatch(roster, runtime.loaded, sight)
            try:
                new = begin_epoch(runtime, watch)
            except McrError as error:
                if not (isinstance(error, PeerLost) or watch.states() or roster.is_being_left):
                    runtime.leave_keepers()
                    runtime.closed_because = f"{what} has failed ({error})"
                    raise
            else:
                for each in left:
                    remove_world(each, runtime, roster, dead)
                return new
            # A member was lost meanwhile: decide again. The last decision already includes these parts.
            seen, proposal = watch.states, replace(proposal, named=(), done={}, leaves=False)


def join_job(
    passport: Mapping[str, str],
    proposal: Proposal,
    timeout: float,
    what: str,
    meanwhile: Callable[[JoinRequest], bool] = lambda _: False,
) -> Runtime | None:
    """Wait until the members of the launcher's job take this process in, and make its world with them.

    The process starts in a world of its own, in which it is alone. `passport`: properties that must be equal
    in the job. `proposal`: see `leave_epoch`, used if a member is lost while the new world is made.
    `meanwhile`: see `join`.

    Returns None if the job has ended.

    Raises `LaunchError` if the members refuse this process, or do not take it in within `timeout` seconds.
    """
    alone = init.current()
    environment = launch_environment()
    root = join_store(environment, alone.world.timeout)
    mine = own_process(host_name(), environment.rank)
    joined = join(root, mine, passport, timeout, meanwhile)
    if joined is None:
        return None
    epoch, settled = joined
    members = settled.members
    roster = EpochLog(root, epoch, members, members.index(mine), passport, settled.taken)
    close_world(alone, "this process has joined a job", Decision())
    watch = EpochWatch(roster, alone.loaded)
    try:
        return begin_epoch(alone, watch)
    except McrError as error:
        if not (isinstance(error, PeerLost) or watch.states() or roster.is_being_left):
            raise
    changes = Regrouping(epoch, members, tuple(None for _ in members))
    return _go_on(alone, roster, watch.states, proposal, timeout, what, changes)


def begin_epoch(before: Runtime, watch: EpochWatch) -> Runtime:
    """Make the world of an epoch, by the configuration of the previous one; collective over its members.

    Either all live members return the world, even if one of them has been lost since, or all raise. In a
    world made by only some members, the boards would not report a rank that gave up.
    """
    roster, limit = watch.roster, before.world.timeout
    if not roster.is_remnant:
        job.disabled.add("mpi")  # its shutdown would wait for live ranks that are not in this world
    new, failure = None, None
    release: StoreRelease | None = None
    try:
        store = JobStore(_meeting_place(roster, watch, limit), timeout=limit, lost=watch.error)
        if roster.rank != 0 and roster.kept is not None:
            release = StoreRelease(store, watch.store_is_lost)
        world = init.world_of(store, roster.rank, len(roster.members), limit)
        new = init.begin(
            before.loaded, replace(world, roster=roster), before.timeout, native=before.is_native
        )
        exchange(store, roster.rank, len(roster.members), "made", "", limit)
    except McrError as error:
        failure = error
    except RuntimeError as error:  # the store is lost
        failure = LaunchError(f"the store of epoch {roster.epoch} does not answer: {error}")
    finally:
        if release is not None:
            release.close()
    if roster.conclude(made=failure is None) and new is not None:
        return new
    if failure is None:
        failure = PeerLost(watch.given_up, seen="reported by another rank")
    if new is not None:
        close_world(new, f"epoch {roster.epoch} has not begun: {failure}", Decision())
    raise failure


def _meeting_place(roster: EpochLog, watch: EpochWatch, timeout: float) -> JobStore:
    """Return the store of an epoch's world, in which its ranks exchange their addresses.

    With a launcher's store, it is a part of the store for decisions. Otherwise it is in the epoch's rank 0,
    and is lost with it, as is the epoch's world.
    """
    if roster.kept is None:
        return roster.root.part(roster.place)
    roster.watch(watch.is_cut_off)
    places = {process.place for process in roster.members}
    key = f"{roster.place}/store"
    if roster.rank == 0:
        host, port = own_server(timeout, everywhere=len(places) > 1)
        roster.root.set(key, json.dumps([host, port, secrets.token_hex(8)]))
    found = JobStore(roster.root, timeout=timeout, lost=watch.error).get(key)
    host, port, name = json.loads(found)
    return JobStore(PrefixStore(name, met_in(host, port, timeout)), roster.root.secret, name)


def remove_arrivals(runtime: Runtime, decision: Decision) -> None:
    """Remove from the store the data of `log.stragglers()` for a world that all ranks are about to leave.

    Each rank removes its own part, and the first staying rank of a group also removes the lost ranks' parts.
    """
    if runtime.closed or runtime.engine.peers.store_is_lost():
        return
    for state in runtime.engine.states:
        local, left = state.group.local, [rank for rank in state.group.ranks if rank in decision.stay]
        lost = [local[rank] for rank in decision.lost if rank in local]
        state.board.remove_noted(lost if left and local.get(min(left)) == state.group.rank else ())


def remove_world(
    roster: EpochLog, runtime: Runtime, following: EpochLog, dead: Collection[Process] = ()
) -> None:
    """Begin to remove a world's keys from the store; called by each of its ranks, in the next world.

    After some hundreds of operations, a request per key takes tenths of a second in total, so a thread makes
    the requests. The end of the process waits for the thread, unless the store does not answer. Keys are
    removed only if all ranks left out are `dead`: a stopped rank may still read them. The members' decisions
    stay, for processes that come later. So does the first world of a job, whose keys are stored beside these.
    `runtime`: the world's runtime, or an earlier one if the world was not made.
    """
    goes_on, gone = ({process[:3] for process in each} for each in (following.members, dead))
    left = [process[:3] for process in roster.members if process[:3] in goes_on]
    own = following.members[following.rank][:3]
    if own not in left or any(process[:3] not in goes_on | gone for process in roster.members):
        return
    if roster.members[0][:3] not in left and (roster.kept is not None or not agent_has_store()):
        return  # the store ended with its process
    stores = [roster.root] if roster.kept is None and roster.epoch == 0 else []  # where processes met
    if roster.kept is None:
        stores.append(roster.root.part(roster.place))
    elif runtime.world.roster is roster and runtime.world.store is not None:
        stores.append(runtime.world.store)
    share, number = len(left), left.index(own)

    def remove() -> None:
        with suppress(RuntimeError):  # the store does not answer any more
            for store in stores:
                keeps = _MET if store is roster.root else _DECIDED
                for key in store.list_keys():
                    if crc32(key.encode()) % share == number and not keeps.fullmatch(key):
                        store.delete_key(key)

    with suppress(RuntimeError):  # the process may have no more threads
        thread = Thread(target=remove, name=REMOVES, daemon=True)
        thread.start()
        atexit.register(thread.join, _REMOVED_WITHIN)


def close_world(runtime: Runtime, why: str, decision: Decision) -> None:
    """Close a world that no rank uses any more; its groups and handles then raise `Revoked`."""
    if runtime.closed:
        return
    for state in runtime.engine.states:
        state.revoked = why
        state.agreed = decision.done.get(state.group.name)
    runtime.prepare_reset()
    for backend in runtime.engine.backends:
        backend.disconnect()
    runtime.close(clean=False)
    runtime.closed_because, runtime.superseded = why, True
    for state in runtime.engine.states:
        state.board.close()
