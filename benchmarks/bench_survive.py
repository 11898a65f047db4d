"""Ranks that go on without lost ones: verdicts, times, and an hour of churn in short.

    python benchmarks/bench_survive.py --deaths 1000 --churn 120 --rounds 5

*Deaths*: jobs of three ranks of one host issue all_reduces of different sizes, several at a time, over shared
memory or gloo in turns; one rank is killed (SIGKILL) at a random moment, from outside. The others catch
`PeerLost`, call `mcr.shrink`, and report which operations are done (`Communicator.done`). Their numbers must
be equal, and every operation called done must have the right sum on both. *Churn*: four ranks train in
`mcr.elastic`, with parameters of 100 MB; every two seconds one is killed and started again. The sum of every
step's all_reduce is checked. *Hosts*: jobs of four ranks on two and four hosts (network namespaces) without a
launcher's store lose a rank, rank 0, all processes of a host, or its link; the sum of those that go on is
checked. Ranks of the first two parts are forked from a process that has imported torch, so that jobs start in
tenths of a second. The report goes to benchmarks/results/survive_<hardware>_<yyyymm>.md.
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
from harness import HARDWARE, ROOT, Dated, Hardware
from racks import Racks
from two_hosts import TwoHosts, why_not

sys.path.append(str(ROOT / "tests" / "support"))

import surviving

import mcr_plus as mcr
from mcr_plus.launch.store import loopback_store
from mcr_plus.liveness.protocol import silence

RANKS: Final = 3
CHURNING: Final = 4
SIZES: Final = (1, 1000, 100_000)  # elements
LIBRARIES: Final = ("msccl", "gloo")
FAULTS: Final = ("rank", "rank 0", "host", "cut")
KILL_EVERY: Final = 2.0  # seconds
STATE: Final = 100 << 20  # bytes of parameters, in the churn
_LIMIT: Final = 60.0

Program = Callable[[int, Path], None]


class Job:
    """Forked ranks, with a store in a process of its own."""

    def __init__(self, program: Program, ranks: int, folder: Path) -> None:
        self.program, self.ranks, self.folder = program, ranks, folder
        self.secret = secrets.token_hex(16)
        reading, writing = os.pipe()
        self.holder = os.fork()
        if self.holder == 0:
            store = loopback_store()
            os.write(writing, str(store.port).encode())
            signal.pause()
        self.port = int(os.read(reading, 16))
        os.close(reading)
        os.close(writing)
        self.pids = {rank: self.start(rank, 0) for rank in range(ranks)}

    def start(self, rank: int, restarts: int) -> int:
        """Fork a rank; returns its process id."""
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            sys.stderr = open(self.folder / f"err.{rank}", "a")  # noqa: SIM115
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(self.ranks),
                LOCAL_WORLD_SIZE=str(self.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port),
                TORCHELASTIC_USE_AGENT_STORE="True", MCR_SECRET=self.secret, MCR_MIN_RANKS="2",
                MCR_RESTARTS=str(restarts),
            )  # fmt: skip
            torch.set_num_threads(1)
            self.program(rank, self.folder)
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)

    def end(self) -> dict[int, int]:
        """Wait for the ranks; returns their statuses, minus the signal: -1 for those that hang."""
        ends, statuses = time.monotonic() + _LIMIT, {}
        for rank, pid in self.pids.items():
            status = None
            while status is None and time.monotonic() < ends:
                done, code = os.waitpid(pid, os.WNOHANG)
                status = os.waitstatus_to_exitcode(code) if done else None
                time.sleep(0.0 if done else 0.002)
            if status is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            statuses[rank] = -1 if status is None else status
        os.kill(self.holder, signal.SIGKILL)
        os.waitpid(self.holder, 0)
        return statuses


# --- deaths -----------------------------------------------------------------------------------------------


def issuing(library: str) -> Program:
    """The program of a rank that issues all_reduces until a rank is lost."""

    def program(slot: int, folder: Path) -> None:
        config = {"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "30s"}}]}
        comm = mcr.init(config, backends=[library, *({"gloo"} - {library})])
        pending: list[tuple[int, torch.Tensor, Any]] = []
        issued = 0
        (folder / f"up.{slot}").touch()
        try:
            while True:
                x = torch.full((SIZES[issued % len(SIZES)],), float(issued % 1000 + slot))
                pending.append((issued, x, comm.all_reduce(x, async_op=True, backend=library)))
                issued += 1
                if len(pending) > 6:
                    pending.pop(0)[2].wait()
        except mcr.PeerLost:
            raised = time.monotonic()
        new = mcr.shrink()
        ended = time.monotonic()
        right = True
        for number, x, work in pending:
            if work.info.sequence <= comm.done:
                right &= bool((x == 3 * (number % 1000) + sum(range(RANKS))).all())
        y = torch.ones(3)
        new.all_reduce(y)
        right &= y.tolist() == [2.0] * 3
        told = {
            "done": comm.done,
            "right": right,
            "raised": raised,
            "shrink": ended - raised,
            "issued": issued,
        }
        (folder / f"told.{slot}").write_text(json.dumps(told))
        mcr.finalize()

    return program


def die_once(library: str, chance: random.Random) -> dict[str, Any]:
    """One job that loses a rank."""
    with tempfile.TemporaryDirectory(prefix="mcr-survive-") as name:
        folder = Path(name)
        job = Job(issuing(library), RANKS, folder)
        ends = time.monotonic() + _LIMIT
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
            "hung": -1 in left,
            "failed": not good,
            "errors": errors,
            "same": len({each["done"] for each in told}) == 1,
            "right": all(each["right"] for each in told),
            "told": max((each["raised"] - died for each in told), default=0.0),
            "shrink": max((each["shrink"] for each in told), default=0.0),
        }


# --- several hosts ----------------------------------------------------------------------------------------


def on_hosts(count: int, fault: str) -> tuple[float, float]:
    """Seconds until the last survivor raises, and of the longest shrink."""
    made: Any = TwoHosts(None) if count == 2 else Racks(1, count)
    per_host = CHURNING // count
    beats = f"{silence(count):.2f}s"  # as few seconds of silence as the number of hosts allows
    least = per_host if count == 2 and fault == "host" else None  # half of the ranks, which are no majority
    with tempfile.TemporaryDirectory(prefix="mcr-survive-") as name, made as hosts:
        options = {"heartbeat": beats, "min_ranks": least}
        with surviving.job_on(hosts, Path(name), per_host, **options) as job:
            if fault in ("host", "cut"):
                victims = job.on(count - 1)
                since = time.monotonic()
                if fault == "cut":
                    hosts.cut(count - 1)
                else:
                    job.lose_host(hosts, count - 1)
            else:
                victims = [0 if fault == "rank 0" else CHURNING - 1]
                since = job.lose("kill", victims)
            left = [rank for rank in range(CHURNING) if rank not in victims]
            said = job.gone_on(left).values()
            job.end(left)
        raised = max(each["raised"] for each in said) - since
        return raised, max(each["shrunk"] - each["raised"] for each in said)


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
        kinds = [(2, "rank"), (2, "rank 0"), (2, "host"), *((4, fault) for fault in FAULTS)]
        rows = []
        for count, fault in kinds:
            losses = [on_hosts(count, fault) for _ in range(rounds)]
            figures = [f"{value(each):.2f}" for each in zip(*losses, strict=True) for value in (median, max)]
            rows.append([str(count), fault, str(rounds), *figures])
        head = ["hosts", "lost", "times", "told, s", "at most", "shrink, s", "at most"]
        parts += ["### Four ranks on several hosts, gloo", harness.markdown(head, rows)]
        harness.show(head, rows)
    note = "a time is of the slower survivor: from the kill to `PeerLost`, and of the call of `mcr.shrink`"
    text = harness.page("Ranks that go on without lost ones", harness.command(), note, *parts)
    harness.write(text, output, f"survive_{hardware}")


run = harness.program(main)

if __name__ == "__main__":
    run()
