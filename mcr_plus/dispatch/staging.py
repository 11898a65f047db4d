"""CUDA tensors through libraries that only know host memory.

Has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch

from mcr_plus.dispatch.work import Info, Work
from mcr_plus.interfaces import Issue
from mcr_plus.message import Message, Signature


class _Arrival(Work):
    """What the current stream has been given so far, as something an operation can start after."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, timeout: float | timedelta | None = None) -> None:  # noqa: ARG002, D102
        self._event.synchronize()

    def is_completed(self) -> bool:  # noqa: D102
        return bool(self._event.query())

    def exception(self) -> BaseException | None:  # noqa: D102
        return None

    def then(self, function: Callable[[], None]) -> Work:  # noqa: D102
        raise TypeError("an event has nothing to follow it")

    @property
    def info(self) -> Info:  # noqa: D102
        raise TypeError("an event is not an operation")


class _StagedWork(Work):
    """A host operation whose results are copied back; `wait` makes the current stream wait for the copy."""

    __slots__ = ("_copied", "_inner")

    def __init__(self, inner: Work, copied: torch.cuda.Event) -> None:
        self._inner = inner
        self._copied = copied

    def wait(self, timeout: float | timedelta | None = None) -> None:  # noqa: D102
        self._inner.wait(timeout)
        torch.cuda.current_stream().wait_event(self._copied)

    def is_completed(self) -> bool:  # noqa: D102
        if not self._inner.is_completed():
            return False
        return self._inner.exception() is not None or bool(self._copied.query())

    def exception(self) -> BaseException | None:  # noqa: D102
        return self._inner.exception()

    def then(self, function: Callable[[], None]) -> Work:  # noqa: D102
        self._inner.then(function)
        return self

    @property
    def info(self) -> Info:  # noqa: D102
        return self._inner.info

    def source_rank(self) -> int | None:  # noqa: D102
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

    def run(message: Message) -> Work:
        tensors = message.inputs + message.outputs
        if not tensors:
            return issue(Message(host_signature, after=message.after))
        stream = copy_stream(tensors[0].device)
        stream.wait_stream(torch.cuda.current_stream(tensors[0].device))
        pinned = {id(t): torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors}
        with torch.cuda.stream(stream):
            for tensor in message.inputs:
                pinned[id(tensor)].copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        copied = torch.cuda.Event()

        def copy_back() -> None:
            with torch.cuda.stream(stream):
                for tensor in message.outputs:
                    tensor.copy_(pinned[id(tensor)], non_blocking=True)
                    tensor.record_stream(stream)
                copied.record(stream)

        host = Message(
            host_signature,
            tuple(pinned[id(t)] for t in message.inputs),
            tuple(pinned[id(t)] for t in message.outputs),
        )
        rest = {name: value for name, value in vars(message).items() if name not in vars(host)}
        host.__dict__.update(rest)
        host.after = _Arrival(arrived)
        return _StagedWork(issue(host).then(copy_back), copied)

    return run
