"""Ranges of operations in torch's profiler, with the arguments that torch's own libraries give theirs.

Torch's `record_param_comms` takes them from an object of C++, which Python cannot make. They are keywords of
the range `mcr:<operation>` instead, under the same names, so that HolisticTraceAnalysis and others find them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._profiler import _RecordFunctionFast

from mcr_plus.core.kinds import COLLECTIVES, SCALAR_TYPES, collective, dtype_name
from mcr_plus.torch_backend.arguments import NAME

if TYPE_CHECKING:
    from mcr_plus.torch_backend.process_group import McrProcessGroup

_MOST_RANKS: Final = 30  # in a list; torch truncates longer ones too
_NCCL_NAMES: Final = {
    "all_reduce": "allreduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_into_tensor": "_allgather_base",
    "all_gather_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "reduce_scatter_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "all_to_all",
}
"""Names of operations in torch's NCCL, where they are others than ours."""
_KINDS: Final = {
    **{name: row.kind for row in COLLECTIVES.values() for name in (row.kind, row.torch) if name},
    "all_reduce_coalesced": "all_reduce",
    "all_gather_coalesced": "all_gather",
    "reduce_scatter_coalesced": "reduce_scatter",
    "monitored_barrier": "barrier",
}


def arguments(
    operation: str, tensors: Sequence[torch.Tensor], ranks: Sequence[int], rank: int
) -> dict[str, Any]:
    """The arguments of an operation on `tensors`, this rank's inputs, in a group of `ranks`.

    Of a scatter, whose inputs only one rank has, `tensors` is the output. Sizes are elements; those of an
    uneven operation's output are counted as even. `rank`: of this process in the job.
    """
    row = collective(_KINDS[operation])
    numel = sum(tensor.numel() for tensor in tensors)
    sent, received = numel, numel
    if row.sends == "one" and row.receives == "each":
        received = numel * len(ranks)
    elif row.rooted and row.sends == "each":
        sent = numel * len(ranks)
    elif row.sends == "each" and row.receives == "one":
        received = numel // len(ranks)
    shown = ", ".join(map(str, ranks[:_MOST_RANKS])) + ", ..." * (len(ranks) > _MOST_RANKS)
    return {
        "Collective name": _NCCL_NAMES.get(operation, operation),
        "In msg nelems": sent,
        "Out msg nelems": received,
        "Group size": len(ranks),
        "dtype": SCALAR_TYPES.get(dtype_name(tensors[0].dtype), "Byte") if tensors else "Byte",
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Ranks": f"[{shown}]",
        "Rank": rank,
    }


class Profiled:
    """A lock with a range for torch's profiler."""

    def __init__(
        self,
        lock: threading.RLock,
        operation: str,
        tensors: Sequence[torch.Tensor],
        group: McrProcessGroup,
    ) -> None:
        self._lock = lock
        self._operation, self._tensors, self._group = operation, tensors, group
        self._range: Any = None

    def __enter__(self) -> None:
        group = self._group
        ranks = group.communicator.ranks
        found = arguments(self._operation, self._tensors, ranks, ranks[group.rank()])
        found["Process Group Name"], found["Process Group Description"] = group.group_name, group.group_desc
        self._lock.acquire()
        self._range = _RecordFunctionFast(f"{NAME}:{self._operation}", list(self._tensors), found)
        self._range.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._range.__exit__(*exception)
        self._lock.release()
