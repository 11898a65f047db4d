"""`torch.distributed.shrink_group` for backend `mcr`, because torch's version refuses Python groups."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mcr_plus.core.c10d import PrefixStore, ProcessGroup
from mcr_plus.core.units import whole_numbers
from mcr_plus.errors import InvalidArgument, NotInitialized
from mcr_plus.job.epoch_change import Regrouping, leave_epoch
from mcr_plus.job.init import current
from mcr_plus.job.rebind import inheriting
from mcr_plus.membership.rules import Proposal
from mcr_plus.torch_backend.jobs import torch_job
from mcr_plus.torch_backend.living_group import SHRINK_ABORT, SHRINK_DEFAULT, LivingGroup


def shrink_group(
    ranks_to_exclude: list[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: object = None,
) -> ProcessGroup:
    """Make a process group without some ranks, dead or alive; collective over the remaining ranks.

    `torch.distributed.shrink_group` (torch 2.9) calls this for groups of the backend `mcr`. The remaining
    ranks keep their order, and `group` is destroyed. If `group` is the default group, all other groups are
    destroyed too, and the new group becomes the default group.

    Args:
        ranks_to_exclude: ranks of `group`; they do not call `shrink_group`.
        group: a process group of the backend `mcr`, None for the default group.
        shrink_flags: 0 (`SHRINK_DEFAULT`) first waits for operations in flight, unless the group has failed;
            1 (`SHRINK_ABORT`) does not wait.
        pg_options: None; the new group has the pipeline of `group`.

    Raises:
        TypeError: `ranks_to_exclude` is no list of ranks, or `group` is of another backend.
        InvalidArgument: a rank is not in the group, is listed twice, is this rank itself, or has called
            `shrink_group`; no rank would remain, or none is excluded; the flags are unknown.
        NotInitialized: `group` is None, and torch.distributed has no default group.
        Unsupported: `pg_options` are given.
        CommTimeout: a remaining rank has not called `shrink_group` in time. As with the next error, the group
            stays unchanged, and all ranks may call `shrink_group` again.
        BackendError: another rank has been lost as well.
        Revoked: the other ranks have excluded this rank.
        LaunchError: torch's store does not answer.

    Example:
        ```python
        try:
            dist.all_reduce(x)
        except mcr.PeerLost as lost:
            group = mcr.shrink_group(list(lost.ranks))
        ```
    """
    if group is None and not dist.is_initialized():
        raise NotInitialized(
            "shrink_group: torch.distributed has no default group; for a world of mcr.init, use mcr.shrink"
        )
    target = distributed_c10d._get_default_group() if group is None else group
    ranks = whole_numbers(ranks_to_exclude) if isinstance(ranks_to_exclude, list) else None
    if ranks is None:
        raise TypeError(f"ranks_to_exclude: expected a list of ranks, got {ranks_to_exclude!r}")
    ranks_to_exclude = ranks
    if not isinstance(target, LivingGroup):
        raise TypeError(f"group: expected a process group of the backend mcr, got {target!r}")
    if len(set(ranks_to_exclude)) < len(ranks_to_exclude):
        raise InvalidArgument(f"ranks_to_exclude: a rank is listed twice in {ranks_to_exclude}")
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise InvalidArgument(f"shrink_flags: expected 0 or 1, got {shrink_flags!r}")
    return _registered(target, ranks_to_exclude, target.shrink(ranks_to_exclude, shrink_flags, pg_options))


def _registered(old: LivingGroup, excluded: list[int], new: LivingGroup) -> ProcessGroup:
    """Register a group with torch in place of an old group."""
    backend, store = dist.get_backend(old), old.get_group_store()
    is_default = old is dist.group.WORLD
    ranks = [
        rank for rank in dist.get_process_group_ranks(old) if dist.get_group_rank(old, rank) not in excluded
    ]
    torch_job.prepared = new.detach()
    if not is_default:
        dist.destroy_process_group(old)
        part: Any = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        return cast("ProcessGroup", part)
    dist.destroy_process_group()
    place = PrefixStore(f"mcr_plus/{new.place}", store)
    dist.init_process_group(backend, store=place, rank=new.rank(), world_size=new.size())
    group: ProcessGroup = distributed_c10d._get_default_group()
    return group


def let_torch_shrink() -> None:
    """Make `torch.distributed.shrink_group` shrink groups of this backend, too (torch 2.9 on)."""
    usual = getattr(distributed_c10d, "_finalize_shrunk_group", None)
    if usual is None:
        return

    def finalize(info: Any, excluded: set[int], new: Any) -> ProcessGroup:
        if isinstance(new, LivingGroup):
            return _registered(info["process_group"], sorted(excluded), new)
        group: ProcessGroup = usual(info, excluded, new)
        return group

    distributed_c10d._finalize_shrunk_group = finalize  # type: ignore[assignment]


def let_torch_split() -> None:
    """Make torch create new groups of this backend from scratch, because it cannot split Python groups."""
    usual = distributed_c10d._get_split_source

    def source(pg: ProcessGroup, *requested: Any) -> Any:
        return None if isinstance(pg, LivingGroup) else usual(pg, *requested)

    distributed_c10d._get_split_source = source


def regrouped(proposal: Proposal, timeout: float, what: str) -> Regrouping:
    """Replace torch's default group by a group of the ranks that continue; collective over them.

    All ranks of the job that live decide who continues. Returns the changes. Raises like `leave_epoch`, and
    `PeerLost` if a rank is lost meanwhile: then call it again.
    """
    old, runtime = distributed_c10d._get_default_group(), current()
    if not isinstance(old, LivingGroup):
        raise NotInitialized(f"{what}: the default group has another backend; expected mcr")
    with inheriting(runtime, takes_codecs=True) as inheritance:
        new, changes = leave_epoch(runtime, proposal, timeout, what)
        torch_job.go_on(new)
        inheritance.give(new)
    _registered(old, [], old.with_communicator(new.communicator))
    return changes
