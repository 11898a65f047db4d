"""Jobs of four ranks on two or four hosts that lose ranks, hosts and links, one after another.

`Rounds(hosts)` has the hosts, which are network namespaces, and `Rounds.lose` runs one job. Its ranks issue
all_reduces over gloo, several at a time; at a loss they call `mcr.shrink`, and go on until they are told to
end. See `FAULTS` for what is lost. Used by bench_survive.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from forked import ended, forked
from harness import ROOT
from racks import Racks

sys.path.append(str(ROOT / "tests" / "support"))

from losing import SETTLES, written

import mcr_plus as mcr
from mcr_plus.hosts.protocol import silence

RANKS: Final = 4
FAULTS: Final = {
    "rank": "a rank but rank 0 is killed",
    "rank 0": "rank 0 is killed",
    "host": "all processes of a host are killed",
    "stopped": "a rank but rank 0 is stopped (SIGSTOP)",
    "stopped 0": "rank 0 is stopped",
    "down": "a host's interface is taken down",
    "cable": "what a host's interface sends is lost",
}
SIZES: Final = (1, 1000, 100_000)  # elements
HANGS: Final = 60.0  # seconds after which a rank is taken for one that hangs
_PARTED: Final = ("down", "cable")
_PATIENCE: Final = 2.0  # seconds that the smaller part waits for the others, before it gives up
_LEAVES: Final = 5.0  # seconds within which agents and keepers end after the ranks


class Issued:
    """The all_reduces that a rank has in flight.

    Attributes:
        right: whether all that were complete had the right sum.
        number: how many were issued.
    """

    def __init__(self, comm: mcr.Communicator, library: str) -> None:
        self.right, self.number = True, 0
        self._comm, self._library = comm, library
        self._pending: list[tuple[int, torch.Tensor, Any]] = []

    def until_lost(self) -> tuple[mcr.PeerLost, float]:
        """Issue them until a rank is lost; returns the error, and when it was raised."""
        slot = self._comm.rank
        try:
            while True:
                x = torch.full((SIZES[self.number % len(SIZES)],), float(self.number % 1000 + slot))
                work = self._comm.all_reduce(x, async_op=True, backend=self._library)
                self._pending.append((self.number, x, work))
                self.number += 1
                if len(self._pending) > 6:
                    self._pending[0][2].wait()
                    self._check(*self._pending.pop(0)[:2])
        except mcr.PeerLost as error:
            return error, time.monotonic()

    def judge(self) -> int:
        """After `mcr.shrink`: check what is done by the verdict; returns its number."""
        done = self._comm.done
        assert done is not None
        for number, x, work in self._pending:
            if work.info.sequence <= done:
                self._check(number, x)
        return done

    def _check(self, number: int, x: torch.Tensor) -> None:
        size = self._comm.size
        self.right &= bool((x == size * (number % 1000) + sum(range(size))).all())


class Rounds:
    """Two or four hosts, on which jobs run one after another; a context manager."""

    def __init__(self, count: int) -> None:
        self._hosts, self._count = Racks(1, count), count
        self._per_host = RANKS // count

    def __enter__(self) -> Rounds:
        self._hosts.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hosts.__exit__(*exception)

    def lose(self, fault: str, chance: random.Random) -> dict[str, Any]:
        """Run a job that loses what `FAULTS` says; returns what came of it.

        `told`: seconds until the last rank that runs has raised `PeerLost`. `shrink`: of the longest
        `mcr.shrink`; 0 where nobody may go on. `problems`: all that should not be. `hung`: whether a rank
        had to be killed. `right`: whether all sums were. `named`: whether each rank has named all that it
        has lost, and not only some of them. `raised`: what each has named, and what it has seen. `ended
        with`: the error with which each has ended, if any.
        """
        with tempfile.TemporaryDirectory(prefix="mcr-hosts-") as name:
            job = _Job(self._hosts, Path(name), self._per_host, fault)
            try:
                found = job.run(chance)
            finally:
                job.close()
            return {"hosts": self._count, "lost": fault, "load": os.getloadavg()[0], **found}


class _Job:
    def __init__(self, hosts: Racks, folder: Path, per_host: int, fault: str) -> None:
        self._hosts, self._folder, self._per_host, self._fault = hosts, folder, per_host, fault
        self._count = RANKS // per_host
        # Half of the ranks are no majority; where the others are dead, nobody else goes on.
        self._least = 2 if fault == "host" and self._count == 2 else None
        self._pids: dict[int, int] = {}
        self._victims: list[int] = []

    def run(self, chance: random.Random) -> dict[str, Any]:
        for rank in range(RANKS):
            self._pids[rank] = forked(lambda: self._rank(rank), self._folder / f"err.{rank}")  # noqa: B023
        problems = [f"rank {rank} has not begun" for rank in self._missing("up", range(RANKS))]
        if problems:
            return self._end(problems, {})
        time.sleep(SETTLES + chance.uniform(0.0, 0.2))
        since = self._lose(chance)
        apart = self._fault in _PARTED
        raising = [rank for rank in range(RANKS) if rank not in self._victims or apart]
        halved = apart and self._count == 2  # which leaves no majority
        going_on = [rank for rank in raising if rank not in self._victims and not halved]
        problems += [f"rank {rank} has not raised" for rank in self._missing("raised", raising)]
        problems += [f"rank {rank} has not gone on" for rank in self._missing("shrunk", going_on)]
        raised, shrunk = self._said("raised", raising), self._said("shrunk", going_on)
        alone = [rank for rank in raising if rank not in going_on]
        problems += [f"rank {rank} has not given up" for rank in self._missing("end", alone)]
        problems += self._judge(raised, shrunk)
        if self._fault.startswith("stopped"):
            os.kill(self._pids[self._victims[0]], signal.SIGCONT)
            problems += [f"rank {rank} has not woken" for rank in self._missing("end", self._victims)]
        told = max((each["at"] - since for each in raised.values()), default=0.0)
        took = max((each["took"] for each in shrunk.values()), default=0.0)
        named = all(each["ranks"] == self._beyond(rank) for rank, each in raised.items())
        right = self._right(shrunk, raised)
        return self._end(problems, {"told": told, "shrink": took, "right": right, "named": named})

    def _rank(self, rank: int) -> None:
        """In a process of its own."""
        os.environ.update(self._hosts.variables(rank, self._per_host))
        self._hosts.enter(rank // self._per_host)
        beats = f"{silence(self._count):.2f}s"  # as few seconds of silence as the number of hosts allows
        end: dict[str, Any] = {"error": None, "text": ""}
        try:
            _work(self._folder, beats, self._least, _PATIENCE if self._fault in _PARTED else 10.0)
        except Exception as error:
            end = {"error": type(error).__name__, "text": str(error)}
        written(self._folder / f"end.{rank}", end)

    def _lose(self, chance: random.Random) -> float:
        """Lose something; returns when."""
        host = chance.randrange(self._count)
        if self._fault in ("host", *_PARTED):
            self._victims = list(range(host * self._per_host, (host + 1) * self._per_host))
        else:
            self._victims = [0 if self._fault.endswith("0") else chance.randrange(1, RANKS)]
        if self._fault in _PARTED:
            since = time.monotonic()
            (self._hosts.cut if self._fault == "down" else self._hosts.unplug)(host)
            return since
        whole = self._fault == "host"
        pids = self._hosts.processes(host) if whole else [self._pids[rank] for rank in self._victims]
        since = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP if self._fault.startswith("stopped") else signal.SIGKILL)
        return since

    def _judge(self, raised: dict[int, Any], shrunk: dict[int, Any]) -> list[str]:
        """What is wrong with what the ranks have raised, and agreed on."""
        problems = []
        for rank, each in raised.items():
            expected = self._beyond(rank)
            if not set(each["ranks"]) <= set(expected):
                problems.append(f"rank {rank} has named {each['ranks']}, not {expected}: {each['text']}")
        if len({each["done"] for each in shrunk.values()}) > 1:
            problems.append(f"verdicts differ: { {rank: each['done'] for rank, each in shrunk.items()} }")
        wrong = [rank for rank, each in shrunk.items() if each["size"] != len(shrunk)]
        return problems + [f"rank {rank} is in another world: {shrunk[rank]}" for rank in wrong]

    def _beyond(self, rank: int) -> list[int]:
        """The ranks that one has lost: where a link is cut, those of the other side."""
        return [other for other in range(RANKS) if (other in self._victims) != (rank in self._victims)]

    def _right(self, shrunk: dict[int, Any], raised: dict[int, Any]) -> bool:
        """Whether all sums were right, those before the loss and those after it."""
        expected = [float(sum(1 + rank for rank in shrunk))]
        return all(each["right"] for each in raised.values()) and all(
            each["right"] and each["sum"] == expected for each in shrunk.values()
        )

    def _end(self, problems: list[str], found: dict[str, Any]) -> dict[str, Any]:
        """End the job; returns `found` and all problems."""
        (self._folder / "stop").touch()
        statuses = ended(self._pids, HANGS if not problems else 5.0)
        self._pids = {}
        if problems or None in statuses.values():
            problems.append(f"statuses {statuses}")
        ends = self._said("end", range(RANKS))
        for rank, each in ends.items():
            ends_with: tuple[str | None, ...] = (None,)
            if self._fault in _PARTED and self._count == 2:
                ends_with = ("BackendError",)  # Revoked would mean that the others have gone on
            elif rank in self._victims:
                ends_with = ("BackendError", "Revoked") if self._fault in _PARTED else ("Revoked",)
            if each["error"] not in ends_with:
                problems.append(f"rank {rank} has ended with {each['error']}: {each['text']}")
        ending = time.monotonic() + _LEAVES
        while left := [pid for host in range(self._count) for pid in self._hosts.processes(host)]:
            if time.monotonic() > ending:
                problems.append(f"left behind: {[_words(pid) for pid in left]}")
                break
            time.sleep(0.01)
        if problems:
            problems += [
                path.read_text()[-6000:] for path in sorted(self._folder.glob("err.*")) if path.stat().st_size
            ]
        hung = None in statuses.values()
        rest = {"told": 0.0, "shrink": 0.0, "right": True, "named": False}
        raised = self._said("raised", range(RANKS))
        said = {rank: [each["ranks"], each["seen"]] for rank, each in raised.items()}
        fates = {rank: each["error"] for rank, each in ends.items()}
        return {**rest, **found, "hung": hung, "problems": problems, "raised": said, "ended with": fates}

    def close(self) -> None:
        """End what there is left of it, and mend the links."""
        ended(self._pids, 0.0)
        for host in range(self._count):
            for pid in self._hosts.processes(host):
                os.kill(pid, signal.SIGKILL)
            if self._fault == "down":
                self._hosts.mend(host)
            elif self._fault == "cable":
                self._hosts.plug(host)

    def _missing(self, what: str, ranks: Sequence[int]) -> list[int]:
        """The ranks that have not written this, once one of them has ended or is taken to hang."""
        ends = time.monotonic() + HANGS
        while True:
            # First: a rank that ends now has written it by the second look.
            over = {rank for rank in ranks if (self._folder / f"end.{rank}").exists()}
            missing = [rank for rank in ranks if not (self._folder / f"{what}.{rank}").exists()]
            if not missing or over.intersection(missing) or time.monotonic() > ends:
                return missing
            time.sleep(0.005)

    def _said(self, what: str, ranks: Sequence[int]) -> dict[int, Any]:
        """What ranks have written."""
        places = {rank: self._folder / f"{what}.{rank}" for rank in ranks}
        return {rank: json.loads(place.read_text()) for rank, place in places.items() if place.exists()}


def _work(folder: Path, heartbeat: str, least: int | None, patience: float) -> None:
    """What a rank does."""
    dispatch = {"timeout": "30s", "heartbeat": heartbeat}
    config = {"version": 1, "pipeline": [{"select": {}}, {"dispatch": dispatch}]}
    comm = mcr.init(config, backends=["gloo"], timeout=HANGS / 2)
    slot = comm.rank
    comm.barrier()
    written(folder / f"up.{slot}", {})
    issued = Issued(comm, "gloo")
    error, raised = issued.until_lost()
    loss = {"at": raised, "ranks": sorted(error.ranks), "seen": error.seen, "text": str(error)}
    written(folder / f"raised.{slot}", {**loss, "right": issued.right})
    comm = mcr.shrink(min_ranks=least, timeout=patience)
    took = time.monotonic() - raised
    done = issued.judge()
    x = torch.full((1000,), 1.0 + slot)
    comm.all_reduce(x)
    fate = {"took": took, "done": done, "right": issued.right, "sum": x.unique().tolist(), "size": comm.size}
    written(folder / f"shrunk.{slot}", fate)
    stop = torch.zeros(1)
    while not stop.item():
        stop.fill_((folder / "stop").exists())
        comm.all_reduce(stop, "MAX")
        time.sleep(0.005)
    mcr.finalize()


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return "ended"
