"""Execution of plans: boxes are packed into buffers, exchanged through the pipeline, and unpacked.

The boxes of many tensors share one exchange. The caller does not wait between the steps of a plan: all
operations are issued at once. Each starts when the one before it is complete (`Message.after`), and packs its
buffer just before it starts. A large plan whose second step gathers inside nodes is cut into waves: one wave
is gathered while the next one is in flight between nodes. If `memory` bounds the buffers, an exchange is cut
into rounds with alternating buffers, so that one is packed while the other is in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import numpy as np
import torch

from mcr_plus.communicator.calls import Call, CallOptions
from mcr_plus.core.message import Message
from mcr_plus.core.work import JointWork, Work
from mcr_plus.layout.buffers import Buffers, Chain, Pool, Repeated
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.messages import Kept
from mcr_plus.layout.plan import Plan, lossy_steps
from mcr_plus.layout.regions import Ints
from mcr_plus.layout.rounds import (
    Locals,
    Pairs,
    Round,
    RowsOf,
    Stage,
    Strided,
    Sum,
    Waves,
    copy_all,
    cut,
    cut_in_waves,
    in_one_piece,
    strided,
    views_of,
)

if TYPE_CHECKING:
    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.core.message import Extras
    from mcr_plus.pipeline.stage import Issue

__all__ = ["TAG", "Locals", "Mover", "Strided", "copy_all", "in_one_piece", "strided"]

TAG: Final = "redistribute"
_SLOTS: Final = 2  # buffers that rounds use alternately
_WAVES: Final = 4
_LEAST_WAVE: Final = 2 << 20  # bytes of the fullest rank, below which its latency is not worth the overlap
_torch: Any = torch  # its type stubs lack the operations on lists
_CPU: Final = torch.device("cpu")
_HALF: Final = (torch.float16, torch.bfloat16)
_REDUCE: Final[dict[str, Callable[..., Any]]] = {
    "SUM": _torch._foreach_add_,
    "AVG": _torch._foreach_add_,
    "PRODUCT": _torch._foreach_mul_,
    "MAX": _torch._foreach_maximum_,
    "MIN": _torch._foreach_minimum_,
}


class Mover:
    """A plan bound to a group; each run redistributes one set of tensors.

    Args:
        comm: the group.
        plan: the plan, for tensors of one dtype and device.
        options: the options of its operations.
        memory: the bound of the buffers in bytes; None: no bound. The addends of one tensor are not cut into
            rounds, so they may exceed it.
        pool: the pool of the buffers, which other movers may share; None: a private one.
    """

    def __init__(
        self,
        comm: Communicator,
        plan: Plan,
        options: CallOptions,
        memory: int | None = None,
        pool: Pool | None = None,
        device: torch.device = _CPU,
    ) -> None:
        self.comm = comm
        self.device = device  # where a rank without tensors takes part
        self.plan = plan
        self.options: CallOptions = {**options, "tag": options.get("tag") or TAG}
        self.dtype = plan.specs[0].dtype
        self.rank = comm.ranks[comm.rank]
        self._wave_count = self._waves_within(memory)
        self.waves = [Waves.of(spec.source, self._wave_count) for spec in plan.specs if self._wave_count > 1]
        """The waves of each tensor; empty if the steps run one after the other."""
        self.stages = [self._stage(step, memory) for step in range(plan.steps)]
        self.gaps = [index for index, spec in enumerate(plan.specs) if spec.source.has_gaps]
        """Indices of the tensors whose source may lack elements; these are zero in the result."""
        self.pool = Pool() if pool is None else pool
        self.key = object()  # in `Space.buffers`, where the mover itself would be a cycle
        rounds = [each for stage in self.stages for each in stage.rounds]
        self.slots = _SLOTS if any(len(stage.rounds) > 1 for stage in self.stages) else 1
        if self.waves:
            self.slots = self._wave_count
        self.slot = max((each.buffered for each in rounds), default=0)
        """Elements of the largest buffers of a round."""
        self.nbytes = self.slots * self.slot * self.dtype.itemsize
        self.twins = [
            self._twins_of(index, spec.target)
            for index, spec in enumerate(plan.specs)
            if spec.target.target_regions.twins
        ]
        """Boxes that this rank lists twice in a target; the second is copied from the first at the end."""
        self._is_simple = (
            len(rounds) == 1
            and not (self.stages[0].is_idle or self.gaps or self.twins or rounds[0].sums)
            and self.stages[0].is_last
        )
        """True if a run consists of one operation and of copies before and after it."""
        self._seen: list[int] = []
        """The ids of the tensors of the last run."""
        self._seen_one: Callable[[], torch.Tensor | None] = _nothing

    # -- binding ----------------------------------------------------------------------------------

    def _waves_within(self, memory: int | None) -> int:
        """Return the number of waves, the same on all ranks; 1 if there is nothing to gain."""
        plan = self.plan
        if plan.nodes is None or {each.program.name for each in plan.chosen} - {"direct", "gather"}:
            return 1
        moved = plan.loads[..., [0, 1, 3, 4]].sum(axis=(0, 2))  # by step
        if len(moved) < 2 or plan.steps != 2 or not moved[:2].all():
            return 1
        if memory is not None and moved.max() > memory // _SLOTS:
            return 1
        if any(spec.source.is_partial or spec.source.overlaps for spec in plan.specs):
            return 1
        return int(min(_WAVES, max(1, moved.max() // _LEAST_WAVE)))

    def _stage(self, number: int, memory: int | None) -> Stage:
        plan = self.plan
        sends: list[RowsOf] = []
        receives: list[RowsOf] = []
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
            sends.append(RowsOf.of(index, step.source, self.rank, part.sends))
            receives.append(RowsOf.of(index, step.target, self.rank, part.receives))
            pairs = self._kept(index, step.source, step.target, part.kept)
            if step.source.is_partial:
                empty: list[Any] = [([], []) for _ in range(step.source.addend_count)]
                sums[index] = Sum(index, spec.source.op, step.source.has_gaps, empty)
                for addend, pair in zip(part.kept.addends.tolist(), pairs, strict=True):
                    empty[addend][1].append(pair)
            elif step.source.inside is None or step.source.inside[0] is not step.target:
                # otherwise the kept boxes are slices, which lie in the target already
                kept += pairs
        moved = plan.loads[:, number, [0, 1, 3, 4]].sum(axis=1)
        rounds = self._rounds(moved, sends, receives, sums, memory)
        is_last = all(
            each is not None and (each.inside is not None or each is spec.target)
            for each, spec in zip(targets, plan.specs, strict=True)
        )
        return Stage(rounds, Pairs.of(kept), targets, is_last, lossy, not moved.any())

    def _kept(self, index: int, source: Layout, target: Layout, part: Kept) -> list[tuple[Strided, Strided]]:
        froms = strided(index, *source.strided(self.rank, part.pieces, part.boxes))
        tos = strided(index, *target.strided(self.rank, part.into, part.boxes))
        return list(zip(froms, tos, strict=True))

    def _rounds(
        self,
        moved: Ints,
        sends: list[RowsOf],
        receives: list[RowsOf],
        sums: dict[int, Sum],
        memory: int | None,
    ) -> list[Round]:
        """Return the rounds of an exchange. `moved`: bytes of each tensor on the fullest rank of all."""
        whole: dict[int, int] = {}  # the round of each tensor with addends
        first, number = 0, 1  # for the others, the first round and the number of rounds
        if memory is not None and not self.waves:
            room = max(1, memory // _SLOTS)
            last = filled = 0
            for tensor in sums:
                size = int(moved[tensor])
                if filled and filled + size > room:
                    last, filled = last + 1, 0
                whole[tensor] = last
                filled += size
            plain = int(moved.sum()) - int(moved[list(sums)].sum())
            number = max(1, -(-plain // room))
            first = last + 1 if filled and plain else 0
            number = max(number, last + 1 - first)
        order = {rank: index for index, rank in enumerate(self.comm.ranks)}
        count = self._wave_count if self.waves else first + number
        found = [Round(f"{index + 1} of {count}") for index in range(count)]
        for is_send, parts in ((True, sends), (False, receives)):
            if self.waves:
                rounds = cut_in_waves(parts, order, self.waves, count)
            else:
                rounds = cut(parts, order, first, number, dict.fromkeys(sums, 0) | whole)
            for each, rows in zip(found, rounds, strict=True):
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
                    each.sent, each.input_counts, each.sent_numel = placed, tuple(counts), at
                    each.sent_at = in_one_piece(placed)
                else:
                    each.received = [item for item in placed if item.tensor not in sums]
                    each.output_counts, each.received_numel = tuple(counts), at
                    each.received_at = in_one_piece(placed) if len(each.received) == len(placed) else None
        for tensor, addends in sums.items():
            found[whole.get(tensor, 0)].sums.append(addends)
        return found

    def _twins_of(self, index: int, target: Layout) -> Pairs:
        pairs = [pair for pair in target.target_regions.twins if target.owners[pair[0]] == self.rank]
        first, second = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
        boxes = target.held.take(first)
        froms = strided(index, *target.strided(self.rank, first, boxes))
        tos = strided(index, *target.strided(self.rank, second, boxes))
        return Pairs(froms, tos)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the idle buffers that are kept for later runs."""
        return self.pool.nbytes

    def release(self) -> None:
        """Free the idle buffers. Buffers in use return to the pool when their operations are complete."""
        self.pool.idle.clear()

    # -- running ----------------------------------------------------------------------------------

    def start(self, sources: Locals, outputs: Locals, nbytes: int, chain: Chain | None = None) -> Work:
        """Issue all operations of the plan; returns one handle for all of them.

        `sources`, `outputs`: this rank's local tensors, contiguous and disjoint, None where it has no part.
        Before the handle is complete, sources must not be changed and outputs must not be read. `chain`: the
        runs that this one follows.
        """
        run = _Run(self, sources, outputs, chain)
        joint = JointWork(run.start(), TAG, nbytes=nbytes, tag=self.options.get("tag"), legs=True)
        joint.then(run.finish)
        return joint

    def run(self, sources: Locals, outputs: Locals) -> None:
        """Run the plan; returns when the outputs may be used. See `start`."""
        if self._is_simple:
            space = next(reversed(self.pool.idle), None)
            buffers = None if space is None else space.buffers.get(self.key)
            repeated = None if buffers is None else buffers.repeated
            fits = repeated is not None and repeated.is_of(sources, outputs)
            if space is not None and repeated is not None and fits and self.pool.claim(space):
                repeated.run()
                self.pool.give_back(space)
                return
        run = _Run(self, sources, outputs)
        if len(self.stages) == 1 and len(self.stages[0].rounds) == 1:
            run.run_at_once()
            if self._is_simple:
                self._remember(run, sources, outputs)
        else:
            for work in run.start():
                work.wait()
        run.finish()

    def _remember(self, run: _Run, sources: Locals, outputs: Locals) -> None:
        """Record the run if its tensors are those of the run before, so that the next one can replay it."""
        tensors = [*outputs, *sources]
        like = next((each for each in tensors if each is not None), None)
        ids = list(map(id, tensors))
        if ids == self._seen and like is not None and self._seen_one() is like:  # ids may be reused
            run.buffers.repeated = run.repeated(tensors)
        else:
            self._seen = ids
            self._seen_one = _nothing if like is None else ref(like)


def _nothing() -> None:
    """A dead weak reference: it returns None."""


class _Run:
    """One run of a plan: its local tensors at every stage, and the operations in flight."""

    def __init__(self, mover: Mover, sources: Locals, outputs: Locals, chain_: Chain | None = None) -> None:
        self._mover = mover
        self._outputs = outputs
        like = next((each for each in chain(outputs, sources) if each is not None), None)
        device = mover.device if like is None else like.device
        self._before = [] if chain_ is None else chain_.before
        self._taken = None if chain_ is not None else mover.pool.take(mover.nbytes, device)
        space = self._taken if chain_ is None else chain_.space
        assert space is not None
        buffers = space.buffers.get(mover.key)
        if buffers is None:
            buffers = space.buffers[mover.key] = Buffers(mover, space)
        self.buffers = buffers
        self._device = device
        for index in mover.gaps:
            if (output := outputs[index]) is not None:
                output.zero_()
        self._stores: list[Locals] = [sources]
        for stage in mover.stages:
            self._stores.append(outputs if stage.is_last else self._store(stage, device))

    def _store(self, stage: Stage, device: torch.device) -> Locals:
        """Return the local tensors that a step writes: outputs, new ones, or those of the step before."""
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
        """Run a plan of at most one operation, without a handle."""
        (stage,) = self._mover.stages
        (each,) = stage.rounds
        self._keep(0)
        if stage.is_idle:
            self._reduce(0, each, 0)
            return
        self._pack(0, each, 0)
        issue, message = self._operation(0, each, 0, False, {})
        issue.run(message)
        self._unpack(0, each, 0)

    def repeated(self, tensors: Locals) -> Repeated:
        """Return a record of this run of one operation. It keeps none of `tensors` (outputs first) alive."""
        (stage,) = self._mover.stages
        (each,) = stage.rounds
        number = len(self._stores[1])
        # `data` is another tensor on the same memory; views of it do not keep the original alive.
        aliases = [None if local is None else local.data for local in tensors]
        self._stores = [aliases[number:], aliases[:number]]
        packed, unpacked = self.buffers.of(each, 0)
        before, after = self._stores
        copies = [(views_of(stage.kept.tos, after), views_of(stage.kept.froms, before)), ([], []), ([], [])]
        if each.sent_at is None:
            copies[1] = self.buffers.views(each.sent, packed), views_of(each.sent, before)
        if each.received_at is None:
            copies[2] = views_of(each.received, after), self.buffers.views(each.received, unpacked)
        issue, message = self._operation(0, each, 0, False, {})
        return Repeated(self.buffers, tensors, copies, issue, message)

    def start(self) -> list[Work]:
        """Issue all operations; returns their handles. The outputs are complete when all of them are."""
        if self._mover.waves:
            return self._start_in_waves()
        works: list[Work] = []
        last: list[Work] = []  # the operations of the step before
        slots = self._mover.slots
        for number, stage in enumerate(self._mover.stages):
            mine: list[Work] = []
            for index, each in enumerate(stage.rounds if not stage.is_idle else ()):
                waits = last or self._before
                if index >= slots:
                    waits = [*waits, mine[index - slots]]
                mine.append(self._issue(number, each, index % slots, waits))
            _after(last, partial(self._keep, number))
            if stage.is_idle:
                for each in stage.rounds:
                    _after(last, partial(self._reduce, number, each, 0))
            else:
                works += mine
                last = mine
        return works

    def _start_in_waves(self) -> list[Work]:
        first, second = (stage.rounds for stage in self._mover.stages)
        sent: list[Work] = []
        gathered: list[Work] = []
        for wave, each in enumerate(first):
            sent.append(self._issue(0, each, wave, sent[-1:] or self._before))
            if wave == 0:
                self._keep(0)
            else:
                gathered.append(self._issue(1, second[wave - 1], wave - 1, [sent[wave - 1]]))
        gathered.append(self._issue(1, second[-1], len(second) - 1, sent[-1:]))
        return [*sent, *gathered]

    def finish(self) -> None:
        """Copy boxes that are listed twice, and return the buffers to the pool."""
        for pairs in self._mover.twins:
            pairs.copy(self._outputs, self._outputs)
        if self._taken is not None:
            self._mover.pool.give_back(self._taken)

    def _issue(self, number: int, each: Round, slot: int, waits: list[Work]) -> Work:
        extras: Extras = {}
        if waits:
            extras["after"] = waits[0] if len(waits) == 1 else JointWork(waits, TAG, nbytes=0)
            if each.sent_at is None:
                extras["prepare"] = partial(self._pack, number, each, slot)
        else:
            self._pack(number, each, slot)
        issue, message = self._operation(number, each, slot, True, extras)
        work = issue.start(message)
        if each.received_at is None or each.sums:
            work.then(partial(self._unpack, number, each, slot))
        return work

    def _operation(
        self, number: int, each: Round, slot: int, async_op: bool, extras: Extras
    ) -> tuple[Issue, Message]:
        """Return the exchange of a round, bound on first use. Its tensors are flat, contiguous, disjoint."""
        packed, unpacked = self.buffers.of(each, slot)
        source = self._buffer(each.sent, each.sent_at, each.sent_numel, number, packed)
        target = self._buffer(each.received, each.received_at, each.received_numel, number + 1, unpacked)
        extras["input_counts"], extras["output_counts"] = each.input_counts, each.output_counts
        key = (async_op, self._device.type)
        bound = each.bound.get(key)
        if bound is None:
            mover = self._mover
            stages = mover.stages
            called = f"{mover.plan.call}, step {number + 1} of {len(stages)}, round {each.place}"
            call = Call(
                "all_to_all_v", (source,), (target,), (), None, extras=extras, called=called,
                counts_agreed=True,
            )  # fmt: skip
            exact: CallOptions = {**mover.options, "compress": False}
            options = mover.options if stages[number].is_lossy else exact
            ready = mover.comm.prepared(call, async_op, options)
            bound = each.bound[key] = (ready.message.signature, ready.issue)
        signature, issue = bound
        return issue, Message(signature, (source,), (target,), **extras)

    def _buffer(
        self, boxes: list[Strided], at: int | None, numel: int, store: int, buffer: torch.Tensor
    ) -> torch.Tensor:
        """Return the tensor that an operation sends or receives: a range of a local tensor, or a buffer."""
        if at is None:
            return buffer
        local = self._stores[store][boxes[0].tensor] if boxes else None
        return buffer[:0] if local is None else local.view(-1)[at : at + numel]

    def _pack(self, number: int, each: Round, slot: int) -> None:
        if each.sent_at is None:
            views = self.buffers.views(each.sent, self.buffers.of(each, slot)[0])
            copy_all(views, views_of(each.sent, self._stores[number]))

    def _unpack(self, number: int, each: Round, slot: int) -> None:
        if each.received_at is None and each.received:
            views = self.buffers.views(each.received, self.buffers.of(each, slot)[1])
            copy_all(views_of(each.received, self._stores[number + 1]), views)
        self._reduce(number, each, slot)

    def _keep(self, number: int) -> None:
        """Copy the boxes that this rank holds already into its local tensors of the next layout."""
        self._mover.stages[number].kept.copy(self._stores[number], self._stores[number + 1])

    def _reduce(self, number: int, each: Round, slot: int) -> None:
        """Reduce the addends of each tensor in the order of their indices, which is the same on all ranks."""
        for addends in each.sums:
            result = self._stores[number + 1][addends.tensor]
            if result is None:
                continue
            into = result
            if result.dtype in _HALF and len(addends.addends) > 2:  # summed in float32 and rounded once
                into = torch.zeros_like(result, dtype=torch.float32)  # some addends may lack elements
            for addend, (received, kept) in enumerate(addends.addends):
                targets = [box.of(into) for box in received]
                values = self.buffers.views(received, self.buffers.of(each, slot)[1]).copy()
                targets += [to.of(into) for _, to in kept]
                values += views_of([one for one, _ in kept], self._stores[number])
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
    """Call a function when all operations are complete, in any order; immediately if there are none."""
    if not works:
        function()
        return
    done = count(1)

    def one_more() -> None:
        if next(done) == len(works):
            function()

    for work in works:
        work.then(one_more)
