"""What capabilities do at the turning points of a job, so that the job need not know them."""

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
    """What is hooked into the world that takes the place of its own.

    Attributes:
        what: for messages.
        comm: the group over whose ranks its gradients are averaged.
        branch: the name of the group in which that is done.
        named: its parameters.
        follow: hooks it into another group, with a branch of this name; collective over it. Nothing is
            broadcast.
    """

    what: str
    comm: Communicator
    branch: str
    named: Sequence[tuple[str, torch.nn.Parameter]]
    follow: Callable[[Communicator, str], None]


class JobHook:
    """Base class of a capability's part in the jobs of this process; every method does nothing.

    `registry.HOOKS` names those that come with mcr_plus, and entry points of the group `mcr_plus.hooks` those
    of other packages. The process makes one of each. A process has one job at a time, and several in turn.
    """

    def check(self, config: Config) -> None:
        """Raise `ConfigError` if this rank cannot do what `config` wants, before ranks compare theirs."""

    def prepare(self, config: Config, world: World) -> None:
        """Open what `config` wants, before there are any groups. Raises `ConfigError` on this rank alone."""

    def accepts(self, stage: str, entry: object) -> bool:  # noqa: ARG002
        """Return False for an entry of a loaded state that this capability will not be able to use."""
        return True

    def begin(self, runtime: Runtime) -> None:
        """Take part in a job whose first group is open."""

    def followers(self, groups: Sequence[Communicator]) -> list[Follower]:  # noqa: ARG002
        """Return what is hooked into these groups and moves to the world that replaces theirs; local.

        The result keeps it alive.
        """
        return []

    def closing(self) -> None:
        """The job's operations have ended here, or the job cannot begin; peers may still be at work."""

    def closed(self) -> None:
        """All ranks have ended the job, or none of them is waited for. Called after `closing`."""

    def abandon(self) -> None:
        """Let go of everything in a forked child, in which the parent's threads do not run."""
