"""Synthetic steps: known computation, and gradients that become ready at known times."""

from __future__ import annotations

from collections.abc import Sequence

from mcr_plus.bucketing.step import CapturedStep, ComputeEvent, Event, IssueEvent, ReadyEvent, Role, WaitEvent

Gradients = Sequence[tuple[str, int, float]]
"""Name, bytes, and seconds of computation since the previous gradient."""


def step_of(
    gradients: Gradients,
    *,
    forward: float = 0.0,
    after: float = 0.0,
    ranks: int = 2,
    seconds: float | None = None,
) -> CapturedStep:
    """Return a step that is equal on all ranks; gradients travel as one operation of `seconds` at the end."""
    whole = tuple(range(ranks))
    names = tuple(name for name, _, _ in gradients)
    events: list[Event] = [ComputeEvent("forward", forward)]
    for name, nbytes, before in gradients:
        events += [ComputeEvent("backward", before), ReadyEvent(name, nbytes, "float32 cpu")]
    total = sum(nbytes for _, nbytes, _ in gradients)
    events += [
        IssueEvent(0, "all_reduce", total, whole, "gradients", seconds, names),
        WaitEvent(0),
        ComputeEvent("end", after),
    ]
    computed = forward + after + sum(before for _, _, before in gradients)
    return CapturedStep(ranks, 1, "0" * 16, computed + (seconds or 0.0), 0.0, (Role(whole, tuple(events)),))
