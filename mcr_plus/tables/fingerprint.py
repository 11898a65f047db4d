"""Make the fingerprint of a job, and compare a table's fingerprint with the running job.

A fingerprint consists of named facts: versions (`mcr_plus`, `torch`, and each backend's library under the
backend's name), the shape of the job (`ranks`, `nodes`, `ranks_per_node`) and the machine (`cpu`, `cores`,
`gpu`). A table has the facts of its measurement; a merged table may have several values per fact. Only facts
on both sides are compared.
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

from mcr_plus.core.environment import package_version

FACTS: Final = ("mcr_plus", "torch", "ranks", "nodes", "ranks_per_node", "cpu", "cores", "gpu")

Fingerprint = Mapping[str, tuple[str, ...]]
"""Facts by name, with several values for merged tables."""


def fingerprint_here(
    libraries: Mapping[str, str], *, ranks: int, nodes: int, ranks_per_node: int
) -> dict[str, tuple[str, ...]]:
    """Return the facts of this job; `libraries` are the versions of its backends (see `backends`)."""
    facts = {
        "mcr_plus": package_version(),
        "torch": version("torch"),
        **libraries,
        "ranks": str(ranks),
        "nodes": str(nodes),
        "ranks_per_node": str(ranks_per_node),
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),  # cores of the machine, because launchers bind ranks to some of them
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    return {name: (value,) for name, value in facts.items()}


def differences(stated: Fingerprint, here: Fingerprint) -> list[str]:
    """Describe each different fact: `mpi: MPICH 5.0.2, measured with Open MPI 5.0.11`."""
    return [
        f"{name}: {', '.join(here[name])}, measured with {' or '.join(values)}"
        for name, values in stated.items()
        if name in here and not _compared(name, values) & _compared(name, here[name])
    ]


def merged(prints: Sequence[Fingerprint]) -> dict[str, tuple[str, ...]]:
    """Return the facts that are in all fingerprints, with all of their values."""
    names = [name for name in prints[0] if all(name in facts for facts in prints)] if prints else []
    return {name: tuple(dict.fromkeys(v for facts in prints for v in facts[name])) for name in names}


def _compared(name: str, values: Sequence[str]) -> set[str]:
    """Return the values to compare: for versions of mcr_plus and torch, only major and minor."""
    if name not in ("mcr_plus", "torch"):
        return set(values)
    return {".".join(value.partition("+")[0].split(".")[:2]) for value in values}


@cache
def cpu_name() -> str:
    """Return the processor's name in /proc/cpuinfo, or its architecture without one."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()
