"""Slices of a sequence in turn: what attention of earlier ones leaves to later ones (TeraPipe).

A module with a method `forward_slice(x, past)` returns its output, and the tensors that later slices need,
such as keys and values; `past` has those of each earlier slice. They stay on the rank as leaves, in which the
backward passes of later slices, which come first, add up gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mcr_plus.errors import Unsupported
from mcr_plus.plans.blocks import ModelBlock
from mcr_plus.plans.language import ModelPlan
from mcr_plus.plans.part import run_whole_before
from mcr_plus.plans.whole import tensors_in

_WANTED: Final = "forward_slice(x, past), which returns the output and what later slices need of this one"


class SlicePass:
    """What a pass of blocks over one slice has made for later ones.

    `kept`: for each module the trees of slices up to this one. `roots`: tensors of the graph, and the leaves
    that later slices have used in their place.
    """

    def __init__(self, micro: int, slice_: int) -> None:
        self.micro, self.slice = micro, slice_
        self.kept: list[list[Any]] = []
        self.roots: list[tuple[Tensor, Tensor]] = []

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the roots that later slices have used, and their gradients."""
        used = [
            (root, leaf.grad) for root, leaf in self.roots if leaf.grad is not None and root.requires_grad
        ]
        return [root for root, _ in used], [grad for _, grad in used]

    def end(self) -> None:
        """Drop what the slice has made, after its backward pass."""
        for kept in self.kept:
            kept.pop()
        self.kept, self.roots = [], []


class PastSlices:
    """Lets modules run in slices, and keeps what they leave, in `kept`. `now`: the present pass."""

    def __init__(self, model: nn.Module, plan: ModelPlan) -> None:
        self.now: SlicePass
        self.kept: dict[tuple[nn.Module, int], list[Any]] = defaultdict(list)
        if plan.slices == 1:
            return
        if not hasattr(model, "mcr_slice"):
            raise Unsupported(
                "model: slices need its method mcr_slice(batch, begin, end), a slice of a batch"
            )
        for one, is_split in zip(plan.blocks, plan.split, strict=True):
            found = _sliced(model, one)
            if one.axes["sequence"].how == "gather" and not found:
                raise Unsupported(f"{one.name}: slices of its sequence need a module with {_WANTED}")
            if is_split:
                raise Unsupported(f"{one.name}: slices of a sequence with a split backward pass")
            for module in found:
                whole = module.forward
                module.forward = partial(self._run, module)
                run_whole_before(module, whole)

    def _run(self, module: Any, x: Tensor) -> Tensor:
        now, kept = self.now, self.kept[module, self.now.micro]
        y, new = module.forward_slice(x, kept[: now.slice])
        if len(kept) == now.slice:  # not so if it runs again, for its backward pass
            kept.append(tree_map(lambda each: each.detach().requires_grad_(each.is_floating_point()), new))
            now.kept.append(kept)
        now.roots += zip(tensors_in(new), tensors_in(kept[now.slice]), strict=True)
        output: Tensor = y
        return output


def can_slice(model: nn.Module, blocks: Sequence[ModelBlock]) -> bool:
    """Return whether blocks of a model can run slices of its sequences in turn."""
    axes = [block.axes.get("sequence") for block in blocks]
    return hasattr(model, "mcr_slice") and all(
        axis is not None and (axis.how == "split" or _sliced(model, block))
        for axis, block in zip(axes, blocks, strict=True)
    )


def _sliced(model: nn.Module, block: ModelBlock) -> list[Any]:
    """Return the modules of a block that run in slices."""
    names = [name for name in block.name.split(" + ") if name != "loss"]
    modules = [module for name in names for module in model.get_submodule(name).modules()]
    return [module for module in modules if hasattr(module, "forward_slice")]
