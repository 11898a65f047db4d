"""Programs on simulated devices, with their expected results: each uses streams in a permitted way.

A program returns the values that it has read. Inputs are small integers that differ from rank to rank, so
that sums are exact, in bfloat16 as well. As in torch, a rank may drop a tensor in use by another stream only
after `record_stream`; every other use of the memory is the library's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

from unit.devices.device_ranks import Rank

from mcr_plus.core.message import Message, Signature
from mcr_plus.errors import BackendError

COUNT: Final = 5
MESSAGES: Final = (7, 1, 5)  # sizes
ROWS: Final = 16  # of a matrix that powersgd takes
Values = list[float]
Options = dict[str, Any]


def given(rank: int, salt: int = 0, count: int = COUNT) -> Values:
    """Return a rank's input."""
    return [float((rank + 1) * (index + 1) + salt) for index in range(count)]


def total(size: int, salt: int = 0, count: int = COUNT) -> Values:
    """Return the sum over ranks."""
    return [sum(column) for column in zip(*(given(rank, salt, count) for rank in range(size)), strict=True)]


# -- programs of a rank, and their expected results --------------------------------------------------


def one(rank: Rank, **how: Any) -> Values:
    x = rank.tensor(given(rank.rank))
    work = rank.comm.all_reduce(x, async_op=True, **how)
    rank.step()
    work.wait()
    return rank.read(x)


def two(rank: Rank, **how: Any) -> Values:
    """Have two operations in flight, one of them polled."""
    x, y = rank.tensor(given(rank.rank)), rank.tensor(given(rank.rank, 1))
    first = rank.comm.all_reduce(x, async_op=True, **how)
    rank.step()
    second = rank.comm.all_reduce(y, async_op=True, **how)
    rank.step()
    rank.poll(first)
    second.wait()
    first.wait()
    return rank.read(x) + rank.read(y)


def libraries(rank: Rank, **how: Any) -> Values:
    """Use two libraries at a time, waited for in the other order."""
    x, y = rank.tensor(given(rank.rank)), rank.tensor(given(rank.rank, 1))
    first = rank.comm.all_reduce(x, async_op=True, backend="nccl", **how)
    rank.step()
    second = rank.comm.all_reduce(y, async_op=True, backend="gloo", **how)
    rank.step()
    second.wait()
    rank.step()
    first.wait()
    return rank.read(x) + rank.read(y)


def four(rank: Rank, **how: Any) -> Values:
    """Have two operations in flight on each of two libraries."""
    tensors = [rank.tensor(given(rank.rank, salt)) for salt in range(4)]
    works = [
        rank.comm.all_reduce(x, async_op=True, backend="nccl" if salt % 2 else "gloo", **how)
        for salt, x in enumerate(tensors)
    ]
    rank.step()
    for work in works:
        work.wait()
    return [value for x in tensors for value in rank.read(x)]


def in_turn(rank: Rank, **how: Any) -> Values:
    read = []
    for salt in range(3):
        x = rank.tensor(given(rank.rank, salt))
        rank.comm.all_reduce(x, **how)
        rank.step()
        read += rank.read(x)
    return read


def in_flight(rank: Rank, **how: Any) -> Values:
    """Have several operations in flight; wait for them in their order."""
    tensors = [rank.tensor(given(rank.rank, salt)) for salt in range(3)]
    works = []
    for x in tensors:
        works.append(rank.comm.all_reduce(x, async_op=True, **how))
        rank.step()
    for work in works:
        work.wait()
        rank.step()
    return [value for x in tensors for value in rank.read(x)]


def other_streams(rank: Rank, **how: Any) -> Values:
    """Issue on one stream, wait and read on another, and issue the next operation there."""
    one, other = rank.stream(), rank.stream()
    read = []
    for salt in range(3):
        with rank.under(one):
            x = rank.tensor(given(rank.rank, salt))
            work = rank.comm.all_reduce(x, async_op=True, **how)
        rank.step()
        with rank.under(other):
            work.wait()
            read += rank.read(x)
            x.record_stream(other)
        rank.step()
        one, other = other, one
    return read


def in_flight_on_streams(rank: Rank, **how: Any) -> Values:
    """Have several operations in flight, each issued and waited for on its own stream."""
    streams = [rank.stream() for _ in range(3)]
    tensors, works = [], []
    for salt, stream in enumerate(streams):
        with rank.under(stream):
            tensors.append(rank.tensor(given(rank.rank, salt)))
            works.append(rank.comm.all_reduce(tensors[-1], async_op=True, **how))
        rank.step()
    read = []
    for x, work, stream in zip(tensors, works, streams, strict=True):
        with rank.under(stream):
            work.wait()
            read += rank.read(x)
        rank.step()
    return read


def polled(rank: Rank, **how: Any) -> Values:
    """Poll under a stream, then wait under another."""
    one = rank.stream()
    x, y = rank.tensor(given(rank.rank)), rank.tensor(given(rank.rank, 1))
    works = [rank.comm.all_reduce(each, async_op=True, **how) for each in (x, y)]
    rank.step()
    with rank.under(one):
        for work in works:
            rank.poll(work)
    for work in works:
        work.wait()
    return rank.read(x) + rank.read(y)


def dropped(rank: Rank, **how: Any) -> Values:
    """Drop tensors and handles while operations are in flight."""
    x = rank.tensor(given(rank.rank))
    work = rank.comm.all_reduce(x, async_op=True, **how)
    del x
    rank.step()
    y = rank.tensor(given(rank.rank, 1))
    other = rank.comm.all_reduce(y, async_op=True, **how)
    rank.step()
    z = rank.tensor(given(rank.rank))
    out = rank.tensor([0.0] * COUNT * rank.size)
    gathered = rank.comm.all_gather_into_tensor(out, z, async_op=True)
    del out, z
    rank.step()
    work.wait()
    del work
    other.wait()
    gathered.wait()
    del gathered
    return rank.read(y)


def strided(rank: Rank, **how: Any) -> Values:
    """Use tensors that are packed first and copied out at the end, waited for on two streams."""
    one, other = rank.stream(), rank.stream()
    read = []
    for salt in range(2):
        with rank.under(one):
            x = rank.tensor(given(rank.rank, salt) * 2).view(2, COUNT).t()
            work = rank.comm.all_reduce(x, async_op=True, **how)
        rank.step()
        with rank.under(other):
            work.wait()
        rank.step()
        with rank.under(one):
            work.wait()
            read += rank.read(x.t().reshape(-1))
        del x, work
        one, other = other, one
    return read


def kinds(rank: Rank, **how: Any) -> Values:
    size, me, comm, read = rank.size, rank.rank, rank.comm, Values()

    def ends(work: Any, *outputs: Any) -> None:
        rank.step()
        work.wait()
        for output in outputs:
            read.extend(rank.read(output))

    def zeros(count: int) -> Any:
        return rank.tensor([0.0] * count)

    x = rank.tensor(given(me))
    ends(comm.broadcast(x, 1, async_op=True, **how), x)
    out = zeros(COUNT * size)
    ends(comm.all_gather_into_tensor(out, rank.tensor(given(me)), async_op=True, **how), out)
    out = zeros(COUNT)
    ends(
        comm.reduce_scatter_tensor(out, rank.tensor(given(me, count=COUNT * size)), async_op=True, **how), out
    )
    out = zeros(COUNT * size)
    ends(comm.all_to_all_single(out, rank.tensor(given(me, count=COUNT * size)), async_op=True, **how), out)
    rows = [rank.tensor(given(me, peer, peer + 1)) for peer in range(size)]
    outs = [zeros(me + 1) for _ in range(size)]
    ends(comm.all_to_all(outs, rows, async_op=True, **how), *outs)
    comm.barrier()
    return read


def kinds_give(rank: int, size: int) -> Values:
    everyone = [given(sender, count=COUNT * size) for sender in range(size)]
    mine = slice(rank * COUNT, (rank + 1) * COUNT)
    return [
        *given(1),
        *(value for sender in range(size) for value in given(sender)),
        *total(size, count=COUNT * size)[mine],
        *(value for values in everyone for value in values[mine]),
        *(value for sender in range(size) for value in given(sender, rank, rank + 1)),
    ]


def messages(rank: Rank, **how: Any) -> Values:
    """Send and receive in a ring; every rank sends before it receives."""
    right, left = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    x, out = rank.tensor(given(rank.rank)), rank.tensor([0.0] * COUNT)
    sent = rank.comm.isend(x, right, **how)
    rank.step()
    received = rank.comm.irecv(out, left, **how)
    rank.step()
    received.wait()
    sent.wait()
    return rank.read(out)


def in_order(rank: Rank, **how: Any) -> Values:
    """Messages of one peer and tag arrive in the order of their sends, though the first is the largest."""
    right, left = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    outs = [rank.tensor([0.0] * count) for count in MESSAGES]
    works = []
    for count, out in zip(MESSAGES, outs, strict=True):
        works.append(rank.comm.isend(rank.tensor(given(rank.rank, 0, count)), right, **how))
        works.append(rank.comm.irecv(out, left, **how))
        rank.step()
    for work in works:
        work.wait()
    return [value for out in outs for value in rank.read(out)]


def coalesced(rank: Rank, **how: Any) -> Values:
    """Pack on one stream, wait on another; the buffer is reused on the first."""
    one, other = rank.stream(), rank.stream()
    read = []
    for salt in range(3):
        with rank.under(one):
            tensors = [rank.tensor(given(rank.rank, salt, count)) for count in (3, 5, 1)]
            work = rank.comm.all_reduce_coalesced(tensors, async_op=True, **how)
        rank.step()
        with rank.under(other):
            if salt == 2:
                rank.poll(work)
            work.wait()
            for x in tensors:
                x.mul_(1)
                x.record_stream(other)
            read.append(tensors)
        rank.step()
    with rank.under(other):
        return [value for tensors in read for x in tensors for value in rank.read(x)]


def reused(rank: Rank, **how: Any) -> Values:
    """Send buckets under one stream and wait under another: their memory is reused."""
    one, other = rank.stream(), rank.stream()
    read = []
    for salt in range(3):
        with rank.under(one):
            tensors = [rank.tensor(given(rank.rank, salt, count)) for count in (5, 3)]
            works = [rank.comm.all_reduce(x, async_op=True, **how) for x in tensors]
            rank.comm.flush()
        rank.step()
        with rank.under(other):
            for x, work in zip(tensors, works, strict=True):
                work.wait()
                x.mul_(1)
                x.record_stream(other)
            read.append(tensors)
        rank.step()
    with rank.under(other):
        return [value for tensors in read for x in tensors for value in rank.read(x)]


def buckets(rank: Rank, **how: Any) -> Values:
    """Fill a bucket from two streams; one polls it, the other waits; its memory is reused."""
    one, other = rank.stream(), rank.stream()
    read = []
    for salt in range(3):
        with rank.under(one):
            x = rank.tensor(given(rank.rank, salt))
            first = rank.comm.all_reduce(x, async_op=True, **how)
        rank.step()
        with rank.under(other):
            y = rank.tensor(given(rank.rank, salt, 3))
            second = rank.comm.all_reduce(y, async_op=True, **how)
        rank.step()
        with rank.under(one):
            if salt:
                rank.poll(first)
            first.wait()
            read += rank.read(x)
        rank.step()
        with rank.under(other):
            second.wait()
            read += rank.read(y)
        one, other = other, one
    return read


def persistent(rank: Rank, **how: Any) -> Values:
    x = rank.tensor(given(rank.rank))
    run = rank.comm.persistent("all_reduce", x, **how)
    read = []
    for _ in range(3):
        x.copy_(rank.tensor(given(rank.rank)))
        work = run.start()
        rank.step()
        work.wait()
        read += rank.read(x)
    return read


def hook(rank: Rank, **how: Any) -> Values:
    """Act like the hooks of gradients: buckets with state between calls, all in flight before the waits."""
    read = []
    keyed: Options = {"parts": ((COUNT,),)} if how.get("compress") else {}
    for salt in range(3):
        tensors = [rank.tensor(given(rank.rank, salt + each)) for each in range(2)]
        works = [
            rank.comm.send_bucket(
                x,
                "SUM",
                members=1,
                parts=((COUNT,),) if keyed else None,
                key=f"{each}" if keyed else None,
                **how,
            )
            for each, x in enumerate(tensors)
        ]
        rank.step()
        for work in works:
            work.wait()
        for x in tensors:
            read += rank.read(x)
    return read


def matrices(rank: Rank, **how: Any) -> Values:
    """Have two calls in flight on one state, like powersgd."""
    tensors = [rank.tensor([given(rank.rank, salt, ROWS)] * ROWS) for salt in range(2)]
    works = []
    for x in tensors:
        works.append(rank.comm.all_reduce(x, async_op=True, **how))
        rank.step()
    for work in works:
        work.wait()
    return [value for x in tensors for value in rank.read(x.view(-1))]


def following(rank: Rank, **how: Any) -> Values:
    """Let functions follow an operation, one of them added when the operation may be done already."""
    one = rank.stream()
    x, double, square = (rank.tensor(values) for values in (given(rank.rank), [0.0] * COUNT, [0.0] * COUNT))
    work = rank.comm.all_reduce(x, async_op=True, **how)
    two = rank.tensor([2.0] * COUNT)
    work.then(lambda: double.copy_(x * two))
    rank.step()
    with rank.under(one):
        rank.poll(work)
    work.then(lambda: square.copy_(x * x))
    work.wait()
    return rank.read(double) + rank.read(square)


def following_a_wait(rank: Rank, **how: Any) -> Values:
    """Run a second function on another stream than the one that ran the first at its wait."""
    one = rank.stream()
    x, double, square = (rank.tensor(values) for values in (given(rank.rank), [0.0] * COUNT, [0.0] * COUNT))
    work = rank.comm.all_reduce(x, async_op=True, **how)
    work.then(lambda: double.copy_(x * 2))
    rank.step()
    with rank.under(one):
        work.wait()
    work.then(lambda: square.copy_(x * x))
    work.wait()
    return rank.read(double) + rank.read(square)


def let_go(rank: Rank, **how: Any) -> Values:
    """Copy results out on another stream than the issuing one; drop each handle at once."""
    one, other = rank.stream(), rank.stream()
    tensors, works = [], []
    with rank.under(one):
        for salt in range(3):
            tensors.append(rank.tensor(given(rank.rank, salt) * 2).view(2, COUNT).t())
            works.append(rank.comm.all_reduce(tensors[-1], async_op=True, **how))
    rank.step()
    with rank.under(other):
        while works:
            works.pop().wait()
        for x in tensors:
            x.record_stream(other)
        return [value for x in tensors for value in rank.read(x.t().reshape(-1))]


def failing(rank: Rank, **how: Any) -> Values:
    """The host library fails; later operations have begun with tensors that the program drops."""
    rank.job.fails = 1
    works = []
    with contextlib.suppress(BackendError):
        for salt in range(2):
            x = rank.tensor(given(rank.rank, salt))
            works.append(rank.comm.all_reduce(x, async_op=True, **how))
            del x
        for work in works:
            work.wait()
    works.clear()
    return given(rank.rank)


def bare(rank: Rank) -> Values:
    """A channel of NCCL alone: it may outlive its tensors, as when an operation has failed."""
    x = rank.tensor(given(rank.rank))
    signature = Signature("all_reduce", x.dtype, (COUNT,), x.nbytes, "world", rank.size, "cuda", "SUM")
    start = rank.comm.opened.runtime.channels["nccl"].channel.bind(signature)
    poll = start(Message(signature, (x,), (x,)))
    del x
    rank.step()
    while not poll():
        rank.job.yields(paused=True)
    return given(rank.rank)


def _sums(*salts: int) -> Callable[[int, int], Values]:
    return lambda _, size: [value for salt in salts for value in total(size, salt)]


Program = Callable[..., Values]
PROGRAMS: Final[dict[Program, Callable[[int, int], Values]]] = {
    one: _sums(0),
    two: _sums(0, 1),
    libraries: _sums(0, 1),
    four: _sums(0, 1, 2, 3),
    in_turn: _sums(0, 1, 2),
    in_flight: _sums(0, 1, 2),
    other_streams: _sums(0, 1, 2),
    in_flight_on_streams: _sums(0, 1, 2),
    polled: _sums(0, 1),
    dropped: _sums(1),
    strided: lambda _, size: [v for salt in range(2) for _ in range(2) for v in total(size, salt)],
    kinds: kinds_give,
    messages: lambda rank, size: given((rank - 1) % size),
    in_order: lambda rank, size: [v for n in MESSAGES for v in given((rank - 1) % size, 0, n)],
    coalesced: lambda _, size: [v for salt in range(3) for n in (3, 5, 1) for v in total(size, salt, n)],
    buckets: lambda _, size: [v for salt in range(3) for n in (5, 3) for v in total(size, salt, n)],
    reused: lambda _, size: [v for salt in range(3) for n in (5, 3) for v in total(size, salt, n)],
    persistent: _sums(0, 0, 0),
    hook: _sums(0, 1, 1, 2, 2, 3),
    matrices: lambda _, size: [v for salt in range(2) for v in total(size, salt, ROWS) * ROWS],
    following: lambda _, size: [2 * v for v in total(size)] + [v * v for v in total(size)],
    following_a_wait: lambda _, size: [2 * v for v in total(size)] + [v * v for v in total(size)],
    let_go: lambda _, size: [v for salt in range(3) for _ in range(2) for v in total(size, salt)],
    failing: lambda rank, _: given(rank),
    bare: lambda rank, _: given(rank),
}
"""Each with what a rank must read, by rank and number of ranks."""
