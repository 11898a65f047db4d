"""What `import mcr_plus` offers: exactly the contract's names, spelt once."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import mcr_plus as mcr
import mcr_plus.horovod as hvd
from mcr_plus.api import collectives
from mcr_plus.core import foreign_module_names, foreign_names

FUNCTIONS = [name for name in mcr.__all__ if hasattr(mcr.Communicator, name)]


def test_every_public_name_resolves() -> None:
    for name in mcr.__all__:
        assert getattr(mcr, name) is not None
    assert dir(mcr) == sorted(mcr.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = mcr.nonsense


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_and_method_take_the_same_arguments(name: str) -> None:
    function = dict(inspect.signature(getattr(collectives, name)).parameters)
    method = dict(inspect.signature(getattr(mcr.Communicator, name)).parameters)
    group = function.pop("group")
    assert group.default is None
    method.pop("self")
    assert list(function) == list(method)
    for key, parameter in method.items():
        assert (function[key].default, function[key].kind) == (parameter.default, parameter.kind)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys; from mcr_plus.cli.main import app; app(); assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.long
def test_the_package_works_without_requirements_of_the_command_line() -> None:
    code = """
import sys
sys.modules |= {"typer": None, "rich": None}
import mcr_plus
with mcr_plus.init(backends=["gloo"]), mcr_plus.record() as log:
    mcr_plus.barrier()
assert "barrier" in str(log)
from mcr_plus.cli import start
start()
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    what = "the command line needs typer, which is missing: pip install rich typer"
    assert (answer.returncode, answer.stderr) == (1, f"mcr-plus: {what}\n")


def test_no_module_hides_a_public_name() -> None:
    # Importing a submodule sets an attribute of its name on the package.
    folder = Path(mcr.__file__ or "").parent
    modules = {path.stem for path in folder.glob("*.py")} | {
        path.name for path in folder.iterdir() if path.is_dir()
    }
    assert modules.isdisjoint(mcr.__all__)


def test_shrink_group_takes_what_torchs_takes() -> None:
    dist = pytest.importorskip("torch.distributed")
    if not hasattr(dist, "shrink_group"):
        pytest.skip("torch's came with 2.9")
    theirs, ours = (inspect.signature(each).parameters for each in (dist.shrink_group, mcr.shrink_group))
    assert [(name, each.default, each.kind) for name, each in ours.items()] == [
        (name, each.default, each.kind) for name, each in theirs.items()
    ]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("rank", "get_rank"), ("size", "get_world_size"), ("allreduce", "all_reduce"), ("elasti", "elastic"),
     ("experts", "expert"), ("xyz", None), ("split_group", "new_group"), ("ReduceOp", "SUM"),
     ("init_process_group", "init"), ("rank_size", "get_world_size"),
     ("Allreduce", "all_reduce"), ("Bcast", "broadcast"),
     ("all_gather_base", "all_gather_into_tensor"), ("DistributedSampler", None),
     ("abort", None), ("close", None), ("win", None),
     ("sum", "SUM"), ("Average", "AVG"), ("initialize", "init"), ("allreduce_async_", "all_reduce"),
     ("Iallgatherv", "all_gather_v"), ("Allreduce_init", "persistent"), ("Gatherv_init", None),
     ("Sendrecv", "batch_isend_irecv"), ("grouped_allreduce_async", "all_reduce_coalesced"),
     ("_all_gather_base", "all_gather_into_tensor"), ("all_gather_inplace", "all_gather"),
     ("reduce_scatter_tensor_autograd", "autograd.reduce_scatter"), ("DistributedDataParallel", "wrap"),
     ("num_processes", "get_world_size"), ("init_distributed", "init"), ("wait_for_everyone", "barrier")],
)  # fmt: skip
def test_an_unknown_name_of_the_package_says_which_was_meant(name: str, meant: str | None) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(mcr, name)
    assert str(caught.value).endswith(f"did you mean {meant!r}?" if meant else f"attribute {name!r}")


OF_TORCH: dict[str, str | None] = {
    **dict.fromkeys(
        ("AllToAllOptions", "AllreduceCoalescedOptions", "AllreduceOptions", "Backend", "BackendConfig",
         "BarrierOptions", "BroadcastOptions", "BuiltinCommHookType", "DebugLevel", "DistNetworkError",
         "DistStoreError", "FileStore", "GatherOptions", "GradBucket", "GroupMember", "GroupName",
         "HashStore", "Logger", "PrefixStore", "ProcessGroupGloo", "ProcessGroupMPI", "ProcessGroupNCCL",
         "ProcessGroupNCCL2", "ProcessGroupNCCLLazy", "QueueEmptyError", "RankType", "ReduceOptions",
         "ReduceScatterOptions", "Reducer", "ScatterOptions", "Store", "TCPStore", "breakpoint",
         "get_backend_impl", "get_debug_level", "get_default_backend_for_device", "get_pg_count",
         "is_torchelastic_launched", "log", "record_comm", "register_rendezvous_handler",
         "set_debug_level", "set_debug_level_from_env", "supports_complex", "timedelta")
    ),
    **dict.fromkeys(
        ("is_available", "is_backend_available", "is_gloo_available", "is_mpi_available",
         "is_nccl_available", "is_ucc_available", "is_xccl_available"), "`mcr-plus doctor` shows"
    ),
    **dict.fromkeys(("get_global_rank", "get_group_rank", "get_process_group_ranks"), "`ranks` of a group"),
    **dict.fromkeys(("recv_object_list", "scatter_object_list", "send_object_list"), "by broadcast_object"),
    **dict.fromkeys(("new_subgroups", "new_subgroups_by_enumeration", "split_group"), "'new_group'?"),
    **dict.fromkeys(("DeviceMesh", "init_device_mesh"), "meshes are torch's"),
    **dict.fromkeys(("default_pg_timeout", "set_timeout"), "`timeout` of `dispatch`"),
    **dict.fromkeys(("gather_into_tensor", "gather_single"), "'gather'?"),
    **dict.fromkeys(("get_backend", "get_backend_config"), "'get_backends'?"),
    **dict.fromkeys(("ReduceOp", "reduce_op"), "'SUM'?"),
    "DistBackendError": "'BackendError'?", "DistError": "'McrError'?", "ProcessGroup": "'Communicator'?",
    "all_gather_single": "'all_gather_into_tensor'?", "broadcast_object_list": "'broadcast_object'?",
    "destroy_process_group": "'finalize'?", "gather_object": "'all_gather_object'?",
    "get_node_local_rank": "LOCAL_RANK", "group": "'world'?", "init_process_group": "'init'?",
    "monitored_barrier": "'barrier'?", "reduce_scatter_single": "'reduce_scatter_tensor'?",
}  # fmt: skip
"""What is said about the public names of torch.distributed 2.6 to 2.15 that are not ours too."""


@pytest.mark.filterwarnings("ignore:.*reduce_op")
def test_each_name_of_torch_distributed_is_ours_or_hinted_at_the_right_one() -> None:
    dist = pytest.importorskip("torch.distributed")
    theirs = {
        name for name in dir(dist) if not (name.startswith("_") or inspect.ismodule(getattr(dist, name)))
    }
    ours = {*mcr.__all__, "rendezvous"}  # a folder here
    assert theirs - ours - set(OF_TORCH) == set()
    for name, expected in OF_TORCH.items():
        with pytest.raises(AttributeError) as caught:
            getattr(mcr, name)
        _, _, said = str(caught.value).partition(f"has no attribute '{name}'")
        assert bool(said) == bool(expected), name
        assert (expected or "") in said, name


def test_a_local_rank_is_said_to_come_from_the_launcher() -> None:
    with mcr.init() as comm:
        for name in ("local_rank", "get_local_rank"):
            for place in (mcr, comm):
                with pytest.raises(
                    AttributeError, match=r"has no attribute .*; launchers set it: LOCAL_RANK"
                ):
                    getattr(place, name)


@pytest.mark.parametrize(
    ("module", "name", "meant"),
    [("autograd", "allreduce", "all_reduce"), ("autograd", "reducescatter", "reduce_scatter"),
     ("layout", "Layouts", "Layout"), ("expert", "dispach", "dispatch"), ("spatial", "Conv2D", "Conv2d"),
     ("dtensor", "plan", "planned"), ("spatial", "split_group", None), ("horovod", "all_reduce", "allreduce"),
     ("horovod", "all_reduce_async_", "allreduce_async_"), ("horovod", "Rank", "rank"),
     ("horovod", "get_world_size", "size"), ("horovod", "destroy_process_group", "shutdown"),
     ("horovod", "DistributedOptimiser", "DistributedOptimizer"), ("horovod", "DistributedSampler", None),
     ("horovod", "all_gather_base", "allgather"), ("horovod", "wait_all", "synchronize"),
     ("horovod", "save_state", None), ("horovod", "SUM", "Sum")],
)  # fmt: skip
def test_an_unknown_name_of_a_module_says_which_was_meant(module: str, name: str, meant: str | None) -> None:
    found = import_module(f"mcr_plus.{module}")
    assert not hasattr(found, name)
    with pytest.raises(AttributeError) as caught:
        getattr(found, name)
    assert str(caught.value).endswith(f"did you mean {meant!r}?" if meant else f"attribute {name!r}")


@pytest.mark.parametrize(
    ("names", "own"),
    [
        (foreign_module_names.OF_HOROVOD, hvd.__all__),
        (foreign_names.OF_COMMUNICATORS, dir(mcr.Communicator)),
        (foreign_names.OF_WORKS, dir(mcr.Work)),
    ],
)
def test_every_hint_names_something_that_exists(names: dict[str, str | None], own: list[str]) -> None:
    assert {meant for meant in names.values() if meant and " " not in meant} <= set(own)


def test_features_missing_in_horovod_are_named() -> None:
    for name in ("gather", "AlreadyInitialized", "local"):
        with pytest.raises(AttributeError, match=f"'{name}'; mcr_plus has it"):
            getattr(hvd, name)


def test_a_handle_of_horovod_says_how_it_is_waited_for() -> None:
    with mcr.init():
        hvd.init()
        handle = hvd.allreduce_async(torch.ones(2))
        with pytest.raises(AttributeError, match=r"'wait'; synchronize\(handle\) returns the result"):
            handle.wait()  # type: ignore[attr-defined]
        hvd.synchronize(handle)
        hvd.shutdown()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("get_rank", "rank"), ("allreduce", "all_reduce"), ("Allreduce", "all_reduce"), ("Get_rank", "rank"),
     ("Get_size", "size"), ("Split", "split"), ("Isend", "isend"), ("Free", "close"),
     ("all_gather_single", "all_gather_into_tensor"), ("Ireduce_scatter", "reduce_scatter"),
     ("reduce_scatter_single", "reduce_scatter_tensor"), ("Sendrecv", "batch_isend_irecv"),
     ("allreduce_coalesced", "all_reduce_coalesced"), ("allgather_into_tensor", "all_gather_into_tensor"),
     ("allGather", "all_gather"), ("AllReduce", "all_reduce"), ("all_reduce_", "all_reduce"),
     ("Dup", "branch"),
     ("alltoall_base", "all_to_all_single"), ("get_process_group_ranks", "ranks"), ("Rank", "rank")],
)  # fmt: skip
def test_a_name_of_another_library_says_that_of_a_communicator(name: str, meant: str) -> None:
    with mcr.init() as comm:
        assert not hasattr(comm, name)
        with pytest.raises(AttributeError, match=f"did you mean '{meant}'"):
            getattr(comm, name)


def test_the_text_of_a_handle_says_kind_library_and_state() -> None:
    with mcr.init() as comm:
        work = comm.all_reduce(torch.ones(3), async_op=True, tag="mlp")
        assert work is not None
        work.wait()
        assert "synchronize" not in dir(work)
        assert {"wait", "info"} < set(dir(work))
        for name, meant in (("synchronize", "wait"), ("test", "is_completed"), ("done", "is_completed"),
                            ("is_complete", "is_completed"), ("isCompleted", "is_completed"),
                            ("get_future", "then")):  # fmt: skip
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'; did you mean '{meant}'"):
                getattr(work, name)
        assert repr(work) == "<Work: all_reduce of 12 bytes on local in group 'world', tag 'mlp': done>"
