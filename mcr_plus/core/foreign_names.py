"""Names of other libraries and ours, for error messages to programs ported from those libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import getattr_static
from typing import Final, NoReturn

from mcr_plus.errors import hint

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
_OPERATIONS: Final = {
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
_LOCAL_RANK: Final = "launchers set it: LOCAL_RANK in the environment, or OMPI_COMM_WORLD_LOCAL_RANK"
_LOCAL_SIZE: Final = "launchers set it: LOCAL_WORLD_SIZE in the environment, or OMPI_COMM_WORLD_LOCAL_SIZE"
_RANKS: Final = "the `ranks` of a group are those of the job, in its order"
_ANY_SOURCE: Final = "recv takes None for any source"
_LIBRARIES: Final = "`mcr-plus doctor` shows which libraries are available"
_DEADLINES: Final = "deadlines are the `timeout` of `dispatch` in the configuration"
_MESHES: Final = "meshes are torch's: init_device_mesh after torch.distributed.init_process_group('mcr')"
_HANDLES: Final = "operations with async_op=True return a handle, which has wait() and is_completed()"
_NONE: Final = (
    "abort", "adasum", "add_error_string", "allgatherv_init", "allreducecoalescedoptions",
    "allreduceoptions", "alltoallv_init", "alltoallw_init", "backend", "backendconfig",
    "barrieroptions", "broadcastoptions", "compare", "compress", "configure", "cross_rank",
    "cross_size", "default_backend_for_device", "device",
    "distributedsampler", "exscan", "file", "free", "gather_init",
    "gatherv_init", "get_backend_impl", "get_config", "get_debug_level",
    "get_default_backend_for_device", "get_node_rank", "get_parent", "get_pg_count", "gradbucket",
    "groupmember", "handle", "has_all_gather_into_tensor", "has_reduce_scatter_tensor", "idup",
    "iexscan", "is_revoked", "iscan", "join", "load_state", "maxloc", "minloc", "node_rank",
    "open_port", "premul_sum", "print", "probe", "record_comm", "reduce_op_to_str",
    "reduce_scatter_init", "reduce_scatter_object", "reducer", "reducescatteroptions", "reducing",
    "request", "revoke", "save_state", "scan", "scatter_init", "scatteroptions", "scatterv_init",
    "set_attr", "set_backend", "sparse_allreduce", "tcpstore", "toint", "win",
)  # fmt: skip
_OF_ALL_MODULES: Final[Mapping[str, str | None]] = {
    **dict.fromkeys(_NONE),  # without a counterpart, or anything similar to one, here
    **dict.fromkeys(
        [f"{each}_built" for each in ("ccl", "cuda", "ddl", "gloo", "mpi", "nccl", "rocm")]
        + [f"is_{each}_available" for each in ("backend", "gloo", "mpi", "nccl", "ucc", "xccl")]
        + ["gloo_enabled", "is_available", "mpi_enabled"],
        _LIBRARIES,
    ),
    **dict.fromkeys(("default_pg_timeout", "set_timeout", "timeout"), _DEADLINES),
    **dict.fromkeys(("devicemesh", "init_device_mesh", "initialize_mesh_device"), _MESHES),
    **dict.fromkeys(("launch", "run", "spawn"), "`mcr-plus run` starts the ranks of a job"),
}
_OF_MODULES: Final[Mapping[str, str | None]] = {
    **_OF_ALL_MODULES,
    **_OPERATIONS,
    **dict.fromkeys(
        ("get_local_rank", "get_node_local_rank", "local_process_index", "local_rank"), _LOCAL_RANK
    ),
    **dict.fromkeys(
        ("get_local_size", "get_local_world_size", "local_size", "local_world_size"), _LOCAL_SIZE
    ),
    **dict.fromkeys(
        ("get_all_ranks_from_group", "get_global_rank", "get_group_rank", "get_process_group_ranks"), _RANKS
    ),
    **dict.fromkeys(("poll", "synchronize", "wait", "wait_all", "wait_tensor", "waitall"), _HANDLES),
    **dict.fromkeys(("cleanup", "destroy", "destroy_process_group", "shutdown"), "finalize"),
    **dict.fromkeys(("init_distributed", "init_process_group", "init_thread", "initialize"), "init"),
    **dict.fromkeys(
        ("comm_size", "get_num_ranks", "get_size", "nranks", "num_processes", "num_ranks", "rank_size"),
        "get_world_size",
    ),
    **dict.fromkeys(("comm_rank", "is_main_process", "is_master", "process_index"), "get_rank"),
    **dict.fromkeys(
        ("add_process_set", "clone", "create", "create_group", "dup", "new_subgroups", "processset",
         "new_subgroups_by_enumeration", "split", "split_group", "split_type"), "new_group",
    ),
    **dict.fromkeys(("get_group", "get_world_group", "global_process_set", "group"), "world"),
    **dict.fromkeys(("comm", "intracomm", "processgroup"), "Communicator"),
    **dict.fromkeys(
        ("allreduce_gradients", "average_gradients", "ddp", "distributeddataparallel", "prepare",
         "sync_gradients"), "wrap",
    ),
    **dict.fromkeys(("fully_shard", "fullyshardeddataparallel"), "fsdp"),
    **dict.fromkeys(("broadcast_model", "broadcast_weights"), "broadcast_parameters"),
    **dict.fromkeys(("get_backend", "get_backend_config"), "get_backends"),
    **dict.fromkeys(("reduce_op", "reduceop"), "SUM"),
    "allreduce_hook": "ddp_hook", "any_source": _ANY_SOURCE, "average": "AVG",
    "broadcast_optimizer_state": "mcr_plus.horovod has it",
    "disterror": "McrError", "gather_for_metrics": "all_gather", "horovodinternalerror": "McrError",
    "mean": "AVG", "start_timeline": "record",
    "all_gather_single_autograd": "autograd.all_gather", "all_gather_tensor_autograd": "autograd.all_gather",
    "all_to_all_single_autograd": "autograd.all_to_all_single",
    "reduce_scatter_single_autograd": "autograd.reduce_scatter",
    "reduce_scatter_tensor_autograd": "autograd.reduce_scatter",
}  # fmt: skip
_HOROVOD: Final = {
    "all_reduce": "allreduce", "all_reduce_coalesced": "grouped_allreduce",
    **dict.fromkeys(("all_gather", "all_gather_into_tensor", "all_gather_v"), "allgather"),
    "all_gather_coalesced": "grouped_allgather", "all_gather_object": "allgather_object",
    **dict.fromkeys(("all_to_all", "all_to_all_single"), "alltoall"),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_v"), "reducescatter"),
    "reduce_scatter_coalesced": "grouped_reducescatter", "broadcast": "broadcast", "barrier": "barrier",
    "broadcast_object": "broadcast_object", "broadcast_parameters": "broadcast_parameters",
    "get_rank": "rank", "get_world_size": "size", "init": "init", "finalize": "shutdown",
    "new_group": "add_process_set", "world": "global_process_set", "Communicator": "ProcessSet",
    "wrap": "DistributedOptimizer", "AVG": "Average", "SUM": "Sum", "McrError": "HorovodInternalError",
    "record": "start_timeline",
}  # fmt: skip
"""Our names and Horovod's."""
OF_HOROVOD: Final[Mapping[str, str | None]] = {
    **_OF_ALL_MODULES,
    **{name.casefold(): theirs for name, theirs in _HOROVOD.items()},
    **{name: _HOROVOD[ours] for name, ours in _OF_MODULES.items() if ours in _HOROVOD},
    **dict.fromkeys(("alltoalloptions", "ranktype")),
    **dict.fromkeys(
        ("alreadyinitialized", "batch_isend_irecv", "gather", "gather_v", "irecv", "isend", "local",
         "localsteps", "notinitialized", "recv", "reduce", "scatter", "scatter_v", "send", "sync"),
        "mcr_plus has it",
    ),
    **dict.fromkeys(("get_global_rank", "get_group_rank"), "a process set has `ranks`, those of the job"),
    "allreduce_sparse": "allreduce", "alltoall_single": "alltoall",
    "allreduce_coalesced": "grouped_allreduce", "allgather_coalesced": "grouped_allgather",
    **{f"i{name}": f"{name}_async" for name in ("allgather", "allreduce", "alltoall")},
    **dict.fromkeys(("broadcast_global_variables", "broadcast_variables"), "broadcast_parameters"),
    "ibcast": "broadcast_async", "world_size": "size",
    **dict.fromkeys(("get_local_rank", "get_node_local_rank", "local_process_index"), "local_rank"),
    **dict.fromkeys(("get_local_size", "get_local_world_size", "local_world_size"), "local_size"),
    **dict.fromkeys(("get_node_rank", "node_rank"), "cross_rank"),
    **dict.fromkeys(("wait", "wait_all", "waitall"), "synchronize"),
    **dict.fromkeys(("is_completed", "test"), "poll"),
    "distributedgradienttape": "DistributedOptimizer", "comm_world": "global_process_set",
    "avg": "Average", "elastic": "programs that use it call mcr_plus.elastic instead", "prod": "Product",
}  # fmt: skip
OF_COMMUNICATORS: Final = {
    **_OPERATIONS,
    **dict.fromkeys(("get_global_rank", "get_group_rank"), _RANKS),
    **dict.fromkeys(("get_local_rank", "get_node_local_rank", "local_rank"), _LOCAL_RANK),
    **dict.fromkeys(("local_size", "local_world_size"), _LOCAL_SIZE),
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
    **dict.fromkeys(("set_timeout", "timeout"), _DEADLINES),
    **dict.fromkeys(("synchronize", "wait", "wait_all", "waitall"), _HANDLES),
    "recv_anysource": _ANY_SOURCE, "shrink": "mcr_plus.shrink goes on without lost ranks",
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


def no_attribute(
    module: str, name: str, known: Sequence[str], others: Mapping[str, str | None] = _OF_MODULES
) -> AttributeError:
    """Return the error for a name that a module lacks, with the name that was probably meant.

    `others`: names of other libraries, each with the module's own; None for a name without a counterpart.
    """
    key = name.casefold().removesuffix("_").removesuffix("_async").removesuffix("_inplace")
    ours = others.get(key, key)
    said = "" if ours is None else _said(ours)
    if ours is not None and (whole := f"{ours}{name[len(key) :].casefold()}") in known:
        said = _said(whole)
    elif ours is not None and " " not in ours and ours.partition(".")[0] not in known:
        # Do not suggest classes and constants for the name of a function.
        alike = [each for each in known if each.islower() or not name.islower() or each.casefold() == key]
        said = "" if name.startswith("_") else hint(key, alike)
    # Without a name Python adds no suggestion.
    return AttributeError(f"module '{module}' has no attribute '{name}'{said}", name=None)


def _said(ours: str) -> str:
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
        self._text = text + _said(ours)

    def __get__(self, instance: object, owner: object = None) -> NoReturn:
        raise AttributeError(self._text, name=None)
