"""The proof of plans refuses what a token simulator finds wrong, and nothing else."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from unit.plan_oracle import error_of

from mcr_plus.errors import InvalidArgument
from mcr_plus.plans.blocks import Axis, ModelBlock, Profile
from mcr_plus.plans.language import ModelPlan
from mcr_plus.plans.named import NAMED, hybrid
from mcr_plus.plans.proof import prove

Random = random.Random
Mutate = Callable[[ModelPlan, Random], None]


def block(number: int, shape: tuple[int, ...], axes: dict[str, Axis], **options: Any) -> ModelBlock:
    times = {"forward": 1.0 + number % 3, "backward": 2.0, "recompute": 1.0, "forward_fixed": 0.0}
    times["backward_fixed"] = 0.0
    names = ("gradients", "optimizer", "saved", "saved_before", "output", "transient", "through")
    sizes = dict.fromkeys(names, 8)
    given = {"shared": (), "reads_batch": False, "random": False, **options}
    names_of = {"name": f"b{number}", "kind": "Part", "params": {f"b{number}.weight": 8}, "dtype": "float32"}
    return ModelBlock.model_validate({**names_of, "shape": shape, "axes": axes, **times, **sizes, **given})


def random_profile(draw: Random) -> Profile:
    """Return blocks of kinds of a transformer, of sizes that mostly do not divide."""
    items, length, width = draw.randint(5, 11), draw.randint(5, 9), draw.randint(4, 7)
    whole = items, length, width
    count = draw.randint(3, 8)
    tied = draw.random() < 0.3
    blocks = []
    for number in range(count):
        last = number == count - 1
        tokens = {
            "batch": Axis(dims=(0,), parts=(items,), how="split"),
            "sequence": Axis(dims=(1,), parts=(length,), how="split"),
        }
        kind = draw.choice(["norm", "mlp", "attention", "linear"])
        axes = dict(tokens)
        if kind == "mlp":
            axes["hidden"] = Axis(dims=(), parts=(draw.randint(4, 9),), how="sum")
        elif kind == "attention":
            axes["heads"] = Axis(dims=(), parts=(draw.randint(4, 6),), how="sum")
            axes["sequence"] = axes["sequence"].model_copy(update={"how": "gather"})
        elif kind == "linear" and not last:
            width = draw.randint(4, 7)
            axes["hidden"] = Axis(dims=(), parts=(width,), how="columns")
        if last:
            axes = {"batch": tokens["batch"]}
        shared = ("b0.weight",) if tied and (number == 0 or last) else ()
        blocks.append(block(number, () if last else (items, length, width), axes, shared=shared))
    return Profile(
        version=1, model="0", device="cpu", input=whole, state_of=None, unused=(), blocks=tuple(blocks)
    )  # fmt: skip


def random_plan(draw: Random) -> ModelPlan:
    """Return a named or hybrid plan, or one with columns or slices."""
    while True:
        profile, ranks = random_profile(draw), draw.randint(2, 4)
        micro_batches = draw.randint(1, 3)
        try:
            chosen = draw.random()
            if chosen < 0.5:
                plan = NAMED[draw.choice(list(NAMED))](profile, ranks, micro_batches=micro_batches)
            elif chosen < 0.8:
                data, tensor, stages = draw.choice(
                    [(2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 2, 1), (1, 1, 3), (2, 1, 1), (1, 4, 1), (1, 3, 1)]
                )
                plan = hybrid(
                    profile, data * tensor * stages, data=data, tensor=tensor, stages=stages,
                    micro_batches=micro_batches, schedule=draw.choice(["gpipe", "1f1b", "zero-bubble"]),
                    outside=draw.choice([None, "sequence"]), held=draw.choice(["whole", "parameters"]),
                )  # fmt: skip
            else:
                plan = free_plan(draw, profile, ranks, micro_batches)
            prove(plan)
            return materialized(plan)
        except InvalidArgument:
            continue


def free_plan(draw: Random, profile: Profile, ranks: int, micro_batches: int) -> ModelPlan:
    """Return a plan whose blocks are cut and assigned each in its own way."""
    plan = ModelPlan(profile, ranks, micro_batches=micro_batches, slices=draw.randint(1, 2))
    for index, one in enumerate(profile.blocks):
        parts = draw.randint(1, ranks)
        axis = draw.choice([None, *one.axes])
        if axis is None:
            plan.replicate(index, parts)
        else:
            plan.cut(index, axis, parts)
        plan.assign(index, draw.sample(range(ranks), parts))
    return plan


def materialized(plan: ModelPlan) -> ModelPlan:
    plan.orders = {rank: list(plan.order_of(rank)) for rank in range(plan.ranks)}
    return plan


def copied(plan: ModelPlan) -> ModelPlan:
    found = copy.copy(plan)
    found.places = [places.copy() for places in plan.places]
    found.orders = {rank: list(order) for rank, order in plan.orders.items()}
    found.befores = list(plan.befores)
    return found


# -- mutants ------------------------------------------------------------------------------------------------


def busy(plan: ModelPlan, draw: Random) -> int:
    """Return a rank with tasks."""
    return draw.choice([rank for rank in range(plan.ranks) if plan.orders[rank]])


def spot(plan: ModelPlan, draw: Random) -> tuple[Any, tuple[int, ...]]:
    """Return a place of a random part."""
    places = plan.places[draw.randrange(len(plan.places))]
    return places, tuple(draw.randrange(size) for size in places.shape)


def dropped(plan: ModelPlan, draw: Random) -> None:
    order = plan.orders[busy(plan, draw)]
    order.pop(draw.randrange(len(order)))


def doubled(plan: ModelPlan, draw: Random) -> None:
    order = plan.orders[busy(plan, draw)]
    order.insert(draw.randrange(len(order) + 1), draw.choice(order))


def neighbours_swapped(plan: ModelPlan, draw: Random) -> None:
    order = plan.orders[busy(plan, draw)]
    at = draw.randrange(max(len(order) - 1, 1))
    order[at : at + 2] = order[at : at + 2][::-1]


def two_swapped(plan: ModelPlan, draw: Random) -> None:
    order = plan.orders[busy(plan, draw)]
    one, two = draw.randrange(len(order)), draw.randrange(len(order))
    order[one], order[two] = order[two], order[one]


def shifted(plan: ModelPlan, draw: Random) -> None:
    """Move a task to another time of its rank."""
    order = plan.orders[busy(plan, draw)]
    order.insert(draw.randrange(len(order)), order.pop(draw.randrange(len(order))))


def moved_to_another_order(plan: ModelPlan, draw: Random) -> None:
    rank = busy(plan, draw)
    order, other = plan.orders[rank], plan.orders[draw.randrange(plan.ranks)]
    other.insert(draw.randrange(len(other) + 1), order.pop(draw.randrange(len(order))))


def another_micro_batch(plan: ModelPlan, draw: Random) -> None:
    order = plan.orders[busy(plan, draw)]
    at = draw.randrange(len(order))
    order[at] = order[at]._replace(micro=draw.randrange(plan.micro_batches + 1))


def without_a_rank(plan: ModelPlan, draw: Random) -> None:
    places, at = spot(plan, draw)
    places[at] = draw.choice([-1, plan.ranks])


def on_another_rank(plan: ModelPlan, draw: Random) -> None:
    """Leave the orders as they are."""
    places, at = spot(plan, draw)
    places[at] = draw.randrange(plan.ranks)


def on_another_rank_in_order(plan: ModelPlan, draw: Random) -> None:
    """Order all tasks anew."""
    on_another_rank(plan, draw)
    plan.orders = {}
    materialized(plan)


def column_on_another_rank(plan: ModelPlan, draw: Random) -> None:
    """Move a part of all micro-batches, and order all tasks anew."""
    places, at = spot(plan, draw)
    everywhere = (slice(None), slice(None), *at[2:])
    places[everywhere] = draw.randrange(plan.ranks)
    plan.orders = {}
    materialized(plan)


def two_places_swapped(plan: ModelPlan, draw: Random) -> None:
    places, at = spot(plan, draw)
    other = tuple(draw.randrange(size) for size in places.shape)
    places[at], places[other] = places[other], places[at]
    plan.orders = {}
    materialized(plan)


def orders_exchanged(plan: ModelPlan, draw: Random) -> None:
    one, two = draw.randrange(plan.ranks), draw.randrange(plan.ranks)
    plan.orders[one], plan.orders[two] = plan.orders[two], plan.orders[one]


def passes_exchanged(plan: ModelPlan, draw: Random) -> None:
    """Run two micro-batches of a rank in the other's place."""
    rank = busy(plan, draw)
    one, two = draw.randrange(plan.micro_batches), draw.randrange(plan.micro_batches)
    swap = {one: two, two: one}
    kind = draw.choice("FB")
    plan.orders[rank] = [
        each._replace(micro=swap.get(each.micro, each.micro)) if each.kind == kind else each
        for each in plan.orders[rank]
    ]


def before_another(plan: ModelPlan, draw: Random) -> None:
    """Let a task wait for another one, which may wait for it."""
    tasks = sorted(set(plan))
    plan.before(draw.choice(tasks), draw.choice(tasks))


def before_an_unknown(plan: ModelPlan, draw: Random) -> None:
    task = draw.choice(sorted(set(plan)))
    plan.before(task, task._replace(micro=plan.micro_batches))


MUTATIONS: tuple[Mutate, ...] = (
    dropped, doubled, neighbours_swapped, two_swapped, shifted, moved_to_another_order, another_micro_batch,
    without_a_rank, on_another_rank, on_another_rank_in_order, column_on_another_rank, two_places_swapped,
    orders_exchanged, passes_exchanged, before_another, before_an_unknown,
)  # fmt: skip


def mutants(seed: int, count: int) -> Iterator[tuple[str, ModelPlan]]:
    draw = random.Random(seed)
    plan = random_plan(draw)
    for number in range(count):
        if number % len(MUTATIONS) == 0:
            plan = random_plan(draw)
            assert error_of(plan) is None, plan.name
        mutant = copied(plan)
        mutate = MUTATIONS[number % len(MUTATIONS)]
        mutate(mutant, draw)
        yield f"{mutate.__name__} of {plan.name}", mutant


def refusal(plan: ModelPlan) -> str | None:
    try:
        prove(plan)
    except InvalidArgument as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 80), *(pytest.param(seed, 200, marks=pytest.mark.long) for seed in range(5))]
)
def test_the_proof_refuses_exactly_the_wrong_mutants(seed: int, count: int) -> None:
    accepted = 0
    for what, mutant in mutants(seed, count):
        wrong, refused = error_of(mutant), refusal(mutant)
        assert (wrong is None) == (refused is None), f"{what}: {wrong}; the proof: {refused}"
        accepted += refused is None
        if refused is not None:
            names = r"[FBW]\(block \d+, micro-batch \d+, slice \d+\)|b\d+( on| and|:) "
            assert re.search(names, refused), refused
            where = r"rank \d|has no rank|^before: |ranks of each other|number of replicas"
            assert re.search(where, refused), refused
    assert count / 20 < accepted < 3 * count / 4  # some mutants are as good as the plan
