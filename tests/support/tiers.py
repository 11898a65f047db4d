"""Which tests `make test` leaves to `make test-all`, so that it takes minutes.

By rule, of a test with parameters (`sampled`): of a function whose tests start processes one stays, another
one for each function; of others every value of every parameter stays, not every combination of them. By
name (`long_tests.py`): functions and variants that take long and have shorter ones of their kind.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from pathlib import PurePath
from typing import Final
from zlib import crc32

import pytest
from hypothesis import settings
from long_tests import FUNCTIONS, KEPT

STALE: Final = pytest.StashKey[list[str]]()
"""What `long_tests.py` names and is no test, of the files that were collected."""


def sampled(tests: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Of the tests of one function those that stay in `make test`: see the text of this module.

    The choice depends on nothing but names and the order of parameters, so all workers make the same one.
    """
    file, function = PurePath(tests[0].location[0]).name, tests[0].originalname
    name = f"{file}::{function}"
    if function.removeprefix("test_") in FUNCTIONS.get(file, "").split():
        return []
    if name in KEPT:
        stay = tuple(f"{function}[{each}" for each in KEPT[name])
        return [each for each in tests if each.name.startswith(stay)]
    if any(each.get_closest_marker("jobs") for each in tests):
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


def stale(tests: Iterable[tuple[str, str]]) -> list[str]:
    """What `long_tests.py` names and is none of these tests, (file, name), of files that are among theirs."""
    found = [f"{PurePath(path).name}::{name}{'' if '[' in name else '['}" for path, name in tests]
    files = {name.partition("::")[0] for name in found}
    named = [
        *(f"{file}::test_{each}[" for file, names in FUNCTIONS.items() for each in names.split()),
        *(f"{function}[{each}" for function, beginnings in KEPT.items() for each in beginnings),
    ]
    return [
        each
        for each in named
        if each.partition("::")[0] in files and not any(name.startswith(each) for name in found)
    ]
