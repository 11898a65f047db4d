"""Small algorithms written by hand, which together have every kind of step."""

from __future__ import annotations

from mcr_plus.msccl.algorithm import Algorithm, AlgorithmStep, Chunks, RankProgram, Space, ThreadBlock


def at(space: Space, chunk: int) -> Chunks:
    return Chunks(space, chunk)


def algorithm(
    name: str,
    collective: str,
    programs: list[RankProgram],
    chunks: int,
    *,
    in_place: bool = True,
    out_of_place: bool = True,
    root: int = 0,
) -> Algorithm:
    channels = 1 + max(block.channel for program in programs for block in program.blocks)
    return Algorithm(
        name,
        collective,
        len(programs),
        chunks,
        channels,
        tuple(programs),
        in_place=in_place,
        out_of_place=out_of_place,
        root=root,
    )


def ring(ranks: int) -> Algorithm:
    """all_reduce around a ring: s, rrs, rrcs, rcs, r."""
    programs = []
    for me in range(ranks):

        def chunk(back: int, me: int = me) -> Chunks:
            return at("i", (me - back) % ranks)

        steps = [
            AlgorithmStep("s", chunk(0), chunk(0)),
            *(AlgorithmStep("rrs", chunk(back), chunk(back)) for back in range(1, ranks - 1)),
            AlgorithmStep("rrcs", chunk(ranks - 1), chunk(ranks - 1)),
            *(AlgorithmStep("rcs", chunk(back), chunk(back)) for back in range(ranks, 2 * ranks - 2)),
            AlgorithmStep("r", chunk(2 * ranks - 2), chunk(2 * ranks - 2)),
        ]
        block = ThreadBlock((me + 1) % ranks, (me - 1) % ranks, 0, tuple(steps))
        programs.append(RankProgram(ranks, 0, 0, (block,)))
    return algorithm("ring", "allreduce", programs, ranks, out_of_place=False)


def all_pairs(ranks: int) -> Algorithm:
    """all_reduce in two exchanges, one thread block per peer: s, rrc, r."""
    programs = []
    for me in range(ranks):
        blocks = []
        for index, peer in enumerate(rank for rank in range(ranks) if rank != me):
            mine, theirs = at("i", me), at("i", peer)
            last = ranks - 2
            steps = (
                AlgorithmStep("s", theirs, theirs),
                AlgorithmStep("rrc", mine, mine, after=(index - 1, 1) if index else None, awaited=True),
                AlgorithmStep("s", mine, mine, after=(last, 1) if index != last else None),
                AlgorithmStep("r", theirs, theirs),
            )
            blocks.append(ThreadBlock(peer, peer, 0, steps))
        programs.append(RankProgram(ranks, 0, 0, tuple(blocks)))
    return algorithm("all_pairs", "allreduce", programs, ranks, out_of_place=False)


def through_scratch(ranks: int, chunks: int = 3) -> Algorithm:
    """all_reduce of whole buffers, out of place: cpy, re, nop, and steps of several chunks."""
    programs = []
    for me in range(ranks):
        peers = [rank for rank in range(ranks) if rank != me]
        whole = at("i", 0)
        exchanges = [
            ThreadBlock(
                peer,
                peer,
                0,
                (
                    AlgorithmStep("s", whole, at("s", 0), chunks),
                    AlgorithmStep("r", whole, at("s", index * chunks), chunks, awaited=True),
                ),
            )
            for index, peer in enumerate(peers)
        ]
        # Add in the order of ranks, so that all ranks hold the same bits.
        parts = [whole if rank == me else at("s", peers.index(rank) * chunks) for rank in range(ranks)]
        steps = [
            *(AlgorithmStep("nop", whole, whole, after=(index, 1)) for index in range(len(peers) - 1)),
            AlgorithmStep("cpy", parts[0], at("o", 0), chunks, after=(len(peers) - 1, 1)),
            *(AlgorithmStep("re", part, at("o", 0), chunks) for part in parts[1:]),
        ]
        local = ThreadBlock(-1, -1, 0, tuple(steps))
        programs.append(RankProgram(chunks, chunks, chunks * len(peers), (*exchanges, local)))
    return algorithm("through_scratch", "allreduce", programs, chunks, in_place=False)


def gathering(ranks: int, per_rank: int = 2) -> Algorithm:
    """all_gather, every rank to every rank, on two channels."""
    programs = []
    for me in range(ranks):
        blocks = [
            ThreadBlock(
                peer,
                peer,
                chunk % 2,
                (
                    AlgorithmStep("s", at("i", chunk), at("o", me * per_rank + chunk)),
                    AlgorithmStep("r", at("i", chunk), at("o", peer * per_rank + chunk)),
                ),
            )
            for peer in range(ranks)
            if peer != me
            for chunk in range(per_rank)
        ]
        own = AlgorithmStep("cpy", at("i", 0), at("o", me * per_rank), per_rank)
        blocks.append(ThreadBlock(-1, -1, 0, (own,)))
        programs.append(RankProgram(per_rank, per_rank * ranks, 0, tuple(blocks)))
    return algorithm("gathering", "allgather", programs, per_rank * ranks)


def exchange(ranks: int, per_rank: int = 3) -> Algorithm:
    """all_to_all, every rank to every rank, in steps of several chunks."""
    programs = []
    for me in range(ranks):
        blocks = [
            ThreadBlock(
                peer,
                peer,
                0,
                (
                    AlgorithmStep("s", at("i", peer * per_rank), at("o", me * per_rank), per_rank),
                    AlgorithmStep("r", at("i", me * per_rank), at("o", peer * per_rank), per_rank),
                ),
            )
            for peer in range(ranks)
            if peer != me
        ]
        own = AlgorithmStep("cpy", at("i", me * per_rank), at("o", me * per_rank), per_rank)
        blocks.append(ThreadBlock(-1, -1, 0, (own,)))
        programs.append(RankProgram(per_rank * ranks, per_rank * ranks, 0, tuple(blocks)))
    return algorithm("exchange", "alltoall", programs, per_rank * ranks, in_place=False)


def scattering(ranks: int) -> Algorithm:
    """reduce_scatter around a ring: s, rrs, rrc into the output."""
    programs = []
    for me in range(ranks):
        chunks = [at("i", (me - back) % ranks) for back in range(1, ranks + 1)]
        steps = (
            AlgorithmStep("s", chunks[0], chunks[0]),
            *(AlgorithmStep("rrs", chunk, chunk) for chunk in chunks[1:-1]),
            AlgorithmStep("rrc", chunks[-1], at("o", 0)),
        )
        block = ThreadBlock((me + 1) % ranks, (me - 1) % ranks, 0, steps)
        programs.append(RankProgram(ranks, 1, 0, (block,)))
    return algorithm("scattering", "reducescatter", programs, ranks)


def dealing(ranks: int, per_rank: int = 2) -> Algorithm:
    """scatter from rank 0, in steps of several chunks."""
    mine = at("o", 0)
    deals = [
        ThreadBlock(peer, -1, 0, (AlgorithmStep("s", at("i", peer * per_rank), mine, per_rank),))
        for peer in range(1, ranks)
    ]
    own = ThreadBlock(-1, -1, 0, (AlgorithmStep("cpy", at("i", 0), mine, per_rank),))
    programs = [RankProgram(per_rank * ranks, per_rank, 0, (*deals, own))]
    for _ in range(1, ranks):
        block = ThreadBlock(-1, 0, 0, (AlgorithmStep("r", mine, mine, per_rank),))
        programs.append(RankProgram(per_rank * ranks, per_rank, 0, (block,)))
    return algorithm("dealing", "scatter", programs, per_rank * ranks, in_place=False)


def chain(ranks: int, root: int) -> Algorithm:
    """broadcast along a chain: s, rcs, r."""
    programs = []
    for me in range(ranks):
        place = (me - root) % ranks
        whole = at("o", 0)
        step = AlgorithmStep("s" if place == 0 else "r" if place == ranks - 1 else "rcs", whole, whole)
        before, behind = (me - 1) % ranks, (me + 1) % ranks
        block = ThreadBlock(behind if place < ranks - 1 else -1, before if place else -1, 0, (step,))
        programs.append(RankProgram(1, 1, 0, (block,)))
    return algorithm("chain", "broadcast", programs, 1, out_of_place=False, root=root)
