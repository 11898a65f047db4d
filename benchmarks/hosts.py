"""Several "hosts" on one machine: network namespaces with a name, an address and an interface of their own.

`TwoHosts` (two_hosts.py) joins two of them by a link, `Racks` (racks.py) many by switches. Ranks are started
by Open MPI, or as processes with the variables that torchrun sets. Needs root and iproute2.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from mcr_plus.rendezvous.mpi_launcher import mpi_flavour

if sys.version_info >= (3, 11):
    from typing import Self
else:
    from typing_extensions import Self

_PORT: Final = 29500  # of the ranks' store; each network namespace has ports of its own
_NEW_NETWORK: Final = 0x40000000  # CLONE_NEWNET and CLONE_NEWUTS of Linux, which os has from Python 3.12 on
_NEW_NAME: Final = 0x04000000


def why_not(*, mpi: bool = True) -> str | None:
    """What keeps this machine from having such hosts; None if nothing does. `mpi`: Open MPI is needed."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [name for name in ("ip", "tc", "unshare", "taskset") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    launcher = mpi_flavour()
    if mpi and (launcher is None or launcher.flavour != "openmpi"):
        return "ranks are started in the namespaces by Open MPI's mpirun, which is not here"
    name = f"mcr-probe-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"ip netns add: {tried.stderr.strip()}"
    ip("netns", "delete", name)
    return None


def need_hosts(*, mpi: bool = True) -> None:
    """Ends the program where this machine cannot have several hosts."""
    if (reason := why_not(mpi=mpi)) is not None:
        raise SystemExit(f"skipped: {reason}")


class Hosts(ABC):
    """Network namespaces, which a subclass joins in `connect`.

    `names`, `links`, `addresses`: of each host its namespace, its interface and its IPv4 address. `network`:
    the addresses of all, as 10.77.0.0/24. `others`: further namespaces that belong to the network.
    """

    def __init__(
        self, names: Sequence[str], links: Sequence[str], addresses: Sequence[str], network: str
    ) -> None:
        self.names, self.links, self.addresses = tuple(names), tuple(links), tuple(addresses)
        self.network = network
        self.others: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="mcr-hosts-")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or they would stay
        try:
            for name in (*self.others, *self.names):
                ip("netns", "add", name)
                inside(name, "ip", "link", "set", "lo", "up")
            self.connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for name in (*self.names, *self.others):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        self._folder.cleanup()

    @abstractmethod
    def connect(self) -> None:
        """Make the interfaces of the hosts and the links between them."""

    def mpirun(
        self,
        command: Sequence[str],
        *,
        per_host: int = 1,
        ranks: int | None = None,
        check: bool = True,
        yields: bool = True,
        **options: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """Run `command` as `per_host` ranks on each host; as `ranks` if given, the last host having the rest.

        `yields`: polls of Open MPI that find nothing yield the core, which beside other work costs a time
        slice each since Linux 6.18 (decision 41).
        With `check` raises `CalledProcessError` if it fails.
        """
        launcher = mpi_flavour()
        assert launcher is not None
        words = [
            launcher.path, "--allow-run-as-root", "-n", str(ranks or len(self.names) * per_host),
            "--host", ",".join(f"{address}:{per_host}" for address in self.addresses),
            "--bind-to", "none", "--prtemca", "plm_ssh_agent", str(self._agent()),
            "--prtemca", "prte_if_include", self.network, "--mca", "btl_tcp_if_include", self.network,
            "--mca", "btl", "tcp,self" if per_host == 1 else "sm,tcp,self", "--mca", "pml", "ob1",
            # A rank that spins keeps its core from the kernel's network work.
            "--mca", "mpi_yield_when_idle", str(int(yields)), str(self._rank()), *command,
        ]  # fmt: skip
        return subprocess.run(entered(self.names[0], words), check=check, **options)

    def torchrun(self, command: Sequence[str], *, per_host: int = 1, timeout: float | None = None) -> None:
        """Run `command` as `per_host` ranks on each host, with the variables that torchrun sets.

        Raises `SystemExit` if a rank fails or `timeout` (seconds) has passed; the other ranks are ended then.
        """
        ends = None if timeout is None else time.monotonic() + timeout
        started: list[subprocess.Popen[Any]] = []
        try:
            started.extend(self.start(command, per_host=per_host))
            while any(process.poll() is None for process in started):
                failed = [rank for rank, process in enumerate(started) if process.poll()]
                if failed:
                    raise SystemExit(f"rank {failed[0]} exited with {started[failed[0]].returncode}")
                if ends is not None and time.monotonic() > ends:
                    raise SystemExit(f"still running after {timeout:g} s")
                time.sleep(0.02)
            failed = [rank for rank, process in enumerate(started) if process.returncode]
            if failed:
                raise SystemExit(f"rank {failed[0]} exited with {started[failed[0]].returncode}")
        finally:
            for process in started:
                if process.poll() is None:
                    process.terminate()
            for process in started:
                process.wait()

    def start(
        self, command: Sequence[str], *, per_host: int = 1, **options: Any
    ) -> Iterator[subprocess.Popen[Any]]:
        """Start `command` as `per_host` ranks on each host, with the variables that torchrun sets."""
        count = len(self.names) * per_host
        for rank in range(count):
            line = entered(self.names[rank // per_host], [str(self._rank()), *command])
            variables = self.variables(rank, per_host)
            yield subprocess.Popen(line, env={**os.environ, **variables}, **options)

    def enter(self, host: int) -> None:
        """Move this process to a host, with its part of the cores; only where it has one thread.

        Sooner than `start`, for a process that was forked from one that has imported torch.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.names[host]}") as network:
            for failed in (libc.setns(network.fileno(), _NEW_NETWORK), libc.unshare(_NEW_NAME)):
                if failed:
                    raise OSError(ctypes.get_errno(), f"entering {self.names[host]}")
        socket.sethostname(self.names[host])
        os.sched_setaffinity(0, self._cores(host))
        os.environ.update(GLOO_SOCKET_IFNAME=self.links[host], OMP_NUM_THREADS="1")

    def processes(self, host: int) -> list[int]:
        """The processes on a host."""
        network, found = os.stat(f"/run/netns/{self.names[host]}").st_ino, []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):  # it has ended
                if os.stat(f"/proc/{name}/ns/net").st_ino == network:
                    found.append(int(name))
        return found

    def cut(self, host: int) -> None:
        """Take a host off the network: its interface is down."""
        inside(self.names[host], "ip", "link", "set", self.links[host], "down")

    def mend(self, host: int) -> None:
        """Undo `cut`."""
        inside(self.names[host], "ip", "link", "set", self.links[host], "up")

    def beside(self, commands: Sequence[Sequence[str]]) -> list[list[str]]:
        """The commands as they run on one host each, without a launcher: a process without peers."""
        script = str(self._rank())
        return [entered(name, [script, *command]) for name, command in zip(self.names, commands, strict=True)]

    def variables(self, rank: int, per_host: int) -> Mapping[str, str]:
        """What torchrun sets for one of `per_host` ranks on each host."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.names) * per_host),
            "LOCAL_RANK": str(rank % per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(_PORT),
        }

    def _agent(self) -> Path:
        """What Open MPI starts its daemon on the other hosts with, instead of ssh: `agent HOST COMMAND…`."""
        cases = "".join(
            f"{address}) name={name};; " for name, address in zip(self.names, self.addresses, strict=True)
        )
        return self._script(
            "agent",
            f"host=$1; shift\ncase $host in {cases}esac\n"
            'exec ip netns exec "$name" unshare --uts bash -c "hostname $name; $*"\n',
        )

    def _rank(self) -> Path:
        """What runs a command as a rank of a host: with the host's interface, and its part of the cores."""
        parts = [self._cores(host) for host in range(len(self.names))]
        cases = "".join(
            f"{name}) link={link}; cores={','.join(map(str, cores))};; "
            for name, link, cores in zip(self.names, self.links, parts, strict=True)
        )
        return self._script(
            "rank",
            f"case $(hostname) in {cases}esac\n"
            "export GLOO_SOCKET_IFNAME=$link OMP_NUM_THREADS=1\n"
            'exec taskset --cpu-list $cores "$@"\n',
        )

    def _cores(self, host: int) -> list[int]:
        """A host's part of the cores."""
        usable = sorted(os.sched_getaffinity(0))
        each = max(1, len(usable) // len(self.names))
        return [usable[(host * each + core) % len(usable)] for core in range(each)]

    def _script(self, name: str, text: str) -> Path:
        path = Path(self._folder.name) / name
        if not path.exists():  # a rank that reads it may not meet a file that is being written
            path.write_text(f"#!/bin/bash\n{text}")
            path.chmod(0o700)
        return path


def entered(name: str, words: Sequence[str]) -> list[str]:
    """`words` in a namespace, under its own host name."""
    line = ["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c"]
    return [*line, f"hostname {name}; exec {shlex.join(words)}"]


def ip(*words: str) -> None:
    """Run `ip` with these words; raises `CalledProcessError` if it fails."""
    subprocess.run(["ip", *words], check=True, stdout=subprocess.DEVNULL)


def inside(name: str, *words: str) -> None:
    """Run a command in a network namespace; raises `CalledProcessError` if it fails."""
    ip("netns", "exec", name, *words)


def shape(name: str, link: str, rate: str | None, burst: str) -> None:
    """Limit what leaves an interface of a namespace to `rate`, as `tc` writes it; None for no limit."""
    if rate is not None:
        limits = ("root", "tbf", "rate", rate, "burst", burst, "latency", "100ms")
        inside(name, "tc", "qdisc", "add", "dev", link, *limits)
