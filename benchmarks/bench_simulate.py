"""`mcr-plus simulate`: foretold and measured steps of a DDP program, on one host and several; large jobs.

    python benchmarks/bench_simulate.py --ranks 2 4 --rounds 3
    python benchmarks/bench_simulate.py --ranks 0 --hosts 2 4 8 --rate 100mbit --rounds 1
    python benchmarks/bench_simulate.py --ranks 0 --large 1024 100000 --planned 1024

`ddp_steps.py`, which knows only torch.distributed, runs on so many ranks of this host over gloo, and is then
simulated on one node, at the costs of gloo that `mcr-plus tune` measures here (kept in --tables). Ranks that
share cores compute more slowly: the computation is multiplied by ranks / cores.

`--hosts` runs it on network namespaces (racks.py), over torch's gloo and over mcr_plus's, which compares
operations first. Both are foretold from operations on two hosts, which are measured again beside others:
all_reduce and all_to_all of 64 KiB and 1 MiB by their costs (bucketing/scaling, see bench_scaling.py), and
the step by `simulate` at these costs. Cores in use are those that the steps of all ranks take.

Jobs of `--large` ranks are simulated on nodes of 8 ranks, those of `--planned` with `planned_steps.py`. The
report goes to benchmarks/results/simulate_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import bench_scaling as scaling
import harness
import typer
import yaml
from bench_scaling import TWO, WAYS, Setting
from harness import HARDWARE, ROOT, Dated, Hardware, Rate, Rounds
from hosts import need_hosts
from racks import Racks

from mcr_plus.bucketing.scaling import ClusterCosts, from_table
from mcr_plus.tables.table import load_table

PROGRAM: Final = str(ROOT / "benchmarks" / "ddp_steps.py")
PLANNED: Final = str(ROOT / "benchmarks" / "planned_steps.py")
BACKENDS: Final = {"torch": "gloo", "mcr_plus": "mcr"}
SIZES: Final = [4 << 10, 64 << 10, 1 << 20, 4 << 20]
LINKS: Final = "{inside: {rate: 20GB/s, latency: 2us}, nic: {rate: 100Gbit/s, latency: 5us, per: node}}"
CORES: Final = len(os.sched_getaffinity(0))
KINDS: Final = ["all_reduce", "all_to_all"]
HOSTS: Final = [
    "hosts", "gloo of", *(f"{kind} {size}: error" for kind in KINDS for size in ("64 KiB", "1 MiB")),
    "step: foretold ms", "measured ms", "error", "processor ms of a rank", "cores in use",
]  # fmt: skip
HEAD: Final = ["ranks", "foretold ms", "measured ms", "error", "exposed ms", "tensors MiB", "ran", "seconds"]


def mcr_plus(*words: object) -> str:
    """What the command prints."""
    line = [sys.executable, "-m", "mcr_plus.cli.main", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{line}\n{done.stdout}{done.stderr}")
    return done.stdout


def measured(ranks: int, width: int) -> float:
    """Milliseconds of a step."""
    printed = mcr_plus("run", "-n", ranks, "--via", "torch", PROGRAM, width)
    return float(json.loads(printed.splitlines()[-1])["step_ms"])


def foretold(
    ranks: int, words: Sequence[object], folder: Path, cluster: str, *options: object
) -> dict[str, Any]:
    """The document of a simulation, with its seconds. `words`: program and arguments."""
    path = folder / "cluster.yaml"
    path.write_text(cluster)
    begin = time.perf_counter()
    printed = mcr_plus("simulate", "-n", ranks, "--topology", path, *options, "--json", *words)
    return {**json.loads(printed), "seconds": time.perf_counter() - begin}


def table_of(ranks: int, tables: Path) -> Path:
    """A pipeline with the costs of gloo on so many ranks of this host, measured unless they are there."""
    table, pipeline = tables / f"gloo_{ranks}.yaml", tables / f"pipeline_{ranks}.yaml"
    if not table.exists():
        binding = ["--no-bind"] if ranks > CORES else []
        kinds = ("--kinds", "all_reduce,broadcast", "--min", "4KiB", "--max", "16MiB", "--budget", "60s")
        mcr_plus("tune", "-n", ranks, "--via", "torch", "--backends", "gloo", *kinds, *binding, "-o", table)
    pipeline.write_text(f"version: 1\npipeline: [{{select: {{table: {table.name}}}}}, {{dispatch: {{}}}}]\n")
    return pipeline


def operations(racks: Racks, way: str, sizes: list[int]) -> dict[str, dict[str, float]]:
    """Microseconds of operations by kind and bytes."""

    def launch(words: Sequence[str]) -> None:
        racks.torchrun([sys.executable, *words], timeout=scaling.LIMIT_S)

    found: dict[str, dict[str, float]] = harness.on_ranks(launch, scaling.measure, way, sizes, KINDS)
    return found


def steps(racks: Racks, way: str, width: int) -> tuple[float, float]:
    """Milliseconds of a step, and of a processor in it on a rank."""
    line = [sys.executable, PROGRAM, str(width), BACKENDS[way]]
    started = list(racks.start(line, stdout=subprocess.PIPE, text=True))
    printed, *_ = [each.communicate(timeout=scaling.LIMIT_S)[0] for each in started]
    found = json.loads(printed.splitlines()[-1])
    return found["step_ms"], found["processor_ms"]


def host_rows(
    counts: Sequence[int], ways: Sequence[str], width: int, rate: str, rounds: int, folder: Path
) -> list[list[str]]:
    """Operations and steps on hosts, foretold from those on two, and measured."""
    rows: list[list[str]] = []
    two_hosts = scaling.topology(TWO, rate)
    for way in ways:
        pipeline, there = folder / "pipeline.yaml", folder / "there.yaml"
        pipeline.write_text("version: 1\nbackends: [gloo]\npipeline: [{select: {}}, {dispatch: {}}]\n")
        os.environ["MCR_CONFIG"] = str(pipeline)  # of the measured ranks
        with Racks(1, 2, rate) as racks:
            points_of = operations(racks, way, SIZES)
        rules = [
            {"kind": kind, "backend": "gloo", "bytes": "0..", "measured": {"gloo": points}}
            for kind, points in points_of.items()
        ]
        measured_by = {"ranks": 2, "nodes": 2, "ranks_per_node": 1}
        table = folder / "two.yaml"
        table.write_text(yaml.safe_dump({"version": 1, "fingerprint": measured_by, "rules": rules}))
        with_table = folder / "with_table.yaml"
        with_table.write_text(pipeline.read_text().replace("select: {}", f"select: {{table: {table}}}"))
        there.write_text(described(TWO, rate))
        known = from_table(load_table(table))
        for count in counts:
            setting = Setting(f"{count} hosts", 1, count)
            costs = ClusterCosts(known, scaling.topology(setting, rate), two_hosts)
            options = ("--config", with_table, "--measured-on", there, "--no-memory", "--steps", 8)
            slower = ("--compute", max(count / CORES, 1.0))
            words = (PROGRAM, width, BACKENDS[way])
            step = foretold(count, words, folder, described(setting, rate), *options, *slower)["step_ms"]
            with Racks(1, count, rate) as racks:
                real = [operations(racks, way, SIZES[1:-1]) for _ in range(rounds)]
                times = [steps(racks, way, width) for _ in range(rounds)]
            errors = {
                (kind, size): 1e6 * costs.of(kind, int(size), range(count), "gloo").seconds / us - 1
                for kind in KINDS
                for size in real[0][kind]
                for us in [median(turn[kind][size] for turn in real)]
            }
            ms, processor = map(median, zip(*times, strict=True))
            used = 100 * count * processor / CORES / ms
            rows.append(
                [
                    str(count), way, *(f"{100 * each:+.0f} %" for each in errors.values()), f"{step:.1f}",
                    f"{ms:.1f}", f"{100 * (step / ms - 1):+.1f} %", f"{processor:.0f}", f"{used:.0f} %",
                ]
            )  # fmt: skip
            typer.echo(" ".join(rows[-1]), err=True)
    return rows


def described(setting: Setting, rate: str) -> str:
    """The cluster of a setting, as a file has it."""
    text = rate.replace("mbit", "Mbit/s").replace("gbit", "Gbit/s")
    return f"nodes: {setting.hosts}\nlinks: {{nic: {{rate: {text}}}}}\n"


def row_of(name: str, documents: list[dict[str, Any]], times: list[float]) -> list[str]:
    """Medians, the error of the foretold step, and what it took to foretell it."""
    step, exposed = (median(each[key] for each in documents) for key in ("step_ms", "exposed_ms"))
    peak = max(each["peak_bytes"] or 0 for each in documents[0]["roles"]) / 2**20
    ran = sum(len(each["ran"]) for each in documents[0]["roles"])
    real = f"{median(times):.1f}" if times else "-"
    error = f"{100 * (step / median(times) - 1):+.1f} %" if times else "-"
    seconds = median(each["seconds"] for each in documents)
    return [
        name,
        f"{step:.1f}",
        real,
        error,
        f"{exposed:.1f}",
        f"{peak:.1f}" if peak else "-",
        str(ran),
        f"{seconds:.0f}",
    ]


@harness.program
def main(
    ranks: Annotated[list[int] | None, typer.Option(help="Numbers of ranks on this host; 0: none.")] = None,
    hosts: Annotated[list[int] | None, typer.Option(help="Numbers of hosts.")] = None,
    large: Annotated[list[int] | None, typer.Option(help="Numbers of ranks that are only simulated.")] = None,
    planned: Annotated[list[int] | None, typer.Option(help="The same, of a program with a plan.")] = None,
    ways: Annotated[str, typer.Option(help="Over which gloo on hosts, with commas between.")] = ",".join(
        WAYS
    ),
    width: Annotated[int, typer.Option(help="Of the transformer.")] = 256,
    width_on_hosts: Annotated[int, typer.Option(help="The same on hosts.")] = 128,
    rate: Rate = "100mbit",
    rounds: Rounds = 3,
    tables: Annotated[Path | None, typer.Option(help="Folder of tuning tables.")] = None,
    output: Dated = None,
    hardware: Hardware = HARDWARE,
) -> None:
    rows: list[list[str]] = []
    names = harness.chosen(ways.split(","), WAYS, "way")
    if hosts:
        need_hosts(mpi=False)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kept = tables or folder
        for count in ranks if ranks is not None else (2, 4):
            if count < 2:
                continue
            slower = max(count / CORES, 1.0)
            options = ("--config", table_of(count, kept), "--compute", slower, "--steps", 8)
            one_node = f"nodes: 1\nranks_per_node: {count}\n"
            turns: dict[str, Callable[[], Any]] = {
                "foretold": partial(foretold, count, (PROGRAM, width), folder, one_node, *options),
                "measured": partial(measured, count, width),
            }
            found: dict[str, list[Any]] = harness.in_turns(turns, rounds, lambda turn: turn())
            rows.append(row_of(f"{count}", found["foretold"], found["measured"]))
        jobs: list[tuple[int, tuple[object, ...], tuple[str, ...]]]
        jobs = [(count, (PROGRAM, width), ()) for count in large or ()]
        jobs += [(count, (PLANNED,), ("--no-memory",)) for count in planned or ()]
        for count, words, others in jobs:
            cluster = f"nodes: {-(-count // 8)}\nranks_per_node: 8\nlinks: {LINKS}\n"
            name = f"{count:,}{', planned' if PLANNED in words else ''}"
            rows.append(row_of(name, [foretold(count, words, folder, cluster, *others)], []))
            typer.echo(" ".join(rows[-1]), err=True)
        on_others = host_rows(hosts or (), names, width_on_hosts, rate, rounds, folder)
    note = (
        f"transformer of width {width} under DDP over gloo, {width_on_hosts} on hosts at {rate}; medians of "
        f"{rounds} runs in turns; large jobs once, on nodes of 8 ranks"
    )
    parts = []
    for head, some in ((HEAD, rows), (HOSTS, on_others)):
        if some:
            harness.show(head, some, width=130)
            parts.append(harness.markdown(head, some))
    harness.write(
        harness.page("Simulated programs", harness.command(), note, *parts), output, f"simulate_{hardware}"
    )


if __name__ == "__main__":
    main()
