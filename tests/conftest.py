"""What holds for all tests."""

from __future__ import annotations

import os
import signal

import torch


def pytest_configure() -> None:
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
    # A shell starts background jobs with interrupts ignored, and programs inherit that. Tests of Ctrl-C send
    # interrupts to programs they start; those must hear them however pytest itself was started.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
