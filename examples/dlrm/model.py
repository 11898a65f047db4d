"""DLRM (Naumov et al. 2019, arXiv 1906.00091), hybrid parallel.

    dense  [n, 13] ── bottom MLP ──────────────┐
                                               ├── dot interaction ── top MLP ── logit
    sparse [n, 26] ── 26 embedding tables ─────┘

The MLPs are data parallel: every rank has a copy and their gradients are all-reduced. The tables are
model parallel: each lives on one rank, and all_to_all carries the look-ups there and the vectors back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from criteo import DENSE, SPARSE, shares
from torch import Tensor, nn
from torch.nn import functional


class Handle(Protocol):
    """An operation under way."""

    def wait(self) -> object: ...


class Comms(Protocol):
    """What the job needs from a communication library. All ranks call the same methods in one order."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        tag: str,
    ) -> None:
        """Send consecutive rows of `input`, some to each rank; fill `output` with those they send."""
        ...

    def all_reduce(self, tensor: Tensor, tag: str) -> Handle:
        """Start to sum `tensor` over the ranks in place; it may be read and written after `wait()`."""
        ...


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a DLRM; the MLPs' defaults are the paper's for Criteo Kaggle."""

    embedding_dim: int = 16
    table_rows: int = 10_000
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 256)
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    seed: int = 0


# --- the model-parallel part ------------------------------------------------------------------------


class Exchange(torch.autograd.Function):
    """all_to_all_single that gradients flow back through, by the same exchange the other way."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, comms: Comms, received: list[int], sent: list[int]) -> Tensor:
        ctx.comms, ctx.received, ctx.sent = comms, received, sent
        output = values.new_empty(sum(received), values.shape[1])
        comms.all_to_all_single(output, values, received, sent, tag="dlrm.embedding")
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grads[0].contiguous()
        output = grad.new_empty(sum(ctx.sent), grad.shape[1])
        ctx.comms.all_to_all_single(output, grad, ctx.sent, ctx.received, tag="dlrm.embedding.grad")
        return output, None, None, None


class ShardedEmbedding(nn.Module):
    """26 embedding tables, dealt to the ranks in consecutive runs; each rank stacks its own into one."""

    weight: nn.Parameter

    def __init__(self, config: ModelConfig, comms: Comms) -> None:
        super().__init__()
        self.comms = comms
        self.table_rows = config.table_rows
        self.tables = shares(SPARSE, comms.world_size)  # how many each rank has
        first = sum(self.tables[: comms.rank])
        mine = range(first, first + self.tables[comms.rank])
        empty = torch.empty(0, config.embedding_dim)
        self.weight = nn.Parameter(torch.cat([empty, *(_table(number, config) for number in mine)]))

    def forward(self, sparse: Tensor, sizes: Sequence[int]) -> Tensor:
        """Vectors [n, 26, dim] for this rank's rows `sparse` [n, 26] of a batch with `sizes[r]` on rank r."""
        asked = [tables * sizes[self.comms.rank] for tables in self.tables]
        asked_of_me = [self.tables[self.comms.rank] * size for size in sizes]
        # Table by table, the questions are in the order of the ranks that own the answers.
        questions = sparse.t().reshape(-1)
        received = questions.new_empty(sum(asked_of_me))
        self.comms.all_to_all_single(received, questions, asked_of_me, asked, tag="dlrm.indices")
        # One answer per question, in the same order, so the way back needs no sorting either.
        answers = functional.embedding(received + self._offsets(sizes), self.weight, sparse=True)
        vectors: Tensor = Exchange.apply(answers, self.comms, asked, asked_of_me)  # type: ignore[no-untyped-call]
        return vectors.view(SPARSE, len(sparse), self.weight.shape[1]).transpose(0, 1)

    def _offsets(self, sizes: Sequence[int]) -> Tensor:
        """Where in the stacked weight the table of each question begins."""
        starts = torch.arange(self.tables[self.comms.rank], device=self.weight.device) * self.table_rows
        return torch.cat([starts.repeat_interleave(size) for size in sizes])


def _table(number: int, config: ModelConfig) -> Tensor:
    """Each table has a seed of its own: it starts the same on whichever rank it lands."""
    random = torch.Generator().manual_seed(config.seed * 1000 + number)
    bound = config.table_rows**-0.5
    return torch.empty(config.table_rows, config.embedding_dim).uniform_(-bound, bound, generator=random)


# --- the data-parallel part -------------------------------------------------------------------------


def mlp(sizes: Sequence[int], random: torch.Generator) -> nn.Sequential:
    """Linear layers with ReLU between them, initialised as in the paper's code."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        linear = nn.Linear(inputs, outputs)
        nn.init.normal_(linear.weight, std=(2 / (inputs + outputs)) ** 0.5, generator=random)
        nn.init.normal_(linear.bias, std=(1 / outputs) ** 0.5, generator=random)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class GradientBuffer:
    """All gradients of a module in one buffer, summed over the ranks as soon as the last one is there.

    The sum runs while autograd goes on with the layers below. `wait()` before the optimizer's step.
    """

    def __init__(self, module: nn.Module, comms: Comms, tag: str) -> None:
        self.comms = comms
        self.tag = tag
        self.parameters = list(module.parameters())
        like = self.parameters[0]
        self.buffer = like.new_zeros(sum(p.numel() for p in self.parameters))
        self.handle: Handle | None = None
        self.missing = len(self.parameters)
        pieces = torch.split(self.buffer, [p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)  # autograd adds into it, so nothing is copied
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, _parameter: Tensor) -> None:
        self.missing -= 1
        if not self.missing:
            self.handle = self.comms.all_reduce(self.buffer, self.tag)

    def wait(self) -> None:
        """Return when every gradient is the sum over all ranks."""
        assert self.handle is not None, "wait() before backward()"
        self.handle.wait()
        self.handle = None
        self.missing = len(self.parameters)

    def zero(self) -> None:
        self.buffer.zero_()


# --- the whole --------------------------------------------------------------------------------------


def interact(dense: Tensor, vectors: Tensor) -> Tensor:
    """`dense` [n, dim], and its and the `vectors`' [n, 26, dim] dot products, each pair once."""
    stacked = torch.cat([dense.unsqueeze(1), vectors], dim=1)
    products = stacked @ stacked.transpose(1, 2)
    left, right = torch.tril_indices(SPARSE + 1, SPARSE + 1, offset=-1)
    return torch.cat([dense, products[:, left, right]], dim=1)


class DLRM(nn.Module):
    """Same weights on any number of ranks for one seed; call `backward` through `loss`."""

    def __init__(self, config: ModelConfig, comms: Comms) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(config.seed)
        pairs = SPARSE * (SPARSE + 1) // 2
        self.bottom = mlp((DENSE, *config.bottom, config.embedding_dim), random)
        self.top = mlp((config.embedding_dim + pairs, *config.top, 1), random)
        self.embedding = ShardedEmbedding(config, comms)
        self.to(config.device, config.dtype)
        self.buffers_of_gradients = (
            GradientBuffer(self.top, comms, "dlrm.dense.top"),
            GradientBuffer(self.bottom, comms, "dlrm.dense.bottom"),
        )

    def forward(self, dense: Tensor, sparse: Tensor, sizes: Sequence[int]) -> Tensor:
        """Logits [n] of this rank's rows. Every rank must call, with rows or without."""
        bottom = self.bottom(dense.to(self.embedding.weight.dtype))
        vectors = self.embedding(sparse, sizes)
        logits: Tensor = self.top(interact(bottom, vectors)).squeeze(1)
        return logits

    def wait_for_gradients(self) -> None:
        for buffer in self.buffers_of_gradients:
            buffer.wait()

    def zero_gradients(self) -> None:
        for buffer in self.buffers_of_gradients:
            buffer.zero()
        self.embedding.weight.grad = None


def loss(logits: Tensor, labels: Tensor, sizes: Sequence[int]) -> Tensor:
    """This rank's part of the mean over the global batch: the parts of all ranks add up to it."""
    total = functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
    return total / sum(sizes)
