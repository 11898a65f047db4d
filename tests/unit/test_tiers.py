"""Which variants of a test stay in `make test`."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import sampled

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
                get_closest_marker=lambda _: jobs or None,
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


def test_a_job_stays_once_whatever_its_launcher_library_and_ranks() -> None:
    decorators = ("via", ["mpi", "torch"]), ("backend", ["mpi", "gloo", "msccl"]), ("ranks", [2, 3])
    found = {params(sampled(variants(*decorators, jobs=True, name=f"test_{at}")))[0] for at in range(60)}
    assert len(params(sampled(variants(*decorators, jobs=True)))) == 1
    assert found == set(product(["mpi", "torch"], ["mpi", "gloo", "msccl"], [2, 3]))  # others of other tests


def test_kinds_of_faults_of_a_job_stay() -> None:
    kept = params(sampled(variants(("how", ["kill", "stop", "raise"]), ("via", ["mpi", "torch"]), jobs=True)))
    assert sorted(str(how) for how, _ in kept) == ["kill", "raise", "stop"]


def test_a_test_without_parameters_stays() -> None:
    assert len(sampled(variants())) == 1
