"""The kernels of topk agree bit for bit, whatever the CPU kernels' first sample shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_exam import hard_tensors, same_bits

from mcr_plus.compression.topk import TopK, TopKOptions
from mcr_plus.errors import BackendError
from mcr_plus.kernels import topk as kernel

SIZES = (1, 7, 511, 512, 513, 5003, 65537)
DTYPES = (torch.float32, torch.bfloat16)


def encoded(values: torch.Tensor, sent: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    wire = torch.zeros(kernel.nbytes(values.numel(), sent, dtype), dtype=torch.uint8)
    kernel.encode(values, wire, sent, dtype)
    return wire


def check(what: str, values: torch.Tensor, sent: int, dtype: torch.dtype = torch.float32) -> None:
    """Check the CPU kernels against the torch reference, which runs on GPUs too."""
    wire = encoded(values, sent, dtype)
    expected = torch.zeros_like(wire)
    kernel.encode_reference(values, expected, sent, dtype)
    if dtype is torch.float32:  # elsewhere NaN may be rounded to any NaN
        same_bits(what, wire, expected)
    indices = kernel.indices_reference(expected, values.numel(), sent, dtype)
    *_, chosen = kernel.split(expected, values.numel(), sent, dtype)
    out, result = torch.zeros_like(values), torch.full_like(values, 7)
    out[indices] = chosen.float()
    kernel.decode(wire, result, sent, dtype)
    same_bits(what, result, out)
    total, sum_ = torch.linspace(-1, 1, values.numel()), torch.linspace(-1, 1, values.numel())
    kernel.accumulate(wire, total, 0.3, sent, dtype)
    sum_.index_add_(0, indices, chosen.float() * 0.3)
    torch.testing.assert_close(total, sum_, rtol=1e-6, atol=1e-6, equal_nan=True)
    kernel.clear(wire, total, sent, dtype)
    assert not bool(total[indices].any())
    untouched = torch.ones(values.numel(), dtype=torch.bool)
    untouched[indices] = False
    assert torch.equal(total[untouched], torch.linspace(-1, 1, values.numel())[untouched])


@pytest.mark.short("1e-06", "1.0")
@pytest.mark.parametrize("ratio", [1e-6, 0.01, 0.3, 1.0])
def test_the_cpu_kernels_are_the_reference(ratio: float) -> None:
    codec = TopK(TopKOptions(ratio=ratio))
    for what, values in hard_tensors(SIZES):
        for dtype in DTYPES if ratio == 0.01 else DTYPES[:1]:
            check(what, values, codec.sent(values.numel()), dtype)


def by_sorting(values: torch.Tensor, sent: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the indices of the largest, lower ones first among equals, by NumPy's stable sort."""
    magnitudes = values.numpy().view(np.int32).astype(np.int64) & 0x7FFFFFFF
    return np.sort(np.argsort(-magnitudes, kind="stable")[:sent])


def misleading(size: int) -> list[tuple[str, torch.Tensor]]:
    """Return tensors that are large enough to be sampled, and that mislead samples in different ways."""
    random = np.random.default_rng(1)
    gaussian = random.standard_normal(size).astype(np.float32)
    crowded = gaussian.copy()
    crowded[size // 3 : size // 3 + size // 50] *= 1000
    periodic = gaussian.copy()
    periodic[5::256] *= 1000
    few = np.zeros(size, np.float32)
    few[random.integers(0, size, size // 500)] = 1
    coarse = torch.from_numpy(gaussian).to(torch.bfloat16).float().numpy()
    spoilt = gaussian.copy()
    spoilt[: size // 20] = np.nan
    spoilt[size // 2 : size // 2 + size // 20] = -np.inf
    named = {"gaussian": gaussian, "crowded": crowded, "periodic": periodic, "few": few, "coarse": coarse}
    named |= {"zeros": np.zeros(size, np.float32), "equal": np.full(size, -2, np.float32), "spoilt": spoilt}
    named["sorted"] = np.sort(gaussian)
    return [(what, torch.from_numpy(array)) for what, array in named.items()]


@pytest.mark.short("0.2")
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.2])
def test_exact_where_a_sample_decides_and_where_it_misleads(ratio: float) -> None:
    size = 5 * 65536 + 777
    sent = TopK(TopKOptions(ratio=ratio)).sent(size)
    before = torch.get_num_threads()
    for what, values in misleading(size):
        wires = []
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                wires.append(encoded(values, sent))
        finally:
            torch.set_num_threads(before)
        same_bits(what, *wires)
        indices = kernel.indices_reference(wires[0], size, sent, torch.float32)
        np.testing.assert_array_equal(indices.numpy(), by_sorting(values, sent), what)
        check(what, values, sent)


@pytest.mark.parametrize("wrong", ["too high", "too low", "no room"])
def test_a_wrong_sample_changes_nothing(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, sent = 3 * 65536, 2000
    values = torch.randn(size, generator=torch.Generator().manual_seed(3))
    right = encoded(values, sent)
    floors = {
        "too high": (np.float32(4), size),
        "too low": (np.float32(0), size),
        "no room": (np.float32(1), sent),
    }
    floor, room = floors[wrong]
    monkeypatch.setattr(kernel, "_floor", lambda bits, sent: (floor.view(np.uint32), room))
    assert torch.equal(encoded(values, sent), right)


@pytest.mark.long
def test_more_than_two_billion_values() -> None:
    """The largest values are at the end; most values are never touched, and take no memory."""
    from codec_exam import untouched

    numel, sent = 2**31 + 70_000, 2148
    values = untouched(numel * 4, torch.float32)
    expected = torch.arange(1, sent + 1, dtype=torch.float32) - sent / 3
    expected[expected == 0] = 0.5
    at = numel - 1 - 31 * torch.arange(sent)
    values[at] = expected
    wire = encoded(values, sent)
    indices = kernel.indices_reference(wire, numel, sent, torch.float32)
    assert torch.equal(indices, at.flip(0))
    total = untouched(numel * 4, torch.float32)
    kernel.accumulate(wire, total, 2.0, sent, torch.float32)
    assert torch.equal(total[at], 2 * expected)
    kernel.clear(wire, values, sent, torch.float32)
    assert not bool(values[at].any())


def test_a_payload_that_contradicts_itself_is_refused() -> None:
    wire = encoded(torch.randn(1000), 10)
    wire[:4].view(torch.int32).fill_(11)
    with pytest.raises(BackendError, match="10 values has block counts that sum to 11"):
        kernel.decode(wire, torch.zeros(1000), 10, torch.float32)


def test_places_beyond_the_end_are_left_out() -> None:
    wire = encoded(torch.randn(1000), 10)
    places = kernel.split(wire, 1000, 10, torch.float32)[1]
    places.copy_(torch.full((10,), 65535))
    out, guarded = torch.zeros(1000), torch.full((70_000,), 3.0)
    for use in (
        kernel.decode,
        lambda *args: kernel.accumulate(args[0], args[1], 1.0, *args[2:]),
        kernel.clear,
    ):
        use(wire, guarded[:1000], 10, torch.float32)
        assert bool((guarded[1000:] == 3).all())
    kernel.decode(wire, out, 10, torch.float32)
    assert not bool(out.any())
