"""The environment this process was started in: the only reader of environment variables in a rank.

    launch_environment()    rank, size and rendezvous, under any launcher
    torch_environment()     the same by torch's variables, if `mcr-plus run` set them beside MPI's
    agent_has_store()       whether torchrun's agent has the job's store
    config_file()           the configuration that MCR_CONFIG names
    rank_by_mpi()           rank and size by the variables of an MPI launcher only
    on_one_host()           whether the launcher's variables place all ranks on this host
    dump_folder()           the folder for dumps that MCR_DUMP names
    job_secret()            the ranks' signing key from MCR_SECRET
    msccl_library()         the GPU library that MCR_MSCCL_LIBRARY names
    error_channel()         the pipe on which `mcr-plus run` reads uncaught exceptions (MCR_JOB_ERRORS)
    whole_tracebacks()      whether MCR_TRACEBACK asks for whole tracebacks
    compiles_calls()        whether repeated calls may be compiled (MCR_FAST_CALLS)
    socket_interface()      the network interface that GLOO_SOCKET_IFNAME names
    meeting_interface()     the interface of MCR_SOCKET_IFNAME, for the job's store and heartbeats
    min_ranks()             fewest ranks with which `mcr-plus run` continues a job (MCR_MIN_RANKS)
    restarts()              number of restarts of this rank by `mcr-plus run` (MCR_RESTARTS)
    mpi4pys_library()       the MPI library that MPI4PY_LIBMPI names for mpi4py
    kernel_folders()        folders of compiled kernels (NUMBA_CACHE_DIR, XDG_CACHE_HOME)
    numba_settings()        numba's variables
    library_path()          the loader's first search folders (LD_LIBRARY_PATH)
    slurm_job()             the number of Slurm's job (SLURM_JOB_ID)
    slurm_step()            the numbers of job and step (SLURM_STEP_ID)
    default_variable(...)   a default for a library's variable that is unset

A malformed or contradictory variable raises a `LaunchError` that begins with its name.

Long because there is no other reader.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from mcr_plus.core.addresses import plain_host
from mcr_plus.errors import ConfigError, LaunchError

Launcher = Literal["torchrun", "openmpi", "mpich", "slurm", "mcr-plus", "env", "single"]

# Slurm numbers special steps (batch script, interactive shell) from here on; user steps are below.
SLURM_SPECIAL_STEPS = 0xFFFFFFF0
_SLURM_PORTS = range(20_000, 30_000)  # below the usual range of ephemeral ports
LOOPBACK = "127.0.0.1"
# Prefixes of the variables of MPI and Slurm.
_OF_RANKS = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_", "SLURM_")


@dataclass(frozen=True)
class LaunchEnvironment:
    """The rank of this process, and the rendezvous of its job.

    `master_addr` and `master_port` are None unless the launcher gave a rendezvous; with `agent_store`
    torchrun's agent already listens there. `launcher` is the source of the numbers: under
    `mcr-plus run` "mcr-plus" for its elastic agent, but the name of the MPI for its mpiexec.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: Launcher = "single"
    master_addr: str | None = None
    master_port: int | None = None
    agent_store: bool = False


@dataclass(frozen=True)
class _Variables:
    """Names of the variables in which a launcher passes rank and size."""

    rank: str
    size: str
    local_rank: str
    local_size: str


TORCH = _Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPENMPI = _Variables(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
HYDRA = _Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
HYDRA_PMIX = replace(HYDRA, rank="PMIX_RANK")


def launch_environment(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Find rank, size and rendezvous in the environment; a process that no launcher started is single.

    Recognises torchrun and env://, Open MPI, MPICH and Intel MPI (hydra), and srun. Raises
    `LaunchError` naming the variable if values are malformed or contradict each other.
    """
    env = _present(environ)
    launcher, (rank, size, local_rank, local_size) = _recognise(env)
    if launcher == "slurm":
        env = {**_slurm_rendezvous(env), **env}
    if _by_our_mpi(env):
        env = {name: value for name, value in env.items() if not name.startswith("MASTER_")}
    return LaunchEnvironment(
        rank,
        size,
        local_rank,
        local_size,
        "mcr-plus" if _started_by_us(env) and launcher in ("torchrun", "env") else launcher,
        plain_host(env["MASTER_ADDR"], "MASTER_ADDR") if "MASTER_ADDR" in env else None,
        _integer(env, "MASTER_PORT", highest=65535),
        agent_has_store(env),
    )


def agent_has_store(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether torchrun's agent, not rank 0, holds the job's store."""
    env = os.environ if environ is None else environ
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def gloo_connects_late() -> bool:
    """Return whether torch's gloo connects two ranks only at the first use of the connection."""
    return "TORCH_GLOO_LAZY_INIT" in os.environ


def ranks_keep_their_own(hosts: int, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether ranks on `hosts` hosts can outlive each other although no launcher holds their store."""
    env = os.environ if environ is None else environ
    if agent_has_store(env):  # the store is lost with its host; a launcher that restarts ranks uses it again
        return hosts > 1 and min_ranks(env) is None
    launcher = launch_environment(env).launcher
    if launcher == "openmpi":
        return env.get("OMPI_MCA_mpi_ft_enable") == "1"
    return launcher != "mpich"


def _present(environ: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables that have a value, without those that Ray workers inherit from Ray's start."""
    given = os.environ if environ is None else environ
    foreign = _OF_RANKS if given.get("RAY_RAYLET_PID") == str(os.getppid()) else ()
    return {
        key: value.strip() for key, value in given.items() if value.strip() and not key.startswith(foreign)
    }


def on_one_host(environ: Mapping[str, str] | None = None, *, ranks: int = 1) -> bool:
    """Return whether the launcher's variables place all ranks on this host; false if missing or malformed.

    `ranks`: size of the group in question. Variables of a launcher that has started fewer ranks belong to
    another job, for instance if a task of srun starts ranks itself.
    """
    env = _present(environ)
    try:
        launcher, (_, size, _, local_size) = _recognise(env)
    except LaunchError:
        return False
    variables = {
        "openmpi": OPENMPI.local_size,
        "mpich": HYDRA.local_size,
        "slurm": "SLURM_STEP_TASKS_PER_NODE",
    }
    return local_size == size >= ranks and variables.get(launcher, TORCH.local_size) in env


def torch_environment(environ: Mapping[str, str] | None = None) -> LaunchEnvironment | None:
    """Return the variables of torch's `env://` in a job for which `speaks_for_both` holds.

    A program may have changed them. None in any other job, or if one is missing.
    """
    env = os.environ if environ is None else environ
    names = (TORCH.rank, TORCH.size, "MASTER_ADDR", "MASTER_PORT")
    if not speaks_for_both(env) or not all(env.get(name) for name in names):
        return None
    return launch_environment({name: env[name] for name in names})


def speaks_for_both(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether `mcr-plus run` started this process under MPI and set torch's variables too."""
    return _by_our_mpi(os.environ if environ is None else environ)


def started_by_mpi(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether an MPI launcher started this process (Open MPI, hydra, or srun with PMI)."""
    env = _present(environ)
    return any(name in env for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"))


def rank_by_mpi(environ: Mapping[str, str] | None = None) -> tuple[int, int | None] | None:
    """Return rank and number of ranks by the variables of the MPI launcher; None without them.

    The number is None if it has no variable. Raises `LaunchError` for malformed variables.
    """
    env = _present(environ)
    for names in (OPENMPI, HYDRA, HYDRA_PMIX):
        rank = _integer(env, names.rank)
        if rank is not None:
            size = names.size if names.size in env or not _slurm_step(env) else _slurm_size(env)
            return rank, _integer(env, size, lowest=1)
    return None


def config_file() -> str | None:
    """Return the path of the configuration file that MCR_CONFIG names; None if it is unset or empty."""
    return os.environ.get("MCR_CONFIG") or None


def dump_folder() -> str | None:
    """Return the folder for Flight Recorder dumps that MCR_DUMP names; None if it is unset or empty."""
    return os.environ.get("MCR_DUMP") or None


def job_secret() -> bytes:
    """Return the text of MCR_SECRET, the key with which ranks sign their entries in the store."""
    return os.environ.get("MCR_SECRET", "").encode()


def min_ranks(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the fewest ranks with which the job continues; None if a lost rank ends it.

    Raises `LaunchError` for more than the job's ranks.
    """
    least = _integer(_present(environ), "MCR_MIN_RANKS", lowest=1)
    if least is not None and least > (size := launch_environment(environ).world_size):
        raise LaunchError(f"MCR_MIN_RANKS={least}: expected at most the number of ranks, {size}")
    return least


def restarts(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of times that this rank was restarted after a failure while the others continued."""
    return _integer(_present(environ), "MCR_RESTARTS") or 0


def mpi4pys_library() -> str | None:
    """Return the files or folders from which MPI4PY_LIBMPI makes mpi4py load MPI; None if it is unset."""
    return os.environ.get("MPI4PY_LIBMPI")


def library_path() -> list[str]:
    """Return the folders of LD_LIBRARY_PATH."""
    return os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)


def slurm_job() -> str:
    """Return the number of Slurm's job, `unknown` outside of one."""
    return os.environ.get("SLURM_JOB_ID") or "unknown"


def slurm_step() -> str:
    """Return the numbers of Slurm's job and step, as `42.0`; `unknown` for a missing number."""
    return f"{slurm_job()}.{os.environ.get('SLURM_STEP_ID') or 'unknown'}"


def masquerade_name() -> str | None:
    """Return the second name that MCR_MASQUERADE gives the torch backend; None if it is unset.

    Raises `ConfigError` for other names than `gloo`.
    """
    name = os.environ.get("MCR_MASQUERADE") or None
    if name not in (None, "gloo"):
        raise ConfigError(f"MCR_MASQUERADE={name!r}: expected gloo, the only name that programs ask for")
    return name


def autoloads() -> bool:
    """Return whether `import torch` runs the entry points of its backends."""
    return os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"


def error_channel() -> str | None:
    """Return the pipe on which `mcr-plus run` reads uncaught exceptions; None in other processes.

    MCR_JOB_ERRORS is `pid:path` and applies only to the process with that pid, not to its children.
    """
    pid, _, path = os.environ.get("MCR_JOB_ERRORS", "").partition(":")
    return path if pid == str(os.getpid()) else None


def whole_tracebacks() -> bool:
    """Return whether MCR_TRACEBACK=1 requests the tracebacks of all ranks, not one message for each error.

    Raises `LaunchError` for other values than 0 and 1.
    """
    return _switch("MCR_TRACEBACK", "0", "1 for the tracebacks of all ranks, or 0")


def compiles_calls() -> bool:
    """Return False if MCR_FAST_CALLS=0 leaves repeated calls in Python.

    Raises `LaunchError` for other values than 0 and 1.
    """
    return _switch("MCR_FAST_CALLS", "1", "0 for calls in Python alone, or 1")


def _switch(name: str, default: str, expected: str) -> bool:
    value = os.environ.get(name) or default
    if value not in ("0", "1"):
        raise LaunchError(f"{name}={value!r}: expected {expected}")
    return value == "1"


def msccl_library() -> str | None:
    """Return the path of the GPU library that MCR_MSCCL_LIBRARY names; None if it is unset or empty."""
    return os.environ.get("MCR_MSCCL_LIBRARY") or None


def host_name() -> str:
    """Return this host's name; ranks with equal names are assumed to share memory and loopback."""
    return socket.gethostname()


def cores() -> int:
    """Return the number of processor cores that this process may run on."""
    return len(usable_cores())


def usable_cores() -> set[int]:
    """Return the numbers of the processor cores that this process may run on."""
    return os.sched_getaffinity(0)


def quota_cores(root: Path = Path("/")) -> float:
    """Return the average number of cores that this process's cgroups allow; infinity without a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    limits = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        folder = Path(path.lstrip("/"))
        # A container may see its own cgroup as the root.
        limits += [_quota(mount / group) for group in (folder, *folder.parents)]
    return min(limits)


def _quota(folder: Path) -> float:
    """Return the limit of one cgroup, of version 2 or 1."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return math.inf
    try:
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (ValueError, ZeroDivisionError):  # `max`: no limit
        return math.inf


def socket_interface(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the network interface that GLOO_SOCKET_IFNAME names, the first of several; None if unset."""
    names = (os.environ if environ is None else environ).get("GLOO_SOCKET_IFNAME", "")
    return names.split(",")[0].strip() or None


def meeting_interface() -> str | None:
    """Return the interface on which ranks meet: MCR_SOCKET_IFNAME, else `socket_interface`."""
    return os.environ.get("MCR_SOCKET_IFNAME", "").strip() or socket_interface()


def nodes_for_torchrun() -> str | None:
    """Return PET_NNODES, which Kubeflow Trainer sets for torchrun; None for one node, and if unset."""
    nodes = os.environ.get("PET_NNODES", "").strip()
    return None if nodes in ("", "1", "1:1") else nodes


def default_variable(name: str, value: str) -> None:
    """Set a variable for a library to read, unless the user has set it."""
    os.environ.setdefault(name, value)


def _started_by_us(env: Mapping[str, str]) -> bool:
    name = env.get("MCR_LAUNCHER", "mcr-plus")
    if name != "mcr-plus":
        raise LaunchError(f"MCR_LAUNCHER={name!r}: expected mcr-plus, which `mcr-plus run` sets")
    return "MCR_LAUNCHER" in env


def _recognise(env: Mapping[str, str]) -> tuple[Launcher, tuple[int, int, int, int]]:
    """Return the launcher and its numbers, from the most explicit variables to the most inherited ones.

    RANK and WORLD_SIZE come first: they have no other purpose, and mpirun may start one torchrun per host.
    Slurm's come last: an mpirun inside an allocation starts its helpers by srun, and ranks then inherit the
    numbers of the helper.
    """
    if not _by_our_mpi(env) and (TORCH.rank in env or TORCH.size in env):
        return "torchrun" if "TORCHELASTIC_RUN_ID" in env else "env", _ranks(env, TORCH)
    if OPENMPI.rank in env or OPENMPI.size in env:
        return "openmpi", _ranks(env, OPENMPI)
    if _by_hydra(env):
        return "mpich", _ranks(env, HYDRA if HYDRA.rank in env else HYDRA_PMIX)
    if _slurm_step(env):
        return "slurm", _slurm_ranks(env)
    return "single", (0, 1, 0, 1)


def _by_our_mpi(env: Mapping[str, str]) -> bool:
    # `mcr-plus run` sets torch's variables and an address for the ranks of its mpirun too, but only for
    # torch.distributed, whose store may already use the address.
    return "MCR_LAUNCHER" in env and started_by_mpi(env) and "TORCHELASTIC_RUN_ID" not in env


def _by_hydra(env: Mapping[str, str]) -> bool:
    # srun --mpi=pmi2 or pmix sets PMI_RANK or PMIX_RANK as well, but never hydra's local numbers.
    named = HYDRA.rank in env or (HYDRA_PMIX.rank in env and HYDRA.size in env)
    return named and (HYDRA.local_rank in env or not _slurm_step(env))


def _slurm_step(env: Mapping[str, str]) -> bool:
    # A batch script has SLURM_PROCID and SLURM_NTASKS too, yet it is one process and no rank.
    step = _integer(env, "SLURM_STEP_ID", highest=0xFFFFFFFF)
    return step is not None and step < SLURM_SPECIAL_STEPS


def _slurm_ranks(env: Mapping[str, str]) -> tuple[int, int, int, int]:
    variables = dict(env)
    if "SLURM_STEP_TASKS_PER_NODE" in env:
        variables["SLURM_NTASKS_PER_NODE"] = str(_tasks_on_node(env))
    names = _Variables("SLURM_PROCID", _slurm_size(env), "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
    return _ranks(variables, names)


def _slurm_size(env: Mapping[str, str]) -> str:
    # SLURM_NTASKS is the allocation's when the step was started with fewer tasks than that.
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"


def _slurm_rendezvous(env: Mapping[str, str]) -> dict[str, str]:
    """Return the rendezvous of a job step: the host of rank 0, and a port derived from the step.

    Slurm assigns no port to a step; steps that share a host most likely get different ones.
    """
    nodes = env.get("SLURM_STEP_NODELIST", "")
    if not nodes or "SLURM_JOB_ID" not in env:
        return {}
    several = env.get("SLURM_STEP_NUM_NODES", "1") != "1"
    number = (_integer(env, "SLURM_JOB_ID") or 0) * 31 + (_integer(env, "SLURM_STEP_ID") or 0)
    port = _SLURM_PORTS.start + number % len(_SLURM_PORTS)
    return {"MASTER_ADDR": _first_host(nodes) if several else LOOPBACK, "MASTER_PORT": str(port)}


def _first_host(nodes: str) -> str:
    """Return the first host of a list: `gpu03-ib` of Slurm's `gpu[03-05,09]-ib,cpu1`."""
    match = re.match(r"([^,\[\]]*)(?:\[([^,\[\]-]+)[^\]]*\])?([^,\[\]]*)", nodes)
    assert match is not None, "every part of the pattern may be empty"
    host = "".join(part or "" for part in match.groups())
    if not host:
        raise LaunchError(f"SLURM_STEP_NODELIST={nodes!r}: expected host names such as gpu[03-05],gpu09")
    return host


def _tasks_on_node(env: Mapping[str, str]) -> int:
    """Read Slurm's `2(x3),1`: two tasks on each of three nodes, then one."""
    text = env["SLURM_STEP_TASKS_PER_NODE"]
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", item, re.ASCII)
        if match is None:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={text!r}: expected counts such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _integer(env, "SLURM_NODEID") or 0
    if node >= len(counts):
        raise LaunchError(f"SLURM_NODEID={node}: SLURM_STEP_TASKS_PER_NODE={text!r} has {len(counts)} nodes")
    return counts[node]


def _ranks(env: Mapping[str, str], names: _Variables) -> tuple[int, int, int, int]:
    """Read and check rank, size, local rank and local size; without local numbers the job has one host."""
    rank = _required(env, names.rank, names.size)
    size = _required(env, names.size, names.rank, lowest=1)
    _check_below(names.rank, rank, names.size, size)
    local_rank = _integer(env, names.local_rank)
    local_size = _integer(env, names.local_size, lowest=1)
    local_size = size if local_size is None else local_size
    local_rank = rank % local_size if local_rank is None else local_rank
    _check_below(names.local_rank, local_rank, names.local_size, local_size)
    if local_size > size:
        raise LaunchError(f"{names.local_size}={local_size}: expected at most {names.size}={size}")
    return rank, size, local_rank, local_size


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise LaunchError(f"{name}={value}: expected a number below {limit_name}={limit}")


def _required(env: Mapping[str, str], name: str, other: str, lowest: int = 0) -> int:
    value = _integer(env, name, lowest)
    if value is None:
        raise LaunchError(f"{name} is not set, but {other} is; set both or neither")
    return value


def _integer(env: Mapping[str, str], name: str, lowest: int = 0, highest: int = 10**9) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII) or not lowest <= int(text) <= highest:
        raise LaunchError(f"{name}={text!r}: expected a whole number from {lowest} to {highest}")
    return int(text)


@cache
def package_version(name: str = "mcr_plus") -> str:
    """Return the version of a package; `unknown` if it runs from its sources without installation."""
    from importlib.metadata import PackageNotFoundError, version  # takes as long as the rest of this module

    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def kernel_folders() -> tuple[str, Path]:
    """Return the folder that NUMBA_CACHE_DIR names, or '', and the user's folder for caches."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # Path's fails without a home
    return os.environ.get("NUMBA_CACHE_DIR", ""), Path(user)


def numba_settings() -> list[str]:
    """Return the variables that may change what numba compiles."""
    return sorted(
        f"{name}={text}"
        for name, text in os.environ.items()
        if name.startswith("NUMBA_") and name != "NUMBA_CACHE_DIR"
    )
