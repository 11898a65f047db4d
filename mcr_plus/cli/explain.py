"""`mcr-plus explain`: show the path of one operation through the pipeline, and the reasons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcr_plus.cli.output import print_json, print_result, print_table

if TYPE_CHECKING:
    from mcr_plus.observe.explain import Explanation

_BOUNDS = {"at_most": "at most", "at_least": "at least"}


def explain(
    kind: Annotated[str, typer.Argument(help="The operation, for example all_reduce.")],
    nbytes: Annotated[str, typer.Argument(metavar="BYTES", help="Its size, such as 64KiB; 0 for a barrier.")],
    dtype: Annotated[str, typer.Option(help="Type of the elements.")] = "float32",
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Number of ranks.")] = 2,
    nodes: Annotated[int, typer.Option(min=1, help="Number of hosts.")] = 1,
    config: Annotated[Path | None, typer.Option("--config", help="Pipeline YAML.")] = None,
    tag: Annotated[str | None, typer.Option(help="The operation's tag, for rules.")] = None,
    async_op: Annotated[bool, typer.Option("--async", help="An asynchronous operation.")] = False,
    param: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Parameter of a wrapped model: explain its gradient's all_reduce."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Shape of the tensor, for codecs that need matrices.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the path of an operation of KIND and BYTES through the pipeline, and the reasons."""
    # Imported here: torch takes seconds, and other commands do not need it.
    from mcr_plus.config.names import DTYPE_NAMES
    from mcr_plus.core.kinds import ALIASES, KINDS
    from mcr_plus.errors import InvalidArgument
    from mcr_plus.observe.explain import explained

    check_known("kind", kind, (*KINDS, *ALIASES), "KIND")
    check_known("dtype", dtype, DTYPE_NAMES, "--dtype")
    options: dict[str, Any] = {"config": config, "tag": tag, "async_op": async_op, "param": param}
    options["shape"] = None if shape is None else parse_shape(shape)
    try:
        explanation = explained(kind, _size(nbytes), dtype=dtype, ranks=ranks, nodes=nodes, **options)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        print_json(explanation.document)
    else:
        _print_explanation(explanation)


def _print_explanation(explanation: Explanation) -> None:
    """Print the steps, and for each choice of a library a table of the alternatives."""
    from mcr_plus.core.units import size_words

    document = explanation.document
    what = f"{document['kind']} {size_words(document['bytes'])} {document['dtype']}"
    where = f"{_several(document['ranks'], 'rank')} on {_several(document['nodes'], 'host')}"
    manner = ", asynchronous" if document["async_op"] else ""
    tag = f", tag {document['tag']}" if document["tag"] else ""
    print(f"{what}, {where}{manner}{tag}\n")
    exposed = bounds = False
    for step, operation in zip(document["steps"], explanation.operations, strict=True):
        print(f"{step['stage']}: {operation.words}")
        print(f"  {step['decision']}")
        if "comparison" in step:
            print(f"  {step['comparison']}")
        if step.get("rule"):
            print(f"  rule: {step['rule']}")
        table_rule = step.get("table_rule")
        if table_rule and Path(table_rule).name not in step["decision"]:
            print(f"  table rule: {table_rule}")
        if step.get("measured_elsewhere"):
            print(f"  the table was measured elsewhere: {'; '.join(step['measured_elsewhere'])}")
            if step["strict"]:
                print("  the table is strict: such a job would be refused")
        alternatives = step.get("alternatives")
        if alternatives:
            rows = alternatives.values()
            timed = operation.async_op and any(row["expected_us"] is not None for row in rows)
            exposed |= timed
            bounds |= any(row["bound_us"] is not None for row in rows)
            expected = "expected, exposed" if timed else "expected"
            print_table("", ("  choice", expected, "support", "reason"), _alternatives(alternatives))
    if bounds:
        print(
            "at most, at least: the time of the smallest or largest measured size; this size lies outside\n"
        )
    if exposed:
        print("exposed: the time not hidden behind a computation that takes as long as the operation\n")
    print_result(f"=> {', '.join(document['backends'])}")


def _alternatives(alternatives: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    return [(f"  {name}", _expected(row), row["support"], row["why"]) for name, row in alternatives.items()]


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _expected(alternative: dict[str, Any]) -> str:
    from mcr_plus.tables.writing import microseconds

    time, figure = alternative["expected_us"], alternative["figure"]
    if time is None or figure == "unknown":
        return "-" if time is None else "unknown"
    if figure in _BOUNDS:
        return f"{_BOUNDS[figure]} {microseconds(alternative['bound_us'])} µs"
    return f"{microseconds(time)} µs{' (extrapolated)' if figure == 'extrapolated' else ''}"


def check_known(what: str, value: str, known: tuple[str, ...], place: str) -> None:
    """Raise a usage error if `value` is not in `known`."""
    from mcr_plus.errors import unknown

    if value not in known:
        raise typer.BadParameter(unknown(what, value, known), param_hint=place)


def parse_shape(text: str) -> list[int]:
    """Parse a shape such as `512,64`; the empty text is the shape of a scalar."""
    if not text:
        return []
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"expected whole numbers such as 512,64, got {text!r}", param_hint="--shape"
        ) from None


def _size(text: str) -> int:
    from mcr_plus.core.units import parse_size

    try:
        return parse_size(int(text) if text.isdigit() else text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="BYTES") from None
