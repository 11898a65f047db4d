"""Streams of the device of the tests, and delays on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from jobs.devices import openreg
from reference import DEVICE

_CYCLES: Final = 2_000_000  # of a GPU, about a millisecond


def begin() -> None:
    """Choose the device of a rank; all ranks share the first."""
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    if DEVICE == "openreg":
        openreg.simulate()


def stream() -> Any:
    """Return another stream."""
    return torch.cuda.Stream() if DEVICE == "cuda" else torch.Stream(DEVICE)


def current() -> Any:
    """Return the current stream."""
    return torch.cuda.current_stream() if DEVICE == "cuda" else torch.accelerator.current_stream()


@contextmanager
def under(stream: Any) -> Iterator[Any]:
    """Make a stream the current one."""
    with torch.cuda.stream(stream) if DEVICE == "cuda" else openreg.under(stream):
        yield stream


def delay() -> None:
    """Let the current stream do nothing for about a millisecond."""
    torch.cuda._sleep(_CYCLES) if DEVICE == "cuda" else openreg.delay()
