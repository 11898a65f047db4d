"""Join the parts of many tensors in one buffer, and split them again, on the host.

torch's own `cat` and `split_with_sizes_copy` need a view of every tensor that is not flat, which costs more
than copying the tensor. Here a tensor is passed as an address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numba
import numpy as np
import torch

from mcr_plus.kernels.compiling import preparing
from mcr_plus.kernels.cpu import compiled

_numba: Any = numba  # numba's partial annotations make type checkers report errors here
_WORD: Final = numba.types.intp
_memcpy: Any = _numba.types.ExternalFunction("memcpy", _WORD(_WORD, _WORD, _WORD))
_memset: Any = _numba.types.ExternalFunction("memset", _WORD(_WORD, _numba.types.intc, _WORD))


@compiled
def _join(parts, sizes, steps, rows, whole):  # type: ignore[no-untyped-def]
    length, at = steps.sum(), whole
    for i in range(parts.size):
        for row in range(rows):
            _memcpy(at + row * length, parts[i] + row * sizes[i], sizes[i])
            if steps[i] > sizes[i]:
                _memset(at + row * length + sizes[i], 0, steps[i] - sizes[i])
        at += steps[i]


@compiled
def _split(parts, sizes, steps, rows, whole):  # type: ignore[no-untyped-def]
    length, at = steps.sum(), whole
    for i in range(parts.size):
        for row in range(rows):
            _memcpy(parts[i] + row * sizes[i], at + row * length, sizes[i])
        at += steps[i]


def prepare() -> None:
    """Compile, or load from disk, the kernels of `join` and `split`."""
    with preparing("fused buffers"):
        for function in (_join, _split):
            function.compile((*[_WORD[::1]] * 3, _WORD, _WORD))


def join(
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[int],
    whole: torch.Tensor,
    rows: int,
    steps: Sequence[int] | None = None,
) -> None:
    """Concatenate row r of every tensor into row r of `whole`.

    Args:
        tensors: contiguous, on the host, of one dtype; each has `rows` rows of equal length.
        sizes: number of elements in a row of each tensor.
        whole: contiguous, `rows` × sum(steps) elements of the same dtype; shares no memory with the tensors.
        rows: number of parts of each tensor.
        steps: distances between consecutive tensors in elements, None for `sizes`; gaps become zero.
    """
    _join(*_addresses(tensors, sizes, steps, whole.element_size()), rows, whole.data_ptr())


def split(
    whole: torch.Tensor,
    sizes: Sequence[int],
    tensors: Sequence[torch.Tensor],
    rows: int,
    steps: Sequence[int] | None = None,
) -> None:
    """The reverse of `join`; gaps are left out."""
    _split(*_addresses(tensors, sizes, steps, whole.element_size()), rows, whole.data_ptr())


def _addresses(
    tensors: Sequence[torch.Tensor], sizes: Sequence[int], steps: Sequence[int] | None, itemsize: int
) -> tuple[Any, Any, Any]:
    parts = np.array([tensor.data_ptr() for tensor in tensors], np.intp)
    lengths = np.array(sizes, np.intp) * itemsize
    return parts, lengths, lengths if steps is None else np.array(steps, np.intp) * itemsize
