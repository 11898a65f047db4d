"""Plans of whole models: the language, stages, schedules, layouts, and what is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mcr_plus.errors import InvalidArgument
from mcr_plus.plans.blocks import Axis, ModelBlock, Profile
from mcr_plus.plans.language import B, F, ModelPlan, PlanTask, W
from mcr_plus.plans.named import hybrid, interleaved, mesh, named
from mcr_plus.plans.proof import prove
from mcr_plus.plans.tensors import PlanTensors

ROWS, LENGTH, WIDTH = 7, 6, 5
BATCH = Axis(dims=(0,), parts=(ROWS,), how="split")
SEQUENCE = Axis(dims=(1,), parts=(LENGTH,), how="split")
AXES: dict[str, dict[str, Axis]] = {
    "norm": {"batch": BATCH, "sequence": SEQUENCE},
    "mlp": {"batch": BATCH, "sequence": SEQUENCE, "hidden": Axis(dims=(), parts=(9,), how="sum")},
    "linear": {"batch": BATCH, "hidden": Axis(dims=(), parts=(WIDTH,), how="columns")},
    "attention": {
        "batch": BATCH,
        "sequence": SEQUENCE.model_copy(update={"how": "gather"}),
        "heads": Axis(dims=(), parts=(4,), how="sum"),
    },
    "none": {},
}


def block(name: str, kind: str, **options: Any) -> ModelBlock:
    given = {
        "forward": 1.0, "backward": 2.0, "recompute": 0.0, "gradients": 8, "optimizer": 8, "saved": 8,
        "saved_before": 0, "transient": 0, "through": 0, "forward_fixed": 0.0, "backward_fixed": 0.0,
        "output": 8, "shape": (ROWS, LENGTH, WIDTH), "dtype": "float32", "shared": (),
        "reads_batch": False, "random": False, "axes": AXES[kind], **options,
    }  # fmt: skip
    return ModelBlock.model_validate({"name": name, "kind": kind, "params": {f"{name}.weight": 8}, **given})


def profile(*kinds: str, rows: int = ROWS, **options: Any) -> Profile:
    blocks = [block(f"{kind}{number}", kind, **options) for number, kind in enumerate(kinds)]
    return Profile(
        version=1, model="", device="cpu", input=(rows, LENGTH, WIDTH), state_of=None, unused=(),
        blocks=tuple(blocks),
    )  # fmt: skip


def plan(*kinds: str, ranks: int = 2, **options: Any) -> ModelPlan:
    return ModelPlan(profile(*kinds), ranks, **options)


# -- what is refused ----------------------------------------------------------------------------------------


def assigned(*kinds: str) -> ModelPlan:
    found = plan(*kinds)
    found.assign(..., 0)
    return found


REFUSED: list[tuple[str, Callable[[], Any]]] = [
    (r"ranks: 0; expected a number from 1", lambda: plan("norm", ranks=0)),
    (r"micro_batches: 1\.5; expected a number from 1", lambda: plan("norm", micro_batches=1.5)),
    (r"micro_batches: 8; block norm0 \(norm\) has batch: 7", lambda: plan("norm", micro_batches=8)),
    (r"ranks: 2; the plan has ranks 0 to 1", lambda: plan("norm").order(2, [])),
    (r"slices: 2; block linear1 \(linear\) has no axis 'sequence'", lambda: plan("norm", "linear", slices=2)),
    (r"block norm0 \(norm\): unknown axis 'space'; known: batch", lambda: plan("norm").cut(0, "space", 2)),
    (r"mlp0: axes \('batch', 'hidden'\); only axes that are sums are cut together",
     lambda: plan("mlp").cut(0, ["batch", "hidden"], 2)),
    (r"mlp0: \('hidden',\) with 'heads' outside; expected a sum with data",
     lambda: plan("mlp").cut(0, "hidden", 2, "heads")),
    (r"linear0: \('hidden',\) with 'batch' outside; expected a sum with data",
     lambda: plan("linear").cut(0, "hidden", 2, "batch")),
    (r"mlp0: 10 parts of \('hidden',\); it has 9", lambda: plan("mlp").cut(0, "hidden", 10)),
    (r"parts: -1; expected a number from 1", lambda: plan("mlp").cut(0, "hidden", -1)),
    (r"parts: 0; expected a number from 1", lambda: plan("mlp").replicate(0, 0)),
    (r"norm0: cut after it was assigned", lambda: assigned("norm").cut(0, "batch", 2)),
    (r"ranks: 2; the plan has ranks 0 to 1", lambda: plan("norm").assign(0, 2)),
    (r"norm0: 2 ranks for 1 parts", lambda: plan("norm").assign(0, [0, 1])),
    (r"blocks: 3; the profile has blocks 0 to 0", lambda: plan("norm").assign(3, 0)),
    (r"blocks: -1; the profile has blocks 0 to 0", lambda: plan("norm").recompute(-1)),
    (r"unknown held 'zero3'", lambda: plan("norm").hold(..., "zero3")),  # type: ignore[arg-type]
    (r"steps: 'F0'; expected an object of class PlanStep",
     lambda: plan("norm").order(0, ["F0"])),  # type: ignore[list-item]
    (r"steps: 5; expected an object of class PlanStep",
     lambda: plan("norm").order(0, 5)),  # type: ignore[arg-type]
    (r"first: 'a'; expected an object of class PlanTask",
     lambda: plan("norm").before("a", "b")),  # type: ignore[arg-type]
    (r"blocks: 'b'; the profile has blocks 0 to 0",
     lambda: plan("norm").recompute("b")),  # type: ignore[arg-type]
    (r"blocks: \[0, \[0\]\]; the profile has blocks 0 to 0",
     lambda: plan("norm").recompute([0, [0]])),  # type: ignore[list-item]
    (r"ranks: 'x'; the plan has ranks 0 to 1", lambda: plan("norm").assign(0, "x")),  # type: ignore[arg-type]
    (r"ranks: 0\.5; the plan has ranks 0 to 1", lambda: plan("norm").assign(0, 0.5)),  # type: ignore[arg-type]
    (r"micro: 7, slice_: .*; the plan has numbers below 1 and 1", lambda: plan("norm").assign(0, 0, micro=7)),
    (r"unknown axis 5", lambda: plan("norm").cut(0, 5, 2)),  # type: ignore[arg-type]
    (r"unknown axis ''", lambda: plan("norm").cut(0, [], 2)),
    (r"data: 0; expected a number from 1", lambda: named("spatial", profile("norm"), 1, data=0)),
    (r"parts: '2'; expected a number from 1", lambda: named("co_shard", profile("mlp"), 1, parts="2")),
    (r"profile: 'p'; expected an object of class Profile",
     lambda: named("gpipe", "p", 1)),  # type: ignore[arg-type]
    (r"plan: 'p'; expected an object of class ModelPlan", lambda: prove("p")),  # type: ignore[arg-type]
    (r"stages: '2'; the profile has 2 blocks",
     lambda: plan("norm", "norm").stages("2")),  # type: ignore[arg-type]
    (r"stages: 3; the profile has 2 blocks", lambda: plan("norm", "norm").stages(3)),
    (r"stages: 0; the profile has 2 blocks", lambda: plan("norm", "norm").stages(0)),
    (r"unknown plan 'gpip'; did you mean 'gpipe'|unknown plan 'gpip'",
     lambda: named("gpip", profile("norm"), 1)),
    (r"unknown schedule '2f2b'", lambda: hybrid(profile("norm"), 1, schedule="2f2b")),  # type: ignore[arg-type]
    (r"plan: 1 stages x 2 data x 2 tensor; the job has 3 ranks",
     lambda: mesh(profile("norm"), 3, data=2, tensor=2)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "make"), REFUSED, ids=[text[:40] for text, _ in REFUSED])
def test_bad_statements_are_refused_with_what_was_expected(text: str, make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidArgument, match=text):
        make()


def moved(
    *statements: Callable[[ModelPlan], Any], kinds: tuple[str, ...] = ("norm", "mlp"), **options: Any
) -> ModelPlan:
    found = plan(*kinds, **options)
    for statement in statements:
        statement(found)
    return found


def halves(found: ModelPlan) -> None:
    """Cut the batch of all blocks."""
    found.cut(..., "batch", 2)
    found.assign(..., [0, 1])


def on_one(found: ModelPlan) -> None:
    found.assign(..., 0)


def place(block: int, at: tuple[int, ...], rank: int) -> Callable[[ModelPlan], None]:
    return lambda found: found.places[block].__setitem__(at, rank)


def cut(block: int, axis: str, ranks: list[int]) -> Callable[[ModelPlan], None]:
    def statement(found: ModelPlan) -> None:
        found.cut(block, axis, len(ranks))
        found.assign(block, ranks)

    return statement


def copies(block: int, ranks: list[int]) -> Callable[[ModelPlan], None]:
    def statement(found: ModelPlan) -> None:
        found.replicate(block, len(ranks))
        found.assign(block, ranks)

    return statement


def to(block: int, rank: int, **where: Any) -> Callable[[ModelPlan], None]:
    return lambda found: found.assign(block, rank, **where)


def drawing() -> ModelPlan:
    found = ModelPlan(profile("norm", random=True), 2)
    found.replicate(0, 2)
    found.assign(0, [0, 1])
    return found


def tied(held: Any = "whole", copies_of_last: int = 1) -> ModelPlan:
    """Return a plan whose first and last block share a parameter, on two ranks."""
    found = ModelPlan(profile("norm", "mlp", "norm", shared=("w",)), 2)
    found.replicate(2, copies_of_last)
    found.assign([0, 1], 0)
    found.assign(2, list(range(copies_of_last)) if copies_of_last > 1 else 1)
    found.hold(..., held)
    return found


def uneven_rows() -> ModelPlan:
    made = profile("norm", "norm")
    odd = made.blocks[0].model_copy(update={"shape": (ROWS + 1, LENGTH, WIDTH)})
    found = ModelPlan(made.model_copy(update={"blocks": (odd, made.blocks[1])}), 2, micro_batches=2)
    on_one(found)
    return found


def wider() -> ModelPlan:
    """Return a plan without parts for some ranks: 7 rows in 4 micro-batches, of which each is cut in two."""
    found = plan("norm", micro_batches=4)
    halves(found)
    return found


UNPROVED: list[tuple[str, Callable[[], ModelPlan]]] = [
    (r"F\(block 0, micro-batch 0, slice 0\) has no rank", lambda: moved()),
    (r"F\(block 1, micro-batch 0, slice 0\), part \(1,\) is on rank 2",
     lambda: moved(halves, place(1, (0, 0, 1), 2))),
    (r"F\(block 1, .*\) on rank 0: its parts are no neighbours",
     lambda: moved(to(0, 0), cut(1, "hidden", [0, 1, 0]))),
    (r"F\(block 0, .*\) on rank 1: it has two replicas", lambda: moved(copies(0, [1, 1]), to(1, 0))),
    (r"F\(block 0, micro-batch 0, slice 0\) on rank 1: it has no part, but its shard",
     lambda: moved(halves, place(0, (0, 0, 1), 0), lambda p: p.hold(..., "parameters"), micro_batches=2)),
    (r"F\(block 0, micro-batch 1, slice 0\) on rank 0: its parts of the parameters differ from task to task",
     lambda: moved(cut(0, "hidden", [0, 1]), lambda p: p.assign(0, [1, 0], micro=1), to(1, 0),
                   kinds=("linear", "norm"), micro_batches=2)),
    (r"F\(block 1, .*\) on rank 1: some of its parts of the parameters, but not all, are on rank 0, too",
     lambda: moved(to(0, 0), cut(1, "hidden", [0, 1]), lambda p: p.assign(1, [0, 0], micro=0),
                   lambda p: p.assign(1, [1, 2], micro=1), ranks=3, micro_batches=2)),
    (r"norm0: it draws random numbers", drawing),
    (r"norm0 and mlp1 and norm2 share a parameter; expected the same number of replicas",
     lambda: tied(copies_of_last=2)),
    (r"norm0: its w is in shards, one of them on rank 1, which has no part", lambda: tied("parameters")),
    (r"rank 1: F\(block 0, micro-batch 0, slice 0\) is in its order, but not on this rank",
     lambda: moved(on_one, lambda p: p.orders.update({1: [PlanTask(0, 0, 0, "F")]}))),
    (r"rank 0: F\(block 0, micro-batch 0, slice 0\) is 2 times in its order",
     lambda: moved(on_one, lambda p: p.order(0, [F(..., 0), F(0, 0), B(..., 0)]))),
    (r"rank 0: B\(block 0, micro-batch 0, slice 0\) is not in its order",
     lambda: moved(on_one, lambda p: p.order(0, [F(..., 0), B(1, 0)]))),
    (r"rank 0: W\(block 0, micro-batch 0, slice 0\) is not in its order",
     lambda: moved(on_one, lambda p: p.split_backward(0), lambda p: p.order(0, [F(..., 0), B(..., 0)]))),
    (r"norm0 on rank 0: a part without elements", wider),
    (r"norm0: its output has 8 items along dimension 0, not 7", uneven_rows),
    (r"before: F\(block 0, micro-batch 3, slice 0\) is no task of the plan",
     lambda: moved(on_one, lambda p: p.before(PlanTask(0, 3, 0, "F"), PlanTask(0, 0, 0, "F")))),
    (r"order: tasks wait for each other: .*B\(block 1, .*\) on rank 0",
     lambda: moved(on_one, lambda p: p.before(PlanTask(1, 0, 0, "B"), PlanTask(0, 0, 0, "F")))),
    (r"order: tasks wait for each other: .*F\(block 1, .*\) on rank",
     lambda: moved(to(0, 0), cut(1, "hidden", [0, 1]),
                   lambda p: p.order(0, [F(..., 0), F(..., 1), B(..., 0), B(..., 1)]),
                   lambda p: p.order(1, [F(..., 1), F(..., 0), B(..., 0), B(..., 1)]), micro_batches=2)),
    (r"B\(block 0, micro-batch 0, slice 0\) on rank 0: it needs B\(block 0, .*, slice 1\), which is",
     lambda: moved(to(0, 0), to(0, 1, slice_=1), to(1, 0), kinds=("attention", "norm"), slices=2)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "make"), UNPROVED, ids=[text[:40] for text, _ in UNPROVED])
def test_wrong_plans_are_refused_with_task_and_rank(text: str, make: Callable[[], ModelPlan]) -> None:
    wrong = make()
    with pytest.raises(InvalidArgument, match=text):
        prove(wrong)


# -- stages -------------------------------------------------------------------------------------------------


def test_stages_have_the_least_largest_weight_of_all_partitions() -> None:
    draw = random.Random(4)
    for _ in range(200):
        count = draw.randint(1, 9)
        stages = draw.randint(1, count)
        weights = [draw.choice([0.0, draw.random(), draw.random() * 9]) for _ in range(count)]
        found = plan(*["norm"] * count).stages(stages, weights)
        assert [index for stage in found for index in stage] == list(range(count))
        assert all(len(stage) for stage in found)
        best = min(
            max(sum(weights[a:b]) for a, b in itertools.pairwise([0, *cuts, count]))
            for cuts in itertools.combinations(range(1, count), stages - 1)
        )
        assert max(sum(weights[index] for index in stage) for stage in found) == pytest.approx(best)


# -- schedules ----------------------------------------------------------------------------------------------


def pipeline(stages: int, micro_batches: int, **options: Any) -> Profile:
    """Return a profile of one block per stage: 1 s forward, 2 s backward for each micro-batch."""
    rows = {"batch": BATCH.model_copy(update={"parts": (2 * micro_batches,)})}
    times = {"forward": 1.0 * micro_batches, "backward": 2.0 * micro_batches}
    shape = (2 * micro_batches, LENGTH, WIDTH)
    return profile(*["norm"] * stages, rows=2 * micro_batches, axes=rows, shape=shape, **times, **options)


SHAPES = [(2, 2), (2, 5), (3, 3), (4, 4), (4, 7), (4, 12), (5, 2)]


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
def test_schedules_take_the_time_of_closed_forms(stages: int, micro_batches: int) -> None:
    given = pipeline(stages, micro_batches)

    def ideal(schedule: Any) -> float:
        found = hybrid(given, stages, stages=stages, micro_batches=micro_batches, schedule=schedule)
        return prove(found).ideal

    whole = (micro_batches + stages - 1) * 3  # seconds of a forward and a backward pass
    assert ideal("gpipe") == pytest.approx(whole)
    assert ideal("1f1b") == pytest.approx(whole)
    assert ideal("eager-1f1b") == pytest.approx(whole)
    inputs, weights = 2 * 0.70, 2 * 0.53
    work, bubble = micro_batches * (1 + inputs + weights), 1 + inputs - weights
    if micro_batches >= 2 * stages - 1:
        # ZB-H1 of Qi et al. 2023; the first stage has no gradients of inputs, so the second may be the last
        least, most = 1 + (stages - 2) * bubble, (stages - 1) * bubble
        assert work + least - 1e-9 <= ideal("zero-bubble") <= work + most + 1e-9
    else:
        assert work <= ideal("zero-bubble") <= work + (stages - 1) * (1 + inputs)


@pytest.mark.parametrize(
    ("ranks", "groups", "loops"), [(2, 1, 2), (2, 3, 2), (3, 2, 2), (4, 2, 2), (4, 2, 3)]
)
def test_interleaving_divides_the_bubble_by_the_loops(ranks: int, groups: int, loops: int) -> None:
    micro_batches = groups * ranks
    found = prove(interleaved(pipeline(ranks * loops, micro_batches), ranks, micro_batches, loops))
    assert found.ideal == pytest.approx(3 * (micro_batches * loops + ranks - 1))


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
def test_kept_micro_batches_are_those_of_the_papers(stages: int, micro_batches: int) -> None:
    def kept(schedule: Any, stage: int) -> int:
        given = pipeline(stages, micro_batches)
        found = hybrid(given, stages, stages=stages, micro_batches=micro_batches, schedule=schedule)
        signs = [{"F": 1, "B": -1, "W": 0}[task.kind] for task in found.order_of(stage)]
        return int(np.cumsum(signs).max())

    for stage in range(stages):
        assert kept("gpipe", stage) == micro_batches
        assert kept("1f1b", stage) == min(stages - stage, micro_batches)
        assert kept("zero-bubble", stage) == min(stages - stage, micro_batches)
        assert kept("eager-1f1b", stage) == min(2 * (stages - stage) - 1, micro_batches)


# -- layouts ------------------------------------------------------------------------------------------------


def boxes(found: ModelPlan, block: int, end: Any, micro: int = 0, **options: Any) -> dict[int, Any]:
    layout = PlanTensors(found).end(block, end, micro, 0, **options)
    bounds = np.stack([layout.held.lows, layout.held.highs], axis=2).tolist()
    return dict(zip(layout.owners.tolist(), bounds, strict=True))


def test_layouts_of_cuts_are_as_by_hand() -> None:
    whole = [[0, ROWS], [0, LENGTH], [0, WIDTH]]
    rows = moved(cut(0, "batch", [1, 0, 2]), to(1, 0), ranks=3)
    assert boxes(rows, 0, "input") == {
        1: [[0, 2], *whole[1:]], 0: [[2, 4], *whole[1:]], 2: [[4, 7], *whole[1:]]
    }  # fmt: skip
    assert boxes(rows, 1, "input") == {0: whole}

    parts = moved(cut(0, "hidden", [2, 0]), to(1, 0), kinds=("linear", "norm"), ranks=3)
    assert boxes(parts, 0, "input") == {2: whole, 0: whole}
    assert boxes(parts, 0, "output") == {2: [*whole[:2], [0, 2]], 0: [*whole[:2], [2, 5]]}
    gradient = PlanTensors(parts).end(0, "input", 0, 0, gradient=True)
    assert dict(zip(gradient.owners.tolist(), gradient.addends.tolist(), strict=True)) == {2: 0, 0: 1}

    sums = moved(lambda p: p.cut(1, "hidden", 2, "sequence"), lambda p: p.assign(1, [0, 1]), to(0, 0))
    assert boxes(sums, 1, "output") == {0: [whole[0], [0, 3], whole[2]], 1: [whole[0], [3, 6], whole[2]]}

    micro = moved(cut(0, "batch", [0, 1]), to(1, 0), micro_batches=2)
    assert boxes(micro, 0, "input", 0) == {0: [[0, 1], *whole[1:]], 1: [[1, 3], *whole[1:]]}
    assert boxes(micro, 0, "input", 1) == {0: [[0, 2], *whole[1:]], 1: [[2, 4], *whole[1:]]}
    assert [PlanTensors(micro).rows(0, 1, 0, rank) for rank in (0, 1)] == [(3, 5), (5, 7)]


def test_steps_are_those_of_the_rank_in_the_order_of_the_pass() -> None:
    found = plan("norm", "mlp", "norm")
    found.split_backward(1)
    found.assign([0, 1], 0)
    found.assign(2, 1)
    found.order([0, 1], [F(..., 0), B(..., 0), W(..., 0)])
    texts = [str(task) for task in found]
    assert texts == [
        f"{kind}(block {index}, micro-batch 0, slice 0)"
        for kind, index in (("F", 0), ("F", 1), ("B", 1), ("B", 0), ("W", 1), ("F", 2), ("B", 2))
    ]


def test_ranks_that_sum_within_a_task_join_it_alike() -> None:
    """Check a plan in which rank 1 waits for block 2 of another micro-batch between two blocks of rank 0."""
    kinds = ("linear", "mlp", "linear", "linear", "norm")
    plan = ModelPlan(profile(*kinds), 3, micro_batches=2)
    plan.replicate(0, 2)
    plan.cut(1, "hidden", 2)
    plan.cut(2, "batch", 2)
    places: list[Any] = [[0, 1], [0, 1], [0, 2], 1, 1]
    for number, ranks in enumerate(places):
        plan.assign(number, ranks)
    back = [B(4, 0), B(3, 0), B(1, 0), B(0, 0), B(4, 1), B(3, 1), B(1, 1), B(0, 1)]
    plan.order(1, [F(0, 0), F(1, 0), F(0, 1), F(3, 0), F(4, 0), F(1, 1), F(3, 1), F(4, 1), *back])
    plan.order(0, [F([0, 1, 2], 0), F([0, 1], 1), F(2, 1), B(..., 0), B(..., 1)])
    firsts = prove(plan).firsts
    assert firsts[PlanTask(1, 1, 0, "F"), 0].block == firsts[PlanTask(1, 1, 0, "F"), 1].block == 1
    assert firsts[PlanTask(4, 0, 0, "F"), 1].block == 3
