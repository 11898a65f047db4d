"""Mixture of experts, expert parallel: each rank has some experts, and tokens travel to them and back.

Gating is that of Switch (top 1; Fedus et al. 2021, arXiv 2101.03961) or GShard (top 2; Lepikhin et al. 2020,
arXiv 2006.16668, without its random choice of whether the second expert is used).

    tokens [t, h] ── gate ── dispatch ── experts ── combine: weighted sum [t, h]
                             moe.counts             moe.combine
                             moe.dispatch

`mcr.expert` has both; over torch.distributed, and with `by_hand`, `by_hand.py` has them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import by_hand
import torch
from libraries import JobError
from parallel import Transport
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from transformer import STD, Fed, FeedForward, LanguageModel, Linears, Shape


class ExpertShape(Shape):
    """Sizes of a model with experts."""

    experts: PositiveInt = 8
    top_k: PositiveInt = 1
    capacity: PositiveFloat = 1.25  # room of an expert, as a multiple of what it gets when all get the same
    moe_every: PositiveInt = 2  # every second layer has experts
    balance: NonNegativeFloat = 0.01  # weight of the loss that spreads tokens over experts
    by_hand: bool = False  # tokens travel by all_to_alls, to which rules with codecs apply

    def check(self) -> None:
        super().check()
        if self.top_k > min(2, self.experts):
            raise JobError(f"top_k {self.top_k}: expected 1 or 2, and at most the {self.experts} experts")


# --- gating -----------------------------------------------------------------------------------------


class Gate(NamedTuple):
    """What the tokens choose."""

    chosen: Tensor  # [tokens, top_k] experts, the most probable one first
    weights: Tensor  # [tokens, top_k] what their answers count
    importance: Tensor  # [experts] mean probability


def gate(logits: Tensor, top_k: int) -> Gate:
    """The `top_k` experts of each token of `logits` [tokens, experts].

    Top 1 weighs the answer by its probability; top 2 by the two probabilities scaled to sum to 1, also when
    one is dropped.
    """
    probabilities = logits.softmax(dim=1)
    weights, chosen = probabilities.topk(top_k)
    if top_k > 1:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return Gate(chosen, weights, probabilities.mean(dim=0))


def balance_loss(first: Tensor, importance: Tensor) -> Tensor:
    """Switch's (and GShard's) experts · Σ share of tokens · mean probability; 1 when all are alike."""
    share = first.to(importance.dtype) / first.sum()
    return len(first) * (share * importance).sum()


# --- the layer --------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A feed-forward part for each of `experts`, dealt to the ranks in consecutive runs of equal length."""

    def __init__(
        self, shape: ExpertShape, layer: int, seed: int, comms: Transport, random: torch.Generator, std: float
    ) -> None:
        super().__init__()
        self.shape, self.comms = shape, comms
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        nn.init.normal_(self.gate.weight, std=STD, generator=random)
        own = shape.experts // comms.world_size
        numbers = range(comms.rank * own, (comms.rank + 1) * own)
        self.own = nn.ModuleList(_expert(shape, layer, number, seed, std) for number in numbers)
        for parameter in self.own.parameters():
            setattr(parameter, "mcr_skip", True)  # noqa: B010 - the annotations do not know it
            # The exchange brings every rank's tokens here, so backward sums the gradients of all ranks'
            # losses; what is minimised is their mean, as data parallelism makes it of other gradients.
            parameter.register_hook(lambda gradient: gradient / comms.world_size)

    def forward(self, x: Tensor) -> Fed:
        tokens = x.flatten(0, -2)
        shape = self.shape
        room = math.ceil(shape.capacity * shape.top_k * len(tokens) / shape.experts)
        chosen, weights, importance = gate(self.gate(tokens), shape.top_k)
        expert = self.comms.expert
        if expert is None or shape.by_hand:
            output, first, dropped = by_hand.exchange(
                self.comms, tokens, chosen, weights, shape.experts, room, self._answers
            )
        else:
            routed = expert.dispatch(
                tokens, chosen, weights, experts=shape.experts, capacity=room, load=True, tag="moe"
            )
            output = expert.combine(self._answers(routed.rows, routed.counts), routed)
            # With the global counts the mean of the ranks' balance losses is that of the global batch.
            first, dropped = routed.load[0].to(x.device), routed.dropped
        penalty = shape.balance * balance_loss(first, importance)
        return Fed(output.view_as(x), penalty, dropped / chosen.numel())

    def _answers(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The own experts' answers to rows in their order; each takes all its rows at once."""
        parts = rows.split(counts)
        return torch.cat([one(part).output for one, part in zip(self.own, parts, strict=True)])


def _expert(shape: ExpertShape, layer: int, number: int, seed: int, std: float) -> FeedForward:
    """Each expert has a seed of its own: it starts the same on whichever rank it lands."""
    random = torch.Generator().manual_seed((seed * 1000 + layer) * 1000 + number + 1)
    return FeedForward(shape.hidden, Linears(), random, std)


# --- the model --------------------------------------------------------------------------------------


def build(shape: ExpertShape, seed: int, comms: Transport) -> LanguageModel:
    """This rank's part of the model: the last of every `moe_every` layers has experts."""
    if shape.experts % comms.world_size:
        raise JobError(f"{shape.experts} experts do not divide by {comms.world_size} ranks")

    def feed_forward(layer: int, random: torch.Generator, std: float) -> nn.Module:
        if (layer + 1) % shape.moe_every:
            return FeedForward(shape.hidden, Linears(), random, std)
        return Experts(shape, layer, seed, comms, random, std)

    return LanguageModel(shape, seed, feed_forward=feed_forward)
