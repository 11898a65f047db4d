"""Programs whose process groups are shrunk and reconfigured, for `test_torch_membership`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from jobs.elasticity.reconfigure_jobs import Meeting
from ranks import wait_for_files
from torch.nn.parallel import DistributedDataParallel

import mcr_plus as mcr
from mcr_plus.torch_backend.process_group import McrProcessGroup, masquerade


def _begin(backend: str = "mcr") -> McrProcessGroup:
    torch.set_num_threads(1)
    if backend == "gloo":
        masquerade()
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    return _world()


def _world() -> McrProcessGroup:
    group: Any = dist.group.WORLD
    assert isinstance(group, McrProcessGroup)
    return group


def _sum(value: float, group: Any = None) -> float:
    x = torch.full((3,), value)
    dist.all_reduce(x, group=group)
    return x[0].item()


def _gradient(value: float) -> float:
    """The gradient that DDP has averaged over the ranks, of a model with this input."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    model(torch.full((1, 1), value)).sum().backward()
    gradient: torch.Tensor = model.module.weight.grad
    return gradient.item()


def _error(call: Callable[[], Any]) -> str:
    """The kind and the text of the error that a call raises; empty if it raises none."""
    try:
        call()
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _options(uuid: int, handles: list[str], seconds: float = 20) -> Any:
    return SimpleNamespace(uuid=uuid, handles=handles, timeout=timedelta(seconds=seconds))


def shrunk(folder: str, how: str, dies: bool, backend: str = "mcr") -> dict[str, Any]:
    """The default group without rank 1, which dies, or lives and does not take part."""
    group = _begin(backend)
    rank = dist.get_rank()
    inner: Any = dist.new_group([0, 1, 2])
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mcr.wrap(model, optimizer)
    _sum(1.0)
    Path(folder, f"past.{rank}").touch()
    if rank == 1 and dies:
        wait_for_files(*(Path(folder, f"past.{each}") for each in range(3)))
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        text = _error(lambda: _sum(1.0))
        wait_for_files(*(Path(folder, f"done.{each}") for each in (0, 2)))
        dist.destroy_process_group()
        return {"excluded": text}
    seen = ""
    if dies:
        while not seen:
            seen = _error(lambda: _sum(1.0))
    error = str(group.get_error()) if dies else "ErrorType.REMOTE_ERROR"
    if how == "mcr":
        new = mcr.shrink_group([1])
    elif how == "dist":
        new = dist.shrink_group([1])
    else:
        new = mcr.shrink_group([1], group, 1)
    assert new is dist.group.WORLD
    pair: Any = dist.new_group([1, 0])
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    assert model.weight.grad is not None
    result = {
        "seen": seen.partition(":")[0],
        "error": error,
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "world": mcr.get_world_size(),
        "sum": _sum(1.0 + rank),
        "gradient": _gradient(1.0 + rank),
        "wrapped": model.weight.grad.item(),
        "pair": _sum(1.0, pair),
        "old": [_error(lambda: group.communicator), _error(lambda: inner.communicator)],
    }
    Path(folder, f"done.{rank}").touch()
    dist.destroy_process_group()
    result["ended"] = not mcr.is_initialized()
    return result


def shrunk_part(how: str) -> dict[str, Any]:
    """A group inside the job without one of its ranks; the job stays as it is."""
    _begin()
    rank = dist.get_rank()
    group: Any = dist.new_group([0, 1, 2])
    before = _sum(1.0, group)
    result: dict[str, Any] = {"before": before}
    if rank != 1:
        new: Any = mcr.shrink_group([1], group) if how == "mcr" else dist.shrink_group([1], group)
        result |= {"rank": new.rank(), "size": dist.get_world_size(new), "sum": _sum(1.0 + rank, new)}
        result["ranks"] = dist.get_process_group_ranks(new)
    result["all"] = _sum(1.0)
    dist.destroy_process_group()
    return result


def reconfigured(folder: str) -> dict[str, Any]:
    """The default group in place: turned, with fewer ranks, again with all, and after an abort."""
    meeting = Meeting(folder)
    group = _begin()
    inner: Any = dist.new_group([0, 1, 2])
    number = meeting.number
    model = DistributedDataParallel(torch.nn.Linear(1, 1))

    def handles(what: str) -> list[str]:
        return meeting.share(what, group.get_reconfigure_handle())

    work = group.reconfigure(_options(1, handles("1")[::-1]))
    result: dict[str, Any] = {
        "completed": [work.is_completed(), work.wait()],
        "turned": [dist.get_rank(), dist.get_world_size(), _sum(1.0 + number)],
        "inner": [_error(lambda: _sum(1.0, inner)), _error(lambda: inner.get_reconfigure_handle())],
        "ddp": _error(lambda: model(torch.ones(1, 1)).sum().backward()),
        "gradient": _gradient(1.0 + number),
    }
    fewer = handles("2")
    if number == 1:
        result["left out"] = [_error(lambda: _sum(1.0)), str(group.get_error())]
    else:
        group.reconfigure(_options(2, [fewer[0], fewer[2]]))
        result["fewer"] = [dist.get_rank(), dist.get_world_size(), _sum(1.0), _gradient(1.0 + number)]
    group.reconfigure(_options(3, handles("3")))
    result["all"] = [dist.get_rank(), dist.get_world_size(), _sum(1.0)]
    absent = handles("4")
    if number == 0:
        result["absent"] = _error(lambda: group.reconfigure(_options(4, absent, 0.4)))
    result["as before"] = _sum(1.0)
    meeting.share("past", "")
    group.abort()
    result["aborted"] = [_error(lambda: _sum(1.0)), str(group.get_error())]
    group.reconfigure(_options(5, handles("5")))
    result["after abort"] = [_sum(1.0), str(group.get_error())]
    new: Any = dist.new_group([2, 0])
    result["group"] = _sum(1.0, new) if number != 1 else 2.0
    dist.destroy_process_group()
    result["ended"] = not mcr.is_initialized()
    return result


def wrong_arguments() -> dict[str, Any]:
    """What is refused, on one rank alone, and changes nothing."""
    group = _begin()
    inner: Any = dist.new_group([0, 1, 2])
    own = [dist.get_rank()]
    wrong: dict[str, Callable[[], Any]] = {
        "none": lambda: mcr.shrink_group([]),
        "type": lambda: mcr.shrink_group(1),  # type: ignore[arg-type]
        "text": lambda: mcr.shrink_group(["1"]),  # type: ignore[list-item]
        "outside": lambda: mcr.shrink_group([3]),
        "twice": lambda: mcr.shrink_group([1, 1]),
        "all": lambda: mcr.shrink_group([0, 1, 2]),
        "own": lambda: mcr.shrink_group(own),
        "flags": lambda: mcr.shrink_group([1], None, 2),
        "options": lambda: group.shrink([(own[0] + 1) % 3], 0, {"version": 1}),
        "part": lambda: inner.reconfigure(_options(1, [])),
        "shrink": mcr.shrink,
        "reconfigure": lambda: mcr.reconfigure("new", [mcr.reconfigure_handle()]),
    }
    texts = {name: _error(call) for name, call in wrong.items()}
    result = {
        "texts": texts,
        "sum": _sum(1.0),
        "supports": [group.supports_shrinking, group.supports_reconfigure],
    }
    dist.destroy_process_group()
    texts["ended"] = _error(lambda: mcr.shrink_group([1]))
    return result
