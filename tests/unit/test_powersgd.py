"""powersgd: power iteration in float64 as the oracle, exact low ranks, and robustness."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from codec_exam import F64, exchanged, f64
from pydantic import ValidationError

from mcr_plus.compression.powersgd import PowerSGD, PowerSGDOptions

Shapes = Sequence[tuple[int, ...]]

BUCKET: Shapes = [
    (7,),
    (24, 16),
    (16,),
    (24, 16),
    (40, 2, 3),
    (3, 3),
    (24, 16),
    (0, 5),
    (),
    (40, 6),
    (12, 12),
]
"""Three matrices alike at unequal distances, a view of more than two dimensions, and what does not pay."""


def world(ranks: int, **options: Any) -> list[PowerSGD]:
    options = {"rank": 2, "min_rate": 1.5, **options}
    codecs = [PowerSGD(PowerSGDOptions(**options)) for _ in range(ranks)]
    for rank, codec in enumerate(codecs):
        codec.enter(rank, "bucket 3")
    return codecs


def drawn(numel: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(numel).astype(np.float32))


def of_rank(rank: int, rows: int, columns: int, seed: int) -> torch.Tensor:
    return (
        drawn(rows * rank, seed).view(rows, rank) @ drawn(rank * columns, seed + 1).view(rank, columns)
    ).view(-1)


def after(
    calls: int, codecs: list[PowerSGD], inputs: list[torch.Tensor], shapes: Shapes
) -> list[torch.Tensor]:
    """Return the results of the last of several calls with the same values."""
    for _ in range(calls - 1):
        exchanged(codecs, inputs, shapes=shapes)
    return exchanged(codecs, inputs, shapes=shapes)


def size_of(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def parts(values: torch.Tensor, shapes: Shapes) -> list[F64]:
    split = values.split([math.prod(shape) for shape in shapes])
    return [f64(part).reshape(shape) for part, shape in zip(split, shapes, strict=True)]


def projected(matrix: F64, onto: F64) -> tuple[F64, F64]:
    """Return one step's result, the sum of all ranks' matrices on the columns of P = M Q, and the next Q."""
    columns, _ = np.linalg.qr(matrix @ onto)
    return columns @ (columns.T @ matrix), matrix.T @ columns


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_the_power_iteration_by_hand(ranks: int) -> None:
    shapes = [(30, 20)]
    codecs = world(ranks, rank=3)
    first = codecs[0]._drawn(codecs[0]._layout(shapes).batches[0], torch.device("cpu"))[0]  # the random start
    q = f64(first).reshape(3, 20).T
    for step in range(4):
        inputs = [drawn(600, 10 * step + rank) for rank in range(ranks)]
        results = exchanged(codecs, inputs, shapes=shapes)
        expected, q = projected(np.sum([f64(values).reshape(30, 20) for values in inputs], axis=0), q)
        for result in results:
            np.testing.assert_allclose(f64(result).reshape(30, 20), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_bucket_of_many_shapes(ranks: int) -> None:
    """Small tensors are summed uncompressed; all ranks get the same bits; residuals add up."""
    codecs, numel = world(ranks), size_of(BUCKET)
    whole = {0, 2, 5, 7, 8}
    for step in range(3):
        inputs = [drawn(numel, 10 * step + rank) for rank in range(ranks)]
        left = [values.clone() for values in inputs]
        results = exchanged(codecs, inputs, left=left, shapes=BUCKET)
        assert all(torch.equal(result, results[0]) for result in results)
        true = parts(torch.stack(inputs).to(torch.float64).sum(0), BUCKET)
        for index, (got, wanted) in enumerate(zip(parts(results[0], BUCKET), true, strict=True)):
            if index in whole:
                np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
            else:
                assert np.linalg.matrix_rank(got.reshape(len(got), -1), tol=1e-4) == 2
                assert np.linalg.norm(wanted - got) < np.linalg.norm(wanted)
        for rest in left:
            for index, part in enumerate(parts(rest, BUCKET)):
                assert index not in whole or not part.any()
        sent = sum(f64(values) - f64(rest) for values, rest in zip(inputs, left, strict=True))
        np.testing.assert_allclose(f64(results[0]), sent, rtol=0, atol=2e-5)


def test_a_bucket_is_its_tensors_one_by_one() -> None:
    """Tensors of one bucket share calls, never values."""
    values = drawn(size_of(BUCKET), 1)
    (together,) = exchanged(world(1), [values], shapes=BUCKET)
    offset = 0
    for shape, part in zip(BUCKET, parts(together, BUCKET), strict=True):
        alone = values[offset : offset + math.prod(shape)].clone()
        offset += math.prod(shape)
        if alone.numel():
            (result,) = exchanged(world(1), [alone], shapes=[shape])
            np.testing.assert_allclose(f64(result).reshape(shape), part, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_low_ranks_are_found_exactly(dtype: torch.dtype) -> None:
    shapes = [(64, 40), (5,), (32, 48)]
    values = torch.cat([of_rank(2, 64, 40, 1), drawn(5, 2), of_rank(1, 32, 48, 3)]).to(dtype)
    codecs = world(2)
    results = after(3, codecs, [values, values], shapes)
    assert results[0].dtype == dtype
    limit = 4 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 2e-6
    off = (results[0].to(torch.float64) - 2 * values.to(torch.float64)).abs().max()
    assert float(off) <= limit * 2 * float(values.abs().max().to(torch.float64)) * 4


def test_a_rank_above_the_shape_is_exact() -> None:
    shapes = [(3, 50), (50, 2)]
    values = drawn(250, 1)
    codecs = world(1, rank=16, min_rate=0.0)
    assert [each.numel for each in codecs[0].rounds(shapes, 1)] == [9 + 100, 150 + 4]
    (result,) = exchanged(codecs, [values], shapes=shapes)
    torch.testing.assert_close(result, values, rtol=0, atol=1e-4)  # a random 2 × 2 start loses some digits


def test_the_start_of_the_call_before_helps() -> None:
    """A power iteration: the error of a fixed matrix falls to that of the best matrix of the rank."""
    spectrum = np.geomspace(1, 1e-3, 40)
    random = np.random.default_rng(0)
    u, v = (np.linalg.qr(random.standard_normal((60, 40)))[0] for _ in range(2))
    matrix = (u * spectrum) @ v.T
    values = torch.from_numpy(matrix.astype(np.float32)).view(-1)
    best = float(np.sqrt((spectrum[4:] ** 2).sum()))
    codecs = world(1, rank=4)
    errors = [
        float(np.linalg.norm(f64(exchanged(codecs, [values], shapes=[(60, 60)])[0]) - matrix.reshape(-1)))
        for _ in range(12)
    ]
    assert errors[0] > 1.2 * best
    assert errors[-1] < 1.01 * best
    fresh = exchanged(world(1, rank=4), [values], shapes=[(60, 60)])[0]
    assert np.linalg.norm(f64(fresh) - matrix.reshape(-1)) == pytest.approx(errors[0])


def test_residuals_get_through_in_time() -> None:
    """With error feedback the mean of many results is the true mean, whatever the matrix's rank."""
    true = drawn(400, 1)

    def mean_error(feedback: bool) -> float:
        codecs, rests, total = world(2), [torch.zeros(400)] * 2, torch.zeros(400)
        for step in range(80):
            noise = drawn(400, 100 + step)
            inputs = [true + noise + rests[0], true - noise + rests[1]]
            left = [values.clone() for values in inputs]
            total += exchanged(codecs, inputs, left=left, shapes=[(20, 20)])[0]
            rests = left if feedback else rests
        return float((total / 160 - true).norm() / true.norm())

    assert mean_error(feedback=True) < 0.1
    assert mean_error(feedback=False) > 0.5


def test_zeros_stay_zeros_and_do_not_stop_the_iteration() -> None:
    shapes = [(64, 40)]
    codecs = world(2)
    low = of_rank(2, 64, 40, 1)
    for _ in range(3):
        for result in exchanged(codecs, [torch.zeros(2560)] * 2, shapes=shapes):
            assert not result.any()
    results = after(3, codecs, [low, torch.zeros(2560)], shapes)
    torch.testing.assert_close(results[0], low, rtol=0, atol=2e-5)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30])
def test_tiny_and_huge_values(scale: float) -> None:
    """The state is of the size of gradients; squares of it would be out of range."""
    low = of_rank(2, 64, 40, 1)
    low = low / low.abs().max() * scale
    codecs = world(2)
    results = after(4, codecs, [low, low], [(64, 40)])
    torch.testing.assert_close(results[0] / scale, 2 * low / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_stay_visible_in_one_step_only(bad: float) -> None:
    shapes = [(24, 16), (6,), (24, 16), (40, 10)]
    low = torch.cat([of_rank(2, 24, 16, 1), drawn(6, 2), of_rank(2, 24, 16, 3), of_rank(2, 40, 10, 5)])
    codecs = world(3)
    for at in (0, 383, 384, 400, len(low) - 1):
        inputs = [low.clone() for _ in range(3)]
        inputs[1][at] = bad
        for result in exchanged(codecs, inputs, shapes=shapes):
            assert not result[at].isfinite()
            begin = 0
            for part in result.split([math.prod(shape) for shape in shapes]):
                spoilt = begin <= at < begin + len(part)
                assert bool(part.isfinite().all()) is not spoilt
                assert not spoilt or len(part) == 6 or part.isnan().all()
                begin += len(part)
        results = after(3, codecs, [low] * 3, shapes)
        torch.testing.assert_close(results[0], 3 * low, rtol=0, atol=1e-4)


def test_a_restart_changes_nothing() -> None:
    numel = size_of(BUCKET)
    running = world(2)
    for step in range(3):
        exchanged(running, [drawn(numel, step), drawn(numel, 50 + step)], shapes=BUCKET)
    states = [codec.state() for codec in running]
    assert states[0]
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())
    stored = io.BytesIO()
    torch.save(states[0], stored)
    stored.seek(0)
    again = world(2)
    for codec in again:  # from one rank's file
        codec.load_state(torch.load(stored))
        stored.seek(0)
    inputs = [drawn(numel, 98), drawn(numel, 99)]
    first, second = exchanged(running, inputs, shapes=BUCKET), exchanged(again, inputs, shapes=BUCKET)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], exchanged(world(2), inputs, shapes=BUCKET)[0])


def test_state_of_another_rank_is_left_alone() -> None:
    values = drawn(600, 1)
    old, new = world(1, rank=3), world(1, rank=2)
    exchanged(old, [values], shapes=[(30, 20)])
    new[0].load_state(old[0].state())
    result = exchanged(new, [values], shapes=[(30, 20)])[0]
    assert torch.equal(result, exchanged(world(1, rank=2), [values], shapes=[(30, 20)])[0])


def test_the_start_depends_on_seed_key_and_shape() -> None:
    values = drawn(600, 1)

    def result(seed: int, key: str) -> torch.Tensor:
        (codec,) = world(1, seed=seed)
        codec.enter(0, key)
        return exchanged([codec], [values], shapes=[(30, 20)])[0]

    assert torch.equal(result(0, "a"), result(0, "a"))
    assert not torch.equal(result(0, "a"), result(0, "b"))
    assert not torch.equal(result(0, "a"), result(1, "a"))


def test_the_state_does_not_live_in_the_buffers() -> None:
    """Buffers belong to the caller, who may overwrite them between calls."""
    (codec,), values = world(1), drawn(600, 1)
    wires = [torch.zeros(each.numel) for each in codec.rounds([(30, 20)], 1)]
    list(codec.exchange(values, [(30, 20)], wires, 1, None))
    (kept,) = codec.state().values()
    before = kept.clone()
    for wire in wires:
        wire.fill_(7)
    assert torch.equal(kept, before)


def test_rounds_of_the_codec() -> None:
    codec = world(1, rank=4, min_rate=2)[0]
    assert [each.numel for each in codec.rounds([(100, 50), (9,)], 8)] == [409, 200]
    assert [each.numel for each in codec.rounds([(9,), (8, 8)], 8)] == [73]  # 64 / (4 × 16) is below 2
    assert codec.refusal([(100, 50), (9,)]) is None
    reason = codec.refusal([(1000,), ()])
    assert reason == "codec powersgd is for matrices, and none of the shapes (1000,), () has two dimensions"
    reason = codec.refusal([(8, 8), (), (4, 4), (0, 9)])
    assert reason == (
        "factors of rank 4 make none of the shapes (8, 8), (), (4, 4), … 2 times smaller (min_rate)"
    )


def test_a_bucket_without_matrices_is_summed_as_it_is() -> None:
    inputs = [drawn(73, rank) for rank in range(3)]
    results = exchanged(world(3, min_rate=4), inputs, shapes=[(9,), (8, 8)])
    torch.testing.assert_close(results[0], torch.stack(inputs).sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"rank": 0}, {"seed": -1}, {"min_rate": -1.0}, {"ranks": 2}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PowerSGDOptions(**options)
