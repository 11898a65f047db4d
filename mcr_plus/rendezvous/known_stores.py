"""The stores that this process serves or is connected to, so that it connects to each once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store

known_stores: dict[tuple[str, int], Store] = {}
"""By host and port of the server."""


def forget_store(host: str, port: int) -> None:
    """Connect anew at the next use: this process has shut its connections down."""
    known_stores.pop((host, port), None)
