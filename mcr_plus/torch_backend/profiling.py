"""Ranges of operations in torch's profiler, with the same arguments as torch's own libraries.

Torch's `record_param_comms` takes the arguments from a C++ object that Python cannot create. Here they are
keywords of the range `mcr:<operation>`, under the same names, so that tools such as HolisticTraceAnalysis
find them.
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

_MOST_RANKS: Final = 30  # per list; torch truncates longer lists too
_NCCL_NAMES: Final = {
    "all_reduce": "allreduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_into_tensor": "_allgather_base",
    "all_gather_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "reduce_scatter_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "all_to_all",
}
"""Names of operations in torch's NCCL that differ from ours."""
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
    """Return the arguments of an operation on `tensors`, this rank's inputs, in a group of `ranks`.

    For a scatter, `tensors` is the output, because only the root has inputs. Sizes are in elements; the
    output size of an uneven operation is given as if even. `rank`: this process's rank in the job.
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
    """Lock that also records a range in torch's profiler."""

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
