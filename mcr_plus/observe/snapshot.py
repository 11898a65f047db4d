"""The operations of a process at one moment, as plain data for dumps.

Nothing here takes a lock or talks to another process, so that any thread can take a snapshot of a hanging
process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from mcr_plus.board.shared import SharedBoard
from mcr_plus.core.stacks import Frame, frames_of, waiting_frames

if TYPE_CHECKING:
    from mcr_plus.core.message import Signature
    from mcr_plus.engine.engine import Engine
    from mcr_plus.engine.group_state import GroupState
    from mcr_plus.engine.hook import Noted
    from mcr_plus.engine.work import IssuedWork

State = Literal["scheduled", "started", "completed"]
_OWN_THREADS: Final = "mcr_plus"  # prefix of the names of mcr_plus's threads
_PARTS: Final = 8  # parts into which the ring is divided, see `_first`


@dataclass
class SnapshotEntry:
    """An operation in this rank's view.

    Attributes:
        number: number in the group; 0 for sends and receives.
        issued: time of issue, in `time.time_ns()`.
        peer, match_tag: peer and tag of a send or receive; `peer` is a group rank, None for any rank.
        frames: frames of the thread in which it failed, or that waits for it or waited longer than a second.
        waited: seconds of that wait, up to now if it continues.
        waits: whether the program waits for it now.
        error: text of its error; empty unless it has failed.
    """

    number: int
    signature: Signature
    issued: int
    state: State = "completed"
    peer: int | None = None
    match_tag: int = 0
    frames: Sequence[tuple[str, str, int]] = ()
    waited: float = 0.0
    waits: bool = False
    error: str = ""


@dataclass
class GroupSnapshot:
    """A group's last operations.

    Attributes:
        rank: rank of this process in the group. `ranks`: the members' ranks in the job.
        issued: number of collectives that this rank has issued. `peers`: the same number by group rank, if it
            is readable without asking another process.
        entries: collectives, in order. `messages`: sends and receives.
        failed: reason why the group is unusable; empty unless it has failed.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    issued: int
    peers: dict[int, int] = field(default_factory=dict)
    entries: list[SnapshotEntry] = field(default_factory=list)
    messages: list[SnapshotEntry] = field(default_factory=list)
    failed: str = ""


@dataclass
class Snapshot:
    """The operations and threads of a rank at one moment.

    Attributes:
        time: the moment, in `time.time_ns()`.
        reason: the reason for the snapshot. error: error of the failed operation, if that is the reason.
        threads: name → frames, the main thread first; without threads that run only mcr_plus.
    """

    time: int
    reason: str
    groups: list[GroupSnapshot]
    threads: list[tuple[str, list[Frame]]]
    error: BaseException | None = None


def take_snapshot(engine: Engine, reason: str, error: BaseException | None = None) -> Snapshot:
    """Return the last operations of all open groups, and the places of the program's threads."""
    now = time.time_ns()
    alive = _alive(engine)
    groups = [_group(engine, state, alive, now) for state in list(engine.states) if not state.closed]
    return Snapshot(now, reason, groups, _threads(), error)


def frames_for(engine: Engine, work: IssuedWork) -> list[Frame]:
    """Return the frames of the thread that waits for an operation, else of the calling or the group's thread.

    A thread of mcr_plus may detect the failure: its frames are of no use.
    """
    for wait in list(engine.waits):
        if wait.work is work:
            return frames_of(wait.thread)
    caller, owner = threading.current_thread(), work.operation.state.owner
    return frames_of(owner) if caller.name.startswith(_OWN_THREADS) and owner > 0 else waiting_frames()


def _alive(engine: Engine) -> list[IssuedWork]:
    """Return all issued operations that are not done and still have a handle."""
    deferred = [work for channel in list(engine.blocked) for work in list(channel.pending)]
    waited = [wait.work for wait in list(engine.waits)]
    known = (*list(engine.in_flight), *deferred, *list(engine.unordered), *waited)
    return [work for work in {id(work): work for work in known}.values() if not work.is_done]


def _group(engine: Engine, state: GroupState, alive: list[IssuedWork], now: int) -> GroupSnapshot:
    own = [work for work in alive if work.operation.state is state]
    works = {work.sequence: work for work in own if work.sequence}
    notes = {noted.sequence: noted for noted in list(state.notes) if noted.sequence}
    found = GroupSnapshot(state.group.name, state.group.ranks, state.group.rank, state.sequence)
    found.peers = _peers(state)
    first = _first(state, max(found.peers.values(), default=0))
    for number, signature, issued in list(state.ring):
        if number >= first:
            entry = SnapshotEntry(number, signature, issued)
            _describe(entry, engine, works.get(number), notes.get(number), now)
            if 0 < state.failed_at <= number and entry.state == "completed":
                entry.state = "scheduled"  # nothing more is known after a failure
            found.entries.append(entry)
    found.messages = list(_messages(engine, state, own, now))
    found.failed = "" if state.failure is None else f"{type(state.failure).__name__}: {state.failure}"
    return found


def _messages(engine: Engine, state: GroupState, own: list[IssuedWork], now: int) -> Iterator[SnapshotEntry]:
    """Yield the last sends and receives; live handles show which of them are in flight."""
    flying = {
        (work.message.peer, work.message.match_tag, work.operation.signature.kind, work.issued): work
        for work in own
        if not work.sequence
    }
    for peer, tag, signature, issued in list(state.messages):
        entry = SnapshotEntry(0, signature, issued, peer=peer, match_tag=tag)
        work = flying.get((peer, tag, signature.kind, issued))
        _describe(entry, engine, work, None if work is None else work.noted, now)
        yield entry


def _describe(
    entry: SnapshotEntry, engine: Engine, work: IssuedWork | None, noted: Noted | None, now: int
) -> None:
    """Add details of an operation from its handle and its notes."""
    if noted is not None:
        entry.frames, entry.error = noted.frames, noted.error
        entry.waited = ((noted.ended or now) - noted.began) * 1e-9
    if work is not None:
        entry.state = "scheduled" if work.poll is None else "started"
        for wait in list(engine.waits):
            if wait.work is work:
                entry.waits = True
                entry.frames = frames_of(wait.thread) or entry.frames
                entry.waited = (now - wait.began) * 1e-9
    elif noted is not None and noted.error:
        entry.state = "started"


def _peers(state: GroupState) -> dict[int, int]:
    board = state.board
    if not isinstance(board, SharedBoard) or state.group.rank < 0:
        return {}
    return {rank: board.read(rank, 0).issued for rank in state.group.peers}


def _first(state: GroupState, most: int) -> int:
    """Return the number of the first operation to show.

    Tools compare the ranks' operations from the first one on, so all ranks must show the same first one,
    although the rings of ranks ahead have dropped more: it is one of a few fixed numbers.
    """
    room = state.ring.maxlen or 0
    first = max(most, state.sequence) - room + 1
    step = max(room // _PARTS, 1)
    return 1 if first <= 1 else -(-first // step) * step


def _threads() -> list[tuple[str, list[Frame]]]:
    main = threading.main_thread()
    others = (
        each for each in threading.enumerate() if each is not main and not each.name.startswith(_OWN_THREADS)
    )
    threads = [main, *others]
    found = [(thread.name, frames_of(thread.ident)) for thread in threads if thread.ident is not None]
    return [(name, frames) for name, frames in found if frames]
