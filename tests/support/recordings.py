"""Recordings of jobs with given times, for tests of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcr_plus.observe.record import Record
from mcr_plus.observe.record_file import file_of, save_recording
from mcr_plus.observe.report.advice import advice
from mcr_plus.observe.report.analysis import groups, skew, steps
from mcr_plus.observe.report.job import RecordedJob, load_job

BEGAN, SECONDS = 1000.0, 10.0
PLAIN = Record(
    sequence=1,
    kind="all_reduce",
    tag=None,
    group="world",
    backend="gloo",
    codec=None,
    bytes=4096,
    wire_bytes=4096,
    fused=1,
    t_issue=0.0,
    t_done=0.0,
    waited=0.0,
    ranks=2,
    error=None,
    dtype="float32",
)


def operation(number: int, at: float, seconds: float, waited: float, **others: Any) -> Record:
    """Return an operation `at` seconds after the recording began."""
    issued = BEGAN + at
    return replace(PLAIN, sequence=number, t_issue=issued, t_done=issued + seconds, waited=waited, **others)


def save(folder: Path, rank: int, records: list[Record], ends: tuple[float, ...] = (), **about: Any) -> Path:
    known = {
        "job": "1f2e",
        "rank": rank,
        "size": 2,
        "host": "node0",
        "hosts": ["node0", "node0"],
        "epoch_us": 0.0,
        "began": BEGAN,
        "ended": BEGAN + SECONDS,
        "choices": [],
        "config": {"version": 1},
        "versions": {"torch": "2"},
        **about,
    }
    path = file_of(folder, rank)
    save_recording(path, records, [BEGAN + end for end in ends], known)
    return path


def job_of(folder: Path, *ranks: list[Record], ends: tuple[float, ...] = (), **about: Any) -> RecordedJob:
    for rank, records in enumerate(ranks):
        save(folder, rank, records, ends, **about)
    return load_job(folder)


def collective(number: int, arrivals: Sequence[float], served: float, **others: Any) -> list[Record]:
    """Return a synchronous collective of all ranks; it ends `served` seconds after the last arrival."""
    done = max(arrivals) + served
    return [operation(number, at, done - at, done - at, ranks=len(arrivals), **others) for at in arrivals]


def expected(
    kind: str, backend: str, job: dict[str, float], usual: dict[str, float], **row: Any
) -> dict[str, Any]:
    def table(times: dict[str, float]) -> dict[str, Any]:
        return {"expected_us": times.get(backend), "alternatives": times}

    return {
        "kind": kind,
        "size_class": 4096,
        "tag": None,
        "backend": backend,
        "ranks": 2,
        "is_async": False,
        "bytes": 4096,
        "count": 100,
        "job": table(job),
        "usual": table(usual),
        **row,
    }


def titles(job: RecordedJob) -> dict[str, Any]:
    """Return the findings of the report, by title."""
    return {each.title: each for each in advice(job, groups(job), steps(job), skew(job))}
