"""A keeper: a small process beside the ranks of a host, with a copy of the members' decisions.

`mcr.init` starts it if no launcher has a store that outlives the ranks. It imports only the standard library
and ends when the ranks of its host have ended. It holds values by key, and has one thread, so that each
request is one step. It is not restarted after its death: a keeper without the values would be worse than
none.

A connection begins with the job's token. Requests follow: kind, lengths of key and value, key, value. Each
has an answer: whether there is a value, its length, and the value.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import resource
import select
import socket
import struct
import sys
from typing import Any, Final

from mcr_plus.core.proc import state_of
from mcr_plus.hosts.acceptor import Acceptor

TOKEN: Final = 32  # bytes
REQUEST: Final = struct.Struct("<BII")
ANSWER: Final = struct.Struct("<BI")
SET, GET, COMPARE_SET, ADD, LEAVE = range(5)
_LONGEST: Final = 1 << 26  # bytes of a key or a value
_LOOK_EVERY: Final = 2000  # ms between checks of ranks whose end nothing announces
_SENT_WITHIN: Final = 1.0  # seconds


class KeyReplica:
    """The values, and the ranks of the host that may need them.

    `order` is written by `rendezvous.key_replicas`: the `token` (hexadecimal), and process id and start time
    of each rank of this host (`processes`).
    """

    def __init__(self, order: dict[str, Any], listener: socket.socket) -> None:
        self._token = bytes.fromhex(order["token"])
        self._values: dict[bytes, bytes] = {}
        self._acceptor = Acceptor(listener, "keeper", members=len(order["processes"]))
        self._buffers: dict[socket.socket, bytearray] = {}
        self._greeted: set[socket.socket] = set()
        self._ranks = {(int(pid), started) for pid, started in order["processes"]}
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._by_descriptor: dict[int, socket.socket] = {}
        for pid, _ in self._ranks:
            with contextlib.suppress(OSError, AttributeError):  # without pidfds, periodic checks do
                self._poll.register(os.pidfd_open(pid), select.POLLIN)

    def run(self) -> None:
        """Answer requests until all ranks of the host have ended, or have left."""
        while self._ranks:
            for descriptor, _ in self._poll.poll(_LOOK_EVERY):
                if descriptor == self._acceptor.listener.fileno():
                    self._accept()
                elif (peer := self._by_descriptor.get(descriptor)) is not None:
                    self._serve(peer)
                else:  # a rank has ended
                    self._poll.unregister(descriptor)
            self._acceptor.expire()
            self._ranks = {each for each in self._ranks if state_of(*each) != "dead"}

    def answer(self, kind: int, key: bytes, value: bytes) -> bytes | None:
        """Return the value of a key after a request, None if it has none."""
        if kind == SET or (kind == COMPARE_SET and key not in self._values):
            self._values[key] = value
        elif kind == ADD:
            self._values[key] = str(int(self._values.get(key, b"0")) + int(value)).encode()
        elif kind == LEAVE:
            pid, started = json.loads(value)
            self._ranks.discard((pid, started))
        return self._values.get(key)

    def _accept(self) -> None:
        if (peer := self._acceptor.accept()) is not None:
            peer.settimeout(_SENT_WITHIN)
            self._buffers[peer] = bytearray()
            self._by_descriptor[peer.fileno()] = peer
            self._poll.register(peer, select.POLLIN)

    def _serve(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(1 << 16)
            self._buffers[peer] += data
            if not data or not self._answer_all(peer):
                self._drop(peer)
        except (OSError, ValueError):
            self._drop(peer)

    def _answer_all(self, peer: socket.socket) -> bool:
        """Answer the requests that have arrived; return False for a stranger."""
        buffer = self._buffers[peer]
        if peer not in self._greeted:
            if len(buffer) < TOKEN:
                return True
            if not hmac.compare_digest(bytes(buffer[:TOKEN]), self._token) or not self._acceptor.admit(peer):
                return False
            del buffer[:TOKEN]
            self._greeted.add(peer)
        while len(buffer) >= REQUEST.size:
            kind, keys, values = REQUEST.unpack_from(buffer)
            if max(keys, values) > _LONGEST:
                return False
            middle, end = REQUEST.size + keys, REQUEST.size + keys + values
            if len(buffer) < end:
                return True
            found = self.answer(kind, bytes(buffer[REQUEST.size : middle]), bytes(buffer[middle:end]))
            del buffer[:end]
            peer.sendall(ANSWER.pack(found is not None, len(found or b"")) + (found or b""))
        return True

    def _drop(self, peer: socket.socket) -> None:
        self._poll.unregister(peer)
        del self._by_descriptor[peer.fileno()], self._buffers[peer]
        self._greeted.discard(peer)
        self._acceptor.refuse(peer, "it does not have the token of this job")


def main() -> None:
    """Read an order from standard input, and run the keeper; the started process itself ends."""
    order = json.loads(sys.stdin.buffer.read())
    if os.fork():
        os._exit(0)  # the keeper is nobody's child, so no rank has to wait for it
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.close(nothing)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # each rank of the job has a connection
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    KeyReplica(order, socket.socket(fileno=order["socket"])).run()
    os._exit(0)
