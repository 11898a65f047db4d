"""Translation of the arguments of c10d's calls."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from mcr_plus.core.kinds import REDUCE_OPS, ReduceOp, check_reducible
from mcr_plus.errors import Unsupported

# Keyed by the hash of torch's reduce op, which is its number.
TORCH_REDUCE_OPS: Final[dict[int, ReduceOp]] = {
    hash(getattr(dist.ReduceOp, name)): name for name in REDUCE_OPS
}


_PREMUL_SUM: Final = hash(dist.ReduceOp.PREMUL_SUM)


def reduction_of(opts: Any) -> tuple[ReduceOp, Any, bool]:
    """Return the reduce op's name, the factor of PREMUL_SUM or None, and True if the call is asynchronous."""
    try:
        op, async_op = opts.reduceOp, opts.asyncOp
    except AttributeError:  # other overloads of torch pass only the op, or nothing
        if opts is None:
            return "SUM", None, True
        op, async_op = getattr(opts, "reduceOp", opts), getattr(opts, "asyncOp", True)
    number = hash(op)
    name = TORCH_REDUCE_OPS.get(number)
    if name is not None:
        return name, None, async_op
    if number == _PREMUL_SUM:
        return "SUM", op.__getstate__()[1], async_op
    raise Unsupported(f"reduce op number {number}; known: {', '.join(TORCH_REDUCE_OPS.values())}, PREMUL_SUM")


def rooted(opts: Any, root: Any) -> tuple[int, bool]:
    """Return the root's group rank, and True if the call is asynchronous.

    Torch has two overloads of these methods: one passes options, the other only the root.
    """
    given = opts if root is None else root
    if given is None or hasattr(given, "__index__"):
        return operator.index(given or 0), True
    return given.rootRank, getattr(given, "asyncOp", True)


def scale(tensor: torch.Tensor, factor: Any) -> None:
    """Multiply the input of a sum in place. Raises `Unsupported` for dtypes that cannot be summed."""
    check_reducible("SUM", tensor.dtype)
    tensor.detach().mul_(factor)


def scaled(tensors: Sequence[torch.Tensor], factor: Any) -> list[torch.Tensor]:
    """Return the tensors times the factor of a `PREMUL_SUM`; the same tensors if the factor is None."""
    return list(tensors) if factor is None else [tensor.detach() * factor for tensor in tensors]


NAME: Final = "mcr"
