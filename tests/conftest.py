"""What holds for all tests."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import settings

# One of these names is in every module that starts processes.
_STARTERS = {"run_ranks", "subprocess", "example_runs", "launch", "jobs"}


def pytest_configure() -> None:
    # Beside other work an example may take any time.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
    # A shell starts background jobs with interrupts ignored, and programs inherit that. Tests of Ctrl-C send
    # interrupts to programs they start; those must hear them however pytest itself was started.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and not _STARTERS.isdisjoint(vars(item.module)):
            item.add_marker("jobs")
