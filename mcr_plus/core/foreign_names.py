"""Names of other libraries' methods and ours, for errors of programs ported from those libraries."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import getattr_static
from typing import Final, NoReturn

_MPI: Final = {
    "allgather": "all_gather", "allgatherv": "all_gather_v", "allreduce": "all_reduce",
    "alltoall": "all_to_all", "alltoallv": "all_to_all_single", "alltoallw": "all_to_all",
    "bcast": "broadcast", "gatherv": "gather_v", "reduce_scatter_block": "reduce_scatter_tensor",
    "scatterv": "scatter_v",
}  # fmt: skip
_ALIKE: Final = ("barrier", "gather", "reduce", "reduce_scatter", "scatter")
_PERSISTENT: Final = (
    "allgather", "allreduce", "alltoall", "barrier", "bcast", "reduce", "reduce_scatter_block",
)  # fmt: skip
_OBJECTS: Final = "objects go by broadcast_object and all_gather_object"
OPERATIONS: Final = {
    **_MPI,
    **{f"i{name}": ours for name, ours in (*_MPI.items(), *zip(_ALIKE, _ALIKE, strict=True))},
    **dict.fromkeys([f"{name}_init" for name in _PERSISTENT], "persistent"),
    **dict.fromkeys(("_all_gather_base", "all_gather_base"), "all_gather_into_tensor"),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_base"), "reduce_scatter_tensor"),
    **dict.fromkeys(("all_to_all_v", "alltoall_base"), "all_to_all_single"),
    "all_gather_into_tensor_coalesced": "all_gather_coalesced", "all_gather_list": "all_gather",
    "all_gather_single": "all_gather_into_tensor", "all_gather_single_coalesced": "all_gather_coalesced",
    "all_gather_tensor": "all_gather_into_tensor", "allgather_fn": "all_gather_into_tensor",
    "allgather_object": "all_gather_object", "broadcast_object_list": "broadcast_object",
    "gather_into_tensor": "gather", "gather_object": "all_gather_object", "gather_single": "gather",
    "gather_tensor": "gather",
    "grouped_allgather": "all_gather_coalesced", "grouped_allreduce": "all_reduce_coalesced",
    "grouped_reducescatter": "reduce_scatter_coalesced", "inference_all_reduce": "all_reduce",
    "isendrecv": "batch_isend_irecv", "monitored_barrier": "barrier", "pad_across_processes": "all_gather_v",
    "recv_object_list": _OBJECTS, "reduce_scatter_fn": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_coalesced", "reducescatter": "reduce_scatter",
    "scatter_object_list": _OBJECTS, "scatter_tensor": "scatter", "send_object_list": _OBJECTS,
    "sendrecv": "batch_isend_irecv", "wait_for_everyone": "barrier",
    **dict.fromkeys(("bsend", "rsend", "ssend"), "send"),
    **dict.fromkeys(("ibsend", "irsend", "issend"), "isend"),
}  # fmt: skip
LOCAL_RANK: Final = "launchers set it: LOCAL_RANK in the environment, or OMPI_COMM_WORLD_LOCAL_RANK"
LOCAL_SIZE: Final = "launchers set it: LOCAL_WORLD_SIZE in the environment, or OMPI_COMM_WORLD_LOCAL_SIZE"
RANKS: Final = "the `ranks` of a group are those of the job, in its order"
ANY_SOURCE: Final = "recv takes None for any source"
DEADLINES: Final = "deadlines are the `timeout` of `dispatch` in the configuration"
HANDLES: Final = "operations with async_op=True return a handle, which has wait() and is_completed()"
OF_COMMUNICATORS: Final = {
    **OPERATIONS,
    **dict.fromkeys(("get_global_rank", "get_group_rank"), RANKS),
    **dict.fromkeys(("get_local_rank", "get_node_local_rank", "local_rank"), LOCAL_RANK),
    **dict.fromkeys(("local_size", "local_world_size"), LOCAL_SIZE),
    "allgather_into_tensor_coalesced": "all_gather_coalesced",
    **dict.fromkeys(("get_all_ranks_from_group", "get_process_group_ranks", "get_ranks", "members"), "ranks"),
    **dict.fromkeys(("comm_rank", "get_rank", "group_rank", "process_index"), "rank"),
    **dict.fromkeys(("comm_size", "get_size", "get_world_size", "num_ranks", "world_size"), "size"),
    **dict.fromkeys(("get_name", "group_name"), "name"),
    **dict.fromkeys(("clone", "dup", "dup_with_info"), "branch"),
    **dict.fromkeys(("split_group", "split_type"), "split"),
    **dict.fromkeys(
        ("destroy", "destroy_process_group", "disconnect", "finalize", "free", "shutdown"), "close"
    ),
    **dict.fromkeys(
        ("create", "create_group", "new_group", "new_subgroups"), "mcr_plus.new_group takes ranks of the job"
    ),
    **dict.fromkeys(("get_backend", "get_backend_config"), "mcr_plus.get_backends returns the libraries"),
    **dict.fromkeys(("comm_world", "get_world_group", "world"), "mcr_plus.world() is the group of all ranks"),
    **dict.fromkeys(("set_timeout", "timeout"), DEADLINES),
    **dict.fromkeys(("synchronize", "wait", "wait_all", "waitall"), HANDLES),
    "recv_anysource": ANY_SOURCE, "shrink": "mcr_plus.shrink goes on without lost ranks",
}  # fmt: skip
OF_WORKS: Final = {
    **dict.fromkeys(
        ("complete", "completed", "done", "finished", "is_complete", "is_done", "is_finished", "is_ready",
         "poll", "query", "ready", "test", "testall"), "is_completed",
    ),
    **dict.fromkeys(("error", "is_success", "success"), "exception"),
    **dict.fromkeys(("add_callback", "add_done_callback", "get_future"), "then"),
    **dict.fromkeys(("block_current_stream", "join", "sync", "synchronize", "waitall", "waits"), "wait"),
    **dict.fromkeys(
        ("get", "get_future_result", "result", "value"), "after wait() the tensors have the result"
    ),
    "timeout": "wait(timeout) takes seconds",
}  # fmt: skip
OF_HANDLES: Final = {
    **dict.fromkeys(("get", "join", "result", "wait"), "synchronize(handle) returns the result"),
    **dict.fromkeys(
        ("done", "is_completed", "poll", "query", "ready", "test"),
        "poll(handle) returns True when it is done",
    ),
}  # fmt: skip
OF_PROCESS_SETS: Final = {
    **dict.fromkeys(("get_rank", "group_rank"), "rank"), **dict.fromkeys(("get_size", "world_size"), "size"),
    **dict.fromkeys(("get_ranks", "members"), "ranks"), "id": "process_set_id",
}  # fmt: skip


def said(ours: str) -> str:
    """Return the hint for an error message: the equivalent name here, or the reason why there is none."""
    return f"; {ours}" if " " in ours else f"; did you mean {ours!r}?"


def name_others(cls: type, names: Mapping[str, str]) -> None:
    """Make errors for other libraries' names, also with a capital as in mpi4py, name the class's own.

    It does the same for other spellings of its names, such as `allGather`, `AllGather` or `allgather`.
    """
    own = [name for name in dir(cls) if not name.startswith("_")]
    spelt = {other: name for name in own for other in _spellings(name)}
    known = {**spelt, **names, **{name.capitalize(): ours for name, ours in names.items()}}
    for other, ours in known.items():
        if not hasattr(cls, other):
            setattr(cls, other, _OtherName(f"'{cls.__name__}' object has no attribute '{other}'", ours))
    cls.__dir__ = _own_names  # type: ignore[assignment, method-assign]


def _spellings(name: str) -> tuple[str, ...]:
    words = name.split("_")
    title = "".join(word.capitalize() for word in words)
    torchs = name.replace("all_to_all", "alltoall").replace("all_", "all").replace("reduce_s", "reduces")
    camel = title[0].lower() + title[1:]
    return "".join(words), torchs, title, camel, name.capitalize(), f"{name}_", f"{name}_async"


def _own_names(self: object) -> list[str]:
    return [
        each for each in object.__dir__(self) if not isinstance(getattr_static(self, each, None), _OtherName)
    ]


class _OtherName:
    """An attribute whose error gives our name. A `__getattr__` would slow every call (3.11)."""

    def __init__(self, text: str, ours: str) -> None:
        self._text = text + said(ours)

    def __get__(self, instance: object, owner: object = None) -> NoReturn:
        raise AttributeError(self._text, name=None)
