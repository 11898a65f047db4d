"""Emitted plans: schedules as torch has them, and what no engine of torch has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.nn import functional
from unit.test_model_plans import block

import mcr_plus as mcr
from mcr_plus.errors import ConfigError, InvalidArgument, Unsupported
from mcr_plus.plans.blocks import Axis, ModelBlock, Profile
from mcr_plus.plans.emit import TorchPlan, emit
from mcr_plus.plans.language import ModelPlan, PlanTask
from mcr_plus.plans.named import hybrid, interleaved, named

ROWS = 24


def with_rows(one: ModelBlock) -> ModelBlock:
    axes = {
        name: axis.model_copy(update={"parts": (ROWS,)}) if name == "batch" else axis
        for name, axis in one.axes.items()
    }
    return one.model_copy(update={"shape": (ROWS, *one.shape[1:]), "axes": axes})


def profile(*kinds: str, loss: bool = True, **changes: Any) -> Profile:
    """Return blocks of these kinds and a loss; `changes`: of some blocks."""
    blocks = [block(f"{kind}{number}", kind) for number, kind in enumerate(kinds)]
    blocks += [block("loss", "norm", params={}, reads_batch=True, forward=0.0, backward=0.0)] if loss else []
    blocks = [with_rows(each).model_copy(update=changes.get(each.name, {})) for each in blocks]
    return Profile(
        version=1, model="", device="cpu", input=(ROWS, 6, 5), state_of=None, unused=(), blocks=tuple(blocks)
    )


# -- schedules ----------------------------------------------------------------------------------------------


Order = list[tuple[str, int, int]]


def order_of_torch(name: str, pipe: int, loops: int, micro_batches: int) -> dict[int, Order]:
    """Return the order of each rank by torch's class."""
    of: Any = getattr(schedules, name)
    if name in ("Schedule1F1B", "ScheduleGPipe"):
        return {rank: calls_of(of, rank, pipe, micro_batches) for rank in range(pipe)}
    stages = [
        SimpleNamespace(num_stages=pipe * loops, group_size=pipe, group_rank=0, stage_index=index,
                        submod=nn.Identity(), is_first=index == 0, is_last=False)
        for index in range(0, pipe * loops, pipe)
    ]  # fmt: skip
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    orders = of(stages, micro_batches, loss_fn=functional.mse_loss).pipeline_order
    named = {
        rank: [(kinds.get(a.computation_type.name, ""), a.stage_index, a.microbatch_index) for a in each if a]
        for rank, each in orders.items()
    }
    return {rank: [action for action in each if action[0]] for rank, each in named.items()}


def calls_of(of: Any, rank: int, pipe: int, micro_batches: int) -> Order:
    """Return the passes that a schedule calls of a stage; its table of actions is another for 1F1B."""
    stage = MagicMock(num_stages=pipe, stage_index=rank, is_last=False)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    schedule = of(stage, micro_batches, loss_fn=functional.mse_loss)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches)
    kinds = {"forward_one_chunk": "F", "backward_one_chunk": "B"}
    return [(kinds[name], rank, args[0]) for name, args, _ in stage.method_calls if name in kinds]


def order_of(plan: ModelPlan, stages: int) -> dict[int, Order]:
    """Return the order of each rank; a stage is a block, and the last one the loss, too."""
    return {
        rank: list(
            dict.fromkeys(
                (task.kind, min(task.block, stages - 1), task.micro) for task in plan.order_of(rank)
            )
        )
        for rank in range(plan.ranks)
    }


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble", "eager-1f1b"])
def test_schedules_are_those_of_torchs_classes(schedule: Any) -> None:
    emitted = 0
    for pipe in (2, 3, 4):
        for count in (1, 2, 3, 4, 6, 8):
            plan = hybrid(
                profile(*["norm"] * pipe), pipe, stages=pipe, micro_batches=count, schedule=schedule
            )
            try:
                name = emit(plan).schedule
            except Unsupported:
                assert schedule != "gpipe"
                continue
            assert name is not None
            assert order_of(plan, pipe) == order_of_torch(name, pipe, 1, count)
            emitted += 1
    assert emitted == {"gpipe": 18, "1f1b": 15, "zero-bubble": 18, "eager-1f1b": 4}[schedule]


def test_interleaved_schedules_are_those_of_torch() -> None:
    emitted = 0
    for pipe in (2, 3):
        for loops in (2, 3):
            for count in (1, 2, 3, 4, 6, 8):
                found = profile(*["norm"] * pipe * loops)
                plan = interleaved(found, pipe, count, loops)
                if count % pipe:
                    with pytest.raises(Unsupported):
                        emit(plan)
                    continue
                assert (name := emit(plan).schedule) == "ScheduleInterleaved1F1B"
                assert order_of(plan, pipe * loops) == order_of_torch(name, pipe, loops, count)
                emitted += 1
    assert emitted == 2 * (4 + 2)


# -- what is refused ----------------------------------------------------------------------------------------


def on_two(found: Profile, *statements: Callable[[ModelPlan], Any], **options: Any) -> ModelPlan:
    plan = hybrid(found, 2, **{"stages": 2, "micro_batches": 2, **options})
    for statement in statements:
        statement(plan)
    return plan


def swapped(plan: ModelPlan) -> None:
    first = next(number for number, task in enumerate(plan.orders[0]) if task.kind == "B")
    plan.orders[0].insert(0, plan.orders[0].pop(first - 1))


def two_meshes() -> ModelPlan:
    plan = ModelPlan(profile("norm", "mlp"), 2)
    plan.cut(1, "hidden", 2)
    plan.assign([0, 2], 0)
    plan.assign(1, [0, 1])
    return plan


def norms(**changes: Any) -> Profile:
    return profile("norm", "norm", **changes)


def shared() -> ModelPlan:
    return on_two(norms(norm0={"shared": ("both",)}, norm1={"shared": ("both",)}))


def ordered(plan: ModelPlan) -> None:
    plan.before(PlanTask(0, 0, 0, "F"), PlanTask(1, 0, 0, "F"))


REFUSED: list[tuple[str, Callable[[], ModelPlan]]] = [
    ("mlp0: it has several parts on a rank, in turn", lambda: named("co_shard", profile("mlp"), 2)),
    ("mlp0: it is cut along hidden, with sequence outside",
     lambda: named("sequence_parallel", profile("mlp"), 2)),
    ("linear0: it is cut along hidden",
     lambda: named("splitbrain", profile("linear", linear0={"kind": "Linear"}), 2)),
    ("mlp1: it is cut in 1 x 2 parts, the first block in 1 x 1", two_meshes),
    ("batch: 24 items in 32 parts", lambda: on_two(norms(), stages=1, data=2, micro_batches=16)),
    ("norm1: it holds whole, the first block optimizer",
     lambda: on_two(norms(), lambda plan: plan.hold(0, "optimizer"), stages=1, data=2)),
    (r"norm1: it is on ranks \[0\], not \[1\]",
     lambda: on_two(norms(), lambda plan: plan.assign(1, 0, micro=1))),
    ("plan: slices of sequences", lambda: on_two(norms(), ordered)),
    ("plan: 3 stages on 2", lambda: on_two(norms(), lambda plan: plan.assign(2, 0))),
    ("norm1: it shares both with another stage", shared),
    ("norm1: it reads the batch", lambda: on_two(norms(norm1={"reads_batch": True}))),
    ("norm1: it is no function", lambda: on_two(profile("norm", "norm", loss=False))),
    ("loss: it is no function", lambda: on_two(norms(), stages=[range(2), range(2, 3)])),
    (r"norm1 \(2\): it runs several times", lambda: on_two(norms(norm1={"name": "norm1 (2)"}))),
    ("norm0: it is recomputed, with its backward pass in two",
     lambda: on_two(norms(), schedule="zero-bubble", recompute=0)),
    ("its order of tasks is none of Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble",
     lambda: on_two(norms(), swapped)),
    ("plan hybrid: its order of tasks is none of Schedule1F1B$",
     lambda: on_two(norms(), stages=1, data=2, schedule="gpipe")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "make"), REFUSED, ids=[text[:40] for text, _ in REFUSED])
def test_plans_that_torch_has_no_engine_for_are_refused(text: str, make: Callable[[], ModelPlan]) -> None:
    with pytest.raises(Unsupported, match=text):
        emit(make())


class Fused(nn.Module):
    """Attention of one linear layer for queries, keys and values."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.out(self.qkv(x).chunk(3, dim=-1)[2])
        return mixed


class Half(nn.Module):
    """An MLP that never calls one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.idle = nn.Linear(12, 10), nn.Linear(10, 12), nn.Embedding(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.up(x).relu())
        return found


@pytest.mark.parametrize(
    ("make", "tensor", "text"),
    [
        (lambda: Fused(6), 2, r"0: it cuts each of the 3 sections of 0\.qkv\.weight"),
        (lambda: Fused(3), 2, "0: it has 3 heads, in 2 parts of different sizes"),
        (Half, 1, "0.idle.weight: no block uses it, and DDP waits for its gradient"),
    ],
)
def test_modules_that_torch_treats_otherwise_are_refused(
    make: Callable[[], nn.Module], tensor: int, text: str
) -> None:
    model = nn.Sequential(make(), nn.Linear(12, 2))
    found = mcr.profile(
        model, (torch.ones(4, 5, 12), torch.ones(4, 5, 2)), loss=functional.mse_loss, repeats=1
    )
    plan = hybrid(found, 2, tensor=tensor, data=2 // tensor)
    with pytest.raises(Unsupported, match=text):
        emit(plan, model)


def test_cuts_of_parameters_need_the_model() -> None:
    with pytest.raises(InvalidArgument, match="model: expected the model, to find the layers"):
        emit(
            hybrid(
                profile("mlp", mlp0={"axes": {"hidden": Axis(dims=(), parts=(4,), how="sum")}}), 2, tensor=2
            )
        )


def test_files_of_emitted_plans(tmp_path: Path) -> None:
    plan = emit(on_two(norms()))
    plan.save(tmp_path / "plan.json")
    assert TorchPlan.load(tmp_path / "plan.json") == plan
    assert plan.stages == (("norm0",), ("norm1",))
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace("Schedule1F1B", "Schedule2F2B"))
    with pytest.raises(ConfigError, match=r"plan\.json:\d+: schedule"):
        TorchPlan.load(tmp_path / "plan.json")
