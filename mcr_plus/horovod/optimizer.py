"""Horovod's `DistributedOptimizer`: reduces gradients as they become ready, and waits in `step()`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import torch

from mcr_plus.communicator.gradient_policy import TAG
from mcr_plus.core.units import whole_number
from mcr_plus.errors import InvalidArgument
from mcr_plus.horovod.compression import Compression
from mcr_plus.horovod.handle import Handle
from mcr_plus.horovod.reducing import Average, HorovodReduceOp, Sum, reduce_op_of
from mcr_plus.horovod.starting import reduce_async, synchronize
from mcr_plus.horovod.world import ProcessSet, global_process_set
from mcr_plus.training.foreign_optimizers import count_parameters, watch_steps

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
Param = torch.Tensor
Groups = int | Sequence[Sequence[torch.Tensor]] | None

_SLOW: Final = (
    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): the "
    "gradients are reduced again; put step() into `with optimizer.skip_synchronize():`"
)


class _Gradients:
    """Reduces the gradients of an optimizer's parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[Param, str],
        *,
        compression: Any,
        passes: int,
        op: HorovodReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        units: list[tuple[Param, ...]],
    ) -> None:
        self.names = names
        self.passes = passes
        self.waits = True  # True if `step` synchronizes
        self.synchronized = False
        self._optimizer = optimizer
        self._compression = compression
        self._op = op
        self._factors = (1.0 / predivide, predivide) if op == Average else (1.0, 1.0)
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._count = count_parameters(optimizer)
        self._units = units  # parameters whose gradients are reduced as one operation
        self._unit_of = {param: unit for unit in units for param in unit}
        self._left: dict[Param, int] = {}  # backward passes left until a gradient is complete
        self._handles: dict[tuple[Param, ...], Handle] = {}
        self._dense: dict[Param, torch.Tensor] = {}  # dense copies of sparse gradients
        self._hooks: list[Any] = [optimizer.register_step_pre_hook(self.before_step)]
        watch_steps(self, list(self._unit_of), _Gradients.before_other_step)
        self.begin()

    @property
    def busy(self) -> bool:
        """True if a backward pass has not been synchronized."""
        return bool(self._handles) or any(left != self.passes for left in self._left.values())

    @property
    def under_way(self) -> bool:
        """True if gradients are being reduced."""
        return bool(self._handles)

    def attach(self) -> None:
        """Install the hooks on all parameters."""
        for param in self._unit_of:
            if param.requires_grad:
                self._hooks.append(param.register_post_accumulate_grad_hook(self._ready))

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Expect `passes` backward passes."""
        self._left = dict.fromkeys(self._unit_of, self.passes)

    def _ready(self, param: Param) -> None:
        unit = self._unit_of[param]
        if unit in self._handles or self._left[param] <= 0:
            raise AssertionError(
                f"the gradient of '{self.names[param]}' was computed more than backward_passes_per_step "
                f"({self.passes}) times before step() or synchronize(); a larger backward_passes_per_step "
                "accumulates gradients"
            )
        self._left[param] -= 1
        if not any(self._left[member] for member in unit):
            self._start(unit)

    def _start(self, unit: tuple[Param, ...]) -> None:
        absent = len(unit) == 1 and unit[0].grad is None
        tensors = [self._gradient(param) for param in unit]
        many = len(unit) > 1
        name = f"gradient.{self.names[unit[0]]}" + (f"+{len(unit) - 1}" if many else "")
        self._handles[unit] = reduce_async(
            tensors, name, self._op, *self._factors, self._process_set,
            compression=self._compression, in_place=True, many=many, tag=TAG, absent=absent,
        )  # fmt: skip

    def _gradient(self, param: Param) -> torch.Tensor:
        if param.grad is None:
            # Other ranks may have a gradient, because their models took another branch.
            param.grad = torch.zeros_like(param)
        if param.grad.is_sparse and self._sparse_as_dense:
            self._dense[param] = param.grad.to_dense()
            return self._dense[param]
        if param.grad.is_sparse and len(self._unit_of[param]) > 1:
            raise InvalidArgument(
                f"groups: the gradient of '{self.names[param]}' is sparse; pass sparse_as_dense=True"
            )
        return param.grad

    def synchronize(self) -> None:
        """Reduce the remaining gradients, and wait for all gradients."""
        self.synchronized = True
        if not self._process_set.included():
            return
        try:
            for unit in self._units:
                trained = any(param.requires_grad or param.grad is not None for param in unit)
                if unit not in self._handles and trained:
                    self._start(unit)
            for unit, handle in self._handles.items():
                self._take(unit, synchronize(handle))
        finally:
            self._handles.clear()
            self._dense.clear()
            self.begin()

    def _take(self, unit: tuple[Param, ...], result: Any) -> None:
        results = result if len(unit) > 1 else [result]
        for param, value in zip(unit, results, strict=True):
            if param in self._dense:
                param.grad = value.to_sparse()
            elif value is not param.grad:
                param.grad = value

    def before_step(
        self, _optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Wait for the gradients before `step`; wrap a closure so that each of its runs reduces gradients."""
        if count_parameters(self._optimizer) != self._count:
            raise InvalidArgument(
                "optimizer: its parameters have changed since hvd.DistributedOptimizer; call it again"
            )
        # `args` begins with the optimizer.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        again = None
        if closure is not None and self.waits:
            again = (args[:1], {"closure": partial(self._closed, closure)})
        if self.waits and (closure is None or self.under_way):
            if self.synchronized:
                warnings.warn(_SLOW, stacklevel=3)
            self.synchronize()
        self.synchronized = False
        return again

    def before_other_step(self, optimizer: torch.optim.Optimizer, *_: bool) -> None:
        """Raise `InvalidArgument` if another optimizer would use gradients before they are reduced."""
        if optimizer is not self._optimizer and self.under_way:
            raise InvalidArgument(
                f"optimizer.step() was called on another optimizer ({type(optimizer).__name__}) of the "
                "parameters of hvd.DistributedOptimizer, whose gradients are being reduced; pass that one to "
                "hvd.DistributedOptimizer in its place, or call synchronize() first"
            )

    def _closed(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        self.synchronized = False
        return loss


class _Distributed(torch.optim.Optimizer):
    """Mixin with the methods that `DistributedOptimizer` adds to an optimizer."""

    _plain: type[torch.optim.Optimizer]
    _gradients: _Gradients

    @property
    def _parameter_names(self) -> dict[Param, str]:
        return self._gradients.names

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, before `step()`, for instance to clip them."""
        self._gradients.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which `step()` does not synchronize, for use after `synchronize()`."""
        before, self._gradients.waits = self._gradients.waits, False
        try:
            yield
        finally:
            self._gradients.waits = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate gradients over `passes` backward passes."""
        self._gradients.passes = _positive(passes)
        self._gradients.begin()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients like the plain optimizer. Raises `AssertionError` during their reduction."""
        if self._gradients.under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() and before optimizer.step() or "
                "optimizer.synchronize(), while gradients are being reduced"
            )
        super().zero_grad(set_to_none)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles are plain optimizers, because hooks cannot leave this process.
        return _blank, (self._plain,), self.__getstate__()


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> OptimizerT:
    """Make `optimizer` reduce gradients over ranks as they become ready; return it. `step()` waits for them.

    Args:
        optimizer: gets the methods `synchronize`, `skip_synchronize`, `set_backward_passes_per_step`.
        named_parameters: the model's named parameters, including all parameters of the optimizer; equal names
            on all ranks.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16`, `.codec(…)`, or a compressor of the program.
        backward_passes_per_step: the number of backward passes to sum before sending.
        op: Average or Sum (or Min, Max, Product, which skip ranks without a gradient).
        gradient_predivide_factor: the divisor before the sum and factor after it; only with Average.
        num_groups: deprecated, use `groups`.
        groups: the number of groups, or lists of parameters; each group is reduced as one operation.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: the participating ranks; on other ranks the optimizer stays local.

    Raises:
        InvalidArgument: a `ValueError`: missing, duplicate or unpaired names; options out of range.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    reduce_op = reduce_op_of(op)
    if gradient_predivide_factor != 1.0 and reduce_op != Average:
        raise InvalidArgument("gradient_predivide_factor: works with op=Average only")
    if not gradient_predivide_factor > 0:
        raise InvalidArgument(
            f"gradient_predivide_factor: expected a positive number, got {gradient_predivide_factor!r}"
        )
    if num_groups:
        warnings.warn("num_groups is deprecated; pass groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    passes = _positive(backward_passes_per_step)
    names = _names(optimizer, named_parameters)
    units = _units(optimizer, groups)
    if reduce_op not in (Average, Sum):  # a missing gradient cannot count as zero: do not group
        units = [(param,) for unit in units for param in unit]
    before: Any = optimizer
    if isinstance(optimizer, _Distributed):
        before._gradients.detach()
        before.__class__ = before._plain
    gradients = _Gradients(
        optimizer, names, compression=compression, passes=passes, op=reduce_op,
        predivide=gradient_predivide_factor, sparse_as_dense=sparse_as_dense, process_set=process_set,
        units=units,
    )  # fmt: skip
    if process_set.included():
        gradients.attach()
    # Changing the object's class keeps references valid, such as the reference of a learning-rate scheduler.
    plain: type = before.__class__
    before.__class__ = type(plain.__name__, (_Distributed, plain), {"_plain": plain})
    before._gradients = gradients
    return optimizer


def _blank(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return an uninitialised optimizer, for unpickling."""
    return kind.__new__(kind)


def _positive(passes: int) -> int:
    number = whole_number(passes)
    if number is None or number < 1:
        raise InvalidArgument(f"backward_passes_per_step: expected an integer from 1, got {passes!r}")
    return number


def _names(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[Param, str]:
    """Return a unique name for each parameter."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if named is None:
        return {
            param: f"{number}.{index}"
            for number, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group["params"])
        }
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise InvalidArgument(
            "named_parameters: expected pairs (name, parameter), such as model.named_parameters() gives"
        )
    listed = [name for name, _ in pairs]
    twice = sorted({name for name in listed if listed.count(name) > 1})
    if twice:
        raise InvalidArgument(f"named_parameters: names must differ; more than once: {', '.join(twice)}")
    names = {param: name for name, param in pairs}
    unnamed = [index for index, param in enumerate(params) if param not in names]
    if unnamed:
        raise InvalidArgument(
            f"named_parameters: {len(unnamed)} of the optimizer's {len(params)} parameters are not among "
            f"them; the first is its parameter {unnamed[0]} of shape {list(params[unnamed[0]].shape)}"
        )
    return {param: names[param] for param in params}


def _units(optimizer: torch.optim.Optimizer, groups: Groups) -> list[tuple[Param, ...]]:
    """Return the parameters grouped by operation; the result depends only on the model and `groups`."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if groups is None or (isinstance(groups, int) and groups == 0):
        return [(param,) for param in params]
    trained = [param for param in params if param.requires_grad]
    if isinstance(groups, int):
        if groups < 0:
            raise InvalidArgument(f"groups: expected a number from 0 or lists of parameters, got {groups}")
        each, more = divmod(len(trained), min(groups, len(trained)) or 1)
        units: list[tuple[Param, ...]] = []
        start = 0
        while start < len(trained):
            end = start + each + (len(units) < more)
            units.append(tuple(trained[start:end]))
            start = end
        return units
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise InvalidArgument("groups: expected a number from 0 or lists of parameters")
    seen: set[Param] = set()
    for param in (param for group in groups for param in group):
        if not isinstance(param, torch.Tensor):
            raise InvalidArgument(f"groups: expected parameters, got a {type(param).__name__}")
        if param in seen:
            raise InvalidArgument("groups: a parameter is in them more than once")
        seen.add(param)
    trained_set = set(trained)
    named = [tuple(param for param in group if param in trained_set) for group in groups]
    return [unit for unit in named if unit] + [(param,) for param in trained if param not in seen]
