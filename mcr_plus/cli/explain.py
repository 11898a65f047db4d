"""`mcr-plus explain`: the way one operation would take through the pipeline, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcr_plus.cli.output import print_json, print_result, print_table

if TYPE_CHECKING:
    from mcr_plus.explanation import Explanation


def explain(
    kind: Annotated[str, typer.Argument(help="The operation, for example all_reduce.")],
    nbytes: Annotated[str, typer.Argument(metavar="BYTES", help="Its size, such as 64KiB; 0 for a barrier.")],
    dtype: Annotated[str, typer.Option(help="Type of the elements.")] = "float32",
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks take part.")] = 2,
    nodes: Annotated[int, typer.Option(min=1, help="On how many hosts.")] = 1,
    config: Annotated[Path | None, typer.Option("--config", help="Pipeline YAML.")] = None,
    tag: Annotated[str | None, typer.Option(help="The operation's tag, for rules.")] = None,
    async_op: Annotated[bool, typer.Option("--async", help="An asynchronous operation.")] = False,
    param: Annotated[
        str | None, typer.Option(metavar="NAME", help="All_reduce of this parameter's gradient, by mcr.wrap.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Of the tensor, for codecs that need matrices.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the way an operation of KIND and BYTES would take, and why."""
    # imported here: torch takes seconds, and other commands do without it
    from mcr_plus.config import DTYPE_NAMES
    from mcr_plus.errors import InvalidArgument
    from mcr_plus.explanation import explained
    from mcr_plus.message import ALIASES, KINDS

    _check_known("kind", kind, (*KINDS, *ALIASES), "KIND")
    _check_known("dtype", dtype, DTYPE_NAMES, "--dtype")
    options: dict[str, Any] = {"config": config, "tag": tag, "async_op": async_op, "param": param}
    options["shape"] = None if shape is None else _shape(shape)
    try:
        explanation = explained(kind, _size(nbytes), dtype=dtype, ranks=ranks, nodes=nodes, **options)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        print_json(explanation.document)
    else:
        _print_way(explanation)


def _print_way(explanation: Explanation) -> None:
    """The steps, and a table of the alternatives for each choice of a library."""
    from mcr_plus.units import size_words

    way = explanation.document
    what = f"{way['kind']} {size_words(way['bytes'])} {way['dtype']}"
    where = f"{_several(way['ranks'], 'rank')} on {_several(way['nodes'], 'host')}"
    manner = f"{', asynchronous' if way['async_op'] else ''}{', tag ' + way['tag'] if way['tag'] else ''}"
    print(f"{what}, {where}{manner}\n")
    exposed = False
    for step, operation in zip(way["steps"], explanation.operations, strict=True):
        print(f"{step['stage']}: {operation.words}")
        print(f"  {step['decision']}")
        if step.get("rule"):
            print(f"  rule: {step['rule']}")
        table_rule = step.get("table_rule")
        if table_rule and Path(table_rule).name not in step["decision"]:
            print(f"  table rule: {table_rule}")
        if step.get("measured_elsewhere"):
            print(f"  the table was measured elsewhere: {'; '.join(step['measured_elsewhere'])}")
            if step["strict"]:
                print("  it is strict: such a job would be refused")
        found = step.get("alternatives")
        if found:
            timed = operation.async_op and any(each["expected_us"] is not None for each in found.values())
            exposed |= timed
            expected = "expected, exposed" if timed else "expected"
            print_table("", ("  choice", expected, "support", "why"), _alternatives(found))
    if exposed:
        print("exposed: what is left of the time beside a computation of the operation's own length\n")
    print_result(f"=> {', '.join(way['backends'])}")


def _alternatives(found: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    return [(f"  {name}", _expected(each), each["support"], each["why"]) for name, each in found.items()]


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _expected(alternative: dict[str, Any]) -> str:
    from mcr_plus.selection.writing import microseconds

    time = alternative["expected_us"]
    if time is None:
        return "-"
    return f"{microseconds(time)} µs{' (extrapolated)' if alternative['extrapolated'] else ''}"


def _check_known(what: str, value: str, known: tuple[str, ...], place: str) -> None:
    from mcr_plus.errors import unknown

    if value not in known:
        raise typer.BadParameter(unknown(what, value, known), param_hint=place)


def _shape(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"expected whole numbers such as 512,64, got {text!r}", param_hint="--shape"
        ) from None


def _size(text: str) -> int:
    from mcr_plus.units import parse_size

    try:
        return parse_size(int(text) if text.isdigit() else text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="BYTES") from None
