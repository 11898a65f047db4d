"""Arrays of other libraries on a device, such as CuPy's: their memory, and the order of their streams.

A library that has `__cuda_array_interface__` states in its entry `stream` (version 3) the stream on which its
arrays are worked at, for CuPy its current one. An operation follows what is enqueued there when it is issued;
the stream that is stated when the operation is waited for follows the operation, as torch's current stream
does where tensors are concerned. Of an array that states no stream, its producer may still order one of ours
(`__dlpack__(stream=)`), but none can be ordered after us: the host waits for the operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch

from mcr_plus.communicator.tensors import is_on_device, tensor_on
from mcr_plus.core import streams as core_streams
from mcr_plus.core.deadline import Deadline, until
from mcr_plus.core.work import Info, Work
from mcr_plus.errors import CommTimeout, InvalidArgument

if TYPE_CHECKING:
    from mcr_plus.communicator.prepared import Prepared
    from mcr_plus.core.streams import Streams

_NAP_S: Final = 50e-6
_REAP: Final = 2  # operations looked at per call: amortised, never a scan
_MOST_STREAMS: Final = 16  # of a group: those of other libraries come and go


class ArrayStreams:
    """The streams that operations of one group on arrays are issued under.

    There is one for each device and set of streams that calls have followed: with one for all, an operation
    would wait for what others follow, which may wait for the operation on another rank.

    Arrays of operations that the program has not waited for are kept until these are complete: memory of
    another library is none that torch's allocator could keep.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        """`lock`: under which operations are polled, the engine's."""
        self._lock = lock
        self._made: dict[tuple[torch.device, frozenset[int | None]], Any] = {}
        self._pending = deque[ArrayWork]()

    def loan(self, arguments: Iterable[Any]) -> Loan:
        """The arguments of a call with tensors in place of arrays; work enqueued from now on follows them.

        Raises `InvalidArgument` for arrays that cannot be shared.
        """
        self._forget()
        loan = Loan(arguments, self._of)
        loan.follow()
        return loan

    def prepared(self, arguments: Iterable[Any], prepare: Callable[..., Any]) -> PreparedArrays:
        """Make an operation on arrays ready to be issued.

        `prepare` gets the arguments with tensors in place of arrays, and returns the operation as `Prepared`.
        """
        loan = self.loan(arguments)
        with loan.under():
            return PreparedArrays(prepare(*loan.arguments), loan, self)

    def started(self, loan: Loan, start: Callable[[], Work]) -> ArrayWork:
        """The handle of an operation on the arrays of a loan, which `start` issues."""
        with loan.under():
            work = ArrayWork(start(), loan, self._let_go)
        with self._lock:
            self._pending.append(work)
        return work

    def again(self, loan: Loan, start: Callable[[], Work]) -> ArrayWork:
        """The handle of another operation on the same arrays, which follows what is enqueued by now."""
        self._forget()
        loan.choose()
        loan.follow()
        return self.started(loan, start)

    def finish(self) -> None:
        """Wait until no array is needed any more, after the last operation has ended on the host."""
        for work in list(self._pending):
            until(work.is_completed, Deadline(None), _NAP_S)
        self._pending.clear()

    def _forget(self) -> None:
        """Let go of arrays of operations that have ended.

        It only probes: the program has not asked for them, so a bucket is not sent, nor a deadline begun.
        """
        pending = self._pending
        with self._lock:
            for _ in range(min(_REAP, len(pending))):
                work = pending.popleft()
                if not work.probe():
                    pending.append(work)

    def _let_go(self, work: ArrayWork) -> None:
        """The streams of the program follow the operation, so its arrays need not be kept here."""
        with self._lock, suppress(ValueError):
            self._pending.remove(work)

    def _of(self, device: torch.device, followed: frozenset[int | None]) -> Any:
        """The stream for operations that follow these streams, given by their handles in CUDA."""
        key = device, followed
        if key not in self._made:
            if len(self._made) >= _MOST_STREAMS:
                self._made.clear()
            self._made[key] = core_streams.streams_of(device).create()
        return self._made[key]


def finish_all(streams: Iterable[ArrayStreams]) -> None:
    """`finish` of several groups, of which none issues operations any more."""
    for each in streams:
        each.finish()


class Loan:
    """Arrays that are lent to an operation, and the stream that the operation is issued under."""

    def __init__(
        self, arguments: Iterable[Any], of: Callable[[torch.device, frozenset[int | None]], Any]
    ) -> None:
        """`arguments`: of a call; arrays, one at least, are arguments themselves or members of lists.

        `of`: returns the stream for operations on a device that follow given ones.
        """
        self._arrays: list[Any] = []
        self._has_tensors = False
        self._device = torch.device("cuda")
        self.arguments = tuple(self._lent(argument) for argument in arguments)
        self._streams = core_streams.streams_of(self._device)
        self._of = of
        self.choose()

    def _lent(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            self._has_tensors = True
        elif isinstance(argument, Sequence) and not isinstance(argument, str):
            return [self._lent(member) for member in argument]
        elif is_on_device(argument):
            self._arrays.append(argument)
            tensor = tensor_on(argument)
            self._device = tensor.device
            return tensor
        return argument

    def under(self) -> AbstractContextManager[object]:
        """Make the stream the current one of the calling thread in a block."""
        return self._streams.under(self._stream)

    def choose(self) -> None:
        """Choose the stream: the one that follows the streams which the arrays state now.

        Also torch's current stream, if tensors have a part.
        """
        stated, current = self._stated(), self._current()
        self._followed = (*map(self._streams.external, stated), *current)
        self._stream = self._of(self._device, stated | {each.cuda_stream for each in current})

    def follow(self) -> None:
        """Order the stream behind what is enqueued on those that it follows."""
        of, stream = self._streams, self._stream
        for other in self._followed:
            event = of.event()
            event.record(other)
            stream.wait_event(event)
        for array in self._arrays:
            if stated_stream(array) is None and hasattr(array, "__dlpack__"):
                array.__dlpack__(stream=stream.cuda_stream)  # which orders our stream, not the array

    def lead(self, work: ArrayWork, timeout: float | None) -> None:
        """Order those streams behind ours; without one that could be, wait for the operation's end."""
        of = self._streams
        event = of.event()
        event.record(self._stream)
        for other in (*map(of.external, self._stated()), *self._current()):
            other.wait_event(event)
        if any(stated_stream(array) is None for array in self._arrays):
            work.wait_for_end(timeout)

    def _stated(self) -> frozenset[int | None]:
        return frozenset(map(stated_stream, self._arrays))

    def _current(self) -> tuple[Any, ...]:
        """The current stream of torch, if tensors have a part."""
        return (self._streams.current(),) if self._has_tensors else ()


class ArrayWork(Work):
    """The handle of an operation on arrays: `wait` orders the streams of their libraries behind it."""

    __slots__ = ("_inner", "_let_go", "_loan")

    def __init__(self, inner: Work, loan: Loan, let_go: Callable[[ArrayWork], None]) -> None:
        """`let_go`: is called once streams of the program follow the operation."""
        self._inner = inner
        self._loan = loan
        self._let_go = let_go

    def wait(self, timeout: float | timedelta | None = None) -> None:  # noqa: D102
        deadline = Deadline(timeout)
        with self._loan.under():
            self._inner.wait(deadline.left())
        self._loan.lead(self, deadline.left())
        self._let_go(self)

    def is_completed(self) -> bool:  # noqa: D102
        with self._loan.under():
            return self._inner.is_completed()

    def wait_for_end(self, timeout: float | None) -> None:
        """Wait on the host until the operation has ended; raises its error."""
        if not until(self.is_completed, Deadline(timeout), _NAP_S):
            raise CommTimeout(f"{self.info.kind}: not done in the time of this wait; it goes on")
        if (error := self.exception()) is not None:
            raise error

    def probe(self) -> bool:  # noqa: D102
        with self._loan.under():
            return self._inner.probe()

    def exception(self) -> BaseException | None:  # noqa: D102
        return self._inner.exception()

    def then(self, function: Callable[[], None]) -> Work:  # noqa: D102
        with self._loan.under():
            self._inner.then(function)
        return self

    @property
    def info(self) -> Info:  # noqa: D102
        return self._inner.info

    @property
    def streams(self) -> Streams | None:  # noqa: D102
        return self._inner.streams

    def source_rank(self) -> int | None:  # noqa: D102
        return self._inner.source_rank()


class PreparedArrays:
    """An operation on arrays that is ready to be issued; as `Prepared`."""

    def __init__(self, ready: Prepared, loan: Loan, streams: ArrayStreams) -> None:
        self._ready, self._loan, self._streams = ready, loan, streams

    def start(self) -> Work:
        """Issue the operation; returns a handle, whose `wait` orders the arrays' streams."""
        return self._streams.started(self._loan, self._ready.start)

    def run(self) -> None:
        """Issue the operation; what the arrays' libraries enqueue from then on follows it."""
        self.start().wait()


def stated_stream(array: Any) -> int | None:
    """The stream, as CUDA's handle, that an array states; None if it states none.

    Raises `InvalidArgument` for 0, which the interface excludes: it may be either of CUDA's default streams.
    """
    interface = getattr(array, "__cuda_array_interface__", None)
    stream = None if interface is None else interface.get("stream")
    if stream is not None and (type(stream) is not int or stream <= 0):
        raise InvalidArgument(
            f"__cuda_array_interface__ of {type(array).__name__}: stream {stream!r}; expected None, or the "
            "handle of a CUDA stream: 1 for the legacy default stream, 2 for that of the thread"
        )
    return stream
