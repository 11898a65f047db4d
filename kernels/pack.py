"""Join the parts of many tensors in one buffer, and split them again, on the host.

torch's own `cat` and `split_with_sizes_copy` want a view of every tensor that is not flat, which costs more
than copying it; here a tensor is an address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numba
import numpy as np
import torch

from mcr_plus.kernels.compiling import preparing
from mcr_plus.kernels.cpu import compiled

_numba: Any = numba  # annotated in part, which type checkers take for a mistake of ours
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
    """Copy row r of every tensor, one behind another, into row r of `whole`.

    Args:
        tensors: contiguous, on the host, of one dtype; each is `rows` rows of equal length.
        sizes: elements in a row of each.
        whole: contiguous, `rows` × sum(steps) elements of that dtype; apart from the tensors.
        rows: how many parts each tensor has.
        steps: elements from the beginning of each to that of the next, None for `sizes`; gaps become zero.
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
