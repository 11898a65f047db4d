"""A communicator for every signature, and votes on the operations that ranks have started.

MPI matches the n-th collective of a communicator on one rank with the n-th on every other rank, whatever
their kinds. Mismatched collectives return garbage, and if sizes differ Open MPI writes past buffers. So every
signature has a communicator of its own: different operations are never matched, and stay pending until the
mismatch is detected. An operation that may complete before other ranks start it (a broadcast on its root, an
asynchronous operation) is reported complete only after a vote that all ranks have started the same operation.
Ranks vote before the start of vector collectives, with the numbers of elements, and of operations whose
signature got no communicator.
"""

from __future__ import annotations

import hashlib
import operator
from array import array
from collections.abc import Callable
from typing import Any, ClassVar, Final

from mcr_plus.backends.base import Poll, Start
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message
from mcr_plus.errors import BackendError, OperationsDiffer

# Limits on communicators for signatures: per group, and for all groups of a process. MPICH has 2,048
# communicators per process; a group takes three, and the program may use some.
_OF_A_GROUP: Final = 192
_OF_A_PROCESS: Final = 1024
_WORD: Final = 1 << 64


class Contexts:
    """Communicators of a group: one for each signature up to a limit, and a shared one for other signatures.

    Attributes:
        unreserved: number of communicators of this process that no group has reserved.
        in_the_making: communicators of this process that are being created.
    """

    unreserved: ClassVar[int] = _OF_A_PROCESS
    in_the_making: ClassVar[int] = 0

    def __init__(self, mpi: Any, comm: Any, group: Group, room: int) -> None:
        """`comm`: communicator for votes. `room`: limit of communicators, equal on all ranks."""
        self._mpi = mpi
        self._comm = comm
        self._group = group
        self.limit = self._taken = room
        # By digest, ordered by first start; all ranks have the same order.
        self.own: dict[int, Any] = {}
        self._shared: Any = None
        self._flow_factors = _flow_factors(group)
        Contexts.unreserved -= room

    @staticmethod
    def room() -> int:
        """Return the number of communicators that a new group may reserve on this rank."""
        return min(_OF_A_GROUP, Contexts.unreserved // 4)

    def of(self, digest: int) -> Any:
        """Return the communicator for a signature."""
        return self.own.get(digest, self._shared)

    def is_apart(self, digest: int) -> bool:
        """Return whether a signature has a communicator of its own."""
        return digest in self.own

    def free(self) -> None:
        """Free all communicators; collective."""
        for context in (*self.own.values(), self._shared):
            if context is not None:
                context.Free()
        Contexts.unreserved += self._taken

    def give_up(self) -> None:
        """Return the unused communicators of the reservation."""
        Contexts.unreserved += self._taken - len(self.own)
        self._taken = len(self.own)

    def make(self, digest: int | None) -> Poll | None:
        """Begin to create the communicator of a signature, or (None) the shared communicator.

        Returns None if it exists, or at the limit. Collective: all ranks have issued the operation. The poll
        raises `BackendError` if not even the shared communicator can be created.
        """
        there = self._shared is not None if digest is None else digest in self.own
        if there or (self._shared is not None and len(self.own) >= self.limit):
            return None
        mpi, problem = self._mpi, ""
        context: Any = None
        request: Any = None
        # A duplication that ranks have not begun holds up others in Open MPI, even those of other groups that
        # must end before these ranks can begin it. So no rank begins before all are ready to.
        ready: Poll = self._comm.Ibarrier().Test
        had = array("i", (1,))
        ballot: Poll | None = None

        def made() -> bool:
            nonlocal context, request, ballot, problem
            if request is None:
                if not ready():
                    return False
                context, request = self._duplicate()
            if ballot is None:
                try:
                    if not request.Test():
                        return False
                except mpi.Exception as error:  # no communicators left
                    had[0], problem = 0, str(error)
                else:
                    Contexts.in_the_making -= 1
                started: Poll = self._comm.Iallreduce(mpi.IN_PLACE, [had, mpi.INT], mpi.MIN).Test
                ballot = started
            if not ballot():
                return False
            if had[0]:
                context.Set_errhandler(mpi.ERRORS_RETURN)
                self._keep(context, digest)
            elif self._shared is None:
                raise BackendError(f"MPI has no communicator left: {problem or 'on another rank'}")
            else:
                self.limit = len(self.own)  # all further signatures share one communicator
            return True

        return made

    def _duplicate(self) -> Any:
        try:
            made = self._comm.Idup()
        except self._mpi.Exception as error:  # peers wait for this rank, so no vote is possible
            raise BackendError(f"MPI cannot create a communicator for the operation: {error}") from error
        Contexts.in_the_making += 1
        return made

    def _keep(self, context: Any, digest: int | None) -> None:
        if digest is None or len(self.own) >= self.limit:
            self._shared = context
        else:
            self.own[digest] = context

    def vote(self, digest: int, flows: int = 0) -> Poll:
        """Begin to compare an operation on all ranks; if they differ, a poll raises `OperationsDiffer`.

        `flows`: the `flow_sum` of a vector collective; the sum over all ranks is 0 if the counts match.
        """
        mpi, size = self._mpi, self._group.size
        mine, result = array("Q", (digest, flows)), array("Q", (0, 0))
        ballot = self._comm.Iallreduce([mine, mpi.UINT64_T], [result, mpi.UINT64_T], mpi.SUM).Test

        def counted() -> bool:
            if not ballot():
                return False
            if result[0] != size * mine[0]:  # keeps `mine` alive: mpi4py keeps no reference to it
                raise OperationsDiffer("another rank has started another operation in its place")
            if result[1]:
                raise OperationsDiffer("ranks send and expect different numbers of elements")
            return True

        return counted

    def flow_sum(self, message: Message) -> int:
        """Return sent minus expected elements, weighted by the factor of each pair of ranks, modulo 2⁶⁴."""
        if not message.compares_counts:
            return 0
        flows = zip(message.compared_flows(self._group.rank), self._flow_factors, strict=True)
        sent, expected = (int(sum(map(operator.mul, counts, factors))) for counts, factors in flows)
        return (sent - expected) % _WORD


class ContextGate:
    """Gate that creates a signature's communicator before the second operation, and votes if necessary.

    The first operation, which ranks have compared, uses the shared communicator, since many signatures occur
    only once. With `at_once` the first operation already has its own communicator.
    """

    def __init__(self, contexts: Contexts, digest: int, *, every: bool, at_once: bool) -> None:
        self._contexts, self._digest = contexts, digest
        self._is_first = not at_once
        self.every = every
        self.again = True

    def __call__(self, message: Message) -> Poll | None:
        """Begin the step for the next operation; None if the operation need not wait."""
        is_first, self._is_first = self._is_first, False
        self.again = is_first
        made = self._contexts.make(None if is_first else self._digest)
        if made is None:
            return self._vote(message)
        ballot: Poll | None = None

        def opens() -> bool:
            nonlocal made, ballot
            if made is not None:
                if not made():
                    return False
                made, ballot = None, self._vote(message)
            return ballot is None or ballot()

        return opens

    def _vote(self, message: Message) -> Poll | None:
        contexts = self._contexts
        if not self.again and not contexts.is_apart(self._digest):
            self.every = True  # no communicators left
        return contexts.vote(self._digest, contexts.flow_sum(message)) if self.every else None


def voted(start: Start, digest: int, cast: Callable[[int], Poll]) -> Start:
    """Wrap `start`: operations complete only after a vote that all ranks have started the same operation."""

    def start_and_vote(message: Message) -> Poll:
        poll, ballot = start(message), cast(digest)
        return lambda: ballot() and poll()  # a counted ballot may be polled again

    return start_and_vote


def _flow_factors(group: Group) -> tuple[list[int], list[int]]:
    """Return odd factors, one per pair of ranks: for this rank's sends and for its receives."""

    def factor(source: int, target: int) -> int:
        pair = f"{source}>{target}".encode()
        return int.from_bytes(hashlib.blake2b(pair, digest_size=8).digest(), "big") | 1

    ranks = range(group.size)
    return [factor(group.rank, rank) for rank in ranks], [factor(rank, group.rank) for rank in ranks]
