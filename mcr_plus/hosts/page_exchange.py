"""Status pages of ranks on other hosts: the agents of a job exchange them while a reader needs them.

A host's agent has a page of its own (`HOSTS`). A reader that needs other hosts' pages holds a shared lock on
it (flock), which writes nothing. Meanwhile the agent requests the pages of the other agents' ranks, several
times a second, and shows them on its page. This module reads no socket; datagrams are signed like heartbeats,
and an answer counts only for this agent's own question.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from mcr_plus.hosts.page import NAME, Page, Unreadable, read

HOSTS: Final = "mcr_plus:hosts"
"""Name of the memory of an agent's page."""
ROOM: Final = 1 << 22
"""Bytes of each place of the page."""
_EVERY: Final = 0.25  # seconds between two questions
_FORGOTTEN: Final = 5.0  # s after which the page of a rank is no longer shown
_QUESTION: Final = struct.Struct("<4sH8s")  # magic, sender, number of the question
_ANSWER: Final = struct.Struct("<4sH8sId")  # as `_QUESTION`, then rank, and the sender's clock
_ASKS: Final = b"mcrq"
_ANSWERS: Final = b"mcrp"
_TAG: Final = 16
_LARGEST: Final = 60_000  # maximum bytes of an answer, which is one datagram


class Datagram(NamedTuple):
    """Data to send to the agent of a host."""

    host: int
    data: bytes


class PageExchange:
    """Part of an agent that exchanges pages. Times are in seconds of its host's monotonic clock."""

    def __init__(self, hosts: int, me: int, key: bytes, job: str, own: Mapping[int, int], page: Page) -> None:
        """`own`: the process of each rank of this host. `page`: this agent's page."""
        self._others = [host for host in range(hosts) if host != me]
        self._me, self._key, self._job, self._page = me, key, job, page
        self._own = own
        self._number = b""
        self._next = 0.0
        self._known: dict[int, dict[str, Any]] = {}
        self._is_new = False

    def step(self, now: float) -> Sequence[Datagram]:
        """Show received pages, and ask again if it is time and there is a reader."""
        if not self._is_watched():
            self._number = b""
            return ()
        if self._is_new:
            self._is_new = False
            known = {rank: each for rank, each in self._known.items() if now - each["received"] < _FORGOTTEN}
            self._known = known
            self._page.show({"at": now, "ranks": {str(rank): each for rank, each in known.items()}})
        if self._number and now < self._next:
            return ()
        self._next = now + _EVERY
        self._number = self._number or secrets.token_bytes(8)
        question = self._signed(_QUESTION.pack(_ASKS, self._me, self._number))
        return [Datagram(host, question) for host in self._others]

    def receive(self, data: bytes, now: float) -> Sequence[Datagram] | None:
        """Receive a datagram; return the answers to it, None if it is another type of datagram."""
        body, tag = data[:-_TAG], data[-_TAG:]
        if body[:4] not in (_ASKS, _ANSWERS):
            return None
        if not hmac.compare_digest(tag, self._signature(body)):
            return ()
        if body[:4] == _ASKS and len(body) == _QUESTION.size:
            _, sender, number = _QUESTION.unpack(body)
            return list(self._answers(sender, number, now)) if sender in self._others else ()
        if body[:4] == _ANSWERS and len(body) > _ANSWER.size:
            _, _, number, rank, clock = _ANSWER.unpack_from(body)
            if self._number and number == self._number and rank not in self._own:
                self._take(rank, body[_ANSWER.size :], now, now - clock)
        return ()

    def _take(self, rank: int, packed: bytes, now: float, shift: float) -> None:
        with contextlib.suppress(zlib.error, ValueError, TypeError, RecursionError):
            unpacking = zlib.decompressobj()
            text = unpacking.decompress(packed, ROOM)
            self._known[rank] = {**json.loads(text), "received": now, "shift": shift}
            self._is_new = True

    def _answers(self, sender: int, number: bytes, now: float) -> list[Datagram]:
        answers = []
        for rank, pid in self._own.items():
            shown = _page_of(pid, self._job)
            if shown is None:
                continue
            body = _ANSWER.pack(_ANSWERS, self._me, number, rank, now) + zlib.compress(shown.encode(), 1)
            if len(body) <= _LARGEST:
                answers.append(Datagram(sender, self._signed(body)))
        return answers

    def _is_watched(self) -> bool:
        try:
            fcntl.flock(self._page.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(self._page.descriptor, fcntl.LOCK_UN)
        return False

    def _signed(self, body: bytes) -> bytes:
        return body + self._signature(body)

    def _signature(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")[:_TAG]


def _page_of(pid: int, job: str) -> str | None:
    """Return a rank's page for an answer; None if it has none."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            path = f"{folder}/{name}"
            with contextlib.suppress(OSError, Unreadable):
                if not os.readlink(path).startswith(f"/memfd:{NAME} "):
                    continue
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    shown = read(descriptor)
                finally:
                    os.close(descriptor)
                if shown.about.get("job") == job:
                    return json.dumps({"version": shown.version, "picture": shown.picture})
    return None
