"""Sentences that say why a job is stuck: the ranks that wait, and the ranks that they wait for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from mcr_plus.errors import phrase_ranks
from mcr_plus.observe.job_status import LOST, Line, Member, ObservedJob, RankWait

_LONG: Final = 1.0  # seconds; a shorter wait gets no sentence, unless a rank is lost
_LINES: Final = 3  # lines of the program that are shown
_NAMED: Final = 8  # ranks that get a sentence each


def findings(job: ObservedJob) -> list[str]:
    """Return sentences on long waits of a job, each with ranks and lines of the program.

    Empty if no wait is long and no rank is lost.
    """
    found: list[str] = []
    waits: dict[tuple[str, int, str, tuple[int, ...]], list[tuple[Member, RankWait]]] = {}
    for member in job.members:
        for wait in member.waits if member.state == "waiting" else ():
            lost = any(job.member(rank).state in LOST for rank in wait.waits_for)
            if wait.seconds >= _LONG or lost:
                key = wait.group, wait.number, wait.operation, wait.waits_for
                waits.setdefault(key, []).append((member, wait))
    blamed: dict[int, RankWait] = {}
    for (group, number, operation, waits_for), waiting in waits.items():
        member, wait = max(waiting, key=lambda each: each[1].seconds)
        name = f"#{number} in group '{group}'" if number else f"in group '{group}'"
        verb = "has" if len(waiting) == 1 else "have"
        whom = f"for {_ranks(waits_for, wait.missing)} " if waits_for else "" if number else "for any rank "
        found.append(
            f"{phrase_ranks([member.rank for member, _ in waiting])} {verb} waited {seconds(wait.seconds)} "
            f"{whom}in {operation} ({name}){_called(member)}"
            + ("; all its ranks have issued it" if number and not waits_for else "")
        )
        for rank in waits_for:
            blamed.setdefault(rank, wait)
    gone = [member.rank for member in job.members if member.state in LOST and member.state != "gone"]
    ranks = list(dict.fromkeys([*blamed, *gone]))
    found += [condition(job, rank, blamed.get(rank)) for rank in ranks[:_NAMED]]
    if len(ranks) > _NAMED:
        found.append(f"and {len(ranks) - _NAMED} ranks more")
    return found


def condition(job: ObservedJob, rank: int, wait: RankWait | None = None) -> str:
    """Describe a rank's activity, its place, its last operation, and for a stopped rank how to resume it.

    `wait`: the wait of another rank for this one; the sentence then names its group.
    """
    member = job.member(rank)
    where = f"rank {rank}"
    if member.host:
        where += f" (process {member.pid} on {member.host})"
    doing = {
        "stopped": _stop(job, member),
        "dead": "has died",
        "gone": "has left the job",
        "silent": "is out of reach: nothing is heard of its host",
        "running": "runs; mcr-plus top on its host shows where",
        "unknown": "has shown nothing yet",
        "busy": f"has shown nothing for {seconds(member.seen or 0.0)}: its interpreter's lock is held",
        "waiting": f"waits itself, in {_operation(member)}",
        "inside": f"is in {member.call}",
    }.get(member.state, f"has been outside mcr_plus for {seconds(member.idle or 0.0)}")
    seen = "last seen " if member.state in LOST else ""
    line = f", {seen}at {_trace(member)}" if member.lines else ""
    return f"{where} {doing}{line}{_last(member, wait)}{_remedy(job, member)}"


def _stop(job: ObservedJob, member: Member) -> str:
    lasts = f"has been stopped for {seconds(member.seen)}" if member.seen is not None else "is stopped"
    if member.tracer:
        return f"{lasts}, by process {member.tracer}, which traces it"
    return f"{lasts}, by a signal" + ("" if member.rank in job.here else " or a debugger")


def _remedy(job: ObservedJob, member: Member) -> str:
    """Return the command or advice that resumes a stopped rank."""
    if member.state != "stopped":
        return ""
    if member.tracer:
        return f"; it goes on once process {member.tracer}, such as a debugger, continues it or detaches"
    there = "" if member.rank in job.here else f" on {member.host}"
    return f"; `kill -CONT {member.pid}`{there} resumes it"


def _operation(member: Member) -> str:
    """Describe the operation that a rank waits for."""
    if not member.waits:
        return ""
    wait = member.waits[0]
    number = f" (#{wait.number} in group '{wait.group}')" if wait.number else ""
    return f"{wait.operation}{number}"


def _last(member: Member, wait: RankWait | None) -> str:
    """Describe the last operation of a rank in the group that waits for it; for a lost rank, in any group."""
    if wait is not None and wait.number:
        number = wait.issued.get(member.rank)
        group = next((each for each in member.groups if each.name == wait.group), None)
        if number is None:
            return ""
        if number == 0:
            return f"; it has issued nothing in group '{wait.group}'"
        known = f", {group.last}" if group is not None and group.issued == number and group.last else ""
        return f"; its last operation in group '{wait.group}' is #{number}{known}"
    if member.state not in LOST:
        return ""
    own = member.waits[0] if member.waits else None
    if own is not None and not any(g.name == own.group and g.issued > own.number > 0 for g in member.groups):
        return f"; it waited in {_operation(member)}"
    used = [group for group in member.groups if group.idle is not None and group.issued]
    if not used:
        return ""
    latest = min(used, key=lambda group: group.idle or 0.0)
    known = f", {latest.last}" if latest.last else ""
    return f"; its last operation is #{latest.issued} in group '{latest.name}'{known}"


def _called(member: Member) -> str:
    return f", called at {_trace(member)}" if member.lines else ""


def _trace(member: Member) -> str:
    """Return the innermost lines of a member's program."""
    return ", called at ".join(map(place, member.lines[:_LINES]))


def place(line: Line) -> str:
    """Return a line of the program as `train.py:71 in step`, relative to the current folder if inside."""
    here = os.getcwd() + os.sep
    file = line.file[len(here) :] if line.file.startswith(here) else line.file
    return f"{file}:{line.line} in {line.function}"


def _ranks(ranks: Sequence[int], count: int) -> str:
    named = phrase_ranks(list(ranks))
    return named if count <= len(ranks) else f"{named} and {count - len(ranks)} more"


def seconds(number: float) -> str:
    """Format a duration for people: `0.31 s`, `12 s`, `3 min`, `2.1 h`."""
    if number < 10:
        return f"{number:.2g} s"
    if number < 600:
        return f"{number:.0f} s"
    return f"{number / 60:.0f} min" if number < 6000 else f"{number / 3600:.3g} h"


def clean(text: str) -> str:
    """Remove control characters, which a terminal might obey, from a page's text."""
    return "".join(each if each.isprintable() else "?" for each in text)
