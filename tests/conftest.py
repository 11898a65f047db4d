"""Settings and fixtures of all tests."""

from __future__ import annotations

import gc
import inspect
import os
import signal
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from hypothesis import settings
from ranks import nursery, share_nursery
from tiers import STALE, sampled, stale

_HERE = str(Path(__file__).parent)
_STARTERS = {
    "run_ranks",
    "run_job",
    "subprocess",
    "example_runs",
    "launch",
    "jobs",
    "fork",
    "multiprocessing",
    "TwoHosts",
    "job_here",
    "job_on",
    "job_by_mpirun",
    "Racks",
    "why_not",
    "bench_beside",
}
"""Functions, fixtures and modules by which tests start processes."""


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until tests are collected, which leaves hardly any garbage
    # On a busy machine an example may take any time. Without long tests, random ones are shorter, too.
    drawn = 20 if "not long" in config.option.markexpr else 100
    settings.register_profile("untimed", deadline=None, max_examples=drawn)
    settings.load_profile("untimed")
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
    if getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput"):
        # More ranks at once than cores. Yields alone would starve some of them (decision 16).
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        os.environ.setdefault("OMPI_MCA_threads_pthreads_yield_strategy", "nanosleep")
    share_nursery(getattr(config, "workerinput", {}).get("nursery"))
    # A shell starts background jobs with interrupts ignored, and their children inherit this setting. Tests
    # of Ctrl-C send interrupts to programs they start; those must hear them however pytest itself was
    # started.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let all workers of pytest-xdist fork ranks from the same processes, whose start takes seconds."""
    if "not jobs" not in node.config.option.markexpr:
        node.workerinput["nursery"] = nursery().folder


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    variants: defaultdict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function):
            variants[item.location[0], item.function].append(item)
            if _starts_processes(item):
                item.add_marker("jobs")
    whole_files = not any("::" in arg for arg in config.args) and not config.getoption("lf", False)
    config.stash[STALE] = []
    for tests in variants.values():
        stay = set(sampled(tests))
        for each in tests:
            if each not in stay:
                each.add_marker("long")
        config.stash[STALE] += stale(tests) if whole_files else []


def pytest_collection_finish() -> None:
    """Keep tests and modules out of later collections of garbage, which took a fifth of a worker's time."""
    gc.freeze()
    gc.enable()


def _starts_processes(item: pytest.Function) -> bool:
    """Return whether a test, a function of tests that it uses, or one of its fixtures names a starter."""
    fixtures = item.session._fixturemanager.getfixturedefs
    known = [each.func for name in item.fixturenames for each in fixtures(name, item) or ()]
    return _names_a_starter(item.function, *known)


@cache  # the variants of a test share its code
def _names_a_starter(*functions: object) -> bool:
    todo = list(functions)
    seen: set[int] = set()
    while todo:
        function = inspect.unwrap(todo.pop())  # type: ignore[arg-type]
        if isinstance(function, type):
            todo += [each for each in vars(function).values() if inspect.isfunction(each)]
        if id(function) in seen or not inspect.isfunction(function) or not _is_of_tests(function):
            continue
        seen.add(id(function))
        names = _names(function.__code__)
        if names & _STARTERS:
            return True
        used = [function.__globals__[name] for name in names & function.__globals__.keys()]
        for each in used:
            todo += (
                [vars(each)[name] for name in names & vars(each).keys()] if inspect.ismodule(each) else [each]
            )
    return False


def _is_of_tests(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith(_HERE)


def _names(code: CodeType) -> set[str]:
    """Names of globals and attributes that a function uses, and the functions inside it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names, *code.co_freevars}.union(*map(_names, inner))
