"""The options under `observe:` of a configuration."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, create_model

from mcr_plus import registry
from mcr_plus.config.options import Seconds, StageOptions
from mcr_plus.core.environment import dump_folder
from mcr_plus.errors import Unsupported

if TYPE_CHECKING:
    from mcr_plus.config.schema import Config

MOST: int = 1_000_000
"""Most operations that a group remembers; each takes about a hundred bytes."""


def _checked_range(text: str) -> str:
    """Check the name of one or several operations."""
    if operations_in(text) is None:
        raise ValueError(f"expected GROUP#NUMBER or GROUP#FIRST-LAST, as in world#57-60, got {text!r}")
    return text


def operations_in(text: str) -> tuple[str, range] | None:
    """Return the group (or its buckets) and the numbers of operations named by `text`; None if malformed."""
    found = re.fullmatch(r"(.+)#(\d{1,18})(?:-(\d{1,18}))?", text)
    return found and (found[1], range(int(found[2]), int(found[3] or found[2]) + 1))


def _with_folder(value: object) -> object:
    if value is not None and not registry.is_installed("hooks", "digests"):
        raise ValueError("this installation of mcr_plus has no folder `reproducible`")
    return {"folder": value} if isinstance(value, str) else value


class DigestOptions(StageOptions):
    """Options of digests: the `folder` of their files, and `keep`, the operations whose elements are kept.

    `keep` is as `mcr-plus compare` prints it: `GROUP#NUMBER`, or `GROUP#FIRST-LAST`.
    """

    folder: Annotated[str, Field(min_length=1)]
    keep: Annotated[str, AfterValidator(_checked_range)] | None = None


class ObserveOptions(StageOptions):
    """Options of observation. They do not affect results, and ranks may differ in all but `digests`.

    `dump`: the folder for Flight Recorder dumps, relative to the working directory; None means the folder of
    MCR_DUMP. With a folder, every failure of an operation writes dumps.

    `ring`: the number of its last operations that each group remembers.

    `digests`: the folder for digests of all operations' inputs and outputs, or `DigestOptions`.

    `every`: seconds between two publications of metrics; gauges cover the operations in between.

    `observe_options` adds an option for each sink of the registry.
    """

    dump: Annotated[str, Field(min_length=1)] | None = None
    ring: Annotated[int, Field(ge=0, le=MOST)] = 2000
    every: Annotated[Seconds, Field(ge=0.1)] = 5.0
    digests: Annotated[DigestOptions | None, BeforeValidator(_with_folder)] = None

    @property
    def sinks(self) -> dict[str, object]:
        """Values of the options that name sinks, by name."""
        fixed = ObserveOptions.model_fields
        return {name: value for name, value in self if name not in fixed and value is not None}


def observe_options() -> type[ObserveOptions]:
    """Return the model of the options under `observe:`, with an option for each sink."""
    return _with_sinks(registry.names("sinks"))


@cache
def _with_sinks(names: tuple[str, ...]) -> type[ObserveOptions]:
    if taken := ObserveOptions.model_fields.keys() & names:
        raise Unsupported(f"a sink has the name of an option under observe: {', '.join(sorted(taken))}")
    fields: dict[str, Any] = {
        name: (Annotated[object, BeforeValidator(partial(_checked, name))], None) for name in names
    }
    return create_model("ObserveOptions", __base__=ObserveOptions, **fields)


def _checked(name: str, value: object) -> object:
    from mcr_plus.observe.sinks import SinkOption

    try:
        return None if value is None else registry.checked("sinks", name, SinkOption).check(value)
    except Unsupported as error:
        raise ValueError(str(error)) from None


def dump_folder_of(config: Config) -> tuple[str | None, str]:
    """Return the folder for dumps, or None, and the option or variable that names it, for messages."""
    named = observed(config).dump
    if named is not None:
        return named, f"{config.name}: observe.dump"
    return dump_folder(), "MCR_DUMP"


def observed(config: Config) -> ObserveOptions:
    """Return the options under `observe:` of a configuration."""
    assert isinstance(config.observe, ObserveOptions)
    return config.observe
