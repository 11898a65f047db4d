"""Kernels of `sums: fixed` and `sums: exact`, against fractions and trees by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np
import pytest
import torch
from kernel_exam import triton_device

from mcr_plus.backends.shm.reductions import LEVELS, SumTable
from mcr_plus.core.kinds import ReduceOp
from mcr_plus.reproducible import torch_sums
from mcr_plus.reproducible.accumulators import ExactSums
from mcr_plus.reproducible.torch_sums import TorchSum

# Significant bits, exponent of the least positive value, and of the first power of two that overflows.
FORMATS: Final = {
    torch.float16: (11, -24, 16),
    torch.bfloat16: (8, -133, 128),
    torch.float32: (24, -149, 128),
    torch.float64: (53, -1074, 1024),
}
INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def reduced(rows: torch.Tensor, sums: Any, op: ReduceOp = "SUM") -> torch.Tensor:
    out = torch.empty_like(rows[0])
    SumTable(sums, rows.dtype, op, len(rows)).reduce(rows.reshape(-1), out)
    return out


def rounded(value: Fraction, dtype: torch.dtype) -> float:
    """Round to nearest even, by integers."""
    bits, least, overflows = FORMATS[dtype]
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    unit = Fraction(2) ** max(exponent - bits + 1, least)
    whole, rest = divmod(size, unit)
    whole += 2 * rest > unit or (2 * rest == unit and whole % 2)
    found = whole * unit
    number = math.inf if found >= Fraction(2) ** overflows else float(found)
    return number if value > 0 else -number  # the value itself may be beyond float64


def exact_sum(column: Sequence[float], dtype: torch.dtype) -> float:
    special = [value for value in column if not math.isfinite(value)]
    if special:
        return sum(special)
    total = sum(map(Fraction, column), Fraction())
    if total == 0:
        return -0.0 if all(math.copysign(1, value) < 0 for value in column) else 0.0
    return rounded(total, dtype)


def same(found: float, wanted: float) -> bool:
    if math.isnan(wanted):
        return math.isnan(found)
    return found == wanted and math.copysign(1, found) == math.copysign(1, wanted)


def addends(name: str, dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    """Return values of 1 to 8 ranks: any bits, normal ones, of many magnitudes, subnormal, cancelling."""
    ranks, count = int(rng.integers(1, 9)), int(rng.integers(1, 1100))
    shape, bits = (ranks, count), 8 * dtype.itemsize
    if name == "any bits":
        raw = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape, dtype=np.int64)
        return torch.from_numpy(raw).to(INTEGERS[dtype.itemsize]).view(dtype)
    low, high = {
        "normal": (0, 1),
        "magnitudes": (-60, 60),
        "subnormal": (FORMATS[dtype][1] - 2, FORMATS[dtype][1] + 30),
        "cancelling": (-90, 90),
        "overflow": (FORMATS[dtype][2] - 4, FORMATS[dtype][2] - 2),
    }[name]
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(low, high, shape)
    rows = torch.from_numpy(values).to(dtype)
    if name == "cancelling" and ranks > 1:
        rows[-1] = -rows[0]
    return rows


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["any bits", "normal", "magnitudes", "subnormal", "cancelling", "overflow"])
def test_exact_sums_are_rounded_once_and_do_not_depend_on_the_order(name: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    for _ in range(12):
        rows = addends(name, dtype, rng).contiguous()
        found = reduced(rows, "exact")
        columns = rows.double().T.tolist()
        for index in range(0, len(columns), max(1, len(columns) // 40)):
            wanted = exact_sum(columns[index], dtype)
            assert same(float(found[index].double()), wanted), (columns[index], wanted)
        order = torch.from_numpy(rng.permutation(len(rows)))
        again = reduced(rows[order].contiguous(), "exact")
        numbers = ~found.isnan()
        assert torch.equal(found[numbers].view(torch.uint8), again[numbers].view(torch.uint8))
        assert torch.equal(found.isnan(), again.isnan())


def tree(values: Sequence[torch.Tensor], combine: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Halve at the largest power of two below the number of leaves."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return combine(tree(values[:half], combine), tree(values[half:], combine))


@pytest.mark.parametrize("dtype", [*FORMATS, torch.complex64], ids=str)
@pytest.mark.parametrize("op", ["SUM", "PRODUCT"])
def test_a_fixed_sum_is_a_tree_over_the_ranks(op: ReduceOp, dtype: torch.dtype) -> None:
    half = dtype in (torch.float16, torch.bfloat16)
    for ranks in (*range(1, 18), 31, 64):
        for count in (1, 7, 2048, 5001):
            rows = torch.randn(ranks, count, generator=torch.Generator().manual_seed(count)).to(dtype)
            wide = [row.float() if half else row for row in rows]
            if op == "PRODUCT" and dtype.is_complex:
                continue  # torch may use fused multiplications
            wanted = tree(wide, torch.add if op == "SUM" else torch.mul).to(dtype)
            assert torch.equal(reduced(rows, "fixed", op), wanted), (ranks, count)


def test_groups_of_powers_of_two_have_the_same_leaves() -> None:
    """Four ranks, and two ranks with the sums of two each, give the same bits; so do 3 and 5 groups."""
    for leaves, groups in ((8, (2, 4)), (6, (3,)), (12, (3, 6)), (20, (5, 10))):
        rows = torch.randn(leaves, 999, generator=torch.Generator().manual_seed(1))
        whole = reduced(rows, "fixed")
        for ranks in groups:
            parts = torch.stack([reduced(part, "fixed") for part in rows.view(ranks, leaves // ranks, -1)])
            assert torch.equal(reduced(parts, "fixed"), whole), (leaves, ranks)


def test_the_memory_of_a_tree_is_enough_for_every_group() -> None:
    assert 2 ** (LEVELS - 1) >= 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["any bits", "normal", "magnitudes", "subnormal", "cancelling", "overflow"])
def test_accumulators_hold_whatever_is_added(name: str, dtype: torch.dtype) -> None:
    """Of one rank, and of several that share the addends in any way, at any place of a bucket."""
    rng = np.random.default_rng(4)
    for _ in range(6):
        rows = addends(name, dtype, rng)
        ranks, begin, size = int(rng.integers(1, 4)), int(rng.integers(0, 1500)), len(rows[0])
        buckets = [ExactSums(begin + size + 3) for _ in range(ranks)]
        for row in rows:
            buckets[int(rng.integers(ranks))].add(row, begin)
        firsts = [bucket.of_passes(len(rows))[0].clone() for bucket in buckets]
        for bucket in buckets:  # the all_reduce, and the all_gathers that may follow
            bucket._total.copy_(reduced(torch.stack(firsts), "exact"))
        parts = [torch.stack(bucket._parts) for bucket in buckets]
        lacking = [(each[1:] != 0).any(0).nonzero().view(-1) for each in parts]
        index = torch.cat(lacking).unique()
        answers: list[list[Any]] = [[each[:, index] for each in parts], lacking]
        means = torch.empty(begin + size + 3, dtype=dtype)
        buckets[0].write_means(means, lambda _: answers.pop())  # noqa: B023 - called at once
        columns = rows.double().T.tolist()
        for at in range(0, size, max(1, size // 40)):
            total = exact_sum(columns[at], torch.float64)
            with np.errstate(over="ignore"):
                single = np.float32(total / np.float64(len(rows) * ranks))
            wanted = torch.tensor(single).to(dtype).item()
            assert same(means[begin + at].item(), wanted), columns[at]
        assert not means[:begin].any()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["any bits", "normal", "magnitudes", "subnormal", "cancelling", "overflow"])
@pytest.mark.parametrize("way", ["torch", "triton"])
@np.errstate(all="ignore")  # Triton's interpreter computes by NumPy
def test_sums_on_a_device_have_the_bits_of_the_host(
    way: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which the tests above compare those of the host with fractions and trees."""
    device = "cpu"
    if way == "triton":
        device = triton_device()
        from mcr_plus.kernels.gpu import sums as kernels

        monkeypatch.setattr(torch_sums, "_kernels_for", lambda _: kernels)
    rng, integers = np.random.default_rng(6), INTEGERS[dtype.itemsize]
    ways: list[tuple[Any, ReduceOp]] = [
        ("fixed", "SUM"),
        ("fixed", "PRODUCT"),
        ("exact", "SUM"),
        ("exact", "AVG"),
    ]
    for sums, op in ways:
        for _ in range(6):
            rows = addends(name, dtype, rng).contiguous()
            wanted, found = reduced(rows, sums, op), torch.empty_like(rows[0], device=device)
            TorchSum(sums, dtype, op, len(rows)).reduce(rows.view(-1).to(device), found)
            same_bits = found.cpu().view(integers) == wanted.view(integers)
            assert (same_bits | (found.cpu().isnan() & wanted.isnan())).all(), (sums, op, len(rows))


@pytest.mark.parametrize("sums", ["fixed", "exact"])
def test_triton_adds_up_the_values_of_many_ranks(sums: Any) -> None:
    """Also of zeros of both signs; results that two float64 do not hold are reported."""
    device = triton_device()
    from mcr_plus.kernels.gpu import sums as kernels

    for ranks in (1, 2, 3, 5, 31, kernels.MOST):
        rows = torch.randn(ranks, 1025, generator=torch.Generator().manual_seed(ranks))
        rows[:, :4] = torch.tensor([[-0.0, 0.0, 2.0**120, 2.0**-149]])
        rows[ranks // 2 :, 1:3] *= -1
        out, lost = torch.empty(1025, device=device), torch.zeros(1025)
        if sums == "fixed":
            kernels.tree(rows.to(device), out, False)
        else:
            lost = kernels.exact(rows.to(device), out).cpu()
        wanted = reduced(rows, sums)
        assert torch.equal(out.cpu().view(torch.int32), wanted.view(torch.int32)), ranks
        assert not lost.any()
    apart = torch.tensor([[1.0, 2.0**100, 1.0], [2.0**-60, 1.0, 1.0], [2.0**-140, 2.0**-100, 1.0]])
    assert kernels.exact(apart.to(device), out[:3]).tolist() == [1, 1, 0]
