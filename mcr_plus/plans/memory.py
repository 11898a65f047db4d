"""Memory that a plan needs on each rank over time, from the sizes in the profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from mcr_plus.core.units import about
from mcr_plus.errors import InvalidArgument
from mcr_plus.layout.layout import Layout
from mcr_plus.plans.language import ALONG_DATA, PlanTask, TensorKey
from mcr_plus.plans.proof import (
    PlanTransfer,
    ProvedPlan,
    is_local,
    own_parts,
    share_along,
    shared_shards,
    work_share,
)
from mcr_plus.plans.sums import gradient_groups
from mcr_plus.plans.tensors import End


class MemoryUse(NamedTuple):
    """Bytes of a rank.

    `parameters`, `gradients`, `optimizer`: through the whole step. `peak`: the most at once, in the task
    `at`. `times`, `bytes`: what is in use from each time on.
    """

    parameters: int
    gradients: int
    optimizer: int
    peak: int
    at: PlanTask
    times: tuple[float, ...]
    bytes: tuple[int, ...]

    def __str__(self) -> str:
        fixed = self.parameters + self.gradients + self.optimizer
        return f"{about(self.peak)} ({about(fixed)} fixed) at {self.at}"


def memory_of(proved: ProvedPlan, rank: int) -> MemoryUse:
    """Return the memory of a rank in a step, without the batch and the optimizer's own work space."""
    return RankMemory(proved, rank).use()


def check_memory(proved: ProvedPlan, most: int) -> None:
    """Raise `InvalidArgument` if a rank needs more than `most` bytes; the text says how much is missing."""
    for rank in range(proved.plan.ranks):
        use = memory_of(proved, rank)
        if use.peak > most:
            missing = about(use.peak - most)
            raise InvalidArgument(f"memory: rank {rank} needs {use}, {missing} more than {about(most)}")


class RankMemory:
    """Bytes of a rank's tensors, of its blocks and tasks."""

    def __init__(self, proved: ProvedPlan, rank: int) -> None:
        self.proved, self.plan, self.rank = proved, proved.plan, rank
        self.blocks = [block for block, places in enumerate(self.plan.places) if rank in places]

    def use(self) -> MemoryUse:
        """Run through the tasks in order."""
        fixed = self.fixed(self.blocks)
        kept: dict[PlanTask, int] = {}
        coming: dict[TensorKey, int] = {}
        now = sum(fixed)
        times, sizes, tasks = [0.0], [now], [PlanTask(0, 0, 0, "F")]
        for (start, _), item in self.proved.program(self.rank):
            if isinstance(item, PlanTransfer):
                if self.rank in item.needed.locals:
                    coming[item[:4]] = self._bytes(item.tensor, item.needed)
                    now += coming[item[:4]]
                continue
            came = coming.pop(item.needs, 0)
            now -= came  # of an input it is in `kept`
            most = now + self.transient(item) + came * (item.kind != "F")
            key = item._replace(kind="F")
            if item.kind == "F":
                kept[key] = self.kept(item)
                now += kept[key]
                most += kept[key]
            if item.kind == self.plan.kinds(item.block)[-1]:
                now -= kept.pop(key)
            elif item.kind == "B" and set(range(item.block)) - set(self.blocks):
                # Until W: gradients of the outputs of what has parameters. A first stage leaves all to W.
                block = self.plan.blocks[item.block]
                through = round(block.through * work_share(self.plan, self.proved.tensors, item, self.rank))
                kept[key] += through
                now += through
            times += [start, start]
            sizes += [max(most, now), now]
            tasks += [item, item]
        at = int(np.argmax(sizes))
        return MemoryUse(*fixed, sizes[at], tasks[at], tuple(times), tuple(sizes))

    def fixed(self, blocks: Sequence[int]) -> tuple[int, int, int]:
        """Return the bytes of parameters, gradients and state of the optimizer of blocks."""
        plan = self.plan
        of_name = {name: size for block in plan.blocks for name, size in block.params.items()}
        parameters = gradients = state = 0.0
        seen: set[str] = set()
        for index in blocks:
            block = plan.blocks[index]
            shared = sum(of_name[name] for name in block.names - seen - block.params.keys())
            seen |= block.names
            among = next(len(g) for g in gradient_groups(plan, index, cut=True) if self.rank in g)
            own, held = self._share(index, "params"), plan.held[index]
            parameters += (own + shared) / (among if held == "parameters" else 1)
            trained = block.gradients / block.parameters if block.parameters else 1.0
            gradients += own * trained + shared
            whole = block.optimizer * own / max(block.parameters, 1)
            state += whole / (1 if held == "whole" else among)
        return round(parameters), round(gradients), round(state)

    def _share(self, index: int, what: Literal["params", "saved"], *, one: bool = False) -> float:
        """Return the bytes of a block's parameters or saved activations that this rank's parts have.

        Activations of the whole batch; with `one`, of the parts that run at once.
        """
        plan, block = self.plan, self.plan.blocks[index]
        whole = float(block.parameters if what == "params" else block.saved)
        for cut, own in own_parts(plan, index, self.rank):
            if what == "saved" and cut.outside:
                continue  # the share in the input divides it
            if what == "saved" and len(own) > 1:
                # Parts on one rank run in turn; between them only their common input is kept.
                own = own[-1:] if one else []
            for name in cut.axes if plan.how(index, cut) not in ALONG_DATA else ():
                whole -= getattr(block.axes[name], what) * (1 - share_along(block, name, cut, own))
        return whole

    def kept(self, task: PlanTask, *, one: bool = False) -> int:
        """Return the bytes that a forward pass keeps for the backward pass."""
        plan, index = self.plan, task.block
        if plan.recomputed[index] and not one:
            return self.end_bytes(index, task, "input") if index else 0
        block, share = plan.blocks[index], self.proved.tensors.share(index, task.micro, task.slice, self.rank)
        kept = self._share(index, "saved", one=one)
        for cut in plan.cuts[index]:  # what is cut outside is gathered inside
            axes = [block.axes[name] for name in cut.axes if cut.outside]
            kept += sum(axis.input for axis in axes if axis.how == "sum") * (cut.parts - 1)
        if task.slice:  # what earlier slices have left, and this one, in one tensor
            begin, end = plan.slice_ends[task.slice - 1 : task.slice + 1]
            kept += block.past * end / (end - begin)
        kept *= share
        if self._leaves(task):
            kept += self.end_bytes(index + 1, task, "output")
        if index and not one and self._comes(task):
            kept += self.end_bytes(index, task, "input")
        return round(kept)

    def transient(self, task: PlanTask) -> int:
        """Return the bytes that a pass needs on top, until it ends."""
        plan, index = self.plan, task.block
        block = plan.blocks[index]
        need = block.transient * work_share(plan, self.proved.tensors, task, self.rank)
        if task.kind == "B":
            turns = self._share(index, "saved", one=True) - self._share(index, "saved")
            need += turns * self.proved.tensors.share(index, task.micro, task.slice, self.rank)
            if plan.recomputed[index]:
                need += self.kept(task, one=True)
        if plan.held[index] == "parameters":
            need += self._share(index, "params")
        return round(need) + shared_shards(plan, index)

    def gradient(self, task: PlanTask) -> int:
        """Return the bytes of the gradient of a block's output, if it comes from other ranks."""
        tensor = task.block + 1
        if tensor == len(self.plan.blocks):
            return 0
        ends = self.proved.tensors.gradients(tensor, task.micro, task.slice)
        return 0 if is_local(ends) else self._bytes(tensor, ends.needed)

    def _leaves(self, task: PlanTask) -> bool:
        """Return whether a block's output is moved to other ranks."""
        return task.block < len(self.plan.blocks) - 1 and self._comes(task._replace(block=task.block + 1))

    def _comes(self, task: PlanTask) -> bool:
        """Return whether a block's input is moved from other ranks."""
        return not is_local(self.proved.tensors.values(task.block, task.micro, task.slice))

    def end_bytes(self, tensor: int, task: PlanTask, end: End) -> int:
        """Return the bytes of the rank's part of x[tensor], of the block after it or before it."""
        layout = self.proved.tensors.end(tensor - (end == "output"), end, task.micro, task.slice)
        return self._bytes(tensor, layout)

    def _bytes(self, tensor: int, layout: Layout) -> int:
        before = self.plan.blocks[tensor - 1]
        numbers = int(np.prod(layout.local_shape(self.rank) or (0,)))
        return numbers * before.output // max(int(np.prod(before.shape)), 1)
