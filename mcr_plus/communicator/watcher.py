"""The interface of an observer of the operations that a program issues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from mcr_plus.core.group import Group
    from mcr_plus.pipeline.stage import Issue


class OperationWatcher(Protocol):
    """An observer of operations as the program issues them, before the pipeline changes them."""

    @property
    def holds(self) -> bool:
        """True if buckets of gradients must be sent one after another at the end of the backward pass."""
        ...

    def watched(self, group: Group, issue: Issue) -> Issue:
        """Return an equivalent of `issue` that also reports each operation to the watcher."""
        ...

    def ready(self, param: torch.Tensor) -> None:
        """Report that the gradient of a parameter is ready to be sent."""
        ...

    def carries(self, params: Sequence[torch.Tensor]) -> None:
        """Report that the next operation carries the gradients of these parameters."""
        ...
