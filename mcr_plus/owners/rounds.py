"""Exchanges of one round of matrices: gradients to their owners, and weights back to the shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.work import Work
from mcr_plus.kernels.digest import digest
from mcr_plus.layout.buffers import SpacePool
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.state import Redistribution
from mcr_plus.layout.torch_layouts import local_tensor
from mcr_plus.owners.matrices import MemoryPlan, OwnedMatrix

Gradients = Mapping[str, torch.Tensor | None]
"""This rank's part of each gradient, by the matrix's name."""

_GRADIENT: Final = "gradient of "
_WEIGHT: Final = "weight of "


class SlotPool:
    """Memory for the whole tensors of rounds, kept from step to step."""

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []
        self.gathers, self.spreads = SpacePool(is_single=True), SpacePool(is_single=True)
        self.nbytes = 0  # of a slot on this rank

    def take(self, device: torch.device) -> torch.Tensor:
        """Return idle memory, or new memory."""
        return self._idle.pop() if self._idle else torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def give_back(self, slot: torch.Tensor) -> None:
        """Take memory that is no longer used."""
        self._idle.append(slot)


class MatrixRound:
    """Matrices that travel together, and the optimizer of those that this rank owns.

    Attributes:
        moved: the matrices that are sharded.
        whole: matrices of this rank, as parameters of `inner`; the model's own if each rank has it whole.
        present: names of the matrices with gradients in this step.
        arriving: the gradients on their way to their owners, or there; None: not started.
    """

    def __init__(
        self,
        matrices: Sequence[OwnedMatrix],
        memory: MemoryPlan,
        comm: Communicator,
        slots: SlotPool,
        tag: str,
    ) -> None:
        self.matrices = matrices
        self.moved = [each for each in matrices if not each.is_whole]
        self.inner: torch.optim.Optimizer | None = None
        self.present: set[str] = set()
        self.arriving: Work | None = None
        self._rank = comm.ranks[comm.rank]
        self._slots = slots
        self._slot: torch.Tensor | None = None
        self._cuts: dict[int, dict[str, torch.Tensor]] = {}
        """Whole tensors in a slot, by its identity: the pool keeps all slots."""
        self._keeps = memory.keeps_weights
        self._sent: list[int] = []
        self._mine = [each for each in self.moved if each.owner == self._rank]
        self.whole = {each.name: self._parameter(each) for each in matrices if each.owner == self._rank}
        kinds = [_GRADIENT] if self._keeps else [_GRADIENT, _WEIGHT]
        self._arrivals = [(kind + each.name, each) for kind in kinds for each in self._mine]
        slots.nbytes = max(slots.nbytes, sum(each.nbytes for _, each in self._arrivals))

        def bound(pairs: Mapping[str, OwnedMatrix], pool: SpacePool, *, back: bool = False) -> Any:
            specs = {
                name: _homeward(each) if back else (each.layout, _at(each)) for name, each in pairs.items()
            }
            specs = {name: pair for name, pair in specs.items() if pair[1].ranks}
            if not specs:
                return None
            move = Redistribution(specs, memory=memory.buffers, group=comm, tag=tag, pool=pool)
            parameters = [pairs[name].parameter for name in specs]
            move.prepare([each.dtype for each in parameters], device=parameters[0].device)
            return move

        sent = {kind + each.name: each for kind in kinds for each in self.moved}
        self._gather: Redistribution | None = bound(sent, slots.gathers)
        weights = {_WEIGHT + each.name: each for each in self.moved if self._keeps}
        self._refresh: Redistribution | None = bound(weights, slots.gathers)
        returned = {_WEIGHT + each.name: each for each in matrices}
        self._spread: Redistribution | None = bound(returned, slots.spreads, back=True)

    def start(self, gradients: Gradients, *, is_early: bool = False) -> None:
        """Send this rank's parts of the gradients to their owners; returns at once, also if that has begun.

        `is_early`: the program may still change them.
        """
        if self._gather is None or self.arriving is not None:
            return
        source: dict[str, torch.Tensor | None] = {}
        for each in self.moved:
            gradient = gradients[each.name]
            if gradient is None and (weight := self._part(each)) is not None:
                gradient = torch.zeros_like(weight)  # other matrices of the round have gradients
            source[_GRADIENT + each.name] = gradient
            if not self._keeps:
                source[_WEIGHT + each.name] = self._part(each)
        self._sent = digests(gradients[each.name] for each in self.moved) if is_early else []
        self.arriving = self._gather.start(source, self._views())

    def has_changed(self, gradients: Gradients) -> bool:
        """Return whether gradients have changed since they were sent early."""
        return self.arriving is not None and self._sent != digests(
            gradients[each.name] for each in self.moved
        )

    def arrive(self, gradients: Gradients) -> None:
        """Wait for the gradients, and give them to the parameters of `inner`."""
        if self.arriving is not None:
            self.arriving.wait()
        views = self._views()
        for each in self.matrices:
            parameter = self.whole.get(each.name)
            if parameter is None:
                continue
            if not each.is_whole and not self._keeps:
                parameter.data = views[_WEIGHT + each.name]  # in memory of the round
            if parameter is not each.parameter:
                found = gradients[each.name] if each.is_whole else views[_GRADIENT + each.name]
                parameter.grad = found if each.name in self.present else None

    def updated(self) -> None:
        """Free the whole gradients."""
        for each in self.matrices:
            parameter = self.whole.get(each.name)
            if parameter is not None and parameter is not each.parameter:
                parameter.grad = None
        if self._keeps:
            self.release()

    def send(self) -> Work | None:
        """Send the updated weights of this rank to the shards; returns a handle."""
        if self._spread is None:
            return None
        source = {_WEIGHT + name: parameter.detach() for name, parameter in self.whole.items()}
        target = {
            _WEIGHT + each.name: self._part(each)
            for each in self.matrices
            if not (each.is_whole and each.owner == self._rank)
        }
        return self._spread.start(source, target)

    def receive_weights(self) -> None:
        """Receive the whole weights of this rank's matrices from the shards."""
        if self._refresh is not None:
            source = {_WEIGHT + each.name: self._part(each) for each in self.moved}
            self._refresh(source, {_WEIGHT + each.name: self.whole[each.name].data for each in self._mine})

    def release(self) -> None:
        """Give the memory of whole tensors back, after an exchange that may still be on its way."""
        if self.arriving is not None:
            work, self.arriving = self.arriving, None
            if not work.is_completed():
                work.wait()
        if self._slot is not None:
            for each in self._mine:
                if not self._keeps:
                    self.whole[each.name].data = placeholder(each.parameter, each.layout.shape)
            self._slots.give_back(self._slot)
            self._slot = None

    def _views(self) -> dict[str, torch.Tensor]:
        """Return this rank's whole tensors of the round, in its slot."""
        if not self._arrivals:
            return {}
        if self._slot is None:
            self._slot = self._slots.take(self._mine[0].parameter.device)
        found = self._cuts.get(id(self._slot))
        if found is None:
            found = self._cuts[id(self._slot)] = {}
            begin = 0
            for name, each in self._arrivals:
                size = each.parameter.numel() * each.parameter.itemsize
                flat = self._slot[begin : begin + size].view(each.parameter.dtype)
                found[name] = flat.view(each.layout.shape)
                begin += each.nbytes
        return found

    def _parameter(self, matrix: OwnedMatrix) -> torch.nn.Parameter:
        """Return the parameter of `inner` for a matrix of this rank."""
        parameter, shape = matrix.parameter, matrix.layout.shape
        if matrix.is_whole:
            if not isinstance(parameter, DTensor):
                return parameter
            return torch.nn.Parameter(parameter._local_tensor.detach())
        if self._keeps:
            return torch.nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device=parameter.device))
        return torch.nn.Parameter(placeholder(parameter, shape))

    def _part(self, matrix: OwnedMatrix) -> torch.Tensor | None:
        """Return this rank's part of a parameter; None if it has none."""
        return local_part(matrix.parameter, matrix.layout.local_shape(self._rank))


def local_part(tensor: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor | None:
    """Return the local tensor of a DTensor, or the tensor itself, detached; None without a shape."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local_tensor(local, shape)


def placeholder(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of this shape that takes no memory."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(shape)


def digests(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """Return a digest of each tensor's values.

    Versions do not tell whether a DTensor has changed: `torch._foreach_mul_`, and so clipping and optimizers,
    leave those of the DTensor or of its local tensor as they were.
    """
    return [0 if each is None else digest(each.reshape(-1)) for each in tensors]


def _at(matrix: OwnedMatrix) -> Layout:
    """Return the layout of the whole matrix on its owner."""
    return Layout.replicated(matrix.layout.shape, [matrix.owner])


def _homeward(matrix: OwnedMatrix) -> tuple[Layout, Layout]:
    """Return the layouts of the owner's weights and of the ranks that receive them."""
    others = [rank for rank in matrix.layout.ranks if rank != matrix.owner]
    target = Layout.replicated(matrix.layout.shape, others) if matrix.is_whole else matrix.layout
    return _at(matrix), target
