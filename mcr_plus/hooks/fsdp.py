"""FSDP2's parameters and gradients through the pipeline, with codecs and tags of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import nn

from mcr_plus.c10d import AllgatherOptions, ReduceScatterOptions
from mcr_plus.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    import torch.distributed as dist

    from mcr_plus.torch_backend import McrProcessGroup

Compress = str | Mapping[str, object] | bool | None
Model = TypeVar("Model", bound=nn.Module)
_ENTRIES: Final = ("set_custom_all_gather", "set_custom_reduce_scatter")


def fsdp(
    model: Model, *, parameters: Compress = None, gradients: Compress = None, tag: str = "fsdp"
) -> Model:
    """Have a model of FSDP2 (`fully_shard`) gather and reduce with these codecs; returns the same model.

    `parameters` is for the all_gather of parameters, `gradients` for the reduce_scatter of gradients: None
    (the pipeline decides), False (off), a codec's name or a mapping with `codec` and its options. Every
    sharded module has tags of its own, `TAG.NAME.parameters` and `TAG.NAME.gradients` by its name in the
    model, for rules and error feedback. The model's groups must be of the backend `mcr`. Call it on all
    ranks alike, after `fully_shard`; the replicas of a hybrid mesh are reduced as the pipeline says.

    Raises:
        InvalidArgument: nothing in the model is sharded by `fully_shard`.
        Unsupported: this torch has no entries for it (it came with 2.8).
    """
    from torch.distributed.fsdp import FSDPModule

    shards = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not shards:
        raise InvalidArgument("model: nothing in it is sharded; call torch's fully_shard first")
    for name, module in shards:
        if not all(hasattr(module, entry) for entry in _ENTRIES):
            raise Unsupported(f"fsdp: torch {torch.__version__} has no {' and '.join(_ENTRIES)}; update it")
        inside = f"{tag}.{name}" if name else tag
        module.set_custom_all_gather(_AllGather(parameters, f"{inside}.parameters"))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(_ReduceScatter(gradients, f"{inside}.gradients"))  # type: ignore[arg-type]
    return model


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
