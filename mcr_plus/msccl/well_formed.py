"""Check that an algorithm is well-formed (peers, queues, references), before the proof."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from mcr_plus.msccl.algorithm import (
    READS,
    RECEIVES,
    SENDS,
    WRITES,
    Algorithm,
    AlgorithmStep,
    Chunks,
    RankProgram,
    ThreadBlock,
)
from mcr_plus.msccl.postconditions import DIVIDED, ROOTED, VERIFIABLE, layout

MAX_CHUNKS: Final = 1 << 12
"""Maximum per buffer. With the following limits, the verifier needs at most about a gigabyte."""
MAX_CONTRIBUTIONS: Final = 1 << 15
"""Maximum of chunks of the whole buffer times ranks."""
MAX_CLOCKS: Final = 1 << 27
"""Maximum of thread blocks of all ranks times clocks; thread blocks and awaited steps have clocks."""
MAX_SCRATCH: Final = 1 << 17
"""Maximum of scratch chunks of all ranks."""
MAX_WORK: Final = 1 << 19
"""Maximum of steps and moved chunks. With the next limit, the verifier takes at most about ten seconds."""
MAX_CLOCK_WORK: Final = 1 << 29
"""Maximum of thread blocks times steps, because a step may compare every clock."""
MAX_CHANNELS: Final = 256
"""Maximum between two ranks. NCCL has at most 64, and each channel takes memory in both directions."""


class Problem(NamedTuple):
    """A problem: line (0 for an algorithm without a file), place in the file, and description."""

    line: int
    place: str
    what: str

    def text(self, algorithm: Algorithm) -> str:
        """Return the start of an error text: `file:line: place: what`."""
        return f"{where(algorithm, self.line)}: {self.place}: {self.what}"


def where(algorithm: Algorithm, line: int) -> str:
    """Return `file:line`, or the name of an algorithm without a file."""
    return f"{algorithm.file}:{line}" if algorithm.file else f"<{algorithm.name}>"


def also(at: str, line: int) -> str:
    """Return another place in the same file: `gpu[0].tb[1].step[2] (line 9)`."""
    return f"{at} (line {line})" if line else at


def place(rank: int, block: int | None = None, step: int | None = None, field: str = "") -> str:
    """Return the path of a part of the file: `gpu[0].tb[1].step[2].cnt`."""
    text = f"gpu[{rank}]"
    if block is not None:
        text += f".tb[{block}]"
    if step is not None:
        text += f".step[{step}]"
    return f"{text}.{field}" if field else text


def structure_problems(algorithm: Algorithm) -> Iterator[Problem]:
    """Yield all problems of counts, peers, queues, offsets and dependencies."""
    yield from _whole_problems(algorithm)
    for rank, program in enumerate(algorithm.programs):
        for number, block in enumerate(program.blocks):
            yield from _block_problems(algorithm, rank, number, block)
            for index, step in enumerate(block.steps):
                at = _At(rank, number, index, step.line)
                yield from _operation_problems(block, step, at)
                yield from _reference_problems(algorithm, program, step, at)
                yield from _dependency_problems(program, step, at)
        yield from _queue_end_problems(rank, program)


class _At(NamedTuple):
    """Place of a step."""

    rank: int
    block: int
    step: int
    line: int

    def problem(self, field: str, what: str) -> Problem:
        return Problem(self.line, place(self.rank, self.block, self.step, field), what)


def _whole_problems(algorithm: Algorithm) -> Iterator[Problem]:
    kind, ranks = algorithm.collective, algorithm.ranks
    if ranks < 1 or len(algorithm.programs) != ranks:
        what = f"{ranks}, expected the number of gpu elements, which is {len(algorithm.programs)}"
        yield Problem(0, "algo.ngpus", what)
    if not 1 <= algorithm.chunks <= MAX_CHUNKS:
        yield Problem(0, "algo.nchunksperloop", f"{algorithm.chunks}, expected 1 to {MAX_CHUNKS}")
    elif algorithm.chunks * ranks > MAX_CONTRIBUTIONS:
        most = MAX_CONTRIBUTIONS // ranks
        what = (
            f"{algorithm.chunks}, expected at most {most} for {ranks} ranks: the verifier follows "
            f"{MAX_CONTRIBUTIONS} contributions, chunks times ranks"
        )
        yield Problem(0, "algo.nchunksperloop", what)
    elif kind in DIVIDED and algorithm.chunks % max(ranks, 1):
        what = f"{algorithm.chunks}, expected a multiple of ngpus ({ranks}) for {kind}"
        yield Problem(0, "algo.nchunksperloop", what)
    if not 1 <= algorithm.channels <= MAX_CHANNELS:
        yield Problem(0, "algo.nchannels", f"{algorithm.channels}, expected 1 to {MAX_CHANNELS}")
    yield from _work_problems(algorithm)
    if kind in ROOTED and not 0 <= algorithm.root < ranks:
        yield Problem(0, "algo.root", f"{algorithm.root}, expected a rank: 0 to {ranks - 1}")
    if not (algorithm.in_place or algorithm.out_of_place):
        yield Problem(0, "algo.inplace", "0, expected 1 here or in outofplace: else no call could use it")
    if algorithm.most is not None and algorithm.most < algorithm.least:
        what = f"{algorithm.most}, expected at least minBytes ({algorithm.least}), or 0 for no limit"
        yield Problem(0, "algo.maxBytes", what)


def _work_problems(algorithm: Algorithm) -> Iterator[Problem]:
    """Yield problems of size: the verifier would take too much time or memory."""
    blocks = [block for program in algorithm.programs for block in program.blocks]
    steps = [step for block in blocks for step in block.steps]
    awaited = sum(step.awaited for step in steps)
    if len(blocks) * (len(blocks) + awaited) > MAX_CLOCKS:
        what = (
            f"{len(blocks)} thread blocks and {awaited} steps that others wait for, expected fewer of both: "
            f"the verifier keeps {MAX_CLOCKS} clocks, thread blocks times the sum of the two"
        )
        yield Problem(0, "algo", what)
    if len(blocks) * len(steps) > MAX_CLOCK_WORK:
        what = (
            f"{len(blocks)} thread blocks and {len(steps)} steps, expected fewer of both: the verifier "
            f"compares {MAX_CLOCK_WORK} clocks, the one times the other"
        )
        yield Problem(0, "algo", what)
    moved = sum(step.count for step in steps if step.operation != "nop")
    if len(steps) + moved > MAX_WORK:
        what = (
            f"{len(steps)} steps that move {moved} chunks, expected fewer or smaller ones: the verifier "
            f"follows {MAX_WORK}, steps and chunks taken together"
        )
        yield Problem(0, "algo", what)
    scratch = sum(program.scratch for program in algorithm.programs)
    if scratch > MAX_SCRATCH:
        yield Problem(0, "algo", f"{scratch} chunks of scratch on all ranks, expected at most {MAX_SCRATCH}")


def _block_problems(algorithm: Algorithm, rank: int, number: int, block: ThreadBlock) -> Iterator[Problem]:
    for field, peer in (("send", block.send), ("recv", block.receive)):
        here = place(rank, number, None, field)
        if peer == rank:
            yield Problem(block.line, here, f"{peer}, expected another rank than its own")
        elif not -1 <= peer < algorithm.ranks:
            what = f"{peer}, expected a rank: 0 to {algorithm.ranks - 1}, or -1 for none"
            yield Problem(block.line, here, what)
    if not 0 <= block.channel < algorithm.channels:
        what = f"{block.channel}, expected 0 to {algorithm.channels - 1}: nchannels is {algorithm.channels}"
        yield Problem(block.line, place(rank, number, None, "chan"), what)


def _operation_problems(block: ThreadBlock, step: AlgorithmStep, at: _At) -> Iterator[Problem]:
    least = 0 if step.operation == "nop" else 1
    if step.count < least:
        yield at.problem("cnt", f"{step.count}, expected at least {least}")
    if step.operation in SENDS and block.send == -1:
        yield at.problem("type", f"{step.operation!r} sends, but its thread block's send is -1")
    if step.operation in RECEIVES and block.receive == -1:
        yield at.problem("type", f"{step.operation!r} receives, but its thread block's recv is -1")


def _reference_problems(
    algorithm: Algorithm, program: RankProgram, step: AlgorithmStep, at: _At
) -> Iterator[Problem]:
    # chunks that only describe the peer's buffer are not checked
    if step.operation in READS:
        yield from _bound_problems(algorithm, program, step.source, step.count, at, "src")
    if step.operation in WRITES:
        yield from _bound_problems(algorithm, program, step.target, step.count, at, "dst")


def _bound_problems(
    algorithm: Algorithm, program: RankProgram, chunks: Chunks, count: int, at: _At, field: str
) -> Iterator[Problem]:
    length = {"i": program.inputs, "o": program.outputs, "s": program.scratch}[chunks.space]
    # For calls in place, files omit the count of an aliased buffer, although some of them use the buffer.
    known = algorithm.collective in VERIFIABLE and len(algorithm.programs) == algorithm.ranks
    if length == 0 and algorithm.in_place and known:
        length = layout(algorithm, at.rank, in_place=True).length(chunks.space)
    if chunks.at < 0:
        yield at.problem(f"{field}off", f"{chunks.at}, expected 0 or more")
    elif count > length:
        yield at.problem("cnt", f"{count}, but the length of buffer {chunks.space!r} is {length}")
    elif chunks.at + count > length:
        what = f"expected 0 to {length - count}: the length of buffer {chunks.space!r} is {length}"
        yield at.problem(f"{field}off", f"{chunks.at}, {what}")


def _dependency_problems(program: RankProgram, step: AlgorithmStep, at: _At) -> Iterator[Problem]:
    if step.after is None:
        return
    block, index = step.after
    if not 0 <= block < len(program.blocks):
        yield at.problem("depid", f"{block}, expected a thread block: 0 to {len(program.blocks) - 1}")
        return
    steps = program.blocks[block].steps
    if not 0 <= index < len(steps):
        what = f"{index}, expected a step of thread block {block}: 0 to {len(steps) - 1}"
        yield at.problem("deps", what if steps else f"{index}, but thread block {block} has no steps")
    elif not steps[index].awaited:
        what = f"{index}, but step {index} of thread block {block} has hasdep=0, expected 1"
        yield at.problem("deps", what)


def _queue_end_problems(rank: int, program: RankProgram) -> Iterator[Problem]:
    ends: dict[tuple[str, int, int], int] = {}
    for number, block in enumerate(program.blocks):
        for field, peer in (("send", block.send), ("recv", block.receive)):
            if peer == -1:
                continue
            first = ends.setdefault((field, peer, block.channel), number)
            if first != number:
                what = (
                    f"{peer} on channel {block.channel}, expected another channel or peer: "
                    f"thread block {first} has this end of the queue"
                )
                yield Problem(block.line, place(rank, number, None, field), what)
