"""The start of processes beside ranks: agents, that begin late or twice, and how they run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import losing
import pytest

from mcr_plus.core.mapped_memory import made
from mcr_plus.core.proc import read_stat
from mcr_plus.hosts.arguments import NOTHING_LEFT
from mcr_plus.hosts.dump_request import address_of, opened
from mcr_plus.hosts.findings import Findings
from mcr_plus.rendezvous import heartbeats, side_processes

_AGENT: Final = "mcr_plus.hosts.agent"
_IN_REAL_TIME: Final = "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))"


class Host:
    """One of two hosts, whose only rank is this process: what its agent needs, and what that finds."""

    def __init__(self, folder: Path, link: socket.socket, requests: socket.socket) -> None:
        memory, descriptor, _ = made(Findings.size(2), "findings")
        own = read_stat(os.getpid())
        assert memory is not None
        assert descriptor is not None
        assert own is not None
        self.findings, self.folder = Findings(memory, 2), folder
        self.order: dict[str, Any] = {
            "key": b"secret".hex(), "hosts": [[0], [1]], "addresses": [link.getsockname(), None], "me": 0,
            "processes": {0: (os.getpid(), own[1])}, "limit": 1.0, "job": "unit", "version": "1",
            "memory": descriptor, "socket": link.fileno(), "requests": requests.fileno(),
        }  # fmt: skip
        self.descriptors = [descriptor, link.fileno(), requests.fileno()]

    def agents(self) -> dict[int, int]:
        return losing.agents(self.folder)

    def wait_for_agent(self) -> None:
        """An agent is two processes."""
        _wait_for(lambda: self.findings.looked > 0.0 and len(self.agents()) == 2)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv(losing._MARK, str(tmp_path))  # by which agents are found
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link,
        opened(address_of("a test")) as requests,
    ):
        link.bind(("127.0.0.1", 0))
        made_here = Host(tmp_path, link, requests)
        try:
            yield made_here
        finally:
            made_here.findings.leave(0)  # which ends the agent
            _wait_for(lambda: not made_here.agents())
            made_here.findings.close()
            os.close(made_here.descriptors[0])


def test_the_processes_of_an_agent_run_before_other_work(host: Host) -> None:
    tried = subprocess.run([sys.executable, "-c", _IN_REAL_TIME], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no processes in real time here: {tried.stderr.strip().splitlines()[-1]}")
    heartbeats._start(host.order)
    host.wait_for_agent()
    for pid in host.agents():
        assert os.sched_getscheduler(pid) == os.SCHED_RR
        assert os.sched_getparam(pid).sched_priority == 1
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "the ranks do not"


def test_a_process_that_does_not_begin_is_replaced(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [["sleep", "60"]]
    usual = side_processes.command
    monkeypatch.setattr(side_processes, "_EACH", 0.3)
    monkeypatch.setattr(
        side_processes, "command", lambda module: commands.pop() if commands else usual(module)
    )
    side_processes.start_once(_AGENT, host.order, host.descriptors)
    host.wait_for_agent()
    (late,) = [each for each in side_processes._late if each.args == ["sleep", "60"]]
    late.kill()
    late.wait()
    side_processes.reap_later([])
    assert late not in side_processes._late


def test_one_of_two_late_processes_works(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_processes, "_EACH", 0.0)
    problem = side_processes.start_once(_AGENT, host.order, host.descriptors)
    assert problem.endswith("and may begin later")
    begun = [each for each in side_processes._late if each.args == side_processes.command(_AGENT)]
    _wait_for(lambda: all(each.poll() is not None for each in begun))
    assert sorted(each.returncode for each in begun) == [0, NOTHING_LEFT]
    host.wait_for_agent()


def test_a_process_that_fails_is_not_waited_for(host: Host) -> None:
    problem = side_processes.start_once("mcr_plus.hosts.no_such_module", host.order, host.descriptors)
    assert problem == "the process has ended with status 1"


def _wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)
