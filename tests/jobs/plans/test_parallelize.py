"""Plans that run, against one process: losses, gradients and parameters."""

from __future__ import annotations

from typing import Any

import pytest
from jobs.plans.plan_training import checkpoint_of_odd, fail_on_one_rank, refusals, train
from ranks import run_ranks

from mcr_plus.plans.named import NAMED
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
Spec = dict[str, Any]
MADE_FOR = {"expert_parallel", "tables_parallel", "terapipe", "interlaced"}
"""Plans for some models alone: test_dealt.py, test_slices.py, test_made_for_models.py."""


def every_plan(case: str) -> list[Spec]:
    """Return the named plans of any model, with optimizers and numbers of micro-batches in turn."""
    found = []
    left = MADE_FOR - {"terapipe"} if case == "gpt" else MADE_FOR
    for number, name in enumerate(name for name in NAMED if name not in left):
        options = {} if number % 3 else {"micro_batches": 3 if number > 5 else 2}
        found.append(
            {"case": case, "plan": name, "optimizer": ("adamw", "sgd")[number % 2], "options": options}
        )
    return found


def hybrids(case: str) -> list[Spec]:
    """Return plans of four ranks in two dimensions."""
    options: list[Spec] = [
        {"data": 2, "tensor": 2},
        {"data": 2, "tensor": 2, "outside": "sequence", "held": "parameters"},
        {"data": 2, "tensor": 2, "held": "optimizer", "recompute": True},
        {"stages": 2, "data": 2, "micro_batches": 3},
        {"stages": 2, "data": 2, "micro_batches": 2, "held": "optimizer", "schedule": "zero-bubble"},
        {"stages": 2, "tensor": 2, "outside": "sequence", "micro_batches": 2, "recompute": True},
        {"stages": 2, "tensor": 2, "micro_batches": 3, "schedule": "eager-1f1b"},
        {"stages": 2, "data": 2, "micro_batches": 3, "sharded": [2, 3], "held": "optimizer"},
        {
            "data": 2,
            "tensor": 2,
            "outside": "batch",
            "tensor_blocks": [1, 3],
            "held": "optimizer",
            "micro_batches": 2,  # of 7 and 8 items
        },
        {
            "stages": 2,
            "tensor": 2,
            "outside": "batch",
            "tensor_blocks": [2],
            "sharded": [1, 3],
            "recompute": True,
        },
    ]
    if case != "gpt":  # its tied embedding is in two stages
        shards = {"stages": 2, "data": 2, "micro_batches": 2, "held": "parameters"}
        options += [shards, {**shards, "schedule": "zero-bubble"}]
    kinds = ("adamw", "sgd")
    return [
        {"case": case, "plan": "hybrid", "optimizer": kinds[number % 2], "options": each}
        for number, each in enumerate(options)
    ]


def check(specs: list[Spec], ranks: int, steps: int, config: Any = None) -> None:
    results = run_ranks(train, ranks, args=[specs, steps, config])
    assert [result.value for result in results] == [[]] * ranks


@needs_mpi
@pytest.mark.short("gpt-2]")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", ["gpt", "mlp", "separate", "grouped"])
def test_named_plans_train_like_one_process(case: str, ranks: int) -> None:
    check([each for each in every_plan(case) if fits(each, ranks)], ranks, 3)


def fits(spec: Spec, ranks: int) -> bool:
    """Return whether the model has parts for the ranks: grouped attention has three."""
    return (
        spec["case"] != "grouped" or ranks < 4 or spec["plan"] not in ("tensor_parallel", "sequence_parallel")
    )


@needs_mpi
@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "every"), [("gpt", 4), ("gpt", 1), ("mlp", 1), ("separate", 1), ("grouped", 1)]
)
def test_plans_in_two_dimensions_train_like_one_process(case: str, every: int) -> None:
    check(hybrids(case)[1::every] if every > 1 else hybrids(case), 4, 3)


@needs_mpi
@pytest.mark.long
@pytest.mark.parametrize("case", ["gpt", "grouped"])
def test_twenty_steps(case: str) -> None:
    check([*every_plan(case), *hybrids(case)][::2] if case == "gpt" else hybrids(case), 4, 20)


@needs_mpi
@pytest.mark.long
def test_ranks_without_blocks_and_low_precision() -> None:
    idle = [{"case": case, "plan": "idle", "optimizer": "sgd"} for case in ("gpt", "mlp")]
    low = [
        {"case": "bfloat16", "plan": name, "optimizer": "sgd", "close": 0.2}
        for name in ("zero1", "tensor_parallel", "one_f_one_b")
    ]
    check(idle + low, 3, 4)


@needs_mpi
@pytest.mark.long
def test_transfers_through_a_codec_train() -> None:
    """Check that the rule finds the transfers: it moves losses, not far."""
    config = {
        "version": 1,
        "backends": ["gloo"],
        "pipeline": [{"compress": {"codec": "none"}}, {"select": {}}, {"dispatch": {}}],
        "rules": [{"match": {"tag": "plan.forward"}, "compress": {"codec": "int8_block"}}],
    }
    spec = {"case": "separate", "plan": "one_f_one_b", "optimizer": "sgd"}
    check([{**spec, "close": 0.05}], 2, 4, config)
    results = run_ranks(train, 2, args=[[spec], 4, config])
    assert any("loss" in each for each in results[1].value)


@needs_mpi
def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    one, two = (result.value for result in run_ranks(refusals, 2))
    assert one == two
    again = one.pop("again")
    assert again.startswith("InvalidArgument: model: ")
    assert again.endswith(" has no memory, as after an earlier `parallelize`; expected a new model")
    stranger = "optimizer: it has parameters that the model has not; expected one of this model"
    parts = "model: its parameters have other names, shapes or dtypes than the profile's"
    assert one == {
        "batch": "InvalidArgument: batch: shapes [[9, 6]]; the plan is for 8 items",
        "state": "InvalidArgument: optimizer: it has state already; expected one before its first step",
        "stranger": f"InvalidArgument: {stranger}",
        "once": "",
        "ranks": "InvalidArgument: plan: made for 3 ranks; the job has 2",
        "kind": "InvalidArgument: plan: 'data_parallel'; expected an object of class ModelPlan",
        "shapes": f"InvalidArgument: {parts}",
        "modules": f"InvalidArgument: {parts}",
        "proof": "InvalidArgument: rank 1: B(block 2, micro-batch 1, slice 0) is not in its order",
        "way": "Unsupported: model: its forward does not call parts.0, as in the profile",
    }


@needs_mpi
def test_a_checkpoint_has_the_keys_of_a_plain_state_dict() -> None:
    assert [result.value for result in run_ranks(checkpoint_of_odd, 2)] == [True, True]


def test_a_block_that_fails_on_one_rank_ends_the_other() -> None:
    zero, one = run_ranks(fail_on_one_rank, 2, via="torch", check=False, timeout=60)
    assert "ZeroDivisionError: in part 3" in one.stderr
    assert "tag=plan.backward" in zero.stderr
    assert "rank 1 has given up: it left the job after an error" in zero.stderr
