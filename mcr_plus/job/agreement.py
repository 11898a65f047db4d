"""Agreement of ranks before they open a group: file descriptors for it, and dropped groups to close first."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mcr_plus.core.file_limit import descriptors_left, lacking_descriptors
from mcr_plus.engine.closing import has_messages
from mcr_plus.errors import BackendError, McrError
from mcr_plus.rendezvous.wait_messages import logged_waiting, some_ranks

if TYPE_CHECKING:
    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.engine.engine import Engine
    from mcr_plus.job.runtime import Runtime

_log = logging.getLogger("mcr_plus")
ValueT = TypeVar("ValueT")
_PATIENCE: Final = 5.0  # s; other ranks may begin an operation only after they have opened the group
_NAP: Final = 50e-6


def agree_before_opening(
    runtime: Runtime,
    ranks: Sequence[int],
    gather: Callable[[object], list[Any]],
    value: ValueT,
    what: str,
    sizes: Callable[[Sequence[ValueT]], Sequence[int]],
) -> list[ValueT]:
    """See `Runtime.agree`; `gather` returns the objects of all `ranks`, in order.

    Before that, ranks let their operations start: MPI makes communicators for these, and two at once can wait
    for each other.
    """
    libraries = runtime.libraries
    _let_start(runtime.engine)
    while True:
        # The most that any of these groups may need, because the values of other ranks are not known yet.
        room = descriptors_left(libraries.descriptors(len(ranks)))
        answers = gather((value, _dropped_groups(runtime, ranks), room, runtime.engine.off))
        values, dropped, left, disabled = zip(*answers, strict=True)
        needs = [libraries.descriptors(size) for size in sizes(values)]
        short = lacking_descriptors(ranks, left, needs)
        libraries.note_disabled(ranks, disabled)
        if not _close_dropped(runtime, dict(zip(ranks, dropped, strict=True))) and short:
            raise BackendError(f"{what}: {short}")
        if not short:
            return list(values)


def _let_start(engine: Engine) -> None:
    """Wait for up to 5 s until this rank has no operations that have not started, if they may be MPI's."""
    ends = time.monotonic() + _PATIENCE
    has_mpi = any(backend.name == "mpi" for backend in engine.backends)
    while has_mpi and engine.blocked and time.monotonic() < ends:
        with engine.lock:
            engine.progress()
        time.sleep(_NAP)


def gather_patiently(communicator: Communicator, what: str, value: object) -> list[Any]:
    """Return every rank's `value`, for the call `what`; collective. Long waits are logged with the ranks."""
    state, group = communicator.opened.state, communicator.opened.group

    def waits() -> str:
        late = [group.ranks[peer] for peer in group.peers if state.board.seen(peer) < state.sequence]
        own = communicator.ranks[communicator.rank]
        return f"rank {own} waits in {what} for {some_ranks(late) if late else 'others'}"

    with logged_waiting(waits):
        return communicator.all_gather_object(value, tag=what)


def _dropped_groups(runtime: Runtime, ranks: Sequence[int]) -> dict[str, list[int]]:
    """Return the groups within these ranks that the program has dropped here or closed here alone.

    They are returned by name, with their ranks. A group with messages in flight is left out. Groups of one
    rank, groups with other ranks and failed groups are closed at once.
    """
    dropped = runtime.idle_channels.groups_within(ranks)
    for opened in [opened for opened in runtime.groups if opened.is_dropped]:
        group, state = opened.group, opened.state
        if group.size == 1 or group.rank < 0 or state.failure is not None:
            runtime.remove(opened, clean=state.failure is None)
        elif set(group.ranks) <= set(ranks) and not has_messages(runtime.engine, state):
            dropped[group.name] = list(group.ranks)
    return dropped


def _close_dropped(runtime: Runtime, dropped: Mapping[int, Mapping[str, list[int]]]) -> bool:
    """Close the groups that all their ranks have dropped; return whether any rank has dropped one.

    `dropped`: the result of `_dropped_groups`, by rank.
    """
    by_all = {
        (name, tuple(members))
        for groups in dropped.values()
        for name, members in groups.items()
        if all(dropped[rank].get(name) == members for rank in members)
    }
    opened = {
        (open_group.name, open_group.group.ranks): open_group
        for open_group in runtime.groups
        if not open_group.inner
    }
    for group in sorted(by_all):
        runtime.idle_channels.close(group, runtime.libraries.disabled_on(group[1]))
        if group in opened:
            try:
                opened[group].take_over()
                runtime.close_together(opened[group])
            except McrError as error:
                _log.warning("group '%s', which the program has dropped: %s", group[0], error)
    return bool(by_all)
