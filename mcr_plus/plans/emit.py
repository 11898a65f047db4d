"""Emit plans that torch's own engines have: mesh, stages, layouts and schedule, for a program of torch alone.

Whether an engine has a plan is read from its cuts, places and orders, not from its name: all parts on one
mesh and of equal size, and every rank's order that of a class of `torch.distributed.pipelining`.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import numpy as np
from torch import nn

from mcr_plus.bucketing.step_file import StrictModel, read_json
from mcr_plus.config.document import write_text
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.plans.cutting import cut_parameters, modules_to_cut
from mcr_plus.plans.language import ModelPlan
from mcr_plus.plans.named import Schedule, interleaved_steps, schedule_steps
from mcr_plus.plans.profile import HEADS

VERSION: Final = 1
_ENGINES: Final[dict[str, Any]] = {"whole": "ddp", "optimizer": "zero1", "parameters": "fsdp2"}
TorchSchedule = Literal[
    "Schedule1F1B", "ScheduleGPipe", "ScheduleInterleavedZeroBubble", "ScheduleInterleaved1F1B"
]
_SCHEDULES: Final[dict[TorchSchedule, Schedule]] = {
    "Schedule1F1B": "1f1b", "ScheduleGPipe": "gpipe", "ScheduleInterleavedZeroBubble": "zero-bubble",
}  # fmt: skip
_STYLES: Final = {
    "colwise": "ColwiseParallel()", "rowwise": "RowwiseParallel()",
    "rows": "RowwiseParallel(input_layouts=Replicate())",
}  # fmt: skip


class TorchPlan(StrictModel):
    """What a program of torch alone needs to train as a plan says; `str` is such a program.

    `mesh`: lengths of the dimensions of the device mesh. `stages`: modules of each; a position of `pipe` has
    every stage whose number it is, modulo the length. `schedule`: class of `torch.distributed.pipelining`.
    `data`: engine of that dimension; `units`: modules that FSDP2 shards on their own. `layouts`: styles of
    `parallelize_module`, `rows` for embeddings. `heads`: attributes that count heads, as each rank has them.
    `recompute`: modules of which only the input is kept.
    """

    version: Literal[1]
    model: str
    mesh: dict[Literal["pipe", "data", "tensor"], int]
    stages: tuple[tuple[str, ...], ...]
    schedule: TorchSchedule | None
    micro_batches: int
    data: Literal["ddp", "zero1", "fsdp2"] | None
    units: tuple[str, ...]
    layouts: dict[str, Literal["colwise", "rowwise", "rows"]]
    heads: dict[str, int]
    recompute: tuple[str, ...]

    @classmethod
    def load(cls, path: str | Path) -> TorchPlan:
        """Read a file written by `save`. Raises `ConfigError` with file, line and key if it is none."""
        return read_json(Path(path), VERSION, cls.model_validate_json, "plan")

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON. Raises `ConfigError` if that fails."""
        write_text(Path(path), self.model_dump_json(indent=1) + "\n")

    def __str__(self) -> str:
        pipe, sizes, count = self.mesh["pipe"], tuple(self.mesh.values()), self.micro_batches
        styles = "".join(f"    {name!r}: {_STYLES[how]},\n" for name, how in self.layouts.items())
        heads = [(*name.rpartition(".")[::2], count) for name, count in self.heads.items()]
        replicas = self.data in ("ddp", "zero1")
        first = "[0]" if self.schedule in ("Schedule1F1B", "ScheduleGPipe") else ""
        parts: list[tuple[object, str]] = [
            (True, f"""# Given: model, loss, device, Optimizer, options; step takes this rank's rows.
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh(device, {sizes}, mesh_dim_names={tuple(self.mesh)})
group = mesh["data"].get_group()"""),
            (styles, f"""from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
parallelize_module(model, mesh["tensor"], {{\n{styles}}})"""),
            *((True, f"setattr(model.get_submodule({path!r}), {key!r}, {own})") for path, key, own in heads),
            (self.recompute, f"""from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
for name in {self.recompute}:
    module = checkpoint_wrapper.checkpoint_wrapper(model.get_submodule(name))
    model.set_submodule(name, module)"""),
            (not self.schedule, "parts = [model]"),
            (self.schedule, f"""from torch.distributed.pipelining import PipelineStage, {self.schedule}
stages, at = {self.stages}, mesh.get_local_rank("pipe")
own = range(at, len(stages), {pipe})
# As modules in a row; code between them goes into a module of the stage.
parts = [nn.Sequential(*map(model.get_submodule, stages[number])) for number in own]"""),
            (self.data == "fsdp2", f"""from torch.distributed.fsdp import fully_shard
for module in [*map(model.get_submodule, {self.units}), *parts]:
    fully_shard(module, mesh=mesh["data"])"""),
            (replicas and not self.schedule,
             "parts = [nn.parallel.DistributedDataParallel(model, device_mesh=mesh[\"data\"])]"),
            (True, "params = [p for part in parts for p in part.parameters() if p.requires_grad]"),
            (self.data == "zero1", """from torch.distributed.optim import ZeroRedundancyOptimizer
optimizer = ZeroRedundancyOptimizer(params, Optimizer, process_group=group, **options)"""),
            (self.data != "zero1", "optimizer = Optimizer(params, **options)"),
            (self.schedule, f"""pipe = mesh["pipe"].get_group()
built = [PipelineStage(part, number, len(stages), device, group=pipe) for part, number in zip(parts, own)]
schedule = {self.schedule}(built{first}, {count}, loss_fn=loss)"""),
            (True, """def step(inputs, target):
    optimizer.zero_grad()
    losses = []"""),
            (self.schedule, "    schedule.step(*[inputs][at:], target=target, losses=losses)"),
            (self.schedule and replicas, f"""    for param in params:  # DDP counts a pass that stages try
        dist.all_reduce(param.grad.div_({self.mesh["data"]}), group=group)"""),
            (not self.schedule, f"""    for x, y in zip(inputs.chunk({count}), target.chunk({count})):
        losses.append(loss(parts[0](x), y))
        (losses[-1] / {count}).backward()"""),
            (True, """    optimizer.step()
    return losses  # of micro-batches, on the ranks of the last stage
"""),
        ]  # fmt: skip
        return "\n".join(text for wanted, text in parts if wanted)


def emit(plan: ModelPlan, model: nn.Module | None = None) -> TorchPlan:
    """Return what torch's own engines need to train as a plan says.

    Args:
        plan: data, tensor and pipeline parallelism, as of `hybrid`, in equal parts.
        model: of the profile; needed where the plan cuts parameters, to find its layers.

    Raises:
        InvalidArgument: the plan cuts parameters, and `model` is None.
        Unsupported: torch has no engine for the plan; the text names the block.
    """
    data, tensor = _counts(plan)
    stage_of = _stages(plan, data * tensor)
    pipe = plan.ranks // (data * tensor)
    if plan.slices > 1 or plan.befores or plan.codecs:
        raise Unsupported("plan: slices of sequences, an order between ranks, or codecs; torch has none")
    items, parts = plan.profile.input[0], data * plan.micro_batches
    if items % parts:
        raise Unsupported(f"batch: {items} items in {parts} parts; torch's engines need equal ones")
    names: list[list[str]] = [[] for _ in range(max(stage_of) + 1)]
    stages_of: dict[str, int] = {}
    units, again = [], []
    for index, block in enumerate(plan.blocks):
        own = [name for name in block.name.split(" + ") if name != "loss"]
        if " (" in block.name:
            _refuse(plan, index, "runs several times in a pass")
        if plan.held[index] != plan.held[0]:
            _refuse(plan, index, f"holds {plan.held[index]}, the first block {plan.held[0]}")
        if plan.recomputed[index] and plan.split[index]:
            _refuse(plan, index, "is recomputed, with its backward pass in two")
        if pipe > 1 and stage_of[index] and own and block.reads_batch:
            _refuse(plan, index, "reads the batch, in another stage than the first")
        for name in block.names:
            if stages_of.setdefault(name, stage_of[index]) != stage_of[index]:
                _refuse(plan, index, f"shares {name} with another stage")
        names[stage_of[index]] += own
        again += own if plan.recomputed[index] else []
        units += own if block.params and not block.shared else []
    if pipe > 1 and (plan.blocks[-1].name != "loss" or not all(names)):
        _refuse(plan, -1, "is no function of a stage's output, as `loss` of a profile is")
    layouts, heads = _layouts(plan, tensor, model) if tensor > 1 else ({}, {})
    engine = _ENGINES[plan.held[0]] if data > 1 else None
    if engine in ("ddp", "zero1") and plan.profile.unused:
        raise Unsupported(f"{plan.profile.unused[0]}: no block uses it, and DDP waits for its gradient")
    return TorchPlan(
        version=VERSION, model=plan.profile.model, mesh={"pipe": pipe, "data": data, "tensor": tensor},
        stages=tuple(map(tuple, names)), schedule=_schedule(plan, stage_of, pipe),
        micro_batches=plan.micro_batches, data=engine, units=tuple(units) if engine == "fsdp2" else (),
        layouts=layouts, heads=heads, recompute=tuple(again),
    )  # fmt: skip


def _refuse(plan: ModelPlan, index: int, why: str) -> NoReturn:
    raise Unsupported(f"{plan.blocks[index].name}: it {why}; torch's engines do not")


def _counts(plan: ModelPlan) -> tuple[int, int]:
    """Return into how many parts all blocks are cut along the batch, and along parameters."""
    found = []
    for index, cuts in enumerate(plan.cuts):
        if len(set(places := plan.places[index][0, 0].ravel().tolist())) < len(places):
            _refuse(plan, index, "has several parts on a rank, in turn")
        rest = list(cuts)
        data = rest.pop(0).parts if rest and rest[0].axes == ("batch",) else 1
        tensor = 1
        if rest and plan.how(index, rest[0]) in ("sum", "replicas") and not rest[0].outside:
            tensor = rest.pop(0).parts
        if rest:
            outside = f", with {rest[0].outside} outside" if rest[0].outside else ""
            _refuse(plan, index, f"is cut along {' and '.join(rest[0].axes) or 'replicas'}{outside}")
        found.append((data, tensor))
        if found[0] != found[-1]:
            first = " x ".join(map(str, found[0]))
            _refuse(plan, index, f"is cut in {data} x {tensor} parts, the first block in {first}")
    return found[0]


def _stages(plan: ModelPlan, size: int) -> list[int]:
    """Return the stage of each block, on consecutive ranks, in turn."""
    found: list[int] = []
    at: list[int] = []
    for index, places in enumerate(plan.places):
        ranks = places.reshape(-1, size)
        at.append(int(ranks[0, 0]) // size)
        found.append(found[-1] + (at[-1] != at[-2]) if found else 0)
        expected = np.arange(size) + found[-1] % max(plan.ranks // size, 1) * size
        if (wrong := (ranks != expected).any(axis=1)).any() or plan.ranks % size:
            got = ranks[wrong.argmax()].tolist()
            _refuse(plan, index, f"is on ranks {got}, not {expected.tolist()}, for some micro-batch")
    if (found[-1] + 1) % (plan.ranks // size):
        raise Unsupported(f"plan: {found[-1] + 1} stages on {plan.ranks // size} groups of ranks")
    return found


def _schedule(plan: ModelPlan, stage_of: list[int], pipe: int) -> TorchSchedule | None:
    """Return the class whose order all ranks have; None without stages, where micro-batches accumulate."""
    count, stages, size = plan.micro_batches, max(stage_of) + 1, plan.ranks // pipe
    one, several = stages == pipe, pipe > 1
    fits: dict[TorchSchedule, bool] = {
        "Schedule1F1B": one and count >= pipe, "ScheduleGPipe": one and several,
        "ScheduleInterleavedZeroBubble": one and several and not count % max(count // pipe, 1),
        "ScheduleInterleaved1F1B": not one and not count % pipe,
    }  # fmt: skip
    orders = []
    for rank in range(plan.ranks):
        keys = ((task.kind, stage_of[task.block], task.micro) for task in plan.order_of(rank))
        orders.append([key for key, _ in groupby(keys)])
    names: list[TorchSchedule] = [name for name, fit in fits.items() if fit]
    for name in names:
        known = []
        for at in range(pipe):
            if one:
                steps = schedule_steps(_SCHEDULES[name], at, pipe, count, at)
            else:
                steps = interleaved_steps(at, pipe, count, range(at, stages, pipe))
            known.append([(step.kind, step.blocks, step.micro) for step in steps])
        if all(order == known[rank // size] for rank, order in enumerate(orders)):
            return name if several else None
    raise Unsupported(f"plan {plan.name}: its order of tasks is none of {', '.join(names) or 'torch'}")


def _layouts(plan: ModelPlan, tensor: int, model: nn.Module | None) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the style of each layer that the plan cuts, and the numbers of heads."""
    layouts: dict[str, Any] = {}
    heads: dict[str, int] = {}
    for index, cuts in enumerate(plan.cuts):
        if not (axes := cuts[-1].axes):
            continue  # replicas
        if model is None:
            raise InvalidArgument("model: expected the model, to find the layers that the plan cuts")
        names = [name for name in plan.blocks[index].name.split(" + ") if name != "loss"]
        counts = {axis: plan.blocks[index].axes[axis].parts[0] for axis in axes}
        for path, module, axis in modules_to_cut(model, names, axes, counts):
            count = counts[axis]
            if count % tensor:
                _refuse(plan, index, f"has {count} {axis}, in {tensor} parts of different sizes")
            for key, cut in cut_parameters(module, axis, count).items():
                if cut.sections > 1:
                    _refuse(plan, index, f"cuts each of the {cut.sections} sections of {path}.{key}")
                style = "rows" if axis == "rows" else "rowwise" if cut.dim else "colwise"
                layouts[f"{path}.{key}".rpartition(".")[0]] = style
            for key in HEADS if axis == "heads" else ():
                if hasattr(module, key):
                    heads[f"{path}.{key}"] = getattr(module, key) // tensor
    return layouts, heads
