"""Memory of gradient buckets: flat tensors; each `param.grad` is a view into one.

With `dispatch: {failover: true}` a bucket has three tensors, used in turn, so that nothing is copied: a pass
reads its gradients from one tensor and writes the means to the next. A rank that has the means of a pass may
start the next pass while other ranks still lack them. It cannot start the pass after the next before all
ranks have taken part in the next one. So gradients stay intact as long as a rank may need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.gradient_policy import Choice, GradientPolicy, key_of, with_codec
from mcr_plus.core.work import Work
from mcr_plus.engine.options import DispatchOptions
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.fusion.bucket import Bucket

_TURNS: Final = 3  # tensors of a bucket with failover


@dataclass(eq=False)
class ParameterSlot:
    """A parameter and its place in a bucket: `views` into the bucket's tensors, and `view` for this pass.

    `is_summed`: its bucket's `sums` have a gradient of it.
    """

    index: int
    name: str
    param: torch.nn.Parameter
    policy: GradientPolicy
    flat: Flat | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    view: torch.Tensor | None = None
    ready: bool = False
    is_summed: bool = False


@dataclass(eq=False)
class Flat:
    """Memory of a bucket, and the state of its operation.

    `memory`: one tensor that is reduced in place, or the tensors used in turn. `turn`: the index of the
    tensor that holds the gradients of this pass. `sums`: an `ExactSums` or None.
    """

    memory: list[torch.Tensor]
    slots: list[ParameterSlot]
    policy: GradientPolicy
    backend: str | None
    parts: tuple[tuple[int, ...], ...]  # shapes of the members and of the gaps between them
    gaps: list[torch.Tensor]
    nbytes: int  # as counted in the plan
    missing: int = 0
    work: Work | None = None
    turn: int = 0
    sums: Any = None

    def __post_init__(self) -> None:
        self.missing = len(self.slots)
        self.key = key_of([slot.name for slot in self.slots])

    @property
    def values(self) -> torch.Tensor:
        """This rank's gradients in this pass."""
        return self.memory[self.turn]

    @property
    def means(self) -> torch.Tensor:
        """Destination of the means; `values` if the bucket is reduced in place."""
        return self.memory[(self.turn + 1) % len(self.memory)]

    def reset(self) -> None:
        """Start the next backward pass; the means of this one are now the accumulated gradients."""
        if self.work is not None:
            self.turn = (self.turn + 1) % len(self.memory)
        self.missing, self.work = len(self.slots), None
        for slot in self.slots:
            slot.ready, slot.view, slot.is_summed = False, slot.views[self.turn], False
        if self.sums is not None:
            self.sums.reset()


def keeps_inputs(comm: Communicator, values: torch.Tensor) -> bool:
    """Return whether gradients in `values` must survive their reduction, so that it can run again.

    True for CPU tensors with `dispatch: {failover: true}`. GPU gradients are copied to the host in any case.
    """
    options = comm.stage_options("dispatch")
    has_failover = isinstance(options, DispatchOptions) and options.failover
    return has_failover and comm.size > 1 and values.device.type == "cpu"


def flat_of(comm: Communicator, slots: list[ParameterSlot], bucket: Bucket, choice: Choice) -> Flat:
    """Allocate a bucket for the gradients of these parameters, and move existing gradients into it."""
    first = slots[0].param
    numel = -(-bucket.nbytes // first.element_size())
    begins = [offset // first.element_size() for offset in bucket.offsets]
    values = torch.zeros(numel, dtype=first.dtype, device=first.device)
    ends = [begin + slot.param.numel() for slot, begin in zip(slots, begins, strict=True)]
    gaps = [values[end:begin] for end, begin in zip(ends, begins[1:], strict=False) if begin > end]
    policy = slots[0].policy
    backend = choice.library if policy.backend is None else policy.backend
    if choice.codec is not None and policy.compress is None:  # a rule overrides the choice
        policy = with_codec(policy, choice.codec)
    memory = [values]
    if keeps_inputs(comm, values) and not policy.encoded:  # encoded values have memory of their own
        memory += [torch.zeros_like(values) for _ in range(_TURNS - 1)]
    flat = Flat(memory, slots, policy, backend, _parts(slots, begins), gaps, bucket.nbytes)
    for slot, begin in zip(slots, begins, strict=True):
        slot.flat = flat
        slot.views = [_view(each, begin, slot.param) for each in memory]
        slot.view = slot.views[0]
        if slot.param.grad is not None:
            slot.view.copy_(slot.param.grad)
            slot.param.grad = slot.view
    return flat


def move_into_bucket(slot: ParameterSlot) -> None:
    """Copy the parameter's gradient into its bucket, unless it is a view of it; zeros if there is none."""
    param, view = slot.param, slot.view
    assert view is not None
    grad = param.grad
    if grad is None:
        view.zero_()
    elif grad is not view:
        _check(grad, slot, view)
        view.copy_(grad)
        param.grad = view


def add_to_sums(slot: ParameterSlot) -> None:
    """Add the parameter's gradient to the sums of its bucket, and take it from the parameter."""
    grad, view, flat = slot.param.grad, slot.view, slot.flat
    assert grad is not None
    assert view is not None
    assert flat is not None
    assert flat.sums is not None
    if grad is view:
        raise InvalidArgument(
            f"the gradient of '{slot.name}' is the mean of an earlier pass, to which nothing can be added "
            "exactly; call optimizer.zero_grad() before the first backward pass of a step, and make all "
            "passes of a step but the last within mcr.no_sync"
        )
    _check(grad, slot, view)
    if grad.stride() != view.stride():
        grad = view.copy_(grad)
    flat.sums.add(grad.as_strided((grad.numel(),), (1,)), view.storage_offset())
    slot.param.grad, slot.is_summed = None, True


def _check(grad: torch.Tensor, slot: ParameterSlot, view: torch.Tensor) -> None:
    if grad.is_sparse:
        raise Unsupported(f"the gradient of '{slot.name}' is sparse; build the layer with sparse=False")
    if grad.requires_grad:
        raise Unsupported(f"the gradient of '{slot.name}' has a graph (create_graph=True)")
    if grad.shape != view.shape or grad.dtype != view.dtype:
        raise InvalidArgument(
            f"the gradient of '{slot.name}' is {list(grad.shape)} of {grad.dtype}; "
            f"expected {list(view.shape)} of {view.dtype}"
        )


def _parts(slots: Sequence[ParameterSlot], begins: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of gradients and gaps in a bucket, in order; a gap is one-dimensional."""
    parts: list[tuple[int, ...]] = []
    end = 0
    for slot, begin in zip(slots, begins, strict=True):
        if begin > end:
            parts.append((begin - end,))
        parts.append(tuple(slot.param.shape))
        end = begin + slot.param.numel()
    return tuple(parts)


def _view(flat: torch.Tensor, offset: int, param: torch.Tensor) -> torch.Tensor:
    """Return a view of the bucket with the parameter's shape, and with its strides if they are dense."""
    part = flat[offset : offset + param.numel()]
    if _is_dense(param):
        return part.as_strided(param.shape, param.stride(), part.storage_offset())
    return part.view(param.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a range of memory without gaps, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
