"""Long waits: failed and exited peers, ranks that compile kernels, and deadlines.

Functions return errors; the engine alone fails operations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from mcr_plus.backends.base import ReceivePoll
from mcr_plus.core.deadline import Deadline
from mcr_plus.errors import BackendError, CommTimeout, LaunchError, McrError, OrderMismatch

if TYPE_CHECKING:
    from mcr_plus.dispatch.work import IssuedWork
    from mcr_plus.rendezvous.processes import Peers

LONG_WAIT: Final = 0.05
"""Seconds after which a wait also checks the peers' processes."""

_DEATH_GRACE: Final = 0.2  # seconds; the last message of a rank that has just exited may still be in flight
_CHECKS_OF_GRACE: Final = 40  # the same in checks of the board, which are rarer between hosts
_UNSEEN: Final = 10.0  # seconds that an operation may take while its peers' rows cannot be read
_COMPILES_FOR: Final = 300.0  # seconds for which a peer that compiles kernels extends deadlines, at most
_RAISED_BY_PEER: Final = {"OrderMismatch": OrderMismatch, "CommTimeout": CommTimeout}


class FailedPeer(NamedTuple):
    """A rank that issues nothing more, why, and the error of the operation that failed there."""

    rank: int  # in the job
    reason: str
    failure: str = ""


class Watchdog:
    """Finds out why an operation does not complete.

    Attributes:
        failed_peers: ranks of the job that have exited or failed, and so failed an operation here.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.failed_peers: set[int] = set()

    # -- peers ------------------------------------------------------------------------------------

    def check(self, work: IssuedWork, waited: float) -> McrError | None:
        """The error of an operation whose peers have failed, or cannot be seen, after `waited` seconds."""
        if waited > LONG_WAIT:
            self.note_compiling(work, time.monotonic())
        error = board_error(work, waited)
        if error is not None or work.is_done or waited <= LONG_WAIT:
            return None if work.is_done else error
        failed = self.failed_peers_of(work)
        if not failed or not _past_grace(work):
            return None
        operation = work.operation
        kind = _RAISED_BY_PEER.get(failed[0].failure.partition(":")[0], BackendError)
        return self.peer_error(kind, f"{operation.name(work.sequence)} on {operation.backend}", failed)

    def failed_peers_of(self, work: IssuedWork) -> list[FailedPeer]:
        """The failed peers because of which `work` cannot complete.

        A rank that failed because a peer failed only relays that error: it is used if no root cause is known.
        A receive from any source needs one of the others: the list is empty unless all have failed.
        """
        state, sequence = work.operation.state, work.sequence
        board, is_p2p = state.board, work.operation.signature.is_p2p
        root_causes: list[FailedPeer] = []
        relayed: list[FailedPeer] = []
        needed = _needed(work)
        for rank in needed or state.group.peers:
            process = state.group.ranks[rank]
            closed, failure = board.is_closed(rank), board.failure(rank)
            absent = not is_p2p and board.read(rank, sequence).issued < sequence
            if failure is not None and (absent or not sequence or 0 < failure.sequence <= sequence):
                failed = FailedPeer(process, f"rank {rank} has given up: {failure.text}", failure.text)
                (relayed if failure.sequence else root_causes).append(failed)
            elif closed and absent:
                root_causes.append(FailedPeer(process, f"rank {rank} has left without issuing it"))
            elif closed and _is_unmatched(work):
                root_causes.append(FailedPeer(process, f"rank {rank} has left and takes no part in it"))
            elif not closed and self._peers.status(process) == "dead":
                root_causes.append(FailedPeer(process, f"rank {rank} has died, which closed the group"))
        if not needed and len(root_causes) + len(relayed) < len(state.group.peers):
            return []
        return root_causes or relayed[:1]

    def blame(self, work: IssuedWork) -> str:
        """The failed peers behind an error of the library, as text.

        Waits a moment if there are none: the operating system may not have ended the process yet.
        """
        deadline = Deadline(_DEATH_GRACE)
        while not (failed := self.failed_peers_of(work)) and not deadline.passed():
            time.sleep(0.002)
        return self._describe(failed)

    def peer_error(self, kind: type[McrError], what: str, failed: list[FailedPeer]) -> McrError:
        """The error of an operation, `what`, that failed because of its peers.

        Other ranks are passed the first peer's own error: wrapped in this one it would grow with every rank.
        """
        error = kind(f"{what}: {self._describe(failed)}")
        error.passed_on = failed[0].failure
        return error

    def _describe(self, failed: list[FailedPeer]) -> str:
        self.failed_peers.update(peer.rank for peer in failed)
        return ", ".join(peer.reason for peer in failed)

    # -- deadlines --------------------------------------------------------------------------------

    def is_overdue(self, work: IssuedWork, began: float, now: float) -> bool:
        """Whether a wait has reached its deadline, which begins anew when a rank it needs has compiled."""
        timeout, since = work.operation.timeout, max(began, work.compiling_seen)
        if now - since < timeout:
            return False
        if now - began < timeout + _COMPILES_FOR:
            self.note_compiling(work, now)
        return now - max(since, work.compiling_seen) >= timeout

    def note_compiling(self, work: IssuedWork, now: float) -> None:
        """Note in `work.compiling_seen` when a rank that `work` needs was last seen to compile kernels."""
        state = work.operation.state
        turns = {rank: state.board.compiling(rank) for rank in _needed(work) or state.group.peers}
        busy = [state.group.ranks[rank] for rank, turn in turns.items() if turn % 2]
        known = turns if work.compiling_turns is None else work.compiling_turns
        work.compiling_turns = turns
        if turns != known or any(self._peers.status(rank) != "stopped" for rank in busy):
            work.compiling_seen = now

    def timeout_error(self, work: IssuedWork, waited: float) -> CommTimeout:
        """The error of a deadline, with the ranks that have not issued the operation."""
        operation = work.operation
        state, is_p2p = operation.state, operation.signature.is_p2p
        missing, notes = [], []
        for rank in _needed(work):
            issued = state.board.read(rank, work.sequence).issued
            status = self._peers.status(state.group.ranks[rank])
            absent = not is_p2p and issued < work.sequence
            if absent or is_p2p:
                missing.append(rank)
            if absent or status not in ("running", "unknown"):
                at = [f"last issued #{issued}"] if absent else []
                at += [f"process {status}"] if status != "unknown" else []
                notes.append(f"rank {rank}: {', '.join(at)}")
        absence = f"missing ranks: {missing}" if missing else "all ranks have issued it"
        detail = f" ({'; '.join(notes)})" if notes else ""
        return CommTimeout(
            f"{operation.name(work.sequence)} on {operation.backend} not done after {waited:.1f} s "
            f"(its timeout is {operation.timeout:g} s); {absence}{detail}",
            missing,
        )


def board_error(work: IssuedWork, waited: float = math.inf) -> BackendError | None:
    """The error of an operation whose peers' rows cannot be trusted, or not be read for `_UNSEEN` seconds."""
    problem = work.operation.state.board.problem
    if problem is None or (waited < _UNSEEN and not isinstance(problem, LaunchError)):
        return None
    error = BackendError(f"{work.operation.name(work.sequence)}: {problem}")
    error.__cause__ = problem
    return error


def _past_grace(work: IssuedWork) -> bool:
    """True once a peer has looked dead for the grace period: its last message may still be in flight."""
    now = time.monotonic()
    if work.doubted_since is None:
        work.doubted_since = now
    grace = max(_DEATH_GRACE, _CHECKS_OF_GRACE * work.operation.state.board.check_every)
    return now - work.doubted_since > grace


def _needed(work: IssuedWork) -> Sequence[int]:
    """Group ranks that an operation cannot complete without; empty for a receive from any source."""
    group, peer = work.operation.state.group, work.message.peer
    if work.operation.signature.is_p2p:
        return [peer] if peer is not None and peer != group.rank else []
    return group.peers


def _is_unmatched(work: IssuedWork) -> bool:
    """Whether a send or receive has started, and its library has found no counterpart at the peer.

    False on a stream: the operation may wait there for its turn, even if the peer has left meanwhile.
    """
    operation, poll = work.operation, work.poll
    if not operation.signature.is_p2p or operation.on_stream or poll is None:
        return False
    return not (isinstance(poll, ReceivePoll) and poll.arriving)
