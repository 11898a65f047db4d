"""Measure the cost of bucket all_reduces within the job, with and without computation.

A step sends its buckets one right after another. So small operations are measured in trains, several in
flight together; the time of an operation is the time of the train divided by the number of operations. A
single operation would look too fast, because buffers and the burst of a traffic shaper accept the first few
hundred KiB faster than the link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np
import torch

from mcr_plus.bucketing.costs import BucketCurve
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.kinds import MAX
from mcr_plus.core.work import Work
from mcr_plus.errors import Unsupported

Send = Callable[[torch.Tensor, "str | None"], Work]
"""Function that starts the all_reduce of a bucket by a named library; None: the pipeline chooses."""

_SMALLEST: Final = 4 << 10
_LARGEST: Final = 4 << 20  # beyond this, time grows with size
_FACTOR: Final = 8
_SECONDS: Final = 2.0  # time limit of all measurements together
_MOST: Final = 9  # maximum number of repetitions of a size
_FIRST: Final = 2  # operations before a measurement
_PARTS: Final = 4.2  # duration of a measurement, in trains: train alone, computation alone, and both together
_TRAIN: Final = 2 << 20  # bytes of a train
_LONGEST: Final = 8  # maximum number of operations in a train
_EDGE: Final = 160  # size of the square matrices multiplied as computation: about 0.1 ms each


def probe(
    comm: Communicator,
    dtype: torch.dtype,
    device: torch.device,
    nbytes: int,
    libraries: Sequence[str | None],
    send: Send,
) -> dict[str | None, BucketCurve]:
    """Return the curves of all_reduces up to `nbytes` bytes by library, equal on all ranks; collective.

    Times are medians over repetitions, and maxima over ranks. The measurement takes about two seconds in
    total, divided among libraries and sizes; sizes that do not fit into this time are omitted. Libraries that
    cannot run the operation are omitted, too.
    """
    largest = min(nbytes, _LARGEST)
    sizes = [_SMALLEST]
    while sizes[-1] * _FACTOR <= largest:
        sizes.append(sizes[-1] * _FACTOR)
    if sizes[-1] < largest:
        sizes.append(largest // dtype.itemsize * dtype.itemsize)
    found: dict[str | None, BucketCurve] = {}
    clock = _ProbeClock(comm)
    for number, library in enumerate(libraries):
        seconds = (_SECONDS - clock.spent()) / (len(libraries) - number)
        points: dict[int, tuple[float, float]] = {}
        of_library = _ProbeClock(comm)
        for at, size in enumerate(sizes):
            parts = _PARTS if len(points) > 1 else 0.0  # a curve needs two sizes for its slope
            if points and seconds - of_library.spent() < (_FIRST + parts) * _expected(points, size):
                break
            values = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
            start = partial(send, values, library)
            try:
                work = start()
            except Unsupported:
                break
            work.wait()
            whole = _slowest(comm, [_time_of([start])])[0]
            left = seconds - of_library.spent()
            if points and left < parts * whole:  # measure at least one size, however late it is
                break
            fitting = left / (len(sizes) - at) / (_PARTS * whole)  # number of single operations that fit
            length = int(max(1, min(_TRAIN / size, _LONGEST, fitting)))
            train = [start, *(partial(send, values.clone(), library) for _ in range(length - 1))]
            points[size] = _measured(comm, train, max(1, int(min(fitting / length, _MOST))))
        if points:
            found[library] = BucketCurve.through(points)
    return found


def _expected(points: Mapping[int, tuple[float, float]], size: int) -> float:
    """Return the expected seconds of a larger operation than measured; with one point, an upper bound."""
    if len(points) == 1:
        ((known, (seconds, _)),) = points.items()
        return seconds * size / known
    return float(BucketCurve.through(points).times(np.array([size]))[0])


class _ProbeClock:
    """Clock that returns seconds since its creation, as the maximum over ranks."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._began = perf_counter()

    def spent(self) -> float:
        """Return the seconds, equal on all ranks; collective."""
        return _slowest(self._comm, [perf_counter() - self._began])[0]


def _time_of(train: Sequence[Callable[[], Work]], meanwhile: Callable[[], object] = lambda: None) -> float:
    began = perf_counter()
    works = [start() for start in train]
    meanwhile()
    for work in works:
        work.wait()
    return perf_counter() - began


def _measured(comm: Communicator, train: Sequence[Callable[[], Work]], repeats: int) -> tuple[float, float]:
    """Return the duration of an operation in a train, and its share of the core."""
    whole = _slowest(comm, [median(_time_of(train) for _ in range(repeats))])[0]
    left, right = torch.ones(_EDGE, _EDGE, device="cpu"), torch.ones(_EDGE, _EDGE, device="cpu")

    def compute(pieces: int) -> float:
        began = perf_counter()
        for _ in range(pieces):
            torch.mm(left, right)
            comm.progress()  # as hooks of gradients do
        return perf_counter() - began

    compute(4)
    piece = compute(8) / 8
    pieces = int(_slowest(comm, [max(1.0, 1.2 * whole / piece)])[0])

    busy = median(compute(pieces) for _ in range(repeats))
    both = median(_time_of(train, lambda: compute(pieces)) for _ in range(repeats))
    (lost,) = _slowest(comm, [both - busy])
    return whole / len(train), min(max(lost / whole, 0.0), 1.0)


def _slowest(comm: Communicator, values: Sequence[float]) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64, device="cpu")
    comm.all_reduce(found, MAX, compress=False, tag="plan")
    return list(found.tolist())
