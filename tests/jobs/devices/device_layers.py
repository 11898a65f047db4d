"""The layers above calls on tensors of a device: layouts, experts, gradients, weights, outer steps, FSDP.

Inputs come late on the current stream. Oracles are NumPy's results or closed forms; for long programs, the
same program on CPU tensors in one process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.distributed as dist
from jobs.devices import late_streams
from jobs.weight_sync import sync_jobs
from reference import DEVICE, Failures, difference
from torch import nn
from torch.distributed.fsdp import fully_shard

import mcr_plus as mcr
from mcr_plus import autograd, expert

TIMEOUT: Final = 20.0
EXPERTS, HIDDEN, PICKED = 5, 32, 2
_ROUTED: Final[tuple[tuple[Literal["bf16", "fp8_block"] | None, float], ...]] = (
    (None, 1e-5),
    ("bf16", 2e-2),
    ("fp8_block", 0.2),
)  # and the error that each may have, of the largest result
_OUTER: Final[tuple[dict[str, Any] | None, ...]] = (
    None,
    {"codec": "topk", "ratio": 0.25, "chunk": 64, "error_feedback": True},
)


def late(values: torch.Tensor) -> torch.Tensor:
    """Return a copy on the device that is written late on the current stream; until then it holds zeros."""
    made = torch.zeros(values.shape, dtype=values.dtype, device=DEVICE)
    if DEVICE == "cpu":
        return made.copy_(values)
    host = values.pin_memory()
    late_streams.delay()
    return made.copy_(host, non_blocking=True)


def layouts(comm: mcr.Communicator, failures: Failures) -> None:
    """Redistribute rows to columns, and one rank's tensor to all ranks."""
    ranks, size = range(comm.size), comm.size
    for rows, columns in ((5, 8), (301, 94)):
        shape = (rows, columns)
        whole = torch.arange(float(rows * columns)).view(shape)
        by_rows, by_columns = (mcr.Layout.sharded(shape, ranks, dim) for dim in (0, 1))
        moved = mcr.redistribute(late(whole.chunk(size)[comm.rank]), by_rows, by_columns)
        wanted = whole.numpy().reshape(rows, size, -1)[:, comm.rank]
        failures.check(f"redistribute {shape}", difference(moved, wanted))
        one = mcr.Layout.boxes(shape, {0: [((0, rows), (0, columns))]})
        given = late(whole) if comm.rank == 0 else None
        spread = mcr.redistribute(given, one, mcr.Layout.replicated(shape, ranks))
        failures.check(f"redistribute {shape} from one rank", difference(spread, whole.numpy()))


def experts(comm: mcr.Communicator, failures: Failures) -> None:
    """Expert number e answers (e + 1) x; tokens of unlike numbers."""
    for compress, error in _ROUTED:
        tokens = 60 + 7 * comm.rank
        draw = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(tokens, HIDDEN, generator=draw)
        ids = torch.rand(tokens, EXPERTS, generator=draw).topk(PICKED).indices
        weights = torch.rand(tokens, PICKED, generator=draw)
        routed = expert.dispatch(
            late(x), late(ids), late(weights), experts=EXPERTS, compress=compress, compress_back=compress
        )
        first = sum(EXPERTS // comm.size + (rank < EXPERTS % comm.size) for rank in range(comm.rank))
        mine = enumerate(routed.rows.split(routed.counts), first + 1)
        back = expert.combine(torch.cat([number * rows for number, rows in mine]), routed)
        wanted = x.double().numpy() * ((ids + 1.0) * weights).sum(1, keepdim=True).double().numpy()
        allowed = error * float(np.abs(wanted).max())
        failures.check(f"experts, codec {compress}", difference(back, wanted, allowed))


def gradients(comm: mcr.Communicator, failures: Failures) -> None:
    """Take the gradient of a sum unchanged: all ranks compute the same from the sum."""
    leaf = late(torch.tensor([1.0, 2.0, 3.0])).requires_grad_()
    (autograd.all_reduce(leaf * leaf * (comm.rank + 1)) * 3).sum().backward()
    assert leaf.grad is not None
    wanted = 2 * np.arange(1.0, 4.0) * (comm.rank + 1) * 3
    failures.check("autograd", difference(leaf.grad, wanted))


def weights(comm: mcr.Communicator, failures: Failures) -> None:
    """Every version has the source's bits; all ranks can compute the source's changes."""
    model, twin = sync_jobs.Model().to(DEVICE), sync_jobs.Model()
    if comm.rank:
        with torch.no_grad():
            for tensor in model.tensors():
                tensor.zero_()
    synced = mcr.sync(model, src=0)
    for number in range(4):
        sync_jobs.step(twin, number)
        with torch.no_grad():
            if comm.rank == 0:
                for tensor, value in zip(model.tensors(), twin.tensors(), strict=True):
                    tensor.copy_(late(value.contiguous()))
        synced.push() if comm.rank == 0 else synced.pull(timeout=TIMEOUT)
        failures.expect(f"weights, version {number}", sync_jobs.bits(_on_host(model)) == sync_jobs.bits(twin))
        comm.barrier()
    figures = synced.stats()
    failures.expect("what changed travels", figures["bytes"] < figures["dense_bytes"] / 4, figures)
    synced.close()


def _on_host(model: sync_jobs.Model) -> sync_jobs.Model:
    copy = sync_jobs.Model()
    with torch.no_grad():
        for tensor, value in zip(copy.tensors(), model.tensors(), strict=True):
            tensor.copy_(value)
    return copy


def outer_steps(comm: mcr.Communicator, failures: Failures) -> None:
    """`mcr.local`: Nesterov's outer steps of constant gradients in closed form; with a codec, equal bits."""
    for compress in _OUTER:
        model = nn.Linear(64, 3, bias=False).to(DEVICE)
        with torch.no_grad():
            model.weight.zero_()
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        local = mcr.local(model, inner, every=2, compress=compress)
        for _ in range(4):
            inner.zero_grad()
            slope = late(torch.full((3, 64), comm.rank + 1.0))
            (model.weight * slope).sum().backward()
            local.step()
        if compress is None:
            mean, momentum, place = (comm.size + 1) / 2, 0.0, 0.0
            for _ in range(2):
                momentum = 0.9 * momentum + mean
                place -= 0.7 * (mean + 0.9 * momentum)
            wanted = np.full((3, 64), place)
            failures.check("outer steps", difference(model.weight, wanted, 1e-5))
        gathered = [torch.zeros_like(model.weight) for _ in range(comm.size)]
        comm.all_gather(gathered, model.weight.detach())
        same = all(torch.equal(each.cpu(), model.weight.detach().cpu()) for each in gathered)
        failures.expect(
            f"outer steps, {compress}: replicas", same and bool(model.weight.detach().cpu().any())
        )


def capture(comm: mcr.Communicator, failures: Failures) -> None:
    """A step that is captured has a duration."""
    model = nn.Linear(2, 2).to(DEVICE)
    wrapped, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.5))
    with mcr.capture(wrapped, optimizer, steps=3) as captured:
        for _ in range(4):
            optimizer.zero_grad()
            wrapped(late(torch.ones(6, 2))).sum().backward()
            optimizer.step()
    failures.expect("capture", captured.step.seconds > 0, captured.step.seconds)


LAYERS: Final = {
    "layouts": layouts,
    "experts": experts,
    "gradients": gradients,
    "weights": weights,
    "outer steps": outer_steps,
    "capture": capture,
}


@contextmanager
def group_of_torch(backends: Sequence[str]) -> Iterator[tuple[int, int]]:
    """torch.distributed with the backend `mcr` and these libraries; the rank and the number of ranks."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(f"version: 1\nbackends: [{', '.join(backends)}]\n")
        file.flush()
        os.environ["MCR_CONFIG"] = file.name
        dist.init_process_group("mcr")
        del os.environ["MCR_CONFIG"]
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def fsdp(backends: Sequence[str], failures: Failures) -> None:
    """torch's `fully_shard` with the backend `mcr`: the parameters of the same training in one process."""
    with group_of_torch(backends) as (rank, size):
        model, alone = _layered(), _layered().double()
        model.to(DEVICE)
        for layer in (*model, model):
            fully_shard(layer)
        steps = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)
        for turn in range(3):
            for step in steps:
                step.zero_grad()
            model(late(_batch(rank, turn))).square().mean().backward()
            losses = [alone(_batch(each, turn).double()).square().mean() for each in range(size)]
            torch.stack(losses).mean().backward()
            for step in steps:
                step.step()
        for (name, param), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
            got = param.full_tensor()  # type: ignore[attr-defined]
            failures.check(f"FSDP, {name}", difference(got, wanted.detach().numpy(), 1e-5))


def _layered() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(33, 64), nn.Linear(64, 17))


def _batch(rank: int, turn: int) -> torch.Tensor:
    return torch.randn(6, 33, generator=torch.Generator().manual_seed(10 * turn + rank))
