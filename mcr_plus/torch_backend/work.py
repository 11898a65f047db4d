"""`torch.distributed.Work` on top of `mcr_plus.Work`."""

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

from mcr_plus.core.deadline import Deadline
from mcr_plus.core.kinds import KINDS, collective
from mcr_plus.pipeline.dispatch import DispatchStage

if TYPE_CHECKING:
    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.core.work import Work

_T = TypeVar("_T")

_OP_TYPES: Final[dict[str, int]] = {
    **{kind: collective(kind).op_type for kind in KINDS},
    "all_to_all_v": 10, "all_reduce_coalesced": 2, "all_gather_coalesced": 20,
    "reduce_scatter_coalesced": 19, "coalesced": 17,
}  # fmt: skip
"""Numbers of c10d's `OpType`."""
_COALESCED: Final = 17
_UNKNOWN: Final = 100
_NO_BACKWARD: Final = -1
_HALVES: Final = (torch.float16, torch.bfloat16)
_PAUSE_S: Final = 100e-6  # pause between polls of the thread that completes futures
_LEAST_S: Final = 1e-6  # the shortest bounded wait; for torch, zero means unbounded
# Delay before the thread completes a future that the end of a backward pass should complete: the pass
# may have raised, or may itself wait for the future.
_BACKWARD_S: Final = 1.0


def untraced(kind: type[_T]) -> type[_T]:
    """Exclude a class's methods and their callees from torch.compile, because c10d calls them from C++.

    Marks the methods without importing the compiler. No-op before torch 2.7, which has no such API.
    """
    bindings: Any = torch._C  # untyped: the stubs lack these members
    compiler = bindings._dynamo.eval_frame
    if hasattr(compiler, "set_code_exec_strategy"):
        skip = compiler._FrameAction.SKIP
        for method in vars(kind).values():
            if isinstance(method, FunctionType):
                strategy = compiler._FrameExecStrategy(skip, skip)
                compiler.set_code_exec_strategy(method.__code__, strategy)
    return kind


@untraced
class _Done(dist.Work):
    """Handle shared by all synchronous calls."""

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


# Handles used by C++ code. Before torch 2.7, C++ does not keep their Python objects alive, and waits
# forever once these are gone.
_used_by_cpp: Final[set[TorchWork]] = set()


class Membership:
    """Membership of this rank in a group, kept alive by the process group and its handles."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator


@untraced
class TorchWork(dist.Work):
    """Handle of torch over an `mcr_plus.Work`. `tensors` is the value of its future."""

    def __init__(self, work: Work, tensors: Sequence[torch.Tensor], membership: Membership) -> None:
        super().__init__()
        self._work = work
        self._tensors = flat(tensors)
        self._membership = membership
        self._future: _Future | None = None

    def keep(self) -> None:
        """Keep this handle alive until it is waited for, or its future is complete."""
        _used_by_cpp.add(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as `mcr_plus.Work.wait` does; zero means no timeout, as in torch."""
        _used_by_cpp.discard(self)
        bounded = timeout is not None and timeout > timedelta(0)
        self._work.wait(timeout if bounded else None)
        return True

    def synchronize(self) -> None:
        """Wait without a timeout."""
        _used_by_cpp.discard(self)
        self._work.wait()

    def is_completed(self) -> bool:
        """Return True if the operation has succeeded or failed."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return True if the operation has succeeded."""
        return self._work.is_completed() and self._work.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation, if it failed."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the group rank of the sender, after a completed receive from any source."""
        source = self._work.source_rank()
        return -1 if source is None else self._membership.communicator.ranks.index(source)

    _source_rank = source_rank

    @property
    def timeout(self) -> timedelta:
        """The deadline of the group's operations."""
        stages = self._membership.communicator.opened.pipeline.stages
        return timedelta(seconds=next(each.timeout for each in stages if isinstance(each, DispatchStage)))

    def _get_sequence_number(self) -> int:
        return self._work.info.sequence

    def _get_op_type(self) -> int:
        return _OP_TYPES.get(self._work.info.kind, _UNKNOWN)

    def __repr__(self) -> str:
        return repr(self._work)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors.

        Within a backward pass, autograd's thread completes the future at the end of the pass, before DDP
        reads it; otherwise a background thread completes it as soon as the operation is done. A failed
        operation makes the backward pass raise, because C++ takes an error in a Python future for a result.
        """
        _used_by_cpp.discard(self)  # the future keeps the handle alive
        if self._future is None:
            self._future = _Future(self)
            done = self._work.is_completed()
            if torch._C._current_graph_task_id() != _NO_BACKWARD:
                # Final callbacks run one after another, and DDP's callback for a static graph waits for
                # futures that it creates itself: queue only futures created by graph nodes.
                if done or torch._C._current_autograd_node() is None:
                    self._future.complete_or_raise()
                else:
                    # Queued before DDP's own callback, which waits for futures without driving progress.
                    Variable._execution_engine.queue_callback(self._future.complete_or_raise)
                    self._membership.communicator.progress()
                    _completer.add(self._future, delay=_BACKWARD_S)
            elif done:
                self._future.complete()
            else:
                _completer.add(self._future, delay=0.0)
        wide = any(tensor.dtype not in _HALVES or not tensor.is_cpu for tensor in self._tensors)
        if wide or _called_from_python():
            return self._future
        typed: torch.futures.Future[Any] = _script().typed(self._future, self._tensors)
        return typed


def _called_from_python() -> bool:
    """Return True if Python code called `get_future`: the caller's frame names it, unlike on C++ calls."""
    try:
        return "get_future" in sys._getframe(2).f_code.co_names
    except ValueError:  # no frame at all in a thread of autograd
        return False


@cache
def _script() -> Any:
    """Return a TorchScript unit that makes futures with a TensorList as value, as torch's own groups do.

    A result set from Python is an opaque Python object in C++: DDP accepts it, its hook FP16_COMPRESS does
    not. A TorchScript future has the return type of its function, and waits for a Python future without
    blocking a thread. But a thread of torch completes it, and takes milliseconds to wake on busy cores: too
    long for float32, in which DDP itself reduces. Tensors on a device would lose their streams.
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
    """Future that drives its operation's progress while Python waits for it."""

    def __init__(self, work: TorchWork) -> None:
        devices = {tensor.device for tensor in work.result() if not tensor.is_cpu}
        super().__init__(devices=list(devices))
        self._work = work
        self._lock = threading.Lock()
        self.completed = False

    def complete(self) -> None:
        """Wait for the operation, and complete the future; later calls do nothing."""
        error: Exception | None = None
        try:
            self._work.wait()
        except Exception as failure:
            error = failure
        with self._lock:
            completed, self.completed = self.completed, True
        if completed:
            return
        if error is None:
            self.set_result(self._work.result())
        else:
            self.set_exception(error)

    def complete_or_raise(self) -> None:
        """Complete the future as `complete` does, and raise the operation's error."""
        self._work.wait()
        self.complete()

    def poll(self) -> bool:
        """Complete the future if the operation is done; return True if it is."""
        if not self._work.is_completed():
            return False
        self.complete()
        return True

    def wait(self) -> Any:
        """See `torch.futures.Future`."""
        self.complete()
        return super().wait()

    def value(self) -> Any:
        """See `torch.futures.Future`."""
        self.poll()
        return super().value()

    def done(self) -> bool:
        """See `torch.futures.Future`."""
        return self.poll() or super().done()


def flat(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors of a sequence of tensors or lists of tensors."""
    lists = (item if isinstance(item, (list, tuple)) else [item] for item in tensors)
    return [tensor for part in lists for tensor in part]


class _Completer:
    """Background thread that completes pending futures in order, each after its delay."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._pending: list[tuple[float, _Future]] = []
        self._thread: threading.Thread | None = None

    def add(self, future: _Future, *, delay: float) -> None:
        with self._lock:
            self._pending.append((time.monotonic() + delay, future))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="mcr_plus futures", daemon=True)
                self._thread.start()
        if not delay:
            self._wake.set()

    def _run(self) -> None:
        while True:
            now, pause = time.monotonic(), _BACKWARD_S / 20
            for entry in list(self._pending):
                due, future = entry
                if future.completed or (due <= now and future.poll()):
                    with self._lock:
                        self._pending.remove(entry)
                elif due <= now:
                    pause = _PAUSE_S
            with self._lock:
                if not self._pending:
                    self._thread = None
                    return
            self._wake.wait(pause)
            self._wake.clear()


_completer: Final = _Completer()


@untraced
class _Joint(dist.Work):
    """Joint handle of several operations."""

    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._works, self._tensors = list(works), list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        deadline = Deadline(timeout if timeout is not None and timeout > timedelta(0) else None)
        for work in self._works:
            left = deadline.left()
            work.wait(timedelta(seconds=0 if left is None else max(left, _LEAST_S)))
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

    @property
    def timeout(self) -> timedelta:
        return min((work.timeout for work in self._works), default=timedelta(0))  # type: ignore[attr-defined]

    def _get_sequence_number(self) -> int:
        return max((work._get_sequence_number() for work in self._works), default=0)  # type: ignore[attr-defined]

    def _get_op_type(self) -> int:
        return _COALESCED

    def get_future(self) -> torch.futures.Future[Any]:
        futures: list[Any] = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda _: self._tensors)


def joint(works: Sequence[dist.Work], tensors: Sequence[torch.Tensor]) -> dist.Work:
    """Return one handle for several operations, with `tensors` as its result."""
    return _Joint(works, tensors)
