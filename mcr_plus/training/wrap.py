"""Data parallel training in one line (`mcr.wrap`)."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from torch.nn.utils import stateless

from mcr_plus import registry
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.gradient_policy import TAG, policy_for
from mcr_plus.communicator.transfer import broadcast_tensors
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.job.hooks import Follower
from mcr_plus.job.init import member_of
from mcr_plus.training.distributed_optimizer import averaged_optimizers
from mcr_plus.training.foreign_optimizers import count_parameters, has_closure, watch_steps
from mcr_plus.training.parameters import (
    compare,
    is_skipped,
    refuse_lazy,
    refuse_within_backward,
    trainable,
    unaveraged,
)
from mcr_plus.training.reducer import Reducer

if TYPE_CHECKING:
    from mcr_plus.bucketing.compiled import CompiledCall

Accumulate = Literal["fast", "exact"]
ModelT = TypeVar("ModelT", bound=torch.nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_wrapped: weakref.WeakKeyDictionary[torch.nn.Module, _Wrapped] = weakref.WeakKeyDictionary()


class _Inert:
    """Placeholder for a wrapped model's hooks in a pickle."""

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Do nothing: the copy is not wrapped."""


class _Wrapped(_Inert):
    """Hooks and reducer of a wrapped model; not part of the model's state."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        branch: str | None = None,
        exact: Any = None,
    ) -> None:
        self.model = weakref.ref(model)
        self.optimizer = weakref.ref(optimizer)
        self.comm = comm
        self.named = trainable(model)
        self.frozen = [
            param for param in model.parameters() if not param.requires_grad and not is_skipped(param)
        ]
        self.count = count_parameters(optimizer)
        params, _ = _held(model)
        self.parameters = len(params)
        self.trained = {id(param): param for param in params if param.requires_grad}
        self.reducer = Reducer(self.named, comm, branch, exact=exact)
        self.is_compiled = False
        self.handles = [
            model.register_forward_pre_hook(self.before_forward),
            optimizer.register_step_pre_hook(self.before_step),
        ]
        if exact is not None:
            optimizer.zero_grad = partial(_zero_grad, self.optimizer)  # type: ignore[method-assign]
        watch_steps(self, model, _Wrapped.before_other_step)
        if model._compiled_call_impl is not None:
            from mcr_plus.bucketing.compiled import CompiledCall  # only models of `mcr.compile` need it

            if isinstance(model._compiled_call_impl, CompiledCall):
                self.use(model._compiled_call_impl)

    def use(self, call: CompiledCall) -> None:
        """Use the hook of a compiled model; a forward hook cannot be part of a compiled graph."""
        self.is_compiled = True
        call.before = self.begin_forward
        self.reducer.use(call)

    def __deepcopy__(self, memo: object) -> _Wrapped:
        return self  # the hook ignores all models but `model`, so copies may share it

    def __reduce__(self) -> tuple[type[_Inert], tuple[()]]:
        return _Inert, ()

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:  # noqa: ARG002 - a hook
        if not self.is_compiled and module is self.model():
            self.begin_forward(module)

    def begin_forward(self, module: torch.nn.Module) -> None:
        """Complete a failed pass, check the parameters, and broadcast buffers."""
        self.reducer.recover()
        if not (module.training and torch.is_grad_enabled() and self.reducer.syncing):
            return
        # List them in every pass: a module may have assigned other tensors.
        params, buffers = _held(module)
        trained = self.trained
        if len(params) != self.parameters:
            self.check()
        elif any(param.requires_grad and id(param) not in trained for param in params) and not _is_swapped():
            self.check(missing=False)  # tolerate frozen ones: GANs, for example, freeze some for one pass
        buffers = [buffer for buffer in buffers if not is_skipped(buffer)]
        if buffers:
            broadcast_tensors(buffers, self.comm)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Call `check` if a cheap test indicates that parameters were added, removed, frozen or unfrozen.

        Raises `InvalidArgument` if gradients accumulated in `no_sync` have not been averaged since.
        """
        closes = has_closure(args, kwargs)
        self.refuse_sums(closes)
        self.reducer.note_step(closes)
        if self.reducer.detached and (name := unaveraged(self.named)) is not None:
            raise InvalidArgument(
                f"model: '{name}' is not averaged any more, as mcr.wrap has since been called on a part "
                "of the model; call it on the whole model last"
            )
        grown = count_parameters(optimizer) != self.count or any(p.requires_grad for p in self.frozen)
        if grown or not (self.reducer.all_used and all(param.requires_grad for _, param in self.named)):
            self.check()

    def before_other_step(self, optimizer: torch.optim.Optimizer, is_new: bool, has_closure: bool) -> None:
        """Check a step of another optimizer that trains parameters of the model, see `watch_steps`."""
        if optimizer is self.optimizer() or self.reducer.detached:
            return
        self.refuse_sums(has_closure)
        if is_new or any(param.requires_grad for param in self.frozen):
            self.check(missing=False)  # parameters that it does not train may be frozen during its steps

    def refuse_sums(self, has_closure: bool) -> None:
        """Raise `InvalidArgument` if this step would use gradients of this rank alone.

        These are gradients accumulated in `no_sync`, or gradients of a closure within it. Also raises within
        a backward pass whose gradients are being averaged.
        """
        refuse_within_backward(self.reducer)
        summed = self.reducer.exact is not None
        keeps = self.reducer.keeps and (summed or any(param.grad is not None for _, param in self.named))
        if keeps or (has_closure and not self.reducer.syncing):
            raise InvalidArgument(
                "optimizer.step: the gradients are of this rank alone, as the last backward pass was within "
                "mcr.no_sync; leave the block before the last pass of a step, or use mcr.local"
            )

    def check(self, *, missing: bool = True) -> None:
        """Raise `InvalidArgument` if the model's parameters differ from the wrapped ones.

        `missing`: also raise if parameters are gone or frozen, which never makes ranks differ.
        """
        model = self.model()
        if model is None or self.reducer.detached:
            return
        now, then = trainable(model), self.named
        have, had = {id(param) for _, param in now}, {id(param) for _, param in then}
        names = {name for name, _ in then}
        # Compare by identity: pruning, for one, renames a parameter.
        found = [
            (name, "was replaced" if name in names else "was added or unfrozen")
            for name, param in now
            if id(param) not in had
        ]
        if missing:
            found += [(name, "was removed or frozen") for name, param in then if id(param) not in have]
        for name, what in found:
            raise InvalidArgument(
                f"model: since mcr.wrap parameter '{name}' {what}; call mcr.wrap again on all ranks"
            )

    def detach(self) -> None:
        if not self.comm.closed:
            self.reducer.recover()  # peers may be waiting in a pass that failed on this rank
        self.reducer.detach()
        for handle in self.handles:
            handle.remove()


def wrap(
    model: ModelT,
    optimizer: OptimizerT,
    *,
    group: Communicator | None = None,
    accumulate: Accumulate = "fast",
) -> tuple[ModelT, OptimizerT]:
    """Make training data parallel over `group` (None: the whole job); returns the same two objects.

    Parameters and buffers are broadcast from the group's first rank. From then on the gradients of every
    backward pass are averaged while it runs: when `backward()` returns, `param.grad` is the mean over ranks,
    a view into a bucket, so clipping, `GradScaler` and `optimizer.step()` work unchanged. If no rank has a
    gradient of a parameter, its `grad` stays None. Buffers (running statistics) are broadcast before every
    forward pass in training mode.

    Parameters with `param.mcr_skip = True` (experts, shards), frozen parameters, and buffers with `mcr_skip`
    are ignored. `with mcr.no_sync(model):` accumulates without communication. Wrapping again replaces the
    first wrapping: do so on all ranks after adding, removing, freezing or unfreezing parameters.

    With `accumulate="exact"` the mean is over all backward passes of all ranks since the last step, those in
    `no_sync` among them, of exact sums: the same bits however many passes each rank has had, and in which
    order (docs/reproducible.md). So losses are not divided by the number of passes, and `grad` is None from
    pass to pass; `optimizer.zero_grad()` drops passes in `no_sync`. A gradient takes 16 bytes per element
    more, and is sent as float64.

    The pipeline's fuse stage sets the bucket sizes, by default 25 MiB and 1 MiB for the first. All ranks
    must run the same forward and backward passes. A parameter has one wrapping or `DistributedOptimizer`: a
    later one replaces an earlier one.

    A backward pass that raises after its first gradient is an error on all ranks. A pass that raises earlier,
    or that only one rank skips, is not detected: the rank's next pass is matched with its peers' current
    pass, and their last pass then has no partner.

    Args:
        model: in training or evaluation mode; changed in place.
        optimizer: of any class, with at least one parameter of the model.
        group: the ranks that train the model together; None is the whole job.
        accumulate: "fast", as autograd adds up passes, or "exact"; the same on all ranks.

    Raises:
        InvalidArgument: `model` or `optimizer` has another type, the optimizer has no parameter of the model,
            a parameter of a lazy module has no shape yet, ranks have different parameters or `accumulate`, or
            a rule gives a gradient that is added up exactly a codec. Raised by the
            next forward pass, or by `step()` of any optimizer of these parameters: parameters were added,
            replaced, unfrozen or removed, or (`step()` of this optimizer only) frozen. Raised by `step()`:
            all gradients come from passes in `no_sync`, or, with `accumulate="exact"`, there was no pass.
        Unsupported: in a backward pass, a gradient is sparse or has a graph (`create_graph=True`). With
            `accumulate="exact"`: a parameter is not of float32, bfloat16 or float16 in host memory, or a
            backward pass has reentrant checkpoints.

    Example:
        ```python
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = mcr.wrap(model, optimizer)
        model(torch.full((3, 4), float(mcr.get_rank()))).sum().backward()
        assert model.weight.grad.unique().tolist() == [1.5]  # the mean of 0 and 3, on both ranks
        optimizer.step()
        ```
    """
    comm = member_of(group)
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    held = {id(param) for param_group in optimizer.param_groups for param in param_group["params"]}
    if not any(id(param) in held for param in model.parameters()):
        raise InvalidArgument("optimizer: holds none of the model's parameters, so it cannot train the model")
    refuse_lazy((*model.named_parameters(), *model.named_buffers()))
    compare(comm, trainable(model), f"accumulate={accumulate!r}")
    exact = _exact_passes(trainable(model), comm, accumulate)
    both = [*model.parameters(), *model.buffers()]
    broadcast_tensors([tensor for tensor in both if not is_skipped(tensor)], comm)
    if (before := _wrapped.pop(model, None)) is not None:
        before.detach()
    _wrapped[model] = _Wrapped(model, optimizer, comm, exact=exact)
    return model, optimizer


def use_compiled(model: torch.nn.Module, call: CompiledCall) -> None:
    """Adapt the wrapping of a model, if there is one, to its compilation."""
    if (wrapped := _wrapped.get(model)) is not None:
        wrapped.use(call)


def is_wrapped(model: torch.nn.Module) -> bool:
    """Return whether `wrap` has hooked the model's gradients."""
    return model in _wrapped


def followers_of(groups: Sequence[Communicator]) -> list[Follower]:
    """Return the models and optimizers wrapped for these groups on this rank. The result keeps them alive."""
    found = []
    for model, wrapped in list(_wrapped.items()):
        optimizer = wrapped.optimizer()
        if optimizer is not None and wrapped.comm in groups:
            moved = partial(_move, model, optimizer)
            branch = wrapped.reducer.comm.name
            found.append(Follower("a model", wrapped.comm, branch, wrapped.named, moved))
    for averaged in list(averaged_optimizers.values()):
        if averaged.comm in groups:
            branch = averaged.reducer.comm.name
            found.append(Follower("an optimizer", averaged.comm, branch, averaged.named, averaged.move))
    return found


def _move(model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, branch: str) -> None:
    before = _wrapped[model]
    before.detach()
    _wrapped[model] = _Wrapped(model, optimizer, comm, branch, before.reducer.exact)


def _zero_grad(optimizer: weakref.ref[torch.optim.Optimizer], set_to_none: bool = True) -> None:
    """Drop exact sums too; a gradient of zeros would be one of the last step."""
    of = optimizer()
    for reducer in [each.reducer for each in _wrapped.values() if each.optimizer() is of]:
        reducer.drop_passes()
        set_to_none |= reducer.exact is not None
    zero_grad: Any = type(of).zero_grad  # type: ignore[union-attr]
    zero_grad(of, **({} if set_to_none else {"set_to_none": False}))


def _exact_passes(
    named: Sequence[tuple[str, torch.nn.Parameter]], comm: Communicator, accumulate: Accumulate
) -> Any:
    """Return an `ExactPasses` or None; raises for gradients that cannot be added up exactly."""
    if accumulate not in get_args(Accumulate):
        raise InvalidArgument(f"accumulate: expected 'fast' or 'exact', got {accumulate!r}")
    if accumulate == "fast":
        return None
    exact = registry.reproducible("accumulate='exact'")()
    for name, param in named:
        if param.dtype not in exact.dtypes or param.device.type != "cpu":
            raise Unsupported(
                f"accumulate='exact': '{name}' is of {param.dtype} on {param.device.type}; expected float32, "
                "bfloat16 or float16 in host memory"
            )
        if policy_for(comm.config, name, param.shape, param.nbytes, param.dtype, TAG, comm.size).encoded:
            raise InvalidArgument(
                f"accumulate='exact': the configuration gives the gradient of '{name}' a codec, which is not "
                f"exact; add a rule `match: {{tag: {TAG}}}` with `compress: {{codec: none}}` before others"
            )
    return exact


@contextmanager
def no_sync(model: torch.nn.Module) -> Iterator[None]:
    """Accumulate gradients locally in this block; the next backward pass outside averages the sum.

    Args:
        model: a model that `mcr.wrap` returned. All ranks enter the block for the same passes.

    Raises:
        InvalidArgument: `mcr.wrap` has not been called on `model`.

    Example:
        ```python
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = mcr.wrap(model, optimizer)
        x = torch.full((1, 4), float(mcr.get_rank()))
        with mcr.no_sync(model):
            model(x).sum().backward()  # no communication
        model(x).sum().backward()
        assert model.weight.grad.unique().tolist() == [1.0]  # the mean of 0 + 0 and 1 + 1 on two ranks
        ```
    """
    # `wrap` may have received the model itself, or the result of torch.compile.
    wrapped = _wrapped.get(model) or _wrapped.get(getattr(model, "_orig_mod", model))
    if wrapped is None:
        raise InvalidArgument("model: mcr.wrap has not been called on it")
    reducer = wrapped.reducer
    before, reducer.syncing = reducer.syncing, False
    try:
        yield
    finally:
        reducer.syncing = before


def _held(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    """Return parameters and buffers, each once; faster than `parameters()`, which builds names."""
    modules, seen = [model], {model}
    params: dict[int, torch.nn.Parameter] = {}
    buffers: dict[int, torch.Tensor] = {}
    for module in modules:  # the loop appends to `modules`
        for param in module._parameters.values():
            if param is not None:
                params[id(param)] = param
        for buffer in module._buffers.values():
            if buffer is not None:
                buffers[id(buffer)] = buffer
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return list(params.values()), list(buffers.values())


def _is_swapped() -> bool:
    """Return whether this pass runs in `torch.func.functional_call`, which swaps in other tensors."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None
