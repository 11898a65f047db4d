"""`mcr-plus tune`: measure every library on every operation and size, and write a tuning table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcr_plus.cli import measuring
from mcr_plus.cli.output import print_json, print_table, print_written, rule_count
from mcr_plus.cli.run import ViaChoice

_CELL_S = 0.6  # seconds for all candidates of one operation and size

if TYPE_CHECKING:
    from mcr_plus.tables.table import Table, TableRule
    from mcr_plus.tuning.measurements import Sample


def tune(
    output: Annotated[Path, typer.Option("-o", "--output", help="The table file to write.")] = ...,  # type: ignore[assignment]  # required
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", min=2, help="Number of ranks.")] = None,
    kinds: Annotated[str | None, typer.Option(help="Operations, such as all_reduce,all_to_all.")] = None,
    smallest: Annotated[str, typer.Option("--min", help="Smallest size.")] = "8",
    largest: Annotated[str, typer.Option("--max", help="Largest size.")] = "64MiB",
    backends: Annotated[str | None, typer.Option(help="Backends to compare; all by default.")] = None,
    algorithms: Annotated[
        list[Path] | None, typer.Option(help="Algorithm file or folder to compare, too; repeatable.")
    ] = None,
    dtypes: Annotated[str, typer.Option(help="Dtypes; rules of the first apply to all others.")] = "float32",
    budget: Annotated[str | None, typer.Option(help="Stop after this time, such as 60s.")] = "180s",
    asynchronous: Annotated[bool, typer.Option("--async/--no-async", help="Also measure async_op.")] = True,
    overlap: Annotated[bool, typer.Option(help="Measure async_op beside a computation.")] = True,
    measurements: Annotated[Path | None, typer.Option(help="File of samples to continue from.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the samples of earlier runs.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Write a table that is refused on other machines.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the curves, as .png, .svg or .pdf.")] = None,
    bind: Annotated[bool, typer.Option("--bind/--no-bind", help="Pin each rank to a core.")] = True,
    via: Annotated[ViaChoice, typer.Option(help="Launcher of the ranks.")] = ViaChoice.auto,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure and write a tuning table; if the budget runs out, repeat the command to continue.

    Omit -n inside a job that was started by mpirun, torchrun or srun, for instance on several hosts.
    """
    from mcr_plus.config.reader import load
    from mcr_plus.core.units import parse_duration
    from mcr_plus.tables.table import load_table
    from mcr_plus.tuning.measurements import Sample
    from mcr_plus.tuning.operations import KINDS
    from mcr_plus.tuning.worker import TuningJob

    low, high = measuring.sizes(smallest, largest)
    measuring.check_plot(plot)
    figures = measurements or output.parent / f"{output.stem}.measurements.jsonl"
    _check_output(output, figures)
    files = tuple(str(path.absolute()) for path in algorithms or ())
    pipeline = load({"version": 1, "algorithms": list(files)})
    selected = measuring.backend_names(backends, pipeline, files="--algorithms")
    _check_files(files, selected)
    job = TuningJob(
        "tune",
        measuring.kinds(kinds, KINDS),
        low,
        high,
        measuring.dtype_names(dtypes),
        selected,
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
    table, samples = load_table(output), [Sample.from_document(row) for row in answer["points"]]
    for line in (*answer["left_out"], *answer["late_warnings"]):
        typer.echo(line, err=True)
    if as_json:
        print_json(_document(output, table, samples, answer))
    else:
        _print(table, samples, answer)
    print_written(output, f"{rule_count(table)}; {len(samples)} measurements, each of one library")
    if plot is not None:
        from mcr_plus.tuning.plot import plot_tuning

        panels = plot_tuning(table, samples, plot)
        print_written(plot, f"{panels} panel{'' if panels == 1 else 's'}, one for each operation and manner")


def _check_output(output: Path, figures: Path) -> None:
    """Raise an error for unwritable outputs, and for tables not written by `tune`, before measuring."""
    from mcr_plus.tuning.worker import COMMENT

    if not output.parent.is_dir():
        raise typer.BadParameter(f"no such folder: {output.parent}", param_hint="-o")
    for path, option in ((output, "-o"), (figures, "--measurements")):
        if path.is_dir() or not path.name:
            raise typer.BadParameter(f"expected a file, got the folder {path}", param_hint=option)
        if path.exists() and not path.is_file():  # opening a FIFO would block
            raise typer.BadParameter(f"expected a regular file, got {path}", param_hint=option)
    if figures.absolute() == output.absolute():
        raise typer.BadParameter("expected another file than that of the table", param_hint="--measurements")
    if output.exists() and COMMENT[0][:24] not in output.read_text(errors="replace"):
        raise typer.BadParameter(
            f"{output} was not written by mcr-plus tune and would be overwritten; name another file",
            param_hint="-o",
        )


def _check_files(files: tuple[str, ...], backends: tuple[str, ...] | None) -> None:
    """Raise a usage error if no selected backend runs algorithm files."""
    if files and backends is not None and all(name.partition(":")[0] != "msccl" for name in backends):
        raise typer.BadParameter(
            "algorithm files need the backend msccl, which is not among --backends",
            param_hint="--algorithms",
        )


def _document(output: Path, table: Table, samples: list[Sample], answer: Mapping[str, Any]) -> dict[str, Any]:
    from mcr_plus.tables.writing import key_items

    return {
        "table": str(output),
        "complete": answer["complete"],
        "combinations": dict(zip(("measured", "planned"), answer["coverage"], strict=True)),
        "seconds_left": round(answer["seconds_left"], 1),
        "algorithms": answer["algorithms"],
        "warnings": answer["warnings"],
        "fingerprint": {name: list(values) for name, values in table.fingerprint.items()},
        "rules": [
            {**key_items(rule.key), "bytes": rule.span(), "backend": rule.backend} for rule in table.rules
        ],
        "points": [sample.document() for sample in samples],
    }


def _print(table: Table, samples: list[Sample], answer: Mapping[str, Any]) -> None:
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
    print_table("fastest libraries", columns, rows)
    wrong = _left_out(samples)
    if wrong:
        print_table("left out", ("operation", "backend", "sizes", "reason"), wrong)
    if any(row[0].endswith("_v") for row in rows):
        print("Sizes of uneven operations (_v) differ between ranks: the last rule applies to all of them.")
    if slower:
        print("Below 1 ×: another was faster at a size in the range, but not by enough for a separate rule.")
    print("Sizes that are not listed were not measured: the built-in preference applies to them.")
    if answer["algorithms"]:
        from mcr_plus.tuning.worker import NEEDED

        print(f"{NEEDED}: [{', '.join(answer['algorithms'])}]")
    if not answer["complete"]:
        print(_unfinished(answer))


def _unfinished(answer: Mapping[str, Any]) -> str:
    """Summarize a run that ran out of budget, with instructions to continue."""
    (done, planned), missing = answer["coverage"], answer["missing"]
    then = "run the same command again to continue, or give it a longer --budget."
    if done >= planned:
        return f"The budget ended before unclear sizes were measured again: {then}"
    none = f", none of {', '.join(missing)}" if missing else ""
    far = f"with {done} of {planned} combinations of operation, manner and size measured{none}"
    rest = f"The rest takes about {_about(answer['seconds_left'])} at the pace of this run: {then}"
    return "\n".join([f"The budget ended {far}.", *_left_out_sizes(answer["left_out_sizes"]), rest])


def _left_out_sizes(missing: Sequence[tuple[int, int, int, float]]) -> list[str]:
    """Return a line with the first incompletely measured sizes and the expected times for the rest."""
    from mcr_plus.core.units import size_words

    if not missing:
        return []
    sizes = [
        f"{size_words(size)} in {'all' if lacking == total else f'{lacking} of {total}'} "
        f"(about {_about(seconds)})"
        for size, lacking, total, seconds in missing
    ]
    return [f"Left out for lack of time, by operations and manners: {', '.join(sizes)}."]


def _about(seconds: float) -> str:
    return f"{max(seconds, 1):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _decided(table: Table) -> list[TableRule]:
    """Return the rules that name a library."""
    from mcr_plus.tables.table import BUILT_IN

    return [rule for rule in table.rules if rule.backend != BUILT_IN]


def _sizes(rule: TableRule) -> str:
    """Return the sizes of a rule as text."""
    from mcr_plus.core.units import size_words

    if rule.lo == 0 and rule.hi is None:
        return "any"
    if rule.hi is None:
        return f"≥ {size_words(rule.lo)}"
    return f"< {size_words(rule.hi)}" if rule.lo == 0 else f"{size_words(rule.lo)} to {size_words(rule.hi)}"


def _left_out(samples: list[Sample]) -> list[tuple[str, str, str, str]]:
    """Return (operation, backend, sizes, problem) of exclusions; numbers do not distinguish problems."""
    sizes: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    for sample in samples:
        if sample.problem is not None:
            reason = (sample.case.kind, sample.candidate, re.sub(r"\d+", "#", sample.problem))
            sizes.setdefault(reason, []).append((sample.case.nbytes, sample.problem))
    return [
        (kind, candidate, _from_to(min(problems)[0], max(problems)[0]), min(problems)[1])
        for (kind, candidate, _), problems in sorted(sizes.items())
    ]


def _from_to(least: int, most: int) -> str:
    from mcr_plus.core.units import size_words

    return size_words(least) if least == most else f"{size_words(least)} to {size_words(most)}"


def _factors(choice: str, measured: Any, low: int, high: int | None) -> list[float]:
    """Return the slowdown factor of the next best candidate at every measured size of a rule."""
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
