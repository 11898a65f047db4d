"""Codecs of transfers: a pipeline whose stages exchange rounded values, against one process that rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import mcr_plus as mcr
from mcr_plus.errors import InvalidArgument
from mcr_plus.plans.named import hybrid
from mcr_plus.plans.plan_file import SavedModelPlan, plan_text

WIDTH, ITEMS, STEPS, MICRO_BATCHES = 12, 10, 4, 2


class Channel:
    """Values rounded to bfloat16; with `feedback`, what is lost is added to the next ones."""

    def __init__(self, feedback: bool) -> None:
        self.feedback, self.lost = feedback, torch.zeros(())

    def __call__(self, x: Tensor) -> Tensor:
        given = x + self.lost
        sent = given.bfloat16().float()
        self.lost = self.feedback * (given - sent)
        return sent


class Sent(torch.autograd.Function):
    """Send values, and their gradient back, over channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Channel, back: Channel) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return ctx.back(dy[0]), None, None


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(ITEMS, WIDTH, generator=random), torch.randn(ITEMS, WIDTH, generator=random)


def one_process(bounds: dict[int, bool]) -> list[float]:
    """Return the losses of a model with channels after the layers `bounds`, with or without feedback."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    channels = {number: (Channel(feedback), Channel(feedback)) for number, feedback in bounds.items()}
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(*(each.chunk(MICRO_BATCHES) for each in batch(step)), strict=True):
            for number, each in enumerate(model):
                x = each(x)
                x = Sent.apply(x, *channels[number]) if number in channels else x  # type: ignore[no-untyped-call]
            loss = nn.functional.mse_loss(x, y) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def trained(compressed: dict[int, Any]) -> list[float]:
    """Return the losses of a pipeline on three ranks."""
    with mcr.init({"version": 1, "backends": ["gloo"]}) as comm:
        model, loss = layers(), nn.functional.mse_loss
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        profile = mcr.profile(model, batch(0), optimizer=optimizer, loss=loss, repeats=1)
        stages = [range(2), range(2, 4), range(4, 7)]
        plan = hybrid(profile, comm.size, stages=stages, micro_batches=MICRO_BATCHES)
        for block, codec in compressed.items():
            plan.compress(int(block), codec)
        parallel = mcr.parallelize(model, optimizer, plan, loss=loss)
        losses = []
        for step in range(STEPS):
            losses.append(float(parallel.step(batch(step))))
            optimizer.step()
        return losses


FEEDBACK = {"codec": "bf16", "error_feedback": True}


@pytest.mark.parametrize(
    "compressed", [{1: "bf16"}, {1: "bf16", 3: "bf16"}, {1: FEEDBACK, 3: FEEDBACK}, {3: FEEDBACK}]
)
def test_the_transfers_that_a_plan_names_are_compressed(compressed: dict[int, Any]) -> None:
    expected = one_process({block: codec is FEEDBACK for block, codec in compressed.items()})
    for result in run_ranks(trained, 3, args=[compressed]):
        assert result.value == pytest.approx(expected, rel=1e-6)
        assert result.value != pytest.approx(one_process({}), rel=1e-6)


def summed(held: Any, codec: Any) -> list[list[float]]:
    """Return the parameters after each step of data parallelism, by a plan that went through a file."""
    with mcr.init({"version": 1, "backends": ["gloo"]}) as comm:
        model, loss = layers(), nn.functional.mse_loss
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        profile = mcr.profile(model, batch(0), optimizer=optimizer, loss=loss, repeats=1)
        plan = hybrid(profile, comm.size, data=comm.size)
        plan.hold(..., held)
        if codec is not None:
            plan.compress("sums", codec)
        plan = SavedModelPlan.model_validate_json(plan_text(plan)).plan(profile)
        parallel = mcr.parallelize(model, optimizer, plan, loss=loss)
        found = []
        for step in range(STEPS):
            parallel.step(batch(step))
            optimizer.step()
            state = parallel.state_dict()  # on rank 0
            parts = [state[name] for name, _ in layers().named_parameters() if state]
            found.append([number for each in parts for number in each.flatten().tolist()])
        return found


@pytest.mark.parametrize(
    ("held", "codec"), [("whole", "bf16"), ("whole", FEEDBACK), ("optimizer", "bf16")], ids=str
)
def test_sums_of_gradients_are_compressed(held: str, codec: Any) -> None:
    """Each of two ranks rounds the gradient of its half of the batch, and the sum is rounded, too."""
    model, channels = layers(), [Channel(codec is FEEDBACK) for _ in range(2)]
    found = run_ranks(summed, 2, args=[held, codec])[0].value
    params = list(model.parameters())
    for step in range(STEPS):
        total = torch.zeros(())
        for channel, x, y in zip(channels, *(each.chunk(2) for each in batch(step)), strict=True):
            own = torch.autograd.grad(nn.functional.mse_loss(model(x), y) / 2, params)
            total = total + channel(parameters_to_vector(own))
        expected = parameters_to_vector(params).detach() - 0.5 * total.bfloat16().float()
        vector_to_parameters(expected, params)
        torch.testing.assert_close(torch.tensor(found[step]), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("held", ["whole", "optimizer", "parameters"])
def test_compressed_sums_of_three_ranks_are_near_exact_ones(held: str) -> None:
    found, expected = (
        torch.tensor(run_ranks(summed, 3, args=[held, codec])[0].value[0]) for codec in ("int8_block", None)
    )
    change = (expected - parameters_to_vector(layers().parameters()).detach()).abs().max()
    assert 0 < (found - expected).abs().max() < 4 / 127 * change  # a rounding of each rank, and of the sum


def refused() -> list[str]:
    """Return the errors of a plan whose codec does not take the parameters, and of one that is not exact."""
    found = []
    for dtype, codec, sums in ((torch.bfloat16, "bf16", "fast"), (torch.float32, "int8_block", "exact")):
        with mcr.init({"version": 1, "backends": ["gloo"], "numerics": {"sums": sums}}) as comm:
            model = layers().to(dtype)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            given = tuple(each.to(dtype) for each in batch(0))
            profile = mcr.profile(model, given, optimizer=optimizer, loss=nn.functional.mse_loss, repeats=1)
            plan = hybrid(profile, comm.size, data=comm.size)
            plan.compress("sums", codec)
            with pytest.raises(InvalidArgument) as error:
                mcr.parallelize(model, optimizer, plan, loss=nn.functional.mse_loss)
            found.append(str(error.value))
    return found


def test_codecs_that_cannot_add_up_gradients_are_refused_before_the_step() -> None:
    for result in run_ranks(refused, 2):
        assert "takes float32" in result.value[0]
        assert "not bfloat16" in result.value[0]
        assert "the sum is to be exact" in result.value[1]
