"""Compile a model in parts, so that communication overlaps with computation (`mcr.compile`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from mcr_plus.bucketing.compiled import CompiledCall
from mcr_plus.errors import InvalidArgument
from mcr_plus.training.wrap import use_compiled

__all__ = ["compile"]
ModelT = TypeVar("ModelT", bound=torch.nn.Module)


def compile(  # noqa: A001 - as in torch
    model: ModelT,
    cuts: str | Sequence[str] = "auto",
    *,
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = None,
    fullgraph: bool = False,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> ModelT:
    """Compile a model with `torch.compile`, cut into parts so that gradients become ready part by part.

    Works in place, like `model.compile()`, and returns the same model; the names in its `state_dict()` do not
    change. Copies and pickles of the model are not compiled. `mcr.wrap` may be called before or after;
    compiling a second time replaces the first.

    Args:
        model: any module. Its forward pass may have graph breaks and checkpoints.
        cuts: positions of the cuts in the graph:

            - "none": no cuts. All gradients become ready at the end of the backward pass, and no
              communication overlaps.
            - "blocks": at the end of every repeated child, i.e. every module in a `Sequential` or
              `ModuleList` that is not inside another such module.
            - names of modules: at the end of each named module.
            - "auto": with `mcr.wrap`, the job times "none" and "blocks", in 27 steps, and keeps the one that
              is faster on the slowest rank. With `fuse: {plan: auto}` in the pipeline, the best of all
              subsets of the blocks is searched together with the buckets, and timed too (36 steps). It is
              "blocks" under `fuse: {plan: exact}`, with buckets from a file or a loaded state, and with
              codecs that keep state; "none" without `mcr.wrap` and on a single rank. The choice is not
              part of `mcr.state_dict()`.

            A cut is omitted if no gradient becomes ready after it. Without gradients (evaluation), the graph
            is compiled as a whole.
        backend: the compiler of each part, a name or a callable as in `torch.compile`.
        dynamic, fullgraph: as in `torch.compile`.
        mode, options: as in `torch.compile`, for "inductor" only.

    Raises:
        InvalidArgument: `model` is not a module, or already the result of `torch.compile`; `cuts` contains a
            name that no module has; the backend is unknown.

    Example:
        ```python
        blocks = [torch.nn.Linear(4, 4) for _ in range(3)]
        model = mcr.compile(torch.nn.Sequential(*blocks), cuts="blocks", backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = mcr.wrap(model, optimizer)
        model(torch.ones(2, 4)).sum().backward()
        assert "0.weight" in model.state_dict()
        ```
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise InvalidArgument("model: is the result of torch.compile; expected the model given to it")
    settings = {"dynamic": dynamic, "fullgraph": fullgraph, "mode": mode, "options": options}
    call = CompiledCall(model, cuts, backend, settings)
    model._compiled_call_impl = call
    use_compiled(model, call)
    return model
