"""Device streams: order of operations that start late, and staging of operations through host memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

from mcr_plus.core import streams as core_streams
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.streams import Event, Retained, Streams
from mcr_plus.core.work import Info, Work
from mcr_plus.engine.issue import Issue


class StartOrder:
    """Order, on a stream's device, of the stages' preparation before operations of a channel start.

    An operation that starts after its issue is ordered after the position of the caller's stream at the
    issue, and after nothing later. Encoders read and write state between calls, so they run in operation
    order, independent of the streams under which the operations were issued.
    """

    def __init__(self, streams: Streams | None) -> None:
        """`streams`: None for the streams of the current CUDA device."""
        self.streams = streams or core_streams.streams_of(torch.device("cuda"))
        self._stream = self.streams.create()  # for operations that start later
        self._prepared: Event | None = None

    def position(self) -> Event:
        """Return the caller's position."""
        event = self.streams.event()
        event.record(self.streams.current())
        return event

    def after(self, position: Event) -> AbstractContextManager[object]:
        """Order the work in a block after a position."""
        self._stream.wait_event(position)
        return self.streams.under(self._stream)

    def prepare(self, message: Message) -> None:
        """Call the message's `prepare`; its kernels run after the kernels of the previous operation."""
        prepare = message.prepare
        if prepare is None:
            return
        stream = self.streams.current()
        if self._prepared is None:
            self._prepared = self.streams.event()
        else:
            stream.wait_event(self._prepared)
        prepare()
        self._prepared.record(stream)


class _Arrival(Work):
    """Copies of the inputs to host memory, as a handle that an operation can start after.

    The copies begin once `after`, the operation's own dependency, is done. An error in an earlier step (for
    example an encoder) becomes the operation's error.
    """

    __slots__ = ("_after", "_copy", "_error", "_event", "_is_begun")

    def __init__(self, after: Work | None, copy: Callable[[], Event]) -> None:
        self._after = after
        self._copy = copy
        self._error: BaseException | None = None
        self._is_begun = after is None
        self._event: Event | None = copy() if after is None else None

    def probe(self) -> bool:
        if not self._is_begun:
            assert self._after is not None
            if not self._after.probe():
                return False
            # The probe may have re-entered this method: functions of `then` may issue operations.
            if not self._is_begun and self.exception() is None:
                self._is_begun = True
                try:
                    self._event = self._copy()
                except Exception as error:
                    self._error = error
        return self.exception() is not None or (self._event is not None and bool(self._event.query()))

    def is_completed(self) -> bool:
        return self.probe()

    def exception(self) -> BaseException | None:
        return self._error or (None if self._after is None else self._after.exception())

    def wait(self, timeout: float | timedelta | None = None) -> None:  # noqa: ARG002
        raise TypeError("a copy is waited for by its operation")

    def then(self, function: Callable[[], None]) -> Work:  # noqa: ARG002
        raise TypeError("a copy has nothing to follow it")

    @property
    def info(self) -> Info:
        raise TypeError("a copy is not an operation")


class _StagedWork(Work):
    """Host operation with results to copy back; `wait` makes the current stream wait for the copies.

    Functions of `then` launch their kernels on the stream of the copies, after the copy back. `copied` is
    recorded after the last of them; their tensors are kept alive until then.
    """

    __slots__ = ("_copied", "_inner", "_retained", "_stream", "_streams")

    def __init__(self, inner: Work, of: Streams, stream: Any, copied: Event, retained: Retained) -> None:
        self._inner = inner
        self._streams = of
        self._stream = stream
        self._copied = copied
        self._retained = retained

    @property
    def streams(self) -> Streams:
        return self._streams

    def wait(self, timeout: float | timedelta | None = None) -> None:
        self._inner.wait(timeout)
        self._streams.current().wait_event(self._copied)

    def is_completed(self) -> bool:
        return self._inner.is_completed() and self._is_copied()

    def probe(self) -> bool:
        return self._inner.probe() and self._is_copied()

    def _is_copied(self) -> bool:
        return self._inner.exception() is not None or bool(self._copied.query())

    def exception(self) -> BaseException | None:
        return self._inner.exception()

    def then(self, function: Callable[[], None]) -> Work:
        position = self._streams.event()
        position.record(self._streams.current())

        def follow() -> None:
            self._stream.wait_event(position)
            with self._streams.under(self._stream):
                function()
            self._copied.record(self._stream)
            self._retained.add(self._copied, function)

        self._inner.then(follow)
        return self

    @property
    def info(self) -> Info:
        return self._inner.info

    def source_rank(self) -> int | None:
        return self._inner.source_rank()


def stage_through_host(signature: Signature, issue: Issue) -> Issue:
    """Wrap the host operation `issue`: copy to the host, run it once the copy has arrived, copy back.

    The copies run on a stream of their own from and to pinned memory; nothing synchronises the device.
    """
    return Issue(_Staging(signature, issue).start)


class _Staging:
    """Bound form of `stage_through_host` for one signature."""

    def __init__(self, signature: Signature, issue: Issue) -> None:
        self._device = torch.device(signature.device)
        self._signature = signature.replace(device="cpu")
        self._issue = issue
        self._made: dict[torch.device, tuple[Streams, Any]] = {}
        self._retained = Retained()

    def _stream(self, device: torch.device) -> tuple[Streams, Any]:
        if device not in self._made:
            of = core_streams.streams_of(device)
            self._made[device] = of, of.create()
        return self._made[device]

    def _late_stream(self, message: Message) -> tuple[Streams, Any]:
        """Return the stream type of the preceding operation's device, else of the type's current device."""
        of = None if message.after is None else message.after.streams
        kind = self._device
        return self._stream(kind if of is None else torch.device(kind.type, of.device))

    def start(self, message: Message) -> Work:
        tensors, prepare = message.inputs + message.outputs, message.prepare
        if not tensors and prepare is None:
            return self._issue(message.with_tensors((), (), self._signature))
        is_late = not tensors  # `prepare` supplies the tensors; their lengths arrive with `after`
        retained = self._retained
        retained.release()
        of, stream = self._stream(tensors[0].device) if tensors else self._late_stream(message)
        # `produced` orders the copies after the caller's work so far; `wait` orders the caller after
        # `copied`.
        produced, copied = of.event(), of.event()
        produced.record(of.current())
        pinned = {id(t): of.pinned(t) for t in tensors}

        def place() -> None:
            """Allocate host memory for tensors of the current lengths."""
            pinned.update((id(t), of.pinned(t)) for t in message.inputs + message.outputs)
            host.inputs = tuple(pinned[id(t)] for t in message.inputs)
            host.outputs = tuple(pinned[id(t)] for t in message.outputs)
            host.input_counts, host.output_counts = message.input_counts, message.output_counts

        def copy_out() -> Event:
            stream.wait_event(produced)
            with of.under(stream):
                if prepare is not None:
                    prepare()
                if is_late:
                    place()
                for tensor in message.inputs:
                    pinned[id(tensor)].copy_(tensor, non_blocking=True)
                    of.keep(tensor, stream)
            arrived = of.event()
            arrived.record(stream)
            retained.add(arrived, prepare)
            return arrived

        def copy_back() -> None:
            with of.under(stream):
                for tensor in message.outputs:
                    tensor.copy_(pinned[id(tensor)], non_blocking=True)
                    of.keep(tensor, stream)
            copied.record(stream)

        host = message.with_tensors(
            tuple(pinned[id(t)] for t in message.inputs),
            tuple(pinned[id(t)] for t in message.outputs),
            self._signature,
            prepare=None,
        )
        host.after = _Arrival(message.after, copy_out)
        return _StagedWork(self._issue(host).then(copy_back), of, stream, copied, retained)
