"""Choice of the tests that `make test` leaves to `make test-all`, so that it takes minutes.

`long` marks tests that take long and have shorter tests of their kind. `short("2-", "3]")` keeps the variants
of a function whose ids, with the closing bracket, begin with one of these texts; without arguments, all
variants. Of other functions with parameters, `make test` keeps one variant (a different one for each
function) if their tests start processes; otherwise every value of every parameter, but not every combination.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import PurePath
from typing import Final
from zlib import crc32

import pytest
from hypothesis import settings

STALE: Final = pytest.StashKey[list[str]]()
"""Arguments of `short` that fit no variant, in the collected files."""


def sampled(tests: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Return the tests of one function that `make test` keeps; see the module's docstring.

    The choice depends only on names and the order of parameters, so all workers make the same one.
    """
    mark = tests[0].get_closest_marker("short")
    if mark is not None:
        return [each for each in tests if _variant(each).startswith(mark.args or ("",))]
    if any(each.get_closest_marker("jobs") for each in tests):
        name = f"{PurePath(tests[0].location[0]).name}::{tests[0].originalname}"
        return _one(tests, crc32(name.encode()))
    return _covering(tests)


def _one(tests: Sequence[pytest.Function], turn: int) -> list[pytest.Function]:
    """Return one of the tests; tests marked as longer, or skipped here anyway, stay unchanged."""
    left = [
        each
        for each in tests
        if each.get_closest_marker("long")
        or each.get_closest_marker("slow")
        or any(mark.args and mark.args[0] for mark in each.iter_markers("skipif"))
    ]
    run = [each for each in tests if each not in left]
    return [*left, *([run[turn % len(run)]] if run else [])]


def _covering(tests: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Return few tests that together have every value of every parameter, chosen greedily."""
    values = {each: _values(each) for each in tests}
    missing = set().union(*values.values())
    chosen = [each for each in tests if not values[each]]
    while missing:
        chosen.append(max(tests, key=lambda each: len(values[each] & missing)))
        missing -= values[chosen[-1]]
    return chosen


def _values(test: pytest.Function) -> set[Hashable]:
    """Return a test's values of each `parametrize`; all combinations of one share its objects."""
    left = dict(_params(test))
    values: set[Hashable] = set()
    for mark in test.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        values.add(tuple((name, id(left.pop(name, None))) for name in names))
    return values.union((name, id(value)) for name, value in left.items())


def _params(test: pytest.Function) -> dict[str, object]:
    return test.callspec.params if hasattr(test, "callspec") else {}


def examples(count: int) -> int:
    """Return the number of examples in this run, of `count` in `make test-all`."""
    return count * settings().max_examples // 100


def stale(tests: Sequence[pytest.Function]) -> list[str]:
    """Return the arguments of `short` that fit none of the tests of its function."""
    mark = tests[0].get_closest_marker("short")
    return [
        f"{tests[0].originalname}: {each}"
        for each in (mark.args if mark else ())
        if not any(_variant(test).startswith(each) for test in tests)
    ]


def _variant(test: pytest.Function) -> str:
    return test.name.partition("[")[2]
