"""Ranks that go on without lost ones: verdicts, times, and an hour of churn in short.

    python benchmarks/bench_survive.py --deaths 1000 --churn 120 --rounds 5

*Deaths*: jobs of three ranks of one host issue all_reduces of different sizes, several at a time, over shared
memory or gloo in turns; one rank is killed (SIGKILL) at a random moment, from outside. The others catch
`PeerLost`, call `mcr.shrink`, and report which operations are done (`Communicator.done`). Their numbers must
be equal, and every operation called done must have the right sum on both. *Churn*: four ranks train in
`mcr.elastic`, with parameters of 100 MB; every two seconds one is killed and started again. The sum of every
step's all_reduce is checked. *Hosts*: see lost_hosts.py; jobs of four ranks on two and four hosts (network
namespaces) without a launcher's store lose a rank, a host or a link, by a kill, a stop or a cut; `--rounds`
of each kind. What is wrong with one is printed. Ranks are forked from a process that has imported torch, so
that jobs start in tenths of a second. The report goes to benchmarks/results/survive_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import harness
import torch
import typer
from forked import ended, forked
from harness import HARDWARE, Dated, Hardware
from hosts import why_not
from lost_hosts import FAULTS, HANGS, Issued, Rounds

import mcr_plus as mcr
from mcr_plus.rendezvous.store_connections import served

RANKS: Final = 3
CHURNING: Final = 4
LIBRARIES: Final = ("msccl", "gloo")
KILL_EVERY: Final = 2.0  # seconds
STATE: Final = 100 << 20  # bytes of parameters, in the churn

Program = Callable[[int, Path], None]


class Job:
    """Forked ranks, with a store in a process of its own."""

    def __init__(self, program: Program, ranks: int, folder: Path) -> None:
        self.program, self.ranks, self.folder = program, ranks, folder
        self.secret = secrets.token_hex(16)
        reading, writing = os.pipe()
        self.holder = os.fork()
        if self.holder == 0:
            store = served()
            os.write(writing, str(store.port).encode())
            signal.pause()
        self.port = int(os.read(reading, 16))
        os.close(reading)
        os.close(writing)
        self.pids = {rank: self.start(rank, 0) for rank in range(ranks)}

    def start(self, rank: int, restarts: int) -> int:
        """Fork a rank; returns its process id."""

        def body() -> None:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(self.ranks),
                LOCAL_WORLD_SIZE=str(self.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port),
                TORCHELASTIC_USE_AGENT_STORE="True", MCR_SECRET=self.secret, MCR_MIN_RANKS="2",
                MCR_RESTARTS=str(restarts),
            )  # fmt: skip
            self.program(rank, self.folder)

        return forked(body, self.folder / f"err.{rank}")

    def end(self) -> dict[int, int | None]:
        """Wait for the ranks; returns their statuses, see `ended`."""
        statuses = ended(self.pids, HANGS)
        os.kill(self.holder, signal.SIGKILL)
        os.waitpid(self.holder, 0)
        return statuses


# --- deaths -----------------------------------------------------------------------------------------------


def issuing(library: str) -> Program:
    """The program of a rank that issues all_reduces until a rank is lost."""

    def program(slot: int, folder: Path) -> None:
        config = {"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "30s"}}]}
        comm = mcr.init(config, backends=[library, *({"gloo"} - {library})])
        issued = Issued(comm, library)
        (folder / f"up.{slot}").touch()
        _, raised = issued.until_lost()
        new = mcr.shrink()
        ended = time.monotonic()
        issued.judge()
        right = issued.right
        y = torch.ones(3)
        new.all_reduce(y)
        right &= y.tolist() == [2.0] * 3
        told = {
            "done": comm.done,
            "right": right,
            "raised": raised,
            "shrink": ended - raised,
            "issued": issued.number,
        }
        (folder / f"told.{slot}").write_text(json.dumps(told))
        mcr.finalize()

    return program


def die_once(library: str, chance: random.Random) -> dict[str, Any]:
    """One job that loses a rank."""
    with tempfile.TemporaryDirectory(prefix="mcr-survive-") as name:
        folder = Path(name)
        job = Job(issuing(library), RANKS, folder)
        ends = time.monotonic() + HANGS
        while len(list(folder.glob("up.*"))) < RANKS and time.monotonic() < ends:
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.1))
        victim = chance.randrange(RANKS)
        os.kill(job.pids[victim], signal.SIGKILL)
        died = time.monotonic()
        statuses = job.end()
        told = [json.loads(path.read_text()) for path in folder.glob("told.*")]
        left = [status for rank, status in statuses.items() if rank != victim]
        good = left == [0, 0] and len(told) == 2
        errors = "" if good else "".join(path.read_text() for path in sorted(folder.glob("err.*")))
        return {
            "hung": None in left,
            "failed": not good,
            "errors": errors,
            "same": len({each["done"] for each in told}) == 1,
            "right": all(each["right"] for each in told),
            "told": max((each["raised"] - died for each in told), default=0.0),
            "shrink": max((each["shrink"] for each in told), default=0.0),
        }


# --- several hosts ----------------------------------------------------------------------------------------


def on_hosts(rounds: int, chance: random.Random, records: Path | None) -> list[dict[str, Any]]:
    """Lose each of `FAULTS` so often on two and on four hosts; returns what came of it.

    `records`: a file that has a line for each loss, to which these are added; all that it has are returned.
    """
    found = []
    for count in (2, 4):
        with Rounds(count) as hosts:
            for _ in range(rounds):
                for fault in FAULTS:
                    found.append(hosts.lose(fault, chance))
                    for problem in found[-1]["problems"]:
                        print(f"{count} hosts, {fault}: {problem}", file=sys.stderr, flush=True)
                    if records is not None:
                        with records.open("a") as file:
                            file.write(json.dumps(found[-1]) + "\n")
    return found if records is None else [json.loads(line) for line in records.read_text().splitlines()]


def rows_of(losses: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The table of losses on several hosts: head and rows."""
    rows = []
    for count in (2, 4):
        for fault in FAULTS:
            all_ = [each for each in losses if (each["hosts"], each["lost"]) == (count, fault)]
            good = [each for each in all_ if not each["problems"]]
            counts = [len(all_), sum(each["hung"] for each in all_), len(all_) - len(good)]
            counts += [sum(not each["right"] for each in all_), sum(each["named"] for each in good)]
            times = [[each[what] for each in good] or [0.0] for what in ("told", "shrink")]
            late = sum(each["told"] > 1.0 for each in good)
            figures = [f"{value(each):.2f}" for each in times for value in (median, max)]
            rows.append([str(count), fault, *map(str, counts), *figures[:2], str(late), *figures[2:]])
    head = ["hosts", "lost", "times", "hung", "failed", "wrong", "all named", "told, s", "at most"]
    head += ["over 1 s", "shrink, s", "at most"]
    return head, rows


# --- churn ------------------------------------------------------------------------------------------------


def training(slot: int, folder: Path) -> None:
    """The program of a rank that trains until a file says that it is enough."""
    mcr.init({"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "60s"}}]})
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, STATE // 4096)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mcr.wrap(model, optimizer)
    wrong = 0
    took: list[float] = []
    for step in mcr.elastic(model, optimizer):
        with step:
            began = time.monotonic()
            ranks, rank = mcr.get_world_size(), mcr.get_rank()
            x = torch.full((1000,), float(step.number % 1000 + rank))
            mcr.all_reduce(x)
            wrong += int(x[0].item() != ranks * (step.number % 1000) + ranks * (ranks - 1) / 2)
            stop = torch.tensor([float((folder / "stop").exists())])
            mcr.all_reduce(stop, "MAX")
            optimizer.zero_grad()
            model(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
            took.append(time.monotonic() - began)
            counts = {
                "wrong": wrong,
                "steps": step.number,
                "descriptors": len(os.listdir("/proc/self/fd")),
                "memory": int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024,
                "ranks": ranks,
            }
            written = folder / f".counts.{slot}"
            written.write_text(json.dumps(counts))
            written.rename(folder / f"counts.{slot}")
            if stop.item():
                break
    mcr.finalize()


def churn(seconds: float, chance: random.Random) -> dict[str, Any]:
    """Kill a rank every two seconds, and start it again."""
    with tempfile.TemporaryDirectory(prefix="mcr-survive-") as name:
        folder = Path(name)
        job = Job(training, CHURNING, folder)
        restarts = dict.fromkeys(range(CHURNING), 0)
        while len(list(folder.glob("counts.*"))) < CHURNING:
            time.sleep(0.05)
        began, kills, failures, first = time.monotonic(), 0, 0, {}
        first = json.loads((folder / "counts.0").read_text())
        while time.monotonic() - began < seconds:
            time.sleep(KILL_EVERY)
            victim = chance.randrange(1, CHURNING)  # rank 0 stays, for its memory and descriptors
            for rank, pid in job.pids.items():
                if rank == victim:
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
                    os.waitpid(pid, 0)
                elif os.waitpid(pid, os.WNOHANG)[0]:
                    failures += 1
                else:
                    continue
                restarts[rank] += 1
                job.pids[rank] = job.start(rank, restarts[rank])
        time.sleep(3 * KILL_EVERY)
        counts = json.loads((folder / "counts.0").read_text())
        (folder / "stop").touch()
        statuses = job.end()
        errors = "".join(path.read_text() for path in sorted(folder.glob("err.*")))
        return {
            "kills": kills,
            "failures": failures,
            "statuses": statuses,
            "wrong": counts["wrong"],
            "steps": counts["steps"],
            "first": first,
            "last": counts,
            "regroupings": [line for line in errors.splitlines() if line.startswith("elastic:")],
            "errors": [line for line in errors.splitlines() if "Error" in line],
        }


def main(
    deaths: Annotated[int, typer.Option(min=0, help="Jobs that lose a rank.")] = 1000,
    churning: Annotated[float, typer.Option("--churn", min=0, help="Seconds of churn.")] = 120.0,
    rounds: Annotated[int, typer.Option(min=0, help="Losses of each kind on several hosts.")] = 5,
    records: Annotated[
        Path | None, typer.Option(help="Add the losses on hosts to this file, and report all in it.")
    ] = None,
    seed: int = 0,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    """Measure and write the report."""
    chance, parts = random.Random(seed), []
    if deaths:
        rows = []
        for library in LIBRARIES:
            found = [die_once(library, chance) for _ in range(deaths // len(LIBRARIES))]
            for each in (each for each in found if each["failed"]):
                print(each["errors"], file=sys.stderr)
            good = [each for each in found if not each["failed"]]
            counts = [len(found), sum(each["hung"] for each in found), len(found) - len(good)]
            verdicts = [sum(each[what] for each in good) for what in ("same", "right")]
            times = [[each[what] for each in good] for what in ("told", "shrink")]
            rows.append([
                library,
                *map(str, counts),
                *(f"{number} of {len(good)}" for number in verdicts),
                *(f"{value:.2f}" for each in times for value in (median(each), max(each))),
            ])  # fmt: skip
        head = ["library", "deaths", "hung", "failed", "same verdict", "done is right", "told, s", "at most",
                "shrink, s", "at most"]  # fmt: skip
        parts += ["### Deaths at random moments, three ranks", harness.markdown(head, rows)]
        harness.show(head, rows)
    if churning:
        result = churn(churning, chance)
        first, last = result["first"], result["last"]
        rows = [
            ["seconds", f"{churning:g}"],
            ["ranks killed", str(result["kills"])],
            ["ranks that failed by themselves", str(result["failures"])],
            ["steps", str(result["steps"])],
            ["wrong sums", str(result["wrong"])],
            ["file descriptors of rank 0, first and last", f"{first['descriptors']}, {last['descriptors']}"],
            ["memory of rank 0 in MiB, first and last", f"{first['memory']}, {last['memory']}"],
            ["regroupings", str(len(result["regroupings"]))],
            ["statuses at the end", ", ".join(map(str, result["statuses"].values()))],
        ]
        parts += ["### Churn, four ranks, 100 MB of parameters", harness.markdown(["what", "measured"], rows)]
        harness.show(["what", "measured"], rows)
        for line in (*result["errors"], *result["regroupings"][-5:]):
            print(line)
    reason = why_not(mpi=False) if rounds else None
    if reason is not None:
        print(f"left out, several hosts: {reason}")
    elif rounds:
        losses = on_hosts(rounds, chance, records)
        head, rows = rows_of(losses)
        loads = sorted(each["load"] for each in losses)
        parts += [
            "### Four ranks on several hosts, gloo",
            f"Load of the machine: {loads[0]:.1f} to {loads[-1]:.1f}, {median(loads):.1f} in the median.",
            harness.markdown(head, rows),
        ]
        harness.show(head, rows)
    note = "a time is of the slower survivor: from the kill to `PeerLost`, and of the call of `mcr.shrink`"
    text = harness.page("Ranks that go on without lost ones", harness.command(), note, *parts)
    harness.write(text, output, f"survive_{hardware}")


run = harness.program(main)

if __name__ == "__main__":
    run()
