"""Buffers that runs of redistributions use and keep for later ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

import torch

from mcr_plus.core.message import Message
from mcr_plus.layout.rounds import Locals, Round, Strided, copy_all

if TYPE_CHECKING:
    from mcr_plus.core.work import Work
    from mcr_plus.layout.mover import Mover
    from mcr_plus.pipeline.stage import Issue


class Space:
    """Memory for the buffers of a run. `buffers`: of the movers that have used it, by their keys."""

    __slots__ = ("buffers", "data", "device")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # or nobody could write to it outside of that
            self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.device = device
        self.buffers: dict[object, Buffers] = {}


class Pool:
    """Memory that is kept between runs: of as many as there were at a time, or with `is_single` of one."""

    def __init__(self, *, is_single: bool = False) -> None:
        self.idle: list[Space] = []
        self._is_single = is_single

    @property
    def nbytes(self) -> int:
        """Bytes that no run has."""
        return sum(space.data.numel() for space in self.idle)

    def take(self, nbytes: int, device: torch.device) -> Space:
        """Idle memory, or new."""
        for space in tuple(self.idle):
            if space.data.numel() >= nbytes and space.device == device and self.claim(space):
                return space
        if self._is_single:
            self.idle.clear()
        return Space(nbytes, device)

    def claim(self, space: Space) -> bool:
        """Take this memory if it is idle still: other threads may complete runs and free it meanwhile."""
        try:
            self.idle.remove(space)
        except ValueError:
            return False
        return True

    def give_back(self, space: Space) -> None:
        """Keep memory for the next run."""
        if self._is_single and self.idle:
            if any(each.data.numel() >= space.data.numel() for each in self.idle):
                return
            self.idle.clear()
        self.idle.append(space)


class Chain:
    """Runs of several movers, one after another in the same memory. `before`: what the next one waits for."""

    def __init__(self, pool: Pool, space: Space) -> None:
        self.space = space
        self.before: list[Work] = []
        self._pool = pool

    def give_back(self) -> None:
        """Keep the memory, once all of them are done."""
        self._pool.give_back(self.space)


class Buffers:
    """The buffers of a mover in some memory, with the views of the boxes in them."""

    def __init__(self, mover: Mover, space: Space) -> None:
        with torch.inference_mode(False):
            self._data = space.data[: mover.nbytes].view(mover.dtype)
        self._slot = mover.slot
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._views: dict[int, list[torch.Tensor]] = {}
        self.repeated: Repeated | None = None

    def of(self, each: Round, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a round, always in the same slot, sends and receives."""
        found = self._parts.get(id(each))
        if found is None:
            begin = slot * self._slot
            middle, end = begin + each.packed, begin + each.buffered
            found = self._parts[id(each)] = self._data[begin:middle], self._data[middle:end]
        return found

    def views(self, boxes: Sequence[Strided], buffer: torch.Tensor) -> list[torch.Tensor]:
        """The boxes, a list that is kept by the plan, as views of a buffer, always the same; remembered."""
        found = self._views.get(id(boxes))
        if found is None:
            found = self._views[id(boxes)] = [box.within(buffer) for box in boxes]
        return found


class Repeated:
    """A run of one operation with the same tensors again and again: its copies and what it sends.

    It is forgotten as soon as one of the tensors is, whose memory its views would keep.
    """

    def __init__(
        self,
        buffers: Buffers,
        tensors: Locals,
        copies: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]],
        issue: Issue,
        message: Message,
    ) -> None:
        owner = ref(buffers)
        self._refs = [None if each is None else ref(each, partial(_forget, owner)) for each in tensors]
        self._addresses = [None if each is None else each.data_ptr() for each in tensors]
        *self._before, self._after = copies
        self._issue = issue
        self._of_message = message.signature, message.inputs, message.outputs
        self._extras = message.extras

    def is_of(self, sources: Locals, outputs: Locals) -> bool:
        """Whether it is a run with these tensors, whose shapes and dtypes fit."""
        tensors = [*outputs, *sources]  # outputs are other ones more often
        for one, at, each in zip(self._refs, self._addresses, tensors, strict=True):
            if one is None or each is None:
                if not (one is None and each is None):
                    return False
            elif one() is not each or each.data_ptr() != at:
                return False
        return True

    def run(self) -> None:
        """Run it, and return once the outputs may be used."""
        for targets, values in self._before:
            copy_all(targets, values)
        self._issue.run(Message(*self._of_message, **self._extras))
        copy_all(*self._after)


def _forget(owner: ref[Buffers], _: object) -> None:
    buffers = owner()
    if buffers is not None:
        buffers.repeated = None
