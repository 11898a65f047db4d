"""Where a table was measured, and whether this is such a place.

A fingerprint is a few named facts: versions (`mcr_plus`, `torch`, and each backend's library under the
backend's name), the shape of the job (`ranks`, `nodes`, `ranks_per_node`) and the machine (`cpu`, `cores`,
`gpu`). A table states those it was measured with; a merged table states several values of a fact. Only facts
that both sides know are compared.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch

from mcr_plus.backends import backend_class

FACTS: Final = ("mcr_plus", "torch", "ranks", "nodes", "ranks_per_node", "cpu", "cores", "gpu")

Fingerprint = Mapping[str, tuple[str, ...]]
"""Facts by name; more than one value of a fact if tables were merged."""


def fingerprint_here(
    libraries: Mapping[str, str], *, ranks: int, nodes: int, ranks_per_node: int
) -> dict[str, tuple[str, ...]]:
    """The facts of this job; `libraries` names what is behind its backends (see `library_versions`)."""
    facts = {
        "mcr_plus": version("mcr_plus"),
        "torch": version("torch"),
        **libraries,
        "ranks": str(ranks),
        "nodes": str(nodes),
        "ranks_per_node": str(ranks_per_node),
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),  # of the machine: launchers bind ranks to some of them
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    return {name: (value,) for name, value in facts.items()}


def library_versions(names: Sequence[str]) -> dict[str, str]:
    """The libraries behind backends in use in this process, by backend, such as `Open MPI 5.0.11`."""
    found = {}
    for name in names:
        library = getattr(backend_class(name), "library_version", None)
        if library is not None:
            found[name] = library()
    return found


def differences(stated: Fingerprint, here: Fingerprint) -> list[str]:
    """What is not as stated, one phrase per fact: `mpi: MPICH 5.0.2, measured with Open MPI 5.0.11`."""
    return [
        f"{name}: {', '.join(here[name])}, measured with {' or '.join(values)}"
        for name, values in stated.items()
        if name in here and not _compared(name, values) & _compared(name, here[name])
    ]


def merged(prints: Sequence[Fingerprint]) -> dict[str, tuple[str, ...]]:
    """The facts that all state, with every value that one of them has."""
    names = [name for name in prints[0] if all(name in each for each in prints)] if prints else []
    return {name: tuple(dict.fromkeys(v for each in prints for v in each[name])) for name in names}


def _compared(name: str, values: Sequence[str]) -> set[str]:
    """Of our own version and torch's only what changes behaviour: the first two numbers."""
    if name not in ("mcr_plus", "torch"):
        return set(values)
    return {".".join(value.partition("+")[0].split(".")[:2]) for value in values}


@cache
def cpu_name() -> str:
    """The processor's name as Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()
