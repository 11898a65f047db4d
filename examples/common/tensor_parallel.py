"""Tensor parallel linear layers (Megatron-LM; Shoeybi et al. 2019, arXiv 1909.08053).

    x ── replicate ── columns ── heads, or GELU ── rows ── all_reduce
         tp.backward  this rank's share of all           tp.forward

Each half of a block has one all_reduce forward, and one backward. Everything else is the same on all ranks:
they see the same batch, so what they have in common has equal gradients without any communication.
"""

from __future__ import annotations

import torch
from libraries import JobError
from parallel import Transport
from torch import Tensor, nn
from torch.nn import functional
from transformer import LanguageModel, Linears, Shape, linear


class ColumnParallel(nn.Module):
    """This rank's share of the outputs of a layer: of each of `parts` equal parts of them."""

    def __init__(self, whole: nn.Linear, parts: int, comms: Transport) -> None:
        super().__init__()
        self.comms = comms
        self.weight = nn.Parameter(self._share(whole.weight, parts))
        self.bias = nn.Parameter(self._share(whole.bias, parts))

    def _share(self, tensor: Tensor, parts: int) -> Tensor:
        each: Tensor = tensor.detach().unflatten(0, (parts, self.comms.world_size, -1))
        return each[:, self.comms.rank].flatten(0, 1).clone()

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.comms.replicate(x, tag="tp.backward"), self.weight, self.bias)


class RowParallel(nn.Module):
    """The part of a layer that this rank's share of the inputs has; the bias, which all have, comes last."""

    def __init__(self, whole: nn.Linear, comms: Transport) -> None:
        super().__init__()
        self.comms = comms
        share = whole.weight.detach().chunk(comms.world_size, dim=1)[comms.rank]
        self.weight = nn.Parameter(share.clone())
        self.bias = nn.Parameter(whole.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.comms.all_reduce(functional.linear(x, self.weight), tag="tp.forward") + self.bias


class SharedLinears(Linears):
    """Draws whole layers, as one process would, and keeps this rank's share."""

    def __init__(self, comms: Transport) -> None:
        self.comms = comms
        self.ranks = comms.world_size

    def columns(self, inputs: int, outputs: int, random: torch.Generator, parts: int = 1) -> nn.Module:
        return ColumnParallel(linear(inputs, outputs, random), parts, self.comms)

    def rows(self, inputs: int, outputs: int, random: torch.Generator, std: float) -> nn.Module:
        return RowParallel(linear(inputs, outputs, random, std), self.comms)


def build(shape: Shape, seed: int, comms: Transport) -> LanguageModel:
    """This rank's share of the model."""
    if shape.heads % comms.world_size:  # the hidden size divides by the heads
        raise JobError(f"{shape.heads} heads do not divide by {comms.world_size} ranks")
    return LanguageModel(shape, seed, SharedLinears(comms))
