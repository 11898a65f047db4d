"""Programs with arrays of another library on a device, with their expected results.

The rules of `device_programs` apply; the library's arrays may be dropped at any time, and its streams are its
own. They run on simulated devices (`device_ranks`) and, with CuPy, on a GPU (`gpu_arrays`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from unit.devices.device_programs import COUNT, Program, Values, given, total

import mcr_plus as mcr


def _wait_for(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


def _poll(rank: Any, works: Iterable[Any]) -> None:
    for work in works:
        rank.poll(work)


def in_turn(rank: Any, *, states: bool = True, **how: Any) -> Values:
    """Make synchronous calls under two of the library's streams in turn, without torch's streams."""
    cupy, read = rank.library(states=states), Values()
    streams = [rank.stream(), rank.stream()]
    for salt in range(3):
        with cupy.under(streams[salt % 2]):
            x = cupy.array(given(rank.rank, salt))
            rank.comm.all_reduce(x, **how)
            rank.step()
            read += x.read()
            x.write(given(rank.rank))
            rank.comm.all_reduce(x, **how)
            read += x.read()
    return read


def in_flight(rank: Any, *, states: bool = True, **how: Any) -> Values:
    """Issue under one of the library's streams, wait and read under another."""
    cupy, read = rank.library(states=states), Values()
    one, other = rank.stream(), rank.stream()
    for salt in range(2):
        with cupy.under(one):
            arrays = [
                cupy.array(given(rank.rank, salt)),
                cupy.array(given(rank.rank, 1) * 2).view(2, COUNT).T,
            ]
            works = [rank.comm.all_reduce(x, async_op=True, **how) for x in arrays]
        rank.step()
        with cupy.under(other):
            _wait_for(reversed(works))
            read += [value for x in arrays for value in x.read()]
        with cupy.under(one):  # where the memory belongs
            _wait_for(works)
            del arrays, works
        rank.step()
    return read


def polled(rank: Any, **how: Any) -> Values:
    cupy = rank.library()
    x = cupy.array(given(rank.rank))
    work = rank.comm.all_reduce(x, async_op=True, **how)
    rank.step()
    rank.poll(work)
    with cupy.under(rank.stream()):
        read: Values = x.read()
    return read


def dropped(rank: Any, **how: Any) -> Values:
    """Drop arrays and handles while operations are in flight."""
    cupy = rank.library()
    works = [rank.comm.all_reduce(cupy.array(given(rank.rank)), async_op=True, **how) for _ in range(2)]
    rank.step()
    del works
    _poll(rank, list(rank.engine.in_flight))  # results are copied back to arrays that the program has not
    y = cupy.array(given(rank.rank, 1))
    rank.comm.all_reduce(y, **how)
    read: Values = y.read()
    out, x = cupy.array([0.0] * COUNT * rank.size), cupy.array(given(rank.rank))
    gathered = rank.comm.all_gather_into_tensor(out, x, async_op=True)
    del out, x, gathered
    rank.step()
    rank.comm.all_reduce(y, **how)
    del y
    rank.comm.opened.finish_arrays()  # as the group's end does
    return read


def with_tensors(rank: Any, **how: Any) -> Values:
    """Operate from an array to a tensor and back, with torch's current stream."""
    cupy, one, read = rank.library(), rank.stream(), Values()
    with rank.under(one):
        out = rank.tensor([0.0] * COUNT * rank.size)
        work = rank.comm.all_gather_into_tensor(out, cupy.array(given(rank.rank)), async_op=True, **how)
        rank.step()
        work.wait()
        read += rank.read(out)
        back = cupy.array([0.0] * COUNT)
        rank.comm.reduce_scatter_tensor(back, out, **how)
        out.zero_()  # after the operation, in torch's order
    return [*read, *back.read()]


def persistent(rank: Any, *, states: bool = True, **how: Any) -> Values:
    """Bind once, start and call under other streams of the library."""
    cupy, read = rank.library(states=states), Values()
    x = cupy.array(given(rank.rank))
    run = rank.comm.persistent("all_reduce", x, **how)
    for turn in range(4):
        cupy.go_on_with(rank.stream())
        x.write(given(rank.rank, turn))
        if turn % 2:
            run()
        else:
            work = run.start()
            rank.step()
            work.wait()
        read += x.read()
    return read


class Kinds:
    """Every operation once, synchronous or not."""

    def __init__(self, rank: Any, async_op: bool, how: dict[str, Any]) -> None:
        self.rank, self.comm, self.cupy = rank, rank.comm, rank.library()
        self.how = how | {"async_op": async_op}
        self.read = Values()

    def zeros(self, count: int) -> Any:
        return self.cupy.array([0.0] * count)

    def mine(self, count: int = COUNT, salt: int = 0) -> Any:
        return self.cupy.array(given(self.rank.rank, salt, count))

    def ends(self, call: Callable[..., Any], *arguments: Any, outputs: list[Any] | None = None) -> None:
        """Run a call; its outputs are the first argument unless they are given."""
        work = call(*arguments, **self.how)
        self.rank.step()
        if work is not None:
            work.wait()
        first = arguments[0]
        for out in outputs if outputs is not None else first if isinstance(first, list) else [first]:
            self.read += out.read()

    def run(self) -> Values:
        size, me, comm = self.rank.size, self.rank.rank, self.comm
        zeros, mine, ends = self.zeros, self.mine, self.ends
        root = me == 1
        ends(comm.all_reduce, mine())
        ends(comm.broadcast, mine(), 1)
        x = mine()
        ends(comm.reduce, x, 1, outputs=[x] if root else [])
        ends(comm.all_gather_into_tensor, zeros(COUNT * size), mine())
        ends(comm.all_gather, [zeros(COUNT) for _ in range(size)], mine())
        ends(comm.all_gather_v, [zeros(peer + 1) for peer in range(size)], mine(me + 1))
        ends(comm.reduce_scatter_tensor, zeros(COUNT), mine(COUNT * size))
        ends(comm.reduce_scatter, zeros(COUNT), [mine(COUNT, peer) for peer in range(size)])
        ends(comm.reduce_scatter_v, zeros(me + 1), [mine(peer + 1) for peer in range(size)])
        ends(comm.all_to_all_single, zeros(COUNT * size), mine(COUNT * size))
        rows, parts = [me + 1] * size, [peer + 1 for peer in range(size)]
        ends(comm.all_to_all_single, zeros(sum(rows)), mine(sum(parts)), rows, parts)
        ends(comm.all_to_all, [zeros(me + 1) for _ in range(size)], [mine(p + 1, p) for p in range(size)])
        every = [zeros(COUNT) for _ in range(size)] if root else None
        ends(comm.gather, mine(), every, 1, outputs=every or [])
        every = [zeros(peer + 1) for peer in range(size)] if root else None
        ends(comm.gather_v, mine(me + 1), every, 1, outputs=every or [])
        ends(comm.scatter, zeros(COUNT), [mine(COUNT, peer) for peer in range(size)] if root else None, 1)
        ends(comm.scatter_v, zeros(me + 1), [mine(p + 1) for p in range(size)] if root else None, 1)
        ends(comm.all_reduce_coalesced, [mine(3), mine(5)])
        ends(comm.all_gather_coalesced, [zeros(3 * size), zeros(size)], [mine(3), mine(1)])
        ends(comm.reduce_scatter_coalesced, [zeros(3), zeros(1)], [mine(3 * size), mine(size)])
        self.messages()
        return self.read

    def messages(self) -> None:
        """Pass messages in rings, and a batch; every rank sends before it receives."""
        right, left = ((self.rank.rank + by) % self.rank.size for by in (1, -1))
        comm, out = self.comm, [self.zeros(COUNT) for _ in range(2)]
        sent = comm.isend(self.mine(), right)
        received = comm.irecv(out[0], left)
        self.rank.step()
        received.wait()
        sent.wait()
        batch = [mcr.P2POp(mcr.isend, self.mine(salt=1), right), mcr.P2POp(mcr.irecv, out[1], left)]
        for work in comm.batch_isend_irecv(batch):
            work.wait()
        for each in out:
            self.read += each.read()


def kinds(rank: Any, **how: Any) -> Values:
    return Kinds(rank, True, how).run()


def kinds_in_turn(rank: Any, **how: Any) -> Values:
    return Kinds(rank, False, how).run()


def kinds_give(rank: int, size: int) -> Values:
    """Return plain sums and slices of the ranks' inputs."""

    def everyone(count: int = COUNT, salt: int = 0) -> list[Values]:
        return [given(sender, salt, count) for sender in range(size)]

    def joined(lists: list[Values]) -> Values:
        return [value for values in lists for value in values]

    def share(values: Values, sizes: list[int], at: int) -> Values:
        begin = sum(sizes[:at])
        return values[begin : begin + sizes[at]]

    ranks, left = range(size), (rank - 1) % size
    equal, growing = [COUNT] * size, [peer + 1 for peer in ranks]
    return joined(
        [
            total(size),
            given(1),
            total(size) if rank == 1 else [],
            *everyone(),
            *everyone(),
            *(given(sender, 0, sender + 1) for sender in ranks),
            share(total(size, 0, COUNT * size), equal, rank),
            total(size, rank),
            total(size, 0, rank + 1),
            *(share(each, equal, rank) for each in everyone(COUNT * size)),
            *(share(each, growing, rank) for each in everyone(sum(growing))),
            *everyone(rank + 1, rank),
            *(everyone() if rank == 1 else []),
            *((given(sender, 0, sender + 1) for sender in ranks) if rank == 1 else []),
            given(1, rank),
            given(1, 0, rank + 1),
            total(size, 0, 3),
            total(size, 0, 5),
            *everyone(3),
            *everyone(1),
            share(total(size, 0, 3 * size), [3] * size, rank),
            share(total(size, 0, size), [1] * size, rank),
            given(left),
            given(left, 1),
        ]
    )


def _with_tensors_gives(rank: int, size: int) -> Values:
    gathered = [value for sender in range(size) for value in given(sender)]
    return gathered + [size * value for value in given(rank)]


def _named(name: str, program: Program) -> Program:
    program.__name__ = name
    return program


def _in_turn_gives(_: int, size: int) -> Values:
    return [value for salt in range(3) for each in (salt, 0) for value in total(size, each)]


def _in_flight_gives(_: int, size: int) -> Values:
    columns = [value for value in total(size, 1) for _ in range(2)]
    return [value for salt in range(2) for values in (total(size, salt), columns) for value in values]


def _persistent_gives(_: int, size: int) -> Values:
    return [value for turn in range(4) for value in total(size, turn)]


ARRAY_PROGRAMS: Final[dict[Program, Callable[[int, int], Values]]] = {
    in_turn: _in_turn_gives,
    _named("in_turn_unstated", partial(in_turn, states=False)): _in_turn_gives,
    in_flight: _in_flight_gives,
    _named("in_flight_unstated", partial(in_flight, states=False)): _in_flight_gives,
    polled: lambda _, size: total(size),
    dropped: lambda _, size: total(size, 1),
    with_tensors: _with_tensors_gives,
    persistent: _persistent_gives,
    _named("persistent_unstated", partial(persistent, states=False)): _persistent_gives,
    kinds: kinds_give,
    kinds_in_turn: kinds_give,
}
"""Each with what a rank must read, by rank and number of ranks."""
