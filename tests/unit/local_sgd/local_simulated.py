"""Outer steps on simulated ranks, for the tests of `mcr.local`."""

from __future__ import annotations

from typing import Any

import torch
from local_oracle import INNER

from mcr_plus.local_sgd import arguments
from mcr_plus.local_sgd.local import LocalSteps

DEFAULTS: dict[str, Any] = {
    "every": 4, "fragments": 1, "delay": 0, "mix": 1.0, "compress": None, "uneven": False, "weighted": False,
    "warmup": 0, "gate": None,
}  # fmt: skip


def made(
    comm: Any, model: torch.nn.Module, outer: Any = None, inner: Any = None, **changed: Any
) -> LocalSteps:
    optimizer = inner or torch.optim.SGD(model.parameters(), **INNER)
    return LocalSteps(model, optimizer, outer, arguments.checked(**DEFAULTS | changed), comm)


def outer_values(local: LocalSteps) -> list[float]:
    return [each for fragment in local.fragments for each in fragment.anchor.tolist()]
