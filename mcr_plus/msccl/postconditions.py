"""Preconditions and postconditions of every collective: buffers, aliases in place, contributions.

A contribution is one chunk of one rank's input. A sum is a set of contributions, written as the bits of an
integer: bit `rank * chunks + index`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from mcr_plus.msccl.algorithm import ROWS, Algorithm, Space

VERIFIABLE: Final = tuple(ROWS)
"""Collectives with a defined result."""
ROOTED: Final = frozenset(name for name, row in ROWS.items() if row.rooted)
DIVIDED: Final = frozenset(name for name, row in ROWS.items() if row.is_shared)
"""Collectives in which every rank has a part of the whole buffer; the ranks must divide its chunks."""
_ONE_BUFFER: Final = frozenset(name for name, row in ROWS.items() if row.sends == row.receives)


class BufferLayout(NamedTuple):
    """Offsets of the buffers of one rank in its memory, in chunks.

    Two chunks are the same if and only if their places in memory are equal: in place, input and output
    overlap.
    """

    inputs: int
    outputs: int
    scratch: int
    input_at: int
    output_at: int
    scratch_at: int

    @property
    def size(self) -> int:
        """Number of chunks of the whole memory; scratch comes last."""
        return self.scratch_at + self.scratch

    def length(self, space: Space) -> int:
        """Return the actual number of chunks of a buffer; a file may state another number."""
        return {"i": self.inputs, "o": self.outputs, "s": self.scratch}[space]

    def start(self, space: Space) -> int:
        """Return the offset of a buffer."""
        return {"i": self.input_at, "o": self.output_at, "s": self.scratch_at}[space]

    def name(self, cell: int) -> str:
        """Write a place in memory as its buffer and offset: `o[3]`."""
        for space in ("o", "i", "s"):
            if 0 <= cell - self.start(space) < self.length(space):
                return f"{space}[{cell - self.start(space)}]"
        raise IndexError(cell)


def layout(algorithm: Algorithm, rank: int, *, in_place: bool) -> BufferLayout:
    """Return the layout of the buffers of `rank` in a call in place or out of place.

    In place, allreduce, alltoall, broadcast and reduce have one buffer; the input of allgather and of
    gather's root is the rank's part of the output; the output of reducescatter and of scatter's root is the
    rank's part of the input. A buffer that does not exist, such as the output of a gather on ranks other than
    the root, has no chunks.
    """
    whole, part = algorithm.chunks, algorithm.chunks // algorithm.ranks
    is_root = rank == algorithm.root
    inputs = outputs = whole
    kind, scratch = algorithm.collective, algorithm.programs[rank].scratch
    if kind in ROWS and not (in_place and kind in _ONE_BUFFER):
        lengths = {"none": 0, "one": part if kind in DIVIDED else whole, "each": whole}
        inputs, outputs = (lengths[parts] for parts in ROWS[kind].buffers(root=is_root))
    if in_place and whole in (inputs, outputs):
        input_at, output_at = (0 if length == whole else rank * part for length in (inputs, outputs))
        return BufferLayout(inputs, outputs, scratch, input_at, output_at, whole)
    return BufferLayout(inputs, outputs, scratch, 0, inputs, inputs + outputs)


def contribution(algorithm: Algorithm, rank: int, index: int) -> int:
    """Return the set that contains only chunk `index` of the input of `rank`."""
    return 1 << (rank * algorithm.chunks + index)


def sources(algorithm: Algorithm, contributions: int) -> Iterator[tuple[int, int]]:
    """Yield (rank, index) of every contribution of a set."""
    while contributions:
        lowest = contributions & -contributions
        yield divmod(lowest.bit_length() - 1, algorithm.chunks)
        contributions ^= lowest


def given(algorithm: Algorithm, rank: int) -> dict[int, int]:
    """Return the input of `rank` at the start: {index: contribution}.

    A rank other than the root of a broadcast or scatter has no input, whatever its buffer contains.
    """
    count = algorithm.chunks
    if algorithm.collective in ROWS:
        sends, _ = ROWS[algorithm.collective].buffers(root=rank == algorithm.root)
        if sends == "none":
            return {}
        if sends == "one" and algorithm.collective in DIVIDED:
            count //= algorithm.ranks
    return {index: contribution(algorithm, rank, index) for index in range(count)}


def wanted(algorithm: Algorithm, rank: int, *, in_place: bool) -> dict[int, int]:
    """Return the required output of `rank` at the end: {index: set of contributions}.

    Other chunks may have any value. A reduce in place must preserve the inputs of the other ranks.
    """
    everyone, whole = range(algorithm.ranks), algorithm.chunks
    part = whole // algorithm.ranks
    root = algorithm.root

    def one(origin: int, index: int) -> int:
        return contribution(algorithm, origin, index)

    def total(index: int) -> int:
        return sum(one(origin, index) for origin in everyone)

    row = ROWS.get(algorithm.collective)
    if row is None:
        raise ValueError(f"the result of {algorithm.collective!r} does not follow from its name")
    if row.buffers(root=rank == root)[1] == "none":
        return {k: one(rank, k) for k in range(whole)} if in_place and row.in_place else {}
    first = rank * part if row.sends == "each" else 0  # this rank's part of an input
    if row.receives == "each":
        return {k: one(k // part, first + k % part) for k in range(whole)}
    count = part if row.divides else whole
    return {k: total(first + k) if row.reduces else one(root, first + k) for k in range(count)}
