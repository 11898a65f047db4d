"""Elements of a checkpoint that the weight loaders of a vLLM worker read, found without loading anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcr_plus.layout.regions import Boxes
from mcr_plus.weight_sync.shards import HeldShard

_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


def reads_of(
    model: torch.nn.Module, config: Any, tensors: Iterable[HeldShard]
) -> tuple[dict[str, Boxes], list[str]]:
    """Return the boxes of each checkpoint tensor that this worker's loaders copy to its parameters.

    Tensors without data go through `model.load_weights` while the parameters have no data either, as at the
    begin of vLLM's layerwise reload; the model keeps its values. `config`: vLLM's configuration of the model.
    A tensor is read as a whole if a loader computes with it. The second result has a text for each tensor
    that does not fit the model, and for each parameter that no tensor fills.
    """
    reload = import_module("vllm.model_executor.model_loader.reload.layerwise")
    reload.initialize_layerwise_reload(model)
    seen = _Reads()
    try:
        for layer in model.modules():
            reload.get_layerwise_info(layer).load_numel_total = 0  # else vLLM warns that it loads nothing
            for each in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
                tensor: Any = each
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = reload._get_original_loader(tensor)
        with seen, torch.no_grad():
            for shard in tensors:
                seen.load(model, shard)
        parameters = {name: each for name, each in model.named_parameters() if each.numel()}
    finally:
        reload.finalize_layerwise_reload(model, config)
    is_tied = getattr(config.hf_text_config, "tie_word_embeddings", False)
    for name, parameter in parameters.items():
        missing = parameter.numel() - seen.filled[_storage(parameter)]
        if missing > 0 and not (is_tied and name.endswith("lm_head.weight")):
            seen.problems.append(
                f"no tensor fills {missing:,} of the {parameter.numel():,} values of '{name}'"
            )
    return seen.boxes, seen.problems


class _Reads(TorchDispatchMode):
    """Observer of the copies that loaders make; copies nothing itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.boxes: dict[str, Boxes] = {}
        self.filled: dict[int, int] = defaultdict(int)  # elements written, by storage of the parameter
        self.problems: list[str] = []
        self._name, self._fake = "", torch.empty(0, device="meta")
        self._found: set[tuple[tuple[int, ...], ...]] = set()

    def load(self, model: Any, tensor: HeldShard) -> None:
        """Load one tensor without data, and note what is read of it."""
        self._name, self._found = tensor.name, set()
        self._fake = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        try:
            model.load_weights([(tensor.name, self._fake)])
        except Exception as error:  # loaders assert shapes, and raise ValueError or KeyError for names
            reason = str(error).split(". ")[0] or "it has another shape in the model"
            self.problems.append(f"{tensor}: {reason}")
        if self._found:
            rows = np.array(sorted(self._found), np.int64)
            self.boxes[tensor.name] = Boxes(rows[:, 0], rows[:, 1])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._note(*args[:2])
        elif func not in _FILLS:
            return func(*args, **(kwargs or {}))
        self.filled[_storage(args[0])] += args[0].numel()
        return args[0]

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if torch.promote_types(target.dtype, source.dtype) != target.dtype:
            self.problems.append(f"'{self._name}' is {source.dtype}, and the model has {target.dtype}")
        if source.numel():
            self._found.add(_box(source, self._fake))


def _box(view: torch.Tensor, whole: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the lowest and highest corner of a view; those of the whole tensor unless the view is a box."""
    everything = (0,) * whole.dim(), tuple(whole.shape)
    if _storage(view) != _storage(whole):
        return everything
    steps = [(size, step) for size, step in zip(view.shape, view.stride(), strict=True) if size > 1]
    first = int(view.storage_offset())
    ends = first, first + sum((size - 1) * step for size, step in steps)
    low, high = (np.array(np.unravel_index(end, whole.shape)) for end in ends)
    wide = [step for step, below, above in zip(whole.stride(), low, high, strict=True) if above > below]
    is_box = (high >= low).all() and (high - low + 1).prod() == view.numel()
    if not is_box or sorted(step for _, step in steps) != sorted(wide):
        return everything
    return tuple(low.tolist()), tuple((high + 1).tolist())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
