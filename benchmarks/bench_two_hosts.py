"""A training step of each example over a slow link: computing alone, communicating alone, ours, and DDP's.

    python benchmarks/bench_two_hosts.py --rate 1gbit --examples gpt moe [--codecs bf16,int8_block]

Two network namespaces joined by a link of that rate, one rank and half of the cores on each. Computing alone
is the rank's share in a process without peers, on both hosts at once; communicating alone repeats the
operations of a recorded step, one after another, by the same pipeline. Jobs take turns in rounds; a step's
time is the median of its jobs' medians. Goals: at most 1.10 times the larger of the two, and never slower
than DDP over gloo. With codecs (the ways of `bench_training`) the rest of the pipeline is that of "ours".
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import bench_training as training
import torch
from two_hosts import TwoHosts, why_not

import mcr_plus as mcr
from mcr_plus.environment import cores
from mcr_plus.selection.fingerprint import cpu_name

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
KINDS = "all_reduce,all_to_all,all_gather,broadcast,barrier"
REPEATS = 20  # of a recorded step


@dataclass(frozen=True)
class Example:
    """A job, and what changes where one of its two ranks computes in a process of its own."""

    program: str
    words: Sequence[str] = ()
    alone: Sequence[str] = ()  # half of the rows or of the experts


EXAMPLES: Final = {
    "gpt": Example("gpt"),
    "gpt, few tokens": Example("gpt", ["--hidden", "512", "--batch", "1", "--sequence", "16"]),
    "moe": Example("moe", alone=["--experts", "4"]),
    "dlrm": Example("dlrm", ["--holdout", "0"], ["--batch-size", "64"]),
}
# Ours, by what differs in the pipeline.
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "ours": {"fuse": {"plan": "exact"}},
    "ours, buckets by size": {"fuse": {}},
    "ours, progress thread": {"fuse": {"plan": "exact"}, "dispatch": {"progress": "thread"}},
}
TORCH = "torch gloo (DDP)"
COMPUTE = "computing alone"
COMMUNICATE = "communicating alone"
CODECS = [way for way in training.WAYS if way != training.FLOAT32]


def pipeline(table: Path, way: str) -> dict[str, Any]:
    """The configuration of one of `WAYS`, or of ours with one of `CODECS`."""
    rules = training.WAYS[way].rules() if way in CODECS else []
    changed = WAYS["ours" if way in CODECS else way]
    stages = {"fuse": {}, "compress": {}, "select": {"table": str(table)}, "dispatch": {}}
    merged = [{name: {**options, **changed.get(name, {})}} for name, options in stages.items()]
    return {"version": 1, "backends": ["mpi", "gloo"], "pipeline": merged, "rules": rules}


class Bench:
    """Runs jobs of the examples on two hosts, and keeps what they report."""

    def __init__(self, hosts: TwoHosts, folder: Path, table: Path, steps: int) -> None:
        self.hosts, self.folder, self.table, self.steps = hosts, folder, table, steps

    def tune(self, budget: str) -> None:
        words = ["tune", "-o", str(self.table), "--kinds", KINDS, "--max", "32MiB", "--budget", budget]
        self._on_both([sys.executable, "-m", "mcr_plus.cli.main", *words])

    def job(self, example: str, *words: str) -> dict[str, Any]:
        """The report of one job with a rank on each host."""
        target = self.folder / "job.json"
        self._on_both([*self._line(example), *words, "--json", str(target)])
        return dict(json.loads(target.read_text()))

    def ours(self, example: str, way: str) -> dict[str, Any]:
        config = self.folder / "pipeline.yaml"
        config.write_text(json.dumps(pipeline(self.table, way)))
        return self.job(example, "--config", str(config))

    def alone(self, example: str) -> float:
        """Seconds of a step of each rank's share, both computed at once; the slower one's."""
        line = [*self._line(example), *EXAMPLES[example].alone]
        targets = [self.folder / f"alone{index}.json" for index in range(2)]
        started = [
            subprocess.Popen(command, stdout=subprocess.DEVNULL)
            for command in self.hosts.beside([[*line, "--json", str(target)] for target in targets])
        ]
        if sum(process.wait() for process in started):
            raise SystemExit(f"{example}: failed alone")
        return max(float(json.loads(target.read_text())["step_seconds"]) for target in targets)

    def communication(self, report: Mapping[str, Any]) -> float:
        """Seconds that the operations of a recorded step take, one after another."""
        recorded, target = self.folder / "recorded.json", self.folder / "replayed.json"
        recorded.write_text(json.dumps(report))
        config = self.folder / "pipeline.yaml"
        config.write_text(json.dumps(pipeline(self.table, "ours")))
        words = ["--replay", str(recorded), str(config), str(target)]
        self._on_both([sys.executable, __file__, *words])
        return float(json.loads(target.read_text()))

    def _line(self, example: str) -> list[str]:
        job = EXAMPLES[example]
        script = ROOT / "examples" / job.program / "train.py"
        return [sys.executable, str(script), "--steps", str(self.steps), *job.words]

    def _on_both(self, line: list[str]) -> None:
        self.hosts.mpirun(line, stdout=subprocess.DEVNULL)


def replay(recorded: Path, config: Path, target: Path) -> None:
    """On ranks: the operations of a recorded step, again and again without computing."""
    torch.set_num_threads(1)
    report = json.loads(recorded.read_text())
    with mcr.init(str(config)) as comm:
        operations = list(_operations(report, comm))
        times = []
        for _ in range(REPEATS):
            comm.barrier()
            began = time.perf_counter()
            for operation in operations:
                operation()
            times.append(time.perf_counter() - began)
        slowest = max(comm.all_gather_object(median(times)))
    if comm.rank == 0:
        target.write_text(json.dumps(slowest))


def _operations(report: Mapping[str, Any], comm: mcr.Communicator) -> Iterator[Callable[[], Any]]:
    """What a step of a job issues, by the means over its steps; vector operations with even parts."""
    for row in report["communication"]:
        count = max(1, round(row["count"] / report["steps"]))
        numel = max(1, row["bytes"] // row["count"] // 4 // comm.size) * comm.size
        values, space = torch.ones(numel), torch.empty(numel)
        kind, tag = row["kind"].removesuffix("_v"), row["tag"] or None
        if kind not in ("all_reduce", "all_to_all", "broadcast"):
            raise SystemExit(
                f"a step with {kind} cannot be repeated; known: all_reduce, all_to_all, broadcast"
            )
        call: Callable[[], Any] = {
            "all_reduce": partial(comm.all_reduce, values, mcr.MAX, tag=tag),
            "all_to_all": partial(comm.all_to_all_single, space, values, tag=tag),
            "broadcast": partial(comm.broadcast, values, 0, tag=tag),
        }[kind]
        yield from [call] * count


def suited(codecs: Sequence[str], example: str) -> list[str]:
    """Those of the ways with codecs that do something for an example."""
    matrices = training.EXAMPLES[EXAMPLES[example].program].matrices
    return [way for way in codecs if matrices or not training.WAYS[way].needs_matrices]


def measure(
    bench: Bench, example: str, rounds: int, codecs: Sequence[str]
) -> tuple[dict[str, float], dict[str, int]]:
    """Milliseconds of a step by way, and bytes that a rank sends in it by our ways."""
    turns: dict[str, list[float]] = {}
    sent: dict[str, int] = {}
    recorded: dict[str, Any] = {}
    for _ in range(rounds):
        for way in (*WAYS, *codecs):
            report = bench.ours(example, way)
            turns.setdefault(way, []).append(report["step_seconds"])
            sent[way] = sum(row["wire"] for row in report["communication"]) // report["steps"]
            recorded = report if way == "ours" else recorded
        turns.setdefault(TORCH, []).append(bench.job(example, "--comms", "torch")["step_seconds"])
        turns.setdefault(COMPUTE, []).append(bench.alone(example))
        turns.setdefault(COMMUNICATE, []).append(bench.communication(recorded))
    return {way: 1e3 * median(times) for way, times in turns.items()}, sent


def row_of(example: str, found: Mapping[str, float]) -> list[str]:
    """A line of the report's table."""
    bound = max(found[COMPUTE], found[COMMUNICATE])
    best = min(found[way] for way in WAYS)
    figures = [f"{found[way]:.1f}" for way in (COMPUTE, COMMUNICATE, *WAYS, TORCH)]
    return [example, *figures, f"{best / bound:.2f}", f"{found[TORCH] / best:.2f}"]


def codec_rows(example: str, found: Mapping[str, float], sent: Mapping[str, int]) -> list[list[str]]:
    """Lines of the table of codecs: rates relative to the best way without one, and to DDP."""
    best = min(WAYS, key=lambda way: found[way])
    return [
        [
            example,
            way,
            f"{sent[way] / 2**20:.2f}",
            f"{found[way]:.1f}",
            f"{found[best] / found[way]:.2f}",
            f"{found[TORCH] / found[way]:.2f}",
        ]
        for way in (best, *(way for way in found if way in CODECS))
    ]


def table_of(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    head = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows), ""]


def text_of(rows: list[list[str]], encoded: list[list[str]], rate: str, line: str) -> str:
    """The report as Markdown."""
    names = [
        "example",
        COMPUTE,
        COMMUNICATE,
        *WAYS,
        TORCH,
        "best of ours / max",
        "DDP / best of ours",
    ]
    with_codecs = [
        "## With codecs",
        "",
        'As "ours", with compressed all_reduces and, up to int4_block, compressed all_to_alls; biases and '
        "norms as they are. MiB that a rank sends in a step, the mean over all steps: with feedback or "
        "powersgd the first ones, until buckets are what they will be, are not compressed. Step rates "
        "relative to the best of ours without a codec, which has the first line of each example, and to DDP.",
        "",
        *table_of(["example", "way", "MiB", "ms", "rate, relative to ours", "to DDP"], encoded),
    ]
    return "\n".join(
        [
            f"# A training step over a link of {rate} ({date.today():%Y-%m-%d})",
            "",
            f"    {line}",
            "",
            f"{cpu_name()}, {cores()} cores, Python {platform.python_version()}, torch {torch.__version__}; "
            "two network namespaces, one rank and half of the cores on each. Milliseconds; medians of rounds "
            "in which all take turns. Wanted: at most 1.10 times the larger of computing and communicating, "
            "and DDP / ours at least 1.",
            "",
            *table_of(names, rows),
            *(with_codecs if encoded else ()),
        ]
    )


def main() -> None:
    if sys.argv[1:2] == ["--replay"]:
        replay(*map(Path, sys.argv[2:5]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it")
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--codecs", default=",".join(CODECS), help="ways with codecs; '' for none")
    parser.add_argument("--steps", type=int, default=20, help="of each job")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--table", type=Path, help="use this table; tune it if it is not there")
    parser.add_argument("--tune", default="120s", help="budget of tuning")
    parser.add_argument(
        "--hardware", default=f"{platform.machine()}-{cores()}core", help="for the file's name"
    )
    parser.add_argument("--output", type=Path, help="another file than the dated one")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(f"skipped: {reason}")
    codecs = training.chosen(options.codecs, CODECS, "way") if options.codecs else []
    rows, encoded = [], []
    with TwoHosts(options.rate) as hosts, tempfile.TemporaryDirectory() as folder:
        table = (options.table or Path(folder) / "table.yaml").absolute()
        bench = Bench(hosts, Path(folder), table, options.steps)
        if not table.exists():
            bench.tune(options.tune)
        for example in options.examples:
            found, sent = measure(bench, example, options.rounds, suited(codecs, example))
            rows.append(row_of(example, found))
            print(*rows[-1], sep="  ", flush=True)
            if codecs:
                encoded += codec_rows(example, found, sent)
                print(*("  ".join(row) for row in encoded if row[0] == example), sep="\n", flush=True)
    target = options.output or RESULTS / f"steps_{options.hardware}-two-hosts_{date.today():%Y%m}.md"
    line = f"python benchmarks/bench_two_hosts.py {shlex.join(sys.argv[1:])}"
    target.write_text(text_of(rows, encoded, options.rate, line))
    print(target)


if __name__ == "__main__":
    main()
