"""Accelerate and transformers: on a CPU they take no backend but gloo, so ours goes by that name."""

from __future__ import annotations

import tempfile
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
from clients.job import STEPS, main

accelerate: Final[Any] = import_module("accelerate")
transformers: Final[Any] = import_module("transformers")
transformers.logging.set_verbosity_error()
ROWS: Final = 4


def model() -> Any:
    """Return a tiny transformer of random weights."""
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 50, (2 * STEPS * ROWS, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in words]


def accelerated() -> list[float]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(texts(), batch_size=ROWS)  # type: ignore[arg-type, var-annotated]
    network, optimizer, data = accelerator.prepare(network, optimizer, data)
    network.eval()  # no dropout
    losses = []
    for rows in data:
        with accelerator.accumulate(network):
            loss = network(**rows).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses += [loss.item(), accelerator.gather_for_metrics(loss.detach()).sum().item()]
    return [*losses, accelerator.reduce(torch.tensor([1.0 + dist.get_rank()]), "mean").item()]


def trained() -> list[float]:
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="mcr-client-"),
        use_cpu=True,
        per_device_train_batch_size=ROWS,
        num_train_epochs=1,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    trainer = transformers.Trainer(model=model(), args=arguments, train_dataset=texts())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] or [0.0]


if __name__ == "__main__":
    main(
        {"accelerator": accelerated, "trainer": trained},
        lambda backend: accelerate.Accelerator(cpu=True),
    )
