"""The progress thread: operations advance while the program does something else."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.backends.base import Poll
from mcr_plus.board.base import Failure, GroupBoard
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature
from mcr_plus.engine.closing import drain
from mcr_plus.engine.disabled_backends import refuse_if_off
from mcr_plus.engine.engine import Engine
from mcr_plus.engine.group_state import BackendChannel, GroupState
from mcr_plus.engine.operation import BoundOperation
from mcr_plus.engine.work import IssuedWork
from mcr_plus.rendezvous.mpi_launcher import mpi_usable
from mcr_plus.rendezvous.processes import Peers

pytestmark = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")

IDLE: Any = SimpleNamespace(withdraw=lambda: None)  # a channel without operations
BY_HOST = 1 << 20  # elements; far more than an MPI library moves without being called again


def dispatch(progress: str) -> dict[str, Any]:
    stages = [{"select": {}}, {"dispatch": {"timeout": "30s", "progress": progress}}]
    return {"version": 1, "backends": ["mpi"], "pipeline": stages}


def hands_off(progress: str, patience: float) -> tuple[bool, bool]:
    """Return whether an operation and its followers were done without a call of the program."""
    followed = threading.Event()
    done = False, False
    with mcr.init(dispatch(progress)) as comm:
        for _ in range(2):  # the first of a signature is compared with the peers
            x = torch.full((BY_HOST,), comm.rank + 1.0)
            work = comm.all_reduce(x, async_op=True)
            assert isinstance(work, IssuedWork)
            followed.clear()
            work.then(followed.set)
            until = time.monotonic() + patience
            while not work.is_done and time.monotonic() < until:
                time.sleep(0.01)
            done = work.is_done, followed.is_set()
            work.wait()
            assert x[0] == x[-1] == 3.0
            comm.barrier()
    return done


def both_ways() -> dict[str, Any]:
    """Run on ranks."""
    before = threading.active_count()
    found: dict[str, Any] = {"caller": hands_off("caller", 0.5), "thread": hands_off("thread", 20.0)}
    found["threads left"] = threading.active_count() - before
    with mcr.init(dispatch("thread")):
        busy = time.process_time()
        time.sleep(0.5)  # nothing in flight: the thread sleeps
        found["idle"] = time.process_time() - busy
    return found


INFERENCE = [(True, True, False), (True, True, True), (False, True, False), (False, False, False)]
"""Whether tensors are made, operations issued, and waited for in torch's inference mode."""
CODECS: dict[str, dict[str, Any]] = {"none": {}, "bf16": {}, "int8_block": {}, "powersgd": {"rank": 2}}


def in_inference_mode(backend: str, progress: str, fuse: bool) -> list[str]:
    """Return the differences from sums and means by hand; calls of both modes share a residual."""
    stages: list[dict[str, Any]] = [{"fuse": {}}] if fuse else []
    stages += [{"compress": {}}, {"select": {}}, {"dispatch": {"timeout": "30s", "progress": progress}}]
    wrong = []
    with mcr.init({"version": 1, "backends": [backend], "pipeline": stages}) as comm:
        total = sum(range(1, comm.size + 1))
        for codec, feedback, (number, (made, used, waited)) in product(
            CODECS, (False, True), enumerate(INFERENCE)
        ):
            if feedback and codec == "none":
                continue
            compress = {"codec": codec, **CODECS[codec], **({"error_feedback": True} if feedback else {})}
            with torch.inference_mode(made):
                # Tensors of equal values, which all codecs keep up to the last bits; one is not contiguous.
                large = torch.full((64, 1024), float(comm.rank + 1))
                small = [torch.full((size,), float(comm.rank + 1)) for size in (33, 35)]
                turned = torch.full((5, 7), float(comm.rank + 1)).t()
            with torch.inference_mode(used):
                keys: Any = {"async_op": True, "tag": f"{codec} {feedback}"}
                if codec != "none":
                    keys["compress"] = compress
                works = [comm.all_reduce(large, "AVG", **keys)]
                works += [comm.all_reduce(each, async_op=True) for each in small]
                works.append(comm.all_reduce(turned, "AVG", async_op=True))
            with torch.inference_mode(waited):
                for work in works:
                    assert work is not None
                    work.wait()
            for found, expected in ((large, total / comm.size), (turned, total / comm.size)):
                if not torch.allclose(found, torch.tensor(expected), rtol=0.02):
                    wrong.append(f"{codec} {feedback} {number}: {found.flatten()[:3]}")
            wrong += [f"{codec} {number}: small" for each in small if not bool((each == total).all())]
    return wrong


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
@pytest.mark.parametrize(("progress", "fuse"), [("thread", True), ("thread", False), ("caller", True)])
def test_inference_mode_may_end_before_an_operation(backend: str, progress: str, fuse: bool) -> None:
    assert [each.value for each in run_ranks(in_inference_mode, 2, args=[backend, progress, fuse])] == [
        [],
        [],
    ]


def sums_of_inference_mode(backend: str, verify: str) -> list[str]:
    """Reductions that libraries lack or verification makes, issued in the mode and waited for outside."""
    dispatch = {"dispatch": {"timeout": "30s", "verify": verify}}
    wrong = []
    with mcr.init({"version": 1, "backends": [backend], "pipeline": [{"select": {}}, dispatch]}) as comm:
        total, last = sum(range(1, comm.size + 1)), comm.size
        mean = total / comm.size
        cases: list[tuple[torch.dtype, Any, float]] = [
            (torch.float32, "SUM", total), (torch.float32, "AVG", mean), (torch.bfloat16, "SUM", total),
            (torch.int16, "MAX", last), (torch.int32, "SUM", total), (torch.bool, "MAX", 1),
        ]  # fmt: skip
        for dtype, op, expected in cases:
            for numel in (3, 70_001):  # a small one is one step if it is verified
                with torch.inference_mode():
                    given = torch.full((comm.size * numel,), comm.rank + 1).to(dtype)
                    part, whole = torch.zeros(numel, dtype=dtype), given.clone()
                    works = [
                        comm.reduce_scatter_tensor(part, given, op, async_op=True),
                        comm.all_reduce(whole, op, async_op=True),
                    ]
                for work in works:
                    assert work is not None
                    work.wait()
                wrong += [
                    f"{dtype} {op} {numel}: {found[:3]}"
                    for found in (part, whole)
                    if not bool((found.double() == expected).all())
                ]
    return wrong


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
@pytest.mark.parametrize("verify", ["off", "every"])
def test_results_of_inference_mode_are_reduced_outside_of_it(backend: str, verify: str) -> None:
    assert [each.value for each in run_ranks(sums_of_inference_mode, 2, args=[backend, verify])] == [[], []]


def test_progress_thread_completes_operations_without_a_wait() -> None:
    for result in run_ranks(both_ways, 2):
        assert result.value["caller"] == [False, False]
        assert result.value["thread"] == [True, True]
        assert result.value["threads left"] == 0
        assert result.value["idle"] < 0.25


def serialized() -> str:
    """Run on ranks: MPI initialised for one thread at a time."""
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    try:
        mcr.init(dispatch("thread"))
    except mcr.BackendUnavailable as error:
        return str(error)
    return "nothing"


def test_an_mpi_for_one_thread_is_refused() -> None:
    for result in run_ranks(serialized, 2):
        if result.value == "nothing":
            pytest.skip("this MPI gives more threads than were asked for")
        assert "MPI_THREAD_MULTIPLE" in result.value
        assert "progress: caller" in result.value


class Stub:
    """A stand-in for an operation, done or not, that acts while its state is read."""

    error = poll = noted = None
    inline = waited = True

    def __init__(self, is_done: bool = True, look: Callable[[], object] = lambda: None) -> None:
        self.is_done = is_done
        self._look = look
        self.state = SimpleNamespace(board=GroupBoard())

    @property
    def operation(self) -> Stub:
        self._look()
        return self


def test_drain_tolerates_operations_released_by_the_progress_thread() -> None:
    nobody: Any = None
    engine = Engine(nobody, wait="auto", oversubscribed=False)

    def drive() -> None:
        thread = threading.Thread(target=engine.progress_once)
        thread.start()
        thread.join()

    works: list[Any] = [Stub(), Stub(look=drive), Stub(), Stub()]
    engine.in_flight.extend(works)
    drain(engine, [each.state for each in works])
    assert not engine.in_flight


def forked() -> list[int]:
    """Run on ranks: a child of a process with a progress thread ends by itself."""
    with mcr.init(dispatch("thread")) as comm:
        work = comm.all_reduce(torch.ones(BY_HOST), async_op=True)
        child = os.fork()
        if child == 0:
            os._exit(7)
        _, status = os.waitpid(child, 0)
        assert work is not None
        work.wait()
        return [os.waitstatus_to_exitcode(status)]


def test_forked_child_exits_despite_progress_thread() -> None:
    for result in run_ranks(forked, 2):
        assert result.value == [7]


class Noted(GroupBoard):
    """A board that notes why its rank has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.why: list[str] = []

    def mark_failed(self, failure: Failure) -> None:
        self.why.append(failure.text)


@pytest.mark.parametrize("when", [1, 3, 200])
def test_running_poll_loop_stops_when_its_library_is_disabled(when: int) -> None:
    """The first polls, the following polls, or the engine's polls are running."""
    engine = Engine(Peers(0, ("host",), None, 1.0), wait="spin", oversubscribed=False)
    group, nobody = Group("world", (0,), 0), cast("Any", None)
    polls: list[None] = []

    def poll() -> bool:
        polls.append(None)
        if len(polls) == when:  # an operation of another thread has failed inside the library
            engine.off["lost"] = "not used any more"
            refuse_if_off(engine, operation)
        return False

    signature = Signature("all_reduce", torch.float32, (4,), 16, "world", 1, reduce_op="SUM", backend="lost")
    state, channel = GroupState(group, GroupBoard()), BackendChannel(nobody, IDLE)
    operation = BoundOperation(
        signature, lambda message: poll, engine, state, channel, channel=nobody, on_stream=False, spins=100,
        burst=range(10), timeout=30.0,
    )  # fmt: skip
    issue = operation.bind()
    assert issue.run is not None
    with pytest.raises(mcr.BackendError, match="not used any more"):
        issue.run(Message(signature, (), ()))
    assert len(polls) == when


def test_operations_in_place_share_a_message_but_not_while_it_is_in_use() -> None:
    """A handler of signals, for one, may issue an operation while the thread polls another one like it."""
    engine = Engine(Peers(0, ("host",), None, 1.0), wait="spin", oversubscribed=False)
    signature = Signature("all_reduce", torch.float32, (4,), 16, "world", 1, reduce_op="SUM", backend="local")
    group, nobody = Group("world", (0,), 0), cast("Any", None)
    started: list[Message] = []

    def start(message: Message) -> Poll:
        started.append(message)
        own, polls = message.inputs[0], 0

        def poll() -> bool:
            nonlocal polls
            polls += 1
            if own[0] == 0 and polls == 1:
                assert run is not None
                run(torch.ones(4))
            if own[0] == 2:
                raise ValueError("wrong")
            assert message.inputs[0] is message.outputs[0] is own
            return polls == 2

        return poll

    operation = BoundOperation(
        signature, start, engine, GroupState(group, GroupBoard()), BackendChannel(nobody, IDLE),
        channel=nobody, on_stream=False, spins=100, burst=range(10), timeout=30.0,
    )  # fmt: skip
    run = operation.bind().run_in_place
    assert run is not None
    values = torch.zeros(4)
    run(values)
    outer, inner = started
    assert outer is not inner
    assert outer.inputs == outer.outputs == inner.inputs == ()  # no tensor is kept alive
    run(torch.full((4,), 3.0))
    assert started[2] is outer
    with pytest.raises(mcr.BackendError, match="wrong"):
        run(torch.full((4,), 2.0))
    assert started[3].inputs[0][0] == 2.0  # the library may still write there


def issued(engine: Engine, number: int, after: IssuedWork | None) -> IssuedWork:
    """Return an operation of a group of its own, deferred if it follows another one."""
    group: Any = SimpleNamespace(
        board=Noted(), publish=lambda: None, fail=lambda error, sequence: None, unfinished=set()
    )
    channel: Any = SimpleNamespace(pending=deque(), channel=IDLE)
    operation: Any = SimpleNamespace(
        engine=engine, hooks=engine.hooks, state=group, backend_channel=channel, inline=True, backend="gloo",
        signature=SimpleNamespace(backend="gloo", is_p2p=False),
        has_failover=False,
    )  # fmt: skip
    work = IssuedWork(operation, SimpleNamespace(after=after, inputs=(), outputs=()), None, number)  # type: ignore[arg-type]
    if after is not None:
        channel.pending.append(work)
        engine.blocked.append(channel)
    return work


def test_failure_propagates_along_dependent_operations_across_groups() -> None:
    engine = Engine(Peers(0, ("host",), None, 1.0), wait="auto", oversubscribed=False)
    first = issued(engine, 1, None)
    second = issued(engine, 2, first)
    third = issued(engine, 3, second)
    other = issued(engine, 4, issued(engine, 5, None))
    # The last operation of the chain is polled before the operation that it follows.
    engine.blocked.sort(key=lambda channel: -channel.pending[0].sequence)
    engine.fail(first, mcr.OrderMismatch("ranks differ"))
    for work in (first, second, third):
        assert isinstance(work.error, mcr.OrderMismatch)
        assert work.operation.state.board.why == ["OrderMismatch: ranks differ"]  # type: ignore[attr-defined]
    assert not other.is_done
