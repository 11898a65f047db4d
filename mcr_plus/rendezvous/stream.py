"""Authenticated connections for weights: frames of a fixed head and a body, from a source to a receiver.

Each receiver opens one TCP connection to each source. Both ends announce their version of frames and digests,
and refuse another one. Both prove that they have the key of the synchronisation by signing
numbers that the other end has drawn. A receiver outside the job also names the offer that it takes. Then the
receiver requests versions newer than the one that it holds; the source answers when it has one. An `AIM`
frame before a request has two numbers. The first is the version requested, as soon as the source has it, or 0
for the newest; the source also answers with the newest if it can no longer lead to the requested version. The
second is the number of bytes that take as long to arrive as the changes of one version take to be applied.
A receiver on another host also tells the port of its relay (`ENTER`) and what it has seen of relays
(`REPORT`); the source may answer with a relay in place of payloads (`RELAYED`), to which the receiver opens a
connection for one message. There is no other traffic, so either end may close at any time. A frame:

    head, 32 bytes | SHA-256 of the body | HMAC-SHA-256 of both and the frame's number | the body
    body: the lengths of payloads, uint64 each | the payloads

The HMAC key is derived per connection and direction from the drawn numbers, so that no frame can be changed,
left out, repeated or taken from another connection. The hash of a body covers the lengths and the payloads'
hashes, so that the source hashes a payload once, however many receivers it has. The hash of a payload covers
the hashes of its pieces; the receiver hashes one piece while the next is on its way.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mcr_plus.core.addresses import family_of
from mcr_plus.errors import BackendError

if TYPE_CHECKING:
    import torch

WAIT, POLL, PAYLOADS, END, AIM, JOIN, RELAYED, ENTER, REPORT = range(9)
"""Kinds of frames: a request that waits for a newer version, and one that does not; answers; the end of
answers; the target of the next request; the offer that a receiver outside the job takes, with its number; an
answer that names a relay, and the request to it; the port of a relay; what a receiver has seen of one.
"""
FAILED: Final = 1
"""First number of an `END` after a failure of this end; 0 after an orderly close."""
JOINER: Final = (1 << 32) - 1
"""Rank in greetings of a receiver outside the job. Such receivers draw numbers above this one."""

_HEAD: Final = struct.Struct("<4sBxxxQQQ")
_MAGIC: Final = b"mcrw"
_LOOK_S: Final = 0.25
"""Interval in s at which a waiting end checks whether it must end."""
_CONNECTS_WITHIN: Final = 5.0  # s per try
_GREETS_WITHIN: Final = 10.0  # s; strangers may connect too, and send nothing
_ANSWERS_WITHIN_MS: Final = 30_000
_NONCE: Final = 32
_GREETING: Final = struct.Struct("<4sI")
VERSION: Final = 3
"""Version of frames and digests; payloads have that of `kernels.delta`, whose import loads a compiler."""
_SIGNATURE: Final = 32
_HASH: Final = 32
_PIECE: Final = 4 << 20
_HASHERS: Final = 4  # threads; each hashes 1 to 2 GB/s, and a connection delivers at most several GB/s


class StreamClosed(Exception):
    """Raised when this side has to close the connection."""


class AuthenticationFailed(ConnectionError):
    """A frame failed authentication: nothing more on this connection can be trusted."""


class Payload(NamedTuple):
    """Bytes of a body, and the SHA-256 of the hashes of their pieces."""

    data: memoryview
    hash: bytes

    @classmethod
    def of(cls, wire: torch.Tensor | bytes) -> Payload:
        """Create the payload of bytes or of flat uint8; shares their memory."""
        view: Any = wire if isinstance(wire, bytes) else wire.numpy()  # type checkers know no buffer there
        data = memoryview(view)
        return cls(data, _joined([_begun(piece) for piece in _pieces(data)]))


class _Signatures:
    """Signatures of the frames of one direction of a connection, in order."""

    def __init__(self, secret: bytes, role: bytes, nonces: bytes, rank: int) -> None:
        self._key = _signed(secret, b"frames of the " + role, nonces, rank)
        self._number = 0

    def next(self, signed: bytes) -> bytes:
        """Return the signature of the next frame."""
        self._number += 1
        return hmac.digest(self._key, struct.pack("<Q", self._number) + signed, "sha256")


class StreamConnection:
    """One end of a connection. `ends`: returns whether it must end, called several times a second.

    `silent`: seconds without any byte after which the other end counts as lost.

    `is_sending`: whether a frame has been sent in part. `moved`: time of the last bytes sent or received, by
    `time.monotonic`. `arrived`: payloads of the last body, which they share.
    """

    def __init__(self, connection: socket.socket, ends: Callable[[], bool], silent: float = math.inf) -> None:
        self._socket, self._ends, self._silent = connection, ends, silent
        self.is_sending, self.moved = False, time.monotonic()
        self.arrived: list[Payload] = []
        self._own: _Signatures | None = None
        self._theirs: _Signatures | None = None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):
            if hasattr(socket, option):  # a lost host answers no probes, a stopped process does
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # probes are sent only while no data waits for an answer
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _ANSWERS_WITHIN_MS)
        connection.settimeout(_LOOK_S)

    @property
    def hosts(self) -> tuple[str, str]:
        """Addresses of this end and of the other one. Raises `OSError` if the connection is broken."""
        return self._socket.getsockname()[0], self._socket.getpeername()[0]

    @property
    def is_authenticated(self) -> bool:
        """True if both ends have proved that they know the secret."""
        return self._own is not None

    def sign(self, secret: bytes, nonces: bytes, rank: int, *, is_source: bool) -> None:
        """Sign all frames sent from now on, and expect signatures on received frames."""
        source, receiver = (_Signatures(secret, role, nonces, rank) for role in (b"source", b"receiver"))
        self._own, self._theirs = (source, receiver) if is_source else (receiver, source)

    def send(self, kind: int, first: int = 0, second: int = 0, payloads: Sequence[Payload] = ()) -> None:
        """Send a signed frame with two numbers; for a frame with payloads, `second` is their number.

        Raises `OSError` if the connection breaks, or `StreamClosed`.
        """
        assert self._own is not None
        sizes = struct.pack(f"<{len(payloads)}Q", *(len(each.data) for each in payloads))
        nbytes = len(sizes) + sum(len(each.data) for each in payloads)
        signed = _HEAD.pack(_MAGIC, kind, nbytes, first, second)
        signed += _hash_of_body(sizes, [each.hash for each in payloads])
        self.is_sending = True
        self._send(memoryview(signed + self._own.next(signed) + sizes))
        for each in payloads:
            self._send(each.data)
        self.is_sending = False

    def _send(self, part: memoryview) -> None:
        while part:
            part = part[self._sent(part) :]

    def _sent(self, part: memoryview) -> int:
        try:
            sent = self._socket.send(part)
        except TimeoutError:
            self._look()
            return 0
        self.moved = time.monotonic()
        return sent

    def receive(
        self, most: int, announced: Callable[[int, int], object] | None = None
    ) -> tuple[int, int, int, bytearray]:
        """Receive a frame of `send` with a body of at most `most` bytes: kind, its numbers, the body.

        `announced` is called with the kind and the first number before the body arrives. Raises as `send`
        does, `EOFError` at the end, and `AuthenticationFailed` for data that the other end has not sent.
        """
        assert self._theirs is not None
        signed, signature = self.take(_HEAD.size + _HASH), self.take(_SIGNATURE)
        if not hmac.compare_digest(signature, self._theirs.next(bytes(signed))):
            raise AuthenticationFailed(
                "the head of a frame of weights does not have the signature of the other end"
            )
        magic, kind, nbytes, first, second = _HEAD.unpack_from(signed)
        if magic != _MAGIC or nbytes > most:
            raise BackendError(f"a frame of {nbytes} bytes of weights begins with {magic!r}; most: {most}")
        if announced is not None:
            announced(kind, first)
        self.arrived = []
        if not nbytes:
            return kind, first, second, bytearray()
        body = bytearray(nbytes)
        begin = 8 * second
        self.fill(memoryview(body)[:begin])
        sizes, hashes = struct.unpack_from(f"<{second}Q", body), []
        if begin + sum(sizes) != nbytes:
            raise AuthenticationFailed(f"payloads of {sum(sizes)} bytes came in a frame of {nbytes - begin}")
        for size in sizes:
            begun, data = [], memoryview(body)[begin : begin + size]
            for piece in _pieces(data):
                self.fill(piece)
                begun.append(_begun(piece))
            hashes.append(_joined(begun))
            self.arrived.append(Payload(data, hashes[-1]))
            begin += size
        if _hash_of_body(bytes(body[: 8 * second]), hashes) != signed[_HEAD.size :]:
            raise AuthenticationFailed(
                f"{nbytes} bytes of weights came that are not those that the other end has signed"
            )
        return kind, first, second, body

    def take(self, nbytes: int, within: float = math.inf) -> bytearray:
        """Receive `size` bytes; raise `EOFError` if they have not arrived in time."""
        data = bytearray(nbytes)
        self.fill(memoryview(data), within)
        return data

    def fill(self, space: memoryview, within: float = math.inf) -> None:
        """Receive bytes into `space`, as `take` does."""
        ends = time.monotonic() + within
        while space:
            space = space[self._some(space) :]
            if space and time.monotonic() > ends:
                raise EOFError(f"the other end has sent nothing for {within:g} s")

    def _some(self, space: memoryview) -> int:
        """Receive into `space`; return the number of bytes, 0 if none have arrived for a while."""
        try:
            got = self._socket.recv_into(space)
        except TimeoutError:
            self._look()
            return 0
        if not got:
            raise EOFError("the other end has closed the connection")
        self.moved = time.monotonic()
        return got

    def check(self) -> None:
        """Raise `EOFError` or `OSError` if the other end has closed the connection; read nothing from it."""
        if self.has_come() and not self._socket.recv(1, socket.MSG_PEEK):
            raise EOFError("the other end has closed the connection")

    def has_come(self) -> bool:
        """Return whether data has arrived or the other end has closed; `EOFError` if this end has closed."""
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise EOFError("this end has closed the connection")
        waiting = select.poll()  # a `recv` would wait for the timeout of the socket
        waiting.register(descriptor, select.POLLIN)
        return bool(waiting.poll(0))

    def put(self, data: bytes | memoryview) -> None:
        """Send bytes without a frame."""
        self._send(memoryview(data))

    def close(self) -> None:
        """Close this end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _look(self) -> None:
        if self._ends():
            raise StreamClosed
        if time.monotonic() - self.moved > self._silent:
            raise EOFError(f"nothing has come for {self._silent:g} s")


def named(rank: int) -> str:
    """Return a receiver in words: a rank of the job, or the number of one outside it."""
    return f"rank {rank}" if rank < JOINER else f"receiver {rank:016x} from outside the job"


def key_of(secret: bytes, nonce: str) -> bytes:
    """Return the key of one synchronisation, from which the job's secret cannot be derived."""
    return hmac.digest(secret or b"\0", b"key of weights " + nonce.encode(), "sha256")


def listen(address: str) -> socket.socket:
    """Return a socket for receivers to connect to."""
    listener = socket.create_server((address, 0), family=family_of(address), backlog=128)
    listener.settimeout(_LOOK_S)
    return listener


def greet(link: StreamConnection, secret: bytes, rank: int) -> None:
    """Prove to the source that this is rank `rank` of the job, and check that the source is of the job.

    Raises `BackendError` if it is not, or has another version.
    """
    _take_greeting(link, "the source of weights")
    theirs, mine = bytes(link.take(_NONCE, within=_GREETS_WITHIN)), secrets.token_bytes(_NONCE)
    link.put(
        _GREETING.pack(_MAGIC, VERSION)
        + struct.pack("<I", rank)
        + mine
        + _signed(secret, b"receiver", theirs + mine, rank)
    )
    answer = bytes(link.take(_SIGNATURE, within=_GREETS_WITHIN))
    if not hmac.compare_digest(answer, _signed(secret, b"source", theirs + mine, rank)):
        raise BackendError("a process that is not of this job listens where the source of weights should")
    link.sign(secret, theirs + mine, rank, is_source=False)


def greeted(link: StreamConnection, secret: bytes) -> int:
    """Return the rank at the other end, after both ends have proved their identity.

    Raises `BackendError` if the other end does not know the secret of the job, or has another version.
    """
    mine = secrets.token_bytes(_NONCE)
    link.put(_GREETING.pack(_MAGIC, VERSION) + mine)
    _take_greeting(link, "a receiver of weights")
    answer = bytes(link.take(4 + _NONCE + _SIGNATURE, within=_GREETS_WITHIN))
    (rank,), nonces = struct.unpack("<I", answer[:4]), mine + answer[4 : 4 + _NONCE]
    if not hmac.compare_digest(answer[4 + _NONCE :], _signed(secret, b"receiver", nonces, rank)):
        raise BackendError("a process that is not of this job asked for weights")
    link.put(_signed(secret, b"source", nonces, rank))
    link.sign(secret, nonces, rank, is_source=True)
    return int(rank)


def _take_greeting(link: StreamConnection, other: str) -> None:
    """Receive the greeting of the peer; peers older than version 2 send none."""
    magic, version = _GREETING.unpack(link.take(_GREETING.size, within=_GREETS_WITHIN))
    if magic != _MAGIC:
        raise BackendError(
            f"{other} does not greet as version {VERSION} of this connection does: it is not of this job, or "
            "has another version of mcr_plus"
        )
    if version != VERSION:
        raise BackendError(
            f"{other} has version {version} of this connection, not {VERSION}: all ranks need the same "
            "version of mcr_plus"
        )


def connect(
    place: tuple[str, int],
    secret: bytes,
    rank: int,
    ends: Callable[[], bool],
    tries: int,
    offer: int | None = None,
    within: float = _CONNECTS_WITHIN,
    silent: float = math.inf,
) -> StreamConnection:
    """Connect to the source; raises `OSError` or `EOFError` if it does not answer, `StreamClosed`.

    `rank`: rank of this receiver; outside the job its number, and `offer` is the offer that it takes.
    `within`: seconds that a try may wait for a connection, if shorter than usual. `silent`: see
    `StreamConnection`.

    Raises `BackendError` if another process or another version answers.
    """
    for left in reversed(range(tries)):
        link = None
        try:
            link = StreamConnection(
                socket.create_connection(place, timeout=min(within, _CONNECTS_WITHIN)), ends, silent
            )
            greet(link, secret, min(rank, JOINER))
            if offer is not None:
                link.send(JOIN, offer, rank)
            return link
        except (OSError, EOFError, BackendError, StreamClosed) as error:
            if link is not None:
                link.close()
            if not left or isinstance(error, (BackendError, StreamClosed)):
                raise
        if ends():
            raise StreamClosed
        time.sleep(_LOOK_S)
    raise AssertionError(tries)


def longest(nbytes: int) -> int:
    """Return the most bytes of an answer that a receiver accepts for weights of this size."""
    return 2 * nbytes + (1 << 20)


def hash_of(payloads: Sequence[Payload]) -> str:
    """Return the hash that is signed for a body of these payloads, hexadecimal."""
    sizes = struct.pack(f"<{len(payloads)}Q", *(len(each.data) for each in payloads))
    return _hash_of_body(sizes, [each.hash for each in payloads]).hex()


def _signed(secret: bytes, role: bytes, nonces: bytes, rank: int) -> bytes:
    return hmac.digest(secret or b"\0", b"weights " + role + nonces + struct.pack("<I", rank), "sha256")


def _pieces(data: memoryview) -> list[memoryview]:
    return [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]


def _begun(piece: memoryview) -> Callable[[], bytes]:
    """Begin to hash a piece, on another thread if it is long; the result returns the hash."""
    if len(piece) == _PIECE:
        return _hashers().submit(_sha256, piece).result
    return partial(bytes, _sha256(piece))


def _joined(begun: Sequence[Callable[[], bytes]]) -> bytes:
    return _sha256(b"".join(each() for each in begun))


def _sha256(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


@cache
def _hashers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_HASHERS, thread_name_prefix="mcr_plus-hash")


def _hash_of_body(sizes: bytes, hashes: Sequence[bytes]) -> bytes:
    return _sha256(sizes + b"".join(hashes))
