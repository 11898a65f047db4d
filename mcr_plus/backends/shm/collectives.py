"""Direct collectives, which need no algorithm file: the operations of `collectives_kernels`."""

from __future__ import annotations

import ctypes
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mcr_plus.backends.shm import collectives_state as words
from mcr_plus.backends.shm.collectives_state import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_WHOLE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    CHUNK,
    EXCHANGE,
    GATHER,
    PAGE,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_V,
    SCATTER,
    SHARE,
    UNEVEN,
)
from mcr_plus.backends.shm.reductions import ReduceKernels, SumTable
from mcr_plus.backends.shm.segment import LINE
from mcr_plus.kernels.compiling import preparing
from mcr_plus.kernels.images import c_kernel, has_image, image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcr_plus.backends.shm.queue import Advance, Begin
    from mcr_plus.backends.shm.segment import Segment

_KERNELS: Final = "mcr_plus.backends.shm.collectives_kernels"
_C_FUNCTIONS: Final = ("begin_at", "advance_at")
_NOTHING: Final = ReduceKernels()
# Bytes to one rank that peers read in place until trials of that size say otherwise: a system call costs less
# than a second copy of more, but the kernel must find every page, and does not bypass the caches. What is
# faster depends on the processor and on the number of ranks (benchmarks/bench_one_copy.py).
_IN_PLACE: Final = {
    ALL_GATHER: (32 << 10, 16 << 20),
    ALL_REDUCE: (2 << 20, 16 << 20),
    ALL_TO_ALL: (32 << 10, 8 << 20),
    BROADCAST: (32 << 10, 1 << 20),
    EXCHANGE: (32 << 10, 8 << 20),
    GATHER: (32 << 10, 16 << 20),
    SCATTER: (32 << 10, 16 << 20),
    SHARE: (32 << 10, 16 << 20),
}
_TRIED: Final = (*_IN_PLACE, ALL_REDUCE_WHOLE, REDUCE, REDUCE_SCATTER, REDUCE_SCATTER_V)
_TRIED_FROM: Final = 1 << 10  # bytes
# Slots have a part for each rank.
_PARTED: Final = (ALL_TO_ALL, REDUCE_SCATTER, SCATTER, EXCHANGE, REDUCE_SCATTER_V)
_CACHED: Final = 768 << 10  # maximum bytes of a slice that stays in the core's cache until a peer reads it


class DirectCollectives:
    """Direct collectives of one rank, of two or more, on a segment.

    Operations run one at a time, in the same order on all ranks. `spins` and `yields`: number of retries of
    `advance`, spinning and yielding, before it returns. `whole`: size in bytes up to which every rank reduces
    all data. `streamed`: size in bytes above which results bypass the caches. `way`: how this rank hands over
    its data, where it can; None for the way that is fastest in operations of that kind and size.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        spins: int = 200,
        yields: int = 4,
        whole: int = 8192,
        streamed: int = 8 << 20,
        way: int | None = None,
    ) -> None:
        self._segment = segment
        self._way, self._bounce = way, np.empty((2 + segment.shape.ranks) * CHUNK, np.uint8)
        self._trials: Any = np.zeros((1 + max(_TRIED), 64, words.TRIED // 8), np.int64)
        self._spins, self._yields = spins, yields
        self._whole, self._streamed = min(whole, segment.shape.area), streamed

    def bind(
        self,
        kind: int,
        count: int = 0,
        width: int = 1,
        kernels: ReduceKernels = _NOTHING,
        root: int = 0,
        tag: int = 0,
        sums: SumTable | None = None,
    ) -> Any:
        """Return the state of an operation, for `begin`, and for `advance` until that returns 1.

        `begin(state, source, target)` takes addresses, equal for calls in place: all_gather's source may be
        its block of the target. `count` elements of `width` bytes are the whole buffer of all_reduce, reduce
        and broadcast, and one rank's block of other operations. broadcast reads the root's `source` and does
        not write the root's target. A state may be used again when the operation is done. Ranks with
        different `tag`s wait for each other forever. `sums` reduces in place of `kernels`, which only divide
        then; it must live as long as the state.

        For EXCHANGE, SHARE and REDUCE_SCATTER_V the state is a pattern, from which `of_sizes` makes states.
        """
        shape, rank = self._segment.shape, self._segment.rank
        header = (-(-8 * (2 + shape.ranks) // 64) * 64) if kind in UNEVEN else 0
        blocks = shape.ranks if kind in (ALL_GATHER, ALL_TO_ALL, GATHER) else 1
        streams = count * width * blocks >= self._streamed
        # Small slices stay in the caches until peers read them; streamed results bypass the caches anyway.
        area = shape.area
        if kind in (ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER) and not streams:
            area = min(area, _CACHED)
        # Small all_reduces save an exchange. For some other kinds, a slot holds a part for each rank.
        if kind == ALL_REDUCE and count * width <= self._whole:
            kind = ALL_REDUCE_WHOLE
        area -= header
        if kind in _PARTED:
            area = area // shape.ranks // 64 * 64
        slice_elements, stride = area // width, shape.area
        if kind not in UNEVEN:
            slice_elements = min(slice_elements, -(-max(count, 1) // 64) * 64)
            parts = shape.ranks if kind in _PARTED else 1
            stride = -(-slice_elements * width * parts // PAGE) * PAGE  # a page for tiny slices, in one place
        state: Any = np.zeros(words.WORDS + (2 * shape.ranks if kind in UNEVEN else 0), np.int64)
        settings = {
            words.KIND: kind,
            words.RANK: rank,
            words.RANKS: shape.ranks,
            words.LINES: self._segment.base + shape.lines,
            words.AREAS: self._segment.base + shape.areas,
            words.AREA: shape.area,
            words.RING: shape.ring,
            words.SPINS: self._spins,
            words.YIELDS: self._yields,
            words.SLICES: 1 if kind == BARRIER else -(-count // slice_elements),
            words.COUNT: count,
            words.WIDTH: width,
            words.SLICE: slice_elements,
            words.COMBINE: kernels.combine,
            words.DIVIDE: kernels.divide,
            words.ROOT: root,
            words.STREAMS: streams,
            words.STRIDE: stride,
            words.PLACES: max(1, shape.area // stride) if stride > PAGE else 1,
            words.HEADER: header,
            words.AGREED: kind not in UNEVEN,
            words.TAG: tag,
            words.BELLS: self._segment.bells,
            words.PROCESS: os.getpid(),  # the one that peers have probed, unless it was forked
            words.BOUNCE: self._bounce.ctypes.data,
            words.SUMS: 0 if sums is None else sums.function,
            words.TABLE: 0 if sums is None else sums.words.ctypes.data,
        }
        for word, value in settings.items():
            state[word] = value
        self._choose(state, kind, count * width)
        return state

    def _choose(self, state: Any, kind: int, nbytes: int) -> None:
        """Set how operations choose the way in which this rank hands its data to its peers."""
        may_share = kind in _IN_PLACE and bool(self._segment.probe)
        if self._way is not None:
            state[words.FIRST] = self._way
        elif kind in _TRIED and nbytes >= _TRIED_FROM:
            least, most = _IN_PLACE.get(kind, (0, 0))
            may_share = may_share and nbytes >= least
            state[words.FIRST] = words.IN_PLACE if may_share and nbytes <= most else words.COPIED
            state[words.TRIALS] = self._trials[kind, nbytes.bit_length()].ctypes.data
        state[words.SHARING] = words.ASK if may_share else words.NEVER

    def of_sizes(self, pattern: Any, sent: Sequence[int], expected: Sequence[int]) -> Any:
        """Return the state of one operation; `sent`, `expected`: elements to each rank and from each rank.

        Parts are contiguous in source and target, in rank order; SHARE's source is sent to all ranks. When
        the operation is done, `mismatch` returns a disagreement on sizes.
        """
        state = pattern.copy()
        ranks = self._segment.shape.ranks
        state[words.WORDS : words.WORDS + ranks] = sent
        state[words.WORDS + ranks :] = expected
        state[words.SLICES] = max(1, -(-max(sent) // int(state[words.SLICE])))
        kind, width = int(state[words.KIND]), int(state[words.WIDTH])
        state[words.STREAMS] = sum(expected) * width >= self._streamed
        state[words.COUNT] = sum(sent) if kind == EXCHANGE else max(sent)
        self._choose(state, kind, max(sent) * width)
        return state

    def withdraw(self) -> None:
        """Make peers take no more data in this process's memory; what they have not taken is lost."""
        base, shape = self._segment.base, self._segment.shape
        first = base + shape.lines + self._segment.rank * LINE + words.TAGS_AT
        for at in range(first, first + 8 * shape.ring, 8) if base else ():
            tag = ctypes.c_int64.from_address(at)
            if tag.value & words.EXPOSED:
                tag.value = words.WITHDRAWN


def unreadable(state: Any) -> int | None:
    """Return a rank whose memory could not be read in an operation, which never ends then."""
    return int(state[words.UNREADABLE]) - 1 if state[words.UNREADABLE] else None


def mismatch(state: Any) -> tuple[int, int] | None:
    """Return a rank that had an unexpected count in an operation, and the count; None if there is none."""
    return (int(state[words.MISMATCH]) - 1, int(state[words.GIVEN])) if state[words.MISMATCH] else None


@cache
def begin_and_advance() -> tuple[Begin, Advance]:
    """Return both functions of `collectives_kernels`; compiles them if nobody has."""
    with _preparing():
        begins, advances = (image(_KERNELS, name) for name in _C_FUNCTIONS)
        if begins is not None and advances is not None:
            return begins.call, advances.call
        from mcr_plus.backends.shm import collectives_kernels  # imported here: needs numba

        collectives_kernels.prepare()
        return collectives_kernels.begin, collectives_kernels.advance


@cache
def addresses() -> tuple[int, int]:
    """Return the addresses of both as C functions of the address of a state."""
    with _preparing():
        begins, advances = (c_kernel(_KERNELS, name).address for name in _C_FUNCTIONS)
    return begins, advances


def _preparing() -> AbstractContextManager[None]:
    return nullcontext() if all(has_image(_KERNELS, name) for name in _C_FUNCTIONS) else preparing("msccl")
