"""The state that stages keep between calls, in a form that any number of ranks can save and load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class StateTensor:
    """A tensor that outlives a call, and its relation to those of the other ranks.

    `own`: every rank has another; the mean over ranks is saved. `shard`: of the part of the values that this
    rank sums; the parts are saved end to end in the order of ranks. `shared`: equal on all ranks.
    """

    name: str
    role: Literal["own", "shard", "shared"]
    tensor: torch.Tensor


def holds_tensors(value: object) -> bool:
    """Whether an entry of a saved state holds tensors, by name, and not plain data."""
    return isinstance(value, Mapping) and all(isinstance(each, torch.Tensor) for each in value.values())
