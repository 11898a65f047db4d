"""The life of a job in this process: from `init` to `finalize`, or to the end of the process without it."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, cast

from mcr_plus import config as configuration
from mcr_plus import registry
from mcr_plus.backends import backend_class
from mcr_plus.communicator import Communicator
from mcr_plus.config import Config, DispatchOptions
from mcr_plus.dispatch.board import Failure, open_board
from mcr_plus.dispatch.engine import Engine, GroupState
from mcr_plus.dispatch.operation import Lane
from mcr_plus.dispatch.peers import Peers
from mcr_plus.dispatch.stage import GroupRuntime, Line
from mcr_plus.environment import LaunchEnvironment, cores, host_name, launch_environment
from mcr_plus.errors import (
    BackendUnavailable,
    ConfigError,
    InvalidArgument,
    LaunchError,
    McrError,
    NotInitialized,
    OrderMismatch,
)
from mcr_plus.interfaces import Backend, Context, World
from mcr_plus.launch.rendezvous import open_store
from mcr_plus.message import Group
from mcr_plus.pipeline import Pipeline

if TYPE_CHECKING:
    from mcr_plus.c10d import Store

_LAST_WAIT: Final = 5.0  # seconds that ranks wait for each other at a clean end


class Runtime:
    """Everything that `init` creates and `finalize` takes down."""

    def __init__(
        self,
        config: Config,
        world: World,
        backends: Mapping[str, type[Backend]],
    ) -> None:
        options = config.options("dispatch")
        assert isinstance(options, DispatchOptions)
        self.config = config
        self.world = world
        self.closed = False
        self._classes = backends
        self._peers = Peers(world.rank, world.hosts, world.store)
        local = sum(host == world.hosts[world.rank] for host in world.hosts)
        self.engine = Engine(self._peers, wait=options.wait, oversubscribed=local > cores())
        self._backends: dict[str, Backend] = {name: kind(world) for name, kind in backends.items()}
        self.engine.backends = list(self._backends.values())
        self._communicators: list[Communicator] = []
        self._groups = 0
        self.communicator = self.open_group("world", tuple(range(world.size)))

    @property
    def backend_names(self) -> list[str]:
        """The libraries of this job, in fallback order."""
        return list(self._backends)

    def open_group(self, name: str, ranks: tuple[int, ...]) -> Communicator:
        """Create the communicator of `ranks`; collective over them."""
        world = self.world
        rank = ranks.index(world.rank) if world.rank in ranks else -1
        group = Group(name, ranks, rank)
        board = open_board(world.store if rank >= 0 else None, group, world.single_host, world.timeout)
        state = GroupState(group, board)
        lines = {}
        for backend_name, backend in self._backends.items():
            if rank >= 0 and (backend_name == "local") == (group.size == 1):
                lines[backend_name] = Line(backend, backend.open(group), Lane())
        runtime = GroupRuntime(self.engine, state, lines, {})
        usable = {name: self._classes[name] for name in lines} if rank >= 0 else dict(self._classes)
        context = Context(self.config, world, group, usable, runtime)
        communicator = Communicator(self, group, Pipeline(context), runtime)
        self.engine.states.append(state)
        state.recorded = bool(self.engine.recorders)
        state.refresh()
        self._communicators.append(communicator)
        return communicator

    def new_group(self, ranks: Sequence[int]) -> Communicator:
        """See `mcr_plus.new_group`."""
        chosen = tuple(ranks)
        size = self.world.size
        wrong = [rank for rank in chosen if not isinstance(rank, int) or not 0 <= rank < size]
        if wrong or len(set(chosen)) != len(chosen) or not chosen:
            raise InvalidArgument(
                f"ranks: expected distinct ranks from 0 to {size - 1}, at least one, got {list(ranks)}"
            )
        for rank, theirs in enumerate(self.communicator.all_gather_object(chosen)):
            if theirs != chosen:
                raise OrderMismatch(
                    f"new_group: rank {self.world.rank} passed {list(chosen)}, rank {rank} passed "
                    f"{list(theirs)}; all ranks of the job must create the same groups in the same order"
                )
        self._groups += 1
        return self.open_group(f"group{self._groups}", chosen)

    def leave(self, clean: bool) -> None:
        """End of a `with mcr.init(...)` block; after an exception nothing waits for peers."""
        if not self.closed:
            self.close(clean)

    def close(self, clean: bool) -> None:
        """Take everything down. Waits for what is in flight if `clean`, and raises its first error."""
        self.closed = True
        job.communicator = None
        error: McrError | None = None
        clean = clean and not self.engine.failed
        if clean:
            try:
                for communicator in self._communicators:
                    communicator.flush()
                self.engine.drain()
            except McrError as failure:
                error, clean = failure, False
        for state in self.engine.states:
            if clean:
                state.board.mark_closed()
            else:
                state.board.mark_failed(Failure(0, "it left the job after an error"))
        clean = clean and self._meet()
        for communicator in reversed(self._communicators):
            communicator.shut(clean)
        for state in self.engine.states:
            state.close()
        for backend in self._backends.values():
            backend.close(clean)
        if error is not None:
            raise error

    def _meet(self) -> bool:
        """Wait, not for long, until all ranks are here: nobody may leave while others still need it."""
        store, world = self.world.store, self.world
        if store is None or world.size == 1:
            return True
        try:
            if store.add("closing", 1) == world.size:
                store.set("closed", "1")
            store.wait(["closed"], timedelta(seconds=_LAST_WAIT))
            # The store's own server must outlive the last question put to it.
            store.add("closing/gone", 1)
            deadline = time.monotonic() + _LAST_WAIT
            while (
                world.rank == 0 and store.add("closing/gone", 0) < world.size and time.monotonic() < deadline
            ):
                time.sleep(0.001)
        except Exception:
            return False
        return True

    def abandon(self) -> None:
        """In a forked child: the parent's groups are not ours, and neither is its end."""
        self.closed = True
        for state in self.engine.states:
            state.abandon()


class Job:
    """The process's one runtime, and how its process ends."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.communicator: Communicator | None = None  # of all ranks, between init and finalize
        self.attempts = 0
        self.crashed = False
        self.hooked = False
        self.used: dict[int, Backend] = {}

    def hook(self) -> None:
        """Be told about the end of the process, an uncaught exception, and forks."""
        if self.hooked:
            return
        self.hooked = True
        atexit.register(self.at_exit)
        os.register_at_fork(after_in_child=self.after_fork)
        previous = sys.excepthook

        def note_crash(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            self.crashed = True
            previous(kind, value, trace)

        sys.excepthook = note_crash

    def at_exit(self) -> None:
        """Leave in good order if the program has; in no case wait for ranks that will not come."""
        runtime = self.runtime
        with contextlib.suppress(McrError):
            if runtime is not None and not runtime.closed:
                runtime.close(clean=not self.crashed)
        for backend in self.used.values():
            before_exit = getattr(backend, "before_exit", None)
            if before_exit is not None:
                before_exit()
        if not self.crashed:
            for backend in self.used.values():
                finalize = getattr(backend, "finalize", None)
                if finalize is not None:
                    finalize()

    def after_fork(self) -> None:
        """A forked child has no part in the job."""
        atexit.unregister(self.at_exit)
        if self.runtime is not None:
            self.runtime.abandon()
            self.runtime = None


job = Job()
_lock = threading.Lock()


def init(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    backends: Sequence[str] | None = None,
    timeout: float | timedelta | None = None,
) -> Communicator:
    """Join the job and return the communicator of all its ranks; collective.

    Works under `mcr-plus run`, torchrun, mpirun and mpiexec (Open MPI, MPICH), srun, and as a single
    process. A default process group of torch.distributed may exist; it is not touched.

    Args:
        config: path of a YAML file, a mapping of the same form, or None: every backend that is found, the
            built-in preference, nothing compressed.
        backends: names in fallback order; overrides the configuration.
        timeout: seconds that ranks may take to find each other, and the deadline of operations unless the
            configuration's dispatch stage sets one.

    Raises:
        ConfigError: the configuration is wrong, or differs between ranks.
        NotInitialized: `init` was called before without `finalize`.
        BackendUnavailable: a backend that was asked for is missing on some rank.
        LaunchError: the ranks cannot find each other.
    """
    with _lock:
        if job.runtime is not None and not job.runtime.closed:
            raise NotInitialized("init was called before; call finalize first (or use `with mcr.init(...)`)")
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        checked = configuration.load(config)
        if backends is not None:
            checked = checked.with_backends(tuple(backends))
        if seconds is not None:
            checked = checked.with_timeout(seconds)
        environment = launch_environment()
        job.attempts += 1
        world = _join(environment, seconds or 300.0, job.attempts)
        _compare_configs(checked, world)
        chosen = _choose_backends(checked, world)
        runtime = Runtime(checked, world, chosen)
        job.hook()
        job.runtime = runtime
        job.communicator = runtime.communicator
        for backend in runtime.engine.backends:
            job.used[id(backend)] = backend
        return runtime.communicator


def _join(environment: LaunchEnvironment, timeout: float, attempt: int) -> World:
    name = host_name()
    if environment.world_size == 1:
        return World(0, 1, (name,), timeout)
    store = open_store(environment, attempt, timeout)
    store.set(f"hosts/{environment.rank}", name)
    limit = timedelta(seconds=timeout)
    keys = [f"hosts/{rank}" for rank in range(environment.world_size)]
    try:
        store.wait(keys, limit)
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise LaunchError(f"ranks {missing} did not call init within {timeout:g} s") from error
    hosts = tuple(store.get(key).decode() for key in keys)
    return World(environment.rank, environment.world_size, hosts, timeout, store)


def _gather(world: World, what: str, value: str) -> list[str]:
    """Every rank's value, through the store."""
    store = cast("Store", world.store)
    store.set(f"{what}/{world.rank}", value)
    return [store.get(f"{what}/{rank}").decode() for rank in range(world.size)]


def _compare_configs(config: Config, world: World) -> None:
    if world.store is None:
        return
    prints = _gather(world, "config", f"{configuration.fingerprint(config)} {config.name}")
    differing = [rank for rank, text in enumerate(prints) if text.split()[0] != prints[0].split()[0]]
    if differing:
        names = "; ".join(f"rank {rank}: {prints[rank].split(maxsplit=1)[1]}" for rank in (0, differing[0]))
        raise ConfigError(
            f"{config.name}: the configuration (with its tables) differs between ranks: rank 0 and ranks "
            f"{differing} ({names}); all ranks must use the same"
        )


def _choose_backends(config: Config, world: World) -> dict[str, type[Backend]]:
    """The backends of the job: those asked for, or all that are there on every rank."""
    wanted = config.backends
    classes = {
        name: backend_class(name) for name in (wanted or registry.names("backends")) if name != "local"
    }
    lacking = {}
    for name, kind in classes.items():
        found = kind.availability()
        if not found.available:
            lacking[name] = f"{found.reason}; {found.remedy}"
    everywhere = (
        _gather(world, "backends", ",".join(lacking)) if world.store is not None else [",".join(lacking)]
    )
    for rank, names in enumerate(everywhere):
        for name in filter(None, names.split(",")):
            if wanted is not None and world.size > 1:
                where = f" on rank {rank}" if name not in lacking else ""
                raise BackendUnavailable(
                    f"backend {name} was asked for and is not available{where}: {lacking.get(name, '')}"
                )
            classes.pop(name, None)
    if world.size > 1:
        classes = _without_strangers(classes, world, strict=wanted is not None)
        if not classes:
            raise BackendUnavailable(f"no backend is available on all ranks: {lacking}")
    else:
        classes = {}
    return {**classes, "local": backend_class("local")}


def _without_strangers(
    classes: dict[str, type[Backend]], world: World, *, strict: bool
) -> dict[str, type[Backend]]:
    """Without backends that this job's launcher does not serve (MPI under torchrun), unless asked for."""
    kept = dict(classes)
    for name, kind in classes.items():
        serves = getattr(kind, "serves", None)
        reason = serves(world) if serves is not None else ""
        verdicts = _gather(world, f"serves/{name}", reason)
        refusal = next((verdict for verdict in verdicts if verdict), "")
        if refusal and strict:
            raise BackendUnavailable(f"backend {name} was asked for, but {refusal}")
        if refusal:
            del kept[name]
    return kept


def finalize() -> None:
    """Wait for what is in flight, leave the job in good order, and release everything.

    Raises `NotInitialized` without a matching `init`, or the first error of an operation in flight.
    """
    runtime = current()
    runtime.close(clean=True)


def current() -> Runtime:
    """The runtime between `init` and `finalize`."""
    runtime = job.runtime
    if runtime is None:
        raise NotInitialized("mcr.init has not been called in this process")
    if runtime.closed:
        raise NotInitialized("finalize has been called; call mcr.init again to join a job")
    return runtime


def is_initialized() -> bool:
    """Whether `init` has been called, and `finalize` not since."""
    return job.runtime is not None and not job.runtime.closed


def world() -> Communicator:
    """The communicator of all ranks."""
    return job.communicator or current().communicator


def get_backends() -> list[str]:
    """Names of the libraries this job uses, in fallback order."""
    return [name for name in current().backend_names if name != "local" or current().world.size == 1]


def get_rank(group: Communicator | None = None) -> int:
    """This process's rank in `group` (None: in the job); -1 if it is not a member."""
    return (group or world()).rank


def get_world_size(group: Communicator | None = None) -> int:
    """Number of ranks in `group` (None: in the job)."""
    return (group or world()).size


def new_group(ranks: Sequence[int]) -> Communicator:
    """The communicator of `ranks`, which keep the given order; collective over the whole job.

    Other ranks get a communicator too; its `rank` is -1 and it refuses operations.
    """
    return current().new_group(ranks)
