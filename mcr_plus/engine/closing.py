"""Closing groups and leaving a job, with or without operations in flight."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from mcr_plus.board.base import Failure
from mcr_plus.core.stacks import site_at
from mcr_plus.engine.disabled_backends import why_off
from mcr_plus.errors import BackendError, McrError, NotInitialized, PeerLost, Revoked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mcr_plus.engine.engine import Engine
    from mcr_plus.engine.group_state import GroupState
    from mcr_plus.engine.work import IssuedWork

_OWN_TAGS: Final = ("elastic", "local", "outer")  # groups that may end with operations left


def drain(engine: Engine, only: Sequence[GroupState] | None = None) -> None:
    """Wait for all operations in flight, or those of the groups in `only`; raise the first error at the end.

    Closing a group waits for all of its operations. Leaving the job does not: see `never_waited`.
    """
    errors: list[BaseException] = []
    while True:
        issued = list(engine.in_flight)  # a copy: a progress thread may remove operations meanwhile
        left = [work for work in issued if only is None or work.operation.state in only]
        if not left:
            break
        work = left[0]
        try:
            engine.wait(work, until_done=True)
        except McrError as error:
            errors.append(error)
        if work.error is not None and not work.error_raised:
            errors.append(work.error)
        with contextlib.suppress(ValueError):
            engine.in_flight.remove(work)
            engine.unread.append(work)
    for work in engine.unread:
        work.waited = work.waited or (only is not None and work.operation.state in only)
    if errors:
        raise errors[0]


def never_waited(engine: Engine) -> str | None:
    """Describe the asynchronous operations that the program never waited for, at the end of the job.

    None if there are none. Sends do not count: they have no result, so programs drop their handles.
    """
    left = [work for work in engine.unread if not (work.waited or work.error or _is_ours(work))]
    if not left:
        return None
    kinds = Counter(
        f"{work.operation.signature.describe()} in group '{work.operation.state.group.name}'" for work in left
    ).most_common()
    named = ", ".join(f"{number} x {kind}" for kind, number in kinds[:3])
    more = f" and {len(kinds) - 3} other kinds" * (len(kinds) > 3)
    site = next((site_at(work.site) for work in left if work.site is not None), None)
    return (
        f"asynchronous operations were never waited for: {named}{more}"
        f"{'' if site is None else f' (one issued at {site[0]}:{site[1]})'}; "
        "a result is undefined until wait() of its handle has returned"
    )


def _is_ours(work: IssuedWork) -> bool:
    """Return whether nobody needs to wait for the operation through a handle of ours."""
    signature = work.operation.signature
    tag = (signature.tag or "").partition(".")[0]
    return signature.kind == "send" or tag in _OWN_TAGS or work.operation.state.own_handles


def has_messages(engine: Engine, state: GroupState) -> bool:
    """Return whether sends or receives of a group are in flight: their peer may never post its side."""
    with engine.lock:
        engine.progress()
        issued = (*engine.in_flight, *engine.unordered)
        return any(
            work.operation.state is state and work.operation.signature.is_p2p and not engine.try_poll(work)
            for work in issued
        )


def forget(engine: Engine, state: GroupState) -> bool:
    """Fail the operations in flight of a group that is left; return whether there were any.

    Sends and receives are polled a last time: a message that has arrived is received. Libraries may still
    write to the tensors of the failed operations, so these tensors are kept until the process ends.
    """
    name = state.group.name
    error = (
        Revoked(f"not complete when the world of group '{name}' was replaced: {state.revoked}")
        if state.revoked
        else BackendError(f"group '{name}' was left with operations in flight")
    )
    with engine.lock:
        blocked = [channel for channel in engine.blocked if channel.pending[0].operation.state is state]
        deferred = [work for channel in blocked for work in channel.pending]
        own = [work for work in (*engine.in_flight, *engine.unordered) if work.operation.state is state]
        for work in own:
            if work.operation.signature.is_p2p and why_off(engine, work.operation) is None:
                _look_again(work)
        left = [work for work in (*deferred, *own) if not work.is_done]
        for work in left:
            engine.peers.keep.append((work.message.inputs, work.message.outputs, work.poll))
            state.unfinished.add(work.operation.signature.backend)
            work.fail(error)
        for channel in blocked:
            channel.pending.clear()
            engine.mark_blocked(channel, state, False)
        engine.in_flight = deque(work for work in engine.in_flight if work.operation.state is not state)
        engine.unordered[:] = [work for work in engine.unordered if work.operation.state is not state]
    return bool(left)


def _look_again(work: IssuedWork) -> None:
    """Poll an operation once; an error of its library does not fail it here."""
    with contextlib.suppress(Exception):
        if not work.is_done and work.poll is not None and work.poll():
            work.complete()


def completed(engine: Engine, state: GroupState) -> int:
    """Return the largest number up to which all operations of the group have completed here without error.

    Sends and receives have no number. Operations in flight are polled a last time.
    """
    with engine.lock:
        engine.progress()
        deferred = (work for channel in engine.blocked for work in channel.pending)
        numbers = [
            work.sequence
            for work in (*engine.in_flight, *deferred)
            if work.operation.state is state
            and work.sequence
            and not (engine.try_poll(work) and work.error is None)
        ]
        failed = [state.failed_at] if state.failed_at else []
        return min([state.sequence, *(number - 1 for number in (*numbers, *failed))])


def release_waiting(engine: Engine, lost: Mapping[int, str], what: str) -> None:
    """Release the ranks that wait for this one, which will not join their operations any more.

    `lost`: states of the ranks that this rank has found lost. `what`: the call that it has reached instead.
    """
    text = f"this rank has called {what}"
    if lost:
        text = PeerLost(text, list(lost), seen=", ".join(dict.fromkeys(lost.values()))).passed_on
    else:  # `what` is a peer's report
        failures = (state.failure for state in engine.states)
        text = next((each.passed_on for each in failures if isinstance(each, PeerLost)), text)
    for state in engine.states:
        state.publish()
        state.board.mark_failed(Failure(0, text))
    engine.ring()


def help_others(engine: Engine) -> None:
    """Help other ranks, after this one's last operation, to settle which library takes over a failed one."""
    with engine.lock:
        for wrapper in list(engine.wrappers):
            wrapper.tick()


def close_states(engine: Engine, clean: bool) -> None:
    """Close the states of all groups at the end of the job; `clean` if all ranks have reached it."""
    for state in engine.states:
        state.close()
        if clean:
            if not engine.peers.rank_0_serves:  # otherwise the store's process may have ended by now
                state.board.remove_noted()
            state.board.close()


def abandon(engine: Engine) -> None:
    """Fail the operations in flight in a forked child: they belong to the parent."""
    engine.lock = threading.RLock()  # a thread of the parent may have held it
    engine.waiting.abandon()
    engine.progress_thread = engine.start_thread = None
    for work in engine.in_flight:
        if not work.is_done:
            work.error = NotInitialized(
                f"{work.operation.name(work.sequence)} was issued by the parent process; a forked child "
                "cannot wait for it"
            )
            work.is_done = True
    engine.in_flight.clear()
