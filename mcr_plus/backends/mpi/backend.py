"""MPI, through mpi4py and the MPI library that it finds.

Collectives are started as nonblocking calls and tested, so that every wait has a deadline and progresses
other libraries too; operations bound once with `mcr.persistent` are MPI-4 persistent requests, which cost no
more than a blocking call. Only buffer methods are used, never mpi4py's pickling ones.

MPI matches the n-th collective of a communicator on one rank with the n-th on every other, whatever they are.
Mismatched collectives return garbage, and where sizes differ Open MPI writes past buffers. So every signature
has a communicator of its own: different operations are never matched, and stay pending until the mismatch is
detected. An operation that may complete before other ranks start it (a broadcast on its root, an asynchronous
operation) is reported complete only after a vote that all ranks started the same. Vector collectives are
voted on before they start, with their numbers of elements, and so are signatures for which no communicator is
left.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import operator
import os
import re
import sys
import weakref
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from mcr_plus.backends.base import NATIVE, Availability, Backend, Channel, Poll, Start, Support
from mcr_plus.backends.mpi.p2p import MatchingQueue, Receive
from mcr_plus.core.environment import started_by_mpi
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import REDUCING, ROOTED, VECTOR, ReduceOp, dtype_name
from mcr_plus.core.message import Message, Signature
from mcr_plus.errors import BackendError, BackendUnavailable, OperationsDiffer, Unsupported
from mcr_plus.kernels.compiling import compiling
from mcr_plus.rendezvous.mpi_library import MISSING, REMEDY, load_mpi
from mcr_plus.rendezvous.world import World

_MAX_COUNT: Final = 2**31 - 1
_SPECS: Final = 4096  # buffer descriptions kept per bound operation
_STAGED_BYTES: Final = 4096  # up to here two copies are cheaper than a nonblocking call
# Communicators for signatures: of a group, and of all groups of a process. MPICH has 2,048 per process; a
# group takes three for itself, and the program may use some.
_CONTEXTS: Final = 192
_ALL_CONTEXTS: Final = 1024
_WORD: Final = 1 << 64
_BREAKING: Final = ("TRUNCATE", "IN_STATUS", "INTERN", "UNKNOWN")  # classes of errors
_HALVES: Final = (torch.float16, torch.bfloat16)
_HALF_OPS: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
_SATURATED: Final = (torch.int8, torch.int16, torch.uint8)  # by Open MPI's vectorised SUM

_DATATYPES: Final = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.float16: "UINT16_T",  # moved as 16 bits; reduced by an MPI_Op of this package
    torch.bfloat16: "UINT16_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.bool: "C_BOOL",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
_OPS: Final = {
    "SUM": "SUM",
    "AVG": "SUM",
    "PRODUCT": "PROD",
    "MIN": "MIN",
    "MAX": "MAX",
    "BAND": "BAND",
    "BOR": "BOR",
    "BXOR": "BXOR",
}
_BOOL_OPS: Final = {
    "SUM": "LOR",
    "MAX": "LOR",
    "BOR": "LOR",
    "PRODUCT": "LAND",
    "MIN": "LAND",
    "BAND": "LAND",
}


_log = logging.getLogger("mcr_plus")


def _library_found() -> bool:
    """Whether an MPI library is installed as a wheel or on the system; loads nothing."""
    import ctypes.util

    prefix = Path(sys.prefix) / "lib"
    return any(prefix.glob("libmpi.so*")) or ctypes.util.find_library("mpi") is not None


class MpiBackend(Backend):
    """MPI over the communicator of all ranks that the launcher started."""

    name = "mpi"
    on_stream = False
    has_algorithms = False
    needs_polls = True
    keeps_apart = True
    spins = 400
    off = ""  # the reason why MPI is unusable in this process
    contexts = _ALL_CONTEXTS  # not reserved by a group for its signatures

    def __init__(self, world: World) -> None:  # noqa: ARG002 - a Backend
        self._mpi = load_mpi()
        comm = self._mpi.COMM_WORLD
        self._comm = comm
        self._probe, self._own_probe = _probes()
        self._busy: set[MatchingQueue] = set()  # queues with waiting receives

    @classmethod
    def availability(cls) -> Availability:
        """Available with mpi4py and an MPI library."""
        if importlib.util.find_spec("mpi4py") is None:
            return Availability(False, reason=MISSING, remedy=REMEDY)
        if not _library_found() and "mpi4py.MPI" not in sys.modules:
            return Availability(False, reason="mpi4py is there, but no MPI library", remedy=REMEDY)
        import mpi4py

        return Availability(True, f"mpi4py {mpi4py.__version__}")

    @classmethod
    def library_version(cls) -> str:
        """The MPI library in use: `Open MPI 5.0.11`, `MPICH 5.0.2`."""
        text = str(load_mpi().Get_library_version())
        found = re.search(r"(Open MPI|MPICH|Intel\(R\) MPI Library|MVAPICH2?)\D*([\d.]+)", text)
        if found is None:
            return text.split("\n")[0].strip()[:60]
        return f"{found[1].replace('(R)', '').removesuffix(' Library')} {found[2]}"

    @classmethod
    def serves(cls, world: World) -> str:
        """See `Backend`: an MPI launcher must have started the job."""
        if cls.off:
            return cls.off
        remedy = "start the job with mcr-plus run or mpirun, or name no mpi in `backends`"
        # Initialising MPI in a process that it did not start takes a second, for a world of one rank.
        if "mpi4py.MPI" not in sys.modules and not started_by_mpi():
            return f"no MPI launcher started this job; {remedy}"
        try:
            comm = load_mpi().COMM_WORLD
        except BackendUnavailable as error:
            return str(error)
        if (comm.size, comm.rank) == (world.size, world.rank):
            return ""
        return (
            f"MPI sees rank {comm.rank} of {comm.size} where the job has rank {world.rank} of {world.size}; "
            f"{remedy}"
        )

    @classmethod
    def supports(cls, signature: Signature) -> Support:
        """All operations on up to 2³¹ − 1 elements."""
        if signature.algorithm is not None:
            return Support("no", f"algorithm '{signature.algorithm}'; mpi has none to choose from")
        if signature.device != "cpu":
            return Support("emulated", "staged through host memory")
        if signature.dtype is not None and (signature.nbytes or 0) > _MAX_COUNT * signature.dtype.itemsize:
            return Support("no", f"more than {_MAX_COUNT} elements in one MPI call")
        if signature.kind not in REDUCING:
            return NATIVE
        if signature.dtype in _HALVES:
            return Support("emulated", "an MPI_Op of our own that widens to float32 (compiled by numba)")
        if signature.dtype in _SATURATED and signature.reduce_op == "SUM":
            return Support("emulated", "an MPI_Op of our own that wraps around (compiled by numba)")
        if signature.reduce_op == "AVG":
            return Support("emulated", "SUM, then divided by the number of ranks")
        return NATIVE

    def open(self, group: Group) -> Channel:
        """See `Backend.open`."""
        if self.off:
            raise BackendUnavailable(f"backend mpi: {self.off}")
        mpi = self._mpi
        try:
            everyone = self._comm.Get_group()
            members = everyone.Incl(list(group.ranks))
            # One communicator for collectives and one for messages: a user's tag never matches internal
            # traffic.
            comm = self._comm.Create_group(members, 0)
            members.Free()
        except mpi.Exception as error:
            raise BackendUnavailable(
                f"backend mpi: no communicator for group '{group.name}': {error}"
            ) from error
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        messages, problem, room = None, "another rank has none left", min(_CONTEXTS, MpiBackend.contexts // 4)
        try:
            messages = comm.Dup()
            messages.Set_errhandler(mpi.ERRORS_RETURN)
        except mpi.Exception as error:
            problem, room = str(error), -1
        agreed = array("q", [room])
        comm.Allreduce(mpi.IN_PLACE, [agreed, mpi.INT64_T], mpi.MIN)
        if agreed[0] < 0:
            for each in (messages, comm):
                if each is not None:
                    each.Free()
            raise BackendUnavailable(f"backend mpi: no communicator for group '{group.name}': {problem}")
        MpiBackend.contexts -= agreed[0]
        return _MpiChannel(mpi, comm, messages, group, self._busy, agreed[0])

    def progress(self) -> None:
        """One probe lets the library advance every request."""
        try:
            self._probe()
        except (
            self._mpi.Exception
        ):  # a rank has died: each operation detects by itself whether it depends on that rank
            self._probe = self._own_probe
        if self._busy:
            for queue in tuple(self._busy):
                queue.progress()

    @classmethod
    def breaks(cls, error: BaseException) -> str:
        """See `Backend`: truncations and internal errors make MPI unusable.

        After a truncation, Open MPI's nonblocking collectives have written past a buffer, or free memory
        twice when they are called again, even in another group.
        """
        mpi = load_mpi()
        cause: Any = error.__cause__ if isinstance(error, BackendError) else error
        if not isinstance(cause, mpi.Exception):
            return ""
        if cause.Get_error_class() in [getattr(mpi, f"ERR_{name}") for name in _BREAKING]:
            cls.off = f"MPI is not used any more in this process, after an error inside it: {cause}"
        return cls.off

    def refuses_threads(self) -> str:
        """See `Backend`."""
        if self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE:
            return ""
        return f"{self.library_version()} was initialised without MPI_THREAD_MULTIPLE"

    def close(self, clean: bool) -> None:
        """See `Backend.close`. MPI is finalised at the end of the process: it can be only once."""

    def finalize(self) -> None:
        """See `Backend`."""
        self.end_library()

    @staticmethod
    def end_library() -> None:
        """Finalise MPI; all ranks must call this at the end of their processes, since it waits for all."""
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is None:  # it could not be loaded
            return
        import mpi4py

        off = MpiBackend.off
        if not off and not mpi4py.rc.finalize and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()


@cache
def _half_op(name: str, dtype: torch.dtype) -> Any:
    """Return the MPI_Op of a reduction of float16 or bfloat16, which MPI lacks."""
    from mcr_plus.kernels.half_reduce import reducer

    with compiling(f"{name} on {dtype_name(dtype)}"):
        return _own_op(reducer("SUM" if name == "AVG" else name, dtype))


@cache
def _wrapping_op(dtype: torch.dtype) -> Any:
    """Return the MPI_Op for SUM of small integers that wraps around."""
    from mcr_plus.kernels.wrapping_sum import wrapping_sum

    with compiling(f"SUM on {dtype_name(dtype)}"):
        return _own_op(wrapping_sum(dtype))


def _own_op(function: Any) -> Any:
    """Return an MPI_Op of a function compiled by numba; a Python callback would take the GIL per segment."""
    mpi = load_mpi()
    op = mpi.Op()
    status = _libmpi().MPI_Op_create(
        ctypes.c_void_p(function.address), ctypes.c_int(1), ctypes.c_void_p(mpi._addressof(op))
    )
    if status != 0:
        raise BackendUnavailable(f"backend mpi: MPI_Op_create failed with code {status}")
    return op


@cache
def _probes() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return probes that progress the library, on a communicator of all ranks and on one of this rank.

    MPICH answers a probe of a communicator of one rank without progress.
    """
    mpi = load_mpi()
    return mpi.COMM_WORLD.Dup().Iprobe, mpi.COMM_SELF.Dup().Iprobe


@cache
def _has_persistent() -> bool:
    """Whether the library has MPI 4's persistent collectives, as Open MPI 5, although it reports MPI 3.1."""
    try:
        load_mpi().COMM_SELF.Barrier_init().Free()
    except NotImplementedError:
        return False
    return True


@cache
def _libmpi() -> ctypes.CDLL:
    """Return the MPI library that mpi4py has loaded into this process."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libmpi" in line}
    for path in sorted(paths, key=len):
        if os.path.basename(path).startswith(("libmpi.so", "libmpich.so", "libmpi_abi.so")):
            return ctypes.CDLL(path)
    raise BackendUnavailable("backend mpi: the loaded MPI library was not found in this process")


def _flow_factors(group: Group) -> tuple[list[int], list[int]]:
    """Return an odd factor per pair of ranks: for sends of this rank to each, and for receives from each."""

    def factor(source: int, target: int) -> int:
        pair = f"{source}>{target}".encode()
        return int.from_bytes(hashlib.blake2b(pair, digest_size=8).digest(), "big") | 1

    ranks = range(group.size)
    return [factor(group.rank, rank) for rank in ranks], [factor(rank, group.rank) for rank in ranks]


class _Persistent:
    """A persistent request, created when it first starts: creating one is an ordered collective."""

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


class _Gate:
    """Creates the communicator of a signature before its second operation, and votes where needed.

    The first operation, which ranks have compared, uses the communicator that signatures share, since many
    signatures occur only once. With `at_once` the first operation already has its own communicator.
    """

    def __init__(self, channel: _MpiChannel, digest: int, *, every: bool, at_once: bool) -> None:
        self._channel, self._digest = channel, digest
        self._is_first = not at_once
        self.every = every
        self.again = True

    def __call__(self, message: Message) -> Poll | None:
        is_first, self._is_first = self._is_first, False
        self.again = is_first
        made = self._channel.new_context(None if is_first else self._digest)
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
        channel = self._channel
        if not self.again and not channel.is_apart(self._digest):
            self.every = True  # no more communicators
        return channel.vote(self._digest, channel.flow_sum(message)) if self.every else None


def _voted(start: Start, digest: int, cast: Callable[[int], Poll]) -> Start:
    """Wrap `start` so that an operation completes only after a vote that all ranks have started the same."""

    def start_and_vote(message: Message) -> Poll:
        poll, ballot = start(message), cast(digest)
        return lambda: ballot() and poll()  # a counted ballot may be polled again

    return start_and_vote


class _User:
    """Lives as long as a request may be started or polled."""


class _MpiChannel(Channel):
    takes_ballots = True

    def __init__(
        self, mpi: Any, comm: Any, messages: Any, group: Group, busy: set[MatchingQueue], room: int
    ) -> None:
        """`room`: limit of signatures with a communicator, the same on all ranks."""
        self._mpi = mpi
        self._room = self._taken = room
        self._comm = comm
        self._messages = messages
        self.matching = MatchingQueue(mpi, messages, group, busy)
        self._group = group
        # By digest, in the order in which operations first started, which is the same on all ranks.
        self._contexts: dict[int, Any] = {}
        self._shared: Any = None  # the communicator of all further signatures
        self._requests: list[Any] = []  # persistent ones, which keep their communicator alive
        self._unused: list[Any] = []  # those of them that cannot be started any more
        self._flow_factors = _flow_factors(group)

    def close(self) -> None:
        if MpiBackend.off:
            return
        for request in self._requests:
            request.Free()
        for context in (*self._contexts.values(), self._shared, self._messages, self._comm):
            if context is not None:
                context.Free()
        MpiBackend.contexts += self._taken

    def give_up(self) -> None:
        """See `Channel`: returns the unused communicators of its reservation."""
        MpiBackend.contexts += self._taken - len(self._contexts)
        self._taken = len(self._contexts)

    # -- a communicator per signature -----------------------------------------------------------------

    def bind(self, signature: Signature) -> Start:
        if signature.is_p2p:
            message_binder = self._send if signature.kind == "send" else self._recv
            return message_binder(signature)
        digest = signature.digest()
        if signature.reduce_op is not None and signature.dtype is not None:
            self._op(signature.reduce_op, signature.dtype)  # raises if unsupported, compiles if needed
        chosen: Start

        calls = 0

        def first_calls(message: Message) -> Poll:
            nonlocal chosen, calls
            calls += 1
            comm = self._contexts.get(digest, self._shared)
            bound = self._bind_on(comm, signature, digest, once=calls == 1)
            if calls > 1:
                chosen = bound
            return bound(message)

        chosen = first_calls
        return lambda message: chosen(message)

    def _bind_on(self, comm: Any, signature: Signature, digest: int, *, once: bool) -> Start:
        binder: Callable[[Signature, Any], Start] = getattr(self, f"_{signature.kind}")
        bound = binder(signature, comm)
        # Small operations get a persistent request, which does not pay for a single operation.
        if signature.kind == "all_reduce" and not once and not signature.async_op:
            bound = self._staged(signature, comm) or bound
        if signature.reduce_op == "AVG":
            bound = self._divided(bound, signature)
        may_end_early = signature.async_op or signature.kind in ROOTED
        if not may_end_early or signature.kind in VECTOR:
            return bound
        return _voted(bound, digest, self.vote if signature.async_op else self.ballots or self.vote)

    def bind_persistent(self, signature: Signature, message: Message, digest: int) -> _Persistent | None:
        """Return an MPI-4 persistent request on the message's buffers; None if MPI has none for it."""
        name = _PERSISTENT.get(signature.kind)
        if name is None or signature.reduce_op == "AVG" or not _has_persistent():
            return None

        def make() -> tuple[Callable[[], object], Poll]:
            maker = getattr(self._contexts.get(digest, self._shared), name)
            request = maker(*self._arguments(signature, message))
            self._requests.append(request)
            if signature.kind not in ROOTED:
                return request.Start, request.Test

            poll: Poll = request.Test

            def begin() -> None:
                nonlocal poll
                poll = voted(message)

            def started(message: Message) -> Poll:  # noqa: ARG001 - a Start
                request.Start()
                test: Poll = request.Test
                return test

            voted = _voted(started, digest, self.vote)
            return begin, lambda: poll()

        return _Persistent(make)

    def gate(self, signature: Signature, digest: int) -> _Gate:
        """See `Backend`."""
        is_persistent = digest != signature.digest()
        return _Gate(self, digest, every=signature.kind in VECTOR, at_once=is_persistent)

    def new_context(self, digest: int | None) -> Poll | None:
        """Begin to create the communicator of a signature, or for None the one that signatures share.

        Returns None if it exists, or at the limit. Collective: all ranks have issued the operation. The poll
        raises `BackendError` if there is no communicator to share either.
        """
        there = self._shared is not None if digest is None else digest in self._contexts
        if there or (self._shared is not None and len(self._contexts) >= self._room):
            return None
        mpi, context, problem = self._mpi, None, ""
        try:
            context, request = self._comm.Idup()
        except mpi.Exception as error:  # peers wait for this rank, so no vote is possible
            raise BackendError(f"MPI makes no communicator for the operation: {error}") from error
        had = array("i", (1,))
        ballot: Poll | None = None

        def made() -> bool:
            nonlocal ballot, problem
            if ballot is None:
                try:
                    if not request.Test():
                        return False
                except mpi.Exception as error:  # no communicators left
                    had[0], problem = 0, str(error)
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
                self._room = len(self._contexts)  # all further signatures share one
            return True

        return made

    def _keep(self, context: Any, digest: int | None) -> None:
        if digest is None or len(self._contexts) >= self._room:
            self._shared = context
        else:
            self._contexts[digest] = context

    def is_apart(self, digest: int) -> bool:
        """Whether a signature has a communicator of its own."""
        return digest in self._contexts

    def vote(self, digest: int, flows: int = 0) -> Poll:
        """Begin to compare an operation on all ranks. The poll raises `OperationsDiffer` on at least one.

        `flows`: of a vector collective, see `flow_sum`; they add up to 0 if the numbers of elements fit.
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
        """Return sent minus expected elements, each times the factor of the pair of ranks, modulo 2⁶⁴."""
        if not message.compares_counts:
            return 0
        flows = zip(message.compared_flows(self._group.rank), self._flow_factors, strict=True)
        sent, expected = (int(sum(map(operator.mul, counts, factors))) for counts, factors in flows)
        return (sent - expected) % _WORD

    # -- arguments of MPI calls -----------------------------------------------------------------------

    def _datatype(self, signature: Signature) -> Any:
        assert signature.dtype is not None
        return getattr(self._mpi, _DATATYPES[signature.dtype])

    def _op(self, op: ReduceOp, dtype: torch.dtype) -> Any:
        if dtype in _HALVES:
            if op not in _HALF_OPS:
                raise Unsupported(f"reduce op {op} on {dtype_name(dtype)}; known: {', '.join(_HALF_OPS)}")
            return _half_op(op, dtype)
        if dtype in _SATURATED and op == "SUM":
            return _wrapping_op(dtype)
        if dtype is torch.bool:
            return getattr(self._mpi, _BOOL_OPS.get(op, "LXOR"))
        return getattr(self._mpi, _OPS[op])

    def _spec(self, signature: Signature) -> Callable[[torch.Tensor], list[Any]]:
        """Return tensor → mpi4py buffer description, cached by address: one costs as much as a call."""
        datatype, from_address = self._datatype(signature), self._mpi.buffer.fromaddress
        known: dict[tuple[int, int], list[Any]] = {}

        def describe(tensor: torch.Tensor) -> list[Any]:
            key = (tensor.data_ptr(), tensor.numel())
            spec = known.get(key)
            if spec is None:
                if len(known) >= _SPECS:
                    known.clear()
                # Without a count, which mpi4py takes as elements per rank in gathers and exchanges.
                spec = known[key] = [from_address(key[0], key[1] * tensor.element_size()), datatype]
            return spec

        return describe

    def _fixed_spec(self, signature: Signature) -> Callable[[torch.Tensor], list[Any]]:
        """As `_spec`, for tensors whose size the signature fixes."""
        datatype, from_address = self._datatype(signature), self._mpi.buffer.fromaddress
        nbytes = signature.nbytes or 0
        known: dict[int, list[Any]] = {}

        def describe(tensor: torch.Tensor) -> list[Any]:
            address = tensor.data_ptr()
            spec = known.get(address)
            if spec is None:
                if len(known) >= _SPECS:
                    known.clear()
                spec = known[address] = [from_address(address, nbytes), datatype]
            return spec

        return describe

    def _arguments(self, signature: Signature, message: Message) -> list[Any]:
        """Return the arguments of the MPI collective for tensors with fixed addresses."""
        if signature.kind == "barrier":
            return []
        spec = self._spec(signature)
        source = [spec(tensor) for tensor in message.inputs]
        target = [spec(tensor) for tensor in message.outputs]
        in_place = message.inputs and message.outputs and message.inputs[0] is message.outputs[0]
        if signature.kind == "broadcast":
            return [target[0], signature.root]
        first = self._mpi.IN_PLACE if in_place else source[0]
        if signature.kind in REDUCING:
            assert signature.dtype is not None
            assert signature.reduce_op is not None
            return [first, target[0], self._op(signature.reduce_op, signature.dtype)]
        return [first, target[0]]

    def _divided(self, start: Start, signature: Signature) -> Start:
        size = self._group.size
        divides = signature.root is None or signature.root == self._group.rank

        def start_and_divide(message: Message) -> Poll:
            poll = start(message)
            if not divides:
                return poll
            out = message.outputs[0]

            def finish() -> bool:
                if not poll():
                    return False
                out.div_(size)
                return True

            return finish

        return start_and_divide

    # -- collectives ------------------------------------------------------------------------------

    def _all_reduce(self, signature: Signature, comm: Any) -> Start:
        assert signature.dtype is not None
        assert signature.reduce_op is not None
        op = self._op(signature.reduce_op, signature.dtype)
        spec, call, in_place = self._fixed_spec(signature), comm.Iallreduce, self._mpi.IN_PLACE

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            poll: Poll = call(in_place if out is value else spec(value), spec(out), op).Test
            return poll

        return start

    def _staged(self, signature: Signature, comm: Any) -> Start | None:
        """Return a small all_reduce by a persistent request on own buffers; None if large, or MPI is too old.

        Starting one is cheaper than a nonblocking call, by more than the cost of two small copies. A
        synchronous operation of a signature is never in flight twice, so one pair of buffers is enough. The
        request is freed some time after the last reference to its start and polls.
        """
        nbytes = signature.nbytes or 0
        if not 0 < nbytes <= _STAGED_BYTES or not _has_persistent():
            return None
        assert signature.reduce_op is not None
        assert signature.dtype is not None
        op, datatype = self._op(signature.reduce_op, signature.dtype), self._datatype(signature)
        source, result = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
        while self._unused:
            unused = self._unused.pop()
            self._requests.remove(unused)
            unused.Free()
        request = comm.Allreduce_init([source, datatype], [result, datatype], op)
        self._requests.append(request)
        user = _User()
        weakref.finalize(user, self._unused.append, request).atexit = False
        begin, test = request.Start, request.Test
        from_address = self._mpi.buffer.fromaddress
        views: dict[int, memoryview] = {}
        target = result
        busy = False

        def view(tensor: torch.Tensor) -> memoryview:
            address = tensor.data_ptr()
            found = views.get(address)
            if found is None:
                if len(views) >= _SPECS:
                    views.clear()
                found = views[address] = memoryview(from_address(address, nbytes))
            return found

        def poll(_: _User = user) -> bool:
            nonlocal busy
            if not test():
                return False
            target[:] = result
            busy = False
            return True

        def restart(message: Message, _: _User = user) -> Poll:
            nonlocal target, busy
            if busy:
                raise RuntimeError("two synchronous operations of one signature in flight; use async_op")
            value, out = message.inputs[0], message.outputs[0]
            target = views.get(out.data_ptr()) or view(out)
            source[:] = target if out is value else view(value)
            busy = True
            begin()
            return poll

        return restart

    def _reduce(self, signature: Signature, comm: Any) -> Start:
        assert signature.dtype is not None
        assert signature.reduce_op is not None
        spec, op = self._spec(signature), self._op(signature.reduce_op, signature.dtype)
        call, in_place, root = comm.Ireduce, self._mpi.IN_PLACE, signature.root
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            if not is_root:
                poll: Poll = call(spec(value), None, op, root).Test
            else:
                poll = call(in_place if out is value else spec(value), spec(out), op, root).Test
            return poll

        return start

    def _reduce_scatter(self, signature: Signature, comm: Any) -> Start:
        assert signature.dtype is not None
        assert signature.reduce_op is not None
        spec, op = self._spec(signature), self._op(signature.reduce_op, signature.dtype)
        call = comm.Ireduce_scatter_block

        def start(message: Message) -> Poll:
            poll: Poll = call(spec(message.inputs[0]), spec(message.outputs[0]), op).Test
            return poll

        return start

    def _reduce_scatter_v(self, signature: Signature, comm: Any) -> Start:
        assert signature.dtype is not None
        assert signature.reduce_op is not None
        spec, op = self._spec(signature), self._op(signature.reduce_op, signature.dtype)
        call = comm.Ireduce_scatter

        def start(message: Message) -> Poll:
            counts = list(message.input_counts or ())
            poll: Poll = call(spec(message.inputs[0]), spec(message.outputs[0]), counts, op).Test
            return poll

        return start

    def _broadcast(self, signature: Signature, comm: Any) -> Start:
        spec, root, call = self._spec(signature), signature.root, comm.Ibcast

        def start(message: Message) -> Poll:
            poll: Poll = call(spec(message.outputs[0]), root).Test
            return poll

        return start

    def _all_gather(self, signature: Signature, comm: Any) -> Start:
        return self._moved(signature, comm.Iallgather)

    def _all_to_all(self, signature: Signature, comm: Any) -> Start:
        return self._moved(signature, comm.Ialltoall)

    def _moved(self, signature: Signature, call: Callable[..., Any]) -> Start:
        spec = self._spec(signature)

        def start(message: Message) -> Poll:
            poll: Poll = call(spec(message.inputs[0]), spec(message.outputs[0])).Test
            return poll

        return start

    def _all_gather_v(self, signature: Signature, comm: Any) -> Start:
        spec, datatype, call = self._spec(signature), self._datatype(signature), comm.Iallgatherv

        def start(message: Message) -> Poll:
            target = self._parts(spec, message.outputs[0], message.output_counts, datatype)
            poll: Poll = call(spec(message.inputs[0]), target).Test
            return poll

        return start

    def _all_to_all_v(self, signature: Signature, comm: Any) -> Start:
        spec, datatype, call = self._spec(signature), self._datatype(signature), comm.Ialltoallv

        def start(message: Message) -> Poll:
            source = self._parts(spec, message.inputs[0], message.input_counts, datatype)
            target = self._parts(spec, message.outputs[0], message.output_counts, datatype)
            poll: Poll = call(source, target).Test
            return poll

        return start

    @staticmethod
    def _parts(
        spec: Callable[[torch.Tensor], list[Any]],
        tensor: torch.Tensor,
        counts: tuple[int, ...] | None,
        datatype: Any,
    ) -> list[Any]:
        """Buffer, counts and (implied, dense) displacements."""
        return [spec(tensor)[0], list(counts or ()), None, datatype]

    def _gather(self, signature: Signature, comm: Any) -> Start:
        spec, root, call = self._spec(signature), signature.root, comm.Igather
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            target = spec(message.outputs[0]) if is_root else None
            poll: Poll = call(spec(message.inputs[0]), target, root).Test
            return poll

        return start

    def _gather_v(self, signature: Signature, comm: Any) -> Start:
        spec, root, call = self._spec(signature), signature.root, comm.Igatherv
        is_root, datatype = self._group.rank == root, self._datatype(signature)

        def start(message: Message) -> Poll:
            target = (
                self._parts(spec, message.outputs[0], message.output_counts, datatype) if is_root else None
            )
            poll: Poll = call(spec(message.inputs[0]), target, root).Test
            return poll

        return start

    def _scatter(self, signature: Signature, comm: Any) -> Start:
        spec, root, call = self._spec(signature), signature.root, comm.Iscatter
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            source = spec(message.inputs[0]) if is_root else None
            poll: Poll = call(source, spec(message.outputs[0]), root).Test
            return poll

        return start

    def _scatter_v(self, signature: Signature, comm: Any) -> Start:
        spec, root, call = self._spec(signature), signature.root, comm.Iscatterv
        is_root, datatype = self._group.rank == root, self._datatype(signature)

        def start(message: Message) -> Poll:
            source = self._parts(spec, message.inputs[0], message.input_counts, datatype) if is_root else None
            poll: Poll = call(source, spec(message.outputs[0]), root).Test
            return poll

        return start

    def _barrier(self, signature: Signature, comm: Any) -> Start:  # noqa: ARG002 - binders share a shape
        call = comm.Ibarrier

        def start(message: Message) -> Poll:  # noqa: ARG001
            poll: Poll = call().Test
            return poll

        return start

    # -- messages ---------------------------------------------------------------------------------

    def _send(self, signature: Signature) -> Start:
        assert signature.dtype is not None
        spec, call, tag = self._spec(signature), self._messages.Isend, self.matching.tag
        dtype = signature.dtype

        def start(message: Message) -> Poll:
            poll: Poll = call(spec(message.inputs[0]), message.peer, tag(dtype, message.match_tag)).Test
            return poll

        return start

    def _recv(self, signature: Signature) -> Start:
        spec, queue = self._spec(signature), self.matching

        def start(message: Message) -> Poll:
            out = message.outputs[0]
            return queue.post(Receive(queue, signature, message.peer, message.match_tag, out, spec(out)))

        return start


_PERSISTENT: Final = {
    "all_reduce": "Allreduce_init",
    "broadcast": "Bcast_init",
    "all_gather": "Allgather_init",
    "all_to_all": "Alltoall_init",
    "reduce_scatter": "Reduce_scatter_block_init",
    "barrier": "Barrier_init",
}
