"""torchtitan: its Llama with its own tensor parallelism and FSDP, on CPUs.

torchtitan takes "cuda" where torch has no accelerator, so the program sets the device type. Language models
have no attention for CPUs by name; the layers' configuration takes that of Flux.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
from clients.job import STEPS, main
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

utils: Final[Any] = import_module("torchtitan.tools.utils")
utils.device_type, utils.device_module = "cpu", torch.cpu  # before other modules of torchtitan copy them

distributed: Final[Any] = import_module("torchtitan.distributed")
llama: Final[Any] = import_module("torchtitan.models.llama3")
registry: Final[Any] = import_module("torchtitan.models.llama3.config_registry")
attention: Final[Any] = import_module("torchtitan.models.common.attention")
VOCABULARY: Final = 2048  # of the model
SEQUENCE: Final = 32


def trained(data: int, tensor: int) -> list[float]:
    """Train the model with these degrees of FSDP and of tensor parallelism."""
    config, spec = registry.llama3_debugmodel(), llama.model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    config.model_spec, config.training.seq_len, config.training.local_batch_size = spec, SEQUENCE, 2
    config.training.mixed_precision_param = config.training.mixed_precision_reduce = "float32"
    parallelism = config.parallelism
    parallelism.data_parallel_shard_degree, parallelism.tensor_parallel_degree = data, tensor
    parallelism.spmd_backend = "partial_dtensor"
    dims = distributed.ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    distributed.utils.set_spmd_backend(parallelism.spmd_backend)
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    with tempfile.TemporaryDirectory() as folder:
        spec.parallelize_fn(
            model, parallel_dims=dims, training=config.training, parallelism=parallelism,
            compile_config=config.compile, ac_config=config.activation_checkpoint, dump_folder=folder,
        )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):  # else torch asks for PREMUL_SUM, which gloo does not have
            module.set_force_sum_reduction_for_comms(enable=True)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    return list(losses(model, dist.get_rank() if data > 1 else 0))


def losses(model: Any, stream: int) -> Iterator[float]:
    """Train, with data of this stream's own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        random = torch.Generator().manual_seed(1000 * step + stream)
        tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=random)
        logits = model(tokens[:, :-1])
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


if __name__ == "__main__":
    main({"tensor_parallel": partial(trained, 1, 2), "fsdp": partial(trained, 2, 1)})
