"""`mcr-plus top`: show operations, rates and waits of the ranks of running jobs on this host."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mcr_plus.cli.output import print_error
from mcr_plus.core.units import about

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mcr_plus.observe.job_status import GroupTraffic, JobStatus, Member, ObservedJob

_COLUMNS: Final = (
    "rank", "process", "state", "since", "group", "#", "operation", "waits for", "op/s", "B/s", "line",
)  # fmt: skip
_ROWS: Final = 6  # groups of a rank that are shown
_FAILED: Final = 1


def top(
    process: Annotated[
        int | None, typer.Argument(metavar="PROCESS", min=1, help="Show the job of this process only.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print one JSON document.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between refreshes.")] = 1.0,
    dump: Annotated[
        bool, typer.Option("--dump", help="Have all ranks write dumps, on all hosts, print where, and end.")
    ] = False,
) -> None:
    """Show the activity of your running jobs' ranks on this host, and the ranks that they wait for.

    The command reads the ranks' status pages and disturbs no rank; ranks that hang or are stopped are shown,
    too. Ctrl-C ends it.
    """
    from mcr_plus.observe.job_status import survey

    if dump:
        _dump(process, as_json)
        return
    if as_json and not once:
        raise typer.BadParameter("it prints one document: add --once", param_hint="--json")
    if not once and not sys.stdout.isatty():
        raise typer.BadParameter("the output is no terminal to refresh: add --once", param_hint="top")
    if not once:
        _refresh(process, interval)
        return
    found = survey(process)
    if as_json:
        print(json.dumps(_document(found), indent=2))
    else:
        if found.jobs:
            print("\n".join(_lines(found)))
        for number, why in found.unreadable.items():
            print_error(f"process {number}: its status page cannot be read: {_clean(why)}")
    if not found.jobs:
        print_error(_nothing())
        raise typer.Exit(_FAILED)


def _dump(process: int | None, as_json: bool) -> None:
    from mcr_plus.observe.remote_dump import demand_dumps

    answers = demand_dumps(process)
    if as_json:
        print(json.dumps([asdict(each) for each in answers], indent=2))
    for each in answers if not as_json else ():
        who = f"job {each.job}, rank {each.rank} on {each.host}"
        if each.file:
            other = "" if each.written_by == each.rank else f" (written by rank {each.written_by})"
            print(_clean(f"{who}: {each.file}{other}"))
        if each.problem:
            print_error(_clean(f"{who}: no dump{' of its own' if each.file else ''}: {each.problem}"))
    if not answers:
        print_error(_nothing())
    if not answers or any(each.problem for each in answers):
        raise typer.Exit(_FAILED)


def _nothing() -> str:
    from mcr_plus.observe.job_status import user_name

    return (
        f"no running job of {user_name(os.geteuid())} on {socket.gethostname()} (jobs of one rank, those of "
        "other users, and those in which mcr.init has not returned yet are not shown)"
    )


def _document(found: JobStatus) -> dict[str, Any]:
    from mcr_plus.observe.findings import findings

    return {
        "host": socket.gethostname(),
        "time": time.time(),
        "jobs": [{**asdict(job), "findings": findings(job)} for job in found.jobs],
        "unreadable": [{"process": number, "why": why} for number, why in found.unreadable.items()],
    }


def _refresh(process: int | None, interval: float) -> None:
    from rich.live import Live

    from mcr_plus.observe.job_status import survey
    from mcr_plus.observe.remote_status import RemoteStatus

    with closing(RemoteStatus()) as elsewhere, Live(screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(_drawn(survey(process, elsewhere)), refresh=True)
                time.sleep(interval)
        except KeyboardInterrupt:
            return


def _drawn(found: JobStatus) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(time.strftime("mcr-plus top, %H:%M:%S"), "dim")]
    for job in found.jobs:
        parts += [Text(f"\n{_title(job)}", "bold"), *(Text(each, "yellow") for each in _said(job))]
        table = Table(header_style="bold cyan", expand=False)
        for column in _COLUMNS:
            right = column in ("#", "op/s", "B/s", "since")
            table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=right)
        for member in job.members:
            for row in _rows(job, member):
                table.add_row(
                    *map(Text, row), style="red" if member.state in ("stopped", "dead", "silent") else ""
                )
        parts.append(table)
    parts += [Text(f"process {number}: {_clean(why)}", "red") for number, why in found.unreadable.items()]
    if not found.jobs:
        parts.append(Text(_nothing()))
    return Group(*parts)


def _lines(found: JobStatus) -> list[str]:
    from mcr_plus.cli.output import plain_lines

    lines: list[str] = []
    for job in found.jobs:
        rows = [row for member in job.members for row in _rows(job, member)]
        lines += [*plain_lines(_title(job), _COLUMNS, rows), *_said(job), ""]
    return lines[:-1]


def _title(job: ObservedJob) -> str:
    from mcr_plus.observe.findings import seconds

    hosts = list(dict.fromkeys(job.hosts))
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    return _clean(f"job {job.id}: {len(job.members)} ranks on {where}, for {seconds(job.seconds)}")


def _said(job: ObservedJob) -> list[str]:
    from mcr_plus.observe.findings import findings

    return [_clean(each) for each in findings(job)] or ["no rank is lost, and none waits for long"]


def _rows(job: ObservedJob, member: Member) -> list[tuple[str, ...]]:
    """Return the rows of a rank: one for each active group, the group in which it waits first."""
    from mcr_plus.observe.findings import seconds

    here = len(set(job.hosts)) == 1
    wait = member.waits[0] if member.state == "waiting" and member.waits else None
    waited = "" if wait is None else wait.group
    groups = [group for group in member.groups if group.idle is not None or group.name == waited]
    groups.sort(key=lambda group: (group.name != waited, group.idle or 0.0))
    at = member.line
    line = "" if at is None else f"{Path(at.file).name}:{at.line} {at.function}"
    since = wait.seconds if wait is not None else member.seen if member.state in _GONE else member.idle
    state = f"in {member.call}" if member.state == "inside" else member.state
    first = (
        str(member.rank),
        str(member.pid) if here else f"{member.pid}@{member.host}",
        state,
        "" if since is None else seconds(since),
    )
    rows: list[tuple[str, ...]] = []
    for group in (*groups[:_ROWS],) or (None,):
        named = ("", "", "", "") if rows else first
        rows.append(tuple(map(_clean, (*named, *_cells(member, group), "" if rows else line))))
    left = len(groups) - _ROWS
    if left > 0:
        rows.append(("", "", "", "", f"and {left} groups more", *[""] * 6))
    return rows


_GONE: Final = ("stopped", "dead", "busy")


def _cells(member: Member, group: GroupTraffic | None) -> tuple[str, ...]:
    """Return group, number, operation, awaited ranks, operations and bytes per second."""
    if group is None:
        return ("",) * 6
    wait = next((each for each in member.waits if each.group == group.name), None)
    speeds = f"{group.operations_per_s:,.1f}", f"{about(round(group.bytes_per_s))}/s"
    if member.state in _GONE:  # its last values
        speeds = "", ""
    if wait is None or member.state != "waiting":
        return group.name, str(group.issued), group.last, "", *speeds
    more = f" and {wait.missing - len(wait.waits_for)} more" if wait.missing > len(wait.waits_for) else ""
    whom = ", ".join(map(str, wait.waits_for)) + more
    return group.name, str(wait.number or ""), wait.operation, whom, *speeds


def _clean(text: str) -> str:
    from mcr_plus.observe.findings import clean

    return clean(text)
