"""Averages gradients over ranks while the backward pass still runs.

Gradients live in flat buckets, and `param.grad` is a view. The all_reduce of a bucket starts when its last
gradient is ready, in the same order of buckets on all ranks, and the end of the backward pass waits for all
of them. So `param.grad` is the mean over ranks when `backward()` returns.

The first pass uses buckets in reverse order of the parameters. The order in which the gradients of rank 0
became ready is then broadcast, and determines the buckets from then on (as in DDP; Li et al., VLDB 2020).
With `fuse: {plan: exact}` rank 0 also measures when they become ready, and a few passes later it plans the
buckets with the earliest end of the last all_reduce.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import torch
from torch.autograd import Variable

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.compression.policy import largest_alignment
from mcr_plus.core.kinds import AVG, MAX, SUM, ReduceOp
from mcr_plus.core.units import format_size
from mcr_plus.core.work import Work
from mcr_plus.errors import InvalidArgument, McrError, Unsupported
from mcr_plus.fusion.bucket import Bucket, Cost, Entry, by_size, packed
from mcr_plus.fusion.options import FuseOptions
from mcr_plus.training.bucket_plan import all_reduce_cost, earliest
from mcr_plus.training.policy import GradientPolicy, key_of, policy_for

_log = logging.getLogger("mcr_plus")
TAG: Final = "gradients"
_MEASURED_PASS: Final = 3  # `plan: exact` uses the times of this pass; earlier ones allocate and warm up
_ALIGNMENT: Final = 64  # bytes: a cache line, and the widest vector register


@dataclass(eq=False)
class _Slot:
    """A parameter and its place in a bucket."""

    index: int
    name: str
    param: torch.nn.Parameter
    policy: GradientPolicy
    flat: _Flat | None = None
    view: torch.Tensor | None = None
    ready: bool = False


@dataclass(eq=False)
class _Flat:
    """The memory of a bucket, and the state of its operation."""

    values: torch.Tensor
    slots: list[_Slot]
    policy: GradientPolicy
    parts: tuple[tuple[int, ...], ...]  # the members' shapes, and the gaps between them
    gaps: list[torch.Tensor]
    missing: int = 0
    work: Work | None = None

    def __post_init__(self) -> None:
        self.missing = len(self.slots)
        self.key = key_of([slot.name for slot in self.slots])


# The reducer of a parameter, by its identity: an attribute would be part of copies and pickles.
_reducers: dict[int, weakref.ref[Reducer]] = {}


def _reducer_of(param: torch.nn.Parameter) -> Reducer | None:
    reducer = _reducers.get(id(param), lambda: None)()
    is_current = reducer is not None and any(slot.param is param for slot in reducer._slots)
    return reducer if is_current else None


class Reducer:
    """The gradients of some parameters, averaged over the ranks of `comm` in every backward pass.

    All ranks pass the same parameters in the same order. After a backward pass that raised with some
    gradients ready, `recover` sends the remaining buckets and a flag of the failure, so that the peers do not
    wait for this rank and raise.

    Operations are issued in a group of their own: a rank without a gradient of some parameter sends its
    bucket late, and that must not change the order of the program's operations.
    """

    def __init__(self, params: Sequence[tuple[str, torch.nn.Parameter]], comm: Communicator) -> None:
        for param in {id(param): param for _, param in params}.values():
            if (before := _reducer_of(param)) is not None:
                before.detach()
        self.comm = comm = comm.branch()
        self.syncing = True
        config = comm.config
        self._alignment = largest_alignment(config)  # in elements
        self._slots = [
            _Slot(
                index,
                name,
                param,
                policy_for(config, name, param.shape, param.nbytes, param.dtype, TAG, comm.size),
            )
            for index, (name, param) in enumerate(params)
        ]
        self._order: list[int] = []
        self._times: list[float] = []  # when each of `_order` became ready, in seconds
        self._arranged = False
        self._final = False  # whether the buckets are final
        self._whole_passes = 0
        self._task: int | None = None  # the autograd graph task whose end we wait for
        self._flats: list[_Flat] = []
        self._next = 0
        # The outcome of a pass, reduced to the maximum over ranks at its end: 1 + a rank whose pass failed (0
        # if none did), whether all gradients of rank 0 became ready in it, and for every parameter whether
        # any rank has a gradient.
        device = params[0][1].device if params else None
        self._outcome = torch.zeros(2 + len(params), dtype=torch.int32, device=device)
        fuse = comm.stage_options("fuse")
        self._limits = fuse if isinstance(fuse, FuseOptions) else FuseOptions()
        self._costs = self._expected() if self._limits.plan == "exact" and comm.size > 1 else None
        self._arrange(self._by_size(range(len(self._slots) - 1, -1, -1)))
        self._hooks = [
            slot.param.register_post_accumulate_grad_hook(self._hook(slot.index))
            for slot in self._slots
            if comm.size > 1
        ]
        for gone in [key for key, found in _reducers.items() if found() is None]:
            del _reducers[gone]
        _reducers.update({id(slot.param): weakref.ref(self) for slot in self._slots})

    @property
    def active(self) -> bool:
        """Whether a backward pass is in progress."""
        return self._task is not None

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters of each bucket, in the order in which they are sent."""
        return [[slot.name for slot in flat.slots] for flat in self._flats]

    @property
    def all_used(self) -> bool:
        """Whether some rank had a gradient of every parameter in the last pass."""
        return bool(self._outcome[2:].all())

    def detach(self) -> None:
        """Remove the hooks from the parameters.

        This communicates nothing, and a later reducer gets a group of its own: garbage collection decides on
        each rank by itself whether a reducer still exists when it is replaced.
        """
        for hook in self._hooks:
            hook.remove()
        for slot in self._slots:
            _reducers.pop(id(slot.param), None)
        self._hooks, self._slots, self._task = [], [], None

    def recover(self) -> None:
        """Complete a backward pass that raised, so that the peers do not wait for it.

        Called before every forward pass, by the thread that trains: it becomes the owner of the group.
        """
        self.comm.take_over()
        if self.active:
            self._complete(failed=True)

    # -- layout -----------------------------------------------------------------------------------

    def _entry(self, index: int, ready: float = 0.0) -> Entry:
        param = self._slots[index].param
        like = (param.dtype, param.device, self._slots[index].policy)
        return Entry(index, param.numel() * param.element_size(), like, ready)

    def _by_size(self, order: Sequence[int] | range) -> list[Bucket]:
        limits, entries = self._limits, [self._entry(index) for index in order]
        return by_size(entries, limit=limits.bucket, first_limit=limits.first_bucket, alignment=self._gap)

    @property
    def _gap(self) -> int:
        """Alignment of gradients in a bucket, in bytes, so that no block of a codec holds two gradients."""
        itemsize = max((slot.param.element_size() for slot in self._slots), default=1)
        return math.lcm(_ALIGNMENT, self._alignment * itemsize)

    def _arrange(self, plan: Sequence[Bucket]) -> None:
        """Allocate these buckets, and move existing gradients into them."""
        self._flats = [self._flat(bucket) for bucket in plan]

    def _expected(self) -> dict[Hashable, Cost]:
        """Return the cost of an all_reduce for each set of gradients that may share a bucket."""
        total: dict[Any, int] = {}
        for slot in self._slots:
            entry = self._entry(slot.index)
            total[entry.like] = total.get(entry.like, 0) + entry.nbytes
        return {
            (dtype, device, policy): all_reduce_cost(self.comm, dtype, nbytes, device.type, TAG)
            for (dtype, device, policy), nbytes in total.items()
        }

    def _flat(self, bucket: Bucket) -> _Flat:
        slots = [self._slots[index] for index in bucket.members]
        first = slots[0].param
        numel = -(-bucket.nbytes // first.element_size())
        begins = [offset // first.element_size() for offset in bucket.offsets]
        values = torch.zeros(numel, dtype=first.dtype, device=first.device)
        ends = [begin + slot.param.numel() for slot, begin in zip(slots, begins, strict=True)]
        gaps = [values[end:begin] for end, begin in zip(ends, begins[1:], strict=False) if begin > end]
        flat = _Flat(values, slots, slots[0].policy, _parts(slots, begins), gaps)
        for slot, begin in zip(slots, begins, strict=True):
            slot.flat = flat
            slot.view = _view(flat.values, begin, slot.param)
            if slot.param.grad is not None:
                slot.view.copy_(slot.param.grad)
                slot.param.grad = slot.view
        return flat

    # -- one backward pass ------------------------------------------------------------------------

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # The parameter holds its hook in C++, where the garbage collector cannot see a cycle through it.
        reducer = weakref.ref(self)

        def ready(_: torch.Tensor) -> None:
            me = reducer()
            if me is not None and me.syncing:
                me._is_ready(me._slots[index])

        return ready

    def _is_ready(self, slot: _Slot) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self._end)
        if slot.ready:
            raise McrError(
                f"the gradient of '{slot.name}' was accumulated again after it had been handed to the "
                "pipeline: a parameter that reentrant checkpoints share (use_reentrant=False helps), or "
                "a backward pass that raised and was repeated without a forward pass"
            )
        _move_into_bucket(slot)
        slot.ready = True
        self._order.append(slot.index)
        self._times.append(perf_counter())
        flat = slot.flat
        assert flat is not None
        flat.missing -= 1
        if flat.missing == 0:
            self._send_complete()
        else:
            self.comm.progress()

    def _send_complete(self) -> None:
        """Send the buckets that are complete and whose predecessors have been sent."""
        while self._next < len(self._flats) and self._flats[self._next].missing == 0:
            self._send(self._flats[self._next])
            self._next += 1

    def _send(self, flat: _Flat) -> None:
        op: ReduceOp = AVG
        if flat.values.dtype is torch.float16:  # its sum may be out of range where the mean is not
            flat.values.div_(self.comm.size)
            op = SUM
        policy = flat.policy
        encoded = policy.encoded and (self._final or not policy.keeps)
        if policy.encoded:
            for gap in flat.gaps:  # decoded values there would count in a block of the codec
                gap.zero_()
        flat.work = self.comm.send_bucket(
            flat.values,
            op,
            members=len(flat.slots),
            backend=policy.backend,
            compress=policy.options if encoded or not policy.encoded else False,
            tag=TAG,
            parts=flat.parts if encoded else None,
            key=flat.key if encoded else None,
        )

    def _end(self) -> None:
        """Callback of autograd at the end of a backward pass."""
        if self.active:
            self._complete(failed=False)

    def _complete(self, *, failed: bool) -> None:
        """Send the remaining buckets, wait for all of them, and assign the means."""
        for slot in self._slots:
            if not slot.ready:
                _move_into_bucket(slot)
        used = [slot.param.grad is not None for slot in self._slots]
        whole = self.comm.rank == 0 and len(self._order) == sum(used)
        self._outcome.copy_(torch.tensor([1 + self.comm.rank if failed else 0, whole, *used]))
        for flat in self._flats[self._next :]:
            self._send(flat)
        outcome = self.comm.send_bucket(self._outcome, MAX, members=1, tag=TAG)
        try:
            for work in [*(flat.work for flat in self._flats), outcome]:
                assert work is not None
                work.wait()
        finally:
            self._reset()
        self._assign(raised=failed)

    def _reset(self) -> None:
        self._task, self._next = None, 0
        for flat in self._flats:
            flat.missing, flat.work = len(flat.slots), None
        for slot in self._slots:
            slot.ready = False

    def _assign(self, *, raised: bool) -> None:
        """Assign the mean to every parameter of which some rank has a gradient; raises if a pass failed."""
        order, self._order = self._order, []
        times, self._times = self._times, []
        if raised:
            return  # the gradients stay as they are: the program starts another pass
        failed, whole, *used = self._outcome.tolist()
        for slot, some in zip(self._slots, used, strict=True):
            if some:
                slot.param.grad = slot.view
        if not failed:
            self._replan(order, times, bool(whole))
        if failed:
            raise McrError(
                f"the backward pass of rank {self.comm.ranks[failed - 1]} failed; the gradients of this pass "
                "are not complete on any rank"
            )

    def _replan(self, seen: list[int], times: list[float], whole: bool) -> None:
        """Plan the buckets of later passes by the order and the times on rank 0 in this one.

        `seen`: indices of parameters in the order in which their gradients became ready, at `times`
        (seconds). `whole`: all gradients of rank 0 became ready in this pass; with reentrant checkpoints it
        may be a part.
        """
        self._whole_passes += whole
        first = not self._arranged
        exactly = self._costs is not None and whole and self._whole_passes == _MEASURED_PASS
        if not (first or exactly):
            return
        self._arranged = True
        rest = [slot.index for slot in reversed(self._slots) if slot.index not in seen]
        plan = self._by_size([*seen, *rest])
        if exactly and self._costs is not None:
            ready = [time - times[0] for time in times]
            ready += ready[-1:] * len(rest)
            entries = [self._entry(index, when) for index, when in zip([*seen, *rest], ready, strict=True)]
            plan = earliest(entries, self._costs, self._gap)
        members = self.comm.broadcast_object([bucket.members for bucket in plan], self.comm.ranks[0])
        plan = [packed([self._entry(index) for index in each], self._gap) for each in members]
        self._arrange(plan)
        self._final = exactly or self._costs is None
        _log.info(
            "gradients: %d buckets of %s, by %s",
            len(plan),
            ", ".join(format_size(bucket.nbytes) for bucket in plan[:8]) + ", …" * (len(plan) > 8),
            "the table's costs and ready times" if exactly else "size, in the order of the first pass",
        )


def _move_into_bucket(slot: _Slot) -> None:
    """Copy the parameter's gradient into the bucket unless it is there; zeros without a gradient."""
    param, view = slot.param, slot.view
    assert view is not None
    grad = param.grad
    if grad is None:
        view.zero_()
    elif grad is not view:
        if grad.is_sparse:
            raise Unsupported(f"the gradient of '{slot.name}' is sparse; build the layer with sparse=False")
        if grad.requires_grad:
            raise Unsupported(f"the gradient of '{slot.name}' has a graph (create_graph=True)")
        if grad.shape != view.shape or grad.dtype != view.dtype:
            raise InvalidArgument(
                f"the gradient of '{slot.name}' is {list(grad.shape)} of {grad.dtype}; "
                f"expected {list(view.shape)} of {view.dtype}"
            )
        view.copy_(grad)
        param.grad = view


def _parts(slots: Sequence[_Slot], begins: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of gradients and gaps in a bucket, in order; a gap is one-dimensional."""
    parts: list[tuple[int, ...]] = []
    end = 0
    for slot, begin in zip(slots, begins, strict=True):
        if begin > end:
            parts.append((begin - end,))
        parts.append(tuple(slot.param.shape))
        end = begin + slot.param.numel()
    return tuple(parts)


def _view(flat: torch.Tensor, offset: int, param: torch.Tensor) -> torch.Tensor:
    """Return a view of the bucket with the parameter's shape, and with its strides if they are dense."""
    part = flat[offset : offset + param.numel()]
    if _is_dense(param):
        return part.as_strided(param.shape, param.stride(), part.storage_offset())
    return part.view(param.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a range of memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
