"""Rendezvous of a communicator's ranks before the ranks call NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store


class Meeting:
    """Returns the communicator's unique id once all its ranks have arrived, None before.

    Ranks call NCCL only after that: NCCL would wait for absent ranks, and cannot be stopped while it creates
    a communicator.
    """

    def __init__(
        self, store: Store | None, name: str, size: int, rank: int, make: Callable[[], bytes]
    ) -> None:
        """`name`: a new name, unused in the store. `make`: creates the id, on rank 0."""
        self._store = store
        self._name = name
        self._size = size
        self._rank = rank
        self._make = make
        self._has_come = False

    def __call__(self) -> bytes | None:
        """Return the id, or None while ranks are missing."""
        store, name = self._store, self._name
        if store is None or self._size == 1:
            return self._make()
        if not self._has_come:
            self._has_come = True
            self._come(store)
        if not store.check([name, f"{name}/come"]):
            return None
        return bytes.fromhex(store.get(name).decode())

    def _come(self, store: Store) -> None:
        if self._rank == 0:
            store.set(self._name, self._make().hex())
        last = self._rank == 1 if self._size == 2 else store.add(f"{self._name}/ranks", 1) == self._size
        if last:
            store.set(f"{self._name}/come", "")
