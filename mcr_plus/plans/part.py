"""Run some blocks of a model by its own forward, on the rank that has them.

What comes before the blocks runs on meta tensors, which have shapes alone; where the first block begins, its
input is put in place of the one computed; where the block after the last would begin, the pass ends.
Parameters of other blocks are on the meta device, too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.whole import WholeModel, tensors_in


class _Left(BaseException):
    """The pass has reached the end of its blocks, with this tensor; the model's handlers let it through."""


class _OnMeta(TorchFunctionMode):
    """Runs operations on the meta device if one of their tensors is a parameter, or is there.

    Once the blocks have begun, their input takes the place of the one computed, wherever a parent uses it.
    """

    in_use = False

    def __init__(self, known: dict[Any, Any]) -> None:
        super().__init__()
        self.computed: list[Tensor] = []
        self.known, self.count = known, 0
        self.input: Tensor | None = None
        self.is_used = False

    def begin(self, *given: Any) -> Any:
        """Return the arguments of the first block, with its input."""
        self.computed, _OnMeta.in_use = [each for each in tensors_in(given) if each.is_meta], False
        found = tree_map(self._input_of, given)
        self.is_used = False
        return found

    def _input_of(self, each: Any) -> Any:
        found = any(each is one for one in self.computed)
        self.is_used |= found
        return self.input if found else each

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        if self.computed:
            given = tree_map(self._input_of, given)
        elif any(tensor.is_meta or isinstance(tensor, nn.Parameter) for tensor in tensors_in(given)):
            return self._on_meta(func, given)
        return func(*given[0], **given[1])

    def _on_meta(self, func: Any, given: Any) -> Any:
        """Return the result on the meta device; only the first pass computes it, which may take long."""
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):  # it changes its argument, in each pass
            args, kwargs = tree_map(_to_meta, given)
            return func(*args, **kwargs)
        self.count += 1  # results of several calls are several tensors
        key = self.count, func, *map(_likeness, tree_leaves(given))
        try:
            known = key in self.known
        except TypeError:  # of something without a hash
            known, key = False, (self.count,)
        if not known:
            args, kwargs = tree_map(_to_meta, given)
            self.known[key] = func(*args, **kwargs)
        # Others of the same storage, as a pass may change them.
        return tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, self.known[key])


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _likeness(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.is_meta
    return type(leaf), repr(leaf) if isinstance(leaf, slice) else leaf


class ModelPart:
    """Blocks of a model that a rank runs; see the module.

    Args:
        model: its parameters of other blocks are on the meta device (`drop_parameters`).
        loss: as in `mcr.profile`.
        profile: of the model.

    Raises:
        InvalidArgument: the model lacks modules of the profile.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] | None, profile: Profile) -> None:
        self.whole = WholeModel(model, loss)
        self._names = [block.name for block in profile.blocks]
        self._range, self._stop = range(0), len(self._names)
        self._prefix: _OnMeta | None = None
        self._is_used_later: dict[range, bool] = {}
        self._known: dict[Any, Any] = {}  # results of functions before the blocks of a pass
        self._calls: dict[nn.Module, int] = {}
        modules = {name.removeprefix("model."): module for name, module in self.whole.named_modules()}
        self._starts: dict[nn.Module, dict[int, int]] = {}
        for index, name in enumerate(self._names):
            first, count = re.fullmatch(r"(.*?)(?: \((\d+)\))?", name.split(" + ")[0]).groups()  # type: ignore[union-attr]
            if first not in modules:
                raise InvalidArgument(f"model: no module {first!r}, which the profile has")
            self._starts.setdefault(modules[first], {})[int(count or 1)] = index
        for name in (name for block in self._names for name in block.split(" + ")):
            module = modules.get(name)
            if module is not None and "forward" not in vars(module):
                module.forward = partial(self._forward, module.forward, {})
        for module in self._starts:
            module.register_forward_pre_hook(self._at_module, prepend=True, with_kwargs=True)

    def run(self, blocks: range, x: Tensor | None, batch: Any) -> Tensor:
        """Return the output of consecutive blocks, of the loss after the last one.

        Args:
            blocks: they are this rank's.
            x: input of the first block; None for the model's first.
            batch: the rows of the batch that `x` comes from.

        Raises:
            Unsupported: the model's forward does not reach the blocks as it did in the profile.
        """
        self._range, self._stop, self._calls = blocks, blocks.stop, {}
        self._reached = set[int]()
        self.whole.take(batch)
        self._has_begun = not blocks.start
        if blocks.start:
            self._prefix = _OnMeta(self._known)
            self._prefix.input = x
            self._prefix.__enter__()  # type: ignore[no-untyped-call]
            _OnMeta.in_use = True
        try:
            result: Tensor = self.whole()
        except _Left as left:
            result = left.args[0]
        finally:
            self._leave_prefix()
            self._range = range(0)
        for index in blocks:
            if index not in self._reached:
                raise Unsupported(f"model: its forward does not call {self._names[index]}, as in the profile")
        return result

    def _leave_prefix(self) -> None:
        if self._prefix is not None:
            if self._has_begun:
                self._is_used_later[self._range] = self._prefix.is_used
            self._prefix.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._prefix, _OnMeta.in_use = None, False

    def _forward(self, forward: Callable[..., Any], known: dict[Any, Any], *args: Any, **kwargs: Any) -> Any:
        """Run a module; before the blocks of a pass, only once for the shapes of its input."""
        if not _OnMeta.in_use:
            return forward(*args, **kwargs)
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors_in((args, kwargs)))
        if shapes not in known:
            known[shapes] = forward(*args, **kwargs)
        return known[shapes]

    def _at_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._range:
            return None
        count = self._calls[module] = self._calls.get(module, 0) + 1
        index = self._starts[module].get(count)
        self._reached.update(() if index is None else (index,))
        if index is not None and index == self._stop:
            tensors = [tensor for tensor in tensors_in((args, kwargs)) if not tensor.is_meta]
            raise _Left(next((tensor for tensor in tensors if tensor.requires_grad), tensors[0]))
        if index == self._range.start and self._prefix is not None and not self._has_begun:
            self._has_begun, prefix = True, self._prefix
            if prefix.input is not None and getattr(module, "inplace", False):
                # Autograd refuses to change a leaf; it may be needed again.
                prefix.input = prefix.input.clone()
            given = prefix.begin(args, kwargs)
            if not self._is_used_later.get(self._range, True):
                self._leave_prefix()
            return given
        return None


def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters are on the meta device."""
    twins = ((id(own), own.detach().to("meta")) for own in module.parameters())
    return copy.deepcopy(module, {key: nn.Parameter(twin, requires_grad=False) for key, twin in twins})


def run_whole_before(module: nn.Module, whole: Callable[..., Any]) -> None:
    """Let a module that has been cut run as `whole` before the blocks of a pass, where only shapes count."""
    cut = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (whole if _OnMeta.in_use else cut)(*args, **kwargs)

    module.forward = forward


def drop_parameters(model: nn.Module, kept: Collection[str]) -> None:
    """Move the parameters of a model but for some to the meta device, where they take no memory."""
    for name, param in list(model.named_parameters()):
        if name not in kept:
            twin = nn.Parameter(param.detach().to("meta"), requires_grad=False)
            for module in model.modules():
                own = [key for key, each in module._parameters.items() if each is param]
                module._parameters.update(dict.fromkeys(own, twin))
