"""Hooks of capabilities into a job, so that the job need not know the capabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.config.schema import Config
    from mcr_plus.job.runtime import Runtime
    from mcr_plus.rendezvous.world import World


class Follower(NamedTuple):
    """An object hooked into a world that moves to the world's replacement.

    Attributes:
        what: description for messages.
        comm: the group over whose ranks its gradients are averaged.
        branch: the name of the group in which they are averaged.
        named: its parameters by name.
        follow: hooks it into another group, with a branch of the given name; collective over that group.
            Broadcasts nothing.
    """

    what: str
    comm: Communicator
    branch: str
    named: Sequence[tuple[str, torch.nn.Parameter]]
    follow: Callable[[Communicator, str], None]


class JobHook:
    """Base class of a capability's part in the jobs of this process; every method does nothing.

    `registry.HOOKS` names the hooks of mcr_plus, and entry points of the group `mcr_plus.hooks` those of
    other packages. The process creates one object of each. A process has one job at a time, and may have
    several in turn.
    """

    def check(self, config: Config) -> None:
        """Raise `ConfigError` if this rank cannot do what `config` requires; precedes the comparison."""

    def prepare(self, config: Config, world: World) -> None:
        """Open what `config` requires, before any group exists. Raises `ConfigError` on this rank alone."""

    def accepts(self, stage: str, entry: object) -> bool:  # noqa: ARG002
        """Return False for an entry of a loaded state that this capability cannot use."""
        return True

    def begin(self, runtime: Runtime) -> None:
        """Take part in a job whose first group is open."""

    def followers(self, groups: Sequence[Communicator]) -> list[Follower]:  # noqa: ARG002
        """Return the objects hooked into these groups that move to the replacing world; local.

        The result keeps them alive.
        """
        return []

    def unfinished(self) -> str | None:
        """Return a warning of what the program has left undone at the orderly end of a job, or None."""
        return None

    def closing(self) -> None:
        """Called when the job's operations have ended here, or it cannot begin; peers may still work."""

    def closed(self) -> None:
        """Called after `closing`, when all ranks have ended the job, or none of them is waited for."""

    def abandon(self) -> None:
        """Drop all resources in a forked child, which does not have the parent's threads."""
