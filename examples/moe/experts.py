"""Mixture of experts, expert parallel: each rank has some experts, and tokens travel to them and back.

Gating is that of Switch (top 1; Fedus et al. 2021, arXiv 2101.03961) or GShard (top 2; Lepikhin et al. 2020,
arXiv 2006.16668, without its random choice of whether the second expert is used).

    tokens [t, h] ── gate ── route ── all_to_all ── experts ── all_to_all ── weighted sum [t, h]
                                      moe.dispatch             moe.combine
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from libraries import JobError
from parallel import Transport
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional
from transformer import STD, Fed, FeedForward, LanguageModel, Linears, Shape


class ExpertShape(Shape):
    """Sizes of a model with experts."""

    experts: PositiveInt = 8
    top_k: PositiveInt = 1
    capacity: PositiveFloat = 1.25  # room of an expert, as a multiple of what it gets when all get the same
    moe_every: PositiveInt = 2  # every second layer has experts
    balance: NonNegativeFloat = 0.01  # weight of the loss that spreads tokens over experts

    def check(self) -> None:
        super().check()
        if self.top_k > min(2, self.experts):
            raise JobError(f"top_k {self.top_k}: expected 1 or 2, and at most the {self.experts} experts")


# --- gating -----------------------------------------------------------------------------------------


class Routing(NamedTuple):
    """Which token goes to which expert: choices in the order of experts, and of arrival at each."""

    token: Tensor  # [kept] index of the token
    weight: Tensor  # [kept] what the expert's answer counts
    kept: Tensor  # [experts] choices each has room for
    first: Tensor  # [experts] tokens whose first choice it is, with room or without
    importance: Tensor  # [experts] mean probability
    dropped: float  # share of all choices


def route(logits: Tensor, top_k: int, capacity: int) -> Routing:
    """Give each token of `logits` [tokens, experts] its `top_k` experts while they have room.

    All first choices come before all second ones, each in the order of tokens. Top 1 weighs the answer by
    its probability; top 2 by the two probabilities scaled to sum to 1, also when one is dropped.
    """
    tokens, experts = logits.shape
    probabilities = logits.softmax(dim=1)
    weights, chosen = probabilities.topk(top_k)
    if top_k > 1:
        weights = weights / weights.sum(dim=1, keepdim=True)
    choice = chosen.t().reshape(-1)
    mine = functional.one_hot(choice, experts)
    place = (mine.cumsum(dim=0) * mine).sum(dim=1)  # from 1, in the expert's queue
    fits = place <= capacity
    # Those that do not fit sort behind all experts.
    order = torch.where(fits, choice, experts).argsort(stable=True)[: int(fits.sum())]
    return Routing(
        token=order % tokens,
        weight=weights.t().reshape(-1)[order],
        kept=mine[fits].sum(dim=0),
        first=mine[:tokens].sum(dim=0),
        importance=probabilities.mean(dim=0),
        dropped=1 - len(order) / len(choice),
    )


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
        routing = route(self.gate(tokens), shape.top_k, room)
        counts, first = self._tell(routing)
        answers = self._ask(tokens[routing.token], routing.kept, counts)
        output = torch.zeros_like(tokens).index_add(0, routing.token, answers * routing.weight[:, None])
        penalty = shape.balance * balance_loss(first, routing.importance)
        return Fed(output.view_as(x), penalty, routing.dropped)

    def _tell(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """How many rows come from each rank [ranks, own], and the first choices of all ranks' tokens.

        With the global counts the mean of the ranks' balance losses is that of the global batch.
        """
        ranks = self.comms.world_size
        told = torch.cat([routing.kept.view(ranks, -1), routing.first.expand(ranks, -1)], dim=1)
        heard = self.comms.all_to_all(told, [1] * ranks, [1] * ranks, tag="moe.counts")
        own = len(self.own)
        return heard[:, :own], heard[:, own:].sum(dim=0)

    def _ask(self, rows: Tensor, kept: Tensor, counts: Tensor) -> Tensor:
        """The experts' answers to `rows`, which are in the order of experts; `counts` come from each rank."""
        sent = kept.view(self.comms.world_size, -1).sum(dim=1).tolist()
        received = counts.sum(dim=1).tolist()
        asked = self.comms.all_to_all(rows, received, sent, tag="moe.dispatch")
        # They come rank by rank, from each in the order of experts; an expert takes all its rows at once.
        own = torch.arange(len(self.own), device=counts.device).repeat(len(counts))
        order = own.repeat_interleave(counts.flatten()).argsort(stable=True)
        parts = asked[order].split(counts.sum(dim=0).tolist())
        answers = torch.cat([one(part).output for one, part in zip(self.own, parts, strict=True)])
        return self.comms.all_to_all(answers[order.argsort()], sent, received, tag="moe.combine")


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
