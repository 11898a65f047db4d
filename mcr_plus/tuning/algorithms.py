"""Algorithms in tables: candidates of `tune`, the sizes they support, and the files that a table needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mcr_plus.backends import backend_class, table_sizes
from mcr_plus.config.schema import AlgorithmsRef
from mcr_plus.core.kinds import VECTOR, Kind
from mcr_plus.core.units import Range, size_words
from mcr_plus.errors import Unsupported
from mcr_plus.msccl import catalog
from mcr_plus.tables.table import Table
from mcr_plus.tuning.operations import BenchCase
from mcr_plus.tuning.plan import TableRequest


def compared(candidates: Sequence[str], kind: Kind, ranks: int) -> tuple[str, ...]:
    """Return the algorithms to compare for a kind: a backend's proposals, or the named algorithm."""
    algorithms = []
    for candidate in candidates:
        name, _, named = candidate.partition(":")
        known = [named] if named else backend_class(name).algorithms(kind, ranks)
        algorithms += [f"{name}:{algorithm}" for algorithm in known]
    return tuple(dict.fromkeys(algorithms))


def spans(algorithms: Mapping[Kind, Sequence[str]]) -> dict[str, Range]:
    """Return the sizes for which a table may name an algorithm, if the algorithm has limits."""
    sizes_of = {
        candidate: table_sizes(candidate) for candidates in algorithms.values() for candidate in candidates
    }
    return {candidate: sizes for candidate, sizes in sizes_of.items() if sizes != Range(0)}


def check_sizes(request: TableRequest) -> None:
    """Raise `Unsupported` if the rules of a kind would have gaps.

    A gap is a size that no candidate supports. The vector form is a gap too, since rules cover it but no
    algorithm supports it.
    """
    for kind in request.kinds:
        algorithms = request.algorithms.get(kind, ())
        if algorithms and not request.libraries and f"{kind}_v" in VECTOR:
            libraries = ",".join([algorithms[0].partition(":")[0], *algorithms])
            raise Unsupported(
                f"{kind}: no entry of --backends supports {kind}_v, which rules for {kind} cover and no "
                f"algorithm supports; add a library: --backends {libraries}"
            )
        ends = [
            request.spans[candidate].hi
            for candidate in request.algorithms.get(kind, ())
            if candidate in request.spans
        ]
        for size in sorted({0, *(end for end in ends if end is not None)}):
            if not request.candidates_for(BenchCase(kind, size)):
                raise Unsupported(
                    f"{kind}: no entry of --backends supports {size_words(size)}, and rules cover all "
                    "sizes and roots; add a library, such as msccl"
                )


def needed(table: Table, paths: Iterable[str]) -> list[str]:
    """Return the algorithm files that a table's rules name; `paths` are files or folders."""
    named = {rule.backend.partition(":")[2] for rule in table.rules}
    return [str(path) for path in _files(paths) if path.stem in named]


def left_out(request: TableRequest, paths: Iterable[str]) -> list[str]:
    """Return a line for every algorithm file that is not compared, with the file's operation."""
    candidates = [candidate for kind in request.kinds for candidate in request.algorithms.get(kind, ())]
    used = {
        candidate.partition(":")[2] for candidate in candidates if request.spans.get(candidate) != Range(0, 0)
    }
    return [
        f"{path}: not compared; it is for {catalog.description(path.stem)}"
        for path in _files(paths)
        if path.stem not in used
    ]


def _files(paths: Iterable[str]) -> list[Path]:
    return [path for each in paths for path in AlgorithmsRef(each).resolve()]
