"""Receivers of weights that are many versions behind, and the memory that a source has for them.

`bench_sync.py --only-late` times the `pull` of such a receiver: with the changes of each version, with all
weights instead, and with what the source chooses. `--only-memory` reports what a source keeps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

import harness
import torch

import mcr_plus as mcr
from mcr_plus.weight_sync import receiver
from mcr_plus.weight_sync.source import WeightSource

CHANGES: Final = "changes"
WHOLE: Final = "all weights"
CHOSEN: Final = "chosen"
# What a step is said to cost the receiver, in bytes, so that the source decides for one way; None: as it is.
_COSTS: Final[Mapping[str, int | None]] = {WHOLE: 1 << 60, CHANGES: -(1 << 60), CHOSEN: None}
_SETS: Final = 8  # of elements that versions move, in turns
_BITS: Final = torch.int16
Move = tuple[torch.Tensor, torch.Tensor]


def _moves(numel: int, density: float) -> list[Move]:
    """Elements and their steps, in units of the last place, for versions in turns."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(_SETS):
        where = torch.nonzero(torch.rand(numel, generator=draw) < density).view(-1)
        sizes = torch.where(torch.rand(len(where), generator=draw) < 0.15, 3, 1)
        signs = torch.randint(0, 2, (len(where),), generator=draw) * 2 - 1
        found.append((where, (sizes * signs).to(_BITS)))
    return found


def _start(numel: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return (torch.randn(numel, generator=draw) * 0.02).bfloat16()


def _choose(way: str) -> None:
    """Have this process' sources decide for a way from now on."""
    chain, cost = _CHAIN, _COSTS[way]

    def forced(self: Any, *arguments: Any, exactly: bool) -> Any:
        *first, said = arguments
        return chain(self, *first, said if cost is None else cost, exactly=exactly)

    source: Any = WeightSource
    source._chain = forced


_CHAIN: Final[Any] = WeightSource._chain


def on_hosts(numel: int, density: float, behind: Sequence[int], rounds: int) -> list[dict[str, Any]] | None:
    """Bytes and seconds of the pull of a receiver that is so many versions behind; rank 0's answer."""
    torch.set_num_threads(1)
    receiver.AHEAD = 1  # type: ignore[misc]  # so that no more than the first version has come
    weights, moves, version = _start(numel), _moves(numel, density), 0
    with mcr.init(backends=["gloo"]) as comm:
        sync = mcr.sync({"weights": weights}, history=2 * max(behind) * (2 * density + 0.01))
        results: dict[tuple[int, str], list[tuple[float, int, int]]] = {}
        for number, count, way in product(range(rounds + 1), behind, _COSTS):
            _choose(way)
            for _ in range(count + 1):  # the first one comes at once
                version += 1
                where, steps = moves[version % _SETS]
                if comm.rank == 0:
                    weights.view(_BITS)[where] += steps
                    sync.push()
            while comm.rank == 0 and sync.stats()["version"] < version:
                time.sleep(0.001)
            comm.barrier()
            before, begin = sync.stats(), time.perf_counter()
            while comm.rank and sync.stats()["version"] < version:
                sync.pull(timeout=120)
            taken, after = time.perf_counter() - begin, sync.stats()
            expected = weights.clone()
            comm.broadcast(expected, 0)
            if not torch.equal(weights.view(_BITS), expected.view(_BITS)):
                raise SystemExit(f"version {version} differs on rank {comm.rank}")
            if number:  # the first round finds out what the link carries
                got = after.get("received_bytes", 0) - before.get("received_bytes", 0)
                results.setdefault((count, way), []).append(
                    (taken, got, after["anchors"] - before["anchors"])
                )
        rows = [
            {
                "behind": count, "way": way, "density": density, "dense_bytes": weights.nbytes,
                "seconds": median(each[0] for each in found), "bytes": median(each[1] for each in found),
                "anchors": sum(each[2] > 0 for each in found), "times": len(found),
            }
            for (count, way), found in results.items()
        ]  # fmt: skip
        answers: Any = comm.all_gather_object(rows)
        return list(answers[1]) if comm.rank == 0 else None


def table(found: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Those of several links, each with its name."""
    head = [
        "link", "density", "versions behind", "MB of changes", "ms", "MB of all weights", "ms", "chosen",
        "ms",
    ]  # fmt: skip
    lines = []
    for link, rows in found:
        by = {(row["density"], row["behind"], row["way"]): row for row in rows}
        for density, behind in dict.fromkeys(key[:2] for key in by):
            one, other, chosen = (by[density, behind, way] for way in (CHANGES, WHOLE, CHOSEN))
            times = chosen["times"]
            choice = {0: CHANGES, times: WHOLE}.get(
                chosen["anchors"], f"{WHOLE} {chosen['anchors']} of {times} times"
            )
            figures = [
                word
                for row in (one, other)
                for word in (f"{row['bytes'] / 1e6:.2f}", f"{1e3 * row['seconds']:,.0f}")
            ]
            last = [choice, f"{1e3 * chosen['seconds']:,.0f}"]
            lines.append([link, f"{density:.1%}", f"{behind}", *figures, *last])
    return harness.markdown(head, lines)


# --- memory ---------------------------------------------------------------------------------------------


def _resident(*, peak: bool = False) -> int:
    """Bytes of this process in memory, now or at most since `_forget_peak`."""
    words = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(words["VmHWM" if peak else "VmRSS"].split()[0])


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory(numel: int, density: float, history: float) -> list[list[Any]] | None:
    """What a source has beside the weights, in multiples of their bytes; rank 0's answer."""
    torch.set_num_threads(1)
    weights, moves, version = _start(numel), _moves(numel, density), 0
    rows: list[list[Any]] = []
    with mcr.init(backends=["gloo"]) as comm:
        mcr.sync({"weights": weights[:65536].clone()}).close()  # what is loaded once is not of the weights
        _forget_peak()
        first = _resident()

        def note(what: str) -> None:
            if comm.rank == 0:
                rows.append([
                    what, (_resident() - first) / weights.nbytes,
                    (_resident(peak=True) - first) / weights.nbytes,
                    sync.stats()["history_bytes"] / weights.nbytes,
                ])  # fmt: skip
                _forget_peak()

        def push(*, everything: bool = False) -> None:
            nonlocal version
            version += 1
            where, steps = moves[version % _SETS]
            if comm.rank == 0:
                if everything:
                    weights.view(_BITS).mul_(31).add_(version)
                else:
                    weights.view(_BITS)[where] += steps
            sync.push()
            sync.pull(timeout=120)
            comm.barrier()

        sync = mcr.sync({"weights": weights}, history=history)
        note("begun")
        push()
        note(f"a version of which {density:.0%} changed")
        for _ in range(round(1.5 * history / (0.7 * density))):
            push()
        note("so many that the history is full")
        if comm.rank:
            end: Any = sync._end
            with end._holding:
                end._feeds[0]._digests = [0]
        push()
        note("a receiver has got all weights")
        push(everything=True)
        note("a version of which all changed")
        push()
        note(f"then one of which {density:.0%} changed")
        return rows if comm.rank == 0 else None


def memory_report(numel: int = 64_000_037, density: float = 0.01, history: float = 1.0) -> str:
    """Run the job; a part of a report."""
    rows = harness.on_ranks(harness.here(2), memory, numel, density, history)
    head = ["after", "beside the weights, in multiples of them", "at most since the line before", "history"]
    lines = [[str(row[0]), *(f"{each:.2f}" for each in row[1:])] for row in rows]
    return (
        f"## Memory of a source\n\n{numel:,} bfloat16 values on one rank, one receiver, "
        f"`history={history:g}`. Resident memory of the source's process, without the weights themselves.\n\n"
        + harness.markdown(head, lines)
    )
