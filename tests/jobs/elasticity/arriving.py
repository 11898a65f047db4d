"""Jobs in which a rank dies in `mcr.init`, or its host is cut off; what the others raise.

    python arriving.py FOLDER HOW STEP VICTIM    as a rank; with the variables of a launcher

`HOW`: `dies`; `stops`, as a debugger stops a process; `is busy`, with the interpreter's lock, for as long as
an import may take; or `stands still` until there is a file `go` in FOLDER. `STEP`: where, see `STEPS`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import mcr_plus as mcr
from mcr_plus.job import init
from mcr_plus.rendezvous import store as stores

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("", "support"))  # of a program

from losing import _MARK, written

RUN: Final = {"version": 1, "backends": ["gloo"], "pipeline": [{"select": {}}, {"dispatch": {}}]}
WITHIN: Final = 60.0
"""Seconds in which ranks are told on a busy machine: `init` and `reset` wait for 300."""
BUSY: Final = 5
"""Seconds for which a rank does nothing else: a silent host and a stopped process would show before."""
STEPS: Final = {
    "before the secret": (stores, "_offered_secret"),
    "before the hosts": (init, "world_of"),
    "before the checks": (init, "choose_backends"),
    "in the world": (init, "Runtime"),
}
"""Where in `init` a rank dies: a module, and the function that it does not return from."""


def die(*_: Any, **__: Any) -> NoReturn:
    """End this process as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def told_by(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call raises."""
    began = time.monotonic()
    try:
        call()
    except mcr.McrError as error:
        return {
            "error": type(error).__name__,
            "ranks": list(getattr(error, "ranks", ())),
            "text": str(error),
            "soon": time.monotonic() - began < WITHIN,
        }
    return {"error": ""}


def rank(folder: str, how: str, step: str, victim: str) -> None:
    """Runs on ranks."""
    own, os.environ[_MARK] = os.environ["RANK"], folder  # by which agents are found
    if own == victim:
        module, name = STEPS[step]
        usual = getattr(module, name)

        def stand_still(*arguments: Any, **options: Any) -> Any:
            written(Path(folder, f"still.{own}"), {})
            if how == "is busy":
                ctypes.PyDLL(None).sleep(BUSY)  # which does not let go of the lock
            while how == "stands still" and not Path(folder, "go").exists():
                time.sleep(0.01)
            if how == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            return usual(*arguments, **options)

        setattr(module, name, die if how == "dies" else stand_still)
    written(Path(folder, f"told.{own}"), told_by(lambda: mcr.init(RUN)))
    time.sleep(WITHIN)  # the test ends it: had it left, those that are told later might name this rank


if __name__ == "__main__":
    rank(*sys.argv[1:])
