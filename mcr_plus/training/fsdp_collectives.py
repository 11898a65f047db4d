"""Collectives that `mcr.fsdp` installs in FSDP2: all_gather of parameters, reduce_scatter of gradients.

FSDP2 relies on streams for overlap, and calls both synchronously. The CPU has none: both are asynchronous:

- FSDP2 waits for the handle of a gather, if there is one, when a module uses the parameters. So the gather of
  prefetched parameters overlaps with the previous module's computation.
- FSDP2 has no handle for a reduction, but reads a gradient only after the backward pass, with the
  exceptions in `_may_be_late`. A reduction is completed after the next one has been started, and the last
  one at the end of the pass (decision 43).
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from mcr_plus.core.c10d import AllgatherOptions, ReduceScatterOptions
from mcr_plus.errors import NotInitialized, Unsupported
from mcr_plus.torch_backend.process_group import McrProcessGroup

_NO_BACKWARD: Final = -1
_NAMED: Final = 4  # maximum number of names of parameters in an error
_REDUCED: Final = "fsdp_params"  # parameter of FSDP2's foreach_reduce: the parameters that have gradients


class _Collective:
    """Base class of both collectives, with the module, memory and options of each."""

    def __init__(self, module: nn.Module, compress: Any, tag: str) -> None:
        self._module = weakref.ref(module)  # weak: the module refers to this object
        self._options: dict[str, Any] = {"compress": compress, "tag": tag}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate an input or output."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Collective):
    """All_gather of a module's parameters."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Start the gather; returns a handle if the call is asynchronous, as all calls on the CPU are."""
        options = AllgatherOptions()
        options.asyncOp = async_op or input_tensor.is_cpu
        work = checked_group(group).all_gather_single(output_tensor, input_tensor, options, **self._options)
        if input_tensor.is_cpu and (shards := _param_groups(self._module())):
            return _Gathering(work, group, shards)
        if options.asyncOp and not async_op:
            work.wait()
        return work if async_op else None


class _Gathering(dist.Work):
    """Handle of a gather.

    FSDP2 keeps the handle until it has used the result. After a failure, `wait` removes the handle from
    FSDP2, so that the next pass starts another gather. `wait` also raises if the group no longer exists.
    """

    def __init__(self, work: dist.Work, group: McrProcessGroup, shards: Sequence[Any]) -> None:
        """Keep `shards`, the parameter groups of FSDP2 that may hold this handle."""
        super().__init__()
        self._work, self._group, self._shards = work, group, shards

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the parameters; raises the errors of `checked_group` and of the operation."""
        checked_group(self._group)
        try:
            return self._work.wait() if timeout is None else self._work.wait(timeout)
        finally:
            if self._work.exception() is not None:
                for shard in self._shards:
                    kept = shard._all_gather_result
                    if kept is not None and kept.all_gather_work is self:
                        shard._all_gather_result = None

    def is_completed(self) -> bool:
        """Return whether the gather has succeeded or failed."""
        return self._work.is_completed()


class BackwardPass:
    """The pending reduction of a model, completed by the end of the backward pass at the latest."""

    def __init__(self, tell: Callable[[list[nn.Parameter]], None] | None = None) -> None:
        """`tell`: called with parameters when their gradients are complete, on the CPU."""
        self.tell = tell
        self._pending: tuple[dist.Work, Sequence[Any]] | None = None
        self._task = _NO_BACKWARD

    def started(self, work: dist.Work, reduced: Sequence[Any]) -> None:
        """Complete the previous reduction, so that memory for one reduction at most is held while computing.

        `reduced`: FSDP2's parameters whose gradients are reduced. Raises the error of the previous reduction.
        """
        before, self._pending = self._pending, (work, reduced)
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self.end)
        self._complete(before)

    def end(self) -> None:
        """Complete the last reduction; raises its error."""
        pending, self._pending, self._task = self._pending, None, _NO_BACKWARD
        self._complete(pending)

    def _complete(self, pending: tuple[dist.Work, Sequence[Any]] | None) -> None:
        if pending is not None:
            work, reduced = pending
            work.wait()
            if self.tell is not None:
                self.tell([param.sharded_param for param in reduced])


class ReduceScatter(_Collective):
    """Reduce_scatter of a module's gradients."""

    _between: McrProcessGroup | None = None

    def __init__(self, module: nn.Module, compress: Any, tag: str, backward: BackwardPass) -> None:
        super().__init__(module, compress, tag)
        self._backward = backward

    def set_replica_options(self, group: McrProcessGroup, compress: Any, tag: str) -> None:
        """Set the options of the all_reduce between replicas."""
        self._between, self._later = group, {"compress": compress, "tag": tag}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate an input or output, see `_Collective`.

        FSDP2 has no hook before the all_reduce between replicas (its hook runs afterwards), but it allocates
        the tensor of that all_reduce here.
        """
        values = super().allocate(size, dtype=dtype, device=device)
        if self._between is not None:
            called = self._subset(sys._getframe(1).f_locals.get(_REDUCED, ()))
            self._between.all_reduces_with(values, called=called, **self._later)
        return values

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Start the reduction; it completes now or later in the backward pass."""
        options = ReduceScatterOptions()
        options.reduceOp = op
        # Also asynchronous if completed at once: hooks and earlier gradients may exist on one rank only.
        options.asyncOp = async_op or output_tensor.is_cpu
        reduced = sys._getframe(1).f_locals.get(_REDUCED, ())
        work = checked_group(group).reduce_scatter_single(
            output_tensor, input_tensor, options, called=self._subset(reduced), **self._options
        )
        if async_op:
            return work
        if output_tensor.is_cpu and self._may_be_late(output_tensor, op):
            self._backward.started(work, reduced)
        elif options.asyncOp:
            work.wait()
            if self._backward.tell is not None and torch._C._current_graph_task_id() != _NO_BACKWARD:
                self._backward.started(work, reduced)  # FSDP2 has not assigned the gradients yet
        return None

    def _subset(self, reduced: Sequence[Any]) -> str | None:
        """Return the names of the reduced parameters; None if they are all parameters of the module.

        FSDP2 reduces the parameters that have gradients. Ranks that took different branches, or froze
        different parameters, may have gradients of the same size for different parameters. They would average
        these gradients; names in the signature turn this into a mismatch. `reduced`: read from the calling
        frame, as FSDP2 does not pass it on; empty if `sees_reduced` is false.
        """
        shards = _param_groups(self._module())
        names = [str(getattr(param, "_param_fqn", None)) for param in reduced]
        if not names or len(names) == sum(len(each.fsdp_params) for each in shards):
            return None
        some = ", ".join(names[:_NAMED])
        if len(names) > _NAMED:
            digest = crc32("\n".join(names).encode())
            some += f" and {len(names) - _NAMED} more ({digest:08x})"
        return f"gradients of {some} alone"

    def _may_be_late(self, output: torch.Tensor, op: Any) -> bool:
        """Return whether the result is not needed before the end of the backward pass."""
        return (
            torch._C._current_graph_task_id() != _NO_BACKWARD
            and op == dist.ReduceOp.AVG  # with other operators, FSDP2 may divide the result itself
            and bool(shards := _param_groups(self._module()))
            and not any(_reads_early(shard, output.dtype) for shard in shards)
        )


_USED: Final = ("fsdp_params", "_all_gather_result", "_all_reduce_hook", "_is_hsdp")


def _param_groups(module: Any) -> list[Any]:
    """Return FSDP2's internal objects for the parameters of a module.

    Empty if this version of torch lacks the undocumented attributes that are used here.
    """
    state = None if module is None else module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return found if all(hasattr(group, name) for group in found for name in _USED) else []


def _reads_early(shard: Any, dtype: torch.dtype) -> bool:
    """Return whether FSDP2, or a hook of the program, reads gradients as soon as they are reduced.

    Reasons: reduction between replicas, gradients of an earlier pass, conversion of the dtype, and hooks.
    """
    params = [param.sharded_param for param in shard.fsdp_params if param.sharded_param.requires_grad]
    return (
        shard._is_hsdp
        or shard._all_reduce_hook is not None
        or any(
            param.grad is not None
            or param.dtype != dtype
            or bool(getattr(param, "_post_accumulate_grad_hooks", None))
            for param in params
        )
    )


def sees_reduced() -> bool:
    """Return whether torch's function that starts a reduction has a parameter of the known name."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce

    return _REDUCED in inspect.signature(foreach_reduce).parameters


def checked_group(group: Any) -> McrProcessGroup:
    """Return the process group over which a model is sharded.

    Raises:
        Unsupported: the group has another backend.
        NotInitialized: the group has been destroyed.
    """
    if not isinstance(group, McrProcessGroup):
        raise Unsupported(
            f"fsdp: the model is sharded over a group of backend {group.name()}; "
            "use init_process_group('mcr')"
        )
    if group.is_destroyed:
        raise NotInitialized(
            "fsdp: the process group over which the model is sharded has been destroyed; if ranks have been "
            "lost, mcr.fsdp_state rebuilds the state, for a new model over the remaining ranks"
        )
    return group
