"""Costs that are measured on two hosts and foretold for more, beside what more hosts then took.

    python benchmarks/bench_scaling.py --rate 100mbit --rounds 3
    python benchmarks/bench_scaling.py --rate 25mbit --rounds 1 --largest 1MiB    more hosts than cores

Hosts are network namespaces on switches (racks.py), one rank on each. all_reduce, all_gather and all_to_all
are measured by torch's gloo, and by mcr_plus over gloo, which compares operations before they start. Times
of two hosts are scaled to four and eight in a rack and to two racks of four (mcr_plus/bucketing/scaling), and
compared with times measured there. A time is that of a call in a row of calls on the slowest rank; of
several turns the least, since other work on the machine only adds to it, and of rounds the median. The
report goes to benchmarks/results/scaling_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from statistics import mean, median
from time import perf_counter
from typing import Annotated, Any, Final, NamedTuple

import harness
import torch
import torch.distributed as dist
import typer
from harness import HARDWARE, Call, Dated, Hardware, Json, Rate, Rounds
from hosts import need_hosts
from racks import Racks

import mcr_plus as mcr
from mcr_plus.bucketing.scaling import ClusterCosts, Measured
from mcr_plus.bucketing.topology import Topology
from mcr_plus.core.units import format_size, parse_size
from mcr_plus.tables.cost import TimeCurve, placed

KINDS: Final = ("all_reduce", "all_gather", "all_to_all")
WAYS: Final = ("torch", "mcr_plus")
FITTED: Final = [1 << power for power in range(10, 23)]
FORETOLD: Final = [1 << power for power in range(16, 23)]  # from 64 KiB on
TURNS: Final = 5
TURN_S: Final = 0.12
LIMIT_S: Final = 300.0
GOALS: Final = {"mean": 0.05, "largest": 0.12}


class Setting(NamedTuple):
    """Racks, hosts of each, and the rate of an uplink relative to a host's."""

    name: str
    racks: int
    hosts: int


TWO: Final = Setting("2 hosts", 1, 2)
SETTINGS: Final = (Setting("4 hosts", 1, 4), Setting("8 hosts", 1, 8), Setting("2 racks of 4", 2, 4))


def measure(way: str, sizes: list[int], kinds: Sequence[str] = KINDS) -> dict[str, dict[str, float]] | None:
    """On ranks: microseconds by kind and bytes."""
    torch.set_num_threads(1)
    if way == "torch":
        dist.init_process_group("gloo")
        found = {kind: {str(size): _torch(kind, size) for size in sizes} for kind in kinds}
        rank = dist.get_rank()
        dist.destroy_process_group()
        return found if rank == 0 else None
    stages: list[dict[str, Any]] = [{"select": {}}, {"dispatch": {}}]
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages}) as comm:
        found = {kind: {str(size): _ours(comm, kind, size) for size in sizes} for kind in kinds}
        return found if comm.rank == 0 else None


def _torch(kind: str, size: int) -> float:
    whole, part, out = _tensors(size, dist.get_world_size())
    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_to_all": lambda: dist.all_to_all_single(out, whole),
    }
    return _least(calls[kind], dist.barrier, lambda value: dist.all_reduce(value, dist.ReduceOp.MAX))


def _ours(comm: mcr.Communicator, kind: str, size: int) -> float:
    whole, part, out = _tensors(size, comm.size)
    calls: dict[str, Call] = {
        "all_reduce": lambda: comm.all_reduce(whole),
        "all_gather": lambda: comm.all_gather_into_tensor(whole, part),
        "all_to_all": lambda: comm.all_to_all_single(out, whole),
    }
    return _least(calls[kind], comm.barrier, lambda value: comm.all_reduce(value, mcr.MAX))


def _tensors(size: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = size // 4
    return torch.zeros(count), torch.zeros(count // ranks), torch.zeros(count)


def _least(call: Call, barrier: Call, largest: Callable[[torch.Tensor], object]) -> float:
    """Microseconds of a call on the slowest rank, of several turns the least."""

    def turn(calls: int) -> float:
        barrier()
        began = perf_counter()
        for _ in range(calls):
            call()
        mine = torch.tensor([(perf_counter() - began) / calls], dtype=torch.float64)
        largest(mine)
        return mine.item()

    turn(1)
    calls = max(2, min(100, int(TURN_S / turn(2))))
    return 1e6 * min(turn(calls) for _ in range(TURNS))


def topology(setting: Setting, rate: str) -> Topology:
    """The cluster of a setting."""
    text = rate.replace("mbit", "Mbit/s").replace("gbit", "Gbit/s")
    links: dict[str, Any] = {"nic": {"rate": text}}
    if setting.racks > 1:
        links["rack"] = {"nodes": setting.hosts, "uplink": text}
    return Topology.of({"nodes": setting.racks * setting.hosts, "links": links})


def turn(setting: Setting, way: str, rate: str, largest: int) -> dict[str, dict[str, float]]:
    """Microseconds by kind and bytes, of a job on new hosts."""
    sizes = [size for size in (FITTED if setting is TWO else FORETOLD) if size <= largest]
    with Racks(setting.racks, setting.hosts, rate, rate) as racks:

        def launch(words: Sequence[str]) -> None:
            racks.torchrun([sys.executable, *words], timeout=LIMIT_S)

        return dict(harness.on_ranks(launch, measure, way, sizes))


class Row(NamedTuple):
    """Microseconds that were foretold and measured."""

    way: str
    setting: str
    kind: str
    nbytes: int
    foretold: float
    measured: float

    @property
    def error(self) -> float:
        """Of what was foretold, relative to what was measured."""
        return self.foretold / self.measured - 1


def compared(figures: dict[str, dict[str, Any]], rate: str) -> list[Row]:
    """What two hosts foretell, beside what was measured; `figures` by setting and way."""
    rows = []
    for way in WAYS:
        two = placed(2, 2, 1)
        known = [
            Measured(kind, "gloo", two, TimeCurve.through({int(size): us for size, us in points.items()}))
            for kind, points in figures[TWO.name][way].items()
        ]
        for setting in SETTINGS:
            costs = ClusterCosts(known, topology(setting, rate), topology(TWO, rate))
            for kind, points in figures[setting.name][way].items():
                for size, us in points.items():
                    cost = costs.of(kind, int(size), range(costs.topology.ranks), "gloo")
                    rows.append(Row(way, setting.name, kind, int(size), 1e6 * cost.seconds, us))
    return rows


def summary(rows: list[Row]) -> list[list[str]]:
    """Mean and largest errors by way, setting and kind."""
    found = []
    for way in WAYS:
        for setting in SETTINGS:
            for kind in KINDS:
                of = [each.error for each in rows if each[:3] == (way, setting.name, kind)]
                found.append([way, setting.name, kind, *_errors(of), f"{100 * mean(of):+.1f} %"])
    return found


def _errors(errors: list[float]) -> list[str]:
    sizes = [abs(each) for each in errors]
    return [f"{100 * mean(sizes):.1f} %", f"{100 * max(sizes):.1f} %"]


@harness.program
def main(
    rate: Rate = "100mbit",
    rounds: Rounds = 3,
    largest: Annotated[str, typer.Option(help="Bytes up to which operations are measured.")] = "4MiB",
    hardware: Hardware = HARDWARE,
    output: Dated = None,
    figures: Json = None,
) -> None:
    need_hosts(mpi=False)
    most = parse_size(largest)
    if most < FORETOLD[0]:
        raise typer.BadParameter(f"{largest}: expected at least {format_size(FORETOLD[0])}")
    found: dict[str, dict[str, list[dict[str, dict[str, float]]]]] = {}
    for _ in range(rounds):
        for setting in (TWO, *SETTINGS):
            for way in WAYS:
                times = turn(setting, way, rate, most)
                found.setdefault(setting.name, {}).setdefault(way, []).append(times)
    middle = {
        setting: {
            way: {
                kind: {size: median(each[kind][size] for each in times) for size in times[0][kind]}
                for kind in KINDS
            }
            for way, times in ways.items()
        }
        for setting, ways in found.items()
    }
    harness.write_json(middle, figures)
    rows = compared(middle, rate)
    goals = [
        [f"{way}: {what} error", f"≤ {100 * goal:.0f} %", of]
        for way in WAYS
        for (what, goal), of in zip(
            GOALS.items(), _errors([each.error for each in rows if each.way == way]), strict=True
        )
    ]
    text = harness.page(
        "Costs of two hosts, foretold for more",
        harness.command(),
        f"one rank per host, {rate} for each host and for the uplink of a rack; gloo",
        harness.markdown(["what", "wanted", "measured"], goals),
        "### Errors",
        harness.markdown(
            ["way", "hosts", "operation", "mean error", "largest error", "mean with its sign"], summary(rows)
        ),
        "### Milliseconds",
        harness.markdown(
            ["way", "hosts", "operation", "bytes", "foretold", "measured", "error"],
            [
                [
                    each.way, each.setting, each.kind, format_size(each.nbytes), f"{each.foretold / 1e3:.2f}",
                    f"{each.measured / 1e3:.2f}", f"{100 * each.error:+.1f} %",
                ]
                for each in rows
            ],
        ),
    )  # fmt: skip
    harness.write(text, output, f"scaling_{hardware}")


if __name__ == "__main__":
    main()
