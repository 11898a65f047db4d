"""How soon survivors raise `PeerLost`, after a death, a stop and a partition, on one host and on several.

    python benchmarks/bench_failures.py [--rounds 5] [--hosts 1 2 4] [--ways wait backward]

Jobs of three ranks on one host, with each library, and of one rank per host on several, with gloo; hosts are
network namespaces. A job works in one of the ways of `tests/support/losing.py` when its last rank is killed
or stopped, or its last host is taken off the network. Times are from there to the error in the program, over
all survivors and rounds. The second table is what the agent of a host costs while nothing happens. The report
goes to benchmarks/results/failures_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Final

import harness
import typer
from harness import HARDWARE, ROOT
from hosts import Hosts, why_not
from racks import Racks
from two_hosts import TwoHosts

sys.path.append(str(ROOT / "tests" / "support"))

from losing import WAYS, Job, job_here, job_on

from mcr_plus.hosts.protocol import silence
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

LIBRARIES: Final = ("msccl", "gloo", "mpi")
FAULTS: Final = ("kill", "stop", "cut")
_WATCHED_S: Final = 5.0


@contextmanager
def some_hosts(count: int) -> Iterator[Hosts | None]:
    """As many hosts; None for this one."""
    made: Any = nullcontext() if count == 1 else TwoHosts(None) if count == 2 else Racks(1, count)
    with made as hosts:
        yield hosts


@contextmanager
def running(hosts: Hosts | None, library: str, way: str) -> Iterator[Job]:
    """A job that works in a way."""
    with tempfile.TemporaryDirectory(prefix="mcr-failures-") as name:
        folder = Path(name)
        if hosts is None:
            job = job_here(folder, 3, library, way)
        else:  # as few seconds of silence as the number of hosts allows
            heartbeat = f"{silence(len(hosts.names)):.2f}s"
            job = job_on(hosts, folder, library, way, heartbeat=heartbeat)
        with job as started:
            yield started


def detection(count: int, library: str, way: str, fault: str) -> list[float]:
    """Seconds until each survivor has raised `PeerLost`; infinite for one that has raised another error."""
    with some_hosts(count) as hosts, running(hosts, library, way) as job:
        victim = job.size - 1
        survivors = [rank for rank in range(job.size) if rank != victim or fault == "cut"]
        if fault == "cut":
            assert hosts is not None
            since = time.monotonic()
            hosts.cut(victim)
        else:
            since = job.lose(fault, victim)
        told = job.told(survivors, within=90).values()
        return [each["at"] - since if each["error"] == "PeerLost" else float("inf") for each in told]


def cost() -> list[str]:
    """What an agent takes of a core, its memory, and its datagrams, while two hosts work."""
    with some_hosts(2) as hosts, running(hosts, "gloo", "wait") as job:
        found = job.agents()
        mine = [pid for pid, parent in found.items() if parent in found]
        before = [_cpu_seconds(pid) for pid in mine]
        began, sent = time.monotonic(), _datagrams(mine[0])
        time.sleep(_WATCHED_S)
        seconds = time.monotonic() - began
        shares = [(_cpu_seconds(pid) - then) / seconds for pid, then in zip(mine, before, strict=True)]
        rate = (_datagrams(mine[0]) - sent) / seconds
        memory = sum(_private_mib(pid) for pid in found) / len(mine)
        return [f"{100 * max(shares):.2f} %", f"{memory:.1f} MiB", f"{rate:.1f}"]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _private_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def _datagrams(pid: int) -> int:
    """Those that the host of a process has sent, in its network namespace."""
    head, values = (
        line.split()
        for line in Path(f"/proc/{pid}/net/snmp").read_text().splitlines()
        if line.startswith("Udp:")
    )
    return int(values[head.index("OutDatagrams")])


@harness.program
def main(
    hosts: Annotated[list[int], typer.Option(min=1, default_factory=lambda: [1, 2, 4])],
    ways: Annotated[list[str], typer.Option(default_factory=lambda: ["wait", "backward"])],
    rounds: harness.Rounds = 5,
) -> None:
    ways = harness.chosen(ways, WAYS, "way")
    reason = why_not(mpi=False) if max(hosts) > 1 else None
    if reason is not None:
        print(f"left out, several hosts: {reason}")
        hosts = [count for count in hosts if count == 1]
    candidates = {
        f"{count} {library} {way} {fault}": (count, library, way, fault)
        for count in hosts
        for library in (LIBRARIES if count == 1 else ("gloo",))
        for way in ways
        for fault in FAULTS
        if (library != "mpi" or mpi_usable()) and (fault != "cut" or count > 1)
    }
    found = harness.in_turns(candidates, rounds, lambda each: detection(*each))
    rows = []
    for name, (count, library, way, fault) in candidates.items():
        times = [seconds for turn in found[name] for seconds in turn]
        figures = [f"{statistics.median(times):.2f}", f"{max(times):.2f}", str(len(times))]
        rows.append([str(count), library, way, fault, *figures])
    head = ["hosts", "library", "way", "fault", "median, s", "worst, s", "survivors"]
    harness.show(head, rows)
    parts = [harness.markdown(head, rows)]
    if max(hosts) > 1:
        parts.append(
            harness.markdown(["share of a core", "memory of an agent", "datagrams a second"], [cost()])
        )
    note = "one host has three ranks, several have one each; `kill` -9, `stop`, the link `cut` off."
    text = harness.page("How soon the loss of a rank is known", harness.command(), note, *parts)
    harness.write(text, None, f"failures_{HARDWARE}")


if __name__ == "__main__":
    main()
