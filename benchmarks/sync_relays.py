"""One source and several receivers behind one link: bytes from the source, and seconds until all have them.

`bench_sync.py --only-relays` runs it. All receivers begin with other weights than the source, so the first
version brings all of them; the next ones change 1 % of the values.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import harness
import torch
from two_hosts import TwoHosts

import mcr_plus as mcr
from mcr_plus.rendezvous.stream import StreamConnection

BITS: Final = torch.int16
NUMEL: Final = 12_800_000
WITHIN: Final = 300.0  # s


def weights(numel: int, version: int) -> torch.Tensor:
    """The weights of a version; one of 100 values differs from those of the version before."""
    old = torch.arange(numel, dtype=torch.int32).remainder_(31).to(BITS)
    if version:
        old += ((torch.arange(numel, dtype=torch.int32) + version) // 100).to(BITS)
    return old.view(torch.bfloat16)


def push(folder: Path, receivers: int, numel: int, versions: int) -> None:
    """Be the source; a version begins when all receivers have the one before."""
    torch.set_num_threads(1)
    held = weights(numel, 0)
    with mcr.init(backends=["gloo"]):
        sync = mcr.sync({"w": held}, src=0, invite=folder / "policy.sync")
        _until(lambda: sync.stats()["joined"] == receivers)
        rows = []
        for version in range(1, versions + 1):
            held.copy_(weights(numel, version))
            sent, begin = _sent(), time.monotonic()
            sync.push()
            _until(lambda: len(list(folder.glob(f"{version}-*.json"))) == receivers)  # noqa: B023
            ends = [json.loads(path.read_text()) for path in folder.glob(f"{version}-*.json")]
            link = _sent() - sent
            (folder / f"{version}.all").touch()
            _until(lambda: len(list(folder.glob(f"{version}-*.same"))) == receivers)  # noqa: B023
            stats = sync.stats()
            rows.append({
                "link": link, "first": min(ends) - begin, "last": max(ends) - begin,
                "relayed": stats["relayed"], "payload": stats["bytes"] if version > 1 else held.nbytes,
            })  # fmt: skip
        sync.close()
    (folder / "rows.json").write_text(json.dumps(rows))


def receive(folder: Path, name: str, numel: int, *, alone: bool) -> None:
    """Be a receiver until the source closes. `alone`: as if there were no relays."""
    torch.set_num_threads(1)
    if alone:
        StreamConnection.hosts = property(lambda _: ("here", "here"))  # type: ignore[assignment]
    mine = torch.zeros(numel, dtype=torch.bfloat16)
    with mcr.join_sync(folder / "policy.sync", {"w": mine}, timeout=WITHIN) as sync:
        try:
            while version := sync.pull(timeout=WITHIN):
                told = folder / f"{name}.tmp"
                told.write_text(json.dumps(time.monotonic()))  # of the clock that both hosts share
                told.rename(folder / f"{version}-{name}.json")
                _until((folder / f"{version}.all").exists)  # else it would take the core from the others
                if not torch.equal(mine.view(BITS), weights(numel, version).view(BITS)):
                    raise SystemExit(f"receiver {name}: version {version} differs")
                (folder / f"{version}-{name}.same").touch()
        except mcr.SyncClosed:
            print(f"receiver {name} forwarded {sync.stats()['forwarded_bytes']:,} bytes", file=sys.stderr)


def _until(is_done: Any) -> None:
    ends = time.monotonic() + WITHIN
    while not is_done():
        if time.monotonic() > ends:
            raise SystemExit("receivers do not come")
        time.sleep(0.005)


def _sent() -> int:
    """Bytes that this host has sent on its links."""
    links = [path for path in Path("/sys/class/net").iterdir() if path.name != "lo"]
    return sum(int((path / "statistics" / "tx_bytes").read_text()) for path in links)


@contextmanager
def receivers_of(
    hosts: TwoHosts, folder: Path, count: int, numel: int, versions: int, *, alone: bool
) -> Iterator[tuple[subprocess.Popen[bytes], list[subprocess.Popen[bytes]]]]:
    """Start the source on the first host and receivers on the second."""
    program = [sys.executable, str(Path(__file__))]
    source = [*program, "push", str(folder), str(count), str(numel), str(versions)]
    receiver = [*program, "receive", str(folder), "NAME", str(numel), str(int(alone))]
    first, second = hosts.beside([source, receiver])
    started = [subprocess.Popen(first)]
    try:
        lines = [[word.replace("NAME", str(number)) for word in second] for number in range(count)]
        started += [subprocess.Popen(line) for line in lines]
        yield started[0], started[1:]
    finally:
        for process in started:
            process.kill()
            process.wait()


def relays_report(rate: str, count: int, versions: int, numel: int = NUMEL) -> str:
    """Figures with relays and without them."""
    rows = []
    for alone in (False, True):
        with (
            tempfile.TemporaryDirectory() as name,
            TwoHosts(rate) as hosts,
            receivers_of(hosts, Path(name), count, numel, versions, alone=alone) as (source, _),
        ):
            if source.wait(4 * WITHIN):
                raise SystemExit("the source has failed")
            found = json.loads(Path(name, "rows.json").read_text())
        for what, listed in (("all weights", found[:1]), ("1 % changed", found[1:])):
            link, payload, begun, end = (
                median(row[key] for row in listed) for key in ("link", "payload", "first", "last")
            )
            rows.append([
                "without" if alone else "with", what, f"{payload:,.0f}", f"{link / payload:.3f}",
                f"{begun * 1e3:,.0f}", f"{end * 1e3:,.0f}", f"{end / begun:.2f}",
            ])  # fmt: skip
    head = [
        "relays",
        "version",
        "payload",
        "bytes on the link / payload",
        "first, ms",
        "last, ms",
        "last / first",
    ]
    return f"## {count} receivers behind {rate}\n\n" + harness.markdown(head, rows)


if __name__ == "__main__":
    if sys.argv[1] == "push":
        push(Path(sys.argv[2]), *map(int, sys.argv[3:]))
    else:
        receive(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), alone=bool(int(sys.argv[5])))
