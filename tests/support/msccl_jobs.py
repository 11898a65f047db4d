"""Programs of ranks for the tests of the interpreter; each returns its failures as text."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final

import msccl_samples as samples
import torch
from leftovers import lasting
from ranks import own_rank

from mcr_plus.backends.shm import collectives_state, interpreter_kernels, segment
from mcr_plus.backends.shm.collectives import DirectCollectives, begin_and_advance
from mcr_plus.backends.shm.interpreter import Interpreter
from mcr_plus.backends.shm.queue import WorkQueue
from mcr_plus.backends.shm.reductions import ReduceKernels, kernels_for
from mcr_plus.backends.shm.segment import Segment, Shape, open_segment
from mcr_plus.core.c10d import PrefixStore, Store, TCPStore
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import FLOATS, INTEGERS, REDUCIBLE, ReduceOp
from mcr_plus.errors import BackendUnavailable

DTYPES: Final = (*FLOATS, *INTEGERS, torch.bool)
OPS: Final[tuple[ReduceOp, ...]] = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
SIZES: Final = (0, 1, 7, 64, 1000, 9973)
PATIENCE: Final = 20.0

Call = Callable[[torch.Tensor, torch.Tensor], None]
"""(source, target): run an operation to its end."""


def connect() -> Store:
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        False,
        timedelta(seconds=60),
    )


def small(ranks: int) -> Shape:
    """Return a segment so small that large operations take many slots."""
    return Shape(ranks, channels=2, depth=2, slot=1024, ring=2, area=1536 * ranks)


def wait(poll: Callable[[], bool], patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not poll():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0)


class Rank:
    """One rank with everything it needs to run operations."""

    def __init__(self, memory: Segment) -> None:
        self.segment, self.me, self.ranks = memory, memory.rank, memory.shape.ranks
        self.queue = WorkQueue()
        self.direct = {
            way: DirectCollectives(memory, whole=512, streamed=4096, way=number)
            for way, number in DIRECT_WAYS.items()
        }
        ranks = self.ranks
        self.reducing = [samples.ring(ranks), samples.all_pairs(ranks), samples.through_scratch(ranks)]
        everything = (
            *self.reducing,
            samples.gathering(ranks),
            samples.exchange(ranks),
            samples.scattering(ranks),
            *(samples.chain(ranks, root) for root in range(ranks)),
        )
        self.interpreters = {(each.name, each.root): Interpreter(memory, each) for each in everything}

    def run_direct(
        self,
        kind: int,
        source: torch.Tensor,
        target: torch.Tensor,
        count: int,
        root: int = 0,
        kernels: ReduceKernels | None = None,
        way: str = "direct",
    ) -> None:
        state = self.direct[way].bind(kind, count, source.element_size(), kernels or ReduceKernels(), root)
        wait(self.queue.bind(*begin_and_advance(), state)(source.data_ptr(), target.data_ptr(), None))

    def run(
        self,
        name: str,
        source: torch.Tensor,
        target: torch.Tensor,
        count: int,
        root: int = 0,
        kernels: ReduceKernels | None = None,
        in_place: bool = False,
    ) -> None:
        interpreter = self.interpreters[name, root if name == "chain" else 0]
        state = interpreter.bind(count, source.element_size(), kernels or ReduceKernels(), in_place=in_place)
        wait(
            self.queue.bind(interpreter_kernels.begin, interpreter_kernels.advance, state)(
                source.data_ptr(), target.data_ptr(), None
            )
        )

    def ways(self, kind: str) -> list[str]:
        """Return the names of the implementations of an operation."""
        names = {
            "all_reduce": [each.name for each in self.reducing],
            "all_gather": ["gathering"],
            "all_to_all": ["exchange"],
            "reduce_scatter": ["scattering"],
            "broadcast": ["chain"],
        }
        return [*DIRECT_WAYS, *names.get(kind, [])]

    def do(
        self,
        way: str,
        kind: str,
        source: torch.Tensor,
        target: torch.Tensor,
        count: int,
        *,
        root: int = 0,
        kernels: ReduceKernels | None = None,
        in_place: bool = False,
    ) -> None:
        if way in DIRECT_WAYS:
            self.run_direct(KINDS[kind], source, target, count, root, kernels, way)
        else:
            self.run(way, source, target, count, root, kernels, in_place)


DIRECT_WAYS: Final = {
    "direct": None,
    "copied": collectives_state.COPIED,
    "past caches": collectives_state.PAST_CACHES,
    "in place": collectives_state.IN_PLACE,
}
KINDS: Final = {
    "all_reduce": collectives_state.ALL_REDUCE,
    "all_gather": collectives_state.ALL_GATHER,
    "all_to_all": collectives_state.ALL_TO_ALL,
    "reduce_scatter": collectives_state.REDUCE_SCATTER,
    "broadcast": collectives_state.BROADCAST,
    "reduce": collectives_state.REDUCE,
    "gather": collectives_state.GATHER,
    "scatter": collectives_state.SCATTER,
}
REDUCES: Final = ("all_reduce", "reduce_scatter", "reduce")


def drawn(seed: int, rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the input of `rank`, which every rank can draw."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, (elements,), generator=generator).bool()
    if dtype.is_floating_point:
        return (torch.rand(elements, generator=generator) * 2 - 0.5).to(dtype)
    return torch.randint(-128, 128, (elements,), generator=generator).to(dtype)


_COMBINED: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def combined(inputs: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Return the result in float64 for floats, exact for everything else."""
    stack = torch.stack(inputs)
    if stack.dtype is torch.bool:
        logic = {"SUM": "or", "MAX": "or", "BOR": "or", "BXOR": "xor"}.get(op, "and")
        return {"or": stack.any(0), "and": stack.all(0), "xor": stack.sum(0) % 2 == 1}[logic]
    if stack.dtype.is_floating_point:
        stack = stack.double()
    result = stack[0]
    for each in stack[1:]:
        result = _COMBINED[op](result, each)
    if op != "AVG":
        return result
    return torch.div(result, len(inputs), rounding_mode=None if result.is_floating_point() else "trunc")


def layout(kind: str, ranks: int) -> tuple[int, int]:
    """Return the blocks of input and output."""
    return {
        "all_gather": (1, ranks), "gather": (1, ranks), "all_to_all": (ranks, ranks),
        "reduce_scatter": (ranks, 1), "scatter": (ranks, 1),
    }.get(kind, (1, 1))  # fmt: skip


def expected(kind: str, inputs: list[torch.Tensor], me: int, root: int, op: ReduceOp) -> torch.Tensor | None:
    """Return the expected output of this rank, None without one."""
    block = len(inputs[0]) // len(inputs)
    mine = slice(me * block, (me + 1) * block)
    if kind == "all_reduce" or (kind == "reduce" and me == root):
        return combined(inputs, op)
    if kind == "reduce_scatter":
        return combined([each[mine] for each in inputs], op)
    if kind == "all_gather" or (kind == "gather" and me == root):
        return torch.cat(inputs)
    if kind == "all_to_all":
        return torch.cat([each[mine] for each in inputs])
    if kind == "scatter":
        return inputs[root][mine]
    return inputs[root] if kind == "broadcast" else None


def close(found: torch.Tensor, wanted: torch.Tensor, ranks: int) -> bool:
    if not found.dtype.is_floating_point:
        return torch.equal(found, wanted)
    slack = torch.finfo(found.dtype).eps * ranks
    return torch.allclose(found.double(), wanted.double(), rtol=slack, atol=slack, equal_nan=True)


def one(
    rank: Rank,
    way: str,
    kind: str,
    count: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    op: ReduceOp = "SUM",
    root: int = 0,
    in_place: bool = False,
    nan: bool = False,
) -> Iterator[str]:
    """Run one operation and yield its failures."""
    blocks, results = layout(kind, rank.ranks)
    inputs = [drawn(seed, each, count * blocks, dtype) for each in range(rank.ranks)]
    if nan and count:
        inputs[seed % rank.ranks][seed % count] = torch.nan
    wanted = expected(kind, inputs, rank.me, root, op)
    source = inputs[rank.me].clone()
    target = torch.zeros(count * results, dtype=dtype)
    mine = slice(rank.me * count, (rank.me + 1) * count)
    if in_place or kind == "broadcast":
        if kind in ("all_gather", "gather"):
            target[mine] = source
            source = target[mine]
        elif kind in ("reduce_scatter", "scatter"):
            target = source[mine]
        else:
            target = source
    kernels = kernels_for(dtype, op) if kind in REDUCES else None
    place = in_place or kind == "broadcast"
    rank.do(way, kind, source, target, count, root=root, kernels=kernels, in_place=place)
    if wanted is not None and not close(target, wanted, rank.ranks):
        yield f"{way} {kind} {op} {dtype} count={count} root={root} in_place={in_place} seed={seed}"
    if not place and not torch.equal(source.nan_to_num(), inputs[rank.me].nan_to_num()):
        yield f"{way} {kind} {dtype} count={count}: the input has changed"


def every_operation(rank: Rank) -> Iterator[str]:
    for kind in KINDS:
        for way in rank.ways(kind):
            for seed, count in enumerate(SIZES):
                for in_place in (False, True):
                    yield from one(
                        rank, way, kind, count, seed=seed, root=seed % rank.ranks, in_place=in_place
                    )


def every_dtype(rank: Rank) -> Iterator[str]:
    cases: list[tuple[torch.dtype, ReduceOp]] = [
        (dtype, op) for op in OPS for dtype in DTYPES if dtype in REDUCIBLE[op]
    ]
    for seed, (dtype, op) in enumerate(cases):
        for way in rank.ways("all_reduce"):
            for nan in {False, dtype.is_floating_point}:
                yield from one(rank, way, "all_reduce", 203, seed=seed, dtype=dtype, op=op, nan=nan)
        yield from one(rank, "direct", "reduce_scatter", 131, seed=seed, dtype=dtype, op=op)
        yield from one(rank, "in place", "all_reduce", 4099, seed=seed, dtype=dtype, op=op)


def many_in_a_row(rank: Rank) -> Iterator[str]:
    """Run operations of changing sizes and kinds; one rank is often late."""
    agreed = random.Random(7)
    for seed in range(300):
        kind = agreed.choice(list(KINDS))
        way, root = agreed.choice(rank.ways(kind)), agreed.randrange(rank.ranks)
        count = int(2 ** agreed.uniform(0, 14))
        if rank.me == 1 and seed % 8 == 0:
            time.sleep(0.003)
        yield from one(rank, way, kind, count, seed=seed, root=root)


def same_bits(rank: Rank) -> Iterator[str]:
    for seed, count in enumerate((3, 100, 5000)):
        for way in rank.ways("all_reduce"):
            source = drawn(seed, rank.me, count, torch.float32)
            result, everywhere = torch.empty_like(source), torch.empty(rank.ranks * count)
            rank.do(way, "all_reduce", source, result, count, kernels=kernels_for(torch.float32, "SUM"))
            rank.run_direct(collectives_state.ALL_GATHER, result, everywhere, count)
            bits = everywhere.view(torch.int32).view(rank.ranks, count)
            if not bool((bits == bits[0]).all()):
                yield f"{way}: ranks hold different bits of {count} elements"


def in_flight(rank: Rank) -> Iterator[str]:
    """Run several operations at once, polled in reverse."""
    kernels, count = kernels_for(torch.int64, "SUM"), 700
    buffers = [torch.full((count,), rank.me + index) for index in range(6)]
    polls = []
    for index, buffer in enumerate(buffers):
        at = buffer.data_ptr()
        if index % 2:
            state = rank.direct["direct"].bind(collectives_state.ALL_REDUCE, count, 8, kernels)
            polls.append(rank.queue.bind(*begin_and_advance(), state)(at, at, None))
        else:
            state = rank.interpreters["ring", 0].bind(count, 8, kernels, in_place=True)
            polls.append(
                rank.queue.bind(interpreter_kernels.begin, interpreter_kernels.advance, state)(at, at, None)
            )
    for poll in reversed(polls):
        wait(poll)
    total = rank.ranks * (rank.ranks - 1) // 2
    for index, buffer in enumerate(buffers):
        if not bool((buffer == total + index * rank.ranks).all()):
            yield f"operation {index} of those in flight at once"


def exam() -> list[str]:
    """Run all of the above on one segment, so that each finds the counters of the previous ones."""
    me, ranks = own_rank(), int(os.environ["WORLD_SIZE"])
    group = Group("exam", tuple(range(ranks)), me)
    begin_and_advance()
    interpreter_kernels.prepare()
    rank = Rank(open_segment(connect(), group, small(ranks), 60))
    parts = (every_operation, every_dtype, many_in_a_row, same_bits, in_flight)
    failures = [failure for part in parts for failure in part(rank)]
    rank.segment.close()
    return failures


def too_large() -> list[str]:
    """Check that every rank gets the same error."""
    me, ranks = own_rank(), int(os.environ["WORLD_SIZE"])
    shape = Shape(ranks, slot=1 << 44)
    try:
        open_segment(connect(), Group("huge", tuple(range(ranks)), me), shape, 60)
    except BackendUnavailable as error:
        return [str(error)]
    return []


def left_behind() -> list[str]:
    """Return the segment files that remain."""
    return lasting(lambda: [str(path) for path, _, _ in segment._files()])


def _be_killed(port: int, trial: int, me: int, ranks: int) -> None:
    """Run operations until a peer is gone."""
    group = Group("g", tuple(range(ranks)), me)
    # Not a `FileStore`: its readers wait without end for the rest of a record whose writer was killed.
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=0.5), wait_for_workers=False)
    memory = open_segment(PrefixStore(str(trial), store), group, small(ranks), 0.5)
    queue, value = WorkQueue(), torch.ones(2000)
    kernels, at = kernels_for(torch.float32, "MAX"), value.data_ptr()
    ways = [DirectCollectives(memory, way=way) for way in (None, collectives_state.IN_PLACE)]
    states = [each.bind(collectives_state.ALL_REDUCE, 2000, 4, kernels) for each in ways]
    ring = Interpreter(memory, samples.ring(ranks)).bind(2000, 4, kernels, in_place=True)
    while True:
        for state in states:
            wait(queue.bind(*begin_and_advance(), state)(at, at, None), 0.2)
        wait(queue.bind(interpreter_kernels.begin, interpreter_kernels.advance, ring)(at, at, None), 0.2)


def killed(times: int, ranks: int = 3) -> list[str]:
    """Kill one of some processes at a random moment, again and again."""
    # Compile before the first fork, not in every child.
    begin_and_advance()
    interpreter_kernels.prepare()
    kernels_for(torch.float32, "MAX")
    chance, problems = random.Random(11), []
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for trial in range(times):
        children = [_forked(_be_killed, server.port, trial, me, ranks) for me in range(ranks)]
        time.sleep(chance.choice([0.0, 0.002, 0.02, 0.1]) + chance.uniform(0, 0.01))
        victim = chance.choice(children)
        os.kill(victim, signal.SIGKILL)
        problems += [f"trial {trial}: a survivor hangs"] * len(hanging(children))
    segment.remove_stale()
    return [*problems, *left_behind()]


def hanging(children: list[int]) -> set[int]:
    """Wait for forked children; kill and return those that have not ended after 30 s."""
    deadline = time.monotonic() + 30
    alive = set(children)
    while alive and time.monotonic() < deadline:
        alive -= {child for child in alive if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.002)
    for child in alive:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return alive


def _forked(function: Callable[..., None], *arguments: object) -> int:
    child = os.fork()
    if child:
        return child
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        function(*arguments)
    finally:
        os._exit(1)
