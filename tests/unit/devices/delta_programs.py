"""Programs with the codec delta on simulated devices: payloads get their lengths when they are encoded.

The rules of `device_programs` apply. Values change from call to call, so that calls after the first send
changes. The programs run on simulated devices and on a GPU (`gpu_arrays`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from unit.devices.device_programs import Program, Values, given

COUNT: Final = 70
TURNS: Final = 3


def value(rank: int, turn: int, count: int = COUNT) -> Values:
    """Return a rank's values; few of them change from turn to turn."""
    values = given(rank, 0, count)
    for index in range(0, count, 9 + rank):
        values[index] += turn
    return values


def broadcasts(rank: Any, **how: Any) -> Values:
    """Issue under one stream and wait under another, with the next call in flight."""
    one, other, read, flying = rank.stream(), rank.stream(), Values(), list[Any]()
    for turn in range(TURNS):
        with rank.under(one):
            x = rank.tensor(value(1, turn) if rank.rank == 1 else [0.0] * COUNT)
            flying.append((x, rank.comm.broadcast(x, 1, async_op=True, tag="b", **how)))
        rank.step()
    with rank.under(other):
        for x, work in flying:
            work.wait()
            read += rank.read(x)
    return read


def gathers(rank: Any, **how: Any) -> Values:
    read = Values()
    for turn in range(TURNS):
        outs = [rank.tensor([0.0] * (COUNT + peer)) for peer in range(rank.size)]
        x = rank.tensor(value(rank.rank, turn, COUNT + rank.rank))
        work = rank.comm.all_gather_v(outs, x, async_op=True, tag="g", **how)
        del x
        rank.step()
        work.wait()
        for out in outs:
            read += rank.read(out)
        out = rank.tensor([0.0] * COUNT * rank.size)
        rank.comm.all_gather_into_tensor(out, rank.tensor(value(rank.rank, turn)), tag="i", **how)
        read += rank.read(out)
    return read


def scatters(rank: Any, **how: Any) -> Values:
    read = Values()
    for turn in range(TURNS):
        out = rank.tensor([0.0] * COUNT)
        parts = [rank.tensor(value(peer, turn)) for peer in range(rank.size)] if rank.rank == 1 else None
        rank.comm.scatter(out, parts, 1, tag="s", **how)
        rank.step()
        read += rank.read(out)
    return read


def messages(rank: Any, **how: Any) -> Values:
    """Pass messages in a ring, several of the same peer and tag in flight; NCCL has no tags."""
    how = how | {"backend": "gloo"}
    right, left = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    outs = [rank.tensor([0.0] * COUNT) for _ in range(TURNS)]
    works = []
    for turn, out in enumerate(outs):
        works.append(rank.comm.isend(rank.tensor(value(rank.rank, turn)), right, tag=3, **how))
        rank.step()
        works.append(rank.comm.irecv(out, left, tag=3, **how))
        rank.step()
    for work in works:
        work.wait()
    return [each for out in outs for each in rank.read(out)]


def _gathers_give(_: int, size: int) -> Values:
    return [
        each
        for turn in range(TURNS)
        for count in (lambda peer: COUNT + peer, lambda _: COUNT)
        for peer in range(size)
        for each in value(peer, turn, count(peer))
    ]


DELTA_PROGRAMS: Final[dict[Program, Callable[[int, int], Values]]] = {
    broadcasts: lambda *_: [each for turn in range(TURNS) for each in value(1, turn)],
    gathers: _gathers_give,
    scatters: lambda rank, _: [each for turn in range(TURNS) for each in value(rank, turn)],
    messages: lambda rank, size: [e for turn in range(TURNS) for e in value((rank - 1) % size, turn)],
}
"""Each with what a rank must read, by rank and number of ranks."""
