"""Job of the process groups of backend `mcr`: the first group joins it, the last group leaves it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist

from mcr_plus.board.base import Failure
from mcr_plus.board.shared import SharedBoard
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.config import reader as configuration
from mcr_plus.config.options import Scope, options_marked
from mcr_plus.config.schema import Config
from mcr_plus.core.c10d import HashStore, PrefixStore, Store
from mcr_plus.core.group import Group
from mcr_plus.core.job_store import JobStore
from mcr_plus.engine.options import DispatchOptions
from mcr_plus.errors import ConfigError, Unsupported
from mcr_plus.hierarchy.nodes import check_nodes
from mcr_plus.job.checks import check_tables, compare_configs
from mcr_plus.job.init import join, readable
from mcr_plus.job.process import job
from mcr_plus.job.runtime import Runtime
from mcr_plus.msccl.catalog import kept
from mcr_plus.rendezvous.init_connections import settle
from mcr_plus.rendezvous.store import exchange, signed_part
from mcr_plus.rendezvous.world import World
from mcr_plus.selection.checks import use_algorithms
from mcr_plus.torch_backend.arguments import NAME

_OF_JOB: Final = set(options_marked(DispatchOptions, Scope.JOB))


class TorchJob:
    """Job of torch's groups: its ranks in torch's numbering, and its open groups."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.ranks: tuple[int, ...] = ()
        self.names = Counter[str]()
        self.groups = set[Communicator]()
        self.joined = False
        self.dropped = deque[Communicator]()
        self.prepared: Communicator | None = None  # communicator of the group that torch makes next
        # Configurations of all groups but the first, without the timeout passed by the program.
        self.configs = WeakKeyDictionary[Communicator, Config]()

    def enter(self, running: Runtime, ranks: tuple[int, ...], *, joined: bool) -> None:
        """Start to use a job. `joined`: torch's first group joined it, so it ends with the last group."""
        self.runtime, self.ranks, self.joined = running, ranks, joined
        running.torch_ranks = None if ranks == tuple(range(len(ranks))) else ranks
        self.names, self.groups = Counter(), set()

    def go_on(self, running: Runtime) -> None:
        """Use the job that replaces this one; its world is torch's first group."""
        self.enter(running, tuple(range(running.world.size)), joined=self.joined)
        self.use(running.communicator)

    def use(self, communicator: Communicator) -> None:
        """Register a group of torch; any thread may use it, one at a time, also by calls of mcr_plus."""
        for opened in communicator.opened.all:
            opened.state.changes_threads = opened.state.own_handles = True
        self.groups.add(communicator)

    def open(
        self,
        running: Runtime,
        ranks: Sequence[int],
        name: str,
        config: Config,
        seconds: float | None = None,
    ) -> Communicator:
        """Open a group of the job; collective over its ranks.

        `ranks`: ranks of the job. `seconds`: the deadline of operations, unless `config` sets one.
        """
        self.names[name] += 1
        unique = f"torch/{name}/{self.names[name]}"  # torch may use a name again
        timed = config if seconds is None else config.with_timeout(seconds)
        communicator = running.open_group(unique, tuple(ranks), timed)
        self.configs[communicator] = config
        self.use(communicator)
        return communicator

    def split(
        self, running: Runtime, parent: Communicator, ranks: Sequence[int], seconds: float | None
    ) -> Communicator:
        """Open a group of some ranks of `parent`, with its pipeline; collective over these ranks."""
        config = parent.opened.config if seconds is None else self.configs.get(parent, running.loaded)
        chosen = [parent.ranks[rank] for rank in ranks]
        return self.open(running, chosen, f"split/{'-'.join(map(str, chosen))}", config, seconds)

    def drop(self, communicator: Communicator, running: Runtime | None) -> None:
        """Mark a group of the job `running` as garbage-collected.

        This is a finalizer and may interrupt any code in any thread, so it takes no lock and does not use the
        store. Peers that share memory see the mark at once, other peers when `leave_dropped` is called.
        """
        self.dropped.append(communicator)
        if running is None or running.closed:  # also in a forked child: the group is its parent's
            return
        for runtime in communicator.opened.all:
            board = runtime.state.board
            if isinstance(board, SharedBoard) and not runtime.state.closed:
                runtime.state.publish()
                board.mark_failed(Failure(0, "its process group was dropped without shutdown"))

    def leave_dropped(self) -> None:
        """Leave the garbage-collected groups, without waiting for operations or peers."""
        while self.dropped:
            self.leave(self.dropped.popleft(), clean=False)

    def leave(self, communicator: Communicator, *, clean: bool = True) -> None:
        """Close a group; with the last group, also close the job if torch's first group has joined it.

        The first group is the world: while other groups are open, `leave` only waits for its operations.
        """
        self.leave_dropped()
        self.groups.discard(communicator)
        running = self.runtime
        if running is None or running.closed or communicator not in running.communicators:
            return
        if self.joined and not self.groups:
            running.leave(running.communicator, clean=clean)
        elif communicator is not running.communicator:
            running.leave(communicator, clean=clean)
        elif clean:
            running.wait_in_flight(communicator.opened)
        else:
            communicator.state.board.mark_failed(Failure(0, "it left the group after an error"))


torch_job: Final = TorchJob()


def communicator_of(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta | None,
    ranks: Sequence[int],
    name: str,
    options: object,
) -> Communicator:
    """Open the communicator of a group of torch, in the running job or in a new job."""
    torch_job.leave_dropped()
    if (prepared := torch_job.prepared) is not None:
        torch_job.prepared = None
        return prepared
    seconds = (timeout or dist.default_pg_timeout).total_seconds()
    members = tuple(ranks) or tuple(range(size))
    # The store may be older than this group, and may serve groups of other ranks: use a prefix.
    digest = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
    group_store = signed_part(PrefixStore(f"mcr_plus/{digest}", store), rank, size, seconds)
    job_ranks = _ranks_in_job(Group(name, members, rank), group_store, seconds)
    running = job.runtime
    if job_ranks is None or running is None:
        loaded = readable(partial(_load, options))
        running = join(loaded, group_store, rank, size, seconds)
        torch_job.enter(running, members, joined=True)
        communicator = running.communicator
    else:
        config = running.loaded
        if options is not None:
            hosts = tuple(running.world.hosts[job_rank] for job_rank in job_ranks)
            world = World(rank, size, hosts, seconds, group_store, running.world.libraries)
            config = _checked(options, running, world)
        communicator = torch_job.open(running, job_ranks, name, config, seconds)
        settle()
        return communicator
    torch_job.use(communicator)
    return communicator


def alone(timeout: timedelta | None, options: object) -> Communicator:
    """Start a job of only this process, for a first group of torch that will be reconfigured.

    Raises `Unsupported` if the process has a job.
    """
    return begin(HashStore(), 0, 1, timeout or dist.default_pg_timeout, options)


def begin(store: Store, rank: int, size: int, timeout: timedelta, options: object) -> Communicator:
    """Start a job for torch's first group; collective over its ranks. `store`: a new store.

    Raises `Unsupported` if the process has a job.
    """
    torch_job.leave_dropped()
    if job.runtime is not None and not job.runtime.closed:
        raise Unsupported("this process already has a job of mcr_plus; a process can have only one")
    seconds = timeout.total_seconds()
    part = JobStore(store) if size == 1 else signed_part(PrefixStore("mcr_plus", store), rank, size, seconds)
    running = join(readable(partial(_load, options)), part, rank, size, seconds)
    torch_job.enter(running, tuple(range(size)), joined=True)
    torch_job.use(running.communicator)
    return running.communicator


def _ranks_in_job(group: Group, store: Store, timeout: float) -> tuple[int, ...] | None:
    """Return the job ranks of a group, or None without a job; collective over the group.

    `group`: a group in the numbering of torch.distributed.

    Raises `Unsupported` on all ranks if only some ranks are in a job: they would wait for each other.
    """
    running, own, members = job.runtime, None, group.ranks
    if running is not None and not running.closed:
        if torch_job.runtime is not running:  # mcr.init has joined it
            torch_job.enter(running, tuple(range(running.world.size)), joined=False)
        own = [torch_job.ranks, running.world.rank]
    answers = exchange(store, group.rank, group.size, "job", json.dumps(own), timeout, group=group)
    jobs = dict(zip(members, map(json.loads, answers), strict=True))
    running_jobs = [job for job in jobs.values() if job is not None]
    if not running_jobs:
        return None
    first_group, _ = running_jobs[0]
    foreign = [member for member in members if member not in first_group]
    if foreign:
        raise Unsupported(
            f"group {list(members)}: ranks {foreign} are not in the first group of backend {NAME} "
            f"({first_group}); name {NAME} in init_process_group"
        )
    gone = [member for member, job in jobs.items() if job is None or job[0] != first_group]
    if gone:
        raise Unsupported(
            f"group {list(members)}: ranks {gone} have left the job of ranks {first_group}, and the others "
            "have not; destroy their groups first"
        )
    for member, (_, job_rank) in jobs.items():
        if first_group.index(member) != job_rank:
            raise Unsupported(
                f"rank {member} of torch.distributed is rank {job_rank} of the job that mcr.init has joined; "
                "use the same launcher settings for both"
            )
    return tuple(first_group.index(member) for member in members)


def _load(options: Any) -> Config:
    """Load the configuration in `pg_options`."""
    if options is not None and not isinstance(options, (str, Path, Mapping)):
        raise ConfigError(f"pg_options: expected the path of a YAML file or a mapping, got {options!r}")
    return configuration.load(options)


def _checked(options: Any, running: Runtime, world: World) -> Config:
    """Return the checked configuration of a group in a running job, equal on its ranks."""

    def load() -> Config:
        config = _load(options)
        _check_inside(config, running)
        return config

    config = compare_configs(readable(load), world)
    check_tables(config, world)
    return config


def _check_inside(config: Config, running: Runtime) -> None:
    """Raise `ConfigError` for job-wide settings that differ from the job's settings."""
    known, elsewhere = running.libraries.names, "in the configuration of init_process_group too"
    foreign = [name for name in config.backends or () if name not in known]
    if foreign:
        raise ConfigError(
            f"{config.name}: backend {foreign[0]} is not part of this job ({', '.join(known)}); name it "
            f"{elsewhere}"
        )
    of_group, of_job = config.options("dispatch"), running.config.options("dispatch")
    assert of_group is not None  # a pipeline without it is refused
    assert of_job is not None
    present = of_job.model_dump(include=_OF_JOB)
    for name, requested in of_group.model_dump(include=_OF_JOB & of_group.model_fields_set).items():
        if requested != present[name]:
            raise ConfigError(
                f"{config.name}: dispatch.{name}: {requested} is set for this group alone, but all groups "
                f"of a job share the setting and this job has {present[name]}; write it {elsewhere}"
            )
    digests = {digest for ref in running.config.algorithms for digest in ref.digests()}
    if any(digest not in digests for ref in config.algorithms for digest in ref.digests()):
        raise ConfigError(f"{config.name}: algorithms: some are not part of this job; name them {elsewhere}")
    with kept():
        use_algorithms(replace(config, algorithms=running.config.algorithms))
    check_nodes(config, running.world.size)
