"""MPI, through mpi4py and the MPI library that mpi4py finds.

Collectives are started as nonblocking calls and tested, so that every wait has a deadline and also progresses
other libraries. Operations bound once with `mcr.persistent` are MPI-4 persistent requests, which cost no more
than a blocking call. Only buffer methods are used, never mpi4py's pickling methods.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import sys
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.backends.base import NATIVE, Availability, Backend, Channel, Preference, Support
from mcr_plus.core.environment import rank_by_mpi, started_by_mpi
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import REDUCING
from mcr_plus.core.message import Signature
from mcr_plus.errors import BackendError, BackendUnavailable, LaunchError
from mcr_plus.rendezvous.mpi_library import REMEDY, load_mpi, missing_library
from mcr_plus.rendezvous.store import exchange
from mcr_plus.rendezvous.world import World

if TYPE_CHECKING:
    from mcr_plus.backends.mpi.p2p import MatchingQueue

_MAX_COUNT: Final = 2**31 - 1
_HOW_TO_START: Final = "start the job with mcr-plus run or mpirun, or name no mpi in `backends`"
_BREAKING: Final = ("TRUNCATE", "IN_STATUS", "INTERN", "UNKNOWN")  # error classes after which MPI is unusable

_log = logging.getLogger("mcr_plus")


class MpiBackend(Backend):
    """MPI on the communicator of all ranks that the launcher started, or of the surviving ranks."""

    name = "mpi"
    on_stream = False
    has_algorithms = False
    host_driven = True
    keeps_apart = True
    stops_as_whole = True
    shares_connections = True
    spins = 400
    preference = Preference(cpu=2, between_hosts=2, cuda=2)
    off = ""  # the reason why MPI is unusable in this process

    def __init__(self, world: World) -> None:  # noqa: ARG002 - a Backend
        from mcr_plus.backends.mpi.shrinking import everyone

        self._mpi = load_mpi()
        self._comm = everyone()
        self._probe, self._own_probe = _probes()
        self._busy: set[MatchingQueue] = set()  # queues with waiting receives

    @classmethod
    def availability(cls) -> Availability:
        """Report MPI as available if mpi4py and an MPI library are."""
        if reason := missing_library():
            return Availability(False, reason=reason, remedy=REMEDY)
        import mpi4py

        return Availability(True, f"mpi4py {mpi4py.__version__}")

    @classmethod
    def library_version(cls) -> str:
        """Version of the MPI library in use: `Open MPI 5.0.11`, `MPICH 5.0.2`."""
        text = str(load_mpi().Get_library_version())
        found = re.search(r"(Open MPI|MPICH|Intel\(R\) MPI Library|MVAPICH2?)\D*([\d.]+)", text)
        if found is None:
            return text.split("\n")[0].strip()[:60]
        return f"{found[1].replace('(R)', '').removesuffix(' Library')} {found[2]}"

    @classmethod
    def unavailable_in(cls, world: World) -> str:
        """See `Backend`. The job must have been started by an MPI launcher, with the same rank numbers."""
        if world.roster is not None and world.roster.epoch > 0:
            from mcr_plus.backends.mpi.shrinking import follow

            refusal = cls.off or cls._not_started(None) or cls._unloadable()
            refusal = follow(world, world.roster, refusal)
            cls.off = cls.off or refusal
            return refusal
        refusal = cls.off or cls._not_started(world)
        if world.store is not None:
            # Checked before any rank initialises MPI, which waits for all processes that the launcher has
            # started.
            place = (world.store, world.rank, world.size)
            refusals = exchange(*place, "mpi/started", refusal, world.timeout)
            refusal = next(filter(None, refusals), "")
        refusal = refusal or cls._unloadable()
        if refusal:
            return refusal
        from mcr_plus.backends.mpi.shrinking import everyone

        comm = everyone()
        if (comm.size, comm.rank) == (world.size, world.rank):
            return ""
        return (
            f"MPI sees rank {comm.rank} of {comm.size} where the job has rank {world.rank} of {world.size}; "
            f"{_HOW_TO_START}"
        )

    @staticmethod
    def _not_started(world: World | None) -> str:
        """Return the reason why this process is not rank `world.rank` of an MPI launcher; empty if it is."""
        if "mpi4py.MPI" in sys.modules:
            return ""
        # Without a launcher, initialising MPI takes a second and yields a world of one rank.
        if not started_by_mpi():
            return f"no MPI launcher started this job; {_HOW_TO_START}"
        try:
            place = rank_by_mpi()
        except LaunchError as error:
            return str(error)
        # Child processes of a rank inherit these variables; so do torchrun or Ray workers under srun or
        # mpirun.
        if world is None or place in (None, (world.rank, world.size), (world.rank, None)):
            return ""
        assert place is not None
        rank, size = place
        of = "" if size is None else f" of {size}"
        return (
            f"an MPI launcher started rank {rank}{of} here, where the job has rank {world.rank} of "
            f"{world.size}; {_HOW_TO_START}"
        )

    @staticmethod
    def _unloadable() -> str:
        """Return the reason why MPI cannot be initialised here; empty if it can be, or already is."""
        try:
            load_mpi()
        except BackendUnavailable as error:
            return str(error)
        return ""

    @classmethod
    def supports(cls, signature: Signature) -> Support:
        """Support all operations on up to 2³¹ − 1 elements."""
        if signature.algorithm is not None:
            return Support("no", f"algorithm '{signature.algorithm}'; mpi has none to choose from")
        if signature.device != "cpu":
            return Support("emulated", "staged through host memory")
        if signature.dtype is not None and (signature.nbytes or 0) > _MAX_COUNT * signature.dtype.itemsize:
            return Support("no", f"more than {_MAX_COUNT} elements in one MPI call")
        if signature.kind not in REDUCING:
            return NATIVE
        from mcr_plus.backends.mpi.datatypes import own_reduction

        if how := own_reduction(signature.reduce_op, signature.dtype):
            return Support("emulated", f"an MPI_Op of our own that {how} (compiled by numba)")
        if signature.reduce_op == "AVG":
            return Support("emulated", "SUM, then divided by the number of ranks")
        return NATIVE

    def open(self, group: Group) -> Channel:
        """See `Backend.open`."""
        if self.off:
            raise BackendUnavailable(f"backend mpi: {self.off}")
        from mcr_plus.backends.mpi.channel import MpiChannel  # imported here: most launchers start no MPI
        from mcr_plus.backends.mpi.contexts import Contexts

        mpi = self._mpi
        try:
            everyone = self._comm.Get_group()
            members = everyone.Incl(list(group.ranks))
            # Separate communicators for collectives and messages, so that a user's tag never matches internal
            # traffic.
            comm = self._comm.Create_group(members, 0)
            members.Free()
        except mpi.Exception as error:
            raise BackendUnavailable(
                f"backend mpi: no communicator for group '{group.name}': {error}"
            ) from error
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        messages, problem, room = None, "another rank has none left", Contexts.room()
        try:
            messages = comm.Dup()
            messages.Set_errhandler(mpi.ERRORS_RETURN)
        except mpi.Exception as error:
            problem, room = str(error), -1
        agreed = array("q", [room])
        comm.Allreduce(mpi.IN_PLACE, [agreed, mpi.INT64_T], mpi.MIN)
        if agreed[0] < 0:
            for each in (messages, comm):
                if each is not None:
                    each.Free()
            raise BackendUnavailable(f"backend mpi: no communicator for group '{group.name}': {problem}")
        return MpiChannel(mpi, comm, messages, group, self._busy, agreed[0], lambda: bool(MpiBackend.off))

    def progress(self) -> None:
        """Probe once, which lets the library advance every request."""
        try:
            self._probe()
        except (
            self._mpi.Exception
        ):  # a rank has died: each operation itself detects whether it depends on that rank
            self._probe = self._own_probe
        if self._busy:
            for queue in tuple(self._busy):
                queue.progress()

    @classmethod
    def breaks(cls, error: BaseException) -> str:
        """See `Backend`. Truncations and internal errors make MPI unusable.

        After a truncation, Open MPI's nonblocking collectives may have written past a buffer, or may free
        memory twice in a later call, even in another group.
        """
        mpi = load_mpi()
        cause: Any = error.__cause__ if isinstance(error, BackendError) else error
        if not isinstance(cause, mpi.Exception):
            return ""
        if cause.Get_error_class() in [getattr(mpi, f"ERR_{name}") for name in _BREAKING]:
            cls.off = f"MPI is not used any more in this process, after an error inside it: {cause}"
        return cls.off

    def thread_restriction(self) -> str:
        """See `Backend`."""
        if self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE:
            return ""
        return f"{self.library_version()} was initialised without MPI_THREAD_MULTIPLE"

    def close(self, clean: bool) -> None:
        """See `Backend.close`. MPI can be finalised only once, so that happens at the end of the process."""

    def finalize(self) -> None:
        """See `Backend`."""
        self.end_library()

    @classmethod
    def switched_off(cls, reason: str) -> None:
        """See `Backend`."""
        cls.off = cls.off or reason

    def leave_launcher(self) -> None:
        """See `Backend`."""
        self.leave_unfinalized()

    @staticmethod
    def leave_unfinalized() -> None:
        """Sign off from Open MPI's launcher, which kills all ranks when one exits without doing so.

        If the program loaded MPI before this package, mpi4py finalises it, which needs PMIx.
        """
        import mpi4py

        if mpi4py.rc.finalize is not False:
            return
        with contextlib.suppress(OSError, AttributeError, StopIteration):
            mapped = Path("/proc/self/maps").read_text().splitlines()
            library = next(line.split()[-1] for line in mapped if "/libpmix" in line)
            ctypes.CDLL(library).PMIx_Finalize(None, ctypes.c_size_t(0))

    @staticmethod
    def end_library() -> None:
        """Finalise MPI, which waits for all ranks: all must call this at the end of their processes."""
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is None:  # MPI could not be loaded
            return
        import mpi4py

        off = MpiBackend.off
        if not off and not mpi4py.rc.finalize and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()


@cache
def _probes() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return probes that progress the library, on a communicator of all ranks and on one of this rank alone.

    MPICH makes no progress in a probe of a communicator of one rank.
    """
    mpi = load_mpi()
    return mpi.COMM_WORLD.Dup().Iprobe, mpi.COMM_SELF.Dup().Iprobe
