"""What the operations of this process do, published on its status page for `mcr-plus top`.

A thread draws a picture twice a second from what the engine has anyway: its waits, and the rings of the last
operations of each group. Nothing is drawn on the path of operations. A rank that computes or hangs is drawn
like any other, and of one that is stopped the last picture stays.
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
_LEAST_SHARE: Final = 500  # a period lasts at least so many times as long as the processor draws
_LONGEST: Final = 2.0  # seconds; readers take a rank for busy after three without a picture
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
        dumped: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`about`, `version`: see `Page`; None for no page. `elsewhere`: states of ranks on other hosts.

        `dumped`: see `Recorder`.
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
        """In a forked child: it has no such thread, and must not keep the parent's page alive."""
        page, self._thread, self._page = self._page, None, None
        if page is not None:
            page.close()

    def _run(self) -> None:
        page = self._page
        while page is not None:
            began = time.thread_time()  # a stop, or other threads on the core, cost nothing
            try:
                page.show(self._draw.picture(time.monotonic()))
            except Exception as error:  # a group may be closed meanwhile; the next picture is without it
                _log.debug("no picture for mcr-plus top: %s", error, exc_info=True)
            took = time.thread_time() - began
            if self._ended.wait(min(max(PERIOD, _LEAST_SHARE * took), _LONGEST)):
                return


class Drawing:
    """Draws pictures of an engine. Times in them are seconds of the monotonic clock."""

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
        self._active = time.monotonic()  # when the program was last seen inside mcr_plus

    def picture(self, now: float) -> dict[str, Any]:
        """The picture of this moment."""
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
        """Bytes of an operation by the convention of nccl-tests, this rank's own where sizes differ."""
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
        """Where the thread that waits is, or that of the program."""
        if thread is None:
            owner = self._engine.states[0].owner if self._engine.states else 0
            thread = owner if owner > 0 else threading.main_thread().ident
        return stack_in(thread or 0)


class _Traffic:
    """What a group has issued: calls and bytes, those of the last pictures, and the last operation."""

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0.0
        self.changed = 0.0  # when a picture last found a new call
        self.last = ""
        self.history: deque[tuple[float, int, float]] = deque(maxlen=_WINDOW)
        self._number = 0  # of the last operation that was counted
        self._message = 0  # when the last message that was counted was issued

    def count(self, state: GroupState, now: float, mean_bytes: Callable[[Signature], float]) -> None:
        """Add what the group has issued since the last picture, from its rings of the last operations.

        What the ring of operations has lost since then counts as large as what is left; messages that are
        lost are not counted.
        """
        issued = state.sequence
        # At once, without the interpreter's lock in between: the program adds to it.
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
    """The one rank that a wait is for; None if there are several, or another rank would say the same."""
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
