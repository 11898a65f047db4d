"""A driver of collective groups of Ray's actors: `python ray_groups_program.py FOLDER [ADDRESS]`.

Starts a Ray of its own, or connects to the one at ADDRESS, whose nodes have the resources `a` and `b`. Writes
what the actors saw to FOLDER/seen.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

SIZE: Final = 3
LENGTH: Final = 5


def values(rank: int, seed: int) -> np.ndarray[Any, Any]:
    """Return the input of a rank, which no other rank and seed has."""
    return np.random.default_rng([rank, seed]).normal(size=LENGTH)


def error_of(call: Callable[[], object]) -> str:
    """Return the type and text of a call's error, empty without one."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Member:
    """One rank."""

    def __init__(self) -> None:
        from mcr_plus.engines import ray as mcr_ray

        mcr_ray.register()

    def enter(self, size: int, rank: int, name: str) -> str:
        """Open a group; return the error."""
        from ray.util import collective

        return error_of(partial(collective.init_collective_group, size, rank, "MCR", name))

    def operate(self, name: str) -> dict[str, Any]:
        """Run each operation once."""
        from ray.util import collective as col
        from ray.util.collective.types import ReduceOp

        import mcr_plus as mcr

        rank, size = col.get_rank(name), col.get_collective_group_size(name)
        seen: dict[str, Any] = {"backends": mcr.get_backends(), "rank": rank}
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            x = torch.from_numpy(values(rank, 0).copy())
            col.allreduce(x, name, op)
            seen[op.name] = x.tolist()
        array = values(rank, 1).copy()
        col.allreduce(array, name)
        seen["array"] = array.tolist()
        x = torch.from_numpy(values(rank, 2).copy())
        col.reduce(x, size - 1, name)
        seen["reduce"] = x.tolist()
        x = torch.from_numpy(values(rank, 3).copy())
        col.broadcast(x, 1, name)
        seen["broadcast"] = x.tolist()
        outs = [torch.zeros(LENGTH, dtype=torch.float64) for _ in range(size)]
        col.allgather(outs, torch.from_numpy(values(rank, 4).copy()), name)
        seen["allgather"] = [out.tolist() for out in outs]
        out = torch.zeros(LENGTH, dtype=torch.float64)
        parts = [torch.from_numpy(values(rank, 10 + part).copy()) for part in range(size)]
        col.reducescatter(out, parts, name)
        seen["reducescatter"] = out.tolist()
        col.barrier(name)
        if rank == 0:
            col.send(torch.from_numpy(values(0, 5).copy()), size - 1, name)
        elif rank == size - 1:
            x = torch.zeros(LENGTH, dtype=torch.float64)
            col.recv(x, 0, name)
            seen["recv"] = x.tolist()
        return seen

    def mistakes(self, name: str) -> list[str]:
        """Return the errors of calls that cannot work."""
        from ray.util import collective as col

        size = col.get_collective_group_size(name)
        calls: list[Callable[[], object]] = [
            lambda: col.allreduce([1.0, 2.0], name),
            lambda: col.allreduce(torch.zeros(3), "no such group"),
            lambda: col.allgather([torch.zeros(2)] * size, torch.zeros(3), name),
            lambda: col.allreduce(np.array(["text"]), name),
        ]
        return [error_of(call) for call in calls]

    def leave(self, name: str) -> None:
        """Destroy a group."""
        from ray.util import collective

        collective.destroy_collective_group(name)

    def reduce_until_lost(self, name: str, dies: bool) -> str:
        """Reduce until an error; with `dies`, die instead."""
        from ray.util import collective

        for step in range(10_000):
            if dies and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if error := error_of(partial(collective.allreduce, torch.ones(4), name)):
                return error
            time.sleep(0.01)
        return ""


def main(folder: Path, address: str | None) -> None:
    """Run the groups one after the other."""
    import ray

    if address is None:
        ray.init(num_cpus=SIZE, include_dashboard=False, _temp_dir=str(folder / "ray"), resources={"a": SIZE})
    else:
        ray.init(address=address)
    places = ["a", "a", "a" if address is None else "b"]
    actor = ray.remote(max_restarts=0, num_cpus=1)(Member)
    members = [actor.options(resources={place: 1}).remote() for place in places]

    def enter(name: str, ranks: list[int]) -> list[str]:
        found: list[str] = ray.get(
            [members[m].enter.remote(len(ranks), r, name) for r, m in enumerate(ranks)]
        )
        return found

    seen: dict[str, Any] = {"entered": enter("default", [0, 1, 2])}
    seen["default"] = ray.get([each.operate.remote("default") for each in members])
    seen["entered part"] = enter("part", [2, 0])
    seen["part"] = ray.get([members[m].operate.remote("part") for m in (2, 0)])
    seen["mistakes"] = ray.get([each.mistakes.remote("default") for each in members])
    ray.get([members[m].leave.remote("part") for m in (2, 0)])
    ray.get([each.leave.remote("default") for each in members])
    seen["entered again"] = enter("default", [1, 2, 0])
    seen["again"] = ray.get([members[m].operate.remote("default") for m in (1, 2, 0)])
    ray.get([each.leave.remote("default") for each in members])
    seen["entered apart"] = enter("default", [0, 1]) + enter("default", [2])
    seen["entered across"] = enter("across", [2, 0])
    ray.get([each.leave.remote("default") for each in members])
    seen["entered last"] = enter("default", [1, 2, 0])
    calls = [each.reduce_until_lost.remote("default", n == 2) for n, each in enumerate(members)]
    seen["lost"] = []
    for call in calls:
        answers: list[str] = []
        kind = error_of(lambda: answers.append(ray.get(call))).partition(":")[0]  # noqa: B023 - called here
        seen["lost"].append(kind or answers[0])
    (folder / "seen.json").write_text(json.dumps(seen))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
