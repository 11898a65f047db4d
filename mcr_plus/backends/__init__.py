"""Communication libraries behind one interface; a library is imported only when it is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from mcr_plus import registry
from mcr_plus.backends.base import Availability, Backend, complete
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import KINDS, Kind
from mcr_plus.core.message import Signature
from mcr_plus.core.units import Range
from mcr_plus.rendezvous.world import World


@dataclass(frozen=True)
class OperationRow:
    """Support of a backend for a kind of operation, with one reduce op and dtype, or for `sums`."""

    kind: Kind | Literal["sums"]
    backend: str
    support: Literal["native", "emulated", "no"]
    how: str


def backend_class(name: str) -> type[Backend]:
    """Return the backend registered under `name`; raises `Unsupported`, which lists the known backends."""
    return complete(cast("type[Any]", registry.get("backends", name)))


@cache
def is_polled(library: str) -> bool:
    """Return whether a library's operations advance only while polled; True for an unknown library."""
    name = library.partition(":")[0]
    return name not in registry.names("backends") or backend_class(name).host_driven


def table_sizes(choice: str) -> Range:
    """Return the message sizes (bytes) for which a table's rule may name `name` or `name:algorithm`."""
    name, _, algorithm = choice.partition(":")
    return backend_class(name).sizes(algorithm) if algorithm else Range(0)


def preferred_backends() -> list[str]:
    """Return all known backends in the built-in order of preference, backends of other packages last."""
    names = registry.names("backends")
    ours = [name for name in registry.BACKEND_ORDER if name in names]
    return ours + [name for name in names if name not in ours]


def backends_for(names: Iterable[str], world: World, group: Group) -> list[str]:
    """Return the named backends that are available for a group."""
    if group.size == 1:
        return [name for name in names if name == "local"]
    return [
        name for name in names if name != "local" and not backend_class(name).unavailable_for(world, group)
    ]


def assumed_backends(wanted: Sequence[str] | None, world: World, group: Group) -> dict[str, type[Backend]]:
    """Return the backends that a group would have in a job that is not running.

    `wanted`: names of backends; None for all installed backends.
    """
    names = backends_for([*(wanted or preferred_backends()), "local"], world, group)
    return {
        name: backend_class(name)
        for name in dict.fromkeys(names)
        if wanted is not None or backend_class(name).availability().available
    }


def availability() -> dict[str, Availability]:
    """Return the availability of every known backend, by name. Initialises no library."""
    return {name: backend_class(name).availability() for name in registry.names("backends")}


def library_versions(names: Sequence[str]) -> dict[str, str]:
    """Return the libraries of backends in use in this process, by backend, such as `Open MPI 5.0.11`."""
    versions = {name: backend_class(name).library_version() for name in names}
    return {name: library for name, library in versions.items() if library}


def operations_table() -> list[OperationRow]:
    """Return a row per operation and backend, from `supports` (with float32 and SUM if relevant).

    The last rows are for reductions with `sums: fixed` or `exact`.
    """
    rows = []
    for kind in KINDS:
        for name in registry.names("backends"):
            support = backend_class(name).supports(_sample(kind, name))
            rows.append(OperationRow(kind, name, support.level, support.how))
    return [*rows, *(OperationRow("sums", name, *_sums(name)) for name in registry.names("backends"))]


def _sums(backend: str) -> tuple[Literal["native", "emulated"], str]:
    if backend == "local" or backend_class(backend).adds_in_order:
        return "native", ""
    return (
        "emulated",
        "floating-point values of all ranks, in parts or whole, added by one rank or each",
    )


def _sample(kind: Kind, backend: str) -> Signature:
    import torch

    from mcr_plus.core.kinds import REDUCING, ROOTED

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
