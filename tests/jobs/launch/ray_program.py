"""A driver of Ray Train: `python ray_program.py FOLDER` runs `JOBS` in a Ray of its own, one after the other.

A worker writes its observations to FOLDER/JOB-RANK-ATTEMPT.json. The driver writes the errors of `fit`, by
job, to FOLDER/errors.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

WORKERS: Final = 2
STEPS: Final = 4
DIES_AT: Final = 2  # the step before which the last worker dies
RATE: Final = 0.1
ROWS, INPUTS, OUTPUTS = 7, 5, 3
COMPRESSED: Final = {"rules": [{"match": {"kind": "all_reduce"}, "compress": {"codec": "bf16"}}]}
JOBS: Final[Mapping[str, Mapping[str, Any]]] = {
    "trained": {"ways": ["ddp", "wrap"]},
    "restarted": {"ways": ["ddp"], "dies": True, "failures": 1, "pipeline": COMPRESSED},
    "failed": {"ways": ["wrap"], "dies": True},
}
"""What is special about a job: who averages gradients, one model after the other; whether a worker dies in
the first attempt; how many failures Ray puts up with; the configuration that MCR_CONFIG names."""


def batch(rank: int, step: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return inputs and targets that are unique to a rank and a step."""
    random = np.random.default_rng([rank, step])
    return random.normal(size=(ROWS, INPUTS)), random.normal(size=(ROWS, OUTPUTS))


def expected() -> tuple[list[list[float]], NDArray[np.float64]]:
    """Return each rank's losses, and the weights of a linear layer that one process trains on all data."""
    weight = np.zeros((OUTPUTS, INPUTS))
    losses: list[list[float]] = [[] for _ in range(WORKERS)]
    for step in range(STEPS):
        gradient = np.zeros_like(weight)
        for rank in range(WORKERS):
            x, y = batch(rank, step)
            error = x @ weight.T - y
            losses[rank].append(float(np.mean(error**2)))
            gradient += 2 * error.T @ x / error.size / WORKERS
        weight -= RATE * gradient
    return losses, weight


def train(config: Mapping[str, Any]) -> None:
    """A worker of a job."""
    import ray.train
    from ray.train.torch import prepare_model

    import mcr_plus as mcr

    rank, folder, job = ray.train.get_context().get_world_rank(), Path(config["folder"]), config["job"]
    attempt = len(list(folder.glob(f"{job}-{rank}-*.json")))
    dies = config.get("dies", False) and attempt == 0 and rank == WORKERS - 1
    file = folder / f"{job}-{rank}-{attempt}.json"
    total = torch.tensor([rank + 1.0])
    mcr.all_reduce(total)  # in another thread than the one in which Ray has made the process group
    seen: dict[str, Any] = {
        "pid": os.getpid(), "backend": dist.get_backend(), "size": dist.get_world_size(), "sum": total.item(),
        "libraries": mcr.get_backends(), "trained": [],
    }  # fmt: skip
    file.write_text(json.dumps(seen))
    with mcr.record() as log:
        try:
            for way in config["ways"]:
                layer, losses = nn.Linear(INPUTS, OUTPUTS, bias=False), list[float]()
                trained: dict[str, Any] = {"losses": losses}
                seen["trained"].append(trained)
                nn.init.zeros_(layer.weight)
                model: nn.Module = layer
                optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
                if way == "wrap":
                    model, optimizer = mcr.wrap(model, optimizer)
                else:
                    model = prepare_model(model)
                for step in range(STEPS):
                    if dies and step == DIES_AT:
                        os.kill(os.getpid(), signal.SIGKILL)
                    losses.append(_step(model, optimizer, rank, step))
                trained["weight"] = layer.weight.tolist()
        except Exception as error:
            seen["error"] = [type(error).__name__, str(error)]
            raise
        finally:
            seen["operations"] = [[each.kind, each.codec] for each in log.records]
            file.write_text(json.dumps(seen))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> float:
    x, y = (torch.from_numpy(values).float() for values in batch(rank, step))
    optimizer.zero_grad()
    loss: Tensor = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def main(folder: Path) -> None:
    """Run all jobs."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    errors = {}
    ray.init(num_cpus=WORKERS, include_dashboard=False, _temp_dir=str(folder / "ray"))
    for job, special in JOBS.items():
        variables = {}
        if "pipeline" in special:
            file = folder / "pipeline.json"
            file.write_text(json.dumps({"version": 1, **special["pipeline"]}))  # JSON is YAML
            variables["MCR_CONFIG"] = str(file)
        trainer = TorchTrainer(
            train,
            train_loop_config={**special, "job": job, "folder": str(folder)},
            torch_config=TorchConfig(backend="mcr", timeout_s=60),
            scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=False),
            run_config=RunConfig(
                name=job,
                storage_path=str(folder / "results"),
                failure_config=FailureConfig(max_failures=special.get("failures", 0)),
                worker_runtime_env={"env_vars": variables},
            ),
        )
        try:
            trainer.fit()
        except Exception as error:
            errors[job] = [type(error).__name__, str(error)]
    (folder / "errors.json").write_text(json.dumps(errors))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
