"""Open a group's board."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from mcr_plus.board.base import GroupBoard
from mcr_plus.board.shared import SharedBoard
from mcr_plus.board.shared import map_shared as map_shared

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store
    from mcr_plus.core.group import Group


def open_board(store: Store | None, group: Group, shared: bool, timeout: float) -> GroupBoard:
    """Open the board of `group`, the same kind on all ranks; collective over the group."""
    if group.size == 1 or store is None:
        return GroupBoard()
    questions = f"board/{group.name}/votes"
    if shared:
        memory, descriptor = map_shared(store, group)
        try:
            mapped = _all(store, f"{questions}/mapped", group.size, memory is not None, timeout)
        finally:
            if descriptor is not None:  # every rank has mapped the memory, or never will
                os.close(descriptor)
        if mapped and memory is not None:
            return SharedBoard(memory, group)
    from mcr_plus.board.store import StoreBoard  # imported here: most jobs have one host

    stored = StoreBoard(store, group)
    _all(store, f"{questions}/stored", group.size, True, timeout)  # before any rank reads another's row
    return stored


def _all(store: Store, what: str, size: int, mine: bool, timeout: float) -> bool:
    """Return whether `mine` is true on all ranks; waits for them. `what`: a new name for the question."""
    if not mine:
        store.set(f"{what}/no", "")
    if store.add(f"{what}/ranks", 1) == size:
        store.set(f"{what}/done", "")
    store.wait([f"{what}/done"], timedelta(seconds=timeout))
    return not store.check([f"{what}/no"])
