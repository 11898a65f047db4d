"""Options of the stage `hierarchical`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializationInfo,
    ValidationInfo,
    model_validator,
)

from mcr_plus import registry
from mcr_plus.compression.options import CompressOptions, checked_compression
from mcr_plus.config.document import Keys
from mcr_plus.config.names import backend_name, names_no_algorithm, stored_backend
from mcr_plus.config.options import NOWHERE, Bytes, ReadContext, StageOptions, some_of
from mcr_plus.core.units import whole_number
from mcr_plus.errors import short, unknown

HIERARCHICAL: tuple[str, ...] = ("all_reduce", "broadcast", "all_to_all", "all_gather", "reduce_scatter")
"""Kinds of operations that can be decomposed into steps in the nodes and between them."""


def _nodes(value: object) -> tuple[tuple[int, ...], ...] | None:
    """Validate a list of ranks per node, which must contain every rank of the job once."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(node, (list, tuple)) for node in value):
        raise ValueError(f"expected a list of ranks for every node, got {short(value)}")
    ranks = [rank for node in value for rank in node]
    if not ranks or not all(value):
        raise ValueError("a node without ranks; expected at least one")
    for place, rank in enumerate(ranks):
        if (number := whole_number(rank)) is None or number < 0:
            raise ValueError(f"expected ranks, which are integers from 0, got {short(rank)}")
        if rank in ranks[:place]:
            raise ValueError(f"rank {rank} is written twice; expected every rank once")
    missing = sorted(set(range(max(ranks))) - set(ranks))
    if missing:
        raise ValueError(f"rank {missing[0]} is missing; expected every rank from 0 to {max(ranks)} once")
    return tuple(tuple(node) for node in value)


def _step_backend(value: object) -> object:
    known = registry.names("backends")
    value = stored_backend(value)
    if value is not None and backend_name(value) not in known:
        raise ValueError(unknown("backend", value, known))
    if names_no_algorithm(value):
        raise ValueError(f"{value!r} names no algorithm; expected name or name:algorithm")
    return value


def _step_codec(value: object, info: ValidationInfo) -> object:
    if value is None or isinstance(value, CompressOptions):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a mapping such as {{codec: int8_block}}, got {short(value)}")
    context = info.context
    document, keys = (context.document, context.keys) if isinstance(context, ReadContext) else (NOWHERE, ())
    return checked_compression(value, document, (*keys, "inter", "compress"), {})


StepBackend = Annotated[str | None, BeforeValidator(_step_backend)]


class LocalOptions(StageOptions):
    """Options of the steps inside a node.

    `backend`: the library of these steps; None chooses one as for any operation.
    """

    backend: StepBackend = None


def _codec_options(options: CompressOptions | None, info: SerializationInfo) -> dict[str, Any] | None:
    return None if options is None else options.plain(units=bool(info.context))


class InterOptions(StageOptions):
    """Options of the step between nodes.

    `backend`: as in `LocalOptions`. `compress`: options of `compress` for this step, which override the stage
    and rules. None leaves the choice to the stage and rules.
    """

    backend: StepBackend = None
    compress: Annotated[
        CompressOptions | None,
        BeforeValidator(_step_codec),
        PlainSerializer(_codec_options),
    ] = None


class HierarchicalOptions(StageOptions):
    """Options of `hierarchical`.

    `kinds`: kinds of operations to decompose; an all_to_all gains nothing if nodes have few ranks. `min`:
    bytes below which an operation stays flat. `nodes`: the job ranks of every node; or `ranks_per_node`: the
    number of consecutive ranks per node. By default each host is a node. `local`, `inter`: options of the
    steps inside a node, and between nodes.
    """

    kinds: Annotated[tuple[str, ...], BeforeValidator(some_of(HIERARCHICAL))] = (
        "all_reduce",
        "broadcast",
    )
    min: Bytes = 64 << 10
    nodes: Annotated[tuple[tuple[int, ...], ...] | None, BeforeValidator(_nodes)] = None
    ranks_per_node: Annotated[int, Field(gt=0)] | None = None
    local: LocalOptions = LocalOptions()
    inter: InterOptions = InterOptions()

    @model_validator(mode="after")
    def _one_of_them(self) -> HierarchicalOptions:
        if self.nodes is not None and self.ranks_per_node is not None:
            raise ValueError("nodes and ranks_per_node exclude each other; expected one of them")
        return self

    @property
    def names_nothing(self) -> bool:
        """True if the options name neither nodes nor how to send in them and between them."""
        named = (self.nodes, self.ranks_per_node, self.local.backend, self.inter.backend, self.inter.compress)
        return all(each is None for each in named)

    def named_backends(self) -> dict[str, str]:
        """Return the backends that the options name for the steps, see `StageOptions.named_backends`."""
        steps = {"local": self.local.backend, "inter": self.inter.backend}
        return {
            f"hierarchical.{step}.backend": backend for step, backend in steps.items() if backend is not None
        }

    def problem(
        self, stages: Collection[str] | None, backends: Sequence[str] | None
    ) -> tuple[Keys, str] | None:
        """Return the step that lacks a backend or stage, and the reason, see `StageOptions.problem`."""
        for step, named in (("local", self.local.backend), ("inter", self.inter.backend)):
            if named is not None and backends is not None and backend_name(named) not in backends:
                known = ", ".join(backends)
                return (step, "backend"), f"backend {named!r} is not in backends; known: {known}"
        if self.inter.compress is not None and stages is not None and "compress" not in stages:
            return ("inter", "compress"), (
                "a codec needs the stage 'compress'; add '- compress: {}' after this one"
            )
        return None
