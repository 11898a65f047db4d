"""Status pages of ranks on other hosts, which the agents of a job send each other while somebody looks.

The agent of a host has a page of its own (`HOSTS`). A reader that wants to know of other hosts holds a shared
lock on it (flock), by which nothing is written. While one does, the agent asks the others for the pages of
their ranks, several times a second, and shows them on its page. Nothing here reads a socket; datagrams are
signed as heartbeats are, and an answer counts only for the question that this agent has asked.
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
"""Bytes of each of its places."""
_EVERY: Final = 0.25  # seconds between two questions
_FORGOTTEN: Final = 5.0  # seconds after which the page of a rank is not shown any more
_QUESTION: Final = struct.Struct("<4sH8s")  # magic, sender, number of the question
_ANSWER: Final = struct.Struct("<4sH8sId")  # the same, rank, the sender's clock
_ASKS: Final = b"mcrq"
_ANSWERS: Final = b"mcrp"
_TAG: Final = 16
_LARGEST: Final = 60_000  # bytes of an answer, which is one datagram


class Datagram(NamedTuple):
    """What is to be sent to the agent of a host."""

    host: int
    data: bytes


class PageExchange:
    """The part of an agent that exchanges pages. Times are seconds of its host's monotonic clock."""

    def __init__(self, hosts: int, me: int, key: bytes, job: str, own: Mapping[int, int], page: Page) -> None:
        """`own`: the process of each rank of this host. `page`: of this agent."""
        self._others = [host for host in range(hosts) if host != me]
        self._me, self._key, self._job, self._page = me, key, job, page
        self._own = own
        self._number = b""
        self._next = 0.0
        self._known: dict[int, dict[str, Any]] = {}
        self._is_new = False

    def step(self, now: float) -> Sequence[Datagram]:
        """Show what has come in, and ask anew if it is time and somebody looks."""
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
        """Take in a datagram; returns the answers to it, None if it is none of this kind."""
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
    """The page of a rank of a job, as an answer holds it; None if it has none."""
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
