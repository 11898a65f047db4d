"""`mcr-plus simulate`: foretold and measured steps of a DDP program on this host, and jobs of many ranks.

    python benchmarks/bench_simulate.py --ranks 2 4 --rounds 3
    python benchmarks/bench_simulate.py --ranks 0 --large 1024 100000

`ddp_steps.py`, which knows only torch.distributed, runs on so many ranks of this host over gloo, and is then
simulated on one node, at the costs of gloo that `mcr-plus tune` measures here (kept in --tables). Ranks that
share cores compute more slowly: the computation is multiplied by ranks / cores. Jobs of `--large` ranks are
simulated on nodes of 8 ranks. The report goes to benchmarks/results/simulate_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import harness
import typer
from harness import HARDWARE, ROOT, Dated, Hardware, Rounds

PROGRAM: Final = str(ROOT / "benchmarks" / "ddp_steps.py")
LINKS: Final = "{inside: {rate: 20GB/s, latency: 2us}, nic: {rate: 100Gbit/s, latency: 5us, per: node}}"
CORES: Final = len(os.sched_getaffinity(0))
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


def foretold(ranks: int, width: int, folder: Path, cluster: str, *options: object) -> dict[str, Any]:
    """The document of a simulation, with its seconds."""
    path = folder / "cluster.yaml"
    path.write_text(cluster)
    begin = time.perf_counter()
    printed = mcr_plus("simulate", "-n", ranks, "--topology", path, *options, "--json", PROGRAM, width)
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


def row_of(ranks: int, documents: list[dict[str, Any]], times: list[float]) -> list[str]:
    """Medians, the error of the foretold step, and what it took to foretell it."""
    step, exposed = (median(each[key] for each in documents) for key in ("step_ms", "exposed_ms"))
    peak = max(each["peak_bytes"] for each in documents[0]["roles"]) / 2**20
    ran = sum(len(each["ran"]) for each in documents[0]["roles"])
    real = f"{median(times):.1f}" if times else "-"
    error = f"{100 * (step / median(times) - 1):+.1f} %" if times else "-"
    seconds = median(each["seconds"] for each in documents)
    return [
        f"{ranks:,}",
        f"{step:.1f}",
        real,
        error,
        f"{exposed:.1f}",
        f"{peak:.1f}",
        str(ran),
        f"{seconds:.0f}",
    ]


@harness.program
def main(
    ranks: Annotated[list[int] | None, typer.Option(help="Numbers of ranks on this host; 0: none.")] = None,
    large: Annotated[list[int] | None, typer.Option(help="Numbers of ranks that are only simulated.")] = None,
    width: Annotated[int, typer.Option(help="Of the transformer.")] = 256,
    rounds: Rounds = 3,
    tables: Annotated[Path | None, typer.Option(help="Folder of tuning tables.")] = None,
    output: Dated = None,
    hardware: Hardware = HARDWARE,
) -> None:
    rows = []
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
                "foretold": partial(foretold, count, width, folder, one_node, *options),
                "measured": partial(measured, count, width),
            }
            found: dict[str, list[Any]] = harness.in_turns(turns, rounds, lambda turn: turn())
            rows.append(row_of(count, found["foretold"], found["measured"]))
        for count in large or ():
            cluster = f"nodes: {-(-count // 8)}\nranks_per_node: 8\nlinks: {LINKS}\n"
            rows.append(row_of(count, [foretold(count, width, folder, cluster)], []))
    harness.show(HEAD, rows, width=110)
    note = f"transformer of width {width} under DDP over gloo; medians of {rounds} runs in turns; " + (
        "large jobs once, on nodes of 8 ranks"
    )
    harness.write(
        harness.page("Simulated programs", harness.command(), note, harness.markdown(HEAD, rows)),
        output,
        f"simulate_{hardware}",
    )


if __name__ == "__main__":
    main()
