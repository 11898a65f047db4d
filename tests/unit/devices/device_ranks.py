"""Ranks as threads of this process, on simulated devices, one at a time: whole pipelines under a model.

Each rank has the library's own pipeline, engine and communicator, over the simulated NCCL and a host library
that moves data between pinned tensors. A rank gives up its turn between the statements of its program
(`Rank.step`) and wherever the library would sleep; then `Decisions` decides whose turn it is, and whether a
query finds a device's work done, so that a run can be repeated and its alternatives be tried. Devices run
nothing before `Decisions` answers a query: results that are read too early are wrong.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from unit.devices.device_arrays import ArrayLibrary, shared
from unit.devices.device_host import HostLibrary, HostOperation, ModelBoard, ModelStore
from unit.devices.device_model import FakeStreams, Place, Shared
from unit.devices.device_tensors import OnDevice, kernels_on_devices, uploaded
from unit.devices.device_turns import Actor, Decisions, State, Stuck, Turns
from unit.devices.fake_nccl import Simulator

from mcr_plus.backends.nccl import NcclBackend, link
from mcr_plus.backends.nccl.abi import Nccl
from mcr_plus.backends.nccl.channel import NcclChannel
from mcr_plus.communicator import tensors
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.open_group import OpenGroup
from mcr_plus.config.reader import load
from mcr_plus.core import deadline as core_deadline
from mcr_plus.core import streams as core_streams
from mcr_plus.core import work as core_work
from mcr_plus.core.group import Group
from mcr_plus.core.job_store import JobStore
from mcr_plus.core.streams import Retained
from mcr_plus.engine import desync, engine
from mcr_plus.engine.engine import Engine
from mcr_plus.engine.group_runtime import GroupRuntime
from mcr_plus.engine.group_state import BackendChannel, GroupState
from mcr_plus.hierarchy.nodes import inner_groups
from mcr_plus.pipeline.pipeline import Pipeline
from mcr_plus.pipeline.stage import Context
from mcr_plus.rendezvous.processes import Peers
from mcr_plus.rendezvous.world import World
from mcr_plus.waiting import progress_thread


class Rank:
    """One rank from its program's point of view."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.size = job, rank, job.size
        self.home = job.homes[rank]
        self.home.hosts.append(job.simulator.host())
        peers = Peers(0, ("host",), None, 1.0)
        self.engine = Engine(peers, wait="auto", oversubscribed=False)
        self.engine.lock = TurnLock(job)  # type: ignore[assignment]
        job.engines.append(self.engine)
        self.engine.backends = [job.nccl[rank], HostLibrary(job, rank)]
        self.world = job.worlds[rank]
        self.channels: list[NcclChannel] = []
        self.comm: Any = self._opened(Group("world", tuple(range(job.size)), rank), job.config)

    def _opened(self, group: Group, config: Any) -> Communicator:
        opened = self._open(group, config)
        runtime: Any = SimpleNamespace(engine=self.engine, world=self.world)
        self.opened = opened  # a group lives as long as its rank
        return Communicator(runtime, opened)

    def _open(self, group: Group, config: Any) -> OpenGroup:
        job = self.job
        over_nccl = job.channel(self.rank, group)
        self.channels.append(over_nccl)
        channels = {
            "nccl": BackendChannel(self.engine.backends[0], over_nccl),
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
        pipeline = Pipeline(Context(config, self.world, group, classes, runtime, parts))
        return OpenGroup(group, pipeline, runtime, config, b"")

    def tensor(self, values: Any) -> torch.Tensor:
        """Values on this rank's device, by its current stream."""
        return uploaded(self.home, torch.as_tensor(values, dtype=torch.float32))

    def stream(self) -> Any:
        """Return another stream for the rank's calls."""
        return self.home.create()

    def under(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return self.home.under(stream)

    def library(self, *, states: bool = True) -> ArrayLibrary:
        """Return an array library next to torch; see `ArrayLibrary`."""
        return ArrayLibrary(self.home, states=states)

    def step(self) -> None:
        """The end of a statement: another rank may have its turn."""
        self.job.yields(paused=False)

    def poll(self, work: Any) -> None:
        """Poll until an operation is complete."""
        while not work.is_completed():
            self.job.yields(paused=True)

    def read(self, tensor: torch.Tensor) -> list[float]:
        """Return the values, read by the current stream."""
        values: list[float] = tensor.tolist()
        return values


class TurnLock:
    """Replaces an engine's lock: a thread that waits for the lock gives up its turn to the owner."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        while not self._lock.acquire(blocking=False):
            self._job.yields(paused=True)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Helper:
    """Replaces the library's thread that starts operations; it has turns, too, once it is woken."""

    def __init__(self, job: Job, step: Callable[[], bool], _longest: float) -> None:
        turns = job.turns
        assert turns.now is not None
        self._job, self._step = job, step
        self._actor = Actor(turns, self._run, "helper", turns.now.home, is_helper=True)

    def wake(self) -> None:
        self._actor.wake()

    def _run(self) -> None:
        home = self._actor.home
        home.hosts.append(self._job.simulator.host())
        with OnDevice(home):
            while True:
                self._actor.sleeps = not self._step()
                self._job.yields(paused=True)


class RetainedByRank:
    """Replaces a process's retained memory: ranks are threads here, and none may release another's memory."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._of: dict[FakeStreams, Retained] = {}

    def add(self, event: Any, used: object) -> None:
        turns = self._job.turns
        assert turns.now is not None
        self._of.setdefault(turns.now.home, Retained()).add(event, used)


Program = Callable[[Rank], Any]
After = Literal["nothing", "opening", "one run"]


class Job:
    """The ranks of a job, for one run of a program."""

    def __init__(self, size: int, config: Mapping[str, Any] | None = None, *, slow: int = 0) -> None:
        self.size = size
        self.simulator = Simulator()
        self.config = load(config or {})
        self.operations: dict[Any, HostOperation] = {}
        self.boards: dict[str, dict[tuple[int, int], int]] = {}
        self.engines: list[Engine] = []
        self.homes = [FakeStreams(self.simulator, rank) for rank in range(size)]
        store = JobStore(ModelStore(self.simulator))
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

    def channel(self, rank: int, group: Group) -> NcclChannel:
        channel = self.nccl[rank].open(group)
        assert isinstance(channel, NcclChannel)
        self.simulator.slow = self.slow
        return channel

    def yields(self, *, paused: bool) -> None:
        self._now.yields(paused=paused)

    @property
    def _now(self) -> Actor:
        """Return the rank that has its turn."""
        assert self._turns is not None
        assert self._turns.now is not None
        return self._turns.now

    def finds(self, what: Hashable) -> bool:
        """Return whether the rank whose turn it is finds possible work done."""
        assert self._turns is not None
        return self._turns.now is None or self._turns.now.finds(what)

    def _touch(self, what: Shared) -> None:
        if self._turns is not None and self._turns.now is not None:
            self._turns.now.touched.add(what)

    def _look(self, what: Shared) -> None:
        if self._turns is not None and self._turns.now is not None:
            self._turns.now.looked.add(what)

    def _here(self) -> int:
        return -1 if self._turns is None or self._turns.now is None else self._turns.now.home.device

    def _note(self, fact: Hashable) -> None:
        if self._turns is not None and self._turns.now is not None:
            self._turns.now.noted.add(fact)

    def _reached(self, place: Place) -> None:
        if self._turns is not None and self._turns.now is not None:
            self._turns.now.reaches(place)

    def _behind(self, place: Place) -> bool:
        if self._turns is None or self._turns.now is None:
            return False
        sequence, count = place
        return self._turns.now.reached.get(sequence, 0) >= count

    def _clock(self) -> Hashable:
        turns = self._turns
        return None if turns is None or turns.now is None else turns.now.clock()

    def _number(self) -> int:
        turns = self._turns
        return 0 if turns is None or turns.now is None else len(turns.now.noted)

    def run(
        self,
        program: Program,
        decide: Decisions | None = None,
        ends_in: Callable[[State, int], bool] | None = None,
        forgets: bool = False,
        after: After = "nothing",
        only: int | None = None,
    ) -> list[Any]:
        """Return the program's results on each rank. `ends_in`, `forgets`: see `Turns`; raises `Known`.

        `after`: when decisions begin: once all ranks have opened their groups and connected, or have run the
        program once. `only`: the rank that may learn late of completed work.
        """
        machine = self.simulator
        turns = self.turns = self._turns = Turns(machine, decide or Decisions())
        machine.lazy = True
        machine.decide = self.finds
        machine.note, machine.touch, machine.look = self._note, self._touch, self._look
        machine.here, machine.reached = self._here, self._reached
        machine.clock, machine.number, machine.behind = self._clock, self._number, self._behind
        turns.opening = 0 if after == "nothing" else self.size
        turns.only = only
        turns.ends_in, turns.forgets, turns.most_denied = ends_in, forgets, 1
        machine.sleep = lambda: self.yields(paused=True)
        results: list[Any] = [None] * self.size

        def run_rank(rank: int) -> None:
            with OnDevice(self.homes[rank]):
                opened = Rank(self, rank)
                if turns.opening:
                    for channel in opened.channels:
                        channel.connect()
                    if after == "one run":
                        program(opened)
                    turns.actors[rank].opens()
                results[rank] = program(opened)

        def starting(rank: int) -> Callable[[], None]:
            return lambda: run_rank(rank)

        with ExitStack() as inside:
            inside.enter_context(_patched(self))
            inside.callback(self._close_waiting)
            if self.config.options("compress") is not None:
                inside.enter_context(kernels_on_devices())
            for rank in range(self.size):
                Actor(turns, starting(rank), f"rank {rank}", self.homes[rank])
            turns.run()
            machine.run(turns.decide)
        if machine.stuck:
            raise Stuck("streams wait for what has not come")
        return results

    def _close_waiting(self) -> None:
        for each in self.engines:
            each.waiting.close()  # its files


@contextlib.contextmanager
def _patched(job: Job) -> Iterator[None]:
    """Turn the library's sleeps into turns and its streams into the model's."""

    def pause(*_: Any) -> None:
        job.yields(paused=True)

    def streams_of(device: torch.device) -> FakeStreams:
        return job.homes[device.index or 0]

    with pytest.MonkeyPatch.context() as patch:
        still = SimpleNamespace(sleep=pause, monotonic=lambda: 0.0, time_ns=time.time_ns)
        patch.setattr(link, "time", still)  # a program must not depend on the speed of the machine
        patch.setattr(engine, "time", still)
        patch.setattr(desync, "time", still)
        patch.setattr(progress_thread, "ProgressThread", partial(Helper, job))
        patch.setattr(core_work, "_retained", RetainedByRank(job))
        patch.setattr(link, "_POLL_STORE_EVERY", 0.0)
        patch.setattr(engine, "pause_wait", pause)
        patch.setattr(core_streams, "streams_of", streams_of)
        patch.setattr(core_deadline, "sleep", pause)
        patch.setattr(tensors, "from_dlpack", shared)
        yield
