"""Ranks that are threads of this process, on simulated devices, one at a time: whole pipelines under a model.

Each rank has the library's own pipeline, engine and communicator, over the simulated NCCL and a host library
that moves data between pinned tensors. A rank gives up its turn between the statements of its program
(`Rank.step`) and wherever the library would sleep; whose turn it is then, and whether a query finds work of a
device done, is decided by `Decisions`, so that a run can be repeated and its alternatives be tried. Devices
run nothing before that decides a query: results that are read too early are wrong.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_arrays import ArrayLibrary, shared
from device_model import FakeStreams
from device_tensors import OnDevice, kernels_on_devices, ranges, uploaded
from fake_nccl import Simulator

from mcr_plus.backends.base import NATIVE, Backend, Channel, Poll, Preference, Start, Support
from mcr_plus.backends.nccl import NcclBackend, link
from mcr_plus.backends.nccl.abi import Nccl
from mcr_plus.communicator import arrays, tensors
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.open_group import OpenGroup
from mcr_plus.config.reader import load
from mcr_plus.core import streams as core_streams
from mcr_plus.core.c10d import HashStore, WrappedStore
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature
from mcr_plus.dispatch.board.base import GroupBoard, PeerStatus
from mcr_plus.dispatch.engine import Engine
from mcr_plus.dispatch.group_runtime import GroupRuntime
from mcr_plus.dispatch.group_state import BackendChannel, GroupState
from mcr_plus.errors import BackendError
from mcr_plus.hierarchy.nodes import inner_groups
from mcr_plus.pipeline.pipeline import Pipeline
from mcr_plus.pipeline.stage import Context
from mcr_plus.rendezvous.processes import Peers
from mcr_plus.rendezvous.world import World


class Decisions:
    """What is decided in a run: the first decisions are `given`, later ones `pick` chooses.

    `made`: the choices, each with the number of alternatives.
    """

    def __init__(self, given: Sequence[int] = (), pick: Callable[[int], int] = lambda _: 0) -> None:
        self.given = given
        self.pick = pick
        self.made: list[tuple[int, int]] = []

    def __call__(self, count: int) -> int:
        if count == 1:
            return 0
        number = len(self.made)
        choice = self.given[number] if number < len(self.given) else self.pick(count)
        self.made.append((choice, count))
        return choice


class Stuck(Exception):
    """No rank can go on."""


class Known(Exception):
    """The run has come to a state from which another run has gone on."""


class Turns:
    """Whose turn it is. `machine.version` says whether anything has changed since a rank paused."""

    def __init__(self, job: Job, decide: Decisions) -> None:
        self.job = job
        self.decide = decide
        self.back = threading.Semaphore(0)
        self.actors: list[Actor] = []
        self.ended: Exception | None = None
        self.now: Actor | None = None
        self.states: set[Any] | None = None  # in which runs had a choice; a run that comes to one again ends

    def run(self) -> None:
        """Until all ranks have ended. Raises `Stuck`, or what a rank raised."""
        machine = self.job.simulator
        while alive := [actor for actor in self.actors if not actor.ended]:
            able = [actor for actor in alive if actor.seen != machine.version]
            if not able:
                before = machine.version
                machine.pass_time()
                if machine.version == before:
                    self.end(Stuck(f"{len(alive)} ranks wait, and nothing can run"))
                continue
            if self.ended is None and self._is_known(alive, able):
                self.end(Known())
            self.now = able[self.decide(len(able)) if self.ended is None else 0]
            self.now.go.release()
            self.back.acquire()
            if self.now.error is not None and self.ended is None:
                self.end(self.now.error)
        if self.ended is not None:
            raise self.ended

    def _is_known(self, alive: Sequence[Actor], able: Sequence[Actor]) -> bool:
        """Whether another run has been in this state, after the decisions that were given for this run.

        What a rank has done follows from what it has been told; what devices have done, from what all have.
        """
        if self.states is None or len(self.decide.made) < len(self.decide.given):
            return False
        state = tuple((each.told, each in alive, each in able) for each in self.actors)
        if state in self.states:
            return True
        self.states.add(state)
        return False

    def end(self, error: Exception) -> None:
        """Make all ranks raise where they are."""
        self.ended = error
        for actor in self.actors:
            actor.seen = -1


class Actor:
    """A thread that runs when it is its turn."""

    def __init__(self, turns: Turns, function: Callable[[], None], name: str) -> None:
        self.turns = turns
        self.go = threading.Semaphore(0)
        self.seen = -1  # the version at which it paused
        self.ended = False
        self.error: Exception | None = None
        self.denied = set[int]()  # entries that a query of its has once found unfinished
        self.told = 0  # a digest of the answers to its queries
        self._function = function
        turns.actors.append(self)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.go.acquire()
        try:
            if self.turns.ended is None:
                self.told = 1
                self._function()
        except Exception as error:
            self.error = error
        self.ended = True
        self.turns.back.release()

    def yields(self, *, paused: bool) -> None:
        """Give up the turn; `paused`: until something changes."""
        self.seen = self.turns.job.simulator.version if paused else -1
        if not paused:
            self.told = hash((self.told, "a statement"))
        self.turns.back.release()
        self.go.acquire()
        if self.turns.ended is not None:
            raise Stuck("the run has ended")


@dataclass
class HostOperation:
    """An operation of the host library: what each rank has given."""

    messages: dict[int, Message] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)  # the library's thread on a rank, for the detector
    entry: Any = None
    done: bool = False


class HostLibrary(Backend):
    """A library that reads and writes host memory at any time between an operation's start and its end."""

    name = "gloo"
    on_stream = False
    spins = 1
    host_driven = True
    preference = Preference(cpu=0, cuda=2)

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self.rank = job, rank

    @classmethod
    def availability(cls) -> Any:
        raise NotImplementedError

    @classmethod
    def supports(cls, signature: Signature) -> Support:
        return NATIVE

    def open(self, group: Group) -> Channel:
        return HostChannel(self._job, group)

    def progress(self) -> None:
        pass

    def close(self, clean: bool) -> None:
        pass


class HostChannel(Channel):
    def __init__(self, job: Job, group: Group) -> None:
        self._job, self._group, self._count = job, group, 0
        self._sent: dict[Any, int] = {}

    def close(self) -> None:
        pass

    def bind(self, signature: Signature) -> Start:
        def start(message: Message) -> Poll:
            job, me, group = self._job, self._group.rank, self._group
            if self._count == job.fails - 1:
                raise BackendError("the host library has failed")
            machine = job.simulator
            if signature.is_p2p:
                ends = (me, message.peer) if signature.kind == "send" else (message.peer, me)
                path = ends, message.match_tag
                self._sent[path] = self._sent.get(path, 0) + 1
                key: Any = (group.name, path, self._sent[path])
                needed = {each for each in ends if each is not None}
            else:
                self._count += 1
                key, needed = (group.name, self._count), set(range(group.size))
            operation = job.operations.setdefault(key, HostOperation())
            operation.messages[me] = message
            user = operation.users[me] = machine.detector.new("host library")
            reads = [each for t in message.inputs for each in ranges(t)]
            writes = [each for t in message.outputs for each in ranges(t)]
            machine.detector.order(user, machine.host())
            machine.detector.launch(user, f"{signature.kind} begins", reads, writes)
            machine.version += 1

            def poll() -> bool:
                if not operation.done:
                    if operation.messages.keys() < needed or not job.finds(operation):
                        return job.answers(False)
                    for rank, each in operation.messages.items():
                        inside = [r for t in each.inputs for r in ranges(t)]
                        outside = [r for t in each.outputs for r in ranges(t)]
                        machine.detector.launch(operation.users[rank], signature.kind, inside, outside)
                    move(signature, [operation.messages[rank] for rank in sorted(needed)])
                    operation.done = True
                    machine.version += 1
                machine.detector.order(machine.host(), operation.users[me])
                return job.answers(True)

            return poll

        return start


def move(signature: Signature, messages: Sequence[Message]) -> None:
    """One operation of the host library, given all ranks' messages in the order of ranks."""
    kind, size, root = signature.kind.removesuffix("_v"), len(messages), signature.root or 0
    given = [message.inputs[0].reshape(-1).clone() for message in messages if message.inputs]

    def parts(rank: int, values: torch.Tensor) -> Sequence[torch.Tensor]:
        counts = list(messages[rank].input_counts or [values.numel() // size] * size)
        return torch.split(values, counts)

    def result(rank: int) -> torch.Tensor:
        if kind in ("all_reduce", "reduce", "reduce_scatter"):
            stacked = torch.stack(given)
            total = stacked.amax(0) if signature.reduce_op == "MAX" else stacked.sum(0)
            total = (total / size if signature.reduce_op == "AVG" else total).to(stacked.dtype)
            return parts(rank, total)[rank] if kind == "reduce_scatter" else total
        if kind in ("all_gather", "gather"):
            return torch.cat(given)
        if kind == "all_to_all":
            return torch.cat([parts(sender, values)[rank] for sender, values in enumerate(given)])
        if kind == "scatter":
            return parts(root, given[0])[rank]
        assert kind in ("broadcast", "send", "recv"), kind
        return given[root if kind == "broadcast" and len(given) == size else 0]

    for rank, message in enumerate(messages):
        if message.outputs and (kind != "reduce" or rank == root):
            message.outputs[0].view(-1).copy_(result(rank))


class ModelBoard(GroupBoard):
    """A board that ranks share in memory."""

    def __init__(self, job: Job, group: Group) -> None:
        super().__init__()
        self._job, self._rank, self._size = job, group.rank, group.size
        self._posted: dict[tuple[int, int], int] = job.boards.setdefault(group.name, {})

    def post(self, sequence: int, digest: int, text: bytes) -> None:
        self._posted[self._rank, sequence] = digest
        self._job.simulator.version += 1

    def read(self, rank: int, sequence: int) -> PeerStatus:
        return PeerStatus(sequence, self._posted.get((rank, sequence)))

    def all_match(self, sequence: int, digest: int) -> bool:
        return self._job.answers(
            all(self._posted.get((rank, sequence)) == digest for rank in range(self._size))
        )


class ModelStore(WrappedStore):
    """A store whose changes let ranks go on that have paused."""

    def __init__(self, machine: Simulator) -> None:
        super().__init__(HashStore())
        self._machine = machine

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        self._machine.version += 1


class Rank:
    """One rank, as its program sees it."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.size = job, rank, job.size
        self.home = job.homes[rank]
        self.home.hosts.append(job.simulator.host())
        peers = Peers(0, ("host",), None, 1.0)
        self.engine = Engine(peers, wait="auto", oversubscribed=False)
        self.engine.backends = [job.nccl[rank], HostLibrary(job, rank)]
        self.world = job.worlds[rank]
        self.comm: Any = self._opened(Group("world", tuple(range(job.size)), rank), job.config)

    def _opened(self, group: Group, config: Any) -> Communicator:
        opened = self._open(group, config)
        runtime: Any = SimpleNamespace(engine=self.engine, watcher=None, world=self.world)
        self.opened = opened  # a group lives as long as its rank
        return Communicator(runtime, opened)

    def _open(self, group: Group, config: Any) -> OpenGroup:
        job = self.job
        channels = {
            "nccl": BackendChannel(self.engine.backends[0], job.channel(self.rank, group)),
            "gloo": BackendChannel(self.engine.backends[1], self.engine.backends[1].open(group)),
        }
        state = GroupState(group, ModelBoard(job, group))
        runtime = GroupRuntime(self.engine, state, channels, {})
        self.engine.states.append(state)
        known: Any = {"nccl": NcclBackend, "gloo": HostLibrary}
        classes = {name: known[name] for name in config.backends or known}
        parts: dict[str, Pipeline] = {}
        for part, inner in inner_groups(config, self.world.hosts, group).items():
            parts[part] = self._open(inner, config.below("hierarchical")).pipeline
        return OpenGroup(
            group, Pipeline(Context(config, self.world, group, classes, runtime, parts)), runtime, config
        )

    def tensor(self, values: Any) -> torch.Tensor:
        """Values on this rank's device, by its current stream."""
        return uploaded(self.home, torch.as_tensor(values, dtype=torch.float32))

    def stream(self) -> Any:
        """Another stream, under which the rank can issue."""
        return self.home.create()

    def under(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return self.home.under(stream)

    def library(self, *, states: bool = True) -> ArrayLibrary:
        """An array library beside torch; see `ArrayLibrary`."""
        return ArrayLibrary(self.home, states=states)

    def step(self) -> None:
        """The end of a statement: another rank may have its turn."""
        self.job.yields(paused=False)

    def poll(self, work: Any) -> None:
        """Poll until an operation is complete."""
        while not work.is_completed():
            self.job.yields(paused=True)

    def read(self, tensor: torch.Tensor) -> list[float]:
        """The values, read by the current stream."""
        values: list[float] = tensor.tolist()
        return values


Program = Callable[[Rank], Any]


class Job:
    """All ranks of a job, for one run of a program."""

    def __init__(self, size: int, config: Mapping[str, Any] | None = None, *, slow: int = 0) -> None:
        self.size = size
        self.simulator = Simulator()
        self.config = load(config or {})
        self.operations: dict[Any, HostOperation] = {}
        self.boards: dict[str, dict[tuple[int, int], int]] = {}
        self.homes = [FakeStreams(self.simulator, rank) for rank in range(size)]
        store = ModelStore(self.simulator)
        self.worlds = [World(rank, size, ("host",) * size, 60.0, store, cores=size) for rank in range(size)]
        self.nccl = [
            NcclBackend(
                self.worlds[rank],
                nccl=Nccl(self.simulator.library()),
                streams=lambda rank=rank: self.homes[rank],  # type: ignore[misc]
            )
            for rank in range(size)
        ]
        self.slow = slow
        self.fails = 0  # which of the host library's operations fails, from 1; 0 for none
        self._turns: Turns | None = None

    def channel(self, rank: int, group: Group) -> Channel:
        channel = self.nccl[rank].open(group)
        self.simulator.slow = self.slow
        return channel

    def yields(self, *, paused: bool) -> None:
        turns = self._turns
        assert turns is not None
        assert turns.now is not None
        turns.now.yields(paused=paused)

    def finds(self, what: object) -> bool:
        """Whether a rank finds done what may be done by now; it does at the second query at the latest."""
        turns = self._turns
        assert turns is not None
        actor = turns.now
        if actor is None or id(what) in actor.denied or turns.decide(2):
            return True
        actor.denied.add(id(what))
        self.simulator.version += 1
        return False

    def answers(self, answer: bool) -> bool:
        """Note what the rank that has its turn is told."""
        turns = self._turns
        if turns is not None and turns.now is not None:
            turns.now.told = hash((turns.now.told, answer))
        return answer

    def run(
        self, program: Program, decide: Decisions | None = None, states: set[Any] | None = None
    ) -> list[Any]:
        """What the program returns on each rank. `states`: see `Turns`; raises `Known`."""
        turns = self._turns = Turns(self, decide or Decisions())
        machine = self.simulator
        machine.lazy = True
        machine.decide = self.finds
        machine.tell = self.answers
        turns.states = states
        machine.sleep = lambda: self.yields(paused=True)
        results: list[Any] = [None] * self.size

        def run_rank(rank: int) -> None:
            with OnDevice(self.homes[rank]):
                results[rank] = program(Rank(self, rank))

        def starting(rank: int) -> Callable[[], None]:
            return lambda: run_rank(rank)

        with ExitStack() as inside:
            inside.enter_context(_patched(self))
            if self.config.options("compress") is not None:
                inside.enter_context(kernels_on_devices())
            for rank in range(self.size):
                Actor(turns, starting(rank), f"rank {rank}")
            turns.run()
            machine.run(turns.decide)
        if machine.stuck:
            raise Stuck("streams wait for what has not come")
        return results


@contextlib.contextmanager
def _patched(job: Job) -> Iterator[None]:
    """The library's sleeps as turns, and its streams as those of the model."""

    def pause(*_: Any) -> None:
        job.yields(paused=True)

    def streams_of(device: torch.device) -> FakeStreams:
        return job.homes[device.index or 0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "time", SimpleNamespace(sleep=pause, monotonic=monotonic))
        patch.setattr(link, "_POLL_STORE_EVERY", 0.0)
        patch.setattr(Engine, "_pause", pause)
        patch.setattr(core_streams, "streams_of", streams_of)
        patch.setattr(arrays, "time", SimpleNamespace(sleep=pause))
        patch.setattr(tensors, "from_dlpack", shared)
        yield
