"""State that stages keep between calls, in a form that any number of ranks can save and load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class StateTensor:
    """Tensor kept between calls, and its relation to the tensors of the other ranks.

    `own`: ranks hold different tensors; the mean over ranks is saved. `shard`: the tensor covers the values
    that this rank sums; the shards are saved concatenated in rank order. `shared`: equal on all ranks.
    """

    name: str
    role: Literal["own", "shard", "shared"]
    tensor: torch.Tensor


def holds_tensors(value: object) -> bool:
    """Return True if an entry of a saved state holds named tensors, not plain data."""
    return isinstance(value, Mapping) and all(isinstance(each, torch.Tensor) for each in value.values())
