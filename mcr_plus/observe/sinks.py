"""Sinks for metrics: their interface, and those that a configuration names."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mcr_plus import registry
from mcr_plus.errors import ConfigError, Unsupported

if TYPE_CHECKING:
    from mcr_plus.observe.metrics import Family


class Sink(ABC):
    """Base class of places where metrics are published.

    Attributes:
        name: the name in messages.
        waits: whether publishing may wait for another process.
    """

    name: str
    waits = False

    @abstractmethod
    def publish(self, metrics: Sequence[Family]) -> None:
        """Publish; raise any error if that fails."""

    def close(self) -> None:  # noqa: B027 - most sinks keep nothing open
        """Release open resources."""

    def abandon(self) -> None:  # noqa: B027
        """Release the parent's resources in a forked child, without disturbing the parent."""


class SinkOption(NamedTuple):
    """An option under `observe:` that opens a sink; the registry has it under the option's name.

    Attributes:
        check: function of the option's value that returns the value to use, or raises `ValueError`.
        open: function of that value, a rank, and the rank's number on its host that returns an open sink. It
            raises `OSError` or `Unsupported` if that fails.
    """

    check: Callable[[object], object]
    open: Callable[[Any, int, int], Sink]


def require(module: str, package: str) -> None:
    """Raise `Unsupported` if a package of the extra `metrics` is not installed."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        found = False
    if not found:
        extra = "pip install 'mcr_plus[metrics]' brings it"
        raise Unsupported(f"needs {package}, which is not installed; {extra}")


def open_sinks(targets: Mapping[str, object], *, rank: int, local: int) -> list[Sink]:
    """Open the sinks of a rank, from the values of their options; `local` is its rank on its host.

    Raises `ConfigError` if one cannot be opened; then none stays open.
    """
    sinks: list[Sink] = []
    name = ""
    try:
        for name, target in targets.items():
            sinks.append(registry.checked("sinks", name, SinkOption).open(target, rank, local))
    except (OSError, OverflowError, Unsupported) as error:
        for sink in sinks:
            sink.close()
        text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"observe.{name}: {text}") from None
    return sinks
