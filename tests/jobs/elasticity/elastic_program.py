"""Trains a small model in an elastic loop, and loses ranks where it is told to.

    mcr-plus run -n 3 --min-ranks 2 --restart-failed 2 elastic_program.py FOLDER PLAN

A plan such as {"steps": 30, "deaths": [[1, 5, 0, "backward"]]} has the steps, and deaths: of a launcher's
rank, in a step, after so many restarts of the rank, and where in it; step -1 is "setup", before the loop.
With "precopy", newcomers get a state of any size beforehand, and deaths may also be "giving" or "receiving"
it, whatever the step. A step of fewer than "full" ranks takes "nap" seconds more, each of the last ten steps
"last_nap", and a rank that is started again waits for "late" seconds. With "logs", a rank that dies in a
"step" does so once the others have made it. With "exact", every window is a backward pass, and they are added
up exactly, in float32; deaths may also be "between" passes. "notices" are like deaths, [rank, step, how]: by
SIGTERM ("sigterm", "twice"; step -1 is within `init`), or by the "file" that the configuration names. Each
rank writes what it has at the end to
FOLDER/end.RANK. See tests/jobs/elasticity/test_elastic.py.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import mcr_plus as mcr
from mcr_plus.communicator import transfer
from mcr_plus.elasticity import newcomers, state_stream
from mcr_plus.job import init

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("", "support"))  # of a program

from ranks import wait_for_files

WINDOWS = 12  # in a step, on all ranks together


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same on all ranks, whatever their number."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and targets of a step, of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(WINDOWS, 6, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def window_loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, window: int) -> torch.Tensor:
    """The loss of one window in float32; of some it is so small that float64 cannot add their gradients."""
    loss: torch.Tensor = (model(x[window].float()) - y[window].float()).square().sum()
    return loss * 2.0 ** (-30 * (window % 3))


class Counter:
    """A sampler, of which newcomers get the state."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "some": [torch.tensor([self.seen]), (1, None)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["some"][0].item() == state["seen"]
        self.seen = state["seen"]


def watch_precopy(plan: dict[str, Any], places: set[str], sent: list[int]) -> None:
    """Newcomers get this small state beforehand; die where it is `giving` or `receiving`.

    `sent`: gets the bytes of each broadcast of what newcomers lack.
    """
    send, receive, broadcast = state_stream.send, state_stream.receive, transfer.broadcast_tensors

    def slow_send(link: Any, message: state_stream.StateMessage) -> None:
        send(link, message)
        if message.kind == state_stream.COPY:
            Path(plan["folder"], "giving").touch()
            if "giving" in places:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(plan.get("holds", 0.0))

    def counted_receive(link: Any) -> tuple[int, Any]:
        kind, state = receive(link)
        if kind == state_stream.COPY and "receiving" in places:
            os.kill(os.getpid(), signal.SIGKILL)
        return kind, state

    def counted_broadcast(tensors: Any, *others: Any, tag: str | None = None) -> None:
        if tag == transfer.STATE:
            sent.append(sum(each.nbytes for each in tensors))
        broadcast(tensors, *others, tag=tag)

    changed: dict[Any, dict[str, Any]] = {
        newcomers: {"WORTH": 0 if plan["precopy"] else 1 << 40},
        state_stream: {"send": slow_send, "receive": counted_receive},
        transfer: {"broadcast_tensors": counted_broadcast},
    }
    for module, names in changed.items():
        for name, value in names.items():
            setattr(module, name, value)


def notify(plan: dict[str, Any], step: int, slot: int, folder: str) -> None:
    """Tell this rank to leave, if the plan says so."""
    for at, when, how in plan.get("notices", ()):
        if (at, when) == (slot, step) and how == "file":
            Path(folder, f"leave.{slot}").touch()
        elif (at, when) == (slot, step):
            for _ in range(1 + (how == "twice")):
                os.kill(os.getpid(), signal.SIGTERM)


def notify_within_init(plan: dict[str, Any], slot: int, folder: str) -> None:
    """Tell this rank to leave while `init` finds the other ranks, if the plan says so."""
    find = init._find_ranks

    def told_within(*given: Any) -> Any:
        notify(plan, -1, slot, folder)
        return find(*given)

    setattr(init, "_find_ranks", told_within)  # noqa: B010 - mypy takes an assignment for a mistake


def main(folder: str, text: str) -> None:
    """Train."""
    torch.set_num_threads(1)
    plan = json.loads(text)
    slot, restarts = int(os.environ["RANK"]), int(os.environ["MCR_RESTARTS"])
    deaths = {(step, where) for at, step, times, where in plan["deaths"] if (at, times) == (slot, restarts)}
    time.sleep(plan.get("late", 0.0) if restarts else 0.0)
    notify_within_init(plan, slot, folder)
    mcr.init(plan.get("config", {}).get(str(restarts)), timeout=60)
    if (-1, "setup") in deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    model, optimizer = model_and_optimizer()
    if plan.get("other_model") and restarts:
        model = torch.nn.Linear(6, 2)
        optimizer = torch.optim.Adam(model.parameters())
    exact = plan.get("exact", False)
    mcr.wrap(model.float() if exact else model, optimizer, accumulate="exact" if exact else "fast")
    sampler, seen = Counter(), []
    places, sent = {where for _, where in deaths}, list[int]()
    plan.setdefault("precopy", False)
    watch_precopy({**plan, "folder": folder}, places, sent)

    def maybe_die(step: int, where: str) -> None:
        if (step, where) in deaths or (f"{where} while giving" in places and Path(folder, "giving").exists()):
            if where == "step" and plan.get("logs"):
                wait_for_files(*(Path(folder, f"made.{step}.{each}") for each in range(3) if each != slot))
            os.kill(os.getpid(), signal.SIGKILL)

    atexit.register(Path(folder, f"over.{slot}").touch)
    for step in mcr.elastic(model, optimizer, sampler, steps=plan["steps"]):
        with step:
            rank, ranks = mcr.get_rank(), mcr.get_world_size()
            x, y = data(step.number)
            own = range(rank, WINDOWS, ranks)
            optimizer.zero_grad()
            notify(plan, step.number, slot, folder)
            maybe_die(step.number, "forward")
            loss = torch.zeros(1)
            if exact:
                for window in own:
                    with nullcontext() if window == own[-1] else mcr.no_sync(model):
                        loss = window_loss(model, x, y, window)
                        loss.backward()
                    maybe_die(step.number, "between")
            else:
                loss = (model(x[own]) - y[own]).square().sum() * (ranks / WINDOWS)
                loss.backward()
            maybe_die(step.number, "backward")
            optimizer.step()
            maybe_die(step.number, "step")
            if plan.get("logs"):
                Path(folder, f"made.{step.number}.{slot}").touch()
            if (step.number, "raise") in deaths:
                raise ValueError("a bug of one rank")
            if plan.get("logs"):
                mcr.all_reduce(loss.detach())
            sampler.seen = step.number + 1
            seen.append([step.number, ranks])
            nap = plan.get("nap", 0.0)
            nap = plan.get("last_nap", nap) if step.number >= plan["steps"] - 10 else nap
            time.sleep(nap if ranks < plan.get("full", ranks + 1) else 0.0)
    end = {
        "rank": mcr.get_rank(),
        "size": mcr.get_world_size(),
        "values": torch.cat([each.detach().flatten() for each in model.parameters()]).tolist(),
        "moments": [state["exp_avg_sq"].sum().item() for state in optimizer.state.values()],
        "sampler": sampler.seen,
        "seen": seen,
        "sent": sent,
    }
    Path(folder, f"end.{slot}").write_text(json.dumps(end))
    mcr.finalize()


if __name__ == "__main__":
    main(*sys.argv[1:])
