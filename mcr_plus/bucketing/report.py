"""Write the HTML report of `mcr-plus plan`: timeline, step time over ranks, and gains of changes."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from typing import Any, Final

from mcr_plus.bucketing.advise import PlanAdvice, Scaled
from mcr_plus.bucketing.simulation_result import Timeline
from mcr_plus.bucketing.step import CapturedStep
from mcr_plus.core.units import about

COLOURS: Final = {"measured": "#1b7837", "scaled": "#e08214", "assumed": "#b2182b"}
_COMPUTING: Final = "#9ecae1"
# Pictures and coloured words are made for light pages; dark pages invert them and keep the hues. Narrow pages
# scroll wide content, because in a picture shrunk to 400 pixels, labels would be 4 pixels high.
_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8885; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
svg { width: 100%; height: auto; min-width: 42rem; }
@media (prefers-color-scheme: dark) { svg, b, td[style] { filter: invert(1) hue-rotate(180deg); } }
"""


def html_report(step: CapturedStep, advice: PlanAdvice, title: str) -> str:
    """Return the complete report; needs matplotlib."""
    timeline = advice.timeline
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(summary(advice))}</p>",
        "<p>Costs are "
        + ", ".join(f'<b style="color:{colour}">{how}</b>' for how, colour in COLOURS.items())
        + ": from the table or the captured step at this number of ranks; computed by the rounds of "
        "algorithms from other numbers of ranks or other links; or without a measurement. Tables include the "
        "origin of the shares of the core; pictures show that of the times. Computation is that of the "
        f"captured step ({step.ranks} ranks, spread of its steps {step.spread:.0%}).</p>",
        "<h2>Timeline of the slowest rank</h2>",
        _timeline(timeline),
        "<h2>Step time over ranks</h2>",
        _scaling(step, advice),
        _table(
            ("ranks", "step ms", "bound ms", "costs"),
            [(str(at.ranks), _ms(at.step_s), _ms(at.bound), costs_of(at)) for at in advice.scaling],
        ),
        "<h2>Plans</h2>",
        _table(
            ("plan", "step ms", "exposed ms", "costs"),
            [
                (name, _ms(each.step_s), _ms(each.exposed_s), costs_of(each))
                for name, each in [("this one", timeline), *advice.others.items()]
            ],
        ),
        "<h2>Changes</h2>",
        _table(
            ("change", "step ms", "gain ms", "costs"),
            [(each.change, _ms(each.step_s), _ms(each.gain), each.how) for each in advice.what_ifs],
        ),
        "".join(f"<p>{html.escape(text)}</p>" for text in (*advice.skipped, *step.notes)),
        "<h2>Buckets, in the order of sending</h2>",
        _table(
            ("bucket", "library", "gradients"),
            [
                (str(number), bucket.library, ", ".join(bucket.params))
                for number, bucket in enumerate(advice.plan.buckets or ())
            ],
        ),
    ]
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
    head += f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def summary(advice: PlanAdvice) -> str:
    """Return the predicted step time and its causes, in a few sentences."""
    timeline = advice.timeline
    text = (
        f"{_ms(timeline.step_s)} ms on {timeline.ranks} ranks (costs: {costs_of(timeline)}); computation "
        f"{_ms(timeline.compute_s)} ms, exposed communication {_ms(timeline.exposed_s)} ms; lower bound "
        f"{_ms(advice.bound)} ms for any buckets"
    )
    if timeline.bound > advice.bound:
        text += f", and {_ms(timeline.bound)} ms for these, set by {timeline.bound_by}"
    text += "."
    if advice.plan.buckets:
        above = f"{100 * advice.gap:.1f} % above"
        if advice.exact:
            text += " These buckets are the best ones."
        elif advice.to_bound:
            text += f" These buckets are {above} the lower bound, and at most that above the best ones."
        else:
            text += f" These buckets are at most {above} the best ones."
    best = next((each for each in advice.what_ifs if each.gain > 0), None)
    if best is not None:
        text += f" The change with the largest gain: {best.change} ({_ms(best.gain)} ms less)."
    if timeline.unknown:
        text += f" Unknown operations, simulated as barriers: {', '.join(timeline.unknown)}."
    return text


def costs_of(known: Timeline | Scaled) -> str:
    """Return the origin of costs, or two origins if core shares have a weaker origin than times."""
    return known.how if known.how == known.times_how else f"{known.how} (times {known.times_how})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>"


def _cell(text: str) -> str:
    colour = COLOURS.get(text.partition(" (")[0])
    style = f' style="color:{colour}"' if colour else ""
    kind = ' class="n"' if text.replace(".", "", 1).removeprefix("-").isdigit() else ""
    return f"<td{kind}{style}>{html.escape(text)}</td>"


# -- pictures -----------------------------------------------------------------------------------------------


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes: Any = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return f"<div class='scroll'>{text[text.index('<svg') :]}</div>"


def _timeline(timeline: Timeline) -> str:
    lanes = list(dict.fromkeys(each.library for each in timeline.per_op))
    figure, axes = _figure(10, 1.2 + 0.5 * (1 + len(lanes)))
    computing = [part for part in timeline.critical if part.what == "computing"]
    for each in computing:
        axes.barh(0, 1e3 * (each.end - each.start), left=1e3 * each.start, color=_COMPUTING)
    for operation in timeline.per_op:
        row = 1 + lanes.index(operation.library)
        start, length = 1e3 * operation.start, 1e3 * (operation.end - operation.start)
        axes.barh(row, length, left=start, color=COLOURS[operation.how], edgecolor="white", linewidth=0.5)
        if length > 30 * timeline.step_s:  # 3 % of the width
            text = about(operation.nbytes)
            axes.text(start + length / 2, row, text, ha="center", va="center", fontsize=7, color="white")
    axes.axvline(1e3 * timeline.bound, color="black", linewidth=0.8, linestyle="--")
    axes.text(1e3 * timeline.bound, -0.55, "bound ", ha="right", va="bottom", fontsize=8)
    axes.set_yticks(range(1 + len(lanes)), ["computing (critical path)", *lanes])
    axes.invert_yaxis()
    axes.set_xlabel("ms from the beginning of the step")
    return _svg(figure)


def _scaling(step: CapturedStep, advice: PlanAdvice) -> str:
    figure, axes = _figure(8, 3.2)
    ranks = [at.ranks for at in advice.scaling]
    steps = [1e3 * at.step_s for at in advice.scaling]
    # Assume that computation varies as much as it did between the captured steps.
    band = [step.spread / 2 * 1e3 * advice.timeline.compute_s] * len(ranks)
    low = [value - part for value, part in zip(steps, band, strict=True)]
    high = [value + part for value, part in zip(steps, band, strict=True)]
    axes.fill_between(ranks, low, high, color="#cccccc", alpha=0.5, label="spread of the captured steps")
    axes.plot(ranks, steps, color="#555555", linewidth=1)
    for how, colour in COLOURS.items():
        chosen = [at for at in advice.scaling if at.times_how == how]
        axes.scatter(
            [at.ranks for at in chosen], [1e3 * at.step_s for at in chosen], color=colour, label=how, zorder=3
        )
    axes.plot(ranks, [1e3 * at.bound for at in advice.scaling], "k--", linewidth=0.8, label="bound")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("step, ms")
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure)
