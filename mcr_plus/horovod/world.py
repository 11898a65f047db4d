"""Horovod's `init`, `shutdown`, ranks and process sets."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch

from mcr_plus.backends import backend_class
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.foreign_names import OF_PROCESS_SETS, name_others
from mcr_plus.core.units import whole_numbers
from mcr_plus.engine.options import DispatchOptions
from mcr_plus.errors import InvalidArgument, McrError, NotInitialized
from mcr_plus.horovod.handle import Handle
from mcr_plus.horovod.launching import launch
from mcr_plus.horovod.negotiation import Agreed, Negotiations, Negotiator
from mcr_plus.horovod.request import HorovodInternalError, OperationRequest
from mcr_plus.job import init as runtime
from mcr_plus.job.init import Source
from mcr_plus.job.process import job
from mcr_plus.observe.record import Log, recording


class NotReady(NotInitialized, ValueError):
    """`init` has not been called; a `ValueError` as in Horovod."""


class ProcessSet:
    """A subset of the job's ranks; see `add_process_set`.

    Attributes:
        ranks: ranks of the whole job, ascending.
        process_set_id: a number, equal on all ranks; None before the set is added and after it is removed.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        numbers = whole_numbers(ranks)
        if numbers is None:
            raise InvalidArgument(f"ranks: expected integers, got {ranks!r}")
        self.ranks = sorted(numbers)
        self.process_set_id: int | None = None

    def size(self) -> int | None:
        """Return the number of ranks; None if the set is not part of the job."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's rank in the set, or -1; None if the set is not part of the job."""
        if self.process_set_id is None:
            return None
        return self.ranks.index(rank()) if self.included() else -1

    def included(self) -> bool:
        """Return True if the set contains this process."""
        return rank() in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


name_others(ProcessSet, OF_PROCESS_SETS)
global_process_set: Final = ProcessSet([])
"""All ranks of the job."""


@dataclass
class _World:
    """State created by `init`."""

    comm: Communicator
    own: bool  # True if `init` has joined the job, so `shutdown` leaves it
    negotiations: Negotiations
    everyone: Negotiator
    negotiators: dict[int, Negotiator] = field(default_factory=dict)  # by the number of the process set
    groups: dict[int, Communicator] = field(default_factory=dict)
    sets: dict[int, ProcessSet] = field(default_factory=dict)
    added: int = 0
    timeline: tuple[str, contextlib.ExitStack, Log] | None = None


_world: _World | None = None
_hooked = False


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    config: Source = None,
    backends: Sequence[str] | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Join the job, unless this process has already joined it; collective.

    `process_sets` are added at once; `"dynamic"` is accepted without effect, because sets can always be added
    later. `comm` must contain all ranks, as a list or as a communicator of mpi4py; use process sets for
    subsets. `config`, `backends`, `timeout`: see `mcr_plus.init`. If the program has called `mcr_plus.init`
    before, `shutdown` does not leave the job.
    """
    global _world, _hooked
    if is_initialized():
        return
    own = not runtime.is_initialized()
    world = runtime.init(config, backends=backends, timeout=timeout) if own else runtime.world()
    try:
        _check_comm(comm, world.size)
    except InvalidArgument:
        if own:
            runtime.finalize()
        raise
    options = world.stage_options("dispatch")
    negotiations = Negotiations(options.timeout if isinstance(options, DispatchOptions) else 300.0)
    everyone = Negotiator(negotiations, world.branch(), _launch)
    negotiations.negotiators.append(everyone)
    _world = _World(world, own, negotiations, everyone, {0: everyone}, sets={0: global_process_set})
    global_process_set.ranks = list(world.ranks)
    global_process_set.process_set_id = 0
    if not _hooked:
        _hooked = True
        atexit.register(_at_exit)
    for added in process_sets if isinstance(process_sets, Sequence) and process_sets != "dynamic" else ():
        if isinstance(added, str):
            raise InvalidArgument(
                f"process_sets: expected a list of process sets or 'dynamic', got {added!r}"
            )
        add_process_set(added)


def _check_comm(comm: Any, ranks: int) -> None:
    if comm is None:
        return
    count = comm.Get_size() if hasattr(comm, "Get_size") else None
    if count == ranks or (isinstance(comm, (list, tuple)) and list(comm) in ([], list(range(ranks)))):
        return
    raise InvalidArgument(
        f"comm: expected all {ranks} ranks of the job, got {comm!r}; pass process_sets=[ProcessSet(ranks)]"
    )


def _at_exit() -> None:
    """Shut down, unless the process exits because of an error."""
    if is_initialized() and not job.crashed:
        with contextlib.suppress(McrError):
            shutdown()


def shutdown() -> None:
    """Leave the job; collective. Operations that are still pending on other ranks fail.

    Before `init`, this does nothing.
    """
    global _world
    world = _world
    if world is None or not is_initialized():
        _world = None
        return
    stop_timeline()
    world.negotiations.leaving = True
    try:
        for one in world.negotiations.negotiators:
            world.negotiations.wait(one, lambda one=one: one.left or one.error is not None, "shutdown")  # type: ignore[misc]
    finally:
        _world = None
        for process_set in world.sets.values():
            process_set.process_set_id = None
        if world.own:
            runtime.finalize()
        else:
            for group in (*world.groups.values(), world.everyone.comm):
                group.close()


def is_initialized() -> bool:
    """Return True between `init` and `shutdown`."""
    return _world is not None and runtime.is_initialized()


def current() -> _World:
    """Return the state created by `init`. Raises `NotReady` before `init`."""
    if _world is None or not runtime.is_initialized():
        raise NotReady("Horovod has not been initialized; call hvd.init() first")
    return _world


# -- ranks ----------------------------------------------------------------------------------------------


def rank() -> int:
    """Return this process's rank in the job."""
    return current().comm.rank


def size() -> int:
    """Return the number of ranks in the job."""
    return current().comm.size


def _hosts() -> tuple[str, ...]:
    current()
    return runtime.current().world.hosts


def _local_ranks() -> list[int]:
    hosts = _hosts()
    return [number for number, host in enumerate(hosts) if host == hosts[rank()]]


def _across() -> list[str]:
    """Return the hosts that have a rank with this process's local rank."""
    hosts = _hosts()
    return [host for host in dict.fromkeys(hosts) if hosts.count(host) > local_rank()]


def local_rank() -> int:
    """Return this process's rank among the ranks of its host."""
    return _local_ranks().index(rank())


def local_size() -> int:
    """Return the number of ranks on this host."""
    return len(_local_ranks())


def cross_rank() -> int:
    """Return the index of this host among the hosts that have this local rank."""
    return _across().index(_hosts()[rank()])


def cross_size() -> int:
    """Return the number of hosts that have this local rank."""
    return len(_across())


def is_homogeneous() -> bool:
    """Return True if all hosts have the same number of ranks."""
    hosts = _hosts()
    return len({hosts.count(host) for host in hosts}) == 1


# -- available libraries --------------------------------------------------------------------------------


def mpi_built() -> bool:
    """Return True if the backend mpi is available."""
    return backend_class("mpi").availability().available


def gloo_built() -> bool:
    """Return True if the backend gloo is available."""
    return backend_class("gloo").availability().available


def nccl_built() -> int:
    """Return the version of NCCL, such as 22005; 0 if it is not available."""
    if not backend_class("nccl").availability().available or not torch.cuda.is_available():
        return 0
    from torch.cuda import nccl

    version: Any = nccl.version()
    major, minor, patch = (*version, 0, 0)[:3]
    return int(10000 * major + 100 * minor + patch)


def cuda_built() -> bool:
    """Return True if torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return True if torch was built for ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Return False: DDL is not supported."""
    return False


def ccl_built() -> bool:
    """Return False: oneCCL is not supported."""
    return False


def mpi_enabled() -> bool:
    """Return True if this job uses MPI."""
    current()
    return "mpi" in runtime.get_backends()


def gloo_enabled() -> bool:
    """Return True if this job uses gloo."""
    current()
    return "gloo" in runtime.get_backends()


def mpi_threads_supported() -> bool:
    """Return True if MPI may be called from several threads in this job."""
    if not mpi_enabled():
        return False
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


# -- recording ------------------------------------------------------------------------------------------


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: ARG001 - there are none
    """Start recording; `stop_timeline` writes the operations of rank 0 to `file_path` in Chrome's format.

    A recording in progress is ended and written first.
    """
    world = current()
    stop_timeline()
    stack = contextlib.ExitStack()
    log = stack.enter_context(recording(runtime.current().engine, world.comm.rank, world.comm.size))
    world.timeline = (file_path, stack, log)


def stop_timeline() -> None:
    """End the recording in progress, if any, and write it on rank 0."""
    world = current()
    if world.timeline is None:
        return
    path, stack, log = world.timeline
    world.timeline = None
    stack.close()
    if world.comm.rank == 0:
        log.save(path)


# -- process sets ---------------------------------------------------------------------------------------


def negotiator_of(process_set: ProcessSet) -> Negotiator:
    """Return the negotiator of a set. Raises `InvalidArgument` on a rank that is not in the set."""
    world = current()
    number = process_set.process_set_id
    if number is None:
        raise InvalidArgument(f"process_set: {process_set} is not part of the job; see hvd.add_process_set")
    negotiator = world.negotiators.get(number)
    if negotiator is None:
        raise InvalidArgument(f"process_set: rank {world.comm.rank} is not in {process_set}")
    return negotiator


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set to the job and return it, ready for use; collective over the whole job.

    Raises `InvalidArgument` (a `ValueError`) if a set of these ranks exists already.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    number = _together("add_process_set", added.ranks)
    if number is None:
        raise InvalidArgument(f"process_set: a set of ranks {added.ranks} exists already")
    added.process_set_id = number
    current().sets[number] = added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; return True if it was part of the job. Collective over the whole job.

    The set of all ranks cannot be removed.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    process_set.process_set_id = None
    return _together("remove_process_set", [number]) is not None


def _together(kind: str, numbers: list[int]) -> int | None:
    """Change the process sets on all ranks of the job, at the same point in their operations."""
    everyone = current().everyone
    name = everyone.auto_name(kind)
    everyone.check_name(name)
    handle = Handle(everyone, OperationRequest(name, kind, numbers=tuple(numbers)), [])
    result: int | None = everyone.negotiations.synchronize(everyone.enqueue(handle))
    return result


def _launch(negotiator: Negotiator, agreed: Sequence[Agreed]) -> None:
    """Launch operations, and apply changes of the process sets in between."""
    run: list[Agreed] = []
    for operation in agreed:
        change = _CHANGES.get(next(iter(operation.requests.values())).kind)
        if change is None or operation.problem:
            run.append(operation)
            continue
        launch(negotiator.comm, run)
        run = []
        handle = operation.handle
        assert handle is not None
        try:
            number = change(list(handle.request.numbers))
        except McrError as error:
            handle.fail(error)
        else:
            handle.start([], lambda number=number: number)  # type: ignore[misc]
    launch(negotiator.comm, run)


def _add(ranks: list[int]) -> int | None:
    world = current()
    if any(ranks == existing.ranks for existing in world.sets.values()):
        return None
    group = runtime.new_group(ranks)
    world.added += 1
    number = world.added
    world.groups[number] = group
    world.sets[number] = ProcessSet(ranks)
    if group.rank >= 0:
        world.negotiators[number] = Negotiator(world.negotiations, group, _launch)
        world.negotiations.negotiators.append(world.negotiators[number])
    return number


def _remove(numbers: list[int]) -> int | None:
    world = current()
    number = numbers[0]
    if world.sets.pop(number, None) is None:
        return None
    group = world.groups.pop(number)
    negotiator = world.negotiators.pop(number, None)
    if negotiator is not None:
        world.negotiations.negotiators.remove(negotiator)
        negotiator.break_off(HorovodInternalError("its process set has been removed"))
    group.close()
    return number


_CHANGES: Final[dict[str, Callable[[list[int]], int | None]]] = {
    "add_process_set": _add,
    "remove_process_set": _remove,
}
