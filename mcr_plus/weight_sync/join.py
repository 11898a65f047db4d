"""`mcr.join_sync`: a receiver of weights outside the job of their sources, which comes and goes alone."""

from __future__ import annotations

import os
import secrets
import time
from typing import Final

import torch

from mcr_plus.core.units import whole_number
from mcr_plus.errors import BackendError, CommTimeout, InvalidArgument, PeerLost
from mcr_plus.kernels import delta
from mcr_plus.rendezvous import stream as links
from mcr_plus.rendezvous.stream import StreamClosed
from mcr_plus.weight_sync import endpoint_file
from mcr_plus.weight_sync.endpoint_file import EndpointFile
from mcr_plus.weight_sync.receiver import WeightReceiver
from mcr_plus.weight_sync.sync import Path, WeightSync, buffers_from
from mcr_plus.weight_sync.weights import Layouts, Source, Weights

_LOOK_S: Final = 0.25
_DRAWN_BITS: Final = 63


@torch.inference_mode(False)  # as `sync`
def join_sync(
    invitation: Path,
    module_or_state_dict: Source,
    layout: Layouts | None = None,
    *,
    rank: int = 0,
    timeout: float = 60.0,
) -> WeightSync:
    """Receive the weights of another job, in a process that is in no job itself, as long as it likes.

    For servers that start after the trainers, are killed, and come back: neither `mcr.init` nor
    `torch.distributed` is needed, and neither the trainers' program nor other receivers notice. The trainers
    call `mcr.sync(…, invite="policy.sync")`. What this process holds must be one of the things that the
    invitation offers; only its elements travel, and of these only what changes, after all of them once.

    The result is a receiver: its `pull`, `stats` and `close` are those of one in the job, but that `close`
    waits for nobody. When the trainers have closed their `mcr.sync`, or their job has ended, `pull` raises
    `SyncClosed`, and `PeerLost` when they have died; both are `BackendError`. A server that goes on then
    calls `join_sync` again, which reads the newer invitation.

    Args:
        invitation: the file, which belongs to this user and nobody else can read. On another host, a copy.
        module_or_state_dict: as for `mcr.sync`; written in place by `pull`.
        layout: as for `mcr.sync`.
        rank: which of the ranks of its layouts this process is: that of the receiver in the job that holds
            the same, or one of those of `offers` of the trainers' `mcr.sync`.
        timeout: seconds to wait for the file to be there, and for its sources to answer; with 0 each is
            looked at once, and a source has a quarter of a second.

    Raises:
        InvalidArgument: the file may be read by others or is not an invitation, or what this process holds is
            not offered; the text has the first difference, and all offers.
        CommTimeout: no file came in time.
        PeerLost: the sources did not answer in time; the text has the age of the file.

    Example:
        ```python
        with mcr.init() as comm:  # the trainer; a server would be another program
            model, server = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            weights = mcr.sync(model, src=range(comm.size), invite="policy.sync")
            weights.push()
            with mcr.join_sync("policy.sync", server) as receiver:
                print(comm.rank, receiver.pull())
        ```
    """
    path = _checked(invitation, timeout)
    if (place := whole_number(rank)) is None or place < 0:
        raise InvalidArgument(f"join_sync: rank={rank!r}; expected a rank of the layouts")
    weights = Weights(module_or_state_dict, layout, place)
    for width in sorted({getattr(torch, each.dtype).itemsize for each in weights.held}):
        delta.prepare(width)  # before the sources are asked, as it may take seconds, in which they may end
    try:
        found = _answering(path, timeout)
        offer, parts = found.choose(weights.held)
    except InvalidArgument as error:
        raise InvalidArgument(f"join_sync: {error}") from None
    weights.lay(parts)
    what = f"sync {found.tag!r} of {path!r}"
    places = buffers_from(parts, {each.rank: (each.host, each.port) for each in found.sources})
    number = (1 << _DRAWN_BITS) + secrets.randbits(_DRAWN_BITS)
    end = WeightReceiver(weights, what, found.secret, places, number, lambda: False, offer)
    return WeightSync(None, found.tag, end, found.timeout)


def _checked(invitation: Path, timeout: float) -> str:
    if not isinstance(invitation, (str, os.PathLike)) or not str(invitation):
        raise InvalidArgument(f"join_sync: {invitation!r}; expected the name of a file")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise InvalidArgument(f"join_sync: timeout={timeout!r}; expected seconds, at least 0")
    return os.fspath(invitation)


def _answering(path: str, timeout: float) -> EndpointFile:
    """The invitation of the file, once its sources answer; the file may be replaced meanwhile."""
    deadline = time.monotonic() + timeout
    while True:
        found = endpoint_file.read(path)
        problem = None if found is None else _silence(found, deadline)
        if found is not None and problem is None:
            return found
        if time.monotonic() + _LOOK_S > deadline:
            break
        time.sleep(_LOOK_S)
    if found is None or problem is None:
        raise CommTimeout(f"join_sync: there is no file {path!r} within {timeout:g} s")
    rank, error = problem
    age = max(0.0, time.time() - found.created)
    raise PeerLost(
        f"join_sync: rank {rank}, a source of weights, does not answer within {timeout:g} s: {error}; "
        f"{path!r} was written {age:,.0f} s ago: have the trainers ended, or started again?",
        (rank,),
        f"join_sync {found.tag!r}",
        seen="no answer",
    )


def _silence(invitation: EndpointFile, deadline: float) -> tuple[int, Exception] | None:
    """The first source that does not answer as one of this invitation, and why; None if all do."""
    for each in invitation.sources:
        error = _trouble((each.host, each.port), invitation.secret, deadline)
        if error is not None:
            return each.rank, error
    return None


def _trouble(place: tuple[str, int], key: bytes, deadline: float) -> Exception | None:
    """Why a source does not answer; it is greeted, and nothing is asked of it."""
    within = max(_LOOK_S, deadline - time.monotonic())
    try:
        link = links.connect(place, key, links.JOINER, lambda: time.monotonic() > deadline, 1, within=within)
        try:
            link.send(links.END)
        finally:
            link.close()
    except (OSError, EOFError, BackendError) as error:
        return error
    except StreamClosed:
        return TimeoutError("it says nothing")
    return None
