"""Device arrays of other libraries, such as CuPy: their memory, and the order of their streams.

The entry `stream` of `__cuda_array_interface__` (version 3) states the stream on which a library uses its
arrays (CuPy: its current stream). An operation runs after the work that this stream holds when the operation
is issued. The stream stated at `wait` runs after the operation, as torch's current stream does for tensors.
If an array states no stream, its producer may still order our stream after its work (`__dlpack__(stream=)`),
but cannot order its work after ours: the host waits for the operation.
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
_REAP: Final = 2  # pending operations probed per call: an amortised cost, never a full scan
_MOST_STREAMS: Final = 16  # per group: streams of other libraries come and go


class ArrayStreams:
    """Streams under which a group issues operations on arrays.

    Each device and set of followed streams has a stream of its own. With a single stream, an operation would
    wait for the work that other operations follow, which may wait for this operation on another rank.

    Arrays are kept alive until the program has waited for their operations or these are complete, because
    torch's allocator cannot keep memory of another library.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        """`lock`: the engine's lock, held while operations are polled."""
        self._lock = lock
        self._made: dict[tuple[torch.device, frozenset[int | None]], Any] = {}
        self._pending = deque[ArrayWork]()

    def loan(self, arguments: Iterable[Any]) -> Loan:
        """Return the arguments of a call with tensors in place of arrays, and order the operation's stream.

        Raises `InvalidArgument` if an array cannot be shared with torch.
        """
        self._forget()
        loan = Loan(arguments, self._of)
        loan.follow()
        return loan

    def prepared(self, arguments: Iterable[Any], prepare: Callable[..., Any]) -> PreparedArrays:
        """Bind an operation on arrays, without issuing it.

        `prepare` gets the arguments with tensors in place of arrays, and returns the operation as `Prepared`.
        """
        loan = self.loan(arguments)
        with loan.under():
            return PreparedArrays(prepare(*loan.arguments), loan, self)

    def started(self, loan: Loan, start: Callable[[], Work]) -> ArrayWork:
        """Issue an operation on the arrays of a loan by `start`; return its handle."""
        with loan.under():
            work = ArrayWork(start(), loan, self._let_go)
        with self._lock:
            self._pending.append(work)
        return work

    def again(self, loan: Loan, start: Callable[[], Work]) -> ArrayWork:
        """Issue another operation on the same arrays, after the work enqueued so far; return its handle."""
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
        """Release the arrays of operations that have ended.

        This only probes: the program does not wait here, so no bucket is sent and no deadline starts.
        """
        pending = self._pending
        with self._lock:
            for _ in range(min(_REAP, len(pending))):
                work = pending.popleft()
                if not work.probe():
                    pending.append(work)

    def _let_go(self, work: ArrayWork) -> None:
        """Release an operation's arrays once the program's streams follow the operation."""
        with self._lock, suppress(ValueError):
            self._pending.remove(work)

    def _of(self, device: torch.device, followed: frozenset[int | None]) -> Any:
        """Return the stream for operations that follow these streams, given as CUDA handles."""
        key = device, followed
        if key not in self._made:
            if len(self._made) >= _MOST_STREAMS:
                self._made.clear()
            self._made[key] = core_streams.streams_of(device).create()
        return self._made[key]


class Loan:
    """Arrays lent to an operation, and the stream under which the operation is issued."""

    def __init__(
        self, arguments: Iterable[Any], of: Callable[[torch.device, frozenset[int | None]], Any]
    ) -> None:
        """`arguments`: the arguments of a call; at least one is an array or a list with an array.

        `of`: returns the stream for operations on a device that follow given streams.
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
        """Choose the stream that follows the streams stated by the arrays now.

        It also follows torch's current stream if tensors are among the arguments.
        """
        stated, current = self._stated(), self._current()
        self._followed = (*map(self._streams.external, stated), *current)
        self._stream = self._of(self._device, stated | {each.cuda_stream for each in current})

    def follow(self) -> None:
        """Order the stream after the work enqueued on the streams that it follows."""
        of, stream = self._streams, self._stream
        for other in self._followed:
            event = of.event()
            event.record(other)
            stream.wait_event(event)
        for array in self._arrays:
            if stated_stream(array) is None and hasattr(array, "__dlpack__"):
                array.__dlpack__(stream=stream.cuda_stream)  # orders our stream after the array's producer

    def lead(self, work: ArrayWork, timeout: float | None) -> None:
        """Order the stated streams after ours; wait for the operation's end if an array states none."""
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
        """Return torch's current stream if tensors are among the arguments."""
        return (self._streams.current(),) if self._has_tensors else ()


class ArrayWork(Work):
    """Handle of an operation on arrays; `wait` orders the arrays' streams after the operation."""

    __slots__ = ("_inner", "_let_go", "_loan")

    def __init__(self, inner: Work, loan: Loan, let_go: Callable[[ArrayWork], None]) -> None:
        """`let_go`: called once the program's streams follow the operation."""
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
        """Wait on the host until the operation has ended; raise its error."""
        if not until(self.is_completed, Deadline(timeout), _NAP_S):
            raise CommTimeout(f"{self.info.kind}: not complete in the time of this wait; it continues")
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
    """Operation on arrays, bound and ready to be issued; the counterpart of `Prepared`."""

    def __init__(self, ready: Prepared, loan: Loan, streams: ArrayStreams) -> None:
        self._ready, self._loan, self._streams = ready, loan, streams

    def start(self) -> Work:
        """Issue the operation; return a handle whose `wait` orders the arrays' streams."""
        return self._streams.started(self._loan, self._ready.start)

    def run(self) -> None:
        """Issue the operation; later work on the arrays' streams runs after it."""
        self.start().wait()


def stated_stream(array: Any) -> int | None:
    """Return the CUDA stream handle in the array's `__cuda_array_interface__`, or None.

    Raises `InvalidArgument` for 0, which the protocol forbids because it could mean either default stream.
    """
    interface = getattr(array, "__cuda_array_interface__", None)
    stream = None if interface is None else interface.get("stream")
    if stream is not None and (type(stream) is not int or stream <= 0):
        raise InvalidArgument(
            f"__cuda_array_interface__ of {type(array).__name__}: stream {stream!r}; expected None, or the "
            "handle of a CUDA stream: 1 for the legacy default stream, 2 for that of the thread"
        )
    return stream
