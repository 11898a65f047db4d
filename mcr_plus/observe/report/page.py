"""The report as one self-contained HTML file."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from mcr_plus.config.document import write_text
from mcr_plus.core.units import about
from mcr_plus.observe.report.advice import ReportAdvice, advice, alternatives
from mcr_plus.observe.report.analysis import (
    CodecUse,
    OperationGroup,
    Skew,
    StepDurations,
    codecs,
    groups,
    shares_of,
    skew,
    steps,
)
from mcr_plus.observe.report.codec_error import relative_error
from mcr_plus.observe.report.job import RecordedJob, load_job
from mcr_plus.observe.report.style import STYLE
from mcr_plus.observe.report.timeline import legend, timeline

_MOST_ROWS: Final = 100
_MOST_RANKS: Final = 64
_ALIKE: Final = 0.05  # relative difference below which times count as equal
_LABELS: Final = {"problem": "problem", "gain": "gain", "note": "note"}


def write_report(folder: Path, output: Path) -> RecordedJob:
    """Write the page about the recordings of a folder; raise `ConfigError` for bad files."""
    job = load_job(folder)
    write_text(output, report(job, folder.name))
    return job


def report(job: RecordedJob, title: str) -> str:
    """Return the page."""
    found, of_steps, arrivals = groups(job), steps(job), skew(job)
    kinds = list(dict.fromkeys(group.kind for group in found))
    parts = [
        _header(job, title, of_steps),
        _tiles(job, found, of_steps),
        _section("What to change", _cards(advice(job, found, of_steps, arrivals))),
        _section(*_step(job, of_steps, kinds)),
        _section("Time of each rank", _ranks(job)),
        _section("Operations", _operations(found)),
        _section("Choices of libraries", _choices(job, of_steps)),
        _section("Codecs", _codecs(codecs(job))),
        _section("Late ranks", _late(arrivals)),
        _section("About these figures", _about(job)),
    ]
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}: communication</title><style>{STYLE}</style>"
    )
    body = f"<main>{''.join(parts)}</main>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>\n"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{content}</section>" if content else ""


def _header(job: RecordedJob, title: str, of_steps: StepDurations) -> str:
    hosts = len(set(job.hosts))
    recorded = f"{of_steps.count:,} steps" if of_steps.count else f"{job.seconds:.3g} s"
    where = f"{len(job.hosts)} ranks on {hosts} host{'' if hosts == 1 else 's'}"
    return (
        f"<header><h1>{html.escape(title)}</h1>"
        f"<p>{where} · {recorded} · {job.count:,} operations</p></header>"
    )


def _tiles(job: RecordedJob, found: Sequence[OperationGroup], of_steps: StepDurations) -> str:
    shares = [shares_of(job, rank) for rank in list(job.ranks)[:_MOST_RANKS]]
    waiting = sum(each.waiting for each in shares) / len(shares)
    hidden = sum(each.hidden for each in shares) / len(shares)
    wire, payload = sum(group.wire for group in found), sum(group.bytes for group in found)
    each = about(wire // (len(job.ranks) * max(of_steps.count, 1)))
    saved = f"{1 - wire / payload:.0%} saved by codecs" if wire < payload else "no codec"
    per = "per step and rank" if of_steps.count else "per rank"
    tiles = [
        ("step", _time(of_steps.p50), f"95 %: {_time(of_steps.p95)}")
        if of_steps.count
        else ("recorded", f"{job.seconds:.3g} s", "no steps of an optimizer were seen"),
        ("waiting", f"{waiting:.0%}", "exposed communication, mean of the ranks"),
        ("hidden", f"{hidden:.0%}", "communication behind computing"),
        ("to libraries", each, f"{per}, {saved}"),
    ]
    inner = "".join(
        f"<div class='tile'><span>{html.escape(name)}</span><b>{html.escape(value)}</b>"
        f"<small>{html.escape(what)}</small></div>"
        for name, value, what in tiles
    )
    return f"<div class='tiles'>{inner}</div>"


def _cards(found: Sequence[ReportAdvice]) -> str:
    if not found:
        return "<p>Nothing stands out: little of the time waits for communication, and no rank is late.</p>"
    return "".join(
        "<article "
        f"class='{each.severity}'><h3><span>{_LABELS[each.severity]}</span>{html.escape(each.title)}</h3><p>{html.escape(each.text)}</p>"
        + (f"<pre>{html.escape(each.snippet)}</pre>" if each.snippet else "")
        + "</article>"
        for each in found
    )


def _step(job: RecordedJob, of_steps: StepDurations, kinds: Sequence[str]) -> tuple[str, str]:
    if not job.count:
        return "One step", "<p>Nothing was recorded.</p>"
    title = f"One step, {_time(of_steps.end - of_steps.begin)}"
    if not of_steps.by_marks:
        title = f"A part of the recording, {_time(of_steps.end - of_steps.begin)}"
    note = (
        "<p class='quiet'>Above, what the program did; below, what was in flight on each library, from "
        "issue until completion was noticed. Point at a bar for its operation.</p>"
    )
    return title, note + legend(kinds) + timeline(job, of_steps, kinds)


def _ranks(job: RecordedJob) -> str:
    rows = []
    for rank in list(job.ranks)[:_MOST_RANKS]:
        shares = shares_of(job, rank)
        rows.append(
            f"<div class='share'><span>rank {rank}</span><div class='lane program'>"
            f"<i class='waiting' style='right:0;width:{100 * shares.waiting:.2f}%'></i></div>"
            f"<span>waits {shares.waiting:.1%}</span></div>"
        )
    return "".join(rows)


def _operations(found: Sequence[OperationGroup]) -> str:
    heads = ("operation", "waited", "for late ranks", "in flight", "count", "bytes", "p50", "p95", "bus GB/s")
    rows = [
        [
            _named(group.kind, group.tag, _where(group)),
            _meter(group.waited), f"{group.late:.1%}", f"{group.in_flight:.1%}", f"{group.count:,}",
            about(group.bytes), _time(group.p50_us / 1e6), _time(group.p95_us / 1e6), _speed(group.busbw),
        ]
        for group in found[:_MOST_ROWS]
    ]  # fmt: skip
    left = len(found) - _MOST_ROWS
    more = f"<p class='quiet'>{left} more rows are left out.</p>" if left > 0 else ""
    return _table(heads, rows, names=1) + more


def _where(group: OperationGroup) -> str:
    sums = f"sums: {group.sums}" if group.sums else ""
    return " · ".join(filter(None, (group.backend, group.codec, sums)))


def _choices(job: RecordedJob, of_steps: StepDurations) -> str:
    rows = []
    for row in job.choices:
        compared = alternatives(row)
        if compared is None:
            continue
        own, others = compared
        other = min(others, key=lambda each: others[each])
        ratio = others[other] / own
        word = f"{ratio:.2g}× slower" if ratio >= 1 else f"{1 / ratio:.2g}× faster"
        word = "as fast" if abs(ratio - 1) < _ALIKE else word
        saved = (others[other] - own) * row["count"] / max(of_steps.count, 1) / 1e6
        rows.append(
            [
                _named(row["kind"], row["tag"] or "", row["backend"]), about(row["bytes"]), _time(own / 1e6),
                f"{other}, {_time(others[other] / 1e6)}", word, "−" * (saved < 0) + _time(abs(saved)),
            ]
        )  # fmt: skip
    if not rows:
        return ""
    note = (
        "<p class='quiet'>Times are those that the tuning table expects: of the library in use, and of the "
        "best other one; of asynchronous operations the exposed ones. What the choice saves is negative "
        "where the other one would be faster.</p>"
    )
    saves = "saves per step" if of_steps.count else "saves in all"
    heads = ("operation", "bytes", "expected", "best other one", "it is", saves)
    return note + _table(heads, rows, names=1)


def _codecs(found: Sequence[CodecUse]) -> str:
    if not found:
        return ""
    errors = {codec: relative_error(codec) for codec in {each.codec for each in found}}
    rows = []
    for each in found:
        error = errors[each.codec]
        shown = "–" if error is None else "none" if error == 0 else f"{error:.2%}"
        ratio = f"{each.wire / each.bytes:.3g}" if each.bytes else "–"
        rows.append(
            [
                _named(each.kind, "", each.codec), ratio, shown, f"{each.count:,}", about(each.bytes),
                about(each.wire), _time(each.p50_us / 1e6),
            ]
        )  # fmt: skip
    note = (
        "<p class='quiet'>Ratio: bytes that the library was handed for each byte of payload. Error: of one "
        "encoding of normal values with default options, root mean square relative to the values; with "
        "error feedback it is sent later. docs/compression.md compares codecs.</p>"
    )
    heads = ("operation", "ratio", "error", "count", "payload", "on the wire", "p50")
    return note + _table(heads, rows, names=1)


def _late(arrivals: Skew) -> str:
    if not arrivals.count:
        return ""
    by_rank = [
        [f"rank {each.rank}", f"{each.last:.1%}", _time(each.median), _time(each.worst), _time(each.total)]
        for each in sorted(arrivals.ranks, key=lambda each: -each.total)[:_MOST_RANKS]
    ]
    by_operation = [
        [
            each.name, f"{each.count:,}", f"rank {each.late.rank}", f"{each.late.last:.0%}",
            _time(each.late.median), _time(each.late.total),
        ]
        for each in arrivals.operations[:12]
    ]  # fmt: skip
    error = "unknown" if arrivals.error_us is None else f"± {arrivals.error_us:,.0f} µs"
    if arrivals.error_us == 0:
        error = "none, on one host"
    note = (
        f"<p class='quiet'>{arrivals.count:,} operations that all of their ranks have recorded. A rank that "
        f"arrives last is late by the time since the one before it. Error of the clocks: {error}.</p>"
    )
    return (
        note
        + _table(("", "is last", "late by, median", "worst", "in all"), by_rank, names=1)
        + _table(
            ("operation", "count", "last", "of them", "late by, median", "in all"), by_operation, names=1
        )
    )


def _about(job: RecordedJob) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in job.versions.items())
    clocks = "".join(
        f"<li>Clock of {html.escape(host)}: shifted by {clock.shift_us / 1e6:.6f} s, "
        + ("error unknown" if clock.error_us is None else f"± {clock.error_us:,.0f} µs")
        + f", by {html.escape(clock.by)}.</li>"
        for host, clock in list(job.clocks.items())[1:]
    )
    return (
        "<ul><li>Waited: the program stood still for the operation, exposed communication; for late ranks: "
        "what of it passed before the last rank had issued the operation. In flight: from "
        "issue until completion was noticed, which is at the wait, or earlier if something else drove "
        "progress. All are shares of the time of a rank.</li><li>Bus bandwidth: bytes by time, by the "
        "formulas of nccl-tests; comparable with the speed of a link.</li><li>Recorded by mcr.record with "
        f"{html.escape(versions)}.</li>{clocks}</ul>"
    )


# -- pieces -------------------------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, names: int) -> str:
    """Return a table; columns after `names` hold numbers. On narrow pages each row is a block."""
    kinds = ["" if at < names else " class='n'" for at in range(len(heads))]
    labels = [html.escape(name, quote=True) for name in heads]
    head = "".join(f"<th{kind}>{label}</th>" for label, kind in zip(labels, kinds, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{kind} data-of='{label}'>{cell if isinstance(cell, _Markup) else html.escape(cell)}</td>"
            for cell, kind, label in zip(row, kinds, labels, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


class _Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


def _meter(share: float) -> str:
    """Return a share with a bar behind it."""
    width = f"{min(100 * share, 100):.1f}%"
    return _Markup(f"<span class='meter' style='--share:{width}'>{share:.1%}</span>")


def _named(kind: str, tag: str, below: str) -> str:
    """Return an operation with its tag, and a second line."""
    name = f"<b>{html.escape(kind)}</b> {html.escape(tag)}"
    return _Markup(f"{name}<small>{html.escape(below)}</small>")


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} µs"


def _speed(found: float) -> str:
    return "< 0.001" if 0 < found < 1e-3 else f"{found:.3g}"
