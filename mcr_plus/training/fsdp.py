"""Codecs and tags for the collectives of FSDP2 (`fully_shard`)."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import nn

from mcr_plus.core.c10d import AllgatherOptions, ReduceScatterOptions
from mcr_plus.errors import InvalidArgument, NotInitialized, Unsupported
from mcr_plus.runtime.process import job

if TYPE_CHECKING:
    import torch.distributed as dist

    from mcr_plus.torch_backend.process_group import McrProcessGroup

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
    """Set the codecs of the collectives of an FSDP2 model (`fully_shard`); returns the same model.

    `parameters` is for the all_gather of parameters, `gradients` for the reduce_scatter of gradients, and
    `replicas` for the all_reduce between the replicas of a hybrid mesh: None (the pipeline decides), False
    (off), a codec's name or a mapping with `codec` and its options. Every sharded module has its own tags,
    `TAG.NAME.parameters`, `TAG.NAME.gradients` and `TAG.NAME.replicas` by its name in the model, for rules
    and error feedback. The model's groups must have the backend `mcr`. Call this function with the same
    arguments on all ranks, after `fully_shard`; another call for the same model replaces the first.

    Raises:
        InvalidArgument: no module of the model is sharded by `fully_shard`, or another existing model has the
            tag.
        Unsupported: this torch is older than 2.8, which introduced custom collectives; or `replicas` is given
            and the model has no replicas, or their group has another backend.

    Example:
        ```python
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("mcr")
        model = fully_shard(torch.nn.Linear(64, 8))
        mcr.fsdp(model, parameters="bf16", gradients="int8_block")
        model(torch.ones(4, 64)).sum().backward()
        assert model.weight.grad.to_local().shape == (4, 64)  # this rank's half of the mean, of two ranks
        dist.destroy_process_group()
        ```
    """
    from torch.distributed.fsdp import FSDPModule

    from mcr_plus.torch_backend.process_group import McrProcessGroup

    shards: list[tuple[str, Any]] = [  # for type checkers, an FSDPModule is no module
        (name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)
    ]
    if not shards:
        raise InvalidArgument("model: none of its modules is sharded; call torch's fully_shard first")
    if not all(hasattr(module, entry) for _, module in shards for entry in _ENTRIES):
        raise Unsupported(f"fsdp: torch {torch.__version__} has no {' and '.join(_ENTRIES)}; update it")
    groups = [_replica_group(module) for _, module in shards]
    if replicas is not None and not any(groups):
        raise Unsupported("fsdp: replicas: the model's mesh has no dimension of replicas; use a hybrid one")
    # Without a codec, the group between replicas may have another backend.
    between = [_checked_group(group) if group and replicas is not None else group for group in groups]
    tags = [f"{tag}.{name}" if name else tag for name, _ in shards]
    _claim_tags({inside: module for inside, (_, module) in zip(tags, shards, strict=True)}, tag)
    for inside, (_, module), group in zip(tags, shards, between, strict=True):
        reduce_scatter = _ReduceScatter(gradients, f"{inside}.gradients")
        if isinstance(group, McrProcessGroup):
            reduce_scatter.set_replica_options(group, replicas, f"{inside}.replicas")
        module.set_custom_all_gather(_AllGather(parameters, f"{inside}.parameters"))
        module.set_custom_reduce_scatter(reduce_scatter)
    return model


def _claim_tags(modules: Mapping[str, nn.Module], tag: str) -> None:
    """Register the tags of these modules in the running job, because codecs keep their state by tag.

    Raises `InvalidArgument` if another model has one of the tags.
    """
    running = job.runtime
    if running is None:  # no group has the backend `mcr`: the first use of the model raises
        return
    tagged = running.tagged

    def is_taken() -> bool:
        return any(tagged.get(inside, module) is not module for inside, module in modules.items())

    if is_taken():
        gc.collect()  # unused sharded modules refer to each other
    if is_taken():
        raise InvalidArgument(f"tag: another model has the tag {tag!r}; pass tag=")
    for inside in [inside for inside, module in tagged.items() if module in modules.values()]:
        del tagged[inside]
    tagged.update(modules)


def _replica_group(module: nn.Module) -> Any:
    """Return the group between a module's replicas on a hybrid mesh; None without replicas.

    The dimension of replicas is the first one in the mesh of the parameters.
    """
    from torch.distributed.tensor import DTensor

    for parameter in _own_parameters(module):
        if isinstance(parameter, DTensor) and parameter.placements[0].is_replicate():
            return parameter.device_mesh.get_group(0)
    return None


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that torch reduces with this module: all but those of inner sharded modules."""
    from torch.distributed.fsdp import FSDPModule

    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


class _Step:
    """Base of both custom collectives: their memory, and the options of their calls."""

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
        work = _checked_group(group).all_gather_single(output_tensor, input_tensor, options, **self._options)
        return work if async_op else None


class _ReduceScatter(_Step):
    _between: McrProcessGroup | None = None

    def set_replica_options(self, group: McrProcessGroup, compress: Compress, tag: str) -> None:
        """Set the options of the output's all_reduce between replicas."""
        self._between, self._later = group, {"compress": compress, "tag": tag}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # FSDP2 has no hook for the all_reduce between replicas (its hook runs afterwards), but it allocates
        # the tensor of that all_reduce here.
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
        work = _checked_group(group).reduce_scatter_single(
            output_tensor, input_tensor, options, **self._options
        )
        return work if async_op else None


def _checked_group(group: Any) -> McrProcessGroup:
    from mcr_plus.torch_backend.process_group import McrProcessGroup

    if not isinstance(group, McrProcessGroup):
        raise Unsupported(
            f"fsdp: the model is sharded over a group of backend {group.name()}; "
            "use init_process_group('mcr')"
        )
    if group.is_destroyed:
        raise NotInitialized(
            "fsdp: the process group over which the model is sharded has been destroyed; if ranks have been "
            "lost, mcr.fsdp_state puts the state together, for a new model over the ranks that are left"
        )
    return group
