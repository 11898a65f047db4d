"""Which variants of a test stay in `make test`."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import long_tests
import pytest
from tiers import sampled, stale

SIZES = [1, 32, 1000, 5003]
CODECS = ["bf16", "topk", "sign1"]


def variants(*decorators: tuple[str, list[Any]], jobs: bool = False, name: str = "test_it") -> list[Any]:
    """What pytest collects of a function with these decorators, each with its names and sets of values."""
    marks = [pytest.mark.parametrize(names, values).mark for names, values in decorators]
    found = []
    for values in product(*(values for _, values in decorators)):
        params: dict[str, object] = {}
        for (names, _), value in zip(decorators, values, strict=True):
            params.update(zip(names.split(","), value if "," in names else [value], strict=True))
        found.append(
            SimpleNamespace(
                location=("tests/unit/test_x.py", 1, name),
                originalname=name,
                name=f"{name}[{'-'.join(map(str, params.values()))}]",
                callspec=SimpleNamespace(params=params),
                iter_markers=lambda kind: marks if kind == "parametrize" else [],
                get_closest_marker=lambda kind: (jobs and kind == "jobs") or None,
            )
        )
    return [Hashable(**vars(each)) for each in found]


class Hashable(SimpleNamespace):
    """Equal to nothing but itself, as tests are."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def params(tests: list[Any]) -> list[tuple[object, ...]]:
    return [tuple(each.callspec.params.values()) for each in tests]


def test_every_value_of_every_parameter_stays() -> None:
    kept = params(sampled(variants(("size", SIZES), ("codec", CODECS))))
    assert len(kept) == max(len(SIZES), len(CODECS))
    assert {size for size, _ in kept} == set(SIZES)
    assert {codec for _, codec in kept} == set(CODECS)


def test_sets_of_values_that_are_listed_one_by_one_stay() -> None:
    listed = [(1, "bf16"), (1, "topk"), (32, "bf16"), (32, "topk")]
    assert params(sampled(variants(("size,codec", listed)))) == listed


def test_of_jobs_one_stays_and_another_of_each_function() -> None:
    decorators = ("via", ["mpi", "torch"]), ("how", ["kill", "stop"]), ("ranks", [2, 3])
    found = {params(sampled(variants(*decorators, jobs=True, name=f"test_{at}")))[0] for at in range(60)}
    assert len(params(sampled(variants(*decorators, jobs=True)))) == 1
    assert found == set(product(["mpi", "torch"], ["kill", "stop"], [2, 3]))


def test_the_job_that_stays_is_none_that_is_marked_as_slow() -> None:
    for at in range(20):
        tests = variants(("ranks", [2, 3, 50]), jobs=True, name=f"test_{at}")
        tests[2].get_closest_marker = lambda kind: kind in ("jobs", "slow")
        assert {ranks for (ranks,) in params(sampled(tests))} in (
            {2, 50},
            {3, 50},
        )


def test_variants_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(long_tests.KEPT, "test_x.py::test_it", ("32-", "1000-topk"))
    kept = params(sampled(variants(("codec", CODECS), ("size", SIZES))))
    assert kept == []
    kept = params(sampled(variants(("size", SIZES), ("codec", CODECS))))
    assert kept == [(32, "bf16"), (32, "topk"), (32, "sign1"), (1000, "topk")]
    names = [("tests/unit/test_x.py", "test_it[32-bf16]"), ("tests/unit/test_y.py", "test_that")]
    assert stale(names) == ["test_x.py::test_it[1000-topk"]


def test_functions_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(long_tests.FUNCTIONS, "test_x.py", "this it")
    assert sampled(variants(("size", SIZES))) == []
    assert len(sampled(variants(("size", SIZES), name="test_it_too"))) == len(SIZES)
    assert stale([("tests/unit/test_x.py", "test_it[1]"), ("tests/unit/test_x.py", "test_this_one")]) == [
        "test_x.py::test_this["
    ]


def test_a_test_without_parameters_stays() -> None:
    assert len(sampled(variants())) == 1
