"""A small causal decoder over bytes whose linear layers and feed-forward parts can be exchanged.

Pre-norm (Xiong et al. 2020, arXiv 2002.04745), learned positions, GELU, and a head tied to the embedding of
the bytes. All weights are drawn from one generator, in order, so that a seed gives the same model however
its parts are spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from corpus import VOCABULARY
from libraries import JobError
from pydantic import BaseModel, ConfigDict, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from mcr_plus.config.document import read_document
from mcr_plus.config.options import validate

STD = 0.02
WIDER = 4  # times as wide as the model is the middle of a feed-forward part


class Shape(BaseModel):
    """Sizes of a model, as `--model FILE` gives them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    layers: PositiveInt = 4
    hidden: PositiveInt = 256
    heads: PositiveInt = 8
    sequence: PositiveInt = 128

    def check(self) -> None:
        """Raise `JobError` if the sizes do not fit together."""
        if self.hidden % self.heads:
            raise JobError(f"hidden {self.hidden} does not divide by {self.heads} heads")


ShapeT = TypeVar("ShapeT", bound=Shape)


def read_shape(kind: type[ShapeT], path: Path | None, given: dict[str, Any]) -> ShapeT:
    """The shape in a YAML file, or the defaults, with what was `given` on the command line in its place."""
    shape = kind()
    if path is not None:
        document = read_document(path, versioned=False)
        shape = validate(kind, document.data, document, ())
    shape = shape.model_copy(update={key: value for key, value in given.items() if value is not None})
    try:
        shape.check()
    except JobError as error:
        raise JobError(f"{path}: {error}" if path else str(error)) from None
    return shape


# --- parts ------------------------------------------------------------------------------------------


def linear(inputs: int, outputs: int, random: torch.Generator, std: float = STD) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=std, generator=random)
    nn.init.zeros_(layer.bias)
    return layer


class Linears:
    """Makes a block's linear layers: each half has columns, something between, and rows."""

    ranks = 1  # that share the columns of a layer, and so the heads

    def columns(self, inputs: int, outputs: int, random: torch.Generator, parts: int = 1) -> nn.Module:  # noqa: ARG002
        """A layer whose outputs, `parts` equal parts of them, may lie on several ranks."""
        return linear(inputs, outputs, random)

    def rows(self, inputs: int, outputs: int, random: torch.Generator, std: float) -> nn.Module:
        """A layer whose inputs may lie on several ranks."""
        return linear(inputs, outputs, random, std)


class Fed(NamedTuple):
    """What a feed-forward part gives."""

    output: Tensor
    penalty: Tensor | float = 0.0  # to be added to the loss
    dropped: float | None = None  # share of what experts had no room for


class FeedForward(nn.Module):
    def __init__(self, hidden: int, linears: Linears, random: torch.Generator, std: float) -> None:
        super().__init__()
        self.up = linears.columns(hidden, WIDER * hidden, random)
        self.down = linears.rows(WIDER * hidden, hidden, random, std)

    def forward(self, x: Tensor) -> Fed:
        return Fed(self.down(functional.gelu(self.up(x))))


class Attention(nn.Module):
    def __init__(
        self, hidden: int, heads: int, linears: Linears, random: torch.Generator, std: float
    ) -> None:
        super().__init__()
        self.heads = heads // linears.ranks
        self.qkv = linears.columns(hidden, 3 * hidden, random, parts=3)
        self.out = linears.rows(hidden, hidden, random, std)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_slice(x, [])[0]

    def forward_slice(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Any]:
        """The output for a slice of a sequence, and its keys and values; `past` has those of earlier ones."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask, keys, values = None, k, v
        if past:
            keys, values = (torch.cat(each, dim=2) for each in zip(*past, (k, v), strict=True))
            mask = x.new_ones(length, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - length)
        mixed = functional.scaled_dot_product_attention(q, keys, values, mask, is_causal=not past)
        output: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return output, (k, v)


class Block(nn.Module):
    def __init__(self, hidden: int, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(hidden)
        self.attention = attention
        self.before_feed_forward = nn.LayerNorm(hidden)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> Fed:
        x = x + self.attention(self.before_attention(x))
        fed: Fed = self.feed_forward(self.before_feed_forward(x))
        return fed._replace(output=x + fed.output)


# --- the whole --------------------------------------------------------------------------------------


class Losses(NamedTuple):
    """What a model says about a batch."""

    text: Tensor  # mean cross entropy of a byte, in nats
    penalty: Tensor | float
    dropped: tuple[float, ...]  # of every layer with experts


# Makes the feed-forward part of a layer, by its number and the deviation of its last weights.
MakeFeedForward = Callable[[int, torch.Generator, float], nn.Module]


class LanguageModel(nn.Module):
    """Says what byte comes next. `feed_forward` makes that part of each layer; without it all are dense."""

    def __init__(
        self,
        shape: Shape,
        seed: int,
        linears: Linears | None = None,
        feed_forward: MakeFeedForward | None = None,
    ) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        linears = linears or Linears()
        self.bytes = nn.Embedding(VOCABULARY, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=STD, generator=random)
        last_std = STD / (2 * shape.layers) ** 0.5  # as in GPT-2: the residual stream grows with every part
        blocks = []
        for layer in range(shape.layers):
            attention = Attention(shape.hidden, shape.heads, linears, random, last_std)
            if feed_forward is None:
                fed: nn.Module = FeedForward(shape.hidden, linears, random, last_std)
            else:
                fed = feed_forward(layer, random, last_std)
            blocks.append(Block(shape.hidden, attention, fed))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(shape.hidden)

    def forward(self, windows: Tensor, begin: int = 0) -> Losses:
        """Windows [batch, length + 1] of bytes: each but the last is read, each but the first foretold.

        `begin`: position of the first byte.
        """
        read, next_ = windows[:, :-1], windows[:, 1:]
        logits, penalty, dropped = self._read(read, begin)
        text = functional.cross_entropy(logits.flatten(0, 1), next_.flatten())
        return Losses(text, penalty, dropped)

    def mcr_slice(self, windows: Tensor, begin: int, end: int) -> dict[str, Any]:
        """The batch of positions from `begin` to `end`, for plans with slices."""
        return {"windows": windows[:, begin : end + 1], "begin": begin}

    def predict(self, read: Tensor) -> Tensor:
        """The logits [batch, length, VOCABULARY] of the byte after each of `read` [batch, length]."""
        return self._read(read)[0]

    def _read(self, read: Tensor, begin: int = 0) -> tuple[Tensor, Tensor | float, tuple[float, ...]]:
        x = self.bytes(read) + self.positions.weight[begin : begin + read.shape[1]]
        penalty: Tensor | float = 0.0
        dropped: list[float] = []
        for block in self.blocks:
            x, more, lost = block(x)
            penalty = penalty + more
            dropped += () if lost is None else (lost,)
        return functional.linear(self.norm(x), self.bytes.weight), penalty, tuple(dropped)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
