"""The MPI library of this process, loaded and initialised through mpi4py."""

from __future__ import annotations

import importlib.util
import logging
import os
import site
import sys
import time
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Final

from mcr_plus.core.environment import (
    cores,
    default_variable,
    launch_environment,
    library_path,
    mpi4pys_library,
)
from mcr_plus.errors import BackendUnavailable

_log = logging.getLogger("mcr_plus")
MISSING: Final = "mpi4py is not installed"
REMEDY: Final = (
    "pip install 'mcr_plus[mpi]' (Open MPI), 'mcr_plus[mpich]' or 'mcr_plus[impi]' (Intel MPI) brings mpi4py "
    "and a library"
)
_YIELD_STRATEGY: Final = "OMPI_MCA_threads_pthreads_yield_strategy"  # of Open MPI 5
_UNTIL_READ: Final = 0.5  # s; mpiexec loses output that a rank has written just before it is killed


@cache
def load_mpi() -> Any:
    """Return `mpi4py.MPI`, initialised; the backend `mpi` finalises it, not mpi4py.

    MPI_Finalize needs all ranks. mpi4py would also call it after a failure, and hang, so its own finalization
    is disabled, unless the program imported mpi4py.MPI before.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise BackendUnavailable(f"backend mpi: {MISSING}; {REMEDY}")
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.finalize = False
        _warn_of_little_memory()
        _have_idle_ranks_sleep()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailable(
            f"backend mpi: no MPI library could be loaded ({error}); {REMEDY}"
        ) from error
    return MPI


def missing_library() -> str:
    """Return why mpi4py or its MPI library is missing, checked without loading it; empty if both exist.

    Searches where mpi4py does: the library that mpi4py was linked with, then only MPI4PY_LIBMPI if it is set,
    then the environments of packages, and the loader's folders.
    """
    if "mpi4py.MPI" in sys.modules:
        return ""
    if importlib.util.find_spec("mpi4py") is None:
        return MISSING
    import mpi4py

    if any(Path(mpi4py.__file__).with_name(f"MPI{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return ""  # built for one library, whose place it knows
    if (named := mpi4pys_library()) is not None:
        places = (os.path.expanduser(os.path.expandvars(each)) for each in named.split(os.pathsep))
        found = any(Path(each).is_file() or os.sep not in each or _has_library(each) for each in places)
        unset = "without it, mpi4py takes that of the environment"
        return "" if found else f"MPI4PY_LIBMPI names no MPI library: {named} ({unset})"
    users = [site.getuserbase()] if site.ENABLE_USER_SITE else []
    prefixes = [f"{prefix}/lib" for prefix in (sys.prefix, *site.PREFIXES, *users)]
    if any(map(_has_library, filter(None, [*prefixes, *library_path()]))):
        return ""
    import ctypes.util

    return "" if ctypes.util.find_library("mpi") else "mpi4py is installed, but no MPI library"


def _has_library(folder: str) -> bool:
    return any(Path(folder).glob("libmpi.so*"))


def _have_idle_ranks_sleep() -> None:
    """Make polls of Open MPI sleep for a moment, instead of yielding, if there are more ranks than cores.

    Since Linux 6.18, ranks that yield all the time can starve others for many seconds (decision 16).
    """
    place = launch_environment()
    if place.launcher in ("openmpi", "slurm") and place.local_size > cores():
        default_variable(_YIELD_STRATEGY, "nanosleep")


def _warn_of_little_memory() -> None:
    """Warn before MPI_Init that it may end in a SIGBUS under MPICH's mpiexec; Open MPI reports it itself.

    This is not an error, because ranks of a host may see different values: some may have allocated their
    memory already. Every rank warns, because the first to be killed ends the others, which may not have
    arrived here.
    """
    place = launch_environment()
    if place.launcher == "mpich":
        from mcr_plus.rendezvous.shared_memory import MPICH_RANK, SHARED_MEMORY, lacking_shared_memory

        user = f"MPICH with {place.local_size} ranks on this host"
        if problem := lacking_shared_memory(SHARED_MEMORY, place.local_size * MPICH_RANK, user):
            _log.warning("%s, or MPI may end the ranks without a message", problem)
            time.sleep(_UNTIL_READ)
