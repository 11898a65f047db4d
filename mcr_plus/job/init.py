"""Functions that begin and end a process's job, and answer questions about it."""

from __future__ import annotations

import json
import logging
import operator
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final

from mcr_plus.backends import preferred_backends
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.config import reader as configuration
from mcr_plus.config.schema import Config
from mcr_plus.core.c10d import HashStore, Store
from mcr_plus.core.deadline import Deadline, until
from mcr_plus.core.environment import (
    LaunchEnvironment,
    host_name,
    launch_environment,
    min_ranks,
    nodes_for_torchrun,
    restarts,
    usable_cores,
)
from mcr_plus.core.job_store import JobStore
from mcr_plus.engine.closing import release_waiting
from mcr_plus.engine.options import DispatchOptions
from mcr_plus.errors import (
    AlreadyInitialized,
    ConfigError,
    InvalidArgument,
    LaunchError,
    McrError,
    NotInitialized,
    PeerLost,
)
from mcr_plus.hierarchy.nodes import check_nodes
from mcr_plus.job.checks import (
    check_descriptors,
    check_tables,
    choose_backends,
    compare_configs,
    versions_on_rank_0,
)
from mcr_plus.job.exit_barrier import shutdown_barrier
from mcr_plus.job.members import MemberWatch
from mcr_plus.job.notice import notice
from mcr_plus.job.process import job
from mcr_plus.job.runtime import Runtime
from mcr_plus.rendezvous.arrivals import STOPPED_FOR
from mcr_plus.rendezvous.init_connections import dismiss_witness, settle
from mcr_plus.rendezvous.store import (
    exchange,
    job_announced,
    open_plain_store,
    open_store,
)
from mcr_plus.rendezvous.world import World
from mcr_plus.selection.checks import use_algorithms

Source = str | Path | Mapping[str, Any] | None
"""The forms in which a configuration may be given, see `config.load`."""
_LOSS_SHOWS: Final = 0.3  # s after a store error within which the death that caused it shows
_NAP: Final = 0.01
_lock = threading.Lock()
_log = logging.getLogger("mcr_plus")


def init(
    config: Source = None,
    *,
    backends: Sequence[str] | None = None,
    timeout: float | timedelta | None = None,
) -> Communicator:
    """Join the job and return the communicator of all its ranks; collective.

    Works under `mcr-plus run`, torchrun, mpirun and mpiexec (Open MPI, MPICH), srun, and as a single process.
    A default process group of torch.distributed may exist; it is not touched.

    Args:
        config: path of a YAML file, a mapping of the same form, or None: all available backends in the
            built-in order of preference, no compression.
        backends: names in fallback order; overrides the configuration.
        timeout: seconds that ranks may take to find each other, and the deadline of operations unless the
            configuration's dispatch stage sets one.

    Raises:
        ConfigError: the configuration is wrong, or differs between ranks.
        AlreadyInitialized: `init` was called before without `finalize`.
        BackendUnavailable: a requested backend is missing on some rank.
        BackendError: a rank has too few file descriptors left.
        LaunchError: the ranks cannot find each other.
        PeerLost: a rank died during the call, or its host is cut off; or a rank ended for good before it,
            under `mcr-plus run --min-ranks`.

    Example:
        ```python
        with mcr.init(backends=["gloo"], timeout=60) as comm:  # or `mcr.finalize()` at the end
            x = torch.full((4,), 1.0 + comm.rank)
            comm.all_reduce(x)
        assert x.tolist() == [3, 3, 3, 3]  # of two ranks
        ```
    """
    with _lock:
        job.leave_dropped()
        if job.runtime is not None and not job.runtime.closed:
            raise AlreadyInitialized(
                "init was called before; use mcr.world(), or call finalize first (`with mcr.init(...)` does)"
            )
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        loaded = notice.listen(readable(partial(_load, config, backends, seconds)))
        limit = seconds if isinstance(seconds, (int, float)) and seconds > 0 else 300.0
        try:
            environment = launch_environment()
            # A restarted rank must not wait for the other ranks' `init`, which is long over.
            if restarts() and min_ranks() is not None and job_announced(environment, limit):
                world = World(0, 1, (host_name(),), limit)
                _log.warning(
                    "rank %d was started again: it is alone until mcr.elastic joins the other ranks",
                    environment.rank,
                )
            else:
                world = _find_ranks(environment, limit, _grace_of_stops(loaded))
        except McrError:
            notice.close()
            dismiss_witness()
            if isinstance(loaded, ConfigError):  # its error is closer to the cause
                raise loaded.with_traceback(None) from None
            raise
        try:
            return begin(loaded, world, seconds).communicator
        except McrError as error:
            notice.close()
            if isinstance(error, ConfigError):  # its text names file and line; our frames add nothing
                raise error.with_traceback(None) from None
            raise


def _load(config: Source, backends: Sequence[str] | None, seconds: float | None) -> Config:
    """Read a configuration, merge the arguments of `init` into it, and check its timeout."""
    loaded = configuration.load(config)
    if isinstance(backends, str):
        known = ", ".join(preferred_backends())
        raise ConfigError(f"backends: expected a list of names, got {backends!r}; known: {known}")
    if backends is not None:
        loaded = loaded.with_backends(tuple(backends))
    if seconds is not None:
        loaded.with_timeout(seconds)
    return loaded


def readable(load: Callable[[], Config]) -> Config | ConfigError:
    """Return the result of `load`, or its error, which `compare_configs` raises on all ranks."""
    try:
        return load()
    except ConfigError as error:
        return error


def join(loaded: Config | ConfigError, store: JobStore, rank: int, size: int, timeout: float) -> Runtime:
    """Do the work of `init` for ranks that have found each other; `store`, a new one, reaches all of them.

    `loaded`: see `readable`. Raises as `init` does.
    """
    with _lock:
        alone = World(0, 1, (host_name(),), timeout)
        world = alone if size == 1 else world_of(store, rank, size, timeout)
        try:
            return begin(notice.listen(loaded), world, timeout, native=False)
        except McrError:
            notice.close()
            raise


def rendezvous(timeout: float) -> tuple[Store, int, int]:
    """Return a store that reaches all ranks of the launcher's job, this rank, and the number of ranks."""
    environment = launch_environment()
    if environment.world_size == 1:
        _warn_of_siblings(environment)
        return HashStore(), 0, 1
    store = open_plain_store(environment, timeout)
    return store, environment.rank, environment.world_size


def begin(
    loaded: Config | ConfigError, world: World, timeout: float | None, *, native: bool = True
) -> Runtime:
    """Create the runtime of a world; collective over its ranks. Raises as `init` does."""
    job.install_handlers()
    loaded = _prepared(loaded, world)
    try:
        loaded = compare_configs(loaded, world, timeout)
        config = loaded if timeout is None else loaded.with_timeout(timeout)
        use_algorithms(config)
        check_descriptors(world)
        chosen = choose_backends(config, world)
        world = replace(world, libraries=versions_on_rank_0(chosen, world))
        check_tables(config, world)
        check_nodes(config, world.size)
        runtime = Runtime(config, world, chosen, loaded, timeout, native=native)
    except PeerLost:  # wait for no other rank
        job.hooks_closing()
        dismiss_witness()
        raise
    except McrError:
        job.hooks_closing()
        job.all_ended = shutdown_barrier(world, "refused")  # so that every rank can read the reason
        if job.all_ended:  # all ranks refuse, so watch none of them any more
            settle()
        raise
    job.begin(runtime)
    settle()
    return runtime


def _prepared(loaded: Config | ConfigError, world: World) -> Config | ConfigError:
    """Call `prepare` of the hooks; an error counts as a configuration error."""
    if isinstance(loaded, ConfigError):
        return loaded
    try:
        for hook in job.hooks:
            hook.prepare(loaded, world)
    except ConfigError as error:
        return ConfigError(f"{loaded.name}: {error}")
    return loaded


def _grace_of_stops(loaded: Config | ConfigError) -> float:
    """Return the configured seconds after which a stopped rank is lost."""
    options = None if isinstance(loaded, ConfigError) else loaded.options("dispatch")
    if not isinstance(options, DispatchOptions):
        return STOPPED_FOR
    return options.stop_grace


def _warn_of_siblings(environment: LaunchEnvironment) -> None:
    """Log that a process of multiprocessing, or in one of several pods, is a job of its own."""
    if environment.launcher == "single" and (nodes := nodes_for_torchrun()) is not None:
        _log.warning("PET_NNODES=%s, but this is a job of one rank: start the program by torchrun", nodes)
    processes = sys.modules.get("multiprocessing.process")
    if environment.launcher == "single" and processes is not None and processes.parent_process() is not None:
        _log.warning(
            "this process was started by multiprocessing, and is a job of one rank: no RANK and WORLD_SIZE "
            "are set. Ranks of one job (torch.multiprocessing.spawn) need RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT in os.environ before init"
        )


def _find_ranks(environment: LaunchEnvironment, timeout: float, stopped: float) -> World:
    if environment.world_size == 1:
        _warn_of_siblings(environment)
        return World(0, 1, (host_name(),), timeout)
    store = open_store(environment, timeout, stopped)
    return world_of(store, environment.rank, environment.world_size, timeout)


def world_of(store: JobStore, rank: int, size: int, timeout: float) -> World:
    """Return the world of ranks that share a part of a store; collective over them."""
    mine = json.dumps([host_name(), sum(1 << core for core in usable_cores())])
    places = [json.loads(text) for text in exchange(store, rank, size, "hosts", mine, timeout)]
    hosts = tuple(host for host, _ in places)
    here = reduce(operator.or_, (mask for host, mask in places if host == hosts[rank]))
    return World(rank, size, hosts, timeout, store, cores=here.bit_count(), secret=store.secret)


def finalize() -> None:
    """Wait for operations in flight, leave the job in good order, and release everything.

    Calls after the first do nothing. Raises `NotInitialized` if `init` has never been called, or the first
    error of an operation in flight.
    """
    runtime = job.runtime or current()
    if not runtime.closed:
        runtime.close(clean=True)


def reset() -> Communicator:
    """Replace a failed world by a new one with the same ranks and configuration.

    Collective over all ranks of the job, all of which must live. It is for programs that continue after a
    failed operation, such as an `OrderMismatch`: the operation's group can no longer be used, nor can the
    world if the group has all ranks. Operations in flight are not waited for; the tensors of incomplete
    operations must not be used again. Communicators, wrapped models, hooks and persistent operations of the
    old world are closed; codec state is lost unless it was saved (`mcr.state_dict`). Memory of operations
    that never ended stays allocated until the process ends, except gloo's, whose connections are closed. For
    each group in which an MPI operation failed or is in flight, MPI's communicators stay allocated too:
    three, and one per signature that the group has used on MPI more than once, 192 at most. Communicators of
    other groups are freed.

    Returns the communicator of all ranks. If it raises, the old world is closed (see `PeerLost` for the
    exception), and all ranks may call `init` again, with another configuration if necessary.

    Raises:
        NotInitialized: there is no world, or torch.distributed made it: then destroy its process group.
        PeerLost: a rank is lost, which the others see within about a second. Until all ranks have called
            this, the old world stays as it is, so that the remaining ranks may call `shrink`.
        LaunchError: a rank has not called this within the time that `init` gave ranks to find each other.
        BackendUnavailable: the configuration names a library that has become unusable, as MPI does after an
            error inside it.

    Example:
        ```python
        comm = mcr.init(backends=["gloo"])
        try:
            comm.all_reduce(torch.ones(2 + comm.rank))  # another size on each rank
        except mcr.OrderMismatch:
            comm = mcr.reset()
        x = torch.ones(2)
        comm.all_reduce(x)
        assert x.tolist() == [2, 2]  # of two ranks
        mcr.finalize()
        ```
    """
    runtime = current()
    if not runtime.is_native:
        raise NotInitialized(
            "reset: this world belongs to torch.distributed; destroy its process group and make a new one"
        )
    failure = _await_callers_of_reset(runtime)
    runtime.prepare_reset()
    sight, roster = runtime.hand_over(), runtime.roster
    watch = None if roster is None else MemberWatch(roster, runtime.config, sight)
    if failure is None:  # all ranks are here, and none uses the old world any more
        for backend in runtime.engine.backends:
            backend.disconnect()
    runtime.close(clean=False)
    try:
        if failure is not None:
            raise failure
        with _lock:
            return begin(runtime.loaded, _fresh_world(runtime, watch), runtime.timeout).communicator
    except McrError as error:
        runtime.closed_because = f"reset has failed ({error})"
        cause = error if watch is None or isinstance(error, PeerLost) else watch.error() or error
        text = f"reset: {cause}. The old world is closed"
        if isinstance(cause, PeerLost):
            raise cause.again(text) from error
        raise type(cause)(f"{text}; to go on, let all ranks call mcr.init") from error
    finally:
        if sight is not None:
            sight.close()


def _await_callers_of_reset(runtime: Runtime) -> LaunchError | None:
    """Wait until all ranks have called `reset`, so that no world is closed if a rank is lost before.

    Returns the error if a rank does not call it in time. Raises `PeerLost` if a rank is lost.
    """
    world = runtime.world
    if world.store is None:
        return None
    release_waiting(runtime.engine, runtime.lost_ranks(), "reset")
    lost = partial(runtime.lost_among, range(world.size))
    store = JobStore(world.store, timeout=world.timeout, lost=lost)
    try:
        exchange(store, world.rank, world.size, "reset/called", "", world.timeout)
    except PeerLost as error:
        loss = error
    except LaunchError as error:
        found = until(lost, Deadline(_LOSS_SHOWS), _NAP)  # for the loss of the rank that served the store
        if found is None:
            return error
        loss = found
    else:
        return None
    raise loss.again(f"reset: {loss}; the remaining ranks can continue with mcr.shrink()")


def _fresh_world(runtime: Runtime, watch: MemberWatch | None) -> World:
    world = runtime.world
    if world.store is not None:
        assert watch is not None
        idle = runtime.idle_channels
        store = JobStore(world.store, timeout=world.timeout, lost=watch.error)
        mine = json.dumps([secrets.token_hex(8), idle.closable(runtime.engine.off)])
        texts = exchange(store, world.rank, world.size, "reset", mine, world.timeout)
        (name, _), *_ = answers = [json.loads(text) for text in texts]
        # From here on no rank uses the old world.
        idle.close_common(
            world.rank, [{(of, tuple(ranks), by) for of, ranks, by in closable} for _, closable in answers]
        )
        for group in list(world.stores):
            runtime.leave_store(group)
        kept = runtime.roster.kept if runtime.roster is not None else None
        part = JobStore(world.store.part(name), timeout=world.timeout, lost=watch.error)
        world = world_of(part, world.rank, world.size, world.timeout)
        world = replace(world, kept=None if kept is None else kept.part(f"members/{name}"))
    for state in runtime.engine.states:  # all ranks have left
        state.board.close()
    return world


def current() -> Runtime:
    """Return the runtime between `init` and `finalize`."""
    runtime = job.runtime
    if runtime is None:
        raise NotInitialized("mcr.init has not been called in this process")
    if runtime.closed:
        raise NotInitialized(f"{runtime.closed_because}; call mcr.init again to join a job")
    return runtime


def is_initialized() -> bool:
    """Return whether `init` has been called, and not `finalize` since."""
    return job.runtime is not None and not job.runtime.closed


def world() -> Communicator:
    """Return the communicator of all ranks."""
    return job.communicator or current().communicator


def member_of(group: Communicator | None) -> Communicator:
    """Return `group`, or the communicator of all ranks for None."""
    if group is None:
        return job.communicator or current().communicator
    if not isinstance(group, Communicator):
        raise InvalidArgument(f"group: expected a Communicator or None, got {group!r}")
    return group


def get_backends() -> list[str]:
    """Return the names of the libraries that this job uses, in fallback order."""
    return current().libraries.names


def get_rank(group: Communicator | None = None) -> int:
    """Return this process's rank in `group` (None: in the job); -1 if it is not a member."""
    return member_of(group).rank


def get_world_size(group: Communicator | None = None) -> int:
    """Return the number of ranks in `group` (None: in the job)."""
    return member_of(group).size


def new_group(ranks: Sequence[int]) -> Communicator:
    """Create the communicator of `ranks`, in the given order; collective over the whole job.

    Other ranks get a communicator too; its `rank` is -1 and it refuses operations. A group is closed by its
    `close()`, at the end of a `with` block, or some time after all its ranks have dropped it.

    Args:
        ranks: distinct ranks of the job, at least one; the same on all ranks of the job.

    Raises:
        InvalidArgument: `ranks` are not ranks of the job, or contain a duplicate.
        OrderMismatch: ranks passed different lists.
        BackendError: a rank has too few file descriptors left.

    Example:
        ```python
        with mcr.new_group([1, 0]) as pair:
            x = torch.full((2,), float(pair.rank))  # 1 on rank 0 of the job, 0 on rank 1
            mcr.broadcast(x, 1, group=pair)  # `src` is a rank of the job
        assert x.tolist() == [0, 0]
        ```
    """
    return current().new_group(ranks)
