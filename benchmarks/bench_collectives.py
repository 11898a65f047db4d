"""Every operation and size on every library, as tuned, and on torch.distributed; writes a dated report.

    python benchmarks/bench_collectives.py -n 2 --tune 300s            tune first, then compare
    python benchmarks/bench_collectives.py -n 2 --table table.yaml     with a table that is there, or will be
    python benchmarks/bench_collectives.py --two-hosts 1gbit           across a link between two namespaces

The report goes to benchmarks/results/collectives_<hardware>_<yyyymm>.md. In it: how far the tuned mix is from
the best single library of every operation and size, how far from torch.distributed, and how well the cost
model predicts sizes that it was not shown.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any

import harness
import numpy as np
import typer
from harness import HARDWARE, MCR_PLUS, Budget, Dated, Hardware, Tables
from two_hosts import TwoHosts, need_two_hosts

from mcr_plus.core.units import format_size
from mcr_plus.tables.cost import TimeCurve
from mcr_plus.tables.table import load_table
from mcr_plus.tuning.measurements import Sample, median_of_repeats
from mcr_plus.tuning.operations import KINDS, TORCH, TUNED

LEAST = 1024  # bytes from which the mix may not lose
Row = Mapping[str, Any]


def on_one_host(ranks: int, *words: str) -> Any:
    """The JSON document that a subcommand of mcr-plus prints, of a job on this host."""
    line = [*MCR_PLUS, words[0], "-n", str(ranks), *words[1:], "--json"]
    return json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout)


def on_two_hosts(hosts: TwoHosts, *words: str) -> Any:
    """The same of a job with one rank on each of two hosts."""
    line = [*MCR_PLUS, *words, "--json"]
    return json.loads(hosts.mpirun(line, stdout=subprocess.PIPE, text=True).stdout)


def by_cell(rows: Sequence[Row]) -> Iterator[tuple[str, int, dict[str, float]]]:
    """(kind, bytes, median microseconds by candidate)."""
    cells: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["verified"]:
            cells.setdefault((row["kind"], row["bytes"]), {})[row["backend"]] = row["p50_us"]
    for (kind, nbytes), times in cells.items():
        yield kind, nbytes, times


def summary(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """(what, wanted, measured)."""
    cells = list(by_cell(rows))
    singles = sorted({candidate for _, _, times in cells for candidate in times} - {TUNED, TORCH})
    best = [
        (kind, n, times[TUNED] / min(times[candidate] for candidate in singles if candidate in times))
        for kind, n, times in cells
        if TUNED in times and any(candidate in times for candidate in singles)
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
    for candidate in singles:
        ratios = [
            times[candidate] / times[TUNED] for _, _, times in cells if {candidate, TUNED} <= times.keys()
        ]
        found.append((f"{candidate} alone / tuned, geometric mean", "≥ 1", f"{geometric_mean(ratios):.2f}"))
    against = [times[TORCH] / times[TUNED] for _, _, times in cells if {TORCH, TUNED} <= times.keys()]
    if against:
        found.append(
            ("torch.distributed gloo / tuned, geometric mean", "≥ 3", f"{geometric_mean(against):.1f}")
        )
    return found


def hold_out(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Errors, by library, of predicting every second size from the others."""
    curves: dict[tuple[Any, ...], dict[int, float]] = {}
    for sample in median_of_repeats(samples):
        if sample.timing is not None and not sample.overlap:
            key = (sample.candidate, sample.case.kind, sample.case.dtype, sample.case.async_op)
            curves.setdefault(key, {})[sample.case.nbytes] = sample.timing.p50
    errors: dict[str, list[float]] = {}
    for (candidate, *_), curve in curves.items():
        sizes = sorted(size for size in curve if size and size & (size - 1) == 0)
        shown = {size: curve[size] for size in sizes[::2]}
        errors.setdefault(candidate, []).extend(
            abs(TimeCurve.through(shown).at(size).us / curve[size] - 1)
            for size in sizes[1::2]
            if size < max(shown)
        )
    return errors


def samples_of(path: Path) -> list[Sample]:
    """What `tune` has kept beside its table."""
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    return [Sample.from_document(each) for each in documents if "timing" in each]


def tables_of_times(rows: Sequence[Row]) -> Iterator[str]:
    cells = list(by_cell(rows))
    candidates = list(dict.fromkeys(candidate for _, _, times in cells for candidate in times))
    for kind in dict.fromkeys(kind for kind, _, _ in cells):
        lines = [
            [
                format_size(nbytes),
                *(f"{times[candidate]:.4g}" if candidate in times else "–" for candidate in candidates),
            ]
            for _, nbytes, times in (cell for cell in cells if cell[0] == kind)
        ]
        yield from (f"### {kind}", harness.markdown(["bytes", *candidates], lines))


def report(rows: Sequence[Row], samples: Sequence[Sample], table: Path, line: str) -> str:
    """The report as Markdown."""
    prints = load_table(table).fingerprint
    note = (
        ", ".join(
            f"{name} {' / '.join(values)}" for name, values in prints.items() if name not in ("cpu", "torch")
        )
        + ". Medians in microseconds of the slowest rank, of several passes the median. Candidates take "
        "turns in one run, ranks keep to cores of their own, all results were verified."
    )
    lines = summary(rows)
    for candidate, errors in hold_out(samples).items():
        if not errors:
            continue
        middle, high = np.percentile(errors, (50, 95))
        what = f"cost model, {candidate}, every second size held out ({len(errors)}): error"
        lines.append((f"{what}, median", "≤ 5 %", f"{100 * middle:.1f} %"))
        lines.append((f"{what}, 95th percentile", "≤ 15 %", f"{100 * high:.1f} %"))
    head = ["what", "wanted", "measured"]
    title = "Collectives: libraries, tuned mix, torch.distributed"
    return harness.page(title, line, note, harness.markdown(head, lines), *tables_of_times(rows))


def compare(
    command: Callable[..., Any], scope: Sequence[str], table: Path | None, budget: str, passes: str
) -> tuple[str, list[Row]]:
    """Tune (unless there is a table), compare; the report, and the rows it is made of."""
    with tempfile.TemporaryDirectory() as folder:
        table = table or Path(folder) / "table.yaml"
        if not table.exists():
            command("tune", "-o", str(table), *scope, "--budget", budget)
        figures = table.with_name(f"{table.stem}.measurements.jsonl")
        samples = samples_of(figures) if figures.exists() else []
        config = Path(folder) / "pipeline.yaml"
        stages = {"select": {"table": str(table.absolute())}, "dispatch": {}}
        config.write_text(json.dumps({"version": 1, "pipeline": [{name: o} for name, o in stages.items()]}))
        rows = command("bench", *scope, "--config", str(config), "--against", "torch", "--passes", passes)
        return report(rows, samples, table, harness.command()), rows


@harness.program
def main(
    ranks: Annotated[int, typer.Option("-n", help="Ranks on this host.")] = 2,
    two_hosts: Annotated[
        str | None, typer.Option(help="One rank on each of two hosts; rate such as 1gbit.", metavar="RATE")
    ] = None,
    kinds: str = ",".join(KINDS),
    smallest: Annotated[str, typer.Option("--min")] = "8",
    largest: Annotated[str, typer.Option("--max")] = "64MiB",
    table: Tables = None,
    tune: Budget = "300s",
    passes: Annotated[str, typer.Option(help="Of the comparison, over all sizes.")] = "3",
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    scope = ["--kinds", kinds, "--min", smallest, "--max", largest]
    if two_hosts is None:
        text, rows = compare(partial(on_one_host, ranks), scope, table, tune, passes)
    else:
        need_two_hosts()
        with TwoHosts(two_hosts) as hosts:
            text, rows = compare(partial(on_two_hosts, hosts), scope, table, tune, passes)
    where = "-two-hosts" if two_hosts else ""
    part = "" if kinds == ",".join(KINDS) else f"-{kinds.replace(',', '-')}"
    harness.write(text, output, f"collectives_{hardware}{where}{part}")
    for what, wanted, measured in summary(rows):
        print(f"{what}: {measured} (wanted {wanted})")


if __name__ == "__main__":
    main()
