"""A group of ranks in MPI: collectives on communicators by signature, and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mcr_plus.backends.base import Channel, Corrupted, FirstCalls, Poll, Start
from mcr_plus.backends.mpi.collectives import Collectives, op_of
from mcr_plus.backends.mpi.contexts import ContextGate, Contexts, voted
from mcr_plus.backends.mpi.p2p import MatchingQueue, Receive
from mcr_plus.backends.mpi.persistent import MpiRequest, PersistentRequests
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import ROOTED, VECTOR
from mcr_plus.core.message import Message, Signature

if TYPE_CHECKING:
    from mcr_plus.backends.mpi.checked import CheckedMessages


class MpiChannel(Channel):
    """Operations of an MPI group. `is_off` returns True if this process must no longer call MPI."""

    takes_ballots = True

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        messages: Any,
        group: Group,
        busy: set[MatchingQueue],
        room: int,
        is_off: Callable[[], bool],
    ) -> None:
        """`room`: maximum number of signatures with a communicator, the same on all ranks."""
        self._comm = comm
        self._messages = messages
        self.matching = MatchingQueue(mpi, messages, group, busy)
        self.collectives = Collectives(mpi, group)
        self.contexts = Contexts(mpi, comm, group, room)
        self._checked: CheckedMessages | None = None
        self._mpi = mpi
        self._requests = PersistentRequests(mpi, self.collectives, self.contexts)
        self._is_off = is_off

    def close(self) -> None:
        """See `Channel`."""
        if self._is_off():
            return
        self._requests.free()
        self.contexts.free()
        self._messages.Free()
        self._comm.Free()

    def give_up(self) -> None:
        """See `Channel`. Returns the unused communicators of the reservation."""
        self.contexts.give_up()

    def gate(self, signature: Signature, digest: int) -> ContextGate:
        """See `Channel`."""
        is_persistent = digest != signature.digest()
        every = signature.kind in VECTOR and not signature.counts_agreed
        return ContextGate(self.contexts, digest, every=every, at_once=is_persistent)

    def bind_persistent(self, signature: Signature, message: Message, digest: int) -> MpiRequest | None:
        """See `Channel`."""
        return self._requests.bind(signature, message, digest)

    def bind_checked(self, signature: Signature, every: int, corrupted: Corrupted) -> Start | None:
        """See `Channel`. Only small messages, in a group whose messages all carry checksums."""
        from mcr_plus.backends.mpi.checked import MOST, CheckedMessages  # needs numba

        if every != 1 or not 0 < (signature.nbytes or 0) <= MOST:
            return None
        if self._checked is None:
            self._checked = CheckedMessages(self._mpi, self._messages, self.matching)
        is_send = signature.kind == "send"
        return self._checked.send(signature) if is_send else self._checked.receive(signature, corrupted)

    def bind(self, signature: Signature) -> Start:
        """See `Channel`."""
        if signature.is_p2p:
            return self._send(signature) if signature.kind == "send" else self._recv(signature)
        digest = signature.digest()
        if signature.reduce_op is not None and signature.dtype is not None:
            op_of(signature)  # raises if unsupported, compiles if needed
        calls = 0

        def first(message: Message) -> Poll:
            nonlocal calls
            calls += 1
            bound = self._bind_on(self.contexts.of(digest), signature, digest, once=calls == 1)
            if calls > 1:
                start.settle(bound)
            return bound(message)

        start = FirstCalls(first)
        return start

    def _bind_on(self, comm: Any, signature: Signature, digest: int, *, once: bool) -> Start:
        bound = None
        # Small operations get a persistent request, which does not pay for an operation that runs once.
        if signature.kind == "all_reduce" and not once and not signature.async_op:
            bound = self._requests.staged(signature, comm)
        if bound is None:
            bound = self.collectives.bind(signature, comm)
        elif signature.reduce_op == "AVG":
            bound = self.collectives.divided(bound, signature)
        is_vector = signature.kind in VECTOR
        if is_vector and not signature.counts_agreed:  # the gate votes before every operation
            return bound
        ends_early = signature.async_op or is_vector or signature.kind in ROOTED  # on some rank
        if not (ends_early and self.votes):
            return bound
        vote = self.contexts.vote
        return voted(bound, digest, vote if signature.async_op else self.ballots or vote)

    def _send(self, signature: Signature) -> Start:
        assert signature.dtype is not None
        spec, dtype = self.collectives.spec(signature), signature.dtype
        call, tag = self._messages.Isend, self.matching.tag

        def start(message: Message) -> Poll:
            poll: Poll = call(spec(message.inputs[0]), message.peer, tag(dtype, message.match_tag)).Test
            return poll

        return start

    def _recv(self, signature: Signature) -> Start:
        spec, queue = self.collectives.spec(signature), self.matching

        def start(message: Message) -> Poll:
            out = message.outputs[0]
            return queue.post(Receive(queue, signature, message.peer, message.match_tag, out, spec(out)))

        return start
