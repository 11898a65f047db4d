"""Recommended changes to a job, from the costs of its operations; with a rule where possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from mcr_plus.core.kinds import MESSAGES
from mcr_plus.core.units import about, format_size
from mcr_plus.errors import phrase_ranks
from mcr_plus.observe.report.analysis import SMALL, ArrivalDelays, OperationGroup, Skew, StepDurations
from mcr_plus.observe.report.job import RecordedJob

_MUCH: Final = 0.10  # share of the time that is worth a finding
_FASTER: Final = 0.8  # an alternative must take at most this fraction of the time
_SLOWER: Final = 2.0  # times the table's expectation; slower operations get a finding
_MOSTLY: Final = 0.7  # share of the time lost to late ranks above which one rank is named
_WORTH: Final = 0.01  # gain of another library, as a share of the time, that is worth a rule
_MANY: Final = 20  # small operations in a step, or in a second
_LITTLE_SAVED: Final = 0.9  # ratio of bytes after to bytes before a codec; above it, the codec saves little

Severity = Literal["problem", "gain", "note"]


@dataclass(frozen=True)
class ReportAdvice:
    """One finding: a title, an explanation with advice, and a piece of a configuration, empty for none.

    `share`: share of the time, by which findings are sorted.
    """

    severity: Severity
    title: str
    text: str
    snippet: str = ""
    share: float = 0.0


def advice(
    job: RecordedJob, groups: Sequence[OperationGroup], steps: StepDurations, skew: Skew
) -> list[ReportAdvice]:
    """Return all findings: problems first, then by share of the time."""
    waits = [*_of_waits(job, groups, skew), *_of_late_ranks(job, groups, skew)]
    found = [
        *_of_files(job),
        *_of_failures(groups),
        *(waits or _of_spread_waits(groups)),
        *_of_small_operations(job, groups, steps),
        *_of_codecs(groups),
    ]
    order = {"problem": 0, "gain": 1, "note": 2}
    return sorted(found, key=lambda each: (order[each.severity], -each.share))


def _of_files(job: RecordedJob) -> Iterator[ReportAdvice]:
    if job.missing:
        yield ReportAdvice(
            "problem",
            f"No file of {phrase_ranks(job.missing)}",
            "The page is about the other ranks. Collect the files of all hosts in one folder; a rank that "
            "was killed has written none.",
        )
    for host, clock in job.clocks.items():
        if clock.error_us is None:
            yield ReportAdvice(
                "note",
                f"The clock of {host} is placed by its time of day",
                "It has no operations in common with the other hosts, so times between hosts may be off by "
                "milliseconds.",
            )


def _of_failures(groups: Sequence[OperationGroup]) -> Iterator[ReportAdvice]:
    failed = [group for group in groups if group.failed]
    if failed:
        names = ", ".join(f"{group.failed} of {group.name} on {group.backend}" for group in failed)
        yield ReportAdvice(
            "problem", "Operations have failed", f"{names}. They are left out of times and bandwidths."
        )


def _of_waits(job: RecordedJob, groups: Sequence[OperationGroup], skew: Skew) -> Iterator[ReportAdvice]:
    late = {each.name: each.late for each in skew.operations}
    for group in groups:
        if group.waited >= _MUCH and not group.codec and group.failed < group.count:
            yield _of_wait(job, group, late.get(group.name))


def _of_wait(job: RecordedJob, group: OperationGroup, late: ArrivalDelays | None) -> ReportAdvice:
    """Return a finding on an operation with long waits: the cause, and a change that shortens the waits."""
    title = f"{group.waited:.0%} of the time waits for {group.name} on {group.backend}"
    rows = _choices(job, group)
    cause = _of_late_arrivals(group, late)
    # Only the time after the last arrival depends on the library.
    served = group.waited - group.late
    if (better := _better(rows)) is not None:
        gain = min(served, better.mean_us * group.count / len(job.ranks) / 1e6 / job.seconds)
        if gain >= _WORTH:
            return ReportAdvice(
                "gain",
                title,
                f"{cause}{better.choice} would take {_ms(better.us)} instead of {_ms(better.own_us)} for "
                f"{about(better.bytes)}, by the table: {gain:.1%} of the time. Add this rule to the "
                "configuration, and the library to `backends` if that names others; a call with its own "
                "`backend=` keeps that one.",
                _rule(group, f"backend: {better.choice}"),
                group.waited,
            )
    # No table names a faster library: look for other causes, the most certain first.
    if group.late > group.waited / 2:
        return ReportAdvice(
            "note", title, f"{cause}A faster library would not help with that.", share=group.waited
        )
    expected = max(((row["job"].get("expected_us") or 0.0, row["bytes"]) for row in rows), default=(0.0, 0))
    if expected[0] and group.served_us > _SLOWER * expected[0]:
        return _of_a_slow_one(job, group, expected, cause, title)
    if not group.is_async and group.kind not in MESSAGES:
        return ReportAdvice(
            "gain",
            title,
            f"{cause}It is synchronous, so nothing is computed meanwhile. Issue it with `async_op=True` as "
            "soon as its data are there, and wait for it when they are needed; `mcr.wrap` does that for "
            "gradients.",
            share=group.waited,
        )
    if _can_be_rounded(job, group):
        return ReportAdvice(
            "gain",
            title,
            f"{cause}It moves {about(group.bytes // group.count)} each time between hosts. A codec sends "
            "less: bf16 halves the bytes of float32, and docs/compression.md has what others cost.",
            _rule(group, "compress: {codec: bf16}"),
            group.waited,
        )
    compared = any(alternatives(row) is not None for row in rows)
    found = "No library in the table is clearly faster." if compared else "The table compares no libraries."
    return ReportAdvice("note", title, f"{cause}{found}", share=group.waited)


def _of_late_arrivals(group: OperationGroup, late: ArrivalDelays | None) -> str:
    """Describe the part of a wait before the last rank has arrived; empty if that part is small."""
    if late is None or group.late < group.waited / 4:
        return ""
    text = f"{_share(group.late)} of the time passes before the last rank has issued it"
    if late.blame >= _MOSTLY:
        return f"{text}, mostly rank {late.rank}, by {_ms(late.median * 1e6)} at the median. "
    return f"{text}: now one rank, now another comes later, as their work differs or others use their cores. "


def _of_a_slow_one(
    job: RecordedJob, group: OperationGroup, expected: tuple[float, int], cause: str, title: str
) -> ReportAdvice:
    """Return a finding on an operation that takes longer than a table predicts.

    `expected`: the table's longest prediction in microseconds, and its size in bytes.
    """
    us, nbytes = expected
    return ReportAdvice(
        "problem",
        title,
        f"{cause}Its median wait for {group.backend}, once all ranks have issued it, is "
        f"{_ms(group.served_us)}, and the table expects at most {_ms(us)}, for {about(nbytes)}. Other "
        "processes use the cores or the link, or the table was measured on faster ones. Measure here with "
        f"`mcr-plus tune -n {len(job.hosts)} -o table.yaml`, and name the table in `select`.",
        "pipeline:\n  - select: {table: table.yaml}\n  - dispatch: {}",
        group.waited,
    )


def _can_be_rounded(job: RecordedJob, group: OperationGroup) -> bool:
    """Return whether bf16 halves the bytes that an operation sends over a network."""
    return (
        len(set(job.hosts)) > 1
        and group.kind in ("all_reduce", "all_gather", "reduce_scatter")
        and group.dtypes == ("float32",)
        and group.bytes / group.count > 1 << 20
    )


def _choices(job: RecordedJob, group: OperationGroup) -> list[dict[str, Any]]:
    """Return the tables' predictions for the operations of a group, by size."""
    wanted = group.kind, group.tag, group.backend
    return [row for row in job.choices if (row["kind"], row["tag"] or "", row["backend"]) == wanted]


def alternatives(row: dict[str, Any]) -> tuple[float, dict[str, float]] | None:
    """Return the times of the library in use and of its alternatives, from a row of `expectations`.

    Times are in microseconds, from the job's table, or from the usual table if the job's has no alternatives;
    None if neither has any.
    """
    own_name = row["backend"].partition(":")[0]
    for table in (row["job"], row["usual"]):
        times = table.get("alternatives", {})
        own = times.get(row["backend"], times.get(own_name))
        others = {each: us for each, us in times.items() if us > 0 and each.partition(":")[0] != own_name}
        if own and others:
            return own, others
    return None


class _Better(NamedTuple):
    """A faster library: its time and the present one's, at the size with the largest gain; `mean_us` is the
    mean gain per operation over all sizes.
    """

    choice: str
    bytes: int
    us: float
    own_us: float
    mean_us: float


def _better(rows: Sequence[dict[str, Any]]) -> _Better | None:
    """Return the library with the least total time by a table, if it is clearly faster."""
    compared = [(row, *found) for row in rows if (found := alternatives(row)) is not None]
    if not compared:
        return None
    own_us = sum(row["count"] * own for row, own, _ in compared)
    totals = {
        choice: sum(row["count"] * others[choice] for row, _, others in compared)
        for choice in compared[0][2]
        if all(choice in others for *_, others in compared)
    }
    choice = min(totals, key=lambda each: totals[each], default="")
    if not choice or totals[choice] > _FASTER * own_us:
        return None
    row, own, others = max(compared, key=lambda each: each[0]["count"] * (each[1] - each[2][choice]))
    mean_us = (own_us - totals[choice]) / sum(each["count"] for each, *_ in compared)
    return _Better(choice, row["bytes"], others[choice], own, mean_us)


def _rule(group: OperationGroup, what: str) -> str:
    """Return a configuration rule for the operations of a group."""
    tag = f', tag: "{group.tag}"' if group.tag else ""
    size = ""
    if not group.tag:
        size = f', bytes: ">={format_size(max(1, group.bytes // group.count // 2))}"'
    return f"rules:\n  - match: {{kind: {group.kind}{tag}{size}}}\n    {what}"


def _of_late_ranks(job: RecordedJob, groups: Sequence[OperationGroup], skew: Skew) -> Iterator[ReportAdvice]:
    if (size := len(job.ranks)) < 2 or not skew.count:
        return
    worst = max(skew.ranks, key=lambda each: each.total)
    # Only the other ranks' waits count: lateness hidden behind computation costs nothing.
    waited = sum(group.late for group in groups) * size / (size - 1)
    share = min(worst.total / max(job.ranks[worst.rank].seconds, 1e-12), waited)
    times = worst.last * skew.count
    if worst.blame < _MOSTLY or share < _MUCH / 2 or worst.total / times < 2e-6 * (skew.error_us or 0.0):
        return
    at = max((each for each in skew.operations if each.late.rank == worst.rank), key=lambda e: e.late.total)
    how = f"{_ms(at.late.median * 1e6)} at the median, {_ms(at.late.worst * 1e6)} at worst"
    once = " Half of it and more is one delay, such as a checkpoint." * (worst.worst > worst.total / 2)
    yield ReportAdvice(
        "problem",
        f"The others wait for rank {worst.rank} for {share:.0%} of the time",
        f"It comes last to {at.late.last:.0%} of {at.count:,} calls of {at.name}, by {how}; "
        f"{worst.blame:.0%} of what late ranks cost is its.{once} No library helps: look at what this rank "
        "does before the call, its data loader, its share of the work, other processes on its cores, the "
        "clock of its processor.",
        share=share,
    )


def _of_spread_waits(groups: Sequence[OperationGroup]) -> Iterator[ReportAdvice]:
    """Yield findings on waits spread over many kinds and ranks, or on operations with a codec already."""
    waited, late = sum(group.waited for group in groups), sum(group.late for group in groups)
    if waited >= _MUCH:
        most = max(groups, key=lambda group: group.waited)
        encoded = f", encoded by {most.codec}" if most.codec else ""
        yield ReportAdvice(
            "note",
            f"{waited:.0%} of the time waits for communication",
            f"The most, {most.waited:.1%}, is for {most.name} on {most.backend}{encoded}. {late:.0%} of the "
            "time passes before the last rank has issued the operation: not a matter of the library.",
            share=waited,
        )


def _of_small_operations(
    job: RecordedJob, groups: Sequence[OperationGroup], steps: StepDurations
) -> Iterator[ReportAdvice]:
    for group in groups:
        each = group.count / len(job.ranks)
        rate = each / steps.count if steps.count else each / job.seconds
        fusible = group.kind in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
        if (
            fusible
            and group.small > 0.9
            and rate >= _MANY
            and group.fused < 2
            and group.in_flight >= _MUCH / 2
        ):
            per = "step" if steps.count else "second"
            advised = "" if group.is_async else " Issue them with `async_op=True`; only these can be fused."
            yield ReportAdvice(
                "gain",
                f"{rate:,.0f} small operations per {per}: {group.name}",
                f"Nearly all are of at most {about(SMALL)}, where latency counts and not bandwidth. Fused, "
                f"they travel as few.{advised} Those of different tags are fused apart.",
                f"pipeline:\n  - fuse: {{bucket: 25MiB, kinds: [{group.kind}]}}\n  - select: {{}}\n  - "
                f"dispatch: {{}}",
                group.waited,
            )


def _of_codecs(groups: Sequence[OperationGroup]) -> Iterator[ReportAdvice]:
    for group in groups:
        if group.codec and group.bytes and group.wire >= _LITTLE_SAVED * group.bytes:
            yield ReportAdvice(
                "gain",
                f"Codec {group.codec} saves {1 - group.wire / group.bytes:.0%} of {group.name}",
                "Encoding and decoding take longer than what it saves, unless the link is slow.",
                _rule(group, "compress: {codec: none}"),
                group.waited,
            )


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= _MUCH else f"{share:.1%}"


def _ms(us: float) -> str:
    if us >= 1e6:
        return f"{us / 1e6:.3g} s"
    return f"{us / 1e3:.3g} ms" if us >= 100 else f"{us:.3g} µs"
