"""Files of plans (JSON, version 1): cuts, places and orders, for a profile of the same model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import numpy as np
from pydantic import Field

from mcr_plus.bucketing.step_file import StrictModel, read_json
from mcr_plus.config.document import write_text
from mcr_plus.errors import ConfigError, InvalidArgument, short
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.language import Held, Kind, ModelPlan, PlanTask
from mcr_plus.plans.proof import check_tasks

VERSION: Final = 1
_Number = Annotated[int, Field(ge=1, le=1 << 20)]


class _SavedBlock(StrictModel):
    cuts: tuple[tuple[tuple[str, ...], _Number, str | None], ...]
    recomputed: bool
    split: bool
    held: Held
    places: tuple[Annotated[int, Field(ge=-1, lt=1 << 20)], ...]


class SavedModelPlan(StrictModel):
    """File of a plan.

    `slices`: their number, or their lengths; `places`: of micro-batches, slices and parts, in row-major
    order; `orders`: of all ranks.
    """

    version: Literal[1]
    model: str
    name: str
    ranks: _Number
    micro_batches: _Number
    slices: _Number | tuple[_Number, ...]
    blocks: tuple[_SavedBlock, ...]
    orders: dict[int, tuple[str, ...]]
    befores: tuple[tuple[str, str], ...]
    codecs: dict[int, str | dict[str, Any]] = Field(default_factory=dict)

    def plan(self, profile: Profile) -> ModelPlan:
        """Return the plan of a profile.

        Raises:
            InvalidArgument: it was made for another model, or its places and tasks do not fit together.
        """
        if self.model != profile.model or len(self.blocks) != len(profile.blocks):
            raise InvalidArgument(
                f"plan: of model {self.model} with {len(self.blocks)} blocks; the profile is of model "
                f"{profile.model} with {len(profile.blocks)}"
            )
        plan = ModelPlan(
            profile, self.ranks, micro_batches=self.micro_batches, slices=self.slices, name=self.name
        )
        for index, block in enumerate(self.blocks):
            cells = plan.places[index].size * math.prod(parts for _, parts, _ in block.cuts)
            if len(block.places) != cells:
                raise InvalidArgument(f"plan: block {index} has {len(block.places)} places, not {cells}")
            for axes, parts, outside in block.cuts:
                if axes:
                    plan.cut(index, axes, parts, outside)
                else:
                    plan.replicate(index, parts)
            plan.recomputed[index], plan.split[index] = block.recomputed, block.split
            plan.held[index] = block.held
            places: Any = np.array(block.places, np.int64)
            plan.places[index] = places.reshape(plan.places[index].shape)
        plan.orders = {rank: [_task(text) for text in order] for rank, order in self.orders.items()}
        plan.befores = [(_task(first), _task(second)) for first, second in self.befores]
        for tensor, codec in self.codecs.items():
            plan.compress(tensor - 1 if tensor else "sums", codec)
        if sorted(plan.orders) != list(range(self.ranks)):
            raise InvalidArgument(f"plan: expected the orders of its {self.ranks} ranks")
        check_tasks(plan)
        return plan


def save_plan(plan: ModelPlan, path: str | Path) -> None:
    """Write a plan as JSON. Raises `ConfigError` if that fails."""
    write_text(Path(path), plan_text(plan))


def plan_text(plan: ModelPlan) -> str:
    """Return a plan as JSON, one block or rank per line."""
    blocks = [
        {
            "cuts": plan.cuts[index], "recomputed": plan.recomputed[index], "split": plan.split[index],
            "held": plan.held[index], "places": plan.places[index].ravel().tolist(),
        }
        for index in range(len(plan.blocks))
    ]  # fmt: skip
    head: dict[str, Any] = {
        "version": VERSION, "model": plan.profile.model, "name": plan.name, "ranks": plan.ranks,
        "micro_batches": plan.micro_batches, "slices": np.diff([0, *plan.slice_ends]).tolist() or 1,
        "befores": [tuple(map(_text, pair)) for pair in plan.befores], "codecs": plan.codecs,
    }  # fmt: skip
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines.append(' "blocks": [\n  ' + ",\n  ".join(map(json.dumps, blocks)) + "\n ]")
    orders = [f'"{rank}": {json.dumps([*map(_text, plan.order_of(rank))])}' for rank in range(plan.ranks)]
    lines.append(' "orders": {\n  ' + ",\n  ".join(orders) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def load_plan(path: str | Path, profile: Profile) -> ModelPlan:
    """Read a plan of a profile.

    Raises:
        ConfigError: the file cannot be read, is no plan, or is one of another model, or its tasks are wrong;
            the text begins with the file.
    """
    saved = read_json(Path(path), VERSION, SavedModelPlan.model_validate_json, "plan")
    try:
        return saved.plan(profile)
    except InvalidArgument as error:
        raise ConfigError(f"{path}: {error}") from None


def _text(task: PlanTask) -> str:
    return f"{task.kind}{task.block}.{task.micro}.{task.slice}"


def _task(text: str) -> PlanTask:
    match = re.fullmatch(r"([FBW])(\d{1,9})\.(\d{1,9})\.(\d{1,9})", text)
    if match is None:
        raise InvalidArgument(f"task {short(text)}; expected one such as F0.1.0: block, micro-batch, slice")
    kind, *numbers = match.groups()
    block, micro, slice_ = map(int, numbers)
    return PlanTask(block, micro, slice_, cast("Kind", kind))
