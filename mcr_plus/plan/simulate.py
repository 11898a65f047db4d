"""The course of a step under a plan: a rank that computes, and a channel that sends bucket after bucket.

    course = simulate(marks, compute, buckets)
    course.step, course.starts, course.ends

Computing goes on at the rate 1 - share while an operation is in flight, and an operation starts when its last
gradient is ready and the channel is free. Where the program drives progress (`dispatch: {progress: caller}`),
an operation that is behind another, of a library that needs polls, starts at a mark of the program at the
earliest, that is when a gradient is ready, or at the end, where the program waits.
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
class Course:
    """Seconds from the beginning of the step.

    `computed`: the end of computing. `starts`, `ends`: of each bucket's operation. `step`: the end of all.
    """

    computed: float
    starts: Floats
    ends: Floats

    @property
    def step(self) -> float:
        """The end of the step."""
        return max(self.computed, float(self.ends.max(initial=0.0)))

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed any more, but operations are in flight."""
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
) -> Course:
    """The course of a step.

    Args:
        marks: seconds of computing after which each gradient is ready, ascending. compute: in all.
        last: of each bucket, in the order of sending, the index in `marks` of its last gradient.
        seconds, shares: of each bucket, its time alone and the part of the core that it takes meanwhile.
        overhead: seconds of computing that issuing a bucket takes. by_caller: the program drives progress; of
            each bucket, or of all.
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
    return Course(computed, starts, ends)


def prepare() -> None:
    """Compile, or load from disk, what a simulation needs."""
    simulate(np.zeros(1), 0.0, np.zeros(1, np.int64), np.zeros(1), np.zeros(1))


@compiled
def _course(marks, compute, last, seconds, shares, overhead, by_caller):  # type: ignore[no-untyped-def]
    count, buckets = len(marks), len(last)
    starts, ends = np.zeros(buckets), np.zeros(buckets)
    now, done = 0.0, 0.0  # the time, and the seconds of computing that are done
    issued, running, finished = 0, -1, 0.0  # buckets issued; the one in flight, and when it ends
    begun = 0  # operations started
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
