"""The job's store as seen by one group: the group's keys are removed when all its ranks have left it."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from mcr_plus.core.c10d import Store, WrappedStore, put

if TYPE_CHECKING:
    from mcr_plus.core.group import Group


class GroupStore(WrappedStore):
    """The keys of `store`, with a note of the keys that this rank has written.

    A key is never removed while a rank of the group may still read it: the rank that leaves last removes all
    keys. A counter has several writers, and is noted by the group's rank 0.
    """

    def __init__(self, store: Store, group: Group) -> None:
        """`group`: a group that includes this process."""
        super().__init__(store)
        self._group = group
        self._written: set[str] = set()

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._written.add(key)
        put(self._store, key, value.encode() if isinstance(value, str) else value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write a value if the key has the expected one (none for ''); return the resulting value."""
        self._written.add(key)
        return super().compare_set(key, expected_value, desired_value)

    def add(self, key: str, value: int) -> int:
        """Add to a counter; return its new value."""
        if self._group.rank == 0:
            self._written.add(key)
        return super().add(key, value)

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it existed."""
        self._written.discard(key)
        return super().delete_key(key)

    def leave(self) -> None:
        """Note that this rank reads no more values; the last rank to do so removes the keys of all.

        Call it once. If a rank never does, or the store does not answer, the keys stay.
        """
        group, store = self._group, self._store
        lists = [f"left/{group.name}/{rank}" for rank in range(group.size)]
        count = f"left/{group.name}/ranks"
        with contextlib.suppress(RuntimeError):
            put(store, lists[group.rank], json.dumps(sorted(self._written)).encode())
            if store.add(count, 1) < group.size:
                return
            for key in lists:
                for written in json.loads(store.get(key)):
                    store.delete_key(written)
                store.delete_key(key)
            store.delete_key(count)
