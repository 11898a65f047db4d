"""Desync detection: checks that all ranks of a group have issued the same operation under a number.

Functions only read the group's board and return errors. Only the engine fails operations.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from mcr_plus.board.base import unpad
from mcr_plus.core.deadline import Deadline
from mcr_plus.engine.peer_errors import described
from mcr_plus.engine.watchdog import board_error
from mcr_plus.errors import McrError, OperationsDiffer, OrderMismatch

if TYPE_CHECKING:
    from mcr_plus.engine.watchdog import Watchdog
    from mcr_plus.engine.work import IssuedWork

_DESCRIBED_WITHIN: Final = 1.0  # s for peers to describe an operation that differs
_NAP: Final = 0.002  # s between two checks for that description


def compare_signatures(work: IssuedWork) -> bool | McrError:
    """Return True once all peers have posted the signature of `work`, and the error if a peer has posted
    another.

    False while peers have not posted. Peers overwrite their posts only long after the operation; overwritten
    rows are read one by one, at the board's interval.
    """
    state, sequence, digest = work.operation.state, work.sequence, work.operation.digest
    board = state.board
    if board.all_match(sequence, digest):
        return _count_mismatch(work) or True
    if (error := board_error(work)) is not None:
        return error
    now = time.monotonic()
    next_comparison = work.next_comparison
    if next_comparison is None or now < next_comparison:
        if next_comparison is None:
            work.next_comparison = now + board.first_check
        return False
    work.next_comparison = now + board.check_every
    for rank in state.group.peers:
        status = board.read(rank, sequence)
        if status.digest == digest or status.overwritten:
            continue
        if status.digest is None and (status.issued <= sequence or _may_still_describe(work, now)):
            return False
        return _mismatch(work, rank, status.digest)
    return True


def find_mismatch(work: IssuedWork) -> OrderMismatch | None:
    """Return the error, during a long wait, if a peer has posted another operation under this number."""
    operation = work.operation
    board = operation.state.board
    for rank in operation.state.group.peers:
        digest = board.read(rank, work.sequence).digest
        if digest is not None and digest != operation.digest:
            return _mismatch(work, rank, digest)
    return None


def explain_difference(work: IssuedWork, difference: OperationsDiffer, watchdog: Watchdog) -> McrError:
    """Return the error of an operation whose library has reported `difference` between ranks.

    The error names the operations of two ranks if the peers post theirs within a second.
    """
    state, sequence = work.operation.state, work.sequence
    deadline = Deadline(_DESCRIBED_WITHIN)
    missing = set() if difference.explained else set(state.group.peers)
    while missing and not deadline.passed():
        for rank in list(missing):
            digest = state.board.read(rank, sequence).digest
            if digest is None:
                continue
            missing.discard(rank)
            if digest != work.operation.digest:
                return _mismatch(work, rank, digest)
            if (mismatch := _count_mismatch_with(work, rank)) is not None:
                return mismatch
        time.sleep(_NAP)
    text = f"operation #{sequence} of group '{state.group.name}', {work.operation.signature.describe()}"
    while not difference.explained and not deadline.passed():  # while other ranks name each other
        if failed := watchdog.failed_peers_of(work):
            watchdog.note(failed)
            error = OrderMismatch(f"{text}: {described(failed)}")
            error.passed_on = failed[0].failure
            return error
        time.sleep(_NAP)
    return OrderMismatch(f"{text}: {difference}")


def _may_still_describe(work: IssuedWork, now: float) -> bool:
    """Return whether a peer that has issued a different operation still has time to post it.

    A peer posts its operation when its own wait for it becomes long.
    """
    if work.undescribed_since is None:
        work.undescribed_since = now
    return now - work.undescribed_since < _DESCRIBED_WITHIN


def _mismatch(work: IssuedWork, rank: int, digest: int | None) -> OrderMismatch:
    board, group = work.operation.state.board, work.operation.state.group
    mine = unpad(work.operation.text)  # cut like the peer's text: both fit in the record for peers
    theirs = "" if digest is None else board.text(rank, work.sequence, digest)
    theirs = theirs or "another operation, issued before and not described"
    return OrderMismatch(
        f"operation #{work.sequence} of group '{group.name}': {group.named(group.rank)} issued {mine}; "
        f"{group.named(rank)} issued {theirs}. All ranks of a group must issue the same operations "
        "in the same order"
    )


def _count_mismatch(work: IssuedWork) -> OrderMismatch | None:
    """Return the error of a vector collective in which a peer's counts differ from this rank's."""
    for rank in work.operation.state.group.peers:
        if (mismatch := _count_mismatch_with(work, rank)) is not None:
            return mismatch
    return None


def _count_mismatch_with(work: IssuedWork, rank: int) -> OrderMismatch | None:
    """Return that error for one peer; None also for operations without counts of their own."""
    if not work.message.compares_counts:
        return None
    state, named = work.operation.state, work.operation.state.group.named
    me = state.group.rank
    sent, expected = work.message.compared_flows(me)
    theirs = state.board.counts(rank, work.sequence)
    if theirs is None or theirs == (expected[rank], sent[rank]):
        return None
    sends, expects = theirs
    if sends != expected[rank]:
        text = f"{named(rank)} sends {sends} elements to {named(me)}, which expects {expected[rank]}"
    else:
        text = f"{named(me)} sends {sent[rank]} elements to {named(rank)}, which expects {expects}"
    described = work.operation.signature.describe()
    return OrderMismatch(f"operation #{work.sequence} of group '{state.group.name}', {described}: {text}")
