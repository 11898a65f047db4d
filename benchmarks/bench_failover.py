"""A library that fails while another one takes over: right results, the time that it takes, and its cost.

    python benchmarks/bench_failover.py --failures 1000 --cuts 10

*Failures*: three ranks of one host issue all_reduces, several at a time, and check each sum. A random rank
has its library fail at a random moment: gloo's connections are closed, shared memory reports an error. The
library comes back soon, and fails again. *Cuts*: two network namespaces with two links, gloo on one of them,
MPI and the job's store on the other. The first one is taken down in the middle of an all_reduce of 1 MiB and
is up again four seconds later. *Cost*: without a failure, calls and steps of examples/gpt with failover and
without, in turns. *Short batches*: small calls, 20 at a time at full speed (`wait: spin`), of which the
fastest batch counts, so that other work of the machine matters little. The report goes to
benchmarks/results/failover_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import math
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import harness
import torch
import typer
from harness import HARDWARE, ROOT, Dated, Hardware
from hosts import inside, ip
from two_hosts import TwoHosts, why_not

import mcr_plus as mcr
from mcr_plus.core.sockets import shut_down
from mcr_plus.job.init import current
from mcr_plus.reliability.failover import reinstate
from mcr_plus.reliability.failover.channel import FailoverChannel

sys.path.insert(0, str(ROOT / "examples" / "common"))
from corpus import VOCABULARY
from transformer import LanguageModel, Shape

RANKS: Final = 3
PAIRS: Final = (("gloo", "msccl"), ("msccl", "gloo"))
SIZES: Final = (1, 1000, 100_000)  # elements
DATA: Final = "data0"  # the link that is cut
CUT_S: Final = 4.0
COSTS: Final = (8, 4 << 10, 1 << 20, 64 << 20)  # bytes
STEPS: Final = 4
BATCH: Final = 20  # calls


def _config(backends: Sequence[str], *, failover: bool = True) -> dict[str, Any]:
    dispatch = {"failover": failover, "timeout": "30s"}
    return {"version": 1, "backends": list(backends), "pipeline": [{"select": {}}, {"dispatch": dispatch}]}


def _channel(name: str) -> FailoverChannel:
    channel = current().communicator.opened.runtime.channels[name].channel
    assert isinstance(channel, FailoverChannel)
    return channel


def _break(channel: FailoverChannel) -> None:
    """Let the library fail on this rank."""
    if channel.slot.backend.name == "gloo":
        shut_down(channel._own._connections)  # type: ignore[attr-defined]
    else:
        with current().engine.lock:
            channel.fail("an error")


def _sum(rank: int, number: int, size: int) -> float:
    return float((rank + 1) * (number % 13 + 1) + size % 7)


# --- on ranks -------------------------------------------------------------------------------------------


def failing(backends: list[str], failures: int, seed: int) -> dict[str, Any] | None:
    """Operations until the library has failed so often."""
    torch.set_num_threads(1)
    for name in ("_FIRST_TRY", "_LAST_TRY"):
        setattr(reinstate, name, 0.02)
    shared, wrong, slow = random.Random(seed), 0, []
    with mcr.init(_config(backends)) as comm:
        channel, own = _channel(backends[0]), random.Random(f"{seed} {comm.rank}")
        pending: list[tuple[mcr.Work, torch.Tensor, float]] = []
        number = moves = 0
        was = False
        while moves < failures or pending:
            size, victim, ends = shared.choice(SIZES), shared.randrange(comm.size), shared.random() < 0.3
            if shared.random() < 0.1 and victim == comm.rank and not channel.moved:
                threading.Timer(own.random() * 0.004, _break, [channel]).start()
            tensor = torch.full((size,), _sum(comm.rank, number, size))
            expected = sum(_sum(rank, number, size) for rank in range(comm.size))
            work = comm.all_reduce(tensor, async_op=True, backend=backends[0])
            assert work is not None
            pending.append((work, tensor, expected))
            number += 1
            if ends:
                for each, found, value in pending:
                    began = time.perf_counter()
                    each.wait()
                    if each.info.instead_of and not was:
                        slow.append(time.perf_counter() - began)
                    was = bool(each.info.instead_of)
                    wrong += not bool((found == value).all())
                    found.fill_(-1.0)
                pending.clear()
                agreed = torch.tensor(
                    [channel._round]
                )  # the least, so that ranks end with the same operation
                comm.all_reduce(agreed, mcr.MIN, backend=backends[1])
                moves = int(agreed)
        totals = comm.all_gather_object((wrong, slow))
        if comm.rank:
            return None
        return {
            "operations": number * comm.size,
            "failures": moves,
            "wrong": sum(each for each, _ in totals),
            "slow": [each for _, times in totals for each in times],
        }


def cut(folder: str, cuts: int) -> dict[str, Any] | None:
    """All_reduces over a link that is cut from outside."""
    torch.set_num_threads(1)
    os.environ["MCR_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"]
    os.environ["GLOO_SOCKET_IFNAME"] = DATA
    wrong, taken, libraries = 0, [], set()
    with mcr.init(_config(["gloo", "mpi"])) as comm:
        number = 0
        while True:
            if comm.rank == 0:
                Path(folder, "begun").touch()
            is_end = torch.tensor([Path(folder, "end").exists()])
            comm.broadcast(is_end, 0, backend="mpi")
            if is_end:
                break
            for _ in range(4):
                tensor = torch.full((1 << 18,), _sum(comm.rank, number, 1))
                began = time.perf_counter()
                work = comm.all_reduce(tensor, async_op=True, backend="gloo")
                assert work is not None
                work.wait()
                wrong += not bool((tensor == sum(_sum(rank, number, 1) for rank in range(comm.size))).all())
                taken.append(time.perf_counter() - began)
                libraries.add(work.info.backend)
                number += 1
        back, gaps = _channel("gloo")._generation, sorted(taken)[-cuts:]
        total = sum(comm.all_gather_object(wrong))
        if comm.rank:
            return None
        return {
            "wrong": total,
            "operations": number,
            "gaps": gaps,
            "back": back,
            "libraries": sorted(libraries),
        }


def costs(backends: list[str], rounds: int) -> dict[str, Any] | None:
    """Microseconds of calls and milliseconds of steps, with failover and without, by round."""
    torch.set_num_threads(1)

    def calls(failover: bool) -> dict[str, float]:
        found = {}
        with mcr.init(_config(backends, failover=failover)) as comm:
            for nbytes in COSTS:
                tensor, part = torch.zeros(nbytes // 4), torch.zeros(max(1, nbytes // 4 // comm.size))
                gathered = torch.zeros(part.numel() * comm.size)
                for name, call in (
                    ("all_reduce", partial(comm.all_reduce, tensor)),
                    ("all_gather", partial(comm.all_gather_into_tensor, gathered, part)),
                ):
                    repeats = max(5, min(400, int(20e6 / nbytes)))
                    for _ in range(max(3, repeats // 20)):
                        call()
                    times = []
                    for _ in range(5):
                        comm.barrier()
                        times.append(harness.seconds(call, max(1, repeats // 5)))
                    slowest = torch.tensor([1e6 * median(times)])
                    comm.all_reduce(slowest, mcr.MAX)
                    found[f"{name} {nbytes}"] = float(slowest)
        return found

    def steps(failover: bool) -> dict[str, float]:
        stages: list[dict[str, Any]] = [
            {"fuse": {}}, {"select": {}}, {"dispatch": {"failover": failover}},
        ]  # fmt: skip
        with mcr.init({"version": 1, "backends": backends, "pipeline": stages}) as comm:
            model = LanguageModel(Shape(), 0)
            wrapped, optimizer = mcr.wrap(model, torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True))
            generator = torch.Generator().manual_seed(comm.rank)
            times = []
            for _ in range(STEPS + 2):
                windows = torch.randint(VOCABULARY, (4, Shape().sequence + 1), generator=generator)
                began = time.perf_counter()
                optimizer.zero_grad()
                losses = wrapped(windows)
                (losses.text + losses.penalty).backward()
                optimizer.step()
                times.append(1e3 * (time.perf_counter() - began))
            slowest = torch.tensor(times[2:])
            comm.all_reduce(slowest, mcr.MAX)
            return {"step of examples/gpt": float(slowest.median())}

    turns = harness.in_turns(
        {"off": False, "on": True}, rounds, lambda failover: calls(failover) | steps(failover)
    )
    is_first = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0"
    return turns if is_first else None


def short_batches(backends: list[str], batches: int) -> dict[str, list[float]] | None:
    """Microseconds of small calls in the fastest of so many batches, without failover and with."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for failover in (False, True, False, True):
        config = _config(backends, failover=failover)
        config["pipeline"][-1]["dispatch"]["wait"] = "spin"
        with mcr.init(config) as comm:
            tensor, part, gathered = torch.zeros(2), torch.zeros(1), torch.zeros(comm.size)
            for name, call in (
                ("all_reduce 8", partial(comm.all_reduce, tensor)),
                ("all_gather 8", partial(comm.all_gather_into_tensor, gathered, part)),
            ):
                harness.seconds(call, 5 * BATCH)
                took = 1e6 * min(harness.seconds(call, BATCH) for _ in range(batches))
                both = found.setdefault(name, [math.inf, math.inf])
                both[failover] = min(both[failover], took)
            is_first = comm.rank == 0
    return found if is_first else None


# --- what came out --------------------------------------------------------------------------------------


class TwoLinks(TwoHosts):
    """Two hosts with a second link of their own, `DATA`."""

    def connect(self) -> None:
        """Make both links."""
        super().connect()
        names = [f"mcd{letter}{os.getpid()}" for letter in "ab"]
        ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for host, (space, link) in enumerate(zip(self.names, names, strict=True)):
            ip("link", "set", link, "netns", space, "name", DATA)
            inside(space, "ip", "address", "add", f"10.78.0.{host + 1}/24", "dev", DATA)
            inside(space, "ip", "link", "set", DATA, "up")

    def pull(self, up: bool) -> None:
        """Take the second link down, or up again."""
        inside(self.names[1], "ip", "link", "set", DATA, "up" if up else "down")


def with_cuts(cuts: int) -> dict[str, Any]:
    """Run `cut` on two hosts, and cut the link so often."""
    with TwoLinks(None) as hosts, tempfile.TemporaryDirectory() as folder:
        ended = threading.Event()

        def cutter() -> None:
            while not Path(folder, "begun").exists():
                time.sleep(0.05)
            chance = random.Random(3)
            for _ in range(cuts):
                time.sleep(1.0 + chance.random())
                hosts.pull(up=False)
                time.sleep(CUT_S)
                hosts.pull(up=True)
                ended.wait(6.0)  # until gloo is back
            Path(folder, "end").touch()

        threading.Thread(target=cutter, daemon=True).start()
        found = dict(harness.on_ranks(harness.on_both(hosts), cut, folder, cuts))
        ended.set()
        return found


@harness.program
def main(
    failures: Annotated[int, typer.Option(help="Of a library, of each of two.")] = 500,
    cuts: Annotated[int, typer.Option(help="Of the link between two hosts.")] = 5,
    rounds: Annotated[int, typer.Option(help="Of the costs, in turns.")] = 5,
    batches: Annotated[int, typer.Option(help="Of small calls at full speed.")] = 200,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    parts: list[str] = []
    rows = []
    for backends in PAIRS if failures else ():
        found = harness.on_ranks(harness.here(RANKS), failing, list(backends), failures, 11)
        ms = sorted(1e3 * each for each in found["slow"])
        rows.append(
            [
                " -> ".join(backends), str(found["failures"]), str(found["operations"]), str(found["wrong"]),
                f"{median(ms):.0f}", f"{ms[int(0.99 * len(ms))]:.0f}", f"{ms[-1]:.0f}",
            ]
        )  # fmt: skip
    if rows:
        head = ["library", "failures", "operations", "wrong", "wait then, ms: median", "99 %", "largest"]
        parts += ["### Failures at random moments, three ranks", harness.markdown(head, rows)]
    reason = why_not() if cuts else None
    if cuts and reason is None:
        found = with_cuts(cuts)
        gaps = ", ".join(f"{1e3 * gap:.0f}" for gap in found["gaps"])
        parts += [
            "### One of two links is cut",
            f"{found['operations']} all_reduces of 1 MiB by {' and '.join(found['libraries'])}, "
            f"{found['wrong']} wrong; {cuts} cuts. The longest operations, ms: {gaps}. gloo came back "
            f"{found['back']} times.",
        ]
    elif cuts:
        parts += [f"No cuts: {reason}"]
    rows = []
    for backends in PAIRS if rounds else ():
        turns = harness.on_ranks(harness.here(2), costs, list(backends), rounds)
        for name in turns["on"][0]:
            on, off = ([turn[name] for turn in turns[key]] for key in ("on", "off"))
            ratios = [one / other for one, other in zip(on, off, strict=True)]
            unit = "ms" if "step" in name else "µs"
            rows.append(
                [
                    backends[0],
                    name,
                    f"{median(off):.1f} {unit}",
                    f"{median(on):.1f} {unit}",
                    f"{median(ratios):.3f}",
                ]
            )
    if rows:
        head = ["library", "call (bytes)", "without failover", "with", "ratio"]
        parts += ["### Cost without a failure, two ranks, medians of turns", harness.markdown(head, rows)]
    rows = []
    for backends in PAIRS if batches else ():
        for name, (off, on) in harness.on_ranks(
            harness.here(2), short_batches, list(backends), batches
        ).items():
            rows.append([backends[0], name, f"{off:.1f}", f"{on:.1f}"])
    if rows:
        head = ["library", "call (bytes)", "without failover, µs", "with"]
        parts += [f"### The fastest of {batches} short batches, two ranks", harness.markdown(head, rows)]
    text = harness.page("Failover", harness.command(), f"{rounds} turns", *parts)
    harness.write(text, output, f"failover_{hardware}")


if __name__ == "__main__":
    main()
