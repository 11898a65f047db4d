"""Run algorithm files on a segment: the state of operations for `interpreter_kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from mcr_plus.backends.shm import interpreter_kernels as words
from mcr_plus.backends.shm.reductions import ReduceKernels
from mcr_plus.backends.shm.segment import LINE
from mcr_plus.errors import Unsupported
from mcr_plus.msccl.algorithm import READS, RECEIVES, ROWS, SENDS, SPACES, WRITES

if TYPE_CHECKING:
    from mcr_plus.backends.shm.segment import Segment
    from mcr_plus.msccl.algorithm import Algorithm, RankProgram

_NOTHING: Final = ReduceKernels()
_LINE_BYTES: Final = 64


class Interpreter:
    """One rank's program of one algorithm on a segment.

    Operations run one at a time, in the same order on all ranks. `spins` and `yields`: number of retries of
    `advance`, spinning and yielding, before it returns. The first `skip` channels of the segment stay unused.

    Raises:
        Unsupported: the algorithm needs more channels than the segment has, or its chunks cannot be divided
            among the ranks.
    """

    def __init__(
        self, segment: Segment, algorithm: Algorithm, *, spins: int = 200, yields: int = 4, skip: int = 0
    ) -> None:
        shape, channels = segment.shape, segment.shape.channels - skip
        if algorithm.ranks != shape.ranks or algorithm.channels > channels:
            raise Unsupported(
                f"algorithm '{algorithm.name}' is for {algorithm.ranks} ranks and {algorithm.channels} "
                f"channels; there are {shape.ranks} ranks and {channels} channels"
            )
        blocks = ROWS[algorithm.collective].parts(shape.ranks)
        if algorithm.chunks % max(blocks):
            raise Unsupported(
                f"algorithm '{algorithm.name}': {algorithm.chunks} chunks cannot be divided among "
                f"{shape.ranks} ranks"
            )
        self.algorithm = algorithm
        self._segment, self._spins, self._yields = segment, spins, yields
        self._inputs, self._outputs = blocks
        self._per_block = algorithm.chunks // max(blocks)
        self._program = algorithm.programs[segment.rank]
        self._skip = skip
        self._kept: list[Any] = []

    def bind(
        self, count: int, width: int = 1, kernels: ReduceKernels = _NOTHING, *, in_place: bool, tag: int = 0
    ) -> Any:
        """Return the state of an operation, for `begin`, and for `advance` until that returns 1.

        `begin(state, source, target)` takes addresses. For a call `in_place` they are equal, with two
        exceptions: the source of allgather is this rank's block of the target, and the target of
        reducescatter is this rank's block of the source. `count` elements of `width` bytes are the whole
        buffer, or for allgather, reducescatter, alltoall, gather and scatter one rank's block of it. A state
        may be used again when the operation is done; its memory lives as long as this object. Ranks with
        different `tag`s wait for each other forever; `mismatched_peer` returns such a rank.
        """
        shape, segment = self._segment.shape, self._segment
        steps = [step for block in self._program.blocks for step in block.steps]
        # All ranks need the same tiles, so the largest step of any rank determines them.
        most = self.algorithm.largest_step
        chunk, rest = divmod(count, self._per_block)
        room = shape.slot // most // _LINE_BYTES * _LINE_BYTES // width
        if not room:
            raise Unsupported(
                f"algorithm '{self.algorithm.name}': steps of {most} chunks, for slots of {shape.slot} bytes"
            )
        tile = min(room, chunk)
        stage = self._stage(in_place)
        state: Any = np.zeros(
            words.HEAD + len(self._program.blocks) * words.BLOCK + len(steps) * words.STEP, np.int64
        )

        def buffer(elements: int) -> int:
            self._kept.append(np.zeros(elements * width + _LINE_BYTES, np.uint8))
            address: int = self._kept[-1].ctypes.data
            return -(-address // _LINE_BYTES) * _LINE_BYTES

        scratch = -(-max(self._program.scratch, 1) // self._per_block) * self._per_block
        collective = self.algorithm.collective
        root = collective not in ("reduce", "gather") or segment.rank == self.algorithm.root
        own_input, own_output = self._aliased
        settings = {
            words.RANK: segment.rank,
            words.RANKS: shape.ranks,
            words.DEPTH: shape.depth,
            words.SLOT: shape.slot,
            words.SPINS: self._spins,
            words.YIELDS: self._yields,
            words.WIDTH: width,
            words.COMBINE: kernels.combine,
            words.DIVIDE: kernels.divide,
            words.COUNT: count,
            words.PER_BLOCK: self._per_block,
            words.CHUNK: chunk,
            words.TILE: tile,
            words.TILES: (-(-chunk // tile) if chunk else 0) + bool(rest),
            words.REST: rest,
            words.INPUTS: self._inputs,
            words.OUTPUTS: self._outputs,
            words.STAGE: buffer(count * self._inputs) if stage == "buffer" else int(stage == "output"),
            words.OWN_INPUT: own_input,
            words.OWN_OUTPUT: own_output,
            words.DELIVERS: root,
            words.SPACE + 2: buffer(chunk * scratch),
            words.REST_SPACE + 2: buffer(scratch),
            words.REST_BUFFERS: buffer(self._per_block * self._inputs),
            words.REST_BUFFERS + 1: buffer(self._per_block * self._outputs),
            words.STAND_IN: 0 if root else buffer(count * self._outputs),
            words.BLOCKS: len(self._program.blocks),
            words.TAG: tag,
            words.BELLS: self._segment.bells,
        }
        for word, value in settings.items():
            state[word] = value
        self._write_program(state, self._program)
        return state

    def offset(self, nbytes: int) -> int:
        """Return the bytes from output to input of an in-place call; `nbytes` as `count` in `bind`."""
        own_input, own_output = self._aliased
        return -own_output * nbytes if own_output >= 0 else own_input * nbytes

    @property
    def _aliased(self) -> tuple[int, int]:
        """Return the in-place aliases: the output block that is the input, and vice versa; or -1."""
        rank, row = self._segment.rank, ROWS[self.algorithm.collective]
        if row.sends == row.receives:
            return 0, -1
        return (rank, -1) if row.receives == "each" else (-1, rank)

    def _stage(self, in_place: bool) -> Literal["", "buffer", "output"]:
        """Return the place to which the input must be copied first; '' if the algorithm reads it directly."""
        algorithm = self.algorithm
        if in_place:
            return "" if algorithm.in_place else "buffer"
        if not algorithm.out_of_place:
            if self._inputs > self._outputs:
                raise Unsupported(f"algorithm '{algorithm.name}' works in place only")
            return "output"
        writes_input = any(
            step.operation in WRITES and step.target.space == "i"
            for block in self._program.blocks
            for step in block.steps
        )
        return "buffer" if writes_input else ""

    def _write_program(self, state: Any, program: RankProgram) -> None:
        shape, base, me = self._segment.shape, self._segment.base, self._segment.rank

        def queue(source: int, target: int, channel: int) -> tuple[int, int, int]:
            number = shape.queue(source, target, channel + self._skip)
            counters = base + shape.queues + 2 * number * LINE
            return counters, counters + LINE, base + shape.slots_of(source, target, channel + self._skip)

        at = words.HEAD + len(program.blocks) * words.BLOCK
        for index, block in enumerate(program.blocks):
            word = words.HEAD + index * words.BLOCK
            state[word + words.FIRST], state[word + words.STEPS] = at, len(block.steps)
            if any(step.operation in SENDS for step in block.steps):
                state[word + words.FILLED : word + words.TO + 1] = queue(me, block.send, block.channel)
            if any(step.operation in RECEIVES for step in block.steps):
                state[word + words.PEER_FILLED : word + words.FROM + 1] = queue(
                    block.receive, me, block.channel
                )
                state[word + words.RECEIVES] = block.receive
            for step in block.steps:
                # A step without a buffer of its own describes the peer's buffer, which is ignored.
                source, target = step.source, step.target
                reads, writes = step.operation in READS, step.operation in WRITES
                after = step.after or (-1, -1)
                state[at : at + words.STEP] = (
                    words.NUMBERS[step.operation],
                    SPACES.index(source.space) if reads else 0,
                    source.at if reads else 0,
                    SPACES.index(target.space) if writes else 0,
                    target.at if writes else 0,
                    0 if step.operation == "nop" else step.count,
                    *after,
                    step.operation in RECEIVES,
                    step.operation in SENDS,
                )
                at += words.STEP


def mismatched_peer(state: Any) -> int | None:
    """Return a rank that sends data of another operation; None if there is none."""
    return int(state[words.MISMATCHED]) - 1 if state[words.MISMATCHED] else None
