"""Programs of other libraries train on the backend `mcr` with the results of gloo."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch.distributed as dist
from ranks import run_ranks
from torch_features import FSDP2_ON_CPU

from mcr_plus.core.c10d import TORCH

FOLDER: Final = Path(__file__).parent
GOES_BY_GLOO: Final = ("with_accelerate", "with_trl")  # they take no other name
EXACT: Final = ("with_megatron", "with_torchtitan")  # each sum has two addends
TOGETHER: Final = ("ddp", "fsdp", "pipelining", "tensor")  # started once
NEEDS: Final = {
    "with_lightning": ("lightning",),
    "with_accelerate": ("accelerate", "transformers"),
    "with_transformers": ("accelerate", "transformers"),
    "with_deepspeed": ("deepspeed",),
    "with_megatron": ("megatron",),
    "with_torchtitan": ("torchtitan", "spmd_types", "datasets"),
    "with_trl": ("trl", "accelerate", "transformers", "datasets"),
}
DDP: Final = {"all_gather", "broadcast", "all_reduce"}
FSDP: Final = {"all_gather", "reduce_scatter"}
MESSAGES: Final = {"send", "recv"}
CLIENTS: Final[dict[str, dict[str, set[str]]]] = {  # with the kinds of operations that the pipeline sees
    "ddp": {
        **dict.fromkeys(["plain", "unused", "static", "buffers", "views"], DDP),
        **dict.fromkeys(["allreduce_hook", "fp16_hook", "fp16_wrapper", "powersgd_hook"], DDP),
        **dict.fromkeys(["no_sync", "join", "join_counted", "zero"], DDP),
    },
    "fsdp": {
        **dict.fromkeys(["fsdp2", "fsdp2_mixed", "fsdp1"], FSDP),
        **dict.fromkeys(["fsdp2_clipped", "fsdp1_clipped"], FSDP | {"all_reduce"}),
        **dict.fromkeys(["checkpoint", "async_checkpoint"], FSDP | {"gather", "scatter"}),
    },
    "pipelining": {
        **dict.fromkeys(["gpipe", "1f1b", "interleaved", "looped_bfs", "zero_bubble", "zbv"], MESSAGES),
    },
    "tensor": {
        "dtensor": {"scatter", "all_gather", "reduce_scatter", "all_reduce"},
        "dtensor_matmul": {"all_reduce"},
        "tensor_parallel": {"all_reduce"},
        "sequence_parallel": FSDP,
        "mesh": {"all_reduce"},
        "compile": FSDP | {"all_reduce"},
        "compile_ddp": DDP,
    },
    "with_lightning": {"trainer": DDP},
    "with_accelerate": {"accelerator": DDP, "trainer": DDP},
    "with_transformers": {"decode": {"all_reduce", "all_gather"}},
    "with_deepspeed": {
        **dict.fromkeys(["zero0", "zero1", "zero2"], DDP - {"all_gather"}),
        "zero3": {"broadcast", *FSDP},
    },
    "with_megatron": {"layers": {"all_reduce"}, "layers_adam": {"all_reduce"}},
    "with_torchtitan": {"tensor_parallel": {*FSDP, "all_reduce"}, "fsdp": FSDP},
    "with_trl": {"sft": DDP},
}
OF_FSDP2: Final = ("fsdp2", "fsdp2_mixed", "fsdp2_clipped", "checkpoint", "async_checkpoint")
if not FSDP2_ON_CPU:
    for name in OF_FSDP2:
        del CLIENTS["fsdp"][name]
if TORCH < (2, 7):  # other schedules wait forever over gloo there, or fail
    CLIENTS["pipelining"] = {"gpipe": MESSAGES}
ALL: Final = [(program, client) for program, clients in CLIENTS.items() for client in clients]

Results = dict[tuple[str, int], Any]


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return the clients of `TOGETHER` that this run of pytest tests."""
    tests = (each for each in request.session.items if isinstance(each, pytest.Function))
    params = [each.callspec.params for each in tests if each.function is test_client_trains_as_on_gloo]
    asked = {(each["program"], each["client"]) for each in params}
    return tuple(client for program, client in ALL if program in TOGETHER and (program, client) in asked)


@cache
def results(program: str, backend: str, names: tuple[str, ...], ranks: int = 2) -> Results:
    """Return each rank's report on each client of a program, or the error; launch it once if it succeeds."""
    found: Results = {}
    while left := [name for name in names if (name, 0) not in found]:
        said, log = launch(program, backend, left, ranks)
        whole = {name for name in left if all((name, rank) in said for rank in range(ranks))}
        found |= {key: value for key, value in said.items() if key[0] in whole}
        failed = [name for name in left if name not in whole][: 1 if whole else None]
        found |= {(name, rank): log for name in failed for rank in range(ranks)}
    return found


def launch(program: str, backend: str, names: list[str], ranks: int) -> tuple[Results, str]:
    """Launch a program; return the reports of its ranks and all its output."""
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    }
    if program in NEEDS:
        printed = under_torchrun(program, backend, names, ranks, settings)
    else:
        args = [program, backend, *names]
        ended = run_ranks(
            "clients.job:run", ranks, args=args, via="torch", env=settings, timeout=600, check=False
        )
        # A stream may end in the middle of a line, like nanobind's reports at exit.
        printed = "\n".join(text for result in ended for text in (result.stdout, result.stderr))
    said = [json.loads(line) for line in printed.splitlines() if line.startswith('{"client"')]
    return {(one["client"], one["rank"]): one for one in said}, printed[-6000:]


def under_torchrun(program: str, backend: str, names: list[str], ranks: int, settings: dict[str, str]) -> str:
    """Test libraries that check how they were started: torchrun starts them, as they expect."""
    if program in GOES_BY_GLOO and backend == "mcr":
        settings["MCR_MASQUERADE"] = "gloo"
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
            *(str(FOLDER / f"{program}.py"), backend, *names),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=600,
    ).stdout  # fmt: skip


def outcomes(
    program: str, client: str, backend: str, ranks: int = 2, started: tuple[str, ...] = ()
) -> Iterator[Any]:
    """Return each rank's report on a client; `started`: the clients of `TOGETHER` in one job."""
    missing = [name for name in NEEDS.get(program, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    if client not in CLIENTS.get(program, ()):
        found = results(program, backend, (client,), ranks)
    elif program in TOGETHER:
        found = results("core", backend, started)
    else:
        found = results(program, backend, tuple(CLIENTS[program]))
    for rank in range(ranks):
        outcome = found[client, rank]
        assert isinstance(outcome, dict), outcome
        yield outcome


@pytest.mark.short(
    "ddp-plain",
    "ddp-no_sync",
    "ddp-join-",
    "ddp-zero",
    "ddp-powersgd_hook",
    "fsdp-",
    "pipelining-gpipe",
    "tensor-dtensor-",
    "tensor-tensor_parallel",
    "tensor-mesh",
    "with_",
)
@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("backend", ["gloo", "mcr"])
@pytest.mark.parametrize(("program", "client"), ALL)
def test_client_trains_as_on_gloo(program: str, client: str, backend: str, started: tuple[str, ...]) -> None:
    same_as_gloo(program, client, backend, CLIENTS[program][client], started=started)


@pytest.mark.slow
def test_hybrid_sharding_on_four_ranks() -> None:
    same_as_gloo("fsdp", "hsdp", "mcr", {*FSDP, "all_reduce"}, ranks=4)


def same_as_gloo(
    program: str, client: str, backend: str, kinds: set[str], ranks: int = 2, started: tuple[str, ...] = ()
) -> None:
    expected = [outcome["losses"] for outcome in outcomes(program, client, "gloo", ranks, started)]
    for losses, outcome in zip(expected, outcomes(program, client, backend, ranks, started), strict=True):
        assert losses
        assert all(map(math.isfinite, losses))
        assert outcome["losses"] == (losses if program in EXACT else pytest.approx(losses, rel=1e-6))
        assert outcome["operations"].keys() >= (kinds if backend == "mcr" else set())
        assert outcome["operations"] or backend == "gloo"


@pytest.mark.short("static")
@pytest.mark.parametrize("graph", ["dynamic", "static"])
def test_a_backward_pass_that_fails_raises(graph: str) -> None:
    found = results("failing", "mcr", ("dynamic", "static"))
    for rank in range(2):
        assert isinstance(found[graph, rank], dict), found[graph, rank]
        assert found[graph, rank]["losses"] == [1.0]
