"""Buckets that are known before training begins: of a file, or of a trial that `mcr.state_dict` has kept."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from pydantic import ValidationError

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.config.schema import TableRef
from mcr_plus.core.kinds import dtype_name
from mcr_plus.errors import ConfigError
from mcr_plus.plan import REPORT
from mcr_plus.plan.saved import SavedBucket, SavedPlan, digests
from mcr_plus.plan.step import model_hash
from mcr_plus.runtime.init import current

STATE: Final = "plan"
"""Under this name, beside those of stages, plans are part of a group's state: by the hash of the model."""

_log = logging.getLogger("mcr_plus")

Named = Sequence[tuple[str, torch.nn.Parameter]]


def found(plan: str | TableRef, comm: Communicator, group: str, named: Named) -> SavedPlan | None:
    """The plan of a file, or else of the group's loaded state, for these parameters; collective.

    Raises:
        ConfigError: the file cannot be read; or the first thing in which the job differs from its plan.
    """
    job = _job(comm, named)
    if isinstance(plan, TableRef):
        known = SavedPlan.load(plan.resolve(), plan.place)
        if (difference := known.difference(**job._asdict())) is not None:
            raise ConfigError(f"{plan.place}: {plan.text}: {difference}")
    else:
        data = current().restored.get(group, {}).get(STATE, {}).get(job.model) if comm.rank == 0 else None
        of_state = None if data is None else SavedPlan.model_validate(data)
        if of_state is not None and of_state.difference(**job._asdict()) is not None:
            data = None  # of other ranks or nodes: planned anew
        data = comm.broadcast_object(data, comm.ranks[0])
        if data is None:
            return None
        known = SavedPlan.model_validate(data)
    return known


def warn_of_parts(bucket: SavedBucket, parts: int) -> None:
    """Warn that the gradients of a bucket cannot share one."""
    _log.warning(
        "gradients: the bucket of the plan that begins with %r is sent as %d, since its gradients have "
        "several dtypes, devices or codecs",
        bucket.params[0],
        parts,
    )


def report(plan: str | TableRef, buckets: list[list[str]], libraries: list[str | None]) -> None:
    """Attach the buckets in use, by names of parameters, as what `mcr.plan_report` returns."""
    source = "file" if isinstance(plan, TableRef) else "state"
    current().attached[REPORT] = {"plan": source, "buckets": buckets, "libraries": libraries}


def keep(group: str, named: Named, comm: Communicator, report: Mapping[str, Any]) -> None:
    """Make the result of a trial part of the state that `mcr.state_dict` returns."""
    buckets = tuple(
        SavedBucket(params=tuple(params), library=library)
        for params, library in zip(report["buckets"], report["libraries"], strict=True)
    )
    job = _job(comm, named)
    plan = SavedPlan(
        model=job.model, ranks=job.ranks, nodes=job.nodes, ranks_per_node=job.ranks_per_node, buckets=buckets
    )
    current().restored.setdefault(group, {}).setdefault(STATE, {})[plan.model] = plan.model_dump(mode="json")


class _Job(NamedTuple):
    """The facts of a job that a plan has to fit; see `SavedPlan.difference`."""

    model: str
    names: Sequence[str]
    ranks: int
    libraries: Sequence[str]
    nodes: int
    ranks_per_node: int
    tables: tuple[str, ...]


def _job(comm: Communicator, named: Named) -> _Job:
    on_host = Counter(comm.hosts[rank] for rank in comm.ranks)
    return _Job(
        model=model_hash((name, param.shape, dtype_name(param.dtype)) for name, param in named),
        names=[name for name, _ in named],
        ranks=comm.size,
        nodes=len(on_host),
        ranks_per_node=max(on_host.values()),
        libraries=comm.libraries,
        tables=digests(comm.config),
    )


def is_plan(data: object) -> bool:
    """Whether an entry of a loaded state is a plan."""
    try:
        SavedPlan.model_validate(data)
    except ValidationError:
        return False
    return True
