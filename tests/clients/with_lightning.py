"""Lightning's Trainer, on a backend named in its strategy."""

from __future__ import annotations

import logging
import sys
import warnings
from importlib import import_module
from typing import Any, Final

import torch
from clients.job import STEPS, batch, main, network
from torch import Tensor, nn

warnings.simplefilter("ignore")
lightning: Final[Any] = import_module("lightning")
strategies: Final[Any] = import_module("lightning.pytorch.strategies")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.losses: list[float] = []

    def training_step(self, inputs: Tensor, index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.network(inputs), inputs)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        self.log("rows", torch.tensor(len(inputs) * (1 + self.global_rank)), sync_dist=True)  # an integer
        return loss

    def on_train_end(self) -> None:
        self.losses += [float(self.trainer.callback_metrics[name]) for name in ("loss", "rows")]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(backend: str) -> Any:
    return lightning.Trainer(
        strategy=strategies.DDPStrategy(process_group_backend=backend),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fitted() -> list[float]:
    module = Module()
    data: Any = torch.cat([batch(step)[0] for step in range(2 * STEPS)])  # shared out by its own sampler
    trainer(sys.argv[1]).fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    return module.losses


if __name__ == "__main__":
    main({"trainer": fitted}, lambda backend: trainer(backend).strategy.setup_environment())
