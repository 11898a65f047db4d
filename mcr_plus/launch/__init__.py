"""Start ranks on one host, under MPI, torchrun's elastic agent or a supervisor of our own."""

from __future__ import annotations

from mcr_plus.launch.commands import Supervised
from mcr_plus.launch.job import Outcome, Via, run_job
from mcr_plus.launch.run import launch
from mcr_plus.rendezvous.mpi_launcher import MpiLauncher, mpi_flavour, mpi_usable

__all__ = ["MpiLauncher", "Outcome", "Supervised", "Via", "launch", "mpi_flavour", "mpi_usable", "run_job"]
