"""The model of an algorithm: for every rank, thread blocks of steps that move and add chunks.

The model follows MSCCL (Cowan et al., "MSCCLang: Microsoft Collective Communication Language", ASPLOS 2023)
and its XML files. A buffer is divided into chunks of equal size. A thread block sends to at most one peer,
and receives from at most one. Every (source, target, channel) has one first-in-first-out queue, with one
thread block at each end. Steps of a thread block run in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from mcr_plus.core import kinds

Operation = Literal["s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop"]
"""Operations of steps:

    s     send src
    r     receive into dst
    rcs   receive into dst, and send it on
    rrs   receive, add src, send the sum on; nothing is stored
    rrc   receive, add src, store in dst
    rrcs  as rrc, and send it on
    cpy   copy src to dst
    re    add src to dst
    nop   only wait for the dependency
"""
OPERATIONS: Final[tuple[Operation, ...]] = get_args(Operation)
RECEIVES: Final = frozenset({"r", "rcs", "rrs", "rrc", "rrcs"})
SENDS: Final = frozenset({"s", "rcs", "rrs", "rrcs"})
READS: Final = frozenset({"s", "rrs", "rrc", "rrcs", "cpy", "re"})
"""Steps that read `src` on their own rank; for other steps `source` describes the peer's buffer, if any."""
WRITES: Final = frozenset({"r", "rcs", "rrc", "rrcs", "cpy", "re"})
"""Steps that write `dst` on their own rank."""

Space = Literal["i", "o", "s"]
"""Buffer: input, output or scratch."""
SPACES: Final[tuple[Space, ...]] = get_args(Space)

ROWS: Final[Mapping[str, kinds.Collective]] = {
    row.msccl: row for row in kinds.COLLECTIVES.values() if row.msccl
}
"""Collectives with a defined result, by their names in MSCCL."""
COLLECTIVES: Final = (*ROWS, "alltoallv", "send", "recv", "custom")
"""Names of collectives in MSCCL."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of a buffer from `at` on; `count` of the step is the number of chunks."""

    space: Space
    at: int


@dataclass(frozen=True, slots=True)
class AlgorithmStep:
    """One step of a thread block.

    Attributes:
        operation: see `Operation`.
        source, target: the step's chunks; `READS` and `WRITES` list the operations that use them.
        count: number of contiguous chunks, at least 1 except for `nop`.
        after: (thread block, step) on the same rank that must be done first; None without a dependency.
        awaited: whether a step of another thread block depends on this one (`hasdep`).
        line: line in the file, 0 for an algorithm without a file.
    """

    operation: Operation
    source: Chunks
    target: Chunks
    count: int = 1
    after: tuple[int, int] | None = None
    awaited: bool = False
    line: int = 0


@dataclass(frozen=True, slots=True)
class ThreadBlock:
    """Steps in order, the peer to send to and the peer to receive from; -1 for no peer."""

    send: int
    receive: int
    channel: int
    steps: tuple[AlgorithmStep, ...]
    line: int = 0


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The program of one rank: numbers of chunks of its buffers, and thread blocks by id."""

    inputs: int
    outputs: int
    scratch: int
    blocks: tuple[ThreadBlock, ...]
    line: int = 0


@dataclass(frozen=True)
class Algorithm:
    """A collective of a fixed number of ranks.

    Attributes:
        name: name in messages and tables.
        collective: the collective that the algorithm computes.
        ranks: number of ranks.
        chunks: `nchunksperloop`, the number of chunks of the whole buffer: the input of allreduce, reduce,
            reducescatter, alltoall, broadcast and scatter, and the output of allgather and gather.
        channels: maximum number of queues between two ranks in one direction.
        in_place, out_of_place: the calls that may use the algorithm. In place, input and output of allreduce
            and alltoall are one buffer; the input of allgather is the rank's part of the output, and the
            output of reducescatter is the rank's part of the input. See `postconditions.layout` for all
            collectives.
        least, most: intended bytes of the whole buffer, both inclusive; `most` is None without a limit.
        root: root of broadcast, reduce, gather and scatter.
        protocol: `Simple`, `LL` or `LL128`; it matters on GPUs only.
        programs: programs by rank.
        file: path of the file; empty for a generated algorithm.
    """

    name: str
    collective: str
    ranks: int
    chunks: int
    channels: int
    programs: tuple[RankProgram, ...] = field(repr=False)
    in_place: bool = True
    out_of_place: bool = True
    least: int = 0
    most: int | None = None
    root: int = 0
    protocol: str = "Simple"
    file: str = ""

    @property
    def largest_step(self) -> int:
        """Number of chunks of the largest step on any rank; a `nop` moves no chunks, whatever its count."""
        steps = (step for program in self.programs for block in program.blocks for step in block.steps)
        return max((step.count for step in steps if step.operation != "nop"), default=1)

    @property
    def used_channels(self) -> int:
        """One more than the highest channel of a thread block; `channels` may be larger."""
        return 1 + max((block.channel for program in self.programs for block in program.blocks), default=0)
