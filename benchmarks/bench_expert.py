"""Expert parallelism: `mcr.expert` beside an exchange written by hand, forward and backward, experts left
out.

    python benchmarks/bench_expert.py --rounds 15

By hand is what `examples/moe` did before it: an exchange of counts, one of rows in the order of experts,
answers back in the same way, and an index_add of answers times weights, by differentiable all_to_alls. Both
get the same tokens, experts and weights; a call is a forward and a backward pass. `gating` adds the choice of
experts with capacity and the counts for the balance loss. Candidates take turns in one job; a time is that of
the slowest rank, and of the rounds the median. The report goes to
benchmarks/results/expert_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Annotated, Any, Final

import harness
import torch
import typer
from harness import HARDWARE, Dated, Hardware, Rounds
from torch import Tensor
from torch.nn import functional

import mcr_plus as mcr
from mcr_plus import autograd, expert

LIBRARIES: Final = ("msccl", "mpi", "gloo")
SIZES: Final = ((16, 256, 2), (1024, 128, 1), (1024, 512, 1), (1024, 512, 2), (1024, 512, 4), (4096, 1024, 2))
"""Tokens of a rank, hidden, experts of a token."""
EXPERTS: Final = 8
CAPACITY: Final = 1.25
HAND: Final = "by hand"
GATED: Final = "gating, by hand"


# --- by hand --------------------------------------------------------------------------------------------


def exchanged(
    comm: mcr.Communicator,
    backend: str,
    tokens: Tensor,
    token: Tensor,
    weight: Tensor,
    kept: Tensor,
    first: Tensor,
) -> Tensor:
    """`token`, `weight`: of the choices in the order of experts; `kept`, `first`: choices of each expert."""
    ranks = comm.size
    exchange = partial(autograd.all_to_all_single, backend=backend, tag="by hand")
    told = torch.cat([kept.view(ranks, -1), first.expand(ranks, -1)], dim=1)
    heard = exchange(told, [1] * ranks, [1] * ranks)
    own = EXPERTS // ranks
    counts = heard[:, :own]
    sent, received = kept.view(ranks, -1).sum(dim=1).tolist(), counts.sum(dim=1).tolist()
    asked = exchange(tokens[token], received, sent)
    of_experts = torch.arange(own).repeat(ranks)
    order = of_experts.repeat_interleave(counts.flatten()).argsort(stable=True)
    answers = asked[order]
    back = exchange(answers[order.argsort()], sent, received)
    return torch.zeros_like(tokens).index_add(0, token, back * weight[:, None])


def by_hand(comm: mcr.Communicator, backend: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The exchange for given experts."""
    choice = ids.t().reshape(-1)
    order = choice.argsort(stable=True)
    kept = choice.bincount(minlength=EXPERTS)
    return exchanged(comm, backend, x, order % len(x), weights.t().reshape(-1)[order], kept, kept)


def gated_by_hand(comm: mcr.Communicator, backend: str, x: Tensor, logits: Tensor, k: int) -> Tensor:
    """Gating, too, as the example did it."""
    tokens, room = len(x), _room(len(x), k)
    weights, chosen = _chosen(logits, k)
    choice = chosen.t().reshape(-1)
    mine = functional.one_hot(choice, EXPERTS)
    place = (mine.cumsum(dim=0) * mine).sum(dim=1)
    fits = place <= room
    order = torch.where(fits, choice, EXPERTS).argsort(stable=True)[: int(fits.sum())]
    weight = weights.t().reshape(-1)[order]
    return exchanged(
        comm, backend, x, order % tokens, weight, mine[fits].sum(dim=0), mine[:tokens].sum(dim=0)
    )


# --- ours -----------------------------------------------------------------------------------------------


def ours(backend: str, x: Tensor, ids: Tensor, weights: Tensor, **options: Any) -> Tensor:
    """The exchange for given experts."""
    routed = expert.dispatch(x, ids, weights, experts=EXPERTS, backend=backend, **options)
    return expert.combine(routed.rows, routed)


def again(routing: expert.Routing, x: Tensor, weights: Tensor) -> Tensor:
    """With the routing of an earlier layer."""
    routed = expert.dispatch(x, weights=weights, routing=routing)
    return expert.combine(routed.rows, routed)


def gated(backend: str, x: Tensor, logits: Tensor, k: int) -> Tensor:
    """Gating, too."""
    weights, chosen = _chosen(logits, k)
    room = _room(len(x), k)
    return ours(backend, x, chosen, weights, capacity=room, load=True)


def _room(tokens: int, k: int) -> int:
    return math.ceil(CAPACITY * k * tokens / EXPERTS)


def _chosen(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, chosen = logits.softmax(dim=1).topk(k)
    return (weights / weights.sum(dim=1, keepdim=True) if k > 1 else weights), chosen


# --- on ranks -------------------------------------------------------------------------------------------


def measure(libraries: list[str], rounds: int) -> list[dict[str, list[float]]] | None:
    """Microseconds of a forward and a backward pass by size, by library and way, and by round."""
    torch.set_num_threads(1)
    with mcr.init() as comm:

        def largest(number: float) -> float:
            found = torch.tensor(number)
            comm.all_reduce(found, mcr.MAX)
            return float(found)

        found = []
        for tokens, hidden, k in SIZES:
            calls: dict[str, Callable[[], None]] = {}
            for library in libraries:
                steps = _steps(comm, library, tokens, hidden, k)
                calls |= {f"{library} {way}": step for way, step in steps.items()}
            found.append(harness.slowest(calls, rounds, comm.barrier, largest))
        return found if comm.rank == 0 else None


def _steps(
    comm: mcr.Communicator, library: str, tokens: int, hidden: int, k: int
) -> dict[str, Callable[[], None]]:
    random = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(tokens, hidden, generator=random).requires_grad_()
    logits = torch.randn(tokens, EXPERTS, generator=random).requires_grad_()
    weights, ids = (each.detach() for each in _chosen(logits, k))
    weights.requires_grad_()
    gradient = torch.randn(tokens, hidden, generator=random)
    first = expert.dispatch(x, ids, weights, experts=EXPERTS, backend=library).routing
    coded = {"compress": "fp8_block", "compress_back": "bf16"}
    forwards: dict[str, Callable[[], Tensor]] = {
        HAND: partial(by_hand, comm, library, x, ids, weights),
        "mcr.expert": partial(ours, library, x, ids, weights),
        "fp8 there, bf16 back": partial(ours, library, x, ids, weights, **coded),
        "max_rows": partial(ours, library, x, ids, weights, max_rows=tokens),
        "routing again": partial(again, first, x, weights),
        GATED: partial(gated_by_hand, comm, library, x, logits, k),
        "gating, mcr.expert": partial(gated, library, x, logits, k),
    }
    torch.testing.assert_close(forwards["mcr.expert"](), forwards[HAND]())
    torch.testing.assert_close(forwards["gating, mcr.expert"](), forwards[GATED]())

    def step(forward: Callable[[], Tensor]) -> None:
        x.grad = weights.grad = logits.grad = None
        forward().backward(gradient)

    return {way: partial(step, forward) for way, forward in forwards.items()}


def main(
    rounds: Rounds = 15,
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    library: Annotated[list[str] | None, typer.Option(help="; ".join(LIBRARIES))] = None,
    output: Dated = None,
    hardware: Hardware = HARDWARE,
) -> None:
    """Measure all sizes on each library, and write the report."""
    libraries = harness.chosen(library or LIBRARIES, LIBRARIES, "library")
    head = ["way", *(f"{name} {what}" for name in libraries for what in ("µs", "×"))]
    parts: list[str] = []
    load = os.getloadavg()[0]  # of other work, beside which figures of small sizes mean little
    found = harness.on_ranks(harness.here(ranks), measure, libraries, rounds)
    for (tokens, hidden, k), times in zip(SIZES, found, strict=True):
        middle = {way: median(each) for way, each in times.items()}
        ways = [name.removeprefix(f"{libraries[0]} ") for name in times if name.startswith(libraries[0])]

        def cells(way: str, middle: dict[str, float] = middle) -> list[str]:
            base = GATED if way.startswith("gating") else HAND
            pairs = [(middle[f"{name} {way}"], middle[f"{name} {base}"]) for name in libraries]
            return [text for time, hand in pairs for text in (f"{time:,.0f}", f"{hand / time:.2f}")]

        rows = [[way, *cells(way)] for way in ways]
        title = f"{tokens} tokens a rank, hidden {hidden}, top {k} of {EXPERTS} experts"
        harness.show(head, rows, title)
        parts.append(f"## {title}\n\n{harness.markdown(head, rows)}")
    beside = f"{ranks} ranks, medians of {rounds} rounds in turns; load average {load:.0f}."
    note = f"{beside} ×: times as fast as by hand"
    text = harness.page(
        "Expert parallelism: dispatch, combine and their backward passes", harness.command(), note, *parts
    )
    harness.write(text, output, f"expert_{hardware}")


if __name__ == "__main__":
    harness.program(main)()
