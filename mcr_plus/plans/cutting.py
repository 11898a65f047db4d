"""Cut the parameters of modules: this rank's parts of attention, MLPs, linear layers and embeddings.

Attention and MLPs are linear layers of which the last one adds up what the parts of the others give. Parts of
different ranks are added by communication. Parts on one rank run one after another, each again for its
backward pass, so that the activations of one part at a time are kept (co-shard).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.errors import Unsupported
from mcr_plus.plans.part import on_meta, run_whole_before
from mcr_plus.plans.profile import HEADS, inner_axes
from mcr_plus.plans.tensors import part_of
from mcr_plus.plans.whole import tensors_in

Move = Callable[[Tensor], Tensor]


class ParameterCut(NamedTuple):
    """Cut of a parameter along a dimension that consists of `sections` equal ones, each with all parts."""

    dim: int
    sections: int = 1

    def take(self, whole: Tensor, parts: Sequence[int], count: int) -> Tensor:
        """Return units `parts[0]` up to `parts[1]` of `count` in each section; a view if there is one."""
        units = whole.unflatten(self.dim, (self.sections, count, -1))
        own = units.narrow(self.dim + 1, parts[0], parts[1] - parts[0])
        part: Tensor = own.flatten(self.dim, self.dim + 2)
        return part


def cut_parameters(module: nn.Module, axis: str, count: int) -> dict[str, ParameterCut]:
    """Return the cuts of a module's parameters along an axis with `count` units.

    Raises:
        Unsupported: its layers are not known to be cut so.
    """
    if isinstance(module, nn.Linear) and axis == "hidden":
        return {name: ParameterCut(0) for name in ("weight", "bias") if getattr(module, name) is not None}
    if isinstance(module, nn.Embedding) and axis in ("hidden", "rows") and module.max_norm is None:
        return {"weight": ParameterCut(1 if axis == "hidden" else 0)}
    layers = {name: kid for name, kid in module.named_children() if isinstance(kid, nn.Linear)}
    *firsts, last = layers or [""]
    known = sum(1 for kid in module.modules() if next(kid.parameters(recurse=False), None) is not None)
    if known != len(layers) or not firsts or type(module) is nn.MultiheadAttention:
        raise Unsupported(
            f"{type(module).__name__}: {axis} of it cannot be cut; expected linear layers alone"
        )
    width = layers[last].in_features
    found = {f"{last}.weight": ParameterCut(1)}
    for name in firsts:
        sections, rest = divmod(layers[name].out_features, width)
        grouped = axis == "heads" and len({getattr(module, each, None) for each in HEADS} - {None}) > 1
        if (sections and rest) or (sections > 1 and grouped) or layers[name].out_features % count:
            raise Unsupported(f"{name}: {layers[name].out_features} outputs do not consist of {count} {axis}")
        for key in ("weight", "bias"):
            if getattr(layers[name], key) is not None:
                found[f"{name}.{key}"] = ParameterCut(0, max(sections, 1))
    return found


class CutModule(nn.Module):
    """Parts of a module, whose outputs add up.

    Args:
        module: the module, whose parameters are replaced by this rank's.
        axis, count: what is cut, and the number of its units.
        parts: (first, end) units of each part of this rank; consecutive.
        enter, leave: communication of the input, and of the sum of the parts.
    """

    def __init__(
        self, module: nn.Module, axis: str, count: int, parts: Sequence[tuple[int, int]], enter: Move,
        leave: Move,
    ) -> None:  # fmt: skip
        super().__init__()
        self.inner, self.enter, self.leave = module, enter, leave
        cuts = cut_parameters(module, axis, count)
        own = parts[0][0], parts[-1][1]
        self.units = [(low - own[0], high - own[0]) for low, high in parts]
        self.count, self.whole_count, self.cuts = own[1] - own[0], count, cuts
        heads = HEADS if axis == "heads" else ()
        self.counts = {name: getattr(module, name) for name in heads if hasattr(module, name)}
        self.first_row = own[0] * (getattr(module, "num_embeddings", 0) // count) if axis == "rows" else None
        kids = [kid for kid in module.children() if isinstance(kid, nn.Linear)]
        self.bias = kids[-1].bias if kids else None  # it is added to the sum
        if kids:
            kids[-1].register_parameter("bias", None)
        for name, cut in cuts.items():
            path, _, key = name.rpartition(".")
            whole = module.get_parameter(name)
            shard = cut.take(whole.detach(), own, count).clone()
            new = nn.Parameter(shard, requires_grad=whole.requires_grad)
            new.mcr_cut = (tuple(whole.shape), cut, own, count)  # type: ignore[attr-defined]
            setattr(module.get_submodule(path), key, new)
        self._set(own)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the parts, and add up their outputs."""
        args, kwargs = _with_first((args, kwargs), partial(_moved, self.enter))
        if len(self.units) == 1:
            return _with_first(self._rows(*args, **kwargs), self._left)
        made: Any = None
        for number in range(len(self.units)):
            before = tensors_in(made)
            made = checkpoint(
                self._part, number, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )
            if before:
                made = _with_first(made, before[0].add)
        return _with_first(made, self._left)

    def _part(self, number: int, *args: Any, **kwargs: Any) -> Any:
        units = self.units[number]
        params = dict(self.inner.named_parameters())
        own = {name: cut.take(params[name], units, self.count) for name, cut in self.cuts.items()}
        self._set(units)
        return functional_call(self.inner, own, args, kwargs)

    def _rows(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; an embedding cut along its rows gives 0 for the others."""
        if self.first_row is None:
            return self.inner(*args, **kwargs)
        weight = cast("Tensor", self.inner.weight)
        rows = args[0] - self.first_row
        padding = cast("int | None", self.inner.padding_idx)  # it gets no gradient
        own = -1 if padding is None else padding - self.first_row
        at = own if 0 <= own < len(weight) else None
        found = nn.functional.embedding(rows.clamp(0, len(weight) - 1), weight, at)
        return found * ((rows >= 0) & (rows < len(weight))).unsqueeze(-1)

    def _left(self, output: Tensor) -> Tensor:
        output = _moved(self.leave, output)
        return output if self.bias is None else output + self.bias

    def _set(self, units: tuple[int, int]) -> None:
        for name, count in self.counts.items():
            setattr(self.inner, name, count * (units[1] - units[0]) // self.whole_count)


def _moved(move: Move, x: Tensor) -> Tensor:
    """Return `x` moved, but for indices."""
    return move(x) if x.is_floating_point() else x


def same(x: Tensor) -> Tensor:
    """Return `x`: the move of parts that one rank has."""
    return x


def _with_first(value: Any, change: Move) -> Any:
    """Return nested containers with their first tensor changed."""
    leaves, spec = tree_flatten(value)
    at = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    leaves[at] = change(leaves[at])
    return tree_unflatten(leaves, spec)


def cut_module(
    model: nn.Module, names: Sequence[str], axes: Sequence[str], count: dict[str, int], cuts: int,
    own: Sequence[int], enter: Move, leave: Move, group: Communicator | None,
) -> dict[str, CutModule]:  # fmt: skip
    """Cut the modules of a block along `axes` into `cuts` parts, keep the parts `own`; return them by name.

    `group`: the ranks of the parts, in order; None if it is this rank alone. Modules with `mcr_cut` cut
    themselves, and are not returned.

    Raises:
        Unsupported: no module of the block can be cut so, or the parts are not consecutive.
    """
    if list(own) != list(range(own[0], own[-1] + 1)):
        raise Unsupported(f"{names[0]}: parts {list(own)} on one rank; expected consecutive ones")
    wanted = list(modules_to_cut(model, names, axes, count))
    if not wanted:
        raise Unsupported(f"{names[0]}: no module of it is known to be cut along {', '.join(axes)}")
    found: dict[str, CutModule] = {}
    for path, module, axis in wanted:
        parts = [part_of((0, count[axis]), cuts, number) for number in own]
        if hasattr(module, "mcr_cut"):
            if group is not None:
                _deal(module, axis, count[axis], range(parts[0][0], parts[-1][1]), group)
            continue
        whole = on_meta(module)
        found[path] = CutModule(module, axis, count[axis], parts, enter, leave)
        run_whole_before(found[path], whole)
        parent, _, key = path.rpartition(".")
        setattr(model.get_submodule(parent), key, found[path])
    return found


def modules_to_cut(
    model: nn.Module, names: Sequence[str], axes: Sequence[str], count: Mapping[str, int]
) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, module and axis of the modules in a block that are cut, none of which is in another.

    Raises:
        Unsupported: a module exchanges elements, and does not cut itself.
    """
    done: list[str] = []
    for name in names:
        for path, module in list(model.get_submodule(name).named_modules(prefix=name)):
            if any(path.startswith(f"{one}.") for one in done):
                continue
            known: dict[str, Any] = {**getattr(module, "mcr_axes", {}), **inner_axes(module)}
            axis = next((axis for axis in axes if axis in known), None)
            if (
                axis is None
                and isinstance(module, nn.Embedding)
                and module.num_embeddings == count.get("rows")
            ):
                axis = "rows"
            elif axis is None and [path] == names and isinstance(module, nn.Linear | nn.Embedding):
                axis = axes[0]
            if axis is None:
                continue
            if axis in known and known[axis][1] == "exchange" and not hasattr(module, "mcr_cut"):
                kind = type(module).__name__
                raise Unsupported(f"{path}: {kind} has no method mcr_cut, which would deal its {axis}")
            done.append(path)
            yield path, module, axis


@torch.no_grad()
def adds_up(module: nn.Module, axis: str, args: Any, kwargs: Any) -> bool:
    """Return whether two parts of a module add up to it, with random parameters and input.

    They do not where parameters are laid out otherwise (queries, keys and values of each head together), or
    the module does more, such as a skip.
    """
    count = inner_axes(module)[axis][0]
    try:
        twin = copy.deepcopy(module).eval()
        for param in twin.parameters():
            param.normal_(std=param.shape[-1] ** -0.5 if param.ndim > 1 else 1.0)
        args, kwargs = _with_first((args, kwargs), torch.randn_like)
        whole = tensors_in(twin(*args, **kwargs))
        halves = [(0, count // 2), (count // 2, count)]
        found = CutModule(twin, axis, count, halves, same, same)(*args, **kwargs)
        # Of further outputs, such as a penalty on activations, each part would return its own.
        pairs = zip(tensors_in(found), whole, strict=True)
        return all(one.shape == other.shape and _are_close(one, other) for one, other in pairs)
    except Exception:  # its code does not run with parts, or they are none
        return False


def _are_close(found: Tensor, expected: Tensor) -> bool:
    close = max(torch.finfo(expected.dtype).eps ** 0.5, 1e-3) * expected.abs().max()
    return bool((found - expected).abs().max() <= close)


def _deal(module: Any, axis: str, count: int, parts: range, group: Communicator) -> None:
    """Let a module keep its parts, and mark their parameters."""
    whole = on_meta(module)
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
    names = list(module.mcr_cut(axis, parts, group))
    for name in names:
        param = module.get_parameter(name)
        sizes = zip(shapes[name], param.shape, strict=True)
        dim = next((dim for dim, (size, own) in enumerate(sizes) if size != own), None)
        how = None if dim is None else ParameterCut(dim)
        param.mcr_cut = (shapes[name], how, (parts.start, parts.stop), count)
    run_whole_before(module, whole)
