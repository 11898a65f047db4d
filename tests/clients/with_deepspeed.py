"""DeepSpeed on a CPU, in all stages of ZeRO."""

from __future__ import annotations

import logging
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from clients.job import STEPS, loss_of, main, network

deepspeed: Final[Any] = import_module("deepspeed")
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def stage(number: int) -> list[float]:
    model = network()
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": number},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


if __name__ == "__main__":
    main(
        {f"zero{number}": partial(stage, number) for number in range(4)},
        lambda backend: deepspeed.init_distributed(dist_backend=backend),
    )
