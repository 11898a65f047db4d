"""torch's simulated accelerator, `torch_openreg`, with copies that run on streams.

Its streams are threads, and its memory is protected from the host, so that code that reads it through a
pointer ends the process. But its kernels run at once, even if the current stream has pending work. After
`simulate`, copies that need not be waited for run on the current stream, and all other kernels first wait for
that stream, so values that are read too early are wrong, as on a real device.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3  # of orMemcpyKind
_DESTROY: Final = 3  # of the operations of std::function's manager
_MANAGER = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
_INVOKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Function(ctypes.Structure):
    """A `std::function<void()>` of libstdc++."""

    _fields_ = (("data", ctypes.c_uint64 * 2), ("manager", _MANAGER), ("invoker", _INVOKER))


def missing() -> str | None:
    """Return the reason why there is no simulated accelerator here, or None."""
    spec = find_spec("torch_openreg")
    if spec is None or spec.origin is None:
        return "torch_openreg is not installed (docs/gpu.md)"
    if not _library_path().exists():
        return f"{_library_path()} is missing, so streams cannot be delayed"
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None or accelerator.type == "openreg" else f"torch uses {accelerator.type}"


def _library_path() -> Path:
    spec = find_spec("torch_openreg")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib" / "libopenreg.so"


@cache
def _library() -> Any:
    return ctypes.CDLL(str(_library_path()))


class _Queue:
    """A stream with a known handle that works in the order of one of torch's streams."""

    def __init__(self, stream: torch.Stream) -> None:
        self._handle = ctypes.c_void_p()
        with torch.accelerator.device_index(stream.device_index):
            assert _library().orStreamCreate(ctypes.byref(self._handle)) == 0
        assert self._handle.value is not None
        self._queue = torch.Stream(
            stream_id=self._handle.value, device_index=stream.device_index, device_type=stream.device_type
        )

    @contextmanager
    def in_order_of(self, stream: torch.Stream) -> Iterator[ctypes.c_void_p]:
        """Return the handle for work after `stream`'s present work and before its future work."""
        self._queue.wait_stream(stream)
        yield self._handle
        stream.wait_stream(self._queue)


_queues: dict[torch.Stream, _Queue] = {}
_used: deque[tuple[torch.Event, object]] = deque()
_tasks: deque[tuple[threading.Event, _Function]] = deque()
_registered: list[torch.library.Library] = []


def _queue_of(stream: torch.Stream) -> _Queue:
    if stream not in _queues:
        _queues[stream] = _Queue(stream)
    return _queues[stream]


def _keep(stream: torch.Stream, used: object) -> None:
    """Keep the memory that `stream` uses until it is done: a device reuses freed memory no earlier."""
    while _used and _used[0][0].query():
        _used.popleft()
    _used.append((stream.record_event(torch.Event(stream.device)), used))


def enqueue(stream: torch.Stream, function: Callable[[], object]) -> None:
    """Call a function in the order of a stream, on its thread."""

    def manage(_: int | None, __: int | None, operation: int) -> bool:
        if operation == _DESTROY:
            ended.set()
        return False

    ended = threading.Event()
    task = _Function(manager=_MANAGER(manage), invoker=_INVOKER(lambda _: function()))
    with _queue_of(stream).in_order_of(stream) as handle:
        add = _library()._ZN7openreg15addTaskToStreamEP8orStreamSt8functionIFvvEE
        assert add(handle, ctypes.byref(task)) == 0
    _tasks.append((ended, task))
    while _tasks and _tasks[0][0].is_set():
        _tasks.popleft()


def delay() -> None:
    """Let the current stream sleep for a millisecond."""
    enqueue(torch.accelerator.current_stream(), lambda: time.sleep(1e-3))


@contextmanager
def under(stream: torch.Stream) -> Iterator[None]:
    """Make a stream the current one."""
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def late(values: Any) -> torch.Tensor:
    """Return a float32 tensor whose values come late on the current stream; until then it holds zeros."""
    host = torch.tensor(values, dtype=torch.float32).pin_memory()
    made = torch.zeros(host.shape, device="openreg")
    delay()
    return made.copy_(host, non_blocking=True)


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Hold back the work that a stream is given in the block until the block ends."""
    released = threading.Event()
    enqueue(stream, lambda: released.wait(30))
    try:
        yield
    finally:
        released.set()


@cache
def simulate() -> None:
    """Make copies asynchronous, and other kernels follow the current stream."""
    of = torch.library.Library("aten", "IMPL")
    copy = torch.library.get_kernel("aten::_copy_from", "PrivateUse1")
    scalar = torch.library.get_kernel("aten::_local_scalar_dense", "PrivateUse1")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        device = target.device if source.is_cpu else source.device
        stream = torch.accelerator.current_stream(device)
        kind = _TO_DEVICE if source.is_cpu else _TO_HOST if target.is_cpu else _ON_DEVICE
        host = source if source.is_cpu else target
        is_async = kind == _ON_DEVICE or (non_blocking and host.is_pinned())
        if not (is_async and _is_flat(source, target)):
            stream.synchronize()
            result: torch.Tensor = copy.call_boxed(keys, source, target, non_blocking)
            return result
        with _queue_of(stream).in_order_of(stream) as handle:
            _library().orMemcpyAsync(
                ctypes.c_void_p(target.data_ptr()),
                ctypes.c_void_p(source.data_ptr()),
                ctypes.c_size_t(source.nbytes),
                kind,
                handle,
            )
        _keep(stream, (source, target))
        return target

    def local_scalar_dense(tensor: torch.Tensor) -> Any:
        torch.accelerator.current_stream(tensor.device).synchronize()
        return scalar.call_boxed(keys, tensor)

    def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
        _keep(stream, tensor)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of kernels that take the place of others
        of.impl("_copy_from", copy_from, "PrivateUse1", allow_override=True)
        of.impl("_local_scalar_dense", local_scalar_dense, "PrivateUse1", allow_override=True)
        of.impl("record_stream", record_stream, "PrivateUse1")
    _registered.append(of)
    torch.Stream("openreg")  # the first of 32 in turn is the default stream, the others are not


def _is_flat(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether a copy moves plain bytes."""
    alike = source.shape == target.shape and source.dtype == target.dtype and source.numel() > 0
    lazy = source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg()
    return alike and not lazy and source.is_contiguous() and target.is_contiguous()
