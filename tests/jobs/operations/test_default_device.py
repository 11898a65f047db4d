"""Programs with another default device communicate CPU tensors as usual.

The device is torch's `meta`: its tensors have no values, so a tensor made there by mistake is found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from jobs.operations import behaviour, conformance
from ranks import run_ranks
from reference import Failures, difference
from torch import nn

import mcr_plus as mcr
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

SECTIONS = (
    "compressed",
    "messages",
    "objects",
    "persistent",
    "overlapping",
    "handles",
    "groups",
)


def under_another_device(backends: list[str]) -> dict[str, Any]:
    torch.set_default_device("meta")
    failures = Failures()
    for name in SECTIONS:
        with mcr.init(backends=backends, timeout=30) as comm:
            behaviour.SECTIONS[name](comm, backends, failures)
    with mcr.init(backends=backends, timeout=30) as comm:
        groups = conformance.make_groups(comm)
        conformance.run_table(list(conformance.every_type(backends, list(groups)))[::29], groups, failures)
        for codec in ("int8_block", "int4_block", "sign1", "topk", "randk", "int_shared", "exp_window"):
            tensor = torch.full((1000,), float(comm.rank + 1), device="cpu")
            comm.all_reduce(tensor, compress={"codec": codec})
            total = comm.size * (comm.size + 1) / 2
            if codec not in ("topk", "randk"):
                failures.check(codec, difference(tensor, np.full(1000, total), 0.02 * total))
        _train(comm, failures)
    return failures.report()


def _train(comm: mcr.Communicator, failures: Failures) -> None:
    model = nn.Linear(5, 3, device="cpu")
    nn.init.ones_(model.weight)
    model, _ = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.full((2, 5), float(comm.rank + 1), device="cpu")).sum().backward()
    mean = (comm.size + 1) / 2
    assert model.weight.grad is not None
    failures.check("mcr.wrap", difference(model.weight.grad, np.full((3, 5), 2 * mean)))


@pytest.mark.short("mpi")
@pytest.mark.parametrize("backend", ["gloo", "msccl", "mpi"])
def test_cpu_tensors_under_another_default_device(backend: str) -> None:
    if backend == "mpi" and not mpi_usable():
        pytest.skip("needs mpi4py and an MPI launcher")
    via: Any = "mpi" if backend == "mpi" else "torch"
    backends = [backend] if backend == "mpi" else [backend, *({"gloo"} - {backend})]
    for result in run_ranks(under_another_device, 2, args=[backends], via=via):
        assert result.value["failures"] == []
        assert result.value["cases"] > 500
