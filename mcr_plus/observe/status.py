"""The status page of this process for `mcr-plus top`: its operations and waits.

A thread draws a picture twice a second from existing state of the engine: its waits, and each group's ring of
last operations. The path of operations draws nothing. A rank that computes or hangs is drawn like any other;
the page of a stopped rank keeps the last picture.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.core.stacks import Stack, stack_in
from mcr_plus.hosts.page import Page
from mcr_plus.observe.persistent_stragglers import Blame, PersistentStragglers

if TYPE_CHECKING:
    from mcr_plus.core.message import Signature
    from mcr_plus.engine.engine import Engine
    from mcr_plus.engine.group_state import GroupState
    from mcr_plus.engine.work import IssuedWork

PERIOD: Final = 0.5
"""Seconds between two pictures."""
_LEAST_SHARE: Final = 500  # ratio of period to drawing time, at least: bounds the processor use
_LONGEST: Final = 2.0  # seconds; readers consider a rank busy after three without a picture
_WINDOW: Final = 9  # pictures over which rates are taken
_NO_WAIT: Final = 0.005  # seconds; a shorter wait is the operation itself
_NAMED: Final = 64  # most missing ranks, groups and ranks of a group that a picture names

_log = logging.getLogger("mcr_plus")


class StatusThread:
    """The thread that updates the status page of this process; it does nothing without a page."""

    def __init__(
        self,
        engine: Engine,
        about: Mapping[str, Any] | None,
        version: str = "",
        elsewhere: Callable[[], Mapping[int, str]] = dict,
        dumped: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Prepare a page for `about` and `version`, see `Page`; None: no page.

        `elsewhere` returns states of ranks on other hosts, `dumped` is as in `Recorder`.
        """
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
        self._draw = Drawing(engine, elsewhere, dumped)
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
        """Drop the parent's page in a forked child, which lacks the thread; it would keep the page alive."""
        page, self._thread, self._page = self._page, None, None
        if page is not None:
            page.close()

    def _run(self) -> None:
        page = self._page
        while page is not None:
            began = time.thread_time()  # processor time: excludes stops, and other threads on the core
            try:
                page.show(self._draw.picture(time.monotonic()))
            except Exception as error:  # a group may close meanwhile; the next picture omits it
                _log.debug("no picture for mcr-plus top: %s", error, exc_info=True)
            took = time.thread_time() - began
            if self._ended.wait(min(max(PERIOD, _LEAST_SHARE * took), _LONGEST)):
                return


class Drawing:
    """Draws pictures of an engine. Times in pictures are seconds of the monotonic clock."""

    def __init__(
        self,
        engine: Engine,
        elsewhere: Callable[[], Mapping[int, str]],
        dumped: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._engine = engine
        self._elsewhere, self._dumped = elsewhere, dumped
        self._groups: dict[GroupState, _Traffic] = {}
        self._latecomers = PersistentStragglers(PERIOD)
        self._active = time.monotonic()  # time at which the program was last seen inside mcr_plus

    def picture(self, now: float) -> dict[str, Any]:
        """Return the picture of this moment."""
        engine = self._engine
        states = engine.states[:]
        self._groups = {state: self._groups.get(state) or _Traffic() for state in states}
        for state, traffic in self._groups.items():
            traffic.count(state, now, self._mean_bytes)
        to_monotonic = now - time.time_ns() * 1e-9
        waits = sorted(engine.waits[:], key=lambda wait: wait.began)
        since = [wait.began * 1e-9 + to_monotonic for wait in waits]
        stack = self._stack(waits[0].thread if waits else None)
        if stack.call:
            self._active = now
        self._latecomers.sample(now, _blame(waits[0].work, now - since[0], stack) if waits else None)
        flying = [work for work in list(engine.in_flight) if not work.is_done]
        return {
            "at": now,
            "active": max([self._active, *(traffic.changed for traffic in self._groups.values())]),
            "waits": [_wait(wait.work, began) for wait, began in zip(waits, since, strict=True)][:_NAMED],
            "frames": stack.frames,
            "program": stack.program,
            "call": stack.call,
            "groups": [self._group(state, flying) for state in states[:_NAMED]],
            "more_groups": max(0, len(states) - _NAMED),
            "error": next((str(state.failure) for state in states if state.failure is not None), ""),
            "dumped": dict(self._dumped()),
            "elsewhere": {str(rank): state for rank, state in self._elsewhere().items()},
        }

    def _mean_bytes(self, signature: Signature) -> float:
        """Return an operation's bytes by the convention of nccl-tests; this rank's own if sizes differ."""
        if signature.nbytes is not None:
            return signature.nbytes
        with contextlib.suppress(RuntimeError):  # another thread has bound an operation meanwhile
            for operation in self._engine.bound:
                if operation.signature == signature:
                    return operation.mean_bytes
        return 0.0

    def _group(self, state: GroupState, flying: list[IssuedWork]) -> dict[str, Any]:
        traffic, group = self._groups[state], state.group
        drawn: dict[str, Any] = {
            "name": group.name,
            "size": group.size,
            "ranks": group.ranks[:_NAMED],
            "issued": state.sequence,
            "last": traffic.last,
            "changed": traffic.changed,
            "in_flight": sum(work.operation.state is state for work in flying),
        }
        if len(traffic.history) > 1:
            (then, calls, sent), (now, calls_now, sent_now) = traffic.history[0], traffic.history[-1]
            drawn["operations_per_s"] = (calls_now - calls) / (now - then)
            drawn["bytes_per_s"] = (sent_now - sent) / (now - then)
        return drawn

    def _stack(self, thread: int | None) -> Stack:
        """Return the stack of the waiting thread, or of the program's."""
        if thread is None:
            owner = self._engine.states[0].owner if self._engine.states else 0
            thread = owner if owner > 0 else threading.main_thread().ident
        return stack_in(thread or 0)


class _Traffic:
    """The traffic of a group: calls and bytes, their values in the last pictures, and the last operation."""

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0.0
        self.changed = 0.0  # time at which a picture last found a new call
        self.last = ""
        self.history: deque[tuple[float, int, float]] = deque(maxlen=_WINDOW)
        self._number = 0  # number of the last counted operation
        self._message = 0  # issue time of the last counted message

    def count(self, state: GroupState, now: float, mean_bytes: Callable[[Signature], float]) -> None:
        """Add the operations since the last picture, from the group's rings of last operations.

        Operations that the ring has dropped since then count with the mean size of the others; dropped
        messages are not counted.
        """
        issued = state.sequence
        # In one call, without releasing the interpreter's lock: the program appends to the ring.
        ring = list(islice(reversed(state.ring), max(0, issued - self._number)))
        new = Counter(signature for number, signature, _ in ring if number > self._number)
        known = new.total()
        lost = max(0, issued - self._number - known)
        sent = sum(count * mean_bytes(each) for each, count in new.items())
        sent += lost * sent / known if known else 0.0
        messages = [(each, at) for _, _, each, at in tuple(state.messages) if at > self._message]
        calls = known + lost + len(messages)
        if calls:
            self.calls += calls
            self.bytes += sent + sum(mean_bytes(each) for each, _ in messages)
            self.changed = now
            last = ring[0][1] if ring else messages[-1][0] if messages else None
            self.last = "" if last is None else last.describe()
        self._number = max(self._number, issued)
        self._message = messages[-1][1] if messages else self._message
        self.history.append((now, self.calls, self.bytes))


def _blame(work: IssuedWork, waited: float, stack: Stack) -> Blame | None:
    """Return the one rank that a wait is for; None if there are several, or if another rank reports it."""
    state, sequence = work.operation.state, work.sequence
    group, board = state.group, state.board
    if waited < _NO_WAIT or not sequence or not board.is_live:
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
