"""The backend `mcr` of torch.distributed against gloo and against our own calls, in turns in one job.

    mcr-plus run -n 2 benchmarks/bench_torch_backend.py
    mcr-plus run -n 2 benchmarks/bench_torch_backend.py --rounds 15 --sizes 8,4MiB

`dist.all_reduce` goes through the process groups `mcr` and `gloo`, `comm.all_reduce` to the communicator
under the first. Then a model in DistributedDataParallel takes steps over each group: the same but for the
group. Printed are medians over rounds, of the slowest rank, and the smallest in brackets.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, Final

import harness
import torch
import torch.distributed as dist
from harness import Call, Output, Rounds
from torch import nn

import mcr_plus as mcr
from mcr_plus.core.units import format_size, parse_size

MODELS: Final = {"MLP of 0.3 M parameters": (128, 512), "MLP of 4.7 M parameters": (512, 2048)}
HEAD: Final = ["what", "own call", "mcr", "gloo", "mcr - own", "gloo / mcr"]


def largest(value: float) -> float:
    """Of all ranks' numbers."""
    values = torch.tensor([value])
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.item()


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


def all_reduces(nbytes: int, groups: dict[str, Any]) -> dict[str, Call]:
    """An all_reduce of float32, by each candidate."""
    values = {name: torch.ones(nbytes // 4) for name in ("own call", *groups)}
    own, comm = values["own call"], groups["mcr"].communicator
    candidates: dict[str, Call] = {"own call": lambda: comm.all_reduce(own)}
    for name, group in groups.items():
        candidates[name] = partial(dist.all_reduce, values[name], group=group)
    for candidate in candidates.values():
        candidate()
    if any(x[0] != dist.get_world_size() for x in values.values()):
        raise SystemExit(f"all_reduce of {nbytes} bytes: wrong results")
    return {name: _scaled(candidate, values[name]) for name, candidate in candidates.items()}


def _scaled(candidate: Call, values: torch.Tensor) -> Call:
    values.zero_()  # sums of sums would overflow
    return candidate


def steps(inputs: int, hidden: int, groups: dict[str, Any]) -> dict[str, Call]:
    """A training step in DistributedDataParallel, over each group."""
    candidates: dict[str, Call] = {}
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

        candidates[name] = step
    return candidates


@harness.program
def main(sizes: str = "8,1KiB,64KiB,1MiB,16MiB", rounds: Rounds = 11, output: Output = None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"mcr": dist.new_group(backend="mcr"), "gloo": dist.group.WORLD}
    rows = []
    for nbytes in map(parse_size, sizes.split(",")):
        spent = harness.slowest(all_reduces(nbytes, groups), rounds, dist.barrier, largest)
        rows.append(row_of(f"all_reduce {format_size(nbytes)}", spent))
    for name, (inputs, hidden) in MODELS.items():
        spent = harness.slowest(steps(inputs, hidden, groups), rounds, dist.barrier, largest)
        rows.append(row_of(f"DDP step, {name}", spent))
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        title = f"{ranks} ranks, {', '.join(mcr.get_backends())} against gloo, microseconds"
        harness.show(HEAD, rows, title, width=130)
        note = f"{title}: medians of rounds in which all take turns, the smallest in brackets."
        harness.write_table(output, "The torch backend against gloo", ranks, note, HEAD, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
