"""Training over slow links: DDP and `mcr.wrap` in every step, against outer steps (`mcr.local`).

    python benchmarks/bench_local.py [--rates 100mbit --rates 1gbit] [--hosts 2] [--seeds 3] [--plot FILE.png]

Network namespaces joined by links of a rate, one rank on each. *Quality*: a small GPT (0.25 million
parameters) is trained on the same tokens in every way, over a link of `--quality-rate`; held-out loss
relative to DDP of the same seed. *Speed*: a GPT of 12.7 million parameters with 16 tokens a step and rank, so
that computing takes some 60 ms and the gradients 51 MB, at each rate; ways that are bound by the wire make
few steps, `mcr.local` several windows, with the last outer step in the time. `--ways 'wrap topk,wrap
powersgd'`: codecs with feedback in every step, after two steps without. Bytes are those that interfaces
have counted, of all ranks together. Utilization is the time of a step that a rank computes alone, while the
others do so too, over the mean time of a step; the shortest that any way of the same rate has measured. "By
processor time": the same of rank 0's threads, those of gloo included, so that neither waiting nor other work
on the machine counts. Waiting for other ranks, and the rest of outer steps, are shares of the time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Final

import harness
import typer
from harness import HARDWARE, ROOT, Dated, Hardware, Plot
from hosts import Hosts
from racks import Racks, bits_per_second
from two_hosts import TwoHosts, need_two_hosts

TRAIN: Final = ROOT / "examples" / "gpt" / "train.py"
SMALL: Final = ["--layers", "2", "--hidden", "96", "--heads", "4", "--sequence", "32", "--lr", "1e-3"]
LARGE: Final = ["--hidden", "512", "--batch", "1", "--sequence", "16"]
WAYS: Final = ("ddp", "wrap", "wrap int8", "local", "local int4", "local int2", "local topk")
FED_BACK: Final = ("wrap topk", "wrap powersgd")
"""Ways that compress from the second pass on, as their buckets must not change; not among the usual ones."""
DDP: Final = "ddp"
DENSE: Final = "local"
WIRE_S: Final = 20.0  # of a job that the wire binds, about
GRADIENTS: Final = 51e6  # bytes
FEWER: Final = 20  # times fewer bytes of `FED_BACK`, about
WINDOWS: Final = 6  # times `WIRE_S` that the windows of `DENSE` may take
Run = dict[str, Any]


def joined(count: int, rate: str | None) -> Hosts:
    """So many hosts with a link of this rate, or a switch between them."""
    return TwoHosts(rate) if count == 2 else Racks(1, count, rate)


def train(hosts: Hosts, ways: Sequence[str], words: Sequence[str], plot: Path | None = None) -> list[Run]:
    """The reports of the example for some ways, one after another in one job."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "report.json")
        line = [sys.executable, str(TRAIN), "--local", "--way", ",".join(ways), *words, "--json", str(target)]
        drawn = [] if plot is None else ["--plot", str(plot)]
        hosts.mpirun([*line, *drawn], stdout=subprocess.DEVNULL)
        runs: list[Run] = json.loads(target.read_text())["runs"]
    return runs


def quality(
    count: int,
    rate: str,
    seeds: int,
    steps: int,
    ways: Sequence[str],
    words: Sequence[str],
    plot: Path | None,
) -> dict[str, list[Run]]:
    """The runs of each way, by seed."""
    found: dict[str, list[Run]] = {}
    with joined(count, rate) as hosts:
        for seed in range(seeds):
            options = [*SMALL, "--steps", str(steps), "--seed", str(seed), *words]
            for run in train(hosts, ways, options, plot if seed == 0 else None):
                found.setdefault(run["way"], []).append(run)
                print(f"{count} hosts  {rate}  seed {seed}  {run['way']}  {run['held_out']:.4f}", flush=True)
    return found


def steps_of(way: str, rate: str, steps: int, every: int) -> int:
    """How many steps a way makes at this rate: so many that neither a job is long nor its wire idle."""
    dense = WIRE_S * bits_per_second(rate) / 8 / GRADIENTS  # that send all gradients
    if way == DENSE:
        return min(steps, every * max(2, round(WINDOWS * dense)))
    if way.startswith("local"):
        return steps
    return max(2, min(steps, round(dense * (FEWER if way in FED_BACK else 1))))


def speed(
    count: int, rate: str, steps: int, every: int, ways: Sequence[str], words: Sequence[str]
) -> dict[str, Run]:
    """A run of each way with the large model."""
    found = {}
    with joined(count, rate) as hosts:
        for way in ways:
            number = steps_of(way, rate, steps, every)
            before = ["--warmup", "2"] if way in FED_BACK else []
            (found[way],) = train(hosts, [way], [*LARGE, "--steps", str(number), *before, *words])
            print(f"{count} hosts  {rate}  {way}  {found[way]['tokens_per_second']:.1f} tokens/s", flush=True)
    return found


def quality_rows(runs: Mapping[str, Sequence[Run]]) -> list[list[str]]:
    """Lines of the table: losses, by seed relative to DDP's, bytes, speed."""
    plain = runs[DDP]
    rows = []
    for way, own in runs.items():
        ratios = [run["held_out"] / other["held_out"] for run, other in zip(own, plain, strict=True)]
        rows.append(
            [
                way,
                f"{mean(run['held_out'] for run in own):.4f}",
                f"{mean(ratios):.4f}",
                " ".join(f"{each:.4f}" for each in ratios),
                f"{_mean(own, 'bytes_per_token'):.1f}",
                f"{_mean(plain, 'bytes_per_token') / _mean(own, 'bytes_per_token'):.0f}",
                f"{_mean(own, 'tokens_per_second') / _mean(plain, 'tokens_per_second'):.1f}",
            ]
        )
    return rows


def _mean(runs: Sequence[Run], figure: str) -> float:
    return float(mean(run[figure] for run in runs))


def speed_rows(rate: str, runs: Mapping[str, Run]) -> list[list[str]]:
    """Lines of the table of speeds."""
    plain = runs[DDP]
    compute = min(run["compute"] for run in runs.values())
    return [
        [
            way,
            rate,
            str(len(run["losses"])),
            f"{1e3 * run['seconds'][-1] / len(run['losses']):.1f}",
            f"{min(1.0, compute * len(run['losses']) / run['seconds'][-1]):.1%}",
            f"{run['processor_alone'] / run['processor']:.1%}",
            f"{run['waiting'] / run['seconds'][-1]:.1%}",
            f"{run['outer'] / run['seconds'][-1]:.1%}",
            f"{run['tokens_per_second']:.1f}",
            f"{run['tokens_per_second'] / plain['tokens_per_second']:.1f}",
            f"{run['bytes_per_token']:,.0f}",
            f"{plain['bytes_per_token'] / run['bytes_per_token']:,.0f}",
        ]
        for way, run in runs.items()
    ]


@harness.program
def main(
    rates: Annotated[list[str], typer.Option(default_factory=lambda: ["10mbit", "100mbit", "1gbit"])],
    hosts: Annotated[int, typer.Option(min=2, help="One rank on each.")] = 2,
    ways: str = ",".join(WAYS),
    seeds: Annotated[int, typer.Option(min=0, help="Of the quality; 0 leaves it out.")] = 3,
    quality_rate: Annotated[str, typer.Option(help="Of the link while quality is measured.")] = "100mbit",
    quality_steps: Annotated[int, typer.Option(min=1)] = 1500,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of the quality with averaged gradients.")] = 300,
    steps: Annotated[int, typer.Option(min=1, help="Of mcr.local where speed is measured.")] = 240,
    every: Annotated[int, typer.Option(min=1)] = 30,
    fragments: Annotated[int, typer.Option(min=1)] = 4,
    delay: Annotated[int, typer.Option(min=0)] = 2,
    mix: float = 1.0,
    hardware: Hardware = HARDWARE,
    plot: Plot = None,
    output: Dated = None,
) -> None:
    names = harness.chosen(ways.split(","), (*WAYS, *FED_BACK), "way")
    if DDP not in names:
        names.insert(0, DDP)
    need_two_hosts()
    settings = {"every": every, "fragments": fragments, "delay": delay, "mix": mix}
    same = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    parts = []
    if seeds:
        found = quality(
            hosts,
            quality_rate,
            seeds,
            quality_steps,
            names,
            [*same, "--warmup", str(warmup)],
            plot,
        )
        head = ["way", "held-out loss", "to DDP's", "by seed", "bytes/token", "fewer", "tokens/s to DDP's"]
        parts += [
            f"## Quality: {quality_steps} steps of the small model, {quality_rate}",
            f"After {warmup} steps with averaged gradients in all ways, whose time and bytes do not count "
            "(DiLoCo starts from a trained model, too).",
            harness.markdown(head, quality_rows(found)),
        ]
    rows = []
    for rate in rates:
        rows += speed_rows(rate, speed(hosts, rate, steps, every, names, same))
    if rows:
        head = [
            "way",
            "link",
            "steps",
            "ms a step",
            "utilization",
            "by processor time",
            "waiting",
            "outer steps",
            "tokens/s",
            "to DDP's",
            "bytes/token",
            "fewer",
        ]
        parts += [
            "## Speed: 12.7 million parameters",
            harness.markdown(head, rows),
        ]
    note = (
        f"{hosts} network namespaces with a rank on each: a small model and emulated links (tbf; no latency "
        "is added). All ways use gloo. Bytes as interfaces count them, of all ranks together. mcr.local with "
        f"every={every}, fragments={fragments}, delay={delay}, mix={mix:g} in both parts."
    )
    harness.write(
        harness.page(f"Outer steps over slow links, {hosts} hosts", harness.command(), note, *parts),
        output,
        f"local_{hardware}-{hosts}-hosts",
    )


if __name__ == "__main__":
    main()
