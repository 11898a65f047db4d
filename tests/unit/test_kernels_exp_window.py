"""exp_window: every bit pattern comes back, the payload is the reference's, and damage is noticed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from codec_exam import GUARD
from kernel_exam import hard_tensors

from mcr_plus.compression.exp_window import ExpWindow
from mcr_plus.errors import BackendError, Unsupported
from mcr_plus.kernels import exp_window as kernel

SIZES = (1, 5, 255, 256, 257, 1000, 5003)
DTYPES = (torch.float32, torch.bfloat16)

both = pytest.mark.parametrize("dtype", DTYPES)


def encoded(values: torch.Tensor) -> torch.Tensor:
    room = kernel.most_nbytes(values.numel(), values.dtype)
    space = torch.full((room + 8,), GUARD, dtype=torch.uint8)
    length = kernel.encode(values, space[:room])
    assert length % 4 == 0
    assert length <= room
    assert bool((space[room:] == GUARD).all())
    return space[:length]


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def check(what: str, values: torch.Tensor) -> torch.Tensor:
    wire, expected = encoded(values), kernel.encode_reference(values)
    assert wire.numel() == expected.numel(), what
    at = int((wire != expected).sum())
    padding = 3 * 6  # bytes between sections that mean nothing
    assert at <= padding, what
    out = torch.full((values.numel() + 8,), 7, dtype=values.dtype)
    for payload in (wire, expected):
        kernel.decode(payload, out[4:-4])
        assert same(out[4:-4].clone(), values), what
        assert bool((out[:4] == 7).all())
        assert bool((out[-4:] == 7).all())
    assert kernel.dtype_of(wire) is values.dtype
    return wire


@both
def test_the_cpu_kernels_are_the_reference(dtype: torch.dtype) -> None:
    for what, values in hard_tensors(SIZES):
        check(what, values.to(dtype))


@both
def test_all_bit_patterns(dtype: torch.dtype) -> None:
    """All patterns of the upper half, so every exponent, sign, and kind of NaN, in order and shuffled."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    shuffled = upper[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    for patterns in (upper, shuffled):
        lower = patterns * 40503 & 0xFFFF
        bits = patterns.to(torch.int16) if dtype is torch.bfloat16 else patterns << 16 | lower
        check("all", bits.view(dtype))


@both
@pytest.mark.parametrize("escapes", [0, 1, 159, 160, 161, 255])
def test_around_the_most_exponents_that_may_not_fit(dtype: torch.dtype, escapes: int) -> None:
    values = torch.ones(3 * 256)
    values[256 : 256 + escapes] = 2.0**-7
    values[0] = 2.0**-6  # the lowest that fits
    wire = check("escapes", values.to(dtype))
    plain = check("none", torch.ones(3 * 256).to(dtype))
    assert wire.numel() == plain.numel() + -(-min(escapes, 160) // 4) * 4


@both
def test_payload_lengths_of_gaussian_and_random_values(dtype: torch.dtype) -> None:
    """Gaussian values have the promised length. Random bits are hardly longer than the values."""
    numel = 1 << 18
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    nbytes = numel * dtype.itemsize
    low, high = (1.17, 1.18) if dtype is torch.float32 else (1.41, 1.43)
    assert low < nbytes / encoded(values).numel() < high
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)).view(dtype)
    assert encoded(noise).numel() <= nbytes + numel // 128 + 8
    assert encoded(noise).numel() > nbytes * 0.99


def damage(offset: Callable[[int], int], value: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    def apply(wire: torch.Tensor, numel: int) -> torch.Tensor:
        damaged = wire.clone()
        damaged[offset(numel)] = value
        return damaged

    return apply


DAMAGES: list[tuple[str, Callable[[torch.Tensor, int], torch.Tensor]]] = [
    ("ends after", lambda wire, numel: wire[:100]),
    ("cut off or damaged", lambda wire, numel: wire[:-4]),
    ("cut off or damaged", damage(lambda numel: 5, 200)),  # a head that counts more than there may be
    ("cut off or damaged", damage(lambda numel: 5, 160)),  # more than there are
    ("damaged in 1 blocks", damage(lambda numel: 5, 0)),  # fewer than the codes say
    ("begins with 9", damage(lambda numel: 0, 9)),
    ("begins with 0", lambda wire, numel: wire[:0]),
]


@both
@pytest.mark.parametrize(("what", "harm"), DAMAGES)
def test_damage_is_noticed(
    dtype: torch.dtype, what: str, harm: Callable[[torch.Tensor, int], torch.Tensor]
) -> None:
    numel = 2000
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    wire = harm(encoded(values), numel)
    with pytest.raises(BackendError, match=what):
        ExpWindow().decode(wire, values)
    with pytest.raises(BackendError, match=what):
        ExpWindow().decode_accumulate(wire, torch.zeros(numel))


def test_damage_anywhere_writes_nowhere_else() -> None:
    """Damage may cause wrong values or an error, but no access outside the tensors."""
    values = torch.randn(700, generator=torch.Generator().manual_seed(0))
    wire = encoded(values)
    random = np.random.default_rng(0)
    noticed = 0
    for _ in range(2000):
        damaged = wire.clone()
        damaged[int(random.integers(4, len(wire)))] = int(random.integers(256))
        space = torch.full((700 + 1000,), 7.0)
        try:
            kernel.decode(damaged, space[500:1200])
        except BackendError:
            noticed += 1
        assert bool((space[:500] == 7).all())
        assert bool((space[1200:] == 7).all())
    assert 0 < noticed < 2000


def test_payloads_carry_their_dtype() -> None:
    codec = ExpWindow()
    values = torch.randn(1000).to(torch.bfloat16)
    wire = torch.zeros(codec.wire_numel(1000), dtype=torch.uint8)
    length = codec.encode(values, wire)
    out, total = torch.zeros(1000), torch.ones(1000)
    codec.decode(wire[:length], out)
    assert torch.equal(out, values.float())
    codec.decode_accumulate(wire[:length], total, -0.5)
    torch.testing.assert_close(total, 1 - out / 2)
    total = torch.zeros(1000)
    narrow = torch.zeros(1000, dtype=torch.bfloat16)
    length = codec.encode(out * 1.001, wire)
    codec.decode(wire[:length], narrow)
    assert torch.equal(narrow, (out * 1.001).to(torch.bfloat16))


def test_more_than_two_billion_values() -> None:
    """The kernels' last blocks; the other blocks are never touched."""
    from codec_exam import untouched

    numel = 2**31 + 1000
    values = untouched(numel * 2, torch.bfloat16)
    values[-3:] = torch.tensor([1.0, -2.0, 3.0])
    wire = untouched(kernel.most_nbytes(numel, torch.bfloat16), torch.uint8).numpy()
    heads, codes, uppers, lowers, rest = kernel._split(wire, numel, 1)
    bits = kernel._bits(values)
    blocks = kernel.blocks_of(numel)
    did_not_fit = kernel._encode(bits, np.uint16(0), heads, codes, uppers, lowers, blocks - 2, blocks)
    rest[: did_not_fit.size] = did_not_fit
    starts = np.zeros(blocks, np.int64)
    starts[-1] = heads[-2] >> 8
    values[-3:] = 0
    assert kernel._decode(heads, codes, uppers, lowers, rest, starts, bits, blocks - 2, blocks) == 0
    assert values[-4:].tolist() == [0, 1, -2, 3]


def test_gpus_are_refused() -> None:
    class Elsewhere(torch.Tensor):
        @property
        def is_cuda(self) -> bool:  # type: ignore[override]
            return True

    values = torch.zeros(600).as_subclass(Elsewhere)
    codec = ExpWindow()
    wire = torch.zeros(codec.wire_numel(600), dtype=torch.uint8)
    with pytest.raises(Unsupported, match="codec exp_window: tensors on CUDA"):
        codec.encode(values, wire)
