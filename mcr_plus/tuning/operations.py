"""Operation of one size that can be run, timed and verified.

An `OpUnderTest` owns the tensors of one case (kind, bytes, dtype) on this rank. All candidates work on the
same tensors, so that no candidate has a warmer cache. Timed calls move zeros, which repeated sums do not
change. Verification moves small integers, which differ by rank and position and are exact in every dtype, and
compares the result with NumPy's result in 64-bit integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.kinds import ARITHMETIC, PLAIN, REDUCING, SHARED, Kind, collective, dtype_name
from mcr_plus.core.work import Work
from mcr_plus.errors import Unsupported

KINDS: Final[tuple[Kind, ...]] = tuple(kind for kind in PLAIN if kind != "recv")
"""Measured kinds. `send` is measured as a message to a neighbour and back; its time is half of that."""
DTYPE_BY_NAME: Final = {dtype_name(dtype): dtype for dtype in ARITHMETIC}

TUNED: Final = "tuned"
"""The candidate without a backend: the pipeline decides."""
TORCH: Final = "torch"
"""torch.distributed with its default process group, for comparison."""

Call = Callable[[], object]
_Integers = NDArray[np.int64]
_MODULUS: Final = 5


@dataclass(frozen=True)
class BenchCase:
    """Case to measure: `kind`, `nbytes`, `dtype` (a name), synchronous or asynchronous, and tag."""

    kind: Kind
    nbytes: int
    dtype: str = "float32"
    async_op: bool = False
    tag: str | None = None


def whole_size(kind: str, nbytes: int, dtype: str, ranks: int) -> int:
    """Return the closest size at or below `nbytes` with whole elements and equal parts."""
    if kind == "barrier":
        return 0
    unit = DTYPE_BY_NAME[dtype].itemsize * (ranks if kind in SHARED else 1)
    return max(unit, nbytes // unit * unit)


def partner(comm: Communicator) -> int | None:
    """Return the rank with which this one exchanges messages: on hosts of equal size, one of another host."""
    hosts, half = [comm.hosts[rank] for rank in comm.ranks], comm.size // 2
    by_host = sorted(range(comm.size), key=lambda rank: hosts.index(hosts[rank]))
    place = by_host.index(comm.rank)
    return by_host[(place + half) % (2 * half)] if place < 2 * half else None


class OpUnderTest:
    """Tensors of a case on this rank, and the calls that use them."""

    def __init__(self, comm: Communicator, case: BenchCase) -> None:
        self._comm, self._case = comm, case
        self._dtype = DTYPE_BY_NAME[case.dtype]
        self._count = case.nbytes // self._dtype.itemsize
        part = self._count // comm.size if case.kind in SHARED else self._count
        row = self._row = collective(case.kind)
        given, gotten = (max(1, parts) * part for parts in row.parts(comm.size))
        self.source = torch.zeros(given, dtype=self._dtype, device="cpu")
        self.target = self.source if row.in_place else torch.zeros(gotten, dtype=self._dtype, device="cpu")

    # -- calls ------------------------------------------------------------------------------------

    def call(self, candidate: str) -> Call:
        """Return a call of the operation by `candidate`: a backend, `backend:algorithm`, `tuned` or `torch`.

        The call waits for an asynchronous operation.
        """
        start = self.start(candidate)
        if self._case.kind == "send" or not self._case.async_op:
            return start
        return lambda: cast("Work", start()).wait()

    def start(self, candidate: str) -> Call:
        """Return a call like `call`, but without waiting: an asynchronous operation returns its handle."""
        if candidate == TORCH:
            return self._torch()
        backend = None if candidate == TUNED else candidate
        options: dict[str, Any] = {"backend": backend, "async_op": self._case.async_op, "tag": self._case.tag}
        comm, source, target = self._comm, self.source, self.target
        if self._case.kind == "send":
            return self._ping_pong(
                lambda peer: comm.send(source, comm.ranks[peer], backend=backend),
                lambda peer: comm.recv(target, comm.ranks[peer], backend=backend),
            )
        return partial(getattr(comm, self._row.torch), *self._arguments(comm.ranks[0]), **options)

    def _arguments(self, root: int) -> tuple[Any, ...]:
        """Return the positional arguments, the same for torch.distributed and for a communicator."""
        row, source, target = self._row, self.source, self.target
        if row.buffers() == ("none", "none"):
            return ()
        if row.in_place:
            tensors: tuple[Any, ...] = (source,)
        elif row.rooted:  # the root passes a list
            whole, own = (target, source) if row.receives == "each" else (source, target)
            tensors = (own, list(whole.view(self._comm.size, -1)) if self._comm.rank == 0 else None)
        else:
            tensors = (target, source)
        return (*tensors, root) if row.rooted else tensors

    def _ping_pong(self, send: Callable[[int], object], recv: Callable[[int], object]) -> Call:
        """Return a round trip with the partner; a no-op on the rank that has none."""
        rank, peer = self._comm.rank, partner(self._comm)
        if peer is None:
            return lambda: None
        first, second = (send, recv) if rank < peer else (recv, send)
        return lambda: (first(peer), second(peer))

    def _torch(self) -> Call:
        import torch.distributed as dist

        source, target, kind = self.source, self.target, self._case.kind
        if kind == "send":
            return self._ping_pong(lambda peer: dist.send(source, peer), lambda peer: dist.recv(target, peer))
        # Newer versions of torch have renamed two functions, and warn about the old names.
        newer = f"{kind}_single" if self._row.is_shared and not self._row.rooted else ""
        function = getattr(dist, newer, None) or getattr(dist, self._row.torch)
        return partial(function, *self._arguments(0), async_op=self._case.async_op)

    # -- verification -----------------------------------------------------------------------------

    def verify(self, candidate: str) -> str | None:
        """Run the operation once on known values; return the problem of a wrong result, otherwise None.

        Collective. The tensors are zeros afterwards. Errors of the library propagate.
        """
        call, mine = self.call(candidate), self._comm.rank
        self.source.copy_(torch.from_numpy(self._values(mine, self.source.numel())))
        if self.target is not self.source:
            self.target.fill_(3)
        call()
        expected = self._expected()
        result = self.target.to(torch.int64, copy=True).numpy() if expected is not None else None
        self.source.zero_()
        self.target.zero_()
        if expected is None or result is None or np.array_equal(result, expected):
            return None
        place = int(np.argmax(result != expected))
        wrong = int((result != expected).sum())
        return (
            f"wrong result on rank {mine}: {wrong} of {expected.size} elements, the first at {place}: "
            f"{result[place]} instead of {expected[place]}"
        )

    def _values(self, rank: int, length: int) -> _Integers:
        modulus = 2 if self._dtype is torch.bool else _MODULUS
        return (np.arange(length, dtype=np.int64) * 7 + rank * 3 + np.arange(length) // 11) % modulus

    def _expected(self) -> _Integers | None:
        """Return the required values of `target` on this rank; None if undefined or unknown."""
        kind, rank, size = self._case.kind, self._comm.rank, self._comm.size
        given = [self._values(other, self.source.numel()) for other in range(size)]
        mine = slice(rank * self.target.numel(), (rank + 1) * self.target.numel())
        if kind in REDUCING:
            total = np.minimum(sum(given), 1) if self._dtype is torch.bool else np.sum(given, axis=0)
            if kind == "reduce_scatter":
                return np.asarray(total)[mine]
            return np.asarray(total) if kind == "all_reduce" or (kind == "reduce" and rank == 0) else None
        row = collective(kind)
        if row.sends_elsewhere is not None:  # only from the root
            return given[0] if row.sends == "one" else given[0][mine]
        if kind == "all_gather" or (kind == "gather" and rank == 0):
            return np.concatenate(given)
        if kind == "all_to_all":
            return np.concatenate([values.reshape(size, -1)[rank] for values in given])
        if kind == "send" and (peer := partner(self._comm)) is not None:
            return given[peer]
        if kind in ("gather", "send", "barrier"):
            return None
        raise Unsupported(f"{kind}: its results cannot be verified, so it is not measured")
