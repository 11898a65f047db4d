"""The exchange of tokens and answers by hand, over all_to_alls alone, where there is no `mcr.expert`.

A token is sent once for each of its experts, and each answer returns by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from parallel import Transport
from torch import Tensor
from torch.nn import functional

Answer = Callable[[Tensor, list[int]], Tensor]
"""The own experts' answers to rows in their order, so many for each."""


class Choices(NamedTuple):
    """Choices that are kept, in the order of experts, and of tokens at each."""

    token: Tensor  # [kept] index of the token
    weight: Tensor  # [kept] what the expert's answer counts
    kept: Tensor  # [experts] choices each has room for
    first: Tensor  # [experts] tokens whose first choice it is, with room or without
    dropped: int


def choices(chosen: Tensor, weights: Tensor, experts: int, capacity: int) -> Choices:
    """Give each token the experts that it has `chosen` [tokens, k] while they have room.

    All first choices come before all second ones, each in the order of tokens.
    """
    tokens, k = chosen.shape
    choice = chosen.t().reshape(-1)
    mine = functional.one_hot(choice, experts)
    place = (mine.cumsum(dim=0) * mine).sum(dim=1)  # from 1, in the expert's queue
    fits = (place <= capacity).view(k, tokens).t().reshape(-1)
    kept = int(fits.sum())
    # Those that do not fit sort behind all experts.
    order = torch.where(fits, chosen.reshape(-1), experts).argsort(stable=True)[:kept]
    return Choices(
        token=order // k,
        weight=weights.reshape(-1)[order],
        kept=chosen.reshape(-1)[fits].bincount(minlength=experts),
        first=mine[:tokens].sum(dim=0),
        dropped=tokens * k - kept,
    )


def exchange(
    comms: Transport,
    tokens: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: int,
    capacity: int,
    answer: Answer,
) -> tuple[Tensor, Tensor, int]:
    """Weighted sums of answers to each token, first choices of all ranks' tokens, and dropped choices."""
    ranks, own = comms.world_size, experts // comms.world_size
    routing = choices(chosen, weights, experts, capacity)
    # With the global counts the mean of the ranks' balance losses is that of the global batch.
    told = torch.cat([routing.kept.view(ranks, -1), routing.first.expand(ranks, -1)], dim=1)
    heard = comms.all_to_all(told, [1] * ranks, [1] * ranks, tag="moe.counts")
    counts, first = heard[:, :own], heard[:, own:].sum(dim=0)
    sent = routing.kept.view(ranks, -1).sum(dim=1).tolist()
    received = counts.sum(dim=1).tolist()
    asked = comms.all_to_all(tokens[routing.token], received, sent, tag="moe.dispatch")
    # They come rank by rank, from each in the order of experts; an expert takes all its rows at once.
    of_experts = torch.arange(own, device=counts.device).repeat(ranks)
    order = of_experts.repeat_interleave(counts.flatten()).argsort(stable=True)
    answers = answer(asked[order], counts.sum(dim=0).tolist())
    back = comms.all_to_all(answers[order.argsort()], sent, received, tag="moe.combine")
    # In float64, in which `mcr.expert` sums the gradients of weights, so that both train the same to the last
    # bit.
    weighted = (back.double() * routing.weight.double()[:, None]).to(back.dtype)
    return torch.zeros_like(tokens).index_add(0, routing.token, weighted), first, routing.dropped
