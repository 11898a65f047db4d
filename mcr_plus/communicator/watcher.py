"""What is told of the operations that a program issues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from mcr_plus.core.group import Group
    from mcr_plus.pipeline.stage import Issue


class Watcher(Protocol):
    """Sees the program's operations as the program issues them, before the pipeline changes them."""

    @property
    def holds(self) -> bool:
        """Whether buckets of gradients are to be sent at the end of the backward pass, one after another."""
        ...

    def watched(self, group: Group, issue: Issue) -> Issue:
        """The same as `issue`, which the watcher is told of."""
        ...

    def ready(self, param: torch.Tensor) -> None:
        """The gradient of a parameter may be sent."""
        ...

    def carries(self, params: Sequence[torch.Tensor]) -> None:
        """The next operation that is issued carries the gradients of these parameters."""
        ...
