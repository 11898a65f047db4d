"""Plans made for models: a large vocabulary, and passes without gradients, beside one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from plan_exam import difference, profile_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional

import mcr_plus as mcr
from mcr_plus.errors import InvalidArgument
from mcr_plus.plans.named import named

CLOSE = 1e-9
WORDS = 23


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return x + y


class Nested(Residual):
    """Its layers are a chain where only data goes around it: in the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(self.up, nn.Tanh(), self.down)
        del self.up, self.down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(x)
        return y


def vocabulary(block: type[nn.Module] = Residual) -> nn.Module:
    torch.manual_seed(1)
    blocks = [block() for _ in range(5)]
    return nn.Sequential(nn.Embedding(WORDS, 6), *blocks, nn.Linear(6, WORDS)).double()


class Placed(nn.Module):
    """Words with a padding word, and their positions, in one block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.places = nn.Embedding(WORDS, 6, padding_idx=2), nn.Embedding(7, 6)
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.places(torch.arange(x.shape[1]))
        for each in self.inner:
            x = each(x)
        output: Tensor = self.head(x)
        return output


class Recycled(nn.Module):
    """Three passes, of which the last has gradients."""

    def __init__(self, block: type[nn.Module] = Residual) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        for param in self.blocks.parameters():
            param.mcr_shared = True  # type: ignore[attr-defined]
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        previous = torch.zeros_like(x)
        for number in range(3):
            with torch.set_grad_enabled(number == 2 and torch.is_grad_enabled()):
                previous = x + previous
                for block in self.blocks:
                    previous = block(previous)
        output: Tensor = self.head(previous)
        return output


class Around(nn.Module):
    """A parent uses the input of blocks beside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * x.mean(-1, keepdim=True) + torch.relu(x)
        return x[..., :2]


def words() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    return [(torch.randint(WORDS, (8, 5)), torch.randint(WORDS, (8, 5))) for _ in range(2)]


def features() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return [(torch.randn(8, 6).double(), torch.randn(8, 2).double()) for _ in range(2)]


def of_words(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained() -> dict[str, float]:
    found = {}
    with mcr.init() as comm:
        ranks = comm.size
        for micro in (1, 4):
            plan_of = partial(named, "interlaced", ranks=ranks, micro_batches=micro)
            found[f"interlaced {micro}"] = difference(vocabulary, words(), plan_of, of_words)
        for name in ("interlaced", "tensor_parallel", "sequence_parallel"):
            plan_of = partial(named, name, ranks=ranks, micro_batches=2)
            found[f"placed, {name}"] = difference(lambda: Placed().double(), words(), plan_of, of_words)
        plan_of = partial(named, "sequence_parallel", ranks=ranks)
        found["rows of words in a sequence"] = difference(
            partial(vocabulary, Nested), words(), plan_of, of_words
        )
        plan_of = partial(named, "three_f_one_b", ranks=ranks, micro_batches=2)
        nested = partial(difference, lambda: Recycled(Nested).double(), features())
        found["nested"] = nested(plan_of, functional.mse_loss)
        recycled = partial(difference, lambda: Recycled().double(), features(), loss=functional.mse_loss)
        for micro in (1, 4):
            plan_of = partial(named, "three_f_one_b", ranks=ranks, micro_batches=micro)
            found[f"3F1B {micro}"] = recycled(plan_of)
        for name in ("gpipe", "one_f_one_b") if ranks < 4 else ():
            plan_of = partial(named, name, ranks=ranks, micro_batches=2)
            loss = functional.mse_loss
            found[f"around, {name}"] = difference(lambda: Around().double(), features(), plan_of, loss)
        found["data"] = recycled(partial(named, "data_parallel", ranks=ranks))
        profile = profile_of(Placed(), words()[0], of_words)
        rows = profile.blocks[0].axes["rows"]
        assert (profile.blocks[0].name, rows.parts, rows.params) == ("words + places", (WORDS,), WORDS * 24)
        profile = profile_of(Recycled().double(), features()[0], functional.mse_loss)
        assert [block.detached for block in profile.blocks] == [True] * 8 + [False] * 6
        with pytest.raises(InvalidArgument, match="expected an embedding"):
            named("interlaced", profile, ranks)
    return found


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_they_train_as_one_process(ranks: int) -> None:
    for result in run_ranks(trained, ranks):
        assert {key: value for key, value in result.value.items() if not value < CLOSE} == {}
        assert len(result.value) == 12 - 2 * (ranks == 4)
