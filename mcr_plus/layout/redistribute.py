"""`mcr.redistribute`: a tensor from one layout to another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.message import frozen
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.state import Redistribution
from mcr_plus.runtime.init import member_of

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from mcr_plus.communicator.calls import Compress

_KEPT: Final = 64  # plans of a group
_BUFFERS: Final = 256 << 20  # bytes of the buffers that they keep


def redistribute(
    x: Any,
    source: Layout | DeviceMesh,
    target: Layout | Any,
    *,
    out: torch.Tensor | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    tag: str | None = None,
    compress: Compress = None,
) -> Any:
    """Bring a tensor from one layout to another: any ranks, any boxes, sums included; collective over the
    group.

    Every rank of the group calls it with the same layouts. The plan is chosen by expected time, proved by all
    ranks before the first byte is sent, and kept for calls with the same layouts and dtype.

    Args:
        x: this rank's local tensor in `source`, of shape `source.local_shape(rank)`, of any dtype and
            strides; None where the rank has no part in it. It must not be changed while an asynchronous call
            is in flight.
        source: a `Layout`, or, if `x` is a `DTensor`, the mesh of the result.
        target: a `Layout` of the same global shape, or, if `x` is a `DTensor`, the placements of the result.
        out: the local tensor in `target` to write to; None: a new one. Any strided tensor of the right shape
            and dtype.
        async_op: return a `Work`, whose `output` is the result once it is done.
        tag: of its operations, which rules match; `redistribute` if None.
        compress: as of every collective. With a codec, replicas still get the same bits.

    Returns:
        The local tensor in `target`, None where this rank has no part in it. With a `DTensor`, a `DTensor`.
        Values are exact, but for sums of floats, whose addends are reduced in the order of their numbers.

    Raises:
        InvalidArgument: layouts, dtypes or shapes do not fit or differ between ranks; elements that no rank
            holds; on all ranks.
        Unsupported: a codec would leave replicas with different bits.

    Example:
        ```python
        ranks = range(mcr.get_world_size())
        rows = mcr.Layout.sharded((6, 4), ranks, 0)
        columns = mcr.Layout.sharded((6, 4), ranks, 1)
        x = torch.full(rows.local_shape(mcr.get_rank()), float(mcr.get_rank()))
        y = mcr.redistribute(x, rows, columns)
        assert tuple(y.shape) == columns.local_shape(mcr.get_rank())
        ```
    """
    if not isinstance(source, Layout):
        from mcr_plus.layout.torch_layouts import redistribute_dtensor

        if out is not None:
            raise InvalidArgument("out: not with a DTensor, whose result is another DTensor")
        return redistribute_dtensor(
            cast("DTensor", x),
            source,
            cast("Any", target),
            group=group,
            async_op=async_op,
            tag=tag,
            compress=compress,
        )
    if not isinstance(target, Layout):
        raise InvalidArgument(f"target: expected a Layout, got {short(target)}")
    move = bound(source, target, group, tag, compress)
    if async_op:
        return move.start({"": x}, {"": out})
    return move({"": x}, {"": out})[""]


def bound(
    source: Layout, target: Layout, group: Communicator | None, tag: str | None, compress: Compress
) -> Redistribution:
    """The redistribution of one tensor, the same object for calls with the same arguments.

    The group keeps the latest ones, the same on all ranks.
    """
    comm = member_of(group)
    known: OrderedDict[Any, Redistribution] = comm.attached.setdefault("redistributions", OrderedDict())
    key = (source, target, tag, frozen(compress) if isinstance(compress, Mapping) else compress)
    move = known.get(key)
    if move is None:
        if len(known) >= _KEPT:
            known.popitem(last=False)
        used = 0
        for each in reversed(known.values()):
            used += each.buffer_bytes
            if used > _BUFFERS:
                each.release()
        move = known[key] = Redistribution(
            {"": (source, target)}, memory=None, group=comm, tag=tag, compress=compress
        )
    return move
