"""The channel of a group of ranks in gloo: its connections, its threads, and its end."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Set
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.backends.base import Channel, Corrupted, Start
from mcr_plus.core import c10d
from mcr_plus.core.buffers import Pool
from mcr_plus.core.deadline import Deadline
from mcr_plus.core.group import Group
from mcr_plus.core.message import Signature
from mcr_plus.core.sockets import Sockets, shut_down, torn, unacknowledged
from mcr_plus.core.threads import all_wait

if TYPE_CHECKING:
    from mcr_plus.backends.gloo.operations import GlooOperations

_ASLEEP: Final = 0.03  # s for which threads must be seen waiting to count as idle
_UNACKNOWLEDGED: Final = 0.6  # s; TCP retransmits after 0.2 and 0.6 s


class GlooChannel(Channel):
    """A gloo group; `GlooOperations` binds its operations."""

    def __init__(
        self,
        process_group: Any,
        group: Group,
        timeout: timedelta,
        open_ones: list[GlooChannel],
        connections: Sockets,
        workers: Set[str],
        pool: Pool,
        hosts: int = 1,
    ) -> None:
        """`open_ones`: the backend's open channels.

        `connections`: connections to the peers. `workers`: threads, including all threads that run
        operations. `pool`: memory for received data that is not a result. `hosts`: number of hosts of the
        ranks.
        """
        # None once closed. Only this attribute keeps gloo's group alive: dropping the last reference destroys
        # it.
        self.pg: Any = process_group
        self._open_ones = open_ones
        self.running: set[object] = set()  # operations not known to be complete
        self.group, self.hosts, self.pool = group, hosts, pool
        self.timeout = timeout
        self._connections = connections
        self._workers = workers
        self._stopped = False
        self._asleep: Deadline | None = None  # since when the workers have been waiting

    def close(self) -> None:
        """See `Channel`."""
        self._open_ones.remove(self)
        if self._stopped and not self.is_idle:
            self.keep()
            stuck.append(self)
            return
        self.drop()

    def drop(self) -> None:
        """Drop gloo's group, which destroys it. Destroying waits for operations: see `is_idle`."""
        self.pg = None

    @property
    def is_idle(self) -> bool:
        """Return whether gloo has ended all operations, with or without an error."""
        running = tuple(self.running)  # a copy: other threads may remove operations
        ended = {work for work in running if isinstance(work, c10d.Work) and work.is_completed()}
        self.running -= ended
        return not self.running

    def silent_failure(self) -> str:
        """See `Channel`.

        gloo waits for a peer behind a cut link until gloo's own timeout. After about one in 25 broken
        connections it also does so for an operation that is complete on all other ranks.
        """
        # If there are more, another thread has opened connections meanwhile.
        if len(self._connections) == self.group.size - 1 and torn(self._connections):
            return "a connection to another rank is broken"
        peer = unacknowledged(self._connections, _UNACKNOWLEDGED)
        return f"the connection to {peer} has acknowledged nothing for {_UNACKNOWLEDGED:g} s" if peer else ""

    def stop_operations(self) -> bool:
        """See `Channel`.

        After a broken connection, gloo may let an operation wait for a message until its timeout. Once all
        connections are closed no message can arrive, and once all threads wait, arrived messages have been
        processed.
        """
        if not self._stopped:
            self._stopped = True
            with contextlib.suppress(RuntimeError, AttributeError):  # older versions of torch
                self.pg.abort()
            shut_down(self._connections)
        if self.is_idle:
            return True
        if not all_wait(self._workers):
            self._asleep = None
        elif self._asleep is None:
            self._asleep = Deadline(_ASLEEP)
        return self._asleep is not None and self._asleep.passed()

    def keep(self) -> None:
        """Keep gloo's group alive, even without other references, unless `let_go` follows."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.pg))

    def let_go(self) -> None:
        """Undo `keep`, and drop the group."""
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self.pg))
        self.drop()

    def release(self) -> None:
        """Close this rank's part while other ranks may still use theirs: gloo destroys a group locally.

        Destroying waits for pending operations, so a group with pending operations stays until the job ends.
        """
        if not self.running or self._stopped:
            self.close()

    @cached_property
    def _operations(self) -> GlooOperations:
        from mcr_plus.backends.gloo.operations import GlooOperations  # gloo is the last choice of most jobs

        return GlooOperations(self)

    def bind(self, signature: Signature) -> Start:
        """See `Channel`."""
        return self._operations.bind(signature)

    def bind_checked(self, signature: Signature, every: int, corrupted: Corrupted) -> Start | None:  # noqa: ARG002
        """See `Channel`."""
        return self._operations.bind_checked(signature, corrupted)


stuck: Final[list[GlooChannel]] = []
"""Closed channels that still hold an operation that gloo has not ended."""
