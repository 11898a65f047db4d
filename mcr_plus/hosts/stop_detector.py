"""The witness of a rank: a small process beside it in `init` that reports when the rank is stopped.

A stopped process sends nothing, but its kernel still answers for it. A thread of the process could not tell a
stop from an extension that holds the GIL. So another process reads /proc. It imports only the standard
library, and ends when the rank releases it or has ended.

The witnesses of ranks on other hosts connect to rank 0's witness. Each reports on its connections when its
rank stops and continues, and tells its own rank the reports of the others (`REPORT`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from mcr_plus.core.proc import Stop, state_of
from mcr_plus.hosts.handshake import Handshakes, greeting

REPORT: Final = struct.Struct("<I?")
"""Report of a witness to its rank: another rank, and whether that rank is stopped."""
_LOOK_EVERY: Final = 0.1  # s between checks of the rank, since nothing announces a stop
_CONNECTS_WITHIN: Final = 2.0  # seconds
_STOPPED: Final = b"s"
_RUNS: Final = b"r"


class StopDetector:
    """The witness of one rank.

    `order` is written by `rendezvous.init_connections`: process id and start time of its rank (`process`),
    the rank's number (`rank`), the `key` of greetings (hexadecimal), the seconds after which the rank counts
    as stopped (`grace`), and `address`, where rank 0's witness listens; None for that witness itself.
    """

    def __init__(
        self, order: Mapping[str, Any], control: socket.socket, listener: socket.socket | None
    ) -> None:
        """`control`: the connection with its rank. `listener`: on rank 0, for the other witnesses."""
        self._pid, self._started = order["process"]
        self._grace: float = order["grace"]
        self._control = control
        key = bytes.fromhex(order["key"])
        self._door = None if listener is None else Handshakes(listener, key, lambda _: None)
        self._links: dict[int, socket.socket] = {}
        self._reports: dict[int, bool] = {}  # latest report of each rank, not yet sent
        self._is_stopped = False
        self._stop: Stop | None = None  # stop of the rank, if it is stopped
        if order["address"] is not None:
            host, port = order["address"]
            with contextlib.suppress(OSError):  # unreachable: stops are not reported
                link = socket.create_connection((host, port), _CONNECTS_WITHIN)
                link.sendall(greeting(key, order["rank"]))
                link.setblocking(False)
                self._links[0] = link

    def run(self) -> None:
        """Work until the rank releases this process, or has ended."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)  # readable when the rank closes its end
        while not poll.poll(1e3 * _LOOK_EVERY):
            state = state_of(self._pid, self._started)
            if state == "dead":
                return
            self._judge(state == "stopped")
            for rank, link in self._door.come() if self._door is not None else ():
                self._links[rank] = link
                if self._is_stopped:
                    self._say(link, _STOPPED)
            for rank, link in list(self._links.items()):
                self._hear(rank, link)
            self._report()

    def _judge(self, stands: bool) -> None:
        """Check whether the rank is stopped now, and report a change once it is certain."""
        now = time.monotonic()
        self._stop = (self._stop or Stop(self._grace, now)) if stands else None
        is_stopped = self._stop is not None and self._stop.is_certain(now)
        if is_stopped != self._is_stopped:
            self._is_stopped = is_stopped
            for link in self._links.values():
                self._say(link, _STOPPED if is_stopped else _RUNS)

    def _say(self, link: socket.socket, what: bytes) -> None:
        with contextlib.suppress(OSError):  # the next read of the link shows the error
            link.send(what)

    def _hear(self, rank: int, link: socket.socket) -> None:
        try:
            said = link.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:  # the end of that witness says nothing of its rank
            self._links.pop(rank).close()
        self._reports[rank] = said[-1:] == _STOPPED

    def _report(self) -> None:
        """Pass the others' reports to the own rank; keep reports that the kernel cannot buffer for later."""
        for rank, is_stopped in list(self._reports.items()):
            try:
                self._control.send(REPORT.pack(rank, is_stopped))
            except OSError:
                return
            del self._reports[rank]


def main() -> None:
    """Read an order from standard input, and run the witness."""
    order = json.loads(sys.stdin.buffer.read())
    os.chdir("/")
    control = socket.socket(fileno=order["control"])
    control.setblocking(False)
    listener = None if order["listener"] is None else socket.socket(fileno=order["listener"])
    StopDetector(order, control, listener).run()
    os._exit(0)
