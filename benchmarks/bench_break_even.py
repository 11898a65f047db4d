"""From which size on a codec pays over a slow link: all_reduces measured, beside a model of them.

    python benchmarks/bench_break_even.py --rates 1gbit,10gbit --codecs int8_block --plot FILE.png

Two network namespaces joined by a link of that rate, one rank and half of the cores on each. On W ranks an
all_reduce of S bytes should take, f = 2 (W - 1) / W,

    uncompressed       α + f S / B
    by a codec         α_c + f S / (r B) + S / C

α and α_c are what an all_reduce of 1 KiB takes. B is fitted to the uncompressed ones of 1 MiB and more, by
the smallest relative error: a shaper lets the first 256 KiB pass without delay. C is what a rank's codec
calls for one all_reduce take when nothing is sent, on both hosts at once; r how much smaller a payload is. So
nothing is fitted to what is predicted. Results are compared with the true sum before anything is timed, but
for those of sparse codecs.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import harness
import numpy as np
import torch
import typer
from bench_codecs import LIMIT, verify
from harness import HARDWARE, MCR_PLUS, Budget, Dated, Hardware, Json, Plot, Rounds, Tables
from two_hosts import TwoHosts, need_two_hosts

import mcr_plus as mcr
from mcr_plus.compression.codec import PayloadCodec, make
from mcr_plus.core.units import format_size, parse_size
from mcr_plus.tuning.plot import check_available

RAW: Final = "uncompressed"
TINY: Final = 1 << 10  # bytes: what is left of the time is latency
LIMITED: Final = 1 << 20  # bytes from which on the link, and not the burst of its shaper, decides
RANKS: Final = 2
KINDS: Final = "all_reduce,all_to_all,all_gather,barrier"

Seconds = dict[str, dict[int, float]]  # by candidate, and size in bytes


# --- the model --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Seconds of an all_reduce as a straight line over its bytes."""

    latency: float
    per_byte: float

    def at(self, nbytes: float) -> float:
        return self.latency + self.per_byte * nbytes


def fitted(times: Mapping[int, float], latency: float) -> Line:
    """The line with this latency whose squared relative error is smallest."""
    seconds = np.array(list(times.values()))
    sizes, rest = np.array(list(times)) / seconds, 1 - latency / seconds
    return Line(latency, float((sizes * rest).sum() / (sizes**2).sum()))


def predicted(raw: Line, rate: float, codec_per_byte: float, latency: float) -> Line:
    """The line of a codec whose payloads are `rate` times as small: α_c + f S / (r B) + S / C."""
    return Line(latency, raw.per_byte / rate + codec_per_byte)


def crossing(raw: Line, encoded: Line) -> float:
    """The bytes from which the second line lies below the first; inf if it never does."""
    gained = raw.per_byte - encoded.per_byte
    if gained <= 0:
        return math.inf
    return max(0.0, (encoded.latency - raw.latency) / gained)


def measured_crossing(raw: Mapping[int, float], encoded: Mapping[int, float]) -> float:
    """The bytes from which on all measured points of the second are below those of the first.

    Between two sizes where the logarithm of their ratio, drawn over that of the size, is 0; inf if the last
    point is not below, 0 if all are.
    """
    sizes = sorted(raw)
    logs = [math.log(encoded[size] / raw[size]) for size in sizes]
    slower = [index for index, value in enumerate(logs) if value >= 0]
    if not slower:
        return 0.0
    last = slower[-1]
    if last == len(sizes) - 1:
        return math.inf
    share = logs[last] / (logs[last] - logs[last + 1])
    return float(sizes[last] * (sizes[last + 1] / sizes[last]) ** share)


def crossing_text(nbytes: float, low: int, high: int) -> str:
    """A break-even size for people; of what lies beyond the sizes measured, only on which side."""
    if math.isinf(nbytes):
        return "never"
    if nbytes < low:
        return f"below {format_size(low)}"
    if nbytes > high:
        return f"above {format_size(high)}"
    unit, name = (1 << 20, "MiB") if nbytes >= 1 << 20 else (1 << 10, "KiB")
    return f"{nbytes / unit:.3g} {name}"


# --- on ranks ---------------------------------------------------------------------------------------


def measure(
    config: dict[str, Any], sizes: Sequence[int], codecs: Sequence[str], rounds: int
) -> dict[str, Seconds] | None:
    """On ranks: every candidate and size in turns; a call takes as long as on the slower rank."""
    torch.set_num_threads(1)
    times: Seconds = {}
    local: Seconds = {}
    with mcr.init(config) as comm:
        for nbytes in [TINY, *sizes]:
            source = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(comm.rank))
            for candidate, found in _all_reduces(comm, source, codecs, rounds).items():
                times.setdefault(candidate, {})[nbytes] = found
            for name in codecs:
                comm.barrier()
                own = codec_seconds(payload_codec(name), source, rounds)
                local.setdefault(name, {})[nbytes] = max(comm.all_gather_object(own))
    return {"times": times, "local": local} if comm.rank == 0 else None


def _all_reduces(
    comm: mcr.Communicator, source: torch.Tensor, codecs: Sequence[str], rounds: int
) -> dict[str, float]:
    """Median seconds of an all_reduce by candidate."""
    candidates: dict[str, str | bool] = {RAW: False, **{name: name for name in codecs}}
    buffer, true = torch.empty_like(source), torch.empty_like(source)
    true.copy_(source)
    comm.all_reduce(true, compress=False)
    for candidate, compress in candidates.items():
        buffer.copy_(source)
        comm.all_reduce(buffer, compress=compress)
        # Sparse codecs choose different positions on each rank.
        if candidate == RAW or not payload_codec(candidate).traits.sparse:
            verify(candidate, buffer, true, 1e-6 if candidate == RAW else LIMIT, sparse=False)

    def turn(compress: str | bool) -> float:
        buffer.copy_(source)
        comm.barrier()
        return harness.seconds(lambda: comm.all_reduce(buffer, compress=compress))

    turns = harness.in_turns(candidates, rounds, turn)
    everyones: list[list[list[float]]] = comm.all_gather_object(list(turns.values()))
    slowest = [map(max, zip(*each, strict=True)) for each in zip(*everyones, strict=True)]
    return {candidate: median(each) for candidate, each in zip(candidates, slowest, strict=True)}


def payload_codec(name: str) -> PayloadCodec:
    codec = make({"codec": name})
    if not isinstance(codec, PayloadCodec):
        raise SystemExit(f"codec {name} has no payloads to be timed by themselves")
    codec.enter(0, "break even")
    return codec


def codec_seconds(codec: PayloadCodec, values: torch.Tensor, rounds: int) -> float:
    """Median seconds of all codec calls that one rank makes for one all_reduce, without communication."""
    wire, out = (
        torch.zeros(codec.wire_numel(values.numel()), dtype=codec.wire_dtype),
        torch.zeros_like(values),
    )

    def call() -> None:
        codec.encode(values, wire)
        codec.decode(wire, out)
        for _ in range(0 if codec.traits.additive else RANKS - 1):
            codec.decode_accumulate(wire, out)

    call()
    return median(harness.seconds(call) for _ in range(rounds))


def times_smaller(codec: PayloadCodec, nbytes: int) -> float:
    """How many times less a rank sends with the codec in an all_reduce of `nbytes` of float32.

    Two ranks send each other whole payloads, or the library does what it does with fewer bytes.
    """
    return nbytes / codec.wire_nbytes(nbytes // 4)


# --- the program ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What came out over one link."""

    rate: str
    times: Seconds
    local: Seconds  # a rank's codec calls alone
    raw: Line
    codecs: dict[str, Line]  # predicted

    @property
    def sizes(self) -> list[int]:
        return sorted(size for size in self.times[RAW] if size != TINY)

    def measured(self, candidate: str) -> dict[int, float]:
        return {size: self.times[candidate][size] for size in self.sizes}

    def break_even(self, codec: str) -> tuple[str, str]:
        """Predicted and measured."""
        found = (
            crossing(self.raw, self.codecs[codec]),
            measured_crossing(self.measured(RAW), self.measured(codec)),
        )
        first, second = (crossing_text(each, self.sizes[0], self.sizes[-1]) for each in found)
        return first, second


def found_of(rate: str, times: Seconds, local: Seconds) -> Found:
    """Fit what was measured without a codec, and predict the rest."""
    above = {size: seconds for size, seconds in times[RAW].items() if size >= LIMITED}
    raw = fitted(above or times[RAW], times[RAW][TINY])
    codecs = {}
    for name, by_size in local.items():
        largest = max(by_size)
        smaller = times_smaller(payload_codec(name), largest)
        codecs[name] = predicted(raw, smaller, by_size[largest] / largest, times[name][TINY])
    return Found(rate, times, local, raw, codecs)


def over_the_link(
    rate: str, sizes: Sequence[int], codecs: Sequence[str], rounds: int, table: Path | None, budget: str
) -> Found:
    """Measure over a link of a rate; without a table, tune one first."""
    with TwoHosts(rate) as hosts, tempfile.TemporaryDirectory() as folder:
        if table is None:
            table = Path(folder) / "table.yaml"
            words = ["tune", "-o", str(table), "--kinds", KINDS, "--max", "32MiB", "--budget", budget]
            hosts.mpirun([*MCR_PLUS, *words], stdout=subprocess.DEVNULL)
        stages = [{"compress": {}}, {"select": {"table": str(table.absolute())}}, {"dispatch": {}}]
        config = {"version": 1, "backends": ["mpi", "gloo"], "pipeline": stages}
        result = harness.on_ranks(harness.on_both(hosts), measure, config, sizes, codecs, rounds)
    times, local = (
        {
            candidate: {int(size): spent for size, spent in each.items()}
            for candidate, each in result[what].items()
        }
        for what in ("times", "local")
    )
    return found_of(rate, times, local)


def codec_facts(found: Found, codec: str) -> list[str]:
    """The constants of a codec's line, and where it crosses that of the uncompressed ones."""
    largest = max(found.sizes)
    smaller = times_smaller(payload_codec(codec), largest)
    codec_rate = largest / found.local[codec][largest]
    share = 2 * (RANKS - 1) / RANKS
    link = share / found.raw.per_byte
    needed = smaller / (share * (smaller - 1))
    return [
        codec,
        f"{smaller:.2f}",
        f"{1e6 * found.times[codec][TINY]:.0f}",
        f"{codec_rate / 1e9:.2f}",
        f"{codec_rate / link:.1f}",
        f"{needed:.2f}",
        *found.break_even(codec),
    ]


FACTS: Final = (
    "codec", "r", "α_c µs", "C GB/s", "C / B", "needed", "predicted break-even", "measured break-even",
)  # fmt: skip
TIMES: Final = ("bytes", "way", "ms", "by the line", "times as fast as uncompressed")


def size_rows(found: Found) -> list[list[str]]:
    """A line for each size and candidate: milliseconds measured, and by the fitted or predicted line."""
    lines = {RAW: found.raw, **found.codecs}
    return [
        [
            format_size(size),
            candidate,
            f"{1e3 * found.times[candidate][size]:.2f}",
            f"{1e3 * line.at(size):.2f}",
            f"{found.times[RAW][size] / found.times[candidate][size]:.2f}",
        ]
        for size in found.sizes
        for candidate, line in lines.items()
    ]


def link_text(found: Found) -> str:
    bandwidth = 2 * (RANKS - 1) / RANKS / found.raw.per_byte
    return f"α = {1e6 * found.raw.latency:.0f} µs, B = {bandwidth / 1e9:.3f} GB/s"


def print_tables(found: Found) -> None:
    harness.show(FACTS, map(partial(codec_facts, found), found.codecs), f"{found.rate}: {link_text(found)}")
    harness.show(TIMES, size_rows(found), f"{found.rate}: all_reduce")


def text_of(every: Sequence[Found], line: str) -> str:
    """The report as Markdown."""
    note = (
        "two network namespaces, one rank and half of the cores on each. all_reduce of float32, medians of "
        "rounds in which all candidates take turns. Lines: uncompressed α + f S / B; by a codec α_c + f S / "
        "(r B) + S / C, where f = 2 (W - 1) / W = 1. α and α_c are by all_reduces of 1 KiB, B is fitted to "
        "the uncompressed ones of 1 MiB and more (a shaper lets the first 256 KiB pass without delay), C by "
        "what a rank's codec calls take alone at the largest size. A codec can pay only where C / B is more "
        "than what is needed, r / (f (r - 1))."
    )
    parts: list[str] = []
    for found in every:
        parts += [f"## {found.rate}", f"{link_text(found)}."]
        parts.append(harness.markdown(FACTS, [codec_facts(found, each) for each in found.codecs]))
        parts.append(harness.markdown(TIMES, size_rows(found)))
    return harness.page("From which size on a codec pays", line, note, *parts)


def plot(every: Sequence[Found], path: Path) -> None:
    """A panel for each link: points measured, lines fitted and predicted, break-even sizes."""
    from matplotlib.lines import Line2D

    with harness.panels(path, len(every), 5.2, 4.8) as figure:
        colours = dict(zip([RAW, *every[0].codecs], ["black", *(f"C{i}" for i in range(10))], strict=False))
        for axis, found in zip(figure.axes, every, strict=True):
            sizes = np.array(found.sizes, float)
            fine = np.geomspace(sizes[0], sizes[-1], 200)
            for candidate, line in {RAW: found.raw, **found.codecs}.items():
                times = [1e3 * found.times[candidate][size] for size in found.sizes]
                axis.plot(sizes / 2**20, times, "o", color=colours[candidate], ms=4)
                axis.plot(
                    fine / 2**20, [1e3 * line.at(size) for size in fine], color=colours[candidate], lw=1.2
                )
                if candidate == RAW:
                    continue
                for style, size in (
                    ("--", crossing(found.raw, line)),
                    (":", measured_crossing(found.measured(RAW), found.measured(candidate))),
                ):
                    if sizes[0] <= size <= sizes[-1]:
                        axis.axvline(size / 2**20, color=colours[candidate], ls=style, lw=1)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(f"all_reduce over {found.rate}")
            axis.set_xlabel("MiB of float32")
            axis.set_ylabel("ms")
            axis.grid(alpha=0.25, lw=0.5, which="both")
        keys = [Line2D([], [], color=colour, label=candidate) for candidate, colour in colours.items()]
        keys += [
            Line2D([], [], color="grey", ls="", marker="o", ms=4, label="measured"),
            Line2D([], [], color="grey", lw=1.2, label="fitted (uncompressed), predicted"),
            Line2D([], [], color="grey", ls="--", lw=1, label="break-even, predicted"),
            Line2D([], [], color="grey", ls=":", lw=1, label="break-even, measured"),
        ]
        figure.legend(handles=keys, loc="outside lower center", ncols=4, frameon=False, fontsize=8)


@harness.program
def main(
    rates: Annotated[str, typer.Option(help="Of the link, as tc writes them.")] = "1gbit,10gbit",
    codecs: Annotated[str, typer.Option(help="Any that have payloads.")] = "int8_block",
    sizes: str = "64KiB,256KiB,1MiB,4MiB,16MiB,64MiB",
    rounds: Rounds = 11,
    table: Tables = None,
    tune: Budget = "60s",
    hardware: Hardware = HARDWARE,
    output: Dated = None,
    figures: Json = None,
    picture: Plot = None,
) -> None:
    names, nbytes = codecs.split(","), [parse_size(size) for size in sizes.split(",")]
    for name in names:
        payload_codec(name)
    if picture is not None:
        check_available(picture)
    need_two_hosts()
    every = []
    for rate in rates.split(","):
        every.append(over_the_link(rate, nbytes, names, rounds, table, tune))
        print_tables(every[-1])
    harness.write_json([asdict(found) for found in every], figures)
    if picture is not None:
        plot(every, picture)
    harness.write(text_of(every, harness.command()), output, f"break-even_{hardware}-two-hosts")


if __name__ == "__main__":
    main()
