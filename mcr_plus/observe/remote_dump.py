"""Dumps of all ranks of running jobs, on demand from outside: `mcr-plus top --dump`."""

from __future__ import annotations

import secrets
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from mcr_plus.hosts.dump_request import EVERYBODY, ask
from mcr_plus.observe.findings import condition
from mcr_plus.observe.job_status import LOST, Member, ObservedJob, survey
from mcr_plus.observe.remote_status import RemoteStatus

_ANSWERS_WITHIN: Final = 5.0  # seconds; pages are drawn twice a second
_NAP: Final = 0.1


@dataclass(frozen=True)
class DumpAnswer:
    """The answer of a rank to a demand for a dump.

    Attributes:
        file: its dump; empty without one.
        problem: why the rank itself has not written one; empty if it has.
        written_by: the rank that has written the file: the rank itself, or another rank that wrote for it.
    """

    job: str
    rank: int
    host: str
    file: str
    problem: str
    written_by: int | None


def demand_dumps(process: int | None = None, patience: float = _ANSWERS_WITHIN) -> list[DumpAnswer]:
    """Make all ranks of this user's jobs, or of the job of `process`, write dumps on all hosts.

    A rank of this host passes the request on through the agents. Ranks that have not answered after
    `patience` seconds are reported. Raises the errors of `survey`.
    """
    with closing(RemoteStatus()) as elsewhere:
        reason = f"mcr-plus top --dump ({secrets.token_hex(4)})"
        jobs = survey(process, elsewhere).jobs
        for job in jobs:
            ask((job.member(rank).pid for rank in job.here), f"{EVERYBODY}\0{reason}")
        names, ends = {job.id for job in jobs}, time.monotonic() + patience
        while any(_is_awaited(each, reason) for job in jobs for each in job.members):
            if time.monotonic() > ends:
                break
            time.sleep(_NAP)
            latest = {job.id: job for job in survey(None, elsewhere).jobs if job.id in names}
            jobs = tuple(latest.get(job.id, job) for job in jobs)
        return [_answer(job, member, reason) for job in jobs for member in job.members]


def _is_awaited(member: Member, reason: str) -> bool:
    return member.state not in LOST and member.dumped.get("reason") != reason


def _answer(job: ObservedJob, member: Member, reason: str) -> DumpAnswer:
    if member.dumped.get("reason") == reason:
        file = member.dumped.get("file", "")
        problem = member.dumped.get("problem", "")
        return DumpAnswer(job.id, member.rank, member.host, file, problem, member.rank if file else None)
    problem, number = condition(job, member.rank), str(member.rank)
    if member.state not in LOST:
        problem = f"it has not answered: {problem}"
    for other in job.members:
        if other.dumped.get("reason") == reason and number in other.dumped:
            return DumpAnswer(job.id, member.rank, member.host, other.dumped[number], problem, other.rank)
    return DumpAnswer(job.id, member.rank, member.host, "", problem, None)
