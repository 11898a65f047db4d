"""Local reduction of a verified operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from mcr_plus.backends.emulation import LocalReduce, local_reduce
from mcr_plus.backends.shm.reduce_kernels import reduce_rows
from mcr_plus.backends.shm.reductions import kernels_for

if TYPE_CHECKING:
    from mcr_plus.core.message import Signature

SMALL: Final = 64 << 10
"""Largest operation in bytes for which calling torch costs more than the reduction."""
EXACT: Final = {torch.float32, torch.float64, torch.int32, torch.int64}
"""Dtypes whose compiled kernels give the same bits as torch."""


def reduction(signature: Signature) -> LocalReduce:
    """Return a reduction of values in rank order, see `LocalReduce`."""
    assert signature.reduce_op is not None
    assert signature.dtype is not None
    if signature.dtype in EXACT and (signature.nbytes or SMALL + 1) <= SMALL:
        return _compiled(signature)
    return local_reduce(signature.reduce_op, signature.dtype)


def _compiled(signature: Signature) -> LocalReduce:
    assert signature.reduce_op is not None
    assert signature.dtype is not None
    combine, divide, _ = kernels_for(signature.dtype, signature.reduce_op)
    width = signature.dtype.itemsize

    def reduce_parts(parts: torch.Tensor, out: torch.Tensor) -> None:
        ranks, count = parts.shape
        reduce_rows(combine, divide, parts.data_ptr(), out.data_ptr(), ranks, count, width)

    return reduce_parts
