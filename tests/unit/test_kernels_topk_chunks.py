"""The kernels of topk in chunks agree bit for bit; the largest are sent; errors are within their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from codec_exam import F64, f64
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_exam import hard_tensors, same_bits
from tiers import examples

from mcr_plus.errors import BackendError
from mcr_plus.kernels import topk_chunks as kernel
from mcr_plus.kernels import topk_chunks_reference as reference
from mcr_plus.kernels import topk_records
from mcr_plus.kernels.topk_records import Chunking

SIZES = (1, 7, 100, 101, 5003, 9000)
BITS = (32, 16, 4, 2)


def encoded(values: torch.Tensor, how: Chunking) -> torch.Tensor:
    wire = torch.full((topk_records.nbytes(values.numel(), how),), 0xA5, dtype=torch.uint8)
    kernel.encode(values, wire, how)
    return wire


def decoded(values: torch.Tensor, how: Chunking) -> torch.Tensor:
    out = torch.full_like(values, 7)
    kernel.decode(encoded(values, how), out, how)
    return out


def by_reference(wire: torch.Tensor, numel: int, how: Chunking) -> torch.Tensor:
    out = torch.zeros(numel)
    for form, records, rows in topk_records.split(wire, out, how):
        rows.scatter_(1, *reference.contents_reference(records, form))
    return out


def check(what: str, values: torch.Tensor, how: Chunking) -> None:
    """Check the CPU kernels against the torch reference, which runs on GPUs too."""
    wire = encoded(values, how)
    expected = torch.zeros_like(wire)
    reference.encode_reference(values, expected, how)
    same_bits(what, wire, expected)
    expected_out = by_reference(expected, values.numel(), how)
    out = torch.full_like(values, 7)
    kernel.decode(wire, out, how)
    same_bits(what, out, expected_out)
    total = torch.linspace(-1, 1, values.numel())
    summed = torch.linspace(-1, 1, values.numel()) + expected_out * 0.3
    kernel.accumulate(wire, total, 0.3, how)
    torch.testing.assert_close(total, summed, rtol=1e-6, atol=1e-6, equal_nan=True)
    kernel.clear(wire, total, how)
    sent = torch.from_numpy(largest(values, how))
    assert not bool(total[sent].any())
    assert torch.equal(total[~sent], torch.linspace(-1, 1, values.numel())[~sent])


def largest(values: torch.Tensor, how: Chunking) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return whether each value is sent, by NumPy's stable sort of each chunk."""
    magnitudes = values.numpy().view(np.int32).astype(np.int64) & 0x7FFFFFFF
    flags = np.zeros(values.numel(), np.bool_)
    for at in range(0, values.numel(), how.chunk):
        part = magnitudes[at : at + how.chunk]
        many = max(1, math.ceil(how.ratio * part.size))
        flags[at + np.argsort(-part, kind="stable")[:many]] = True
    return flags


@pytest.mark.short("2", "4")
@pytest.mark.parametrize("bits", BITS)
def test_the_cpu_kernels_are_the_reference(bits: int) -> None:
    hows = [Chunking(100, 0.2, bits), Chunking(4096, 0.0156, bits)]
    for what, values in hard_tensors(SIZES):
        check(what, values, hows[values.numel() % 2])


@pytest.mark.short("2")
@pytest.mark.parametrize("bits", BITS)
def test_the_residual_is_the_part_that_was_not_sent(bits: int) -> None:
    """One pass has the bits of single steps in torch; values that are not finite are not kept."""
    random = torch.Generator().manual_seed(bits)
    for what, values in hard_tensors(SIZES):
        how = Chunking(100, 0.2, bits) if values.numel() % 2 else Chunking(4096, 0.125, bits)
        before, decay = torch.randn(values.numel(), generator=random), 0.95
        rest = before.clone()
        wire = torch.full((topk_records.nbytes(values.numel(), how),), 0xA5, dtype=torch.uint8)
        kernel.encode_rest(values, decay, rest, wire, how)
        total = before * decay + values
        expected = torch.zeros_like(wire)
        reference.encode_reference(total, expected, how)
        same_bits(what, wire, expected)
        left = total - by_reference(expected, values.numel(), how)
        same_bits(what, rest, left.nan_to_num(0.0, 0.0, 0.0))


@pytest.mark.parametrize("bits", BITS)
def test_payloads_are_summed_in_the_order_of_ranks(bits: int) -> None:
    how = Chunking(100, 0.2, bits)
    random = torch.Generator().manual_seed(bits)
    for numel in SIZES:
        ranks = torch.randn(3, numel, generator=random) * torch.tensor([[1.0], [1e4], [1e-4]])
        wires = torch.stack([encoded(each, how) for each in ranks])
        total = torch.full((numel,), torch.nan)
        kernel.sum_payloads(wires, total, 0.3, how)
        expected = torch.zeros(numel)
        for wire in wires:
            expected += by_reference(wire, numel, how) * 0.3
        same_bits("sum", total, expected)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=300),
    st.integers(64, 200),
    st.sampled_from([1e-6, 0.03, 0.25, 0.9, 1.0]),
    st.sampled_from(BITS),
)
def test_any_floats(values: list[float], chunk: int, ratio: float, bits: int) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    check("drawn", tensor, Chunking(chunk, ratio, bits))
    out = decoded(tensor, Chunking(chunk, ratio, 32))
    sent = largest(tensor, Chunking(chunk, ratio, 32))
    same_bits("exact", out, torch.where(torch.from_numpy(sent), tensor, 0.0))


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 65536), st.floats(1e-6, 1))
def test_a_position_takes_the_fewest_bits(length: int, ratio: float) -> None:
    """Within half a bit a place of the bits that the number of choices needs, and 64 bits of filling up."""
    how = Chunking(length, ratio, 32)
    sent = how.sent_of(length)
    form = topk_records.form_of(length, sent, 32)
    places = 32 * (form.codes - form.upper)
    choices = math.lgamma(length + 1) - math.lgamma(sent + 1) - math.lgamma(length - sent + 1)
    assert places <= min(length + 31, sent * math.ceil(math.log2(length + 1)) + sent + 64)
    assert places <= choices / math.log(2) + 0.6 * min(sent, length - sent) + 80 or places <= length + 31


def test_records_of_sparseloco() -> None:
    """64 of 4096 values in 2 bits: 128 + 384 bits of places, 128 of values, and a word of levels."""
    form = topk_records.form_of(4096, 64, 2)
    assert (form.low, form.spread) == (6, 1)
    assert [form.upper, form.lower, form.codes, form.words] == [1, 5, 17, 21]
    assert topk_records.nbytes(4096 * 10, Chunking(4096, 1 / 64, 2)) == 840
    dense = topk_records.form_of(4096, 2000, 2)
    assert (dense.low, dense.spread, dense.lower - dense.upper) == (0, 0, 128)


@pytest.mark.parametrize("kind", ["falling", "rising", "crowded", "zeros", "few"])
def test_chunks_that_mislead_each_other(kind: str) -> None:
    """Thresholds are guessed from the chunk before."""
    random = torch.Generator().manual_seed(2)
    rows = torch.randn(40, 4096, generator=random)
    scale = torch.arange(40.0)[:, None]
    if kind in ("falling", "rising"):
        rows *= 2 ** (scale if kind == "rising" else -scale)
    if kind == "crowded":
        rows[::3] *= 1e6
    if kind == "zeros":
        rows[1::2] = 0
    if kind == "few":
        rows *= torch.rand(40, 4096, generator=random) < 0.005
    values = rows.view(-1)[: 40 * 4096 - 77]
    for ratio in (1 / 64, 0.25):
        how = Chunking(4096, ratio, 32)
        flags = largest(values, how)
        wires = []
        before = torch.get_num_threads()
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                wires.append(encoded(values, how))
        finally:
            torch.set_num_threads(before)
        same_bits(kind, *wires)
        assert torch.equal(by_reference(wires[0], values.numel(), how), values * torch.from_numpy(flags))


def errors(values: torch.Tensor, how: Chunking) -> tuple[F64, F64]:
    """Return the values sent in a chunk, and their errors."""
    sent = largest(values, how)
    return f64(values)[sent], (f64(decoded(values, how)) - f64(values))[sent]


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=150))
def test_four_bits_are_within_half_a_level(values: list[float]) -> None:
    true, off = errors(torch.tensor(values, dtype=torch.float32), Chunking(200, 0.4, 4))
    magnitudes = np.abs(true)
    room = (magnitudes.max() - magnitudes.min()) / 14 + magnitudes.max() * 2.0**-7 + 2.0**-133
    assert np.abs(off).max() <= room


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=150))
def test_two_bits_are_means_of_parts(values: list[float]) -> None:
    """NumPy's oracle splits at the docstring's threshold and rounds the parts' means to bfloat16."""
    tensor = torch.tensor(values, dtype=torch.float32)
    true, off = errors(tensor, Chunking(200, 0.4, 2))
    magnitudes = np.abs(true)
    threshold = magnitudes.min() + 1.594 * (magnitudes.mean() - magnitudes.min())
    if (np.abs(magnitudes - threshold) < 1e-9 * magnitudes.max()).any():
        return  # on the edge either level is right
    above = magnitudes > threshold
    levels = np.zeros(true.size)
    for part in (above, ~above):
        if part.any():
            levels[part] = magnitudes[part].mean()
    expected = np.copysign(levels, true) - true
    assert np.abs(off - expected).max() <= magnitudes.max() * 2.0**-7 + 2.0**-130


def test_the_error_of_a_gaussian_tail() -> None:
    """With 64 of 4096 values two levels lose 0.4 % of the energy, eight levels 0.04 %."""
    values = torch.randn(4096 * 400, generator=torch.Generator().manual_seed(1))
    for bits, limit in ((2, 0.0045), (4, 0.0005)):
        true, off = errors(values, Chunking(4096, 1 / 64, bits))
        assert (off**2).sum() < limit * (true**2).sum()


def test_a_payload_that_contradicts_itself_is_refused() -> None:
    how = Chunking(100, 0.1, 32)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for word, value in ((0, 0), (0, -1), (1, -1)):
        wire = encoded(values, how)
        wire.view(torch.int32)[word] = value
        uses: list[Callable[[torch.Tensor, torch.Tensor], None]] = [
            lambda wire, out: kernel.decode(wire, out, how),
            lambda wire, out: kernel.accumulate(wire, out, 1.0, how),
            lambda wire, out: kernel.clear(wire, out, how),
        ]
        for use in uses:
            guarded = torch.full((1100,), 3.0)
            with pytest.raises(BackendError, match="1 chunks do not hold the places of 10 of 100 values"):
                use(wire, guarded[:1000])
            assert bool((guarded[1000:] == 3).all())
