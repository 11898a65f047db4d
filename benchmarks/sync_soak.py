"""Weight synchronisation for many versions, with flipped bits, restarts, and receivers that are killed.

`bench_sync.py --only-soak` runs it: two ranks of a job, and one process at a time outside it. `--only-joins`
starts receivers outside the job one after another, and reports what they leave at the source.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import harness
import numpy as np
import torch
from forked import forked

import mcr_plus as mcr
from mcr_plus.kernels import delta
from mcr_plus.weight_sync.connection import SourceConnection

BITS: Final = torch.int16
SOAKED: Final = 100_000


def soak_bits(version: int) -> torch.Tensor:
    """The weights of a version of the soak by its number: 1 of 97 moves in each, others each time."""
    first, places = _soak_start()
    return first + ((version + places) // 97 - places // 97).to(BITS)


@cache
def _soak_start() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(SOAKED, generator=random).bfloat16()
    return weights.view(BITS), torch.randint(0, 97, (SOAKED,), generator=random)


def joins(file: Path, seen: Path) -> None:
    """Be a receiver outside the job until killed; adds a line for each version that it has pulled."""
    mine = torch.zeros(SOAKED, dtype=torch.bfloat16)
    while True:
        # The source may close this synchronisation, and begin the next one.
        with suppress(mcr.BackendError), mcr.join_sync(file, {"weights": mine}, timeout=600) as sync:
            while (version := sync.pull(timeout=600)) is not None:
                same = torch.equal(mine.view(BITS), soak_bits(version))
                with seen.open("ab", buffering=0) as lines:
                    lines.write(b"same\n" if same else f"version {version} differs\n".encode())


def killed_receivers(file: Path, folder: Path, is_done: Callable[[], bool]) -> tuple[int, list[str]]:
    """Kill a receiver outside the job and start it again; how often, and what they have pulled.

    One after another is killed at a random moment after it has begun, or after its first version.
    """
    seen, draw, kills = folder / "seen", np.random.default_rng(1), 0
    seen.touch()
    delta.prepare(2)
    soak_bits(0)
    _ = mcr.join_sync  # all that receivers need is there before the first is forked
    while not file.exists() and not is_done():  # the job has yet to start
        time.sleep(0.05)
    while not is_done():
        before = seen.stat().st_size if kills % 2 else -1
        process = forked(lambda: joins(file, seen), folder / "errors")
        while seen.stat().st_size == before and not is_done():
            time.sleep(0.005)
        time.sleep(draw.uniform(0.0, 0.5))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise SystemExit((folder / "errors").read_text())
        kills += 1
    return kills, seen.read_text().splitlines()


def soaked(count: int, file: str) -> dict[str, Any] | None:
    """Versions of a small model with damage and restarts of the receiver; how many arrived bit for bit."""
    torch.set_num_threads(1)
    received, draw = SourceConnection._received, np.random.default_rng(0)

    def damaged(self: Any, *args: Any) -> Any:
        kind, newest, parts, body = received(self, *args)
        if parts and draw.random() < 0.01:
            body[int(draw.integers(8 * parts, len(body)))] ^= 1 << int(draw.integers(8))
        return kind, newest, parts, body

    with mcr.init(backends=["gloo"]) as comm:
        if comm.rank == 1:
            SourceConnection._received = damaged  # type: ignore[assignment,method-assign]
        mine, same, restarts, refused, anchors = soak_bits(0).view(torch.bfloat16), 0, 0, 0, 0
        sync = mcr.sync({"weights": mine}, invite=file)
        for number in range(count):
            if number % 500 == 499:  # the receiver is a new process, with other weights
                sync.close()
                stats = sync.stats()
                refused, anchors = refused + stats.get("refused", 0), anchors + stats["anchors"]
                if comm.rank == 1:
                    mine.zero_()
                sync, restarts = mcr.sync({"weights": mine}, invite=file), restarts + 1
            expected = soak_bits(number + 1)
            if comm.rank == 0:
                mine.view(BITS).copy_(expected)
            sync.push(number + 1)
            sync.pull(timeout=60)
            comm.barrier()  # or the receiver would skip versions
            same += torch.equal(mine.view(BITS), expected)
        sync.close()
        stats = sync.stats()
        refused, anchors = refused + stats.get("refused", 0), anchors + stats["anchors"]
        answers = comm.all_gather_object(
            {"same": same, "restarts": restarts, "refused": refused, "anchors": anchors}
        )
        return {"count": count, **answers[1]} if comm.rank == 0 else None


def soak_report(count: int) -> str:
    """Run so many versions; a part of a report."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(1) as pool:
        folder = Path(made)
        file = folder / "policy.sync"
        job = pool.submit(harness.on_ranks, harness.here(2), soaked, count, str(file))
        kills, seen = killed_receivers(file, folder, job.done)
        done = job.result()
    return (
        "## Damage and restarts\n\n"
        f"{done['same']:,} of {done['count']:,} versions of 100,000 values arrived bit for bit, in "
        f"{time.monotonic() - begin:,.0f} s; {done['refused']} messages with a flipped bit were refused, the "
        f"receiver began anew {done['restarts']} times with other weights, and got {done['anchors']} anchors."
        "\n\n"
        f"Beside it, a receiver outside the job was killed (SIGKILL) and started again {kills:,} times, at "
        f"random moments: {seen.count('same'):,} of the {len(seen):,} versions that it "
        "pulled were the source's bit for bit."
    )


def pushes(file: str, folder: str) -> dict[str, Any]:
    """The source of weights: push versions until the file `done` is there."""
    torch.set_num_threads(1)
    with mcr.init(backends=["gloo"]):
        mine, version = soak_bits(0).view(torch.bfloat16), 0
        with mcr.sync({"weights": mine}, invite=file) as sync:
            while not Path(folder, "done").exists():
                version += 1
                mine.view(BITS).copy_(soak_bits(version))
                sync.push(version)
                if version == 1:
                    written = Path(folder, "written")
                    written.write_text(str(os.getpid()))
                    written.rename(Path(folder, "pid"))
                time.sleep(0.05)
            stats = sync.stats()
    return {"versions": version, "receivers": stats["receivers"], "lost": len(stats["lost"])}


def joins_once(file: Path, seen: Path, *, is_killed: bool) -> None:
    """Join, pull a version and compare it; then leave, or be killed."""
    mine, begin = torch.zeros(SOAKED, dtype=torch.bfloat16), time.monotonic()
    with mcr.join_sync(file, {"weights": mine}, timeout=60) as sync:
        version = sync.pull(timeout=60)
        seconds = time.monotonic() - begin
        same = version is not None and torch.equal(mine.view(BITS), soak_bits(version))
        with seen.open("a") as lines:
            lines.write(f"{int(same)} {seconds}\n")
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)


def _left_of(pid: int) -> dict[str, float]:
    """Resident MB, open files and threads of a process."""
    words = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "MB": int(words["VmRSS"].split()[0]) / 1e3,
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(words["Threads"]),
    }


def _settled(pid: int, first: dict[str, float]) -> dict[str, float]:
    """What a process has once its files and threads are as few as at first, or after half a minute."""
    ends = time.monotonic() + 30
    while True:
        left = _left_of(pid)
        if time.monotonic() > ends or all(left[what] <= first[what] for what in ("files", "threads")):
            return left
        time.sleep(0.1)


def joins_report(count: int) -> str:
    """Have so many receivers join, one after another; a part of a report."""
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(1) as pool:
        folder = Path(made)
        file, seen = folder / "policy.sync", folder / "seen"
        job = pool.submit(harness.on_ranks, harness.here(1), pushes, str(file), made)
        delta.prepare(2)
        soak_bits(0)
        _ = mcr.join_sync  # as in `killed_receivers`
        while not (folder / "pid").exists() and not job.done():
            time.sleep(0.05)
        if job.done():
            job.result()  # raises why it has ended
        rows: list[tuple[int, dict[str, float]]] = []
        try:
            pid = int((folder / "pid").read_text())
            rows.append((0, _left_of(pid)))
            for number in range(1, count + 1):
                is_killed = number % 2 == 0
                body = partial(joins_once, file, seen, is_killed=is_killed)
                joiner = forked(body, folder / "errors")
                code = os.waitstatus_to_exitcode(os.waitpid(joiner, 0)[1])
                if code != (-signal.SIGKILL if is_killed else 0):
                    raise SystemExit((folder / "errors").read_text())
                if number == count or number in (count // 10, count // 2):
                    rows.append((number, _settled(pid, rows[0][1])))
        finally:
            (folder / "done").touch()
        done = job.result()
        found = [line.split() for line in seen.read_text().splitlines()]
    times = 1e3 * np.array([float(seconds) for _, seconds in found])
    table = [
        [f"{number:,}", f"{row['MB']:.1f}", f"{row['files']}", f"{row['threads']}"] for number, row in rows
    ]
    same = sum(word == "1" for word, _ in found)
    typical, slow = np.quantile(times, (0.5, 0.99))
    return (
        "## Receivers that come and go\n\n"
        f"{count:,} processes outside the job joined one after another, pulled all of 100,000 values and "
        f"left, every second one by SIGKILL, while the source pushed {done['versions']:,} versions: {same:,} "
        f"had the source's bits. From the call of `mcr.join_sync` to the end of the first `pull`: "
        f"{typical:.1f} ms in the median, {slow:.1f} ms for 99 of 100. The source, with receivers that had "
        "gone:\n\n" + harness.markdown(["joined", "resident MB", "open files", "threads"], table)
    )
