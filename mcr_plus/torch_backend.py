"""The backend `mcr` of torch.distributed: programs written for it use the pipeline by changing one word.

    torch.distributed.init_process_group("mcr")

A process group of Python over a `Communicator`, for `torch.distributed` takes a subclass of `ProcessGroup` as
it is, with no wrapper around it. Everything that c10d can ask of a group arrives here: from Python by all
methods below, from C++ (DDP's reducer, functional collectives) by those that its trampoline knows.

The first group joins a job of ours over torch's store; `mcr.record()`, `mcr.world()` and the others
see it. Groups made from it are groups of that job. A job that `mcr.init` has joined before is used as it is.
"""

# The stubs of ProcessGroup are overloaded, and name arguments otherwise than its callers pass them: by place.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

import hashlib
import json
import logging
import operator
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _RecordFunctionFast
from torch.distributed import distributed_c10d
from torch.utils.weak import WeakIdKeyDictionary

from mcr_plus import config as configuration
from mcr_plus import runtime
from mcr_plus.backends.msccl.catalog import kept
from mcr_plus.c10d import PrefixStore, ProcessGroup, Store
from mcr_plus.communicator import Communicator
from mcr_plus.config import Config
from mcr_plus.dispatch.board import Failure, SharedBoard
from mcr_plus.dispatch.work import JointWork, Work
from mcr_plus.errors import CommTimeout, ConfigError, McrError, NotInitialized, Unsupported
from mcr_plus.hierarchy.nodes import check_nodes
from mcr_plus.interfaces import World
from mcr_plus.launch.rendezvous import exchange, signed_part
from mcr_plus.message import REDUCE_OPS, ReduceOp, check_reducible
from mcr_plus.selection.checks import use_algorithms
from mcr_plus.torch_work import DONE, Membership, TorchWork, joint, untraced

NAME: Final = "mcr"
Options = str | Path | Mapping[str, Any]
"""What `pg_options` may be: the path of a pipeline's YAML file, or a mapping of the same form."""

# By the hash of torch's reduce op, which is its number.
_REDUCE_OPS: Final[dict[int, ReduceOp]] = {hash(getattr(dist.ReduceOp, name)): name for name in REDUCE_OPS}
_PREMUL_SUM: Final = hash(dist.ReduceOp.PREMUL_SUM)
_KEPT_COUNTS: Final = 8  # DDP starts at most four while it needs the first
_ROOT_DEVICES: Final = ("cpu", "cuda")

_log = logging.getLogger("mcr_plus")


@untraced
class McrProcessGroup(ProcessGroup):
    """A process group whose operations flow through a communicator's pipeline.

    Methods are those of `torch.distributed.ProcessGroup`, arguments in torch's order: lists of one tensor,
    or of one list of tensors, and options that name op, root and whether the caller will wait. Ranks in
    arguments are the group's. What cannot be done raises `Unsupported` (a `RuntimeError`) on every rank
    alike, before anything is sent.

    Operations may come from any thread, one at a time: their order must be the same on all ranks.

    A group that nobody has any more, and none of its handles, leaves as by `abort`.
    """

    _membership: Membership
    _finalizer: weakref.finalize[..., object] | None = None

    def __init__(self, store: Store, rank: int, size: int, open_group: Callable[[], Communicator]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stubs know another one
        self._store = store
        self._open = open_group
        self._lock = threading.RLock()
        # A message may be what a collective of another thread waits for.
        self._messages_lock = threading.RLock()
        self._owner = 0
        self._destroyed = False
        self._found: Communicator | None = None
        self._batch: list[dist.Work] | None = None
        self._counts = deque[dist.Work](maxlen=_KEPT_COUNTS)
        self._keywords: MutableMapping[torch.Tensor, Mapping[str, Any]] | None = None
        self._name = self._desc = ""

    @property
    def communicator(self) -> Communicator:
        """The group as `mcr_plus` knows it: for calls with codecs, tags and backends of their own."""
        if self._destroyed:
            raise NotInitialized(f"process group '{self._name}' has been destroyed")
        if self._found is None:
            self._found = self._open()
            self._membership = Membership(self._found)
            self._finalizer = weakref.finalize(self._membership, _job.drop, self._found, _job.runtime)
            self._finalizer.atexit = False
        return self._found

    # -- what torch asks about a group ------------------------------------------------------------

    def name(self) -> str:
        """The backend's name."""
        return NAME

    getBackendName = _get_backend_name = name  # noqa: N815 - torch's names

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """The group's name in torch's registry."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """What the group is for."""
        return self._desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815 - torch's names
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in _ROOT_DEVICES if kind == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, device: object) -> Any:  # noqa: ARG002 - one for all
        return self

    # For torch, every device's backend is this group: what it asks of a backend is answered here.
    supports_splitting = supports_coalescing = supports_time_estimate = False
    options = None

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self.communicator.flush()

    def _set_sequence_number_for_group(self) -> None:
        """Numbers are kept by the runtime."""

    def _get_sequence_number_for_group(self) -> int:
        return self.communicator.issued

    def get_group_store(self) -> Store:
        """The store that torch gave to the group."""
        return self._store

    def shutdown(self) -> None:
        """Leave the group, and the job with the last one; what is in flight is waited for."""
        communicator = self._forget()
        if communicator is not None:
            try:
                _job.leave(communicator)
            except McrError as error:  # raised, it would keep torch from forgetting the group
                _log.error("an operation that nobody waited for has failed: %s", error)

    def abort(self) -> None:
        """Leave the group, and the job with the last one, without a wait for anything or anybody."""
        communicator = self._forget()
        if communicator is not None:
            _job.leave(communicator, clean=False)

    def _forget(self) -> Communicator | None:
        """Be destroyed: what is asked of this group from now on is refused."""
        communicator, self._found, self._owner, self._destroyed = self._found, None, 0, True
        if self._finalizer is not None:
            self._finalizer.detach()
        return communicator

    def _set_default_timeout(self, timeout: timedelta) -> None:
        raise Unsupported(
            f"timeout {timeout}: operations that have run keep the deadline they were bound with; give it to "
            "init_process_group or new_group as timeout="
        )

    def all_reduces_with(self, tensor: torch.Tensor, **ours: Any) -> None:
        """Have later all_reduces of `tensor`, this very object, use keywords of `Communicator.all_reduce`.

        For callers inside torch, which cannot pass them on. The tensor is not kept alive.
        """
        if self._keywords is None:
            self._keywords = WeakIdKeyDictionary()
        self._keywords[tensor] = ours

    # -- reductions -------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, *_: object, op: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduce a tensor over all ranks, in place."""
        (tensor,) = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        # What most calls pass, without a call of its own: here microseconds count.
        factor = None
        try:
            name, async_op = _REDUCE_OPS[hash(opts.reduceOp)], opts.asyncOp
        except (AttributeError, KeyError):
            name, factor, async_op = _reduction(opts if op is None else op)
        if tensor.is_sparse:
            return self._sparse_all_reduce(tensor, name, factor, async_op)
        whole = name == "AVG" and _is_whole(tensor)
        counted = tensor.numel() == 1 and not whole
        # A helper for this, or a context of its own, would be most of what the call adds.
        with _Profiled(self._lock, "all_reduce", [tensor]) if _profiler_enabled() else self._lock:
            group: Any = self._found if get_ident() == self._owner else self._group()
            if factor is not None:
                _scale(tensor, factor)
            # Ranks without data wait for one element, in DDP's `join`, where the others do not.
            if self._keywords is None:
                work = group.all_reduce(tensor, "SUM" if whole else name, async_op or counted)
            else:
                ours = self._keywords.get(tensor, {})
                work = group.all_reduce(tensor, "SUM" if whole else name, async_op or counted, **ours)
        if work is None and not whole:
            return DONE
        if whole:
            _then(work, partial(_cut, tensor, self.size()))
        if counted:
            return self._count(work, tensor, async_op)
        return DONE if work is None else self._started(work, [tensor])

    def _count(self, work: Work | None, tensor: torch.Tensor, async_op: bool) -> dist.Work:
        """The handle of one element: DDP hands it to C++, which keeps no object of Python's alive."""
        handle = self._started(work, [tensor])
        self._counts.append(handle)
        if async_op:
            return handle
        handle.wait()
        return DONE

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Reduce tensors of any dtypes over all ranks as few operations."""
        op, factor, _ = _reduction(opts)
        works = []
        with self._call("all_reduce_coalesced", *tensors):
            group = self._group()
            for tensor in tensors if factor is not None else ():
                _scale(tensor, factor)
            for whole, places in _by_way(op, tensors):
                chosen = [tensors[place] for place in places]
                work = group.all_reduce_coalesced(chosen, "SUM" if whole else op, async_op=True)
                works.append(self._cut_then(work, chosen) if whole else work)
        return self._started(_one(works), tensors)

    def reduce(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, op: Any = None, *_: object, root: Any = None
    ) -> dist.Work:
        """Reduce a tensor over all ranks into the root's."""
        (tensor,) = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        chosen, async_op = _rooted(opts, root)
        name, factor, _async = _reduction(op if hasattr(opts, "__index__") or opts is None else opts)
        whole = name == "AVG" and _is_whole(tensor)
        is_root = self.rank() == chosen
        with self._call("reduce", tensor):
            group = self._group()
            if factor is not None and is_root:
                _scale(tensor, factor)
            source = tensor if is_root else _scaled([tensor], factor)[0]
            work = group.reduce(source, group.ranks[chosen], "SUM" if whole else name, async_op)
        if whole and is_root:
            _then(work, partial(_cut, tensor, self.size()))
        return DONE if work is None else self._started(work, [tensor])

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, *_: object, op: Any = None
    ) -> dist.Work:
        """Reduce a list of tensors, one per rank, and keep this rank's; their sizes may differ."""
        nested = isinstance(outputs, (list, tuple))
        (output,), (parts,) = (outputs, inputs) if nested else ([outputs], [inputs])
        name, factor, async_op = _reduction(opts if op is None else op)
        whole = name == "AVG" and _is_whole(output)
        parts = _scaled(parts, factor)
        with self._call("reduce_scatter", *parts):
            group = self._group()
            uneven = any(part.numel() != output.numel() for part in parts)
            call = group.reduce_scatter_v if uneven else group.reduce_scatter
            work = call(output, parts, "SUM" if whole else name, async_op)
        if whole:
            _then(work, partial(_cut, output, self.size()))
        return DONE if work is None else self._started(work, [output])

    def reduce_scatter_single(  # type: ignore[override]  # nobody names the arguments
        self, output: Any, input: Any, opts: Any = None, **ours: Any
    ) -> dist.Work:
        """Reduce a tensor of one block per rank, and keep this rank's block.

        `ours`: keywords of `Communicator.reduce_scatter_tensor`.
        """
        op, factor, async_op = _reduction(opts)
        whole = op == "AVG" and _is_whole(output)
        (source,) = _scaled([input], factor)
        with self._call("reduce_scatter_tensor", source):
            group = self._group()
            work = group.reduce_scatter_tensor(output, source, "SUM" if whole else op, async_op, **ours)
        if whole:
            _then(work, partial(_cut, output, self.size()))
        return DONE if work is None else self._started(work, [output])

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # before torch 2.13

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """`reduce_scatter_single` of several tensors as few operations."""
        op, factor, _ = _reduction(opts)
        works = []
        with self._call("reduce_scatter_coalesced", *inputs):
            group = self._group()
            sources = _scaled(inputs, factor)
            for whole, places in _by_way(op, outputs):
                chosen = [outputs[place] for place in places]
                parts = [sources[place] for place in places]
                work = group.reduce_scatter_coalesced(chosen, parts, "SUM" if whole else op, async_op=True)
                works.append(self._cut_then(work, chosen) if whole else work)
        return self._started(_one(works), outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _cut_then(self, work: Work | None, tensors: Sequence[torch.Tensor]) -> Work | None:
        for tensor in tensors:
            _then(work, partial(_cut, tensor, self.size()))
        return work

    def _sparse_all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, factor: Any, async_op: bool
    ) -> dist.Work:
        """Sum of sparse tensors: everyone's indices and values, added up where they meet."""
        if op not in ("SUM", "AVG") or factor is not None or tensor.layout != torch.sparse_coo:
            told = op if factor is None else "PREMUL_SUM"
            raise Unsupported(f"all_reduce of sparse tensors: {told}; only SUM and AVG of COO tensors")
        with self._call("all_reduce", tensor):
            group = self._group()
            mine = tensor.coalesce()
            places, values = mine.indices().t().contiguous(), mine.values().contiguous()
            counts = group.all_gather_object(len(values))
            all_places = [places.new_empty((count, *places.shape[1:])) for count in counts]
            all_values = [values.new_empty((count, *values.shape[1:])) for count in counts]
            for parts, part in ((all_places, places), (all_values, values)):
                group.all_gather_v(parts, part)
        found = torch.cat(all_values)
        if op == "AVG":
            found /= group.size
        total = torch.sparse_coo_tensor(torch.cat(all_places).t(), found, tensor.shape).coalesce()
        tensor.copy_(total)
        return self._finished([tensor]) if async_op else DONE

    # -- one to all, all to all -------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, *_: object, root: Any = None) -> dist.Work:  # type: ignore[override]
        """Copy the root's tensor to every rank."""
        (tensor,) = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        chosen, async_op = _rooted(opts, root)
        with self._call("broadcast", tensor):
            group = self._group()
            work = group.broadcast(tensor, group.ranks[chosen], async_op)
        return DONE if work is None else self._started(work, [tensor])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor on every rank, as a list; their sizes may differ."""
        nested = isinstance(inputs, (list, tuple))
        (parts,), (tensor,) = (outputs, inputs) if nested else ([outputs], [inputs])
        with self._call("all_gather", tensor):
            group = self._group()
            uneven = any(part.numel() != tensor.numel() for part in parts)
            call = group.all_gather_v if uneven else group.all_gather
            work = call(parts, tensor, getattr(opts, "asyncOp", True))
        return DONE if work is None else self._started(work, [parts])

    def all_gather_single(self, output: Any, input: Any, opts: Any = None, **ours: Any) -> dist.Work:
        """Gather every rank's tensor on every rank, as one tensor.

        `ours`: keywords of `Communicator.all_gather_into_tensor`.
        """
        with self._call("all_gather_into_tensor", input):
            async_op = getattr(opts, "asyncOp", True)
            work = self._group().all_gather_into_tensor(output, input, async_op, **ours)
        return DONE if work is None else self._started(work, [output])

    _allgather_base = all_gather_single  # before torch 2.13

    def all_gather_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any = None,  # noqa: ARG002 - torch's signature
    ) -> dist.Work:
        """`all_gather_single` of several tensors as few operations."""
        with self._call("all_gather_coalesced", *inputs):
            works = self._group().all_gather_coalesced(outputs, inputs, async_op=True)
        return self._started(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """`allgather` of several tensors: `output_lists[rank][index]`."""
        calls = zip(zip(*output_lists, strict=True), inputs, strict=True)
        works = [self.allgather([list(parts)], [tensor], opts) for parts, tensor in calls]
        return joint(works, [part for parts in output_lists for part in parts])

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *_: object, root: Any = None) -> dist.Work:  # type: ignore[override]
        """Gather every rank's tensor on the root, as a list."""
        nested = isinstance(inputs, (list, tuple))
        (tensor,), lists = (inputs, outputs) if nested else ([inputs], [outputs])
        chosen, async_op = _rooted(opts, root)
        with self._call("gather", tensor):
            group = self._group()
            parts = lists[0] if self.rank() == chosen else None
            work = group.gather(tensor, parts, group.ranks[chosen], async_op)
        return DONE if work is None else self._started(work, outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: object, root: Any = None) -> dist.Work:  # type: ignore[override]
        """Give every rank its tensor of the root's list."""
        nested = isinstance(outputs, (list, tuple))
        (tensor,), lists = (outputs, inputs) if nested else ([outputs], [inputs])
        chosen, async_op = _rooted(opts, root)
        with self._call("scatter", tensor):
            group = self._group()
            parts = lists[0] if self.rank() == chosen else None
            work = group.scatter(tensor, parts, group.ranks[chosen], async_op)
        return DONE if work is None else self._started(work, [tensor])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Send a tensor to every rank, and receive one from each."""
        with self._call("all_to_all", *inputs):
            work = self._group().all_to_all(outputs, inputs, getattr(opts, "asyncOp", True))
        return DONE if work is None else self._started(work, outputs)

    def all_to_all_single(
        self, output: Any, input: Any, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> dist.Work:
        """`alltoall` of blocks of one tensor, of equal sizes unless rows per rank are given."""
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
            group = self.communicator  # messages have no order, so any thread may
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
        """Start to receive a tensor from whichever rank of the group sends first."""
        (tensor,) = tensors
        with self._call("recv", tensor):
            work = self.communicator.irecv(tensor, None, tag)
        return self._started(work, tensors)

    # -- barriers ---------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        with self._call("barrier"):
            work = self._group().barrier(getattr(opts, "asyncOp", True))
        return DONE if work is None else self._started(work, [])

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: ARG002 - all that are missing are named in any case
    ) -> None:
        """Wait for all ranks; the error names those that have not come within `timeout`, in torch's words."""
        with self._call("monitored_barrier"):
            work = self._group().barrier(async_op=True)
        assert work is not None
        try:
            work.wait(timeout)
        except CommTimeout as error:
            missing = ", ".join(map(str, error.missing))
            raise CommTimeout(
                f"Rank {self.rank()} timed out in monitoredBarrier: "
                f"Rank{'s' * (len(error.missing) > 1)} {missing} failed to pass monitoredBarrier; {error}",
                error.missing,
            ) from error

    # -- coalescing -------------------------------------------------------------------------------

    def _start_coalescing(self, device: object) -> None:  # noqa: ARG002 - torch's signature
        self._batch = []

    def _end_coalescing(self, device: object) -> dist.Work:  # noqa: ARG002 - torch's signature
        works, self._batch = self._batch or [], None
        return joint(works, [])

    # -- inside -----------------------------------------------------------------------------------

    def _call(self, operation: str, *tensors: torch.Tensor) -> AbstractContextManager[object]:
        """One call at a time; a profiler that runs sees it under its name, with the shapes of its inputs."""
        lock = self._messages_lock if operation in ("send", "recv") else self._lock
        return _Profiled(lock, operation, tensors) if _profiler_enabled() else lock

    def _group(self) -> Communicator:
        """The communicator, as the calling thread may use it."""
        group = self._found
        if group is None:
            group = self.communicator
        caller = threading.get_ident()
        # A thread of autograd's runs while its caller waits, and hands nothing over.
        if caller != self._owner and not isinstance(threading.current_thread(), threading._DummyThread):
            group.take_over()
            self._owner = caller
        return group

    def _started(self, work: Work | None, result: Any) -> dist.Work:
        handle: dist.Work = DONE if work is None else TorchWork(work, result, self._membership)
        if self._batch is not None:
            self._batch.append(handle)
        return handle

    def _finished(self, result: Any) -> dist.Work:
        """The handle of what is done already."""
        return self._started(JointWork([], "done", nbytes=0), result)


class _Profiled:
    """A lock, and a range for torch's profiler."""

    def __init__(self, lock: threading.RLock, operation: str, tensors: Sequence[torch.Tensor]) -> None:
        self._lock = lock
        self._range = _RecordFunctionFast(f"{NAME}:{operation}", list(tensors))

    def __enter__(self) -> None:
        self._lock.acquire()
        self._range.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._range.__exit__(*exception)
        self._lock.release()


@untraced
class _AsGloo(McrProcessGroup):
    """The same under the name `gloo`, for programs that know no other; torch makes it as it makes gloo's."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta | None = None) -> None:
        # What torch sets after it has made the group, and before it uses it.
        options = SimpleNamespace(global_ranks_in_group=[], group_name="", _timeout=timeout)
        self.options: Any = options

        def open_group() -> Communicator:  # without this group itself, which would then be collected late
            ranks, name = options.global_ranks_in_group, options.group_name
            return _communicator(store, rank, size, timeout, ranks, name, None)

        super().__init__(store, rank, size, open_group)

    def name(self) -> str:
        """The name it goes by."""
        return "gloo"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """What C++ is told: for `gloo` it would look for one of gloo's own."""
        return NAME

    def _set_sequence_number_for_group(self) -> None:
        assert self.communicator  # now torch has said which ranks it has


def create(options: Any, pg_options: object = None) -> McrProcessGroup:
    """Make a process group: what torch calls for the backend `mcr`.

    `options`: torch's `_DistributedBackendOptions`. `pg_options`: an `Options`, None for the file that
    MCR_CONFIG names, or without it everything that is found.

    Raises:
        ConfigError: the configuration is wrong, or differs between ranks.
        BackendUnavailable: a backend that was asked for is missing on some rank.
    """
    store, rank, size = options.store, options.group_rank, options.group_size
    ranks, name, timeout = options.global_ranks_in_group, options.group_id, options.timeout
    group = McrProcessGroup(
        store, rank, size, lambda: _communicator(store, rank, size, timeout, ranks, name, pg_options)
    )
    assert group.communicator  # on all ranks now, and not at the first use
    return group


def masquerade() -> None:
    """Have torch make our groups where a program asks for `gloo`; for the whole process, until its end."""
    distributed_c10d.ProcessGroupGloo = _AsGloo  # type: ignore[misc, assignment]


# -- jobs -------------------------------------------------------------------------------------------


class _Job:
    """The job that torch's groups belong to: its ranks in torch's numbering, and the groups that live."""

    def __init__(self) -> None:
        self.runtime: runtime.Runtime | None = None
        self.ranks: tuple[int, ...] = ()
        self.names = Counter[str]()
        self.groups = set[Communicator]()
        self.joined = False
        self.dropped = deque[Communicator]()

    def enter(self, running: runtime.Runtime, ranks: tuple[int, ...], *, joined: bool) -> None:
        """`joined`: by torch's first group, so that it ends with the last one."""
        self.runtime, self.ranks, self.joined = running, ranks, joined
        self.names, self.groups = Counter(), set()

    def drop(self, communicator: Communicator, running: runtime.Runtime | None) -> None:
        """Note that nobody has a group of the job `running` any more.

        A finalizer, which may interrupt anything in any thread: so it takes no lock and asks no store. Peers
        that share memory see it at once, others when `leave_dropped` is called.
        """
        self.dropped.append(communicator)
        if running is None or running.closed:  # also in a forked child: the group is its parent's
            return
        for each in communicator.opened.all:
            board = each.state.board
            if isinstance(board, SharedBoard) and not each.state.closed:
                each.state.publish()
                board.mark_failed(Failure(0, "its process group was dropped without shutdown"))

    def leave_dropped(self) -> None:
        """Leave the groups that nobody has any more, without a wait for anything or anybody."""
        while self.dropped:
            self.leave(self.dropped.popleft(), clean=False)

    def leave(self, communicator: Communicator, *, clean: bool = True) -> None:
        """Close a group, and the job with the last one if torch's first group has joined it.

        The first one is the job's own: while others live it is only waited for.
        """
        self.leave_dropped()
        self.groups.discard(communicator)
        running = self.runtime
        if running is None or running.closed or communicator not in running.communicators:
            return
        if self.joined and not self.groups:
            runtime.leave(running.communicator, clean=clean)
        elif communicator is not running.communicator:
            runtime.leave(communicator, clean=clean)
        elif clean:
            running.settle(communicator)
        else:
            communicator.state.board.mark_failed(Failure(0, "it left the group after an error"))


_job = _Job()
runtime.job.leave_dropped = _job.leave_dropped


def _communicator(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta | None,
    ranks: Sequence[int],
    name: str,
    options: object,
) -> Communicator:
    """The communicator of a group of torch's: of a new job, or of the one that there is."""
    _job.leave_dropped()
    seconds = (timeout or dist.default_pg_timeout).total_seconds()
    members = tuple(ranks) or tuple(range(size))
    # The store may be older than this group, and serve groups of other ranks.
    who = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
    ours = signed_part(PrefixStore(f"mcr_plus/{who}", store), rank, size, seconds)
    inside = _ranks_in_job(members, rank, ours, seconds)
    running = runtime.job.runtime
    if inside is None or running is None:
        loaded = runtime.readable(partial(_load, options))
        running = runtime.join(loaded, ours, rank, size, seconds)
        _job.enter(running, members, joined=True)
        found = running.communicator
    else:
        _job.names[name] += 1
        unique = f"torch/{name}/{_job.names[name]}"  # groups of one name may follow each other
        config = running.loaded.with_timeout(seconds)
        if options is not None:
            hosts = tuple(running.world.hosts[each] for each in inside)
            world = World(rank, size, hosts, seconds, ours, running.world.libraries)
            config = _checked(options, running, world).with_timeout(seconds)
        found = running.open_group(unique, inside, config)
    _job.groups.add(found)
    return found


def _ranks_in_job(
    members: tuple[int, ...], rank: int, store: Store, timeout: float
) -> tuple[int, ...] | None:
    """The ranks of a group in the job that there is, or None if there is none; collective over the group.

    Raises `Unsupported` on all of them if only some are in a job: they would wait for each other.
    """
    running, mine = runtime.job.runtime, None
    if running is not None and not running.closed:
        if _job.runtime is not running:  # mcr.init has joined it
            _job.enter(running, tuple(range(running.world.size)), joined=False)
        mine = [_job.ranks, running.world.rank]
    told = exchange(store, rank, len(members), "job", json.dumps(mine), timeout)
    jobs = dict(zip(members, map(json.loads, told), strict=True))
    there = [job for job in jobs.values() if job is not None]
    if not there:
        return None
    known, _ = there[0]
    strangers = [member for member in members if member not in known]
    if strangers:
        raise Unsupported(
            f"group {list(members)}: ranks {strangers} are not in the first group of backend {NAME} "
            f"({known}); name {NAME} in init_process_group"
        )
    others = [member for member, job in jobs.items() if job is None or job[0] != known]
    if others:
        raise Unsupported(
            f"group {list(members)}: ranks {others} have left the job of ranks {known}, which the others are "
            "in; destroy their groups first"
        )
    for member, (_, in_job) in jobs.items():
        if known.index(member) != in_job:
            raise Unsupported(
                f"rank {member} of torch.distributed is rank {in_job} of the job that mcr.init has joined; "
                "start both the same way"
            )
    return tuple(known.index(member) for member in members)


def _load(options: Any) -> Config:
    """Read what `pg_options` may be."""
    if options is not None and not isinstance(options, (str, Path, Mapping)):
        raise ConfigError(f"pg_options: expected the path of a YAML file or a mapping, got {options!r}")
    return configuration.load(options)


def _checked(options: Any, running: runtime.Runtime, world: World) -> Config:
    """The configuration of one group in a job that runs, equal on its ranks. `world`: of the group."""

    def load() -> Config:
        config = _load(options)
        _check_inside(config, running)
        return config

    config = runtime.compare_configs(runtime.readable(load), world)
    runtime.check_tables(config, world)
    return config


def _check_inside(config: Config, running: runtime.Runtime) -> None:
    """Raise `ConfigError` for what belongs to the job and is not the same there."""
    known, elsewhere = running.backend_names, "in the configuration of init_process_group too"
    foreign = [name for name in config.backends or () if name not in known]
    if foreign:
        raise ConfigError(
            f"{config.name}: backend {foreign[0]} is not part of this job ({', '.join(known)}); name it "
            f"{elsewhere}"
        )
    mine, theirs = config.options("dispatch"), running.config.options("dispatch")
    assert mine is not None  # a pipeline without it is refused
    for name in ("progress", "wait"):
        wanted, there = getattr(mine, name), getattr(theirs, name)
        if name in mine.model_fields_set and wanted != there:
            raise ConfigError(
                f"{config.name}: dispatch.{name}: {wanted} is for this group alone, but all groups of a job "
                f"wait alike and this job has {there}; write it {elsewhere}"
            )
    digests = {digest for ref in running.config.algorithms for digest in ref.digests()}
    if any(digest not in digests for ref in config.algorithms for digest in ref.digests()):
        raise ConfigError(f"{config.name}: algorithms: some are not part of this job; name them {elsewhere}")
    with kept():
        use_algorithms(replace(config, algorithms=running.config.algorithms))
    check_nodes(config, running.world.size)


# -- arguments --------------------------------------------------------------------------------------


def _reduction(opts: Any) -> tuple[ReduceOp, Any, bool]:
    """Our name of the reduce op, the factor of PREMUL_SUM, and whether the caller goes on meanwhile."""
    try:
        op, async_op = opts.reduceOp, opts.asyncOp
    except AttributeError:  # torch's other ways to call have no options, but the op alone or nothing
        if opts is None:
            return "SUM", None, True
        op, async_op = getattr(opts, "reduceOp", opts), getattr(opts, "asyncOp", True)
    number = hash(op)
    name = _REDUCE_OPS.get(number)
    if name is not None:
        return name, None, async_op
    if number == _PREMUL_SUM:
        return "SUM", op.__getstate__()[1], async_op
    raise Unsupported(f"reduce op number {number}; known: {', '.join(_REDUCE_OPS.values())}, PREMUL_SUM")


def _rooted(opts: Any, root: Any) -> tuple[int, bool]:
    """The root's rank in the group, and whether the caller goes on meanwhile.

    Of torch's two ways to call these methods, one has options and the other the root alone.
    """
    chosen = opts if root is None else root
    if chosen is None or hasattr(chosen, "__index__"):
        return operator.index(chosen or 0), True
    return chosen.rootRank, getattr(chosen, "asyncOp", True)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether it holds integers: a mean of them is a sum that is cut, as NCCL does; Lightning asks for it."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _by_way(op: ReduceOp, tensors: Sequence[torch.Tensor]) -> list[tuple[bool, list[int]]]:
    """Whether it is by a sum that is cut, and which of the tensors: what can travel together."""
    ways = [op == "AVG" and _is_whole(tensor) for tensor in tensors]
    found = sorted(set(ways)) or [False]
    return [(way, [place for place, each in enumerate(ways) if each == way]) for way in found]


def _one(works: Sequence[Work | None]) -> Work | None:
    """One handle for all of them."""
    return (
        works[0] if len(works) == 1 else JointWork([w for w in works if w is not None], "coalesced", nbytes=0)
    )


def _then(work: Work | None, function: Callable[[], None]) -> None:
    """Run it when the operation is done, as it is if there is no handle."""
    if work is None:
        function()
    else:
        work.then(function)


def _cut(total: torch.Tensor, number: int) -> None:
    total.div_(number, rounding_mode="trunc")


def _scale(tensor: torch.Tensor, factor: Any) -> None:
    """Multiply in place what is going to be summed, unless that would be refused."""
    check_reducible("SUM", tensor.dtype)
    tensor.detach().mul_(factor)


def _scaled(tensors: Sequence[torch.Tensor], factor: Any) -> list[torch.Tensor]:
    return list(tensors) if factor is None else [tensor.detach() * factor for tensor in tensors]
