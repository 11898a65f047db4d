"""Communication runtime for distributed deep learning.

Every operation passes through one configured pipeline, which runs it on the library that suits it best.

    import mcr_plus as mcr

    with mcr.init() as comm:
        x = torch.full((4,), float(comm.rank))
        mcr.all_reduce(x)
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from mcr_plus.core.collector import collector_paused
from mcr_plus.core.environment import autoloads, error_channel
from mcr_plus.torch_backend.autoload import register

if TYPE_CHECKING:
    from mcr_plus.api.collectives import (
        all_gather,
        all_gather_coalesced,
        all_gather_into_tensor,
        all_gather_object,
        all_gather_v,
        all_reduce,
        all_reduce_coalesced,
        all_to_all,
        all_to_all_single,
        barrier,
        batch_isend_irecv,
        broadcast,
        broadcast_object,
        flush,
        gather,
        gather_v,
        irecv,
        isend,
        persistent,
        recv,
        reduce,
        reduce_scatter,
        reduce_scatter_coalesced,
        reduce_scatter_tensor,
        reduce_scatter_v,
        scatter,
        scatter_v,
        send,
    )
    from mcr_plus.api.state import load_state_dict, state_dict
    from mcr_plus.bucketing.api import capture, plan_report
    from mcr_plus.communicator.communicator import Communicator, P2POp
    from mcr_plus.core.kinds import AVG, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM
    from mcr_plus.core.work import Work
    from mcr_plus.elasticity.api import reconfigure, reconfigure_handle, shrink
    from mcr_plus.elasticity.loop import elastic
    from mcr_plus.elasticity.sharded import elastic_sharded
    from mcr_plus.errors import (
        AlreadyInitialized,
        BackendError,
        BackendUnavailable,
        CommTimeout,
        ConfigError,
        DataCorrupted,
        InvalidArgument,
        LaunchError,
        McrError,
        NotInitialized,
        OrderMismatch,
        PeerLost,
        ResultMismatch,
        Revoked,
        SyncClosed,
        Unsupported,
    )
    from mcr_plus.job.init import (
        finalize,
        get_backends,
        get_rank,
        get_world_size,
        init,
        is_initialized,
        new_group,
        reset,
        world,
    )
    from mcr_plus.layout.layout import Layout
    from mcr_plus.layout.redistribute import redistribute
    from mcr_plus.layout.state import Redistribution, redistribution
    from mcr_plus.local_sgd.local import LocalSteps, local
    from mcr_plus.observe.dump import dump
    from mcr_plus.observe.explain import explain
    from mcr_plus.observe.record import record
    from mcr_plus.owners.owned import OwnedMatrices, owned
    from mcr_plus.plans.profile import profile
    from mcr_plus.plans.run import parallelize
    from mcr_plus.torch_backend.shrinking import shrink_group
    from mcr_plus.training.compiling import compile  # noqa: A004 - the name is the same as torch's
    from mcr_plus.training.ddp import DDPState, ddp_hook
    from mcr_plus.training.distributed_optimizer import DistributedOptimizer
    from mcr_plus.training.fsdp import fsdp
    from mcr_plus.training.fsdp_state import fsdp_state
    from mcr_plus.training.parameters import broadcast_parameters
    from mcr_plus.training.wrap import no_sync, wrap
    from mcr_plus.weight_sync.join import join_sync
    from mcr_plus.weight_sync.sync import WeightSync, sync

__version__ = "0.1.0"

__all__ = [
    "AVG", "BAND", "BOR", "BXOR", "MAX", "MIN", "PRODUCT", "SUM", "AlreadyInitialized", "BackendError",
    "BackendUnavailable", "CommTimeout", "Communicator", "ConfigError", "DDPState", "DataCorrupted",
    "DistributedOptimizer", "InvalidArgument", "LaunchError", "Layout", "LocalSteps", "McrError",
    "NotInitialized", "OrderMismatch", "OwnedMatrices", "P2POp", "PeerLost", "Redistribution",
    "ResultMismatch", "Revoked", "SyncClosed", "Unsupported", "WeightSync", "Work", "all_gather",
    "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_v", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "broadcast_object", "broadcast_parameters", "capture", "compile", "ddp_hook", "dump",
    "elastic", "elastic_sharded", "explain", "finalize", "flush", "fsdp", "fsdp_state", "gather",
    "gather_v", "get_backends", "get_rank", "get_world_size", "init", "irecv", "is_initialized", "isend",
    "join_sync", "load_state_dict", "local", "new_group", "no_sync", "owned", "parallelize", "persistent",
    "plan_report", "profile", "reconfigure", "reconfigure_handle", "record", "recv", "redistribute",
    "redistribution", "reduce", "reduce_scatter", "reduce_scatter_coalesced", "reduce_scatter_tensor",
    "reduce_scatter_v", "reset", "scatter", "scatter_v", "send", "shrink", "shrink_group", "state_dict",
    "sync", "world", "wrap",
]  # fmt: skip

_NAMES = {
    "api.collectives": (
        "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_v all_reduce "
        "all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast "
        "broadcast_object flush gather gather_v irecv isend persistent recv reduce reduce_scatter "
        "reduce_scatter_coalesced reduce_scatter_tensor reduce_scatter_v scatter scatter_v send"
    ),
    "api.state": "load_state_dict state_dict",
    "bucketing.api": "capture plan_report",
    "communicator.communicator": "Communicator P2POp",
    "core.kinds": "AVG BAND BOR BXOR MAX MIN PRODUCT SUM",
    "core.work": "Work",
    "elasticity.api": "reconfigure reconfigure_handle shrink",
    "elasticity.loop": "elastic",
    "elasticity.sharded": "elastic_sharded",
    "errors": (
        "AlreadyInitialized BackendError BackendUnavailable CommTimeout ConfigError DataCorrupted "
        "InvalidArgument LaunchError McrError NotInitialized OrderMismatch PeerLost ResultMismatch Revoked "
        "SyncClosed Unsupported"
    ),
    "job.init": "finalize get_backends get_rank get_world_size init is_initialized new_group reset world",
    "layout.layout": "Layout",
    "layout.redistribute": "redistribute",
    "layout.state": "Redistribution redistribution",
    "local_sgd.local": "LocalSteps local",
    "observe.dump": "dump",
    "observe.explain": "explain",
    "observe.record": "record",
    "owners.owned": "OwnedMatrices owned",
    "plans.profile": "profile",
    "plans.run": "parallelize",
    "torch_backend.shrinking": "shrink_group",
    "training.compiling": "compile",
    "training.ddp": "DDPState ddp_hook",
    "training.fsdp": "fsdp",
    "training.fsdp_state": "fsdp_state",
    "training.distributed_optimizer": "DistributedOptimizer",
    "training.parameters": "broadcast_parameters",
    "training.wrap": "no_sync wrap",
    "weight_sync.join": "join_sync",
    "weight_sync.sync": "WeightSync sync",
}
"""Public names by module; the first use of a name imports its module."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("autograd", "expert", "registry", "spatial")  # `mcr.expert.dispatch` needs no further import


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"mcr_plus.{name}")
    # Imported on first use: torch takes seconds to import, and `mcr-plus run` and `--help` do not need it.
    if name in _HOMES:
        with collector_paused():
            value: object = getattr(import_module(f"mcr_plus.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    from mcr_plus.core.foreign_module_names import no_attribute

    raise no_attribute("mcr_plus", name, (*__all__, *_MODULES))


def __dir__() -> list[str]:
    return sorted(__all__)


if (_channel := error_channel()) is not None:
    from mcr_plus.launch.uncaught import report_to

    report_to(_channel)
if "torch" in sys.modules or not autoloads():  # otherwise `import torch` registers the backend
    register()
