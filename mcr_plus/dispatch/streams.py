"""CUDA streams around operations that start late, and around those that are staged through host memory.

Has not run on a GPU yet.
"""

from __future__ import annotations

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

    The copies begin once `after`, the operation's own dependency, is done.
    """

    __slots__ = ("_after", "_copy", "_event")

    def __init__(self, after: Work | None, copy: Callable[[], torch.cuda.Event]) -> None:
        self._after = after
        self._copy = copy
        self._event: torch.cuda.Event | None = copy() if after is None else None

    def probe(self) -> bool:
        if self._event is None:
            if self._after is not None and not self._after.probe():
                return False
            if self.exception() is not None:
                return True
            self._event = self._copy()
        return bool(self._event.query())

    def is_completed(self) -> bool:
        return self.probe()

    def exception(self) -> BaseException | None:
        return None if self._after is None else self._after.exception()

    def wait(self, timeout: float | timedelta | None = None) -> None:  # noqa: ARG002
        raise TypeError("a copy is waited for by its operation")

    def then(self, function: Callable[[], None]) -> Work:  # noqa: ARG002
        raise TypeError("a copy has nothing to follow it")

    @property
    def info(self) -> Info:
        raise TypeError("a copy is not an operation")


class _StagedWork(Work):
    """A host operation whose results are copied back; `wait` makes the current stream wait for the copy."""

    __slots__ = ("_copied", "_inner")

    def __init__(self, inner: Work, copied: torch.cuda.Event) -> None:
        self._inner = inner
        self._copied = copied

    def wait(self, timeout: float | timedelta | None = None) -> None:
        self._inner.wait(timeout)
        torch.cuda.current_stream().wait_event(self._copied)

    def is_completed(self) -> bool:
        if not self._inner.is_completed():
            return False
        return self._inner.exception() is not None or bool(self._copied.query())

    def exception(self) -> BaseException | None:
        return self._inner.exception()

    def then(self, function: Callable[[], None]) -> Work:
        self._inner.then(function)
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
    host_signature = signature.replace(device="cpu")
    streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy_stream(device: torch.device) -> torch.cuda.Stream:
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)
        return streams[device]

    def start(message: Message) -> Work:
        tensors = message.inputs + message.outputs
        if not tensors:
            return issue(message.with_tensors((), (), host_signature))
        stream = copy_stream(tensors[0].device)
        produced = torch.cuda.Event()
        produced.record(torch.cuda.current_stream(tensors[0].device))
        pinned = {id(t): torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors}
        prepare = message.prepare

        def copy_out() -> torch.cuda.Event:
            with torch.cuda.stream(stream):
                stream.wait_event(produced)
                if prepare is not None:
                    prepare()
                for tensor in message.inputs:
                    pinned[id(tensor)].copy_(tensor, non_blocking=True)
                    tensor.record_stream(stream)
                arrived = torch.cuda.Event()
                arrived.record(stream)
            return arrived

        copied = torch.cuda.Event()

        def copy_back() -> None:
            with torch.cuda.stream(stream):
                for tensor in message.outputs:
                    tensor.copy_(pinned[id(tensor)], non_blocking=True)
                    tensor.record_stream(stream)
                copied.record(stream)

        host = message.with_tensors(
            tuple(pinned[id(t)] for t in message.inputs),
            tuple(pinned[id(t)] for t in message.outputs),
            host_signature,
            after=_Arrival(message.after, copy_out),
            prepare=None,
        )
        return _StagedWork(issue(host).then(copy_back), copied)

    return Issue(start)
