"""never_slower: measure on a few calls what a codec gains, and do without it where it loses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Final

import torch

from mcr_plus.dispatch.work import Work
from mcr_plus.interfaces import Issue, Next
from mcr_plus.message import Message, Signature

_log = logging.getLogger("mcr_plus")
_WARM: Final = 2
"""Calls of each way before it is timed: they allocate, compile and compare signatures."""
_TIMED: Final = 5
"""Calls of each way that are timed."""
_PERIOD: Final = 1000
"""Calls between two trials; twice as many after every trial that has changed nothing."""
_LONGEST: Final = 16_000
_LAG: Final = 8
"""Calls between a trial and its verdict, so that nobody waits for it where a call should only be issued."""


def never_slower(raw: Issue, compressed: Issue, codec: str, signature: Signature, next: Next) -> Issue:
    """Issue by whichever of two ways has been faster; which one, ranks agree on.

    A trial is a fixed number of calls, by turns one way and the other. After it the medians of all ranks
    are compared by an all_reduce of their maximum, and from the call after that on all ranks go the same
    way. What a call takes is the time until its end is noticed.
    """
    ways = (raw, compressed)
    wanted = signature.replace(
        kind="all_reduce", reduce_op="MAX", dtype=torch.float64, shape=(2,), nbytes=16, device="cpu",
        root=None, backend=None, parts=None, key=None, async_op=True,
    )  # fmt: skip
    agree = next(wanted)
    trial = 2 * (_WARM + _TIMED)
    times: tuple[list[float], list[float]] = ([], [])
    call, period, best, first = 0, _PERIOD, 0, True
    verdict: tuple[Work, torch.Tensor] | None = None

    def timed(way: int, message: Message) -> Work:
        begin = perf_counter()
        work = ways[way](message)
        return work.then(lambda: times[way].append(perf_counter() - begin))

    def ask() -> None:
        nonlocal verdict
        medians = torch.tensor([median(each[-_TIMED:]) if each else float("inf") for each in times])
        medians = medians.to(torch.float64)
        verdict = agree(Message(wanted, (medians,), (medians,))), medians

    def decide(work: Work, medians: torch.Tensor) -> None:
        nonlocal best, period, first, call, verdict
        work.wait()
        verdict = None
        without, with_codec = medians.tolist()
        chosen = 1 if with_codec < without else 0  # without, if nobody has waited for any yet
        level = logging.INFO if first or chosen != best else logging.DEBUG
        _log.log(
            level,
            "%s: codec %s takes %.3g ms, %.3g ms without it: %s",
            signature.describe(), codec, with_codec * 1e3, without * 1e3, "on" if chosen else "off",
        )  # fmt: skip
        period = _PERIOD if first or chosen != best else min(2 * period, _LONGEST)
        best, first, call = chosen, False, 0
        for each in times:
            each.clear()

    def issue(message: Message) -> Work:
        nonlocal call
        at = call if first else call - period
        call += 1
        if verdict is not None and at == trial + _LAG:
            decide(*verdict)
        if at < 0 or verdict is not None:
            return ways[best](message)
        work = timed(at % 2, message)
        if at == trial - 1:
            # Its own time is not known yet where the call is asynchronous: the median does without it.
            ask()
        return work

    direct: Callable[[Message], None] | None = getattr(raw, "run", None)
    if direct is not None:  # synchronous: between trials as fast as without all this

        def run(message: Message) -> None:
            nonlocal call
            if best == 0 and verdict is None and not first and call < period:
                call += 1
                direct(message)
            else:
                issue(message).wait()

        issue.run = run  # type: ignore[attr-defined]
    return issue
