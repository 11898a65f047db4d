"""Three implementations of a payload: torch, compiled for the CPU, and Triton (interpreted without a GPU)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import pytest
import torch
from codec_exam import samples
from tiers import examples

Kernel = Callable[..., object]


def triton_device() -> str:
    """Return the device of Triton kernels: the GPU, or the CPU, interpreted."""
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() else "cpu"


def hard_tensors(sizes: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that are hard for codecs, also with non-finite values at several places."""
    for size in sizes:
        for what, values in samples(size):
            yield f"{what} {size}", values
        for bad in (torch.nan, torch.inf, -torch.inf):
            _, values = next(samples(size))
            values[size // 3] = values[-1] = bad
            yield f"{bad} {size}", values


def for_triton(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors to try with Triton: every seventh without a GPU and long tests, else all.

    There are 15 of each size, so every size occurs, with different contents.
    """
    all_of_them = torch.cuda.is_available() or examples(100) == 100
    return islice(tensors, 0, None, 1 if all_of_them else 7)


def same_bits(what: str, first: torch.Tensor, *others: torch.Tensor) -> None:
    """Check that all tensors are equal; NaN equals NaN, whatever its payload."""
    for other in others:
        other = other.cpu()
        if first.is_floating_point():
            assert torch.equal(first.isnan(), other.isnan()), what
            first, other = first.nan_to_num(nan=0.0), other.nan_to_num(nan=0.0)
        differing = int((first != other).sum())
        assert not differing, f"{what}: {differing} of {first.numel()} differ"
