"""The memory of buckets of gradients: flat tensors; each `param.grad` is a view into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mcr_plus.core.work import Work
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.fusion.bucket import Bucket
from mcr_plus.training.policy import Choice, GradientPolicy, key_of, with_codec


@dataclass(eq=False)
class Slot:
    """A parameter and its place in a bucket."""

    index: int
    name: str
    param: torch.nn.Parameter
    policy: GradientPolicy
    flat: Flat | None = None
    view: torch.Tensor | None = None
    ready: bool = False


@dataclass(eq=False)
class Flat:
    """The memory of a bucket, and the state of its operation."""

    values: torch.Tensor
    slots: list[Slot]
    policy: GradientPolicy
    backend: str | None
    parts: tuple[tuple[int, ...], ...]  # the members' shapes, and the gaps between them
    gaps: list[torch.Tensor]
    nbytes: int  # as counted in the plan
    missing: int = 0
    work: Work | None = None

    def __post_init__(self) -> None:
        self.missing = len(self.slots)
        self.key = key_of([slot.name for slot in self.slots])


def flat_of(slots: list[Slot], bucket: Bucket, choice: Choice) -> Flat:
    """Allocate a bucket for the gradients of these parameters, and move existing ones into it."""
    first = slots[0].param
    numel = -(-bucket.nbytes // first.element_size())
    begins = [offset // first.element_size() for offset in bucket.offsets]
    values = torch.zeros(numel, dtype=first.dtype, device=first.device)
    ends = [begin + slot.param.numel() for slot, begin in zip(slots, begins, strict=True)]
    gaps = [values[end:begin] for end, begin in zip(ends, begins[1:], strict=False) if begin > end]
    policy = slots[0].policy
    backend = choice.library if policy.backend is None else policy.backend
    if choice.codec is not None and policy.compress is None:  # a rule decides for its parameters
        policy = with_codec(policy, choice.codec)
    flat = Flat(values, slots, policy, backend, _parts(slots, begins), gaps, bucket.nbytes)
    for slot, begin in zip(slots, begins, strict=True):
        slot.flat = flat
        slot.view = _view(flat.values, begin, slot.param)
        if slot.param.grad is not None:
            slot.view.copy_(slot.param.grad)
            slot.param.grad = slot.view
    return flat


def move_into_bucket(slot: Slot) -> None:
    """Copy the parameter's gradient into the bucket, unless it is a view of it; zeros without a gradient."""
    param, view = slot.param, slot.view
    assert view is not None
    grad = param.grad
    if grad is None:
        view.zero_()
    elif grad is not view:
        if grad.is_sparse:
            raise Unsupported(f"the gradient of '{slot.name}' is sparse; build the layer with sparse=False")
        if grad.requires_grad:
            raise Unsupported(f"the gradient of '{slot.name}' has a graph (create_graph=True)")
        if grad.shape != view.shape or grad.dtype != view.dtype:
            raise InvalidArgument(
                f"the gradient of '{slot.name}' is {list(grad.shape)} of {grad.dtype}; "
                f"expected {list(view.shape)} of {view.dtype}"
            )
        view.copy_(grad)
        param.grad = view


def _parts(slots: Sequence[Slot], begins: Sequence[int]) -> tuple[tuple[int, ...], ...]:
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
    """Return whether the elements fill a range of memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
