"""A training step of each example over a slow link: computing alone, communicating alone, ours, and DDP's.

    python benchmarks/bench_two_hosts.py --rate 1gbit --examples gpt moe [--codecs bf16,int8_block]

Two network namespaces joined by a link of that rate, one rank and half of the cores on each. Computing alone
is the rank's share in a process without peers, on both hosts at once; communicating alone repeats the
operations of a recorded step, one after another, by the same pipeline. Jobs take turns in rounds; a step's
time is the median of its jobs' medians. Goals: at most 1.10 times the larger of the two, and never slower
than DDP over gloo. With codecs (the methods of `bench_training`) the rest of the pipeline is that of "ours".
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import bench_training as training
import harness
import torch
import typer
from harness import HARDWARE, MCR_PLUS, ROOT, Budget, Call, Dated, Hardware, Rate, Rounds, Tables
from two_hosts import TwoHosts, need_two_hosts

import mcr_plus as mcr

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
CANDIDATES: dict[str, dict[str, dict[str, Any]]] = {
    "ours": {"fuse": {"plan": "exact"}},
    "ours, buckets by size": {"fuse": {}},
    "ours, progress thread": {"fuse": {"plan": "exact"}, "dispatch": {"progress": "thread"}},
}
TORCH = "torch gloo (DDP)"
COMPUTE = "computing alone"
COMMUNICATE = "communicating alone"
CODECS = [candidate for candidate, method in training.METHODS.items() if method.gradients]


def pipeline(table: Path, candidate: str) -> dict[str, Any]:
    """The configuration of one of `CANDIDATES`, or of ours with one of `CODECS`."""
    rules = training.METHODS[candidate].rules() if candidate in CODECS else []
    changed = CANDIDATES["ours" if candidate in CODECS else candidate]
    stages = {"fuse": {}, "compress": {}, "select": {"table": str(table)}, "dispatch": {}}
    merged = [{name: {**options, **changed.get(name, {})}} for name, options in stages.items()]
    return {"version": 1, "backends": ["mpi", "gloo"], "pipeline": merged, "rules": rules}


class Bench:
    """Runs jobs of the examples on two hosts, and keeps what they report."""

    def __init__(self, hosts: TwoHosts, folder: Path, table: Path, steps: int) -> None:
        self.hosts, self.folder, self.table, self.steps = hosts, folder, table, steps

    def tune(self, budget: str) -> None:
        words = ["tune", "-o", str(self.table), "--kinds", KINDS, "--max", "32MiB", "--budget", budget]
        self.hosts.mpirun([*MCR_PLUS, *words], stdout=subprocess.DEVNULL)

    def job(self, example: str, *words: str) -> dict[str, Any]:
        """The report of one job with a rank on each host."""
        return harness.train(
            harness.on_both(self.hosts), EXAMPLES[example].program, *self._words(example), *words
        )

    def ours(self, example: str, candidate: str) -> dict[str, Any]:
        config = self.folder / "pipeline.yaml"
        config.write_text(json.dumps(pipeline(self.table, candidate)))
        return self.job(example, "--config", str(config))

    def alone(self, example: str) -> float:
        """Seconds of a step of each rank's share, both computed at once; the slower one's."""
        job = EXAMPLES[example]
        script = ROOT / "examples" / job.program / "train.py"
        line = [sys.executable, str(script), *self._words(example), *job.alone]
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
        return float(
            harness.on_ranks(harness.on_both(self.hosts), replay, report, pipeline(self.table, "ours"))
        )

    def _words(self, example: str) -> list[str]:
        return ["--steps", str(self.steps), *EXAMPLES[example].words]


def replay(report: Mapping[str, Any], config: dict[str, Any]) -> float | None:
    """On ranks: the operations of a recorded step, again and again without computing."""
    torch.set_num_threads(1)
    with mcr.init(config) as comm:
        operations = list(_operations(report, comm))

        def step() -> None:
            for operation in operations:
                operation()

        times = []
        for _ in range(REPEATS):
            comm.barrier()
            times.append(harness.seconds(step))
        slowest: float = max(comm.all_gather_object(median(times)))
    return slowest if comm.rank == 0 else None


def _operations(report: Mapping[str, Any], comm: mcr.Communicator) -> Iterator[Call]:
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
        call: Call = {
            "all_reduce": partial(comm.all_reduce, values, mcr.MAX, tag=tag),
            "all_to_all": partial(comm.all_to_all_single, space, values, tag=tag),
            "broadcast": partial(comm.broadcast, values, 0, tag=tag),
        }[kind]
        yield from [call] * count


def suited(codecs: Sequence[str], example: str) -> list[str]:
    """Those of the candidates with codecs that do something for an example."""
    matrices = training.EXAMPLES[EXAMPLES[example].program].matrices
    return [candidate for candidate in codecs if matrices or not training.METHODS[candidate].needs_matrices]


def measure(
    bench: Bench, example: str, rounds: int, codecs: Sequence[str]
) -> tuple[dict[str, float], dict[str, int]]:
    """Milliseconds of a step by candidate, and bytes that a rank sends in it by our candidates."""
    turns: dict[str, list[float]] = {}
    sent: dict[str, int] = {}
    recorded: dict[str, Any] = {}
    for _ in range(rounds):
        for candidate in (*CANDIDATES, *codecs):
            report = bench.ours(example, candidate)
            turns.setdefault(candidate, []).append(report["step_seconds"])
            sent[candidate] = sum(row["wire"] for row in report["communication"]) // report["steps"]
            recorded = report if candidate == "ours" else recorded
        turns.setdefault(TORCH, []).append(bench.job(example, "--comms", "torch")["step_seconds"])
        turns.setdefault(COMPUTE, []).append(bench.alone(example))
        turns.setdefault(COMMUNICATE, []).append(bench.communication(recorded))
    return {candidate: 1e3 * median(times) for candidate, times in turns.items()}, sent


def row_of(example: str, found: Mapping[str, float]) -> list[str]:
    """A line of the report's table."""
    bound = max(found[COMPUTE], found[COMMUNICATE])
    best = min(found[candidate] for candidate in CANDIDATES)
    figures = [f"{found[candidate]:.1f}" for candidate in (COMPUTE, COMMUNICATE, *CANDIDATES, TORCH)]
    return [example, *figures, f"{best / bound:.2f}", f"{found[TORCH] / best:.2f}"]


def codec_rows(example: str, found: Mapping[str, float], sent: Mapping[str, int]) -> list[list[str]]:
    """Lines of the table of codecs: rates relative to the best candidate without one, and to DDP."""
    best = min(CANDIDATES, key=lambda candidate: found[candidate])
    return [
        [
            example,
            candidate,
            f"{sent[candidate] / 2**20:.2f}",
            f"{found[candidate]:.1f}",
            f"{found[best] / found[candidate]:.2f}",
            f"{found[TORCH] / found[candidate]:.2f}",
        ]
        for candidate in (best, *(candidate for candidate in found if candidate in CODECS))
    ]


def text_of(rows: list[list[str]], encoded: list[list[str]], rate: str) -> str:
    """The report as Markdown."""
    head = ["example", COMPUTE, COMMUNICATE, *CANDIDATES, TORCH, "best of ours / max", "DDP / best of ours"]
    note = (
        "two network namespaces, one rank and half of the cores on each. Milliseconds; medians of rounds in "
        "which all take turns. Wanted: at most 1.10 times the larger of computing and communicating, and DDP "
        "/ ours at least 1."
    )
    with_codecs = [
        "## With codecs",
        'As "ours", with compressed all_reduces and, up to int4_block, compressed all_to_alls; biases and '
        "norms as they are. MiB that a rank sends in a step, the mean over all steps: with feedback or "
        "powersgd the first ones, until buckets are what they will be, are not compressed. Step rates "
        "relative to the best of ours without a codec, which has the first line of each example, and to DDP.",
        harness.markdown(["example", "way", "MiB", "ms", "rate, relative to ours", "to DDP"], encoded),
    ]
    title = f"A training step over a link of {rate}"
    return harness.page(
        title, harness.command(), note, harness.markdown(head, rows), *(with_codecs if encoded else ())
    )


@harness.program
def main(
    examples: Annotated[list[str], typer.Option(default_factory=lambda: list(EXAMPLES))],
    rate: Rate = "1gbit",
    codecs: Annotated[str, typer.Option(help="Methods with codecs; '' for none.")] = ",".join(CODECS),
    steps: Annotated[int, typer.Option(help="Of each job.")] = 20,
    rounds: Rounds = 3,
    table: Tables = None,
    tune: Budget = "120s",
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    harness.chosen(examples, EXAMPLES, "example")
    candidates = harness.chosen(codecs.split(","), CODECS, "way") if codecs else []
    need_two_hosts()
    rows, encoded = [], []
    with TwoHosts(rate) as hosts, tempfile.TemporaryDirectory() as folder:
        known = (table or Path(folder) / "table.yaml").absolute()
        bench = Bench(hosts, Path(folder), known, steps)
        if not known.exists():
            bench.tune(tune)
        for example in examples:
            found, sent = measure(bench, example, rounds, suited(candidates, example))
            rows.append(row_of(example, found))
            print(*rows[-1], sep="  ", flush=True)
            if candidates:
                encoded += codec_rows(example, found, sent)
                print(*("  ".join(row) for row in encoded if row[0] == example), sep="\n", flush=True)
    harness.write(text_of(rows, encoded, rate), output, f"steps_{hardware}-two-hosts")


if __name__ == "__main__":
    main()
