"""Arrivals of ranks in groups that span hosts, whose boards do not show arrivals.

Each rank publishes its own arrivals in the job's store when its recording ends. `log.stragglers()` reads the
arrivals of the other ranks and converts them to the clock of its own host. Two sources bound the clocks:
heartbeats, which carry their time of sending, and operations that all ranks complete together. Both exist
anyway: nothing is sent for this purpose.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mcr_plus.board.base import Published
from mcr_plus.observe.clocks import ClockDifference, place

if TYPE_CHECKING:
    from mcr_plus.board.base import Noted
    from mcr_plus.core.group import Group
    from mcr_plus.engine.engine import Engine
    from mcr_plus.engine.group_state import GroupState

Floats = npt.NDArray[np.float64]
PATIENCE: Final = 5.0
"""Seconds to wait for ranks whose recordings have not ended."""
_LOOK_EVERY: Final = 0.01
_TOGETHER: Final = 512  # operations per comparison of clocks; more would let the clocks drift


class Compared(NamedTuple):
    """Operations of one group: their numbers and keys, and a row with the times of all ranks per operation.

    Times are on each rank's own clock; adding `shifts` converts them to the clock of this rank. After that,
    two clocks differ by at most `error`. All are in seconds.
    """

    numbers: list[int]
    keys: list[int]
    arrivals: Floats
    idle: Floats
    shifts: Floats
    error: float


@dataclass
class _GroupOnHosts:
    """A group across hosts. `own`: operations that have not been compared yet, see `AcrossHosts.add`."""

    state: GroupState
    own: dict[int, tuple[int, bool, tuple[float, float, float]]] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)  # ranks of the group that did not publish in time


class AcrossHosts:
    """The operations that a log has recorded in groups across hosts.

    Attributes:
        missing: ranks of the job whose arrivals at some of the operations are unknown.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._groups: dict[int, _GroupOnHosts] = {}  # by id of the group's state
        self.missing: set[int] = set()

    def note(self, state: GroupState, number: int, times: tuple[float, float, float]) -> None:
        """Note an operation of this rank: its time of issue, the idle time until then, and its end."""
        if id(state) not in self._groups:
            self._groups[id(state)] = _GroupOnHosts(state)
        state.board.note(number, *times)

    def add(
        self, state: GroupState, number: int, key: int, together: bool, times: tuple[float, float, float]
    ) -> None:
        """Add a noted operation for `compared`. `together`: a kind of `clocks.TOGETHER`, with data."""
        self._groups[id(state)].own[number] = key, together, times

    def publish(self) -> None:
        """Publish the noted operations for other ranks."""
        clocks = self._engine.peers.clocks() if self._groups else {}
        for each in self._groups.values():
            if not _has_ended(each.state):
                each.state.board.publish_noted(clocks)

    @property
    def left(self) -> int:
        """Return the number of operations that have not been compared."""
        return sum(len(each.own) for each in self._groups.values())

    def compared(self) -> Iterator[tuple[Group, Compared]]:
        """Yield the operations whose arrivals all ranks have published by now, each operation once.

        Waits for ranks whose recordings are about to end, at most `PATIENCE` seconds in total. Closed groups
        are skipped, also groups that another thread closes meanwhile.
        """
        deadline = time.monotonic() + PATIENCE
        self.missing = set()
        for each in self._groups.values():
            if each.own and not _has_ended(each.state):
                try:
                    for found in self._of_group(each, deadline):
                        yield each.state.group, found
                except ValueError:  # another thread has closed the group and its memory
                    if not _has_ended(each.state):
                        raise

    def _of_group(self, of: _GroupOnHosts, deadline: float) -> Iterator[Compared]:
        group, board = of.state.group, of.state.board
        numbers, last = sorted(of.own), max(of.own)
        said: list[Published] = []
        noted: list[Noted] = []
        for rank in range(group.size):
            if rank == group.rank:
                said.append(Published(last, self._engine.peers.clocks()))
                noted.append({number: of.own[number][2] for number in numbers})
                continue
            published = self._awaited(of, rank, last, deadline)
            theirs = {} if published is None else board.noted(rank, numbers)
            numbers = [number for number in numbers if number in theirs]
            if len(numbers) < len(of.own):
                self.missing.add(group.ranks[rank])
            if not numbers or published is None:
                return
            said.append(published)
            noted.append(theirs)
        clocks = {place: each.clocks for place, each in self._by_place(group.ranks, said)}
        for begin in range(0, len(numbers), _TOGETHER):
            some = numbers[begin : begin + _TOGETHER]
            found = self._on_one_clock(of, some, noted, clocks)
            if found is None:
                return
            for number in some:
                del of.own[number]
            yield found

    def _awaited(self, of: _GroupOnHosts, rank: int, last: int, deadline: float) -> Published | None:
        """Return a rank's published arrivals once they cover operation `last`; None if that takes long.

        Does not wait for a rank that will publish nothing more: one that has left, failed or is lost. Stops
        waiting if another thread of this rank leaves the group.
        """
        board = of.state.board
        while not (_has_ended(of.state) or self._engine.peers.store_is_lost()):
            found = board.published(rank)
            if (found is not None and found.issued >= last) or rank in of.silent:
                return found
            if self._has_gone(of, rank):
                return board.published(rank)  # its final publication
            if time.monotonic() > deadline:
                of.silent.add(rank)
                return found
            self._engine.progress_once()  # the rank may be waiting for this one
            time.sleep(_LOOK_EVERY)
        return None

    def _has_gone(self, of: _GroupOnHosts, rank: int) -> bool:
        board, group = of.state.board, of.state.group
        has_ended = board.is_closed(rank) or board.failure(rank) is not None
        return has_ended or self._engine.peers.is_away(group.ranks[rank])

    def _by_place(self, ranks: Sequence[int], each: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        processes = self._engine.peers.processes
        return zip((processes[rank].place for rank in ranks), each, strict=True)

    def _on_one_clock(
        self,
        of: _GroupOnHosts,
        numbers: list[int],
        noted: Sequence[Noted],
        clocks: Mapping[str, Mapping[int, float]],
    ) -> Compared | None:
        """Return these operations with the shifts of clocks; None if some clocks cannot be compared."""
        times = np.array([[each[number] for each in noted] for number in numbers])
        issued, idle, done = times[:, :, 0], times[:, :, 1], times[:, :, 2]
        together = np.array([of.own[number][1] for number in numbers])
        places = [where for where, _ in self._by_place(of.state.group.ranks, noted)]
        own = places[of.state.group.rank]
        lowest: dict[str, int] = {}
        for rank, process in enumerate(self._engine.peers.processes):
            lowest.setdefault(process.place, rank)
        columns = {where: [at for at, each in enumerate(places) if each == where] for where in places}
        last = {where: issued[together][:, at].max(axis=1) for where, at in columns.items()}
        first = {where: done[together][:, at].min(axis=1) for where, at in columns.items()}

        def difference(there: str, here: str) -> ClockDifference | None:
            # No operation completes before all ranks have issued it, and no datagram arrives before it was
            # sent.
            least = [-clocks[here].get(lowest[there], np.inf), *(last[there] - first[here])]
            most = [clocks[there].get(lowest[here], np.inf), *(first[there] - last[here])]
            bounds = float(np.max(least)), float(np.min(most))
            if not np.isfinite(bounds).all():
                return None
            return ClockDifference(bounds[0] * 1e6, bounds[1] * 1e6, "heartbeats and operations")

        # This rank's clock comes first: `place` relates all others to it.
        order = [own, *(where for where in columns if where != own)]
        placed = place(order, difference)
        if len(placed) < len(columns):
            return None
        errors = sorted(clock.error_us or 0.0 for clock in placed.values())
        return Compared(
            numbers=numbers,
            keys=[of.own[number][0] for number in numbers],
            arrivals=issued,
            idle=idle,
            shifts=np.array([placed[where].shift_us * 1e-6 for where in places]),
            error=sum(errors[-2:]) * 1e-6,
        )


def _has_ended(state: GroupState) -> bool:
    """Return whether a group's store must no longer be used."""
    return state.closed or state.failure is not None or bool(state.revoked)
