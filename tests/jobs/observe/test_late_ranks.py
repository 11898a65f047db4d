"""`log.stragglers()` on real ranks: one that sleeps in its backward pass is named, by all, and where."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

import mcr_plus as mcr

HERE = str(Path(__file__))
DELAY_S = 0.06


def trains(steps: int) -> list[dict[str, Any]]:
    """Runs on ranks: without a delay, with one on each rank in turn, and over every library."""
    torch.set_num_threads(1)
    found = []
    with mcr.init(backends=["msccl", "gloo"]) as comm:
        layers = [torch.nn.Linear(64, 64) for _ in range(4)]
        seconds = [0.0]
        layers[2].register_full_backward_hook(lambda *_: time.sleep(seconds[0]))
        model: Any = torch.nn.Sequential(*layers)
        model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-6))

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            comm.all_reduce(torch.ones(10), tag="loss", backend="gloo")

        for victim in (None, *range(comm.size)):
            step()
            seconds[0] = DELAY_S if comm.rank == victim else 0.0
            comm.barrier()
            with mcr.record() as log:
                for _ in range(steps):
                    step()
            stragglers = log.stragglers()
            skews = [record.skew for record in log.records if record.tag == "gradients"]
            found.append(
                {
                    "named": [each.rank for each in stragglers],
                    "events": [each.events for each in stragglers],
                    "mean": [each.sites[0].mean for each in stragglers],
                    "sites": [each.sites[0].site for each in stragglers],
                    "tags": [each.sites[0].tag for each in stragglers],
                    "largest": max(skew for skew in skews if skew is not None),
                    "left_out": stragglers.left_out,
                    "text": str(stragglers),
                    "site": log.records[-1].site,
                }
            )
    return found


def test_the_rank_that_sleeps_in_its_backward_pass_is_named_by_all() -> None:
    for result in run_ranks(trains, 2, args=[10], via="torch"):
        calm, *delayed = result.value
        assert calm["named"] == []
        assert calm["left_out"] == 0
        assert calm["site"].startswith(f"{HERE}:")
        assert calm["site"].endswith(", in step")
        for victim, found in enumerate(delayed):
            assert found["named"] == [victim]
            assert found["events"][0] >= 8
            assert found["mean"][0] == pytest.approx(DELAY_S, rel=0.5)
            assert found["largest"] >= 0.9 * DELAY_S
            assert found["tags"] == ["gradients"]
            assert found["sites"][0].startswith(f"{HERE}:")
            assert f"rank {victim} keeps the others waiting" in found["text"]


def logs() -> list[str]:
    """Runs on ranks: rank 1 is late without being recorded; what each rank logs."""
    from mcr_plus.observe import persistent_stragglers, status

    status.PERIOD = 0.02  # type: ignore[misc]
    status._LEAST_SHARE = 10  # type: ignore[misc]
    told: list[str] = []
    logger = logging.getLogger("mcr_plus")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    assert persistent_stragglers._SAMPLES == 60
    with mcr.init(backends=["msccl"]) as comm:
        stop = torch.zeros(1)
        deadline = time.monotonic() + 60
        while stop[0] == 0:
            time.sleep(0.02 * (comm.rank == 1))
            comm.all_reduce(torch.ones(1000), tag="late")
            stop[0] = float(any("is late" in each for each in told) or time.monotonic() > deadline)
            comm.broadcast(stop, 0)
    return [each for each in told if "is late" in each]


@pytest.mark.long
def test_a_rank_that_is_late_all_the_time_is_logged_by_one_other() -> None:
    by_rank = [result.value for result in run_ranks(logs, 3, via="torch")]
    assert [len(told) for told in by_rank] == [1, 0, 0]
    assert by_rank[0][0].startswith("rank 1 is late: this rank has waited for it alone in ")
    assert "tag=late" in by_rank[0][0]
    assert "called at " in by_rank[0][0]
    assert "test_late_ranks.py" in by_rank[0][0]
