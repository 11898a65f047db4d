"""Planning of training steps: their capture, and the findings of `fuse: {plan: auto}`."""

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
    """Capture the first `steps` training steps of a block; collective: all ranks enter and end it together.

    A step ends with `optimizer.step()`. Hooks note when modules first need their parameters and when
    gradients become ready; operations of the program and its waits are noted too, by tag, kind, bytes and
    group. Times are seconds of the host or, for parameters on a GPU, of its current stream. At the end of the
    block the ranks exchange their times, and each has the same `CapturedStep`: medians, without the first
    steps as long as they take three times the median. Steps beyond `steps` run as if there were no block.

    With `hold`, models of `mcr.wrap`, `DistributedOptimizer` and their like send their buckets at the end of
    the backward pass, one after another: communication takes nothing from computing meanwhile, and the time
    of an operation is its own. These steps are slower than usual ones, and the step's `seconds` are theirs.
    Without `hold`, and for operations of the program itself, the times of computing include what
    communication beside it has taken. Operations that `mcr.persistent` has bound before are not seen. Of a
    compiled model, only gradients and operations are noted: inside its graph there are no modules.

    In a job with `fuse: {plan: auto}`, the step also has the times of all_reduces by library that
    `mcr.wrap` has measured (`measured`), from which `mcr-plus plan` has their times and shares of the core.

    Args:
        model: any module, wrapped or not. Parameters of any shape, dtype and device.
        optimizer: of the model; its `step` marks the end of a step.
        steps: number, at least 3; the same on all ranks.
        hold: see above; the same on all ranks.

    Returns:
        A context manager, which has the attributes and methods of a `CapturedStep` once the block has ended.

    Raises:
        NotInitialized: there is no job.
        InvalidArgument: a wrong argument or another capture is running; at the end of the block, on all
            ranks: fewer than three steps, other numbers of them on other ranks, or no backward pass.
        BackendError: the block of another rank has ended with an exception.

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
    """The result of the latest trial of `fuse: {plan: auto}` in this job; None before its end, and if
    nothing was tried.

    Times are milliseconds of a whole step, of the slowest rank:

    - `plan`: "auto". `chosen`: "searched", or "by size" if the searched plan was not faster.
    - `buckets`: the names of the parameters of each bucket that is used from now on, in the order of sending;
      `libraries`, `codecs`: the library and the codec of each, None where the pipeline chooses.
      `baseline_buckets`: how many there were by size.
    - `measured_ms`, `baseline_ms`: with the searched buckets and with those by size, tried in turns.
    - `foretold_ms`, `foretold_baseline_ms`: the times expected of both, before.
    - `bound_ms`: the least time of any plan, by the same costs; at most a measured one, as the passes in
      which computing is measured can be slower than others. `gap`: the most by which the searched plan
      may be above the best one, in the model of the search; `exact`: it is proved to be the best there.
    - `cuts`, of a model compiled with `cuts="auto"` only: the modules at whose ends its graph is cut;
      `cuts_known`: how many places there were. `chosen`: "whole" (uncut, buckets by size), "blocks" (cut at
      all places, buckets by size) or "searched"; `tried_ms`: the time of each. `cut_ms`: the price of a
      cut. Without `fuse: {plan: auto}`, nothing is searched or foretold, and `measured_ms` is that of
      "blocks".
    - `compute_ms`: of computing alone. `exposed_ms`: that are expected to pass after it; `exposed_by`: the
      name of the parameter that they wait for.

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
