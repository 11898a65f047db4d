"""`mcr-plus compare`: find the first operation at which two runs part."""

from __future__ import annotations

from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcr_plus.cli.output import print_error, print_json, print_result, print_table

if TYPE_CHECKING:
    from mcr_plus.reproducible.compare import Parting


def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="That `observe: {digests: …}` has written.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="The same of another run.")],
    keep: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Most elements to show, of those that both runs have kept."),
    ] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Name the first operation at which two runs part: rank, line, and whether input or output differ.

    Exit status: 0 if all that was compared is the same, 1 if the runs part, 2 if they cannot be compared.
    """
    from mcr_plus.reproducible.compare import compare as compared

    result = compared(run_a, run_b, keep)
    if as_json:
        first = result.first and asdict(result.first)
        found = {"same": not first, "operations": result.operations, "notes": result.notes, "first": first}
        print_json(found)
    else:
        for note in result.notes:
            print_error(note)
        if result.first is None:
            print_result(f"the same: {result.operations:,} operations")
        else:
            _print(result.first)
    if result.first is not None:
        raise typer.Exit(1)


def _print(first: Parting) -> None:
    from mcr_plus.errors import phrase_ranks

    pair, ranks = list(zip("AB", first.operations, strict=True)), phrase_ranks(first.ranks)
    others = f"; it shows on {phrase_ranks(first.others)}, too" if first.others else ""
    why = (
        ", and no rank's input"
        if first.has_inputs
        else " (inputs of other numbers of ranks are not compared)"
    )
    said = {
        "call": f"the programs part on {ranks}",
        "input": f"its input differs on {ranks}{others}",
        "output": f"its output differs on {ranks}{why}",
        "end": f"only run {'AB'[pair[0][1] is None]} has done it, on {ranks}",
    }
    print_result(f"{next(each.text for _, each in pair if each)}: {said[first.what]}")
    rows = [(letter, *(("none", "", "") if each is None else astuple(each))) for letter, each in pair]
    print_table("", ("run", "operation", "library", "line"), rows)
    for kept in first.elements:
        title = f"rank {kept.rank}: {kept.count:,} of {kept.of:,} elements of its {first.what} differ"
        print_table(title, ("element", "A", "B"), [tuple(map(str, row)) for row in kept.first])
    if first.what in ("input", "output") and first.has_inputs and not first.elements:
        keep = f"observe: {{digests: {{folder: …, keep: '{first.stream}#{first.number}'}}}}"
        typer.echo(f"not both runs have kept its elements: repeat them with {keep}", err=True)
