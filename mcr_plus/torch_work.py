"""Handles as torch.distributed wants them, over ours."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import Variable

if TYPE_CHECKING:
    from mcr_plus.communicator import Communicator
    from mcr_plus.dispatch.work import Work

_T = TypeVar("_T")

_NO_BACKWARD: Final = -1
_HALVES: Final = (torch.float16, torch.bfloat16)
_PAUSE_S: Final = 100e-6  # between two looks of the thread that completes futures
_LEAST_S: Final = 1e-6  # of a wait that is bounded, for zero is not
_PATIENCE_S: Final = 1.0  # of it with a backward pass: it may have raised, or wait for the future itself


def untraced(kind: type[_T]) -> type[_T]:
    """Have torch.compile leave a class's methods alone, and what they call: c10d calls them from C++.

    Says so without loading the compiler. Torch before 2.7 has no word for it.
    """
    inside: Any = torch._C  # the stubs know less of it
    compiler = inside._dynamo.eval_frame
    if hasattr(compiler, "set_code_exec_strategy"):
        skip = compiler._FrameAction.SKIP
        for method in vars(kind).values():
            if isinstance(method, FunctionType):
                strategy = compiler._FrameExecStrategy(skip, skip)
                compiler.set_code_exec_strategy(method.__code__, strategy)
    return kind


@untraced
class _Done(dist.Work):
    """The handle of a call whose caller was going to wait at once: one for all."""

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - torch's signature
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return []

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


DONE: Final = _Done()


class Membership:
    """A rank's part in a group, for as long as somebody has the process group or a handle of it."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator


@untraced
class TorchWork(dist.Work):
    """A handle of torch's over one of ours. `tensors` is what its future holds in the end."""

    def __init__(self, work: Work, tensors: Sequence[torch.Tensor], membership: Membership) -> None:
        super().__init__()
        self._work = work
        self._tensors = _flat(tensors)
        self._membership = membership
        self._future: _Future | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as `Work.wait` of ours does; torch's way to say that nothing bounds it is a time of zero."""
        bounded = timeout is not None and timeout > timedelta(0)
        self._work.wait(timeout if bounded else None)
        return True

    def synchronize(self) -> None:
        """Wait."""
        self._work.wait()

    def is_completed(self) -> bool:
        """Whether it is done, well or badly."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it is done, and well."""
        return self._work.is_completed() and self._work.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """The tensors that it wrote."""
        return self._tensors

    def source_rank(self) -> int:
        """After a finished receive from anybody: the group rank that it came from."""
        source = self._work.source_rank()
        return -1 if source is None else self._membership.communicator.ranks.index(source)

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors.

        Within a backward pass it is completed when that ends, by its thread, and before DDP looks;
        elsewhere by a thread of ours as soon as the operation is done. An operation that fails makes the
        backward pass raise: C++ would take the error in a future of Python's for a result.
        """
        if self._future is None:
            self._future = _Future(self)
            done = self._work.is_completed()
            if torch._C._current_graph_task_id() != _NO_BACKWARD:
                # Callbacks at its end run one after another, and DDP's of a static graph waits for futures
                # that it starts itself: only those of the nodes before are queued.
                if done or torch._C._current_autograd_node() is None:
                    self._future.finish()
                else:
                    # Queued before DDP's own callback, which waits for futures without driving anything.
                    Variable._execution_engine.queue_callback(self._future.finish)
                    self._membership.communicator.progress()
                    _completer.add(self._future, patience=_PATIENCE_S)
            elif done:
                self._future.settle()
            else:
                _completer.add(self._future, patience=0.0)
        if any(tensor.dtype not in _HALVES or tensor.is_cuda for tensor in self._tensors) or _python_asks():
            return self._future
        typed: torch.futures.Future[Any] = _script().typed(self._future, self._tensors)
        return typed


def _python_asks() -> bool:
    """Whether `get_future` was called by Python code: what C++ calls has the frame of another function."""
    try:
        return "get_future" in sys._getframe(2).f_code.co_names
    except ValueError:  # no frame at all, in a thread of autograd's
        return False


@cache
def _script() -> Any:
    """What makes a future whose value is a TensorList, as the futures of torch's own groups.

    A result that Python sets is an object of Python's for C++, whatever it is: DDP takes it, its hook
    FP16_COMPRESS does not. A future of TorchScript's has the type that its function returns; this one waits
    for a future of Python's without holding a thread. But it ends in a thread of torch's, which on busy cores
    takes milliseconds to wake: too much for float32, in which DDP itself reduces. The streams of CUDA tensors
    would be lost on that way.
    """
    return torch.jit.CompilationUnit("""
def when(done: Future[int], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(done)
    return tensors


def typed(done: Future[int], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(when, done, tensors)
""")


@untraced
class _Future(torch.futures.Future[Any]):
    """A future that drives its operation when Python waits for it."""

    def __init__(self, work: TorchWork) -> None:
        devices = {tensor.device for tensor in work.result() if tensor.is_cuda}
        super().__init__(devices=list(devices))
        self._work = work
        self._lock = threading.Lock()
        self.settled = False

    def settle(self) -> None:
        """Wait for the operation, and complete the future once."""
        error: Exception | None = None
        try:
            self._work.wait()
        except Exception as failure:
            error = failure
        with self._lock:
            settled, self.settled = self.settled, True
        if settled:
            return
        if error is None:
            self.set_result(self._work.result())
        else:
            self.set_exception(error)

    def finish(self) -> None:
        """The same; raises what went wrong."""
        self._work.wait()
        self.settle()

    def ended(self) -> bool:
        """Complete the future if the operation is done; whether it is."""
        if not self._work.is_completed():
            return False
        self.settle()
        return True

    def wait(self) -> Any:
        """See `torch.futures.Future`."""
        self.settle()
        return super().wait()

    def value(self) -> Any:
        """See `torch.futures.Future`."""
        self.ended()
        return super().value()

    def done(self) -> bool:
        """See `torch.futures.Future`."""
        return self.ended() or super().done()


def _flat(tensors: Sequence[Any]) -> list[torch.Tensor]:
    return [one for each in tensors for one in (each if isinstance(each, (list, tuple)) else [each])]


class _Completer:
    """A thread that completes futures while there are some, in their order, each once its time has come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._open: list[tuple[float, _Future]] = []
        self._thread: threading.Thread | None = None

    def add(self, future: _Future, *, patience: float) -> None:
        with self._lock:
            self._open.append((time.monotonic() + patience, future))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="mcr_plus futures", daemon=True)
                self._thread.start()
        if not patience:
            self._wanted.set()

    def _run(self) -> None:
        while True:
            now, pause = time.monotonic(), _PATIENCE_S / 20
            for entry in list(self._open):
                due, future = entry
                if future.settled or (due <= now and future.ended()):
                    with self._lock:
                        self._open.remove(entry)
                elif due <= now:
                    pause = _PAUSE_S
            with self._lock:
                if not self._open:
                    self._thread = None
                    return
            self._wanted.wait(pause)
            self._wanted.clear()


_completer: Final = _Completer()


@untraced
class _Joint(dist.Work):
    """Several handles as one."""

    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._works, self._tensors = list(works), list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        bounded = timeout is not None and timeout > timedelta(0)
        deadline = time.monotonic() + timeout.total_seconds() if bounded and timeout is not None else 0.0
        for work in self._works:
            left = max(deadline - time.monotonic(), _LEAST_S) if bounded else 0.0
            work.wait(timedelta(seconds=left))
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        futures: list[Any] = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda _: self._tensors)


def joint(works: Sequence[dist.Work], tensors: Sequence[torch.Tensor]) -> dist.Work:
    """One handle for all of them."""
    return _Joint(works, tensors)
