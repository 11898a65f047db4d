"""Run c10d's tests of fault tolerance: `python fault_tolerance_suite.py BACKEND [SOURCE [PATTERN…]]`.

The tests come from the installed torch (2.14 on), if its wheel has them, or from SOURCE: torch's source tree
of that version, or a file of it. Each test starts three processes. Prints one JSON line per test: its name,
`pass`, `fail` or `skip`, and why.
"""

from __future__ import annotations

import fnmatch
import json
import multiprocessing
import os
import sys
import unittest
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

_NAME: Final = "test_c10d_fault_tolerance.py"


def found(source: str) -> Path | str:
    """Return the file with the tests, or the reason why the installed torch can run none."""
    import torch
    import torch.distributed as dist

    if not hasattr(dist.ProcessGroup, "reconfigure"):
        return f"torch {torch.__version__} has no ProcessGroup.reconfigure; it came with 2.14"
    inside = Path(torch.__file__).parent / "testing" / "_internal" / "distributed"
    places = [Path(source), Path(source) / "test" / "distributed" / _NAME] if source else []
    for place in (*places, *sorted(inside.glob("*fault_tolerance*.py"))):
        if place.is_file():
            return place
    return f"the wheel of torch {torch.__version__} does not have {_NAME}; name torch's source tree"


def suite_of(backend: str, file: Path) -> Any:
    """Return the tests for one backend, as a class."""
    spec = spec_from_file_location("fault_tolerance", file)
    assert spec is not None
    assert spec.loader is not None
    theirs: Any = module_from_spec(spec)
    spec.loader.exec_module(theirs)
    if backend == "mcr":
        import mcr_plus.torch_backend.process_group  # noqa: F401
        from mcr_plus.backends.shm import interpreter_kernels, p2p_kernels
        from mcr_plus.backends.shm.collectives import begin_and_advance

        begin_and_advance()
        for module in (interpreter_kernels, p2p_kernels):
            module.prepare()
    suite = theirs._make_fault_tolerance_test_class(backend, "cpu")

    def fork(test: Any) -> None:  # spawned processes would not find the class
        test._start_processes(multiprocessing.get_context("fork").Process)

    suite._spawn_processes = fork
    return suite


def main(backend: str, source: str, patterns: list[str]) -> int:
    """Run the tests with names that match one of `patterns` (default: all); return 1 if one fails."""
    file = found(source)
    if isinstance(file, str):
        print(json.dumps({"test": "all", "outcome": "skip", "why": file}))
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcome = import_module("suite").outcome  # of the same folder
    suite, failed = suite_of(backend, file), 0
    for name in unittest.TestLoader().getTestCaseNames(suite):
        if patterns and not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            continue
        told = outcome(suite(name))
        failed += told["outcome"] == "fail"
        print(json.dumps({"test": name, **told}), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "".join(sys.argv[2:3]), sys.argv[3:]))
