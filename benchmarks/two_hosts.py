"""Two "hosts" on one machine: network namespaces joined by a link of a given rate.

    with TwoHosts("1gbit") as hosts:
        done = hosts.mpirun([sys.executable, "program.py"], stdout=subprocess.PIPE)

Each host has a name, an address and a network interface of its own, and nothing but the link between them,
and half of the cores. Needs root, iproute2 and Open MPI: `why_not()` says what is missing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcr_plus.launch import mpi_flavour

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NETWORK = "10.77.0.0/24"


def why_not() -> str | None:
    """What keeps this machine from having two hosts; None if nothing does."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [name for name in ("ip", "tc", "unshare", "taskset") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    launcher = mpi_flavour()
    if launcher is None or launcher.flavour != "openmpi":
        return "ranks are started in the namespaces by Open MPI's mpirun, which is not here"
    name = f"mcr-probe-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"ip netns add: {tried.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


def need_two_hosts() -> None:
    """Ends the program where this machine cannot have two hosts."""
    if (reason := why_not()) is not None:
        raise SystemExit(f"skipped: {reason}")


class TwoHosts:
    """Two network namespaces with a link between them; `rate` as `tc` writes it, None for no limit."""

    def __init__(self, rate: str | None) -> None:
        self.rate = rate
        self.names = tuple(f"mcr-{letter}-{os.getpid()}" for letter in "ab")
        self.links = tuple(f"mcr{letter}{os.getpid()}" for letter in "ab")

    def __enter__(self) -> TwoHosts:
        self._folder = tempfile.TemporaryDirectory(prefix="mcr-two-hosts-")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or they would stay
        try:
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        self._folder.cleanup()

    def mpirun(
        self,
        command: Sequence[str],
        *,
        per_host: int = 1,
        ranks: int | None = None,
        check: bool = True,
        **options: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """Run `command` as `per_host` ranks on each host; as `ranks` if given, the last host having the rest.

        With `check` raises `CalledProcessError` if it fails.
        """
        launcher = mpi_flavour()
        assert launcher is not None
        words = [
            launcher.path, "--allow-run-as-root", "-n", str(ranks or 2 * per_host),
            "--host", ",".join(f"{address}:{per_host}" for address in ADDRESSES),
            "--bind-to", "none", "--prtemca", "plm_ssh_agent", str(self._agent()),
            "--prtemca", "prte_if_include", NETWORK, "--mca", "btl_tcp_if_include", NETWORK,
            "--mca", "btl", "tcp,self" if per_host == 1 else "sm,tcp,self", "--mca", "pml", "ob1",
            # A rank that spins keeps its core from the kernel's network work.
            "--mca", "mpi_yield_when_idle", "1", str(self._rank()), *command,
        ]  # fmt: skip
        return subprocess.run(_inside(self.names[0], words), check=check, **options)

    def beside(self, commands: Sequence[Sequence[str]]) -> list[list[str]]:
        """The commands as they run on one host each, without a launcher: a process without peers."""
        script = str(self._rank())
        return [_inside(name, [script, *command]) for name, command in zip(self.names, commands, strict=True)]

    def _connect(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
            _ip("link", "set", link, "netns", name)
            inside = ("netns", "exec", name)
            _ip(*inside, "ip", "address", "add", f"{address}/24", "dev", link)
            _ip(*inside, "ip", "link", "set", link, "up")
            _ip(*inside, "ip", "link", "set", "lo", "up")
            if self.rate is not None:
                shape = ("root", "tbf", "rate", self.rate, "burst", "256kb", "latency", "100ms")
                _ip(*inside, "tc", "qdisc", "add", "dev", link, *shape)

    def _agent(self) -> Path:
        """What Open MPI starts its daemon on the other host with, instead of ssh: `agent HOST COMMAND…`."""
        cases = "".join(
            f"{address}) name={name};; " for name, address in zip(self.names, ADDRESSES, strict=True)
        )
        return self._script(
            "agent",
            f"host=$1; shift\ncase $host in {cases}esac\n"
            'exec ip netns exec "$name" unshare --uts bash -c "hostname $name; $*"\n',
        )

    def _rank(self) -> Path:
        """What runs a command as the rank of a host: with that host's interface, and half of the cores."""
        usable = sorted(os.sched_getaffinity(0))
        half = max(1, len(usable) // 2)
        cases = "".join(
            f"{name}) link={link}; cores={','.join(map(str, cores))};; "
            for name, link, cores in zip(self.names, self.links, (usable[:half], usable[-half:]), strict=True)
        )
        return self._script(
            "rank",
            f"case $(hostname) in {cases}esac\n"
            "export GLOO_SOCKET_IFNAME=$link OMP_NUM_THREADS=1\n"
            'exec taskset --cpu-list $cores "$@"\n',
        )

    def _script(self, name: str, text: str) -> Path:
        path = Path(self._folder.name) / name
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o700)
        return path


def _inside(name: str, words: Sequence[str]) -> list[str]:
    """`words` in a namespace, under its own host name."""
    entered = ["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c"]
    return [*entered, f"hostname {name}; {shlex.join(words)}"]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, stdout=subprocess.DEVNULL)
