"""Build algorithms from moves of chunks, written in an order that is correct if run sequentially.

    builder = Builder("pair", "allreduce", ranks=2, chunks=1)
    for rank in range(2):
        builder.block(rank, send=1 - rank).send(Chunks("i", 0))
    for rank in range(2):
        builder.block(rank, receive=1 - rank).receive_add(Chunks("i", 0), Chunks("o", 0))
    builder.algorithm()

Steps of different thread blocks run concurrently. Within a rank, the builder adds dependencies that keep the
written order of two steps on the same chunk, unless both only read the chunk. Chunks that are the same only
in calls in place count as the same chunk, so the algorithm has no races in place or out of place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mcr_plus.msccl.algorithm import (
    READS,
    WRITES,
    Algorithm,
    AlgorithmStep,
    Chunks,
    Operation,
    RankProgram,
    ThreadBlock,
)
from mcr_plus.msccl.postconditions import BufferLayout, layout

_At = tuple[int, int]
"""Thread block, step."""
_NOTHING = Chunks("i", 0)


@dataclass(slots=True)
class _Uses:
    """The last step that wrote a chunk, and the steps that have read the chunk since."""

    written: _At | None = None
    read: list[_At] = field(default_factory=list)


class Block:
    """A thread block under construction. Every method adds a step, and `nop` steps for its dependencies."""

    def __init__(self, program: _Program, number: int, send: int, receive: int, channel: int) -> None:
        self.send_peer = send
        self.receive_peer = receive
        self.channel = channel
        self.steps: list[AlgorithmStep] = []
        self._program = program
        self._number = number

    def send(self, source: Chunks, count: int = 1) -> None:
        """Send chunks."""
        self._add("s", source, source, count)

    def receive(self, target: Chunks, count: int = 1, *, forward: bool = False) -> None:
        """Receive chunks; with `forward`, send them on."""
        self._add("rcs" if forward else "r", target, target, count)

    def receive_add(self, source: Chunks, target: Chunks, count: int = 1, *, forward: bool = False) -> None:
        """Receive chunks, add `source`, store the sum; with `forward`, send the sum on."""
        self._add("rrcs" if forward else "rrc", source, target, count)

    def receive_add_send(self, source: Chunks, count: int = 1) -> None:
        """Receive chunks, add `source` and send the sum on; nothing is stored."""
        self._add("rrs", source, source, count)

    def copy(self, source: Chunks, target: Chunks, count: int = 1) -> None:
        """Copy chunks."""
        self._add("cpy", source, target, count)

    def add(self, source: Chunks, target: Chunks, count: int = 1) -> None:
        """Add chunks to other chunks."""
        self._add("re", source, target, count)

    def _add(self, operation: Operation, source: Chunks, target: Chunks, count: int) -> None:
        reads = [(source, count)] if operation in READS else []
        writes = [(target, count)] if operation in WRITES else []
        needs = self._program.needs(self._number, reads, writes)
        for need in needs[:-1]:  # a step has one dependency; nops wait for the others
            self.steps.append(AlgorithmStep("nop", _NOTHING, _NOTHING, 0, need))
        self._program.note((self._number, len(self.steps)), reads, writes)
        self.steps.append(AlgorithmStep(operation, source, target, count, needs[-1] if needs else None))


_Spans = Sequence[tuple[Chunks, int]]


class _Program:
    """The program of one rank under construction."""

    def __init__(self, where: BufferLayout) -> None:
        self.blocks: dict[tuple[int, int, int], Block] = {}
        self.scratch = 0
        self._where = where
        self._uses: dict[int, _Uses] = {}

    def block(self, send: int, receive: int, channel: int) -> Block:
        key = (send, receive, channel)
        if key not in self.blocks:
            self.blocks[key] = Block(self, len(self.blocks), *key)
        return self.blocks[key]

    def _cells(self, spans: _Spans) -> list[_Uses]:
        cells = []
        for chunks, count in spans:
            if chunks.space == "s":
                self.scratch = max(self.scratch, chunks.at + count)
            start = self._where.start(chunks.space) + chunks.at
            cells += [self._uses.setdefault(cell, _Uses()) for cell in range(start, start + count)]
        return cells

    def needs(self, number: int, reads: _Spans, writes: _Spans) -> list[_At]:
        """Return the steps of other thread blocks on which a step with these accesses depends."""
        latest: dict[int, int] = {}
        before = [uses.written for uses in self._cells([*reads, *writes])]
        for at in [*before, *(at for uses in self._cells(writes) for at in uses.read)]:
            if at is not None and at[0] != number:
                latest[at[0]] = max(at[1], latest.get(at[0], 0))
        return sorted(latest.items())

    def note(self, at: _At, reads: _Spans, writes: _Spans) -> None:
        """Record the accesses of a step."""
        for uses in self._cells(reads):
            uses.read.append(at)
        for uses in self._cells(writes):
            uses.written, uses.read = at, []


class AlgorithmBuilder:
    """An algorithm under construction, for calls in place and out of place."""

    def __init__(self, name: str, collective: str, ranks: int, chunks: int, root: int = 0) -> None:
        empty = RankProgram(0, 0, 0, ())
        self._made = Algorithm(name, collective, ranks, chunks, 1, (empty,) * ranks, root=root)
        self._programs = [_Program(layout(self._made, rank, in_place=True)) for rank in range(ranks)]

    def block(self, rank: int, *, send: int = -1, receive: int = -1, channel: int = 0) -> Block:
        """Return the thread block of `rank` with these peers and channel; create it on first use."""
        return self._programs[rank].block(send, receive, channel)

    def algorithm(self) -> Algorithm:
        """Return the algorithm."""
        programs = []
        for rank, program in enumerate(self._programs):
            place = layout(self._made, rank, in_place=False)
            blocks = _blocks(list(program.blocks.values()))
            programs.append(RankProgram(place.inputs, place.outputs, program.scratch, blocks))
        channels = 1 + max((block.channel for program in programs for block in program.blocks), default=0)
        return replace(self._made, programs=tuple(programs), channels=channels)


def _blocks(written: Sequence[Block]) -> tuple[ThreadBlock, ...]:
    awaited = {step.after for block in written for step in block.steps}
    return tuple(
        ThreadBlock(
            block.send_peer,
            block.receive_peer,
            block.channel,
            tuple(
                replace(step, awaited=(number, index) in awaited) for index, step in enumerate(block.steps)
            ),
        )
        for number, block in enumerate(written)
    )
