"""Recorder of a simulated rank: operations with the computation between them, waits, and steps."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import thread_time
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mcr_plus.core.group import Group
from mcr_plus.core.kinds import MESSAGES, dtype_name
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.stacks import position_of, site_at
from mcr_plus.core.work import JointWork, Work
from mcr_plus.engine.hook import OperationHook
from mcr_plus.engine.issue import Issue
from mcr_plus.simulate.records import AwaitedCall, EndedStep, IssuedCall, RecordedRank
from mcr_plus.simulate.values import fill

_KEPT: Final = {True: 1 << 16, False: 1 << 24}  # bytes of floats and of others; larger values are only data
_PATIENT: Final = 2  # polls of the issuing thread before an operation that nobody waits for is done
_OTHERS: Final = 1000  # the same by other threads, such as the one that completes torch's futures


class EnoughSteps(SystemExit):
    """Ends the program after enough steps."""


class CallRecorder(OperationHook):
    """Records one rank. `enough`: number of steps after which the program ends; 0: at its own end.

    Computation is the CPU time of the thread that issues, so other processes do not disturb it.
    """

    def __init__(self, rank: int, values: dict[Any, Any], enough: int) -> None:
        self.record = RecordedRank(rank)
        self.known = values
        self.enough = enough
        self.on_step: Callable[[int], None] = lambda _: None
        self._calls: list[int] = []  # those of the program's call in progress
        self._count = 0
        self._groups: dict[str, int] = {}
        self._numbers = Counter[tuple[int, ...]]()
        self._turns = Counter[Any]()
        self._clock = threading.local()
        self._optimizer: Any = None
        self._steps = 0

    # -- groups -----------------------------------------------------------------------------------

    def created(self, ranks: tuple[int, ...]) -> None:
        """Note a group of the program, which may be a group of other ranks."""
        self.record.created.append((ranks, _site()))

    def opened(self, name: str, ranks: tuple[int, ...]) -> None:
        """Note a group in which this rank may issue operations; each of its libraries calls this."""
        if name not in self._groups:
            self._groups[name] = len(self.record.groups)
            self.record.groups.append((ranks, self._numbers[ranks]))
            self._numbers[ranks] += 1

    # -- operations -------------------------------------------------------------------------------

    def spent(self) -> float:
        """Return the seconds of computation since the last call of `resume` in this thread."""
        now = thread_time()
        return now - getattr(self._clock, "since", 0.0)

    def resume(self) -> None:
        """Go on measuring computation."""
        self._clock.since = thread_time()

    def start(self, group: Group, signature: Signature, message: Message) -> None:
        """Record an operation, and give its outputs the values that ranks with equal data would get."""
        seconds = self.spent()
        index = self._groups[group.name]
        self.record.events.append(
            IssuedCall(
                seconds, signature.kind, index, signature.nbytes, message.own_bytes(),
                dtype_name(signature.dtype), signature.reduce_op, signature.root, message.peer,
                message.match_tag, signature.tag, signature.choice, _site(), signature.call,
            )
        )  # fmt: skip
        self._calls.append(self._count)
        self._count += 1
        with _disable_current_modes(), torch.no_grad():
            value, kind, me = None, signature.kind, self.record.rank
            if kind in MESSAGES:
                peer = None if message.peer is None else group.ranks[message.peer]
                channel = (me, peer) if kind == "send" else (peer, me)
                value = self._value([channel, ("like", index)], (message.inputs or message.outputs)[0])
            fill(message, group.rank, value)
        self.resume()

    def _value(self, keys: list[Any], tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value that the sender sends, if it has run, or else rank 0 in its group of this number.

        `keys`: sender with receiver or group; number of the group. Small values of this rank are kept.
        """
        channel = keys[0]
        turn = self._turns[channel]
        self._turns[channel] += 1
        if channel[0] == self.record.rank:
            small = tensor.nbytes <= _KEPT[tensor.is_floating_point()]
            value = tensor.detach().clone() if small else None
            for key in keys if isinstance(channel[1], str) else [channel]:
                self.record.values.setdefault(key, []).append(value)
            return value
        for key in keys:
            values: list[torch.Tensor | None] = self.known.get(key, [])
            known = values[turn] if turn < len(values) else None
            if known is not None and known.nbytes == tensor.nbytes:
                return known.reshape(-1).view(tensor.dtype)
        if not tensor.is_floating_point():  # it may decide what the program does
            self.record.missing = channel[0]
        return None

    def _broadcast(self, group: Group, message: Message) -> Callable[[], None]:
        """Return what gives a broadcast its value as a whole, as stages may cut it; nothing for others."""
        if message.signature.kind != "broadcast":
            return lambda: None
        tensor, root = (message.outputs or message.inputs)[0], message.signature.root
        with _disable_current_modes(), torch.no_grad():
            keys = [(group.ranks[root or 0], group.name), ("like", self._groups.get(group.name))]
            value = self._value(keys, tensor)
            value = tensor.detach().clone() if value is None else value

        def end() -> None:
            with _disable_current_modes(), torch.no_grad():
                tensor.detach().copy_(value.view_as(tensor))
            self.resume()

        return end

    # -- the program's calls ----------------------------------------------------------------------

    def bound(self, group: Group, issue: Issue) -> Issue:
        """See `OperationHook`."""

        def start(message: Message) -> Work:
            end = self._broadcast(group, message)
            with self.within([]) as calls:
                work = RecordedWork(issue.start(message), self, calls)
            work.then(end)
            return work

        def run(message: Message) -> None:
            end = self._broadcast(group, message)
            with self.within([]) as calls:
                issue.run(message)
                self.waited(calls)
            end()

        return Issue(start, run)

    @contextmanager
    def within(self, calls: list[int]) -> Iterator[list[int]]:
        """Add the operations that are issued in the block to `calls`, those of one call of the program."""
        outer, self._calls = self._calls, calls
        try:
            yield calls
        finally:
            self._calls = outer

    def waited(self, calls: list[int]) -> None:
        """Record a wait for operations."""
        for call in calls:
            self.record.events.append(AwaitedCall(self.spent(), call))
            self.resume()
        calls.clear()

    # -- steps ------------------------------------------------------------------------------------

    def stepped(self, optimizer: Any, *_: object) -> None:
        """Note the end of a step, if it is the first optimizer's; ends the program after enough steps."""
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        self.record.events.append(EndedStep(self.spent()))
        self._steps += 1
        self.on_step(self._steps)
        if self._steps == self.enough:
            raise EnoughSteps(0)
        self.resume()


class RecordedWork(JointWork):
    """Handle of a program's call, which is not done before the program waits or polls several times."""

    def __init__(self, work: Work, recorder: CallRecorder, calls: list[int]) -> None:
        super().__init__([work], work.info.kind, nbytes=work.info.bytes)
        self._recorder, self._calls = recorder, calls
        self._polls, self._waited, self._thread = 0, False, threading.get_ident()

    def wait(self, timeout: float | timedelta | None = None) -> None:  # noqa: D102
        self._waited = True
        with self._recorder.within(self._calls):
            super().wait(timeout)
        self._recorder.waited(self._calls)

    def is_completed(self) -> bool:  # noqa: D102
        self._polls += 1
        patience = _PATIENT if threading.get_ident() == self._thread else _OTHERS
        if not self._waited and self._polls > patience:
            self.wait()
        return self._waited

    probe = is_completed


def _site() -> str:
    """Return file and line of the program's innermost frame."""
    position = position_of(sys._getframe(1))
    if position is None:
        return "?"
    file, line, _ = site_at(position)
    return f"{file.rpartition('/')[2]}:{line}"
