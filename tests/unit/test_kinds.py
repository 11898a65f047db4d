"""A kind of operation is a row of one table. What else it needs is listed here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

import mcr_plus as mcr
from mcr_plus.backends.gloo.operations import GlooOperations
from mcr_plus.backends.mpi.channel import MpiChannel
from mcr_plus.backends.mpi.collectives import Collectives
from mcr_plus.backends.nccl.channel import NcclChannel
from mcr_plus.backends.shm import collectives_state as kernels
from mcr_plus.backends.shm.backend import MscclBackend, kernel_of
from mcr_plus.communicator.calls import BUILDERS
from mcr_plus.compression.codec import ENCODED
from mcr_plus.core.kinds import COLLECTIVES, KINDS, PLAIN, VECTOR, Collective, plain_kind
from mcr_plus.core.message import Signature
from mcr_plus.tables.scaling import algorithms
from mcr_plus.torch_backend.process_group import McrProcessGroup

ROOT = Path(__file__).parents[2]
BINDERS: dict[str, list[type]] = {
    "gloo": [GlooOperations],
    "mpi": [Collectives, MpiChannel],
    "nccl": [NcclChannel],
}


def missing(row: Collective) -> list[str]:
    """Return the places that do not know a kind."""
    kinds = [row.kind, *([row.vector] if row.vector else [])]
    backends = (ROOT / "docs" / "adding-a-backend.md").read_text()
    conformance = (ROOT / "tests" / "jobs" / "operations" / "conformance.py").read_text()
    oracle = (ROOT / "tests" / "unit" / "msccl" / "msccl_oracle.py").read_text()
    messages = row.kind in ("send", "recv")
    methods = {row.kind, row.msccl, row.torch} & vars(McrProcessGroup).keys()
    needed = {
        f"Communicator.{row.torch}": hasattr(mcr.Communicator, row.torch),
        f"mcr.{row.torch}": hasattr(mcr, row.torch),
        f"communicator.calls.BUILDERS: {row.torch}": row.torch in BUILDERS,
        f"tests/unit/msccl/msccl_oracle.py: {row.msccl}": not row.msccl or f'"{row.msccl}"' in oracle,
        f"torch_backend.process_group: {row.torch}": bool(methods) or not hasattr(dist, row.torch),
        f"docs/adding-a-backend.md: {row.kind}": row.kind in backends,
        f"tests/jobs/operations/conformance.py: {row.kind}": row.kind in conformance or row.kind == "barrier",
        **{f"compression.codec.ENCODED: {kind}": kind in ENCODED or kind == "barrier" for kind in kinds},
        **{f"core.kinds.Kind: {kind}": kind in KINDS for kind in kinds},
        **{
            f"backend {backend}: _{kind}": any(hasattr(binder, f"_{kind}") for binder in binders)
            for backend, binders in BINDERS.items()
            for kind in kinds
        },
        **{
            f"backend shm: collectives_state.{kind.upper()}": messages or kernel_of(kind) is not None
            for kind in kinds
        },
    }
    return [place for place, known in needed.items() if not known]


@pytest.mark.parametrize("row", COLLECTIVES.values(), ids=PLAIN)
def test_everything_that_a_kind_needs_is_there(row: Collective) -> None:
    assert missing(row) == []


SCAN = Collective("scan", reduces=True, mpi="scan", torch="scan")  # type: ignore[arg-type]


def test_missing_parts_of_a_new_row_are_listed() -> None:
    """Ten files of the library: `mcr.scan` stands in `__init__` and in `api/collectives`.

    `tuning/operations.py` has to know its results before `mcr-plus tune` measures it.
    """
    assert missing(SCAN) == [
        "Communicator.scan",
        "mcr.scan",
        "communicator.calls.BUILDERS: scan",
        "docs/adding-a-backend.md: scan",
        "tests/jobs/operations/conformance.py: scan",
        "compression.codec.ENCODED: scan",
        "core.kinds.Kind: scan",
        "backend gloo: _scan",
        "backend mpi: _scan",
        "backend nccl: _scan",
        "backend shm: collectives_state.SCAN",
    ]


def test_a_row_that_algorithm_files_or_torch_have_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    without = missing(SCAN)
    monkeypatch.setattr(dist, "scan", object(), raising=False)
    assert [place for place in missing(replace(SCAN, msccl="scan")) if place not in without] == [
        "tests/unit/msccl/msccl_oracle.py: scan",
        "torch_backend.process_group: scan",
    ]


def test_shared_memory_refuses_a_kind_without_a_kernel() -> None:
    support = MscclBackend.supports(Signature("scan", None, (4,), 16, "world", 2, "cpu"))  # type: ignore[arg-type]
    assert support.level == "no"
    assert support.how.startswith("scan; msccl has all_reduce, broadcast, ")


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("all_to_all_v", kernels.EXCHANGE), ("scatter_v", kernels.EXCHANGE), ("all_gather_v", kernels.SHARE),
        ("gather_v", kernels.SHARE), ("reduce_scatter_v", kernels.REDUCE_SCATTER_V),
        ("all_reduce", kernels.ALL_REDUCE), ("barrier", kernels.BARRIER), ("send", None), ("scan", None),
    ],
)  # fmt: skip
def test_kernels_of_shared_memory(kind: str, number: int | None) -> None:
    assert kernel_of(kind) == number


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_rounds_for_scaling(kind: str) -> None:
    assert algorithms(kind, "mpi")


def test_every_kind_has_a_row() -> None:
    assert {plain_kind(kind) for kind in KINDS} == set(PLAIN)
    assert {kind for kind in KINDS if kind.endswith("_v")} == VECTOR
