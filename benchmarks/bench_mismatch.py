"""Ranks that issue different operations: what each of them is told, by every library, on one host and two.

    python benchmarks/bench_mismatch.py [--before 0 8 1000] [--ranks 2 3] [--hosts 1 2]

The programs are those of `tests/mismatches.py`: one rank does something else than the others, after all have
run both programs as often as `--before` says. *Named*: the rank was told, with what two ranks had issued.
*Told*: it was told without that. *Garbage*: its program returned something else than among ranks that agree.
*Silent*: it was not told at all. *Lost*: the process ended before it could say. False alarms are errors while
all ranks agree. Ranks on two hosts are in two network namespaces; shared memory does not reach across them.
The report goes to benchmarks/results/mismatch_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from two_hosts import TwoHosts, why_not

import mcr_plus as mcr
from mcr_plus.environment import cores
from mcr_plus.selection.fingerprint import cpu_name

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
sys.path.append(str(ROOT / "tests"))

from mismatches import CASES, try_case  # noqa: E402 - the path to it is set above

LIBRARIES: Final = ("msccl", "mpi", "gloo")
VERDICTS: Final = ("named", "told", "garbage", "silent", "lost")
LIMIT_S: Final = 900


def rank(folder: Path, libraries: list[str], before: int) -> None:
    """On ranks: every case on every library; a line for each, as soon as it is known."""
    torch.set_num_threads(1)
    stages: list[dict[str, Any]] = [{"compress": {}}, {"select": {}}, {"dispatch": {"timeout": "10s"}}]
    comm = mcr.init({"version": 1, "backends": libraries, "pipeline": stages})
    everyone = list(range(comm.size))
    with (folder / f"{comm.rank}").open("w") as file:
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


def run(hosts: TwoHosts | None, ranks: int, before: int) -> list[list[Any]]:
    """One job; a row per library: verdicts on all ranks, false alarms, the slowest answer in seconds."""
    libraries: list[str] = [*LIBRARIES] if hosts is None else ["mpi", "gloo"]
    with tempfile.TemporaryDirectory(prefix="mcr-mismatch-") as name:
        words = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--rank",
            name,
            ",".join(libraries),
            str(before),
        ]
        options: dict[str, Any] = {
            "timeout": LIMIT_S,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }
        if hosts is None:
            line = [sys.executable, "-m", "mcr_plus.cli.main", "run", "-n", str(ranks), *words[1:]]
            start = partial(subprocess.run, line, check=False, **options)
        else:
            start = partial(hosts.mpirun, words, per_host=-(-ranks // 2), ranks=ranks, check=False, **options)
        with suppress(subprocess.TimeoutExpired):  # what has been said until then counts
            start()
        found = [json.loads(line) for path in Path(name).iterdir() for line in path.read_text().splitlines()]
    rows = []
    for library in libraries:
        mine = [each for each in found if each["case"].split("/")[1] == library]
        faults = [each for each in mine if not each["twin"]]
        counts = Counter(verdict(each) for each in faults)
        counts["lost"] = len(cases(libraries)) * ranks - len(faults)
        alarms = sum(each["twin"] and each["error"] is not None for each in mine)
        slowest = max((each["seconds"] for each in faults), default=0.0)
        rows.append([library, *(counts[each] for each in VERDICTS), alarms, f"{slowest:.2f}"])
        for each in faults:
            if verdict(each) != "named":
                print(f"  {each['case']} rank {each['rank']}: {verdict(each)}: {each['text']}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=int, nargs="+", default=[0, 8, 1000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    options = parser.parse_args()
    reason = why_not() if 2 in options.hosts else None
    if reason is not None:
        print(f"left out, two hosts: {reason}")
    lines = [
        f"# Ranks that issue different operations ({date.today():%Y-%m-%d})",
        "",
        f"`{shlex.join(['python', 'benchmarks/bench_mismatch.py', *sys.argv[1:]])}`, on {cpu_name()}, "
        f"{cores()} cores, Python {platform.python_version()}, torch {torch.__version__}. Counted are ranks: "
        f"{len(CASES)} programs times the ranks of the job.",
        "",
        "| hosts | ranks | calls before | library | named | told | garbage | silent | lost | false alarms "
        "| slowest answer, s |",
        "|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for hosts in options.hosts:
        if hosts == 2 and reason is not None:
            continue
        for ranks in options.ranks:
            for before in options.before:
                rows = _on(hosts, ranks, before)
                lines += [f"| {hosts} | {ranks} | {before} | {' | '.join(map(str, row))} |" for row in rows]
                print("\n".join(lines[-len(rows) :]), flush=True)
    target = RESULTS / f"mismatch_{platform.machine().split('_')[0]}-{cores()}core_{date.today():%Y%m}.md"
    target.write_text("\n".join(lines) + "\n")


def _on(hosts: int, ranks: int, before: int) -> list[list[Any]]:
    if hosts == 1:
        return run(None, ranks, before)
    with TwoHosts("1gbit") as both:
        return run(both, ranks, before)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(Path(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4]))
    else:
        main()
