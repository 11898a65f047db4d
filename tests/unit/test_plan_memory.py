"""Memory that plans need, in closed form on profiles made by hand."""

from __future__ import annotations

import pytest
from plan_blocks import ITEMS, chain, layer

from mcr_plus.errors import InvalidArgument
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.language import Held, ModelPlan, PlanTask
from mcr_plus.plans.memory import check_memory, memory_of
from mcr_plus.plans.named import Schedule, co_shard, hybrid, named
from mcr_plus.plans.proof import ProvedPlan, prove, seconds_of

KIB = 1 << 10
PARAMS, SAVED, OUTPUT = 64 * KIB, 4096 * KIB, 256 * KIB
FIXED = 4 * PARAMS  # parameters, gradients, and twice as much state
STAGES, MICRO = 4, 8


def profile(blocks: int = STAGES, **options: int) -> Profile:
    return chain([layer(n, params=PARAMS, saved=SAVED, output=OUTPUT, **options) for n in range(blocks)])


def peaks(plan: ModelPlan) -> list[int]:
    """Return the peak of each rank beyond its parameters, gradients and state."""
    proved = prove(plan)
    uses = [memory_of(proved, rank) for rank in range(plan.ranks)]
    return [use.peak - use.parameters - use.gradients - use.optimizer for use in uses]


def piece(stage: int) -> int:
    """Return what a stage keeps of a micro-batch: saved activations, and what comes and what is sent."""
    return (SAVED + OUTPUT * ((stage > 0) + (stage < STAGES - 1))) // MICRO


def test_one_f_one_b_keeps_a_micro_batch_for_each_stage_that_follows() -> None:
    kept: dict[Schedule, list[int]] = {
        "1f1b": [min(STAGES - stage, MICRO) for stage in range(STAGES)],
        "gpipe": [MICRO] * STAGES,
        "eager-1f1b": [min(2 * (STAGES - 1 - stage) + 1, MICRO) for stage in range(STAGES)],
    }
    # In a backward pass a gradient has come, and inputs of later micro-batches, where some are left.
    coming: dict[Schedule, list[int]] = {
        "1f1b": [1, 2, 2, 1],
        "gpipe": [1, 1, 1, 0],
        "eager-1f1b": [1, 3, 2, 1],
    }
    for schedule, alive in kept.items():
        plan = hybrid(profile(), STAGES, stages=STAGES, micro_batches=MICRO, schedule=schedule)
        expected = [
            alive[stage] * piece(stage) + coming[schedule][stage] * OUTPUT // MICRO for stage in range(STAGES)
        ]
        assert peaks(plan) == expected, schedule


def test_few_micro_batches_are_all_that_is_kept() -> None:
    plan = hybrid(profile(), STAGES, stages=STAGES, micro_batches=2)
    piece_of_two = [piece(stage) * MICRO // 2 for stage in range(STAGES)]
    assert peaks(plan) == [min(STAGES - s, 2) * piece_of_two[s] + OUTPUT // 2 for s in range(STAGES)]


def test_transient_bytes_are_there_while_a_task_runs() -> None:
    """Gradients of micro-batches accumulate: each is gone before the next."""
    for transient in (0, 1024 * KIB):
        plan = named("data_parallel", profile(2, transient=transient), 2, micro_batches=2)
        # Of a micro-batch on one of two ranks: a quarter of the batch.
        assert peaks(plan) == [(2 * SAVED + transient) // 4] * 2


def test_recomputed_blocks_keep_their_input_alone() -> None:
    """The first block has its input anyway; while one runs again, all that it saves is there."""
    plan = hybrid(profile(6), 1, recompute=...)
    assert peaks(plan) == [5 * OUTPUT + SAVED]
    plan = hybrid(profile(6), 1, recompute=[1, 2])
    assert peaks(plan) == [4 * SAVED + 2 * OUTPUT]  # the others: no more than in the last block's task
    plan = named("gpipe", profile(), STAGES, micro_batches=MICRO)
    inputs = [0, OUTPUT, OUTPUT, OUTPUT]
    sent = [OUTPUT, OUTPUT, OUTPUT, 0]
    again = [SAVED + each for each in sent]
    # All inputs; the outputs that are sent, made by forward passes, which keep nothing else; a gradient.
    expected = [inputs[s] + (again[s] + sent[s]) // MICRO for s in range(STAGES)]
    assert peaks(plan) == expected


@pytest.mark.parametrize(
    ("held", "shares"), [("whole", (1, 1, 1)), ("optimizer", (1, 1, 4)), ("parameters", (4, 1, 4))]
)
def test_shards_of_zero(held: Held, shares: tuple[int, int, int]) -> None:
    """Gradients are whole until they are summed; whole parameters of one block are gathered at a time."""
    plan = hybrid(profile(3), 4, data=4, held=held)
    use = memory_of(prove(plan), 2)
    whole = 3 * PARAMS, 3 * PARAMS, 6 * PARAMS
    assert (use.parameters, use.gradients, use.optimizer) == tuple(map(int.__floordiv__, whole, shares))
    gathered = PARAMS if held == "parameters" else 0
    assert peaks(plan) == [3 * SAVED // 4 + gathered] * 4


def test_shards_of_cut_parameters_are_gathered_to_the_part_of_a_rank() -> None:
    plan = hybrid(profile(3), 4, data=2, tensor=2, held="parameters")
    assert peaks(plan) == [(3 * SAVED // 2 * 3 + PARAMS * 3) // 4] * 4


def test_a_pass_gathers_the_shards_that_it_shares_with_another_block() -> None:
    """The second block uses the parameters of the first one alone, as a head does those of its embedding."""
    first, second = profile(2).blocks
    head = {"params": {}, "gradients": 0, "optimizer": 0, "shared": ("b0.w",)}
    blocks = first.model_copy(update={"shared": ("b0.w",)}), second.model_copy(update=head)
    plan = hybrid(chain(blocks), 2, data=2, held="parameters")
    assert memory_of(prove(plan), 0).parameters == PARAMS // 2
    assert peaks(plan) == [2 * SAVED // 2 + PARAMS] * 2


def test_tensor_cuts_divide_half_of_a_block() -> None:
    plan = named("tensor_parallel", profile(3), 4)
    use = memory_of(prove(plan), 3)
    own = PARAMS // 2 + PARAMS // 2 // 4
    assert (use.parameters, use.gradients, use.optimizer) == (3 * own, 3 * own, 6 * own)
    assert peaks(plan) == [3 * (SAVED // 2 + SAVED // 2 // 4)] * 4


def test_heads_that_ranks_do_not_divide_make_larger_parts() -> None:
    """Of six heads, four ranks have one, two, one and two."""
    proved = prove(hybrid(profile(2, heads=6), 4, tensor=4))
    for rank, heads in enumerate((1, 2, 1, 2)):
        assert memory_of(proved, rank).parameters == round(2 * (PARAMS / 2 + PARAMS / 2 * heads / 6))
        seconds = seconds_of(proved.plan, proved.tensors, PlanTask(0, 0, 0, "F"), rank)
        assert seconds == pytest.approx(0.01 * heads / 6)
    assert peaks(proved.plan) == pytest.approx([SAVED * (1 + heads / 6) for heads in (1, 2, 1, 2)], abs=2)


@pytest.mark.parametrize(("how", "times"), [("sum", 3), ("exchange", 0)])
def test_inputs_are_gathered_for_sums_and_not_where_elements_go_to_experts(how: str, times: int) -> None:
    """Ranks that share the batch gather it for a cut layer; an expert gets about as much as it gives."""
    blocks = [layer(number, saved=SAVED, params=PARAMS, output=OUTPUT) for number in range(3)]
    heads = blocks[1].axes["heads"].model_copy(update={"how": how})
    blocks[1] = blocks[1].model_copy(update={"axes": blocks[1].axes | {"heads": heads}})
    plan = hybrid(chain(blocks), 4, tensor=4, outside="batch", tensor_blocks=[1])
    assert peaks(plan) == [3 * SAVED // 4 + times * OUTPUT // 4] * 4


def test_co_shards_keep_the_activations_of_one_part_at_a_time() -> None:
    """Half of what a block saves is made again part by part; all of the parameters stay."""
    plan = co_shard(profile(3), 1, parts=4)
    use = memory_of(prove(plan), 0)
    assert use.parameters == 3 * PARAMS
    assert peaks(plan) == [3 * SAVED // 2 + SAVED // 2 // 4]


def test_peaks_are_the_most_over_time_and_the_bound_is_checked() -> None:
    proved: ProvedPlan = prove(hybrid(profile(6), 2, stages=2, micro_batches=4))
    use = memory_of(proved, 0)
    assert use.peak == max(use.bytes)
    assert list(use.times) == sorted(use.times)
    assert use.bytes[0] == use.bytes[-1] == use.parameters + use.gradients + use.optimizer == 3 * FIXED
    most = max(memory_of(proved, rank).peak for rank in range(2))
    check_memory(proved, most)
    with pytest.raises(InvalidArgument, match=r"memory: rank 0 needs .* 1 B more than"):
        check_memory(proved, most - 1)


def test_items_that_do_not_divide_make_larger_parts() -> None:
    """Of 16 items on three ranks, the last one has six."""
    plan = named("data_parallel", profile(2), 3)
    assert peaks(plan) == [round(2 * SAVED * items / ITEMS) for items in (5, 5, 6)]
