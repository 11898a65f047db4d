"""Run torch's own tests of torch.distributed: `python suite.py BACKEND GATE RANKS [PATTERN…]`.

The tests lie in the wheel (torch.testing._internal.distributed.distributed_test). When that module is
imported, the name GATE decides which tests apply: `gloo`, or `mpi` for other ones. Then they run with
BACKEND. Every test forks RANKS processes. Prints one JSON line per test: its name, `pass`, `fail` or `skip`,
and why.
"""

from __future__ import annotations

import fnmatch
import json
import os
import sys
import tempfile
import unittest
from importlib import import_module
from typing import Any, Final

TIMEOUT_S: Final = 60


def main(backend: str, gate: str, ranks: int, patterns: list[str]) -> None:
    """Run the tests with names that match one of `patterns` (default: all)."""
    folder = tempfile.mkdtemp(prefix="mcr-suite-")
    os.environ.update(
        BACKEND=gate, WORLD_SIZE=str(ranks), TEMP_DIR=folder, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1"
    )
    suite = prepared(backend)
    for name in unittest.TestLoader().getTestCaseNames(suite):
        if patterns and not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            continue
        print(json.dumps({"test": name, **outcome(suite(name))}), flush=True)


def prepared(backend: str) -> Any:
    """The tests as a class, with all that a process needs already loaded: it is forked many times."""
    import torch
    from torch.testing._internal import common_distributed

    tests: Any = import_module("torch.testing._internal.distributed.distributed_test")
    torch.set_num_threads(1)
    common_distributed.TIMEOUT_DEFAULT = TIMEOUT_S
    tests.BACKEND = os.environ["BACKEND"] = backend
    for names in tests.DistTestCases.backend_feature.values():
        if "gloo" in names:
            names.add(backend)
    if backend == "mcr" or os.environ.get("MCR_MASQUERADE"):
        import mcr_plus.torch_backend.process_group  # noqa: F401
        from mcr_plus.backends.shm import interpreter_kernels, p2p_kernels
        from mcr_plus.backends.shm.collectives import begin_and_advance

        begin_and_advance()
        for module in (interpreter_kernels, p2p_kernels):
            module.prepare()

    class Suite(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    Suite.__module__ = "__main__"
    return Suite


def outcome(test: unittest.TestCase) -> dict[str, str]:
    """Return the outcome of a test."""
    result = unittest.TestResult()
    test.run(result)
    if result.skipped:
        return {"outcome": "skip", "why": result.skipped[0][1]}
    problems = [*result.errors, *result.failures]
    return {"outcome": "fail", "why": problems[0][1]} if problems else {"outcome": "pass", "why": ""}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
