"""delta: all bits come back, payloads are the reference's and short, and damage never passes the digest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from bit_flips import missed
from hypothesis import given
from hypothesis import strategies as st
from kernel_exam import triton_device

from mcr_plus.compression.copies import Copies
from mcr_plus.compression.delta import Delta, DeltaState
from mcr_plus.errors import BackendError
from mcr_plus.kernels import delta as kernel
from mcr_plus.kernels import digest as digests
from mcr_plus.kernels.delta_reference import reference_encode

GUARD = 165
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool,
    torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
SIZES = (0, 1, 3, 7, 1000, digests.BLOCK, digests.BLOCK + 1, 3 * digests.BLOCK - 5)
DENSITIES = (0.0, 1e-4, 0.01, 0.5, 1.0)


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(BITS[values.element_size()])


def pair(
    numel: int, dtype: torch.dtype, density: float, seed: int = 0, steps: int = 40
) -> list[torch.Tensor]:
    """Return random bits, including NaN payloads, and a copy with some values moved by some steps."""
    draw = np.random.default_rng(seed)
    width = dtype.itemsize
    bits = torch.empty(numel, dtype=BITS[width])
    bits.view(torch.uint8).copy_(torch.from_numpy(draw.integers(0, 256, numel * width, np.uint8)))
    if dtype is torch.bool:
        bits &= 1
    moved = torch.from_numpy(draw.random(numel) < density)
    step = torch.from_numpy(draw.integers(-steps, steps, numel)).to(bits.dtype)
    new = torch.where(moved, bits ^ 1 if dtype is torch.bool else bits + step, bits)
    return [bits.view(dtype), new.view(dtype)]


def encoded(
    new: torch.Tensor, old: torch.Tensor, versions: tuple[int, int] = (3, 5), *, update: bool = False
) -> torch.Tensor:
    room = kernel.most_nbytes(new.numel(), new.element_size())
    space = torch.full((room + 8,), GUARD, dtype=torch.uint8)
    length = kernel.encode(new, old, space[:room], versions, digests.digest(old), update=update)
    assert length % 4 == 0
    assert length <= room
    assert bool((space[room:] == GUARD).all())
    return space[:length].clone()


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(bits_of(first), bits_of(second))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_bits_come_back(dtype: torch.dtype) -> None:
    for numel in SIZES:
        for density in DENSITIES:
            old, new = pair(numel, dtype, density, seed=numel)
            wire = encoded(new, old)
            head = kernel.header_of(wire)
            assert (head.numel, head.width, head.target) == (numel, dtype.itemsize, 5)
            assert wire.numel() <= max(1.02 * new.nbytes, new.nbytes + 100)
            if not head.is_anchor and new.nbytes <= 40_000:
                assert torch.equal(wire, reference_encode(new, old, (3, 5))), (numel, density)
                assert (head.base, head.base_digest) == (3, digests.digest(old))
            space = torch.full((numel + 32,), 0, dtype=BITS[dtype.itemsize])
            out = space[16 : 16 + numel]
            out.copy_(bits_of(old))
            assert kernel.apply(wire, out.view(dtype)) == head
            assert same(out, new)
            assert not space[:16].any()
            assert not space[16 + numel :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64], ids=str)
def test_an_anchor_needs_no_base(dtype: torch.dtype) -> None:
    for numel in SIZES:
        _, new = pair(numel, dtype, 1.0)
        wire = torch.full((kernel.most_nbytes(numel, dtype.itemsize),), GUARD, dtype=torch.uint8)
        wire = wire[: kernel.encode_anchor(new, wire, 9)].clone()
        out = torch.zeros_like(new)
        head = kernel.apply(wire, out)
        assert head.is_anchor
        assert (head.base, head.target) == (0, 9)
        assert same(out, new)
        assert kernel.changed(wire) == numel


@pytest.mark.short("torch.float32")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_the_triton_kernels_are_the_reference(dtype: torch.dtype) -> None:
    device = triton_device()
    from mcr_plus.kernels.gpu import delta as gpu

    for numel, density in ((7, 0.5), (5003, 0.01), (digests.BLOCK + 1, 0.2), (40_000, 0.01), (17_000, 1.0)):
        old, new = pair(numel, dtype, density, seed=numel)
        blocks = digests.blocks_of(numel)
        expected = reference_encode(new, old, (3, 5))
        end = kernel.header_of(expected).nbytes
        wire = expected[kernel.HEADER : end]
        bits = [bits_of(values).to(device) for values in (new, old)]
        heads, lists = gpu.encode(*bits)
        words = wire[: 4 * blocks].clone().view(torch.int16).to(torch.int32).view(blocks, 2) & 0xFFFF
        assert torch.equal(heads.cpu(), words), (numel, density)
        assert torch.equal(lists.cpu(), wire[4 * blocks :]), (numel, density)
        space = torch.zeros(numel + 32, dtype=BITS[dtype.itemsize], device=device)
        space[16:-16] = bits[1]
        gpu.apply(heads, lists, space[16:-16])
        assert torch.equal(space[16:-16], bits[0])
        assert not space[:16].any()
        assert not space[-16:].any()


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Choose whether tensors on the CPU are taken for tensors on a GPU, where there is none."""
    triton_device()

    def choose(there: bool) -> None:
        for module in (kernel, digests):
            monkeypatch.setattr(module, "on_gpu", lambda values: there or values.is_cuda)

    yield choose
    monkeypatch.undo()


@pytest.mark.short("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_payloads_made_on_a_gpu_are_those_of_the_cpu(
    dtype: torch.dtype, as_on_gpu: Callable[[bool], None]
) -> None:
    device = triton_device()
    cases = [(0, 0.0), (5, 0.5), (9, 0.5), (4003 // dtype.itemsize, 0.01), (777, 1.0)]
    if dtype is torch.uint8:  # wider ones take many times as long in the interpreter
        cases += [(digests.BLOCK + 4, 0.2)]
        many, _ = pair(16 * digests.BLOCK + 9, dtype, 0.0)  # more blocks than a program has
        as_on_gpu(False)
        digest = digests.digest(many)
        as_on_gpu(True)
        assert digests.digest(many.to(device)) == digest
    for numel, density in cases:
        old, new = pair(numel, dtype, density, seed=numel)
        as_on_gpu(False)
        expected, digest = encoded(new, old), digests.digest(new)
        as_on_gpu(True)
        here, there = old.clone().to(device), new.to(device)
        assert digests.digest(there) == digest
        space = torch.full(
            (kernel.most_nbytes(numel, dtype.itemsize),), GUARD, dtype=torch.uint8, device=device
        )
        length = kernel.encode(there, here, space, (3, 5), digests.digest(here), update=True)
        assert same(here.cpu(), new)
        wire = space[:length]
        head = kernel.header_of(wire)
        if kernel.header_of(expected).mode == head.mode:
            assert torch.equal(wire.cpu(), expected), (numel, density)
        for payload, on_gpu in ((wire, False), (expected.to(device), True)):
            as_on_gpu(on_gpu)
            out = old.clone().to(device if on_gpu else "cpu")
            kernel.apply(payload if on_gpu else payload.cpu(), out)
            assert same(out.cpu(), new)
        damaged = expected.to(device).clone()
        if numel > 100:
            damaged[kernel.HEADER + 4 * digests.blocks_of(numel) + 20] ^= 4
            with pytest.raises(BackendError):
                kernel.apply(damaged, old.clone().to(device))


@pytest.mark.long
def test_the_codec_uses_the_kernels_for_gpus(as_on_gpu: Callable[[bool], None]) -> None:
    """Two ranks have states, one of them with tensors on a GPU; they send anchors and changes."""
    device, codec = triton_device(), Delta()
    one, other = (DeltaState(codec, Copies()) for _ in range(2))
    _, values = pair(10_001, torch.uint8, 1.0)
    for call in range(6):
        gpu_sends = call < 3
        sender, receiver = (one, other) if gpu_sends else (other, one)
        values = bumped(values, call)
        as_on_gpu(gpu_sends)
        given = values.to(device) if gpu_sends else values
        wire = torch.zeros(codec.room(values.numel(), values.dtype), dtype=torch.uint8, device=given.device)
        written = sender.encode_part(0, given, wire)
        assert (written < values.nbytes / 20) == (call not in (0, 3)), call
        as_on_gpu(not gpu_sends)
        out = torch.empty_like(values, device="cpu" if gpu_sends else device)
        receiver.decode_part(0, wire[:written].to(out.device), out)
        assert same(out.cpu(), values), call


def bumped(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Move a hundredth of the elements by one step of their bits."""
    draw = torch.Generator().manual_seed(seed)
    return values + (torch.rand(values.shape, generator=draw) < 0.01).to(values.dtype)


def test_the_old_version_becomes_the_new_one() -> None:
    for density in DENSITIES:
        old, new = pair(50_000, torch.bfloat16, density)
        plain, held = encoded(new, old), old.clone()
        assert torch.equal(encoded(new, held, update=True), plain)
        assert same(held, new)


def test_steps_of_one_are_short_for_every_sign_and_size_of_a_value() -> None:
    """The step from the least negative to the least positive value, through both zeros, is short, too."""
    order = [*range(0xFFFF, 0x7FFF, -1), *range(0x8000)]  # bits in the order of floats
    old, new = torch.tensor(order[:-1]).to(torch.int16), torch.tensor(order[1:]).to(torch.int16)
    for first, second in ((old, new), (new, old)):
        wire = encoded(second.view(torch.bfloat16), first.view(torch.bfloat16))
        assert wire.numel() <= 3 / 8 * old.numel() + 64 + 4 * (4 + 3) + 4
        out = first.clone()
        kernel.apply(wire, out.view(torch.bfloat16))
        assert same(out, second)


def test_a_change_of_one_per_cent_takes_little_more_than_its_entropy() -> None:
    """The entropy of gaps and steps is 1.2 bytes per change."""
    draw = np.random.default_rng(1)
    old = torch.from_numpy(draw.normal(0, 0.02, 2_000_000)).to(torch.bfloat16)
    moved = torch.from_numpy(draw.random(old.numel()) < 0.01)
    shares = [0.02, 0.05, 0.43, 0.43, 0.05, 0.02]
    step = torch.from_numpy(draw.choice([-3, -2, -1, 1, 2, 3], old.numel(), p=shares))
    new = torch.where(moved, old.view(torch.int16) + step.to(torch.int16), old.view(torch.int16))
    wire = encoded(new.view(torch.bfloat16), old)
    assert kernel.changed(wire) == int(moved.sum())
    assert wire.numel() < 1.4 * int(moved.sum())


def test_the_digest_is_the_reference_and_depends_on_every_bit_and_its_place() -> None:
    draw = np.random.default_rng(2)
    for numel in (0, 1, 63, 64, 65, 999, 2 * digests.BLOCK + 3):
        values = torch.from_numpy(draw.integers(0, 256, numel, np.uint8))
        digest = digests.digest(values)
        assert digest == digests.reference_digest(values)
        for at in draw.integers(0, numel, 20 if numel else 0):
            other = values.clone()
            other[at] ^= 1 << int(draw.integers(8))
            assert digests.digest(other) != digest
    # The highest bits of two elements: plain multiplications would miss these flips.
    base = torch.zeros(4096)
    seen = {
        digests.digest(base),
        digests.digest(torch.zeros(4095)),
        digests.digest(torch.zeros(8192).bfloat16()),
    }
    for first in (1, 2, 7, 8, 9, 2000):
        for second in (3000, 3001, 3008):
            other = base.clone()
            other[first], other[second] = -0.0, -0.0
            seen.add(digests.digest(other))
    assert len(seen) == 3 + 18
    values = torch.randn(4096)
    for shift in (1, 2, 8, 16, 2048):
        assert digests.digest(values.roll(shift)) != digests.digest(values)


@pytest.mark.parametrize("nbytes", [64, 52, 4 * 64])
def test_flips_of_signs_do_not_cancel_each_other_in_a_digest(nbytes: int) -> None:
    raw = torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8))
    assert missed(digests.digest, raw, lanes=8) == []
    # The last words of two blocks, which are hashed one after another.
    values = torch.zeros(2 * digests.BLOCK, dtype=torch.uint8)
    before = digests.digest(values)
    for width in (1, 2, 4, 8):
        flipped = [digests.BLOCK - 1, 2 * digests.BLOCK - 1 - (8 - width)]
        values[flipped] ^= 0x80
        assert digests.digest(values) != before
        values[flipped] ^= 0x80


def test_payloads_of_other_versions_are_refused_by_name() -> None:
    old, new = pair(1000, torch.bfloat16, 0.01)
    wire = encoded(new, old)
    assert wire[6] == kernel.VERSION
    wire[6] = 0
    with pytest.raises(BackendError, match="has version 0, not 2: it is damaged, or its sender runs another"):
        kernel.apply(wire, old)


def test_damaged_payloads_are_refused() -> None:
    old, new = pair(40_000, torch.bfloat16, 0.01)
    wire = encoded(new, old)
    for length in (0, 10, 63, 64, 70, 100, wire.numel() - 4):
        with pytest.raises(BackendError):
            kernel.apply(wire[:length], old.clone())
    with pytest.raises(BackendError, match="expected 39999 of 2"):
        kernel.apply(wire, old[:-1].clone())
    with pytest.raises(BackendError, match="expected 20000 of 4"):
        kernel.apply(wire, old.view(torch.float32).clone())
    with pytest.raises(BackendError, match="was not received as it was sent"):
        kernel.apply(wire, new.clone())  # another base


@given(
    width=st.sampled_from(sorted(BITS)),
    numel=st.integers(0, 20_000),
    density=st.floats(0, 1),
    steps=st.integers(1, 127),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_versions(width: int, numel: int, density: float, steps: int, seed: int) -> None:
    old, new = pair(numel, BITS[width], density**3, seed, steps)
    wire = encoded(new, old)
    out = old.clone()
    kernel.apply(wire, out)
    assert same(out, new)


@given(
    width=st.sampled_from(sorted(BITS)),
    density=st.sampled_from(DENSITIES),
    seed=st.integers(0, 2**32 - 1),
    places=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=8
    ),
    consistent=st.booleans(),
)
def test_mutants_write_nothing_outside_and_never_pass(
    width: int, density: float, seed: int, places: list[tuple[float, int]], consistent: bool
) -> None:
    old, new = pair(20_000, BITS[width], density, seed)
    wire = encoded(new, old)
    body = kernel.header_of(wire).nbytes - kernel.HEADER
    mutant = wire.clone()
    for place, flip in places:
        if consistent:  # the header stays valid, so that the blocks are read
            mutant[kernel.HEADER + math.floor(place * body)] ^= flip
        else:
            mutant[math.floor(place * wire.numel())] ^= flip
    space = torch.full((20_000 + 32,), 77, dtype=BITS[width])
    out = space[16:-16]
    out.copy_(old)
    try:
        kernel.apply(mutant, out)
    except BackendError:
        pass
    else:
        assert same(out.clone(), new)
    assert bool((space[:16] == 77).all())
    assert bool((space[-16:] == 77).all())
