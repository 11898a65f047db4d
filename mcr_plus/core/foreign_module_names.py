"""Names of other libraries' modules and ours, for errors of programs ported from those libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from mcr_plus.core.foreign_names import (
    ANY_SOURCE,
    DEADLINES,
    HANDLES,
    LOCAL_RANK,
    LOCAL_SIZE,
    OPERATIONS,
    RANKS,
    said,
)
from mcr_plus.core.kinds import KINDS
from mcr_plus.errors import hint

_LIBRARIES: Final = "`mcr-plus doctor` shows which libraries are available"
_MESHES: Final = "meshes are torch's: init_device_mesh after torch.distributed.init_process_group('mcr')"
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
    **dict.fromkeys(("default_pg_timeout", "set_timeout", "timeout"), DEADLINES),
    **dict.fromkeys(("devicemesh", "init_device_mesh", "initialize_mesh_device"), _MESHES),
    **dict.fromkeys(("launch", "run", "spawn"), "`mcr-plus run` starts the ranks of a job"),
}
_OF_MODULES: Final[Mapping[str, str | None]] = {
    **_OF_ALL_MODULES,
    **OPERATIONS,
    **dict.fromkeys(
        ("get_local_rank", "get_node_local_rank", "local_process_index", "local_rank"), LOCAL_RANK
    ),
    **dict.fromkeys(
        ("get_local_size", "get_local_world_size", "local_size", "local_world_size"), LOCAL_SIZE
    ),
    **dict.fromkeys(
        ("get_all_ranks_from_group", "get_global_rank", "get_group_rank", "get_process_group_ranks"), RANKS
    ),
    **dict.fromkeys(("poll", "synchronize", "wait", "wait_all", "wait_tensor", "waitall"), HANDLES),
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
    "allreduce_hook": "ddp_hook", "any_source": ANY_SOURCE, "average": "AVG",
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
    **dict.fromkeys(("all_to_all", "all_to_all_single", "all_to_all_v"), "alltoall"),
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
        ("alreadyinitialized", "batch_isend_irecv", "irecv", "isend", "local", "localsteps", "notinitialized",
         "sync", *(kind for kind in KINDS if kind not in _HOROVOD)),
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


def no_attribute(
    module: str, name: str, known: Sequence[str], others: Mapping[str, str | None] = _OF_MODULES
) -> AttributeError:
    """Return the error for a name that a module lacks, with the name that was probably meant.

    `others`: names of other libraries, each with the module's own; None for a name without a counterpart.
    """
    key = name.casefold().removesuffix("_").removesuffix("_async").removesuffix("_inplace")
    ours = others.get(key, key)
    text = "" if ours is None else said(ours)
    if ours is not None and (whole := f"{ours}{name[len(key) :].casefold()}") in known:
        text = said(whole)
    elif ours is not None and " " not in ours and ours.partition(".")[0] not in known:
        # Do not suggest classes and constants for the name of a function.
        alike = [each for each in known if each.islower() or not name.islower() or each.casefold() == key]
        text = "" if name.startswith("_") else hint(key, alike)
    # Without a name Python adds no suggestion.
    return AttributeError(f"module '{module}' has no attribute '{name}'{text}", name=None)
