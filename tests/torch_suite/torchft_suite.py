"""Run torchft's own tests of process groups on `ProcessGroupMcr`: `python torchft_suite.py [PATTERN…]`.

The tests lie in torchft's wheel (torchft.process_group_test, from October 2026 on). There, ranks are threads
of one process. A process has one job of mcr_plus, so each rank is forked here, and each test as well. Prints
one
JSON line per test: its name, `pass`, `fail` or `skip`, and why.
"""

from __future__ import annotations

import fnmatch
import json
import multiprocessing
import sys
import traceback
import unittest
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from mcr_plus.backends.shm import interpreter_kernels, p2p_kernels
from mcr_plus.backends.shm.collectives import begin_and_advance
from mcr_plus.torchft import ProcessGroupMcr

theirs: Any = import_module("torchft.process_group_test")
RANKS: Final = 3
TIMEOUT: Final = timedelta(seconds=30)
ON_ONE_RANK: Final = ("test_gloo_apis_0_cpu", "test_gloo_timeout", "test_functional_collectives")
"""Tests of gloo that run on any group."""
_forks: Final = multiprocessing.get_context("fork")


class Forked:
    """A call in a process of its own, with `result` as a future has it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._told, other = _forks.Pipe(duplex=False)
        self._process = _forks.Process(target=self._run, args=(call, other))
        self._process.start()
        other.close()

    @staticmethod
    def _run(call: Callable[[], Any], other: Connection) -> None:
        torch.set_num_threads(1)
        try:
            other.send((True, call()))
        except unittest.SkipTest as skipped:
            other.send((None, str(skipped)))
        except BaseException:
            other.send((False, traceback.format_exc()))

    def outcome(self) -> tuple[bool | None, Any]:
        """Return whether the call has returned (None: skipped), and its value or the reason."""
        try:
            done = self._told.recv() if self._told.poll(90) else (False, "not done within 90 s")
        except EOFError:
            done = False, "the process has died"
        self._process.join(10)
        self._process.kill()
        return done

    def result(self) -> Any:
        """Return the value; raises `RuntimeError` with the traceback."""
        returned, value = self.outcome()
        if not returned:
            raise RuntimeError(value)
        return value


class Executor:
    """The part of ThreadPoolExecutor that the tests use."""

    def submit(self, call: Callable[..., Any], *args: Any) -> Forked:
        """Start a call."""
        return Forked(lambda: call(*args))

    def shutdown(self, wait: bool) -> None:
        """Does nothing: processes end by themselves."""


class McrMultiPgTest(theirs.MultiPgBaseTest):  # type: ignore[misc]
    """Their tests of several ranks, with all collectives: gloo skips three."""

    WORLD_SIZE = RANKS

    @classmethod
    def setUpClass(cls) -> None:
        cls.store = theirs.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        cls.pg_pool = [ProcessGroupMcr(timeout=TIMEOUT) for _ in range(RANKS)]
        cls.executor = Executor()

    def _run_parallel(self, collective: str, device: str = "cpu") -> None:
        def run(pg: Any, rank: int) -> None:
            address = f"localhost:{self.store.port}/parallel_{collective}"
            theirs.reconfigure_with_store(pg, address, rank, RANKS)
            theirs._COLLECTIVE_TO_FUNC[collective](pg, rank, torch.tensor([rank + 1], device=device))
            pg.barrier(theirs.BarrierOptions()).wait()  # the others may be at the collective still
            pg.shutdown()

        self._collect([self.executor.submit(run, pg, rank) for rank, pg in enumerate(self.pg_pool)])


def tests() -> dict[str, Callable[[], None]]:
    """Return all tests by name."""
    found: dict[str, Callable[[], None]] = {}
    for name in ON_ONE_RANK:
        found[name] = getattr(theirs.ProcessGroupTest(name), name)
    McrMultiPgTest.setUpClass()
    case = McrMultiPgTest("_run_parallel")
    for collective in theirs._ALL_COLLECTIVES:
        found[f"test_collective_{collective}"] = partial(case._run_parallel, collective)
        found[f"test_collective_with_resiliency_{collective}"] = partial(
            case._run_with_resiliency, collective
        )
    return found


def main(patterns: list[str]) -> int:
    """Run the tests with names that match one of `patterns` (default: all); return 1 if one fails."""
    begin_and_advance()
    for module in (interpreter_kernels, p2p_kernels):
        module.prepare()
    theirs.ProcessGroupGloo = ProcessGroupMcr
    failed = 0
    for name, test in tests().items():
        if patterns and not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            continue
        # Tests with several ranks fork by themselves.
        returned, why = Forked(test).outcome() if name in ON_ONE_RANK else _called(test)
        outcome = "skip" if returned is None else "pass" if returned else "fail"
        failed += outcome == "fail"
        print(json.dumps({"test": name, "outcome": outcome, "why": why or ""}), flush=True)
    return int(failed > 0)


def _called(test: Callable[[], None]) -> tuple[bool | None, str]:
    try:
        test()
    except unittest.SkipTest as skipped:
        return None, str(skipped)
    except Exception:
        return False, traceback.format_exc()
    return True, ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
