"""CUDA streams around operations that start late, and around those that are staged through host memory.

Has not run on a GPU yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch

from mcr_plus.core.message import Message, Signature
from mcr_plus.core.work import Info, Work
from mcr_plus.dispatch.issue import Issue


class CallerStream:
    """The position of the caller's stream when it issued an operation that starts later.

    As a context manager: work inside is ordered after that position, and after nothing later.
    """

    __slots__ = ("_event", "_inside", "_stream")

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream())
        self._stream = torch.cuda.Stream()

    def __enter__(self) -> None:
        self._stream.wait_event(self._event)
        self._inside = torch.cuda.stream(self._stream)
        self._inside.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._inside.__exit__(*exception)


class _Arrival(Work):
    """The inputs' copies to host memory, as a handle that an operation can start after.

    The copies begin once `after`, the operation's own dependency, is done. An error in what precedes them
    (an encoder's, say) becomes the operation's.
    """

    __slots__ = ("_after", "_copy", "_error", "_event", "_is_begun")

    def __init__(self, after: Work | None, copy: Callable[[], torch.cuda.Event]) -> None:
        self._after = after
        self._copy = copy
        self._error: BaseException | None = None
        self._is_begun = after is None
        self._event: torch.cuda.Event | None = copy() if after is None else None

    def probe(self) -> bool:
        if not self._is_begun:
            assert self._after is not None
            if not self._after.probe():
                return False
            # The probe may have led here a second time: functions of `then` may issue operations.
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
    """A host operation whose results are copied back; `wait` makes the current stream wait for the copy.

    Functions of `then` launch their kernels on the stream of the copies, behind the copy back. `copied` is
    recorded behind the last of them. What they refer to must not be freed earlier, so `keep` takes it.
    """

    __slots__ = ("_copied", "_inner", "_keep", "_stream")

    def __init__(
        self, inner: Work, stream: torch.cuda.Stream, copied: torch.cuda.Event, keep: Callable[[object], None]
    ) -> None:
        self._inner = inner
        self._stream = stream
        self._copied = copied
        self._keep = keep

    def wait(self, timeout: float | timedelta | None = None) -> None:
        self._inner.wait(timeout)
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def is_completed(self) -> bool:
        return self._inner.is_completed() and self._is_copied()

    def probe(self) -> bool:
        return self._inner.probe() and self._is_copied()

    def _is_copied(self) -> bool:
        return self._inner.exception() is not None or bool(self._copied.query())

    def exception(self) -> BaseException | None:
        return self._inner.exception()

    def then(self, function: Callable[[], None]) -> Work:
        def follow() -> None:
            with torch.cuda.stream(self._stream):
                function()
                self._copied.record(self._stream)
            self._keep(function)

        self._inner.then(follow)
        return self

    @property
    def info(self) -> Info:
        return self._inner.info

    def source_rank(self) -> int | None:
        return self._inner.source_rank()


def stage_through_host(signature: Signature, issue: Issue) -> Issue:
    """Wrap the host operation `issue`: copy out, run it once the copy has arrived, copy back.

    The copies run on a stream of their own from and to pinned memory; nothing synchronises the device.
    """
    return Issue(_Staging(signature, issue).start)


class _Staging:
    """What `stage_through_host` binds to a signature."""

    def __init__(self, signature: Signature, issue: Issue) -> None:
        self._signature = signature.replace(device="cpu")
        self._issue = issue
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._kept = deque[tuple[torch.cuda.Event, object]]()  # what a stream may still use

    def start(self, message: Message) -> Work:
        inputs, outputs = message.inputs, message.outputs
        tensors = inputs + outputs
        if not tensors:
            return self._issue(message.with_tensors((), (), self._signature))
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()
        device = tensors[0].device
        stream = self._streams.get(device) or self._streams.setdefault(device, torch.cuda.Stream(device))
        produced, copied = torch.cuda.Event(), torch.cuda.Event()
        produced.record(torch.cuda.current_stream(device))
        pinned = {id(t): torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors}
        after, prepare = message.after, message.prepare

        def copy_out() -> torch.cuda.Event:
            stream.wait_event(produced)
            if after is not None:  # functions that followed it may have launched kernels here
                stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                if prepare is not None:
                    prepare()
                for tensor in inputs:
                    pinned[id(tensor)].copy_(tensor, non_blocking=True)
                    tensor.record_stream(stream)
            arrived = torch.cuda.Event()
            arrived.record(stream)
            self._kept.append((arrived, prepare))
            return arrived

        def copy_back() -> None:
            with torch.cuda.stream(stream):
                for tensor in outputs:
                    tensor.copy_(pinned[id(tensor)], non_blocking=True)
                    tensor.record_stream(stream)
            copied.record(stream)

        host = message.with_tensors(
            tuple(pinned[id(t)] for t in inputs),
            tuple(pinned[id(t)] for t in outputs),
            self._signature,
            after=_Arrival(after, copy_out),
            prepare=None,
        )
        keep = self._kept.append
        return _StagedWork(
            self._issue(host).then(copy_back), stream, copied, lambda used: keep((copied, used))
        )
