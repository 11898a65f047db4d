"""Language of plans: cut the tasks of a model's blocks, assign them to ranks, and order them.

    plan = ModelPlan(profile, ranks=4, micro_batches=8)
    first, last = plan.stages(2)
    plan.cut(..., "batch", 2)                           # transform
    plan.assign(first, [0, 1])
    plan.assign(last, [2, 3])
    for rank in range(4):
        plan.order(rank, [F(..., m) for m in range(8)] + [B(..., m) for m in range(8)])

A task is a block of the profile, a micro-batch, a slice of the sequence, and a pass: F (forward), B
(backward), or W (gradients of parameters, if `split_backward` takes them out of B). The three kinds of
statements are those of SuperScaler (Lin et al. 2023, arXiv 2301.08984); communication follows from them, see
`tensors`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from types import EllipsisType
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from mcr_plus.core.units import whole_number, whole_numbers
from mcr_plus.errors import InvalidArgument, expect, short, unknown
from mcr_plus.layout.regions import Ints, as_ints
from mcr_plus.plans.blocks import ModelBlock, Profile
from mcr_plus.plans.codecs import CodecChoice, payload_codec

Kind = Literal["F", "B", "W"]
Held = Literal["whole", "optimizer", "parameters"]
Blocks = int | slice | Sequence[int] | EllipsisType
TensorKey = tuple[int, int, int, bool]
"""Tensor, micro-batch, slice, and whether it is the gradient."""
ALONG_DATA: Final = ("split", "gather", "halo")
"""Cuts of input and output; the other ones cut parameters."""
OUTSIDE: Final = ("sum", "exchange")
"""Cuts of parameters that leave input and output to be cut along data, too."""


class PlanTask(NamedTuple):
    """A pass of a block over a slice of a micro-batch."""

    block: int
    micro: int
    slice: int
    kind: Kind

    @property
    def needs(self) -> TensorKey:
        """The tensor that it needs of another task: its input, or the gradient of its output."""
        is_back = self.kind != "F"
        return self.block + is_back, self.micro, self.slice, is_back

    def __str__(self) -> str:
        return f"{self.kind}(block {self.block}, micro-batch {self.micro}, slice {self.slice})"


class PlanStep(NamedTuple):
    """A pass of several blocks, in the order of the pass."""

    kind: Kind
    blocks: Blocks
    micro: int
    slice: int = 0


def F(blocks: Blocks, micro: int, slice: int = 0) -> PlanStep:  # noqa: N802
    """Return the forward pass of blocks."""
    return PlanStep("F", blocks, micro, slice)


def B(blocks: Blocks, micro: int, slice: int = 0) -> PlanStep:  # noqa: N802
    """Return the backward pass of blocks."""
    return PlanStep("B", blocks, micro, slice)


def W(blocks: Blocks, micro: int, slice: int = 0) -> PlanStep:  # noqa: N802
    """Return the computation of the gradients of blocks' parameters."""
    return PlanStep("W", blocks, micro, slice)


class BlockCut(NamedTuple):
    """A cut of a block into parts, along one axis or several at once; without axes, into replicas.

    `outside`: axis along which the parts cut input and output, if the axes cut parameters; None: every part
    has the whole of both.
    """

    axes: tuple[str, ...]
    parts: int
    outside: str | None = None


class ModelPlan:
    """Tasks of a profile's blocks on ranks; see the module for the language, `named` for plans.

    Attributes:
        profile, ranks, micro_batches: as given. slices: number of slices, in place of their lengths.
        slice_ends: positions at which slices end, if there are several.
        name: for messages.
        cuts: of each block; a later cut divides the parts of an earlier one.
        recomputed, split: whether each block's backward pass runs its forward pass again, and whether it is
            split into B and W.
        held: how the ranks with the same parameters of a block hold them: `whole`, with the state of the
            `optimizer` in shards (ZeRO-1), or `parameters` in shards, too (ZeRO-3; Rajbhandari et al. 2020).
        places: for each block the ranks [micro-batches, slices, *parts]; -1 is none.
        orders: tasks of each rank, in order; a rank without an entry runs them in `default_order`.
        codecs: of tensors between ranks, by their numbers: that of a block's output is the block's plus 1.
            With the key 0: of sums of parameters' gradients.
        befores: pairs of tasks; in the order of all ranks, the first ends before the second begins.

    Raises:
        InvalidArgument: a number is not positive, or larger than what it cuts.
    """

    def __init__(
        self, profile: Profile, ranks: int, *, micro_batches: int = 1, slices: int | Sequence[int] = 1,
        name: str = "plan",
    ) -> None:  # fmt: skip
        expect("profile", profile, Profile)
        self.profile, self.name = profile, name
        self.ranks = positive(ranks, "ranks")
        given = list(slices) if isinstance(slices, Sequence) else None
        self.micro_batches = positive(micro_batches, "micro_batches")
        self.slices = positive(slices if given is None else len(given), "slices")
        for axis, parts, what in (
            ("batch", self.micro_batches, "micro_batches"), ("sequence", self.slices, "slices")
        ):  # fmt: skip
            for block in profile.blocks:
                most = block.axes[axis].parts[0] if axis in block.axes else 0
                if parts > max(most, 1):
                    has = f"has {axis}: {most}" if most else f"has no axis {axis!r}"
                    raise InvalidArgument(f"{what}: {parts}; block {block.name} ({block.kind}) {has}")
        self.slice_ends = self._slice_ends(given)
        count = len(profile.blocks)
        self.cuts: list[tuple[BlockCut, ...]] = [()] * count
        self.recomputed, self.split = [False] * count, [False] * count
        self.held: list[Held] = ["whole"] * count
        self.places: list[Ints] = [np.full((self.micro_batches, self.slices), -1) for _ in range(count)]
        self.orders: dict[int, list[PlanTask]] = {}
        self.codecs: dict[int, CodecChoice] = {}
        self.befores: list[tuple[PlanTask, PlanTask]] = []

    def _inside(self, ranks: int | Sequence[int] | Ints) -> Ints:
        """Return ranks as an array. Raises `InvalidArgument` if the plan does not have one of them."""
        given = np.asarray(ranks)
        is_whole = given.dtype.kind in "iu"
        outside = (given[(given < 0) | (given >= self.ranks)] if is_whole else given.ravel()).tolist()
        if outside:
            raise InvalidArgument(f"ranks: {short(outside[0])}; the plan has ranks 0 to {self.ranks - 1}")
        return as_ints(given)

    def _slice_ends(self, given: list[int] | None) -> list[int]:
        if self.slices == 1:
            return []
        length = self.profile.blocks[0].axes["sequence"].parts[0]
        if given is None:
            return [length * (number + 1) // self.slices for number in range(self.slices)]
        if sum(positive(each, "slices") for each in given) != length:
            raise InvalidArgument(f"slices: {short(given)}; expected lengths that add up to {length}")
        return [int(end) for end in np.cumsum(given)]

    # -- transform ------------------------------------------------------------------------------------------

    def cut(self, blocks: Blocks, axes: str | Sequence[str], parts: int, outside: str | None = None) -> None:
        """Cut blocks into parts; where several axes are named, each block is cut along those that it has.

        Raises:
            InvalidArgument: a block has none of the axes, or fewer parts; axes along data and of parameters
                are mixed; `outside` is no axis along data; the block has been assigned.
        """
        names = (axes,) if isinstance(axes, str) or not isinstance(axes, Sequence) else tuple(axes)
        for index in self.indices(blocks):
            block = self.profile.blocks[index]
            own = tuple(name for name in names if name in block.axes)
            if not own:
                known = unknown("axis", (*names, "")[0], tuple(block.axes) or ("none",))
                if "batch" in names and block.kind.endswith("LossFunction"):
                    known += "; expected a loss that is the mean over the items of the batch"
                elif "batch" in names and "BatchNorm" in block.kind:
                    known += "; its statistics are of the whole batch"
                raise InvalidArgument(f"block {block.name} ({block.kind}): {known}")
            hows = {block.axes[name].how for name in own}
            if len(own) > 1 and not hows <= set(OUTSIDE):
                raise InvalidArgument(f"{block.name}: axes {own}; only axes that are sums are cut together")
            along_data = [name for name, axis in block.axes.items() if axis.how in ALONG_DATA]
            if outside is not None and not (hows <= set(OUTSIDE) and outside in along_data):
                raise InvalidArgument(
                    f"{block.name}: {own} with {outside!r} outside; expected a sum with data"
                )
            least = min(block.axes[name].parts[0] for name in own)
            if positive(parts, "parts") > least:
                raise InvalidArgument(f"{block.name}: {parts} parts of {own}; it has {least}")
            self._add(index, BlockCut(own, parts, outside))

    def replicate(self, blocks: Blocks, parts: int) -> None:
        """Let several ranks compute the same. Raises `InvalidArgument` if a block has been assigned."""
        for index in self.indices(blocks):
            self._add(index, BlockCut((), positive(parts, "parts")))

    def recompute(self, blocks: Blocks) -> None:
        """Keep only the input of blocks, and run them again for the backward pass (Chen et al. 2016)."""
        for index in self.indices(blocks):
            self.recomputed[index] = True

    def split_backward(self, blocks: Blocks) -> None:
        """Split backward passes into B, for the input, and W, for parameters (Qi et al. 2023)."""
        for index in self.indices(blocks):
            self.split[index] = True

    def hold(self, blocks: Blocks, held: Held) -> None:
        """Set how ranks with the same parameters hold them; see `held`. Raises `InvalidArgument`."""
        if held not in get_args(Held):
            raise InvalidArgument(unknown("held", held, get_args(Held)))
        for index in self.indices(blocks):
            self.held[index] = held

    def compress(self, blocks: Blocks | Literal["sums"], codec: CodecChoice) -> None:
        """Compress what goes to other ranks: the outputs of blocks and their gradients; see `codecs`.

        `"sums"`: the gradients of parameters, where ranks add them up.

        Raises:
            InvalidArgument: see `payload_codec`; `blocks` is another text.
        """
        if isinstance(blocks, str):
            if blocks != "sums":
                raise InvalidArgument(unknown("blocks", blocks, ["sums"]))
            payload_codec(codec, "float32", "fast")
            self.codecs[0] = codec
            return
        for index in self.indices(blocks):
            payload_codec(codec, self.profile.blocks[index].dtype)
            self.codecs[index + 1] = codec

    def _add(self, index: int, cut: BlockCut) -> None:
        if (self.places[index] >= 0).any():
            raise InvalidArgument(f"{self.profile.blocks[index].name}: cut after it was assigned")
        self.cuts[index] += (cut,)
        self.places[index] = np.full((self.micro_batches, self.slices, *self.parts(index)), -1)

    # -- assign ---------------------------------------------------------------------------------------------

    def assign(
        self, blocks: Blocks, ranks: int | Sequence[int] | Ints, *, micro: int | slice = slice(None),
        slice_: int | slice = slice(None),
    ) -> None:  # fmt: skip
        """Assign the parts of blocks to ranks: one rank for all, or one for each part, in order.

        The passes of a part run on the same rank, which has its parameters. All micro-batches and slices are
        assigned alike unless `micro` or `slice_` selects some.

        Raises:
            InvalidArgument: a rank is not in the job, or there is not one for each part.
        """
        given = self._inside(ranks)
        for index in self.indices(blocks):
            parts = self.parts(index)
            if given.ndim and given.size != int(np.prod(parts)):
                name = self.profile.blocks[index].name
                raise InvalidArgument(f"{name}: {given.size} ranks for {int(np.prod(parts))} parts")
            try:
                self.places[index][micro, slice_] = given.reshape(parts) if given.ndim else given
            except IndexError:
                what, least = f"micro: {short(micro)}, slice_: {short(slice_)}", "the plan has numbers below"
                raise InvalidArgument(f"{what}; {least} {self.micro_batches} and {self.slices}") from None

    # -- order ----------------------------------------------------------------------------------------------

    def order(self, ranks: int | Iterable[int], steps: Iterable[PlanStep]) -> None:
        """Append tasks to the order of ranks; of each step, those that the rank has.

        Raises:
            InvalidArgument: a rank is not in the job, or a block not in the profile.
        """
        steps = list(steps) if isinstance(steps, Iterable) else [steps]
        for step in steps:
            expect("steps", step, PlanStep)
        given = ranks if isinstance(ranks, int) else list(ranks)
        for rank in np.atleast_1d(self._inside(given)).tolist():
            own = self.tasks_of(rank)
            order = self.orders.setdefault(rank, [])
            for kind, blocks, micro, slice_ in steps:
                indices = self.indices(blocks)
                for index in indices if kind == "F" else reversed(indices):
                    task = PlanTask(index, micro, slice_, kind)
                    if task in own:
                        order.append(task)

    def before(self, first: PlanTask, second: PlanTask) -> None:
        """Order two tasks of any ranks, which do not wait for each other because of it."""
        expect("first", first, PlanTask)
        expect("second", second, PlanTask)
        self.befores.append((first, second))

    # -- look -----------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> tuple[ModelBlock, ...]:
        """The profile's blocks."""
        return self.profile.blocks

    def indices(self, blocks: Blocks) -> list[int]:
        """Return the indices of blocks, ascending; `...` are all. Raises `InvalidArgument`."""
        count = len(self.profile.blocks)
        if blocks is ...:
            return list(range(count))
        if isinstance(blocks, slice):
            return list(range(count)[blocks])
        found = whole_numbers(blocks if isinstance(blocks, Iterable) else [blocks])
        outside = [blocks] if found is None else [index for index in found if not 0 <= index < count]
        if outside or found is None:
            raise InvalidArgument(f"blocks: {short(outside[0])}; the profile has blocks 0 to {count - 1}")
        return sorted(found)

    def parts(self, block: int) -> tuple[int, ...]:
        """Return the number of parts of each cut of a block."""
        return tuple(cut.parts for cut in self.cuts[block])

    def kinds(self, block: int) -> tuple[Kind, ...]:
        """Return the passes of a block; F alone where no gradient comes back."""
        if self.profile.blocks[block].detached:
            return ("F",)
        return ("F", "B", "W") if self.split[block] else ("F", "B")

    def how(self, block: int, cut: BlockCut) -> str:
        """Return how a cut divides a block: as in `Axis`, or `replicas`."""
        return self.profile.blocks[block].axes[cut.axes[0]].how if cut.axes else "replicas"

    def tasks_of(self, rank: int) -> set[PlanTask]:
        """Return the tasks of which a rank has parts."""
        found: set[PlanTask] = set()
        for block, places in enumerate(self.places):
            own = (places == rank).reshape(self.micro_batches, self.slices, -1).any(axis=2)
            for micro, slice_ in np.argwhere(own).tolist():
                found.update(PlanTask(block, micro, slice_, kind) for kind in self.kinds(block))
        return found

    def order_of(self, rank: int) -> list[PlanTask]:
        """Return the tasks of a rank in order."""
        return self.orders[rank] if rank in self.orders else sorted(self.tasks_of(rank), key=default_order)

    def stages(self, count: int, weights: Sequence[float] | None = None) -> list[range]:
        """Return consecutive stages of blocks whose largest weight is least, by default the seconds.

        Exact, by dynamic programming. Raises `InvalidArgument` if there are fewer blocks than stages.
        """
        blocks = self.profile.blocks
        if not 1 <= (whole_number(count) or 0) <= len(blocks):
            raise InvalidArgument(f"stages: {short(count)}; the profile has {len(blocks)} blocks")
        given = [block.forward + block.backward for block in blocks] if weights is None else weights
        ends = np.concatenate([[0.0], np.cumsum(given)])
        best = ends
        firsts: list[Ints] = []
        for stage in range(1, count):
            # Stage `stage` begins at block i: the largest of the stages before, and of blocks i to j.
            largest = np.maximum(best[:, None], ends[None, :] - ends[:, None])
            ahead = np.arange(len(ends))
            largest[(ahead[:, None] >= ahead[None, :]) | (ahead[:, None] < stage)] = np.inf
            firsts.append(largest.argmin(axis=0))
            best = largest.min(axis=0)
        bounds = [len(blocks)]
        for first in reversed(firsts):
            bounds.append(int(first[bounds[-1]]))
        bounds.append(0)
        return [range(low, high) for high, low in pairwise(bounds)][::-1]

    def __iter__(self) -> Iterator[PlanTask]:
        for rank in range(self.ranks):
            yield from self.order_of(rank)


def default_order(task: PlanTask) -> tuple[int, int, int, int]:
    """Return the key that orders all forward passes before backward ones, which begin with the last slice."""
    if task.kind == "F":
        return 0, task.micro, task.slice, task.block
    return 1, task.micro, -task.slice, -2 * task.block + (task.kind == "W")


def positive(value: object, what: str) -> int:
    """Return a number from 1. Raises `InvalidArgument` for any other."""
    count = whole_number(value)
    if count is None or count < 1:
        raise InvalidArgument(f"{what}: {short(value)}; expected a number from 1")
    return count
