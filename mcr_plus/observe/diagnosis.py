"""Faults of a job, found in the dumps of its ranks: ranks that are missing, slow, or differ from others.

Each check looks at one kind of fault and knows nothing of the others; `diagnose` runs the checks in the order
in which one fault explains others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final

from mcr_plus.core.stacks import Frame, call_site
from mcr_plus.errors import phrase_ranks
from mcr_plus.observe.arrivals import LateRank, late_ranks
from mcr_plus.observe.dumps import Dump, DumpedOperation, Folder
from mcr_plus.observe.messages import lonely_messages

AWAY: Final = {
    "stopped": "is stopped, by a signal or a debugger",
    "dead": "has died",
    "silent": "is out of reach: no heartbeat of its host",
}
_DIFFERING: Final[tuple[tuple[str, Callable[[DumpedOperation], object]], ...]] = (
    ("kind", lambda each: each.kind),
    ("reduce op", lambda each: each.reduce_op),
    ("root", lambda each: each.root),
    ("dtype", lambda each: each.dtype),
    ("size", lambda each: each.shape),
    ("tag", lambda each: each.tag),
    ("options", lambda each: each.text),
)
"""Properties on which ranks must agree, by the names of faults."""
_SWAPPED_WITHIN: Final = 16  # operations; two swapped ones are at most this far apart
_LONG: Final = 1.0  # seconds after which an incomplete operation is a fault
BEHIND: Final = "behind"
"""Fault name of ranks that others have waited for only briefly: no fault yet."""


@dataclass
class WaitingPlace:
    """The place of a rank: a line of the program, and the seconds it has waited there, if it waits."""

    rank: int
    frame: Frame | None
    seconds: float | None = None

    def plain(self) -> dict[str, Any]:
        """Return the place as plain data for JSON."""
        return asdict(self) | {"frame": None if self.frame is None else self.frame._asdict()}


@dataclass
class DiagnosedFault:
    """A fault.

    Attributes:
        fault: one of FAULTS.
        ranks: the ranks of the job that cause the fault; empty if none is to blame. Where ranks differ, the
            minority; in a tie, the ranks that differ from the lowest rank.
        operation: an operation of the group, with its number (0 for sends and receives).
        at: the places of these ranks. waiting: the ranks that wait because of the fault, with their places.
    """

    fault: str
    ranks: tuple[int, ...]
    group: str
    sequence: int
    operation: str
    text: str
    at: list[WaitingPlace] = field(default_factory=list)
    waiting: list[WaitingPlace] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """Return the fault as plain data for JSON."""
        places = {
            "at": [each.plain() for each in self.at],
            "waiting": [each.plain() for each in self.waiting],
        }
        return {**{name: value for name, value in vars(self).items() if name not in places}, **places}


FAULTS: Final = (
    *AWAY,
    "order",
    *(name for name, _ in _DIFFERING),
    "group",
    "missing",
    "slow",
    "message",
    "stuck",
    "error",
    "late",
    BEHIND,
)
"""Names of faults, causes before possible consequences."""


def diagnose(folder: Folder) -> list[DiagnosedFault]:
    """Return the faults that the dumps of a folder show, causes before consequences."""
    return _Diagnosis(folder).findings()


class _Diagnosis:
    def __init__(self, folder: Folder) -> None:
        self.dumps = folder.dumps
        self.groups = sorted({name for dump in self.dumps.values() for name in dump.groups})
        statuses = {
            rank: status
            for dump in self.dumps.values()
            if dump.written_by == dump.rank
            for rank, status in dump.processes.items()
            if status in AWAY
        }
        self.late = [late for name in self.groups for late in late_ranks(self.dumps, name, statuses)]
        # A rank that failed an operation ended because of that failure: it is not the cause.
        self.away = {
            rank: status
            for rank, status in statuses.items()
            if status != "dead" or not self._has_failed(rank)
        }

    def findings(self) -> list[DiagnosedFault]:
        found = list(self._lost())
        for name in self.groups:
            found += self._differing(name)
        missing = self._missing()
        found += (
            DiagnosedFault(
                "message", ranks, group, 0, each.text, text, self._at(ranks), [self._waiting(rank, each)]
            )
            for rank, group, ranks, each, text in lonely_messages(self.dumps)
            if not set(ranks) & self.away.keys()
        )
        found += _causes(missing, found)
        if all(finding.fault == BEHIND for finding in found):
            found = [*self._stuck()] or found
        if not found:
            found += self._errors()
        blamed = {rank for finding in found if finding.fault == "slow" for rank in finding.ranks}
        found += (self._lateness(late) for late in self.late if not (late.is_slow and late.rank in blamed))
        return sorted(found, key=lambda finding: FAULTS.index(finding.fault))

    # -- absent ranks ------------------------------------------------------------------------------

    def _lost(self) -> Iterator[DiagnosedFault]:
        """Yield faults for ranks that are away while others need them."""
        for rank, status in sorted(self.away.items()):
            waiting = [
                (other, name, each)
                for other, name, each in self._held_up()
                if rank in self.dumps[other].groups[name].ranks and other != rank
            ]
            named = [dump for dump in self.dumps.values() if rank in ((dump.error or {}).get("ranks") or ())]
            if not waiting and not named:
                continue  # no rank needs it: it has ended normally
            name, each = (waiting[0][1], waiting[0][2]) if waiting else ("world", None)
            last = self._issued(rank, name)
            if status == "stopped" and (seen := self._seen(rank, name, status)) is not None:
                last = seen  # its own dump may be older than observations by others
            text = f"rank {rank} {AWAY[status]}"
            if each is not None and each.number:
                behind = "has not issued" if last is not None and last < each.number else "has issued"
                text += f"; it {behind} {each.text} (#{each.number} in group '{name}')"
            yield DiagnosedFault(
                status,
                (rank,),
                name,
                0 if each is None else each.number,
                "" if each is None else each.text,
                text,
                self._at((rank,)),
                [self._waiting(other, each) for other, _, each in waiting],
            )

    # -- operations that differ -------------------------------------------------------------------

    def _differing(self, name: str) -> Iterator[DiagnosedFault]:
        """Return the first operation of a group in which ranks differ."""
        of_ranks = {
            rank: dump.groups[name].operations
            for rank, dump in self.dumps.items()
            if name in dump.groups and dump.written_by == rank
        }
        for number in sorted({number for operations in of_ranks.values() for number in operations}):
            there = {rank: each[number] for rank, each in of_ranks.items() if number in each}
            for fault, value in _DIFFERING:
                values: dict[int, object] = {rank: value(each) for rank, each in there.items()}
                if len(set(values.values())) > 1:
                    yield self._difference(name, number, fault, there, values, of_ranks)
                    return

    def _difference(
        self,
        name: str,
        number: int,
        fault: str,
        there: dict[int, DumpedOperation],
        values: dict[int, object],
        of_ranks: dict[int, dict[int, DumpedOperation]],
    ) -> DiagnosedFault:
        counts = Counter(values.values())
        lowest = values[min(values)]
        usual = max(counts, key=lambda value: (counts[value], value == lowest))
        strange = tuple(rank for rank in sorted(values) if values[rank] != usual)
        one, other = next(rank for rank in values if values[rank] == usual), strange[0]
        ranks = of_ranks[one], of_ranks[other]
        if _swapped(number, *ranks):
            fault = "order"
        what = {"order": "another order", "options": "other options"}.get(fault, f"another {fault}")
        text = (
            f"operation #{number} of group '{name}' has {what} on {phrase_ranks(strange)}: "
            f"rank {one} issued {there[one].text}; rank {other} issued {there[other].text}"
        )
        at = [self._waiting(rank, there[rank]) for rank in strange]
        waiting = [self._waiting(rank, each) for rank, each in there.items() if rank not in strange]
        return DiagnosedFault(fault, strange, name, number, there[one].text, text, at, waiting)

    # -- operations that some ranks have not issued -----------------------------------------------

    def _missing(self) -> list[DiagnosedFault]:
        """Return faults for ranks that have not issued operations that others wait for."""
        first: dict[str, int] = {}
        waits: dict[tuple[str, int], list[tuple[int, DumpedOperation]]] = defaultdict(list)
        for rank, name, each in self._held_up():
            if each.number:
                waits[name, each.number].append((rank, each))
                first[name] = min(first.get(name, each.number), each.number)
        slow = {late.rank for late in self.late if late.is_slow}
        has_failed = any(dump.error for dump in self.dumps.values())
        found: list[DiagnosedFault] = []
        crossed: set[frozenset[int]] = set()
        for name, number in first.items():
            holding = waits[name, number]
            others = [rank for rank, _ in holding]
            absent = tuple(
                rank
                for rank in self.dumps[others[0]].groups[name].ranks
                if (last := self._issued(rank, name)) is not None and last < number and rank not in self.away
            )
            if not absent or frozenset((*absent, *others)) in crossed:
                continue
            each, waiting = holding[0][1], [self._waiting(rank, each) for rank, each in holding]
            verb = "has" if len(absent) == 1 else "have"
            text = f"{phrase_ranks(absent)} {verb} not issued {each.text} (#{number} in group '{name}'); "
            at, fault = self._at(absent), "slow" if set(absent) <= slow else "missing"
            if fault == "missing" and not has_failed and all(each.waited < _LONG for _, each in holding):
                fault = BEHIND
            if (elsewhere := self._elsewhere(absent[0], name, others)) is not None:
                crossed.add(frozenset((*absent, *others)))
                there, other = elsewhere
                text += (
                    f"rank {absent[0]} waits in group '{there}' for {other.text} (#{other.number}), "
                    f"which {phrase_ranks(others)} {'has' if len(others) == 1 else 'have'} not issued"
                )
                at[0], fault = self._waiting(absent[0], other), "group"
            else:
                text += f"the last one issued there is #{self._issued(absent[0], name)}"
            found.append(DiagnosedFault(fault, absent, name, number, each.text, text, at, waiting))
        return found

    def _elsewhere(
        self, absent: int, name: str, holding: Sequence[int]
    ) -> tuple[str, DumpedOperation] | None:
        """Return the operation in another group in which rank `absent` waits for one of `holding`."""
        for rank, there, each in self._held_up():
            if rank == absent and there != name and each.number:
                ranks = self.dumps[rank].groups[there].ranks
                if any(
                    other in ranks and (self._issued(other, there) or 0) < each.number for other in holding
                ):
                    return there, each
        return None

    # -- the rest ---------------------------------------------------------------------------------

    def _stuck(self) -> Iterator[DiagnosedFault]:
        """Yield operations that all ranks have issued but that do not end."""
        for name in self.groups:
            holding = [
                (rank, each)
                for rank, there, each in self._held_up()
                if there == name and each.number and (each.waited >= _LONG or each.error)
            ]
            if holding and not any(self.dumps[rank].error for rank, _ in holding):
                number = min(each.number for _, each in holding)
                those = [(rank, each) for rank, each in holding if each.number == number]
                each = those[0][1]
                text = f"all ranks have issued {each.text} (#{number} in group '{name}'), and it does not end"
                waiting = [self._waiting(*pair) for pair in those]
                yield DiagnosedFault("stuck", (), name, number, each.text, text, [], waiting)

    def _errors(self) -> Iterator[DiagnosedFault]:
        for rank, dump in self.dumps.items():
            if dump.error is not None and dump.written_by == rank:
                text = f"rank {rank}: {dump.error.get('kind')}: {dump.error.get('text')}"
                yield DiagnosedFault("error", (rank,), "", 0, "", text, self._at((rank,)))

    def _lateness(self, late: LateRank) -> DiagnosedFault:
        """Return the fault of a rank that was late, although everything is complete now."""
        each, group = late.operation, late.group
        if late.is_slow:
            text = (
                f"rank {late.rank} is the last one in {len(late.delays)} of {late.of} operations of group "
                f"'{group}', {1e3 * median(late.delays):.0f} ms after the others as a rule"
            )
        else:
            text = (
                f"rank {late.rank} has issued {each.text} (#{each.number} in group '{group}') "
                f"{max(late.delays):.1f} s after the others"
            )
        waiting = [self._waiting(rank, other) for rank, other in late.others.items() if other.waited > 0]
        fault = "slow" if late.is_slow else "late"
        at = self._at((late.rank,))
        return DiagnosedFault(fault, (late.rank,), group, each.number, each.text, text, at, waiting)

    # -- ranks ------------------------------------------------------------------------------------

    def _has_failed(self, rank: int) -> bool:
        dump = self.dumps.get(rank)
        return dump is not None and dump.written_by == rank and dump.error is not None

    def _held_up(self) -> Iterator[tuple[int, str, DumpedOperation]]:
        """Yield all operations that block a rank."""
        for rank, dump in self.dumps.items():
            if dump.written_by == rank:
                for name, group in dump.groups.items():
                    for each in (*group.operations.values(), *group.messages):
                        if each.holds_up:
                            yield rank, name, each

    def _issued(self, rank: int, name: str) -> int | None:
        """Return the number of collectives that a rank has issued in a group; None if no dump shows it."""
        dump = self.dumps.get(rank)
        if dump is not None:
            return dump.groups[name].issued if name in dump.groups else None
        return self._seen(rank, name)

    def _seen(self, rank: int, name: str, status: str | None = None) -> int | None:
        """Return the same number from the dumps of other ranks; with `status`, if they saw that status."""
        seen = [
            group.peers[group.ranks.index(rank)]
            for other in self.dumps.values()
            if (group := other.groups.get(name)) is not None
            and status in (None, other.processes.get(rank))
            and rank in group.ranks
            and group.ranks.index(rank) in group.peers
        ]
        return max(seen, default=None)

    def _at(self, ranks: Sequence[int]) -> list[WaitingPlace]:
        return [WaitingPlace(rank, self._place(rank)) for rank in ranks]

    def _place(self, rank: int) -> Frame | None:
        dump: Dump | None = self.dumps.get(rank)
        return None if dump is None else dump.place

    def _waiting(self, rank: int, each: DumpedOperation) -> WaitingPlace:
        return WaitingPlace(rank, call_site(each.frames) or self._place(rank), each.waited)


def _causes(missing: list[DiagnosedFault], others: list[DiagnosedFault]) -> list[DiagnosedFault]:
    """Return the faults of `missing` that are causes: a rank that waits itself may block further ranks."""
    held_up = {place.rank for finding in (*missing, *others) for place in finding.waiting}
    causes = [
        finding for finding in missing if finding.fault == "group" or not held_up.issuperset(finding.ranks)
    ]
    return causes if causes or others else missing


def _swapped(number: int, one: dict[int, DumpedOperation], other: dict[int, DumpedOperation]) -> bool:
    """Return whether two ranks have issued the same two operations in opposite order."""
    later = range(number + 1, number + _SWAPPED_WITHIN)
    mine, theirs = one[number].text, other[number].text
    return any(each in other and other[each].text == mine for each in later) and any(
        each in one and one[each].text == theirs for each in later
    )
