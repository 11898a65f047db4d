"""`mcr.redistribute`: a tensor from one layout to another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.message import frozen
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.state import Redistribution, refuse
from mcr_plus.runtime.init import member_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from mcr_plus.communicator.calls import Compress

_KEPT: Final = 1024  # moves of a group
_BUFFERS: Final = 256 << 20  # bytes of the buffers that they keep between calls


def redistribute(
    x: Any,
    source: Layout | DeviceMesh,
    target: Layout | Any,
    *,
    out: torch.Tensor | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    dtype: torch.dtype | None = None,
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
        async_op: return a `Work`, whose `output` is the result once it is done. Only the first call with
            these layouts waits for other ranks.
        dtype: of the tensor, the same on all ranks. Needed where some rank has no part in the source and
            tensors of several dtypes go the same way: without it, the dtype of the first call counts.
        tag: of its operations, which rules match; `redistribute` if None.
        compress: as of every collective. With a codec, replicas still get the same bits.

    Returns:
        The local tensor in `target`, None where this rank has no part in it. With a `DTensor`, a `DTensor`.
        Values are exact, but for sums of floats, whose addends are reduced in the order of their numbers.

    Raises:
        InvalidArgument: layouts, dtypes or shapes do not fit or differ between ranks; elements that no rank
            holds; on all ranks. With a known plan, a wrong tensor is refused on its rank alone, as by other
            collectives.
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
            refuse(group, InvalidArgument("out: not with a DTensor, whose result is another DTensor"))
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
        refuse(group, InvalidArgument(f"target: expected a Layout, got {short(target)}"))
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        refuse(group, InvalidArgument(f"dtype: expected a torch.dtype or None, got {short(dtype)}"))
    move = bound(source, target, group, tag, compress, dtype)
    if async_op:
        return move.start({"": x}, {"": out})
    return move({"": x}, {"": out})[""]


def bound(
    source: Layout,
    target: Layout,
    group: Communicator | None,
    tag: str | None,
    compress: Compress,
    dtype: torch.dtype | None = None,
) -> Redistribution:
    """The redistribution of one tensor, the same object for calls with the same arguments.

    The group keeps the latest ones, the same on all ranks. `dtype`: as of `redistribute`.
    """
    comm = member_of(group)
    kept: _Kept | None = comm.attached.get("redistributions")
    if kept is None:
        kept = comm.attached["redistributions"] = _Kept()
    key = (source, target, tag, frozen(compress) if isinstance(compress, Mapping) else compress, dtype)
    return kept.moves.get(key) or _Move(kept, key, comm, compress)


class _Kept:
    """What a group has bound, and the memory that it keeps for it: of the moves called last."""

    def __init__(self) -> None:
        self.moves: OrderedDict[Any, _Move] = OrderedDict()
        self._bytes: dict[_Move, int] = {}
        self._lock = Lock()  # handles may be completed by any thread

    def add(self, key: Any, move: _Move) -> None:
        """Keep a move that all ranks have agreed on: what they keep must be the same."""
        with self._lock:
            if len(self.moves) >= _KEPT:
                _, oldest = self.moves.popitem(last=False)
                self._bytes.pop(oldest, None)
            self.moves[key] = move

    def hold(self, move: _Move, nbytes: int) -> None:
        """Count the buffers of a move, and free what is too much."""
        with self._lock:
            self._bytes.pop(move, None)
            if self.moves.get(move.key) is not move:  # it has been forgotten, or is not agreed on
                return
            if nbytes > _BUFFERS:
                move.release()
                return
            self._bytes[move] = nbytes
            used = sum(self._bytes.values())
            while used > _BUFFERS:
                oldest = next(iter(self._bytes))
                oldest.release()
                used -= self._bytes.pop(oldest)


class _Move(Redistribution):
    """The redistribution of one tensor, which its group keeps from the first call that succeeds."""

    _other_dtypes = "pass `dtype` on all ranks"

    def __init__(self, kept: _Kept, key: Any, comm: Communicator, compress: Compress) -> None:
        source, target, tag, _, dtype = key
        super().__init__({"": (source, target)}, memory=None, group=comm, tag=tag, compress=compress)
        if dtype is not None:
            self._dtypes = (dtype,)
        self._kept, self.key = kept, key
        self._held = 0

    @property
    def _said(self) -> str:
        return f"{super()._said}, dtype={self.key[-1]}"

    def _bind(self, dtypes: tuple[torch.dtype, ...], wrong: str | None = None) -> None:
        super()._bind(dtypes, wrong)
        if len(self._bound) == 1:
            self._kept.add(self.key, self)

    def release(self) -> None:
        super().release()
        self._held = 0

    def _done(self) -> None:
        nbytes = self.buffer_bytes
        if nbytes != self._held:
            self._held = nbytes
            self._kept.hold(self, nbytes)
