"""Options of the stage `dispatch`."""

from __future__ import annotations

from typing import Annotated, Literal

from mcr_plus.config.options import Scope, Seconds, StageOptions


class DispatchOptions(StageOptions):
    """Options of `dispatch`: the deadline in seconds, when ranks compare signatures, how a wait idles.

    `progress`: the thread that advances operations in flight on libraries that need the host (MPI): the
    `caller`, whenever it issues or waits, or a `thread` of its own, also while the program computes.

    Each option is marked with `Scope.JOB` or `Scope.GROUP`: groups of a job cannot differ in the former.
    """

    timeout: Annotated[Seconds, Scope.GROUP] = 300.0
    check: Annotated[Literal["first", "every"], Scope.GROUP] = "first"
    wait: Annotated[Literal["auto", "spin", "yield", "sleep"], Scope.JOB] = "auto"
    progress: Annotated[Literal["caller", "thread"], Scope.JOB] = "caller"
