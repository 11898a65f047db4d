"""Valid and refused arguments of `mcr.local` and `step`, on simulated ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from local_oracle import Quadratic
from unit.local_sgd.local_simulated import made, outer_values
from unit.local_sgd.simulated_ranks import on_simulated_ranks

from mcr_plus.errors import InvalidArgument, OrderMismatch, ResultMismatch

SGD = torch.optim.SGD

# -- scalers and closures -------------------------------------------------------------------------


@pytest.mark.long
def test_a_scaler_makes_the_inner_step_and_its_skipped_steps_count() -> None:
    """Powers of two scale exactly; a rank skips a step whose gradients overflow there."""

    def train(comm: Any, scaled: bool, warmup: int) -> Any:
        model = Quadratic(comm.rank)
        local = made(comm, model, every=3, warmup=warmup)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
        for step in range(9):
            local.inner.zero_grad()
            overflows = step == 7 and comm.rank == 1
            if scaled:
                scaler.scale(model.loss()).backward()
                if overflows:
                    next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
                local.step(scaler=scaler)
                scaler.update()
                continue
            model.loss().backward()
            if overflows:  # SGD leaves parameters without gradients alone
                local.inner.zero_grad()
            local.step()
        return model.values(), local.steps, scaler.get_scale()

    for warmup in (0, 4):
        plain = on_simulated_ranks(train, 2, False, warmup)
        scaled = on_simulated_ranks(train, 2, True, warmup)
        assert [each[2] for each in scaled] == [2.0**8, 2.0**7]
        for one, other in zip(plain, scaled, strict=True):
            assert one[1] == other[1] == 9
            np.testing.assert_allclose(one[0], other[0], rtol=1e-12)


def test_closures() -> None:
    def train(comm: Any) -> Any:
        model = Quadratic(comm.rank)
        inner = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3 + comm.rank)
        local = made(comm, model, partial(SGD, lr=1.0), inner, every=2)

        def closure() -> torch.Tensor:
            inner.zero_grad()
            loss = model.loss()
            loss.backward()
            return loss

        losses = [local.step(closure=closure).item() for _ in range(6)]
        refused = []
        calls: list[dict[str, Any]] = [
            {},
            {"tokens": closure},
            {"closure": 3},
            {"scaler": inner},
            {"closure": closure, "scaler": torch.amp.GradScaler("cpu")},
        ]
        for arguments_ in calls:
            with pytest.raises(InvalidArgument) as caught:
                local.step(**arguments_)
            refused.append(str(caught.value))
        with pytest.raises(InvalidArgument, match="closure: in the warm-up ranks average gradients"):
            made(comm, Quadratic(0), warmup=2).step(closure=closure)
        return losses, outer_values(local), refused, local.steps

    (losses, outer, refused, steps), (_, other, _, _) = on_simulated_ranks(train, 2)
    assert losses[1] < losses[0]
    assert (outer, steps) == (other, 6)
    for text, wanted in zip(
        refused,
        ["closure: LBFGS needs one", "pass closure=", "closure: expected", "scaler: expected", "only one of"],
        strict=True,
    ):
        assert wanted in text


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"every": 0}, "every: expected a number of steps from 1, got 0"),
        ({"every": True}, "every: expected a number of steps from 1, got True"),
        ({"every": 2.5}, "every: expected a number of steps from 1, got 2.5"),
        ({"delay": -1}, "delay: expected a number of steps from 0, got -1"),
        ({"delay": 4}, r"delay: expected fewer steps than every \(4\)"),
        ({"fragments": 0}, "fragments: expected a number from 1, got 0"),
        ({"fragments": 5}, "fragments: 5 cannot be sent in 4 steps"),
        ({"fragments": 6, "every": 9}, r"modules with trained parameters \(5\), got 6"),
        ({"mix": 0.0}, "mix: expected a number above 0 and up to 1, got 0.0"),
        ({"mix": 1.5}, "mix: expected a number above 0 and up to 1, got 1.5"),
        ({"mix": float("nan")}, "mix: expected a number above 0"),
        ({"warmup": -1}, "warmup: expected a number of steps from 0, got -1"),
        ({"gate": "int8"}, "gate: expected one of bf16, fp16 or None, got 'int8'"),
        ({"uneven": 1}, "uneven: expected True or False, got 1"),
        ({"compress": 8}, "compress: expected None, False, a codec's name or a mapping, got 8"),
        ({"compress": "int8_block"}, "has no stage compress"),
    ],
)
def test_settings_that_are_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        on_simulated_ranks(lambda comm: made(comm, Quadratic(0), **changed), 1)


@pytest.mark.parametrize(
    ("outer", "text"),
    [
        # The test makes it, because the first optimizer of a process imports torch's compiler.
        (lambda: SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), "outer: expected a class of optimizers"),
        (lambda: "sgd", "outer: expected a class of optimizers"),
        (lambda: lambda _: None, "outer: expected it to return an optimizer, got NoneType"),
        (lambda: torch.optim.LBFGS, "outer: LBFGS needs a closure, and an outer step has none"),
    ],
)
def test_outer_optimizers_that_are_refused(outer: Callable[[], Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        on_simulated_ranks(lambda comm: made(comm, Quadratic(0), outer()), 1)


def test_models_that_are_refused() -> None:
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    other = SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    with pytest.raises(InvalidArgument, match="no parameter is trained"):
        on_simulated_ranks(lambda comm: made(comm, frozen), 1)
    with pytest.raises(InvalidArgument, match="holds none of the model's parameters"):
        on_simulated_ranks(lambda comm: made(comm, Quadratic(0), inner=other), 1)


def test_ranks_with_other_settings_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="every: 4 on rank 0, but 6 on rank 1; expected the same"):
        on_simulated_ranks(lambda comm: made(comm, Quadratic(0), every=4 + 2 * comm.rank), 2)


def test_parameters_that_one_rank_has_changed_are_refused_by_all() -> None:
    def freeze(model: Any) -> None:
        model.layers["b"].requires_grad_(False)

    def resize(model: Any) -> None:
        model.layers["b"].weight.data = torch.zeros(7, dtype=torch.float64)

    def train(comm: Any, change: Any, delay: int) -> Any:
        model = Quadratic(comm.rank)
        local = made(comm, model, every=3, delay=delay)
        if comm.rank == 1:
            change(model)
        before = model.values()
        for _ in range(2 + delay):
            local.step()
        with pytest.raises(InvalidArgument) as caught:
            local.step()
        assert local.fragments[0].flight is None
        assert model.values() == before
        return str(caught.value)

    for change, delay, text in (
        (freeze, 0, "'layers.c.weight' in place of 'layers.b.weight'"),
        (freeze, 2, "'layers.c.weight' in place of 'layers.b.weight'"),
        (resize, 1, "'layers.b.weight' has changed its shape from [4] to [7]"),
    ):
        other, own, third = on_simulated_ranks(train, 3, change, delay)
        assert text in own
        assert "trained parameters have changed on rank 1" in other
        assert third == other


def test_missing_tokens_are_refused() -> None:
    for tokens, text in ((None, "needs the tokens of each step"), (0, "expected a number from 1, got 0")):
        with pytest.raises(InvalidArgument, match=text):
            on_simulated_ranks(
                lambda comm, tokens=tokens: made(comm, Quadratic(0), weighted=True).step(tokens), 1
            )


def test_states_that_are_refused() -> None:
    def load(comm: Any, before: dict[str, Any], steps: int, after: dict[str, Any]) -> None:
        first = made(comm, Quadratic(0), **before)
        for _ in range(steps):
            first.step()
        made(comm, Quadratic(0), **after).load_state_dict(first.state_dict())

    cases = [
        ({"fragments": 2}, 0, {"fragments": 3}, "it has 2 fragments, and the model is cut into 3"),
        ({"every": 4}, 3, {"every": 5}, "3 steps into a window of 4, which has 5 now"),
        ({}, 0, {"outer": torch.optim.Adam}, "its outer optimizer is SGD, that of this mcr.local is Adam"),
    ]
    for before, steps, after, text in cases:
        with pytest.raises(InvalidArgument, match=text):
            on_simulated_ranks(load, 1, before, steps, after)
    on_simulated_ranks(load, 1, {"every": 4}, 4, {"every": 5})

    def load_of(comm: Any, before: list[int], after: list[int]) -> None:
        first, second = (
            torch.nn.Sequential(*(torch.nn.Linear(1, size, bias=False) for size in sizes))
            for sizes in (before, after)
        )
        made(comm, second, fragments=2).load_state_dict(made(comm, first, fragments=2).state_dict())

    for sizes, text in (
        ([4, 3], r"fragment 1 has '1.weight' of shape \[4, 1\] in the state, and .* \[3, 1\] in the model"),
        ([4, 4, 1], "its fragments are cut elsewhere"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            on_simulated_ranks(load_of, 1, [4, 4], sizes)
    with pytest.raises(InvalidArgument, match="expected what state_dict"):
        on_simulated_ranks(lambda comm: made(comm, Quadratic(0)).load_state_dict({"version": 1}), 1)


def test_ranks_that_have_made_other_numbers_of_steps() -> None:
    def train(comm: Any) -> None:
        model = Quadratic(0)
        local = made(comm, model, every=3)
        local.steps += comm.rank  # like a run restored from another step
        for _ in range(3):
            local.step()

    with pytest.raises(OrderMismatch, match=r"outer\.0: .* \(rank 0: 3, rank 1: 4\)"):
        on_simulated_ranks(train, 2)


def test_results_that_differ_between_ranks_are_found_in_the_next_round() -> None:
    def train(comm: Any) -> None:
        model = Quadratic(0)
        local = made(comm, model, every=2)
        if comm.rank == 1:
            comm.spoil = lambda mean: mean[3:4].add_(1e-9)
        for _ in range(4):
            local.step()

    with pytest.raises(ResultMismatch, match=r"outer\.0: outer parameters on rank 1 differ from"):
        on_simulated_ranks(train, 3)


def test_an_end_that_is_neither_exact_nor_not_is_refused() -> None:
    def train(comm: Any) -> None:
        local = made(comm, Quadratic(comm.rank))
        with pytest.raises(InvalidArgument, match="exact: expected True or False, got 1"):
            local.finish(exact=1)  # type: ignore[arg-type]

    on_simulated_ranks(train, 1)


def test_a_step_of_the_optimizer_itself_is_refused_while_the_object_exists() -> None:
    """Nothing changes by it; `local.step` may also be made by a scaler, and by a later `mcr.local`."""

    def train(comm: Any) -> Any:
        model = Quadratic(comm.rank)
        local = made(comm, model, every=2)
        inner = local.inner
        model.loss().backward()
        before = model.values().copy()
        with pytest.raises(InvalidArgument, match=r"call local\.step\(\) in its place"):
            inner.step()
        np.testing.assert_array_equal(model.values(), before)
        local.step()
        again = made(comm, model, inner=inner, every=2)
        again.step()
        with pytest.raises(InvalidArgument, match=r"mcr\.local"):
            inner.step()
        steps = local.steps, again.steps
        del local, again
        gc.collect()
        inner.step()
        return steps

    assert on_simulated_ranks(train, 2) == [(1, 1), (1, 1)]
