"""A private Slurm on this machine, started for a test and stopped after it.

    with Slurm() as slurm:
        done = slurm.srun(["-n", "2"], [sys.executable, "program.py"])

munged, slurmctld and a slurmd for every node run as children of this process, with their key, configuration
and state in a temporary folder, on ports that were free. The machine's own Slurm, if any, is neither read nor
changed. Needs root and Debian's packages in `PACKAGES`; `why_no_slurm()` returns what is missing.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from hosts import Hosts, entered

if sys.version_info >= (3, 11):
    from typing import Self
else:
    from typing_extensions import Self

PACKAGES: Final = "slurmctld slurmd slurm-client munge"
_COMMANDS: Final = ("munged", "slurmctld", "slurmd", "srun", "scancel", "squeue", "sinfo")
_DAEMONS: Final = "/usr/sbin:/sbin"  # where Debian has them; not in every user's PATH
_LIMIT_S: Final = 60.0
_JOB_S: Final = 240.0
_NAP_S: Final = 0.1
_CPUS: Final = 4  # of a node, whatever the machine has
_NAMES: Final = Path("/etc/netns")  # `ip netns exec NODE` sees NODE/hosts in it as /etc/hosts


def why_no_slurm() -> str | None:
    """Return the reason why this machine cannot run a Slurm for tests, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "slurmd starts tasks as root, on Linux"
    missing = [name for name in _COMMANDS if _found(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (make test-launchers installs them)"
    return None


class Slurm:
    """A cluster of one node, this host, or of one node on each of `hosts` (which has been entered).

    Attributes:
        nodes: the names of the nodes, equal to the names of their hosts.
        folder: the folder of the configuration and the logs.
    """

    def __init__(self, hosts: Hosts | None = None) -> None:
        self.nodes = (socket.gethostname().partition(".")[0],) if hosts is None else hosts.names
        self._addresses = ("127.0.0.1",) if hosts is None else hosts.addresses
        self._has_hosts = hosts is not None

    def __enter__(self) -> Self:
        with ExitStack() as started:
            self.folder = Path(started.enter_context(tempfile.TemporaryDirectory(prefix="mcr-slurm-")))
            self._configure(started)
            self._start_daemons(started)
            self._running = started.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._running.close()

    def srun(
        self, options: Sequence[str], command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a job to its end, from the first node; `variables` are added to its environment."""
        return self.run("srun", *options, *command, variables=variables)

    def run(
        self, name: str, *words: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands on the first node."""
        environ = {**self._environ(), **(variables or {})}
        line = self._line(name, *words)
        return subprocess.run(line, env=environ, capture_output=True, text=True, check=False, timeout=_JOB_S)

    def start(self, options: Sequence[str], command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a job, which the caller waits for; its output is dropped."""
        line = self._line("srun", *options, *command)
        return subprocess.Popen(
            line, env=self._environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def logs(self) -> str:
        """Return the last lines of the daemons' logs."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))

    def _configure(self, started: ExitStack) -> None:
        folder, (control, *ports) = self.folder, free_ports(1 + len(self.nodes))
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        nodes = "\n".join(
            f"NodeName={node} NodeAddr={address} Port={port} CPUs={_CPUS} State=UNKNOWN"
            for node, address, port in zip(self.nodes, self._addresses, ports, strict=True)
        )
        # Slurm reads this even without cgroups; a network namespace shows none, so Slurm must not look for
        # them.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                folder=folder, host=self.nodes[0], address=self._addresses[0], control=control
            )
            + f"{nodes}\nPartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        )
        if self._has_hosts:
            pairs = zip(self._addresses, self.nodes, strict=True)
            names = "".join(f"{address} {name}\n" for address, name in [("127.0.0.1", "localhost"), *pairs])
            for node in self.nodes:
                (_NAMES / node).mkdir(parents=True)
                started.callback(shutil.rmtree, _NAMES / node)
                (_NAMES / node / "hosts").write_text(names)

    def _start_daemons(self, started: ExitStack) -> None:
        files = {name: str(self.folder / f"munge.{name}") for name in ("socket", "key-file", "log-file")}
        files |= {name: str(self.folder / f"munge.{name}") for name in ("pid-file", "seed-file")}
        files["key-file"] = str(self.folder / "munge.key")
        options = [f"--{name}={path}" for name, path in files.items()]
        self._daemon(started, 0, "munged", "--foreground", "--force", *options)
        _await(Path(files["socket"]).exists, lambda: f"munged has no socket; {self.logs()}")
        self._daemon(started, 0, "slurmctld", "-D")
        for host in range(len(self.nodes)):
            self._daemon(started, host, "slurmd", "-D")
        _await(self._is_ready, lambda: f"no node is ready; {self.logs()}")
        started.callback(self._end_jobs)  # first of all: tasks are no children of the daemons

    def _daemon(self, started: ExitStack, host: int, name: str, *words: str) -> None:
        with open(self.folder / f"{name}-{self.nodes[host]}.log", "w") as log:
            process = subprocess.Popen(
                self._on(host, [_found(name) or name, *words]),
                env=self._environ(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        started.callback(_end, process)

    def _is_ready(self) -> bool:
        states = self.run("sinfo", "--noheader", "--Node", "--format=%t").stdout.split()
        return states == ["idle"] * len(self.nodes)

    def _end_jobs(self) -> None:
        self.run("scancel", "--full", "--user=root")
        _await(lambda: self.run("squeue", "--noheader").stdout == "", lambda: f"jobs go on; {self.logs()}")

    def _environ(self) -> dict[str, str]:
        """This process's environment without variables of other launchers."""
        foreign = ("SLURM_", "PMI", "OMPI_", "PRTE_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def _line(self, name: str, *words: str) -> list[str]:
        return self._on(0, [_found(name) or name, *words])

    def _on(self, host: int, words: list[str]) -> list[str]:
        return entered(self.nodes[host], words) if self._has_hosts else words


_CONFIGURATION: Final = """\
ClusterName=mcr
SlurmctldHost={host}({address})
SlurmctldPort={control}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
"""


def _found(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=_DAEMONS)


def free_ports(count: int) -> list[int]:
    """Return ports that no process listens on."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _await(is_so: Callable[[], bool], problem: Callable[[], str]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(problem())
        time.sleep(_NAP_S)


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
