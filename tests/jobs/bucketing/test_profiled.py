"""Steps from traces of torch's profiler over gloo, compared with the profiled program."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

from mcr_plus.bucketing.step import ComputeEvent, IssueEvent, ReadyEvent, WaitEvent
from mcr_plus.bucketing.traces import load_step

SLEEP = 0.02
LATE = 0.3
WIDTH, LAYERS = 64, 3


class Slow(nn.Module):
    """A linear layer that sleeps before it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP)
        y: torch.Tensor = self.linear(x)
        return y


def profiled(folder: str, with_steps: bool) -> None:
    """Run on ranks: four steps of DDP and operations of their own, under the profiler; rank 1 is late."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*[Slow() for _ in range(LAYERS)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The clock of the program: from the end of a step to the first gradient of the next one, so that it
    # includes the time of other work on the machine and of the profiler itself.
    ended, first, until_first = time.perf_counter(), False, []

    def on_gradient(_parameter: torch.Tensor) -> None:
        nonlocal first
        if first:
            until_first.append(time.perf_counter() - ended)
        first = False

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(on_gradient)

    def step() -> None:
        nonlocal ended, first
        first = True
        optimizer.zero_grad()
        loss = model(torch.ones(4, WIDTH)).sum()
        time.sleep(LATE * rank)
        loss.backward()
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        assert work is not None
        work.wait()
        dist.all_gather_into_tensor(torch.empty(2 * 50), torch.ones(50))
        if rank == 0:
            dist.send(torch.ones(5), 1)
        else:
            dist.recv(torch.empty(5), 0)
        ended = time.perf_counter()
        optimizer.step()

    step()
    step()  # in the second step DDP rebuilds its buckets
    graph = ExecutionTraceObserver()
    graph.register_callback(f"{folder}/graph{rank}.json")
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, execution_trace_observer=graph,
        schedule=schedule(wait=0, warmup=1, active=4, repeat=1) if with_steps else None,
    ) as result:  # fmt: skip
        for _ in range(5 if with_steps else 4):
            step()
            result.step()
    result.export_chrome_trace(f"{folder}/rank{rank}.json")
    Path(f"{folder}/until_first{rank}.json").write_text(json.dumps(until_first))
    dist.destroy_process_group()


@pytest.mark.parametrize("with_steps", [False, True])
def test_real_trace_gives_the_operations_of_the_program(tmp_path: Path, with_steps: bool) -> None:
    run_ranks(profiled, 2, args=[str(tmp_path), with_steps], via="torch")
    step = load_step([tmp_path / "rank0.json", tmp_path / "rank1.json"])
    assert (step.ranks, step.nodes, step.source) == (2, 1, "kineto")
    check(step, [max(json.loads((tmp_path / f"until_first{rank}.json").read_text())) for rank in range(2)])
    names = [tmp_path / f"{what}{rank}.json" for what in ("rank", "graph") for rank in range(2)]
    if all(os.path.exists(name) for name in names):
        joined = load_step(names)
        assert joined.source == "et"
        assert joined.roles == step.roles


def check(step: Any, longest: list[float]) -> None:
    """``longest``: seconds from a step's end to the next one's first gradient, by the clock of each rank."""
    assert [role.ranks for role in step.roles] == [(0,), (1,)]
    assert step.seconds > LAYERS * SLEEP + LATE
    sizes = [4 * WIDTH, 4 * WIDTH * WIDTH] * LAYERS
    for rank, role in enumerate(step.roles):
        ready = [each for each in role.events if isinstance(each, ReadyEvent)]
        assert [each.nbytes for each in ready] == sizes
        assert {each.like for each in ready} == {"float32 cpu"}
        issues = [each for each in role.events if isinstance(each, IssueEvent)]
        assert [(each.kind, each.nbytes, each.group) for each in issues] == [
            ("all_reduce", sum(sizes), (0, 1)), ("all_reduce", 4000, (0, 1)), ("all_gather", 400, (0, 1)),
            ("recv" if rank else "send", 20, (0, 1)),
        ]  # fmt: skip
        assert issues[0].gradients == tuple(each.param for each in ready)
        assert sorted(each.id for each in role.events if isinstance(each, WaitEvent)) == sorted(
            each.id for each in issues
        )
        # Rank 0 waits for rank 1, which counts neither as its computing nor as communication.
        computed = 0.0
        for each in role.events:
            if isinstance(each, ReadyEvent):
                break
            computed += each.seconds if isinstance(each, ComputeEvent) else 0.0
        slept = LAYERS * SLEEP + rank * LATE
        assert slept <= computed < longest[rank] + LATE
        assert all(each.seconds is not None for each in issues)
        assert issues[0].seconds is not None
        assert issues[0].seconds < LATE
