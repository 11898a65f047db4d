"""A call of every name that c10d's classes and functions with a group have, over any backend.

A name that is missing here is one that a new torch has brought: try it over `mcr`, and add a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from types import FunctionType
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as bindings
from torch.distributed import distributed_c10d

from mcr_plus.torch_backend.refusals import REFUSED

Call = Callable[[Any], Any]
Outcome = tuple[str, str]
"""What a call returned, as `("value", repr)`, or raised, as `(name of the type, text)`."""

_CPU: Final = torch.device("cpu")
_SHORT: Final = timedelta(seconds=20)


def own(group: Any, *shape: int) -> torch.Tensor:
    return torch.full(shape or (3,), group.rank() + 1.0)


def empty(group: Any) -> list[torch.Tensor]:
    return [torch.zeros(3) for _ in range(group.size())]


def done(work: Any, *results: Any) -> list[Any]:
    work.wait()
    return [
        [part.tolist() for part in result] if isinstance(result, list) else result.tolist()
        for result in results
    ]


def _in_place(method: str, *others: Any) -> Call:
    def call(group: Any) -> Any:
        tensor = own(group)
        return done(getattr(group, method)([tensor], *others), tensor)

    return call


def _reduce(group: Any) -> Any:
    """Of the root alone: gloo leaves partial sums on other ranks."""
    tensor = own(group)
    result = done(group.reduce([tensor], options("ReduceOptions", rootRank=1)), tensor)
    return result if group.rank() == 1 else None


def _single(method: str, received: int, sent: int, *others: Any) -> Call:
    """A call with one output and one input, of so many elements."""

    def call(group: Any) -> Any:
        output, source = torch.zeros(received), torch.arange(float(sent)) + group.rank()
        return done(getattr(group, method)(output, source, *others), output)

    return call


def _lists(method: str, received: tuple[int, ...], sent: tuple[int, ...]) -> Call:
    def call(group: Any) -> Any:
        outputs = [torch.zeros(number) for number in received]
        inputs = [torch.arange(float(number)) + group.rank() for number in sent]
        return done(getattr(group, method)(outputs, inputs), outputs)

    return call


def _sparse(group: Any) -> Any:
    tensor = own(group, 3).to_sparse()
    group.allreduce_sparse([tensor]).wait()
    return tensor.to_dense().tolist()


def _allgather(group: Any) -> Any:
    outputs = empty(group)
    return done(group.allgather([outputs], [own(group)]), outputs)


def _allgather_coalesced(group: Any) -> Any:
    outputs = [[torch.zeros(3), torch.zeros(2)] for _ in range(group.size())]
    return done(group.allgather_coalesced(outputs, [own(group), own(group, 2)]), *outputs)


def options(name: str, **values: Any) -> Any:
    made = getattr(bindings, name)()
    for key, value in values.items():
        setattr(made, key, value)
    return made


def _gather(group: Any) -> Any:
    root = group.rank() == 1
    outputs = empty(group)
    work = group.gather([outputs] if root else [], [own(group)], options("GatherOptions", rootRank=1))
    return done(work, outputs)


def _gather_single(method: str) -> Call:
    def call(group: Any) -> Any:
        output = torch.zeros(6 if group.rank() == 1 else 0)
        return done(getattr(group, method)(output, own(group), options("GatherOptions", rootRank=1)), output)

    return call


def _scatter(group: Any) -> Any:
    root, output = group.rank() == 1, torch.zeros(3)
    inputs = [[torch.full((3,), 5.0 + rank) for rank in range(group.size())]] if root else []
    return done(group.scatter([output], inputs, options("ScatterOptions", rootRank=1)), output)


def _reduce_scatter(group: Any) -> Any:
    output = torch.zeros(3)
    return done(group.reduce_scatter([output], [[own(group) + rank for rank in range(group.size())]]), output)


def _message(receive: Callable[[Any, torch.Tensor], Any]) -> Call:
    def call(group: Any) -> Any:
        tensor = own(group)
        work = group.send([tensor], 1, 5) if group.rank() == 0 else receive(group, tensor)
        return done(work, tensor)

    return call


def _split(group: Any) -> Any:
    ranks = [1, 0] if HOOKS else [0, 1]  # whose order gloo forgets before torch 2.14
    part = group.split_group(ranks, timeout=_SHORT, group_name=f"part of {group.name()}", group_desc="part")
    tensor = own(part)
    part.allreduce([tensor]).wait()
    return [part.rank(), part.size(), part.name() == group.name(), part.group_desc, tensor.tolist()]


def _hook(when: str, removed: bool) -> Call:
    def call(group: Any) -> Any:
        seen: list[str] = []
        getattr(group, f"register_{when}_hook")(3, lambda given: seen.append(given.name.name))
        if removed:
            getattr(group, f"unregister_{when}_hook")(3)
        group.broadcast([own(group)], options("BroadcastOptions", rootRank=0)).wait()
        getattr(group, f"unregister_{when}_hook")(3)
        return seen

    return call


def _called(name: str, *arguments: Any) -> Call:
    return lambda group: getattr(group, name)(*arguments)


def _kind(name: str, *arguments: Any) -> Call:
    """A call of whose value only the type is compared."""
    return lambda group: type(getattr(group, name)(*arguments)).__name__


def _read(name: str) -> Call:
    return lambda group: getattr(group, name)


OPERATIONS: Final[dict[str, Call]] = {
    "allreduce": _in_place("allreduce"),
    "allreduce_sparse": _sparse,
    "allreduce_coalesced": _in_place("allreduce_coalesced"),
    "broadcast": _in_place("broadcast", options("BroadcastOptions", rootRank=1)),
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _single("reduce_scatter_single", 3, 6, options("ReduceScatterOptions")),
    "_reduce_scatter_base": _single("_reduce_scatter_base", 3, 6, options("ReduceScatterOptions")),
    "reduce_scatter_single_coalesced": _lists("reduce_scatter_single_coalesced", (3, 2), (6, 4)),
    "reduce_scatter_tensor_coalesced": _lists("reduce_scatter_tensor_coalesced", (3, 2), (6, 4)),
    "allgather": _allgather,
    "allgather_coalesced": _allgather_coalesced,
    "all_gather_single": _single("all_gather_single", 6, 3),
    "_allgather_base": _single("_allgather_base", 6, 3),
    "all_gather_single_coalesced": _lists("all_gather_single_coalesced", (6, 4), (3, 2)),
    "allgather_into_tensor_coalesced": _lists("allgather_into_tensor_coalesced", (6, 4), (3, 2)),
    "gather": _gather,
    "gather_single": _gather_single("gather_single"),
    "gather_into_tensor": _gather_single("gather_into_tensor"),
    "scatter": _scatter,
    "alltoall": _lists("alltoall", (3, 3), (3, 3)),
    "all_to_all_single": _single("all_to_all_single", 6, 6, [], []),
    "alltoall_base": _single("alltoall_base", 6, 6, [], []),
    "send": _message(lambda group, tensor: group.recv([tensor], 0, 5)),
    "recv": _message(lambda group, tensor: group.recv([tensor], 0, 5)),
    "recv_anysource": _message(lambda group, tensor: group.recv_anysource([tensor], 5)),
    "barrier": lambda group: group.barrier().wait(),
    "monitored_barrier": lambda group: group.monitored_barrier(_SHORT),
}
QUERIES: Final[dict[str, Call]] = {
    "_add_ephemeral_timeout": _called("_add_ephemeral_timeout", _SHORT),
    "_backend_id": _kind("_backend_id", bindings.ProcessGroup.BackendType.GLOO),
    "_device_types": lambda group: _CPU in group._device_types,
    "_enable_collectives_timing": _called("_enable_collectives_timing"),
    "_end_coalescing": lambda group: (group._start_coalescing(_CPU), group._end_coalescing(_CPU).wait())[1],
    "_end_time_estimate": _called("_end_time_estimate"),
    "_get_backend": lambda group: group._get_backend(_CPU).rank(),
    "_get_backend_name": _kind("_get_backend_name"),
    "_get_sequence_number_for_group": _kind("_get_sequence_number_for_group"),
    "_has_hooks": _called("_has_hooks"),
    "_id": _kind("_id"),
    "_register_on_completion_hook": _called("_register_on_completion_hook", print),
    "_set_default_timeout": _called("_set_default_timeout", _SHORT),
    "_set_group_desc": lambda group: (group._set_group_desc("new"), group.group_desc)[1],
    "_set_group_uid": _called("_set_group_uid", "1"),
    "_set_sequence_number_for_group": _called("_set_sequence_number_for_group"),
    "_start_coalescing": lambda group: (group._start_coalescing(_CPU), group._end_coalescing(_CPU).wait())[1],
    "_start_time_estimate": _called("_start_time_estimate"),
    "_supports_time_estimate": _read("_supports_time_estimate"),
    "_wait_for_pending_works": _called("_wait_for_pending_works"),
    "allocate_tensor": lambda group: group.allocate_tensor(3, dtype=torch.float32, device=_CPU),
    "bound_device_id": _read("bound_device_id"),
    "boxed": _kind("boxed"),
    "eager_connect_single_device": _called("eager_connect_single_device", _CPU),
    "get_backend": lambda group: group.get_backend(_CPU).rank(),
    "get_error": lambda group: group.get_error().name,
    "get_group_store": lambda group: isinstance(group.get_group_store(), bindings.Store),
    "group_desc": _read("group_desc"),
    "group_name": lambda group: isinstance(group.group_name, str),
    "mem_allocator": _read("mem_allocator"),
    "memory_stats": _called("memory_stats"),
    "merge": _called("merge", None, None, 0, 2),
    "merge_remote_group": lambda group: group.merge_remote_group(group.get_group_store(), 2, timedelta(0)),
    "name": lambda group: group.name() in ("gloo", "mcr"),
    "new_window": _called("new_window"),
    "options": lambda group: group.options and None,
    "rank": _called("rank"),
    "register_abort_hook": _called("register_abort_hook", 1, print),
    "register_post_hook": _hook("post", False),
    "register_pre_hook": _hook("pre", False),
    "resume": _called("resume"),
    "set_timeout": _called("set_timeout", _SHORT),
    "setUsePgForSymmMemRendezvous": _called("setUsePgForSymmMemRendezvous", True),
    "size": _called("size"),
    "split": _called("split", None, [0], None),
    "split_group": _split,
    "supports_abort_hooks": _read("supports_abort_hooks"),
    "supports_coalescing": _read("supports_coalescing"),
    "supports_completion_hooks": _read("supports_completion_hooks"),
    "supports_reconfigure": _read("supports_reconfigure"),
    "supports_shrinking": _read("supports_shrinking"),
    "supports_splitting": _read("supports_splitting"),
    "supports_tensor_alloc": lambda group: bool(group.supports_tensor_alloc(0)),
    "supports_time_estimate": _read("supports_time_estimate"),
    "supports_window": _read("supports_window"),
    "suspend": _called("suspend"),
    "unbox": lambda group: group.unbox(group.boxed()).rank(),
    "unregister_abort_hook": _called("unregister_abort_hook", 1),
    "unregister_post_hook": _hook("post", True),
    "unregister_pre_hook": _hook("pre", True),
    "use_pg_for_symm_mem_rendezvous": _read("use_pg_for_symm_mem_rendezvous"),
}
ELSEWHERE: Final = {
    **dict.fromkeys(
        ("abort", "shutdown", "shrink", "reconfigure", "get_reconfigure_handle"), "test_shrink.py and others"
    ),
    **dict.fromkeys(
        ("_register_backend", "_set_default_backend", "_set_group_name"), "torch's own, at set-up"
    ),
    **dict.fromkeys(
        ("BackendType", "Options", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL"),
        "a type, a value",
    ),
    "_pybind11_conduit_v1_": "pybind11's",
}
"""Names that are not called here, and why."""
MORE: Final = {"supports_coalescing", "supports_reconfigure", "supports_shrinking", "supports_splitting"}
"""Queries whose answer over mcr is another than over gloo."""

WORKS: Final[dict[str, Call]] = {
    "_get_duration": _called("_get_duration"),
    "_get_op_type": _called("_get_op_type"),
    "_get_sequence_number": _kind("_get_sequence_number"),
    "_source_rank": _called("_source_rank"),
    "block_current_stream": _called("block_current_stream"),
    "boxed": _kind("boxed"),
    "exception": _called("exception"),
    "get_future": lambda work: work.get_future().wait()[0].tolist(),
    "get_future_result": _called("get_future_result"),
    "is_completed": _called("is_completed"),
    "is_success": _called("is_success"),
    "result": lambda work: work.result()[0].tolist(),
    "source_rank": _called("source_rank"),
    "synchronize": _called("synchronize"),
    "timeout": _read("timeout"),
    "unbox": lambda work: work.unbox(work.boxed()).is_completed(),
    "wait": _called("wait"),
}
OF_TORCH: Final = {
    "_get_duration": "doesn't support getDuration",
    "get_future_result": "getFutureResult not implemented",
    "block_current_stream": "",  # without a GPU, about that
}
"""Names of works that torch refuses over gloo too, and its words."""


def names(*kinds: str) -> list[str]:
    found = (set(dir(getattr(bindings, kind))) for kind in kinds)
    return sorted(name for name in set().union(*found) if not name.startswith("__"))


def outcome(call: Call, subject: Any) -> Outcome:
    try:
        return "value", repr(call(subject))
    except Exception as error:
        return type(error).__name__, str(error)


def outcomes_of_groups() -> dict[str, list[Outcome]]:
    """The outcomes over mcr and over gloo, by name."""
    dist.init_process_group("mcr", timeout=timedelta(seconds=60))
    groups = [dist.group.WORLD, dist.new_group(backend="gloo", timeout=timedelta(seconds=60))]
    found: dict[str, list[Outcome]] = {}
    # Over gloo not what is refused here, since it has no checks of such calls, and no splits before torch
    # 2.14, of which one rank now and then waits without an end.
    ours = refused() | (set() if HOOKS else {"split_group", "splitGroup"})
    for name in names("ProcessGroup", "Backend"):
        call = OPERATIONS.get(name) or QUERIES.get(name)
        if call is not None:
            found[name] = [outcome(call, _with(group, name)) for group in groups[: 2 - (name in ours)]]
    dist.destroy_process_group()
    return found


def _with(group: Any, name: str) -> Any:
    """The group, or the backend under it if only that has the name."""
    return group if hasattr(type(group), name) else group._get_backend(_CPU)


def outcomes_of_works() -> dict[str, list[Outcome]]:
    dist.init_process_group("mcr", timeout=timedelta(seconds=60))
    groups = [dist.group.WORLD, dist.new_group(backend="gloo", timeout=timedelta(seconds=60))]
    found: dict[str, list[Outcome]] = {name: [] for name in names("Work") if name in WORKS}
    for group in groups:
        work = cast("Any", group).allreduce([own(group)])
        work.wait()
        for name, each in found.items():
            each.append(outcome(WORKS[name], work))
    dist.destroy_process_group()
    return found


# -- functions --------------------------------------------------------------------------------------------


def functions() -> list[str]:
    """Torch's functions that take a process group."""
    found = set(distributed_c10d.__all__) | set(vars(distributed_c10d))
    taken = {"group", "pg", "parent_pg", "process_group"}
    return sorted(
        name
        for name in found
        if type(function := getattr(distributed_c10d, name, None)) is FunctionType
        and hasattr(dist, name)
        and taken & set(inspect.signature(function).parameters)
    )


def _function(name: str) -> Any:
    return getattr(dist, name)


def _gather_function(name: str) -> Call:
    def call(group: Any) -> Any:
        output = torch.zeros(6) if group.rank() == 1 else None
        _function(name)(own(group), output, 1, group)
        return None if output is None else output.tolist()

    return call


def _estimate(group: Any) -> Any:
    with _function("_time_estimator")(group):
        pass


def _split_function(group: Any) -> Any:
    part = _function("split_group")(group, [[1, 0]], timeout=_SHORT)
    tensor = own(part)
    dist.all_reduce(tensor, group=part)
    return [part.rank(), dist.get_process_group_ranks(part), tensor.tolist()]


def _backend_impl(group: Any) -> Any:
    return _function("get_backend_impl")(group).rank()


FUNCTIONS: Final[dict[str, Call]] = {
    "_new_window": lambda group: _function("_new_window")(group=group),
    "_supports_window": lambda group: _function("_supports_window")(group),
    "_supports_reconfigure": lambda group: _function("_supports_reconfigure")(group) and None,
    "_time_estimator": _estimate,
    "gather_into_tensor": _gather_function("gather_into_tensor"),
    "gather_single": _gather_function("gather_single"),
    "get_backend_impl": _backend_impl,
    "set_timeout": lambda group: _function("set_timeout")(_SHORT, group),
    "split_group": _split_function,
}
COVERED: Final = """
    _all_gather_base _coalescing_manager _get_process_group_name _get_reconfigure_handle _rank_not_in_group
    _reconfigure _reduce_scatter_base all_gather all_gather_coalesced all_gather_into_tensor all_gather_object
    all_gather_single all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier broadcast
    broadcast_object_list destroy_process_group gather gather_object get_backend get_backend_config
    get_global_rank get_group_rank get_process_group_ranks get_rank get_world_size irecv isend
    monitored_barrier new_subgroups recv recv_object_list reduce reduce_scatter reduce_scatter_single
    reduce_scatter_tensor scatter scatter_object_list send send_object_list shrink_group
"""
"""Functions that torch's own tests (tests/torch_suite) and those of losses and hooks call over mcr."""
HOOKS: Final = hasattr(bindings, "PreHookArgs")
"""Whether groups of this torch have hooks: 2.14 on, whose gloo splits groups in the order of ranks too."""


def outcomes_of_functions() -> dict[str, list[Outcome]]:
    dist.init_process_group("mcr", timeout=timedelta(seconds=60))
    groups = [dist.group.WORLD, dist.new_group(backend="gloo", timeout=timedelta(seconds=60))]
    found = {
        name: [outcome(call, group) for group in groups]
        for name, call in FUNCTIONS.items()
        if name in functions()
    }
    dist.destroy_process_group()
    return found


# -- hooks ------------------------------------------------------------------------------------------------


def _described(tensors: list[torch.Tensor]) -> list[list[int]]:
    return [list(tensor.shape) for tensor in tensors]


def calls_of_hooks(masked: bool) -> dict[str, Any]:
    """What hooks see of every operation over mcr, or over gloo's name, and over gloo."""
    dist.init_process_group("gloo" if masked else "mcr", timeout=timedelta(seconds=60))
    world: Any = dist.group.WORLD
    backend: Any = None
    if not masked:
        backend = dist.new_group(backend="gloo")
    found: dict[str, Any] = {}
    for which, group in (("mcr", world), ("gloo", backend)):
        if group is None:
            continue
        seen: list[Any] = []

        def before(given: Any, place: list[Any] = seen, tag: int = 0) -> None:
            shapes = _described(given.input_tensors), _described(given.output_tensors)
            place.append([tag, given.name.name, given.async_op, *shapes, given.root, given.op_id])

        def after(given: Any, place: list[Any] = seen) -> None:
            is_work = isinstance(given.work, dist.Work)
            place.append(["after", given.name.name, given.async_op, is_work, given.op_id])

        group.register_pre_hook(2, lambda given: before(given, tag=2))
        group.register_pre_hook(1, lambda given: before(given, tag=1))
        group.register_post_hook(7, after)
        for name, call in OPERATIONS.items():
            if not name.startswith(("gather_", "allreduce_sparse")):  # which gloo refuses
                call(group)
                seen.append(name)
        tensors = [own(group), own(group, 6), *empty(group)]
        dist.all_reduce(tensors[0], group=group)
        dist.reduce_scatter(tensors[0], tensors[2:], group=group)
        dist.all_gather_object([None] * 2, 3, group=group)
        group.unregister_pre_hook(2)
        group.unregister_pre_hook(9)
        group.broadcast([tensors[0]], options("BroadcastOptions", rootRank=0)).wait()
        group.unregister_pre_hook(1)
        group.unregister_post_hook(7)
        group.barrier().wait()
        found[which] = seen
    found["kind"] = type(world).__name__
    dist.destroy_process_group()
    return found


def errors_of_hooks() -> list[Any]:
    dist.init_process_group("mcr", timeout=timedelta(seconds=60))
    group: Any = dist.group.WORLD
    plain, problems = type(group), list[Any]()

    def refuse(_: Any) -> None:
        raise KeyError("no")

    def again(_: Any) -> None:
        group.unregister_pre_hook(1)
        group.register_post_hook(2, lambda _: problems.append("called"))

    group.register_pre_hook(1, refuse)
    x = own(group)
    problems.append(outcome(lambda _: dist.all_reduce(x), None))
    group.unregister_pre_hook(1)
    problems += [x.tolist(), type(group) is plain]
    group.register_pre_hook(1, again)
    dist.all_reduce(x)
    dist.all_reduce(x)
    group.unregister_post_hook(2)
    problems += [x.tolist(), type(group) is plain, outcome(lambda _: group.register_pre_hook(1, 5), None)]
    recorder: Any = getattr(bindings, "FlightRecorderHook", None)
    problems.append(outcome(recorder.attach, group))
    dist.destroy_process_group()
    return problems


def nan_checks(backend: str) -> dict[str, Outcome]:
    """What becomes of a NaN, by operation; with TORCH_DIST_NAN_CHECK=1.

    Operations that are to be refused are in a group of one rank, where nobody waits if they are not.
    """
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    alone: Any = [dist.new_group([each]) for each in range(2)][rank]

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape or (3,), float("nan"), dtype=dtype)

    one, halves = [torch.zeros(3)], torch.ones(6)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(tensor(), group=alone),
        "all_reduce, async": lambda: dist.all_reduce(tensor(), group=alone, async_op=True),
        "bfloat16": lambda: dist.all_reduce(tensor(dtype=torch.bfloat16), group=alone),
        "float64": lambda: dist.all_reduce(tensor(dtype=torch.float64), group=alone),
        "all_reduce_coalesced": lambda: alone.allreduce_coalesced([torch.ones(2), tensor()]),
        "reduce": lambda: dist.reduce(tensor(), rank, group=alone),
        "broadcast": lambda: dist.broadcast(tensor(), rank, group=alone),
        "scatter": lambda: dist.scatter(torch.zeros(3), [tensor()], rank, alone),
        "gather": lambda: dist.gather(tensor(), one, rank, alone),
        "all_gather": lambda: dist.all_gather(one, tensor(), alone),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.zeros(3), tensor(), alone),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.zeros(3), [tensor()], group=alone),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.zeros(3), tensor(), group=alone),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(6), tensor(6), group=alone),
        "passes: broadcast to it": lambda: dist.broadcast(tensor() if rank else torch.ones(3), 0),
        "passes: receive": lambda: dist.recv(tensor(), 0) and None if rank else dist.send(torch.ones(3), 1),
        "passes: output": lambda: dist.all_gather_into_tensor(tensor(6), torch.ones(3)),
        "complex": lambda: dist.all_reduce(tensor(dtype=torch.complex64), group=alone),
        "passes: integers": lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32)),
        "passes: numbers": lambda: dist.reduce_scatter_tensor(torch.zeros(3), halves),
    }
    found = {name: outcome(lambda call: call(), call) for name, call in calls.items()}
    dist.barrier()
    dist.destroy_process_group()
    return found


def sparse_nan() -> list[Outcome]:
    dist.init_process_group("mcr", timeout=timedelta(seconds=60))
    found = [
        outcome(lambda x: dist.all_reduce(x), torch.full((3,), value).to_sparse())
        for value in (1.0, float("nan"))
    ]
    dist.barrier()
    dist.destroy_process_group()
    return found


def timeouts_of_splits() -> list[Any]:
    dist.init_process_group("mcr", timeout=timedelta(seconds=60))
    group: Any = dist.group.WORLD
    parts = [group.split_group([0, 1]), group.split_group([1, 0], timeout=_SHORT)]
    named: Any = dist.new_group(
        pg_options={"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "40s"}}]}
    )
    parts += [named.split_group([0, 1], timeout=_SHORT)]
    found = [each.allreduce([own(each)]).timeout.total_seconds() for each in parts]
    found += [group.split_group([0]) is None, outcome(lambda _: group.split_group([0, 0]), None)]
    found += [outcome(lambda _: group.split_group([0, 1], opts={"version": 1}), None)]
    dist.barrier()
    dist.destroy_process_group()
    return found


def refused() -> set[str]:
    return set(REFUSED) | {"mem_allocator"}
