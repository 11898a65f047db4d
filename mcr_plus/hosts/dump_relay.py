"""Requests for dumps on their way to other hosts: the agent of a host passes those of its ranks on.

Nothing here reads a clock or a socket. Datagrams are signed as heartbeats are, and numbers of a host grow, so
that nobody else can ask, nor ask again.
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
_AGAIN: Final = (0.05, 0.2)  # seconds after which a request is sent again: a datagram may be lost


class DumpRelay:
    """The part of an agent that passes requests on. Times are seconds of its host's monotonic clock."""

    def __init__(self, hosts: int, me: int, key: bytes) -> None:
        self._others = [host for host in range(hosts) if host != me]
        self._me, self._key = me, key
        self._number = 0
        self._latest: dict[int, int] = {}  # host → number of its last request
        self._again: deque[tuple[float, bytes]] = deque()
        self._failures: dict[str, float] = {}  # group → when the failure was passed on by anybody

    def ask(self, text: str, now: float) -> list[Datagram]:
        """What asks the agents of all other hosts for the dumps of their ranks.

        Nothing if all have been asked because of the same failure, which many ranks may find at once.
        """
        if self._is_known(text, now):
            return []
        # The clock goes on where an agent takes another one's place, so numbers always grow.
        self._number = max(self._number + 1, int(now * 1e6))
        body = _HEAD.pack(_MAGIC, self._me, self._number) + text.encode()
        data = body + self._signature(body)
        self._again = deque(sorted([*self._again, *((now + later, data) for later in _AGAIN)]))
        return [Datagram(host, data) for host in self._others]

    def step(self, now: float) -> list[Datagram]:
        """What is to be sent again by now."""
        due = []
        while self._again and self._again[0][0] <= now:
            due.append(self._again.popleft()[1])
        return [Datagram(host, data) for data in due for host in self._others]

    def _is_known(self, text: str, now: float) -> bool:
        """Whether a request is because of a failure of a group, and another one for it has just been."""
        group = text.partition("\0")[0]
        if group in ("", EVERYBODY):
            return False
        is_known = now - self._failures.get(group, -math.inf) < SAME_FAILURE
        if not is_known:
            self._failures[group] = now
        return is_known

    def receive(self, data: bytes, now: float) -> str | None:
        """Take in a datagram; returns what the ranks of this host are asked, empty if they have been.

        None if it is none of this kind.
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
