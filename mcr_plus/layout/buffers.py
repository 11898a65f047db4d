"""Buffers of redistributions, which later calls reuse."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

import torch

from mcr_plus.core import streams
from mcr_plus.core.message import Message
from mcr_plus.layout.rounds import ExchangeRound, Locals, Strided, copy_all

if TYPE_CHECKING:
    from mcr_plus.core.work import Work
    from mcr_plus.layout.mover import Mover
    from mcr_plus.pipeline.stage import Issue


class Space:
    """Memory for the buffers of one run.

    Attributes:
        buffers: buffers of each mover that has used this memory, by the mover's key.
        used: device event recorded after the last use, because the next use may be on another stream.
    """

    __slots__ = ("buffers", "data", "device", "used")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # inference tensors cannot be written outside of inference mode
            self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.device = device
        self.used: streams.Event | None = None
        self.buffers: dict[object, Buffers] = {}


class SpacePool:
    """Memory kept between runs: a space per concurrent run, or a single space with `is_single`."""

    def __init__(self, *, is_single: bool = False) -> None:
        self.idle: list[Space] = []
        self._is_single = is_single

    @property
    def nbytes(self) -> int:
        """Bytes of the idle spaces."""
        return sum(space.data.numel() for space in self.idle)

    def take(self, nbytes: int, device: torch.device) -> Space:
        """Return an idle space of at least `nbytes` on the device, or a new one."""
        for space in tuple(self.idle):
            if space.data.numel() >= nbytes and space.device == device and self.claim(space):
                streams.follow(space.used, device)
                return space
        if self._is_single:
            self.idle.clear()
        return Space(nbytes, device)

    def claim(self, space: Space) -> bool:
        """Take this space and return True if it is still idle: another thread may have taken it."""
        try:
            self.idle.remove(space)
        except ValueError:
            return False
        return True

    def give_back(self, space: Space) -> None:
        """Return a space to the pool for the next run. A single-space pool keeps the larger of two spaces.

        On a device, the current stream must be ordered after the last use of the space.
        """
        space.used = streams.recorded(space.device)
        if self._is_single and self.idle:
            if any(each.data.numel() >= space.data.numel() for each in self.idle):
                return
            self.idle.clear()
        self.idle.append(space)


class Chain:
    """Successive runs of several movers in the same memory. `before`: operations to wait for."""

    def __init__(self, pool: SpacePool, space: Space) -> None:
        self.space = space
        self.before: list[Work] = []
        self._pool = pool

    def give_back(self) -> None:
        """Return the memory to the pool; all runs must be complete."""
        self._pool.give_back(self.space)


class Buffers:
    """Buffers of one mover in a space, and cached views of boxes in them."""

    def __init__(self, mover: Mover, space: Space) -> None:
        with torch.inference_mode(False):
            self._data = space.data[: mover.nbytes].view(mover.dtype)
        self._slot = mover.slot
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._views: dict[int, list[torch.Tensor]] = {}
        self.repeated: Repeated | None = None

    def of(self, each: ExchangeRound, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the send buffer and the receive buffer of a round. A round must always use the same slot."""
        found = self._parts.get(id(each))
        if found is None:
            begin = slot * self._slot
            middle, end = begin + each.packed, begin + each.buffered
            found = self._parts[id(each)] = self._data[begin:middle], self._data[middle:end]
        return found

    def views(self, boxes: Sequence[Strided], buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the boxes as views of a buffer, cached by the identity of the list.

        The plan keeps the list alive. The buffer must be the same in every call with the same list.
        """
        found = self._views.get(id(boxes))
        if found is None:
            found = self._views[id(boxes)] = [box.within(buffer) for box in boxes]
        return found


class Repeated:
    """A recorded run of one operation, replayed for calls with the same tensors: copies and a message.

    The record is dropped when one of the tensors is freed, because the recorded views would keep the memory
    alive.
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
        """Return True if the run was recorded with these tensors, whose shapes and dtypes are correct."""
        tensors = [*outputs, *sources]  # outputs first: they differ more often
        for one, at, each in zip(self._refs, self._addresses, tensors, strict=True):
            if one is None or each is None:
                if not (one is None and each is None):
                    return False
            elif one() is not each or each.data_ptr() != at:
                return False
        return True

    def run(self) -> None:
        """Replay the run; returns when the outputs may be used."""
        for targets, values in self._before:
            copy_all(targets, values)
        self._issue.run(Message(*self._of_message, **self._extras))
        copy_all(*self._after)


def _forget(owner: ref[Buffers], _: object) -> None:
    buffers = owner()
    if buffers is not None:
        buffers.repeated = None
