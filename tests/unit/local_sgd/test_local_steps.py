"""The arithmetic of outer steps on simulated ranks, against NumPy in float64."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_oracle import SHAPES, Quadratic, Sgd, flat, load, simulate, start, targets
from tiers import examples
from unit.local_sgd.local_simulated import DEFAULTS, made, outer_values
from unit.local_sgd.simulated_ranks import on_simulated_ranks

from mcr_plus.local_sgd.fragments import Fragment, cut, digest

SGD = torch.optim.SGD


def course(
    comm: Any, steps: int, outer: Any, tokens: list[int] | None, changed: dict[str, Any]
) -> list[tuple[list[float], list[float]]]:
    """Return the parameters and outer parameters after each step."""
    model = Quadratic(comm.rank)
    local = made(comm, model, outer, **changed)
    found = []
    for _ in range(steps):
        local.inner.zero_grad()
        model.loss().backward()
        local.step(None if tokens is None else tokens[comm.rank])
        found.append((model.values(), outer_values(local)))
    return found


def begun(comm: Any, states: Any, changed: dict[str, Any]) -> list[float]:
    """Return the outer parameters of a run that is restored and continues with the next step."""
    model = Quadratic(comm.rank)
    local = made(comm, model, **changed)
    load((model, local.inner, local), copy.deepcopy(states))
    return outer_values(local)


def names_of(fragments: int) -> list[list[str]]:
    """By hand: the sizes are 15, 4, 6, 7, 1."""
    return {1: ["abcde"], 2: ["a", "bcde"], 3: ["a", "b", "cde"], 4: ["a", "b", "c", "de"]}[fragments]  # type: ignore[return-value]


def compare(ranks: int, steps: int, outer: Any, same: Sgd | None, tokens: Any = None, **changed: Any) -> None:
    settings = DEFAULTS | changed
    found = on_simulated_ranks(course, ranks, steps, outer, tokens, changed)
    wanted = simulate(
        ranks, steps, settings["every"], names_of(settings["fragments"]), delay=settings["delay"],
        mix=settings["mix"], outer=same, weights=tokens, warmup=settings["warmup"],
    )  # fmt: skip
    for step in range(steps):
        for rank in range(ranks):
            parameters, outers = found[rank][step]
            np.testing.assert_allclose(parameters, wanted.local[step][rank], rtol=1e-11, atol=1e-13)
            if step + 1 >= settings["warmup"]:  # before there are none
                np.testing.assert_allclose(outers, wanted.outer[step], rtol=1e-11, atol=1e-13)
            assert outers == found[0][step][1]


@pytest.mark.short("1", "2")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_diloco(ranks: int) -> None:
    compare(ranks, 22, None, None, every=5)


@settings(max_examples=examples(40))
@given(
    ranks=st.integers(1, 3),
    every=st.integers(4, 9),
    fragments=st.integers(1, 4),
    delay=st.integers(0, 8),
    mix=st.sampled_from([0.25, 0.5, 1.0]),
    steps=st.integers(1, 40),
)
def test_streaming_diloco(ranks: int, every: int, fragments: int, delay: int, mix: float, steps: int) -> None:
    compare(ranks, steps, None, None, every=every, fragments=fragments, delay=delay % every, mix=mix)


def test_tokens_weigh_ranks() -> None:
    compare(3, 20, None, None, tokens=[10, 30, 5], weighted=True, every=4, fragments=2, delay=1, mix=0.5)


def test_a_warm_up_is_data_parallel() -> None:
    compare(3, 15, partial(SGD, lr=1.0), Sgd(1.0), warmup=6, every=4)


def test_local_sgd_of_one_step_is_data_parallel_sgd() -> None:
    """Closed form: without momentum, the mean of parameters moves as gradient descent on the mean loss."""

    def train(comm: Any) -> list[float]:
        model = Quadratic(comm.rank)
        inner = SGD(model.parameters(), lr=0.05)
        local = made(comm, model, partial(SGD, lr=1.0), inner, every=1)
        for _ in range(30):
            inner.zero_grad()
            model.loss().backward()
            local.step()
        return model.values()

    found = on_simulated_ranks(train, 3)
    assert found[0] == found[1] == found[2]
    problems = [targets(rank) for rank in range(3)]
    ends = {}
    for name, begin in start().items():
        sharp = np.mean([problem[name][0] for problem in problems])
        best = sum(problem[name][0] * problem[name][1] for problem in problems) / (3 * sharp)
        ends[name] = best + (1 - 0.05 * sharp) ** 30 * (begin - best)
    np.testing.assert_allclose(found[0], flat(ends), rtol=1e-10)


def test_easgd_without_gradients_contracts_as_its_closed_form() -> None:
    """The center moves by β to the mean, each rank by α to the center; distances shrink geometrically."""
    alpha, beta, rounds = 0.3, 0.6, 12

    def train(comm: Any) -> tuple[list[float], list[float]]:
        model = Quadratic(comm.rank)
        inner = SGD(model.parameters(), lr=1.0)
        local = made(comm, model, partial(SGD, lr=beta), inner, every=1, mix=alpha)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(comm.rank + 1.0)
        for _ in range(rounds):
            local.step()
        return model.values(), outer_values(local)

    found = on_simulated_ranks(train, 3)
    begin = np.array(flat(start()))
    center, spread = begin.copy(), 2.0  # the mean of ranks lies 2 above the center
    mean = begin + 2.0
    for _ in range(rounds):
        center = center + beta * (mean - center)
        mean = mean + alpha * (center - mean)
        spread *= (1 - alpha) * (1 - beta)
    np.testing.assert_allclose(mean - center, spread, atol=1e-12)
    for rank, (parameters, outers) in enumerate(found):
        np.testing.assert_allclose(outers, center, rtol=1e-12)
        np.testing.assert_allclose(parameters, mean + (rank - 1) * (1 - alpha) ** rounds, rtol=1e-12)


def test_a_gate_sends_what_bfloat16_sees_and_keeps_the_rest() -> None:
    layer = torch.nn.Linear(1, 4, bias=False)
    with torch.no_grad():
        layer.weight[:] = torch.tensor([[1.0], [1.0], [1.0], [0.0]])
    fragment = Fragment(0, list(layer.named_parameters()), partial(SGD, lr=1.0), torch.float32)
    small = 2.0**-10  # less than half of the last place of 1 in bfloat16
    with torch.no_grad():
        layer.weight -= torch.tensor([[small], [0.5], [0.0], [small]])
    assert fragment.pseudo_gradient(torch.bfloat16).tolist() == [0, 0.5, 0, small]
    assert fragment.residual is not None
    assert fragment.residual.tolist() == [small, 0, 0, 0]
    # The layer stays, so each call adds `small` again. Twice that is a tie, which bfloat16 rounds back to 1.
    assert fragment.pseudo_gradient(torch.bfloat16).tolist() == [0, 0.5, 0, small]
    assert fragment.pseudo_gradient(torch.bfloat16).tolist() == [3 * small, 0.5, 0, small]
    assert fragment.residual.tolist() == [0, 0, 0, 0]


@pytest.mark.long
def test_checkpoints_at_every_step_restore_the_same_run() -> None:
    changed = {"every": 5, "fragments": 3, "delay": 3, "mix": 0.5}

    def train(comm: Any, at: int) -> list[list[float]]:
        model = Quadratic(comm.rank)
        local = made(comm, model, **changed)
        found = []
        for step in range(14):
            if step == at:
                saved = copy.deepcopy([each.state_dict() for each in (model, local.inner, local)])
                model = Quadratic(comm.rank)
                local = made(comm, model, **changed)
                load((model, local.inner, local), saved)
            local.inner.zero_grad()
            model.loss().backward()
            local.step()
            found.append(model.values() + outer_values(local))
        return found

    undisturbed = on_simulated_ranks(train, 2, -1)
    for at in range(14):
        assert on_simulated_ranks(train, 2, at) == undisturbed, at


class Descent(torch.optim.Optimizer):
    """The steepest descent, by an optimizer that keeps nothing, and has no option but its rate."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"])


@pytest.mark.parametrize("kind", [SGD, Descent])
def test_optimizers_without_state_are_saved_and_restored(kind: Any) -> None:
    changed = {"every": 5, "fragments": 2, "delay": 3, "mix": 0.5}

    def made_anew(comm: Any) -> tuple[Quadratic, Any]:
        model = Quadratic(comm.rank)
        return model, made(comm, model, partial(kind, lr=0.6), kind(model.parameters(), lr=0.05), **changed)

    def train(comm: Any, at: int) -> list[tuple[list[float], list[float]]]:
        model, local = made_anew(comm)
        found = []
        for step in range(14):
            if step == at:
                saved = copy.deepcopy([each.state_dict() for each in (model, local.inner, local)])
                assert saved[1]["state"] == {}
                assert [each["outer"]["state"] for each in saved[2]["fragments"]] == [{}, {}]
                model, local = made_anew(comm)
                load((model, local.inner, local), saved)
            local.inner.zero_grad()
            model.loss().backward()
            local.step()
            found.append((model.values(), outer_values(local)))
        return found

    undisturbed = on_simulated_ranks(train, 2, -1)
    wanted = simulate(2, 14, 5, names_of(2), delay=3, mix=0.5, outer=Sgd(0.6), inner={"lr": 0.05})
    for rank, course_ in enumerate(undisturbed):
        for step, (parameters, outers) in enumerate(course_):
            np.testing.assert_allclose(parameters, wanted.local[step][rank], rtol=1e-11, atol=1e-13)
            np.testing.assert_allclose(outers, wanted.outer[step], rtol=1e-11, atol=1e-13)
    for at in (0, 1, 4, 6, 9, 13):
        assert on_simulated_ranks(train, 2, at) == undisturbed, at


@pytest.mark.parametrize(("before", "after"), [(2, 4), (3, 2), (3, 1)])
def test_a_checkpoint_fits_other_numbers_of_ranks(before: int, after: int) -> None:
    changed = {"every": 5, "fragments": 2, "delay": 3, "mix": 0.5}

    def train(comm: Any, saved: Any) -> Any:
        model = Quadratic(comm.rank)
        local = made(comm, model, **changed)
        if saved is not None:
            load((model, local.inner, local), copy.deepcopy(saved))
        for _ in range(6):
            local.inner.zero_grad()
            model.loss().backward()
            local.step()
        return [each.state_dict() for each in (model, local.inner, local)], outer_values(local)

    first = on_simulated_ranks(train, before, None)
    later = on_simulated_ranks(train, after, first[0][0])
    assert all(outers == later[0][1] for _, outers in later)
    assert later[0][1] != first[0][1]
    states = first[0][0]
    assert any(each["arrived"] is not None for each in states[2]["fragments"])
    restored = on_simulated_ranks(lambda comm: begun(comm, states, changed), after)
    saved = [each for fragment in states[2]["fragments"] for each in fragment["anchor"].tolist()]
    assert all(outers == saved for outers in restored)


def test_unlike_machines_make_steps_by_their_speed() -> None:
    clock = [0.0, 0.0]

    def train(comm: Any) -> tuple[int, int, list[float]]:
        model = Quadratic(comm.rank)
        local = made(comm, model, every=8, uneven=True, fragments=2, delay=1)
        while local.rounds < 4:
            local.inner.zero_grad()
            model.loss().backward()
            local._left -= 0.4 if comm.rank else 0.1  # as if computing had taken so long
            local.step()
        clock[comm.rank] = local.steps
        local.finish()
        return local.steps, local.every, model.values()

    (fast, usual, one), (slow, fewer, other) = on_simulated_ranks(train, 2)
    assert (fast, usual) == (32, 8)
    assert fewer == 2
    assert slow == 2 * 8 + 2 * 2  # the times of the first window arrive in the second
    assert one == other


def test_the_steps_of_unlike_machines_are_found_anew_after_a_loss() -> None:
    """The fastest of three ranks is lost: the faster one of the rest makes `every` steps from then on."""

    def train(comm: Any) -> Any:
        model = Quadratic(comm.rank)
        local = made(comm, model, every=8, uneven=True, fragments=2, delay=1)

        def advance(rounds: int) -> int:
            before = local.steps
            while local.rounds < rounds:
                local.inner.zero_grad()
                model.loss().backward()
                local._left -= (0.2, 0.1, 0.4)[comm.rank]  # as if computing had taken so long
                local.step()
            return local.steps - before

        counts = [advance(2), advance(3)]
        windows = [local.every]
        if comm.rank == 1:
            return None
        comm.lose(1)
        local.resume()
        windows.append(local.every)
        counts.append(advance(4))
        counts.append(advance(5))
        local.finish()
        return windows, counts[2:], model.values()

    one, lost, other = on_simulated_ranks(train, 3)
    assert lost is None
    assert one[:2] == ([4, 8], [8, 8])
    assert other[:2] == ([2, 4], [4, 4])
    assert one[2] == other[2]


def test_a_warm_up_copies_the_parameters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Fragment] = []
    take = Fragment.take_parameters

    def counted(fragment: Fragment) -> None:
        copies.append(fragment)
        take(fragment)

    monkeypatch.setattr(Fragment, "take_parameters", counted)

    def train(comm: Any, stop: str) -> Any:
        model = Quadratic(comm.rank)
        local = made(comm, model, every=3, warmup=5)
        after = []
        for step in range(5):
            local.inner.zero_grad()
            model.loss().backward()
            local.step()
            after.append(len(copies))
            if step == 2 and stop == "finish":
                values = model.values()
                local.finish()
                assert model.values() == values == outer_values(local)
            elif step == 2 and stop == "save":
                assert local.state_dict()["fragments"][0]["anchor"].tolist() == model.values()
        assert outer_values(local) == model.values()
        return after, model.values()

    ((after, values),) = on_simulated_ranks(train, 1, "")
    assert after == [2, 2, 2, 2, 3]  # two are of the beginning
    for stop in ("finish", "save"):
        assert on_simulated_ranks(train, 2, stop)[0][1] == on_simulated_ranks(train, 2, "")[0][1]
    assert values


def test_finish_makes_models_and_buffers_equal() -> None:
    def train(comm: Any) -> Any:
        model = Quadratic(comm.rank)
        model.register_buffer("mean", torch.zeros(3))
        model.register_buffer("count", torch.zeros((), dtype=torch.int64))
        model.frozen = torch.nn.Parameter(torch.full((2,), 1.0 + comm.rank), requires_grad=False)
        short = torch.full((3,), 1.5 + comm.rank).to(torch.float8_e4m3fn)
        model.quantised = torch.nn.Parameter(short, requires_grad=False)
        model.register_buffer("places", torch.full((2,), 500 + comm.rank, dtype=torch.int32).to(torch.uint16))
        model.register_buffer("scale", short.clone())
        model.tied = model.layers["a"]
        local = made(comm, model, every=4, fragments=2, delay=2, mix=0.5)
        for _ in range(7):
            local.inner.zero_grad()
            model.loss().backward()
            model.mean += comm.rank
            model.count += 1 + comm.rank
            local.step()
        local.finish()
        return {name: each.double().tolist() for name, each in model.state_dict().items()}, local.rounds

    found = on_simulated_ranks(train, 3)
    assert found[0] == found[1] == found[2]
    state, rounds = found[0]
    assert (state["mean"], state["count"], state["frozen"]) == ([7.0] * 3, 7, [1.0, 1.0])
    assert (state["quantised"], state["places"], state["scale"]) == ([1.5] * 3, [500.0] * 2, [1.5] * 3)
    assert rounds == 2


def test_finish_sends_what_a_gate_holds_back_but_for_an_exact_end() -> None:
    small = 2.0**-10  # less than half of the last place of 1 in bfloat16

    def train(comm: Any, exact: bool) -> list[float]:
        model = torch.nn.Linear(1, 2, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        inner = SGD(model.parameters(), lr=0.0)
        local = made(comm, model, partial(SGD, lr=1.0), inner, every=1, gate="bf16")
        for step in range(3):
            with torch.no_grad():
                model.weight[0] -= small if step == 0 else 0.0
                model.weight[1] -= 0.5 * (comm.rank + 1)
            local.step()
        with torch.no_grad():
            model.weight[1] -= 1.0 * comm.rank
        local.fragments[0].tokens = 1.0  # like a step that is not due to be sent
        local.finish(exact=exact)
        assert outer_values(local) == model.weight.view(-1).tolist()
        assert (local.fragments[0].residual is None) == (not exact)
        return outer_values(local)

    for exact, first in ((False, 1.0 - small), (True, 1.0)):
        assert on_simulated_ranks(train, 2, exact) == [[first, 1.0 - 3 * 0.75 - 0.5]] * 2


# -- parts ----------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=12), data=st.data())
def test_cuts_are_runs_that_cover_all(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    runs = cut(sizes, parts)
    assert [at for run in runs for at in run] == list(range(len(sizes)))
    assert len(runs) == parts
    assert all(len(run) > 0 for run in runs)


def test_cuts_are_balanced() -> None:
    assert [list(run) for run in cut([5, 5, 5, 5, 5, 5], 3)] == [[0, 1], [2, 3], [4, 5]]
    assert [list(run) for run in cut([100, 1, 1, 1], 3)] == [[0], [1], [2, 3]]
    assert sum(map(np.prod, SHAPES.values())) == 33


@pytest.mark.parametrize("numel", [1, 2, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_digests_tell_any_bit_apart(numel: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel, dtype=dtype)
    for at in {0, numel // 2, numel - 1}:
        other = values.clone()
        other.view(torch.uint8)[at * dtype.itemsize] ^= 1
        assert digest(other) != digest(values)
        assert -(2**63) <= digest(other) < 2**63


def test_a_digest_sees_order_and_differences_that_add_up_to_nothing() -> None:
    values = torch.arange(1.0, 1001.0)
    swapped = values.clone()
    swapped[[3, 700]] = values[[700, 3]]
    moved = values.clone()
    moved.view(torch.int32)[[10, 12]] += torch.tensor([1, -1], dtype=torch.int32)
    assert len({digest(each) for each in (values, swapped, moved)}) == 3


def test_rounding_to_a_shorter_dtype_is_nothing_that_was_learned() -> None:
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    fragment = Fragment(0, [("w", param)], partial(torch.optim.SGD, lr=1.0), torch.float32)
    fragment.apply(torch.full((4,), -(2.0**-10)), 1.0)  # below the resolution of bfloat16 near 1
    assert fragment.anchor.tolist() == [1 + 2.0**-10] * 4
    assert fragment.pseudo_gradient(None).tolist() == [0.0] * 4
