"""`mcr.wrap(accumulate="exact")`: means over passes and ranks, against fractions."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint
from unit.test_ordered_sums import addends, exact_sum

import mcr_plus as mcr

if TYPE_CHECKING:
    from collections.abc import Callable

PASSES = 5  # in a step, on all ranks together
SHAPES = {"weight": (517, 3), "bias": (7,), "turned": (3, 5)}
STAGES: dict[str, Any] = {
    "default": {},
    "small buckets": {
        "pipeline": [{"fuse": {"bucket": "1KiB", "first_bucket": "64B"}}, {"select": {}}, {"dispatch": {}}]
    },
    "gloo": {"backends": ["gloo"]},
    "failover": {"pipeline": [{"select": {}}, {"dispatch": {"failover": True}}]},
    "hierarchical": {"pipeline": [{"hierarchical": {"ranks_per_node": 2}}, {"select": {}}, {"dispatch": {}}]},
}
VALUES = ("any bits", "normal", "magnitudes", "subnormal", "cancelling", "overflow")


class Model(torch.nn.Module):
    """A model whose gradients are its inputs, to the last bit."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            value = torch.zeros(shape, dtype=dtype)
            value = value.T.contiguous().T if name == "turned" else value
            setattr(self, name, torch.nn.Parameter(value))
        self.unused = torch.nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, wanted: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [(getattr(self, name) * value).sum() for name, value in wanted.items()]
        return torch.stack(parts).sum()


def wrapped(dtype: torch.dtype = torch.float32) -> tuple[Any, torch.optim.Optimizer]:
    model = Model(dtype)
    return mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), accumulate="exact")


def gradients(kind: str, dtype: torch.dtype, step: int) -> list[dict[str, torch.Tensor]]:
    """Return those of all passes of a step; one has no gradient of a parameter."""
    rng = np.random.default_rng((step, VALUES.index(kind)))
    passes: list[dict[str, torch.Tensor]] = [{} for _ in range(PASSES)]
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        columns: list[torch.Tensor] = []
        while len(columns) < PASSES or min(map(len, columns)) < size:
            rows = addends(kind, dtype, rng)
            if len(rows) >= PASSES:
                columns = [
                    torch.cat([*columns[at : at + 1], row])
                    for at, row in enumerate(rows[len(rows) - PASSES :])
                ]
        for each, column in zip(passes, columns, strict=True):
            each[name] = column[:size].view(shape)
    del passes[1]["bias"]
    return passes


def means(passes: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    """Return exact sums, rounded to float64, divided there, and rounded to float32 and the dtype."""
    given = [each[name] for each in passes if name in each]
    columns = torch.stack([each.flatten().double() for each in given]).T.tolist()
    sums = np.array([exact_sum(column, torch.float64) for column in columns])
    with np.errstate(over="ignore"):
        singles = torch.from_numpy((sums / PASSES).astype(np.float32))
    return singles.to(given[0].dtype).view(given[0].shape)


def compare_with_fractions(stages: str, dtypes: list[str]) -> list[str]:
    """Return the cases in which a gradient differs from the oracle's in any bit but those of a NaN."""
    wrong: list[str] = []
    with mcr.init({"version": 1, **STAGES[stages]}) as comm:
        for dtype in (getattr(torch, name) for name in dtypes):
            model, optimizer = wrapped(dtype)
            for step, kind in enumerate(VALUES):
                passes = gradients(kind, dtype, step)
                optimizer.zero_grad()
                own = range(comm.rank, PASSES, comm.size)
                for at in own if step % 2 else reversed(own):
                    is_last = at == (own[-1] if step % 2 else own[0])
                    with nullcontext() if is_last else mcr.no_sync(model):
                        model(passes[at]).backward()
                optimizer.step()
                assert model.unused.grad is None
                of_all = [getattr(model, name).grad.contiguous() for name in SHAPES]
                bits = [each.view(torch.uint8).numpy().tobytes() for each in of_all]
                assert comm.broadcast_object(bits, 0) == bits
                for name in SHAPES if comm.rank == 0 else ():  # the oracle is slow
                    found, wanted = getattr(model, name).grad, means(passes, name)
                    same = (found == wanted) & (found.signbit() == wanted.signbit())
                    if not (same | (found.isnan() & wanted.isnan())).all():
                        wrong.append(f"{dtype} {kind} {name}: {(~same).sum()} elements")
    return wrong


@pytest.mark.short("1-default", "3-small buckets")
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_distribution_of_passes_gives_the_bits_of_fractions(ranks: int, stages: str) -> None:
    dtypes = ["float32", "bfloat16", "float16"]
    for result in run_ranks(compare_with_fractions, ranks, args=[stages, dtypes], via="torch"):
        assert result.value == []


class Checkpointed(torch.nn.Module):
    """A layer whose checkpoint has a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
        return result.sum()


def misuse() -> list[str]:
    """Make mistakes on all ranks; return the messages."""
    said: list[str] = []

    def refused(error: type[Exception], call: Callable[[], Any]) -> None:
        with pytest.raises(error) as caught:
            call()
        said.append(str(caught.value))

    rules: Any = [{"match": {"tag": "gradients"}, "compress": {"codec": "int8_block"}}]
    pipeline: Any = [{"compress": {}}, {"select": {}}, {"dispatch": {}}]
    with mcr.init({"version": 1, "pipeline": pipeline, "rules": rules}):
        refused(mcr.InvalidArgument, wrapped)
    with mcr.init({"version": 1}) as comm:
        refused(mcr.Unsupported, lambda: wrapped(torch.float64))
        dtype = torch.float64 if comm.rank else torch.float32
        refused(mcr.InvalidArgument, lambda: wrapped(dtype))  # on both ranks
        plain = Model()
        sgd = torch.optim.SGD(plain.parameters(), lr=0.0)
        refused(mcr.InvalidArgument, lambda: mcr.wrap(plain, sgd, accumulate="sum"))  # type: ignore[arg-type]
        how: Any = "exact" if comm.rank else "fast"
        refused(mcr.InvalidArgument, lambda: mcr.wrap(plain, sgd, accumulate=how))
        model, optimizer = wrapped()
        refused(mcr.InvalidArgument, optimizer.step)  # without a pass
        ones = {"bias": torch.ones(7)}
        with mcr.no_sync(model):
            model(ones).backward()
        refused(mcr.InvalidArgument, optimizer.step)
        with mcr.no_sync(model):  # a pass that fails on the way, on one rank
            if comm.rank == 1:
                fails = model.weight.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):  # once the gradient of `bias` has been added
                    model({"weight": torch.ones(517, 3), **ones}).backward()
                fails.remove()
                model(ones).backward()
        model({"bias": torch.full((7,), 4.0)}).backward()
        # Rank 1 has repeated its passes: four in all.
        assert model.bias.grad is not None
        said.append(str(model.bias.grad.unique().tolist()))
        refused(mcr.InvalidArgument, lambda: model(ones).backward())  # without zero_grad
        optimizer.zero_grad()
        model(ones).backward()
        assert model.bias.grad.eq(1.0).all(), "nothing is left of the refused pass"
        optimizer.zero_grad(set_to_none=False)
        with mcr.no_sync(model):
            loss = model({"weight": torch.ones(517, 3), **ones})
            fails = model.weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward(retain_graph=True)
            fails.remove()
            refused(mcr.McrError, loss.backward)
            optimizer.zero_grad()
            model({"bias": torch.full((7,), 9.0)}).backward()
        optimizer.zero_grad()
        model(ones).backward()
        assert model.bias.grad.eq(1.0).all(), "zero_grad drops what was added up"
        other = Checkpointed()
        mcr.wrap(other, torch.optim.SGD(other.parameters(), lr=0.0), accumulate="exact")
        refused(mcr.Unsupported, lambda: other(torch.ones(3)).backward())
    return said


def test_mistakes_are_named() -> None:
    for result in run_ranks(misuse, 2, via="torch"):
        codec, wide, differ, unknown, others, none, alone, mean, kept, again, nested = result.value
        assert "gives the gradient of 'weight' a codec" in codec
        assert "'weight' is of torch.float64 on cpu" in wide
        assert "has other parameters" in differ
        assert "expected 'fast' or 'exact', got 'sum'" in unknown
        assert "accumulate='exact'" in others
        assert "no backward pass of this rank since the last step" in none
        assert "of this rank alone" in alone
        assert mean == "[2.5]"
        assert "'bias' is the mean of an earlier pass" in kept
        assert "repeated without a forward pass" in again
        assert "use_reentrant=False" in nested
