"""Memory that plans of a transformer need, foretold and counted."""

from __future__ import annotations

import pytest
import torch
from plan_exam import profile_of
from ranks import run_ranks
from torch import Tensor
from transformer import LanguageModel, Losses, Shape

import mcr_plus as mcr
from mcr_plus.bucketing.live_bytes import LiveBytes
from mcr_plus.plans.memory import memory_of
from mcr_plus.plans.named import named
from mcr_plus.plans.run import parallelize
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
NAMES = ["data_parallel", "zero1", "tensor_parallel", "gpipe", "one_f_one_b", "zero_bubble", "terapipe"]
SHAPE = Shape(layers=6, hidden=96, heads=4, sequence=48)


def text_loss(losses: Losses) -> Tensor:
    return losses.text


def transformer() -> LanguageModel:
    model = LanguageModel(SHAPE, 0)
    model.bytes.weight.mcr_shared = True  # type: ignore[attr-defined]
    return model


def counted() -> list[tuple[str, int, int]]:
    """Return name, foretold and counted peak of the second step of each plan."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    batch = torch.randint(256, (16, SHAPE.sequence + 1))
    found = []
    with mcr.init() as comm:
        model = transformer()
        profile = profile_of(model, batch, text_loss, torch.optim.AdamW(model.parameters()))
        for name in NAMES:
            model = transformer()
            optimizer = torch.optim.AdamW(model.parameters())
            parallel = parallelize(model, optimizer, named(name, profile, comm.size), loss=text_loss)
            parallel.step(batch)
            optimizer.step()
            live = LiveBytes()
            live.add(batch)
            of_batch = live.now
            live.add(list(model.parameters()))
            live.add([param.grad for param in model.parameters()])
            live.add(list(optimizer.state.values()))
            live.add([bucket.gradients for bucket in parallel.buckets])
            with live:
                parallel.step(batch)
            found.append((name, memory_of(parallel.proved, comm.rank).peak, live.peak - of_batch))
    return found


@needs_mpi
@pytest.mark.long
def test_memory_is_foretold() -> None:
    for result in run_ranks(counted, 2):
        far = [
            (name, foretold, peak)
            for name, foretold, peak in result.value
            if not 0.94 < foretold / peak < 1.06
        ]
        assert not far, f"rank {result.rank}"
