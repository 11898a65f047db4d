"""Codecs and tags for the collectives of FSDP2 (`fully_shard`)."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import nn

from mcr_plus.errors import InvalidArgument, Unsupported, short
from mcr_plus.job.process import job

Compress = str | Mapping[str, object] | bool | None
Model = TypeVar("Model", bound=nn.Module)
_log = logging.getLogger("mcr_plus")
_ENTRIES: Final = ("set_custom_all_gather", "set_custom_reduce_scatter")


def fsdp(
    model: Model,
    *,
    parameters: Compress = None,
    gradients: Compress = None,
    replicas: Compress = None,
    owned: object = None,
    tag: str = "fsdp",
) -> Model:
    """Set the codecs of the collectives of an FSDP2 model (`fully_shard`); returns the same model.

    `parameters` applies to the all_gather of parameters, `gradients` to the reduce_scatter of gradients, and
    `replicas` to the all_reduce between the replicas of a hybrid mesh. Values: None (the pipeline decides),
    False (off), a codec's name, or a mapping with `codec` and its options. Every sharded module has its own
    tags for rules and error feedback: `TAG.NAME.parameters`, `TAG.NAME.gradients` and `TAG.NAME.replicas`,
    where NAME is the module's name in the model. The model's groups must have the backend `mcr`. Call this
    function with the same arguments on all ranks, after `fully_shard`; a later call replaces an earlier one.

    On the CPU, transfers of prefetched parameters and of gradients overlap with computation. The backward
    pass prefetches by itself; in the forward pass the program calls torch's
    `set_modules_to_forward_prefetch`. Gradients are complete when `backward()` returns; at most two modules'
    gradients are in flight. If ranks have gradients for different parameters of a module, the reduction
    raises `OrderMismatch`, which names the parameters of both ranks; torch would average them.

    `owned`: the result of `mcr.owned` for this model; on the CPU, gradients then travel to the owners of
    their matrices from the backward pass on.

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
    from mcr_plus.training.fsdp_collectives import (
        BackwardPass,
        Gather,
        ReduceScatter,
        checked_group,
        sees_reduced,
    )

    if not (owned is None or callable(getattr(owned, "reduced", None))):
        raise InvalidArgument(f"owned: expected the result of mcr.owned, got {short(owned)}")
    shards: list[tuple[str, Any]] = [  # type checkers do not know that an FSDPModule is a module
        (name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)
    ]
    if not shards:
        raise InvalidArgument("model: none of its modules is sharded; call torch's fully_shard first")
    if not all(hasattr(module, entry) for _, module in shards for entry in _ENTRIES):
        raise Unsupported(f"fsdp: torch {torch.__version__} has no {' and '.join(_ENTRIES)}; update it")
    if not sees_reduced():
        _log.warning(
            "fsdp: torch %s does not say which gradients it reduces: ranks whose passes give gradients to "
            "different parameters are not found",
            torch.__version__,
        )
    groups = [_replica_group(module) for _, module in shards]
    if replicas is not None and not any(groups):
        raise Unsupported("fsdp: replicas: the model's mesh has no dimension of replicas; use a hybrid one")
    # Without a codec for replicas, their group may have another backend.
    between = [checked_group(group) if group and replicas is not None else group for group in groups]
    tags = [f"{tag}.{name}" if name else tag for name, _ in shards]
    _claim_tags({inside: module for inside, (_, module) in zip(tags, shards, strict=True)}, tag)
    backward = BackwardPass(getattr(owned, "reduced", None))
    for inside, (_, module), group in zip(tags, shards, between, strict=True):
        reduce_scatter = ReduceScatter(module, gradients, f"{inside}.gradients", backward)
        if isinstance(group, McrProcessGroup):
            reduce_scatter.set_replica_options(group, replicas, f"{inside}.replicas")
        module.set_custom_all_gather(Gather(module, parameters, f"{inside}.parameters"))
        module.set_custom_reduce_scatter(reduce_scatter)
    return model


def _claim_tags(modules: Mapping[str, nn.Module], tag: str) -> None:
    """Register the tags of these modules in the running job: codecs keep their state by tag.

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

    Replicas are the first dimension of the parameters' mesh.
    """
    from torch.distributed.tensor import DTensor

    for parameter in _own_parameters(module):
        if isinstance(parameter, DTensor) and parameter.placements[0].is_replicate():
            return parameter.device_mesh.get_group(0)
    return None


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that torch reduces with this module: all outside inner sharded modules."""
    from torch.distributed.fsdp import FSDPModule

    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)
