"""All small mutations of an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from mcr_plus.msccl.algorithm import (
    READS,
    SPACES,
    WRITES,
    Algorithm,
    AlgorithmStep,
    Chunks,
    Operation,
    ThreadBlock,
)

After = tuple[int, int] | None
ALIKE: list[set[Operation]] = [{"r", "rrc"}, {"rcs", "rrs", "rrcs"}, {"cpy", "re"}]
"""Operations that receive and send alike."""


class Mutant(NamedTuple):
    kind: str
    where: str
    algorithm: Algorithm


def mutants(algorithm: Algorithm) -> Iterator[Mutant]:
    """Spoil one thing at a time, at every place where it can be spoilt."""
    for rank, program in enumerate(algorithm.programs):
        for number, block in enumerate(program.blocks):
            for kind, spoilt in block_mutants(block, algorithm.ranks):
                yield Mutant(kind, f"{rank}.{number}", with_block(algorithm, rank, number, spoilt))
            for index in range(len(block.steps)):
                where = f"{rank}.{number}.{index}"
                yield Mutant("drop", where, without(algorithm, rank, number, index))
                yield Mutant("duplicate", where, duplicated(algorithm, rank, number, index))
                for kind, step in step_mutants(block.steps[index]):
                    steps = (*block.steps[:index], step, *block.steps[index + 1 :])
                    changed = with_block(algorithm, rank, number, replace(block, steps=steps))
                    yield Mutant(kind, where, changed)
                if index and block.steps[index].operation != "nop":
                    before, step = block.steps[index - 1 : index + 1]
                    steps = (*block.steps[: index - 1], step, before, *block.steps[index + 1 :])
                    changed = with_block(algorithm, rank, number, replace(block, steps=steps))
                    yield Mutant("order", where, changed)


def block_mutants(block: ThreadBlock, ranks: int) -> Iterator[tuple[str, ThreadBlock]]:
    for peer in range(-1, ranks):
        if block.send >= 0 and peer != block.send:
            yield "peer", replace(block, send=peer)
        if block.receive >= 0 and peer != block.receive:
            yield "peer", replace(block, receive=peer)


def step_mutants(step: AlgorithmStep) -> Iterator[tuple[str, AlgorithmStep]]:
    if step.after is not None:
        yield "dependency", replace(step, after=None)
        block, index = step.after
        if index:
            yield "dependency", replace(step, after=(block, index - 1))
    if step.operation == "nop":
        return
    for alike in ALIKE:
        for operation in sorted(alike - {step.operation}) if step.operation in alike else ():
            yield "operation", replace(step, operation=operation)
    for count in (step.count - 1, step.count + 1):
        yield "count", replace(step, count=count)
    if step.operation in READS:
        for kind, chunks in chunks_mutants(step.source):
            yield kind, replace(step, source=chunks)
    if step.operation in WRITES:
        for kind, chunks in chunks_mutants(step.target):
            yield kind, replace(step, target=chunks)


def chunks_mutants(chunks: Chunks) -> Iterator[tuple[str, Chunks]]:
    for at in (chunks.at - 1, chunks.at + 1):
        yield "offset", replace(chunks, at=at)
    for space in SPACES:
        if space != chunks.space:
            yield "space", replace(chunks, space=space)


# --- Add or remove steps; dependencies still name their steps, if these remain -----------------------------


def without(algorithm: Algorithm, rank: int, number: int, index: int) -> Algorithm:
    def moved(after: After) -> After:
        if after is None or after[0] != number or after[1] < index:
            return after
        return (number, after[1] - 1) if after[1] > 0 else None

    block = algorithm.programs[rank].blocks[number]
    steps = (*block.steps[:index], *block.steps[index + 1 :])
    made = with_block(algorithm, rank, number, replace(block, steps=steps))
    return with_dependencies(made, rank, moved)


def duplicated(algorithm: Algorithm, rank: int, number: int, index: int) -> Algorithm:
    def moved(after: After) -> After:
        if after is None or after[0] != number or after[1] < index:
            return after
        return number, after[1] + 1

    block = algorithm.programs[rank].blocks[number]
    steps = (*block.steps[: index + 1], *block.steps[index:])
    made = with_block(algorithm, rank, number, replace(block, steps=steps))
    return with_dependencies(made, rank, moved)


def with_dependencies(algorithm: Algorithm, rank: int, moved: Callable[[After], After]) -> Algorithm:
    program = algorithm.programs[rank]
    blocks = tuple(
        replace(block, steps=tuple(replace(step, after=moved(step.after)) for step in block.steps))
        for block in program.blocks
    )
    programs = list(algorithm.programs)
    programs[rank] = replace(program, blocks=blocks)
    return announced(replace(algorithm, programs=tuple(programs)))


def with_block(algorithm: Algorithm, rank: int, number: int, block: ThreadBlock) -> Algorithm:
    programs = list(algorithm.programs)
    blocks = list(programs[rank].blocks)
    blocks[number] = block
    programs[rank] = replace(programs[rank], blocks=tuple(blocks))
    return announced(replace(algorithm, programs=tuple(programs)))


def announced(algorithm: Algorithm) -> Algorithm:
    """Say hasdep where a step is waited for, so that no mutant is refused for that alone."""
    programs = []
    for program in algorithm.programs:
        meant = {step.after for block in program.blocks for step in block.steps}
        blocks = tuple(
            replace(
                block,
                steps=tuple(
                    replace(step, awaited=(number, index) in meant) for index, step in enumerate(block.steps)
                ),
            )
            for number, block in enumerate(program.blocks)
        )
        programs.append(replace(program, blocks=blocks))
    return replace(algorithm, programs=tuple(programs))
