"""The optimizer's state from one plan to another, and norms of whole models, beside one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from jobs.plans.plan_training import (
    CASES,
    CLOSE,
    ITEMS,
    Case,
    Reference,
    compared,
    one_process,
    optimizer_of,
    plan_of,
    profile_of,
)
from jobs.plans.test_parallelize import every_plan, fits, hybrids
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import mcr_plus as mcr
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.language import Held
from mcr_plus.plans.named import named
from mcr_plus.plans.run import ParallelModel, parallelize
from mcr_plus.plans.sums import GradientBucket

Spec = Mapping[str, Any]
STEPS = 3


def hybrid(**options: Any) -> Spec:
    return {"plan": "hybrid", "options": options}


def by_name(name: str, **options: Any) -> Spec:
    return {"plan": name, "options": options}


PAIRS: dict[int, list[tuple[str, str, Spec, Spec]]] = {
    2: [
        ("gpt", "adamw", by_name("data_parallel"), by_name("tensor_parallel")),
        ("gpt", "adamw", by_name("tensor_parallel"), by_name("zero3")),
        ("gpt", "sgd", by_name("zero3", micro_batches=2), by_name("zero1")),
        ("gpt", "adamw", by_name("zero1"), by_name("one_f_one_b")),
        ("grouped", "adamw", by_name("interleaved"), by_name("sequence_parallel")),
        ("mlp", "adamw", by_name("one_f_one_b"), by_name("zero3")),
        ("mlp", "sgd", by_name("co_shard"), by_name("data_parallel")),
    ],
    4: [
        ("gpt", "adamw", hybrid(data=2, tensor=2, held="parameters"), hybrid(stages=2, tensor=2)),
        ("gpt", "adamw", by_name("zero1"), hybrid(data=2, tensor=2, held="optimizer", recompute=True)),
        ("separate", "adamw", hybrid(stages=2, data=2, held="parameters"), by_name("zero3")),
        ("separate", "sgd", by_name("zero_bubble"), hybrid(stages=2, data=2, held="optimizer")),
    ],
}  # fmt: skip


def half(
    case: Case, plan: Any, kind: str, first: int, reference: Reference, state: tuple[Any, Any] | None
) -> ParallelModel:
    """Train half of the steps under a plan, from a checkpoint if there is one."""
    optimizer = optimizer_of(case.model, kind)
    parallel = mcr.parallelize(case.model, optimizer, plan, loss=case.loss)
    if state is not None:
        for group in optimizer.param_groups:
            group["lr"] = 0.5  # the state has the right ones
        parallel.load_state_dict(state[0])
        parallel.load_optimizer_state_dict(state[1])
    for step in range(first, first + STEPS):
        loss = parallel.step(case.batch(step)).item()
        optimizer.step()
        assert abs(loss - reference.losses[step]) <= CLOSE * abs(loss), (step, loss, reference.losses[step])
    return parallel


def as_torch_has_it(case: Case, kind: str, found: Mapping[str, Any]) -> bool:
    """Return whether a state is that of torch's own form, of one process after the first half."""
    model = copy.deepcopy(case.model)
    optimizer = optimizer_of(model, kind)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = case.batch(step)
        inputs = batch if isinstance(batch, tuple) else (batch,)
        case.loss(model(inputs[0]), *inputs[1:]).backward()
        optimizer.step()
    torchs: Any = get_optimizer_state_dict(model, optimizer)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert found["state"].keys() == trained
    for name, key in product(trained, next(iter(found["state"].values()))):
        mine, theirs = found["state"][name][key], torchs["state"][name][key]
        assert isinstance(theirs, Tensor)
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-13)
    listed = [set(group["params"]) for group in torchs["param_groups"]]
    assert [set(group["params"]) for group in found["param_groups"]] == listed
    assert [group["lr"] for group in found["param_groups"]] == [
        group["lr"] for group in torchs["param_groups"]
    ]
    return True


def resumed(pairs: int) -> int:
    torch.set_num_threads(1)
    done = 0
    with mcr.init() as comm:
        for name, kind, first, second in PAIRS[pairs]:
            case = CASES[name](comm.size)
            profile = profile_of(case)
            reference = one_process(case, kind, 2 * STEPS)
            other = CASES[name](comm.size)
            for param in other.model.parameters():
                param.data.add_(0.1)  # the checkpoint has all
            plans = [plan_of(profile, comm.size, spec) for spec in (first, second)]
            before = case._replace(model=copy.deepcopy(case.model))
            parallel = half(before, plans[0], kind, 0, reference, None)
            state = parallel.state_dict(), parallel.optimizer_state_dict()
            assert bool(state[1]) == (comm.rank == 0)
            assert comm.rank or as_torch_has_it(case, kind, state[1])
            state = mcr.broadcast_object(state, 0)
            dict(compared(half(other, plans[1], kind, STEPS, reference, state), reference, CLOSE))
            done += 1
    return done


@pytest.mark.short("2]")
@pytest.mark.parametrize("ranks", [2, 4])
def test_state_goes_from_plan_to_plan(ranks: int) -> None:
    assert [result.value for result in run_ranks(resumed, ranks, args=[ranks])] == [len(PAIRS[ranks])] * ranks


def clipped(specs: list[Spec]) -> list[str]:
    """Return the plans under which norms or clipped steps are not those of one process."""
    torch.set_num_threads(1)
    wrong = []
    with mcr.init() as comm:
        known: dict[str, tuple[Case, Profile]] = {}
        for spec in specs:
            if spec["case"] not in known:
                known[spec["case"]] = (case := CASES[spec["case"]](comm.size), profile_of(case))
            case, profile = known[spec["case"]]
            alone, model = copy.deepcopy(case.model), copy.deepcopy(case.model)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
            plan = plan_of(profile, comm.size, spec)
            parallel = mcr.parallelize(model, optimizers[1], plan, loss=case.loss)
            for step, most in enumerate((0.01, 1e9)):
                batch = case.batch(step)
                inputs = batch if isinstance(batch, tuple) else (batch,)
                optimizers[0].zero_grad()
                case.loss(alone(inputs[0]), *inputs[1:]).backward()
                parallel.step(batch)
                expected = nn.utils.clip_grad_norm_(alone.parameters(), most).item()
                found = parallel.clip_grad_norm_(most).item()
                for optimizer in optimizers:
                    optimizer.step()
                if not (abs(found - expected) <= CLOSE * expected and expected > 0.01):
                    wrong.append(f"{spec}: {found}, not {expected}")
            whole, state = alone.state_dict(), parallel.state_dict()
            far = [name for name in state if not torch.allclose(state[name], whole[name], rtol=0, atol=1e-9)]
            wrong += [f"{spec}: {far[0]}"] if far else []
    return wrong


@pytest.mark.long  # tests of models compare norms, too
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", ["gpt", "mlp", "grouped"])
def test_norms_are_those_of_the_whole_model(case: str, ranks: int) -> None:
    specs = [each for each in every_plan(case) if fits(each, ranks)] + (hybrids(case) if ranks == 4 else [])
    assert [result.value for result in run_ranks(clipped, ranks, args=[specs])] == [[]] * ranks


class Scale(nn.Module):
    """A parameter without dimensions."""

    mcr_axes: ClassVar = {"batch": "split"}

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def refused() -> dict[str, str]:
    said = {}
    with mcr.init() as comm:
        model = nn.Sequential(nn.Linear(4, 6), Scale(), nn.Linear(6, 2))
        batch, loss = (torch.ones(ITEMS, 4), torch.zeros(ITEMS, 2)), nn.functional.mse_loss
        plan = named("zero1", mcr.profile(model, batch, loss=loss, repeats=1), comm.size)
        optimizer = torch.optim.Adam(model.parameters())
        parallel = parallelize(model, optimizer, plan, loss=loss)
        parallel.step(batch)
        optimizer.step()
        state = mcr.broadcast_object(parallel.optimizer_state_dict(), 0)
        kept = copy.deepcopy(optimizer.state_dict())

        def load(name: str, change: Any) -> None:
            other = copy.deepcopy(state)
            change(other)
            with pytest.raises(mcr.InvalidArgument) as error:
                parallel.load_optimizer_state_dict(other)
            said[name] = str(error.value)

        load("numbers", lambda other: other["param_groups"][0].update(params=[0, 1, 2, 3]))
        load("nothing", lambda other: other.clear())
        load("groups", lambda other: other["param_groups"].insert(0, {"params": []}))
        load("shape", lambda other: other["state"]["0.bias"].update(exp_avg=torch.ones(5)))
        load("rank", lambda other: other["state"]["0.bias"].update(exp_avg=torch.ones(())))
        load("steps", lambda other: other["state"]["2.bias"]["step"].add_(1))
        load("missing", lambda other: other["state"].pop("2.bias"))
        assert str(optimizer.state_dict()) == str(kept)
        optimizer.state.clear()
        parallel.load_optimizer_state_dict(state)
        assert str(optimizer.state_dict()) == str(kept)
        for value in optimizer.state.values():
            value["odd"] = torch.ones(3, 3)
        with pytest.raises(mcr.Unsupported) as error:
            parallel.optimizer_state_dict()
        said["odd"] = str(error.value)
    return said


def test_states_that_do_not_fit_are_refused() -> None:
    one, two = (result.value for result in run_ranks(refused, 2))
    assert one == two
    group, wrong = "state: expected 2.weight in param_groups[0], by its name", "state: {} of {}: expected"
    shard, scalars = "2.weight, 2.bias, 1.by, 0.weight, 0.bias", " the parameter's shape, or equal scalars"
    assert one == {
        "numbers": group, "nothing": group, "groups": group,
        **{name: wrong.format("exp_avg", shard) + scalars for name in ("shape", "rank")},
        **{name: wrong.format("step", shard) + scalars for name in ("steps", "missing")},
        "odd": "optimizer: odd of 2.weight has neither the parameter's shape nor is a scalar",
    }  # fmt: skip


def under_a_codec(held: Held) -> float:
    """Return the largest change of parameters and state by a codec of all operations, without gradients."""
    compress = {"compress": {"codec": "int8_block"}}
    with mcr.init({"version": 1, "pipeline": [compress, {"select": {}}, {"dispatch": {}}]}) as comm:
        torch.manual_seed(0)
        model = nn.Linear(30, 7)
        expected = [param.detach().clone() for param in model.parameters()]
        bucket = GradientBucket(list(model.parameters()), comm, 0.0, held, 0)
        for _ in range(3):
            bucket.gather(exact=held == "parameters")
        (shard,) = bucket.optimized
        found = [*bucket.params, *bucket.whole(shard)]
        return max(float((a - b).detach().abs().max()) for a, b in zip(found, 2 * expected, strict=True))


@pytest.mark.parametrize("held", ["parameters", "optimizer"])
def test_a_codec_of_all_operations_changes_no_state(held: Held) -> None:
    assert [result.value for result in run_ranks(under_a_codec, 2, args=[held])] == [0.0, 0.0]
