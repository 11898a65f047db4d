"""Execute plans: pack boxes into buffers, exchange the buffers through the pipeline, and unpack them.

The boxes of many tensors share one exchange. The caller does not wait between the steps of a plan: all
operations are issued at once. Each starts when the previous one is complete (`Message.after`), and packs its
buffer just before it starts. A large plan whose second step gathers inside nodes is cut into waves: one wave
is gathered while the next one is in flight between nodes. If `memory` bounds the buffers, an exchange is cut
into rounds with alternating buffers, so that one buffer is packed while the other is in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import ref
from zlib import crc32

import numpy as np
import torch

from mcr_plus.communicator.calls import CallOptions
from mcr_plus.compression.options import CompressOptions
from mcr_plus.core import streams
from mcr_plus.core.work import JointWork, Work
from mcr_plus.layout.buffers import Chain, SpacePool
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.messages import KeptBoxes
from mcr_plus.layout.plan import RedistributionPlan, costs_of, lossy_steps, once
from mcr_plus.layout.regions import Ints
from mcr_plus.layout.rounds import (
    AddendSum,
    ExchangeRound,
    ExchangeStage,
    Locals,
    Pairs,
    RowsOf,
    Strided,
    Waves,
    cut,
    cut_in_waves,
    in_one_piece,
    strided,
)
from mcr_plus.layout.run import TAG, PlanRun

if TYPE_CHECKING:
    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.config.schema import Config

_ROUNDS: Final = "rounds of messages"
_SLOTS: Final = 2  # buffers used alternately by rounds
_WAVES: Final = 4
_LEAST_WAVE: Final = 2 << 20  # bytes on the fullest rank; in a smaller wave, latency outweighs overlap
_CPU: Final = torch.device("cpu")


class Mover:
    """A plan bound to a group; each run redistributes one set of tensors.

    Args:
        comm: the group.
        plan: the plan, for tensors of one dtype and device.
        options: the options of its operations.
        memory: bound of the buffers in bytes; None: no bound. The addends of a tensor are not cut into
            rounds, so they may exceed the bound.
        pool: pool of the buffers, which other movers may share; None: a private pool.
    """

    def __init__(
        self,
        comm: Communicator,
        plan: RedistributionPlan,
        options: CallOptions,
        memory: int | None = None,
        pool: SpacePool | None = None,
        device: torch.device = _CPU,
    ) -> None:
        self.comm = comm
        self.device = device  # for operations of a rank without tensors
        self.plan = plan
        self.options: CallOptions = {**options, "tag": options.get("tag") or TAG}
        self.dtype = plan.specs[0].dtype
        self.rank = comm.ranks[comm.rank]
        self._wave_count = self._waves_within(memory)
        self.waves = [Waves.of(spec.source, self._wave_count) for spec in plan.specs if self._wave_count > 1]
        """Waves of each tensor; empty if the steps run one after the other."""
        self.stages = [self._stage(step, memory) for step in range(plan.steps)]
        self._choose_messages()
        self.gaps = [index for index, spec in enumerate(plan.specs) if spec.source.has_gaps]
        """Indices of tensors whose source may lack elements; these elements are zero in the result."""
        self.pool = SpacePool() if pool is None else pool
        self._digest = crc32(plan.call.encode())
        self.key = object()  # key in `Space.buffers`; the mover itself would form a reference cycle
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
            and not self.stages[0].by_messages
        )
        """True if a run is one operation with copies before and after it."""
        self._seen: list[int] = []
        """Ids of the tensors of the last run."""
        self._seen_one: Callable[[], torch.Tensor | None] = _nothing

    # -- binding ----------------------------------------------------------------------------------

    def _waves_within(self, memory: int | None) -> int:
        """Return the number of waves, the same on all ranks; 1 if waves bring no gain."""
        plan = self.plan
        if plan.nodes is None or {each.program.name for each in plan.chosen} - {"direct", "gather"}:
            return 1
        moved = plan.loads[..., [0, 1, 3, 4]].sum(axis=(0, 2))  # by step
        if len(moved) < 2 or plan.steps != 2 or not moved[:2].all():
            return 1
        if memory is not None and moved.max() > memory // _WAVES:  # one wave may need the buffer of all waves
            return 1
        if any(spec.source.is_partial or spec.source.overlaps for spec in plan.specs):
            return 1
        return int(min(_WAVES, max(1, moved.max() // _LEAST_WAVE)))

    def _stage(self, number: int, memory: int | None) -> ExchangeStage:
        plan = self.plan
        sends: list[RowsOf] = []
        receives: list[RowsOf] = []
        kept: list[tuple[Strided, Strided]] = []
        targets: list[Layout | None] = []
        sums: dict[int, AddendSum] = {}
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
                sums[index] = AddendSum(index, spec.source.op, step.source.has_gaps, empty)
                for addend, pair in zip(part.kept.addends.tolist(), pairs, strict=True):
                    empty[addend][1].append(pair)
            elif step.source.inside is None or step.source.inside[0] is not step.target:
                # otherwise the kept boxes are slices, already within the target
                kept += pairs
        moved = plan.loads[:, number, [0, 1, 3, 4]].sum(axis=1)
        rounds = self._rounds(moved, sends, receives, sums, memory)
        is_last = all(
            each is not None and (each.inside is not None or each is spec.target)
            for each, spec in zip(targets, plan.specs, strict=True)
        )
        return ExchangeStage(rounds, Pairs.of(kept), targets, is_last, lossy, not moved.any())

    def _choose_messages(self) -> None:
        """Decide which steps consist of messages between pairs of ranks; collective.

        Only for CPU tensors: an all_to_all of NCCL consists of messages already. If a codec may apply, by
        the call or by a rule, the step is one operation.
        """
        comm, compress = self.comm, self.options.get("compress")
        may_encode = compress not in (None, False) or (compress is None and _names_a_codec(comm.config))
        if comm.size == 1 or self.device.type != "cpu" or may_encode:
            return
        most = torch.tensor([*map(self._most_messages, self.stages, range(len(self.stages)))], device="cpu")
        comm.all_reduce(most, "MAX", compress=False, tag=TAG)
        costs = costs_of(comm, self.plan.nodes)
        for stage, number in zip(self.stages, most.tolist(), strict=True):
            if number and costs.prefers_messages(number, comm.size - 1, self.plan.nodes is not None):
                stage.by_messages = True
                for each in stage.rounds:
                    each.cut_into_messages()

    def _most_messages(self, stage: ExchangeStage, number: int) -> int:
        """Return the most sends and receives in a round of a step: of this rank, and those not heard."""
        counts = ([*each.input_counts, *each.output_counts] for each in stage.rounds)
        most = [sum(count > 0 for count in each) for each in counts]
        pairs = zip(self.plan.specs, self.plan.chosen, strict=True)
        named = (f"{spec.name} {each.program.name}" for spec, each in pairs)
        key = "messages", self.plan.call, number, *named
        return max([*most, once(self.comm, key, partial(self._unheard_messages, number))])

    def _unheard_messages(self, number: int) -> int:
        """Return the most sends and receives in all rounds of a step, of the ranks that are not heard."""
        steps = [each.program.steps[number : number + 1] for each in self.plan.chosen]
        most = 0
        for rank in self.comm.attached.get("unheard", ()):
            parts = [step.part(rank) for (step,) in filter(None, steps)]
            sides = [part.sends for part in parts], [part.receives for part in parts]
            most = max(
                most, sum(len({peer for rows in side for peer in rows.peers.tolist()}) for side in sides)
            )
        return most

    def _kept(
        self, index: int, source: Layout, target: Layout, part: KeptBoxes
    ) -> list[tuple[Strided, Strided]]:
        froms = strided(index, *source.strided(self.rank, part.pieces, part.boxes))
        tos = strided(index, *target.strided(self.rank, part.into, part.boxes))
        return list(zip(froms, tos, strict=True))

    def _rounds(
        self,
        moved: Ints,
        sends: list[RowsOf],
        receives: list[RowsOf],
        sums: dict[int, AddendSum],
        memory: int | None,
    ) -> list[ExchangeRound]:
        """Return the rounds of an exchange. `moved`: bytes of each tensor on the fullest rank."""
        whole: dict[int, int] = {}  # the round of each tensor with addends
        first, number = 0, 1  # for the other tensors
        # Tensors with addends are not cut: they fill whole rounds first. The others share the later rounds.
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
        found = [ExchangeRound(f"{index + 1} of {count}") for index in range(count)]
        # Lay the boxes of each round out in its buffers, by peer, as the operation needs them.
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

    def next_match_tag(self) -> int:
        """Return the tag of the messages of the next round, the same on all ranks.

        The tag differs from the tags of other rounds and plans in flight. Messages with the same tag start in
        the order of issue, so a ready message would wait for earlier rounds. It may collide with tags of the
        program from 2²³ on.
        """
        counter: list[int] = self.comm.attached.setdefault(_ROUNDS, [0])
        counter[0] += 1
        return 1 << 23 | (self._digest & 0x7FF) << 12 | counter[0] & 0xFFF

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

        `sources`, `outputs`: this rank's local tensors, contiguous and disjoint, None if it has no part.
        Before the handle is complete, sources must not be changed and outputs must not be read. `chain`: the
        previous runs in the same memory.
        """
        run = PlanRun(self, sources, outputs, chain)
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
                streams.follow(space.used, space.device)
                repeated.run()
                self.pool.give_back(space)
                return
        run = PlanRun(self, sources, outputs)
        if len(self.stages) == 1 and len(self.stages[0].rounds) == 1:
            run.run_at_once()
            if self._is_simple:
                self._remember(run, sources, outputs)
        else:
            for work in run.start():
                work.wait()
        run.finish()

    def _remember(self, run: PlanRun, sources: Locals, outputs: Locals) -> None:
        """Record the run for replay by the next run, if its tensors are those of the previous run."""
        tensors = [*outputs, *sources]
        like = next((each for each in tensors if each is not None), None)
        ids = list(map(id, tensors))
        if ids == self._seen and like is not None and self._seen_one() is like:  # ids may be reused
            run.buffers.repeated = run.repeated(tensors)
        else:
            self._seen = ids
            self._seen_one = _nothing if like is None else ref(like)


def _names_a_codec(config: Config) -> bool:
    """Return whether a stage or a rule of a configuration names a codec."""
    options = (each for each in config.all_options if isinstance(each, CompressOptions))
    return any(each.codec != "none" for each in options)


def _nothing() -> None:
    """Return None, like a dead weak reference."""
