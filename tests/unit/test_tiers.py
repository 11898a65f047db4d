"""Which variants of a test stay in `make test`."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import sampled, stale

SIZES = [1, 32, 1000, 5003]
CODECS = ["bf16", "topk", "sign1"]


def variants(
    *decorators: tuple[str, list[Any]], jobs: bool = False, name: str = "test_it", short: tuple[str, ...] = ()
) -> list[Any]:
    """Return pytest's variants of a function with these decorators, each with its names and values."""
    marks = [pytest.mark.parametrize(names, values).mark for names, values in decorators]
    found = []
    own = {"jobs": jobs, "short": short and pytest.mark.short(*short).mark}
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
                get_closest_marker=lambda kind: own.get(kind) or None,
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


def test_explicitly_listed_combinations_stay() -> None:
    listed = [(1, "bf16"), (1, "topk"), (32, "bf16"), (32, "topk")]
    assert params(sampled(variants(("size,codec", listed)))) == listed


def test_one_variant_of_a_job_stays_and_functions_differ() -> None:
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


def test_variants_by_name() -> None:
    short = ("32-", "1000-topk")
    tests = variants(("codec", CODECS), ("size", SIZES), short=short)
    assert sampled(tests) == []
    assert stale(tests) == [f"test_it: {each}" for each in short]
    tests = variants(("size", SIZES), ("codec", CODECS), short=short)
    assert params(sampled(tests)) == [(32, "bf16"), (32, "topk"), (32, "sign1"), (1000, "topk")]
    assert stale(tests) == []
    assert stale(variants(("size", SIZES))) == []


def test_a_test_without_parameters_stays() -> None:
    assert len(sampled(variants())) == 1
