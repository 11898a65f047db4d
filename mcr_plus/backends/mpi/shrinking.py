"""MPI after ranks are lost: a communicator of the surviving ranks, through Open MPI's ULFM.

`MPI_Comm_shrink` creates it (Bland, Bouteiller, Herault, Bosilca and Dongarra, "Post-failure recovery of MPI
communication capability", 2013). The call returns only once all live processes of the communicator have
called it. So it is made after all missing ranks have died, in a thread with a time limit. Open MPI's
`MPI_Comm_ishrink` fails while collectives of dead ranks are pending (seen with 5.0.11).
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.backends.mpi.contexts import Contexts
from mcr_plus.rendezvous.mpi_library import load_mpi
from mcr_plus.rendezvous.store import exchange

if TYPE_CHECKING:
    from mcr_plus.membership.epoch_log import EpochLog
    from mcr_plus.rendezvous.world import World

_PATIENCE: Final = 3.0  # s; with a dead rank the call takes 0.1 s


class _Remnant:
    """Communicator of the members of an epoch; None for the communicator of all processes of the launcher."""

    comm: Any = None
    epoch = 0


def everyone() -> Any:
    """Return the communicator of all ranks of the world; raises `BackendUnavailable` without MPI."""
    return load_mpi().COMM_WORLD if _Remnant.comm is None else _Remnant.comm


def follow(world: World, roster: EpochLog, refusal: str) -> str:
    """Create the communicator of an epoch's members; collective over them.

    `refusal`: the reason why this process cannot use MPI, empty if it can. Returns the reason why there is no
    communicator, or ''.
    """
    if not roster.is_remnant:  # the same on all ranks
        return "MPI can serve the remaining ranks only if all others have died and none has joined"
    is_known = False
    if not refusal:
        before = everyone()
        is_known = (before.size, before.rank) == (world.size, world.rank)
        refusal = _hindrance(roster.epoch)
    assert world.store is not None
    mine = json.dumps([is_known, refusal])
    answers = exchange(world.store, world.rank, world.size, "mpi/shrink", mine, world.timeout)
    known, refusals = zip(*map(json.loads, answers), strict=True)
    if reason := next(filter(None, refusals), ""):
        return str(reason)
    if all(known):
        _Remnant.epoch = roster.epoch
        return ""
    shrinking = _Shrinking(everyone())
    shrinking.start()
    shrinking.join(_PATIENCE)
    if shrinking.is_alive():
        return f"MPI has not created a communicator of the remaining ranks within {_PATIENCE:g} s"
    if shrinking.comm is None:
        return f"MPI cannot create a communicator of the remaining ranks: {shrinking.problem}"
    if (shrinking.comm.size, shrinking.comm.rank) != (world.size, world.rank):
        return f"MPI sees {shrinking.comm.size} remaining ranks, the job {world.size}"
    _Remnant.comm, _Remnant.epoch = shrinking.comm, roster.epoch
    return ""


def _hindrance(epoch: int) -> str:
    """Return the reason why this process may not shrink its communicator for this epoch; empty if it may."""
    mpi = load_mpi()
    if epoch - _Remnant.epoch not in (0, 1):
        return "an earlier epoch has continued without MPI"
    if not hasattr(mpi.Comm, "Shrink") or mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        return "this MPI library cannot repair a communicator that has lost a rank"
    if Contexts.in_the_making:  # Open MPI 5.0.11 would crash at the next death of a rank
        return "a rank has died while MPI was making a communicator, or MPI has failed to make one"
    return ""


class _Shrinking(threading.Thread):
    """A shrink in progress. `comm`: the new communicator; None before the end, and after a failure."""

    def __init__(self, before: Any) -> None:
        super().__init__(name="mcr-shrink-mpi", daemon=True)
        self._before = before
        self.comm: Any = None
        self.problem = ""

    def run(self) -> None:
        mpi = load_mpi()
        try:
            self._before.Set_errhandler(mpi.ERRORS_RETURN)
            comm = self._before.Shrink()
            comm.Set_errhandler(mpi.ERRORS_RETURN)
            self.comm = comm
        except (mpi.Exception, NotImplementedError) as error:
            self.problem = str(error)
