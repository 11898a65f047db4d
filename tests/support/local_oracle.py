"""Oracle of outer steps in NumPy and float64, one rank after another, for the tests of `mcr.local`.

Every rank r minimizes the sum over parameters k of sharpness[r, k] / 2 · |p_k - target[r, k]|², whose
gradient needs no autograd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
SHAPES = {"a": (3, 5), "b": (4,), "c": (2, 3), "d": (7,), "e": (1,)}
INNER: dict[str, Any] = {"lr": 0.05, "momentum": 0.8}


def targets(rank: int) -> dict[str, tuple[float, Array]]:
    """Return sharpness and target of each parameter, by its module; they differ between ranks."""
    random = np.random.default_rng([17, rank])
    return {name: (0.5 + random.random(), random.normal(size=shape)) for name, shape in SHAPES.items()}


def start() -> dict[str, Array]:
    """Return the initial parameters, those of rank 0."""
    random = np.random.default_rng(5)
    return {name: random.normal(size=shape) for name, shape in SHAPES.items()}


class _One(torch.nn.Module):
    def __init__(self, values: Array) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(values.copy()))


class Quadratic(torch.nn.Module):
    """The same problem as a model: a module for each parameter, so each is a layer."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        begin = start() if rank == 0 else {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.layers = torch.nn.ModuleDict({name: _One(values) for name, values in begin.items()})
        self.to(dtype)
        self.problem = {
            name: (sharp, torch.from_numpy(target).to(dtype))
            for name, (sharp, target) in targets(rank).items()
        }

    def loss(self) -> torch.Tensor:
        """Return the loss of this rank."""
        terms = [
            sharp / 2 * (self.layers[name].weight - target).square().sum()  # type: ignore[operator]
            for name, (sharp, target) in self.problem.items()
        ]
        return torch.stack(terms).sum()

    def values(self) -> list[float]:
        """Return all parameters in order."""
        return [each for param in self.parameters() for each in param.detach().double().flatten().tolist()]


def load(targets: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
    """Load each state into its target."""
    for target, state in zip(targets, states, strict=True):
        target.load_state_dict(state)


@dataclass
class Sgd:
    """SGD with (Nesterov) momentum as in torch; state by parameter."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    velocity: dict[str, Array] = field(default_factory=dict)

    def step(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        for name, gradient in gradients.items():
            move = gradient
            if self.momentum:
                before = self.velocity.get(name)
                now = gradient if before is None else self.momentum * before + gradient
                self.velocity[name] = now
                move = gradient + self.momentum * now if self.nesterov else now
            values[name] = values[name] - self.lr * move


@dataclass(frozen=True)
class Course:
    """Parameters of each rank after each step, and the outer parameters."""

    local: list[list[list[float]]]  # step, rank
    outer: list[list[float]]  # step


def flat(values: dict[str, Array]) -> list[float]:
    return [each for name in SHAPES for each in values[name].ravel().tolist()]


def simulate(
    ranks: int,
    steps: int,
    every: int,
    fragments: Sequence[Sequence[str]],
    *,
    delay: int = 0,
    mix: float = 1.0,
    outer: Sgd | None = None,
    weights: Sequence[float] | None = None,
    warmup: int = 0,
    inner: Mapping[str, Any] = INNER,
) -> Course:
    """Run the whole algorithm, by the definitions of DiLoCo and Streaming DiLoCo."""
    share = np.array(weights or [1.0] * ranks) / sum(weights or [1.0] * ranks)
    local = [start() for _ in range(ranks)]
    inners = [Sgd(**inner) for _ in range(ranks)]
    anchor = start()
    outers = [
        Sgd(0.7, 0.9, True) if outer is None else Sgd(outer.lr, outer.momentum, outer.nesterov)
        for _ in fragments
    ]
    sent: dict[tuple[int, int], dict[str, Array]] = {}  # (fragment, step at which it is applied) → mean
    course = Course([], [])
    for step in range(1, steps + 1):
        gradients = [
            {name: sharp * (local[rank][name] - target) for name, (sharp, target) in targets(rank).items()}
            for rank in range(ranks)
        ]
        if step <= warmup:
            mean = {name: np.mean([each[name] for each in gradients], axis=0) for name in SHAPES}
            gradients = [mean] * ranks
        for rank in range(ranks):
            inners[rank].step(local[rank], gradients[rank])
        if step <= warmup:
            anchor = dict(local[0])
        for index, names in enumerate(fragments if step > warmup else ()):
            if (step - warmup) % every == (index + 1) * every // len(fragments) % every:
                moved: dict[str, Array] = {}
                for name in names:
                    apart = np.stack([anchor[name] - mine[name] for mine in local])
                    moved[name] = np.tensordot(share, apart, axes=1)
                sent[index, step + delay] = moved
            if (index, step) in sent:
                outers[index].step(anchor, sent.pop((index, step)))
                for mine in local:
                    for name in names:
                        mine[name] = mix * anchor[name] + (1 - mix) * mine[name]
        course.local.append([flat(mine) for mine in local])
        course.outer.append(flat(anchor))
    return course
