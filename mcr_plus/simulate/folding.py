"""Fold the ranks of a job into classes, of which one rank is run.

All ranks of a program make its groups alike, so one rank knows them all. Disjoint groups of one size form a
family, such as the tensor-parallel groups of all pipeline stages. Ranks that are in groups of the same
families form one class, until ranks that have run differ. Then the family whose places explain the difference
with the fewest classes splits them: first and last members, odd and even places, or each place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.core.kinds import MESSAGES
from mcr_plus.simulate.records import AwaitedCall, IssuedCall, RecordedRank

Ints = NDArray[np.int64]
_LEVELS: Final = 4
_FEW: Final = 8  # members of a group of rank 0 that all run


class GroupFamily:
    """Disjoint groups of one size. `owner`, `place`: each rank's group and its place in it, -1 for none."""

    def __init__(self, world: int, size: int) -> None:
        self.size = size
        self.owner, self.place = np.full(world, -1, np.int64), np.full(world, -1, np.int64)
        self.groups: list[tuple[int, ...]] = []

    def takes(self, ranks: Ints) -> bool:
        """Add a group if no member is in another group of this family; return whether it was added."""
        if len(ranks) != self.size or np.any(self.owner[ranks] >= 0):
            return False
        self.owner[ranks] = len(self.groups)
        self.place[ranks] = np.arange(self.size)
        self.groups.append(tuple(ranks.tolist()))
        return True

    @property
    def table(self) -> Ints:
        """Members of the groups: [groups, size]."""
        return np.array(self.groups, np.int64).reshape(len(self.groups), self.size)

    def feature(self, level: int) -> Ints:
        """Return a number for each rank; at higher levels, more places have numbers of their own."""
        place, last = self.place, self.size - 1
        member = np.where(place < 0, 0, 1)
        edges = np.where(place == 0, 2, np.where((place == last) & (last > 0), 3, member))
        if level == 0:
            return member
        if level == 1:
            return edges
        return np.where(edges == 1, 4 + place % 2, edges) if level == 2 else place + 1


class GroupFamilies:
    """The groups of a program, by family."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.all: list[GroupFamily] = []
        self.of: dict[tuple[int, ...], int] = {}

    def add(self, ranks: tuple[int, ...]) -> int:
        """Return the family of a group; equal groups have one."""
        if ranks not in self.of:
            members = np.array(ranks, np.int64)
            number = next((i for i, each in enumerate(self.all) if each.takes(members)), len(self.all))
            if number == len(self.all):
                self.all.append(GroupFamily(self.world, len(ranks)))
                self.all[-1].takes(members)
            self.of[ranks] = number
        return self.of[ranks]


class QueueSlot(NamedTuple):
    """A queue as seen by a rank: a family's group of this rank, or messages to or from a member of it.

    `number`: among groups of the same ranks. `distance`: places from this rank to the peer; None for
    collectives.
    """

    family: int
    number: int
    library: str
    match: int = 0
    distance: int | None = None
    sends: bool = False

    @property
    def shared(self) -> tuple[Any, ...]:
        """What is the same on all ranks of the queue; the family and the library are among it."""
        return *self[:4], self.distance is None


def relative(record: RecordedRank, families: GroupFamilies) -> tuple[Any, ...]:
    """Return the events of a rank without times and places in the program, and with peers as distances.

    Of an operation, the slot comes first; None for a receive from any rank. Waits are numbers.
    """
    groups = [
        (families.add(ranks), number, ranks.index(record.rank), len(ranks)) for ranks, number in record.groups
    ]
    found: list[Any] = []
    for event in record.events:
        if isinstance(event, IssuedCall):
            family, number, place, size = groups[event.group]
            slot: QueueSlot | None
            slot = base = QueueSlot(family, number, event.library, event.match)
            if event.kind in MESSAGES:
                distance = None if event.peer is None else (event.peer - place) % size
                sends = event.kind == "send"
                slot = None if distance is None else base._replace(distance=distance, sends=sends)
            facts = event.kind, event.nbytes, event.dtype, event.op, event.root, event.tag
            found.append((slot, *facts))
        else:
            found.append(event.call if isinstance(event, AwaitedCall) else -1)
    return tuple(found)


class RankFolding:
    """Finds the classes of the ranks, and runs as few ranks as tell them apart.

    `run`: runs ranks, and returns the records of all that have run. `most`: about how many may run.
    """

    def __init__(
        self, world: int, run: Callable[[Sequence[int]], Mapping[int, RecordedRank]], most: int
    ) -> None:
        self.run, self.most = run, most
        self.families = GroupFamilies(world)
        self.families.add(tuple(range(world)))
        self.events: dict[int, tuple[Any, ...]] = {}
        self.levels: list[int] = []
        self.world = world

    def fold(self) -> Ints:
        """Run ranks until those of each class are alike; return the rank that stands for each rank."""
        for ranks, _ in self.run([0])[0].created:
            self.families.add(ranks)
        self._run([0])
        self._run(self._probes())
        return self.refined()

    def refined(self, more: Sequence[int] = ()) -> Ints:
        """Run further ranks, split classes whose ranks differ, and return the rank for each rank."""
        self._run(more)
        while True:
            self._split()
            classes = self._classes(self.levels)
            begins = np.unique(classes, return_index=True)[1]
            ran = {int(classes[rank]) for rank in self.events}
            ends = self.world - 1 - np.unique(classes[::-1], return_index=True)[1]
            todo = [rank for rank in begins.tolist() if int(classes[rank]) not in ran]
            todo += [rank for rank in ends.tolist() if rank not in self.events and rank not in todo]
            todo = todo[: max(self.most - len(self.events), 0)]
            if not todo:
                return self._standing(classes)
            self._run(todo)

    def _run(self, ranks: Sequence[int]) -> Mapping[int, RecordedRank]:
        records = self.run(ranks)
        for rank, record in records.items():
            if rank not in self.events:
                for group in (*record.inner, *(ranks for ranks, _ in record.groups)):
                    self.families.add(group)
                self.events[rank] = relative(record, self.families)
        return records

    def _probes(self) -> list[int]:
        """Return ranks along each family's group of rank 0, and one of each pattern of membership."""
        found: dict[int, None] = {}
        for family in self.families.all:
            if family.owner[0] >= 0:
                group, last = family.groups[family.owner[0]], family.size - 1
                few = (min(1, last), family.size // 2, last)
                found |= dict.fromkeys(group if family.size <= _FEW else [group[place] for place in few])
        return list(found)

    def _classes(self, levels: Sequence[int]) -> Ints:
        """Return a number of its class for each rank."""
        found = np.zeros(self.world, np.int64)
        levels = [*levels, *([0] * (len(self.families.all) - len(levels)))]
        for family, level in zip(self.families.all, levels, strict=True):
            feature = family.feature(level)
            found = np.unique(found * (int(feature.max()) + 1) + feature, return_inverse=True)[1].reshape(-1)
        return found

    def _split(self) -> None:
        """Raise the levels of families until ranks of one class that have run are alike."""
        self.levels += [0] * (len(self.families.all) - len(self.levels))
        while (pair := self._conflict()) is not None:
            choices: list[tuple[int, int, int, list[int]]] = []
            for number, family in enumerate(self.families.all):
                for level in range(self.levels[number] + 1, _LEVELS):
                    feature = family.feature(level)
                    if feature[pair[0]] != feature[pair[1]]:
                        raised = [*self.levels]
                        raised[number] = level
                        count = int(self._classes(raised).max()) + 1
                        choices.append((count, family.size, number, raised))
                        break
            self.levels = min(choices)[-1]

    def _conflict(self) -> tuple[int, int] | None:
        """Return two ranks of one class that have run, and differ."""
        classes = self._classes(self.levels)
        for one, other in pairwise(sorted(self.events, key=lambda rank: (classes[rank], rank))):
            if classes[one] == classes[other] and self.events[one] != self.events[other]:
                return one, other
        return None

    def _standing(self, classes: Ints) -> Ints:
        """Return the rank that stands for each rank: one of its class that has run, or else the nearest."""
        ran = np.array(sorted(self.events), np.int64)
        found = ran[np.abs(ran[None, :] - np.arange(self.world)[:, None]).argmin(axis=1)]
        of_class = np.full(int(classes.max()) + 1, -1, np.int64)
        of_class[classes[ran[::-1]]] = ran[::-1]
        return np.where(of_class[classes] >= 0, of_class[classes], found)
