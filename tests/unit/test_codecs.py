"""Every codec of the registry passes the exam of `codec_exam`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
import torch
from codec_exam import (
    CASES,
    SIZES,
    Case,
    check_accumulate,
    check_config,
    check_not_finite,
    check_reduce,
    check_round_trip,
    decoded,
    exchanged,
    f64,
    payload,
    samples,
    untouched,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from mcr_plus import registry
from mcr_plus.compression import stage
from mcr_plus.compression.codec import FLOATS, PayloadCodec
from mcr_plus.errors import Unsupported
from mcr_plus.kernels import cpu

PAYLOADS = [case for case in CASES if isinstance(case.make(), PayloadCodec)]
ADDITIVE = [case for case in CASES if case.make().traits.additive]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_payload = pytest.mark.parametrize("case", PAYLOADS, ids=lambda case: case.name)
every_additive = pytest.mark.parametrize("case", ADDITIVE, ids=lambda case: case.name)


def test_every_codec_takes_part() -> None:
    assert {case.config["codec"] for case in CASES} == set(registry.names("codecs"))


@every_case
def test_config(case: Case) -> None:
    check_config(case)


@every_payload
@pytest.mark.parametrize("size", SIZES)
def test_round_trips(case: Case, size: int) -> None:
    for what, values in samples(size):
        check_round_trip(case, what, values)


@every_payload
def test_dtypes_and_strides(case: Case) -> None:
    dtypes = [each for each in case.make().traits.dtypes if each in FLOATS]
    for dtype in dtypes:
        for _, values in samples(770):
            typed = values.clamp(-6e4, 6e4).to(dtype)
            check_round_trip(case, f"{dtype}", typed)
            codec = case.make_payload()
            strided = torch.stack([typed, typed], 1)[:, 0].view(77, 10).T
            flat = payload(case.make_payload(), strided.contiguous())
            wire = payload(codec, strided)
            assert torch.equal(wire.view(torch.uint8), flat.view(torch.uint8))
            target = torch.empty(77, 10, dtype=dtype).T
            codec.decode(wire, target)
            expected = decoded(codec, flat, strided.contiguous())
            assert torch.equal(target.contiguous().view(torch.uint8), expected.view(torch.uint8))


@every_payload
@settings(max_examples=examples(40))
@given(st.data())
def test_any_finite_values(case: Case, data: st.DataObject) -> None:
    limit = 2.0**15  # the range of fp16
    number = st.floats(-limit, limit, width=32, allow_subnormal=True)
    values = data.draw(st.lists(number, min_size=1, max_size=600))
    check_round_trip(case, "drawn", torch.tensor(values, dtype=torch.float32))


@every_payload
def test_the_largest_floats(case: Case) -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([largest, -largest, largest / 2, 0.0] * 80)
    codec = case.make_payload()
    result = decoded(codec, payload(codec, values), values)
    room = f64(values) * 0 + largest / 7 if case.bound is None else case.bound(f64(values)) * (1 + 1e-6)
    for value, got, off in zip(values.tolist(), result.tolist(), room.tolist(), strict=True):
        sent = got != 0 or not codec.traits.sparse
        assert not sent or not np.isfinite(got) or abs(got - value) <= off  # in range, or visibly out of it
    assert not np.isnan(result.numpy()).any()


@every_payload
def test_nothing_to_encode(case: Case) -> None:
    codec = case.make_payload()
    wire, values = torch.zeros(0, dtype=codec.wire_dtype), torch.zeros(0, 3)
    assert codec.encode(values, wire) == 0
    codec.decode(wire, values)
    codec.decode_accumulate(wire, torch.zeros(0))


@every_payload
def test_payloads_have_a_known_length(case: Case) -> None:
    codec = case.make_payload()
    lengths = [codec.wire_nbytes(size) for size in range(1, 3000)]
    assert lengths == sorted(lengths)
    for size in (*SIZES, 2**33 + 1):
        assert codec.wire_nbytes(size) == codec.wire_numel(size) * codec.wire_dtype.itemsize
    if codec.wire_dtype is torch.uint8:
        assert {length % 4 for length in lengths} == {0}
    assert codec.wire_nbytes(2**33) < 2**33 * 4 * 1.01


@every_payload
def test_the_same_values_give_the_same_payload(case: Case) -> None:
    for size in (33, 5003, 300_001):  # the last on several threads
        _, values = next(samples(size))
        wires = []
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                wires.append(payload(case.make_payload(), values).view(torch.uint8))
                assert torch.equal(wires[0], wires[-1])
        finally:
            torch.set_num_threads(before)
    check_round_trip(case, "many", values)


@every_payload
def test_accumulating(case: Case) -> None:
    for size in SIZES:
        for _, values in samples(size):
            check_accumulate(case.make_payload(), values)


@every_payload
def test_kernels_are_prepared_for_the_types_they_get(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first reduction of a job would compile, while peers wait."""
    calls: set[tuple[object, ...]] = set()
    spread = cpu.spread

    def recorded(kernel: Any, blocks: int, nbytes: int, *args: Any) -> list[Any]:
        calls.add((kernel, *map(numba.typeof, args)))
        return spread(kernel, blocks, nbytes, *args)

    monkeypatch.setattr(cpu, "spread", recorded)
    monkeypatch.setattr(stage, "_prepared", set())
    codec = case.make_payload()
    stage.prepare(codec)
    prepared = set(calls)
    values = [next(samples(1025, seed))[1] for seed in range(3)]
    check_reduce(codec, values, -1)
    assert calls == prepared


@every_payload
@pytest.mark.parametrize("skip", [-1, 0, 2])
def test_reducing(case: Case, skip: int) -> None:
    for size in SIZES:
        check_reduce(case.make_payload(), [next(samples(size, seed))[1] for seed in range(3)], skip)


@every_payload
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_stay_visible(case: Case, bad: float) -> None:
    for size in (1, 33, 256, 1025):
        for at in {0, size // 2, size - 1}:
            check_not_finite(case, next(samples(size))[1], at, bad)


@every_payload
def test_refusals_of_codecs(case: Case) -> None:
    codec = case.make_payload()
    wire = torch.zeros(codec.wire_numel(100), dtype=codec.wire_dtype)
    with pytest.raises(Unsupported, match="bits16; expected one of"):
        codec.encode(torch.empty(100, dtype=torch.bits16), wire)
    with pytest.raises(Unsupported, match="a payload of 100 values"):
        codec.encode(torch.zeros(100), wire[:-1])
    with pytest.raises(Unsupported, match="a payload of 100 values"):
        codec.encode(torch.zeros(100), wire.to(torch.float64))


@every_payload
def test_more_than_two_billion_values(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets do not wrap around at 2³¹: only the last blocks of a tensor are touched."""
    codec = case.make_payload()
    if codec.wire_dtype is not torch.uint8:
        pytest.skip("torch's own conversion")
    if not codec.traits.fixed_rate or codec.traits.sparse:
        pytest.skip("its kernels look at every value; tested beside them")

    def at_the_end(kernel: Callable[..., object], blocks: int, nbytes: int, *args: object) -> None:
        kernel(*args, blocks - 2, blocks)

    monkeypatch.setattr(cpu, "spread", at_the_end)
    numel = 2**31 + 1000
    values, total = untouched(numel * 4, torch.float32), untouched(numel * 4, torch.float32)
    values[-3:] = total[-3:] = torch.tensor([1.0, -2.0, 3.0])
    wire = untouched(codec.wire_nbytes(numel), torch.uint8)
    codec.encode(values, wire)
    codec.decode_accumulate(wire, total, 2.0)
    torch.testing.assert_close(total[-3:], 3 * values[-3:], rtol=0.5, atol=5)
    codec.decode(wire, values)
    torch.testing.assert_close(values[-3:], torch.tensor([1.0, -2.0, 3.0]), rtol=0.5, atol=2.5)


@every_additive
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_sums_of_additive_codecs(case: Case, ranks: int) -> None:
    """All ranks get the same sum, and the parts that error feedback gets add up to it."""
    for shape in ((7,), (33, 5), (1031,)):
        codecs = [case.make() for _ in range(ranks)]
        for rank, codec in enumerate(codecs):
            codec.enter(rank, "a key")
        for step in range(3):
            random = np.random.default_rng([step, ranks])
            arrays = [random.standard_normal(shape).astype(np.float32) for _ in range(ranks)]
            inputs = [torch.from_numpy(array) for array in arrays]
            left = [tensor.clone().view(-1) for tensor in inputs]
            results = exchanged(codecs, inputs, left=left)
            assert all(torch.equal(result, results[0]) for result in results)
            sent = sum(f64(tensor) - f64(rest) for tensor, rest in zip(inputs, left, strict=True))
            room = 2.0**-6 * ranks * max(1.0, float(np.abs(f64(results[0])).max()))
            np.testing.assert_allclose(f64(results[0]), sent, rtol=0, atol=room)
            if case.bound is not None:
                off = np.abs(f64(results[0]) - sum(map(f64, inputs)))
                worst = sum(case.bound(f64(tensor)) for tensor in inputs)
                assert (off <= worst + np.abs(f64(results[0])) * 2.0**-7).all()
