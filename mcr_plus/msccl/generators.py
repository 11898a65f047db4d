"""Generated algorithms for 2 or more ranks, for calls in place and out of place.

    GENERATORS["all_reduce_ring"].make(4)                     an Algorithm
    GENERATORS["all_reduce_hierarchical"].make(8, group=4)

Costs are for one of n ranks and a whole buffer of S bytes: steps are sequential messages, bytes are sent
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from mcr_plus.errors import InvalidArgument
from mcr_plus.msccl.algorithm import Algorithm, Chunks, Space
from mcr_plus.msccl.builder import AlgorithmBuilder


class Generator(NamedTuple):
    """Function that makes an algorithm; `options`: arguments of `make` besides the number of ranks."""

    collective: str
    make: Callable[..., Algorithm]
    options: tuple[str, ...] = ()


def _i(at: int) -> Chunks:
    return Chunks("i", at)


def _o(at: int) -> Chunks:
    return Chunks("o", at)


def _s(at: int) -> Chunks:
    return Chunks("s", at)


def _others(rank: int, ranks: int) -> Iterator[int]:
    """Yield all other ranks, beginning with the right neighbour, so that ranks have different receivers."""
    return ((rank + shift) % ranks for shift in range(1, ranks))


# --- all_reduce ---------------------------------------------------------------------------------------------


def all_reduce_ring(ranks: int) -> Algorithm:
    """Pass sums around the ring, then results: 2(n-1) steps, 2S(n-1)/n bytes.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009.
    """
    _check_ranks(ranks)
    builder = AlgorithmBuilder("all_reduce_ring", "allreduce", ranks, ranks)
    _ring_all_reduce(builder, list(range(ranks)), [(chunk, 1) for chunk in range(ranks)], "i")
    return builder.algorithm()


def _ring_all_reduce(
    builder: AlgorithmBuilder, members: Sequence[int], parts: Sequence[tuple[int, int]], space: Space
) -> None:
    """All-reduce parts (first chunk, count) of `space` into the output, one part per member."""
    count = len(members)
    for position, rank in enumerate(members):
        block = builder.block(rank, send=members[(position + 1) % count], receive=members[position - 1])
        at, size = parts[position]
        block.send(Chunks(space, at), size)
        for shift in range(1, count - 1):
            at, size = parts[(position - shift) % count]
            block.receive_add_send(Chunks(space, at), size)
        at, size = parts[(position + 1) % count]
        block.receive_add(Chunks(space, at), _o(at), size, forward=True)
        for shift in range(count - 1):
            at, size = parts[(position - shift) % count]
            block.receive(_o(at), size, forward=shift < count - 2)


def all_reduce_halving_doubling(ranks: int) -> Algorithm:
    """Sum by recursive halving, then collect by doubling: 2 log₂ n steps, 2S(n-1)/n bytes.

    If n is not a power of two, each rank beyond the largest power of two adds its buffer to that of another
    rank, and gets the result from it: 2 more steps, and 2S bytes for these pairs. Rabenseifner, "Optimization
    of collective reduction operations", ICCS 2004.
    """
    _check_ranks(ranks)
    core = 1 << (ranks.bit_length() - 1)
    folded = ranks - core
    builder = AlgorithmBuilder("all_reduce_halving_doubling", "allreduce", ranks, core)
    # In the first pairs of ranks, the odd ranks only send and receive; the other ranks halve and double.
    members = [2 * pair for pair in range(folded)] + list(range(2 * folded, ranks))
    for pair in range(folded):
        giver, taker = 2 * pair + 1, 2 * pair
        builder.block(giver, send=taker).send(_i(0), core)
        builder.block(taker, receive=giver).receive_add(_i(0), _o(0), core)
    space: list[Space] = ["o" if position < folded else "i" for position in range(core)]
    distance = core // 2
    while distance:
        for position in range(core):
            _exchange_halves(builder, members, position, distance, space[position])
            space[position] = "o"
        distance //= 2
    distance = 1
    while distance < core:
        for position in range(core):
            partner = members[position ^ distance]
            block = builder.block(members[position], send=partner, receive=partner)
            have = position & -distance
            block.send(_o(have), distance)
            block.receive(_o(have ^ distance), distance)
        distance *= 2
    for pair in range(folded):
        giver, taker = 2 * pair + 1, 2 * pair
        builder.block(taker, send=giver).send(_o(0), core)
        builder.block(giver, receive=taker).receive(_o(0), core)
    return builder.algorithm()


def _exchange_halves(
    builder: AlgorithmBuilder, members: Sequence[int], position: int, distance: int, space: Space
) -> None:
    """Send the half that the partner keeps, and add the received half to our own."""
    partner = members[position ^ distance]
    block = builder.block(members[position], send=partner, receive=partner)
    keep = position & -distance
    block.send(Chunks(space, keep ^ distance), distance)
    block.receive_add(Chunks(space, keep), _o(keep), distance)


def all_reduce_all_pairs(ranks: int) -> Algorithm:
    """Let every rank sum one chunk of all ranks and send it to all: 2 steps, 2S(n-1)/n bytes."""
    _check_ranks(ranks)
    builder = AlgorithmBuilder("all_reduce_all_pairs", "allreduce", ranks, ranks)
    _direct_reduce(builder, list(range(ranks)), [(chunk, 1) for chunk in range(ranks)])
    _direct_gather(builder, list(range(ranks)), [(chunk, 1) for chunk in range(ranks)])
    return builder.algorithm()


def _direct_reduce(
    builder: AlgorithmBuilder, members: Sequence[int], parts: Sequence[tuple[int, int]]
) -> None:
    """Sum part k (first chunk, count) of all members' inputs into the k-th member's output."""
    count = len(members)
    for position, rank in enumerate(members):
        for other in _others(position, count):
            builder.block(rank, send=members[other]).send(_i(parts[other][0]), parts[other][1])
    for position, rank in enumerate(members):
        at, size = parts[position]
        source = _i(at)
        # begins with the left neighbour, which sends to this rank first
        for other in reversed(list(_others(position, count))):
            builder.block(rank, receive=members[other]).receive_add(source, _o(at), size)
            source = _o(at)


def _direct_gather(
    builder: AlgorithmBuilder, members: Sequence[int], parts: Sequence[tuple[int, int]]
) -> None:
    """Send part k of the k-th member's output to all members."""
    count = len(members)
    for position, rank in enumerate(members):
        for other in _others(position, count):
            builder.block(rank, send=members[other]).send(_o(parts[position][0]), parts[position][1])
    for position, rank in enumerate(members):
        for other in reversed(list(_others(position, count))):
            builder.block(rank, receive=members[other]).receive(_o(parts[other][0]), parts[other][1])


def all_reduce_hierarchical(ranks: int, group: int | None = None) -> Algorithm:
    """Sum within groups of g neighbours and around rings across the groups; return results in the groups.

    Groups use all pairs, so there are 2 + 2(n/g-1) steps and 2S(n-1)/n bytes; 2S(n/g-1)/n bytes leave the
    group. `group` must divide the number of ranks; by default it is the divisor closest to the square root.
    """
    size = _group(ranks, group)
    groups = ranks // size
    builder = AlgorithmBuilder("all_reduce_hierarchical", "allreduce", ranks, ranks)
    teams = [list(range(start, start + size)) for start in range(0, ranks, size)]
    parts = [(position * groups, groups) for position in range(size)]
    if size > 1:
        for team in teams:
            _direct_reduce(builder, team, parts)
    if groups > 1:
        for position in range(size):
            ring = [team[position] for team in teams]
            chunks = [(position * groups + each, 1) for each in range(groups)]
            _ring_all_reduce(builder, ring, chunks, "o" if size > 1 else "i")
    if size > 1:
        for team in teams:
            _direct_gather(builder, team, parts)
    return builder.algorithm()


# --- all_to_all ---------------------------------------------------------------------------------------------


def all_to_all_direct(ranks: int) -> Algorithm:
    """Send every other rank its chunk: one step, S(n-1)/n bytes in n-1 messages."""
    _check_ranks(ranks)
    builder = AlgorithmBuilder("all_to_all_direct", "alltoall", ranks, ranks)
    for rank in range(ranks):
        for other in _others(rank, ranks):
            builder.block(rank, send=other).send(_i(other))
        builder.block(rank).copy(_i(rank), _o(rank))
    for rank in range(ranks):
        for other in _others(rank, ranks):
            builder.block(rank, receive=other).receive(_o(other))
    return builder.algorithm()


def all_to_all_two_level(ranks: int, group: int | None = None) -> Algorithm:
    """Collect the chunks for one position of other groups on one rank of our group, then send them as one.

    With groups of g neighbours, n/g-1 messages of g chunks leave a group per rank, instead of n-g messages of
    one chunk. `group` as in `all_reduce_hierarchical`.
    """
    size = _group(ranks, group)
    groups = ranks // size
    builder = AlgorithmBuilder("all_to_all_two_level", "alltoall", ranks, ranks)
    # Scratch of a rank: for every group, the chunks from our group's members for the rank's position.
    for rank in range(ranks):
        own, position = divmod(rank, size)
        for to in range(size):
            for other in range(groups):
                chunk = _i(other * size + to)
                if to == position:
                    builder.block(rank).copy(chunk, _s(other * size + position))
                else:
                    builder.block(rank, send=own * size + to).send(chunk)
    for rank in range(ranks):
        own, position = divmod(rank, size)
        for source in _others(position, size):
            for other in range(groups):
                block = builder.block(rank, receive=own * size + source)
                block.receive(_s(other * size + source))
    for rank in range(ranks):
        own, position = divmod(rank, size)
        for other in _others(own, groups):
            builder.block(rank, send=other * size + position).send(_s(other * size), size)
        builder.block(rank).copy(_s(own * size), _o(own * size), size)
    for rank in range(ranks):
        own, position = divmod(rank, size)
        for other in _others(own, groups):
            builder.block(rank, receive=other * size + position).receive(_o(other * size), size)
    return builder.algorithm()


# --- all_gather and reduce_scatter --------------------------------------------------------------------------


def all_gather_ring(ranks: int) -> Algorithm:
    """Pass chunks around the ring: n-1 steps, S(n-1)/n bytes."""
    _check_ranks(ranks)
    builder = AlgorithmBuilder("all_gather_ring", "allgather", ranks, ranks)
    for rank in range(ranks):
        block = builder.block(rank, send=(rank + 1) % ranks, receive=(rank - 1) % ranks)
        block.send(_i(0))
        for shift in range(1, ranks):
            block.receive(_o((rank - shift) % ranks), forward=shift < ranks - 1)
        builder.block(rank).copy(_i(0), _o(rank))
    return builder.algorithm()


def all_gather_direct(ranks: int) -> Algorithm:
    """Send this rank's chunk to every other rank: one step, S(n-1)/n bytes in n-1 messages."""
    _check_ranks(ranks)
    builder = AlgorithmBuilder("all_gather_direct", "allgather", ranks, ranks)
    for rank in range(ranks):
        for other in _others(rank, ranks):
            builder.block(rank, send=other).send(_i(0))
            builder.block(rank, receive=other).receive(_o(other))
        # last, since in place it would delay the sends
        builder.block(rank).copy(_i(0), _o(rank))
    return builder.algorithm()


def reduce_scatter_ring(ranks: int) -> Algorithm:
    """Pass sums around the ring: n-1 steps, S(n-1)/n bytes."""
    _check_ranks(ranks)
    builder = AlgorithmBuilder("reduce_scatter_ring", "reducescatter", ranks, ranks)
    for rank in range(ranks):
        block = builder.block(rank, send=(rank + 1) % ranks, receive=(rank - 1) % ranks)
        block.send(_i((rank - 1) % ranks))
        for shift in range(2, ranks):
            block.receive_add_send(_i((rank - shift) % ranks))
        block.receive_add(_i(rank), _o(0))
    return builder.algorithm()


def reduce_scatter_direct(ranks: int) -> Algorithm:
    """Sum this rank's chunk of all ranks: one step of n-1 sums, S(n-1)/n bytes in n-1 messages."""
    _check_ranks(ranks)
    builder = AlgorithmBuilder("reduce_scatter_direct", "reducescatter", ranks, ranks)
    for rank in range(ranks):
        for other in _others(rank, ranks):
            builder.block(rank, send=other).send(_i(other))
        source = _i(rank)
        for other in reversed(list(_others(rank, ranks))):
            builder.block(rank, receive=other).receive_add(source, _o(0))
            source = _o(0)
    return builder.algorithm()


# --- one rank and all others --------------------------------------------------------------------------------


def broadcast_tree(ranks: int, root: int = 0) -> Algorithm:
    """Send the buffer down a binomial tree: ⌈log₂ n⌉ steps."""
    _check_ranks(ranks, root)
    builder = AlgorithmBuilder("broadcast_tree", "broadcast", ranks, 1, root)
    for position in range(ranks):
        rank, parent, children = _family(position, ranks, root)
        source = _i(0) if parent is None else _o(0)
        if parent is not None:
            builder.block(rank, receive=parent).receive(_o(0))
        for child in reversed(children):  # the largest subtree first
            builder.block(rank, send=child).send(source)
    builder.block(root).copy(_i(0), _o(0))
    return builder.algorithm()


def reduce_tree(ranks: int, root: int = 0) -> Algorithm:
    """Sum up a binomial tree: ⌈log₂ n⌉ steps. The inputs of the other ranks are preserved."""
    _check_ranks(ranks, root)
    builder = AlgorithmBuilder("reduce_tree", "reduce", ranks, 1, root)
    for position in reversed(range(ranks)):
        rank, parent, children = _family(position, ranks, root)
        source, total = _i(0), _o(0) if parent is None else _s(0)
        for child in children:  # the smallest subtree first
            builder.block(rank, receive=child).receive_add(source, total)
            source = total
        if parent is not None:
            builder.block(rank, send=parent).send(source)
    return builder.algorithm()


def _family(position: int, ranks: int, root: int) -> tuple[int, int | None, list[int]]:
    """Return a rank, its parent and its children in a binomial tree, by position counted from the root."""

    def rank(place: int) -> int:
        return (place + root) % ranks

    reach = position & -position or 1 << (ranks - 1).bit_length()
    parent = rank(position - reach) if position else None
    steps = [1 << bit for bit in range(reach.bit_length() - 1)]
    return rank(position), parent, [rank(position + step) for step in steps if position + step < ranks]


def gather_direct(ranks: int, root: int = 0) -> Algorithm:
    """Send this rank's chunk to the root: one step, S/n bytes."""
    _check_ranks(ranks, root)
    builder = AlgorithmBuilder("gather_direct", "gather", ranks, ranks, root)
    builder.block(root).copy(_i(0), _o(root))
    for rank in _others(root, ranks):
        builder.block(rank, send=root).send(_i(0))
        builder.block(root, receive=rank).receive(_o(rank))
    return builder.algorithm()


def scatter_direct(ranks: int, root: int = 0) -> Algorithm:
    """Send every rank its chunk from the root: one step, S(n-1)/n bytes from the root."""
    _check_ranks(ranks, root)
    builder = AlgorithmBuilder("scatter_direct", "scatter", ranks, ranks, root)
    builder.block(root).copy(_i(root), _o(0))
    for rank in _others(root, ranks):
        builder.block(root, send=rank).send(_i(rank))
        builder.block(rank, receive=root).receive(_o(0))
    return builder.algorithm()


# --- arguments ----------------------------------------------------------------------------------------------


def _check_ranks(ranks: int, root: int = 0) -> None:
    if ranks < 2:
        raise InvalidArgument(f"ranks: {ranks}, expected at least 2")
    if not 0 <= root < ranks:
        raise InvalidArgument(f"root: {root}, expected a rank: 0 to {ranks - 1}")


def _group(ranks: int, group: int | None) -> int:
    """Return the size of groups: `group`, or the divisor of `ranks` closest to the square root."""
    _check_ranks(ranks)
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    if group is None:
        return min(divisors, key=lambda size: (abs(size * size - ranks), size))
    if group not in divisors:
        known = ", ".join(map(str, divisors))
        raise InvalidArgument(f"group: {group}, expected a divisor of {ranks}: {known}")
    return group


GENERATORS: Final[dict[str, Generator]] = {
    "all_reduce_ring": Generator("allreduce", all_reduce_ring),
    "all_reduce_halving_doubling": Generator("allreduce", all_reduce_halving_doubling),
    "all_reduce_all_pairs": Generator("allreduce", all_reduce_all_pairs),
    "all_reduce_hierarchical": Generator("allreduce", all_reduce_hierarchical, ("group",)),
    "all_to_all_direct": Generator("alltoall", all_to_all_direct),
    "all_to_all_two_level": Generator("alltoall", all_to_all_two_level, ("group",)),
    "all_gather_ring": Generator("allgather", all_gather_ring),
    "all_gather_direct": Generator("allgather", all_gather_direct),
    "reduce_scatter_ring": Generator("reducescatter", reduce_scatter_ring),
    "reduce_scatter_direct": Generator("reducescatter", reduce_scatter_direct),
    "broadcast_tree": Generator("broadcast", broadcast_tree, ("root",)),
    "reduce_tree": Generator("reduce", reduce_tree, ("root",)),
    "gather_direct": Generator("gather", gather_direct, ("root",)),
    "scatter_direct": Generator("scatter", scatter_direct, ("root",)),
}
