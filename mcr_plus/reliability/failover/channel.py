"""Channel of a library, with a second library that takes over when the first fails.

    works ── an operation fails, on any rank ──► stopping ──► settling ── records of all ranks ──► moved
      ▲                                                                                              │
      └─────────── the library is reopened in the background, and all ranks agree ◄──────────────────┘

A rank whose library fails reports it on the group's board and in its store. All ranks then stop calling the
library, wait until it no longer writes to any tensor, and record which operations are complete
(`RankRecord`). From all records, each rank decides which operations run again on the second library
(`decide`): all operations that are not complete on every rank, in the order of their numbers. All later
operations run there too. They use a separate channel of the second library, so that its other operations keep
their order.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

from mcr_plus.backends.base import Channel, Gate, Poll, Start
from mcr_plus.core.message import Message, Signature
from mcr_plus.engine.channel_wrapper import ChannelWrapper
from mcr_plus.engine.disabled_backends import switch_off
from mcr_plus.errors import BackendError, McrError, PeerLost
from mcr_plus.reliability.failover import notices
from mcr_plus.reliability.failover.attempt import FailoverPoll
from mcr_plus.reliability.failover.fallback import SecondLibrary
from mcr_plus.reliability.failover.gate import FirstGate
from mcr_plus.reliability.failover.kept_operations import KeptOperations
from mcr_plus.reliability.failover.reinstate import Reinstatement, Reopen
from mcr_plus.reliability.failover.rules import RankOperation, RankRecord, Verdict, decide
from mcr_plus.reliability.failover.state import note_writes

if TYPE_CHECKING:
    from mcr_plus.backends.base import Backend
    from mcr_plus.core.c10d import Store
    from mcr_plus.engine.engine import Engine
    from mcr_plus.engine.group_state import BackendChannel, GroupState

_LOOK_EVERY: Final = 0.01  # seconds between checks for failures of other ranks, at least
_DOUBT_EVERY: Final = 0.1  # seconds between checks of the library's connections
_ASK_EVERY: Final = 0.002  # seconds between checks for the records of other ranks
_VOTE_EVERY: Final = 16  # operations between two votes on the return of the library
_log = logging.getLogger("mcr_plus")


class Binding:
    """A signature bound to the library's channel; the channel may have been reopened since."""

    __slots__ = ("digest", "generation", "signature", "start")

    def __init__(self, signature: Signature, start: Start, generation: int) -> None:
        self.signature, self.digest = signature, signature.digest()
        self.start, self.generation = start, generation


class FailoverChannel(ChannelWrapper):
    """Channel with failover, see the module.

    Attributes:
        slot: the engine's slot for this channel.
        library: name of the library that now runs operations. moved: True if it is the second one.
        lock: the engine's lock.
        why: the reason for the last failure.
    """

    has_failover = True

    def __init__(
        self,
        slot: BackendChannel,
        second: Backend,
        spare: Channel,
        state: GroupState,
        store: Store,
        engine: Engine,
        reopen: Reopen,
    ) -> None:
        """Wrap `slot`. `spare`: channel of the second library. `reopen`: collective; called in a thread."""
        self.slot = slot
        self._first, self._own = slot.backend, slot.channel
        self._state, self._board, self._store, self._engine = state, state.board, store, engine
        self._group = state.group
        self.lock = engine.lock
        self._second = SecondLibrary(second, spare, state.group.rank)
        self.closes_alone = self._own.closes_alone and spare.closes_alone
        self.outlives_library = self._own.outlives_library or spare.outlives_library
        self.library = self._first.name
        self.moved = False
        self.why = ""
        self._stage: Literal["works", "stopping", "settling"] = "works"
        self._refused: BackendError | None = None
        self._starts_at_once = True  # the library runs operations, and no earlier operation waits to start
        self._broken = False  # the library cannot be reopened
        self._round = 0  # number of settled failures
        self._generation = 0  # generation of the library's channel
        self._count = 0  # number of operations so far
        self._open: dict[int, FailoverPoll] = {}  # incomplete operations, by number
        self._kept = KeptOperations()
        self._queue: deque[FailoverPoll] = deque()  # operations that wait for the second library
        self._sources: dict[int, int] = {}
        self._voted = -1  # number of the operation that followed the last vote
        self._comeback = Reinstatement(reopen)
        self._moves = 0
        self._next_look = self._next_doubt = self._next_ask = 0.0

    # -- as a Channel -------------------------------------------------------------------------------

    @property
    def taken_over_by(self) -> str | None:
        """Name of the second library while it runs operations; see `ChannelWrapper`."""
        return self.library if self.moved else None

    def bind(self, signature: Signature) -> Start:
        """See `Channel`. Sends and receives always use the first library, and fail with it."""
        binding = Binding(signature, self._own.bind(signature), self._generation)
        if signature.is_p2p:

            def message_begins(message: Message) -> Poll:
                note_writes(self._engine.writes, message.outputs)
                if binding.generation != self._generation:
                    self._bind_anew(binding)
                return binding.start(message)

            return message_begins

        def begin(message: Message) -> Poll:
            # A synchronous operation arrives here without the lock. Only this thread records the operation's
            # state, so other threads can at most stop the library now, which `_begin` notices.
            if self._starts_at_once:
                attempt = self._opened(binding, message)
                self._begin(attempt)
                return attempt
            with self.lock:
                if self._refused is not None:
                    raise self._refused
                attempt = self._opened(binding, message)
                self._queue.append(attempt)
                self.advance()
            return attempt

        return begin

    def gate(self, signature: Signature, digest: int) -> Gate | None:
        """See `Channel`."""
        gate = self._own.gate(signature, digest)
        if gate is None:
            return None
        self._broken = True  # operations issued without its gate could not start on it again
        return FirstGate(self, gate)

    def close(self) -> None:
        """See `Channel`."""
        self._end()
        for channel in (self._own, self._second.channel):
            channel.close()

    def release(self) -> None:
        """See `Channel`."""
        self._end()
        for channel in (self._own, self._second.channel):
            channel.release()

    def withdraw(self) -> None:
        """See `Channel`."""
        for channel in (self._own, self._second.channel):
            channel.withdraw()

    def give_up(self) -> None:
        """See `Channel`."""
        for channel in (self._own, self._second.channel):
            channel.give_up()

    def _end(self) -> None:
        if self in self._engine.wrappers:
            self._engine.wrappers.remove(self)
        notices.remove(self)
        self._comeback.give_up()
        self._kept.clear()
        self._open.clear()
        self._queue.clear()
        self._second.clear()

    # -- operations ---------------------------------------------------------------------------------

    def _opened(self, binding: Binding, message: Message) -> FailoverPoll:
        """Number an operation that is about to start."""
        note_writes(self._engine.writes, message.outputs)
        number = self._count
        self._open[number] = attempt = FailoverPoll(self, binding, message, number)
        self._count = number + 1
        return attempt

    def _begin(self, attempt: FailoverPoll) -> None:
        """Start an operation on the first library."""
        attempt.library = self._first.name
        attempt.keep_inputs(self._kept.copied)
        binding = attempt.binding
        try:
            if binding.generation != self._generation:
                self._bind_anew(binding)
            attempt.poll = binding.start(attempt.message)
        except Exception as error:
            with self.lock:
                self.on_error(attempt, error)
            return
        if self._stage != "works":  # another thread has stopped it meanwhile
            with self.lock:
                if self._first.stops_as_whole:
                    self._engine.peers.keep.append(attempt.held)
                attempt.poll = None

    def _bind_anew(self, binding: Binding) -> None:
        """Bind a signature to the library's current channel."""
        binding.start, binding.generation = self._own.bind(binding.signature), self._generation

    def on_complete(self, attempt: FailoverPoll) -> None:
        """Keep a complete operation for a while: other ranks may need it to run again."""
        del self._open[attempt.number]
        attempt.complete()
        if attempt.library != self._first.name:
            attempt.let_go()
            self._engine.ring()  # the issuing thread may wait only for the library, which needed no ring
            return
        attempt.note_state(self._engine.writes)
        self._kept.add(attempt)

    def on_error(self, attempt: FailoverPoll, error: Exception) -> None:
        """Handle an error of the library that runs `attempt`; raise it if it is not a failure to settle."""
        attempt.poll = None
        is_of_library = not isinstance(error, McrError) or type(error) is BackendError
        if self.moved or self._refused is not None or not is_of_library:
            attempt.error = error
            raise error
        self.fail(f"{type(error).__name__}: {error}", self._first.breaks(error))

    # -- failures -----------------------------------------------------------------------------------

    @property
    def stands(self) -> bool:
        """True if the first library itself runs operations."""
        return self._stage == "works" and not self.moved and self._refused is None

    def on_library_off(self, backend: Backend, reason: str) -> None:
        """Fail over when the library is switched off; see `ChannelWrapper`."""
        if backend is self._first:
            self.fail(reason, broken=reason)
        elif backend is self._second.backend and self.moved:
            self._refuse(f"it has failed too: {reason}")

    def fail(self, why: str, broken: str = "") -> None:
        """Report that the library has failed on this rank. `broken`: why it must not be called again."""
        if not self.stands:
            return
        if broken:
            self._broken = True
            switch_off(self._engine, self._first, broken)
            if not self.stands:  # the call above has already told this channel
                return
        self.why = f"{self._group.named(self._group.rank)}: {why}"
        try:
            self._store.compare_set(self._key("begun"), "", self.why)
            self._board.mark_moving()
        except (RuntimeError, McrError) as error:
            self._refuse(f"the job's store does not answer: {error}")
            return
        self._stop()

    def _key(self, what: object) -> str:
        return f"failover/{self._group.name}/{self._first.name}/{self._round}/{what}"

    def _stop(self) -> None:
        """Stop calling the library."""
        self._stage, self._starts_at_once = "stopping", False
        if self._first.stops_as_whole:
            self._broken = True
            reason = f"{self._first.name} is not used any more in this process, after a failure: {self.why}"
            switch_off(self._engine, self._first, reason)
            # Other programs in this process may call it.
            self._engine.peers.keep += [each.held for each in self._running_here()]
        for attempt in self._running_here():
            attempt.poll = None
        self._engine.ring()
        self.advance()

    def _running_here(self) -> list[FailoverPoll]:
        """Return the operations in flight on the first library, but not those on the second one."""
        # A synchronous operation may end meanwhile, in another thread.
        return [each for each in list(self._open.values()) if each.library == self._first.name]

    def tick(self) -> None:
        """Look for failures and advance waiting operations; see `ChannelWrapper`."""
        if self._stage != "works" or self._queue or self._second.is_busy:
            self.advance()
            return
        now = time.monotonic()
        if now < self._next_look or not self.stands:
            return
        self._next_look = now + max(self._board.check_every, _LOOK_EVERY)
        if (self._open or self.slot.pending) and now >= self._next_doubt:
            self._next_doubt = now + _DOUBT_EVERY
            if problem := self._own.silent_failure():
                self.fail(problem)
                return
        moves = self._board.moves()
        if moves != self._moves:
            try:
                begun = self._store.check([self._key("begun")])
                self.why = self._store.get(self._key("begun")).decode() if begun else self.why
            except (RuntimeError, McrError) as error:
                self._refuse(f"the job's store does not answer: {error}")
                return
            self._moves = moves
            if begun:
                self._stop()

    def advance(self) -> None:
        """Advance a failure that is being settled, or operations of the second library."""
        if self._stage != "works":
            now = time.monotonic()
            if now < self._next_ask:
                return
            self._next_ask = now + _ASK_EVERY
            try:
                self._settle()
            except PeerLost:
                return  # waiting for an operation of that rank raises the error
            except (RuntimeError, McrError) as error:
                self._refuse(f"the job's store does not answer: {error}")
                return
        if self._stage == "works":
            self._start_queued()

    def _settle(self) -> None:
        keys = [self._key(rank) for rank in range(self._group.size)]
        if self._stage == "stopping":
            # Not while another thread of the program changes its tensors: torch counts a change when it ends.
            if not self._state.is_its_thread() or not self._own.stop_operations():
                return
            known = {
                each.number: each.record(self._engine.writes) for each in (*self._kept, *self._running_here())
            }
            off = self._engine.off.get(self._second.backend.name, "")
            text = json.dumps([self._count, self._broken, off, known])
            self._store.set(keys[self._group.rank], text)
            self._stage = "settling"
        if not self._store.check(keys):
            return
        texts: list[tuple[int, bool, str, dict[str, Any]]]
        texts = [json.loads(self._store.get(key)) for key in keys]
        records = [
            RankRecord(count, {int(number): RankOperation(*each) for number, each in known.items()})
            for count, _, _, known in texts
        ]
        self._broken = any(broken for _, broken, _, _ in texts)
        self.why = self._store.get(self._key("begun")).decode()
        self._round += 1
        self._moves = self._board.moves()
        off = next((off for _, _, off, _ in texts if off), "")
        verdict = decide(records, self._group.named)
        self._apply(replace(verdict, refusal=off) if off else verdict)
        self._stage = "works"

    def _apply(self, verdict: Verdict) -> None:
        if verdict.refusal:
            self._refuse(verdict.refusal)
            return
        self.moved, self._sources = True, dict(verdict.sources)
        later = {id(each) for each in self._queue}
        repeated = sorted(
            (
                each
                for each in (*self._kept, *self._running_here())
                if each.number >= verdict.first and id(each) not in later
            ),
            key=lambda each: each.number,
        )
        self._queue.extendleft(reversed(repeated))
        self._kept.clear()
        self._use(self._second.backend)
        self._comeback.after_failure()
        group, over = self._group, self._second.backend.name
        notices.put(self, group.ranks[group.rank], group.name, self._first.name, over, self.why)
        if self._group.rank == 0:
            _log.warning(
                "group '%s': %s has failed (%s); its operations now run on %s, %d of them again",
                group.name, self._first.name, self.why, over, len(repeated),
            )  # fmt: skip

    def _refuse(self, reason: str) -> None:
        why = f" ({self.why})" if self.why else ""
        self._refused = BackendError(
            f"{self._first.name} has failed{why}, and {self._second.backend.name} cannot take over: {reason}"
        )
        self._stage, self._starts_at_once = "works", False
        self._queue.clear()
        for attempt in list(self._open.values()):
            if attempt.poll is None or attempt.library != self._first.name:
                attempt.poll, attempt.error = None, self._refused

    def _use(self, backend: Backend) -> None:
        """Make the engine wait for operations as this library requires."""
        self.library = backend.name
        self.slot.backend = backend
        for operation in list(self._engine.bound):
            if operation.backend_channel is self.slot and not operation.signature.is_p2p:
                operation.runs_on(backend)

    # -- the second library -------------------------------------------------------------------------

    def _start_queued(self) -> None:
        """Start operations in order, until a gate or vote holds one back."""
        try:
            while self._queue and self._start_next():
                pass
            if self._second.is_busy:
                self._second.advance()
        except Exception as error:
            self._refuse(f"it has failed too: {error}")
        self._starts_at_once = self.stands and not self._queue

    def _start_next(self) -> bool:
        """Start the first waiting operation; return whether the next one may follow."""
        attempt = self._queue[0]
        if not self.moved:
            self._queue.popleft()
            self._begin(attempt)
            return self.stands
        if attempt.number % _VOTE_EVERY == 0 and self._voted != attempt.number and not self._broken:
            if self._vote():
                self._voted = attempt.number
                return True
            return False
        if not self._second.start(attempt, self._sources):
            return False
        self._queue.popleft()
        return True

    # -- the return of the library ------------------------------------------------------------------

    def _vote(self) -> bool:
        """Vote at the same operation on all ranks; return whether operations may go on."""
        comeback = self._comeback
        if comeback.is_voting:
            result = comeback.result()
            if result is None:
                return False
            channel = comeback.decided(result)
            if channel is not None:
                self._return_to(channel)
                return True
        message = comeback.ballot(self._group, self._second.backend.name)
        if comeback.gate is None:
            comeback.gate = self._second.gate(message)
        if not comeback.gate():
            return False
        comeback.begin(self._second.poll(message))
        return True

    def _return_to(self, channel: Channel) -> None:
        """Return to the first library, over a new channel."""
        former, self._own = self._own, channel
        self.moved = False
        self._generation += 1
        self._use(self._first)
        notices.remove(self)
        former.release()
        if self._group.rank == 0:
            _log.warning(
                "group '%s': %s works again and takes its operations back", self._group.name, self._first.name
            )
