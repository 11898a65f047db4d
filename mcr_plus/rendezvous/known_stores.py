"""Stores that this process serves or is connected to, so that it connects to each only once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store

known_stores: dict[tuple[str, int], Store] = {}
"""Stores by host and port of the server."""


def forget_store(host: str, port: int) -> None:
    """Forget a store after its connections were shut down, so that the next use connects anew."""
    known_stores.pop((host, port), None)
