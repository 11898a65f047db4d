"""Redistribute one tensor from one layout to another (`mcr.redistribute`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.message import frozen
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.job.init import member_of
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.state import Redistribution, refuse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from mcr_plus.communicator.calls import Compress

_KEPT: Final = 1024  # maximum number of cached redistributions of a group
_BUFFERS: Final = 256 << 20  # maximum bytes of idle buffers of cached redistributions


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
    """Redistribute a tensor from one layout to another: any ranks, any boxes, sums included.

    Collective over the group: all ranks pass the same layouts. The plan is chosen by expected time, proved by
    all ranks before the first byte is sent, and cached for calls with the same layouts and dtype.

    Args:
        x: this rank's local tensor in `source`, of shape `source.local_shape(rank)`, of any dtype and
            strides; None if the rank has no part in it. It must not be changed while an asynchronous call
            is pending.
        source: a `Layout`, or, if `x` is a `DTensor`, the mesh of the result.
        target: a `Layout` of the same global shape, or, if `x` is a `DTensor`, the placements of the result.
        out: the local tensor in `target` to write to, any strided tensor of the right shape and dtype; None:
            a new tensor.
        async_op: True: return a `Work`, whose `output` is the result once it is complete. Only the first call
            with these layouts waits for other ranks.
        dtype: the dtype of the tensor, the same on all ranks. Required if some rank has no part in the source
            and tensors of several dtypes have the same layouts; otherwise ranks without a part expect the
            dtype of the first call.
        tag: tag of its operations, for rules; `redistribute` if None.
        compress: as in the other collectives. With a codec, replicas still get the same bits.

    Returns:
        The local tensor in `target`, None if this rank has no part in it. With a `DTensor`, a `DTensor`.
        Values are exact, except for sums of floats, which depend on the order of the addends: by index in
        exchanges, chosen by the library in native collectives. Half-precision addends are summed in float32
        and rounded once. Sums of bool are "or"; means of integers are rounded towards zero.

    Raises:
        InvalidArgument: on all ranks: layouts, dtypes or shapes do not match or differ between ranks, or no
            rank holds some element. With a cached plan, only a rank that passes a wrong tensor raises, as
            in other collectives.
        Unsupported: a codec would make the bits of replicas differ.

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
            refuse(group, InvalidArgument("out: not supported with a DTensor; the result is a new DTensor"))
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
    if not (compress is None or isinstance(compress, (str, bool, Mapping))):
        expected = "a codec's name, a mapping of options, True, False or None"
        refuse(group, InvalidArgument(f"compress: expected {expected}, got {short(compress)}"))
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
    """Return the redistribution of one tensor: a cached object for calls with the same arguments.

    The group caches the latest redistributions, the same on all ranks. `dtype`: see `redistribute`.
    """
    comm = member_of(group)
    kept: _CachedRedistributions | None = comm.attached.get("redistributions")
    if kept is None:
        kept = comm.attached["redistributions"] = _CachedRedistributions()
    key = (source, target, tag, frozen(compress) if isinstance(compress, Mapping) else compress, dtype)
    return kept.moves.get(key) or _CachedMove(kept, key, comm, compress)


class _CachedRedistributions:
    """Cached redistributions of a group; only the latest keep buffers, up to a bound."""

    def __init__(self) -> None:
        self.moves: OrderedDict[Any, _CachedMove] = OrderedDict()
        self._bytes: dict[_CachedMove, int] = {}
        self._lock = Lock()  # any thread may complete a handle

    def add(self, key: Any, move: _CachedMove) -> None:
        """Cache a redistribution that all ranks have agreed on, so that their caches stay equal."""
        with self._lock:
            if len(self.moves) >= _KEPT:
                _, oldest = self.moves.popitem(last=False)
                self._bytes.pop(oldest, None)
            self.moves[key] = move

    def hold(self, move: _CachedMove, nbytes: int) -> None:
        """Count the buffers of a redistribution, and free the oldest buffers beyond the bound."""
        with self._lock:
            self._bytes.pop(move, None)
            if self.moves.get(move.key) is not move:  # dropped from the cache, or not agreed on yet
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


class _CachedMove(Redistribution):
    """Redistribution of one tensor, cached by its group after the first successful call."""

    _other_dtypes = "pass `dtype` on all ranks"

    def __init__(
        self, kept: _CachedRedistributions, key: Any, comm: Communicator, compress: Compress
    ) -> None:
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
