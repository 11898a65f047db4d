"""Algorithms of backends in a table: which are compared, at which sizes, and what a table then needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mcr_plus.backends import backend_class, table_sizes
from mcr_plus.backends.msccl import catalog
from mcr_plus.config import AlgorithmsRef
from mcr_plus.errors import Unsupported
from mcr_plus.message import VECTOR
from mcr_plus.selection.table import Table
from mcr_plus.tuning.operations import Cell, Kind
from mcr_plus.tuning.plan import Request
from mcr_plus.units import Range, size_words


def compared(ways: Sequence[str], kind: Kind, ranks: int) -> tuple[str, ...]:
    """The algorithms of a kind: of backends those worth it, or of one the algorithm that is named."""
    found = []
    for way in ways:
        name, _, wanted = way.partition(":")
        algorithms = getattr(backend_class(name), "algorithms", None)
        known = [] if algorithms is None else algorithms(kind, ranks)
        found += [f"{name}:{each}" for each in ([wanted] if wanted else known)]
    return tuple(dict.fromkeys(found))


def spans(algorithms: Mapping[Kind, Sequence[str]]) -> dict[str, Range]:
    """The sizes for which a table may name an algorithm, where not all."""
    found = {way: table_sizes(way) for ways in algorithms.values() for way in ways}
    return {way: sizes for way, sizes in found.items() if sizes != Range(0)}


def check_sizes(request: Request) -> None:
    """Raise `Unsupported` if the rules of a kind could not be whole.

    Nothing compared is for some size, or for the vector form, which rules cover too and no algorithm does.
    """
    for kind in request.kinds:
        algorithms = request.algorithms.get(kind, ())
        if algorithms and not request.ways and f"{kind}_v" in VECTOR:
            wanted = ",".join([algorithms[0].partition(":")[0], *algorithms])
            raise Unsupported(
                f"{kind}: nothing in --backends is for {kind}_v, which no algorithm does and rules for "
                f"{kind} cover; add a library: --backends {wanted}"
            )
        ends = [request.spans[way].hi for way in request.algorithms.get(kind, ()) if way in request.spans]
        for size in sorted({0, *(end for end in ends if end is not None)}):
            if not request.ways_of(Cell(kind, size)):
                raise Unsupported(
                    f"{kind}: nothing in --backends is for {size_words(size)}, and rules are for all "
                    "sizes and roots; add a library, such as msccl"
                )


def needed(table: Table, paths: Iterable[str]) -> list[str]:
    """Of algorithm files, given as such or as folders, those that a table's rules name."""
    named = {rule.backend.partition(":")[2] for rule in table.rules}
    return [str(path) for path in _files(paths) if path.stem in named]


def left_out(request: Request, paths: Iterable[str]) -> list[str]:
    """A line for every algorithm file that is not compared, and what it is for."""
    ways = [way for kind in request.kinds for way in request.algorithms.get(kind, ())]
    used = {way.partition(":")[2] for way in ways if request.spans.get(way) != Range(0, 0)}
    return [
        f"{path}: not compared; it is for {catalog.description(path.stem)}"
        for path in _files(paths)
        if path.stem not in used
    ]


def _files(paths: Iterable[str]) -> list[Path]:
    return [path for each in paths for path in AlgorithmsRef(each).resolve()]
