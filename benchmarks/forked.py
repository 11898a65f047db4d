"""Processes that are forked from this one, which has imported torch, so that they begin at once."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def forked(body: Callable[[], None], errors: Path) -> int:
    """Run `body` in another process, which ends without teardown; returns its id.

    What it raises and logs goes to the file `errors`, and what it is at, at SIGUSR1.
    """
    gc.freeze()  # what both share is not copied to count its references
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        with errors.open("ab") as file:
            os.dup2(file.fileno(), 2)
        faulthandler.register(signal.SIGUSR1)
        torch.set_num_threads(1)
        body()
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def ended(pids: Mapping[int, int], within: float) -> dict[int, int | None]:
    """Wait for the processes; returns their statuses, minus the signal: None of one that was killed here."""
    ends = time.monotonic() + within
    statuses: dict[int, int | None] = {}
    for rank, pid in pids.items():
        done, code = os.waitpid(pid, os.WNOHANG)
        while not done and time.monotonic() < ends:
            time.sleep(0.002)
            done, code = os.waitpid(pid, os.WNOHANG)
        if not done:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        statuses[rank] = os.waitstatus_to_exitcode(code) if done else None
    return statuses
