"""`RunningJob`: the interface of a running job that a communicator uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.communicator.open_group import OpenGroup
    from mcr_plus.config.schema import Config
    from mcr_plus.engine.engine import Engine
    from mcr_plus.rendezvous.world import World

ValueT = TypeVar("ValueT")


class RunningJob(Protocol):
    """The interface of a running job for communicators; `mcr_plus.job.runtime.Runtime` documents it."""

    engine: Engine
    world: World

    def open_group(  # noqa: D102
        self, name: str, ranks: tuple[int, ...], config: Config | None = None, *, checked: bool = False
    ) -> Communicator: ...

    def agree(  # noqa: D102
        self,
        communicator: Communicator,
        value: ValueT,
        what: str,
        sizes: Callable[[Sequence[ValueT]], Sequence[int]],
    ) -> list[ValueT]: ...

    def leave(self, communicator: Communicator, clean: bool = True) -> None: ...  # noqa: D102

    def close_together(self, opened: OpenGroup) -> None: ...  # noqa: D102
