"""Options of the stage `dispatch`."""

from __future__ import annotations

from typing import Literal

from mcr_plus.config.options import Seconds, StageOptions


class DispatchOptions(StageOptions):
    """Options of `dispatch`: the deadline in seconds, when ranks compare signatures, how a wait idles.

    `progress`: who advances operations in flight on libraries that need the host (MPI): the `caller`,
    whenever it issues or waits, or a `thread`, also while the program computes.
    """

    timeout: Seconds = 300.0
    check: Literal["first", "every"] = "first"
    wait: Literal["auto", "spin", "yield", "sleep"] = "auto"
    progress: Literal["caller", "thread"] = "caller"
