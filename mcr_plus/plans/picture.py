"""Picture of a plan as a page of HTML: tasks over time by rank, and memory below; light and dark."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Final

from mcr_plus.core.units import about
from mcr_plus.plans.language import ModelPlan
from mcr_plus.plans.memory import MemoryUse, memory_of
from mcr_plus.plans.proof import ProvedPlan

_WIDTH: Final = 1000.0
_ROW: Final = 34.0
_MOST: Final = 64  # ranks that are drawn
_STYLE: Final = """
:root{color-scheme:light dark;--ink:#222;--back:#fff;--line:#8886}
@media(prefers-color-scheme:dark){:root{--ink:#ddd;--back:#181818}}
body{font:14px system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:1100px;margin:2em auto}
svg{width:100%;height:auto} text{fill:currentColor;font-size:11px} .F{fill:#4c8bd6} .B{fill:#3f9b5f}
.W{fill:#c9892f} rect{stroke:var(--back);stroke-width:.5} .m{fill:#8a6fc44d;stroke:#8a6fc4}
td,th{padding:2px 9px;text-align:left;border-bottom:1px solid var(--line)}
b.F,b.B,b.W{padding:1px 6px;color:#fff;border-radius:3px}
b.F{background:#4c8bd6} b.B{background:#3f9b5f} b.W{background:#c9892f}
"""


def plan_page(proved: ProvedPlan, step: float | None = None) -> str:
    """Return a page. `step`: foretold seconds of a step, with communication."""
    plan = proved.plan
    ranks = range(min(plan.ranks, _MOST))
    uses = [memory_of(proved, rank) for rank in ranks]
    title = f"Plan {plan.name}: {len(plan.blocks)} blocks on {plan.ranks} ranks"
    about_time = f"{1e3 * proved.ideal:.4g} ms with a core for each rank, and without communication"
    if step is not None:
        about_time = f"A step: {1e3 * step:.4g} ms foretold; {about_time}"
    rows = "".join(
        f"<tr><td>{rank}</td><td>{_blocks(proved, rank)}</td><td>{about(use.peak)}</td>"
        f"<td>{html.escape(str(use.at))}</td></tr>"
        for rank, use in zip(ranks, uses, strict=True)
    )
    parts = [
        f"<h1>{html.escape(title)}</h1><p>{about_time}, as drawn below. Each box is a task with its "
        f"micro-batch: <b class='F'>F</b> forward, <b class='B'>B</b> backward, <b class='W'>W</b> gradients "
        f"of parameters. {len(proved.transfers)} transfers between tasks.</p>",
        _settings(proved.plan),
        _svg(_ROW * len(ranks), _tasks(proved, ranks)),
        f"<h2>Memory over time</h2><p>At the same times; a row is {about(max(use.peak for use in uses))} "
        f"high.</p>",
        _svg(_ROW * len(ranks), _memory(proved, uses)),
        "<table><tr><th>rank</th><th>blocks</th><th>most memory</th><th>in</th></tr>" + rows + "</table>",
    ]
    head = f"<meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _blocks(proved: ProvedPlan, rank: int) -> str:
    return _names(proved.plan, [i for i, places in enumerate(proved.plan.places) if rank in places])


def _names(plan: ModelPlan, blocks: Sequence[int]) -> str:
    names = [plan.blocks[block].name for block in blocks]
    return html.escape(", ".join(names if len(names) < 4 else [names[0], "…", names[-1]]))


def _settings(plan: ModelPlan) -> str:
    """Return a table of the cuts and so on, a row for consecutive blocks that have the same."""
    rows = [
        f"<tr><td>{_names(plan, [*blocks])}</td><td>{html.escape(what)}</td></tr>"
        for what, blocks in groupby(range(len(plan.blocks)), partial(_setting, plan))
    ]
    return "<table><tr><th>blocks</th><th>how</th></tr>" + "".join(rows) + "</table>"


def _setting(plan: ModelPlan, block: int) -> str:
    cuts = [f"{' and '.join(cut.axes) or 'replicas'} in {cut.parts}" for cut in plan.cuts[block]]
    held = plan.held[block]
    return ", ".join(
        (cuts or ["whole"])
        + (["recomputed"] if plan.recomputed[block] else [])
        + ([f"{held} in shards"] if held != "whole" else [])
    )


def _svg(height: float, inside: Iterator[str]) -> str:
    return f"<svg viewBox='-60 0 {_WIDTH + 60:g} {height:g}' role='img'>{''.join(inside)}</svg>"


def _tasks(proved: ProvedPlan, ranks: range) -> Iterator[str]:
    scale = _WIDTH / proved.ideal
    for rank in ranks:
        y = _ROW * rank
        yield f"<text x='-58' y='{y + 18:g}'>rank {rank}</text>"
        for run in proved.runs:
            if rank not in run.ranks:
                continue
            x, width = scale * run.start, scale * (run.end - run.start)
            name = html.escape(proved.plan.blocks[run.task.block].name)
            title = f"{run.task}: {name}, {1e3 * (run.end - run.start):.3g} ms"
            shade = 1 - 0.5 * (run.task.micro % 4) / 4
            yield (
                f"<rect class='{run.task.kind}' x='{x:.2f}' y='{y:g}' width='{width:.2f}' "
                f"height='{_ROW - 4:g}' fill-opacity='{shade:g}'><title>{title}</title></rect>"
            )
            if width > 12:
                yield f"<text x='{x + 2:.2f}' y='{y + 18:g}'>{run.task.micro}</text>"


def _memory(proved: ProvedPlan, uses: list[MemoryUse]) -> Iterator[str]:
    scale, most = _WIDTH / proved.ideal, max(use.peak for use in uses)
    for rank, use in enumerate(uses):
        base = _ROW * (rank + 1) - 4
        points = [f"0,{base:g}"]
        before = use.bytes[0]
        for time, nbytes in zip(use.times, use.bytes, strict=True):
            levels = (base - (_ROW - 6) * level / most for level in (before, nbytes))
            points += [f"{scale * time:.2f},{level:.2f}" for level in levels]
            before = nbytes
        last = base - (_ROW - 6) * before / most
        points += [f"{_WIDTH:g},{last:.2f}", f"{_WIDTH:g},{base:g}"]
        yield f"<text x='-58' y='{base - 8:g}'>rank {rank}</text>"
        title = f"rank {rank}: at most {about(use.peak)}"
        yield f"<polygon class='m' points='{' '.join(points)}'><title>{title}</title></polygon>"
