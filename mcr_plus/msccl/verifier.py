"""Prove, before an algorithm runs, that it computes its collective.

    verify(algorithm, in_place=True)     a Report, or an AlgorithmError with all problems
    verify_all(algorithm)                the same in place and out of place, as the algorithm claims

For queues of a given depth, the proof shows: the result has every required contribution once, and no other;
no step waits forever; no chunk is read before it has been written; no two thread blocks of a rank race for a
chunk; every message is received by a step that expects a message of this length. So every queue is empty at
the end, and the algorithm may run again without a barrier (see `simulator`). Out of place, the input is not
modified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from mcr_plus.errors import AlgorithmError, InvalidArgument
from mcr_plus.msccl.algorithm import RECEIVES, SENDS, Algorithm, AlgorithmStep
from mcr_plus.msccl.postconditions import VERIFIABLE, sources, wanted
from mcr_plus.msccl.simulator import ChunkSum, StepId, SymbolicRun
from mcr_plus.msccl.well_formed import Problem, also, place, structure_problems, where

SLOTS: Final = 2
"""Default capacity of a queue in messages; with capacity 1, rings deadlock."""
_MOST_REPORTED: Final = 20


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a proof, and cost of a run.

    Attributes:
        in_place, slots: the kind of call and the queue depth for which the proof holds.
        blocks, steps: total numbers on all ranks.
        messages: total number.
        rounds: the longest chain of dependent steps, with queues of this depth.
        sent: largest number of chunks that a rank sends.
    """

    in_place: bool
    slots: int
    blocks: int
    steps: int
    messages: int
    rounds: int
    sent: int


def verify(algorithm: Algorithm, *, in_place: bool, slots: int = SLOTS) -> Report:
    """Prove an algorithm for calls in place, or out of place, with queues of `slots` messages.

    Raises:
        AlgorithmError: the proof failed; one line per problem, at most 20. For problems of structure,
            mismatched messages and deadlocks, consequences are not reported.
        InvalidArgument: `slots` is less than 1.
    """
    if slots < 1:
        raise InvalidArgument(f"slots: {slots}, expected at least 1")
    _refuse(algorithm, list(structure_problems(algorithm)))
    if algorithm.collective not in VERIFIABLE:
        what = (
            f"not verified: what {algorithm.collective!r} must compute does not follow from its name; "
            f"expected one of {', '.join(VERIFIABLE)}"
        )
        _refuse(algorithm, [Problem(1, "algo.coll", what)])
    _refuse(algorithm, list(_unmatched(algorithm)))
    run = SymbolicRun(algorithm, in_place=in_place, slots=slots)
    _refuse(algorithm, [*run.problems, *_deadlock(run)])
    _refuse(algorithm, list(_wrong_results(run)))
    return Report(
        in_place=in_place,
        slots=slots,
        blocks=sum(len(program.blocks) for program in algorithm.programs),
        steps=len(run.times),
        messages=run.messages,
        rounds=run.rounds,
        sent=max(run.sent),
    )


def verify_all(algorithm: Algorithm, *, slots: int = SLOTS) -> list[Report]:
    """Prove an algorithm in place and out of place, as far as it claims these; raises like `verify`."""
    claims = ((True, algorithm.in_place), (False, algorithm.out_of_place))
    places = [place for place, claimed in claims if claimed]
    # claiming neither is a problem of structure
    return [verify(algorithm, in_place=place, slots=slots) for place in places or [True]]


def _refuse(algorithm: Algorithm, problems: Sequence[Problem]) -> None:
    if not problems:
        return
    lines = [problem.text(algorithm) for problem in problems[:_MOST_REPORTED]]
    if len(problems) > _MOST_REPORTED:
        lines.append(
            f"{where(algorithm, problems[_MOST_REPORTED].line)}: and {len(problems) - _MOST_REPORTED} more"
        )
    raise AlgorithmError("\n".join(lines))


# --- Queues -------------------------------------------------------------------------------------------------


def _unmatched(algorithm: Algorithm) -> Iterator[Problem]:
    """Yield messages that are sent but not received, received but not sent, or differ in length."""
    sent: dict[tuple[int, int, int], list[tuple[StepId, AlgorithmStep]]] = {}
    received: dict[tuple[int, int, int], list[tuple[StepId, AlgorithmStep]]] = {}
    for rank, program in enumerate(algorithm.programs):
        for number, block in enumerate(program.blocks):
            for index, step in enumerate(block.steps):
                entry = ((rank, number, index), step)
                if step.operation in SENDS:
                    sent.setdefault((rank, block.send, block.channel), []).append(entry)
                if step.operation in RECEIVES:
                    received.setdefault((block.receive, rank, block.channel), []).append(entry)
    for queue in sorted({*sent, *received}):
        yield from _unmatched_in(queue, sent.get(queue, []), received.get(queue, []))


def _unmatched_in(
    queue: tuple[int, int, int],
    sent: Sequence[tuple[StepId, AlgorithmStep]],
    received: Sequence[tuple[StepId, AlgorithmStep]],
) -> Iterator[Problem]:
    source, target, channel = queue
    between = f"from rank {source} to rank {target} on channel {channel}"
    for (start, sending), (end, receiving) in zip(sent, received, strict=False):
        if sending.count != receiving.count:
            other = also(place(*start), sending.line)
            what = f"{receiving.count}, but {other} sends {sending.count}; expected the same"
            yield Problem(receiving.line, place(*end, "cnt"), what)
            return
    numbers = f"{len(sent)} sent, {len(received)} received"
    if len(sent) > len(received):
        at, step = sent[len(received)]
        yield Problem(step.line, place(*at), f"a message {between} that nobody receives: {numbers}")
    elif len(received) > len(sent):
        at, step = received[len(sent)]
        yield Problem(step.line, place(*at), f"waits for a message {between} that nobody sends: {numbers}")


def _deadlock(run: SymbolicRun) -> Iterator[Problem]:
    cycle = run.cycle()
    if not cycle:
        return
    algorithm = run.algorithm

    def line(at: StepId) -> int:
        return algorithm.programs[at[0]].blocks[at[1]].steps[at[2]].line

    first = cycle[0][0]
    parts = [
        f"waits for {what} from {also(place(*at), line(at))}"
        for (_, what), (at, _) in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    ]
    text = f"deadlock with queues of {run.slots}: it {', which '.join(parts)}"
    yield Problem(line(first), place(*first), text)


# --- Results ------------------------------------------------------------------------------------------------


def _wrong_results(run: SymbolicRun) -> Iterator[Problem]:
    algorithm = run.algorithm
    goals = wanted(algorithm, 0, in_place=run.in_place)
    for rank, program in enumerate(algorithm.programs):
        layout, memory = run.layouts[rank], run.memory[rank]
        # For allreduce the output is the same on all ranks; computing it for each rank would take longer than
        # the run.
        if rank and algorithm.collective != "allreduce":
            goals = wanted(algorithm, rank, in_place=run.in_place)
        for index, expected in goals.items():
            value = memory[layout.output_at + index].value
            if value == ChunkSum(expected):
                continue
            here = place(rank)
            goal = _goal(algorithm, expected)
            name = f"o[{index}]"
            if 0 <= (given := layout.output_at + index - layout.input_at) < layout.inputs:
                name += f" (i[{given}] in place)"  # the only name that the file may use
            if isinstance(value, ChunkSum):
                what = f"{name} ends as {_difference(algorithm, value, expected)}; expected {goal}"
            else:
                what = f"{name} is never written; expected {goal}"
            yield Problem(program.line, here, what)


def _goal(algorithm: Algorithm, expected: int) -> str:
    rank, index = next(sources(algorithm, expected))
    if expected.bit_count() == 1:
        return f"rank {rank}'s chunk {index}"
    return f"the sum of all ranks' chunks {index}"


def _difference(algorithm: Algorithm, value: ChunkSum, expected: int) -> str:
    """Describe how a chunk differs from the expected value: `a sum without rank 3's chunk 5`."""
    if value.once.bit_count() == 1 and not value.more:
        return _listed(algorithm, value.once)
    parts = []
    if missing := expected & ~value.once:
        parts.append(f"without {_listed(algorithm, missing)}")
    if foreign := value.once & ~expected:
        parts.append(f"with {_listed(algorithm, foreign)}")
    if value.more:
        parts.append(f"with {_listed(algorithm, value.more)} more than once")
    return f"a sum {' and '.join(parts)}"


def _listed(algorithm: Algorithm, contributions: int, most: int = 4) -> str:
    found, count = islice(sources(algorithm, contributions), most), contributions.bit_count()
    text = ", ".join(f"rank {rank}'s chunk {index}" for rank, index in found)
    return text if count <= most else f"{text} and {count - most} more"
