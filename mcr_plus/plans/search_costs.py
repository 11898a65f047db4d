"""Times and bytes of blocks in all ways that a search for plans may choose; see `search`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from mcr_plus.bucketing.scaling import CAPTURED
from mcr_plus.core.kinds import Kind
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.codecs import CodecChoice, compressed_sum, transfer_codec
from mcr_plus.plans.foretell import OVERHEAD, BestCosts, operations_within
from mcr_plus.plans.language import OUTSIDE, Held, PlanTask
from mcr_plus.plans.memory import RankMemory
from mcr_plus.plans.named import Schedule, inner_cuts, mesh
from mcr_plus.plans.proof import ProvedPlan, seconds_of, share_of
from mcr_plus.plans.stage_search import BlockCosts, Floats, Ints
from mcr_plus.plans.tensors import PlanTensors
from mcr_plus.tables.scaling import Placement


class PlanChoice(NamedTuple):
    """Arguments of `named.hybrid` that a search chooses."""

    data: int
    tensor: int
    micro_batches: int
    held: Held
    outside: str | None
    stages: tuple[range, ...] = ()
    recompute: tuple[int, ...] = ()
    sharded: tuple[int, ...] = ()
    tensor_blocks: tuple[int, ...] = ()
    schedule: Schedule = "1f1b"
    slices: int = 1

    def __str__(self) -> str:
        parts = [f"data {self.data}", f"tensor {self.tensor}", f"stages {len(self.stages)}"]
        parts.append(f"micro-batches {self.micro_batches}")
        parts += [f"{self.held} in shards"] if self.held != "whole" else []
        parts += [f"{self.outside} in parts between"] if self.outside else []
        parts += [f"{len(self.tensor_blocks)} blocks with parameters in parts"] if self.tensor_blocks else []
        parts += [f"{len(self.recompute)} blocks recomputed"] if self.recompute else []
        parts += [f"{len(self.sharded)} with parameters in shards"] if self.sharded else []
        parts += [f"{self.slices} slices"] if self.slices > 1 else []
        parts += [self.schedule] if self.schedule != "1f1b" else []
        return ", ".join(parts)


class _Measured(NamedTuple):
    """Times and bytes of each block on one rank, for one micro-batch; `again`: of its forward pass.

    `within`: kind and bytes of the operations within a pass.
    """

    seconds: Floats
    again: Floats
    kept: Ints
    input: Ints
    parameters: Ints
    gradients: Ints
    state: Ints
    transient: Ints
    transient_again: Ints
    output: Ints
    within: Sequence[Sequence[tuple[str, int]]]


class SearchCosts:
    """Costs of blocks by combination; those of one micro-batch depend on its share of the batch alone."""

    def __init__(self, profile: Profile, costs: BestCosts, codecs: Sequence[CodecChoice]) -> None:
        self.profile, self.costs, self.codecs = profile, costs, codecs
        self.dealt = [bool(inner_cuts(block, ("exchange",))) for block in profile.blocks]
        self._time, self._known, self._sums = cache(self._seconds), cache(self._measured), cache(self._summed)

    def of(self, choice: PlanChoice, stages: int) -> tuple[BlockCosts, Ints]:
        """Return the costs of all blocks, and the ways of each: see `_Combination`."""
        every = choice.data * choice.tensor
        ways = {0: (), 4: choice.tensor_blocks} if choice.tensor_blocks else {0: ()}
        pieces = choice.data * choice.micro_batches
        known = [self._known(choice.tensor, pieces, choice.outside, cut) for cut in ways.values()]
        found = [self._in_ways(choice, stages, *pair) for pair in zip(ways.values(), known, strict=True)]
        seconds, kept, fixed, transient = (np.concatenate(each, axis=1) for each in zip(*found, strict=True))
        order = np.argsort(seconds, axis=1, kind="stable")
        seconds, kept, fixed, transient = (
            np.take_along_axis(each, order, 1) for each in (seconds, kept, fixed, transient)
        )
        for each in (kept, fixed, transient):  # a way that a block has not is no way to save memory
            np.copyto(each, each[:, :1], where=np.isinf(seconds))
        output = known[-1].output
        sends = np.zeros((len(seconds), stages))
        alike: dict[Placement, Floats] = {}
        for stage in range(stages - 1):
            pair = stage * every, (stage + 1) * every
            place = self.costs.topology.placement(pair)
            if place not in alike:
                alike[place] = np.array([self._sent(index, int(n), pair) for index, n in enumerate(output)])
            sends[:, stage] = alike[place]
        extra = seconds - seconds[:, :1]
        costs = BlockCosts(seconds[:, 0], extra, kept, fixed, transient, output, known[-1].input, sends)
        return costs, np.arange(8)[[bits + way for bits in ways for way in range(4)]][order]

    def _in_ways(
        self, choice: PlanChoice, stages: int, cut: tuple[int, ...], one: _Measured
    ) -> tuple[Floats, Ints, Ints, Ints]:
        """Return seconds and bytes of each block in four ways; seconds are infinite where it has one not."""
        data, tensor, micro, held, outside = choice[:5]
        # Ranks with the same parameters; of the first stage, as those of other stages lie alike.
        whole = [outside == "batch" and not dealt and n not in cut for n, dealt in enumerate(self.dealt)]
        alike = [range(0, data * tensor, 1 if each else tensor) for each in whole]
        kind: Kind = "all_reduce" if held == "whole" else "reduce_scatter"
        pairs = zip(one.gradients.tolist(), one.parameters.tolist(), alike, strict=True)
        both = [(self._sums(kind, n, group), self._time("all_gather", m, group)) for n, m, group in pairs]
        sums, gathers = np.array(both).T
        if held == "optimizer":  # after its step, the ranks gather the parameters
            sums = sums + gathers
        shared = [stages > 1 and bool(block.shared) for block in self.profile.blocks]
        holders = np.array([len(group) for group in alike])
        # Shards of a block that shares parameters with one on other ranks are no choice.
        shards = np.where((holders < 2) | shared, np.inf, 2 * gathers)
        group = range(tensor)
        inner = np.array([2 * sum(self._time(*each, group) for each in block) for block in one.within])
        times = one.seconds + inner + sums / (micro + stages - 1)
        again = times + one.again + inner / 2
        fixed = one.gradients + one.parameters + one.state // (1 if held == "whole" else holders)
        split = one.gradients + (one.parameters + one.state) // holders
        transients = one.transient, one.transient_again
        return (
            np.stack([times, again, times + shards, again + shards], axis=1),
            np.stack([one.kept, one.input] * 2, axis=1),
            np.stack([fixed, fixed, split, split], axis=1),
            np.stack([*transients, *(each + one.parameters for each in transients)], axis=1),
        )

    def _sent(self, block: int, nbytes: int, pair: tuple[int, int]) -> float:
        """Return the seconds of a block's output and its gradient, with the fastest codec."""
        found, dtype = [self._time("send", nbytes, pair)], self.profile.blocks[block].dtype
        for codec in (transfer_codec(choice, dtype) for choice in self.codecs if nbytes):
            coding = nbytes // codec.itemsize * (codec.encode + codec.decode)
            found.append(coding + self._time("send", codec.wire(nbytes), pair))
        return 2 * min(found)

    def _summed(self, kind: Kind, nbytes: int, group: range) -> float:
        """Return the seconds of a sum of gradients, with the fastest codec."""
        found = [self._time(kind, nbytes, group)]
        for codec in self.codecs if found[0] else ():
            wire, coding = compressed_sum(codec, kind, nbytes, len(group))
            found.append(coding + self._time(kind, wire, group))
        return min(found)

    def _seconds(self, kind: str, nbytes: int, group: range | tuple[int, ...]) -> float:
        if not nbytes or len(group) < 2:
            return 0.0
        return self.costs.of(kind, nbytes, group, CAPTURED).seconds + OVERHEAD

    def _measured(
        self, tensor: int, pieces: int, outside: str | None, tensor_blocks: tuple[int, ...]
    ) -> _Measured:
        """Return times and bytes of blocks on one of `tensor` ranks, for the largest of `pieces` of a batch.

        The last parts are the largest.
        """
        plan, whole = (
            mesh(
                self.profile, tensor, tensor=tensor, micro_batches=number, outside=outside,
                tensor_blocks=tensor_blocks,
            )[0]
            for number in (pieces, 1)  # one has fewer places to look at
        )  # fmt: skip
        held = RankMemory(ProvedPlan(whole, PlanTensors(whole), (), ()), tensor - 1)
        proved = ProvedPlan(plan, PlanTensors(plan), (), ())
        last, micro = tensor - 1, pieces - 1
        one = RankMemory(proved, last)
        rows = []
        within: list[list[tuple[str, int]]] = []
        for index, block in enumerate(plan.blocks):
            forward, backward = PlanTask(index, micro, 0, "F"), PlanTask(index, micro, 0, "B")
            both = [seconds_of(plan, proved.tensors, task, last) for task in (forward, backward)]
            kept = one.kept(forward)
            input_ = one.end_bytes(index, forward, "input") if index else 0
            output = one.end_bytes(index + 1, forward, "output") if index + 1 < len(plan.blocks) else 0
            transient = one.transient(backward) + one.gradient(backward)
            fixed = held.fixed([index])
            rows.append((sum(both), both[0], kept, input_, *fixed, transient, transient + kept, output))
            within.append([
                operation
                for cut in plan.cuts[index] if plan.how(index, cut) in OUTSIDE
                for operation in operations_within(
                    block, cut, share_of(proved.tensors, forward, cut, range(tensor)), tensor
                )
            ])  # fmt: skip
        seconds, again, *sizes = zip(*rows, strict=True)
        times = np.array(seconds), np.array(again)
        return _Measured._make([*times, *(np.array(each, np.int64) for each in sizes), within])
