"""FSDP2's parameters and gradients through the pipeline, with codecs and tags of their own."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import nn

from mcr_plus import runtime
from mcr_plus.c10d import AllgatherOptions, ReduceScatterOptions
from mcr_plus.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    import torch.distributed as dist

    from mcr_plus.torch_backend import McrProcessGroup

Compress = str | Mapping[str, object] | bool | None
Model = TypeVar("Model", bound=nn.Module)
_ENTRIES: Final = ("set_custom_all_gather", "set_custom_reduce_scatter")


def fsdp(
    model: Model,
    *,
    parameters: Compress = None,
    gradients: Compress = None,
    replicas: Compress = None,
    tag: str = "fsdp",
) -> Model:
    """Have a model of FSDP2 (`fully_shard`) gather and reduce with these codecs; returns the same model.

    `parameters` is for the all_gather of parameters, `gradients` for the reduce_scatter of gradients, and
    `replicas` for the all_reduce of a hybrid mesh between its replicas: None (the pipeline decides), False
    (off), a codec's name or a mapping with `codec` and its options. Every sharded module has tags of its
    own, `TAG.NAME.parameters`, `TAG.NAME.gradients` and `TAG.NAME.replicas` by its name in the model, for
    rules and error feedback. The model's groups must be of the backend `mcr`. Call it on all ranks alike,
    after `fully_shard`; another call for the same model takes the place of the first.

    Raises:
        InvalidArgument: nothing in the model is sharded by `fully_shard`, or another model that still lives
            has the tag.
        Unsupported: this torch has no entries for it (it came with 2.8), or `replicas` is given and the
            model has none, or has them in a group of another backend.
    """
    from torch.distributed.fsdp import FSDPModule

    from mcr_plus.torch_backend import McrProcessGroup

    shards: list[tuple[str, Any]] = [  # for type checkers, an FSDPModule is no module
        (name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)
    ]
    if not shards:
        raise InvalidArgument("model: nothing in it is sharded; call torch's fully_shard first")
    if not all(hasattr(module, entry) for _, module in shards for entry in _ENTRIES):
        raise Unsupported(f"fsdp: torch {torch.__version__} has no {' and '.join(_ENTRIES)}; update it")
    groups = [_replica_group(module) for _, module in shards]
    if replicas is not None and not any(groups):
        raise Unsupported("fsdp: replicas: the model's mesh has no dimension of replicas; use a hybrid one")
    # Without a codec for it, a group of another backend may do that step.
    between = [_ours(each) if each and replicas is not None else each for each in groups]
    tags = [f"{tag}.{name}" if name else tag for name, _ in shards]
    _take({inside: module for inside, (_, module) in zip(tags, shards, strict=True)}, tag)
    for inside, (_, module), group in zip(tags, shards, between, strict=True):
        reduce_scatter = _ReduceScatter(gradients, f"{inside}.gradients")
        if isinstance(group, McrProcessGroup):
            reduce_scatter.then_between(group, replicas, f"{inside}.replicas")
        module.set_custom_all_gather(_AllGather(parameters, f"{inside}.parameters"))
        module.set_custom_reduce_scatter(reduce_scatter)
    return model


def _take(modules: Mapping[str, nn.Module], tag: str) -> None:
    """Note whose tags these are, in the job that runs: what codecs keep for operations goes by their tags."""
    running = runtime.job.runtime
    if running is None:  # then no group can be ours, which is told when one is used
        return
    tagged = running.tagged

    def is_taken() -> bool:
        return any(tagged.get(inside, module) is not module for inside, module in modules.items())

    if is_taken():
        gc.collect()  # sharded modules that nobody has any more hold each other
    if is_taken():
        raise InvalidArgument(f"tag {tag!r} is another model's; pass tag=")
    for inside in [inside for inside, module in tagged.items() if module in modules.values()]:
        del tagged[inside]
    tagged.update(modules)


def _replica_group(module: nn.Module) -> Any:
    """The group between a module's replicas on a hybrid mesh; None if it has none.

    In the mesh of its parameters, torch puts the dimension of replicas first.
    """
    from torch.distributed.tensor import DTensor

    for parameter in _own_parameters(module):
        if isinstance(parameter, DTensor) and parameter.placements[0].is_replicate():
            return parameter.device_mesh.get_group(0)
    return None


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that torch reduces with this module: those of no other sharded one inside it."""
    from torch.distributed.fsdp import FSDPModule

    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


class _Step:
    """What both have: memory, and the options of their calls."""

    def __init__(self, compress: Compress, tag: str) -> None:
        self._options: dict[str, Any] = {"compress": compress, "tag": tag}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Step):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        options = AllgatherOptions()
        options.asyncOp = async_op
        work = _ours(group).all_gather_single(output_tensor, input_tensor, options, **self._options)
        return work if async_op else None


class _ReduceScatter(_Step):
    _between: McrProcessGroup | None = None

    def then_between(self, group: McrProcessGroup, compress: Compress, tag: str) -> None:
        """Have what this writes reduced between replicas with these options."""
        self._between, self._later = group, {"compress": compress, "tag": tag}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # torch offers no way into that all_reduce (its hook runs after it), but its tensor is from here.
        values = super().allocate(size, dtype=dtype, device=device)
        if self._between is not None:
            self._between.all_reduces_with(values, **self._later)
        return values

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        options = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = op, async_op
        work = _ours(group).reduce_scatter_single(output_tensor, input_tensor, options, **self._options)
        return work if async_op else None


def _ours(group: Any) -> McrProcessGroup:
    from mcr_plus.torch_backend import McrProcessGroup

    if not isinstance(group, McrProcessGroup):
        raise Unsupported(
            f"fsdp: the model is sharded over a group of backend {group.name()}; "
            "use init_process_group('mcr')"
        )
    return group
