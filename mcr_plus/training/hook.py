"""Hook by which wrapped models take part in events of the job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcr_plus.job.hooks import Follower, JobHook

if TYPE_CHECKING:
    from mcr_plus.communicator.communicator import Communicator


class TrainingHook(JobHook):
    """Hook that lets wrapped models and optimizers follow their groups into another world."""

    def followers(self, groups: Sequence[Communicator]) -> list[Follower]:
        """Return the wrapped models and optimizers that follow `groups`, see `JobHook`."""
        wrap = sys.modules.get("mcr_plus.training.wrap")  # a program without wrapped models never loads it
        return [] if wrap is None else wrap.followers_of(groups)
