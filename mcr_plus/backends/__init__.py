"""Communication libraries behind one interface; each is imported only when it is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from mcr_plus import registry
from mcr_plus.interfaces import Backend, World
from mcr_plus.message import KINDS, Group, Kind, Signature
from mcr_plus.units import Range

PREFERENCE = ("nccl", "msccl", "mpi", "gloo")


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can run here; if not, why, and how to get it."""

    name: str
    available: bool
    version: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class OperationRow:
    """How one backend does one kind of operation, for one reduce op and dtype."""

    kind: Kind
    backend: str
    support: Literal["native", "emulated", "no"]
    how: str


def backend_class(name: str) -> type[Backend]:
    """The backend registered under `name`; raises `Unsupported` naming the known ones."""
    return cast("type[Backend]", registry.get("backends", name))


def table_sizes(choice: str) -> Range:
    """The bytes for which a table's rule may name a choice, `name` or `name:algorithm`."""
    name, _, algorithm = choice.partition(":")
    sizes = getattr(backend_class(name), "sizes", None) if algorithm else None
    return Range(0) if sizes is None else cast("Range", sizes(algorithm))


def preferred_backends() -> list[str]:
    """Every known backend, in the order of preference where nothing else decides; outside ones last."""
    names = registry.names("backends")
    ours = [name for name in PREFERENCE if name in names]
    return ours + [name for name in names if name not in ours]


def reaching(names: Iterable[str], world: World, group: Group) -> list[str]:
    """Those of the backends that can serve a group; see `Backend` for `reaches`."""
    if group.size == 1:
        return [name for name in names if name == "local"]
    found = []
    for name in names:
        reaches = getattr(backend_class(name), "reaches", None)
        if name != "local" and (reaches is None or not reaches(world, group)):
            found.append(name)
    return found


def supposed(wanted: Sequence[str] | None, world: World, group: Group) -> dict[str, type[Backend]]:
    """The backends of a group of a job that is only supposed: those wanted, or all that are installed."""
    names = reaching([*(wanted or preferred_backends()), "local"], world, group)
    return {
        name: backend_class(name)
        for name in dict.fromkeys(names)
        if wanted is not None or backend_class(name).availability().available
    }


def availability() -> list[BackendStatus]:
    """Every known backend, found or not. Initialises no library."""
    rows = []
    for name in registry.names("backends"):
        found = backend_class(name).availability()
        rows.append(BackendStatus(name, found.available, found.version, found.reason, found.remedy))
    return rows


def operations_table() -> list[OperationRow]:
    """Operation × backend, asked of the code that will do it (float32 and SUM where it matters)."""
    rows = []
    for kind in KINDS:
        for name in registry.names("backends"):
            support = backend_class(name).supports(_sample(kind, name))
            rows.append(OperationRow(kind, name, support.level, support.how))
    return rows


def _sample(kind: Kind, backend: str) -> Signature:
    import torch

    from mcr_plus.message import REDUCING, ROOTED

    on_stream = backend_class(backend).on_stream
    return Signature(
        kind=kind,
        dtype=None if kind == "barrier" else torch.float32,
        shape=(4,),
        nbytes=16,
        group="world",
        ranks=1 if backend == "local" else 2,
        device="cuda" if on_stream else "cpu",
        reduce_op="SUM" if kind in REDUCING else None,
        root=0 if kind in ROOTED else None,
    )
