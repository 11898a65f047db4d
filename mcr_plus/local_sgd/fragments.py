"""Fragments of a model: outer parameters, pseudo-gradients, and outer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from mcr_plus.core.work import Work
from mcr_plus.kernels.digest import digest as digest_of_bits

Outer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""Function that makes the outer optimizer for the outer parameters of one fragment."""
Named = tuple[str, torch.nn.Parameter]


@dataclass
class OuterUpdate:
    """A pseudo-gradient that has been sent.

    Attributes:
        due: inner step after which its mean is applied.
        values: flat tensor with the outer parameters' dtype; the mean over ranks once it has arrived.
        tokens: number of tokens in the steps of the pseudo-gradient.
        work: handle of the all_reduce; None once the mean has arrived.
        check: handle and table of the comparison between ranks; None once they have been compared.
        weight: divisor of this rank's tokens, to weight its pseudo-gradient; None if ranks count equally.
        refusal: the reason why this rank cannot continue, raised together with the other ranks.
    """

    due: int
    values: torch.Tensor
    tokens: float = 0.0
    work: Work | None = None
    check: tuple[Work, torch.Tensor] | None = None
    weight: float | None = None
    refusal: str | None = None


class Fragment:
    """A part of a model's parameters, with their outer parameters and outer optimizer.

    Memory beside the model, in units of the parameters in float32: 1 for `anchor`, the state of the outer
    optimizer (1 for momentum), and 1 while a pseudo-gradient is in flight.

    Attributes:
        tag: tag of the fragment's all_reduces.
        anchor: flat outer parameters on the CPU, bit-identical on all ranks. During the warm-up they are
            copied from the model only when needed.
        rounds: number of outer steps.
        tokens: number of tokens since the last exchange; number of steps if tokens are not counted.
        residual: residual of `gate`; None without a gate.
    """

    def __init__(self, index: int, named: Sequence[Named], outer: Outer, dtype: torch.dtype) -> None:
        self.index, self.named = index, list(named)
        self.tag = f"outer.{index}"
        self.rounds, self.tokens = 0, 0.0
        self.flight: OuterUpdate | None = None
        self.residual: torch.Tensor | None = None
        sizes = [param.numel() for _, param in named]
        self._ends = list(accumulate(sizes))
        self.anchor = torch.empty(sum(sizes), dtype=dtype, device="cpu")
        self._leaves = [
            torch.nn.Parameter(view.view(param.shape)) for view, (_, param) in self._pairs(self.anchor)
        ]
        self.take_parameters()
        self.optimizer = outer(self._leaves)
        self._fuse()

    def take_parameters(self) -> None:
        """Set the outer parameters to the model's."""
        with torch.no_grad():
            for leaf, (_, param) in self.pairs:
                leaf.copy_(param)

    @property
    def pairs(self) -> Iterable[tuple[torch.nn.Parameter, Named]]:
        """Yield each outer parameter with the model's."""
        return zip(self._leaves, self.named, strict=True)

    @property
    def layout(self) -> list[list[Any]]:
        """Names and shapes of the parameters."""
        return [[name, list(param.shape)] for name, param in self.named]

    @torch.no_grad()
    def pseudo_gradient(self, gate: torch.dtype | None) -> torch.Tensor:
        """Return outer minus model parameters, flat; with `gate` only changes visible in that dtype.

        Other changes are added to the next pseudo-gradient (PULSELoCo, 2026).
        """
        flat = torch.empty_like(self.anchor)
        for (view, (_, param)), leaf in zip(self._pairs(flat), self._leaves, strict=True):
            # Compare with the values as stored: rounding to a narrower dtype is not progress.
            begin, own = leaf.view(-1).to(param.dtype), param.reshape(-1)
            if begin.dtype is view.dtype and own.device == view.device:
                torch.sub(begin, own, out=view)
            else:
                view.copy_(begin).sub_(own.to(view.device))
        if gate is not None:
            if self.residual is not None:
                flat += self.residual
            hidden = (self.anchor - flat).to(gate) == self.anchor.to(gate)
            self.residual = torch.where(hidden, flat, 0)
            flat.masked_fill_(hidden, 0)
        return flat

    def all_of_it(self) -> torch.Tensor:
        """Return the pseudo-gradient plus the residual of the gate, and clear the residual."""
        flat = self.pseudo_gradient(None)
        if self.residual is not None:
            flat += self.residual
            self.residual = None
        return flat

    @torch.no_grad()
    def apply(self, mean: torch.Tensor, mix: float) -> None:
        """Make the outer step, and move the model's parameters toward the outer parameters by `mix`."""
        for leaf, (view, _) in zip(self._leaves, self._pairs(mean), strict=True):
            leaf.grad = view.view(leaf.shape)
        with torch.enable_grad():
            self.optimizer.step()
        for leaf in self._leaves:
            leaf.grad = None
        self.rounds += 1
        self.draw(mix)

    @torch.no_grad()
    def settle(self, mean: torch.Tensor) -> None:
        """Apply the mean progress of the ranks at the end, as an outer step with rate 1 and no momentum."""
        for leaf, (view, _) in zip(self._leaves, self._pairs(mean), strict=True):
            leaf.sub_(view.view(leaf.shape))
        self.rounds += 1
        self.draw(1.0)

    def load_outer(self, state: dict[str, Any]) -> None:
        """Load the state of the outer optimizer."""
        self.optimizer.load_state_dict(state)
        self._fuse()

    def _fuse(self) -> None:
        """Use torch's fused SGD, which passes over memory once, unless the program has chosen another."""
        if type(self.optimizer) is torch.optim.SGD:
            for group in self.optimizer.param_groups:
                if not (group["foreach"] or group["differentiable"] or group["fused"] is False):
                    group["fused"] = True

    def drop(self) -> None:
        """Discard the pseudo-gradient in flight; its steps become part of the next one."""
        if self.flight is not None:
            self.tokens += self.flight.tokens
        self.flight = None

    @torch.no_grad()
    def draw(self, mix: float) -> None:
        """Set the model's parameters to mix × outer + (1 - mix) × model."""
        for leaf, (_, param) in self.pairs:
            if mix == 1:
                param.copy_(leaf)
            elif param.dtype is leaf.dtype and param.device == leaf.device:
                param.lerp_(leaf, mix)
            else:
                param.copy_(torch.lerp(param.to(leaf.device, leaf.dtype), leaf, mix))

    def _pairs(self, flat: torch.Tensor) -> Iterable[tuple[torch.Tensor, Named]]:
        begins = [0, *self._ends[:-1]]
        for begin, end, each in zip(begins, self._ends, self.named, strict=True):
            yield flat[begin:end], each


def layers_of(named: Iterable[Named]) -> list[list[Named]]:
    """Return parameters grouped by their module, in the order of the model; fragments keep groups whole."""
    layers: dict[str, list[Named]] = {}
    for name, param in named:
        layers.setdefault(name.rpartition(".")[0], []).append((name, param))
    return list(layers.values())


def cut(sizes: Sequence[int], parts: int) -> list[range]:
    """Cut a sequence into runs with similar sums, each of at least one element.

    Each cut is as close to its share of the sum as possible, while leaving enough elements for later runs.
    """
    sums = [0, *accumulate(sizes)]
    borders = [0]
    for part in range(1, parts):
        allowed = range(borders[-1] + 1, len(sizes) - (parts - part) + 1)
        borders.append(min(allowed, key=lambda at: abs(sums[at] * parts - sums[-1] * part)))
    return [range(begin, end) for begin, end in zip(borders, [*borders[1:], len(sizes)], strict=True)]


def digest(values: torch.Tensor) -> int:
    """Return an int64 digest of the tensors' bits in order."""
    found = digest_of_bits(values)
    return found - (1 << 64) if found >> 63 else found
