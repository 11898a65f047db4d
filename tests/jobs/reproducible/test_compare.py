"""Digests of operations, and `mcr-plus compare`: the first operation at which two runs part."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from command import mcr_plus
from ranks import run_ranks

import mcr_plus as mcr

FLIPPED = 0x00000001  # lowest bit of a mantissa


def flip(tensor: torch.Tensor, at: int) -> None:
    """Flip one bit, which few oracles notice."""
    tensor.view(torch.int32)[at] ^= FLIPPED


def begun(folder: str, library: str = "msccl", keep: str | None = None, **more: Any) -> Any:
    digests: Any = folder if keep is None else {"folder": folder, "keep": keep}
    return mcr.init({"version": 1, "backends": [library], "observe": {"digests": digests}, **more})


def values(rank: int, size: int) -> torch.Tensor:
    rng = np.random.default_rng((rank, size))
    return torch.from_numpy(rng.standard_normal(size).astype(np.float32))


def program(folder: str, library: str, flips: bool, keep: str | None) -> int:
    """Issue operations of every kind and manner; `flips`: rank 1 changes the input of one of them."""
    pipeline = [{"fuse": {"bucket": "64KiB"}}, {"compress": {}}, {"select": {}}, {"dispatch": {}}]
    with begun(folder, library, keep, pipeline=pipeline) as comm:
        me, ranks = comm.rank, comm.size
        x = values(me, 5000)
        mcr.all_reduce(x)
        mcr.broadcast(torch.full((7,), float(me)) if me else torch.ones(7), 0)
        scratch = torch.full((9,), float(np.random.default_rng().random()))  # what broadcast overwrites
        mcr.broadcast(scratch if me != 1 else torch.ones(9), 1)
        mcr.all_gather_object({"time": np.random.default_rng().random()})
        again = mcr.persistent("all_reduce", x)
        again()
        again.start().wait()
        works = [mcr.all_reduce(part, async_op=True, tag="parts") for part in x.split(700)]
        for work in reversed(works):
            assert work is not None
            work.wait()
        mcr.all_reduce(x, compress="bf16", tag="coded")
        group = mcr.new_group(list(range(ranks)))
        y = values(me, 1001)
        thread = threading.Thread(target=lambda: (group.take_over(), [group.all_reduce(y) for _ in range(20)]))
        thread.start()
        for _ in range(20):
            mcr.all_reduce(x, "AVG", tag="beside")
        thread.join()
        if flips and me == 1:
            flip(y, 77)
        group.take_over()
        group.all_reduce(y, "AVG", tag="flipped")
        mcr.isend(y[:40], (me + 1) % ranks)
        mcr.recv(x[:40], (me - 1) % ranks)
        out = torch.empty(ranks * 5000)
        mcr.all_gather_into_tensor(out, x)
        mcr.reduce(out, 0)
        mcr.reduce_scatter_tensor(x, out)
        mcr.barrier()
    return 0


def compared(*words: object) -> tuple[int, dict[str, Any]]:
    answer = mcr_plus("compare", *words, "--json")
    return answer.returncode, json.loads(answer.stdout)


def test_a_flipped_bit_is_named_and_equal_runs_are_equal(tmp_path: Path) -> None:
    one, same, other = (str(tmp_path / name) for name in ("one", "same", "other"))
    run_ranks(program, 3, args=[one, "msccl", False, "world/1#21"])
    run_ranks(program, 3, args=[same, "msccl", False, None])
    run_ranks(program, 3, args=[other, "msccl", True, "world/1#20-22"])
    print(mcr_plus("compare", one, same))
    print(mcr_plus("compare", one, other))
    code, result = compared(one, same)
    assert (code, result["same"], result["first"]) == (0, True, None)
    print(json.dumps(compared(one, other), indent=1))
    assert 0
