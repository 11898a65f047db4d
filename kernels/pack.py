"""Gather the parts of many tensors into one buffer, and scatter them again, on the host.

torch's own `cat` and `split_with_sizes_copy` want a view of every tensor that is not flat, which costs more
than copying it; here a tensor is an address. Compiled on first use, in half a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numba
import numpy as np
import torch

_numba: Any = numba  # annotated in part, which type checkers take for a mistake of ours
_WORD: Final = numba.types.intp
_memcpy: Any = _numba.types.ExternalFunction("memcpy", _WORD(_WORD, _WORD, _WORD))


@_numba.njit(nogil=True)
def _gather(parts, sizes, rows, whole):  # type: ignore[no-untyped-def]
    length, at = sizes.sum(), whole
    for i in range(parts.size):
        for row in range(rows):
            _memcpy(at + row * length, parts[i] + row * sizes[i], sizes[i])
        at += sizes[i]


@_numba.njit(nogil=True)
def _scatter(parts, sizes, rows, whole):  # type: ignore[no-untyped-def]
    length, at = sizes.sum(), whole
    for i in range(parts.size):
        for row in range(rows):
            _memcpy(parts[i] + row * sizes[i], at + row * length, sizes[i])
        at += sizes[i]


def gather(tensors: Sequence[torch.Tensor], sizes: Sequence[int], whole: torch.Tensor, rows: int) -> None:
    """Copy row r of every tensor, one behind another, into row r of `whole`.

    Args:
        tensors: contiguous, on the host, of one dtype; each is `rows` rows of equal length.
        sizes: elements in a row of each.
        whole: contiguous, `rows` × sum(sizes) elements of that dtype; apart from the tensors.
        rows: how many parts each tensor has.
    """
    _gather(*_addresses(tensors, sizes, whole.element_size()), rows, whole.data_ptr())


def scatter(whole: torch.Tensor, sizes: Sequence[int], tensors: Sequence[torch.Tensor], rows: int) -> None:
    """The reverse of `gather`."""
    _scatter(*_addresses(tensors, sizes, whole.element_size()), rows, whole.data_ptr())


def _addresses(tensors: Sequence[torch.Tensor], sizes: Sequence[int], itemsize: int) -> tuple[Any, Any]:
    parts = np.array([tensor.data_ptr() for tensor in tensors], np.intp)
    return parts, np.array(sizes, np.intp) * itemsize
