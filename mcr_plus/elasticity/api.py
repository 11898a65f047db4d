"""Worlds of other ranks: `mcr.shrink` and `mcr.reconfigure`."""

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
    """Make a world of the ranks that are left, after others were lost; collective over those that are left.

    All of them get the same ranks, by the order that they had. Ranks that are lost are found by themselves.
    A rank that lives is waited for, so all must call this: after a `PeerLost`, each does. Communicators and
    handles of the old world raise `Revoked` from then on; groups have successors
    (`Communicator.successor`), in which persistent operations are bound again by their next call. Models and
    optimizers are hooked into the successor of their group; their parameters are not touched, and a pass that
    failed is to be repeated from the forward pass on. Residuals of error feedback are kept, other state of
    codecs begins anew. Nothing in flight is waited for, and tensors of what had not ended must not be used
    again.

    No rank or host is needed, that of rank 0 included: what ranks agree on is in the launcher, or in
    processes beside the ranks of each host. Ranks that are cut off from most others raise instead of going
    on, so that a job never goes on twice.

    Args:
        group: whose survivors are returned; the same on all ranks. None is the job.
        dead: ranks of the job that do not take part, besides those that are found lost.
        timeout: how long ranks that live are waited for: seconds, text such as `10s`, or a timedelta.
        min_ranks: the ranks with which the job may go on, where they need not be a majority of those that
            may still run somewhere. At or below half of the ranks of several hosts, both sides of a partition
            may then go on, each for itself.

    Returns the successor of `group`, of those of its ranks that are left; that of all is `mcr.world()`.

    Raises:
        CommTimeout: a rank that lives has not called it in time. Like the next two errors, this is raised
            on all ranks that have called it, and all may call it again.
        InvalidArgument: `dead` names a rank that lives, or none of the job.
        BackendError: the ranks that are left are too few.
        Revoked: the other ranks have declared this one lost, and have gone on; or the new world is there, and
            `group` has no successor in it.
        PeerLost: a rank has been lost after the new world was made; another `shrink` carries on.
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
    """The present runtime; raises `NotInitialized` if torch.distributed has made it."""
    runtime = current()
    if not runtime.is_native:
        raise NotInitialized(f"{what}: this world belongs to torch.distributed; use {instead}")
    return runtime


def _problem(runtime: Runtime, dead: Sequence[int] | None, least: int | None) -> str:
    """Why arguments of `shrink` are wrong; empty if they are not."""
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
    """A timeout of a program in seconds; raises `InvalidArgument`."""
    try:
        return parse_duration(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
    except ValueError as error:
        raise InvalidArgument(f"timeout: {error}") from None


def reconfigure_handle() -> str:
    """A text by which `mcr.reconfigure` can make this process a rank of another world.

    It is good for the world that the process has now, also if that has failed; a later world has another
    one. Pass it to the other processes by any means. A process that is alone in its job, such as a newcomer,
    has one too.

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

    As c10d's `reconfigure`: the ranks are in the order of the handles. The program says who belongs to it, so
    nothing is agreed on; `mcr.shrink` finds out. Communicators and handles of the old worlds raise `Revoked`
    from then on; groups, models and persistent operations go on as after `mcr.shrink`, with those of their
    ranks that are in the new world. Codecs keep what they have not sent yet, and nobody's parameters are
    touched: broadcast them (`mcr.broadcast_parameters`) where newcomers take part. Each process keeps its
    own configuration, and these must be the same.

    Args:
        uuid: names the attempt; the same on all processes, and new for each attempt.
        handles: of all processes (`mcr.reconfigure_handle`), each once; the same on all of them. In a set,
            the ranks are in an order of ours.
        timeout: how long they wait for each other.

    Returns the communicator of all ranks.

    Raises:
        CommTimeout: a process has not come in time. As with the next four errors, each process that has come
            keeps its old world, and may try again with another `uuid`.
        BackendError: a process has died before all had come.
        ConfigError: a process has another configuration, or another version of mcr_plus or torch.
        InvalidArgument: `handles` are no handles, have a process twice, or lack this one; they differ between
            processes; a handle is stale; the `uuid` has been used before.
        NotInitialized: `init` has not been called, or torch.distributed has made the world.
        LaunchError: the store in which the first handle is met does not answer.
        PeerLost: a process has been lost after all had come, and the old worlds are gone; `reconfigure`
            without it may follow.

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
