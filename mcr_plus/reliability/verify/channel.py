"""Channel of a library in a group whose operations are verified.

Verified operations run one after another, in the order of their numbers, on a separate channel. So steps have
the same order on all ranks, and do not disturb unverified operations in between.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NoReturn

from mcr_plus.backends.base import Channel, Gate, Poll, Start
from mcr_plus.backends.shm.queue import done_at_once
from mcr_plus.engine.channel_wrapper import ChannelWrapper, SteppedPoll
from mcr_plus.errors import BackendError, DataCorrupted, OperationsDiffer
from mcr_plus.kernels.checksum_sizes import BLOCK
from mcr_plus.reliability.verify.checked import Checking
from mcr_plus.reliability.verify.checksum_table import (
    GOT,
    SENT,
    ChecksumMismatch,
    damaged_rows,
    first_block,
    first_difference,
    operations_differ,
)
from mcr_plus.reliability.verify.messages import VerifiedMessages
from mcr_plus.reliability.verify.rows import LibraryRows
from mcr_plus.reliability.verify.small_ops import SmallOperations
from mcr_plus.reliability.verify.verified_run import Begins, VerifiedRun, VerifiedRuns

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import RLock

    from mcr_plus.core.c10d import Store
    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Message, Signature
    from mcr_plus.engine.engine import Engine
    from mcr_plus.reliability.verify.checksum_table import ChecksumTable
    from mcr_plus.reliability.verify.rows import RowExchange
    from mcr_plus.reliability.verify.steps import VerifiedSteps

_BLOCKS_WITHIN: Final = timedelta(seconds=5)  # time in which the two ranks of a mismatch publish their blocks


class VerifiedPoll(SteppedPoll):
    """Poll of a verified operation; may be called with or without the engine's lock."""

    __slots__ = ("_channel", "_course", "_error", "_held", "_is_done", "_lock", "_poll")

    def __init__(self, channel: VerifiedChannel, course: VerifiedRun, message: Message, lock: RLock) -> None:
        self._channel, self._course, self._lock = channel, course, lock
        self._held = message.inputs, message.outputs
        self._poll: Poll | None = None
        self._error: Exception | None = None
        self._is_done = False

    def __call__(self) -> bool:
        """See `Poll`."""
        if not self._is_done:
            with self._lock:  # a thread may drive the queue
                self._channel.tick()
        if self._error is not None:
            raise self._error
        return self._is_done

    @property
    def current(self) -> Poll | None:
        """See `SteppedPoll`."""
        return self._poll

    def ends(self) -> bool:
        """Advance; return whether the operation has ended, with or without an error."""
        if self._is_done:
            return True
        try:
            if self._poll is None:
                self._poll = self._next()
            while self._poll():
                self._poll = self._next()
        except StopIteration:
            self._is_done = True
        except Exception as error:
            self._error, self._is_done = error, True
        return self._is_done

    def _next(self) -> Poll:
        try:
            return next(self._course)
        except Exception:
            raise
        except BaseException as error:  # also an interrupt, which ends the run before the operation is done
            self._channel.interrupted = self._held
            self._error = BackendError(f"a verified operation was interrupted by {type(error).__name__}")
            self._is_done = True
            raise


class VerifiedChannel(ChannelWrapper):
    """Channel with verification, see the module."""

    def __init__(
        self,
        own: Channel,
        steps: VerifiedSteps,
        group: Group,
        store: Store,
        engine: Engine,
        rows: RowExchange,
        every: int,
        close_rows: Callable[[], None],
    ) -> None:
        """Wrap `own`. `steps` use the verified operations' channel. `every`: see `DispatchOptions.verify`."""
        self._own, self._steps, self._rows, self._every = own, steps, rows, every
        self._group, self._store, self._engine = group, store, engine
        self._close_rows = close_rows
        self.closes_alone = own.closes_alone and steps.channel.closes_alone
        self.outlives_library = own.outlives_library or steps.channel.outlives_library
        self.takes_ballots = own.takes_ballots
        self.ballots = own.ballots
        self._checking = Checking(steps, group, rows, self._judge)
        self._brief = SmallOperations(steps, group, rows, self._judge)
        self._courses = VerifiedRuns(steps, group, self._compare, isinstance(rows, LibraryRows))
        self._messages = VerifiedMessages(own, steps, group, every)
        self._queue = deque[VerifiedPoll]()
        self.interrupted: tuple[object, ...] = ()  # tensors of an operation that a library may still use

    # -- as a Channel -----------------------------------------------------------------------------------

    def bind(self, signature: Signature) -> Start:
        """See `Channel`."""
        return self.bind_every(signature, self._every)

    def needs_polls(self, beside: Poll | None) -> bool:
        """Report that operations after a verified one need polls of it; see `ChannelWrapper`."""
        return (bool(self._queue) and self._queue[0] is not beside) or self._messages.needs_polls

    def bind_every(self, signature: Signature, every: int) -> Start:
        """See `ChannelWrapper`."""
        if signature.is_p2p:
            return self._messages.bind(signature)
        if signature.kind == "barrier" or not every:
            return self._own.bind(signature)
        bound = self._checking.bind(signature) or self._brief.bind(signature)
        begin, at_once = bound or Begins(self._courses.bind(signature))
        start = None if every == 1 else self._own.bind(signature)
        queue, lock, calls = self._queue, self._engine.lock, 0

        def start_every(message: Message) -> Poll:
            nonlocal calls
            if start is not None:
                calls += 1
                if calls % every:
                    return start(message)
            if self.interrupted:
                raise BackendError("an earlier verified operation was interrupted while it was started")
            course = None
            if at_once is not None and not queue:
                # No lock is needed: other threads find nothing to advance, and one thread at a time starts
                # operations.
                try:
                    course = at_once(message)
                except Exception:
                    raise
                except BaseException:  # an interrupt: the caller does not get the operation
                    self.interrupted = message.inputs, message.outputs
                    raise
                if course is None:
                    return done_at_once
            with lock:
                attempt = VerifiedPoll(self, course or begin(message), message, lock)
                queue.append(attempt)
                self.tick()
            return attempt

        return start_every

    def gate(self, signature: Signature, digest: int) -> Gate | None:
        """See `Channel`: verified operations pass the gates of their steps."""
        return self._own.gate(signature, digest)

    def silent_failure(self) -> str:
        """See `Channel`."""
        return self._own.silent_failure() or self._steps.channel.silent_failure()

    def withdraw(self) -> None:
        """See `Channel`."""
        for channel in (self._steps.channel, self._own):
            channel.withdraw()

    def stop_operations(self) -> bool:
        """See `Channel`."""
        own, other = self._own.stop_operations(), self._steps.channel.stop_operations()
        return own and other

    def close(self) -> None:
        """See `Channel`."""
        is_open = self._end()
        for channel in (self._steps.channel, self._own):
            channel.close()
        if is_open:  # compiled code posts rows until the channels are closed
            self._close_rows()

    def release(self) -> None:
        """See `Channel`."""
        is_open = self._end()
        for channel in (self._steps.channel, self._own):
            channel.release()
        if is_open:
            self._close_rows()

    def give_up(self) -> None:
        """See `Channel`."""
        for channel in (self._steps.channel, self._own):
            channel.give_up()

    def _end(self) -> bool:
        """End the operations; return whether rows must be closed."""
        is_open = self in self._engine.wrappers
        if is_open:
            self._engine.wrappers.remove(self)
        self._queue.clear()
        return is_open

    # -- progress ---------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Advance the verified operations in order; called often, under the engine's lock."""
        queue = self._queue
        if self._steps.backend.name in self._engine.off:
            return
        while queue and queue[0].ends():
            queue.popleft()
        self._messages.advance()

    # -- comparison -------------------------------------------------------------------------------------

    def _compare(self, signature: Signature, ledger: ChecksumTable) -> VerifiedRun:
        ledger.join()
        yield self._rows.post(ledger.row)
        if not self._rows.agree():
            self._judge(signature, ledger)

    def _judge(self, signature: Signature, ledger: ChecksumTable) -> NoReturn:
        """Raise the error for rows that do not match. All ranks have the same rows."""
        rows = self._rows.read()
        if damaged := damaged_rows(rows):
            rank = self._group.ranks[damaged[0]]
            raise self._error(signature, "the checksums themselves have changed in transit", rank, rank, None)
        if operations_differ(rows):
            raise OperationsDiffer("another rank has run another operation in its place")
        found = first_difference(rows)
        assert found is not None
        raise self._corrupted(signature, ledger, found)

    def _corrupted(
        self, signature: Signature, ledger: ChecksumTable, found: ChecksumMismatch
    ) -> DataCorrupted:
        ranks, named = self._group.ranks, self._group.named
        source, target = ranks[found.source], ranks[found.target]
        block = self._block(ledger, found)
        place = "" if block is None else f", first in block {block} (from byte {block * BLOCK})"
        what = "sums" if found.stage else "values"
        if source == target:
            text = f"{what} of {named(found.source)} itself have changed{place}"
        else:
            text = f"{what} that {named(found.source)} has sent to {named(found.target)} have changed{place}"
        return self._error(signature, text, target, source, block)

    def _error(
        self, signature: Signature, text: str, rank: int, source: int, block: int | None
    ) -> DataCorrupted:
        name, operation = self._group.name, signature.describe()
        library = self._steps.backend.name
        return DataCorrupted(
            f"{operation} on {library} in group '{name}': {text}",
            operation,
            rank,
            source,
            library,
            block,
            name,
        )

    def _block(self, ledger: ChecksumTable, found: ChecksumMismatch) -> int | None:
        """Return the first block that differs, None if the two ranks do not publish in time; collective."""
        me, prefix = (
            self._group.rank,
            f"verify/{self._group.name}/{self._steps.backend.name}/{self._rows.number}",
        )
        keys = [f"{prefix}/sent", f"{prefix}/got"]
        end = 2 * found.stage
        if me == found.source:
            self._store.set(keys[0], json.dumps(ledger.of(end + SENT, found.target)))
        if me == found.target:
            self._store.set(keys[1], json.dumps(ledger.of(end + GOT, found.source)))
        with contextlib.suppress(RuntimeError):
            self._store.wait(keys, _BLOCKS_WITHIN)
            return first_block(*(json.loads(self._store.get(key)) for key in keys))
        return None
