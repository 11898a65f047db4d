"""NCCL's C ABI in ctypes: types, constants, and one loaded library.

The functions of NCCL 2.10 are required. Error texts (2.13), `ncclCommFinalize` (2.14) and `ncclCommRevoke`
(2.29) are optional, so that forks of older versions load too.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from typing import Any, Final

import torch

from mcr_plus.backends.nccl import finding
from mcr_plus.errors import BackendUnavailable

SUCCESS: Final = 0
INVALID_USAGE: Final = 5
IN_PROGRESS: Final = 7

UINT8: Final = 1
DATATYPES: Final = {
    torch.int8: 0,
    torch.uint8: UINT8,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
OPS: Final = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}

Call = Callable[[int, int], int]
"""One or more NCCL calls with all arguments bound but the communicator and the stream."""


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`, passed by value."""

    _fields_ = (("internal", ctypes.c_ubyte * 128),)


_BUFFERS: Final = (c_void_p, c_void_p, c_size_t, c_int)  # send, receive, count, datatype
_ON: Final = (c_void_p, c_void_p)  # communicator, stream
_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetErrorString": (c_int,),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclAllReduce": (*_BUFFERS, c_int, *_ON),
    "ncclReduce": (*_BUFFERS, c_int, c_int, *_ON),
    "ncclBroadcast": (*_BUFFERS, c_int, *_ON),
    "ncclAllGather": (*_BUFFERS, *_ON),
    "ncclReduceScatter": (*_BUFFERS, c_int, *_ON),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, *_ON),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, *_ON),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}
_LATER: Final[dict[str, tuple[Any, ...]]] = {
    "ncclGetLastError": (c_void_p,),
    "ncclCommFinalize": (c_void_p,),
    "ncclCommRevoke": (c_void_p, c_int),  # communicator, flags
}
_TEXTS: Final = ("ncclGetErrorString", "ncclGetLastError")
_NAP: Final = 100e-6


class NcclError(RuntimeError):
    """An NCCL error. The dispatcher wraps it in a `BackendError` that names the operation."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Nccl:
    """One loaded library. Collectives are attributes; every function returns NCCL's result codes."""

    def __init__(self, library: Any) -> None:
        found = {name: _declare(library, name, types) for name, types in (_FUNCTIONS | _LATER).items()}
        missing = [name for name in _FUNCTIONS if found[name] is None]
        if missing:
            raise BackendUnavailable(
                f"backend nccl: {library!r} is no NCCL library: it lacks {', '.join(missing)}"
            )
        self.place = ""  # how the library was found, as text
        self._functions: dict[str, Any] = found
        self.all_reduce = found["ncclAllReduce"]
        self.reduce = found["ncclReduce"]
        self.broadcast = found["ncclBroadcast"]
        self.all_gather = found["ncclAllGather"]
        self.reduce_scatter = found["ncclReduceScatter"]
        self.send = found["ncclSend"]
        self.recv = found["ncclRecv"]
        self.version = self._version()

    def _version(self) -> tuple[int, int, int]:
        code = c_int()
        self._functions["ncclGetVersion"](ctypes.byref(code))
        major, rest = divmod(code.value, 10000 if code.value >= 10000 else 1000)
        return major, *divmod(rest, 100)

    @property
    def version_text(self) -> str:
        """The version as text: `2.30.3`."""
        return ".".join(map(str, self.version))

    def error(self, code: int, doing: str, comm: int = 0) -> NcclError:
        """Return the error for a result code, with the library's text."""
        text = self._functions["ncclGetErrorString"](code).decode(errors="replace")
        last = self._functions["ncclGetLastError"]
        detail = last(comm).decode(errors="replace").strip() if last is not None else ""
        return NcclError(
            f"NCCL {self.version_text}, {doing}: {text}" + (f"; its last error: {detail}" if detail else ""),
            code,
        )

    def check(self, code: int, doing: str, comm: int = 0) -> None:
        """Raise unless `code` means success or in progress."""
        if code not in (SUCCESS, IN_PROGRESS):
            raise self.error(code, doing, comm)

    def unique_id(self) -> bytes:
        """Return a new unique id for a communicator; one rank creates it for all."""
        identity = UniqueId()
        self.check(self._functions["ncclGetUniqueId"](ctypes.byref(identity)), "making a unique id")
        return bytes(identity)

    def init_rank(self, size: int, identity: bytes, rank: int) -> int:
        """Join a communicator on the current device and return its handle; blocks until all ranks join."""
        comm = c_void_p()
        arguments = (ctypes.byref(comm), size, UniqueId.from_buffer_copy(identity), rank)
        code = self._functions["ncclCommInitRank"](*arguments)
        if comm.value:
            code = self.settled(comm.value, code)
        self.check(code, "creating a communicator", comm.value or 0)
        return comm.value or 0

    def settled(self, comm: int, code: int, is_given_up: Callable[[], object] = bool) -> int:
        """Wait until NCCL has completed the call that returned `code`; return the resulting code.

        Only a non-blocking communicator (NCCL_COMM_BLOCKING=0) may be in progress: it accepts no other call
        meanwhile, and may not have launched yet. `is_given_up`: returns True to stop waiting.
        """
        while code == IN_PROGRESS and not is_given_up():
            time.sleep(_NAP)
            code = self.async_error(comm)
        return code

    def async_error(self, comm: int) -> int:
        """Return the state of a communicator: success, in progress, or a background error's code."""
        state = c_int()
        code: int = self._functions["ncclCommGetAsyncError"](comm, ctypes.byref(state))
        return code or state.value

    def close(self, comm: int) -> None:
        """Finalize and free a communicator that has no operation in flight."""
        finalize = self._functions["ncclCommFinalize"]
        if finalize is not None:
            self.check(self.settled(comm, finalize(comm)), "finalizing a communicator", comm)
        self.check(self._functions["ncclCommDestroy"](comm), "destroying a communicator")

    def revoke(self, comm: int) -> bool:
        """Stop a communicator's running operations and calls, but keep it; False if NCCL cannot."""
        function = self._functions["ncclCommRevoke"]
        return function is not None and function(comm, 0) in (SUCCESS, IN_PROGRESS)

    def abort(self, comm: int) -> None:
        """Abort a communicator and its operations, and free it. No other thread may be in a call on it."""
        self._functions["ncclCommAbort"](comm)

    def grouped(self, calls: Sequence[Call], comm: int, stream: int) -> int:
        """Make several calls as one NCCL group, so that no single call can block it."""
        code: int = self._functions["ncclGroupStart"]()
        if code != SUCCESS:
            return code
        for call in calls:
            code = call(comm, stream)
            if code not in (SUCCESS, IN_PROGRESS):
                break
        else:
            code = SUCCESS
        end: int = self._functions["ncclGroupEnd"]()
        return code or end


def _declare(library: Any, name: str, types: tuple[Any, ...]) -> Any:
    function = getattr(library, name, None)
    if function is not None:
        function.argtypes = types
        function.restype = c_char_p if name in _TEXTS else c_int
    return function


@cache
def load(path: str | None = None) -> Nccl:
    """Load `path`, the result of `finding.library`, or the library that the system's loader finds.

    Raises `BackendUnavailable` with the loader's error.
    """
    found = None if path else finding.library()
    chosen = path or (found.path if found else finding.LOADER)
    try:
        nccl = Nccl(ctypes.CDLL(chosen))
    except OSError as error:
        raise BackendUnavailable(
            f"backend nccl: no NCCL library could be loaded ({error}); {REMEDY}"
        ) from error
    found = found or (None if path else finding.loaded())
    nccl.place = chosen if found is None else f"{found.path} ({found.how})"
    return nccl


REMEDY: Final = "pip install nvidia-nccl-cu12 (or -cu13, see torch.version.cuda) installs one"
