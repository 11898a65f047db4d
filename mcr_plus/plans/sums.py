"""Gradients of a plan: which ranks add up which parameters' gradients, in buckets, and when."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.work import Work
from mcr_plus.errors import InvalidArgument, Unsupported, short
from mcr_plus.job.init import world
from mcr_plus.layout.regions import as_ints
from mcr_plus.plans.checkpoint import boxes_of
from mcr_plus.plans.codecs import CodecChoice, is_fed_back
from mcr_plus.plans.language import ALONG_DATA, Held, ModelPlan

if TYPE_CHECKING:
    from mcr_plus.plans.foretell import PlannedSum
    from mcr_plus.plans.proof import ProvedPlan
    from mcr_plus.plans.run import ParallelModel

BUCKET: Final = 25 << 20
"""Bytes of gradients from which a bucket is full."""
_Gradient = TypeVar("_Gradient", "OwnParameter", "PlannedSum")
_TAG: Final = "plan.gradients"


def gradient_groups(plan: ModelPlan, block: int, *, cut: bool) -> list[tuple[int, ...]]:
    """Return the groups of ranks that add up gradients of a block, each rank in one.

    `cut`: of parameters that the plan cuts. The parts of other parameters are equal unless input and output
    are cut, too. Replicas compute the same.
    """
    keyed = [
        axis for axis, how_ in enumerate(plan.cuts[block])
        if (how := plan.how(block, how_)) == "replicas"
        or (how not in ALONG_DATA and (cut or how_.outside is None))
    ]  # fmt: skip
    groups: dict[frozenset[tuple[int, ...]], list[int]] = defaultdict(list)
    places = plan.places[block]
    for rank in np.unique(places).tolist():
        at = np.argwhere(places == rank)[:, as_ints(keyed) + 2]
        groups[frozenset(map(tuple, at.tolist()))].append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def peers(plan: ModelPlan, block: int, axis: int, rank: int) -> tuple[int, ...]:
    """Return the ranks of all parts along a cut, in order; the same for all micro-batches."""
    rows = np.moveaxis(plan.places[block], 2 + axis, -1).reshape(-1, plan.cuts[block][axis].parts)
    found = {tuple(dict.fromkeys(row)) for row in rows.tolist() if rank in row}
    if len(found) > 1:
        raise Unsupported(
            f"{plan.blocks[block].name}: rank {rank} is in groups {short(sorted(found))}; expected one"
        )
    return found.pop()


def shared_groups(plan: ModelPlan, blocks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the groups that add up a parameter of several blocks, which none of them cuts.

    Raises:
        InvalidArgument: the blocks have different numbers of replicas.
    """
    each = [gradient_groups(plan, block, cut=False) for block in blocks]
    if len({len(groups) for groups in each}) > 1:
        names = " and ".join(plan.blocks[block].name for block in blocks)
        raise InvalidArgument(f"{names} share a parameter; expected the same number of replicas")
    found = [tuple(sorted(set().union(*groups))) for groups in zip(*each, strict=True)]
    if len(set().union(*found)) < sum(map(len, found)):
        names = " and ".join(plan.blocks[block].name for block in blocks)
        raise InvalidArgument(f"{names} share a parameter; their replicas are on other ranks of each other")
    return found


class OwnParameter(NamedTuple):
    """A parameter on this rank: the ranks that add up its gradient, and the time when it is complete."""

    param: nn.Parameter
    ranks: tuple[int, ...]
    time: float
    held: Held
    group: int

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""
        return self.param.numel() * self.param.element_size()


def in_buckets(members: Iterable[_Gradient]) -> Iterator[list[_Gradient]]:
    """Yield gradients in buckets, in the order of time; a bucket ends with the gradients of one time.

    Members have a `time`, `nbytes`, and `held`; those with parameters in shards are gathered time by time.
    """
    bucket: list[_Gradient] = []
    for _, same in groupby(sorted(members, key=lambda each: each.time), key=lambda each: each.time):
        bucket += same
        if bucket[0].held == "parameters" or sum(each.nbytes for each in bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def complete(proved: ProvedPlan) -> dict[int, float]:
    """Return for each block the time when all ranks have its last gradient."""
    times: dict[int, float] = defaultdict(float)
    for run in proved.runs:
        if run.task.kind != "F":
            times[run.task.block] = max(times[run.task.block], run.end)
    return times


class GradientBucket:
    """Parameters whose gradients are added up as one flat tensor.

    Args:
        params: of one dtype and device. Their gradients become views of one tensor; with shards, they too.
        comm: the ranks that add up; None if it is this rank alone.
        time: position in the order of all ranks.
        held: as in `ModelPlan`. group: index of theirs in the optimizer. codec: of the sums.
        tag: of their operation.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], comm: Communicator | None, time: float, held: Held, group: int,
        codec: CodecChoice | None = None, tag: str = _TAG,
    ) -> None:  # fmt: skip
        self.params, self.comm, self.time, self.group = list(params), comm, time, group
        self.held: Held = "whole" if comm is None else held
        sizes = [param.numel() for param in params]
        self.rank, self.ranks = (0, 1) if comm is None else (comm.rank, comm.size)
        self.padded = -(-sum(sizes) // self.ranks) * self.ranks
        like = params[0].detach()
        self.gradients = like.new_zeros(self.padded)
        self._views = self.views(self.gradients)
        self.work: Work | None = None
        self._options: Any = {"tag": tag, "compress": codec}
        if self.held != "whole":
            self._flatten(like)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of a flat tensor that are at the places of the parameters, in their shapes."""
        sizes = [param.numel() for param in self.params]
        parts = flat.split([*sizes, self.padded - sum(sizes)])
        return [part.view_as(param) for part, param in zip(parts, self.params, strict=False)]

    def whole(self, shard: Tensor) -> list[Tensor]:
        """Gather what belongs to this rank's shard, such as a state; return the parts of parameters."""
        assert self.comm is not None
        flat = shard.new_empty(self.padded)
        self.comm.all_gather_into_tensor(flat, shard.detach(), tag="plan.parameters", compress=False)
        return self.views(flat)

    def shard_of(self, parts: Sequence[Tensor]) -> Tensor:
        """Return this rank's shard of whole tensors in the shapes of the parameters."""
        flat = self.gradients.new_zeros(self.padded, dtype=parts[0].dtype)
        for own, part in zip(self.views(flat), parts, strict=True):
            own.copy_(part)
        return self.own(flat).clone()

    def own(self, flat: Tensor) -> Tensor:
        """Return the view of this rank's shard of a flat tensor."""
        return flat.chunk(self.ranks)[self.rank]

    def _flatten(self, like: Tensor) -> None:
        self.values = like.new_zeros(self.padded)
        for param, part in zip(self.params, self.views(self.values), strict=True):
            part.copy_(param.detach())
            param.data = part
        own = self.own(self.values)
        self.shard = nn.Parameter(own.clone() if self.held == "parameters" else own)
        self._nbytes = self.values.untyped_storage().nbytes()
        self.drop()

    @property
    def optimized(self) -> list[nn.Parameter]:
        """Parameters for the optimizer: this rank's own, or its shard of all."""
        return self.params if self.held == "whole" else [self.shard]

    def reset(self) -> None:
        """Set the gradients to 0, before the passes of a step; `zero_grad` may have taken them away."""
        self.gradients.zero_()
        if self.held != "whole":
            self.shard.grad = self.own(self.gradients)
        for param, view in zip(self.params, self._views, strict=True):
            param.grad = view

    def start(self) -> None:
        """Begin to add up the gradients."""
        if self.comm is None:
            return
        if self.held == "whole":
            self.work = self.comm.all_reduce(self.gradients, async_op=True, **self._options)
        else:
            own = self.own(self.gradients)
            self.work = self.comm.reduce_scatter_tensor(own, self.gradients, async_op=True, **self._options)

    def wait(self) -> None:
        """Wait for the sums."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        for param in self.params if self.held != "whole" else []:
            param.grad = None  # it is of this rank alone: not for another optimizer than that of the shard

    def gather(self, *, exact: bool = False) -> None:
        """Get the parameters of all shards, into the memory of whole ones.

        `exact`: also if a codec is set; always if a shard is part of the whole, which it would change.
        """
        self.values.untyped_storage().resize_(self._nbytes)
        own = self.shard.detach()
        if self.held == "optimizer":
            own = own.clone()
        assert self.comm is not None
        compress = False if exact or self.held == "optimizer" else None
        self.comm.all_gather_into_tensor(self.values, own, tag="plan.parameters", compress=compress)

    def keep(self) -> None:
        """Take over whole parameters that the program has set; free them if they are in shards."""
        if self.held == "parameters":
            self.shard.data.copy_(self.own(self.values))
        self.drop()

    def drop(self) -> None:
        """Free the memory of whole parameters, if they are in shards."""
        if self.held == "parameters":
            self.values.untyped_storage().resize_(0)


def make_buckets(
    own: Sequence[OwnParameter], comms: Mapping[tuple[int, ...], Communicator], codec: CodecChoice | None
) -> list[GradientBucket]:
    """Return the buckets of this rank's parameters, alike on all ranks of a group; in the order of time."""
    keyed: dict[Any, list[OwnParameter]] = defaultdict(list)
    for each in own:
        keyed[each.ranks, each.held, each.group, each.param.dtype, each.param.device].append(each)
    found = [
        (bucket[-1].time, ranks, held, group, [one.param for one in bucket])
        for (ranks, held, group, *_), members in keyed.items() for bucket in in_buckets(members)
    ]  # fmt: skip
    numbers: Counter[tuple[int, ...]] = Counter()
    made = []
    for time, ranks, held, group, params in sorted(found, key=lambda each: each[:2]):
        # Residuals belong to a tag.
        tag = f"{_TAG}.{numbers[ranks]}" if is_fed_back(codec) else _TAG
        numbers[ranks] += 1
        made.append(GradientBucket(params, comms.get(ranks), time, held, group, codec, tag))
    return made


def clip_grad_norm_(parallel: ParallelModel, max_norm: float) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; return the norm before. Collective.

    It is the norm of the whole model, as of `torch.nn.utils.clip_grad_norm_` on one process: elements that
    several ranks have count once.
    """
    params = parallel.parameters()
    if parallel.copies is None:
        mine = {name: boxes_of(param) for name, param in params.items()}
        theirs = world().all_gather_object(mine)
        parallel.copies = {
            id(params[name]): sum(o.get(name) == own for o in theirs) for name, own in mine.items()
        }
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for bucket in parallel.buckets:
        flat, times = bucket.gradients, 1
        if bucket.held != "whole":  # elsewhere it has addends
            flat, times = torch.zeros_like(flat), bucket.ranks
            bucket.own(flat).copy_(bucket.own(bucket.gradients))
        for param, own in zip(bucket.params, bucket.views(flat), strict=True):
            norm = torch.linalg.vector_norm(own, dtype=torch.float64)
            total += norm.cpu().square() * times / parallel.copies[id(param)]
    world().all_reduce(total, tag="plan.norm", compress=False)
    norm = total.sqrt()
    for bucket in parallel.buckets:
        bucket.gradients.mul_(float((max_norm / (norm + 1e-6)).clamp(max=1.0)))
    return norm
