"""Plans of papers, each in the language of `language`.

Every function returns a plan of a profile on `ranks` ranks. Combined plans are made by `hybrid`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Literal

import numpy as np

from mcr_plus.errors import InvalidArgument, unknown
from mcr_plus.layout.regions import Ints
from mcr_plus.plans.blocks import ModelBlock, Profile
from mcr_plus.plans.language import B, Blocks, F, Held, ModelPlan, PlanStep, W, positive

Schedule = Literal["gpipe", "1f1b", "eager-1f1b", "zero-bubble"]
_INNER: Final = ("heads", "hidden", "experts", "tables", "rows")
"""Axes of parameters whose parts add up or exchange elements."""


# -- transforms and places -----------------------------------------------------------------------------------


def inner_cuts(block: ModelBlock, kinds: Collection[str]) -> list[str]:
    """Return the axes of these kinds (`how`) along which `tensor_cut` can cut a block's parameters."""
    return [axis for axis in _INNER if axis in block.axes and block.axes[axis].how in kinds]


def tensor_cut(
    plan: ModelPlan, blocks: Blocks, parts: int, outside: str | None = None, tensor_blocks: Blocks = ()
) -> None:
    """Cut blocks' parameters where they may be cut; others along `outside`, or into replicas.

    With `batch` outside, experts and tables are dealt, parameters of `tensor_blocks` are cut, too, and all
    other blocks are cut along the batch.
    """
    own = plan.indices(tensor_blocks)
    for index in plan.indices(blocks) if parts > 1 else []:
        block = plan.blocks[index]
        if outside == "batch":
            kinds = {"sum", "exchange"} if index in own else {"exchange"}
        else:
            kinds = set() if block.shared else {"sum", "exchange"}
        if inner := inner_cuts(block, kinds):
            needed = "batch" if any(block.axes[axis].how == "exchange" for axis in inner) else None
            if needed and "rows" in inner:
                inner.remove("rows")  # whose input are indices, which nothing gathers
            can = outside in block.axes and "rows" not in block.axes
            plan.cut(index, inner, parts, outside if can else needed)
        elif outside in block.axes and (
            outside == "batch" or (index and not block.reads_batch and not block.shared)
        ):
            plan.cut(index, outside, parts)
        else:
            plan.replicate(index, parts)


def mesh(
    profile: Profile, ranks: int, *, data: int = 1, tensor: int = 1, stages: Sequence[range] | int = 1,
    micro_batches: int = 1, outside: str | None = None, held: Held = "whole", name: str = "plan",
    loops: int = 1, slices: int | Sequence[int] = 1, tensor_blocks: Blocks = (),
) -> tuple[ModelPlan, list[range], Ints]:  # fmt: skip
    """Return a plan without orders whose ranks are a mesh [stages, data, tensor], its stages, and the mesh.

    With `loops`, each rank of the first dimension has several stages, in turn.
    """
    plan = ModelPlan(profile, ranks, micro_batches=micro_batches, slices=slices, name=name)
    cuts = plan.stages(stages * loops) if isinstance(stages, int) else list(stages)
    count = len(cuts) // loops
    if count * data * tensor != ranks:
        raise InvalidArgument(
            f"{name}: {count} stages x {data} data x {tensor} tensor; the job has {ranks} ranks"
        )
    if data > 1:
        plan.cut(..., "batch", data)
    tensor_cut(plan, ..., tensor, outside, tensor_blocks)
    plan.hold(..., held)
    at = np.arange(ranks).reshape(count, data, tensor)
    for number, stage in enumerate(cuts):
        plan.assign(stage, at[number % count].ravel())
    return plan, cuts, at


# -- one stage ----------------------------------------------------------------------------------------------


def data_parallel(
    profile: Profile, ranks: int, micro_batches: int = 1, held: Held = "whole", name: str = "data_parallel"
) -> ModelPlan:
    """Cut the batch; gradients are summed (`held`: ZeRO, Rajbhandari et al. 2020, arXiv 1910.02054)."""
    return hybrid(profile, ranks, data=ranks, micro_batches=micro_batches, held=held, name=name)


def zero1(profile: Profile, ranks: int, micro_batches: int = 1) -> ModelPlan:
    """Cut the batch, and the optimizer's state."""
    return data_parallel(profile, ranks, micro_batches, "optimizer", "zero1")


def zero3(profile: Profile, ranks: int, micro_batches: int = 1) -> ModelPlan:
    """Cut the batch and all parameters, which are gathered block by block."""
    return data_parallel(profile, ranks, micro_batches, "parameters", "zero3")


def tensor_parallel(profile: Profile, ranks: int, micro_batches: int = 1) -> ModelPlan:
    """Cut heads and hidden units (Megatron-LM; Shoeybi et al. 2019, arXiv 1909.08053)."""
    return hybrid(profile, ranks, tensor=ranks, micro_batches=micro_batches, name="tensor_parallel")


def sequence_parallel(profile: Profile, ranks: int, micro_batches: int = 1) -> ModelPlan:
    """Cut heads and hidden units, and the sequence in between (Korthikanti et al. 2022, arXiv 2205.05198)."""
    return hybrid(
        profile, ranks, tensor=ranks, micro_batches=micro_batches, outside="sequence",
        name="sequence_parallel",
    )  # fmt: skip


def by_kind(
    profile: Profile, ranks: int, axis_of: Callable[[ModelBlock, int], str], *, name: str,
    micro_batches: int = 1, data: int = 1,
) -> ModelPlan:  # fmt: skip
    """Cut the batch among `data` groups, and each block within them along its own axis, or into replicas.

    `axis_of`: of a block and a number of parts; replicas where it has fewer, or no such axis.
    """
    plan = ModelPlan(profile, ranks, micro_batches=micro_batches, name=name)
    parts, rest = divmod(ranks, positive(data, "data"))
    if rest:
        raise InvalidArgument(f"{name}: {ranks} ranks in {data} groups")
    for index, block in enumerate(plan.blocks):
        if data > 1:
            plan.cut(index, "batch", data)
        axis = axis_of(block, parts)
        many = block.axes[axis].parts[0] if axis in block.axes else 0
        if many // (data * micro_batches if axis == "batch" else 1) < parts:
            plan.replicate(index, parts)
        else:
            plan.cut(index, axis, parts, "batch" if block.axes[axis].how == "exchange" else None)
        plan.assign(index, np.arange(ranks))
    return plan


def spatial(profile: Profile, ranks: int, micro_batches: int = 1, data: int = 1) -> ModelPlan:
    """Cut volumes into slabs where blocks have them, and the batch elsewhere.

    Dryden et al. 2019, arXiv 1903.06681; with `data`, Oyama et al. 2020, arXiv 2007.12856.
    """

    def axis_of(block: ModelBlock, parts: int) -> str:
        slabs = min(block.axes["space"].parts[0], block.shape[2]) if "space" in block.axes else 0
        return "space" if slabs >= parts else "batch"

    return by_kind(profile, ranks, axis_of, micro_batches=micro_batches, data=data, name="spatial")


def splitbrain(profile: Profile, ranks: int, micro_batches: int = 1, data: int = 1) -> ModelPlan:
    """Cut the batch for convolutions, and columns of dense layers (Lai et al. 2021, arXiv 2112.15317)."""

    def axis_of(block: ModelBlock, parts: int) -> str:
        hidden = block.axes.get("hidden")
        wide = "Linear" in block.kind and hidden and hidden.how == "columns" and hidden.parts[0] >= parts
        return "hidden" if wide else "batch"

    return by_kind(profile, ranks, axis_of, micro_batches=micro_batches, data=data, name="splitbrain")


def _dealt(profile: Profile, ranks: int, micro_batches: int, data: int, axis: str, name: str) -> ModelPlan:
    if not any(axis in block.axes for block in profile.blocks):
        raise InvalidArgument(f"{name}: no block has {axis}")

    def axis_of(block: ModelBlock, _: int) -> str:
        return axis if axis in block.axes else "batch"

    return by_kind(profile, ranks, axis_of, micro_batches=micro_batches, data=data, name=name)


def expert_parallel(profile: Profile, ranks: int, micro_batches: int = 1, data: int = 1) -> ModelPlan:
    """Cut the batch, and deal experts (GShard; Lepikhin et al. 2020, arXiv 2006.16668)."""
    return _dealt(profile, ranks, micro_batches, data, "experts", "expert_parallel")


def tables_parallel(profile: Profile, ranks: int, micro_batches: int = 1, data: int = 1) -> ModelPlan:
    """Cut the batch, and deal embedding tables (DLRM; Naumov et al. 2019, arXiv 1906.00091)."""
    return _dealt(profile, ranks, micro_batches, data, "tables", "tables_parallel")


def co_shard(profile: Profile, ranks: int, parts: int = 4, micro_batches: int = 1) -> ModelPlan:
    """Cut heads and hidden units on each rank, which runs the parts in turn and again for the backward pass.

    SuperScaler's co-shard (arXiv 2301.08984): activations of one part at a time, without communication.
    """
    plan = ModelPlan(profile, ranks, micro_batches=micro_batches, name="co_shard")
    if ranks > 1:
        plan.cut(..., "batch", ranks)
    for index, block in enumerate(plan.blocks):
        if inner := [
            axis for axis in ("heads", "hidden") if axis in block.axes and block.axes[axis].how == "sum"
        ]:
            plan.cut(
                index, inner, min(positive(parts, "parts"), *(block.axes[axis].parts[0] for axis in inner))
            )
        each = int(np.prod(plan.parts(index))) // ranks
        plan.assign(index, np.repeat(np.arange(ranks), each))
    return plan


# -- pipelines ----------------------------------------------------------------------------------------------


def schedule_steps(
    schedule: Schedule, stage: int, stages: int, micro_batches: int, blocks: Blocks = ...
) -> list[PlanStep]:
    """Return the order of a stage.

    `gpipe`: Huang et al. 2019, arXiv 1811.06965. `1f1b`: Narayanan et al. 2021, arXiv 2104.04473.
    `eager-1f1b`: twice as many micro-batches ahead, so that transfers overlap (Alpa's cross-mesh pipelines;
    Zhuang et al. 2023, arXiv 2211.05322). `zero-bubble`: ZB-H1 of Qi et al. 2023, arXiv 2401.10241.
    """
    last = micro_batches
    if schedule == "gpipe":
        return [F(blocks, m) for m in range(last)] + [B(blocks, m) for m in range(last)]
    ahead = stages - 1 - stage
    ahead = min(2 * ahead if schedule == "eager-1f1b" else ahead, last)
    steps = [F(blocks, m) for m in range(ahead)]
    waiting = stage if schedule == "zero-bubble" else 0  # W begins once this many B are done
    for m in range(last):
        steps += [F(blocks, m + ahead)] if m + ahead < last else []
        steps.append(B(blocks, m))
        if schedule == "zero-bubble" and m >= waiting:
            steps.append(W(blocks, m - waiting))
    if schedule == "zero-bubble":
        steps += [W(blocks, m) for m in range(max(last - waiting, 0), last)]
    return steps


def hybrid(
    profile: Profile, ranks: int, *, data: int = 1, tensor: int = 1, stages: Sequence[range] | int = 1,
    micro_batches: int = 1, schedule: Schedule = "1f1b", outside: str | None = None, held: Held = "whole",
    recompute: Blocks = (), sharded: Blocks = (), tensor_blocks: Blocks = (),
    slices: int | Sequence[int] = 1, name: str = "hybrid",
) -> ModelPlan:  # fmt: skip
    """Cut data and parameters within the stages of a pipeline.

    `sharded`: blocks whose parameters are in shards. `tensor_blocks`: with `batch` outside, see `tensor_cut`.
    With slices of sequences, all forward passes come before backward ones, whatever `schedule` is.
    """
    plan, cuts, at = mesh(
        profile, ranks, data=data, tensor=tensor, stages=stages, micro_batches=micro_batches,
        outside=outside, held=held, name=name, slices=slices, tensor_blocks=tensor_blocks,
    )  # fmt: skip
    if schedule not in ("gpipe", "1f1b", "eager-1f1b", "zero-bubble"):
        known = ("gpipe", "1f1b", "eager-1f1b", "zero-bubble")
        raise InvalidArgument(unknown("schedule", schedule, known))
    plan.recompute(recompute)
    plan.hold(sharded, "parameters")
    if plan.slices > 1:
        return plan  # in the default order, in which backward passes begin with the last slice
    if schedule == "zero-bubble":
        plan.split_backward(...)
    for stage in range(len(cuts)):
        plan.order(at[stage].ravel().tolist(), schedule_steps(schedule, stage, len(cuts), micro_batches))
    return plan


def gpipe(profile: Profile, ranks: int, micro_batches: int = 4) -> ModelPlan:
    """Run all forward passes before the backward passes; only inputs of stages are kept."""
    return hybrid(
        profile,
        ranks,
        stages=ranks,
        micro_batches=micro_batches,
        schedule="gpipe",
        recompute=...,
        name="gpipe",
    )


def one_f_one_b(profile: Profile, ranks: int, micro_batches: int = 4) -> ModelPlan:
    """Alternate forward and backward passes, so that a stage keeps at most as many as there are stages."""
    return hybrid(profile, ranks, stages=ranks, micro_batches=micro_batches, name="one_f_one_b")


def eager_1f1b(profile: Profile, ranks: int, micro_batches: int = 4) -> ModelPlan:
    """Run further ahead than 1F1B, to hide transfers."""
    return hybrid(
        profile, ranks, stages=ranks, micro_batches=micro_batches, schedule="eager-1f1b", name="eager_1f1b"
    )


def zero_bubble(profile: Profile, ranks: int, micro_batches: int = 4) -> ModelPlan:
    """Fill the gaps of 1F1B with gradients of parameters."""
    return hybrid(
        profile, ranks, stages=ranks, micro_batches=micro_batches, schedule="zero-bubble", name="zero_bubble"
    )


def terapipe(
    profile: Profile, ranks: int, micro_batches: int = 1, slices: int | Sequence[int] = 4
) -> ModelPlan:
    """Send slices of sequences through the stages (Li et al. 2021, arXiv 2102.07988).

    `slices`: their number, or their lengths: later ones attend to more, and should be shorter.
    """
    return hybrid(profile, ranks, stages=ranks, micro_batches=micro_batches, slices=slices, name="terapipe")


def interleaved_steps(rank: int, ranks: int, micro_batches: int, own: Sequence[Blocks]) -> list[PlanStep]:
    """Return the order of a rank with several stages."""
    groups = [range(m, min(m + ranks, micro_batches)) for m in range(0, micro_batches, ranks)]
    forwards = [F(stage, m) for group in groups for stage in own for m in group]
    backwards = [B(stage, m) for group in groups for stage in reversed(own) for m in group]
    ahead = min(2 * (ranks - 1 - rank) + (len(own) - 1) * ranks, len(forwards))
    steps = forwards[:ahead]
    for number, backward in enumerate(backwards):
        steps += forwards[ahead + number : ahead + number + 1]
        steps.append(backward)
    return steps


def interleaved(profile: Profile, ranks: int, micro_batches: int = 4, loops: int = 2) -> ModelPlan:
    """Give each rank several stages (Narayanan et al. 2021, arXiv 2104.04473).

    Micro-batches go through the stages in groups of as many as there are ranks.
    """
    plan, cuts, at = mesh(
        profile, ranks, stages=ranks, micro_batches=micro_batches, loops=loops, name="interleaved"
    )
    for rank in at[:, 0, 0].tolist():
        own = [cuts[loop * ranks + rank] for loop in range(loops)]
        plan.order(rank, interleaved_steps(rank, ranks, micro_batches, own))
    return plan


def interlaced(profile: Profile, ranks: int, micro_batches: int = 4) -> ModelPlan:
    """Spread embedding and head over all ranks, between the passes of the stages of 1F1B.

    SuperScaler's interlaced pipeline (arXiv 2301.08984), for large vocabularies. The embedding is cut along
    its rows, and the head, a linear layer before the loss, along its columns.
    """
    plan = ModelPlan(profile, ranks, micro_batches=micro_batches, name="interlaced")
    head = len(plan.blocks) - 2
    hidden = plan.blocks[max(head, 0)].axes.get("hidden")
    is_cut = head > 0 and "rows" in plan.blocks[0].axes and hidden is not None and hidden.how == "columns"
    if not is_cut or plan.blocks[0].shared or plan.blocks[head].shared:
        kinds = ", ".join(block.kind for block in (*plan.blocks[:1], *plan.blocks[1:][-2:]))
        raise InvalidArgument(
            "interlaced: expected an embedding, other blocks, a linear layer with parameters of its own, and "
            f"a loss; the first and last blocks are {kinds}"
        )
    times = [block.forward + block.backward for block in plan.blocks]
    for index, axis in ((0, "rows"), (head, "hidden")):
        plan.cut(index, axis, ranks)
        plan.assign(index, np.arange(ranks))
        times[index] = 0.0
    plan.assign(head + 1, ranks - 1)
    for rank, blocks in enumerate(plan.stages(ranks, times)):
        stage = range(max(blocks.start, 1), min(blocks.stop, head))
        plan.assign(stage, rank)
        timed = []  # by a clock that all ranks share, in passes of a stage
        for m in range(micro_batches):
            first, last = 2 * m, 2 * m + ranks
            timed += [
                (first - 0.5, F(0, m)),
                (first + rank, F(stage, m)),
                (last - 0.5, F([head, head + 1], m)),
            ]
            timed += [(last - 0.4, B([head, head + 1], m)), (last + ranks - 1 - rank, B(stage, m))]
            timed.append((last + ranks - 0.5, B(0, m)))
        plan.order(rank, [step for _, step in sorted(timed, key=lambda pair: pair[0])])
    return plan


def three_f_one_b(profile: Profile, ranks: int, micro_batches: int = 4) -> ModelPlan:
    """Send each micro-batch through the stages several times, of which the last has a backward pass.

    SuperScaler's 3F1B (arXiv 2301.08984), for models that recycle their output as AlphaFold2 does: the chain
    has all passes, and the blocks of those without gradients are `detached`, or "block (2)" and so on.
    """
    plan = ModelPlan(profile, ranks, micro_batches=micro_batches, name="three_f_one_b")
    bases = [block.name.partition(" (")[0] for block in plan.blocks]
    times = [0.0 if block.detached else block.forward + block.backward for block in plan.blocks]
    stages = plan.stages(ranks, times)
    rank_of = {bases[block]: rank for rank, stage in enumerate(stages) for block in stage}  # of the last pass
    chunks: list[list[int]] = []
    for index, base in enumerate(bases):
        plan.assign(index, rank_of[base])
        if chunks and rank_of[bases[index - 1]] == rank_of[base]:
            chunks[-1].append(index)
        else:
            chunks.append([index])
    passes = max(bases.count(base) for base in bases)
    timed = []
    for m in range(micro_batches):
        for number, chunk in enumerate(chunks):
            timed.append(((passes + 1) * m + number, F(chunk, m)))
            timed.append(((passes + 1) * m + 2 * len(chunks) - number, B(chunk, m)))
    plan.order(range(ranks), [step for _, step in sorted(timed, key=lambda pair: pair[0])])
    return plan


NAMED: Final[dict[str, Callable[..., ModelPlan]]] = {
    each.__name__: each
    for each in (
        data_parallel, zero1, zero3, tensor_parallel, sequence_parallel, co_shard, spatial,
        splitbrain, expert_parallel, tables_parallel,
        gpipe, one_f_one_b, eager_1f1b, zero_bubble, interleaved, terapipe,
        interlaced, three_f_one_b,
    )
}  # fmt: skip
"""Plans by name."""


def named(name: str, profile: Profile, ranks: int, **options: Any) -> ModelPlan:
    """Return a plan by its name; raises `InvalidArgument` for an unknown one, which lists the names."""
    if name not in NAMED:
        raise InvalidArgument(unknown("plan", name, tuple(NAMED)))
    return NAMED[name](profile, ranks, **options)
