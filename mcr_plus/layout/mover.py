"""Runs a plan: packs boxes into buffers, exchanges them through the pipeline, and puts them where they
belong.

Boxes of many tensors travel in one exchange. Between the steps of a plan nobody waits: each operation is
issued at once, starts when the one before it is complete (`Message.after`), and packs its buffer just before
that. Where `memory` bounds the buffers, an exchange is cut into rounds of alternating buffers, so that one is
packed while the other is on its way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from mcr_plus.communicator.calls import Call, CallOptions
from mcr_plus.core.work import JointWork, Work
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.messages import Kept, Rows
from mcr_plus.layout.plan import Plan, lossy_steps
from mcr_plus.layout.regions import Ints, row_length, runs

if TYPE_CHECKING:
    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.communicator.prepared import Prepared
    from mcr_plus.core.message import Extras

TAG: Final = "redistribute"
_SLOTS: Final = 2  # buffers that rounds alternate between
_torch: Any = torch  # whose type stubs do not have the operations on lists
_HALF: Final = (torch.float16, torch.bfloat16)
_REDUCE: Final[dict[str, Callable[..., Any]]] = {
    "SUM": _torch._foreach_add_,
    "AVG": _torch._foreach_add_,
    "PRODUCT": _torch._foreach_mul_,
    "MAX": _torch._foreach_maximum_,
    "MIN": _torch._foreach_minimum_,
}
Locals = list["torch.Tensor | None"]


class Strided(NamedTuple):
    """A box in a local tensor, as `torch.as_strided` takes it, and its place in a buffer, in elements."""

    tensor: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    at: int
    numel: int

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The box as a view of its contiguous local tensor."""
        return local.as_strided(self.extents, self.strides, self.offset + local.storage_offset())

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """The box as a view of a buffer."""
        return buffer[self.at : self.at + self.numel].view(self.extents)


@dataclass
class Sum:
    """The addends of one tensor, in the order in which they are reduced: received boxes, and kept ones.

    `onto`: whether they are added to what is there, zeros, because the first may lack elements.
    """

    tensor: int
    op: str
    onto: bool
    addends: list[tuple[list[Strided], list[tuple[Strided, Strided]]]]


@dataclass
class Round:
    """What this rank sends and receives in one operation.

    `received`: boxes that are copied into place; `sums`: those that are reduced. `sent_at`, `received_at`:
    where all of it lies in one piece of a single local tensor, in the order of the buffer, so that no copy is
    needed; None elsewhere.
    """

    sent: list[Strided] = field(default_factory=list)
    received: list[Strided] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    input_counts: tuple[int, ...] = ()
    output_counts: tuple[int, ...] = ()
    sent_at: int | None = None
    received_at: int | None = None


@dataclass
class Stage:
    """One step of the plan: its rounds, and what this rank keeps (from, to).

    `targets`: of each tensor the layout that the step leads to, None where it has no such step. `is_idle`: no
    rank of the group sends anything.
    """

    rounds: list[Round]
    kept: list[tuple[Strided, Strided]]
    targets: list[Layout | None]
    is_lossy: bool
    is_idle: bool


class Mover:
    """A plan bound to a group: redistributes the tensors again and again.

    Args:
        comm: the group. plan: for tensors of one dtype and device.
        memory: bytes that buffers may take; None: as many as needed at once. The addends of one tensor are
            not cut into rounds, so they may take more.
    """

    def __init__(self, comm: Communicator, plan: Plan, memory: int | None = None) -> None:
        self.comm = comm
        self.plan = plan
        self.dtype = plan.specs[0].dtype
        self.rank = comm.ranks[comm.rank]
        self.stages = [self._stage(step, memory) for step in range(plan.steps)]
        self._idle: list[_Buffers] = []
        self.twins = [
            self._twins_of(index, spec.target)
            for index, spec in enumerate(plan.specs)
            if spec.target.target_regions.twins
        ]
        """Boxes that this rank lists twice in a target: copied at the end."""

    # -- binding ----------------------------------------------------------------------------------

    def _stage(self, number: int, memory: int | None) -> Stage:
        plan = self.plan
        sends: list[_Rows] = []
        receives: list[_Rows] = []
        kept: list[tuple[Strided, Strided]] = []
        targets: list[Layout | None] = []
        sums: dict[int, Sum] = {}
        lossy = True
        for index, (spec, each) in enumerate(zip(plan.specs, plan.chosen, strict=True)):
            steps = each.program.steps
            if number >= len(steps):
                targets.append(None)
                continue
            step, part = steps[number], each.parts[number]
            if plan.loads[index, number].any():
                lossy &= number < lossy_steps(each.program)
            targets.append(step.target)
            sends.append(_Rows.of(index, step.source, self.rank, part.sends))
            receives.append(_Rows.of(index, step.target, self.rank, part.receives))
            pairs = self._kept(index, step.source, step.target, part.kept)
            if step.source.is_partial:
                empty: list[Any] = [([], []) for _ in range(step.source.addend_count)]
                sums[index] = Sum(index, spec.source.op, step.source.has_gaps, empty)
                for addend, pair in zip(part.kept.addends.tolist(), pairs, strict=True):
                    empty[addend][1].append(pair)
            elif step.source.inside is None or step.source.inside[0] is not step.target:
                # otherwise they are slices, which lie in the target itself already
                kept += pairs
        moved = plan.loads[:, number, [0, 1, 3, 4]].sum(axis=1)
        rounds = self._rounds(moved, sends, receives, sums, memory)
        return Stage(rounds, kept, targets, lossy, not moved.any())

    def _kept(self, index: int, source: Layout, target: Layout, part: Kept) -> list[tuple[Strided, Strided]]:
        froms = strided(index, *source.strided(self.rank, part.pieces, part.boxes))
        tos = strided(index, *target.strided(self.rank, part.into, part.boxes))
        return list(zip(froms, tos, strict=True))

    def _rounds(
        self,
        moved: Ints,
        sends: list[_Rows],
        receives: list[_Rows],
        sums: dict[int, Sum],
        memory: int | None,
    ) -> list[Round]:
        """The rounds of an exchange. `moved`: bytes of each tensor on the fullest rank, which is agreed."""
        whole: dict[int, int] = {}  # the round of each tensor with addends
        number = 1
        if memory is not None:
            room = max(1, memory // _SLOTS)
            summed = 0
            for tensor in sums:
                whole[tensor] = summed // room
                summed += int(moved[tensor])
            plain = int(moved.sum()) - summed
            number = max(-(-plain // room), 1, *(each + 1 for each in whole.values()))
        order = {rank: index for index, rank in enumerate(self.comm.ranks)}
        found = [Round() for _ in range(number)]
        for is_send, parts in ((True, sends), (False, receives)):
            for each, rows in zip(
                found, _cut(parts, order, number, dict.fromkeys(sums, 0) | whole), strict=True
            ):
                counts = [0] * self.comm.size
                at = 0
                placed = []
                for peer, addend, item in rows:
                    counts[peer] += item.numel
                    placed.append(item._replace(at=at))
                    at += item.numel
                    if not is_send and item.tensor in sums:
                        sums[item.tensor].addends[addend][0].append(placed[-1])
                if is_send:
                    each.sent, each.input_counts, each.sent_at = placed, tuple(counts), in_one_piece(placed)
                else:
                    each.received = [item for item in placed if item.tensor not in sums]
                    each.output_counts = tuple(counts)
                    each.received_at = in_one_piece(placed) if len(each.received) == len(placed) else None
        for tensor, addends in sums.items():
            found[whole.get(tensor, 0)].sums.append(addends)
        return found

    def _twins_of(self, index: int, target: Layout) -> list[tuple[Strided, Strided]]:
        pairs = [pair for pair in target.target_regions.twins if target.owners[pair[0]] == self.rank]
        first, second = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
        boxes = target.held.take(first)
        froms = strided(index, *target.strided(self.rank, first, boxes))
        tos = strided(index, *target.strided(self.rank, second, boxes))
        return list(zip(froms, tos, strict=True))

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are kept to be used again."""
        return sum(buffers.nbytes for buffers in self._idle)

    def release(self) -> None:
        """Free the buffers; those in use are freed when their operations are complete."""
        self._idle.clear()

    # -- running ----------------------------------------------------------------------------------

    def start(self, sources: Locals, outputs: Locals, options: CallOptions, nbytes: int) -> Work:
        """Issue all operations of the plan; returns a handle of the whole.

        `sources`, `outputs`: this rank's local tensors, contiguous and apart from each other, None where it
        has no part. Sources must not be changed before the handle is done, outputs not be read.
        """
        run = _Run(self, sources, outputs, options)
        joint = JointWork(run.start(), TAG, nbytes=nbytes, tag=options.get("tag"), legs=True)
        joint.then(run.finish)
        return joint

    def run(self, sources: Locals, outputs: Locals, options: CallOptions) -> None:
        """As `start`, and return once the outputs may be used."""
        run = _Run(self, sources, outputs, options)
        if len(self.stages) == 1 and len(self.stages[0].rounds) == 1:
            run.run_at_once()
        else:
            for work in run.start():
                work.wait()
        run.finish()

    def buffers(self, device: torch.device) -> _Buffers:
        """Idle buffers, or new ones."""
        for index, buffers in enumerate(self._idle):
            if buffers.device == device:
                return self._idle.pop(index)
        return _Buffers(self.stages, self.dtype, device)

    def give_back(self, buffers: _Buffers) -> None:
        """Keep buffers for the next run."""
        self._idle.append(buffers)


class _Buffers:
    """Buffers of one run, with the views of the boxes in them."""

    def __init__(self, stages: Sequence[Stage], dtype: torch.dtype, device: torch.device) -> None:
        rounds = [each for stage in stages for each in stage.rounds]
        sent = max((sum(each.input_counts) for each in rounds if each.sent_at is None), default=0)
        received = max((sum(each.output_counts) for each in rounds if each.received_at is None), default=0)
        slots = _SLOTS if max(len(stage.rounds) for stage in stages) > 1 else 1
        self.sent = [torch.empty(sent, dtype=dtype, device=device) for _ in range(slots)]
        self.received = [torch.empty(received, dtype=dtype, device=device) for _ in range(slots)]
        self.device = device
        self._views: dict[int, list[torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(buffer.nbytes for buffer in (*self.sent, *self.received))

    def views(self, boxes: Sequence[Strided], buffer: torch.Tensor) -> list[torch.Tensor]:
        """The boxes, a list that is kept by the plan, as views of a buffer, always the same; remembered."""
        found = self._views.get(id(boxes))
        if found is None:
            found = self._views[id(boxes)] = [box.within(buffer) for box in boxes]
        return found


class _Run:
    """One run of a plan: its local tensors at every stage, and the operations in flight."""

    def __init__(self, mover: Mover, sources: Locals, outputs: Locals, options: CallOptions) -> None:
        self._mover = mover
        self._options: CallOptions = {**options, "tag": options.get("tag") or TAG}
        self._outputs = outputs
        tensors = [each for each in (*sources, *outputs) if each is not None]
        device = tensors[0].device if tensors else torch.device("cpu")
        self._buffers = mover.buffers(device)
        for spec, output in zip(mover.plan.specs, outputs, strict=True):
            if spec.source.has_gaps and output is not None:
                output.zero_()
        self._stores: list[Locals] = [sources]
        for stage in mover.stages:
            self._stores.append(self._store(stage, device))

    def _store(self, stage: Stage, device: torch.device) -> Locals:
        """The local tensors that a step leads to."""
        mover, found = self._mover, list[torch.Tensor | None]()
        for index, layout in enumerate(stage.targets):
            if layout is None:
                found.append(self._stores[-1][index])
            elif layout.inside is not None or layout is mover.plan.specs[index].target:
                found.append(self._outputs[index])
            else:
                shape = layout.local_shape(mover.rank)
                found.append(None if shape is None else torch.empty(shape, dtype=mover.dtype, device=device))
        return found

    def run_at_once(self) -> None:
        """Run a plan of one operation, without a handle."""
        (stage,) = self._mover.stages
        (each,) = stage.rounds
        self._keep(0)
        if stage.is_idle:
            self._reduce(0, each, 0)
            return
        self._pack(0, each, 0)
        self._prepared(0, each, 0, False, {}).run()
        self._unpack(0, each, 0)

    def start(self) -> list[Work]:
        """Issue all operations; returns their handles, after the last of which the outputs are complete."""
        works: list[Work] = []
        last: list[Work] = []  # of the step before
        slots = len(self._buffers.sent)
        for number, stage in enumerate(self._mover.stages):
            mine: list[Work] = []
            for index, each in enumerate(stage.rounds if not stage.is_idle else ()):
                waits = last if index < slots else [*last, mine[index - slots]]
                mine.append(self._issue(number, each, index % slots, waits))
            _after(last, partial(self._keep, number))
            if stage.is_idle:
                for each in stage.rounds:
                    _after(last, partial(self._reduce, number, each, 0))
            else:
                works += mine
                last = mine
        return works

    def finish(self) -> None:
        """Copy boxes that are listed twice, and give the buffers back."""
        for pairs in self._mover.twins:
            _copy_pairs(pairs, self._outputs, self._outputs)
        self._mover.give_back(self._buffers)

    def _issue(self, number: int, each: Round, slot: int, waits: list[Work]) -> Work:
        extras: Extras = {}
        if waits:
            extras["after"] = waits[0] if len(waits) == 1 else JointWork(waits, TAG, nbytes=0)
            if each.sent_at is None:
                extras["prepare"] = partial(self._pack, number, each, slot)
        else:
            self._pack(number, each, slot)
        work = self._prepared(number, each, slot, True, extras).start()
        if each.received_at is None or each.sums:
            work.then(partial(self._unpack, number, each, slot))
        return work

    def _prepared(self, number: int, each: Round, slot: int, async_op: bool, extras: Extras) -> Prepared:
        buffers, mover = self._buffers, self._mover
        source = self._buffer(each.sent, each.sent_at, each.input_counts, number, buffers.sent[slot])
        target = self._buffer(
            each.received, each.received_at, each.output_counts, number + 1, buffers.received[slot]
        )
        extras["input_counts"], extras["output_counts"] = each.input_counts, each.output_counts
        call = Call("all_to_all_v", (source,), (target,), (), None, extras=extras, called=mover.plan.call)
        exact: CallOptions = {**self._options, "compress": False}
        return mover.comm.prepared(call, async_op, self._options if mover.stages[number].is_lossy else exact)

    def _buffer(
        self, boxes: list[Strided], at: int | None, counts: tuple[int, ...], store: int, buffer: torch.Tensor
    ) -> torch.Tensor:
        """What an operation sends or receives: a part of a local tensor, or of a buffer."""
        total = sum(counts)
        local = self._stores[store][boxes[0].tensor] if boxes and at is not None else None
        return buffer[:total] if local is None or at is None else local.view(-1)[at : at + total]

    def _pack(self, number: int, each: Round, slot: int) -> None:
        if each.sent_at is None:
            views = self._buffers.views(each.sent, self._buffers.sent[slot])
            copy_all(views, _views(each.sent, self._stores[number]))

    def _unpack(self, number: int, each: Round, slot: int) -> None:
        if each.received_at is None and each.received:
            views = self._buffers.views(each.received, self._buffers.received[slot])
            copy_all(_views(each.received, self._stores[number + 1]), views)
        self._reduce(number, each, slot)

    def _keep(self, number: int) -> None:
        """Copy what this rank has already to its place in the next layout."""
        _copy_pairs(self._mover.stages[number].kept, self._stores[number], self._stores[number + 1])

    def _reduce(self, number: int, each: Round, slot: int) -> None:
        """Reduce the addends of tensors in their order, which is the same on all ranks."""
        for addends in each.sums:
            result = self._stores[number + 1][addends.tensor]
            if result is None:
                continue
            into = result
            if result.dtype in _HALF and len(addends.addends) > 2:  # to be rounded once
                into = torch.zeros_like(result, dtype=torch.float32)  # some addends may lack elements
            for addend, (received, kept) in enumerate(addends.addends):
                targets = [box.of(into) for box in received]
                values = self._buffers.views(received, self._buffers.received[slot]).copy()
                targets += [to.of(into) for _, to in kept]
                values += _views([one for one, _ in kept], self._stores[number])
                if addend == 0 and not addends.onto:
                    copy_all(targets, values)
                elif targets:
                    values = [value.to(into.dtype) for value in values]
                    _REDUCE[addends.op](targets, values)
            if addends.op == "AVG":
                into.div_(len(addends.addends))
            if into is not result:
                result.copy_(into)


def _after(works: list[Work], function: Callable[[], None]) -> None:
    """Run a function once all of these are done, in whatever order; at once if there are none."""
    if not works:
        function()
        return
    done = count(1)

    def one_more() -> None:
        if next(done) == len(works):
            function()

    for work in works:
        work.then(one_more)


def _copy_pairs(pairs: Sequence[tuple[Strided, Strided]], before: Locals, after: Locals) -> None:
    if pairs:
        copy_all(_views([to for _, to in pairs], after), _views([one for one, _ in pairs], before))


def _views(boxes: Sequence[Strided], locals_: Locals) -> list[torch.Tensor]:
    return [box.of(locals_[box.tensor]) for box in boxes]  # type: ignore[arg-type]


def copy_all(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each of `values` to the tensor of `targets` with the same index."""
    if len(targets) == 1:
        targets[0].copy_(values[0])
    elif targets:
        _torch._foreach_copy_(targets, values)


# -- rows of many tensors -------------------------------------------------------------------------


class _Rows(NamedTuple):
    """The rows of one tensor, in the order of packing."""

    tensor: int
    layout: Layout
    rank: int
    rows: Rows
    items: list[Strided]

    @classmethod
    def of(cls, tensor: int, layout: Layout, rank: int, rows: Rows) -> _Rows:
        return cls(
            tensor, layout, rank, rows, strided(tensor, *layout.strided(rank, rows.pieces, rows.boxes))
        )

    def part(self, row: int, start: int, stop: int) -> list[Strided]:
        """A run of the elements of a row."""
        which, found = runs(self.rows.boxes.take(np.array([row])), np.array([start]), np.array([stop]))
        return strided(self.tensor, *self.layout.strided(self.rank, self.rows.pieces[[row]][which], found))


Item = tuple[int, int, Strided]
"""The peer's index in the group, the addend, and the box."""


def _cut(
    parts: Sequence[_Rows], order: dict[int, int], number: int, whole: dict[int, int]
) -> list[list[Item]]:
    """The rows of all tensors in `number` rounds, each sorted by peer, then tensor.

    What goes to one peer is cut into rounds alike by sender and receiver. `whole`: the rounds of tensors
    that are not cut.
    """
    entries = sorted(
        (order[peer], at, row)
        for at, rows in enumerate(parts)
        for row, peer in enumerate(rows.rows.peers.tolist())
    )
    found: list[list[Item]] = [[] for _ in range(number)]
    totals: dict[int, int] = {}
    for peer, at, row in entries:
        if parts[at].tensor not in whole:
            totals[peer] = totals.get(peer, 0) + parts[at].items[row].numel
    done = dict.fromkeys(totals, 0)
    for peer, at, row in entries:
        rows, item, addend = parts[at], parts[at].items[row], int(parts[at].rows.addends[row])
        if rows.tensor in whole or number == 1:
            found[whole.get(rows.tensor, 0)].append((peer, addend, item))
            continue
        total, begin = totals[peer], done[peer]
        done[peer] += item.numel
        first = begin * number // total
        last = min((begin + item.numel - 1) * number // total, number - 1)
        unit = int(row_length(rows.rows.boxes.take(np.array([row])), np.array([max(1, total // number)]))[0])
        start = 0
        for index in range(first, last + 1):
            stop = item.numel
            if index < last:
                stop = max(start, (total * (index + 1) // number - begin) // unit * unit)
            if stop > start:
                found[index] += [(peer, addend, part) for part in rows.part(row, start, stop)]
            start = stop
    return found


def strided(tensor: int, extents: Ints, strides: Ints, offsets: Ints) -> list[Strided]:
    """Boxes as `Layout.strided` returns them, of tensor number `tensor`."""
    return [
        Strided(tensor, tuple(extent), tuple(stride), offset, 0, math.prod(extent))
        for extent, stride, offset in zip(extents.tolist(), strides.tolist(), offsets.tolist(), strict=True)
    ]


def in_one_piece(boxes: Sequence[Strided]) -> int | None:
    """Where boxes begin that lie in one local tensor end to end in their order; None if they do not."""
    if not boxes:
        return 0
    at = begin = boxes[0].offset
    for box in boxes:
        if box.tensor != boxes[0].tensor or box.offset != at or not _is_contiguous(box):
            return None
        at += box.numel
    return begin


def _is_contiguous(box: Strided) -> bool:
    step = 1
    for extent, stride in zip(reversed(box.extents), reversed(box.strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True
