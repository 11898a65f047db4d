"""Expected costs: monotone and exact where they can be, close on sizes that were left out, flagged beyond."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcr_plus.core.kinds import KINDS
from mcr_plus.core.units import Range
from mcr_plus.tables.cost import CostModel, Estimate, TimeCurve, isotonic
from mcr_plus.tables.table import Query, Table, TableKey, TableRule, parse_table

K = 1024
Floats = NDArray[np.float64]

times = st.floats(1e-3, 1e9)
points = st.dictionaries(st.integers(0, 1 << 45), times, min_size=1, max_size=12)


def min_max(values: list[float]) -> list[float]:
    """Isotonic regression by its formula: the lowest over starts of the highest over ends is taken apart.

    fit[k] = max over i ≤ k of min over j ≥ k of mean(values[i..j])
    """
    n = len(values)

    def mean(i: int, j: int) -> float:
        return sum(values[i : j + 1]) / (j + 1 - i)

    return [max(min(mean(i, j) for j in range(k, n)) for i in range(k + 1)) for k in range(n)]


@given(st.lists(times, max_size=12))
def test_isotonic_is_the_min_max_formula(values: list[float]) -> None:
    assert isotonic(np.array(values)).tolist() == pytest.approx(min_max(values), rel=1e-9)


@given(st.lists(times | st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=12))
def test_isotonic_never_falls_and_keeps_rising_values(values: list[float]) -> None:
    found = isotonic(np.array(values)).tolist()
    assert found == sorted(found)  # not by the smallest bit
    rising = sorted(values)
    assert isotonic(np.array(rising)).tolist() == rising


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], []),
        ([3.0], [3.0]),
        ([2.0, 1.0], [1.5, 1.5]),
        ([1.0, 3.0, 2.0, 4.0], [1.0, 2.5, 2.5, 4.0]),
        ([3.0, 2.0, 1.0], [2.0, 2.0, 2.0]),
        ([1.0, 1.0 - 1e-9], [1.0 - 5e-10] * 2),
    ],
)
def test_isotonic_by_hand(values: list[float], expected: list[float]) -> None:
    assert isotonic(np.array(values, np.float64)).tolist() == pytest.approx(expected, rel=1e-12)


# -- curves --------------------------------------------------------------------------------------------------


@given(points, st.lists(st.integers(0, 1 << 50), min_size=2, max_size=30))
def test_a_larger_message_never_costs_less(measured: dict[int, float], asked: list[int]) -> None:
    curve = TimeCurve.through(measured)
    close = [size + step for size in measured for step in (-1, 0, 1) if size + step >= 0]
    costs = [curve.at(nbytes).us for nbytes in sorted([*asked, *close])]
    assert all(np.isfinite(costs))
    assert costs[0] > 0
    for one, larger in pairwise(costs):
        assert larger >= one * (1 - 1e-12)


@given(points)
def test_measured_sizes_cost_the_measured_times_made_monotone(measured: dict[int, float]) -> None:
    curve = TimeCurve.through(measured)
    sizes = sorted(measured)
    fitted = min_max([measured[size] for size in sizes])
    assert [curve.at(size).us for size in sizes] == pytest.approx(fitted, rel=1e-9)
    assert not any(curve.at(size).extrapolated for size in sizes)


@given(
    alpha=st.floats(0.5, 1e3),
    beta=st.floats(1e-6, 1e-2),
    powers=st.lists(st.integers(3, 30), min_size=2, max_size=10, unique=True),
    asked=st.lists(st.integers(0, 1 << 32), min_size=1, max_size=20),
)
def test_latency_and_bandwidth_are_met_exactly(
    alpha: float, beta: float, powers: list[int], asked: list[int]
) -> None:
    """Time = α + β · bytes, from the smallest size measured on, and beyond the largest."""
    sizes = [1 << power for power in powers]
    curve = TimeCurve.through({size: alpha + beta * size for size in sizes})
    for nbytes in [*asked, *(nbytes % (max(sizes) + 1) for nbytes in asked)]:
        assert curve.at(nbytes).us == pytest.approx(alpha + beta * max(nbytes, min(sizes)), rel=1e-6)


@pytest.mark.parametrize(
    ("nbytes", "extrapolated"),
    [(0, True), (7, True), (8, False), (100, False), (4 * K, False), (4 * K + 1, True)],
)
def test_sizes_outside_of_measurements_are_extrapolated(nbytes: int, extrapolated: bool) -> None:
    assert TimeCurve.through({8: 1.0, 512: 2.0, 4 * K: 9.0}).at(nbytes).extrapolated is extrapolated


def test_below_and_beyond() -> None:
    curve = TimeCurve.through({8: 1.0, 1024: 2.0, 2048: 4.0})
    assert curve.at(0) == Estimate(1.0, "at_most", bound_us=1.0)
    assert curve.at(4096) == Estimate(8.0, "extrapolated")  # 2 µs per KiB, as from 1 KiB to 2 KiB
    assert curve.at(1500).us == pytest.approx(2 + 2 * 476 / 1024, rel=0.1)


def test_sizes_beyond_a_flat_end_follow_the_last_rising_segment() -> None:
    noisy = TimeCurve.through({1024: 1.0, 2048: 5.0, 4096: 3.0})  # as 1, 4, 4
    assert noisy.at(2048).us == 4.0
    assert noisy.at(4096 + 3072).us == pytest.approx(4.0 + 3.0)  # 3 µs in the 3 KiB from 1 KiB to 4 KiB


@pytest.mark.parametrize("measured", [{4096: 10.0}, {8: 10.0, 4096: 10.0}, {8: 12.0, 64: 10.0, 4096: 8.0}])
def test_sizes_beyond_a_single_time_take_half_of_it_as_bandwidth(measured: dict[int, float]) -> None:
    curve = TimeCurve.through(measured)
    assert [curve.at(nbytes).us for nbytes in (4096, 8192, 40960)] == [10.0, 15.0, 55.0]
    assert [curve.at(nbytes).figure for nbytes in (4096, 8192, 40960)] == ["measured", "at_least", "at_least"]
    assert [curve.at(nbytes).bound_us for nbytes in (4096, 8192, 40960)] == [None, 10.0, 10.0]


def test_a_curve_with_only_zero_bytes() -> None:
    assert TimeCurve.through({0: 3.0}).at(1 << 20) == Estimate(3.0, "at_least", bound_us=3.0)


# -- sizes left out ------------------------------------------------------------------------------------------

# Microseconds of two ranks on one two-core machine, at 8 B, 4 KiB, 64 KiB, 1 MiB, 16 MiB, 64 MiB.
MEASURED_SIZES = np.array([8, 4 * K, 64 * K, K**2, 16 * K**2, 64 * K**2], np.float64)
MEASURED: dict[str, list[float]] = {
    "all_reduce gloo": [205, 413, 441, 744, 12568, 46462],
    "all_reduce Open MPI": [1.05, 1.7, 17, 105, 2657, 28078],
    "all_reduce MPICH": [2.3, 6.3, 48, 568, 4145, 25598],
    "all_reduce Intel MPI": [0.8, 1.4, 5.7, 72, 15757],
    "all_to_all gloo": [170, 198, 198, 364, 6250, 35735],
    "all_to_all Open MPI": [1.0, 1.4, 6.4, 55, 1933, 20019],
    "all_to_all MPICH": [3.6, 5.1, 16, 59, 864, 5057],
}
NOISE = 0.02
OCTAVES = np.arange(3.0, 27.0)  # 8 B to 64 MiB


def smooth(figures: list[float]) -> Floats:
    """Times at powers of two on a curve through the figures, its corners rounded over an octave or so.

    The library knows nothing of how: straight lines in logarithms, averaged by a Gaussian window.
    """
    known, logs = np.log2(MEASURED_SIZES[: len(figures)]), np.log(figures)
    fine = np.arange(-4.0, 34.0, 0.05)
    line = np.interp(fine, known, logs)
    steepest = (logs[-1] - logs[-2]) / (known[-1] - known[-2])
    line += steepest * np.maximum(fine - known[-1], 0)
    window = np.exp(-0.5 * np.arange(-3, 3.01, 0.05) ** 2)
    rounded = np.convolve(line, window / window.sum(), "same")
    times: Floats = np.exp(np.interp(OCTAVES[: int(known[-1]) - 2], fine, rounded))
    return times


def by_curve(sizes: Floats, measured: Floats, asked: Floats) -> Floats:
    curve = TimeCurve.through({int(size): float(time) for size, time in zip(sizes, measured, strict=True)})
    return np.array([curve.at(int(nbytes)).us for nbytes in asked])


def errors(figures: list[float], repeats: int = 20) -> list[float]:
    """Return relative errors at each half of the sizes, by noisy times of the other half."""
    random = np.random.default_rng(1)
    found: list[float] = []
    truth = smooth(figures)
    sizes = 2.0 ** OCTAVES[: len(truth)]
    for repeat in range(2 * repeats):
        noisy = truth * (1 + NOISE * random.standard_normal(len(truth)))
        kept = slice(repeat % 2, None, 2)
        left = np.arange(1 - repeat % 2, len(truth), 2)
        left = left[(sizes[left] > sizes[kept][0]) & (sizes[left] < sizes[kept][-1])]
        estimates = by_curve(sizes[kept], noisy[kept], sizes[left])
        found += np.abs(estimates / truth[left] - 1).tolist()
    return found


def test_the_smooth_curves_are_like_the_real_ones() -> None:
    for figures in MEASURED.values():
        truth = smooth(figures)
        at = [int(octave) - 3 for octave in np.log2(MEASURED_SIZES[: len(figures)])]
        assert np.all(np.abs(np.log(truth[at] / figures)) < np.log(1.5))
        assert len(at) == len(figures)
        assert np.all(np.diff(truth) > 0)


def test_omitted_sizes_are_predicted() -> None:
    found = np.concatenate([errors(figures) for figures in MEASURED.values()])
    assert np.median(found) <= 0.05
    assert np.quantile(found, 0.95) <= 0.15


@pytest.mark.parametrize("name", MEASURED)
def test_every_library_s_curve_is_met_on_the_whole(name: str) -> None:
    found = errors(MEASURED[name])
    assert np.median(found) <= 0.05
    assert np.quantile(found, 0.95) <= 0.15


# -- tables --------------------------------------------------------------------------------------------------

TEXT = """\
version: 1
rules:
  - {kind: all_reduce, dtype: float16, ranks: 2, bytes: 0.., backend: mpi, measured: {mpi: {8B: 1, 1KiB: 3}}}
  - kind: all_reduce
    ranks: 2
    bytes: 0..64KiB
    backend: mpi
    measured: {mpi: {8B: 2, 64KiB: 20}, "mpi:ring": {8B: 5}, gloo: {8B: 200, 64KiB: 400}}
  - kind: all_reduce
    ranks: 2
    bytes: 64KiB..
    backend: gloo
    measured: {mpi: {64KiB: 20, 1MiB: 500}, gloo: {64KiB: 400, 1MiB: 490}}
  - {kind: all_gather, bytes: 0.., basis: per_rank, backend: mpi, measured: {mpi: {64B: 10, 1KiB: 20}}}
  - {kind: broadcast, async: true, bytes: 0.., backend: mpi, measured: {mpi: {8B: 7}}}
  - {kind: reduce, device: cuda, bytes: 0.., backend: nccl, measured: {nccl: {8B: 7}}}
  - {kind: "*", bytes: 0.., backend: gloo}
"""


@pytest.fixture(scope="module")
def model() -> CostModel:
    return CostModel(parse_table(TEXT))


def cost(
    model: CostModel, choice: str, kind: str, nbytes: int | None, **more: Any
) -> tuple[float, bool] | None:
    found = model.expected(choice, Query(kind, nbytes, **more))
    return None if found is None else (round(found.us, 6), found.extrapolated)


@pytest.mark.parametrize(
    ("choice", "nbytes", "expected"),
    [
        ("mpi", 8, (2, False)),
        ("mpi", 0, (2, True)),
        ("mpi", 64 * K, (20, False)),  # measured at the end of both rules
        ("mpi", 1 << 20, (500, False)),
        ("mpi", 3 << 19, (500 + 480 * 8 / 15, True)),
        ("gloo", 8, (200, False)),
        ("gloo", 1 << 20, (490, False)),
        ("mpi:ring", 8, (5, False)),
        ("mpi:tree", 8, None),
        ("nccl", 8, None),
    ],
)
def test_costs_of_measured_choices(
    model: CostModel, choice: str, nbytes: int, expected: tuple[float, bool] | None
) -> None:
    assert cost(model, choice, "all_reduce", nbytes) == expected


def test_the_rules_of_a_key_make_one_curve(model: CostModel) -> None:
    """Between 8 B and 64 KiB of the first rule, and on to 1 MiB of the second, without a jump."""
    costs = [model.expected("mpi", Query("all_reduce", nbytes)) for nbytes in range(64 * K - 8, 64 * K + 8)]
    assert all(found is not None and 19.9 < found.us < 20.1 and not found.extrapolated for found in costs)


def test_narrow_measurements_come_first(model: CostModel) -> None:
    assert cost(model, "mpi", "all_reduce", 8, dtype="float16") == (1, False)
    assert cost(model, "gloo", "all_reduce", 8, dtype="float16") == (200, False)


@pytest.mark.parametrize(
    ("choice", "kind", "more", "expected"),
    [
        ("mpi", "all_reduce", {"ranks": 8}, (2, True)),
        ("mpi", "all_reduce", {"ranks": 8, "dtype": "float16"}, (1, True)),
        ("mpi", "all_reduce", {"nodes": 2}, (2, False)),  # the table does not tell numbers of nodes apart
        ("mpi", "broadcast", {"async_op": True}, (7, False)),
        ("mpi", "broadcast", {"async_op": False}, None),  # an exposed time says nothing about a whole one
        ("nccl", "reduce", {"device": "cuda"}, (7, False)),
        ("nccl", "reduce", {"device": "cpu"}, None),
        ("mpi", "reduce", {}, None),
        ("mpi", "all_to_all", {}, None),
        ("gloo", "all_to_all", {}, None),  # chosen by the last rule, and never measured
    ],
)
def test_estimates_from_other_measurements(
    model: CostModel, choice: str, kind: str, more: dict[str, Any], expected: tuple[float, bool] | None
) -> None:
    assert cost(model, choice, kind, 8, **more) == expected


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_per_rank_curves_go_by_the_part_of_one_rank(model: CostModel, ranks: int) -> None:
    assert cost(model, "mpi", "all_gather", 64 * ranks, ranks=ranks) == (10, False)
    assert cost(model, "mpi", "all_gather", 1024 * ranks, ranks=ranks) == (20, False)
    assert cost(model, "mpi", "all_gather_v", 1024 * ranks, ranks=ranks) == (20, False)
    assert cost(model, "mpi", "all_gather", 64 * ranks - 1, ranks=ranks) == (10, True)


@pytest.mark.parametrize("choice", ["mpi", "gloo", "nccl"])
def test_no_size_has_no_cost(model: CostModel, choice: str) -> None:
    assert cost(model, choice, "all_gather_v", None) is None
    assert cost(model, choice, "all_reduce", None, ranks=8) is None


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        ("all_reduce", {}, ["mpi", "mpi:ring", "gloo"]),
        ("all_reduce", {"dtype": "float16"}, ["mpi", "mpi:ring", "gloo"]),
        ("all_reduce", {"ranks": 3}, []),
        ("all_gather", {}, ["mpi"]),
        ("broadcast", {}, []),
        ("broadcast", {"async_op": True}, ["mpi"]),
        ("send", {}, []),
    ],
)
def test_choices(model: CostModel, kind: str, more: dict[str, Any], expected: list[str]) -> None:
    assert model.choices(Query(kind, 8, **more)) == expected


def scales(**found: tuple[Range, ...]) -> CostModel:
    """Return a table: every number of ranks, nodes or ranks per node has a time of its own, from 1 µs on."""
    ((name, ranges),) = found.items()
    rules = [
        TableRule("mpi", 0, None, replace(TableKey("send"), **{name: each}), {"mpi": {8: index + 1.0}})  # type: ignore[arg-type]
        for index, each in enumerate(ranges)
    ]
    return CostModel(Table(tuple(rules)))


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [(1, 1), (2, 1), (3, 1), (5, 1), (6, 2), (7, 2), (10, 2), (20, 2), (40, 3), (1000, 3)],
)
@pytest.mark.parametrize("name", ["ranks", "nodes", "ranks_per_node"])
def test_the_nearest_scale_is_taken(name: str, asked: int, nearest: int) -> None:
    """Ratios count: 5 is nearer to 4 than to 7, 20 nearer to 10 than to 64."""
    model = scales(**{name: (Range(2, 5), Range(7, 11), Range(64, None))})
    more: dict[str, Any] = {name: asked}
    found = model.expected("mpi", Query("send", 8, **more))
    covered = asked in (2, 3, 4, 7, 10) or asked >= 64
    assert found == Estimate(float(nearest), "measured" if covered else "extrapolated")


def test_the_scale_matters_more_than_dtype_and_manner() -> None:
    model = CostModel(
        Table(
            (
                TableRule("mpi", 0, None, TableKey("send", ranks=Range(8, 9)), {"mpi": {8: 1.0}}),
                TableRule("mpi", 0, None, TableKey("send", "int8", async_op=True), {"mpi": {8: 2.0}}),
                TableRule("mpi", 0, None, TableKey("send", "int8"), {"mpi": {8: 3.0}}),
            )
        )
    )
    assert model.expected("mpi", Query("send", 8, "float32", ranks=2)) == Estimate(3.0, "extrapolated")
    assert model.expected("mpi", Query("send", 8, "float32", ranks=8)) == Estimate(1.0)
    assert model.expected("mpi", Query("send", 8, "int8", ranks=2)) == Estimate(3.0)


@pytest.mark.parametrize(("nbytes", "figure"), [(4, "unknown"), (8, "extrapolated"), (16, "unknown")])
def test_a_bound_of_other_numbers_of_ranks_is_none(nbytes: int, figure: str) -> None:
    found = scales(ranks=(Range(4, 5),)).expected("mpi", Query("send", nbytes, ranks=2))
    assert found is not None
    assert (found.figure, found.extrapolated, found.bound_us) == (figure, True, None)


@given(
    measured=st.dictionaries(st.sampled_from(["mpi", "gloo", "mpi:ring"]), points, max_size=3),
    kind=st.sampled_from(KINDS),
    nbytes=st.integers(0, 1 << 40),
    basis=st.sampled_from(["total", "per_rank"]),
    ranks=st.integers(1, 64),
)
def test_a_model_is_its_curves(
    measured: dict[str, dict[int, float]], kind: str, nbytes: int, basis: Any, ranks: int
) -> None:
    model = CostModel(Table((TableRule("mpi", 0, None, TableKey("*", basis=basis), measured),)))
    query = Query(kind, nbytes, ranks=ranks)
    for choice in ("mpi", "gloo", "mpi:ring", "nccl"):
        expected = (
            TimeCurve.through(measured[choice]).at(query.size(basis) or 0) if choice in measured else None
        )
        assert model.expected(choice, query) == expected
