"""What the operations of this process do, published on its status page for `mcr-plus top`.

A thread draws a picture twice a second from what the engine has anyway. Operations pay for it with two
counters, and a long wait with a note of what it waits for; nothing is drawn on their path. A rank that
computes or hangs is drawn like any other, and of one that is stopped the last picture stays.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from mcr_plus.core.stacks import Stack, stack_of
from mcr_plus.dispatch.latecomers import Blame, Latecomers
from mcr_plus.liveness.page import Page

if TYPE_CHECKING:
    from mcr_plus.dispatch.engine import Engine
    from mcr_plus.dispatch.group_state import GroupState
    from mcr_plus.dispatch.operation import Operation
    from mcr_plus.dispatch.work import IssuedWork

PERIOD: Final = 0.5
"""Seconds between two pictures."""
_LEAST_SHARE: Final = 500  # a period lasts at least so many times as long as drawing
_WINDOW: Final = 9  # pictures over which rates are taken
_NO_WAIT: Final = 0.005  # seconds; a shorter wait is the operation itself
_NAMED: Final = 64  # missing ranks, groups and ranks of a group that a picture names at most

_log = logging.getLogger("mcr_plus")


class StatusThread:
    """The thread that keeps the status page of this process. One without a page does nothing."""

    def __init__(
        self,
        engine: Engine,
        about: Mapping[str, Any] | None,
        version: str = "",
        elsewhere: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """`about`, `version`: see `Page`; None for no page. `elsewhere`: states of ranks on other hosts."""
        self._ended = threading.Event()
        self._page: Page | None = None
        self._thread: threading.Thread | None = None
        if about is None:
            return
        try:
            self._page = Page(about, version)
        except (OSError, AttributeError) as error:
            _log.debug("no status page for mcr-plus top: %s", error)
            return
        self._draw = Drawing(engine, elsewhere)
        self._thread = threading.Thread(target=self._run, name="mcr_plus status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove the page."""
        thread, page, self._thread, self._page = self._thread, self._page, None, None
        if thread is not None and page is not None:
            self._ended.set()
            thread.join()
            page.close()

    def abandon(self) -> None:
        """In a forked child: it has no such thread, and must not keep the parent's page alive."""
        page, self._thread, self._page = self._page, None, None
        if page is not None:
            page.close()

    def _run(self) -> None:
        page = self._page
        while page is not None:
            began = time.monotonic()
            try:
                page.show(self._draw.picture(began))
            except Exception as error:  # a group may be closed meanwhile; the next picture is without it
                _log.debug("no picture for mcr-plus top: %s", error, exc_info=True)
            took = time.monotonic() - began
            if self._ended.wait(max(PERIOD, _LEAST_SHARE * took)):
                return


class Drawing:
    """Draws pictures of an engine. Times in them are seconds of the monotonic clock."""

    def __init__(self, engine: Engine, elsewhere: Callable[[], Mapping[int, str]]) -> None:
        self._engine = engine
        self._elsewhere = elsewhere
        self._counted: WeakKeyDictionary[Operation, int] = WeakKeyDictionary()
        self._groups: dict[GroupState, _Traffic] = {}
        self._latecomers = Latecomers(PERIOD)
        self._active = time.monotonic()  # when the program was last seen inside mcr_plus

    def picture(self, now: float) -> dict[str, Any]:
        """The picture of this moment."""
        engine = self._engine
        states = engine.states[:]
        self._groups = {state: self._groups.get(state) or _Traffic() for state in states}
        self._count(now)
        waits = sorted(engine.waits.items(), key=lambda each: each[1][1])
        stack = self._stack(waits[0][0] if waits else None)
        if stack.call:
            self._active = now
        self._latecomers.sample(now, _blame(waits[0][1][0], waits[0][1][1], now, stack) if waits else None)
        flying = [work for work in list(engine.in_flight) if not work.is_done]
        return {
            "at": now,
            "active": max([self._active, *(traffic.changed for traffic in self._groups.values())]),
            "waits": [_wait(work, since) for _, (work, since) in waits[:_NAMED]],
            "frames": stack.frames,
            "program": stack.program,
            "call": stack.call,
            "groups": [self._group(state, flying) for state in states[:_NAMED]],
            "more_groups": max(0, len(states) - _NAMED),
            "error": next((str(state.failure) for state in states if state.failure is not None), ""),
            "elsewhere": {str(rank): state for rank, state in self._elsewhere().items()},
        }

    def _count(self, now: float) -> None:
        """Add what has been issued since the last picture to the traffic of its group."""
        for operation in _snapshot(self._engine.bound):
            calls, last = operation.issued
            before = self._counted.get(operation, 0)
            if calls == before:
                continue
            self._counted[operation] = calls
            traffic = self._groups.get(operation.state)
            if traffic is None:  # its group is closed
                continue
            traffic.calls += calls - before
            traffic.bytes += (calls - before) * operation.mean_bytes
            traffic.changed = now
            if last >= traffic.last[0]:
                traffic.last = last, operation.signature.describe()
        for traffic in self._groups.values():
            traffic.history.append((now, traffic.calls, traffic.bytes))

    def _group(self, state: GroupState, flying: list[IssuedWork]) -> dict[str, Any]:
        traffic, group = self._groups[state], state.group
        drawn: dict[str, Any] = {
            "name": group.name,
            "size": group.size,
            "ranks": group.ranks[:_NAMED],
            "issued": state.sequence,
            "last": traffic.last[1],
            "changed": traffic.changed,
            "in_flight": sum(work.operation.state is state for work in flying),
        }
        if len(traffic.history) > 1:
            (then, calls, sent), (now, calls_now, sent_now) = traffic.history[0], traffic.history[-1]
            drawn["operations_per_s"] = (calls_now - calls) / (now - then)
            drawn["bytes_per_s"] = (sent_now - sent) / (now - then)
        return drawn

    def _stack(self, thread: int | None) -> Stack:
        """Where the thread that waits is, or that of the program."""
        if thread is None:
            owner = self._engine.states[0].owner if self._engine.states else 0
            thread = owner if owner > 0 else threading.main_thread().ident
        return stack_of(sys._current_frames().get(thread or 0))


class _Traffic:
    """What a group has issued: calls and bytes, those of the last pictures, and the last operation."""

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0.0
        self.changed = 0.0  # when a picture last found a new call
        self.last: tuple[int, str] = (0, "")
        self.history: deque[tuple[float, int, float]] = deque(maxlen=_WINDOW)


def _blame(work: IssuedWork, since: float, now: float, stack: Stack) -> Blame | None:
    """The one rank that a wait is for; None if there are several, or another rank would say the same."""
    state, sequence = work.operation.state, work.sequence
    group, board = state.group, state.board
    if now - since < _NO_WAIT or not sequence or not board.is_live:
        return None
    missing = [rank for rank in group.peers if board.seen(rank) < sequence]
    if len(missing) != 1 or group.rank != (0 if missing[0] else 1) or board.compiling(missing[0]) % 2:
        return None
    place = "{1}:{2}, in {0}".format(*stack.frames[stack.program[0]]) if stack.frames else ""
    described = work.operation.signature.describe()
    return Blame(group.ranks[missing[0]], group.name, sequence, described, place)


def _wait(work: IssuedWork, since: float) -> dict[str, Any]:
    operation, sequence, peer = work.operation, work.sequence, work.message.peer
    state, is_p2p = operation.state, operation.signature.is_p2p
    ranks = state.group.ranks
    if is_p2p:
        missing = {} if peer is None else {ranks[peer]: 0}
    else:
        issued = {rank: state.board.seen(rank) for rank in state.group.peers}
        missing = {ranks[rank]: number for rank, number in issued.items() if number < sequence}
    return {
        "group": state.group.name,
        "number": sequence,
        "operation": operation.signature.describe(),
        "library": operation.backend,
        "since": since,
        "started": work.poll is not None,
        "missing": [[rank, number] for rank, number in list(missing.items())[:_NAMED]],
        "missing_count": len(missing),
        "timeout": operation.timeout,
    }


def _snapshot(bound: Any) -> list[Operation]:
    """The operations of a set to which another thread may be adding."""
    with contextlib.suppress(RuntimeError):  # its size has changed meanwhile
        return list(bound)
    return []
