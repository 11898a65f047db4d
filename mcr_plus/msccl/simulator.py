"""Run an algorithm symbolically: values of chunks, dependencies, and steps that may run concurrently.

Thread blocks are deterministic programs. Ranks share nothing but first-in-first-out queues with one writer
and one reader each: a Kahn process network, here with bounded queues. A step that can run stays runnable
until it has run, whatever other steps do. So every maximal run ends after the same steps, and with the same
messages, and one run decides for all, provided that thread blocks of a rank do not race for memory. The run
also detects races, with vector clocks (Mattern, "Virtual Time and Global States of Distributed Systems",
1989; per chunk as in FastTrack, Flanagan and Freund, PLDI 2009).

Steps are ordered by program order, by dependencies, and by messages (sending before receipt). A full queue
that
blocks its sender does not count as order: an algorithm must not depend on the depth of queues.

The next run on the same queues, for the next operation or the next tile of a large operation, needs no
barrier. Ranks share nothing but queues. If a run receives exactly the messages that it sends, its messages
meet steps of the same run. One run after the other is then one schedule of both runs, so every schedule ends
in the same state, as shown above. Within a rank, an operation begins when the previous one has ended. The
tiles of an operation are different parts of the same chunks, including scratch. So thread blocks may be in
different tiles, provided that a dependency refers to the step of the same tile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mcr_plus.msccl.algorithm import READS, RECEIVES, SENDS, WRITES, Algorithm, AlgorithmStep, Chunks
from mcr_plus.msccl.postconditions import BufferLayout, contribution, given, layout
from mcr_plus.msccl.well_formed import Problem, also, place

StepId = tuple[int, int, int]
"""Rank, thread block, step."""
Clock = npt.NDArray[np.int32]
"""Vector clock: number of earlier steps of every thread block of all ranks."""


class ChunkSum(NamedTuple):
    """Value of a chunk: its contributions, and the contributions that are included more than once."""

    once: int
    more: int = 0

    def plus(self, other: ChunkSum) -> ChunkSum:
        """Add two chunks."""
        return ChunkSum(self.once | other.once, self.more | other.more | (self.once & other.once))


class _Unknown:
    """Value of a chunk after a reported problem; it causes no further reports."""


UNKNOWN = _Unknown()
Value = ChunkSum | _Unknown | None
"""Value of a chunk; None if it was never written."""


def _added(first: Value, second: Value) -> Value:
    return first.plus(second) if isinstance(first, ChunkSum) and isinstance(second, ChunkSum) else UNKNOWN


@dataclass(slots=True)
class _Queue:
    """Messages in flight: their chunks, and the sender's clock at the sending step."""

    sender: int
    receiver: int
    messages: deque[tuple[list[Value], Clock]] = field(default_factory=deque)


@dataclass(slots=True)
class _Cell:
    """A chunk of memory: its value, and the last steps that wrote and read it."""

    value: Value = None
    written: tuple[int, int] | None = None
    read: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Block:
    """A running thread block; `done` counts its finished steps."""

    rank: int
    number: int
    steps: tuple[AlgorithmStep, ...]
    inbox: _Queue | None
    outbox: _Queue | None
    clock: Clock
    done: int = 0
    awaited: dict[int, Clock] = field(default_factory=dict)

    @property
    def step(self) -> AlgorithmStep | None:
        """The next step; None at the end."""
        return self.steps[self.done] if self.done < len(self.steps) else None

    @property
    def at(self) -> StepId:
        """The id of the next step."""
        return self.rank, self.number, self.done


class SymbolicRun:
    """One run of an algorithm with queues of `slots` messages; the attributes hold the result.

    `algorithm` must have no `well_formed.structure_problems`. In each round, all runnable steps run at once.

    Attributes:
        problems: reads of unwritten chunks, writes out of bounds or to an input, races.
        times: the round of every step that ran, counted from 1.
        rounds: the number of rounds.
        messages, sent: total number of messages, and number of chunks that each rank sent.
    """

    def __init__(self, algorithm: Algorithm, *, in_place: bool, slots: int) -> None:
        self.algorithm = algorithm
        self.in_place = in_place
        self.slots = slots
        self.problems: list[Problem] = []
        self.times: dict[StepId, int] = {}
        self.rounds = 0
        self.messages = 0
        self.sent = [0] * algorithm.ranks
        self.layouts = [layout(algorithm, rank, in_place=in_place) for rank in range(algorithm.ranks)]
        self.memory = [self._memory(rank) for rank in range(algorithm.ranks)]
        self._blocks: list[_Block] = []
        self._number: dict[tuple[int, int], int] = {}
        self._dependents: dict[tuple[int, int], list[int]] = {}
        self._reported: set[tuple[StepId, StepId]] = set()
        self._make_blocks()
        self._run()

    def _memory(self, rank: int) -> list[_Cell]:
        place = self.layouts[rank]
        cells = [_Cell() for _ in range(place.size)]
        for index in given(self.algorithm, rank):
            cells[place.input_at + index].value = ChunkSum(contribution(self.algorithm, rank, index))
        return cells

    def _make_blocks(self) -> None:
        queues: dict[tuple[int, int, int], _Queue] = {}

        def queue(source: int, target: int, channel: int) -> _Queue:
            return queues.setdefault((source, target, channel), _Queue(-1, -1))

        count = sum(len(program.blocks) for program in self.algorithm.programs)
        for rank, program in enumerate(self.algorithm.programs):
            for number, block in enumerate(program.blocks):
                index = len(self._blocks)
                inbox = queue(block.receive, rank, block.channel) if block.receive >= 0 else None
                outbox = queue(rank, block.send, block.channel) if block.send >= 0 else None
                if inbox:
                    inbox.receiver = index
                if outbox:
                    outbox.sender = index
                clock = np.zeros(count, np.int32)
                self._blocks.append(_Block(rank, number, block.steps, inbox, outbox, clock))
                self._number[rank, number] = index
        for index, made in enumerate(self._blocks):
            for step in made.steps:
                if step.after is not None:
                    other = self._number[made.rank, step.after[0]], step.after[1]
                    self._dependents.setdefault(other, []).append(index)

    # --- Progress ---

    def _run(self) -> None:
        # Find all runnable steps before running any, since the steps of a round are simultaneous. Check only
        # blocks that a step of the previous round may have unblocked: checking all blocks would take time
        # blocks × steps.
        ready = self._able(range(len(self._blocks)))
        while ready:
            self.rounds += 1
            freed: set[int] = set()
            for index in ready:
                freed |= self._advance(index)
            ready = self._able(freed)

    def _able(self, blocks: Iterable[int]) -> list[int]:
        """Return the blocks of `blocks` that can run their next step, in order."""
        return [index for index in sorted(blocks) if self._blocks[index].step and not self._waits(index)]

    def _waits(self, index: int) -> list[tuple[str, int]]:
        """Return the reasons why the next step of a thread block waits, with the awaited thread blocks."""
        block = self._blocks[index]
        step = block.step
        assert step is not None
        reasons = []
        if step.after is not None:
            other = self._number[block.rank, step.after[0]]
            if self._blocks[other].done <= step.after[1]:
                reasons.append(("the step it depends on", other))
        # Receiving and forwarding is atomic here. In a run where it is not, steps wait for less, never for
        # more.
        if step.operation in RECEIVES and block.inbox is not None and not block.inbox.messages:
            reasons.append(("a message", block.inbox.sender))
        if step.operation in SENDS and block.outbox is not None and len(block.outbox.messages) >= self.slots:
            reasons.append(("a free slot", block.outbox.receiver))
        return reasons

    def cycle(self) -> list[tuple[StepId, str]]:
        """Return a cycle of steps that wait for one another, with the reasons; empty if every step has run.

        If the messages of every queue match at both ends, every waiting thread block waits for another
        waiting block, so some blocks form a cycle.
        """
        stuck = [index for index, block in enumerate(self._blocks) if block.step]
        if not stuck:
            return []
        path: dict[int, int] = {}
        index = stuck[0]
        while index not in path:
            path[index] = len(path)
            index = self._waits(index)[0][1]
        return [(self._blocks[i].at, self._waits(i)[0][0]) for i in list(path)[path[index] :]]

    def _advance(self, index: int) -> set[int]:
        """Run the next step of a block; return the blocks that it may have unblocked, including itself."""
        block = self._blocks[index]
        step = block.step
        assert step is not None
        at = block.at
        if step.after is not None:
            other = self._blocks[self._number[block.rank, step.after[0]]]
            np.maximum(block.clock, other.awaited[step.after[1]], out=block.clock)
        freed = {index, *self._dependents.get((index, block.done), ())}
        values: list[Value] = []
        if step.operation in RECEIVES:
            assert block.inbox is not None
            values, clock = block.inbox.messages.popleft()
            np.maximum(block.clock, clock, out=block.clock)
            freed.add(block.inbox.sender)
        block.clock[index] = block.done + 1
        values = self._computed(index, step, values)
        if step.operation in WRITES and not self._copies_onto_itself(block.rank, step):
            self._write(index, step.target, values)
        if step.operation in SENDS:
            assert block.outbox is not None
            block.outbox.messages.append((values, block.clock.copy()))
            self.messages += 1
            self.sent[block.rank] += step.count
            freed.add(block.outbox.receiver)
        if step.awaited:
            block.awaited[block.done] = block.clock.copy()
        self.times[at] = self.rounds
        block.done += 1
        freed.discard(-1)  # the unused end of a queue
        return freed

    def _computed(self, index: int, step: AlgorithmStep, received: list[Value]) -> list[Value]:
        """Return the values that a step stores or sends."""
        if step.operation in READS:
            own = self._read(index, step.source, step.count)
            received = list(map(_added, received, own)) if received else own
        if step.operation == "re":
            old = self._read(index, step.target, step.count)
            received = list(map(_added, old, received))
        if step.operation in READS and step.operation in WRITES:
            self._check_overlap(index, step)
        return received

    # --- Memory ---

    def _problem(self, index: int, what: str) -> None:
        block = self._blocks[index]
        self.problems.append(Problem(block.steps[block.done].line, place(*block.at), what))

    def _cells(self, index: int, chunks: Chunks, count: int) -> Iterator[tuple[int, _Cell | None]]:
        """Yield each chunk of a step, or None beyond the buffer (lengths differ in and out of place)."""
        rank = self._blocks[index].rank
        where, memory = self.layouts[rank], self.memory[rank]
        length, start = where.length(chunks.space), where.start(chunks.space)
        for at in range(chunks.at, chunks.at + count):
            if at < length:
                yield at, memory[start + at]
            else:
                manner = "in place" if self.in_place else "out of place"
                what = f"the length of rank {rank}'s buffer {chunks.space!r} is {length}"
                self._problem(index, f"uses {chunks.space}[{at}], but {manner} {what}")
                yield at, None

    def _read(self, index: int, chunks: Chunks, count: int) -> list[Value]:
        values: list[Value] = []
        for at, cell in self._cells(index, chunks, count):
            if cell is None:
                values.append(UNKNOWN)
                continue
            if cell.value is None:
                self._problem(index, f"reads {chunks.space}[{at}], which has never been written")
            values.append(UNKNOWN if cell.value is None else cell.value)
            if cell.written is not None and not self._follows(index, cell.written):
                self._race(index, cell.written, f"reads {chunks.space}[{at}]", "writes")
            cell.read[index] = self._blocks[index].done + 1
        return values

    def _write(self, index: int, chunks: Chunks, values: list[Value]) -> None:
        if chunks.space == "i" and not self.in_place:
            what = f"writes i[{chunks.at}]; out of place, expected the input to be left as it is"
            self._problem(index, what)
        for value, (at, cell) in zip(values, self._cells(index, chunks, len(values)), strict=True):
            if cell is None:
                continue
            if cell.written is not None and not self._follows(index, cell.written):
                self._race(index, cell.written, f"writes {chunks.space}[{at}]", "writes")
            for reader in cell.read.items():
                if not self._follows(index, reader):
                    self._race(index, reader, f"writes {chunks.space}[{at}]", "reads")
            cell.value, cell.written, cell.read = value, (index, self._blocks[index].done + 1), {}

    def _follows(self, index: int, earlier: tuple[int, int]) -> bool:
        """Return whether `earlier` (a thread block and a number of its steps) happened before now."""
        return index == earlier[0] or bool(self._blocks[index].clock[earlier[0]] >= earlier[1])

    def _race(self, index: int, earlier: tuple[int, int], doing: str, other_doing: str) -> None:
        """Report a race of the next step with an earlier step, once per pair."""
        block, other = self._blocks[index], self._blocks[earlier[0]]
        before: StepId = (other.rank, other.number, earlier[1] - 1)
        if (pair := (before, block.at)) in self._reported:
            return
        self._reported.add(pair)
        elsewhere = also(place(*before), other.steps[before[2]].line)
        what = f"{doing}, which {elsewhere} {other_doing}: a race, expected one to wait for the other"
        self._problem(index, what)

    def _shift(self, rank: int, step: AlgorithmStep) -> int:
        """Return the offset of a step's source relative to its target in memory."""
        where: BufferLayout = self.layouts[rank]
        source = where.start(step.source.space) + step.source.at
        return source - where.start(step.target.space) - step.target.at

    def _copies_onto_itself(self, rank: int, step: AlgorithmStep) -> bool:
        # Copies to this rank's part in place do so. The value does not change, so concurrent reads are
        # harmless.
        return step.operation == "cpy" and self._shift(rank, step) == 0

    def _check_overlap(self, index: int, step: AlgorithmStep) -> None:
        """Refuse source and target that share chunks, unless they are identical."""
        if 0 < abs(self._shift(self._blocks[index].rank, step)) < step.count:
            self._problem(index, "source and target overlap, expected the same chunks or others")
