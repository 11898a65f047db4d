"""Token simulator of plans, which shares no code with their proof.

Every rank runs its order. A task needs its inputs: boolean arrays say which elements of which tensor each
rank has made, of each addend. Ranks whose parts exchange data within a task meet in it; transfers begin when
all of the tensor has been made. At the end the gradients of every parameter have been added up of every task
once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcr_plus.errors import InvalidArgument
from mcr_plus.plans.language import ModelPlan, PlanTask
from mcr_plus.plans.sums import gradient_groups, shared_groups

Bools = NDArray[np.bool_]
At = tuple[int, ...]
_DATA = ("split", "gather", "halo")


class _WrongError(Exception):
    """What goes wrong."""


def error_of(plan: ModelPlan) -> str | None:
    """Return what goes wrong when a plan runs; None if all of it is right."""
    try:
        _Machine(plan).run()
    except _WrongError as error:
        return str(error)
    return None


def _pieces(values: NDArray[Any], parts: int, number: int) -> NDArray[Any]:
    return values[number * len(values) // parts : (number + 1) * len(values) // parts]


class _Machine:
    def __init__(self, plan: ModelPlan) -> None:
        self.plan = plan
        for name in ("mask", "needs", "meeting", "groups", "local"):
            setattr(self, name, cache(getattr(self, name)))
        self.cells = list(product(range(plan.micro_batches), range(plan.slices)))
        for block, places in enumerate(plan.places):
            for at, rank in np.ndenumerate(places):
                if not 0 <= rank < plan.ranks:
                    raise _WrongError(f"block {block} {at} on rank {rank}")
        self.parts: dict[tuple[int, int, int], dict[int, list[At]]] = {}
        for block, places in enumerate(plan.places):
            for micro, slice_ in self.cells:
                self.parts[block, micro, slice_] = self._own(block, places[micro, slice_])
        self.hows = [[self._how(block, cut) for cut in cuts] for block, cuts in enumerate(plan.cuts)]
        self.done: Counter[tuple[PlanTask, int]] = Counter()
        # What each rank has made: of tensor and gradient or not, for each set of columns.
        self.made: dict[tuple[int, bool], dict[tuple[int, At], Bools]] = defaultdict(dict)

    def _own(self, block: int, places: NDArray[np.int64]) -> dict[int, list[At]]:
        """Return the parts of each rank, which form a block of neighbours, and no two replicas."""
        own: dict[int, list[At]] = defaultdict(list)
        for at, rank in np.ndenumerate(places):
            own[int(rank)].append(at)
        for rank, parts in own.items():
            axes = [sorted(set(axis)) for axis in zip(*parts, strict=True)]
            if len(parts) < np.prod([len(axis) for axis in axes]):
                raise _WrongError(f"block {block}: rank {rank} has a ragged set of parts")
            for axis, cut in zip(axes, self.plan.cuts[block], strict=True):
                if axis[-1] - axis[0] >= len(axis) or (not cut.axes and len(axis) > 1):
                    raise _WrongError(f"block {block}: rank {rank} has parts {axis} of {cut}")
        return own

    def _how(self, block: int, cut: Any) -> str:
        return self.plan.profile.blocks[block].axes[cut.axes[0]].how if cut.axes else "replicas"

    # -- tensors --------------------------------------------------------------------------------------------

    def mask(self, block: int, output: bool, micro: int, slice_: int, at: At) -> Bools:
        """Return the elements of a block's input or output that belong to a part."""
        plan, axes = self.plan, self.plan.profile.blocks[block].axes
        tensor = block + output
        shape = plan.profile.blocks[tensor - 1].shape if tensor else plan.profile.input
        picked = [np.arange(size) for size in shape]

        def narrow(dim: int, parts: int, number: int) -> None:
            if dim >= len(shape):
                return
            given = plan.profile.input
            unit = shape[dim] // given[dim] if dim < min(2, len(given)) else 1
            items = _pieces(np.unique(picked[dim] // unit), parts, number)
            picked[dim] = picked[dim][np.isin(picked[dim] // unit, items)]

        narrow(0, plan.micro_batches, micro)
        if plan.slices > 1:
            narrow(1, plan.slices, slice_)
        for cut, how, number in zip(plan.cuts[block], self.hows[block], at, strict=True):
            if how == "columns" and output:
                picked[-1] = _pieces(picked[-1], cut.parts, number)
            for name in (*cut.axes, *([cut.outside] if cut.outside else [])):
                if axes[name].how in _DATA:
                    narrow(axes[name].dims[0], cut.parts, number)
        found = np.zeros(shape, bool)
        if any(not len(each) for each in picked):
            raise _WrongError(f"block {block}: part {at} has no elements")
        found[np.ix_(*picked)] = True
        return found

    def columns(self, block: int, at: At) -> At:
        """Return the columns of a part."""
        return tuple(number for number, how in zip(at, self.hows[block], strict=True) if how == "columns")

    def needs(self, block: int, output: bool, micro: int, slice_: int, rank: int) -> Bools:
        """Return the elements of a block's input or output that belong to a rank."""
        parts = self.parts[block, micro, slice_][rank]
        masks = [self.mask(block, output, micro, slice_, at) for at in parts]
        found: Bools = np.logical_or.reduce(masks)
        return found

    def make(self, block: int, gradient: bool, micro: int, slice_: int, rank: int) -> None:
        """Note the output of a block, or the gradient of its input, as made."""
        tensor = block if gradient else block + 1
        own = self.made[tensor, gradient]
        for at in self.parts[block, micro, slice_][rank]:
            key = rank, self.columns(block, at) if gradient else ()
            mask = self.mask(block, not gradient, micro, slice_, at)
            own[key] = own.get(key, np.zeros_like(mask)) | mask

    def has_input(self, task: PlanTask, rank: int) -> bool:
        """Return whether the input of a task on a rank is there. Raises if it never will be whole."""
        block, micro, slice_, kind = task
        gradient = kind == "B"
        maker = task._replace(block=block + 1 if gradient else block - 1)
        if kind == "W" or not 0 <= maker.block < len(self.plan.places):
            return True
        makers = self.parts[maker[:3]]
        sets, local = self.local(maker, gradient, block)
        if not all(self.done[maker, each] for each in ([rank] if local else makers)):
            return False
        if any(one & two and one != two for one in sets.values() for two in sets.values()):
            raise _WrongError(f"{task}: addends of several ranks have some columns in common")
        need = self.needs(block, gradient, micro, slice_, rank)
        made = self.made[maker.block if gradient else block, gradient]
        for column in set.union(*sets.values()):
            there = [
                each for (own, key), each in made.items() if key == column and (not local or own == rank)
            ]
            if not there or (need & ~np.logical_or.reduce(there)).any():
                raise _WrongError(f"{task} on rank {rank}: not all of its input is made")
        return True

    def local(self, maker: PlanTask, gradient: bool, block: int) -> tuple[dict[int, set[At]], bool]:
        """Return the addends that each rank makes, and whether all ranks make what they need."""
        makers, cell = self.parts[maker[:3]], maker[1:3]
        sets = {each: {self.columns(maker.block, at) for at in own} for each, own in makers.items()}
        if not gradient:
            sets = {each: {()} for each in makers}
        local = all(one == two for one in sets.values() for two in sets.values())
        micro, slice_ = cell
        for user in self.parts[block, micro, slice_]:
            need = self.needs(block, gradient, *cell, user)
            local &= user in makers and not (need & ~self.needs(maker.block, not gradient, *cell, user)).any()
        return sets, local

    def groups(self, block: int, cut: bool) -> list[tuple[int, ...]]:
        """Return the ranks that add up gradients."""
        return gradient_groups(self.plan, block, cut=cut)

    # -- run ------------------------------------------------------------------------------------------------

    def meeting(self, task: PlanTask, rank: int) -> set[int]:
        """Return the ranks that meet in a task."""
        block, micro, slice_, _ = task
        places = self.plan.places[block][micro, slice_]
        found, grown = {rank}, True
        while grown:
            before = len(found)
            for own in sorted(found):
                for at in self.parts[block, micro, slice_].get(own, []):
                    for axis, how in enumerate(self.hows[block]):
                        if how in ("sum", "exchange", "gather", "halo"):
                            for other in range(self.plan.cuts[block][axis].parts):
                                there = (*at[:axis], other, *at[axis + 1 :])
                                found.add(int(places[there]))
                if self.plan.held[block] == "parameters":
                    for cut in (False, True):
                        found.update(*(ranks for ranks in self.groups(block, cut) if own in ranks))
            grown = len(found) > before
        return found

    def ready(self, task: PlanTask, rank: int) -> bool:
        """Return whether a task can run."""
        block, _, slice_, kind = task
        earlier = {"F": [], "B": [task._replace(kind="F")], "W": [task._replace(kind="B")]}[kind]
        sequence = self.plan.profile.blocks[block].axes.get("sequence")
        if sequence is not None and sequence.how == "gather" and kind != "W":
            other = slice_ - 1 if kind == "F" else slice_ + 1
            earlier += [task._replace(slice=other)] if 0 <= other < self.plan.slices else []
        for each in earlier:
            if rank not in self.parts[each[:3]]:
                raise _WrongError(f"{task} on rank {rank}: {each} is elsewhere")
        if not all(self.done[each, rank] for each in earlier):
            return False
        for first, second in self.plan.befores:
            if second == task and not all(self.done[first, each] for each in self.parts[first[:3]]):
                return False
        return self.has_input(task, rank)

    def run(self) -> None:
        """Run all orders to their ends."""
        for each in (task for pair in self.plan.befores for task in pair):
            if each[:3] not in self.parts or each.kind not in self.plan.kinds(each.block):
                raise _WrongError(f"{each} does not exist")
        self.left = [list(self.plan.order_of(rank)) for rank in range(self.plan.ranks)]
        while sum(self.runs_some(rank) for rank in range(self.plan.ranks)):  # all of them
            pass
        for rank, order in enumerate(self.left):
            if order:
                raise _WrongError(f"rank {rank} waits in {order[0]}")
        for (block, micro, slice_), parts in self.parts.items():
            for kind, rank in product(self.plan.kinds(block), parts):
                if self.done[PlanTask(block, micro, slice_, kind), rank] != 1:
                    raise _WrongError(f"{kind} of {block} {micro} {slice_}: not run once on rank {rank}")
        self.sums()

    def runs_some(self, rank: int) -> bool:
        """Run tasks of a rank, and of those that it meets in them, as far as possible."""
        some = False
        while self.left[rank]:
            task = self.left[rank][0]
            if task[:3] not in self.parts or rank not in self.parts[task[:3]]:
                raise _WrongError(f"rank {rank} has no parts of {task}")
            group = self.meeting(task, rank)
            if group - set(self.parts[task[:3]]):
                raise _WrongError(f"{task}: ranks {group} exchange parameters, not all have it")
            if any(self.left[each][:1] != [task] for each in group):
                return some
            if not all(self.ready(task, each) for each in group):
                return some
            some = True
            for each in group:
                self.done[task, each] += 1
                self.left[each].pop(0)
                if task.kind != "W":
                    self.make(task.block, task.kind == "B", task.micro, task.slice, each)
        return some

    # -- gradients ------------------------------------------------------------------------------------------

    def sums(self) -> None:
        """Raise if a parameter's gradient is not the sum of every task that has some of it, once."""
        users: dict[str, list[int]] = defaultdict(list)
        for block, one in enumerate(self.plan.profile.blocks):
            for name in one.shared:
                users[name].append(block)
            for cut in (False, True):
                groups = self.groups(block, cut)
                self._check_sums([block], cut, groups, f"block {block}")
            self._check_parts(block)
        for name, blocks in users.items():
            try:
                groups = shared_groups(self.plan, blocks)
            except InvalidArgument as error:
                raise _WrongError(str(error)) from None
            if len(blocks) > 1:
                self._check_sums(blocks, False, groups, name)
                together = [set(ranks) for ranks in groups]
                for block in blocks:
                    for _, parts in self._of(block):
                        if self.plan.held[blocks[0]] == "parameters" and any(
                            len(ranks) > 1 and ranks & set(parts) and ranks - set(parts) for ranks in together
                        ):
                            raise _WrongError(f"{name} is gathered by ranks that do not run block {block}")

    def _of(self, block: int) -> Iterator[tuple[tuple[int, int], dict[int, list[At]]]]:
        for cell in self.cells:
            yield cell, self.parts[block, cell[0], cell[1]]

    def _check_parts(self, block: int) -> None:
        kept: dict[int, set[At]] = {}
        for _, parts in self._of(block):
            for rank, own in parts.items():
                keys = {self._split(block, at, cut=True)[0] for at in own}
                if kept.setdefault(rank, keys) != keys:
                    raise _WrongError(f"block {block}: rank {rank} has other parts from task to task")

    def _check_sums(
        self, blocks: Sequence[int], cut: bool, groups: Sequence[tuple[int, ...]], what: str
    ) -> None:
        added: dict[int, dict[At, Counter[Any]]] = defaultdict(lambda: defaultdict(Counter))
        expected: Counter[Any] = Counter()
        for block in blocks:
            for cell, parts in self._of(block):
                for rank, own in parts.items():
                    for key, item in {self._split(block, at, cut=cut) for at in own}:
                        added[rank][key][block, cell, item] += 1
                        expected[block, cell, item] = 1
        for rank, sums in added.items():
            (group,) = [ranks for ranks in groups if rank in ranks]
            for key in sums:
                total: Counter[Any] = Counter()
                for other in group:
                    if set(added[other]) != set(sums):
                        raise _WrongError(f"{what}: ranks {group} have different parts of its parameters")
                    total += added[other][key]
                if total != expected:
                    raise _WrongError(f"{what}: rank {rank} adds up {total}, not {expected}")

    def _split(self, block: int, at: At, *, cut: bool) -> tuple[At, At]:
        """Return which part of the parameters a part uses, and which part of the gradient it makes."""
        key, item = [], []
        for number, how, one in zip(at, self.hows[block], self.plan.cuts[block], strict=True):
            if how in _DATA or (not cut and one.outside is not None):
                item.append(number)
            elif how != "replicas" and cut:
                key.append(number)
        return tuple(key), tuple(item)
