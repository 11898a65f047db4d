"""Simulate a step under a plan: a computing rank, and a channel that sends buckets in order.

    course = simulate(marks, compute, buckets)
    course.step, course.starts, course.ends

Computation runs at the rate 1 - share while an operation is in flight, and an operation starts when its last
gradient is ready and the channel is free. If the program drives progress (`dispatch: {progress: caller}`) of
a library that must be polled, a queued operation starts at the next mark of the program: when a
gradient becomes ready, or at the end, when the program waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcr_plus.kernels.cpu import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class BucketTimes:
    """Times of buckets, in seconds from the beginning of the step.

    `computed`: end of computation. `starts`, `ends`: start and end of each bucket's operation. `step`: end of
    computation and communication.
    """

    computed: float
    starts: Floats
    ends: Floats

    @property
    def step(self) -> float:
        """End of the step."""
        return max(self.computed, float(self.ends.max(initial=0.0)))

    @property
    def exposed(self) -> float:
        """Seconds from the end of computation to the end of the step."""
        return self.step - self.computed


def simulate(
    marks: Floats,
    compute: float,
    last: Ints,
    seconds: Floats,
    shares: Floats,
    *,
    overhead: float = 0.0,
    by_caller: bool | Sequence[bool] = False,
) -> BucketTimes:
    """Simulate a step.

    Args:
        marks: seconds of computation before each gradient is ready, ascending. compute: total seconds.
        last: index in `marks` of the last gradient of each bucket, in the order of sending.
        seconds, shares: for each bucket, the duration when alone, and the share of the core.
        overhead: seconds of computation to issue a bucket. by_caller: the program drives progress; for each
            bucket, or one value for all.
    """
    computed, starts, ends = _course(
        np.asarray(marks, np.float64),
        compute,
        np.asarray(last, np.int64),
        np.asarray(seconds, np.float64),
        np.asarray(shares, np.float64),
        overhead,
        np.broadcast_to(np.asarray(by_caller, np.bool_), len(last)).copy(),
    )
    return BucketTimes(computed, starts, ends)


def prepare() -> None:
    """Compile the kernels of a simulation, or load them from disk."""
    simulate(np.zeros(1), 0.0, np.zeros(1, np.int64), np.zeros(1), np.zeros(1))


@compiled
def _course(marks, compute, last, seconds, shares, overhead, by_caller):  # type: ignore[no-untyped-def]
    count, buckets = len(marks), len(last)
    starts, ends = np.zeros(buckets), np.zeros(buckets)
    now, done = 0.0, 0.0  # current time, and completed seconds of computation
    issued, running, finished = 0, -1, 0.0  # number of issued buckets; bucket in flight, and its end
    begun = 0  # number of started operations
    mark, extra = 0, 0.0
    while mark <= count:
        target = extra + (marks[mark] if mark < count else compute)
        # compute up to the mark, slower while an operation is in flight
        while done < target:
            left = target - done
            if running < 0:
                now, done = now + left, target
            else:
                rate = 1.0 - shares[running]
                until = finished - now
                if rate > 0 and left / rate <= until:
                    now, done = now + left / rate, target
                else:
                    now, done = finished, done + until * rate
                    ends[running] = finished
                    running = -1
                    if begun < issued and not by_caller[begun]:
                        running, begun = begun, begun + 1
                        starts[running], finished = now, now + seconds[running]
        if running >= 0 and finished <= now:
            ends[running] = finished
            running = -1
        # at the mark: issue the buckets that are complete
        while issued < buckets and mark < count and last[issued] <= mark:
            issued += 1
            extra += overhead
        if running < 0 and begun < issued:
            running, begun = begun, begun + 1
            starts[running], finished = now, now + seconds[running]
        mark += 1
    computed = now
    while begun < buckets or running >= 0:
        if running >= 0:
            now = max(now, finished)
            ends[running] = finished
            running = -1
        else:
            running, begun = begun, begun + 1
            starts[running], finished = now, now + seconds[running]
    return computed, starts, ends
