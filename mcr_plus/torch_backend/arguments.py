"""Translation of the arguments of c10d's calls."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from mcr_plus.core.kinds import REDUCE_OPS, ReduceOp, check_reducible
from mcr_plus.errors import Unsupported

# By the hash of torch's reduce op, which is its number.
TORCH_REDUCE_OPS: Final[dict[int, ReduceOp]] = {
    hash(getattr(dist.ReduceOp, name)): name for name in REDUCE_OPS
}


_PREMUL_SUM: Final = hash(dist.ReduceOp.PREMUL_SUM)


def reduction_of(opts: Any) -> tuple[ReduceOp, Any, bool]:
    """The name of the reduce op, the factor of PREMUL_SUM or None, and whether the call is asynchronous."""
    try:
        op, async_op = opts.reduceOp, opts.asyncOp
    except AttributeError:  # torch's other overloads pass the op alone or nothing
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
    """The root's rank in the group, and whether the call is asynchronous.

    One of torch's two overloads of these methods passes options, the other the root alone.
    """
    given = opts if root is None else root
    if given is None or hasattr(given, "__index__"):
        return operator.index(given or 0), True
    return given.rootRank, getattr(given, "asyncOp", True)


def scale(tensor: torch.Tensor, factor: Any) -> None:
    """Multiply the input of a sum in place; raises `Unsupported` for dtypes that cannot be summed."""
    check_reducible("SUM", tensor.dtype)
    tensor.detach().mul_(factor)


def scaled(tensors: Sequence[torch.Tensor], factor: Any) -> list[torch.Tensor]:
    """The tensors times the factor of a `PREMUL_SUM`; the same tensors if it is None."""
    return list(tensors) if factor is None else [tensor.detach() * factor for tensor in tensors]


NAME: Final = "mcr"
