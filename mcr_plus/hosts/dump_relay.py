"""Relay of dump requests to other hosts: a host's agent forwards its ranks' requests.

This module reads no clock and no socket. Datagrams are signed like heartbeats, and a host's numbers grow, so
that nobody else can send or replay a request.
"""

from __future__ import annotations

import hmac
import math
import struct
from collections import deque
from typing import Final

from mcr_plus.hosts.dump_request import EVERYBODY, SAME_FAILURE
from mcr_plus.hosts.page_exchange import Datagram

_HEAD: Final = struct.Struct("<4sHQ")  # magic, sender, number
_MAGIC: Final = b"mcrd"
_TAG: Final = 16
_AGAIN: Final = (0.05, 0.2)  # s after which a request is sent again, as a datagram may be lost


class DumpRelay:
    """Part of an agent that forwards requests. Times are in seconds of its host's monotonic clock."""

    def __init__(self, hosts: int, me: int, key: bytes) -> None:
        self._others = [host for host in range(hosts) if host != me]
        self._me, self._key = me, key
        self._number = 0
        self._latest: dict[int, int] = {}  # host → number of its last request
        self._again: deque[tuple[float, bytes]] = deque()
        self._failures: dict[str, float] = {}  # group → time at which any agent forwarded its failure

    def ask(self, text: str, now: float) -> list[Datagram]:
        """Return the datagrams that request dumps from the agents of all other hosts.

        Empty if all agents have received a request for the same failure, which many ranks may find at once.
        """
        if self._is_known(text, now):
            return []
        # The clock continues if another agent takes over, so numbers always grow.
        self._number = max(self._number + 1, int(now * 1e6))
        body = _HEAD.pack(_MAGIC, self._me, self._number) + text.encode()
        data = body + self._signature(body)
        self._again = deque(sorted([*self._again, *((now + later, data) for later in _AGAIN)]))
        return [Datagram(host, data) for host in self._others]

    def step(self, now: float) -> list[Datagram]:
        """Return the datagrams that are due to be sent again."""
        due = []
        while self._again and self._again[0][0] <= now:
            due.append(self._again.popleft()[1])
        return [Datagram(host, data) for data in due for host in self._others]

    def _is_known(self, text: str, now: float) -> bool:
        """Return whether a request is for a failure of a group for which there has just been a request."""
        group = text.partition("\0")[0]
        if group in ("", EVERYBODY):
            return False
        is_known = now - self._failures.get(group, -math.inf) < SAME_FAILURE
        if not is_known:
            self._failures[group] = now
        return is_known

    def receive(self, data: bytes, now: float) -> str | None:
        """Receive a datagram; return the request for this host's ranks, empty if they have had it.

        None if it is another type of datagram.
        """
        body, tag = data[:-_TAG], data[-_TAG:]
        if body[:4] != _MAGIC:
            return None
        if len(body) < _HEAD.size or not hmac.compare_digest(tag, self._signature(body)):
            return ""
        _, sender, number = _HEAD.unpack_from(body)
        if sender not in self._others or number <= self._latest.get(sender, 0):
            return ""
        self._latest[sender] = number
        text = body[_HEAD.size :].decode(errors="replace")
        self._is_known(text, now)
        return text

    def _signature(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")[:_TAG]
