"""NCCL without a GPU: the C ABI, the order of streams and events, and the meaning of emulated operations.

The tests marked `gpu` run the real library; they have not run yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from unit.devices.fake_nccl import MOST_ENTRIES, PROTOTYPES, FakeStreams, Simulator

from mcr_plus import registry
from mcr_plus.backends.nccl import NcclBackend, abi, link
from mcr_plus.backends.nccl.abi import Nccl, NcclError
from mcr_plus.backends.nccl.channel import NcclChannel
from mcr_plus.backends.nccl.link import EventPoll
from mcr_plus.board.base import GroupBoard
from mcr_plus.core.c10d import FileStore, HashStore
from mcr_plus.core.deadline import Deadline
from mcr_plus.core.group import Group
from mcr_plus.core.job_store import JobStore
from mcr_plus.core.kinds import DTYPES, KINDS, REDUCIBLE, REDUCING, ROOTED, VECTOR, Kind
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.threads import Background
from mcr_plus.engine.engine import Engine
from mcr_plus.engine.group_state import BackendChannel, GroupState
from mcr_plus.engine.operation import BoundOperation
from mcr_plus.errors import BackendError, BackendUnavailable, CommTimeout, PeerLost, Unsupported
from mcr_plus.rendezvous.processes import Peers
from mcr_plus.rendezvous.world import World

SIZE = 3


@pytest.fixture(autouse=True)
def _same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", os.environ.get("NCCL_SOCKET_IFNAME", "lo"))


@pytest.fixture(autouse=True)
def _no_race(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put all streams of a test under torch's race detector."""
    made: list[Simulator] = []
    begin = Simulator.__init__

    def note(simulator: Simulator, version: int = 23203) -> None:
        begin(simulator, version)
        made.append(simulator)

    monkeypatch.setattr(Simulator, "__init__", note)
    monkeypatch.setattr(link, "_POLL_STORE_EVERY", 0.0)
    yield
    assert [race for simulator in made for race in simulator.detector.races] == []
    assert [call for simulator in made for call in simulator.blocked] == []


class Job:
    """A group with all its ranks in this process."""

    def __init__(
        self, simulator: Simulator, size: int = SIZE, *, without: Sequence[str] = (), timeout: float = 5.0
    ) -> None:
        store = HashStore()
        self.simulator = simulator
        self.size = size
        self.streams = [FakeStreams(simulator) for _ in range(size)]
        self.backends = [
            NcclBackend(
                World(rank, size, ("host",) * size, timeout, JobStore(store)),
                nccl=Nccl(simulator.library(*without)),
                streams=lambda rank=rank: self.streams[rank],  # type: ignore[misc]
            )
            for rank in range(size)
        ]

    def open(self) -> list[NcclChannel]:
        def open_one(rank: int) -> Any:
            return self.backends[rank].open(Group("world", tuple(range(self.size)), rank))

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(open_one, range(self.size)))


@pytest.fixture
def job() -> Job:
    return Job(Simulator())


def signature(kind: Kind, dtype: torch.dtype = torch.float32, **fields: Any) -> Signature:
    known: dict[str, Any] = {"shape": (4,), "nbytes": 4 * dtype.itemsize, "device": "cuda"}
    if kind in REDUCING:
        known["reduce_op"] = "SUM"
    if kind in ROOTED:
        known["root"] = 1
    if kind in VECTOR:
        known |= {"shape": (), "nbytes": None}
    if kind == "barrier":
        known |= {"shape": (), "nbytes": 0, "device": "cpu"}
    own = None if kind == "barrier" else dtype
    return Signature(**({"kind": kind, "dtype": own, "group": "world", "ranks": SIZE} | known | fields))


Make = Callable[[int], Message]


def run(job: Job, signed: Signature, make: Make) -> list[Message]:
    """Issue one collective on all ranks and wait for it; the messages, with their results."""
    channels = job.open()
    messages = [make(rank) for rank in range(job.size)]
    polls = [channel.bind(signed)(message) for channel, message in zip(channels, messages, strict=True)]
    job.simulator.run()
    assert all(poll() for poll in polls)
    return messages


# -- the C ABI ------------------------------------------------------------------------------------


def test_declared_types_have_the_sizes_of_the_header() -> None:
    for name, types in (abi._FUNCTIONS | abi._LATER).items():
        assert [ctypes.sizeof(t) for t in types] == [ctypes.sizeof(t) for t in PROTOTYPES[name][1:]], name


@pytest.mark.parametrize(
    ("code", "text"), [(23203, "2.32.3"), (21212, "2.12.12"), (2804, "2.8.4"), (20902, "2.9.2")]
)
def test_version(code: int, text: str) -> None:
    assert Nccl(Simulator(code).library()).version_text == text


def test_a_library_without_the_abi_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="lacks ncclAllGather"):
        Nccl(Simulator().library("ncclAllGather"))


def test_a_path_that_does_not_load_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="pip install nvidia-nccl"):
        abi.load(str(tmp_path / "libnccl.so.2"))


def test_an_old_library_does_not_finalize_and_has_shorter_errors() -> None:
    simulator = Simulator(21212)
    job = Job(simulator, 1, without=["ncclCommFinalize", "ncclGetLastError"])
    channel = job.open()[0]
    channel.close()
    assert simulator.closed == [("destroy", 1000)]
    assert str(job.backends[0]._nccl.error(3, "trying")) == "NCCL 2.12.12, trying: error 3"


NATIVE_CALLS = [
    ("all_reduce", {"reduce_op": "MAX"}, "AllReduce", lambda a, b: (a, b, 4, 7, 2)),
    ("all_reduce", {"reduce_op": "AVG", "dtype": torch.bfloat16}, "AllReduce", lambda a, b: (a, b, 4, 9, 4)),
    ("all_reduce", {"reduce_op": "BOR", "dtype": torch.bool}, "AllReduce", lambda a, b: (a, b, 4, 1, 2)),
    ("all_reduce", {"dtype": torch.complex128}, "AllReduce", lambda a, b: (a, b, 8, 8, 0)),
    ("reduce", {"reduce_op": "MIN", "root": 0}, "Reduce", lambda a, b: (a, b, 4, 7, 3, 0)),
    ("reduce_scatter", {"reduce_op": "PRODUCT"}, "ReduceScatter", lambda a, b: (a, b, 4, 7, 1)),
    ("broadcast", {"root": 0}, "Broadcast", lambda a, b: (b, b, 16, 1, 0)),
    ("all_gather", {"dtype": torch.int16}, "AllGather", lambda a, b: (a, b, 8, 1)),
]


@pytest.mark.parametrize(("kind", "fields", "name", "expected"), NATIVE_CALLS)
def test_native_operations_are_one_call(
    kind: Kind, fields: dict[str, Any], name: str, expected: Callable[[int, int], tuple[int, ...]]
) -> None:
    job = Job(Simulator(), 1)
    signed = signature(kind, **{"root": None, **fields})
    value, out = torch.zeros(4, dtype=signed.dtype), torch.zeros(4, dtype=signed.dtype)
    run(job, signed, lambda _: Message(signed, (value,), (out,)))
    assert job.simulator.calls == [(name, 0, *expected(value.data_ptr(), out.data_ptr()))]
    assert {id(out)} <= {id(tensor) for tensor in job.streams[0].kept}


# -- the meaning of operations -------------------------------------------------------------------------


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) + 1 + 10 * rank).to(dtype)


def expect(messages: list[Message], expected: Sequence[Any]) -> None:
    for message, wanted in zip(messages, expected, strict=True):
        if wanted is not None:
            np.testing.assert_array_equal(message.outputs[0].numpy(), wanted)


def inputs(count: int, dtype: torch.dtype = torch.float32) -> list[np.ndarray[Any, Any]]:
    return [values(rank, count, dtype).numpy() for rank in range(SIZE)]


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_reductions(job: Job, op: str) -> None:
    signed = signature("all_reduce", torch.float64, reduce_op=op)
    oracle: Any = {"SUM": np.sum, "AVG": np.mean, "PRODUCT": np.prod, "MIN": np.min, "MAX": np.max}[op]

    def make(rank: int) -> Message:
        value = values(rank, 4, torch.float64)
        return Message(signed, (value,), (value,))

    expect(run(job, signed, make), [oracle(inputs(4), axis=0)] * SIZE)


@pytest.mark.parametrize("op", ["SUM", "MAX", "BOR", "PRODUCT", "MIN", "BAND"])
def test_logic(job: Job, op: str) -> None:
    signed = signature("all_reduce", torch.bool, reduce_op=op)
    oracle = np.any if op in ("SUM", "MAX", "BOR") else np.all
    table = np.array([[True, False, True, False], [True, False, False, False], [True, False, True, True]])

    def make(rank: int) -> Message:
        return Message(signed, (torch.tensor(table[rank]),), (torch.zeros(4, dtype=torch.bool),))

    expect(run(job, signed, make), [oracle(table, axis=0)] * SIZE)


def test_complex_average(job: Job) -> None:
    signed = signature("all_reduce", torch.complex64, reduce_op="AVG")

    def make(rank: int) -> Message:
        value = torch.complex(values(rank, 4), -values(rank, 4))
        return Message(signed, (value,), (value,))

    mean = np.mean(inputs(4), axis=0)
    expect(run(job, signed, make), [mean - 1j * mean] * SIZE)


def test_reduce_writes_on_the_root_only(job: Job) -> None:
    signed = signature("reduce")

    def make(rank: int) -> Message:
        return Message(signed, (values(rank, 4),), (torch.zeros(4 if rank == 1 else 0),))

    messages = run(job, signed, make)
    expect(messages, [None, np.sum(inputs(4), axis=0), None])
    for rank, message in enumerate(messages):
        np.testing.assert_array_equal(message.inputs[0].numpy(), inputs(4)[rank])


def test_broadcast(job: Job) -> None:
    signed = signature("broadcast")
    messages = run(job, signed, lambda rank: Message(signed, (), (values(rank, 4),)))
    expect(messages, [inputs(4)[1]] * SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
def test_all_gather(job: Job, dtype: torch.dtype) -> None:
    signed = signature("all_gather", dtype)
    messages = run(
        job, signed, lambda rank: Message(signed, (values(rank, 4, dtype),), (torch.zeros(12, dtype=dtype),))
    )
    expect(messages, [np.concatenate(inputs(4, dtype))] * SIZE)


def test_reduce_scatter(job: Job) -> None:
    signed = signature("reduce_scatter")
    messages = run(job, signed, lambda rank: Message(signed, (values(rank, 12),), (torch.zeros(4),)))
    expect(messages, list(np.sum(inputs(12), axis=0).reshape(SIZE, 4)))


def test_all_to_all(job: Job) -> None:
    signed = signature("all_to_all", torch.int16)
    messages = run(
        job,
        signed,
        lambda rank: Message(signed, (values(rank, 6, torch.int16),), (torch.zeros(6, dtype=torch.int16),)),
    )
    expect(messages, [np.concatenate([part[2 * r : 2 * r + 2] for part in inputs(6)]) for r in range(SIZE)])


COUNTS = [[2, 0, 3], [1, 4, 0], [0, 0, 0]]  # from rank, to rank


def test_all_to_all_v(job: Job) -> None:
    signed = signature("all_to_all_v")

    def make(rank: int) -> Message:
        to, from_ = COUNTS[rank], [row[rank] for row in COUNTS]
        return Message(
            signed,
            (values(rank, sum(to)),),
            (torch.zeros(sum(from_)),),
            input_counts=tuple(to),
            output_counts=tuple(from_),
        )

    sent = [np.split(values(r, sum(row)).numpy(), np.cumsum(row)[:-1]) for r, row in enumerate(COUNTS)]
    expect(run(job, signed, make), [np.concatenate([sent[s][r] for s in range(SIZE)]) for r in range(SIZE)])


UNEVEN = (3, 0, 2)
PIECES = [values(rank, count).numpy() for rank, count in enumerate(UNEVEN)]


def test_all_gather_v(job: Job) -> None:
    signed = signature("all_gather_v")

    def make(rank: int) -> Message:
        return Message(signed, (values(rank, UNEVEN[rank]),), (torch.zeros(5),), output_counts=UNEVEN)

    expect(run(job, signed, make), [np.concatenate(PIECES)] * SIZE)


def test_reduce_scatter_v(job: Job) -> None:
    signed = signature("reduce_scatter_v", reduce_op="AVG")

    def make(rank: int) -> Message:
        return Message(signed, (values(rank, 5),), (torch.zeros(UNEVEN[rank]),), input_counts=UNEVEN)

    expect(run(job, signed, make), np.split(np.mean(inputs(5), axis=0), np.cumsum(UNEVEN)[:-1]))
    calls = [call for call in job.simulator.calls if call[0] == "Reduce"]
    assert sorted(call[7] for call in calls) == [0, 0, 0, 2, 2, 2], "an empty part needs no call"
    assert all((call[3] is not None) == (call[1] == call[7]) for call in calls), "only the root has a target"


def test_gather(job: Job) -> None:
    signed = signature("gather")

    def make(rank: int) -> Message:
        return Message(signed, (values(rank, 4),), (torch.zeros(12),) if rank == 1 else ())

    messages = run(job, signed, make)
    np.testing.assert_array_equal(messages[1].outputs[0].numpy(), np.concatenate(inputs(4)))


def test_gather_v(job: Job) -> None:
    signed = signature("gather_v")

    def make(rank: int) -> Message:
        outputs = (torch.zeros(5),) if rank == 1 else ()
        counts = UNEVEN if rank == 1 else None
        return Message(signed, (values(rank, UNEVEN[rank]),), outputs, output_counts=counts)

    messages = run(job, signed, make)
    np.testing.assert_array_equal(messages[1].outputs[0].numpy(), np.concatenate(PIECES))


def test_scatter(job: Job) -> None:
    signed = signature("scatter")

    def make(rank: int) -> Message:
        return Message(signed, (values(rank, 12),) if rank == 1 else (), (torch.zeros(4),))

    expect(run(job, signed, make), list(inputs(12)[1].reshape(SIZE, 4)))


def test_scatter_v(job: Job) -> None:
    signed = signature("scatter_v")

    def make(rank: int) -> Message:
        inputs = (values(rank, 5),) if rank == 1 else ()
        return Message(
            signed, inputs, (torch.zeros(UNEVEN[rank]),), input_counts=UNEVEN if rank == 1 else None
        )

    expect(run(job, signed, make), np.split(inputs(5)[1], np.cumsum(UNEVEN)[:-1]))


def test_emulations_are_one_group(job: Job) -> None:
    signed = signature("all_to_all")
    run(job, signed, lambda rank: Message(signed, (values(rank, 6),), (torch.zeros(6),)))
    first = [call[0] for call in job.simulator.calls[:8]]
    assert first == ["GroupStart", *["Send"] * SIZE, *["Recv"] * SIZE, "GroupEnd"]


# -- streams --------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> tuple[Job, NcclChannel]:
    """A group of one rank: enough for everything but data."""
    job = Job(Simulator(), 1, timeout=0.3)
    return job, job.open()[0]


def all_reduce(channel: NcclChannel) -> EventPoll:
    signed = signature("all_reduce")
    value = torch.ones(4)
    poll = channel.bind(signed)(Message(signed, (value,), (value,)))
    assert isinstance(poll, EventPoll)
    return poll


def test_producer_operation_consumer(alone: tuple[Job, NcclChannel]) -> None:
    job, channel = alone
    poll = all_reduce(channel)
    assert job.simulator.trace == ["caller records", "comm waits", "AllReduce", "comm records"]
    job.simulator.trace.clear()
    poll.chain(lambda: job.simulator.trace.append(f"function under {job.streams[0].current().name}"))
    assert job.simulator.trace == [
        "caller records",
        "comm waits",
        "function under comm",
        "comm records",
    ]
    job.simulator.trace.clear()
    poll.order_current_stream()
    assert job.simulator.trace == ["caller waits"]
    assert poll()


def test_an_operation_that_nccl_launches_later(alone: tuple[Job, NcclChannel]) -> None:
    job, channel = alone
    job.simulator.slow = 3
    polls = [all_reduce(channel), all_reduce(channel)]
    ran: list[str] = []
    for poll in polls:
        poll.chain(lambda: ran.append(job.streams[0].current().name))
    assert not polls[0].ready
    assert not polls[1].ready
    assert "comm records" not in job.simulator.trace, "an event recorded too early would let the consumer go"
    assert job.simulator.calls == []
    polls[1].order_current_stream()
    assert polls[1].ready
    assert ran == ["comm", "comm"]
    assert all(poll() for poll in polls)


def test_waiting_for_a_launch_ends(alone: tuple[Job, NcclChannel]) -> None:
    job, channel = alone
    job.simulator.slow = 10**9
    poll = all_reduce(channel)
    with pytest.raises(CommTimeout, match=r"group 'world' has waited 0\.3 s"):
        poll.order_current_stream()


def test_progress_launches(alone: tuple[Job, NcclChannel]) -> None:
    job, channel = alone
    job.simulator.slow = 2
    poll = all_reduce(channel)
    for _ in range(3):
        job.backends[0].progress()
    assert poll.ready


def test_an_error_in_a_chained_function_fails_its_operation(alone: tuple[Job, NcclChannel]) -> None:
    job, channel = alone
    job.simulator.slow = 3
    poll, other = all_reduce(channel), all_reduce(channel)

    def fail() -> None:
        raise ValueError("decoding")

    poll.chain(fail)
    for _ in range(4):
        job.backends[0].progress()
    with pytest.raises(ValueError, match="decoding"):
        poll()
    assert other()


def test_events_are_reused(alone: tuple[Job, NcclChannel]) -> None:
    _, channel = alone
    for _ in range(5):
        assert all_reduce(channel)()
    assert len(channel._link._events) == 1


def test_barrier_blocks_the_host(job: Job) -> None:
    channels = job.open()
    signed = signature("barrier")
    polls = [channel.bind(signed)(Message(signed)) for channel in channels[:2]]
    assert all(isinstance(poll, EventPoll) and not poll.ready and not poll() for poll in polls)
    polls.append(channels[2].bind(signed)(Message(signed)))
    assert all(poll() for poll in polls)


def test_tensors_of_another_device_are_refused(alone: tuple[Job, NcclChannel]) -> None:
    job, channel = alone
    job.streams[0].device = 1
    with pytest.raises(Unsupported, match="a tensor on cpu; the communicator of group 'world' is on cuda:1"):
        all_reduce(channel)


# -- messages -------------------------------------------------------------------------------------


def isend(channel: NcclChannel, peer: int | None, value: torch.Tensor, tag: int = 0) -> Any:
    signed = signature("send")
    return channel.bind(signed)(Message(signed, (value,), (), peer=peer, match_tag=tag))


def irecv(channel: NcclChannel, peer: int | None, out: torch.Tensor, tag: int = 0) -> Any:
    signed = signature("recv")
    return channel.bind(signed)(Message(signed, (), (out,), peer=peer, match_tag=tag))


def settle(job: Job, polls: Sequence[Any]) -> None:
    for _ in range(2000):
        for backend in job.backends:
            backend.progress()
        if all([poll() for poll in polls]):  # noqa: C419 - every poll makes progress
            return
    raise AssertionError(f"not done; stuck: {job.simulator.stuck}, calls: {job.simulator.calls}")


def test_all_ranks_may_send_before_receiving(job: Job) -> None:
    channels = job.open()
    outs = [torch.zeros(4) for _ in range(SIZE)]
    polls = []
    for rank, channel in enumerate(channels):
        polls.append(isend(channel, (rank + 1) % SIZE, values(rank, 4)))
        polls.append(irecv(channel, (rank - 1) % SIZE, outs[rank]))
    settle(job, polls)
    for rank, out in enumerate(outs):
        np.testing.assert_array_equal(out.numpy(), inputs(4)[(rank - 1) % SIZE])


def test_waiting_for_one_message_connects_the_others(job: Job) -> None:
    channels = job.open()
    job.simulator.slow = 3

    both = threading.Barrier(2)

    def exchange(rank: int) -> None:
        received = irecv(channels[rank], 1 - rank, torch.zeros(4))  # the sender has not come yet
        both.wait(5)
        isend(channels[rank], 1 - rank, values(rank, 4)).order_current_stream()
        received.order_current_stream()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exchange, range(2))) == [None, None]
    assert not job.simulator.stuck


def test_messages_of_a_direction_arrive_in_order(job: Job) -> None:
    channels = job.open()
    job.simulator.slow = 3
    polls = [isend(channels[0], 1, values(rank, 4)) for rank in range(2)]
    outs = [torch.zeros(4), torch.zeros(4)]
    polls += [irecv(channels[1], 0, out) for out in outs]
    settle(job, polls)
    for rank, out in enumerate(outs):
        np.testing.assert_array_equal(out.numpy(), inputs(4)[rank])


def test_a_send_overtakes_a_collective(job: Job) -> None:
    channels = job.open()
    signed = signature("all_reduce")
    tensors = [torch.ones(4) for _ in range(SIZE)]
    out = torch.zeros(4)

    def reduce(rank: int) -> Any:
        return channels[rank].bind(signed)(Message(signed, (tensors[rank],), (tensors[rank],)))

    polls = [isend(channels[0], 1, values(0, 4)), reduce(0), reduce(2)]
    polls += [reduce(1), irecv(channels[1], 0, out)]
    settle(job, polls)
    np.testing.assert_array_equal(out.numpy(), inputs(4)[0])


@pytest.mark.parametrize(
    ("peer", "tag", "text"), [(None, 0, "name the source"), (1, 5, "tag=5"), (0, 0, "the rank itself")]
)
def test_unsupported_messages_are_refused(job: Job, peer: int | None, tag: int, text: str) -> None:
    channel = job.open()[0]
    with pytest.raises(Unsupported, match=text):
        irecv(channel, peer, torch.zeros(4), tag)


def test_messages_of_no_size(job: Job) -> None:
    channels = job.open()
    polls = [isend(channels[0], 1, torch.zeros(0)), irecv(channels[1], 0, torch.zeros(0))]
    settle(job, polls)
    assert job.simulator.calls == []


# -- failures and the end -------------------------------------------------------------------------


def operation(channel: NcclChannel, signed: Signature) -> BoundOperation:
    engine = Engine(Peers(0, ("host",), None, 1.0), wait="auto", oversubscribed=False)
    state = GroupState(Group("world", (0,), 0), GroupBoard())
    nobody: Any = None
    return BoundOperation(
        signed,
        channel.bind(signed),
        engine,
        state,
        BackendChannel(nobody, channel),
        channel=channel,
        on_stream=True,
        spins=1,
        burst=range(1),
        timeout=5.0,
    )


def test_an_error_code_raises_with_the_text_of_nccl(alone: tuple[Job, NcclChannel]) -> None:
    job, channel = alone
    signed = signature("all_reduce", backend="nccl")
    issue = operation(channel, signed).bind()
    job.simulator.fails["ncclAllReduce"] = 1
    with pytest.raises(BackendError) as caught:
        issue(Message(signed, (torch.ones(4),), (torch.ones(4),))).wait()
    text = str(caught.value)
    for part in (
        "nccl: all_reduce SUM float32[4]",
        "(#1 in group 'world')",
        "NCCL 2.32.3",
        "error 1",
        "the last error",
    ):
        assert part in text


def test_through_the_engine(alone: tuple[Job, NcclChannel]) -> None:
    job, channel = alone
    job.simulator.slow = 2
    signed = signature("all_reduce", backend="nccl")
    bound = operation(channel, signed)
    bound.engine.backends.append(job.backends[0])
    tensor, after = torch.ones(4), torch.zeros(4)

    def copy() -> None:
        after.copy_(tensor)

    work = bound.bind()(Message(signed, (tensor,), (tensor,))).then(copy)
    work.wait()
    while not work.is_completed():
        pass
    assert work.exception() is None
    np.testing.assert_array_equal(after.numpy(), np.ones(4))


def test_a_background_error_is_raised_by_polls(job: Job) -> None:
    channels = job.open()
    poll = all_reduce(channels[0])  # the others never come
    assert not poll()
    job.simulator.comms[channels[0]._link.comm].state = 6
    channels[0]._link._next_check = 0.0
    poll()
    with pytest.raises(NcclError, match="error 6"):
        poll()


def test_checks_for_background_errors_are_rare(job: Job) -> None:
    channel = job.open()[0]
    poll = all_reduce(channel)
    poll()
    job.simulator.comms[channel._link.comm].state = 6
    channel._link._next_check += 1000
    assert not any(poll() for _ in range(1000))


def test_other_errors_fail_the_operations_of_their_link_alone(alone: tuple[Job, NcclChannel]) -> None:
    """The operation whose poll found the error is no exception, and no error is lost."""
    job, channel = alone
    job.simulator.slow = 3
    first = all_reduce(channel)
    signed = signature("all_gather", ranks=1)
    second = channel.bind(signed)(Message(signed, (torch.ones(4),), (torch.ones(4),)))

    def no_thread(call: Callable[[], Any]) -> Any:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job.streams[0], "background", no_thread)
        for _ in range(4):
            job.backends[0].progress()
    for poll in (first, second):
        with pytest.raises(NcclError, match="group 'world': RuntimeError: can't start new thread"):
            assert not poll()


@pytest.mark.parametrize("error", [RuntimeError("broken pipe"), PeerLost("rank 1 has died", [1])])
def test_opening_fails_with_the_error_of_the_store(error: Exception) -> None:
    class Broken(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise error

    store = Broken()
    backend = NcclBackend(
        World(0, 2, ("host",) * 2, 5.0, JobStore(store)),
        nccl=Nccl(Simulator().library()),
        streams=lambda: FakeStreams(Simulator()),
    )
    expected = PeerLost if isinstance(error, PeerLost) else BackendError
    with pytest.raises(expected, match=str(error)):
        backend.open(Group("world", (0, 1), 0))


def test_opening_fails_with_group_and_rank() -> None:
    job = Job(Simulator(22605), 1)
    job.simulator.fails["ncclCommInitRank"] = 5
    job.simulator.last_error = b"Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000"
    with pytest.raises(BackendError) as caught:
        job.open()
    text = str(caught.value)
    for part in (
        "group 'world', rank 0, 1 in all",
        "Duplicate GPU",
        "NCCL_MULTI_RANK_GPU_ENABLE=1",
        "this is 2.26.5",
    ):
        assert part in text


def test_opening_waits_no_longer_than_the_deadline() -> None:
    job = Job(Simulator(), 2, timeout=0.1)
    with pytest.raises(
        CommTimeout, match=r"group 'world' was not ready after 0\.1 s; one of its 2 ranks has not connected"
    ):
        job.backends[0].open(Group("world", (0, 1), 0))
    assert job.simulator.calls == []
    assert job.simulator.comms == {}, "NCCL would wait for the other rank"


def test_a_communicator_that_is_made_too_late_is_aborted() -> None:
    class Slow(FakeStreams):
        def background(self, call: Callable[[], Any]) -> Any:
            def later() -> Any:
                go.wait(20)
                with self.machine.background():
                    return call()

            return Background(later, contextlib.nullcontext())

    go = threading.Event()
    job = Job(Simulator(), 1, timeout=0.1)
    job.streams[0] = Slow(job.simulator)
    with pytest.raises(CommTimeout, match="was not ready"):
        job.open()
    assert job.simulator.closed == []
    go.set()
    while not job.simulator.closed:
        pass
    job.backends[0].close(clean=True)
    assert job.simulator.closed == [("abort", 1000)], "NCCL frees what it aborts"


def test_calls_that_may_wait_for_peers_run_in_the_background(job: Job) -> None:
    channels = job.open()
    job.simulator.slow = 1
    signed = signature("all_reduce")
    small, large = ([torch.ones(count) for _ in range(SIZE)] for count in (4, 5000))

    def turn(tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Return whether each rank had launched when the call returned."""
        bound = [channel.bind(signed) for channel in channels]
        polls = [start(Message(signed, (t,), (t,))) for start, t in zip(bound, tensors, strict=True)]
        launched = [poll.ready for poll in polls if isinstance(poll, EventPoll)]
        settle(job, polls)
        return launched

    assert [turn(small), turn(small)] == [[False] * SIZE, [True] * SIZE]
    assert [turn(large), turn(small), turn(large)] == [[False] * SIZE, [True] * SIZE, [True] * SIZE]


def test_messages_with_any_of_the_peers_that_are_connected_stay_off_the_background(job: Job) -> None:
    """As in all_to_all_v of a changing routing, most counts are zero, in other places each time."""
    channels, random = job.open(), np.random.default_rng(0)
    job.simulator.slow = 1
    signed = signature("all_to_all_v")
    launched = []
    for turn in range(30):
        counts = random.integers(1, 4, (SIZE, SIZE)) * (turn == 0 or random.random((SIZE, SIZE)) < 0.4)
        sent = [values(rank, int(counts[rank].sum())) for rank in range(SIZE)]
        out = [torch.zeros(int(counts[:, rank].sum())) for rank in range(SIZE)]
        polls = []
        for rank, channel in enumerate(channels):
            to, from_ = (tuple(map(int, each)) for each in (counts[rank], counts[:, rank]))
            message = Message(signed, (sent[rank],), (out[rank],), input_counts=to, output_counts=from_)
            polls.append(channel.bind(signed)(message))
        launched.append([poll.ready for poll in polls if isinstance(poll, EventPoll)])
        settle(job, polls)
        parts = [np.split(each.numpy(), np.cumsum(row)[:-1]) for each, row in zip(sent, counts, strict=True)]
        for rank in range(SIZE):
            wanted = np.concatenate([parts[source][rank] for source in range(SIZE)])
            np.testing.assert_array_equal(out[rank].numpy(), wanted)
    assert launched == [[False] * SIZE] + [[True] * SIZE] * 29
    known = channels[0]._link._known
    assert len(known) == 2 * SIZE, "as many as there are peers and directions, not as sets of them"


@pytest.mark.parametrize("how", ["first", "known", "grouped"])
def test_communicators_that_the_environment_makes_non_blocking(how: str) -> None:
    """NCCL_COMM_BLOCKING=0: a call returns before it has launched, and no other is accepted meanwhile."""
    job = Job(Simulator())
    job.simulator.nonblocking = how != "known"
    channels = job.open()
    if how == "known":
        settle(job, [all_reduce(channel) for channel in channels])
        job.simulator.nonblocking = True
    signed = signature("all_to_all" if how == "grouped" else "all_reduce")
    sent, out = ([torch.ones(SIZE) * (rank + 1) for rank in range(SIZE)] for _ in range(2))
    polls = []
    for channel, value, result in zip(channels, sent, out, strict=True):
        start = channel.bind(signed)
        polls += [start(Message(signed, (value,), (result,))) for _ in range(2)]
    after = [torch.zeros(SIZE) for _ in range(SIZE)]
    for poll, result, copy in zip(polls[1::2], out, after, strict=True):
        assert isinstance(poll, EventPoll)
        poll.chain(lambda copy=copy, result=result: copy.copy_(result))  # type: ignore[misc]
    settle(job, polls)
    wanted = range(1, SIZE + 1) if how == "grouped" else [sum(range(1, SIZE + 1))] * SIZE
    for copy in after:
        np.testing.assert_array_equal(copy.numpy(), list(wanted))
    for backend in job.backends:
        backend.close(clean=True)
    assert [how for how, _ in job.simulator.closed] == ["finalize", "destroy"] * SIZE


@pytest.mark.long
def test_a_full_stream_does_not_block_the_program(job: Job) -> None:
    channels = job.open()
    for channel in channels:
        all_reduce(channel)
        job.backends[channels.index(channel)].progress()
    polls = [all_reduce(channels[0]) for _ in range(600)]  # the others have not come; see _no_race
    polls += [all_reduce(channel) for channel in channels[1:] for _ in range(600)]
    settle(job, polls)


def test_decoders_do_not_fill_a_stream(job: Job) -> None:
    channels = job.open()
    for backend, channel in zip(job.backends, channels, strict=True):
        all_reduce(channel)
        backend.progress()
    stream, longest = channels[0]._link.stream, 0

    def decode() -> None:
        for _ in range(10):
            stream.launch("decode", lambda: None, [], [])

    polls = []
    for _ in range(200):  # the others have not come; see _no_race
        polls.append(all_reduce(channels[0]))
        polls[-1].chain(decode)
        longest = max(longest, sum(not entry.done for entry in stream.entries))
    assert 400 < longest < MOST_ENTRIES
    polls += [all_reduce(channel) for channel in channels[1:] for _ in range(200)]
    settle(job, polls)
    assert sum(entry.run is not None for entry in stream.entries) == 2000


def test_many_operations_in_turn_stay_off_the_background(alone: tuple[Job, NcclChannel]) -> None:
    job, channel = alone
    assert all_reduce(channel)()
    job.simulator.slow = 10**9  # nothing more gets through there
    for _ in range(600):  # no poll of the operations
        assert all_reduce(channel).ready
    for _ in range(600):
        assert all_reduce(channel)()
    job.simulator.lazy, job.simulator.decide = True, lambda _: False  # the device is busy
    assert all([all_reduce(channel).ready for _ in range(250)])  # noqa: C419
    assert not all([all_reduce(channel).ready for _ in range(10)])  # noqa: C419


def test_a_clean_end_finalizes_then_destroys(job: Job) -> None:
    channels = job.open()
    settle(job, [isend(channels[0], 1, values(0, 4)), irecv(channels[1], 0, torch.zeros(4))])
    job.backends[0].close(clean=True)
    own = [channels[0]._link, *channels[0]._directions.values()]
    assert [how for how, _ in job.simulator.closed] == ["finalize", "destroy"] * 2
    assert all(link.comm == 0 for link in own)


def test_an_unclean_end_aborts(job: Job) -> None:
    channel = job.open()[0]
    comm = channel._link.comm
    poll = all_reduce(channel)
    job.backends[0].close(clean=False)
    assert job.simulator.closed == [("abort", comm)]
    with pytest.raises(NcclError, match="was aborted"):
        poll()


@pytest.mark.parametrize("where", ["caller", "background"])
def test_an_abort_waits_for_a_call_of_another_thread(where: str) -> None:
    job = Job(Simulator(), 1)
    job.streams[0] = Threads(job.simulator)
    channel = job.open()[0]
    poll = all_reduce(channel)
    while not poll():
        pass
    inside, go = threading.Event(), threading.Event()

    def call(comm: int, stream: int) -> int:
        inside.set()
        assert go.wait(20)
        job.simulator.trace.append(f"returns, with {len(job.simulator.closed)} aborted")
        return 0

    key = next(iter(channel._link._known)) if where == "caller" else "a new one"
    thread = threading.Thread(target=channel._link.submit, args=(call, key))
    thread.start()
    assert inside.wait(20)
    aborting = threading.Thread(target=channel.abort)
    aborting.start()
    aborting.join(0.05)
    go.set()
    for each in (thread, aborting):
        each.join()
    assert job.simulator.closed == [("abort", 1000)]
    assert "returns, with 0 aborted" in job.simulator.trace


class Threads(FakeStreams):
    """Calls in the background on threads of their own."""

    def background(self, call: Callable[[], Any]) -> Any:
        return Background(call, contextlib.nullcontext())


@pytest.mark.parametrize("version", ["with revoke", "without revoke"])
def test_an_abort_frees_nothing_that_a_call_in_nccl_uses(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """The call waits for a silent peer until NCCL is told to end it, or until the peer acts."""
    monkeypatch.setattr(link, "_ABORT_WAITS", 0.1)
    can_revoke = version == "with revoke"
    job = Job(Simulator(), 1, without=() if can_revoke else ("ncclCommRevoke",))
    job.streams[0] = Threads(job.simulator)
    channel = job.open()[0]
    inside, go = threading.Event(), threading.Event()

    def call(comm: int, stream: int) -> int:
        inside.set()
        while not (go.wait(0.001) or ("revoke", comm) in job.simulator.closed):
            pass
        job.simulator.closed.append(("returns", comm))
        return 6

    channel._link.submit(call, "a new one")
    assert inside.wait(20)
    channel.abort()
    if not can_revoke:
        assert job.simulator.closed == []
        go.set()
    wanted = [("revoke", 1000)] * can_revoke + [("returns", 1000), ("abort", 1000)]
    deadline = Deadline(20)
    while job.simulator.closed != wanted:
        assert not deadline.passed(), job.simulator.closed


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_a_communicator_that_cannot_be_closed_leaves_no_other_open(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(Simulator())
    channels = job.open()
    settle(job, [isend(channels[0], 1, values(0, 4)), irecv(channels[1], 0, torch.zeros(4))])
    first, other = (each.comm for each in channels[0]._links())
    for each in channels[0]._links():
        each.timeout = 0.2
    channels[0]._timeout = 0.2
    go = threading.Event()
    job.streams[0].background = Threads(job.simulator).background  # type: ignore[method-assign]
    nccl, finalize = channels[0]._nccl, job.simulator._ncclCommFinalize

    def close(comm: int) -> None:
        if comm == first:
            if fault == "fails":
                raise NcclError("a fault", 3)
            go.wait(20)
        else:
            finalize(comm)
            job.simulator._ncclCommDestroy(comm)

    nccl.close = close  # type: ignore[method-assign]
    job.backends[0].close(clean=True)
    assert ("a fault" if fault == "fails" else "not closed within 0.2 s") in caplog.text
    assert job.simulator.closed == [("finalize", other), ("destroy", other)]
    go.set()


def test_a_failed_communicator_is_aborted_even_in_a_clean_end(alone: tuple[Job, NcclChannel]) -> None:
    job, channel = alone
    job.simulator.comms[1000].state = 6
    channel.close()
    assert job.simulator.closed[-1] == ("abort", 1000)


# -- available features --------------------------------------------------------------------------------


def test_registry_has_the_nccl_backend() -> None:
    assert registry.get("backends", "nccl") is NcclBackend


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a CUDA device")
def test_availability_without_a_device() -> None:
    found = NcclBackend.availability()
    assert not found.available
    assert "CUDA" in found.reason
    assert found.remedy
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call, unused-ignore]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_supported_on_cuda(kind: Kind) -> None:
    support = NcclBackend.supports(signature(kind))
    native = {"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "send", "recv"}
    assert support.level == ("native" if kind in native else "emulated")
    assert support.how or support.level == "native"


def test_cpu_tensors_are_refused() -> None:
    support = NcclBackend.supports(signature("all_reduce", device="cpu"))
    assert not support
    assert "mpi and gloo" in support.how


def test_exactly_these_reductions_are_refused() -> None:
    refused = {
        (op, dtype)
        for op, dtypes in REDUCIBLE.items()
        for dtype in dtypes
        if not NcclBackend.supports(signature("all_reduce", dtype, reduce_op=op))
    }
    bitwise = {(op, d) for op in ("BAND", "BOR", "BXOR") for d in REDUCIBLE[op] if d is not torch.bool}
    short = {(op, torch.int16) for op, dtypes in REDUCIBLE.items() if torch.int16 in dtypes}
    products = {("PRODUCT", torch.complex64), ("PRODUCT", torch.complex128)}
    assert refused == bitwise | short | products | {("BXOR", torch.bool)}
    assert all(NcclBackend.supports(signature("all_to_all", dtype)) for dtype in DTYPES)


def test_binding_refuses_unsupported_operations(alone: tuple[Job, NcclChannel]) -> None:
    with pytest.raises(Unsupported, match="BXOR on int32; NCCL has SUM, PRODUCT, MAX, MIN, AVG"):
        alone[1].bind(signature("all_reduce", torch.int32, reduce_op="BXOR"))


def _real_library() -> Nccl | None:
    try:
        return abi.load()
    except BackendUnavailable:
        return None


@pytest.mark.skipif(_real_library() is None, reason="no NCCL library here (pip install nvidia-nccl-cu12)")
def test_the_real_library() -> None:
    nccl = abi.load()
    assert nccl.version >= (2, 14)
    assert "internal error" in str(nccl.error(3, "trying"))
    assert len(nccl.unique_id()) == 128


# -- on a GPU -------------------------------------------------------------------------------------


def on_gpu(rank: int, size: int, path: str) -> dict[str, list[float]]:
    """Return the result of each operation on a rank."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = NcclBackend(World(rank, size, ("host",) * size, 120.0, JobStore(FileStore(path, size))))
    channel = backend.open(Group("world", tuple(range(size)), rank))
    assert isinstance(channel, NcclChannel)
    kinds: tuple[Kind, ...] = (
        "all_reduce",
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "barrier",
    )
    got: dict[str, list[float]] = {kind: _doubled_on_gpu(channel, kind, rank, size) for kind in kinds}
    if size > 1:
        value, out = values(rank, 4).cuda(), torch.zeros(4).cuda()
        polls = [isend(channel, 1 - rank, value), irecv(channel, 1 - rank, out)]
        for poll in polls:
            poll.order_current_stream()
        got["recv"] = out.cpu().tolist()
    backend.close(clean=True)
    return got


def _doubled_on_gpu(channel: NcclChannel, kind: Kind, rank: int, size: int) -> list[float]:
    """Return the result of an operation, doubled by a function chained to it."""
    count = {"all_gather": 4 * size * size, "reduce_scatter": 4}.get(kind, 4 * size)
    value, out = values(rank, 4 * size).cuda(), torch.zeros(count).cuda()
    if kind == "broadcast":
        out.copy_(value)
    doubled = torch.empty_like(out)

    def double() -> None:
        torch.mul(out, 2, out=doubled)

    signed = signature(kind, ranks=size, root=0 if kind in ROOTED else None)
    tensors = () if kind == "barrier" else ((value,), (out,))
    poll = channel.bind(signed)(Message(signed, *tensors))
    assert isinstance(poll, EventPoll)
    poll.chain(double)
    poll.order_current_stream()
    result: list[float] = doubled.cpu().tolist()
    while not poll():
        pass
    return result


def _run_on_gpu(size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, str(size), str(Path(folder) / "store")]
        environment = os.environ | {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(size)
        ]
        try:
            got = [json.loads(rank.communicate(timeout=180)[0]) for rank in ranks]
        finally:
            for process in ranks:
                process.kill()
    check_gpu_results(got)


def check_gpu_results(got: Sequence[dict[str, list[float]]]) -> None:
    size = len(got)
    doubled = 2 * np.stack([values(rank, 4 * size).numpy() for rank in range(size)])
    for rank in range(size):
        np.testing.assert_array_equal(got[rank]["all_reduce"], doubled.sum(0))
        np.testing.assert_array_equal(got[rank]["broadcast"], doubled[0])
        np.testing.assert_array_equal(got[rank]["all_gather"], doubled.reshape(-1))
        np.testing.assert_array_equal(got[rank]["reduce_scatter"], doubled.sum(0)[4 * rank : 4 * rank + 4])
        np.testing.assert_array_equal(
            got[rank]["all_to_all"], doubled[:, 4 * rank : 4 * rank + 4].reshape(-1)
        )
        if size > 1:
            np.testing.assert_array_equal(got[rank]["recv"], values(1 - rank, 4).numpy())


needs_gpu = pytest.mark.skipif(not NcclBackend.availability().available, reason="no CUDA device with NCCL")


@pytest.mark.gpu
@needs_gpu
def test_one_rank_on_a_gpu() -> None:
    _run_on_gpu(1)


@pytest.mark.gpu
@needs_gpu
def test_two_ranks_on_a_gpu() -> None:
    library = _real_library()
    assert library is not None
    if torch.cuda.device_count() < 2 and library.version < (2, 30):
        pytest.skip(f"one GPU, and NCCL {library.version_text} takes one rank per GPU; 2.30 takes more")
    _run_on_gpu(2)


if __name__ == "__main__":
    print(json.dumps(on_gpu(int(sys.argv[3]), int(sys.argv[1]), sys.argv[2])))
