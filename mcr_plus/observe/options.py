"""The options under `observe:` of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from mcr_plus.config.options import StageOptions
from mcr_plus.core.environment import dump_folder

if TYPE_CHECKING:
    from mcr_plus.config.schema import Config

MOST: int = 1_000_000
"""Operations at most that a group remembers; each takes about a hundred bytes."""


class ObserveOptions(StageOptions):
    """What is written about a job. Nothing here changes what it does, and ranks may differ in it.

    `dump`: the folder for Flight Recorder dumps, relative to the working directory; None for the one that
    MCR_DUMP names. With a folder, every failure of an operation writes them.

    `ring`: how many of its last operations each group remembers.
    """

    dump: Annotated[str, Field(min_length=1)] | None = None
    ring: Annotated[int, Field(ge=0, le=MOST)] = 2000


def dump_folder_of(config: Config) -> tuple[str | None, str]:
    """The folder for dumps, None if there is none, and what names it, for messages."""
    named = observed(config).dump
    if named is not None:
        return named, f"{config.name}: observe.dump"
    return dump_folder(), "MCR_DUMP"


def observed(config: Config) -> ObserveOptions:
    """The options under `observe:` of a configuration."""
    assert isinstance(config.observe, ObserveOptions)
    return config.observe
