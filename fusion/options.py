"""Options of the stage `fuse`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, InstanceOf, PlainSerializer, ValidationInfo, model_validator
from typing_extensions import Self

from mcr_plus import registry
from mcr_plus.config.options import Bytes, StageOptions, size_or_none, size_text, some_of
from mcr_plus.config.schema import TableRef, file_ref
from mcr_plus.errors import short, unknown

FUSIBLE: tuple[str, ...] = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
"""Kinds of operations that can be fused."""


_FILE: Final = re.compile(r"[./\\]")  # a path has one of these characters, a misspelt word does not
_PLANS: Final = ("size", "exact", "auto")


def _plan(value: object, info: ValidationInfo) -> object:
    if value in _PLANS or isinstance(value, TableRef):
        return value
    if isinstance(value, str) and not _FILE.search(value):
        raise ValueError(unknown("value", value, (*_PLANS, "or the path of a plan's file")))
    return file_ref(value, info, "plan")


def _codecs(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    known = registry.names("codecs")
    if not isinstance(names, (list, tuple)):
        raise ValueError(f"expected a list of codecs, got {short(value)}; known: {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ValueError(unknown("codec", name, known))
    return tuple(dict.fromkeys(names))


def _plan_text(plan: str | TableRef) -> str:
    return plan.text if isinstance(plan, TableRef) else plan


class FuseOptions(StageOptions):
    """Options of `fuse`. Sizes are in bytes.

    `bucket`: the limit of a bucket; an operation counts with the larger of input and output. `first_bucket`:
    the limit of the first bucket after a flush, so that sending begins early; None uses `bucket`. `kinds`:
    the kinds of operations to fuse. `memory`: the limit of all buckets that have not been waited for; above
    it, operations are sent unfused.

    `order`: the order of sending open buckets: `ready` sends the oldest bucket first, `priority` the newest,
    for example the gradients of the first layer, which the next forward pass needs first. (Hooks such as
    `mcr.wrap` wait for all their buckets together, so `order` does not affect them.) `plan`: the gradient
    buckets of hooks. `size` fills them up to `bucket`. `exact` computes them from the times at which
    gradients become ready and the table's costs, so that the last operation completes as early as possible;
    `bucket` then has no effect. `auto` searches for buckets in the job, tries them alternately with the
    buckets of `size`, and keeps the faster ones; it needs no table. Any other value is the path of a file
    with the buckets of a model, see `mcr-plus plan`. `codecs`: names of lossy codecs that `auto` may choose
    for buckets if they shorten the step; none by default.
    """

    bucket: Annotated[Bytes, Field(gt=0)] = 25 << 20
    first_bucket: Annotated[
        Annotated[int, Field(gt=0)] | None, BeforeValidator(size_or_none), PlainSerializer(size_text)
    ] = 1 << 20
    kinds: Annotated[tuple[str, ...], BeforeValidator(some_of(FUSIBLE))] = ("all_reduce",)
    memory: Annotated[Bytes, Field(gt=0)] = 256 << 20
    order: Literal["ready", "priority"] = "ready"
    plan: Annotated[
        Literal["size", "exact", "auto"] | InstanceOf[TableRef],
        BeforeValidator(_plan),
        PlainSerializer(_plan_text),
    ] = "size"
    codecs: Annotated[tuple[str, ...], BeforeValidator(_codecs)] = ()

    @model_validator(mode="after")
    def _only_auto_chooses(self) -> Self:
        if self.codecs and self.plan != "auto":
            raise ValueError("codecs: only `plan: auto` uses them; expected that, or a stage `compress`")
        return self

    @property
    def plan_file(self) -> TableRef | None:
        """File of the plan, if any."""
        return self.plan if isinstance(self.plan, TableRef) else None

    def by_content(self) -> dict[str, Any]:
        """See `StageOptions.by_content`."""
        data = self.plain()
        if self.plan_file is not None:
            data["plan"] = self.plan_file.digest()
        return data
