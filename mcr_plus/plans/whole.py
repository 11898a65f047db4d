"""Model, loss and batch as one module that tells of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mcr_plus.errors import Unsupported


class LossFunction(nn.Module):
    """A loss function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.forward = function


class WholeModel(nn.Module):
    """Model and loss, and the batch of the next pass."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss if loss is None or isinstance(loss, nn.Module) else LossFunction(loss)
        self.device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))

    def take(self, batch: Any) -> None:
        """Set the batch: the model's input, or with a loss a pair of input and target."""
        pair = self.loss is not None and isinstance(batch, tuple | list) and len(batch) == 2
        given: Any = batch[0] if pair else batch
        self.target = batch[1:] if pair else ()
        self.kwargs = given if isinstance(given, Mapping) else {}
        self.inputs = given if isinstance(given, tuple | list) else () if self.kwargs else (given,)

    def forward(self) -> Tensor:
        """Return the loss, or the model's output without one."""
        result: Any = self.model(*self.inputs, **self.kwargs)
        if self.loss is not None:
            result = self.loss(result, *self.target)
        if not isinstance(result, Tensor):
            raise Unsupported(
                f"{'model' if self.loss is None else 'loss'}: its output is a {type(result).__name__}; "
                "expected a tensor, or `loss`, a function that makes one of the model's output"
            )
        return result

    def run(self, enter: Callable[..., None], leave: Callable[..., Any]) -> Tensor:
        """Run a pass, and tell of each module and its tensors."""

        def tell(module: nn.Module, args: Any, kwargs: Any) -> None:
            enter(module, tensors_in((args, kwargs)))

        hooks = [each.register_forward_pre_hook(tell, with_kwargs=True) for each in self.modules()]
        hooks += [each.register_forward_hook(leave, with_kwargs=True) for each in self.modules()]
        try:
            return self()  # type: ignore[no-any-return]
        finally:
            for hook in hooks:
                hook.remove()

    def now(self) -> float:
        """Return the time at which the device is done, in seconds; the thread's if it computes alone."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)
        elif torch.get_num_threads() == 1:  # other ranks may share its core
            return thread_time()
        return perf_counter()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore buffers and random numbers afterwards."""
        before = [(buffer, buffer.clone()) for buffer in self.buffers()]
        on_cpu = self.device.type == "cpu"
        devices, kind = ([], "cuda") if on_cpu else ([self.device.index or 0], self.device.type)
        with torch.random.fork_rng(devices, device_type=kind):
            try:
                yield
            finally:
                for buffer, kept in before:
                    buffer.data.copy_(kept)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def rows_of(batch: Any, items: int, low: int, high: int) -> Any:
    """Return items `low` to `high` of a batch of `items`: rows of the tensors that have as many."""

    def cut(value: Any) -> Any:
        fits = isinstance(value, Tensor) and value.ndim and len(value) == items
        return value[low:high] if fits else value

    return tree_map(cut, batch)


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
    return sum(part.numel() * part.element_size() for part in parts)


def storage_key(tensor: Tensor) -> tuple[int, int]:
    """Return address and bytes of a tensor's storage."""
    storage = (tensor._values() if tensor.is_sparse else tensor).untyped_storage()
    return storage._cdata, storage.nbytes()
