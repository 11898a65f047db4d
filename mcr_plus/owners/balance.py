"""Distribute matrices over ranks so that the fullest rank has as little work as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Final, cast

from mcr_plus.errors import InvalidArgument, short

Shape = tuple[int, int]
Cost = Callable[[Shape], float]

_NEWTON_SCHULZ: Final = 5  # iterations, as in torch.optim.Muon
_ATTEMPTS: Final = 1_000_000  # a bound on the time of a search: about a second
_ROUNDING: Final = 1e-9  # of a load: smaller differences are rounding


def muon_cost(shape: Shape) -> float:
    """Return the multiplications and additions of Muon's Newton-Schulz iterations on an m x n matrix.

    With m <= n, an iteration multiplies m x n by n x m, m x m by m x m, and m x m by m x n.
    """
    low, high = sorted(shape)
    return float(_NEWTON_SCHULZ * (4 * low * low * high + 2 * low**3))


def cost_function(cost: object) -> Cost:
    """Return the function for the argument `cost` of `mcr.owned`; raises `InvalidArgument`."""
    if cost == "muon":
        return muon_cost
    if not callable(cost):
        raise InvalidArgument(
            f"cost: expected 'muon' or a function of a matrix's shape (rows, columns), got {short(cost)}"
        )
    return cast("Cost", cost)


def assign(costs: Sequence[float], candidates: Sequence[Sequence[int]]) -> list[int]:
    """Return a rank for each matrix, one of its candidates, so that the largest load is small.

    Complete greedy search (Korf, 1998, doi:10.1016/S0004-3702(98)00086-1): the first result is that of
    longest processing time first (Graham, 1969, doi:10.1137/0117039), later ones are better. The search ends
    at a lower bound, or after a number of attempts; the result depends on the arguments alone, so that all
    ranks have the same.
    """
    # Matrices with few candidates come first, as others can make up for them.
    order = sorted(range(len(costs)), key=lambda index: (len(candidates[index]), -costs[index], index))
    loads = dict.fromkeys(sorted({rank for ranks in candidates for rank in ranks}), 0.0)
    owners = [-1] * len(costs)
    for index in order:
        owners[index] = rank = min(candidates[index], key=lambda each: (loads[each], each))
        loads[rank] += costs[index]
    fullest = max(loads.values(), default=0.0)
    least = max([sum(costs) / max(1, len(loads)), *costs], default=0.0) * (1 + _ROUNDING)
    loads = dict.fromkeys(loads, 0.0)
    tried = [-1] * len(costs)
    untried: list[Iterator[int]] = []  # of the first matrices in `order`
    for _ in range(_ATTEMPTS // max(1, len(loads))):
        if fullest <= least:
            break
        if not untried or tried[order[len(untried) - 1]] >= 0:
            ranks = sorted(candidates[order[len(untried)]], key=lambda rank: (loads[rank], rank))
            if len(ranks) == len(loads):  # and for all later matrices, too: ranks of equal loads are alike
                ranks = [next(alike) for _, alike in groupby(ranks, key=loads.__getitem__)]
            untried.append(iter(ranks))
        index = order[len(untried) - 1]
        rank = next(untried[-1], -1)
        if rank < 0 or loads[rank] + costs[index] >= fullest * (1 - _ROUNDING):
            untried.pop()
            if not untried:
                break
            index = order[len(untried) - 1]
            loads[tried[index]] -= costs[index]
            tried[index] = -1
            continue
        tried[index] = rank
        loads[rank] += costs[index]
        if len(untried) == len(order):
            owners, fullest = list(tried), max(loads.values())
            loads[rank] -= costs[index]
            tried[index] = -1
    return owners
