"""Build the programs of captured ranks, with gradients sent according to a plan: the input of `network`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.bucketing.events import COMPUTE, ISSUE, POLL, WAIT, Programs
from mcr_plus.bucketing.scaling import CAPTURED
from mcr_plus.bucketing.step import CapturedStep, ComputeEvent, IssueEvent, ReadyEvent, Role, WaitEvent
from mcr_plus.core.kinds import KINDS
from mcr_plus.core.units import about
from mcr_plus.errors import InvalidArgument, short

Ints = NDArray[np.int64]


class PlannedBucket(NamedTuple):
    """Gradients sent as one operation, by names of parameters, with library and codec."""

    params: tuple[str, ...]
    library: str = CAPTURED
    codec: str | None = None


@dataclass(frozen=True)
class BucketPlan:
    """Buckets, and the library of other operations.

    `buckets`: in the order of sending, instead of the captured operations that carry gradients; None keeps
    the captured operations. `library`: library of all other operations.
    """

    buckets: Sequence[PlannedBucket] | None = None
    library: str = CAPTURED


class ProgramOperation(NamedTuple):
    """A simulated operation, equal on all members of its group."""

    name: str
    kind: str
    nbytes: int
    codec: str | None


class CapturedQueue(NamedTuple):
    """A queue of a captured rank: its group, in captured ranks, and the library."""

    group: tuple[int, ...]
    library: str


@dataclass
class CapturedProgram:
    """Events of a captured rank."""

    code: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    number: list[int] = field(default_factory=list)
    slots: list[CapturedQueue] = field(default_factory=list)
    sent: list[list[ProgramOperation]] = field(default_factory=list)

    def add(self, code: int, value: float = 0.0, slot: int = 0, number: int = 0) -> None:
        """Append an event."""
        self.code.append(code)
        self.value.append(value)
        self.slot.append(slot)
        self.number.append(number)

    def issue(self, slot: CapturedQueue, sent: ProgramOperation) -> tuple[int, int]:
        """Append an operation; returns the index of its queue on the rank, and its number in the queue."""
        if slot not in self.slots:
            self.slots.append(slot)
            self.sent.append([])
        at = self.slots.index(slot)
        self.sent[at].append(sent)
        place = at, len(self.sent[at]) - 1
        self.add(ISSUE, 0.0, *place)
        return place


class ProgramBuilder:
    """Builder of a role's program, with its gradients sent according to the plan.

    `sent`: gradients that the role sends, including gradients ready only on other ranks. `sizes`: bytes by
    gradient.
    """

    def __init__(
        self,
        role: Role,
        plan: BucketPlan,
        overhead: float,
        world: int,
        sent: frozenset[str],
        sizes: Mapping[str, int],
    ) -> None:
        self.role, self.plan, self.overhead = role, plan, overhead
        carrying = [each for each in role.events if isinstance(each, IssueEvent) and each.gradients]
        self.extends = {each.group for each in carrying}
        self.unknown: dict[str, None] = {}
        self.program = CapturedProgram()
        self._groups = {param: each.group for each in carrying for param in each.gradients}
        self._everyone = tuple(range(world))
        self._sizes = sizes
        self._averaged = sent
        self._buckets = _buckets(role, plan, sent & sizes.keys())
        self._replaced = {each.id for each in carrying} if plan.buckets is not None else set[int]()
        self._ready: set[str] = set()
        self._sent: list[tuple[int, int]] = []
        self._places: dict[int, tuple[int, int]] = {}
        self._named: dict[str, int] = {}

    def build(self) -> CapturedProgram:
        """Return the program; raises `InvalidArgument` for negative times and waits without an operation."""
        waits = [
            each for each in self.role.events if isinstance(each, WaitEvent) and each.id in self._replaced
        ]
        for each in self.role.events:
            if isinstance(each, ComputeEvent):
                if not 0 <= each.seconds < np.inf:
                    raise InvalidArgument(f"{each.name}: expected seconds of at least 0, got {each.seconds}")
                self.program.add(COMPUTE, each.seconds)
            elif isinstance(each, ReadyEvent):
                self._on_ready(each)
            elif isinstance(each, IssueEvent):
                self._on_issue(each)
            elif isinstance(each, WaitEvent):
                self._on_wait(each, last=bool(waits) and each is waits[-1])
        self._send_rest()
        return self.program

    def _on_ready(self, event: ReadyEvent) -> None:
        self._ready.add(event.param)
        if event.param in self._averaged:  # hooks of other parameters (`mcr_skip`) do not poll
            self.program.add(POLL)
        while len(self._sent) < len(self._buckets):
            if not self._ready.issuperset(self._buckets[len(self._sent)].params):
                break
            self._send_next()

    def _send_rest(self) -> None:
        """Send the remaining buckets at the end of backward; their gradients are not ready on these ranks."""
        while len(self._sent) < len(self._buckets):
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._sent)]
        nbytes = sum(self._sizes[param] for param in bucket.params)
        sent = ProgramOperation(
            f"bucket {len(self._sent)} ({about(nbytes)})", "all_reduce", nbytes, bucket.codec
        )
        self._sent.append(self._issue(CapturedQueue(self._group(bucket), bucket.library), sent))

    def _on_issue(self, event: IssueEvent) -> None:
        if event.id in self._replaced:
            return
        if event.kind not in KINDS:
            self.unknown[event.kind] = None
        kind = "send" if event.kind == "recv" else event.kind  # a single operation on both ranks
        stem = event.tag or event.kind
        self._named[stem] = self._named.get(stem, -1) + 1
        sent = ProgramOperation(f"{stem} {self._named[stem]}", kind, event.nbytes, None)
        self._places[event.id] = self._issue(CapturedQueue(event.group, self.plan.library), sent)

    def _on_wait(self, event: WaitEvent, *, last: bool) -> None:
        if event.id in self._replaced:
            self._send_rest()
            places = self._sent if last else []  # gradients are used after the last wait
        elif event.id in self._places:
            places = [self._places[event.id]]
        else:
            ranks = short(self.role.ranks)
            raise InvalidArgument(
                f"a wait for operation {event.id}, which ranks {ranks} have not issued before"
            )
        for place in places:
            self.program.add(WAIT, 0.0, *place)

    def _issue(self, slot: CapturedQueue, sent: ProgramOperation) -> tuple[int, int]:
        place = self.program.issue(slot, sent)
        self.program.add(COMPUTE, self.overhead)
        return place

    def _group(self, bucket: PlannedBucket) -> tuple[int, ...]:
        found = {self._groups.get(param, self._everyone) for param in bucket.params}
        if len(found) > 1:
            raise InvalidArgument(
                f"a bucket with {bucket.params[0]!r}: its gradients are of {len(found)} groups; expected one"
            )
        return found.pop()


def sizes_of(step: CapturedStep) -> dict[str, int]:
    """Return the bytes of each gradient that is ready on some rank."""
    return {
        each.param: each.nbytes for role in step.roles for each in role.events if isinstance(each, ReadyEvent)
    }


def gradients_of(step: CapturedStep, role: Role) -> frozenset[str]:
    """Return the gradients carried by the captured operations of `role`, which a plan sends.

    Other ready gradients are not averaged (`mcr_skip`). If no operation of the step carries gradients, all
    ready gradients are sent.
    """

    def carried(of: Role) -> frozenset[str]:
        return frozenset(
            name for each in of.events if isinstance(each, IssueEvent) for name in each.gradients
        )

    if any(carried(each) for each in step.roles):
        return carried(role)
    return frozenset(each.param for each in role.events if isinstance(each, ReadyEvent))


def _buckets(role: Role, plan: BucketPlan, sent: Set[str]) -> list[PlannedBucket]:
    """Return the buckets whose gradients this role sends."""
    found = []
    for bucket in plan.buckets or ():
        own = [param for param in bucket.params if param in sent]
        if own and len(own) < len(bucket.params):
            absent = next(param for param in bucket.params if param not in sent)
            raise InvalidArgument(
                f"gradient {absent!r}: in a bucket with {own[0]!r}, but the step does not send it"
            )
        if own:
            found.append(bucket)
    planned = {param for bucket in found for param in bucket.params}
    left = min(sent - planned, default=None)
    if plan.buckets is not None and left is not None:
        raise InvalidArgument(
            f"gradient {left!r} of ranks {short(role.ranks)}: it is in no bucket of the plan"
        )
    return found


def joined(programs: Sequence[CapturedProgram]) -> Programs:
    """Return concatenated programs as arrays."""
    return Programs(
        bounds_of([len(each.code) for each in programs]),
        np.array([code for each in programs for code in each.code], np.int64),
        np.array([value for each in programs for value in each.value], np.float64),
        np.array([slot for each in programs for slot in each.slot], np.int64),
        np.array([number for each in programs for number in each.number], np.int64),
    )


def bounds_of(lengths: Sequence[int]) -> Ints:
    """Return the start offsets of consecutive parts with these lengths, and the end of the last part."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
