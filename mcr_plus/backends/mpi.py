"""MPI, through mpi4py and whichever MPI library it finds.

Collectives are started as nonblocking calls and tested, so that every wait has a deadline and drives other
libraries too; operations bound once with `mcr.persistent` are MPI-4 persistent requests, which cost no more
than a blocking call. Only buffer methods are used, never mpi4py's pickling ones.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from mcr_plus.backends.mailbox import Mailbox, Receive
from mcr_plus.environment import started_by_mpi
from mcr_plus.errors import BackendUnavailable, Unsupported
from mcr_plus.interfaces import NATIVE, Availability, Channel, Poll, Start, Support, World
from mcr_plus.message import REDUCING, Group, Message, ReduceOp, Signature, dtype_name

_MAX_COUNT: Final = 2**31 - 1
_SPECS: Final = 4096  # buffer descriptions kept per bound operation
_STAGED_BYTES: Final = 4096  # up to here two copies are cheaper than a nonblocking call
_STAGED_REQUESTS: Final = 1024  # persistent requests made that way per group
_HALVES: Final = (torch.float16, torch.bfloat16)
_HALF_OPS: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
_SATURATED: Final = (torch.int8, torch.int16, torch.uint8)  # by Open MPI's vectorised SUM

_DATATYPES: Final = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.float16: "UINT16_T",  # moved as 16 bits; reduced by our own MPI_Op
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


@cache
def load_mpi() -> Any:
    """`mpi4py.MPI`, initialised; finalised by this backend and not by mpi4py.

    An orderly end needs all ranks. mpi4py would also try after a failure and hang, so it is told not to,
    unless the program has imported mpi4py.MPI before.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise BackendUnavailable(f"backend mpi: {_MISSING}; {_REMEDY}")
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailable(
            f"backend mpi: no MPI library could be loaded ({error}); {_REMEDY}"
        ) from error
    return MPI


_MISSING: Final = "mpi4py is not installed"
_REMEDY: Final = "pip install 'mcr_plus[mpi]' (Open MPI) or 'mcr_plus[mpich]' brings mpi4py and a library"


def _library_found() -> bool:
    """Whether some MPI library is installed as a wheel or on the system; loads nothing."""
    import ctypes.util

    prefix = Path(sys.prefix) / "lib"
    return any(prefix.glob("libmpi.so*")) or ctypes.util.find_library("mpi") is not None


class MpiBackend:
    """MPI over the communicator of all ranks the launcher started."""

    name = "mpi"
    on_stream = False
    needs_polls = True
    spins = 400

    def __init__(self, world: World) -> None:  # noqa: ARG002 - a Backend
        self._mpi = load_mpi()
        comm = self._mpi.COMM_WORLD
        self._comm = comm
        # Of all ranks: MPICH answers a probe of a single rank's communicator without advancing anything.
        self._probe = comm.Dup().Iprobe
        self._own_probe = self._mpi.COMM_SELF.Dup().Iprobe
        self._channels: list[_MpiChannel] = []
        self._busy: set[Mailbox] = set()  # those in which receives wait

    @classmethod
    def availability(cls) -> Availability:
        """Needs mpi4py and an MPI library."""
        if importlib.util.find_spec("mpi4py") is None:
            return Availability(False, reason=_MISSING, remedy=_REMEDY)
        if not _library_found() and "mpi4py.MPI" not in sys.modules:
            return Availability(False, reason="mpi4py is there, but no MPI library", remedy=_REMEDY)
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
        """Why MPI cannot serve this job, empty if it can: it must have been started by an MPI launcher."""
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
        """Everything on CPU tensors of up to 2³¹ − 1 elements."""
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
        mpi = self._mpi
        everyone = self._comm.Get_group()
        members = everyone.Incl(list(group.ranks))
        # One communicator for collectives and one for messages: a user's tag can never meet our traffic.
        comm = self._comm.Create_group(members, 0)
        messages = comm.Dup()
        for each in (comm, messages):
            each.Set_errhandler(mpi.ERRORS_RETURN)
        members.Free()
        channel = _MpiChannel(mpi, comm, messages, group, self._busy)
        self._channels.append(channel)
        return channel

    def progress(self) -> None:
        """One probe lets the library advance every request."""
        try:
            self._probe()
        except (
            self._mpi.Exception
        ):  # a rank has died: each operation finds out by itself whether it needed it
            self._probe = self._own_probe
        if self._busy:
            for mailbox in tuple(self._busy):
                mailbox.progress()

    def refuses_threads(self) -> str:
        """See `Backend`."""
        if self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE:
            return ""
        return f"{self.library_version()} was initialised without MPI_THREAD_MULTIPLE"

    def close(self, clean: bool) -> None:  # noqa: ARG002 - a Backend
        """See `Backend.close`. Finalising is left to the end of the process: it can be done only once."""
        self._channels.clear()

    @staticmethod
    def finalize() -> None:
        """End MPI when all ranks have come to the end of their processes; MPI_Finalize waits for all."""
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is None:  # it could not be loaded
            return
        import mpi4py

        if not mpi4py.rc.finalize and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()


@cache
def _half_op(name: str, dtype: torch.dtype) -> Any:
    """Reductions of float16 and bfloat16, which MPI does not know."""
    from mcr_plus.kernels.half_reduce import reducer

    return _own_op(reducer("SUM" if name == "AVG" else name, dtype))


@cache
def _wrapping_op(dtype: torch.dtype) -> Any:
    """SUM of small integers that wraps around."""
    from mcr_plus.kernels.wrapping_sum import wrapping_sum

    return _own_op(wrapping_sum(dtype))


def _own_op(function: Any) -> Any:
    """An MPI_Op whose C function is compiled by numba: a Python callback would take the GIL per segment."""
    mpi = load_mpi()
    op = mpi.Op()
    status = _libmpi().MPI_Op_create(
        ctypes.c_void_p(function.address), ctypes.c_int(1), ctypes.c_void_p(mpi._addressof(op))
    )
    if status != 0:
        raise BackendUnavailable(f"backend mpi: MPI_Op_create failed with code {status}")
    return op


@cache
def _libmpi() -> ctypes.CDLL:
    """The MPI library that mpi4py has loaded into this process."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libmpi" in line}
    for path in sorted(paths, key=len):
        if os.path.basename(path).startswith(("libmpi.so", "libmpich.so", "libmpi_abi.so")):
            return ctypes.CDLL(path)
    raise BackendUnavailable("backend mpi: the loaded MPI library was not found in this process")


def _nothing_yet() -> bool:
    raise RuntimeError("started before its request was made")


class _MpiChannel:
    def __init__(self, mpi: Any, comm: Any, messages: Any, group: Group, busy: set[Mailbox]) -> None:
        self._mpi = mpi
        self._comm = comm
        self._messages = messages
        self.mailbox = Mailbox(mpi, messages, group, busy)
        self._group = group
        self._staged_requests = 0

    def close(self) -> None:
        self._messages.Free()
        self._comm.Free()

    def bind(self, signature: Signature) -> Start:
        bound: Start = getattr(self, f"_{signature.kind}")(signature)
        if signature.reduce_op == "AVG":
            return self._divided(bound, signature)
        return bound

    def bind_persistent(
        self, signature: Signature, message: Message
    ) -> tuple[Callable[[], Any], Poll] | None:
        """Start and test of an MPI-4 persistent request on the message's buffers; None if there is none.

        Collective: every rank must make the same calls in the same order.
        """
        maker = getattr(self._comm, _PERSISTENT.get(signature.kind, ""), None)
        if maker is None or signature.reduce_op == "AVG":
            return None
        try:
            request = maker(*self._arguments(signature, message))
        except NotImplementedError:  # a library older than MPI 4
            return None
        return request.Start, request.Test

    # -- what MPI calls are made of ---------------------------------------------------------------

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
        """Tensor → mpi4py buffer description, remembered by address: making one costs as much as the call."""
        datatype, from_address = self._datatype(signature), self._mpi.buffer.fromaddress
        known: dict[tuple[int, int], list[Any]] = {}

        def describe(tensor: torch.Tensor) -> list[Any]:
            key = (tensor.data_ptr(), tensor.numel())
            spec = known.get(key)
            if spec is None:
                if len(known) >= _SPECS:
                    known.clear()
                # Without a count: mpi4py would read one as elements per rank in gathers and exchanges.
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
        """The arguments of the MPI collective for tensors that stay where they are."""
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

    def _all_reduce(self, signature: Signature) -> Start:
        assert signature.dtype is not None
        assert signature.reduce_op is not None
        op = self._op(signature.reduce_op, signature.dtype)
        spec, call, in_place = self._fixed_spec(signature), self._comm.Iallreduce, self._mpi.IN_PLACE

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            poll: Poll = call(in_place if out is value else spec(value), spec(out), op).Test
            return poll

        small = 0 < (signature.nbytes or 0) <= _STAGED_BYTES and not signature.async_op
        return self._staged(signature, op, start) if small else start

    def _staged(self, signature: Signature, op: Any, otherwise: Start) -> Start:
        """A small all_reduce by a persistent request on buffers of our own.

        Starting one is cheaper than a nonblocking call, by more than two small copies cost. A synchronous
        operation of a signature is never in flight twice, so one pair of buffers will do. The request is
        made by the first start, because starts come in the same order on all ranks.
        """
        nbytes = signature.nbytes or 0
        source, result = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
        from_address = self._mpi.buffer.fromaddress
        views: dict[int, memoryview] = {}
        chosen: Start
        begin: Callable[[], Any] = _nothing_yet
        test: Callable[[], bool] = _nothing_yet
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

        def poll() -> bool:
            nonlocal busy
            if not test():
                return False
            target[:] = result
            busy = False
            return True

        def restart(message: Message) -> Poll:
            nonlocal target, busy
            if busy:
                raise RuntimeError("two synchronous operations of one signature in flight; use async_op")
            value, out = message.inputs[0], message.outputs[0]
            target = views.get(out.data_ptr()) or view(out)
            source[:] = target if out is value else view(value)
            busy = True
            begin()
            return poll

        def first(message: Message) -> Poll:
            nonlocal chosen, begin, test
            request = self._staged_request(signature, op, source, result)
            if request is None:
                chosen = otherwise
            else:
                chosen, begin, test = restart, request.Start, request.Test
            return chosen(message)

        chosen = first
        return lambda message: chosen(message)

    def _staged_request(self, signature: Signature, op: Any, source: memoryview, result: memoryview) -> Any:
        if self._staged_requests >= _STAGED_REQUESTS:
            return None
        self._staged_requests += 1
        datatype = self._datatype(signature)
        try:
            return self._comm.Allreduce_init([source, datatype], [result, datatype], op)
        except NotImplementedError:  # a library older than MPI 4
            self._staged_requests = _STAGED_REQUESTS
            return None

    def _reduce(self, signature: Signature) -> Start:
        assert signature.dtype is not None
        assert signature.reduce_op is not None
        spec, op = self._spec(signature), self._op(signature.reduce_op, signature.dtype)
        call, in_place, root = self._comm.Ireduce, self._mpi.IN_PLACE, signature.root
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            if not is_root:
                poll: Poll = call(spec(value), None, op, root).Test
            else:
                poll = call(in_place if out is value else spec(value), spec(out), op, root).Test
            return poll

        return start

    def _reduce_scatter(self, signature: Signature) -> Start:
        assert signature.dtype is not None
        assert signature.reduce_op is not None
        spec, op = self._spec(signature), self._op(signature.reduce_op, signature.dtype)
        call = self._comm.Ireduce_scatter_block

        def start(message: Message) -> Poll:
            poll: Poll = call(spec(message.inputs[0]), spec(message.outputs[0]), op).Test
            return poll

        return start

    def _reduce_scatter_v(self, signature: Signature) -> Start:
        assert signature.dtype is not None
        assert signature.reduce_op is not None
        spec, op = self._spec(signature), self._op(signature.reduce_op, signature.dtype)
        call = self._comm.Ireduce_scatter

        def start(message: Message) -> Poll:
            counts = list(message.input_counts or ())
            poll: Poll = call(spec(message.inputs[0]), spec(message.outputs[0]), counts, op).Test
            return poll

        return start

    def _broadcast(self, signature: Signature) -> Start:
        spec, root, call = self._spec(signature), signature.root, self._comm.Ibcast

        def start(message: Message) -> Poll:
            poll: Poll = call(spec(message.outputs[0]), root).Test
            return poll

        return start

    def _all_gather(self, signature: Signature) -> Start:
        return self._moved(signature, self._comm.Iallgather)

    def _all_to_all(self, signature: Signature) -> Start:
        return self._moved(signature, self._comm.Ialltoall)

    def _moved(self, signature: Signature, call: Callable[..., Any]) -> Start:
        spec = self._spec(signature)

        def start(message: Message) -> Poll:
            poll: Poll = call(spec(message.inputs[0]), spec(message.outputs[0])).Test
            return poll

        return start

    def _all_gather_v(self, signature: Signature) -> Start:
        spec, datatype, call = self._spec(signature), self._datatype(signature), self._comm.Iallgatherv

        def start(message: Message) -> Poll:
            target = self._parts(spec, message.outputs[0], message.output_counts, datatype)
            poll: Poll = call(spec(message.inputs[0]), target).Test
            return poll

        return start

    def _all_to_all_v(self, signature: Signature) -> Start:
        spec, datatype, call = self._spec(signature), self._datatype(signature), self._comm.Ialltoallv

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

    def _gather(self, signature: Signature) -> Start:
        spec, root, call = self._spec(signature), signature.root, self._comm.Igather
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            target = spec(message.outputs[0]) if is_root else None
            poll: Poll = call(spec(message.inputs[0]), target, root).Test
            return poll

        return start

    def _gather_v(self, signature: Signature) -> Start:
        spec, root, call = self._spec(signature), signature.root, self._comm.Igatherv
        is_root, datatype = self._group.rank == root, self._datatype(signature)

        def start(message: Message) -> Poll:
            target = (
                self._parts(spec, message.outputs[0], message.output_counts, datatype) if is_root else None
            )
            poll: Poll = call(spec(message.inputs[0]), target, root).Test
            return poll

        return start

    def _scatter(self, signature: Signature) -> Start:
        spec, root, call = self._spec(signature), signature.root, self._comm.Iscatter
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            source = spec(message.inputs[0]) if is_root else None
            poll: Poll = call(source, spec(message.outputs[0]), root).Test
            return poll

        return start

    def _scatter_v(self, signature: Signature) -> Start:
        spec, root, call = self._spec(signature), signature.root, self._comm.Iscatterv
        is_root, datatype = self._group.rank == root, self._datatype(signature)

        def start(message: Message) -> Poll:
            source = self._parts(spec, message.inputs[0], message.input_counts, datatype) if is_root else None
            poll: Poll = call(source, spec(message.outputs[0]), root).Test
            return poll

        return start

    def _barrier(self, signature: Signature) -> Start:  # noqa: ARG002 - binders share a shape
        call = self._comm.Ibarrier

        def start(message: Message) -> Poll:  # noqa: ARG001
            poll: Poll = call().Test
            return poll

        return start

    # -- messages ---------------------------------------------------------------------------------

    def _send(self, signature: Signature) -> Start:
        assert signature.dtype is not None
        spec, call, tag = self._spec(signature), self._messages.Isend, self.mailbox.tag
        dtype = signature.dtype

        def start(message: Message) -> Poll:
            poll: Poll = call(spec(message.inputs[0]), message.peer, tag(dtype, message.match_tag)).Test
            return poll

        return start

    def _recv(self, signature: Signature) -> Start:
        spec, mailbox = self._spec(signature), self.mailbox

        def start(message: Message) -> Poll:
            out = message.outputs[0]
            return mailbox.post(Receive(mailbox, signature, message.peer, message.match_tag, out, spec(out)))

        return start


_PERSISTENT: Final = {
    "all_reduce": "Allreduce_init",
    "broadcast": "Bcast_init",
    "all_gather": "Allgather_init",
    "all_to_all": "Alltoall_init",
    "reduce_scatter": "Reduce_scatter_block_init",
    "barrier": "Barrier_init",
}
