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
    "all_gather_single": "all_gather_into_tensor", "all_gather_tensor": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor", "monitored_barrier": "barrier",
    "all_gather_into_tensor_coalesced": "all_gather_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_coalesced",
    "allgather_object": "all_gather_object", "broadcast_object_list": "broadcast_object",
    "grouped_allgather": "all_gather_coalesced", "grouped_allreduce": "all_reduce_coalesced",
    "grouped_reducescatter": "reduce_scatter_coalesced", "new_subgroups": "new_group",
    "distbackenderror": "BackendError", "backend": "get_backends", "get_backend": "get_backends",
    # We have none, and what is spelt like it does something else.
    **dict.fromkeys((
        "gather_object", "get_backend_config", "get_global_rank", "get_group_rank", "get_local_rank",
        "get_local_size", "get_local_world_size", "get_node_local_rank", "get_process_group_ranks", "group",
        "is_backend_available", "local_rank", "local_size", "record_comm", "reducer", "scatter_object_list",
        "tcpstore", *(f"{name}options" for name in (
            "allgather", "allreduce", "allreducecoalesced", "alltoall", "barrier", "broadcast", "gather",
            "reduce", "reducescatter", "scatter",
        )),
    )),
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
