"""Persistent requests of MPI-4, for operations bound to tensors and for small all_reduces."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

from mcr_plus.backends.base import Poll, Start
from mcr_plus.backends.mpi.collectives import SPECS, Collectives, datatype_of, op_of
from mcr_plus.backends.mpi.contexts import Contexts, voted
from mcr_plus.core.kinds import ROOTED, collective
from mcr_plus.core.message import Message, Signature
from mcr_plus.rendezvous.mpi_library import load_mpi

_STAGED_BYTES: Final = 4096  # up to this size two copies cost less than a nonblocking call
_KINDS: Final = ("all_reduce", "broadcast", "all_gather", "all_to_all", "reduce_scatter", "barrier")
_NAMES: Final = {kind: f"{collective(kind).mpi.capitalize()}_init" for kind in _KINDS}


@cache
def has_persistent() -> bool:
    """Return True if MPI 4's persistent collectives can be used; Open MPI 5 has them, but reports MPI 3.1.

    Those of Intel MPI 2021.18 are wrong: a restarted scatter or all_gather delivers the data of the first
    start, and a restarted gather delivers nothing.
    """
    mpi = load_mpi()
    if "Intel(R) MPI" in mpi.Get_library_version():
        return False
    try:
        mpi.COMM_SELF.Barrier_init().Free()
    except NotImplementedError:
        return False
    return True


class MpiRequest:
    """A persistent request. The first start creates it, because creation is an ordered collective."""

    def __init__(self, make: Callable[[], tuple[Callable[[], object], Poll]]) -> None:
        self._make = make
        self.begin: Callable[[], object] = self._first
        self.test: Poll = self._not_yet

    def _first(self) -> None:
        self.begin, self.test = self._make()
        self.begin()

    @staticmethod
    def _not_yet() -> bool:
        raise RuntimeError("tested before it was begun")


class _User:
    """Token that lives as long as a request can be started or polled."""


class PersistentRequests:
    """Persistent requests of a group; they keep their communicators alive."""

    def __init__(self, mpi: Any, collectives: Collectives, contexts: Contexts) -> None:
        self._mpi = mpi
        self._collectives = collectives
        self._contexts = contexts
        self._requests: list[Any] = []
        self._unused: list[Any] = []  # requests that cannot be started any more

    def free(self) -> None:
        """Free all requests."""
        for request in self._requests:
            request.Free()

    def bind(self, signature: Signature, message: Message, digest: int) -> MpiRequest | None:
        """Return a request on the message's buffers; None if MPI has none for the operation."""
        name = _NAMES.get(signature.kind)
        if name is None or signature.reduce_op == "AVG" or not has_persistent():
            return None

        def make() -> tuple[Callable[[], object], Poll]:
            maker = getattr(self._contexts.of(digest), name)
            request = maker(*self._collectives.arguments(signature, message))
            self._requests.append(request)
            if signature.kind not in ROOTED:
                return request.Start, request.Test

            poll: Poll = request.Test

            def begin() -> None:
                nonlocal poll
                poll = checked(message)

            def started(message: Message) -> Poll:  # noqa: ARG001 - a Start
                request.Start()
                test: Poll = request.Test
                return test

            checked = voted(started, digest, self._contexts.vote)
            return begin, lambda: poll()

        return MpiRequest(make)

    def staged(self, signature: Signature, comm: Any) -> Start | None:
        """Return a small all_reduce by a persistent request on own buffers; None if large, or MPI is too old.

        Starting a request instead of a nonblocking call saves more than two small copies cost. A synchronous
        operation of a signature is never in flight twice, so one pair of buffers is enough. The request is
        freed some time after the last reference to its start and polls.
        """
        nbytes = signature.nbytes or 0
        if not 0 < nbytes <= _STAGED_BYTES or not has_persistent():
            return None
        op, datatype = op_of(signature), datatype_of(signature)
        source, result = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
        # Finalizers only queue requests: they may run in any thread, and inside another MPI call.
        while self._unused:
            unused = self._unused.pop()
            self._requests.remove(unused)
            unused.Free()
        request = comm.Allreduce_init([source, datatype], [result, datatype], op)
        self._requests.append(request)
        user = _User()
        weakref.finalize(user, self._unused.append, request).atexit = False
        begin, test = request.Start, request.Test
        # Views are cached by address, as in `Collectives.spec`.
        from_address = self._mpi.buffer.fromaddress
        views: dict[int, memoryview] = {}
        whole = slice(None)
        target = result
        busy = False

        def view(tensor: torch.Tensor) -> memoryview:
            address = tensor.data_ptr()
            found = views.get(address)
            if found is None:
                if len(views) >= SPECS:
                    views.clear()
                found = views[address] = memoryview(from_address(address, nbytes))
            return found

        def poll(_: _User = user) -> bool:
            nonlocal busy
            if not test():
                return False
            target[whole] = result
            busy = False
            return True

        def restart(message: Message, _: _User = user) -> Poll:
            nonlocal target, busy
            if busy:
                raise RuntimeError("two synchronous operations of one signature in flight; use async_op")
            value, out = message.inputs[0], message.outputs[0]
            try:
                target = views[out.data_ptr()]
            except KeyError:
                target = view(out)
            source[whole] = target if out is value else view(value)
            busy = True
            begin()
            return poll

        return restart
