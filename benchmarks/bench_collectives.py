"""Every operation and size on every library, as tuned, and on torch.distributed; writes a dated report.

    python benchmarks/bench_collectives.py -n 2 --tune 300s            tune first, then compare
    python benchmarks/bench_collectives.py -n 2 --table table.yaml     with a table that is there, or will be
    python benchmarks/bench_collectives.py --two-hosts 1gbit           across a link between two namespaces

The report goes to benchmarks/results/collectives_<hardware>_<yyyymm>.md. In it: how far the tuned mix is from
the best single library of every operation and size, how far from torch.distributed, and how well the cost
model predicts sizes that it was not shown.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from two_hosts import TwoHosts, why_not

from mcr_plus.environment import cores
from mcr_plus.selection.cost import Curve
from mcr_plus.selection.fingerprint import cpu_name
from mcr_plus.selection.table import load_table
from mcr_plus.tuning.operations import KINDS, TORCH, TUNED
from mcr_plus.tuning.points import Point, settled
from mcr_plus.units import format_size

RESULTS = Path(__file__).parent / "results"
LEAST = 1024  # bytes from which the mix may not lose
Row = Mapping[str, Any]


def on_one_host(ranks: int, *words: str) -> Any:
    """The JSON document that a subcommand of mcr-plus prints, of a job on this host."""
    line = [sys.executable, "-m", "mcr_plus.cli.main", words[0], "-n", str(ranks), *words[1:], "--json"]
    return json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout)


def on_two_hosts(hosts: TwoHosts, *words: str) -> Any:
    """The same of a job with one rank on each of two hosts."""
    line = [sys.executable, "-m", "mcr_plus.cli.main", *words, "--json"]
    return json.loads(hosts.mpirun(line, stdout=subprocess.PIPE, text=True).stdout)


def by_cell(rows: Sequence[Row]) -> Iterator[tuple[str, int, dict[str, float]]]:
    """(kind, bytes, median microseconds by way)."""
    cells: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["verified"]:
            cells.setdefault((row["kind"], row["bytes"]), {})[row["backend"]] = row["p50_us"]
    for (kind, nbytes), times in cells.items():
        yield kind, nbytes, times


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values)))) if values else float("nan")


def summary(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """(what, wanted, measured)."""
    cells = list(by_cell(rows))
    singles = sorted({way for _, _, times in cells for way in times} - {TUNED, TORCH})
    best = [
        (kind, n, times[TUNED] / min(times[way] for way in singles if way in times))
        for kind, n, times in cells
        if TUNED in times and any(way in times for way in singles)
    ]
    large = [ratio for _, n, ratio in best if n >= LEAST]
    found = []
    if large:
        worst = max((each for each in best if each[1] >= LEAST), key=lambda each: each[2])
        over = sum(ratio > 1.05 for ratio in large)
        where = f"{worst[2]:.2f} ({worst[0]} {format_size(worst[1])})"
        found = [
            ("tuned / best single, worst from 1 KiB on", "≤ 1.05", where),
            ("… cells above 1.05, of those from 1 KiB on", "0", f"{over} of {len(large)}"),
            ("tuned / best single, geometric mean from 1 KiB on", "≤ 1.00", f"{geometric_mean(large):.3f}"),
        ]
    for way in singles:
        ratios = [times[way] / times[TUNED] for _, _, times in cells if {way, TUNED} <= times.keys()]
        found.append((f"{way} alone / tuned, geometric mean", "≥ 1", f"{geometric_mean(ratios):.2f}"))
    against = [times[TORCH] / times[TUNED] for _, _, times in cells if {TORCH, TUNED} <= times.keys()]
    if against:
        found.append(
            ("torch.distributed gloo / tuned, geometric mean", "≥ 3", f"{geometric_mean(against):.1f}")
        )
    return found


def hold_out(points: Sequence[Point]) -> dict[str, list[float]]:
    """Errors, by library, of predicting every second size from the others."""
    curves: dict[tuple[Any, ...], dict[int, float]] = {}
    for point in settled(points):
        if point.timing is not None and not point.overlap:
            key = (point.way, point.cell.kind, point.cell.dtype, point.cell.async_op)
            curves.setdefault(key, {})[point.cell.nbytes] = point.timing.p50
    errors: dict[str, list[float]] = {}
    for (way, *_), curve in curves.items():
        sizes = sorted(size for size in curve if size and size & (size - 1) == 0)
        shown = {size: curve[size] for size in sizes[::2]}
        errors.setdefault(way, []).extend(
            abs(Curve.through(shown).at(size).us / curve[size] - 1)
            for size in sizes[1::2]
            if size < max(shown)
        )
    return errors


def points_of(path: Path) -> list[Point]:
    """What `tune` has kept beside its table."""
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    return [Point.from_document(each) for each in documents if "timing" in each]


def table_of_times(rows: Sequence[Row]) -> Iterator[str]:
    cells = list(by_cell(rows))
    ways = list(dict.fromkeys(way for _, _, times in cells for way in times))
    for kind in dict.fromkeys(kind for kind, _, _ in cells):
        yield f"\n### {kind}\n"
        yield f"| bytes | {' | '.join(ways)} |"
        yield f"|---|{'---|' * len(ways)}"
        for _, nbytes, times in (cell for cell in cells if cell[0] == kind):
            figures = (f"{times[way]:.4g}" if way in times else "–" for way in ways)
            yield f"| {format_size(nbytes)} | {' | '.join(figures)} |"


def report(rows: Sequence[Row], points: Sequence[Point], table: Path, line: str) -> str:
    """The report as Markdown."""
    prints = load_table(table).fingerprint
    lines = [
        f"# Collectives: libraries, tuned mix, torch.distributed ({date.today():%Y-%m-%d})",
        "",
        f"    {line}",
        "",
        f"{cpu_name()}, {cores()} cores, Python {platform.python_version()}; "
        + ", ".join(f"{name} {' / '.join(values)}" for name, values in prints.items() if name != "cpu"),
        "",
        "Medians in microseconds of the slowest rank, of several passes the median. Ways take turns in one "
        "run, ranks keep to cores of their own, all results were verified.",
        "",
        "| what | wanted | measured |",
        "|---|---|---|",
        *(f"| {what} | {wanted} | {measured} |" for what, wanted, measured in summary(rows)),
    ]
    for way, errors in hold_out(points).items():
        if not errors:
            continue
        middle, high = np.percentile(errors, (50, 95))
        what = f"cost model, {way}, every second size held out ({len(errors)}): error"
        lines.append(f"| {what}, median | ≤ 5 % | {100 * middle:.1f} % |")
        lines.append(f"| {what}, 95th percentile | ≤ 15 % | {100 * high:.1f} % |")
    return "\n".join([*lines, *table_of_times(rows)]) + "\n"


def compare(options: argparse.Namespace, command: Callable[..., Any]) -> tuple[str, list[Row]]:
    """Tune (unless there is a table), compare; the report, and the rows it is made of."""
    scope = ["--kinds", options.kinds, "--min", options.min, "--max", options.max]
    with tempfile.TemporaryDirectory() as folder:
        table: Path = options.table or Path(folder) / "table.yaml"
        if not table.exists():
            command("tune", "-o", str(table), *scope, "--budget", options.tune)
        figures = table.with_name(f"{table.stem}.measurements.jsonl")
        points = points_of(figures) if figures.exists() else []
        config = Path(folder) / "pipeline.yaml"
        stages = {"select": {"table": str(table.absolute())}, "dispatch": {}}
        config.write_text(json.dumps({"version": 1, "pipeline": [{name: o} for name, o in stages.items()]}))
        against = ["--config", str(config), "--against", "torch", "--passes", options.passes]
        rows = command("bench", *scope, *against)
        line = f"python benchmarks/bench_collectives.py {' '.join(sys.argv[1:])}"
        return report(rows, points, table, line), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", type=int, default=2, help="ranks on this host")
    parser.add_argument(
        "--two-hosts", metavar="RATE", help="one rank on each of two hosts; rate such as 1gbit"
    )
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--min", default="8")
    parser.add_argument("--max", default="64MiB")
    parser.add_argument("--table", type=Path, help="use this table; tune it if it is not there")
    parser.add_argument("--tune", default="300s", help="budget of tuning")
    parser.add_argument("--passes", default="3", help="of the comparison, over all sizes")
    parser.add_argument(
        "--hardware", default=f"{platform.machine()}-{cores()}core", help="for the file's name"
    )
    parser.add_argument("--output", type=Path, help="another file than the dated one")
    options = parser.parse_args()
    if options.two_hosts is None:
        text, rows = compare(options, partial(on_one_host, options.n))
    elif (reason := why_not()) is not None:
        raise SystemExit(f"skipped: {reason}")
    else:
        with TwoHosts(options.two_hosts) as hosts:
            text, rows = compare(options, partial(on_two_hosts, hosts))
    where = "-two-hosts" if options.two_hosts else ""
    part = "" if options.kinds == ",".join(KINDS) else f"-{options.kinds.replace(',', '-')}"
    name = f"collectives_{options.hardware}{where}{part}_{date.today():%Y%m}.md"
    target = options.output or RESULTS / name
    target.write_text(text)
    print(target)
    for what, wanted, measured in summary(rows):
        print(f"{what}: {measured} (wanted {wanted})")


if __name__ == "__main__":
    main()
