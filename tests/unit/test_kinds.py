"""A kind of operation is a row of one table. What else it needs is listed here."""

from __future__ import annotations

from pathlib import Path

import pytest

import mcr_plus as mcr
from mcr_plus.backends.gloo.channel import GlooChannel
from mcr_plus.backends.mpi.channel import MpiChannel
from mcr_plus.backends.mpi.collectives import Collectives
from mcr_plus.backends.nccl.channel import NcclChannel
from mcr_plus.communicator.calls import BUILDERS
from mcr_plus.core.kinds import COLLECTIVES, KINDS, PLAIN, VECTOR, Collective, plain_kind
from mcr_plus.msccl.algorithm import COLLECTIVES as IN_FILES

ROOT = Path(__file__).parents[2]
BINDERS: dict[str, list[type]] = {
    "gloo": [GlooChannel],
    "mpi": [Collectives, MpiChannel],
    "nccl": [NcclChannel],
}


def missing(row: Collective) -> list[str]:
    """The places that do not know a kind."""
    kinds = [row.kind, *([row.vector] if row.vector else [])]
    backends = (ROOT / "docs" / "adding-a-backend.md").read_text()
    conformance = (ROOT / "tests" / "support" / "conformance.py").read_text()
    needed = {
        f"Communicator.{row.torch}": hasattr(mcr.Communicator, row.torch),
        f"mcr.{row.torch}": hasattr(mcr, row.torch),
        f"communicator.calls.BUILDERS: {row.torch}": row.torch in BUILDERS,
        f"msccl.algorithm.COLLECTIVES: {row.msccl}": row.msccl in ("", *IN_FILES),
        f"docs/adding-a-backend.md: {row.kind}": row.kind in backends,
        f"tests/support/conformance.py: {row.kind}": row.kind in conformance or row.kind == "barrier",
        **{f"core.kinds.Kind: {kind}": kind in KINDS for kind in kinds},
        **{
            f"backend {backend}: _{kind}": any(hasattr(binder, f"_{kind}") for binder in binders)
            for backend, binders in BINDERS.items()
            for kind in kinds
        },
    }
    return [place for place, known in needed.items() if not known]


@pytest.mark.parametrize("row", COLLECTIVES.values(), ids=PLAIN)
def test_everything_that_a_kind_needs_is_there(row: Collective) -> None:
    assert missing(row) == []


def test_a_new_row_is_told_what_it_needs() -> None:
    row = Collective("scan", reduces=True, msccl="scan", mpi="scan", torch="scan")  # type: ignore[arg-type]
    assert missing(row) == [
        "Communicator.scan",
        "mcr.scan",
        "communicator.calls.BUILDERS: scan",
        "msccl.algorithm.COLLECTIVES: scan",
        "docs/adding-a-backend.md: scan",
        "tests/support/conformance.py: scan",
        "core.kinds.Kind: scan",
        "backend gloo: _scan",
        "backend mpi: _scan",
        "backend nccl: _scan",
    ]


def test_every_kind_has_a_row() -> None:
    assert {plain_kind(kind) for kind in KINDS} == set(PLAIN)
    assert {kind for kind in KINDS if kind.endswith("_v")} == VECTOR
