"""megatron-core: its tensor parallel layers and their loss, on CPUs.

Its attention, DistributedDataParallel and optimizers take memory of "cuda" whatever the device.
"""

from __future__ import annotations

import warnings
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
from clients.job import STEPS, main
from torch import Tensor, nn

warnings.simplefilter("ignore")  # it names what is not installed
state: Final[Any] = import_module("megatron.core.parallel_state")
layers: Final[Any] = import_module("megatron.core.tensor_parallel.layers")
losses: Final[Any] = import_module("megatron.core.tensor_parallel.cross_entropy")
config: Final[Any] = import_module("megatron.core.transformer.transformer_config")
VOCABULARY: Final = 64
WIDTH: Final = 32


class Language(nn.Module):
    """A vocabulary, two linear layers and logits, all of which ranks share."""

    def __init__(self) -> None:
        super().__init__()
        given = config.TransformerConfig(
            num_layers=2, hidden_size=WIDTH, num_attention_heads=4, use_cpu_initialization=True,
            tensor_model_parallel_size=dist.get_world_size(), gradient_accumulation_fusion=False,
        )  # fmt: skip
        common = {"config": given, "init_method": nn.init.xavier_normal_}
        self.embedding = layers.VocabParallelEmbedding(VOCABULARY, WIDTH, **common)
        self.up = layers.ColumnParallelLinear(WIDTH, 2 * WIDTH, bias=True, gather_output=False, **common)
        self.down = layers.RowParallelLinear(
            2 * WIDTH, WIDTH, bias=True, input_is_parallel=True, skip_bias_add=False, **common
        )
        self.logits = layers.ColumnParallelLinear(
            WIDTH, VOCABULARY, bias=False, gather_output=False, **common
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of the next tokens."""
        hidden = self.embedding(tokens[:, :-1])
        hidden = hidden + self.down(torch.relu(self.up(hidden)[0]))[0]
        found: Tensor = losses.vocab_parallel_cross_entropy(self.logits(hidden)[0], tokens[:, 1:])
        return found.mean()


def trained(optimizer: type[torch.optim.Optimizer]) -> list[float]:
    """Train the layers; all ranks have the same tokens, as tensor parallel ranks do."""
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model = Language()
    steps, found = optimizer(model.parameters(), lr=0.05), []  # type: ignore[call-arg]
    for step in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (4, 17), generator=torch.Generator().manual_seed(step))
        loss = model(tokens)
        steps.zero_grad()
        loss.backward()
        steps.step()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    main({"layers": partial(trained, torch.optim.SGD), "layers_adam": partial(trained, torch.optim.AdamW)})
