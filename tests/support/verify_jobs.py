"""Jobs whose payloads change on the way: what ranks run, for tests/jobs/test_verify.py."""

from __future__ import annotations

from typing import Any

import torch

import mcr_plus as mcr


def config(*backends: str, verify: Any = "every", **options: Any) -> dict[str, Any]:
    """A pipeline with verification."""
    dispatch = {"verify": verify, "timeout": "20s", **options}
    return {"version": 1, "backends": list(backends), "pipeline": [{"select": {}}, {"dispatch": dispatch}]}


def smoke(backend: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    with mcr.init(config(backend)) as comm:
        for size in (2, 5000, 100_000):
            x = torch.arange(size, dtype=torch.float32) + comm.rank
            comm.all_reduce(x)
            assert x[1] == sum(range(comm.size)) + comm.size
        return {"x": float(x[1])}
