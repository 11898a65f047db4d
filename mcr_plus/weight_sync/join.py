"""`mcr.join_sync`: a receiver of weights outside the sources' job, which may come and go at any time."""

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
    """Receive the weights of another job, in a process that need not be in a job itself.

    For servers that start after the trainers, are killed, and come back: the server needs neither `mcr.init`
    nor `torch.distributed`, and neither the trainers' program nor other receivers notice it. The trainers
    call `mcr.sync(…, invite="policy.sync")`. The tensors of this process must equal one of the offers in the
    invitation. Only elements of this offer travel: all of them once, then only changes.

    The result is a receiver, with `pull`, `stats` and `close` like a receiver in the job, except that `close`
    waits for nobody. `pull` raises `SyncClosed` when the trainers have closed their `mcr.sync` or their job
    has ended, and `PeerLost` when they have died; both are `BackendError`. A server that wants to go on calls
    `join_sync` again, which reads the newer invitation.

    Args:
        invitation: the file, owned by this user and readable by nobody else. On another host, a copy.
        module_or_state_dict: as for `mcr.sync`; written in place by `pull`.
        layout: as for `mcr.sync`.
        rank: rank of this process in its layouts: the rank of a receiver in the job that holds the same
            tensors, or a rank in the `offers` of the trainers' `mcr.sync`.
        timeout: seconds to wait until the file exists, and its sources answer. With 0, the file is read once
            and each source has a quarter of a second to answer.

    Raises:
        InvalidArgument: other users may read the file, it is not an invitation, or no offer equals the
            tensors of this process; the text has the first difference, and all offers.
        CommTimeout: the file did not appear in time.
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
        delta.prepare(width)  # before asking the sources: it may take seconds, in which they may end
    try:
        found = invited(path, timeout)
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


def invited(path: str, timeout: float) -> EndpointFile:
    """Return the file's invitation once its sources answer; the file may be replaced meanwhile.

    Raises what `join_sync` raises.
    """
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
        raise CommTimeout(
            f"join_sync: there is no file {os.path.abspath(path)!r} within {timeout:g} s: no trainer has "
            "started, or it has ended"
        )
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
    """Return the first source that does not answer for this invitation, and its error; None if all do."""
    for each in invitation.sources:
        error = _trouble((each.host, each.port), invitation.secret, deadline)
        if error is not None:
            return each.rank, error
    return None


def _trouble(place: tuple[str, int], key: bytes, deadline: float) -> Exception | None:
    """Connect to a source without a request; return the error if it does not answer."""
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
