"""`mcr-plus tune`: measure every library on every operation and size, and write a tuning table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcr_plus.cli import measuring
from mcr_plus.cli.output import print_json, print_table, print_written
from mcr_plus.cli.run import ViaChoice

_CELL_S = 0.6  # for all ways of one operation and size; many of those fit into a budget

if TYPE_CHECKING:
    from mcr_plus.selection.table import Table, TableRule
    from mcr_plus.tuning.points import Point


def tune(
    output: Annotated[Path, typer.Option("-o", "--output", help="The table file to write.")] = ...,  # type: ignore[assignment]  # required
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", min=2, help="How many ranks.")] = None,
    kinds: Annotated[str | None, typer.Option(help="Operations, such as all_reduce,all_to_all.")] = None,
    smallest: Annotated[str, typer.Option("--min", help="Smallest size.")] = "8",
    largest: Annotated[str, typer.Option("--max", help="Largest size.")] = "64MiB",
    backends: Annotated[str | None, typer.Option(help="Backends to compare; all by default.")] = None,
    algorithms: Annotated[
        list[Path] | None, typer.Option(help="Algorithm file or folder, to compare too; may be repeated.")
    ] = None,
    dtypes: Annotated[
        str, typer.Option(help="Types; the first one's rules hold for all others.")
    ] = "float32",
    budget: Annotated[str | None, typer.Option(help="Stop after so long, such as 60s.")] = "180s",
    asynchronous: Annotated[bool, typer.Option("--async/--no-async", help="Measure async_op too.")] = True,
    overlap: Annotated[bool, typer.Option(help="Measure async_op beside a computation.")] = True,
    measurements: Annotated[Path | None, typer.Option(help="Where figures are kept, to go on.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the figures of earlier runs.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Have the table refuse other machines.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the curves, as .png, .svg or .pdf.")] = None,
    bind: Annotated[bool, typer.Option("--bind/--no-bind", help="Keep each rank on a core.")] = True,
    via: Annotated[ViaChoice, typer.Option(help="What starts the ranks.")] = ViaChoice.auto,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure and write a tuning table; run it again to go on where the budget ended.

    Inside a job that was started by mpirun, torchrun or srun, for instance over several hosts, leave out -n.
    """
    from mcr_plus.config import load
    from mcr_plus.selection.table import load_table
    from mcr_plus.tuning.operations import KINDS
    from mcr_plus.tuning.points import Point
    from mcr_plus.tuning.worker import Job
    from mcr_plus.units import parse_duration

    low, high = measuring.sizes(smallest, largest)
    measuring.check_plot(plot)
    figures = measurements or output.parent / f"{output.stem}.measurements.jsonl"
    _check_output(output, figures)
    files = tuple(str(path.absolute()) for path in algorithms or ())
    pipeline = load({"version": 1, "algorithms": list(files)})
    chosen = measuring.backend_names(backends, pipeline, files="--algorithms")
    _check_files(files, chosen)
    job = Job(
        "tune",
        measuring.kinds(kinds, KINDS),
        low,
        high,
        measuring.dtype_names(dtypes),
        chosen,
        measuring.number(budget, parse_duration, "--budget"),
        progress=not as_json,
        bind=bind,
        output=str(output.absolute()),
        measurements=str(figures.absolute()),
        fresh=fresh,
        asynchronous=asynchronous,
        overlap=overlap,
        strict=strict,
        algorithms=files,
        effort={"seconds": _CELL_S},
    )
    answer = measuring.answer_of(job, ranks, via)
    if answer is None:
        return
    table, points = load_table(output), [Point.from_document(each) for each in answer["points"]]
    for line in (*answer["left_out"], *answer["late_warnings"]):
        typer.echo(line, err=True)
    if as_json:
        print_json(_document(output, table, points, answer))
    else:
        _print(table, points, answer)
    rules = len(_decided(table))
    print_written(output, f"{rules} rule{'' if rules == 1 else 's'} from {len(points)} measurements")
    if plot is not None:
        from mcr_plus.tuning.plot import plot_tuning

        panels = plot_tuning(table, points, plot)
        print_written(plot, f"{panels} panel{'' if panels == 1 else 's'}, one for each operation and manner")


def _check_output(output: Path, figures: Path) -> None:
    """Refuse to measure for minutes and then have nowhere to write, or to write over somebody's own table."""
    from mcr_plus.tuning.worker import COMMENT

    if not output.parent.is_dir():
        raise typer.BadParameter(f"no such folder: {output.parent}", param_hint="-o")
    for path, option in ((output, "-o"), (figures, "--measurements")):
        if path.is_dir() or not path.name:
            raise typer.BadParameter(f"expected a file, got the folder {path}", param_hint=option)
        if path.exists() and not path.is_file():  # a FIFO may have nobody at its other end
            raise typer.BadParameter(f"expected a regular file, got {path}", param_hint=option)
    if figures.absolute() == output.absolute():
        raise typer.BadParameter("expected another file than that of the table", param_hint="--measurements")
    if output.exists() and COMMENT[0][:24] not in output.read_text(errors="replace"):
        raise typer.BadParameter(
            f"{output} was not written by mcr-plus tune, and would be lost; name another", param_hint="-o"
        )


def _check_files(files: tuple[str, ...], backends: tuple[str, ...] | None) -> None:
    """Refuse algorithm files beside backends of which none would run them all."""
    if files and backends is not None and all(name.partition(":")[0] != "msccl" for name in backends):
        raise typer.BadParameter(
            "nothing runs algorithm files: msccl is not among --backends", param_hint="--algorithms"
        )


def _document(output: Path, table: Table, points: list[Point], answer: Mapping[str, Any]) -> dict[str, Any]:
    from mcr_plus.selection.writing import key_items

    return {
        "table": str(output),
        "complete": answer["complete"],
        "algorithms": answer["algorithms"],
        "warnings": answer["warnings"],
        "fingerprint": {name: list(values) for name, values in table.fingerprint.items()},
        "rules": [
            {**key_items(rule.key), "bytes": rule.span(), "backend": rule.backend} for rule in table.rules
        ],
        "points": [point.document() for point in points],
    }


def _print(table: Table, points: list[Point], answer: Mapping[str, Any]) -> None:
    rows: list[tuple[str, ...]] = []
    slower = False
    for rule in _decided(table):
        factors = _factors(rule.backend, rule.measured, rule.lo, rule.hi)
        slower |= any(factor < 1 for factor in factors)
        manner = {None: "any", False: "sync", True: "async"}[rule.key.async_op]
        cells = (rule.key.kind, manner, rule.key.dtype or "any", _sizes(rule), rule.backend, _words(factors))
        rows.append(cells)
    columns: tuple[str, ...] = ("operation", "manner", "dtype", "size", "choice", "next best takes")
    if rows and {row[2] for row in rows} == {"any"}:
        columns, rows = (*columns[:2], *columns[3:]), [(*row[:2], *row[3:]) for row in rows]
    print_table("what wins where", columns, rows)
    wrong = _left_out(points)
    if wrong:
        print_table("left out", ("operation", "backend", "sizes", "why"), wrong)
    if any(row[0].endswith("_v") for row in rows):
        print("Sizes of uneven operations (_v) differ between ranks: the last rule is for all of them.")
    if slower:
        print("Below 1 ×: another was faster at a size of the range, not by enough for a rule of its own.")
    print("Sizes that are not listed were not measured: there the built-in preference decides.")
    if answer["algorithms"]:
        from mcr_plus.tuning.worker import NEEDED

        print(f"{NEEDED}: [{', '.join(answer['algorithms'])}]")
    if not answer["complete"]:
        print(_unfinished(answer))


def _unfinished(answer: Mapping[str, Any]) -> str:
    """How far the budget went, and how to go on."""
    (done, planned), missing = answer["coverage"], answer["missing"]
    if done >= planned:
        far = "before what is in doubt was measured again"
    else:
        none = f", none of {', '.join(missing)}" if missing else ""
        far = f"with {done} of {planned} combinations of operation, manner and size measured{none}"
    return f"The budget ended {far}: run the same command again to go on, or give it a longer --budget."


def _decided(table: Table) -> list[TableRule]:
    """The rules that name a library."""
    from mcr_plus.selection.table import BUILT_IN

    return [rule for rule in table.rules if rule.backend != BUILT_IN]


def _sizes(rule: TableRule) -> str:
    """The sizes of a rule."""
    from mcr_plus.units import size_words

    if rule.lo == 0 and rule.hi is None:
        return "any"
    if rule.hi is None:
        return f"≥ {size_words(rule.lo)}"
    return f"< {size_words(rule.hi)}" if rule.lo == 0 else f"{size_words(rule.lo)} to {size_words(rule.hi)}"


def _left_out(points: list[Point]) -> list[tuple[str, str, str, str]]:
    """(operation, backend, sizes, why) of what was excluded, once for each reason but for its numbers."""
    sizes: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    for point in points:
        if point.problem is not None:
            cell = (point.cell.kind, point.way, re.sub(r"\d+", "#", point.problem))
            sizes.setdefault(cell, []).append((point.cell.nbytes, point.problem))
    return [
        (kind, way, _from_to(min(found)[0], max(found)[0]), min(found)[1])
        for (kind, way, _), found in sorted(sizes.items())
    ]


def _from_to(least: int, most: int) -> str:
    from mcr_plus.units import size_words

    return size_words(least) if least == most else f"{size_words(least)} to {size_words(most)}"


def _factors(choice: str, measured: Any, low: int, high: int | None) -> list[float]:
    """How many times as long the best of the others takes, at every size measured that a rule covers."""
    return [
        min(curve[size] for name, curve in measured.items() if name != choice and size in curve)
        / measured[choice][size]
        for size in measured.get(choice, {})
        if size >= low and (high is None or size < high)
        if any(name != choice and size in curve for name, curve in measured.items())
    ]


def _words(factors: list[float]) -> str:
    if not factors:
        return "-"
    span = f"{min(factors):.3g} to {max(factors):.3g}" if len(factors) > 1 else f"{factors[0]:.3g}"
    return f"{span} × as long"
