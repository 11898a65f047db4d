"""The kernels of powersgd, against NumPy in float64, against torch, and against themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from codec_exam import GUARD

from mcr_plus.kernels import powersgd as kernel


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


BOTH = pytest.mark.parametrize("orthonormalise", [kernel.orthonormalise, kernel.orthonormalise_reference])


def checked(factors: torch.Tensor) -> None:
    """Rows are orthonormal, as far as float32 can say."""
    basis = factors.to(torch.float64)
    unit = torch.eye(factors.shape[1], dtype=torch.float64).expand(len(factors), -1, -1)
    torch.testing.assert_close(basis @ basis.mT, unit, rtol=0, atol=3e-7)


@BOTH
@pytest.mark.parametrize(("rank", "size"), [(1, 1), (1, 7), (4, 4), (4, 33), (8, 1000), (5, 6)])
@pytest.mark.parametrize("scale", [1.0, 1e-42, 1e38])
def test_orthonormal_rows_span_the_same(orthonormalise, rank: int, size: int, scale: float) -> None:  # type: ignore[no-untyped-def]
    factors = drawn(3, rank, size).clamp(-3, 3) * scale
    before = factors.numpy().astype(np.float64)
    orthonormalise(factors, drawn(rank, size, seed=1))
    checked(factors)
    after = factors.numpy().astype(np.float64)
    for each in range(3):
        for upto in range(1, rank + 1):  # Gram-Schmidt: so do the first rows
            projected = before[each, :upto] @ after[each, :upto].T @ after[each, :upto]
            np.testing.assert_allclose(projected, before[each, :upto], rtol=0, atol=1e-5 * scale)


def test_the_kernel_and_the_reference_agree() -> None:
    ours, theirs = drawn(4, 5, 64), drawn(4, 5, 64)
    for factors in (ours, theirs):
        factors[1, 2] = factors[1, 0] * 2
        factors[2] = 0
        factors[3, 1] = torch.inf
    spare = drawn(5, 64, seed=9)
    kernel.orthonormalise(ours, spare)
    kernel.orthonormalise_reference(theirs, spare)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6, equal_nan=True)


@BOTH
def test_dependent_rows_are_replaced(orthonormalise) -> None:  # type: ignore[no-untyped-def]
    spare = drawn(4, 50, seed=1)
    zero = torch.zeros(1, 4, 50)
    twice = drawn(1, 4, 50)
    twice[0, 1] = twice[0, 0] * -3
    nearly = drawn(1, 4, 50)
    nearly[0, 2] = nearly[0, 0] * (1 + 1e-7) + nearly[0, 1]
    close = drawn(1, 1, 50) + 1e-5 * drawn(1, 4, 50, seed=3)
    for factors in (zero, twice, nearly, close):
        orthonormalise(factors, spare)
        checked(factors)
    none = torch.zeros(1, 4, 50)
    orthonormalise(none, torch.zeros(4, 50))
    assert not none.any()
    half = torch.zeros(1, 2, 50)
    orthonormalise(half, spare[:1].expand(2, 50).contiguous())  # the second spare row depends on the first
    assert half[0, 0].any()
    assert not half[0, 1].any()


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_spoil_only_their_matrix(orthonormalise, bad: float) -> None:  # type: ignore[no-untyped-def]
    factors = drawn(3, 4, 50)
    factors[1, 3, 49] = bad
    orthonormalise(factors, drawn(4, 50, seed=1))
    assert factors[1].isnan().all()
    checked(factors[::2])


@pytest.mark.parametrize("rank", [1, 3, 4, 6, 9])
@pytest.mark.parametrize("suffix", ["", "_reference"])
def test_factors_are_products(suffix: str, rank: int) -> None:
    for count, rows, columns in ((1, 1, 1), (3, 5, 7), (2, 3, 255), (2, 6, 256), (1, 2, 3000), (1, 300, 2)):
        stride, offset = rows * columns + 3, 5
        values = drawn(offset + count * stride)
        matrices = values[offset:].view(count, stride)[:, : rows * columns].reshape(count, rows, columns)
        factors = {"left": drawn(count, rank, rows, seed=1), "right": drawn(count, rank, columns, seed=2)}
        wide = {name: factor.to(torch.float64) for name, factor in factors.items()}
        for name, other, expected in (
            ("left", "right", wide["right"] @ matrices.to(torch.float64).mT),
            ("right", "left", wide["left"] @ matrices.to(torch.float64)),
        ):
            space = torch.full((expected.numel() + 4,), float(GUARD))
            found = space[2:-2].view(expected.shape)
            getattr(kernel, f"find_{name}{suffix}")(values, offset, stride, factors[other], found)
            torch.testing.assert_close(found.to(torch.float64), expected, rtol=1e-5, atol=1e-4)
            assert (space[[0, 1, -2, -1]] == GUARD).all()


@pytest.mark.parametrize("rank", [1, 3, 4, 6, 9])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("expand", [kernel.expand, "reference"])
def test_products_land_where_they_belong(expand, rank: int, add: bool) -> None:  # type: ignore[no-untyped-def]
    for count, rows, columns in ((1, 1, 1), (3, 5, 7), (2, 3, 1025), (1, 2, 3000)):
        left, right = drawn(count, rank, rows), drawn(count, rank, columns, seed=1)
        stride, offset = rows * columns + 3, 5
        values = torch.full((offset + count * stride + 2,), float(GUARD))
        expected = values.to(torch.float64)
        product = (left.to(torch.float64).mT @ right.to(torch.float64)) * -0.5
        for each in range(count):
            part = slice(offset + each * stride, offset + each * stride + rows * columns)
            expected[part] = product[each].reshape(-1) + (expected[part] if add else 0)
        if expand == "reference":
            kernel.expand_reference(left, right, values, offset, stride, -0.5, add)
        else:
            expand(left, right, values, offset, stride, factor=-0.5, add=add)
        torch.testing.assert_close(values.to(torch.float64), expected, rtol=1e-6, atol=4e-5)
        outside = torch.ones(len(values), dtype=torch.bool)
        for each in range(count):
            outside[offset + each * stride : offset + each * stride + rows * columns] = False
        assert (values[outside] == GUARD).all()


def test_the_same_bits_with_any_threads_and_alignment() -> None:
    rank, rows, columns, count = 6, 130, 1100, 24
    left, right, spare = (
        drawn(count, rank, rows),
        drawn(count, rank, columns, seed=1),
        drawn(rank, rows, seed=2),
    )
    found = []
    before = torch.get_num_threads()
    try:
        for threads, shift in itertools.product((1, 2, 3), (0, 1, 3)):
            torch.set_num_threads(threads)
            factors = torch.zeros(left.numel() + shift)[shift:].view(left.shape).copy_(left)
            kernel.orthonormalise(factors, spare)
            values = torch.zeros(count * rows * columns + shift)[shift:]
            kernel.expand(factors, right, values, 0, rows * columns)
            again = [torch.zeros_like(left), torch.zeros_like(right)]
            kernel.find_left(values, 0, rows * columns, right, again[0])
            kernel.find_right(values, 0, rows * columns, factors, again[1])
            found.append(torch.cat([each.view(-1) for each in (values, *again)]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(values, found[0]) for values in found)
