"""Command lines and environments that start ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mcr_plus.core.environment import LOOPBACK
from mcr_plus.launch.scratch import JOB_VARIABLE, Scratch
from mcr_plus.rendezvous.mpi_launcher import MpiLauncher

_WRAPPER = Path(__file__).with_name("wrapper.py")
_PROGRAM = Path(__file__).with_name("uncaught.py")
_LOOPBACK_SETTINGS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "UCX_TLS": "self,sm",  # MPICH: UCX's TCP transport listens even if it is unused
    "FI_TCP_IFACE": "lo",
    "I_MPI_FABRICS": "shm",
}
_LOOPBACK_ON_GPU = {"UCX_TLS": "self,sm,cuda"}
# Variables that identify a rank. Variables of a surrounding job must not leak into the started job.
_OF_ANOTHER_JOB = re.compile(
    r"(RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|GROUP_WORLD_SIZE|MASTER_(ADDR|PORT)|MPI_LOCAL\w+)$"
    r"|OMPI_COMM_|OMPI_UNIVERSE|PMIX_|PMI_|PMI2_|PRTE_(?!MCA_)|TORCHELASTIC_|HYDRA_|MCR_JOB|MCR_LAUNCHER"
    r"|MCR_MIN_RANKS$|MCR_RESTARTS$"
)


@dataclass(frozen=True, slots=True)
class Supervised:
    """A way to start ranks: failed ranks are restarted, or the job continues without them.

    Attributes:
        min_ranks: the smallest number of ranks with which the job continues.
        restarts: the number of restarts in the whole job.
    """

    min_ranks: int
    restarts: int = 0


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def mpi_command(launcher: MpiLauncher, command: Sequence[str], ranks: int) -> list[str]:
    """Return the command that starts `ranks` ranks of `command` under MPI on this host."""
    options = _openmpi_options(launcher, ranks) if launcher.flavour == "openmpi" else _hydra_options()
    return [launcher.path, *options, "-n", str(ranks), *_wrapped(_reporting(command, with_mpi=True))]


def torch_command(scratch: Scratch, command: Sequence[str], ranks: int) -> list[str]:
    """Return the command that starts `ranks` ranks of `command` under torchrun's elastic agent."""
    agent = [sys.executable, "-m", "mcr_plus.launch.agent", str(ranks), str(scratch.root)]
    return [*agent, *_wrapped(_reporting(command))]


def supervisor_command(scratch: Scratch, command: Sequence[str], ranks: int, how: Supervised) -> list[str]:
    """Return the command that starts `ranks` ranks of `command` under our own supervisor."""
    numbers = map(str, (ranks, how.min_ranks, how.restarts))
    supervisor = [sys.executable, "-m", "mcr_plus.launch.supervisor", *numbers, str(scratch.root)]
    return [*supervisor, *_wrapped(_reporting(command))]


def environment(
    base: Mapping[str, str],
    scratch: Scratch,
    ranks: int,
    *,
    config: Path | None,
    terminal: str | None,
    port: int | None = None,
    supervised: Supervised | None = None,
) -> dict[str, str]:
    """Return a job's environment: `base`, defaults for variables missing there, and the job's settings.

    `port`: the port of torch.distributed's store, see `reserved_port`.
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores() // ranks)),
        "PYTHONUNBUFFERED": "1",
        "I_MPI_PIN": "0",  # Intel MPI gives rank 0 of every job the first cores; Open MPI: --bind-to none
        **_LOOPBACK_SETTINGS,
        **(_LOOPBACK_ON_GPU if Path("/dev/nvidiactl").exists() else {}),
    }
    inherited = {name: value for name, value in base.items() if not _OF_ANOTHER_JOB.match(name)}
    settings = _job_settings(scratch, config, terminal, port)
    if supervised is not None:
        # The secret belongs to the job. Otherwise rank 0 would make a secret, but the process of rank 0 may
        # be replaced.
        secret = inherited.get("MCR_SECRET") or secrets.token_hex(32)
        settings |= {"MCR_MIN_RANKS": str(supervised.min_ranks), "MCR_SECRET": secret}
    return {**defaults, **inherited, **settings}


def _job_settings(
    scratch: Scratch, config: Path | None, terminal: str | None, port: int | None
) -> dict[str, str]:
    settings = {JOB_VARIABLE: scratch.name, "MCR_LAUNCHER": "mcr-plus", "MCR_JOB_FOLDER": str(scratch.root)}
    if port is not None:  # port of torch.distributed under mpiexec; the agent sets another
        settings |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    for base in ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base"):
        settings[base] = str(scratch.root)
    for part in ("btl_sm", "btl_vader", "osc_sm", "osc_rdma"):
        settings[f"OMPI_MCA_{part}_backing_directory"] = str(scratch.shm)
    for parameter in ("PRTE_MCA_odls_base_sigkill_timeout", "OMPI_MCA_odls_base_sigkill_timeout"):
        settings[parameter] = "3"  # seconds; the default, 1, is too short to report an exit under load
    if config is not None:
        settings["MCR_CONFIG"] = str(config.resolve())
    if terminal is not None:
        settings["MCR_JOB_TERMINAL"] = terminal
    return settings


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port of this host: while the context is open, the system assigns it to no other process.

    Rank 0 can still listen on the port. Both its socket and the socket opened here have SO_REUSEADDR, and the
    socket opened here does not listen, so they may share the port.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        yield int(holder.getsockname()[1])


def _openmpi_options(launcher: MpiLauncher, ranks: int) -> list[str]:
    shared_memory = "sm" if launcher.major >= 5 else "vader"
    options = ["--oversubscribe", "--bind-to", "none"]
    options += ["--mca", "pml", "ob1", "--mca", "btl", f"self,{shared_memory}"]
    if ranks > cores():
        options += ["--mca", "mpi_yield_when_idle", "1"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    return options


def _hydra_options() -> list[str]:
    return ["-launcher", "fork", "-iface", "lo", "-localhost", "127.0.0.1"]


def dying_with(parent: int, command: Sequence[str]) -> list[str]:
    """Return `command`, wrapped so that the kernel sends it SIGTERM when its parent process `parent` dies."""
    return [*_wrapped(["--launcher", str(parent)]), *command]


def _wrapped(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-I", "-S", str(_WRAPPER), *command]


def _reporting(command: Sequence[str], *, with_mpi: bool = False) -> list[str]:
    """Run a Python program so that its uncaught exceptions are reported, if possible.

    With MPI, the program runs as with `python -m mpi4py`, which calls MPI_Abort after an uncaught exception.
    Otherwise the rank and its peers would wait for each other in MPI_Finalize.
    """
    words = list(command)
    is_program = words[:1] == [sys.executable] and len(words) > 1
    if not is_program or (words[1].startswith("-") and words[1] not in ("-m", "-c")):
        return words
    has_mpi = with_mpi and importlib.util.find_spec("mpi4py") is not None
    if words[1] == "-c" and not has_mpi:
        return words
    return [words[0], str(_PROGRAM), "mpi4py" if has_mpi else "python", *words[1:]]
