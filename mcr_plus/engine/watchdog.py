"""Long waits: failed and exited peers, ranks that compile kernels, and deadlines.

Functions return errors; only the engine fails operations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from mcr_plus.backends.base import ReceivePoll
from mcr_plus.core.deadline import Deadline
from mcr_plus.engine.peer_errors import FailedPeer, described, peer_error
from mcr_plus.errors import BackendError, CommTimeout, LaunchError, McrError
from mcr_plus.rendezvous.identity import DIED
from mcr_plus.rendezvous.processes import LEFT

if TYPE_CHECKING:
    from mcr_plus.engine.work import IssuedWork
    from mcr_plus.rendezvous.processes import Peers

_LOST: Final = {
    "dead": "has died, which closed the group",
    "stopped": "is stopped, by a signal or a debugger",
    "silent": "is out of reach: {seen}",
}
LONG_WAIT: Final = 0.05
"""Seconds after which a wait also checks the peers' processes."""

_DEATH_GRACE: Final = 0.2  # s; the last message of an exited rank may still be in flight
_CHECKS_OF_GRACE: Final = 40  # same grace in checks of the board, which are rarer between hosts
_TOGETHER: Final = 0.02  # s; ranks that end together do so within this time
_UNSEEN: Final = 10.0  # s that an operation may take while its peers' rows cannot be read
_COMPILES_FOR: Final = 300.0  # s by which a peer that compiles kernels extends deadlines, at most


class Watchdog:
    """Finds out why an operation does not complete.

    Attributes:
        failed_peers: job ranks that exited or failed, and thereby failed an operation here.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.failed_peers: set[int] = set()

    # -- peers ------------------------------------------------------------------------------------

    def check(self, work: IssuedWork, waited: float) -> McrError | None:
        """Return the error of `work` if its peers have failed, or cannot be seen, after `waited` seconds."""
        if waited > LONG_WAIT:
            self.note_compiling(work, time.monotonic())
            is_out_of_reach = isinstance(work.operation.state.board.problem, BackendError)  # the job's store
            if is_out_of_reach or self._peers.has_silent_connection():
                self._suspect(work)
        error = board_error(work, waited)
        if work.is_done:
            return None
        if error is not None or waited <= LONG_WAIT:
            return None if error is None else self.board_failed(work, error)
        failed = self.failed_peers_of(work)
        if not failed or not _past_grace(work, failed):
            return None
        failed = self.failed_peers_of(work) or failed  # a host may have become silent during `look`
        operation = work.operation
        self.note(failed)
        text = f"{operation.name(work.sequence)} on {operation.backend}: {described(failed)}"
        return peer_error(work, text, failed)

    def look(self, work: IssuedWork, waited: float) -> McrError | None:
        """Check as `check` does, but send no request to the board unless a peer is lost."""
        if self._peers.has_silent_connection():
            self._suspect(work)
        ranks = work.operation.state.group.ranks
        needed = _needed(work) or work.operation.state.group.peers
        return self.check(work, waited) if any(self._peers.lost(ranks[rank]) for rank in needed) else None

    def failed_peers_of(self, work: IssuedWork) -> list[FailedPeer]:
        """Return the failed peers that keep `work` from completing.

        A rank that failed because a peer failed only relays that error; it is returned only if no root cause
        is known. A receive from any source needs any one peer: the list is empty unless all have failed.
        """
        state, sequence = work.operation.state, work.sequence
        board, is_p2p = state.board, work.operation.signature.is_p2p
        root_causes: list[FailedPeer] = []
        relayed: list[FailedPeer] = []
        needed = _needed(work)
        for rank in needed or state.group.peers:
            process, name = state.group.ranks[rank], state.group.named(rank)
            closed, failure = board.is_closed(rank), board.failure(rank)
            absent = not is_p2p and board.read(rank, sequence).issued < sequence
            if failure is not None and (absent or not sequence or 0 < failure.sequence <= sequence):
                failed = FailedPeer(process, f"{name} has given up: {failure.text}", failure.text)
                (relayed if failure.sequence else root_causes).append(failed)
            elif closed and absent:
                root_causes.append(FailedPeer(process, f"{name} has left without issuing it"))
            elif closed and _is_unmatched(work):
                root_causes.append(FailedPeer(process, f"{name} has left and takes no part in it"))
            elif not closed and (loss := self._peers.lost(process)):
                reason = _LOST[loss.status].format(seen=loss.seen)
                root_causes.append(FailedPeer(process, f"{name} {reason}", seen=loss.seen))
            elif not closed and self._peers.has_left(process):
                # Its failure is not visible, so it had lost the store: this rank may have been stopped.
                reason = f"{name} has left this world, and may have gone on in another one"
                root_causes.append(FailedPeer(process, reason, seen=LEFT))
        if not needed and len(root_causes) + len(relayed) < len(state.group.peers):
            return []
        return root_causes or relayed[:1]

    def library_error(self, work: IssuedWork, error: Exception) -> McrError:
        """Return the error of `work` after its library raised `error`; it names the peers to blame.

        If there are none, wait a moment: the operating system may not have ended the process yet.
        """
        failed = self._blamed(work)
        operation = work.operation
        reason = str(error) or type(error).__name__
        reason = f"{described(failed)}; {reason}" if failed else reason
        text = f"{operation.backend}: {operation.name(work.sequence)} failed: {reason}"
        named = peer_error(work, text, failed, BackendError)
        named.__cause__ = error
        return named

    def board_failed(self, work: IssuedWork, error: McrError) -> McrError:
        """Return the error of `work` after its board failed with `error`; a `PeerLost` if peers are lost."""
        failed = self._blamed(work) if type(error) is BackendError else []
        if not any(peer.seen for peer in failed):
            return error
        named = peer_error(work, f"{error} ({described(failed)})", failed)
        named.__cause__ = error
        return named

    def _blamed(self, work: IssuedWork) -> list[FailedPeer]:
        self._suspect(work)
        group = work.operation.state.group
        needed = [group.ranks[rank] for rank in _needed(work) or group.peers]
        deadline, nap = Deadline(self._peers.patience), 0.002
        # Only a heartbeat proves that a host lives; its agent, or ours, may not have been scheduled.
        while not (failed := self.failed_peers_of(work)) and (
            not deadline.passed() or self._peers.in_doubt(needed)
        ):
            time.sleep(nap)
            nap = min(1.5 * nap, 0.03)  # between hosts, every check costs requests to the store
        if any(peer.seen == DIED for peer in failed):
            time.sleep(_TOGETHER)
        if failed:
            failed = self.failed_peers_of(work) or failed
        self.note(failed)
        return failed

    def _suspect(self, work: IssuedWork) -> None:
        """Note a suspected loss, since there is evidence; silence will tell which peer it is."""
        group = work.operation.state.group
        self._peers.suspect(group.ranks[rank] for rank in _needed(work) or group.peers)

    def note(self, failed: Sequence[FailedPeer]) -> None:
        """Remember the peers that caused an operation to fail here."""
        self.failed_peers.update(peer.rank for peer in failed)

    # -- deadlines --------------------------------------------------------------------------------

    def is_overdue(self, work: IssuedWork, began: float, now: float) -> bool:
        """Return whether a wait is past its deadline; it restarts when a needed rank has compiled kernels."""
        timeout, since = work.operation.timeout, max(began, work.compiling_seen)
        if now - since < timeout:
            return False
        if now - began < timeout + _COMPILES_FOR:
            self.note_compiling(work, now)
        return now - max(since, work.compiling_seen) >= timeout

    def note_compiling(self, work: IssuedWork, now: float) -> None:
        """Note in `work.compiling_seen` when a rank needed by `work` was last seen compiling kernels."""
        state = work.operation.state
        turns = {rank: state.board.compiling(rank) for rank in _needed(work) or state.group.peers}
        busy = [state.group.ranks[rank] for rank, turn in turns.items() if turn % 2]
        known = turns if work.compiling_turns is None else work.compiling_turns
        work.compiling_turns = turns
        if turns != known or any(self._peers.status(rank) != "stopped" for rank in busy):
            work.compiling_seen = now

    def timeout_error(self, work: IssuedWork, waited: float) -> CommTimeout:
        """Return the error for a missed deadline; it names the ranks that have not issued the operation."""
        operation = work.operation
        state, is_p2p = operation.state, operation.signature.is_p2p
        group, missing, notes = state.group, [], []
        for rank in _needed(work):
            issued = state.board.read(rank, work.sequence).issued
            process = group.ranks[rank]
            status = self._peers.status(process)
            absent = not is_p2p and issued < work.sequence
            if absent or is_p2p:
                missing.append(process)
            if absent or status not in ("running", "unknown"):
                at = [f"last issued #{issued}"] if absent else []
                at += [f"process {status}"] if status != "unknown" else []
                notes.append(f"rank {process}: {', '.join(at)}")
        absence = "no rank has sent a message for it" if is_p2p else "all ranks have issued it"
        absence = f"missing ranks{group.of_job}: {missing}" if missing else absence
        detail = f" ({'; '.join(notes)})" if notes else ""
        return CommTimeout(
            f"{operation.name(work.sequence)} on {operation.backend} not done after {waited:.1f} s "
            f"(its timeout is {operation.timeout:g} s); {absence}{detail}",
            missing,
        )


def board_error(work: IssuedWork, waited: float = math.inf) -> BackendError | None:
    """Return the error if peers' rows cannot be trusted, or were unreadable for `_UNSEEN` seconds."""
    problem = work.operation.state.board.problem
    if problem is None or (waited < _UNSEEN and not isinstance(problem, LaunchError)):
        return None
    error = BackendError(f"{work.operation.name(work.sequence)}: {problem}")
    error.__cause__ = problem
    return error


def _past_grace(work: IssuedWork, failed: Sequence[FailedPeer]) -> bool:
    """Return whether peers have looked failed for the grace period: last messages may still be in flight.

    A peer that has been stopped or silent for long has no messages in flight.
    """
    now = time.monotonic()
    if work.doubted_since is None:
        work.doubted_since = now
    if any(peer.seen for peer in failed):
        grace = _DEATH_GRACE if all(peer.seen in ("", DIED, LEFT) for peer in failed) else 0.0
    else:
        grace = max(_DEATH_GRACE, _CHECKS_OF_GRACE * work.operation.state.board.check_every)
    return now - work.doubted_since >= grace


def _needed(work: IssuedWork) -> Sequence[int]:
    """Return the group ranks required to complete an operation; empty for a receive from any source."""
    group, peer = work.operation.state.group, work.message.peer
    if work.operation.signature.is_p2p:
        return [peer] if peer is not None and peer != group.rank else []
    return group.peers


def _is_unmatched(work: IssuedWork) -> bool:
    """Return whether a send or receive has started, but the library has found no counterpart at the peer.

    False on a stream: the operation may wait there for its turn, even if the peer has left meanwhile.
    """
    operation, poll = work.operation, work.poll
    if not operation.signature.is_p2p or operation.on_stream or poll is None:
        return False
    return not (isinstance(poll, ReceivePoll) and poll.arriving)
