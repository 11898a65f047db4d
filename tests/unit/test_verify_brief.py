"""Small verified operations of a library that does nothing, with both ranks in one process."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcr_plus.backends.base import NATIVE, Poll
from mcr_plus.backends.shm.queue import done_at_once
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import Kind, ReduceOp
from mcr_plus.core.message import Message, Signature
from mcr_plus.errors import BackendError, DataCorrupted, OperationsDiffer
from mcr_plus.reliability.verify.channel import VerifiedChannel, VerifiedPoll
from mcr_plus.reliability.verify.checksum_table import row_words
from mcr_plus.reliability.verify.rows import SharedRows, shared_bytes
from mcr_plus.reliability.verify.steps import VerifiedSteps

Start = Callable[[Message], Poll]
SIGNATURE = Signature("broadcast", torch.float32, (3,), 12, "world", 2, root=0, backend="mpi")


def never() -> bool:
    return False


def ended(polls: list[Poll]) -> bool:
    """Return whether all have ended after two polls each: one for its step, one for the other's row."""
    for poll in polls:
        poll()
    return [poll() for poll in polls] == [True] * len(polls)


def missing(*_: Any) -> None:
    raise RuntimeError("the other rank has not written it")


class World:
    """Two ranks on a library that starts operations by `start`."""

    def __init__(self, start: Start, is_polled: bool = True) -> None:
        memory, words = memoryview(bytearray(shared_bytes(2, row_words(2)))), row_words(2)
        library = SimpleNamespace(name="mpi", supports=lambda _: NATIVE, rings=False, host_driven=is_polled)
        channel: Any = SimpleNamespace(
            bind=lambda _: start, gate=lambda *_: None, closes_alone=True, outlives_library=True,
            takes_ballots=False, ballots=None,
        )  # fmt: skip
        store: Any = SimpleNamespace(set=lambda *_: None, wait=missing)
        engine: Any = SimpleNamespace(lock=RLock(), off={}, verified=[])
        backend: Any = library
        self.tensors = [torch.arange(3.0) for _ in range(2)]
        self.channels = [
            VerifiedChannel(
                channel, VerifiedSteps(backend, channel), Group("world", (0, 1), rank), store, engine,
                SharedRows(memory, rank, 2, words, lambda: None), 1, lambda: None,
            )
            for rank in range(2)
        ]  # fmt: skip
        self._starts = [each.bind(SIGNATURE) for each in self.channels]

    def begin(self, rank: int) -> Poll:
        tensor = self.tensors[rank]
        return self._starts[rank](Message(SIGNATURE, (tensor,) if rank == 0 else (), (tensor,)))


def test_an_operation_that_is_alone_ends_in_the_call_that_starts_it() -> None:
    world = World(lambda _: done_at_once)
    for rank in (0, 1, 1, 0, 0, 1):  # who comes first waits for the row of the other
        early = world.begin(rank)
        assert isinstance(early, VerifiedPoll)
        assert not early()
        assert world.begin(1 - rank) is done_at_once
        assert early()


def test_a_damaged_message_raises_on_both_ranks() -> None:
    world = World(lambda _: done_at_once)
    world.tensors[1][2] += 1
    polls = [world.begin(rank) for rank in range(2)]
    for poll in polls:
        with pytest.raises(DataCorrupted, match="values that rank 0 has sent to rank 1 have changed"):
            poll()


def test_ranks_that_run_different_operations_find_out() -> None:
    world = World(lambda _: done_at_once)  # like a broadcast on its root; here both ranks are roots
    other, tensor = SIGNATURE.replace(root=1), world.tensors[1]
    polls = [world.begin(0), world.channels[1].bind(other)(Message(other, (tensor,), (tensor,)))]
    for poll in polls:
        with pytest.raises(OperationsDiffer, match="another operation in its place"):
            poll()


def test_an_operation_waits_for_the_one_before_it() -> None:
    polls: list[Poll] = [never]
    world = World(lambda _: lambda: polls[0]())
    first = [world.begin(rank) for rank in range(2)]
    second = [world.begin(rank) for rank in range(2)]
    assert not any(poll() for poll in first + second)
    polls[0] = done_at_once
    assert ended(first)
    assert ended(second)


def test_a_library_with_threads_is_not_polled_in_the_call() -> None:
    world = World(lambda _: done_at_once, is_polled=False)
    polls = [world.begin(rank) for rank in range(2)]
    assert all(isinstance(poll, VerifiedPoll) for poll in polls)
    assert ended(polls)


@pytest.mark.parametrize("is_polled", [True, False])
def test_an_interrupted_operation_keeps_its_tensors_and_is_the_last(is_polled: bool) -> None:
    def interrupted(message: Message) -> Poll:
        raise KeyboardInterrupt

    world = World(interrupted, is_polled)
    with pytest.raises(KeyboardInterrupt):
        world.begin(0)
    kept: Any = world.channels[0].interrupted
    assert kept[0][0] is world.tensors[0]
    with pytest.raises(BackendError, match="was interrupted"):  # its row would be taken for the next one's
        world.begin(0)


class Exchange:
    """A library for two ranks of one process, which start in turn: the second start moves the data."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def start(self, message: Message) -> Poll:
        mine = len(self._messages)
        self._messages.append(message)
        if mine % 2:
            self._move(*self._messages[-2:])
        return lambda: len(self._messages) >= 2 * (mine // 2 + 1)

    def _move(self, *pair: Message) -> None:
        for rank, message in enumerate(pair):
            for target in message.outputs:
                parts = [other.inputs[0].view(-1) for other in pair]
                if message.signature.kind == "all_to_all":
                    parts = [part.chunk(2)[rank] for part in parts]
                target.copy_(torch.cat(parts))


def reduced(kind: Kind, op: ReduceOp, dtype: torch.dtype, damage: int = -1) -> list[torch.Tensor]:
    """Return the results of a reduction on both ranks; element `damage` changes on its way to rank 0."""
    library = Exchange()
    world = World(library.start)
    values = [torch.tensor([3, 5, -2, 7]).to(dtype) + rank for rank in range(2)]
    numel = 2 if kind == "reduce_scatter" else 4
    outputs = [
        (torch.zeros(numel, dtype=dtype),) if kind != "reduce" or rank == 0 else () for rank in range(2)
    ]
    signature = Signature(
        kind, dtype, (numel,), values[0].nbytes, "world", 2, reduce_op=op, backend="mpi",
        root=0 if kind == "reduce" else None,
    )  # fmt: skip
    starts = [channel.bind(signature) for channel in world.channels]
    polls = []
    for start, value, output in zip(starts, values, outputs, strict=True):
        polls.append(start(Message(signature, (value,), output)))
    if damage >= 0:
        library._messages[0].outputs[0][damage] += 1
    for poll in polls:
        poll()
    assert [poll() for poll in polls] == [True, True]
    return [each for output in outputs for each in output]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("op", "values"), [("SUM", [7, 11, -3, 15]), ("MAX", [4, 6, -1, 8])])
def test_small_reductions_are_one_exchange(dtype: torch.dtype, op: ReduceOp, values: list[int]) -> None:
    wanted = torch.tensor(values).to(dtype)
    if dtype is torch.uint8 and op == "MAX":
        wanted[2] = 255  # -1 is the larger one there, as 254 and 255 are compared
    assert [each.tolist() for each in reduced("all_reduce", op, dtype)] == [wanted.tolist()] * 2
    assert [each.tolist() for each in reduced("reduce", op, dtype)] == [wanted.tolist()]
    halves = [half.tolist() for half in wanted.chunk(2)]
    assert [each.tolist() for each in reduced("reduce_scatter", op, dtype)] == halves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce", "reduce_scatter"])
def test_a_value_that_has_changed_before_it_is_reduced_is_found(kind: Kind, dtype: torch.dtype) -> None:
    with pytest.raises(DataCorrupted, match="values of rank 0 itself have changed"):
        reduced(kind, "SUM", dtype, damage=1)
