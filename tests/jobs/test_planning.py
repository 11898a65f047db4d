"""Buckets by ready times and costs, in `mcr.wrap` on real ranks."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import run_ranks
from torch import nn

import mcr_plus as mcr
from mcr_plus.fusion.bucket import Cost, Entry
from mcr_plus.training import wrap as wrapping
from mcr_plus.training.bucket_plan import earliest

TABLE = """\
version: 1
rules:
  - kind: all_reduce
    bytes: 0..
    backend: gloo
    measured:
      gloo: {{8B: {small}, 64MiB: {large}}}
"""
LAYERS = 6


def linear(latency: float, per_byte: float) -> Cost:
    return lambda nbytes: np.asarray(latency + per_byte * nbytes, np.float64)


def test_dtypes_are_planned_apart_and_sent_as_they_become_ready() -> None:
    entries = [
        Entry(0, 100, "float", 0.0),
        Entry(1, 100, "half", 1.0),
        Entry(2, 100, "float", 2.0),
        Entry(3, 100, "half", 3.0),
        Entry(4, 100, "float", 500.0),
    ]
    plan = earliest(entries, {"float": linear(10.0, 0.01), "half": linear(1000.0, 0.01)}, 1)
    assert [bucket.members for bucket in plan] == [(0, 2), (1, 3), (4,)]


def trained(table: str) -> dict[str, Any]:
    """Runs on ranks: buckets by pass, and how far gradients are from the mean over ranks."""
    torch.set_num_threads(1)
    stages = [{"fuse": {"plan": "exact"}}, {"select": {"table": table}}, {"dispatch": {"timeout": "30s"}}]
    buckets, worst = [], 0.0
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages}) as comm:
        torch.manual_seed(1)
        model: Any = nn.Sequential(*[nn.Linear(40, 40) for _ in range(LAYERS)])
        twin = [nn.Sequential(*[nn.Linear(40, 40) for _ in range(LAYERS)]) for _ in range(comm.size)]
        for each in twin:
            each.load_state_dict(model.state_dict())
        model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(6):
            optimizer.zero_grad()
            for each in twin:
                each.zero_grad()
            for turn in range(2):  # of which only the second is averaged
                for rank, each in enumerate(twin):
                    batch = torch.randn(
                        8, 40, generator=torch.Generator().manual_seed(10 * step + turn + 100 * rank)
                    )
                    each(batch).square().mean().backward()
                    if rank == comm.rank:
                        if turn == 0:
                            with mcr.no_sync(model):
                                model(batch).square().mean().backward()
                        else:
                            model(batch).square().mean().backward()
            buckets.append(wrapping._wrapped[model].reducer.buckets)
            for param, *theirs in zip(model.parameters(), *[each.parameters() for each in twin], strict=True):
                mean = np.mean([their.grad.double().numpy() for their in theirs], axis=0)
                worst = max(
                    worst, float(np.abs(param.grad.double().numpy() - mean).max() / np.abs(mean).max())
                )
    return {"buckets": buckets, "worst": worst}


def test_the_times_of_a_table_determine_buckets(tmp_path: Path) -> None:
    """Dear operations travel together, cheap ones as soon as they can."""
    sizes = {}
    for name, small, large in (("dear", 1e6, 1.001e6), ("cheap", 0.001, 1e6)):
        table = tmp_path / f"{name}.yaml"
        table.write_text(TABLE.format(small=small, large=large))
        one, other = run_ranks(trained, 2, args=[str(table)], via="torch")
        assert one.value["buckets"] == other.value["buckets"]
        assert max(one.value["worst"], other.value["worst"]) < 1e-6
        before, after = one.value["buckets"][0], one.value["buckets"][-1]
        assert one.value["buckets"][3:] == [after] * 3  # settled with the third pass
        assert sorted(chain.from_iterable(before)) == sorted(chain.from_iterable(after))
        sizes[name] = [len(bucket) for bucket in after]
    assert sizes["dear"] == [2 * LAYERS]
    assert len(sizes["cheap"]) > 1


def without_figures() -> str:
    """Runs on ranks: a pipeline without measured costs."""
    stages: list[dict[str, Any]] = [{"fuse": {"plan": "exact"}}, {"select": {}}, {"dispatch": {}}]
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": stages}):
        model = nn.Linear(3, 3)
        try:
            mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except mcr.ConfigError as error:
            return str(error)
    return "nothing"


def test_an_exact_plan_needs_a_table_with_times() -> None:
    for result in run_ranks(without_figures, 3, via="torch"):
        assert "plan: exact" in result.value
        assert "mcr-plus tune" in result.value
