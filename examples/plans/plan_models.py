"""Models that are chains of blocks, for plans: a mixture of experts, and DLRM with all of its tables.

What a module with parts of its own does when a plan cuts it is in its `mcr_cut` (docs/plans.md).

The balance loss of the mixture goes along the chain: each token carries its share of it as one more feature.
It balances experts within each sequence (as DeepSeek-V3 does, arXiv 2412.19437), so that it adds up over
shards of a batch as the loss of the text does.
"""

from __future__ import annotations

import torch
from corpus import VOCABULARY
from criteo import DENSE, SPARSE
from experts import ExpertShape
from libraries import JobError
from model import ModelConfig, interact, mlp
from torch import Tensor, nn
from torch.nn import functional
from transformer import STD, Attention, FeedForward, Linears, linear

import mcr_plus as mcr
from mcr_plus import autograd, expert

# -- experts ------------------------------------------------------------------------------------------------


class DealtExperts(nn.Module):
    """Experts and their gate: all here, or dealt to the ranks of `group`, to which tokens travel."""

    def __init__(self, shape: ExpertShape, random: torch.Generator, std: float) -> None:
        super().__init__()
        self.shape = shape
        self.mcr_axes = {"batch": "split", "experts": (shape.experts, "exchange")}
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        nn.init.normal_(self.gate.weight, std=STD, generator=random)
        dense = (FeedForward(shape.hidden, Linears(), random, std) for _ in range(shape.experts))
        self.own = nn.ModuleList(dense)
        self.parts, self.group = range(shape.experts), None

    def mcr_cut(self, axis: str, parts: range, group: mcr.Communicator) -> list[str]:  # noqa: ARG002
        """Keep the experts `parts`; return the names of their parameters."""
        if len(parts) * group.size != self.shape.experts:
            raise JobError(f"{self.shape.experts} experts do not divide by {group.size} ranks")
        self.parts, self.group = parts, group  # type: ignore[assignment]
        for number, each in enumerate(self.own):
            if number not in parts:
                each.to("meta")
        return [name for name, own in self.own.named_parameters(prefix="own") if not own.is_meta]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the answers to `x` [n, length, hidden], and shares of the balance loss [n, length, 1]."""
        if x.is_meta:  # another rank computes it; here only shapes count, which depend on data further on
            return x, x[..., :1]
        tokens, shape = x.flatten(0, -2), self.shape
        probabilities = self.gate(tokens).softmax(dim=1)
        weights, chosen = probabilities.topk(shape.top_k)
        if self.group is None:
            answers = torch.zeros_like(tokens)
            for number, one in enumerate(self.own):
                token, choice = (chosen == number).nonzero(as_tuple=True)
                own = weights[token, choice, None] * one(tokens[token]).output
                answers = answers.index_add(0, token, own)
        else:
            routed = expert.dispatch(
                tokens, chosen, weights, experts=shape.experts, group=self.group, tag="moe"
            )
            rows = routed.rows.split(routed.counts)
            own_answers = [
                self.own[number](part).output for number, part in zip(self.parts, rows, strict=True)
            ]
            answers = expert.combine(torch.cat(own_answers), routed)
        share = functional.one_hot(chosen, shape.experts).sum(dim=1).view(*x.shape[:-1], -1) / shape.top_k
        of_sequence = probabilities.view_as(share) * share.mean(dim=1, keepdim=True)
        return answers.view_as(x), shape.balance * shape.experts * of_sequence.sum(dim=-1, keepdim=True)


class ExpertBlock(nn.Module):
    """Attention and experts of text with a penalty as its last feature."""

    def __init__(self, shape: ExpertShape, random: torch.Generator, std: float) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape.hidden, shape.heads, Linears(), random, std)
        self.before_experts = nn.LayerNorm(shape.hidden)
        self.experts = DealtExperts(shape, random, std)

    def forward(self, x: Tensor) -> Tensor:
        text, penalty = x[..., :-1], x[..., -1:]
        text = text + self.attention(self.before_attention(text))
        answers, more = self.experts(self.before_experts(text))
        return torch.cat([text + answers, penalty + more], dim=-1)


class TextLoss(nn.Module):
    """Cross entropy of the next byte, and the mean penalty."""

    def __init__(self, hidden: int, random: torch.Generator) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.head = linear(hidden, VOCABULARY, random)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(x[..., :-1]))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + x[..., -1].mean()


class ExpertChain(nn.Module):
    """A causal decoder with experts in each layer; returns the loss of windows [batch, length + 1]."""

    def __init__(self, shape: ExpertShape, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.bytes = nn.Embedding(VOCABULARY, shape.hidden)
        nn.init.normal_(self.bytes.weight, std=STD, generator=random)
        std = STD / (2 * shape.layers) ** 0.5
        self.blocks = nn.ModuleList(ExpertBlock(shape, random, std) for _ in range(shape.layers))
        self.loss = TextLoss(shape.hidden, random)

    def forward(self, windows: Tensor) -> Tensor:
        x = functional.pad(self.bytes(windows[:, :-1]), (0, 1))  # no penalty yet
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.loss(x, windows[:, 1:])
        return loss


# -- tables -------------------------------------------------------------------------------------------------


class Tables(nn.Module):
    """26 embedding tables: all here, or dealt to the ranks of `group`, to which look-ups travel."""

    def __init__(self, config: ModelConfig, random: torch.Generator) -> None:
        super().__init__()
        self.mcr_axes = {"batch": "split", "tables": (SPARSE, "exchange")}
        self.rows = config.table_rows
        weight = torch.empty(SPARSE * self.rows, config.embedding_dim)
        bound = self.rows**-0.5
        self.weight = nn.Parameter(weight.uniform_(-bound, bound, generator=random))
        self.tables, self.group = SPARSE, None

    def mcr_cut(self, axis: str, parts: range, group: mcr.Communicator) -> list[str]:  # noqa: ARG002
        """Keep the tables `parts`; return the names of their parameters."""
        own = self.weight.detach()[parts.start * self.rows : parts.stop * self.rows]
        self.weight = nn.Parameter(own.clone())
        self.tables, self.group = len(parts), group  # type: ignore[assignment]
        return ["weight"]

    def forward(self, sparse: Tensor) -> Tensor:
        """Vectors [n, 26, dim] for rows `sparse` [n, 26]."""
        questions, group = sparse.t().reshape(-1), self.group
        if group is None:
            received, asking, asked = questions, [len(questions)], [len(questions)]
        else:
            told = torch.tensor([len(sparse), self.tables])
            heard = told.new_empty(group.size, 2)
            group.all_gather_into_tensor(heard, told, tag="dlrm.sizes")
            asked = (heard[:, 1] * len(sparse)).tolist()
            asking = (heard[:, 0] * self.tables).tolist()
            received = autograd.all_to_all_single(questions, asking, asked, group=group, tag="dlrm.indices")
        # From each rank, they come table by table.
        starts = torch.arange(self.tables) * self.rows
        offsets = [starts.repeat_interleave(number // self.tables) for number in asking]
        vectors = functional.embedding(received + torch.cat(offsets), self.weight)
        if group is not None:
            vectors = autograd.all_to_all_single(vectors, asked, asking, group=group, tag="dlrm.vectors")
        return vectors.view(SPARSE, len(sparse), -1).transpose(0, 1)


class TablesChain(nn.Module):
    """DLRM; returns logits [n] of `dense` [n, 13] and `sparse` [n, 26]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(config.seed)
        pairs = SPARSE * (SPARSE + 1) // 2
        self.bottom = mlp((DENSE, *config.bottom, config.embedding_dim), random)
        self.tables = Tables(config, random)
        self.top = mlp((config.embedding_dim + pairs, *config.top, 1), random)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        logits: Tensor = self.top(interact(self.bottom(dense), self.tables(sparse)))
        return logits.squeeze(1)
