"""One order, progress and deadlines: the part of the runtime that all operations of a process share."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, cast
from weakref import WeakSet

from mcr_plus.dispatch.board import Failure, GroupBoard, unpad
from mcr_plus.dispatch.progress import ProgressThread
from mcr_plus.dispatch.streams import CallerStream
from mcr_plus.dispatch.waiting import Pause, Waiting, WaitPolicy
from mcr_plus.errors import (
    BackendError,
    CommTimeout,
    LaunchError,
    McrError,
    NotInitialized,
    OperationsDiffer,
    OrderMismatch,
)

if TYPE_CHECKING:
    from mcr_plus.dispatch.bells import Bells
    from mcr_plus.dispatch.operation import Lane, Operation
    from mcr_plus.dispatch.peers import Peers
    from mcr_plus.dispatch.work import IssuedWork
    from mcr_plus.interfaces import Backend, Poll, StreamPoll
    from mcr_plus.message import Group, Message

_NOBODY: Final = -1
_EXPLAINED: Final = 1.0  # seconds that ranks have to say what they issued, after OperationsDiffer
_LONG_WAIT: Final = 0.05  # seconds; from here on peers' processes are looked at too
_VERY_LONG_WAIT: Final = 1.0  # from here on a look is rarer
_SHARED_NAP: Final = 200e-6  # seconds of sleep at most while something else is in flight too
_BURST: Final = 16  # polls of such an operation in a row: a large one takes thousands
_DEATH_GRACE: Final = 0.2  # a message of a rank that has just died or left may still be on its way
_UNSEEN: Final = 10.0  # seconds that an operation may take while nobody can see what its peers are doing
_LOOKS_OF_GRACE: Final = 40  # the same in looks at the board, which are rarer between hosts
_RAISED_BY_PEER: Final = {"OrderMismatch": OrderMismatch, "CommTimeout": CommTimeout}
_COMPILES_FOR: Final = 300.0  # seconds for which a peer that compiles kernels holds deadlines up, at most
_REAP: Final = 2  # finished handles let go per issue: amortised, never a scan


class _Gone(NamedTuple):
    """A rank that will not take part any more, and what it said of an operation that failed there."""

    rank: int  # in the job
    told: str
    failure: str = ""


class GroupState:
    """What this process knows of one group: its numbering, its board, its thread and its failure.

    `sequence` is the number of the last operation issued. The short way of a synchronous operation does not
    publish it: peers only ask about ranks that wait, and whoever waits publishes.
    """

    __slots__ = (
        "_shared",
        "_thread",
        "board",
        "closed",
        "failure",
        "fast",
        "group",
        "owner",
        "recorded",
        "sequence",
        "told",
        "unfinished",
        "waiting_lanes",
        "when_stuck",
    )

    def __init__(self, group: Group, board: GroupBoard) -> None:
        self.group = group
        self.board = board
        self.sequence = 0
        self.failure: BaseException | None = None
        self.told = False  # whether the program has been given it
        self.unfinished: set[str | None] = set()  # libraries that may still be at an operation given up here
        self.closed = False
        self.recorded = False
        self.waiting_lanes = 0
        # Called while a wait takes long: what it waits for may depend on something that is held back here.
        self.when_stuck: list[Callable[[], None]] = []
        self._shared = False
        self._thread = threading.current_thread()
        self.owner = threading.get_ident()
        self.fast = self.owner

    def refresh(self) -> None:
        """Say whether the owner may take the short way, without lock and handle: nothing is special."""
        special = self._shared or self.recorded or self.waiting_lanes or self.owner <= 0
        self.fast = 0 if special else self.owner

    def publish(self) -> None:
        """Let peers see how many operations have been issued."""
        self.board.counter[0] = self.sequence

    def admit(self, *, any_thread: bool = False) -> None:
        """Decide about a caller that is not the group's thread: the slow path of every refusal.

        `any_thread`: for what has no place in the group's order, sends and receives.

        Raises:
            NotInitialized: the group is closed, or belongs to the parent of a forked process.
            BackendError: an earlier operation of the group failed.
            OrderMismatch: another thread uses this group, so the order of operations is not defined.
        """
        name = self.group.name
        if self.closed:
            raise NotInitialized(f"group '{name}' is closed: finalize, close or reset has been called")
        if isinstance(self.failure, OrderMismatch) and not self.told:
            self.told = True
            raise self.failure
        if self.failure is not None:
            raise BackendError(f"group '{name}' cannot be used after it has failed: {self.failure}")
        if self.owner == _NOBODY:
            raise NotInitialized(
                f"group '{name}' belongs to the parent process; a forked child must call mcr.init itself, "
                "under a launcher of its own"
            )
        caller = threading.current_thread()
        # Threads that Python did not start (autograd's) run while their caller waits: no second order.
        if any_thread or isinstance(caller, threading._DummyThread):
            self._shared = True
            self.refresh()
            return
        if not self._thread.is_alive():
            self.take_over()
            return
        raise OrderMismatch(
            f"group '{name}' is used by thread '{self._thread.name}', and now by '{caller.name}': the order "
            "of their operations would differ between ranks. Give each thread a group of its own "
            "(mcr.new_group), or hand this one over with comm.take_over() when the other thread is done"
        )

    def take_over(self) -> None:
        """Make the calling thread the group's thread; raises as `admit` does where nobody may issue."""
        if self.closed or self.failure is not None or self.owner == _NOBODY:
            self.admit()
        self._thread = threading.current_thread()
        self.owner = threading.get_ident()
        self.refresh()

    def fail(self, error: BaseException) -> None:
        """Refuse further operations: numbering or data of this group can no longer be trusted."""
        if self.failure is None:
            self.failure = error
            self.owner = self.fast = 0  # no thread has this identity: every issue goes to `admit`

    def close(self) -> None:
        """Refuse further operations."""
        self.closed = True
        self.owner = self.fast = 0

    def abandon(self) -> None:
        """Called in a forked child."""
        self.owner = _NOBODY
        self.fast = 0


class Engine:
    """Starts operations in order, drives progress while anyone waits, and watches deadlines."""

    def __init__(
        self,
        peers: Peers,
        *,
        wait: WaitPolicy,
        oversubscribed: bool,
        bells: Bells | None = None,
        beside: Sequence[int] = (),
        ranks: int = 1,
        short: bool = False,
    ) -> None:
        """`bells`, `beside`, `ranks`, `short`: see `Waiting`, whose `peers` are `beside`."""
        self.lock = threading.RLock()
        self.peers = peers
        self.recorders: tuple[Callable[[IssuedWork], None], ...] = ()
        self.states: list[GroupState] = []
        self.backends: list[Backend] = []
        self.bound: WeakSet[Operation] = WeakSet()
        self.off: dict[str, str] = {}  # library → why it is not called any more in this process
        self.failed = False
        # Ranks of the job that have left or given up, and so failed an operation.
        self.blamed: set[int] = set()
        self.progress_thread: ProgressThread | None = None
        self.waiting = Waiting(wait, short=short, ranks=ranks, bells=bells, peers=beside)
        self._starter: ProgressThread | None = None
        self._oversubscribed = oversubscribed
        self._held: deque[IssuedWork] = deque()
        self._lanes: list[Lane] = []  # those with deferred operations
        self._unordered: list[IssuedWork] = []  # deferred sends and receives

    def abandon(self) -> None:
        """In a forked child: what is in flight is the parent's, and whoever waits for it here is told."""
        self.lock = threading.RLock()  # a thread of the parent may have held it
        self.waiting.abandon()
        self.progress_thread = self._starter = None
        for work in self._held:
            if not work.is_done:
                work.error = NotInitialized(
                    f"{work.operation.name(work.sequence)} was issued by the parent process; a forked child "
                    "cannot wait for it"
                )
                work.is_done = True
        self._held.clear()

    # -- starting ---------------------------------------------------------------------------------

    def spins_for(self, backend_spins: int) -> int:
        """How often a waiting rank polls at full speed, given what the library likes."""
        if self.waiting.policy == "spin":
            return 1 << 16
        if self.waiting.policy == "sleep":
            return 1
        return min(backend_spins, 20) if self._oversubscribed else backend_spins

    @staticmethod
    def burst_for(backend: Backend) -> range:
        """The polls of one round of a longer wait."""
        return range(_BURST if getattr(backend, "needs_polls", False) else 1)

    def lets_threads_in(self, name: str | None) -> bool:
        """Whether a library may be called while another thread is inside it."""
        backend = next((each for each in self.backends if each.name == name), None)
        refuses: Callable[[], str] | None = getattr(backend, "refuses_threads", None)
        return refuses is None or not refuses()

    def hold(self, work: IssuedWork) -> None:
        """Keep an asynchronous operation alive until it is done, even if the caller drops its handle."""
        held = self._held
        for _ in range(_REAP):
            if not held or not (held[0].is_done or self.try_poll(held[0])):
                break
            held.popleft()
        held.append(work)
        if self.progress_thread is not None:
            self.progress_thread.wake()
        self.ring()

    @property
    def occupied(self) -> bool:
        """Whether anything is in flight but what the caller waits for."""
        return bool(self._held or self._lanes or self._unordered)

    def ring(self) -> None:
        """Wake ranks of this host that wait for this one: something has been posted or started."""
        bells = self.waiting.bells
        if bells is not None and bells.wanted[0]:
            bells.ring()

    def defer(self, work: IssuedWork) -> None:
        """Queue an operation that may not start yet; those of its lane that follow queue behind it."""
        lane = work.operation.lane
        if work.operation.on_stream:
            work.caller = CallerStream()
        if work.operation.compared:
            self.post(work)
        if not lane.pending:
            self._lane_waits(lane, work.operation.state, True)
        lane.pending.append(work)
        self._advance_lane(lane)
        if lane.pending and work.operation.signature.async_op and _runs_by_itself(work):
            self._starts_by_itself()

    def _starts_by_itself(self) -> None:
        """Let a thread start what waits for other ranks: its library goes on alone once it has it."""
        if self.progress_thread is None:
            if self._starter is None:
                self._starter = ProgressThread(self.start_pending)
            self._starter.wake()

    def start_pending(self) -> bool:
        """Start operations of libraries with threads of their own as soon as they may; whether some wait."""
        with self.lock:
            lanes = [lane for lane in self._lanes if _runs_by_itself(lane.pending[0])]
            for lane in lanes:
                self._advance_lane(lane)
            return any(lane.pending for lane in lanes)

    def defer_unordered(self, work: IssuedWork) -> None:
        """Queue a send or receive that waits for its data."""
        self._unordered.append(work)

    def record_to(self, recorders: tuple[Callable[[IssuedWork], None], ...]) -> None:
        """Tell these of every operation that ends."""
        self.recorders = recorders
        for state in self.states:
            state.recorded = bool(recorders)
            state.refresh()

    def _lane_waits(self, lane: Lane, state: GroupState, waits: bool) -> None:
        (self._lanes.append if waits else self._lanes.remove)(lane)
        state.waiting_lanes += 1 if waits else -1
        state.refresh()

    def settle(self, lane: Lane) -> None:
        """Wait until every operation of a lane has started."""
        while lane.pending:
            self.wait(lane.pending[0])

    def post(self, work: IssuedWork) -> None:
        """Publish what this rank is doing."""
        operation = work.operation
        state = operation.state
        state.publish()
        if work.message.compares_counts:
            state.board.post_counts(work.sequence, *work.message.compared_flows(state.group.rank))
        if not operation.signature.is_p2p:
            state.board.post(work.sequence, operation.digest, operation.text)
        self.ring()

    def _advance_lane(self, lane: Lane) -> None:
        pending = lane.pending
        while pending and (pending[0].is_done or self._may_start(pending[0])):
            work = pending.popleft()
            if not work.is_done:
                self._start(work)
            if not pending:  # only now: the short way takes no lock, and must not overtake this start
                self._lane_waits(lane, work.operation.state, False)

    def _may_start(self, work: IssuedWork) -> bool:
        """Whether a deferred operation can start; it may fail here instead."""
        if work.operation.held and not self._is_admitted(work):
            return work.is_done
        after = work.message.after
        if after is None:
            return True
        if not after.probe():
            return False
        if (error := after.exception()) is not None:
            self.fail(work, error)
        return True

    def _is_admitted(self, work: IssuedWork) -> bool:
        """Whether all ranks have issued the same and the library is ready for it; may fail `work`."""
        operation = work.operation
        gate: Poll | None = getattr(work, "gate", None)
        if gate is _admitted:  # it waits for something else: whatever lets it in must not be asked twice
            return True
        try:
            if gate is None and operation.compared and not self._compare(work):
                return False
            if work.is_done:
                return False
            if gate is None:
                gate = None if operation.gate is None else operation.gate(work.message)
            if gate is not None:
                work.gate = gate
                if not gate():
                    return False
        except Exception as error:
            self.fail(work, error)
            return False
        operation.admitted()
        work.gate = _admitted
        return True

    def _start(self, work: IssuedWork) -> None:
        message = work.message
        try:
            with work.caller if work.operation.on_stream else nullcontext():
                if message.prepare is not None:
                    message.prepare()
                work.poll = work.operation.start(message)
        except Exception as error:
            self.fail(work, error)
            return
        if work.finish and work.operation.on_stream:
            finish, work.finish = work.finish, None
            for function in finish:
                _stream(work).chain(function)

    # -- agreement --------------------------------------------------------------------------------

    def _compare(self, work: IssuedWork) -> bool:
        """Whether all peers have posted the same signature; fails `work` if one posted another."""
        board, sequence = work.operation.state.board, work.sequence
        digest = work.operation.digest
        if board.agreed(sequence, digest):
            self._compare_counts(work)
            return True
        if self._is_blind(work):
            return False
        now = time.monotonic()
        look_at = getattr(work, "look_at", None)
        if look_at is None or now < look_at:
            if look_at is None:
                work.look_at = now + board.first_look
            return False
        work.look_at = now + board.look_every
        me = work.operation.state.group.rank
        for rank in range(work.operation.state.group.size):
            if rank == me:
                continue
            sighting = board.look(rank, sequence)
            if sighting.digest == digest or sighting.overwritten:
                continue
            if sighting.digest is None and (sighting.issued <= sequence or self._may_explain(work, now)):
                return False
            self.fail(work, self._mismatch(work, rank, sighting.digest))
            return False
        return True

    def _may_explain(self, work: IssuedWork, now: float) -> bool:
        """Whether a peer that has issued something else, and not said what, still has time to.

        It describes the operation when its own wait for it becomes long.
        """
        since: float | None = getattr(work, "unexplained", None)
        if since is None:
            work.unexplained = since = now
        return now - since < _EXPLAINED

    def _is_blind(self, work: IssuedWork, waited: float = math.inf) -> bool:
        """Fail an operation whose peers cannot be seen and do not come, or are not to be believed."""
        problem = work.operation.state.board.problem
        if problem is None or (waited < _UNSEEN and not isinstance(problem, LaunchError)):
            return False
        if not work.is_done:
            error = BackendError(f"{work.operation.name(work.sequence)}: {problem}")
            error.__cause__ = problem
            self.fail(work, error)
        return True

    def _compare_counts(self, work: IssuedWork) -> None:
        """Fail a vector collective in which a peer sends or expects something else than this rank does."""
        for rank in range(work.operation.state.group.size):
            if (told := self._other_counts(work, rank)) is not None:
                self.fail(work, told)
                return

    def _other_counts(self, work: IssuedWork, rank: int) -> OrderMismatch | None:
        """What does not fit between `rank` and this one in a vector collective; None if all does."""
        state = work.operation.state
        if rank == state.group.rank or not work.message.compares_counts:
            return None
        sent, expected = work.message.compared_flows(state.group.rank)
        theirs = state.board.counts(rank, work.sequence)
        if theirs is None or theirs == (expected[rank], sent[rank]):
            return None
        return self._count_mismatch(work, rank, theirs, (sent[rank], expected[rank]))

    def _count_mismatch(
        self, work: IssuedWork, rank: int, theirs: tuple[int, int], mine: tuple[int, int]
    ) -> OrderMismatch:
        group, text = work.operation.state.group, work.operation.signature.describe()
        (sends, expects), (sent, expected) = theirs, mine
        if sends != expected:
            told = f"rank {rank} sends {sends} elements to rank {group.rank}, which expects {expected}"
        else:
            told = f"rank {group.rank} sends {sent} elements to rank {rank}, which expects {expects}"
        return OrderMismatch(f"operation #{work.sequence} of group '{group.name}', {text}: {told}")

    def _mismatch(self, work: IssuedWork, rank: int, digest: int | None) -> OrderMismatch:
        board, group = work.operation.state.board, work.operation.state.group
        mine = unpad(work.operation.text)  # no longer than theirs, so that both fit into what peers are told
        theirs = "" if digest is None else board.text(rank, work.sequence, digest)
        theirs = theirs or "another operation, issued before and not described"
        return OrderMismatch(
            f"operation #{work.sequence} of group '{group.name}': rank {group.rank} issued {mine}; "
            f"rank {rank} issued {theirs}. All ranks of a group must issue the same operations "
            "in the same order"
        )

    def _look_for_mismatch(self, work: IssuedWork) -> None:
        """While waiting: has any peer posted something else under this number?"""
        operation = work.operation
        board, group = operation.state.board, operation.state.group
        for rank in range(group.size):
            if rank != group.rank:
                sighting = board.look(rank, work.sequence)
                if sighting.digest is not None and sighting.digest != operation.digest:
                    self.fail(work, self._mismatch(work, rank, sighting.digest))
                    return

    def _difference(self, work: IssuedWork, found: OperationsDiffer) -> McrError:
        """What the library has found, with who issued what if all say so within a moment."""
        state, sequence = work.operation.state, work.sequence
        self.post(work)
        deadline = time.monotonic() + _EXPLAINED
        others = {rank for rank in range(state.group.size) if rank != state.group.rank}
        missing = set() if found.explained else others
        while missing and time.monotonic() < deadline:
            for rank in list(missing):
                digest = state.board.look(rank, sequence).digest
                if digest is None:
                    continue
                missing.discard(rank)
                if digest != work.operation.digest:
                    return self._mismatch(work, rank, digest)
                if (told := self._other_counts(work, rank)) is not None:
                    return told
            time.sleep(0.002)
        text = f"operation #{sequence} of group '{state.group.name}', {work.operation.signature.describe()}"
        while not found.explained and time.monotonic() < deadline:  # others name each other
            if gone := self._gone(work):
                return self._news(OrderMismatch, text, gone)
            time.sleep(0.002)
        return OrderMismatch(f"{text}: {found}")

    # -- waiting ----------------------------------------------------------------------------------

    def advance(self, work: IssuedWork) -> None:
        """Poll one operation and let deferred ones start."""
        with self.lock:
            if not work.is_done and not self.try_poll(work):
                self.progress()
                if not work.is_done:
                    self._watch(work)

    def _watch(self, work: IssuedWork) -> None:
        """Somebody asks again and again instead of waiting: deadlines and dead peers are seen there too.

        Nothing that is held back is issued, for who asks may be a thread of ours.
        """
        now = time.monotonic()
        asked: float | None = getattr(work, "asked", None)
        if asked is None:
            work.asked = asked = now
        board = work.operation.state.board
        if now >= getattr(work, "look_for_peers", asked + board.first_look):
            work.look_for_peers = now + max(board.look_every, _LONG_WAIT)
            self._examine(work, now - asked, issues=False)
        if not work.is_done and self._is_over(work, asked, now):
            self.fail(work, self._expired(work, now - asked))

    def try_poll(self, work: IssuedWork) -> bool:
        """Poll; True when done. Under the lock, or by the only thread that knows the operation."""
        poll = work.poll
        if poll is None or work.is_done:
            return work.is_done
        if self.off and (reason := self.off.get(work.operation.signature.backend or "")) is not None:
            self.fail(work, BackendError(f"{work.operation.name(work.sequence)}: {reason}"))
            return True
        try:
            if poll():
                work.complete()
                if work.operation.polled:
                    self.ring()
        except Exception as error:
            self.fail(work, error)
        return work.is_done

    def progress(self) -> None:
        """Advance everything that needs the host: deferred operations and the libraries themselves."""
        for backend in self.backends:
            backend.progress()
        if self._lanes:
            for lane in list(self._lanes):
                self._advance_lane(lane)
        if self._unordered:
            self._unordered = [work for work in self._unordered if not self._start_unordered(work)]

    def stop_thread(self) -> None:
        """End the threads, if there are any: from now on only callers drive."""
        threads = self.progress_thread, self._starter
        self.progress_thread = self._starter = None
        for thread in threads:
            if thread is not None:
                thread.stop()

    def drive(self) -> bool:
        """Make progress on what is in flight, for the progress thread; False if nothing is.

        Finished operations are settled here, so that what follows them (decoding, copying out) is done before
        anybody waits.
        """
        with self.lock:
            held = self._held
            while held and (held[0].is_done or self.try_poll(held[0])):
                held.popleft()
            if held:
                self.progress()
            return bool(held)

    def _start_unordered(self, work: IssuedWork) -> bool:
        after = work.message.after
        if work.is_done:
            return True
        if after is not None and not after.probe():
            return False
        self._start(work)
        return True

    def _polled_first(self, work: IssuedWork) -> bool:
        """Poll at full speed, but for an inline operation, which has had that; whether `work` is done."""
        operation = work.operation
        if operation.inline or work.poll is None:
            return False
        for _ in operation.spins if self.waiting.calm else operation.glance:
            with self.lock:
                if self.try_poll(work):
                    return True
            if operation.on_stream:
                break
        return False

    def wait(
        self, work: IssuedWork, timeout: float | timedelta | None = None, *, until_done: bool = False
    ) -> None:
        """Poll until `work` is done, driving everything else; on expiry fail it, or raise for `timeout`.

        An operation on a stream is waited for only until it has been handed to the stream, and the current
        stream ordered after it, unless `until_done`.
        """
        operation = work.operation
        if self._polled_first(work):
            return
        waiting = self.waiting
        pause: Pause | None = None
        began = time.monotonic()
        patience = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        board = operation.state.board
        next_look = began + board.first_look
        while not work.is_done:
            with self.lock:
                polls = operation.burst if waiting.calm else operation.glance
                if any(self.try_poll(work) for _ in polls):
                    return
                if operation.on_stream and not until_done and work.poll is not None and _stream(work).ready:
                    _stream(work).order_current_stream()
                    return
                self.progress()
                now = time.monotonic()
                if now >= next_look:
                    self._examine(work, now - began)
                    longer = 1 if now - began < _VERY_LONG_WAIT else 25
                    next_look = now + min(board.look_every * longer, 1.0)
            if work.is_done:
                return
            waited = now - began
            if waited >= operation.timeout and self._is_over(work, began, now):
                self.fail(work, self._expired(work, waited))
                return
            if patience is not None and waited >= patience:
                raise self._expired(work, waited)
            if pause is None:
                pause = Pause(waiting, operation.polled, operation.rings, operation.state.group.ranks)
            self._pause(work, pause, now, waited)

    def _is_over(self, work: IssuedWork, began: float, now: float) -> bool:
        """Whether a wait has reached its deadline, which begins anew when a rank it needs has compiled."""
        timeout, since = work.operation.timeout, max(began, getattr(work, "held_up", began))
        if now - since < timeout:
            return False
        if now - began < timeout + _COMPILES_FOR:
            self._look_for_compiling(work, now)
        return now - max(since, getattr(work, "held_up", since)) >= timeout

    def _look_for_compiling(self, work: IssuedWork, now: float) -> None:
        """Note in `held_up` when a rank that `work` needs was last seen to compile kernels."""
        state = work.operation.state
        others = [rank for rank in range(state.group.size) if rank != state.group.rank]
        turns = {rank: state.board.compiling(rank) for rank in self._needed(work) or others}
        busy = [state.group.ranks[rank] for rank, turn in turns.items() if turn % 2]
        known: dict[int, int] = getattr(work, "turns", turns)
        work.turns = turns
        if turns != known or any(self.peers.status(rank) != "stopped" for rank in busy):
            work.held_up = now

    def compiles(self, begins: bool) -> None:
        """Tell peers that this process begins or has ended compiling kernels; from any thread."""
        for state in list(self.states):
            if not state.closed:
                state.board.mark_compiling(begins)

    def _pause(self, work: IssuedWork, pause: Pause, now: float, waited: float) -> None:
        """Let others run: the library's own threads, or a peer on the same core."""
        if not pause.before(now):
            pause.idle(waited)
            return
        with self.lock:
            if self.try_poll(work):
                return
            self.progress()
        others = self._lanes or self._unordered or any(each is not work for each in list(self._held))
        pause.sleep(_SHARED_NAP if others else 1.0)

    def _examine(self, work: IssuedWork, waited: float, *, issues: bool = True) -> None:
        """A wait that takes longer: say where we are, and look at the others; `issues`: what is held back."""
        for state in self.states if issues else ():
            for look in state.when_stuck:
                look()
        operation = work.operation
        if operation.state.group.size == 1:
            return
        self.post(work)
        if waited > _LONG_WAIT:
            self._look_for_compiling(work, time.monotonic())
        if not operation.signature.is_p2p:
            self._look_for_mismatch(work)
        if self._is_blind(work, waited):
            return
        if not work.is_done and waited > _LONG_WAIT:
            gone = self._gone(work)
            if gone and self._is_sure(work):
                name = f"{operation.name(work.sequence)} on {operation.backend}"
                kind = _RAISED_BY_PEER.get(gone[0].failure.partition(":")[0], BackendError)
                self.fail(work, self._news(kind, name, gone))

    def _is_sure(self, work: IssuedWork) -> bool:
        """Whether `work` has been in doubt for long enough: what it waits for may still be on its way."""
        now = time.monotonic()
        since: float | None = getattr(work, "doubted", None)
        if since is None:
            work.doubted = since = now
        return now - since > max(_DEATH_GRACE, _LOOKS_OF_GRACE * work.operation.state.board.look_every)

    def _gone(self, work: IssuedWork) -> list[_Gone]:
        """Which ranks will not take part any more.

        A rank that gave up over an operation passes on what another did: it counts if nobody else is gone.
        A receive from any source needs one of the others: none is told unless all are gone.
        """
        state, sequence = work.operation.state, work.sequence
        found: list[_Gone] = []
        passed_on: list[_Gone] = []
        needed = self._needed(work)
        others = () if needed else [rank for rank in range(state.group.size) if rank != state.group.rank]
        for rank in needed or others:
            board, process = state.board, state.group.ranks[rank]
            closed, failure = board.is_closed(rank), board.failure(rank)
            absent = not work.operation.signature.is_p2p and board.look(rank, sequence).issued < sequence
            if failure is not None and (absent or not sequence or 0 < failure.sequence <= sequence):
                gone = _Gone(process, f"rank {rank} has given up: {failure.text}", failure.text)
                (passed_on if failure.sequence else found).append(gone)
            elif closed and absent:
                found.append(_Gone(process, f"rank {rank} has left without issuing it"))
            elif closed and _is_unmet(work):
                found.append(_Gone(process, f"rank {rank} has left and takes no part in it"))
            elif not closed and self.peers.status(process) == "dead":
                found.append(_Gone(process, f"rank {rank} has died, which closed the group"))
        if others and len(found) + len(passed_on) < len(others):
            return []
        return found or passed_on[:1]

    def _blame(self, work: IssuedWork) -> str:
        """Which ranks are behind an error of the library; a process may take a moment to be seen dead."""
        deadline = time.monotonic() + _DEATH_GRACE
        while not (gone := self._gone(work)) and time.monotonic() < deadline:
            time.sleep(0.002)
        return self._told(gone)

    def _told(self, gone: list[_Gone]) -> str:
        """The words about them, which an error is about to say."""
        self.blamed.update(each.rank for each in gone)
        return ", ".join(each.told for each in gone)

    def _news(self, kind: type[McrError], what: str, gone: list[_Gone]) -> McrError:
        """The error of `what` failed because of them. Ranks that hear of it from this one hear their words.

        Those wrapped in this error's would be longer with every rank that passes them on.
        """
        error = kind(f"{what}: {self._told(gone)}")
        error.passed_on = gone[0].failure
        return error

    def _needed(self, work: IssuedWork) -> Sequence[int]:
        group, peer = work.operation.state.group, work.message.peer
        if work.operation.signature.is_p2p:
            return [peer] if peer is not None and peer != group.rank else []
        return [rank for rank in range(group.size) if rank != group.rank]

    def _expired(self, work: IssuedWork, waited: float) -> CommTimeout:
        operation = work.operation
        state = operation.state
        missing, notes = [], []
        for rank in self._needed(work):
            issued = state.board.look(rank, work.sequence).issued
            status = self.peers.status(state.group.ranks[rank])
            absent = not operation.signature.is_p2p and issued < work.sequence
            if absent or operation.signature.is_p2p:
                missing.append(rank)
            if absent or status not in ("running", "unknown"):
                at = [f"last issued #{issued}"] if absent else []
                at += [f"process {status}"] if status != "unknown" else []
                notes.append(f"rank {rank}: {', '.join(at)}")
        who = f"missing ranks: {missing}" if missing else "all ranks have issued it"
        detail = f" ({'; '.join(notes)})" if notes else ""
        return CommTimeout(
            f"{operation.name(work.sequence)} on {operation.backend} not done after {waited:.1f} s "
            f"(its timeout is {operation.timeout:g} s); {who}{detail}",
            missing,
        )

    def fail(self, work: IssuedWork, error: BaseException) -> None:
        """End an operation badly, and its group with it."""
        if not work.is_done:
            # The library may still write to these tensors: they are never let go.
            self.peers.keep.append((work.message, work.message.inputs, work.message.outputs, work.poll))
            work.operation.state.unfinished.add(work.operation.signature.backend)
            if isinstance(error, OperationsDiffer):
                error = self._difference(work, error)
            self._switch_off(work, error)
            ours = isinstance(error, McrError) or not isinstance(error, Exception)
            work.fail(error, "" if ours else self._blame(work))
        error = work.error or error
        self.failed = True
        state = work.operation.state
        state.publish()
        left = [each for each in work.operation.lane.pending if each is not work and not each.is_done]
        # Also those before it are not started any more, for which peers wait.
        first = min([work.sequence, *(each.sequence for each in left)])
        told = getattr(error, "passed_on", "") or f"{type(error).__name__}: {error}"
        state.board.mark_failed(Failure(first, told))
        state.fail(error)
        kind = OrderMismatch if isinstance(error, OrderMismatch) else BackendError
        for waiting in left:
            waiting.fail(kind(f"not started: another operation has failed: {error}"))

    def _switch_off(self, work: IssuedWork, error: BaseException) -> None:
        """After an error that leaves a library in no state to be called again: nothing calls it any more.

        Its operations in flight fail, in all groups; those that are issued later are refused.
        """
        name = work.operation.signature.backend
        backend = next((each for each in self.backends if each.name == name), None)
        breaks: Callable[[BaseException], str] | None = getattr(backend, "breaks", None)
        reason = breaks(error) if breaks is not None else ""
        if backend is None or not reason:
            return
        self.backends.remove(backend)
        self.off[backend.name] = reason
        for operation in self.bound:
            self.refuse_if_off(operation)
        waiting = [each for lane in self._lanes for each in lane.pending]
        for other in (*self._held, *self._unordered, *waiting):
            if other is not work and not other.is_done and other.operation.signature.backend == name:
                self.peers.keep.append(
                    (other.message, other.message.inputs, other.message.outputs, other.poll)
                )
                other.fail(BackendError(f"{other.operation.name(other.sequence)}: {reason}"))
                other.operation.state.fail(other.error or error)
                other.operation.state.board.mark_failed(Failure(other.sequence, f"BackendError: {reason}"))

    def refuse_if_off(self, operation: Operation) -> None:
        """Let an operation of a library that is switched off fail at once, without comparing it first."""
        reason = self.off.get(operation.signature.backend or "")
        if reason is not None:
            operation.start = refusing(reason)
            operation.gate = None
            operation.compare_every = operation.compared = False
            operation.held = True  # the short way has kept its start

    # -- the end ----------------------------------------------------------------------------------

    def drain(self, only: Sequence[GroupState] | None = None) -> None:
        """Wait for what is in flight, in `only` these groups; the first error is raised at the end."""
        errors: list[BaseException] = []
        while True:
            issued = list(self._held)  # at once: a progress thread may let go of some of them meanwhile
            held = [work for work in issued if only is None or work.operation.state in only]
            if not held:
                break
            work = held[0]
            try:
                self.wait(work, until_done=True)
            except McrError as error:
                errors.append(error)
            if work.error is not None and not hasattr(work, "told"):
                errors.append(work.error)
            with contextlib.suppress(ValueError):
                self._held.remove(work)
        if errors:
            raise errors[0]

    def has_messages(self, state: GroupState) -> bool:
        """Whether sends or receives of a group are in flight: each is for one peer, who may never come."""
        with self.lock:
            self.progress()
            issued = (*self._held, *self._unordered)
            return any(
                work.operation.state is state and work.operation.signature.is_p2p and not self.try_poll(work)
                for work in issued
            )

    def forget(self, state: GroupState) -> bool:
        """Give up what is in flight in a group that is left; whether there was anything.

        Libraries may still write to its tensors, so they are kept until the end of the process.
        """
        error = BackendError(f"group '{state.group.name}' was left with operations in flight")
        with self.lock:
            lanes = [lane for lane in self._lanes if lane.pending[0].operation.state is state]
            waiting = [work for lane in lanes for work in lane.pending]
            mine = [work for work in (*self._held, *self._unordered) if work.operation.state is state]
            left = [work for work in (*waiting, *mine) if not work.is_done]
            for work in left:
                self.peers.keep.append((work.message.inputs, work.message.outputs, work.poll))
                state.unfinished.add(work.operation.signature.backend)
                work.fail(error)
            for lane in lanes:
                lane.pending.clear()
                self._lane_waits(lane, state, False)
            self._held = deque(work for work in self._held if work.operation.state is not state)
            self._unordered = [work for work in self._unordered if work.operation.state is not state]
        return bool(left)

    @property
    def in_flight(self) -> int:
        """Asynchronous operations not yet known to be done."""
        with self.lock:
            return sum(not work.is_done for work in self._held)


def _is_unmet(work: IssuedWork) -> bool:
    """Whether a send or receive has been started, and its library has found nothing on the other side.

    What is on a stream may have to wait there for its turn, whoever has left meanwhile.
    """
    operation, poll = work.operation, work.poll
    started = operation.signature.is_p2p and not operation.on_stream and poll is not None
    return started and not getattr(poll, "arriving", False)


def _stream(work: IssuedWork) -> StreamPoll:
    return cast("StreamPoll", work.poll)


def _runs_by_itself(work: IssuedWork) -> bool:
    """Whether its library has threads of its own, and does not only go on while it is polled."""
    return len(work.operation.burst) == 1 and not work.operation.on_stream


def _admitted() -> bool:
    """The gate of an operation that has been let in."""
    return True


def refusing(reason: str) -> Callable[[Message], NoReturn]:
    """The start of an operation whose library is not called any more."""

    def refuse(message: Message) -> NoReturn:  # noqa: ARG001 - a Start
        raise BackendError(reason)

    return refuse
