"""Stochastic rounding: one of the two neighbours, right on average, and the same however it is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from codec_exam import f64
from kernel_exam import for_triton, hard_tensors, same_bits, triton_device

from mcr_plus.compression.cast import Bf16, CastOptions, Fp16
from mcr_plus.kernels import cast as kernel
from mcr_plus.kernels import counter, cpu

DTYPES = (torch.bfloat16, torch.float16)
SIZES = (1, 5, 1023, 1024, 1025, 5003)

both = pytest.mark.parametrize("dtype", DTYPES)


def rounded(values: torch.Tensor, dtype: torch.dtype, *name: object) -> torch.Tensor:
    wire = torch.empty(values.shape, dtype=dtype)
    kernel.encode(values, wire, *name)
    return wire


def hardest() -> list[tuple[str, torch.Tensor]]:
    return [*hard_tensors(SIZES), all_exponents()]


def all_exponents() -> tuple[str, torch.Tensor]:
    """Every exponent with several mantissas, and every kind of NaN."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    words = [patterns | lower for lower in (0, 1, 0x7FFF, 0x8000, 0xFFFF)]
    return "all exponents", torch.cat(words).view(torch.float32)


@both
def test_the_cpu_kernels_are_the_reference(dtype: torch.dtype) -> None:
    for what, values in hardest():
        expected = torch.empty(values.shape, dtype=dtype)
        kernel.encode_reference(values, expected, counter.key_of(what, 0))
        same_bits(what, rounded(values, dtype, what).view(torch.int16), expected.view(torch.int16))


@pytest.mark.short("dtype0")
@both
def test_the_triton_kernels_are_the_reference(dtype: torch.dtype) -> None:
    device = triton_device()
    from mcr_plus.kernels.gpu import cast as gpu

    for what, values in (*for_triton(hard_tensors(SIZES)), all_exponents()):
        key = counter.key_of(what)
        expected = torch.empty(values.shape, dtype=dtype)
        kernel.encode_reference(values, expected, key)
        got = torch.empty(values.shape, dtype=dtype, device=device)
        gpu.encode(values.to(device), got, key)
        same_bits(what, expected.view(torch.int16), got.view(torch.int16))


@both
def test_one_of_two_neighbours(dtype: torch.dtype) -> None:
    """A value becomes one of its two neighbours; exact values, infinities and NaN stay."""
    for what, values in hardest():
        result, nan = rounded(values, dtype), values.isnan()
        assert torch.equal(result.isnan(), nan), what
        near = values.to(dtype)
        bits = near.view(torch.int16).to(torch.int32)
        below = torch.where(near.float().abs() > values.abs(), bits - 1, bits)
        above = torch.where(near.float() == values, below, below + 1)
        got = result.view(torch.int16).to(torch.int32)
        assert bool(((got == below) | (got == above))[~nan & (values.abs() < 65504)].all()), what
        if dtype is torch.float16:
            assert bool(result[values.abs() >= 65536].isinf().all()), what


VALUES = (1.0, 1 + 2**-12, -1.3, 3.14159, 1000.7)
SMALL_VALUES = (6.1e-5, -6e-5, 3.3e-5, 1.23e-7, -5.96e-8, 1e-8, 3e-10, 2.0**-40)  # subnormal in float16
DRAWS = 1 << 18


def off_in_sigmas(values: torch.Tensor, mean: Any, dtype: torch.dtype) -> Any:
    """Return the distance of means of `DRAWS` roundings from the values, in standard deviations of a mean."""
    true, near = f64(values), f64(values.to(dtype))
    bits = values.to(dtype).view(torch.int16)
    outward = (np.abs(near) < np.abs(true)).astype(np.int16) * 2 - 1
    neighbour = f64((bits + torch.from_numpy(outward)).view(dtype))
    gap = np.abs(neighbour - near)
    share = np.abs(true - near) / gap
    # 1 / DRAWS: the normal distribution's sigma says little about an event that hardly happens once.
    return np.abs(mean - true) / (gap * np.sqrt(share * (1 - share) / DRAWS + 1 / DRAWS**2))


@both
def test_unbiased(dtype: torch.dtype) -> None:
    """Many roundings of each value average to it within six sigma; to nearest, the control, they do not."""
    values = torch.tensor(VALUES + SMALL_VALUES)
    mean, seeds = np.zeros(values.numel()), 8
    for seed in range(seeds):
        many = values.repeat_interleave(DRAWS // seeds)
        result = f64(rounded(many, dtype, "seed", seed)).reshape(values.numel(), -1)
        mean += result.mean(1) / seeds
    assert off_in_sigmas(values, mean, dtype).max() < 6
    nearest = off_in_sigmas(values, f64(values.to(dtype)), dtype)
    assert (nearest > 6).sum() >= values.numel() // 2


@both
def test_neighbouring_draws_are_independent(dtype: torch.dtype) -> None:
    """Correlations of neighbours, steps and seeds are within six sigma of zero."""
    many = torch.full((DRAWS,), 1 + 2.0**-12 + 2.0**-9)
    steps = [f64(rounded(many, dtype, 0, step)) for step in range(2)]
    steps.append(f64(rounded(many, dtype, 1, 0)))
    steps = [each - each.mean() for each in steps]
    first = steps[0]
    for other in (*steps[1:], *(np.roll(first, shift) for shift in (1, 2, 64, 1024, 65536))):
        correlation = (first * other).sum() / np.sqrt((first**2).sum() * (other**2).sum())
        assert abs(correlation) < 6 / np.sqrt(DRAWS)


@both
def test_indices_of_more_than_32_bits_have_streams_of_their_own(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.full((3000,), 1 + 2.0**-9 + 2.0**-12)
    whole = rounded(values, dtype, "name")
    monkeypatch.setattr(kernel, "_SEGMENT", 1024)
    parts = rounded(values, dtype, "name").split(1024)
    assert torch.equal(parts[0], whole[:1024])
    assert not torch.equal(parts[1], whole[1024:2048])
    assert not torch.equal(parts[1], parts[0])


@both
def test_more_than_two_billion_values(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from codec_exam import untouched

    def at_the_end(kernel: Any, blocks: int, nbytes: int, *args: object) -> None:
        kernel(*args, blocks - 2, blocks)

    monkeypatch.setattr(cpu, "spread", at_the_end)
    numel = 2**31 + 1000
    values, wire = untouched(numel * 4, torch.float32), untouched(numel * 2, dtype)
    values[-1500:] = 1 + 2.0**-12
    kernel.encode(values, wire, "name")
    random = counter.draw_reference(torch.arange(numel - 1500, numel), counter.key_of("name", 0))
    low = 0xFFFF if dtype is torch.bfloat16 else 0x1FFF
    up = (random & low) + 2**11 > low  # float32's 2^-12 at 1
    step = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-10
    assert torch.equal(wire[-1500:].float(), 1 + up * step)


@pytest.mark.parametrize("codec", [Bf16, Fp16])
def test_draws_depend_on_seed_rank_key_and_count(codec: type[Bf16 | Fp16]) -> None:
    values = torch.full((300,), 1 + 2.0**-9 + 2.0**-12)

    def payloads(seed: int = 0, rank: int = 0, key: str = "key", count: int = 1) -> list[list[float]]:
        one = codec(CastOptions(rounding="stochastic", seed=seed))
        assert one.traits.unbiased
        one.enter(rank, key)
        wires = [torch.empty(300, dtype=one.wire_dtype) for _ in range(count)]
        for wire in wires:
            one.encode(values, wire)
        resumed = codec(CastOptions(rounding="stochastic", seed=seed))
        resumed.enter(rank, key)
        resumed.load_state(one.state())
        after = [torch.empty(300, dtype=one.wire_dtype) for _ in range(2)]
        one.encode(values, after[0])
        resumed.encode(values, after[1])
        assert torch.equal(*after)
        return [wire.tolist() for wire in wires]

    (first,) = payloads()
    assert payloads() == [first]
    others = [*payloads(count=2)[1:], *payloads(seed=1), *payloads(rank=1), *payloads(key="other")]
    assert all(other != first for other in others)
    assert len({tuple(other) for other in others}) == 4


def test_nearest_has_no_state() -> None:
    assert Bf16().state() == {}
    assert not Bf16().traits.unbiased
    assert Fp16(CastOptions(rounding="stochastic")).traits.unbiased
    assert not Fp16().traits.unbiased
