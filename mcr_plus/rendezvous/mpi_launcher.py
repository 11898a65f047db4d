"""Search for the MPI launcher, and for the implementation to which it belongs."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

Flavour = Literal["openmpi", "hydra"]

_NAMES = ("mpiexec", "mpirun")
_VERSION_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class MpiLauncher:
    """An `mpiexec` of Open MPI, or Hydra (MPICH, Intel MPI and their derivatives)."""

    path: str
    flavour: Flavour
    version: str
    name: str = "MPI"

    @property
    def library(self) -> str:
        """MPI that the launcher most likely starts (`Open MPI 5.0.11`); certain only in a running job."""
        return f"{self.name} {self.version}"

    @property
    def major(self) -> int:
        """The major version."""
        return int(self.version.split(".")[0])


def mpi_flavour() -> MpiLauncher | None:
    """Return the MPI launcher that `mcr-plus run` uses; None if no supported launcher is installed.

    The interpreter's folder is searched before PATH: a wheel of MPI installs its launcher there, and mpi4py
    loads the library of that wheel.
    """
    for path in _candidates():
        if (launcher := _identify(path)) is not None:
            return launcher
    return None


def mpi_usable() -> bool:
    """Return whether ranks can be started under MPI: mpi4py and a launcher are installed."""
    return importlib.util.find_spec("mpi4py") is not None and mpi_flavour() is not None


def _candidates() -> list[str]:
    beside = [str(Path(sys.executable).parent / name) for name in _NAMES]
    on_path = [path for name in _NAMES if (path := shutil.which(name)) is not None]
    return [path for path in dict.fromkeys([*beside, *on_path]) if Path(path).is_file()]


@lru_cache(maxsize=16)
def _identify(path: str) -> MpiLauncher | None:
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(path, answer.stdout + answer.stderr)


def parse_version(path: str, text: str) -> MpiLauncher | None:
    """Parse the output of `mpiexec --version`; None for an unknown implementation."""
    flavour: Flavour
    if "Open MPI" in text or "OpenRTE" in text:
        flavour, name = "openmpi", "Open MPI"
    elif "Intel(R) MPI" in text:
        flavour, name = "hydra", "Intel MPI"
    elif "HYDRA" in text:
        flavour, name = "hydra", "MPICH"
    else:
        return None
    version = re.search(r"\d+\.\d+(?:\.\d+)*", text)
    return MpiLauncher(path, flavour, version.group() if version else "0", name)
