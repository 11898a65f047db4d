"""`mcr-plus compare`: find the first operation at which two runs part."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcr_plus.cli.output import print_error, print_json, print_result, print_table

if TYPE_CHECKING:
    from mcr_plus.reproducible.compare import Comparison, Parting


def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="That `observe: {digests: …}` has written.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="The same of another run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Name the first operation at which two runs part: rank, line, and whether input or output differ.

    Exit status: 0 if all that was compared is the same, 1 if the runs part, 2 if they cannot be compared.
    """
    from mcr_plus.reproducible.compare import compare as compared

    result = compared(run_a, run_b)
    if as_json:
        first = result.first and asdict(result.first) | {"world": result.first.world._asdict()}
        print_json(
            {"same": not first, "operations": result.operations, "notes": result.notes, "first": first}
        )
    else:
        _print(result)
    if result.first is not None:
        raise typer.Exit(1)


def _print(result: Comparison) -> None:
    for note in result.notes:
        print_error(note)
    if result.first is None:
        print_result(f"the same: {result.operations:,} operations")
    else:
        _print_parting(result.first)


def _print_parting(first: Parting) -> None:
    from mcr_plus.errors import phrase_ranks

    named = first.one or first.other
    assert named is not None
    ranks, others = (
        phrase_ranks(first.ranks),
        f"; on {phrase_ranks(first.others)} its output" if first.others else "",
    )
    said = {
        "call": f"the programs part here on {ranks}",
        "input": f"its input differs on {ranks}{others}",
        "output": f"its output differs on {ranks}, and no rank's input does",
        "end": f"run {'A' if first.one is None else 'B'} ends before it, or it is not done there, on {ranks}",
    }
    print_result(f"{named.text}: {said[first.what]}")
    rows = [
        (letter, *(("none", "", "") if each is None else (each.text, each.how, each.site)))
        for letter, each in (("A", first.one), ("B", first.other))
    ]
    print_table("", ("run", "operation", "library", "line"), rows)
    for each in first.elements:
        title = f"rank {each.rank}: {each.count:,} of {each.of:,} elements of the {first.what} differ"
        print_table(title, ("element", "A", "B"), [tuple(map(str, row)) for row in each.first])
    if first.what in ("input", "output") and not first.elements:
        keep = f"observe: {{digests: {{folder: …, keep: '{first.stream}#{first.number}'}}}}"
        typer.echo(f"for the elements, repeat both runs with {keep}", err=True)
