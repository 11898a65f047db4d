"""`mcr.shrink` and `mcr.reconfigure`, which make a world of other ranks."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from datetime import timedelta

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.units import parse_duration, whole_number
from mcr_plus.errors import (
    InvalidArgument,
    NotInitialized,
)
from mcr_plus.job import reconfigure as reconfiguring
from mcr_plus.job.epoch_change import leave_epoch
from mcr_plus.job.init import current, member_of
from mcr_plus.job.rebind import inheriting
from mcr_plus.job.runtime import Runtime
from mcr_plus.membership.rules import Proposal


def shrink(
    group: Communicator | None = None,
    *,
    dead: Sequence[int] | None = None,
    timeout: float | str | timedelta = "10s",
    min_ranks: int | None = None,
) -> Communicator:
    """Make a world of the remaining ranks after others were lost; collective over the remaining ranks.

    All of them agree on the new world, and keep their order. Lost ranks are detected automatically. Living
    ranks are waited for, so every rank must call this after its `PeerLost`. Communicators and
    handles of the old world raise `Revoked` from then on. Groups have successors
    (`Communicator.successor`), to which the next call of a persistent operation binds it again. Models and
    optimizers are hooked into their group's successor; their parameters are not touched. Repeat a failed pass
    from the forward pass on. Residuals of error feedback are kept, other codec state starts anew. Operations
    in flight are abandoned: do not use tensors of unfinished operations again.

    No particular rank or host must survive, not even rank 0: ranks agree through the launcher, or through
    processes beside the ranks of each host. Ranks cut off from the majority raise instead of going
    on, so two halves of a job never both go on.

    Args:
        group: the group of which the successor is returned; the same on all ranks. None is the job.
        dead: ranks of the job that do not take part, besides those detected as lost.
        timeout: time to wait for living ranks: seconds, text such as `10s`, or a timedelta.
        min_ranks: number of ranks with which the job may go on, even if they are not a majority of those that
            may still run somewhere. At or below half of the ranks of several hosts, both sides of a partition
            may then go on, each for itself.

    Returns the successor of `group` with its remaining ranks; the successor of the job is `mcr.world()`.

    Raises:
        CommTimeout: a living rank did not call this in time. Like the next two errors, this is raised
            on all ranks that called, and all may call again.
        InvalidArgument: `dead` names a living rank, or a rank that the job does not have.
        BackendError: too few ranks remain.
        Revoked: the other ranks have declared this one lost, and gone on; or the new world exists, but
            `group` has no successor in it.
        PeerLost: a rank was lost after the new world was made; another `shrink` carries on.
        LaunchError: the job's store does not answer.

    Example:
        ```python
        try:
            mcr.all_reduce(torch.ones(4))
        except mcr.PeerLost:
            comm = mcr.shrink()
        ```
    """
    old = member_of(group)
    runtime = _own_world("shrink", "mcr.shrink_group")
    seconds = seconds_of(timeout)
    problem = _problem(runtime, dead, min_ranks)
    named = () if problem else tuple(map(operator.index, () if dead is None else dead))
    least = None if problem or min_ranks is None else operator.index(min_ranks)
    proposal = Proposal(named=named, least=least, problem=problem)
    with inheriting(runtime) as inheritance:
        new, _ = leave_epoch(runtime, proposal, seconds, "shrink")
        inheritance.give(new)
    return old.successor()


def _own_world(what: str, instead: str) -> Runtime:
    """Return the current runtime; raises `NotInitialized` if torch.distributed made it."""
    runtime = current()
    if not runtime.is_native:
        raise NotInitialized(f"{what}: this world belongs to torch.distributed; use {instead}")
    return runtime


def _problem(runtime: Runtime, dead: Sequence[int] | None, least: int | None) -> str:
    """Return the mistake in the arguments of `shrink`; empty if there is none."""
    size = runtime.world.size
    if least is not None and ((number := whole_number(least)) is None or not 1 <= number <= size):
        return f"min_ranks: expected a number of ranks from 1 to {size}, got {least!r}"
    try:
        ranks = () if dead is None else tuple(dead)
    except TypeError:
        return f"dead: expected ranks from 0 to {size - 1}, got {dead!r}"
    for rank in ranks:
        if (number := whole_number(rank)) is None or not 0 <= number < size:
            return f"dead: expected ranks from 0 to {size - 1}, got {rank!r}"
        if rank == runtime.world.rank:
            return f"dead: {rank} is this rank itself"
        if runtime.is_running(rank):
            return f"dead: rank {rank} is running"
    return ""


def seconds_of(timeout: float | str | timedelta) -> float:
    """Return a timeout in seconds; raises `InvalidArgument`."""
    try:
        return parse_duration(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
    except ValueError as error:
        raise InvalidArgument(f"timeout: {error}") from None


def reconfigure_handle() -> str:
    """Return a text with which `mcr.reconfigure` can make this process a rank of another world.

    It is valid for the current world of the process, even after a failure; a later world has another
    handle. Pass it to the other processes by any means. A process alone in its job (a newcomer) has one, too.

    Raises:
        NotInitialized: `init` has not been called.

    Example:
        ```python
        handles = mcr.world().all_gather_object(mcr.reconfigure_handle())
        ```
    """
    return reconfiguring.handle(reconfiguring.latest())


def reconfigure(
    uuid: str, handles: Collection[str], timeout: float | str | timedelta = "30s"
) -> Communicator:
    """Make a world of these processes, which may be ranks of this world or of others; collective over them.

    Works like c10d's `reconfigure`: ranks are in the order of the handles. The program names the members, so
    no agreement is needed; `mcr.shrink` detects them. Communicators and handles of the old worlds raise
    `Revoked` from then on. Groups, models and persistent operations go on as after `mcr.shrink`, with their
    ranks in the new world. Codecs keep their unsent residuals, and parameters are not
    touched: broadcast them (`mcr.broadcast_parameters`) if newcomers take part. Each process keeps its
    own configuration; all configurations must be equal.

    Args:
        uuid: name of the attempt; the same on all processes, and new for each attempt.
        handles: of all processes (`mcr.reconfigure_handle`), each once; the same on all of them. For a set,
            the library chooses the order of the ranks.
        timeout: time that the processes wait for each other.

    Returns the communicator of all ranks.

    Raises:
        CommTimeout: a process did not come in time. As with the next four errors, each process that came
            keeps its old world, and may try again with another `uuid`.
        BackendError: a process died before all had come.
        ConfigError: a process has another configuration, or another version of mcr_plus or torch.
        InvalidArgument: `handles` are invalid, name a process twice, or lack this process; they differ
            between processes; a handle is stale; the `uuid` has been used before.
        NotInitialized: `init` has not been called, or torch.distributed has made the world.
        LaunchError: the store of the first handle does not answer.
        PeerLost: a process was lost after all had come, and the old worlds are gone; call `reconfigure`
            again without it.

    Example:
        ```python
        handles = mcr.world().all_gather_object(mcr.reconfigure_handle())
        comm = mcr.reconfigure("again", handles)  # `handles[::-1]` would reverse the ranks
        ```
    """
    runtime = reconfiguring.latest()
    if not runtime.is_native:
        raise NotInitialized(
            "reconfigure: this world belongs to torch.distributed; use `reconfigure` of its first group"
        )
    texts = sorted(handles) if isinstance(handles, (set, frozenset)) else list(handles)
    with inheriting(runtime, takes_codecs=True) as inheritance:
        new = reconfiguring.reconfigure(runtime, uuid, texts, seconds_of(timeout))
        inheritance.give(new)
    return new.communicator
