"""The algorithms that `msccl:NAME` may name: those that we generate, and the files of the configuration.

A generated one goes by what its generator is called after the operation, such as `ring` of
`all_reduce_ring`; a file by its name without `.xml`. What there is for an operation depends on the files,
which are equal on all ranks, and on the signature.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mcr_plus.backends.msccl.generators import GENERATORS
from mcr_plus.backends.msccl.reader import read_algorithm
from mcr_plus.backends.msccl.verifier import verify_all
from mcr_plus.errors import ConfigError
from mcr_plus.units import format_size

if TYPE_CHECKING:
    from mcr_plus.backends.msccl.algorithm import Algorithm, Collective
    from mcr_plus.message import Kind, Signature

COLLECTIVES: Final[dict[Kind, Collective]] = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_to_all": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
"""What algorithms can be of, and what MSCCL calls it."""
_GENERATED_CHANNELS: Final = 1

_files: dict[str, Algorithm] = {}


def use(paths: Iterable[Path]) -> None:
    """Read and verify the algorithm files of this process's job; they take the place of earlier ones.

    Raises:
        ConfigError: one cannot be read, has the name of another algorithm, or (`AlgorithmError`) is wrong.
    """
    found: dict[str, Algorithm] = {}
    for path in paths:
        algorithm, name = read_algorithm(path), path.stem
        verify_all(algorithm)
        if name in found:
            raise ConfigError(f"{path}: a file of the same name is there already, {found[name].file}")
        if any(name in _generated(kind) for kind in COLLECTIVES):
            raise ConfigError(f"{path}: {name!r} is the name of an algorithm of our own; rename the file")
        found[name] = algorithm
    _files.clear()
    _files.update(found)


@contextmanager
def kept() -> Iterator[None]:
    """Within, other files may be used: afterwards they are as before, for the job that runs."""
    before = dict(_files)
    try:
        yield
    finally:
        _files.clear()
        _files.update(before)


def paths() -> list[Path]:
    """The files in use."""
    return [Path(algorithm.file) for algorithm in _files.values()]


def channels(ranks: int) -> int:
    """Queues from one rank to another that the algorithms for so many ranks need at most."""
    wanted = [each.channels for each in _files.values() if each.ranks == ranks]
    return max([_GENERATED_CHANNELS, *wanted])


def candidates(kind: Kind, ranks: int) -> list[str]:
    """The algorithms for an operation that are worth comparing, whatever sizes they are for.

    Those that we generate are not among them for two ranks: there, they are all one exchange, which the
    direct collectives do with less overhead.
    """
    ours = _generated(kind) if ranks > 2 else []
    return [*ours, *_of_files(kind, ranks)]


def refusal(signature: Signature) -> str:
    """Why `signature.algorithm` cannot do the operation, empty if it can."""
    name, kind, ranks = signature.algorithm or "", signature.kind, signature.ranks
    if kind not in COLLECTIVES:
        return f"algorithm '{name}'; there are none for {kind}"
    if name in _generated(kind):
        return ""
    known = [*_generated(kind), *_of_files(kind, ranks)]
    if name not in known:
        return f"algorithm '{name}'; for {kind} on {ranks} ranks there are {', '.join(known)}"
    algorithm, nbytes = _files[name], signature.nbytes or 0
    if signature.root not in (None, algorithm.root):
        return f"algorithm '{name}' has root {algorithm.root}"
    if nbytes < algorithm.least or (algorithm.most is not None and nbytes > algorithm.most):
        most = "" if algorithm.most is None else format_size(algorithm.most)
        return f"algorithm '{name}' is for {format_size(algorithm.least)}..{most} ({algorithm.file})"
    if not algorithm.out_of_place and algorithm.collective in ("reducescatter", "scatter"):
        return f"algorithm '{name}' works in place only ({algorithm.file})"
    return ""


def algorithm_of(signature: Signature) -> Algorithm:
    """The algorithm that a signature names, for which there is no `refusal`."""
    name = signature.algorithm or ""
    if name in _files:
        return _files[name]
    return _made(f"{signature.kind}_{name}", signature.ranks, signature.root)


@cache
def _made(name: str, ranks: int, root: int | None) -> Algorithm:
    options = {} if root is None else {"root": root}
    algorithm = GENERATORS[name].make(ranks, **options)
    verify_all(algorithm)
    return algorithm


def _generated(kind: Kind) -> list[str]:
    wanted = COLLECTIVES.get(kind)
    return [name.removeprefix(f"{kind}_") for name, each in GENERATORS.items() if each.collective == wanted]


def _of_files(kind: Kind, ranks: int) -> Sequence[str]:
    wanted = COLLECTIVES.get(kind)
    return [name for name, each in _files.items() if (each.collective, each.ranks) == (wanted, ranks)]
