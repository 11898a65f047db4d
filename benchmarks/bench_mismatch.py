"""Ranks that issue different operations: what each of them is told, by every library, on one host and two.

    python benchmarks/bench_mismatch.py [--before 0 8 1000] [--ranks 2 3] [--hosts 1 2]

The programs are those of `tests/support/mismatches.py`: one rank does something else than the others, after
all have run both programs as often as `--before` says. *Named*: the rank was told, with what two ranks had
issued. *Told*: it was told without that. *Garbage*: its program returned something else than among ranks that
agree. *Silent*: it was not told at all. *Lost*: the process ended before it could say. False alarms are
errors while all ranks agree. Ranks on two hosts are in two network namespaces; shared memory does not reach
across them. The report goes to benchmarks/results/mismatch_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final

import harness
import torch
import typer
from harness import HARDWARE, MCR_PLUS, ROOT, Launch
from two_hosts import TwoHosts, why_not

import mcr_plus as mcr

sys.path.append(str(ROOT / "tests" / "support"))

from mismatches import CASES, try_case

LIBRARIES: Final = ("msccl", "mpi", "gloo")
VERDICTS: Final = ("named", "told", "garbage", "silent", "lost")
LIMIT_S: Final = 900


def rank(folder: str, libraries: list[str], before: int) -> None:
    """On ranks: every case on every library; a line for each, as soon as it is known."""
    torch.set_num_threads(1)
    stages: list[dict[str, Any]] = [{"compress": {}}, {"select": {}}, {"dispatch": {"timeout": "10s"}}]
    comm = mcr.init({"version": 1, "backends": libraries, "pipeline": stages})
    everyone = list(range(comm.size))
    with Path(folder, str(comm.rank)).open("w") as file:
        for backend in libraries:
            for name in cases(libraries):
                groups = mcr.new_group(everyone), mcr.new_group(everyone)
                for found in try_case(name, backend, groups[0], before=before, right=groups[1]):
                    print(json.dumps(found), file=file, flush=True)


def cases(libraries: list[str]) -> list[str]:
    """Those that can be tried with these libraries."""
    return [name for name in CASES if name != "backend" or {"mpi", "gloo"} <= set(libraries)]


def verdict(found: dict[str, Any]) -> str:
    """What became of a fault on one rank."""
    if found["garbage"]:
        return "garbage"
    if found["error"] is None:
        return "silent"
    words = CASES[found["case"].split("/")[0]].words
    ranks = set(re.findall(r"rank (\d+)", found["text"]))
    named = len(ranks) >= 2 and all(re.search(word, found["text"]) for word in words)
    return "named" if named and found["error"] == "OrderMismatch" else "told"


def run(hosts: TwoHosts | None, ranks: int, before: int) -> list[list[str]]:
    """One job; a row per library: verdicts on all ranks, false alarms, the slowest answer in seconds."""
    libraries: list[str] = [*LIBRARIES] if hosts is None else ["mpi", "gloo"]
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    options: dict[str, Any] = {"timeout": LIMIT_S, "check": False, **silent}

    def here(words: Sequence[str]) -> None:
        subprocess.run([*MCR_PLUS, "run", "-n", str(ranks), *words], **options)

    launch: Launch = here
    if hosts is not None:
        launch = harness.on_both(hosts, per_host=-(-ranks // 2), ranks=ranks, **options)
    with tempfile.TemporaryDirectory(prefix="mcr-mismatch-") as name:
        with suppress(subprocess.TimeoutExpired):  # what has been said until then counts
            harness.on_ranks(launch, rank, name, libraries, before)
        found = [json.loads(line) for path in Path(name).iterdir() for line in path.read_text().splitlines()]
    rows = []
    for library in libraries:
        mine = [each for each in found if each["case"].split("/")[1] == library]
        faults = [each for each in mine if not each["twin"]]
        counts = Counter(verdict(each) for each in faults)
        counts["lost"] = len(cases(libraries)) * ranks - len(faults)
        alarms = sum(each["twin"] and each["error"] is not None for each in mine)
        slowest = max((each["seconds"] for each in faults), default=0.0)
        rows.append([library, *(str(counts[each]) for each in VERDICTS), str(alarms), f"{slowest:.2f}"])
        for each in faults:
            if verdict(each) != "named":
                print(f"  {each['case']} rank {each['rank']}: {verdict(each)}: {each['text']}", flush=True)
    return rows


@harness.program
def main(
    before: Annotated[list[int], typer.Option(default_factory=lambda: [0, 8, 1000])],
    ranks: Annotated[list[int], typer.Option(default_factory=lambda: [2, 3])],
    hosts: Annotated[list[int], typer.Option(min=1, max=2, default_factory=lambda: [1, 2])],
) -> None:
    reason = why_not() if 2 in hosts else None
    if reason is not None:
        print(f"left out, two hosts: {reason}")
    rows: list[list[str]] = []
    for host_count, size, calls in product(hosts, ranks, before):
        if host_count == 2 and reason is not None:
            continue
        with TwoHosts("1gbit") if host_count == 2 else nullcontext() as both:
            found = [[str(host_count), str(size), str(calls), *row] for row in run(both, size, calls)]
        print(*(" ".join(row) for row in found), sep="\n", flush=True)
        rows += found
    note = f"counted are ranks: {len(CASES)} programs times the ranks of the job."
    head = ["hosts", "ranks", "calls before", "library", *VERDICTS, "false alarms", "slowest answer, s"]
    text = harness.page(
        "Ranks that issue different operations", harness.command(), note, harness.markdown(head, rows)
    )
    harness.write(text, None, f"mismatch_{HARDWARE}")


if __name__ == "__main__":
    main()
