"""Exam for every codec: its traits' promises, checked against NumPy in float64 and closed forms.

`test_codecs` runs it over `CASES`. A new codec adds a line there: its options, and the largest error of a
decoded value.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from mcr_plus.compression.codec import Codec, PayloadCodec, make

F64 = NDArray[np.float64]
Bound = Callable[[F64], F64]
"""Maps values in float64 to the largest error of each decoded value."""

SIZES: Final = (1, 2, 15, 31, 32, 33, 127, 255, 256, 257, 1000, 1025, 5003)
GUARD: Final = 0xA5


@dataclass(frozen=True)
class Case:
    """A codec with options, and the known bounds of its error.

    Attributes:
        bound: a `Bound` for values that went through float32; None if only statistics are known, as for
            sparse codecs, which have separate tests beside the exam.
        block: number of values that one non-finite value may affect; 0: all of a tensor.
    """

    config: dict[str, Any]
    bound: Bound | None
    block: int = 1

    @property
    def name(self) -> str:
        """Return the name for test ids: `int4_block hadamard=True`."""
        rest = [f"{key}={value}" for key, value in self.config.items() if key != "codec"]
        return " ".join([self.config["codec"], *rest])

    def make(self) -> Codec:
        """Return a new codec object, as a configuration would make it."""
        return make(self.config)

    def make_payload(self) -> PayloadCodec:
        """Return a new codec object that has payloads."""
        codec = self.make()
        assert isinstance(codec, PayloadCodec)
        return codec


def per_block(block: int, relative: float) -> Bound:
    """Bound the error by `relative` times the largest magnitude of each block."""

    def bound(values: F64) -> F64:
        padded = np.zeros(-(-values.size // block) * block)
        padded[: values.size] = np.abs(values)
        largest: F64 = padded.reshape(-1, block).max(1).repeat(block)[: values.size]
        return largest * relative + 2.0**-126

    return bound


def each(relative: float, smallest: float) -> Bound:
    """Bound the error by `relative` times the value, or by `smallest`."""
    return lambda values: np.maximum(np.abs(values) * relative, smallest)


def either(first: Bound, second: Bound) -> Bound:
    """Bound the error by the larger of two bounds."""
    return lambda values: np.maximum(first(values), second(values))


def sign_and_mean(block: int) -> Bound:
    """Return the distance of each value from its block's mean magnitude with the value's sign."""

    def bound(values: F64) -> F64:
        means = [np.abs(values[at : at + block]).mean() for at in range(0, values.size, block)]
        scale = np.repeat(means, block)[: values.size]
        off: F64 = np.where(values == 0, scale, np.abs(np.abs(values) - scale))
        return off + scale * 2.0**-20 + 2.0**-126

    return bound


def two_levels(block: int) -> Bound:
    """Bound the error by two levels: a magnitude stays on its side of the block's threshold."""

    def bound(values: F64) -> F64:
        room = np.zeros(values.size)
        for at in range(0, values.size, block):
            part = np.abs(values[at : at + block])
            threshold = 1.2303 * part.mean()
            room[at : at + block] = np.where(part > threshold, part.max() - threshold, threshold)
            near = np.abs(part - threshold) < 1e-3 * threshold  # the sum in float32 may decide differently
            room[at : at + block][near] = part.max()
            room[at : at + block] += part.max() * 2.0**-8 + 2.0**-126  # levels are bfloat16
        return room

    return bound


def after_hadamard(relative: float) -> Bound:
    """Bound the error of a block's 32 transformed values: `relative` of the largest for each; they add up."""
    matrix = np.ones((1, 1))
    for _ in range(5):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])

    def bound(values: F64) -> F64:
        padded = np.zeros(-(-values.size // 32) * 32)
        padded[: values.size] = values
        largest = np.abs(padded.reshape(-1, 32) @ (matrix / 32)).max(1)
        rows: F64 = largest.repeat(32)[: values.size] * relative * 32 + 2.0**-121
        return rows

    return bound


CASES: Final = [
    Case({"codec": "bf16"}, each(2.0**-8, 2.0**-133)),
    Case({"codec": "fp16"}, each(2.0**-11, 2.0**-25)),
    Case({"codec": "bf16", "rounding": "stochastic"}, each(2.0**-7, 2.0**-133)),
    Case({"codec": "fp16", "rounding": "stochastic", "seed": 3}, each(2.0**-10, 2.0**-24)),
    Case({"codec": "int8_block"}, per_block(256, 1 / 253), block=256),
    Case({"codec": "fp8_block"}, either(each(2.0**-4, 0), per_block(256, 2.0**-10 / 448)), block=256),
    Case(
        {"codec": "fp8_block", "format": "e5m2"},
        either(each(2.0**-3, 0), per_block(256, 2.0**-17 / 57344)),
        block=256,
    ),
    Case(
        {"codec": "fp8_block", "scale": "e8m0"}, either(each(2.0**-3, 0), per_block(32, 2.0**-18)), block=32
    ),
    Case(
        {"codec": "fp8_block", "format": "e5m2", "scale": "e8m0"},
        either(each(2.0**-3, 0), per_block(32, 2.0**-32)),
        block=32,
    ),
    Case({"codec": "int4_block"}, per_block(32, 1 / 13.8), block=32),
    Case({"codec": "int4_block", "hadamard": True}, after_hadamard(1 / 13.8), block=32),
    Case({"codec": "int2_block"}, two_levels(128), block=128),
    Case({"codec": "delta"}, each(0, 0)),
    Case({"codec": "exp_window"}, each(0, 0)),
    Case({"codec": "randk", "ratio": 0.3}, None, block=0),
    Case({"codec": "randk", "seed": 7, "rescale": True}, None, block=0),
    Case({"codec": "topk"}, None, block=0),
    Case({"codec": "topk", "ratio": 0.25, "values": "bf16"}, None, block=0),
    Case({"codec": "topk", "ratio": 0.0156, "values": "int2", "chunk": 4096}, None, block=4096),
    Case({"codec": "topk", "ratio": 0.2, "values": "int4", "chunk": 100}, None, block=100),
    Case({"codec": "topk", "ratio": 0.3, "values": "bf16", "chunk": 256}, None, block=256),
    Case({"codec": "topk", "ratio": 0.05, "chunk": 1000}, None, block=1000),
    Case({"codec": "int_shared"}, None),
    Case({"codec": "int_shared", "bits": 16}, None),
    Case({"codec": "powersgd"}, None),
    Case({"codec": "powersgd", "rank": 1, "seed": 3, "min_rate": 1.5}, None),
    Case({"codec": "sign1"}, sign_and_mean(1024), block=1024),
]


def samples(size: int, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield finite float32 tensors of `size` elements that are hard for codecs."""
    random = np.random.default_rng([seed, size])
    gaussian = random.standard_normal(size)
    yield "gaussian", torch.tensor(gaussian, dtype=torch.float32)
    yield "heavy tails", torch.tensor(random.standard_t(2, size).clip(-6e4, 6e4), dtype=torch.float32)
    yield "zeros", torch.zeros(size)
    yield "negative zeros", -torch.zeros(size)
    yield "constant", torch.full((size,), -3.7)
    yield "tiny", torch.tensor(gaussian * 1e-30, dtype=torch.float32)
    yield "denormal", torch.tensor(gaussian * 1e-40, dtype=torch.float32)
    yield "smallest", torch.full((size,), 1.4e-45)
    yield "huge", torch.tensor(gaussian.clip(-3, 3) * 1e4, dtype=torch.float32)
    one = torch.zeros(size)
    one[size // 2] = 5.0
    yield "one is not zero", one
    scales = 10.0 ** random.uniform(-6, 4, size)
    yield "scales mixed", torch.tensor(gaussian.clip(-3, 3) * scales, dtype=torch.float32)
    yield "integers", torch.tensor(random.integers(-127, 128, size), dtype=torch.float32)


def payload(codec: PayloadCodec, values: torch.Tensor) -> torch.Tensor:
    """Return the payload of `values`; check that nothing is written around it."""
    room = codec.room(values.numel(), values.dtype)
    item = codec.wire_dtype.itemsize
    space = torch.full(((room + 8) * item,), GUARD, dtype=torch.uint8).view(codec.wire_dtype)
    written = codec.encode(values, space[4 : 4 + room])
    assert written <= room
    assert written == room or not codec.traits.fixed_rate
    around = torch.cat([space[:4], space[4 + room :]]).view(torch.uint8)
    assert bool((around == GUARD).all()), "memory beside the payload was changed"
    return space[4 : 4 + written]


def decoded(codec: PayloadCodec, wire: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a decoded payload as a tensor like `like`; check that nothing is written around it."""
    space = torch.full((like.numel() + 16,), 77.0, dtype=like.dtype)
    out = space[8 : 8 + like.numel()].view(like.shape)
    out.fill_(torch.nan)
    codec.decode(wire, out)
    assert bool((space[:8] == 77).all())
    assert bool((space[8 + like.numel() :] == 77).all())
    return out


def f64(tensor: torch.Tensor) -> F64:
    """Return the tensor flat, in float64."""
    array: F64 = tensor.detach().to(torch.float64).reshape(-1).numpy()
    return array


def check_round_trip(case: Case, what: str, values: torch.Tensor) -> None:
    """Check that decoding gives the values within the bound."""
    codec = case.make_payload()
    result = decoded(codec, payload(codec, values), values)
    if codec.traits.lossless:
        assert torch.equal(result.view(torch.uint8), values.contiguous().view(torch.uint8)), what
    if case.bound is not None:
        true = f64(values.to(torch.float32))
        limits = torch.finfo(values.dtype)
        room = case.bound(true)
        room += np.maximum(np.abs(true) + room, limits.tiny) * limits.eps  # rounding to the dtype itself
        off = np.abs(f64(result) - true)
        worst = int(np.argmax(off - room))
        assert off[worst] <= room[worst], f"{what}: {true[worst]} became {f64(result)[worst]}"


def check_accumulate(codec: PayloadCodec, values: torch.Tensor) -> None:
    """Check that accumulating equals decoding, scaling and adding."""
    wire = payload(codec, values)
    alone = f64(decoded(codec, wire, values.to(torch.float32)))
    total = torch.linspace(-2, 2, values.numel())
    for scale in (1.0, -1.0, 0.25, 1 / 3):
        expected = f64(total) + scale * alone
        codec.decode_accumulate(wire, total, scale)
        np.testing.assert_allclose(f64(total), expected, rtol=1e-6, atol=1e-6 * (1 + np.abs(alone).max()))


def check_reduce(codec: PayloadCodec, values: Sequence[torch.Tensor], skip: int) -> None:
    """Check that reducing equals accumulating and encoding."""
    numel = values[0].numel()
    item = codec.wire_dtype.itemsize
    room = codec.wire_numel(numel)
    wires = torch.zeros(len(values), room + (-room * item) % 4 // item, dtype=codec.wire_dtype)
    for row, each_values in zip(wires, values, strict=True):
        codec.encode(each_values, row)
    total = torch.linspace(-1, 1, numel)
    by_hand = total.clone()
    for row in (row for index, row in enumerate(wires) if index != skip):
        codec.decode_accumulate(row, by_hand, 0.5)
    expected = torch.zeros(room, dtype=codec.wire_dtype)
    length = codec.encode(by_hand, expected)
    wire = torch.zeros(room, dtype=codec.wire_dtype)
    assert codec.reduce(wires, total, wire, skip=skip, scale=0.5) == length
    torch.testing.assert_close(total, by_hand, rtol=1e-6, atol=1e-6)
    first, second = (decoded(codec, each[:length], total) for each in (wire, expected))
    torch.testing.assert_close(first, second, rtol=1e-2, atol=2e-2)  # a sum on the edge may round either way


def check_not_finite(case: Case, values: torch.Tensor, at: int, bad: float) -> None:
    """Check that a non-finite value stays so, and that values of other blocks keep their values."""
    codec = case.make_payload()
    spoilt = values.clone()
    spoilt[at] = bad
    result = decoded(codec, payload(codec, spoilt), spoilt)
    assert not bool(torch.isfinite(result[at])), f"{bad} at {at} of {values.numel()} became {result[at]}"
    if case.block:
        own = torch.arange(values.numel()) // case.block != at // case.block
        sound = decoded(codec, payload(case.make_payload(), values), values)
        assert torch.equal(result[own], sound[own])


def check_config(case: Case) -> None:
    """Check that a configuration survives JSON and makes a codec that encodes equally."""
    codec = case.make()
    again = make(json.loads(json.dumps(codec.config())))
    assert type(again) is type(codec)
    assert again.config() == codec.config()
    assert case.config.items() <= codec.config().items()
    assert type(codec).__name__ in repr(codec)


def exchanged(
    codecs: Sequence[Codec],
    inputs: Sequence[torch.Tensor],
    *,
    left: Sequence[torch.Tensor] | None = None,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> list[torch.Tensor]:
    """Return the results of an additive codec's all_reduce over ranks that are all in this process.

    `shapes`: the shapes of the contiguous tensors in the inputs, if there are several.

    The rounds are reduced in float64 for floats, exactly for integers, and rounded once.
    """
    ranks = len(inputs)
    shapes = [tuple(inputs[0].shape)] if shapes is None else shapes
    rounds = codecs[0].rounds(shapes, ranks)
    results = [tensor.clone().view(-1) for tensor in inputs]
    wires = [[torch.zeros(each.numel, dtype=each.dtype) for each in rounds] for _ in range(ranks)]
    lefts: Sequence[torch.Tensor | None] = left or [None] * ranks
    programs = [
        codec.exchange(result, shapes, wire, ranks, rest)
        for codec, result, wire, rest in zip(codecs, results, wires, lefts, strict=True)
    ]
    for index, each in enumerate(rounds):
        for program in programs:
            next(program)
        wide = torch.float64 if each.dtype.is_floating_point else torch.int64
        stack = torch.stack([wire[index].to(wide) for wire in wires])
        total = stack.sum(0) if each.op == "SUM" else stack.amax(0)
        if total.numel() and not each.dtype.is_floating_point:
            limits = torch.iinfo(each.dtype)
            assert limits.min <= int(total.min()) <= int(total.max()) <= limits.max, "the sum overflows"
        for wire in wires:
            wire[index].copy_(total)
    for program in programs:
        assert next(program, "done") == "done"
    return [result.view(inputs[0].shape) for result in results]


def untouched(nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that take no memory before they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=dtype)
