"""Algorithms that `msccl:NAME` may name: generated algorithms, and files of the configuration.

A generated algorithm is named like its generator without the operation, such as `ring` for `all_reduce_ring`.
An algorithm file is named by its file name without `.xml`. The algorithms for an operation depend only on the
files, which are equal on all ranks, and on the signature.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mcr_plus.core import kinds
from mcr_plus.core.kinds import ROOTED
from mcr_plus.core.units import Range, size_words
from mcr_plus.errors import ConfigError, unknown
from mcr_plus.msccl import FILES

if TYPE_CHECKING:
    from mcr_plus.core.kinds import Kind
    from mcr_plus.core.message import Signature
    from mcr_plus.msccl.algorithm import Algorithm

COLLECTIVES: Final[dict[Kind, str]] = {row.kind: row.msccl for row in kinds.COLLECTIVES.values() if row.msccl}
"""Kinds with algorithms, and their names in MSCCL."""


def use(paths: Iterable[Path]) -> None:
    """Read and verify the algorithm files of this process's job; they replace earlier files.

    Raises:
        ConfigError: a file cannot be read, has the name of another algorithm, or (`AlgorithmError`) is wrong.
    """
    algorithms: dict[str, Algorithm] = {}
    for path in paths:
        from mcr_plus.msccl.reader import read_algorithm  # other jobs read no files
        from mcr_plus.msccl.verifier import verify_all  # 60 ms, which jobs without algorithms save

        read, name = read_algorithm(path), path.stem
        # Queues cost memory, so count the queues in use, not the number that the file states.
        algorithm = replace(read, name=name, channels=read.used_channels)
        verify_all(algorithm)
        if name in algorithms:
            raise ConfigError(f"{path}: a file of the same name is there already, {algorithms[name].file}")
        if any(name in _generated(kind) for kind in COLLECTIVES):
            raise ConfigError(f"{path}: {name!r} is the name of an algorithm of our own; rename the file")
        algorithms[name] = algorithm
    FILES.clear()
    FILES.update(algorithms)


@contextmanager
def kept() -> Iterator[None]:
    """Restore the running job's files at the end of the block."""
    before = dict(FILES)
    try:
        yield
    finally:
        FILES.clear()
        FILES.update(before)


def paths() -> list[Path]:
    """Return the paths of the files in use."""
    return [Path(algorithm.file) for algorithm in FILES.values()]


def candidates(kind: Kind, ranks: int) -> list[str]:
    """Return the algorithms for an operation that `tune` should compare, for all sizes.

    For two ranks, generated algorithms are omitted: each is a single exchange, for which the direct
    collectives have less overhead.
    """
    ours = _generated(kind) if ranks > 2 else []
    return [*ours, *_of_files(kind, ranks)]


def sizes(name: str) -> Range:
    """Return the message sizes in bytes for which a table's rule may name an algorithm, from its file.

    For an operation with a root there are none, because the file is for one root, and a rule for all roots.
    """
    if name not in FILES:
        return Range(0)
    algorithm = FILES[name]
    if _kind_of(algorithm) in ROOTED:
        return Range(0, 0)
    return _span(algorithm)


def description(name: str) -> str:
    """Return the operations of a file's algorithm: `all_reduce on 4 ranks, 1 KiB to 64 KiB`."""
    algorithm = FILES[name]
    root = f" from or to rank {algorithm.root}" if _kind_of(algorithm) in ROOTED else ""
    sizes = "" if _span(algorithm) == Range(0) else f", {_span_words(algorithm)}"
    return f"{_kind_of(algorithm)}{root} on {algorithm.ranks} ranks{sizes}"


def _kind_of(algorithm: Algorithm) -> Kind:
    return next(kind for kind, name in COLLECTIVES.items() if name == algorithm.collective)


def _span(algorithm: Algorithm) -> Range:
    return Range(algorithm.least, None if algorithm.most is None else algorithm.most + 1)


def nowhere(name: str) -> str:
    """Return an error text if no operation has an algorithm of this name, or ''.

    The text lists the known names and a likely correction.
    """
    ours = dict.fromkeys(name for kind in COLLECTIVES for name in _generated(kind))
    if name in ours or name in FILES:
        return ""
    what = unknown("algorithm", name, [*ours, *FILES])
    return what if "did you mean" in what else what + _meant(name, [*ours, *FILES])


def refusal(signature: Signature) -> str:
    """Return the reason why `signature.algorithm` cannot do the operation, or '' if it can."""
    name, kind, ranks = signature.algorithm or "", signature.kind, signature.ranks
    if kind not in COLLECTIVES:
        return f"{kind} has no algorithms"
    if name in _generated(kind):
        return ""
    known = [*_generated(kind), *_of_files(kind, ranks)]
    if name not in known:
        return _elsewhere(name) or (
            f"there is no algorithm '{name}' for {kind} on {ranks} ranks; known: {', '.join(known)}"
            f"{_meant(name, known)}"
        )
    algorithm, nbytes = FILES[name], signature.nbytes or 0
    if signature.root not in (None, algorithm.root):
        return f"algorithm '{name}' has root {algorithm.root}"
    if not _span(algorithm).covers(nbytes):
        return f"algorithm '{name}' is for {_span_words(algorithm)} ({algorithm.file})"
    if not algorithm.out_of_place and kinds.collective(kind).divides:
        return f"algorithm '{name}' works in place only ({algorithm.file})"
    return ""


def _span_words(algorithm: Algorithm) -> str:
    least, most = size_words(algorithm.least), algorithm.most
    return f"{least} and more" if most is None else f"{least} to {size_words(most)}"


def _elsewhere(name: str) -> str:
    """Return a refusal that names the operations of an algorithm; '' if no algorithm has this name."""
    if name in FILES:
        return f"algorithm '{name}' is for {description(name)} ({FILES[name].file})"
    kinds = [kind for kind in COLLECTIVES if name in _generated(kind)]
    return f"algorithm '{name}' is for {', '.join(kinds)}" if kinds else ""


def _meant(name: str, known: Sequence[str]) -> str:
    """Return a hint if `name` is a known name with `.xml` or with the operation; otherwise ''."""
    plain = name.removesuffix(".xml")
    without = [plain.removeprefix(f"{kind}_") for kind in COLLECTIVES]
    likely = next((candidate for candidate in (plain, *without) if candidate in known), None)
    return "" if likely is None else f"; did you mean {likely!r}?"


def algorithm_of(signature: Signature) -> Algorithm:
    """Return the algorithm that a signature names; `refusal` of the signature must be ''."""
    name = signature.algorithm or ""
    if name in FILES:
        return FILES[name]
    return _made(f"{signature.kind}_{name}", signature.ranks, signature.root)


@cache
def _made(name: str, ranks: int, root: int | None) -> Algorithm:
    from mcr_plus.msccl.generators import GENERATORS
    from mcr_plus.msccl.verifier import verify_all

    options = {} if root is None else {"root": root}
    algorithm = GENERATORS[name].make(ranks, **options)
    verify_all(algorithm)
    return algorithm


def _generated(kind: Kind) -> list[str]:
    from mcr_plus.msccl.generators import GENERATORS

    collective = COLLECTIVES.get(kind)
    return [
        name.removeprefix(f"{kind}_")
        for name, generator in GENERATORS.items()
        if generator.collective == collective
    ]


def _of_files(kind: Kind, ranks: int) -> Sequence[str]:
    collective = COLLECTIVES.get(kind)
    return [
        name
        for name, algorithm in FILES.items()
        if (algorithm.collective, algorithm.ranks) == (collective, ranks)
    ]
