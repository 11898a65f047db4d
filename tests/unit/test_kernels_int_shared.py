"""The kernels of int_shared agree bit for bit, and words add up like their lanes."""

from __future__ import annotations

import mmap

import pytest
import torch
from kernel_exam import Kernel, for_triton, hard_tensors, same_bits, triton_device

from mcr_plus.kernels import cpu
from mcr_plus.kernels import int_shared as kernel

SIZES = (1, 5, 255, 256, 257, 1000, 5003)
WIDTHS = pytest.mark.parametrize(("lanes", "levels"), [(4, 127), (4, 7), (2, 4095), (1, 2**20)])


def amax_of(values: torch.Tensor) -> torch.Tensor:
    amax = torch.zeros(kernel.blocks_of(values.numel()))
    kernel.amax_reference(values, amax)
    return amax


def words_of(values: torch.Tensor, levels: int, lanes: int) -> torch.Tensor:
    words = torch.full((kernel.words_of(values.numel(), lanes),), 0x55555555, dtype=torch.int32)
    kernel.encode_reference(values, amax_of(values), words, levels, lanes)
    return words


@WIDTHS
def test_the_cpu_kernels_are_the_reference(lanes: int, levels: int) -> None:
    for what, values in hard_tensors(SIZES):
        expected, amax = amax_of(values), torch.zeros(kernel.blocks_of(values.numel()))
        kernel.amax(values, amax)
        same_bits(what, expected, amax)
        words = words_of(values, levels, lanes)
        ours = torch.full_like(words, 0x55555555)
        kernel.encode(values, amax, ours, levels, lanes)
        same_bits(what, words, ours)
        outs = [torch.empty_like(values) for _ in range(2)]
        kernel.decode_reference(amax, words, outs[0], levels, lanes)
        kernel.decode(amax, words, outs[1], levels, lanes)
        same_bits(what, *outs)
        if outs[0].isfinite().all():
            total = torch.linspace(-1, 1, values.numel())
            expected = total - 0.5 * outs[0]
            kernel.accumulate(amax, words, total, levels, lanes, -0.5)
            same_bits(what, expected, total)


@pytest.mark.short("4-7", "2-4095")
@WIDTHS
def test_the_triton_kernels_are_the_reference(lanes: int, levels: int) -> None:
    device = triton_device()
    from mcr_plus.kernels.gpu import int_shared as gpu

    for what, values in for_triton(hard_tensors(SIZES)):
        expected, there = amax_of(values), values.to(device)
        amax = torch.zeros_like(expected, device=device)
        gpu.amax(there, amax)
        same_bits(what, expected, amax)
        words = words_of(values, levels, lanes)
        ours = torch.full_like(words, 0x55555555, device=device)
        gpu.encode(there, amax, ours, levels, lanes)
        same_bits(what, words, ours)
        out, total = torch.empty_like(values), torch.ones_like(values)
        kernel.decode_reference(expected, words, out, levels, lanes)
        kernel.accumulate(expected, words, total, levels, lanes, 0.3)
        for add, factor, wanted in ((False, 1.0, out), (True, 0.3, total)):
            got = torch.ones_like(there)
            gpu.decode(amax, ours, got, levels, lanes, factor, add)
            same_bits(what, wanted, got)


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_words_add_up_like_their_lanes(lanes: int) -> None:
    """Every sum that fits a lane comes out exactly, whatever its neighbours hold."""
    largest = 2 ** (32 // lanes - 1) - 1
    levels, ranks = min(largest // 3, 2**20), 3
    random = torch.Generator().manual_seed(lanes)
    choices = torch.tensor([-levels, -1, 0, 1, levels])
    codes = choices[torch.randint(5, (ranks, 1023), generator=random)]
    codes[:, :8] = torch.tensor([1, -1]).repeat(4) * levels  # all ranks at the ends
    amax = torch.full((kernel.blocks_of(1023),), float(levels))  # so that codes are the values
    total = torch.zeros(kernel.words_of(1023, lanes), dtype=torch.int64)
    for row in codes:
        words = torch.zeros(total.shape, dtype=torch.int32)
        kernel.encode(row.to(torch.float32), amax, words, levels, lanes)
        total += words
    out = torch.empty(1023)
    kernel.decode(amax, total.to(torch.int32), out, levels, lanes)
    torch.testing.assert_close(out, codes.sum(0).to(torch.float32), rtol=2e-7, atol=0)
    assert int(total.abs().max()) < 2**31


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_more_than_two_billion_values(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets do not wrap around at 2³¹: only the last blocks of a tensor are touched."""

    def untouched(numel: int, dtype: torch.dtype) -> torch.Tensor:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        return torch.frombuffer(mmap.mmap(-1, numel * 4, flags=flags), dtype=dtype)

    def at_the_end(run: Kernel, blocks: int, nbytes: int, *args: object) -> None:
        run(*args, blocks - 2, blocks)

    monkeypatch.setattr(cpu, "spread", at_the_end)
    numel = 2**31 + 1001
    values, out = untouched(numel, torch.float32), untouched(numel, torch.float32)
    amax = untouched(kernel.blocks_of(numel), torch.float32)
    words = untouched(kernel.words_of(numel, lanes), torch.int32)
    values[-3:] = torch.tensor([127.0, -2.0, 3.0])
    kernel.amax(values, amax)
    kernel.encode(values, amax, words, 127, lanes)
    kernel.decode(amax, words, out, 127, lanes)
    torch.testing.assert_close(out[-3:], values[-3:])
    assert not out[-300:-3].any()
