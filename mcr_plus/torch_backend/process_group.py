"""Backend `mcr` of torch.distributed: programs use the pipeline by changing the backend's name.

    torch.distributed.init_process_group("mcr")

The process group is a Python class over a `Communicator`: `torch.distributed` uses a subclass of
`ProcessGroup` directly, without a wrapper. All calls of c10d on a group arrive here: calls from Python
through every method below, calls from C++ (DDP's reducer, functional collectives) through the methods
overridden by torch's trampoline.

The first group joins an mcr_plus job over torch's store; `mcr.record()`, `mcr.world()` and the like then
refer to this job. Later groups are groups of the job. A job that `mcr.init` has joined is used.

Long because a process group has one method per operation.
"""

# The stubs of ProcessGroup are overloaded, with other argument names; callers pass arguments by position.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from pathlib import Path
from threading import get_ident
from types import FrameType, SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled
from torch.distributed import distributed_c10d
from torch.utils.weak import WeakIdKeyDictionary

from mcr_plus.communicator.calls import BUILDERS, CallOptions
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.c10d import TORCH, ProcessGroup, Store
from mcr_plus.core.kinds import MESSAGES, ReduceOp
from mcr_plus.core.streams import device_types
from mcr_plus.core.work import JointWork, Work
from mcr_plus.errors import CommTimeout, Unsupported
from mcr_plus.job.process import job
from mcr_plus.torch_backend.arguments import (
    NAME,
    TORCH_REDUCE_OPS,
    reduction_of,
    rooted,
    scale,
    scaled,
)
from mcr_plus.torch_backend.hooks import let_torch_attach
from mcr_plus.torch_backend.jobs import alone, begin, communicator_of, torch_job
from mcr_plus.torch_backend.living_group import LivingGroup
from mcr_plus.torch_backend.profiling import Profiled
from mcr_plus.torch_backend.shrinking import let_torch_shrink, let_torch_split
from mcr_plus.torch_backend.work import DONE, TorchWork, joint, untraced

Options = str | Path | Mapping[str, Any]
"""Type of `pg_options`: the path of a pipeline's YAML file, or a mapping of the same form."""

_RETAINED_WORKS: Final = 8  # DDP starts at most four works while it uses the first


@untraced
class McrProcessGroup(LivingGroup):
    """Process group whose operations run through a communicator's pipeline.

    Methods and argument order are the same as in `torch.distributed.ProcessGroup`: lists of one tensor, or of
    one list of tensors, and options with op, root and `asyncOp`. Ranks in arguments are group ranks. An
    unsupported operation raises `Unsupported` (a `RuntimeError`) on every rank, before anything is sent.

    Any thread may issue operations, one at a time, in an order that is the same on all ranks.
    """

    def __init__(self, store: Store, rank: int, size: int, open_group: Callable[[], Communicator]) -> None:
        super().__init__(store, rank, size, open_group)
        self._lock = threading.RLock()
        # A separate lock, because a collective of another thread may wait for a message.
        self._messages_lock = threading.RLock()
        self._batch: list[dist.Work] | None = None
        self._scalar_works = deque[dist.Work](maxlen=_RETAINED_WORKS)
        self._keywords: MutableMapping[torch.Tensor, Mapping[str, Any]] | None = None

    @staticmethod
    def begin(store: Store, rank: int, size: int, timeout: timedelta, config: object) -> McrProcessGroup:
        """Start a new job and return its group, outside torch's registry; collective over the ranks.

        `store`: a new store that all ranks reach. Raises `Unsupported` if this process has a job, and
        otherwise the errors of `create`.
        """
        group = McrProcessGroup(store, rank, size, lambda: begin(store, rank, size, timeout, config))
        assert group.communicator
        return group

    # -- properties -------------------------------------------------------------------------------

    def name(self) -> str:
        """Return the backend's name."""
        return NAME

    getBackendName = _get_backend_name = name  # noqa: N815 - torch's names

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the group's name in torch's registry."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Return the group's description."""
        return self._desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815 - torch's names
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in device_types() if kind != "cuda" or torch.cuda.is_available()]

    def get_backend(self, device: object) -> Any:  # noqa: ARG002 - the same for all devices
        """Return the group itself: it is also the `Backend` object of every device."""
        return self

    _get_backend = get_backend

    options = None

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self.communicator.flush()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the runtime numbers the operations."""

    def _get_sequence_number_for_group(self) -> int:
        return self.communicator.state.sequence

    def get_group_store(self) -> Store:
        """Return the store that torch gave to the group."""
        return self._store

    def all_reduces_with(self, tensor: torch.Tensor, **keywords: Any) -> None:
        """Set keywords of `Communicator.all_reduce` for later all_reduces of this `tensor` object.

        `called` is allowed too: see `Signature.call`. For callers inside torch, which cannot pass keywords.
        The group holds a weak reference to the tensor.
        """
        if self._keywords is None:
            self._keywords = WeakIdKeyDictionary()
        self._keywords[tensor] = keywords

    # -- reductions -------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, *_: object, op: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduce a tensor over all ranks, in place."""
        (tensor,) = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        # The common case is written inline: this is the hot path.
        factor = None
        try:
            name, async_op = TORCH_REDUCE_OPS[hash(opts.reduceOp)], opts.asyncOp
        except (AttributeError, KeyError):
            name, factor, async_op = reduction_of(opts if op is None else op)
        if tensor.is_sparse:
            return self._sparse_all_reduce(tensor, name, factor, async_op)
        is_scalar = tensor.numel() == 1
        # Not `_call`: an extra function or context manager would dominate the overhead of this method.
        with Profiled(self._lock, "all_reduce", [tensor], self) if _profiler_enabled() else self._lock:
            group: Any = self._communicator if get_ident() == self._owner else self._group()
            if factor is not None:
                scale(tensor, factor)
            # One element is always asynchronous: in DDP's `join`, only ranks without data wait for it.
            if self._keywords is None:
                work = group.all_reduce(tensor, name, async_op or is_scalar)
            else:
                keywords = self._keywords.get(tensor, {})
                work = _issue(group, "all_reduce", (tensor, name), async_op or is_scalar, **keywords)
        if work is None:
            return DONE
        return self._scalar_handle(work, tensor, async_op) if is_scalar else self._started(work, [tensor])

    def _scalar_handle(self, work: Work | None, tensor: torch.Tensor, async_op: bool) -> dist.Work:
        """Return the handle for one element, kept alive here: C++ code of DDP holds no Python object."""
        handle = self._started(work, [tensor])
        self._scalar_works.append(handle)
        if async_op:
            return handle
        handle.wait()
        return DONE

    allreduce_sparse = allreduce  # the name in torch's `Backend`

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Reduce tensors of any dtypes over all ranks in few operations."""
        if len(tensors) == 1:
            return McrProcessGroup.allreduce(self, tensors, opts)  # without calling the hooks again
        op, factor, _ = reduction_of(opts)
        with self._call("all_reduce_coalesced", *tensors):
            group = self._group()
            for tensor in tensors if factor is not None else ():
                scale(tensor, factor)
            work = group.all_reduce_coalesced(tensors, op, async_op=True)
        return self._started(work, tensors)

    def reduce(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, op: Any = None, *_: object, root: Any = None
    ) -> dist.Work:
        """Reduce a tensor over all ranks into the root's tensor."""
        (tensor,) = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        root_rank, async_op = rooted(opts, root)
        name, factor, _async = reduction_of(op if hasattr(opts, "__index__") or opts is None else opts)
        is_root = self.rank() == root_rank
        with self._call("reduce", tensor):
            group = self._group()
            if factor is not None and is_root:
                scale(tensor, factor)
            source = tensor if is_root else scaled([tensor], factor)[0]
            work = group.reduce(source, group.ranks[root_rank], name, async_op)
        return DONE if work is None else self._started(work, [tensor])

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, *_: object, op: Any = None
    ) -> dist.Work:
        """Reduce a list of tensors, one per rank, and keep this rank's tensor; sizes may differ."""
        nested = isinstance(outputs, (list, tuple))
        (output,), (parts,) = (outputs, inputs) if nested else ([outputs], [inputs])
        name, factor, async_op = reduction_of(opts if op is None else op)
        parts = scaled(parts, factor)
        with self._call("reduce_scatter", *parts):
            group = self._group()
            uneven = any(part.numel() != output.numel() for part in parts)
            call = group.reduce_scatter_v if uneven else group.reduce_scatter
            work = call(output, parts, name, async_op)
        return DONE if work is None else self._started(work, [output])

    def reduce_scatter_single(  # type: ignore[override]  # callers pass them by position
        self, output: Any, input: Any, opts: Any = None, **keywords: Any
    ) -> dist.Work:
        """Reduce a tensor of one block per rank, and keep this rank's block.

        `keywords`: keywords of `Communicator.reduce_scatter_tensor`, and `called`: see `Signature.call`.
        """
        op, factor, async_op = reduction_of(opts)
        (source,) = scaled([input], factor)
        with self._call("reduce_scatter_tensor", source):
            group = self._group()
            work = _issue(group, "reduce_scatter_tensor", (output, source, op), async_op, **keywords)
        return DONE if work is None else self._started(work, [output])

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # before torch 2.13

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Run `reduce_scatter_single` on several tensors in few operations.

        Functional collectives, and so DTensors, call it with one tensor; one tensor needs no buffer.
        """
        if len(inputs) == 1:
            return McrProcessGroup.reduce_scatter_single(self, outputs[0], inputs[0], opts)
        op, factor, _ = reduction_of(opts)
        with self._call("reduce_scatter_coalesced", *inputs):
            group = self._group()
            work = group.reduce_scatter_coalesced(outputs, scaled(inputs, factor), op, async_op=True)
        return self._started(work, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _sparse_all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, factor: Any, async_op: bool
    ) -> dist.Work:
        """Sum sparse tensors: gather all ranks' indices and values, and add values of equal indices."""
        if op not in ("SUM", "AVG") or factor is not None or tensor.layout != torch.sparse_coo:
            name = op if factor is None else "PREMUL_SUM"
            raise Unsupported(f"all_reduce of sparse tensors: {name}; only SUM and AVG of COO tensors")
        with self._call("all_reduce", tensor):
            group = self._group()
            own = tensor.coalesce()
            indices, values = own.indices().t().contiguous(), own.values().contiguous()
            counts = group.all_gather_object(len(values))
            all_indices = [indices.new_empty((count, *indices.shape[1:])) for count in counts]
            all_values = [values.new_empty((count, *values.shape[1:])) for count in counts]
            for parts, part in ((all_indices, indices), (all_values, values)):
                group.all_gather_v(parts, part)
        gathered = torch.cat(all_values)
        if op == "AVG":
            gathered /= group.size
        total = torch.sparse_coo_tensor(torch.cat(all_indices).t(), gathered, tensor.shape).coalesce()
        tensor.copy_(total)
        return self._finished([tensor]) if async_op else DONE

    # -- one to all, all to all -------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, *_: object, root: Any = None) -> dist.Work:  # type: ignore[override]
        """Copy the root's tensor to every rank."""
        (tensor,) = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        root_rank, async_op = rooted(opts, root)
        with self._call("broadcast", tensor):
            group = self._group()
            work = group.broadcast(tensor, group.ranks[root_rank], async_op)
        return DONE if work is None else self._started(work, [tensor])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor on every rank, as a list; sizes may differ."""
        nested = isinstance(inputs, (list, tuple))
        (parts,), (tensor,) = (outputs, inputs) if nested else ([outputs], [inputs])
        with self._call("all_gather", tensor):
            group = self._group()
            uneven = any(part.numel() != tensor.numel() for part in parts)
            call = group.all_gather_v if uneven else group.all_gather
            work = call(parts, tensor, getattr(opts, "asyncOp", True))
        return DONE if work is None else self._started(work, [parts])

    def all_gather_single(self, output: Any, input: Any, opts: Any = None, **keywords: Any) -> dist.Work:
        """Gather every rank's tensor on every rank, as one tensor.

        `keywords`: keywords of `Communicator.all_gather_into_tensor`.
        """
        with self._call("all_gather_into_tensor", input):
            async_op = getattr(opts, "asyncOp", True)
            work = self._group().all_gather_into_tensor(output, input, async_op, **keywords)
        return DONE if work is None else self._started(work, [output])

    _allgather_base = all_gather_single  # before torch 2.13

    def all_gather_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any = None,
    ) -> dist.Work:
        """Run `all_gather_single` on several tensors in few operations; a single tensor needs no buffer."""
        if len(inputs) == 1:
            return McrProcessGroup.all_gather_single(self, outputs[0], inputs[0], opts)
        with self._call("all_gather_coalesced", *inputs):
            works = self._group().all_gather_coalesced(outputs, inputs, async_op=True)
        return self._started(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Run `allgather` on several tensors; the result of each is `output_lists[rank][index]`."""
        calls = zip(zip(*output_lists, strict=True), inputs, strict=True)
        works = [McrProcessGroup.allgather(self, [list(parts)], [tensor], opts) for parts, tensor in calls]
        return joint(works, [part for parts in output_lists for part in parts])

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *_: object, root: Any = None) -> dist.Work:  # type: ignore[override]
        """Gather every rank's tensor on the root, as a list."""
        nested = isinstance(inputs, (list, tuple))
        (tensor,), lists = (inputs, outputs) if nested else ([inputs], [outputs])
        root_rank, async_op = rooted(opts, root)
        with self._call("gather", tensor):
            group = self._group()
            parts = lists[0] if self.rank() == root_rank else None
            work = group.gather(tensor, parts, group.ranks[root_rank], async_op)
        return DONE if work is None else self._started(work, outputs)

    def gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor on the root, as one tensor; other ranks need no output."""
        root_rank, async_op = rooted(opts, None)
        is_root = self.rank() == root_rank
        with self._call("gather", input):
            group = self._group()
            parts = list(output.view(group.size, -1).unbind()) if is_root else None
            work = group.gather(input.reshape(-1), parts, group.ranks[root_rank], async_op)
        return DONE if work is None else self._started(work, [output] if is_root else [])

    gather_into_tensor = gather_single

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: object, root: Any = None) -> dist.Work:  # type: ignore[override]
        """Send each rank its tensor from the root's list."""
        nested = isinstance(outputs, (list, tuple))
        (tensor,), lists = (outputs, inputs) if nested else ([outputs], [inputs])
        root_rank, async_op = rooted(opts, root)
        with self._call("scatter", tensor):
            group = self._group()
            parts = lists[0] if self.rank() == root_rank else None
            work = group.scatter(tensor, parts, group.ranks[root_rank], async_op)
        return DONE if work is None else self._started(work, [tensor])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Send a tensor to every rank, and receive one from each."""
        with self._call("all_to_all", *inputs):
            work = self._group().all_to_all(outputs, inputs, getattr(opts, "asyncOp", True))
        return DONE if work is None else self._started(work, outputs)

    def all_to_all_single(
        self, output: Any, input: Any, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> dist.Work:
        """Exchange blocks of one tensor between all ranks, equal unless rows per rank are given."""
        with self._call("all_to_all_single", input):
            work = self._group().all_to_all_single(
                output, input, output_sizes or None, input_sizes or None, getattr(opts, "asyncOp", True)
            )
        return DONE if work is None else self._started(work, [output])

    alltoall_base = all_to_all_single  # type: ignore[assignment]  # its name before torch 2.13

    # -- messages ---------------------------------------------------------------------------------

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803 - torch's name
        """Start to send a tensor to a rank of the group."""
        (tensor,) = tensors
        with self._call("send", tensor):
            group = self.communicator  # messages are not ordered, so any thread may send
            work = group.isend(tensor, group.ranks[dstRank], tag)
        return self._started(work, tensors)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803 - torch's name
        """Start to receive a tensor from a rank of the group."""
        (tensor,) = tensors
        with self._call("recv", tensor):
            group = self.communicator
            work = group.irecv(tensor, group.ranks[srcRank], tag)
        return self._started(work, tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Start to receive a tensor from the first rank of the group that sends."""
        (tensor,) = tensors
        with self._call("recv", tensor):
            work = self.communicator.irecv(tensor, None, tag)
        return self._started(work, tensors)

    recvAnysource = recv_anysource  # noqa: N815 - the name that C++ calls

    # -- barriers ---------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        with self._call("barrier"):
            work = self._group().barrier(getattr(opts, "asyncOp", True))
        return DONE if work is None else self._started(work, [])

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: ARG002 - the error always names all missing ranks
    ) -> None:
        """Wait for all ranks. Raises `CommTimeout` with the missing ranks, worded like gloo's error."""
        with self._call("monitored_barrier"):
            group = self._group()
            work = group.barrier(async_op=True)
        assert work is not None
        try:
            work.wait(timeout)
        except CommTimeout as error:
            missing = ", ".join(map(str, error.missing))
            raise CommTimeout(
                f"Rank {group.ranks[group.rank]} timed out in monitoredBarrier: "
                f"Rank{'s' * (len(error.missing) > 1)} {missing} failed to pass monitoredBarrier; {error}",
                error.missing,
            ) from error

    # -- coalescing -------------------------------------------------------------------------------

    def _start_coalescing(self, device: object) -> None:  # noqa: ARG002 - torch's signature
        self._batch = []

    def _end_coalescing(self, device: object) -> dist.Work:  # noqa: ARG002 - torch's signature
        works, self._batch = self._batch or [], None
        return joint(works, [])

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing  # the names that C++ calls

    # -- inside -----------------------------------------------------------------------------------

    def _call(self, operation: str, *tensors: torch.Tensor) -> AbstractContextManager[object]:
        """Return the lock for one call; with torch's profiler on, it also records a range."""
        lock = self._messages_lock if operation in MESSAGES else self._lock
        return Profiled(lock, operation, tensors, self) if _profiler_enabled() else lock

    def _group(self) -> Communicator:
        """Return the communicator, with the calling thread as its owner."""
        group = self._communicator
        if group is None:
            group = self.communicator
        caller = threading.get_ident()
        # While a thread of autograd (a _DummyThread) runs, its caller waits and stays the owner.
        if caller != self._owner and not isinstance(threading.current_thread(), threading._DummyThread):
            group.take_over()
            self._owner = caller
        return group

    def _started(self, work: Work | None, result: Any) -> dist.Work:
        handle: dist.Work = DONE
        if work is not None:
            handle = own = TorchWork(work, result, self._membership)
            if TORCH < (2, 7) and _called_from_cpp():
                own.keep()
        if self._batch is not None:
            self._batch.append(handle)
        return handle

    def _finished(self, result: Any) -> dist.Work:
        """Return the handle of an operation that is already complete."""
        return self._started(JointWork([], "done", nbytes=0), result)


def _issue(
    group: Communicator,
    kind: str,
    arguments: tuple[Any, ...],
    async_op: bool,
    called: str | None = None,
    **keywords: Any,
) -> Work | None:
    """Issue an operation of a communicator. `called`: a text that ranks compare with the operation."""
    if called is None:
        return getattr(group, kind)(*arguments, async_op, **keywords)  # type: ignore[no-any-return]
    call = BUILDERS[kind](group.opened.group, *arguments)._replace(called=called)
    ready = group.prepared(call, async_op, CallOptions(**keywords))  # type: ignore[typeddict-item]
    return ready.start() if async_op else ready.run()


def _called_from_cpp() -> bool:
    """Return True if C++ code called the group: the code of a Python caller names the group's method."""
    frame: FrameType | None = sys._getframe(1)
    method = ""
    while frame is not None and frame.f_code.co_filename == __file__:
        method, frame = frame.f_code.co_name, frame.f_back
    return frame is None or _names_of(method).isdisjoint(frame.f_code.co_names)


@cache
def _names_of(method: str) -> frozenset[str]:
    """Return all names of a method, including its names in other versions of torch."""
    methods = vars(McrProcessGroup).items()
    return frozenset(name for name, value in methods if getattr(value, "__name__", "") == method)


@untraced
class _AsGloo(McrProcessGroup):
    """Process group named `gloo`, for unmodified programs, with the constructor of ProcessGroupGloo."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta | None = None,
        enable_reconfigure: bool = False,
    ) -> None:
        # Torch sets these fields after the constructor and before it uses the group.
        options = SimpleNamespace(global_ranks_in_group=[], group_name="", _timeout=timeout)
        self.options: Any = options

        def open_group() -> Communicator:  # no reference to self: a cycle would delay garbage collection
            if enable_reconfigure:
                return alone(timeout, None)
            ranks, name = options.global_ranks_in_group, options.group_name
            return communicator_of(store, rank, size, timeout, ranks, name, None)

        super().__init__(store, rank, size, open_group)

    @classmethod
    def over(cls, store: Store, communicator: Communicator) -> _AsGloo:
        """See `LivingGroup.over`."""
        group = cls(store, communicator.rank, communicator.size)
        group._open_group = lambda: communicator
        return group

    def name(self) -> str:
        """Return the name `gloo`."""
        return "gloo"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name for C++ code, which would expect a ProcessGroupGloo under the name `gloo`."""
        return NAME

    def _set_sequence_number_for_group(self) -> None:
        assert self.communicator  # opens the group: torch has set its ranks by now


def create(options: Any, pg_options: object = None) -> McrProcessGroup:
    """Create a process group of the backend `mcr`; called by torch.

    `options`: torch's `_DistributedBackendOptions`. `pg_options`: an `Options`; None uses the file named by
    MCR_CONFIG, or all available backends if it is unset.

    Raises:
        ConfigError: the configuration is wrong, or differs between ranks.
        BackendUnavailable: a requested backend is missing on some rank.
    """
    store, rank, size = options.store, options.group_rank, options.group_size
    ranks, name, timeout = options.global_ranks_in_group, options.group_id, options.timeout

    def open_group() -> Communicator:
        if getattr(options, "enable_reconfigure", False):  # from torch 2.14 on
            return alone(timeout, pg_options)
        return communicator_of(store, rank, size, timeout, ranks, name, pg_options)

    group = McrProcessGroup(store, rank, size, open_group)
    assert group.communicator  # opens the group now, on all ranks, not at its first use
    return group


def masquerade() -> None:
    """Make torch create groups of this backend for the name `gloo`, for the rest of the process."""
    distributed_c10d.ProcessGroupGloo = _AsGloo  # type: ignore[misc, assignment]


def _end_as_torch_does(function: str, method: str) -> None:
    """Make a function of torch 2.6 that ends only NCCL groups end groups of this backend, too.

    Later versions call the method of any group.
    """
    usual = getattr(distributed_c10d, function, None)
    if usual is None:
        return

    def end(group: ProcessGroup) -> None:
        if isinstance(group, McrProcessGroup):
            getattr(group, method)()
        else:
            usual(group)

    setattr(distributed_c10d, function, end)


_end_as_torch_does("_shutdown_backend", "shutdown")
_end_as_torch_does("_abort_backend", "abort")
job.leave_dropped = torch_job.leave_dropped
let_torch_shrink()
let_torch_split()
let_torch_attach()
