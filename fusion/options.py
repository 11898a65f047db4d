"""Options of the stage `fuse`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from mcr_plus.config.options import Bytes, StageOptions, size_or_none, size_text, some_of

FUSIBLE: tuple[str, ...] = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
"""Kinds of operation that can be fused."""


class FuseOptions(StageOptions):
    """Options of `fuse`. Sizes in bytes.

    `bucket`: the limit of a bucket, counting the larger of an operation's input and output.
    `first_bucket`: the limit of the first bucket after a flush, so that sending begins early; None for the
    same limit. `kinds`: the kinds of operation that are fused. `memory`: the limit of all buckets that have
    not been waited for; beyond it operations are sent unfused.

    `order`: the first of several open buckets to be sent: with `ready` the one opened first, with `priority`
    the one opened last, such as the gradients of the first layer, which the next forward pass needs first.
    (Hooks such as `mcr.wrap` wait for all of their buckets together, so `order` does not affect them.)
    `plan`: the buckets of gradients that hooks make: with `size` filled up to `bucket`, with `exact`
    computed from the times at which gradients become ready and the table's costs, so that the last operation
    completes as early as possible; `bucket` has no effect then.
    """

    bucket: Annotated[Bytes, Field(gt=0)] = 25 << 20
    first_bucket: Annotated[
        Annotated[int, Field(gt=0)] | None, BeforeValidator(size_or_none), PlainSerializer(size_text)
    ] = 1 << 20
    kinds: Annotated[tuple[str, ...], BeforeValidator(some_of(FUSIBLE))] = ("all_reduce",)
    memory: Annotated[Bytes, Field(gt=0)] = 256 << 20
    order: Literal["ready", "priority"] = "ready"
    plan: Literal["size", "exact"] = "size"
