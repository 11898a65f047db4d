"""The backend `mcr` of torch.distributed against gloo and against our own calls, in turns in one job.

    mcr-plus run -n 2 benchmarks/bench_torch_backend.py
    mcr-plus run -n 2 benchmarks/bench_torch_backend.py --rounds 15 --sizes 8,4MiB

`dist.all_reduce` goes through the process groups `mcr` and `gloo`, `comm.all_reduce` to the communicator
under the first. Then a model in DistributedDataParallel takes steps over each group: the same but for the
group. Printed are medians over rounds, of the slowest rank, and the smallest in brackets.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import mcr_plus as mcr
from mcr_plus.environment import cores
from mcr_plus.selection.fingerprint import cpu_name
from mcr_plus.units import format_size, parse_size

ROUND_S: Final = 0.02  # of each way in each round
MOST_CALLS: Final = 300
MODELS: Final = {"MLP of 0.3 M parameters": (128, 512), "MLP of 4.7 M parameters": (512, 2048)}
HEAD: Final = ["what", "own call", "mcr", "gloo", "mcr - own", "gloo / mcr"]

Way = Callable[[], object]


def timed(way: Way, calls: int) -> float:
    """Microseconds of a call, on the slowest rank."""
    dist.barrier()
    way()
    start = time.perf_counter()
    for _ in range(calls):
        way()
    spent = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return 1e6 * spent.item() / calls


def measure(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each way in each round."""
    calls = {name: max(1, min(MOST_CALLS, int(ROUND_S * 1e6 / timed(way, 2)))) for name, way in ways.items()}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            spent[name].append(timed(way, calls[name]))
    return spent


def row_of(what: str, spent: dict[str, list[float]]) -> list[str]:
    """A line of the report."""
    middle = {name: median(each) for name, each in spent.items()}
    shown = {name: f"{middle[name]:.1f} ({min(each):.1f})" for name, each in spent.items()}
    own = middle.get("own call")
    return [
        what,
        shown.get("own call", "-"),
        shown["mcr"],
        shown["gloo"],
        "-" if own is None else f"{middle['mcr'] - own:.1f}",
        f"{middle['gloo'] / middle['mcr']:.2f}",
    ]


def all_reduces(nbytes: int, groups: dict[str, Any]) -> dict[str, Way]:
    """An all_reduce of float32, by each way."""
    values = {name: torch.ones(nbytes // 4) for name in ("own call", *groups)}
    own, comm = values["own call"], groups["mcr"].communicator
    ways: dict[str, Way] = {"own call": lambda: comm.all_reduce(own)}
    for name, group in groups.items():
        ways[name] = partial(dist.all_reduce, values[name], group=group)
    for way in ways.values():
        way()
    if any(x[0] != dist.get_world_size() for x in values.values()):
        raise SystemExit(f"all_reduce of {nbytes} bytes: wrong results")
    return {name: _scaled(way, values[name]) for name, way in ways.items()}


def _scaled(way: Way, values: torch.Tensor) -> Way:
    values.zero_()  # sums of sums would overflow
    return way


def steps(inputs: int, hidden: int, groups: dict[str, Any]) -> dict[str, Way]:
    """A training step in DistributedDataParallel, over each group."""
    ways: dict[str, Way] = {}
    for name, group in groups.items():
        torch.manual_seed(0)
        widths = [inputs, hidden, inputs, hidden, inputs]
        layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths)]
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        data = torch.randn(16, inputs)

        def step(model: nn.Module = model, optimizer: Any = optimizer, data: torch.Tensor = data) -> None:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()

        ways[name] = step
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", default="8,1KiB,64KiB,1MiB,16MiB")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", type=Path, help="also write a report to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"mcr": dist.new_group(backend="mcr"), "gloo": dist.group.WORLD}
    rows = []
    for nbytes in map(parse_size, options.sizes.split(",")):
        spent = measure(all_reduces(nbytes, groups), options.rounds)
        rows.append(row_of(f"all_reduce {format_size(nbytes)}", spent))
    for name, (inputs, hidden) in MODELS.items():
        rows.append(row_of(f"DDP step, {name}", measure(steps(inputs, hidden, groups), options.rounds)))
    if dist.get_rank() == 0:
        title = f"{dist.get_world_size()} ranks, {', '.join(mcr.get_backends())} against gloo, microseconds"
        table = Table(*HEAD, title=title)
        for row in rows:
            table.add_row(*row)
        Console(width=130).print(table)
        if options.output is not None:
            options.output.write_text(text_of(rows, title))
    dist.destroy_process_group()


def text_of(rows: list[list[str]], title: str) -> str:
    """The report as Markdown."""
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "\n".join(
        [
            f"# The torch backend against gloo ({date.today():%Y-%m-%d})",
            "",
            f"    mcr-plus run -n 2 benchmarks/bench_torch_backend.py {shlex.join(sys.argv[1:])}",
            "",
            f"{cpu_name()}, {cores()} cores, Python {platform.python_version()}, torch {torch.__version__}; "
            f"{title}: medians of rounds in which all take turns, the smallest in brackets.",
            "",
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
        ]
    )


if __name__ == "__main__":
    main()
