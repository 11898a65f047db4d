"""Options of the stage `dispatch`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, PlainSerializer

from mcr_plus.config.document import Keys
from mcr_plus.config.options import Scope, Seconds, StageOptions, duration_text
from mcr_plus.core.units import parse_duration
from mcr_plus.errors import in_yaml, short

_SHORTEST_SILENCE: Final = 0.5  # s; heartbeats are 0.1 s apart, and some may be lost


def _wait_or_seconds(value: object) -> object:
    return value if value == "wait" else _seconds(value, "wait")


def _word_or_seconds(value: object) -> object:
    if isinstance(value, bool):
        value = "auto" if value else "off"  # YAML 1.1 reads on and off as booleans
    if value in ("auto", "off"):
        return value
    seconds = _seconds(value, "auto, off")
    if seconds < _SHORTEST_SILENCE:
        raise ValueError(f"expected at least {_SHORTEST_SILENCE} s, got {short(value)}")
    return seconds


def _seconds(value: object, words: str) -> float:
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{error}; or {words}") from None


def _every(value: object) -> int:
    """Return 0 for `off` and 1 for `every`."""
    if value is False or value == "off":  # YAML 1.1 reads off as false
        return 0
    if value == "every":
        return 1
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"expected every, off or a number N for every Nth operation, got {in_yaml(value)}")


def _every_text(value: int) -> int | str:
    return {0: "off", 1: "every"}.get(value, value)


Every = Annotated[int, BeforeValidator(_every), PlainSerializer(_every_text)]
Heartbeat = Annotated[
    float | Literal["auto", "off"], BeforeValidator(_word_or_seconds), PlainSerializer(duration_text)
]
WaitOrSeconds = Annotated[
    float | Literal["wait"], BeforeValidator(_wait_or_seconds), PlainSerializer(duration_text)
]


class DispatchOptions(StageOptions):
    """Options of `dispatch`: the deadline in seconds, signature comparison, waiting, failover, verification.

    `progress`: the thread that advances operations in flight on libraries that need the host (MPI). `caller`:
    the program's thread, whenever it issues or waits. `thread`: a thread of its own, also while the program
    computes.

    `heartbeat`: in jobs on several hosts, seconds without a heartbeat after which a host counts as lost.
    `auto`: 30 s, or less if a library, the store or a connection fails too. `off`: no heartbeats.

    `stopped`: seconds after which a stopped rank (SIGSTOP, a debugger) counts as lost to ranks that wait for
    it. `wait`: they wait for it until the deadline.

    `failover`: when a library fails, the next one of `backends` takes over its collectives, and reruns those
    that are not complete on all ranks.

    `verify`: operations of each signature whose checksums are compared after sending and receiving: `every`
    one, every Nth, or `off`.

    Each option is marked with `Scope.JOB` or `Scope.GROUP`; a job-scoped option cannot differ between groups.
    """

    timeout: Annotated[Seconds, Scope.GROUP] = 300.0
    check: Annotated[Literal["first", "every"], Scope.GROUP] = "first"
    wait: Annotated[Literal["auto", "spin", "yield", "sleep"], Scope.JOB] = "auto"
    progress: Annotated[Literal["caller", "thread"], Scope.JOB] = "caller"
    heartbeat: Annotated[Heartbeat, Scope.JOB] = "auto"
    stopped: Annotated[WaitOrSeconds, Scope.JOB] = 0.5
    failover: Annotated[bool, Scope.GROUP] = False
    verify: Annotated[Every, Scope.GROUP] = 0

    @property
    def stop_grace(self) -> float:
        """`stopped` in seconds; infinite for `wait`."""
        return math.inf if self.stopped == "wait" else self.stopped

    def problem(
        self, stages: Collection[str] | None, backends: Sequence[str] | None
    ) -> tuple[Keys, str] | None:
        """See `StageOptions.problem`."""
        if self.failover and backends is not None and len(backends) < 2:
            text = f"true, but `backends` names only {backends[0]}; expected a second one that can take over"
            return ("failover",), text
        if self.failover and self.verify:
            return ("verify",), "cannot be used with `failover: true`, whose second libraries do not verify"
        return super().problem(stages, backends)
