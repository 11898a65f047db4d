"""Names of other libraries, and ours: what a program that comes from there is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from mcr_plus.errors import hint

_OPERATIONS: Final = {
    "allgather": "all_gather", "allgatherv": "all_gather_v", "allreduce": "all_reduce",
    "alltoall": "all_to_all", "alltoallv": "all_to_all_single", "alltoallw": "all_to_all",
    "bcast": "broadcast", "gatherv": "gather_v", "iallreduce": "all_reduce", "ibcast": "broadcast",
    "reducescatter": "reduce_scatter", "reduce_scatter_block": "reduce_scatter_tensor",
    "scatterv": "scatter_v",
}  # fmt: skip
_OF_MODULES: Final[Mapping[str, str | None]] = {
    **_OPERATIONS,
    "destroy_process_group": "finalize", "init_process_group": "init", "num_ranks": "get_world_size",
    "rank_size": "get_world_size", "reduceop": "SUM", "shutdown": "finalize", "split": "new_group",
    "split_group": "new_group",
    "local_rank": None, "local_size": None,  # we have none, and none of ours is like it
}  # fmt: skip
OF_COMMUNICATORS: Final = {
    **_OPERATIONS,
    "barrier": "barrier", "free": "close", "gather": "gather", "get_rank": "rank", "get_size": "size",
    "get_world_size": "size", "irecv": "irecv", "isend": "isend", "recv": "recv", "reduce": "reduce",
    "reduce_scatter": "reduce_scatter", "scatter": "scatter", "send": "send", "split": "split",
    "world_size": "size",
}  # fmt: skip
OF_WORKS: Final = {
    "done": "is_completed", "is_success": "exception", "result": "wait", "synchronize": "wait",
    "test": "is_completed", "wait": "wait",
}  # fmt: skip


def no_attribute(module: str, name: str, known: Sequence[str]) -> AttributeError:
    """The error for a name that a module lacks, with the one that was probably meant."""
    said = "" if name.startswith("_") else hint(name, known)
    if (key := name.casefold()) in _OF_MODULES:
        ours = _OF_MODULES[key]
        said = f"; did you mean {ours!r}?" if ours in known else said if ours else ""
    # Without a name Python adds no suggestion of its own.
    return AttributeError(f"module '{module}' has no attribute '{name}'{said}", name=None)


def name_others(cls: type, names: Mapping[str, str]) -> None:
    """Make a class say its names for those of other libraries, which mpi4py also has with a capital."""
    for name, ours in names.items():
        for other in (name, name.capitalize()):
            if not hasattr(cls, other):
                setattr(cls, other, _OtherName(f"'{cls.__name__}' object has no attribute '{other}'", ours))


class _OtherName:
    """An attribute whose error says our name. A `__getattr__` would slow every call (3.11)."""

    def __init__(self, text: str, ours: str) -> None:
        self._text = f"{text}; did you mean '{ours}'?"

    def __get__(self, instance: object, owner: object = None) -> NoReturn:
        raise AttributeError(self._text, name=None)
