"""Trains an FSDP2 model in an elastic loop; ranks are told to leave, and killed, where the plan says so.

    mcr-plus run -n 3 --min-ranks 1 sharded_program.py FOLDER PLAN

A plan {"steps": 12, "elastic": {...}, "events": [[rank, step, how]]} has the options under `elastic:`, and
what happens to a launcher's rank in a step: "notice" (SIGTERM), or SIGKILL "before" its backward pass,
"after" the step of its optimizer, or "copying", while it sends the copy of its shards of that step. With
"begin", training begins with the state in that file; with "stranger", the optimizer is another model's. Each
rank writes the state at the beginning of each step, and its end, to the folder. See test_sharded.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mcr_plus as mcr
from mcr_plus.elasticity import buddies, sharded

WINDOWS = 12


def plain_model() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """The model in one process; no dimension is a multiple of three ranks."""
    torch.manual_seed(3)
    layers = torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5)
    model = torch.nn.Sequential(*layers).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def sharded_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same over all ranks."""
    model, _ = plain_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh)
    mcr.fsdp(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def loss(model: torch.nn.Module, step: int, rank: int, ranks: int) -> torch.Tensor:
    """The loss of a rank's windows, such that the mean over ranks is the mean over windows."""
    x = torch.randn(WINDOWS, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    own = x[rank::ranks]
    result: torch.Tensor = (model(own) - own[:, :5].sin()).square().sum() * (ranks / WINDOWS)
    return result


def flat(state: dict[str, Any]) -> dict[str, list[float]]:
    """The tensors of a state of `mcr.fsdp_state`."""
    found = {name: value.flatten().tolist() for name, value in state["model"].items()}
    for name, entries in (state["optimizer"] or {"state": {}})["state"].items():
        found |= {f"{name} {key}": value.flatten().tolist() for key, value in entries.items()}
    return found


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, text: str) -> None:
    """Train."""
    torch.set_num_threads(1)
    plan, slot = json.loads(text), int(os.environ["RANK"])
    events = {(step, how) for rank, step, how in plan["events"] if rank == slot}
    config = Path(folder, f"config.{slot}.json")
    config.write_text(json.dumps({"version": 1, "elastic": plan["elastic"]}))
    os.environ["MCR_CONFIG"] = str(config)
    dist.init_process_group("mcr")

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = sharded_model()
        if "begin" in plan:
            sharded.load(model, optimizer, torch.load(plan["begin"]))
        return model, plain_model()[1] if "stranger" in plan else optimizer

    encoded = buddies.encoded

    def encoded_once(values: torch.Tensor, base: torch.Tensor | None, version: int) -> torch.Tensor:
        if (version - 1, "copying") in events and values.numel() > 1:
            die()
        return encoded(values, base, version)

    buddies.encoded = encoded_once
    seen: list[list[int]] = []
    states: list[dict[str, list[float]]] = []
    first, state = plan.get("first", 0), None
    for step in mcr.elastic_sharded(build, steps=plan["steps"] - first):
        with step:
            number, rank, ranks = step.number + first, dist.get_rank(), dist.get_world_size()
            state = mcr.fsdp_state(step.model, step.optimizer, step=step.number)
            seen.append([number, ranks])
            states.append(flat(state))
            torch.save(state, Path(folder, f"state.{slot}.{number}.{ranks}"))
            if (number, "notice") in events:
                os.kill(os.getpid(), signal.SIGTERM)
            if (number, "before") in events:
                die()
            step.optimizer.zero_grad()
            loss(step.model, number, rank, ranks).backward()
            step.optimizer.step()
            if (number, "after") in events:
                die()
            state = mcr.fsdp_state(step.model, step.optimizer, step=number + 1)
    end = {"seen": seen, "states": states, "end": None if state is None else flat(state)}
    Path(folder, f"end.{slot}").write_text(json.dumps(end))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
