"""`mcr-plus diagnose`: find the faults of a job in the dumps of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mcr_plus.cli.output import print_error, print_json, print_result, print_table

if TYPE_CHECKING:
    from mcr_plus.observe.diagnosis import DiagnosedFault, WaitingPlace
    from mcr_plus.observe.dumps import Folder

_FAULT: Final = 1
_NO_DUMPS: Final = 2


def diagnose(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the dumps.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Find the faults of a job in its ranks' Flight Recorder dumps: ranks, places, and causes.

    Exit status: 0 if the dumps show no fault, 1 if they show one, 2 if DIR has no dumps of a job.
    """
    from mcr_plus.errors import InvalidArgument
    from mcr_plus.observe.diagnosis import BEHIND
    from mcr_plus.observe.diagnosis import diagnose as find
    from mcr_plus.observe.dumps import read_folder

    try:
        read = read_folder(folder)
    except InvalidArgument as error:
        print_error(str(error))
        raise typer.Exit(_NO_DUMPS) from None
    findings = find(read)
    if json:
        print_json(_document(read, findings))
    else:
        _print(read, findings)
    if any(finding.fault != BEHIND for finding in findings):
        raise typer.Exit(_FAULT)


def _print(read: Folder, findings: list[DiagnosedFault]) -> None:
    from mcr_plus.observe.diagnosis import AWAY, BEHIND

    for problem in read.problems:
        print_error(problem)
    if read.absent:
        print_error(f"no dump of rank {', '.join(map(str, read.absent))} of {read.size}")
    for finding in findings:
        print_result(f"{finding.fault}: {finding.text}")
        verb = "was" if finding.fault in AWAY else "is"
        rows = [_row(verb, place) for place in finding.at] + [
            _row("waits", place) for place in finding.waiting
        ]
        if rows:
            print_table("", ("rank", "", "at", "seconds"), rows)
    if not findings:
        print_result(
            "no fault: all ranks have issued and completed the same operations, as far as dumps show"
        )
    elif all(finding.fault == BEHIND for finding in findings):
        print_result(
            "no fault yet: nobody has waited for a second; another dump shows whether the job goes on"
        )


def _document(read: Folder, findings: list[DiagnosedFault]) -> dict[str, Any]:
    return {
        "folder": str(read.path),
        "ranks": read.size,
        "absent": read.absent,
        "problems": read.problems,
        "dumps": [
            {"rank": dump.rank, "host": dump.host, "written_by": dump.written_by, "reason": dump.reason}
            for dump in read.dumps.values()
        ],
        "findings": [finding.plain() for finding in findings],
    }


def _row(verb: str, place: WaitingPlace) -> tuple[str, str, str, str]:
    frame = place.frame
    where = "unknown" if frame is None else f"{frame.filename}:{frame.line} in {frame.name}"
    return str(place.rank), verb, where, "" if not place.seconds else f"{place.seconds:.1f}"
