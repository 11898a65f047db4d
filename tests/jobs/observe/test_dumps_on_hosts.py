"""Dumps of ranks on other hosts, which write their own: on a signal, on demand from outside, on a failure.

Hosts are network namespaces; each has a folder of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ranks import nursery
from two_hosts import TwoHosts, why_not

from mcr_plus.errors import InvalidArgument
from mcr_plus.observe.diagnosis import diagnose
from mcr_plus.observe.dumps import Dump, read_dump, read_folder

PROGRAM = str(Path(__file__).with_name("dumps_on_hosts.py"))
LIMIT_S = 120.0
REASON = why_not(mpi=False)


@contextmanager
def running(folder: Path) -> Iterator[tuple[TwoHosts, int, int]]:
    """The job on two hosts, one rank on each: the hosts and its processes."""
    with TwoHosts(None) as hosts, (folder / "errors").open("wb") as errors:
        words = [nursery().python, PROGRAM, str(folder)]
        started = list(hosts.start(words, per_host=1, stdout=errors, stderr=errors))
        try:
            files = [folder / f"pid{rank}" for rank in range(2)]
            wait_for(lambda: all(file.exists() and file.read_text() for file in files), folder)
            here, there = (int(file.read_text()) for file in files)
            yield hosts, here, there
        finally:
            for name in ("go", "ended"):
                (folder / name).touch()
            for process in started:
                process.wait(timeout=120)


def wait_for(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, (folder / "errors").read_text()
        time.sleep(0.05)


def demanded(hosts: TwoHosts, folder: Path, here: int) -> tuple[list[dict[str, Any]], str]:
    """The answers to a demand on the first host, and the state of rank 1 as that sees it."""
    command, _ = hosts.beside([[nursery().python, PROGRAM, str(folder), "demand", str(here)], ["true"]])
    subprocess.run(command, check=True, timeout=LIMIT_S, env={**os.environ, "RANK": "0"})
    said = json.loads((folder / "answers").read_text())
    return said["answers"], said["state"]


def dump_of(folder: Path, rank: int) -> Dump | None:
    try:
        return read_dump(folder / f"host{rank}" / f"rank.{rank}.json")
    except InvalidArgument:
        return None


@pytest.mark.long
@pytest.mark.skipif(REASON is not None, reason=f"hosts: {REASON}")
def test_ranks_of_other_hosts_write_their_own(tmp_path: Path) -> None:
    with running(tmp_path) as (hosts, here, there):
        # A signal to one rank, of any host, is for all.
        for rank, pid in enumerate((here, there)):
            for each in range(2):
                shutil.rmtree(tmp_path / f"host{each}", ignore_errors=True)
            os.kill(pid, signal.SIGUSR2)
            wait_for(lambda: all(dump_of(tmp_path, each) for each in range(2)), tmp_path)
            reasons = [getattr(dump_of(tmp_path, each), "reason", "") for each in range(2)]
            assert reasons[rank] == "SIGUSR2"
            assert reasons[1 - rank] == f"SIGUSR2 to rank {rank}"
            time.sleep(1.1)  # within a second, signals to several ranks are one demand

        # From outside, where the pages of the first host alone can be seen.
        answers, _ = demanded(hosts, tmp_path, here)
        files = [f"{tmp_path}/host{rank}/rank.{rank}.json" for rank in range(2)]
        found = [(each["rank"], each["file"], each["problem"]) for each in answers]
        assert found == [(0, files[0], ""), (1, files[1], "")]
        for rank in range(2):
            dump = dump_of(tmp_path, rank)
            assert dump is not None
            assert dump.reason.startswith("mcr-plus top --dump")
            assert (dump.rank, dump.written_by) == (rank, rank)
        together = tmp_path / "together"
        together.mkdir()
        for file in files:
            shutil.copy(file, together)
        (finding,) = diagnose(read_folder(together))
        assert (finding.fault, finding.ranks) == ("missing", (1,))
        (place,) = finding.at
        assert place.frame is not None
        assert place.frame.name == "idles"

        # One that cannot answer is named, and a rank that can writes for it.
        os.kill(there, signal.SIGSTOP)
        state = ""
        while state != "stopped":  # which the agents tell
            (_, away), state = demanded(hosts, tmp_path, here)
        (_, away), _ = demanded(hosts, tmp_path, here)
        assert (away["file"], away["written_by"]) == (f"{tmp_path}/host0/rank.1.json", 0)
        assert re.match(rf"rank 1 \(process {there} on \S+\) .*stopped", away["problem"])
        assert re.search(rf"`kill -CONT {there}` on \S+ resumes it$", away["problem"])
        substitute = read_dump(Path(away["file"]))
        assert (substitute.rank, substitute.written_by) == (1, 0)
        os.kill(there, signal.SIGCONT)

        # A failure here is a request there, although the other rank computes.
        (tmp_path / "go").touch()
        wait_for((tmp_path / "failed").exists, tmp_path)
        wait_for(lambda: "CommTimeout" in getattr(dump_of(tmp_path, 1), "reason", ""), tmp_path)
        dump = dump_of(tmp_path, 1)
        assert dump is not None
        assert dump.reason.startswith("rank 0: CommTimeout")
        assert dump.place is not None
        assert dump.place.name == "idles"
