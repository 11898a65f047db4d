"""Three ways to a payload: torch, compiled for the CPU, and Triton (interpreted where there is no GPU)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import pytest
import torch
from codec_exam import samples
from tiers import examples

Kernel = Callable[..., object]


def triton_device() -> str:
    """Where Triton kernels run here: on the GPU, or interpreted on the CPU."""
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() else "cpu"


def hard_tensors(sizes: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """What codecs find hard, and what is not finite, at several places."""
    for size in sizes:
        for what, values in samples(size):
            yield f"{what} {size}", values
        for bad in (torch.nan, torch.inf, -torch.inf):
            _, values = next(samples(size))
            values[size // 3] = values[-1] = bad
            yield f"{bad} {size}", values


def for_triton(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Of hard tensors those that a Triton kernel is tried on: without a GPU and long tests every seventh.

    There are 15 of each size, so that every size is among them, and other kinds of the next size.
    """
    all_of_them = torch.cuda.is_available() or examples(100) == 100
    return islice(tensors, 0, None, 1 if all_of_them else 7)


def same_bits(what: str, first: torch.Tensor, *others: torch.Tensor) -> None:
    """All tensors are equal; NaN equals NaN, whatever its payload."""
    for other in others:
        other = other.cpu()
        if first.is_floating_point():
            assert torch.equal(first.isnan(), other.isnan()), what
            first, other = first.nan_to_num(nan=0.0), other.nan_to_num(nan=0.0)
        differing = int((first != other).sum())
        assert not differing, f"{what}: {differing} of {first.numel()} differ"
