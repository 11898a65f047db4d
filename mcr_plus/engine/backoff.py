"""Actions between two polls of a wait: poll again, yield, nap, or block in the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mcr_plus.backends.base import BlockingPoll
from mcr_plus.engine.channel_wrapper import SteppedPoll

if TYPE_CHECKING:
    from mcr_plus.engine.engine import Engine
    from mcr_plus.engine.work import IssuedWork
    from mcr_plus.waiting.policy import Pause

_SHARED_NAP: Final = 200e-6  # longest sleep in s while another operation needs polls too
_BLOCK: Final = 2e-3  # s to block in a library that wakes this thread itself, at first
_LONGEST_BLOCK: Final = 0.02


def pause_wait(engine: Engine, work: IssuedWork, pause: Pause, now: float, waited: float) -> None:
    """Let the library's threads or the peers run, in a wait that has taken `waited` seconds so far."""
    poll = work.poll
    if isinstance(poll, SteppedPoll):
        poll = poll.current
    if isinstance(poll, BlockingPoll) and engine.waiting.may_block and not _has_others(engine, work):
        poll.block(min(max(waited, _BLOCK), _LONGEST_BLOCK))
    elif pause.before(now, waited):
        with engine.lock:
            if engine.try_poll(work):
                return
            engine.progress()
        pause.sleep(_SHARED_NAP if _has_others(engine, work, rung=True) else 1.0, waited)
    else:
        pause.idle(waited)


def _has_others(engine: Engine, work: IssuedWork, *, rung: bool = False) -> bool:
    """Return whether another operation may need polls while this thread waits for `work`.

    Operations that start after another one, or that a library's own threads complete, need none. `rung`: nor
    do those for which the peers of `work` ring; but nobody may ring when another one is over.
    """
    if engine.unordered or (rung and _follows(work)):
        return True
    with engine.lock:
        if any(wrapper.needs_polls(work.poll) for wrapper in engine.wrappers):
            return True
        heads = [channel.pending[0] for channel in engine.blocked if channel.pending]
        return any(
            (rung and _follows(other)) or (_needs_polls(other) and not (rung and _wakes(other, work)))
            for other in (*heads, *engine.in_flight)
            if other is not work and not other.is_done
        )


def _follows(work: IssuedWork) -> bool:
    """Return whether an operation has not started and waits for another one."""
    return work.poll is None and work.message.after is not None


def _wakes(other: IssuedWork, work: IssuedWork) -> bool:
    """Return whether the peers that ring for `work` also ring for all progress of another operation."""
    if not other.operation.rings:
        return False
    ranks, armed = (each.operation.state.group.ranks for each in (other, work))
    return ranks is armed or set(ranks) <= set(armed)


def _needs_polls(work: IssuedWork) -> bool:
    """Return whether an operation in flight may need this thread's polls. Call under the lock."""
    if work.poll is not None:
        return work.operation.polled or work.operation.on_stream
    after = work.message.after
    return after is None or after.probe()
