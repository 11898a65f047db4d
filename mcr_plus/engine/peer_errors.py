"""Errors of operations whose peers will issue no more operations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from mcr_plus.errors import BackendError, CommTimeout, DataCorrupted, McrError, OrderMismatch, PeerLost

if TYPE_CHECKING:
    from mcr_plus.engine.work import IssuedWork

_RAISED_BY_PEER: Final = {"OrderMismatch": OrderMismatch, "CommTimeout": CommTimeout}
_RELAYED_LOSS: Final = re.compile(r"PeerLost \[([\d, ]+)\]")  # as `PeerLost.passed_on` writes the list


class FailedPeer(NamedTuple):
    """A rank that will issue no more operations.

    `rank`: rank in the job. `failure`: the error of the operation that failed there. `seen`: see `PeerLost`;
    empty if the rank is not lost.
    """

    rank: int
    reason: str
    failure: str = ""
    seen: str = ""


def described(failed: Sequence[FailedPeer]) -> str:
    """Return the reasons of all peers as text."""
    return ", ".join(peer.reason for peer in failed)


def peer_error(
    work: IssuedWork, text: str, failed: Sequence[FailedPeer], kind: type[McrError] | None = None
) -> McrError:
    """Return the error of `work` caused by its peers, with this text: `PeerLost` if any peer is lost.

    `kind`: class of the error otherwise; None for the class that the first peer raised. Other ranks are
    passed that peer's own error: wrapped in this one, it would grow with every rank.
    """
    failure = failed[0].failure if failed else ""
    error: McrError
    if (lost := _lost(failed)) is not None:
        operation = work.operation
        ranks, seen = lost
        error = PeerLost(text, ranks, operation.name(work.sequence), operation.state.group.name, seen)
    elif (corrupted := DataCorrupted.relayed(failure, text)) is not None:
        error = corrupted
    else:
        error = (kind or _RAISED_BY_PEER.get(failure.partition(":")[0], BackendError))(text)
    error.passed_on = failure or error.passed_on
    return error


def _lost(failed: Sequence[FailedPeer]) -> tuple[list[int], str] | None:
    """Return the lost ranks and the evidence for each; None if no rank is lost."""
    lost = [peer for peer in failed if peer.seen]
    if lost:
        return sorted(peer.rank for peer in lost), "; ".join(dict.fromkeys(peer.seen for peer in lost))
    relayed = _RELAYED_LOSS.match(failed[0].failure) if failed else None
    if relayed is None:
        return None
    return [int(rank) for rank in relayed[1].split(",")], f"reported by rank {failed[0].rank}"
