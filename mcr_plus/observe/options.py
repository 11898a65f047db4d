"""The options under `observe:` of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from mcr_plus.config.options import Seconds, StageOptions
from mcr_plus.core.environment import dump_folder
from mcr_plus.errors import short

if TYPE_CHECKING:
    from mcr_plus.config.schema import Config

MOST: int = 1_000_000
"""Most operations that a group remembers; each takes about a hundred bytes."""


_PORTS: Final = range(1, 65536)


def _file_or_port(value: object) -> object:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value in _PORTS:
        return value
    if isinstance(value, str) and value.endswith(".prom") and "\0" not in value:
        return value
    raise ValueError(
        f"expected a file that ends with .prom, as node_exporter reads no others, or a port from 1 to 65535, "
        f"got {short(value)}"
    )


def _url(value: object) -> object:
    if value is None:
        return None
    try:
        parts = urlsplit(value) if isinstance(value, str) else None
        is_url = (
            parts is not None and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        )
    except ValueError:  # not a port number
        is_url = False
    if not is_url:
        raise ValueError(f"expected a URL such as http://localhost:4318, got {short(value)}")
    return value


class ObserveOptions(StageOptions):
    """Options of observation. They do not affect results, and ranks may differ in them.

    `dump`: the folder for Flight Recorder dumps, relative to the working directory; None means the folder of
    MCR_DUMP. With a folder, every failure of an operation writes dumps.

    `ring`: the number of its last operations that each group remembers.

    `prometheus`: a file for the textfile collector of node_exporter, or a port on loopback. Each rank has its
    own: its rank is added to the file's name, its rank on the host to the port.

    `otlp`: the URL of an OpenTelemetry collector over HTTP; a URL without a path gets the path of metrics,
    `/v1/metrics`.

    `every`: seconds between two publications of metrics; gauges cover the operations in between.
    """

    dump: Annotated[str, Field(min_length=1)] | None = None
    ring: Annotated[int, Field(ge=0, le=MOST)] = 2000
    prometheus: Annotated[str | int | None, BeforeValidator(_file_or_port)] = None
    otlp: Annotated[str | None, BeforeValidator(_url)] = None
    every: Annotated[Seconds, Field(ge=0.1)] = 5.0


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
