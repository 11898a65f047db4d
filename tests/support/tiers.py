"""Which tests `make test` leaves to `make test-all`, so that it takes minutes.

Marked as `long`: tests that take long and have shorter ones of their kind. Marked as `short("2-", "3]")`: of
the variants of a function those whose ids, with their closing bracket, begin so stay; without arguments, all.
Of other functions with parameters: if their tests start processes, one variant stays, another one for each
function; otherwise every value of every parameter stays, not every combination of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import PurePath
from typing import Final
from zlib import crc32

import pytest
from hypothesis import settings

STALE: Final = pytest.StashKey[list[str]]()
"""Arguments of `short` that fit no variant, in the files that were collected."""


def sampled(tests: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Of the tests of one function those that stay in `make test`: see the text of this module.

    The choice depends on nothing but names and the order of parameters, so all workers make the same one.
    """
    mark = tests[0].get_closest_marker("short")
    if mark is not None:
        return [each for each in tests if _variant(each).startswith(mark.args or ("",))]
    if any(each.get_closest_marker("jobs") for each in tests):
        name = f"{PurePath(tests[0].location[0]).name}::{tests[0].originalname}"
        return _one(tests, crc32(name.encode()))
    return _covering(tests)


def _one(tests: Sequence[pytest.Function], turn: int) -> list[pytest.Function]:
    """One of the tests; those that are marked as longer, or skipped here anyway, are left as they are."""
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
    """Few tests that together have every value of every parameter: always the one with most new ones next."""
    values = {each: _values(each) for each in tests}
    missing = set().union(*values.values())
    chosen = [each for each in tests if not values[each]]
    while missing:
        chosen.append(max(tests, key=lambda each: len(values[each] & missing)))
        missing -= values[chosen[-1]]
    return chosen


def _values(test: pytest.Function) -> set[Hashable]:
    """What a test takes of each `parametrize`; all combinations of one share its objects."""
    left = dict(_params(test))
    values: set[Hashable] = set()
    for mark in test.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        values.add(tuple((name, id(left.pop(name, None))) for name in names))
    return values.union((name, id(value)) for name, value in left.items())


def _params(test: pytest.Function) -> dict[str, object]:
    return test.callspec.params if hasattr(test, "callspec") else {}


def examples(count: int) -> int:
    """Of so many examples in `make test-all` those in this run."""
    return count * settings().max_examples // 100


def stale(tests: Sequence[pytest.Function]) -> list[str]:
    """Arguments of `short` that fit none of the tests of its function."""
    mark = tests[0].get_closest_marker("short")
    return [
        f"{tests[0].originalname}: {each}"
        for each in (mark.args if mark else ())
        if not any(_variant(test).startswith(each) for test in tests)
    ]


def _variant(test: pytest.Function) -> str:
    return test.name.partition("[")[2]
