"""Capture training steps, and report the result of `fuse: {plan: auto}`."""

from __future__ import annotations

import copy
from typing import Any

import torch

from mcr_plus.bucketing import REPORT
from mcr_plus.bucketing.capture import Capture
from mcr_plus.job.init import current

__all__ = ["capture", "plan_report"]


def capture(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5, *, hold: bool = True
) -> Capture:
    """Capture the first `steps` training steps of a block; collective: all ranks enter and leave it together.

    A step ends with `optimizer.step()`. Hooks record when modules first need their parameters and when
    gradients become ready. The program's operations and waits are recorded, too, by tag, kind, bytes and
    group. Times are seconds of the host or, for parameters on a GPU, of its current stream. At the end of the
    block the ranks exchange their times, and all get the same `CapturedStep`: medians, excluding first steps
    that take more than three times the median. Steps after the first `steps` are not captured.

    With `hold`, models of `mcr.wrap`, `DistributedOptimizer` and similar wrappers send their buckets at the
    end of the backward pass, one after another: communication does not slow computation, and each operation
    is timed alone. These steps, and the step's `seconds`, are slower than usual.
    Without `hold`, and for operations of the program itself, computation times include the slowdown by
    concurrent communication. Operations bound earlier by `mcr.persistent` are not recorded. For a
    compiled model, only gradients and operations are recorded: there are no modules inside its graph.

    In a job with `fuse: {plan: auto}`, the step also contains the times of all_reduces by library that
    `mcr.wrap` has measured (`measured`); `mcr-plus plan` uses them for times and shares of the core.

    Args:
        model: any module, wrapped or not. Parameters of any shape, dtype and device.
        optimizer: the optimizer of the model; its `step` marks the end of a step.
        steps: number, at least 3; the same on all ranks.
        hold: see above; the same on all ranks.

    Returns:
        A context manager with the attributes and methods of a `CapturedStep`, available after the block.

    Raises:
        NotInitialized: there is no job.
        InvalidArgument: an argument is wrong, or another capture is running; at the end of the block, on all
            ranks: fewer than three steps, different numbers of steps, or no backward pass.
        BackendError: the block of another rank ended with an exception.

    Example:
        ```python
        model = torch.nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mcr.wrap(model, optimizer)
        with mcr.capture(model, optimizer, steps=3) as step:
            for _ in range(3):
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
        ready = [event.param for event in step.roles[0].events if hasattr(event, "param")]
        assert sorted(ready) == ["bias", "weight"]
        ```
    """
    return Capture(model, optimizer, steps, hold=hold)


def plan_report() -> dict[str, Any] | None:
    """Return the result of this job's latest trial of `fuse: {plan: auto}`; None if no trial has ended.

    Times are milliseconds of a whole step on the slowest rank:

    - `plan`: "auto". `chosen`: "searched", or "by size" if the searched plan was not faster.
    - `buckets`: names of the parameters in each bucket in use, in the order of sending;
      `libraries`, `codecs`: library and codec of each bucket, None if the pipeline chooses.
      `baseline_buckets`: number of buckets by size.
    - `measured_ms`, `baseline_ms`: times with the searched buckets and with buckets by size, measured
      alternately.
    - `foretold_ms`, `foretold_baseline_ms`: the corresponding predicted times.
    - `bound_ms`: lower bound of any plan's time, from the same costs. It never exceeds a measured time:
      passes that measure computation can be slower than others, so the bound is capped. `gap`: upper bound of
      the searched plan's relative distance to the best plan, in the model of the search; `exact`: the plan is
      optimal in this model.
    - `cuts`, for a model compiled with `cuts="auto"` only: the graph is cut at the ends of these modules;
      `cuts_known`: number of possible places. `chosen`: "whole" (uncut, buckets by size), "blocks" (cut at
      all places, buckets by size) or "searched"; `tried_ms`: time of each candidate. `cut_ms`: cost of a cut.
      Without `fuse: {plan: auto}`, there is no search or prediction, and `measured_ms` is the time of
      "blocks".
    - `compute_ms`: computation alone. `exposed_ms`: predicted wait after the computation; `exposed_by`: the
      parameter for which the program waits.

    Raises:
        NotInitialized: there is no job.

    Example:
        ```python
        report = mcr.plan_report()
        assert report is None  # nothing has been trained
        ```
    """
    report: dict[str, Any] | None = current().attached.get(REPORT)
    return copy.deepcopy(report)
