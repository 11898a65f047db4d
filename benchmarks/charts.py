"""Draws the pictures of README.md out of `benchmarks/results/`, for light and dark backgrounds.

    python benchmarks/charts.py                  writes docs/images/*.svg

Needs matplotlib (the extra `plot`). Figures come from the tables of the result files alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from harness import RESULTS, ROOT, program

from mcr_plus.core.units import format_size, parse_size

IMAGES: Final = ROOT / "docs" / "images"
BESIDE: Final = RESULTS / "beside_x86-2core_202611.md"
TWO_HOSTS: Final = RESULTS / "steps_x86-2core-two-hosts_202611.md"
TORCH_BACKEND: Final = RESULTS / "torch-backend_x86-2core_202611.md"
MPIS: Final = RESULTS / "mpis_x86-2core_202611.md"
LABELS: Final = {
    "torch gloo": "torch.distributed, gloo",
    "Open MPI": "Open MPI by mpi4py",
    "MPICH": "MPICH by mpi4py",
    "Intel MPI": "Intel MPI by mpi4py",
    "mcr_plus": "mcr_plus, default pipeline",
}
"""Columns that are drawn, and how they are called."""


@dataclass(frozen=True)
class Style:
    """Colours for one background."""

    name: str
    ink: str
    faint: str
    ours: str
    others: tuple[str, ...]


STYLES: Final = (
    Style("light", "#1f2328", "#d1d9e0", "#0969da", ("#8c959f", "#bc4c00", "#8250df", "#1a7f37")),
    Style("dark", "#e6edf3", "#3d444d", "#58a6ff", ("#9198a1", "#f0883e", "#bc8cff", "#3fb950")),
)


# -- figures --------------------------------------------------------------------------------------------


def tables(text: str) -> dict[str, list[dict[str, str]]]:
    """The tables of a result file by the heading they stand under; rows by the names of their columns.

    The first table under each heading; the text before the first heading is "".
    """
    found: dict[str, list[dict[str, str]]] = {}
    heading: str = ""
    names: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            heading, names = line.lstrip("# "), []
        elif line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not names:
                names = cells
            elif heading not in found or len(found[heading][0]) == len(cells):
                found.setdefault(heading, []).append(dict(zip(names, cells, strict=True)))
        elif not line.startswith("|"):
            names = []
    return found


def latencies(path: Path = MPIS) -> dict[str, dict[int, float]]:
    """Least of the medians of an all_reduce on a quiet machine in microseconds, by library and bytes."""
    rows = [row for row in tables(path.read_text())["Two ranks: times"] if row["operation"] == "all_reduce"]
    return {
        name: {parse_size(row["bytes"]): float(row[name].split("/")[0]) for row in rows} for name in LABELS
    }


def gains() -> dict[str, float]:
    """How many times as fast as torch.distributed's gloo training is, by what is trained.

    Of jobs that were measured twice the later, longer measurement.
    """
    found: dict[str, float] = {}
    for row in last_table(BESIDE):
        if row["beside"] == "0":
            found[f"{EXAMPLES[row['example']]}, one host"] = float(row["speed-up"].split()[0])
    for row in tables(TWO_HOSTS.read_text())["A training step over a link of 1gbit (2026-11-21)"]:
        if row["example"] in EXAMPLES:
            found[f"{EXAMPLES[row['example']]}, 1 Gbit/s"] = float(row["DDP / best of ours"])
    (backend,) = tables(TORCH_BACKEND.read_text()).values()
    for row in backend:
        if row["what"].startswith("DDP"):
            parameters = row["what"].split(" of ")[1]
            found[f"DDP, MLP of {parameters}"] = float(row["gloo / mcr"])
    return found


EXAMPLES: Final = {"dlrm": "DLRM", "moe": "mixture of experts", "gpt": "GPT"}


def last_table(path: Path) -> list[dict[str, str]]:
    """The last table of a result file."""
    text = path.read_text()
    start = max(match.end() for match in re.finditer(r"^(?!\|).*\n(?=\|)", text, re.MULTILINE))
    (rows,) = tables(text[start:]).values()
    return rows


# -- pictures -------------------------------------------------------------------------------------------


def draw_latencies(axes: Any, style: Style) -> None:
    """One line per candidate: microseconds over bytes, both logarithmic."""
    others = iter(style.others)
    for name, points in latencies().items():
        ours = name == "mcr_plus"
        axes.plot(
            list(points), list(points.values()), label=LABELS[name], marker="o", markersize=5 if ours else 4,
            color=style.ours if ours else next(others), linewidth=2.5 if ours else 1.5,
        )  # fmt: skip
    sizes = list(latencies()["mcr_plus"])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [format_size(size) for size in sizes])
    axes.set_ylabel("µs, median")
    axes.figure.suptitle("all_reduce on two ranks of one host")
    axes.grid(axis="y", color=style.faint, linewidth=0.6)
    axes.legend(frameon=False, labelcolor=style.ink)


def draw_gains(axes: Any, style: Style) -> None:
    """A bar for each job."""
    names, values = zip(*reversed(gains().items()), strict=True)
    bars = axes.barh(names, values, color=style.ours, height=0.62)
    axes.bar_label(bars, [f"{value:.2f} ×" for value in values], padding=4, color=style.ink)
    axes.axvline(1, color=style.ink, linewidth=1)
    axes.set_xlim(0, max(values) * 1.15)
    axes.figure.suptitle("Training step, times as fast as over torch.distributed's gloo")
    axes.tick_params(left=False)


def draw(target: Path, style: Style, size: tuple[float, float], paint: Callable[[Any, Style], None]) -> None:
    """One picture in one style; the same bytes for the same figures."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    colours: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), style.ink
    )
    fonts: dict[Any, Any] = {"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "mcr_plus"}
    with mpl.rc_context({**colours, **fonts}):
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        axes.spines[["top", "right"]].set_visible(False)
        paint(axes, style)
        figure.savefig(target, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


STAGES: Final[Mapping[str, str]] = {
    "fuse": "small tensors\ntravel together",
    "hierarchical": "inside hosts,\nthen between",
    "compress": "codecs, with\nerror feedback",
    "select": "table, rules,\nor by the call",
    "dispatch": "order, deadlines,\nmismatches",
}
LIBRARIES: Final = ("shared memory, MSCCL files", "MPI", "gloo", "NCCL")


def pipeline(style: Style) -> str:
    """The picture of the pipeline."""
    width, height, gap, left = 132, 74, 22, 112
    parts = [
        _text(8, 60, "all_reduce", style),
        _text(8, 78, "all_to_all", style),
        _text(8, 96, "send …", style),
    ]
    x = left
    for name, words in STAGES.items():
        parts.append(_arrow(x - gap + 3, 78, x - 3, 78, style))
        parts.append(
            f'<rect x="{x}" y="41" width="{width}" height="{height}" rx="8" fill="none" '
            f'stroke="{style.ours}" stroke-width="2"/>'
        )
        parts.append(_text(x + width / 2, 62, name, style, anchor="middle", weight="bold"))
        for row, line in enumerate(words.split("\n")):
            parts.append(_text(x + width / 2, 83 + 17 * row, line, style, anchor="middle", size=13))
        x += width + gap
    places = [12 + 36 * index for index in range(len(LIBRARIES))]
    for y, library in zip(places, LIBRARIES, strict=True):
        parts.append(_arrow(x - gap + 3, 78, x + 22, y + 14, style))
        parts.append(
            f'<rect x="{x + 26}" y="{y}" width="204" height="28" rx="6" fill="none" '
            f'stroke="{style.ink}" stroke-width="1.2"/>'
        )
        parts.append(_text(x + 128, y + 19, library, style, anchor="middle", size=13))
    total = x + 26 + 204 + 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} 164" width="{total}" height="164" '
        'role="img" font-family="sans-serif">'
    )
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 8 4 0 8Z" fill="{style.ink}"/></marker></defs>'
    )
    return "\n".join([head, marker, *parts, "</svg>", ""])


def _text(
    x: float,
    y: float,
    words: str,
    style: Style,
    *,
    anchor: str = "start",
    weight: str = "normal",
    size: int = 15,
) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{style.ink}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{words}</text>'
    )


def _arrow(x1: float, y1: float, x2: float, y2: float, style: Style) -> str:
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{style.ink}" stroke-width="1.4" '
        'marker-end="url(#tip)"/>'
    )


@program
def main(
    folder: Annotated[Path, typer.Option("--output", help="Folder of the pictures.")] = IMAGES,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for style in STYLES:
        (folder / f"pipeline-{style.name}.svg").write_text(pipeline(style))
        draw(folder / f"latency-{style.name}.svg", style, (7.2, 3.6), draw_latencies)
        draw(folder / f"gains-{style.name}.svg", style, (7.2, 3.2), draw_gains)


if __name__ == "__main__":
    main()
