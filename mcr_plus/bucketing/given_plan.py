"""Use buckets fixed before training begins: from a file, or from a trial saved by `mcr.state_dict`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from pydantic import ValidationError

from mcr_plus.bucketing import REPORT
from mcr_plus.bucketing.saved import SavedBucket, SavedPlan, digests
from mcr_plus.bucketing.step import model_hash
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.gradient_policy import Choice, not_choosable
from mcr_plus.config.schema import TableRef
from mcr_plus.core.kinds import dtype_name
from mcr_plus.errors import ConfigError
from mcr_plus.fusion.options import FuseOptions
from mcr_plus.job.init import current

STATE: Final = "plan"
"""Key of plans in a group's state, next to the keys of stages; the hash of a model selects its plan."""

_log = logging.getLogger("mcr_plus")

Named = Sequence[tuple[str, torch.nn.Parameter]]


def found(plan: str | TableRef, comm: Communicator, group: str, named: Named) -> SavedPlan | None:
    """Return the plan for these parameters from a file, or else from the group's loaded state; collective.

    Returns None if the loaded state has no plan for this job.

    Raises:
        ConfigError: the file cannot be read, or the job does not match its plan; the text has the first
            difference.
    """
    job = _job(comm, named)
    if isinstance(plan, TableRef):
        known = SavedPlan.load(plan.resolve(), plan.place)
        difference = known.difference(**job._asdict())
        for codec in known.codecs:
            difference = difference or not_choosable(codec, comm.config)
        if difference is not None:
            raise ConfigError(f"{plan.place}: {plan.text}: {difference}")
    else:
        data = current().restored.get(group, {}).get(STATE, {}).get(job.model) if comm.rank == 0 else None
        of_state = None if data is None else SavedPlan.model_validate(data)
        if of_state is not None and of_state.difference(**job._asdict()) is not None:
            data = None  # different ranks or nodes: plan again
        if of_state is not None and not _allowed(comm).issuperset(of_state.codecs):
            data = None
        data = comm.broadcast_object(data, comm.ranks[0])
        if data is None:
            return None
        known = SavedPlan.model_validate(data)
    return known


def _allowed(comm: Communicator) -> set[str]:
    """Return the codecs that the configuration lets plans choose."""
    fuse = comm.stage_options("fuse")
    return {*fuse.codecs} if isinstance(fuse, FuseOptions) else set()


def warn_of_parts(bucket: SavedBucket, parts: int) -> None:
    """Warn that a bucket of the plan is split into several buckets."""
    _log.warning(
        "gradients: the plan's bucket that begins with %r is sent as %d, since its gradients have several "
        "dtypes, devices or codecs",
        bucket.params[0],
        parts,
    )


def report(plan: str | TableRef, buckets: list[list[str]], choices: Sequence[Choice]) -> None:
    """Make `mcr.plan_report` return the buckets in use, by names of parameters."""
    source = "file" if isinstance(plan, TableRef) else "state"
    current().attached[REPORT] = {"plan": source, "buckets": buckets, **named_choices(choices)}


def named_choices(choices: Iterable[Choice]) -> dict[str, Any]:
    """Return the `libraries` and `codecs` of a report."""
    known = list(choices)
    return {"libraries": [each.library for each in known], "codecs": [each.codec for each in known]}


def keep(group: str, named: Named, comm: Communicator, report: Mapping[str, Any]) -> None:
    """Add the result of a trial to the state that `mcr.state_dict` returns."""
    buckets = tuple(
        SavedBucket(params=tuple(params), library=library, codec=codec)
        for params, library, codec in zip(
            report["buckets"], report["libraries"], report["codecs"], strict=True
        )
    )
    job = _job(comm, named)
    plan = SavedPlan(
        model=job.model, ranks=job.ranks, nodes=job.nodes, ranks_per_node=job.ranks_per_node, buckets=buckets
    )
    current().restored.setdefault(group, {}).setdefault(STATE, {})[plan.model] = plan.model_dump(mode="json")


class _JobProperties(NamedTuple):
    """Properties of a job that must match a plan, see `SavedPlan.difference`."""

    model: str
    names: Sequence[str]
    ranks: int
    libraries: Sequence[str]
    nodes: int
    ranks_per_node: int
    tables: tuple[str, ...]


def _job(comm: Communicator, named: Named) -> _JobProperties:
    on_host = Counter(comm.hosts[rank] for rank in comm.ranks)
    return _JobProperties(
        model=model_hash((name, param.shape, dtype_name(param.dtype)) for name, param in named),
        names=[name for name, _ in named],
        ranks=comm.size,
        nodes=len(on_host),
        ranks_per_node=max(on_host.values()),
        libraries=comm.pipeline.libraries,
        tables=digests(comm.config),
    )


def is_plan(data: object) -> bool:
    """Return whether an entry of a loaded state is a plan."""
    try:
        SavedPlan.model_validate(data)
    except ValidationError:
        return False
    return True
