"""Examples that spread layers and experts: with `sums`, losses have the same bits over libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example_runs import TINY, launch

from mcr_plus.rendezvous.mpi_launcher import mpi_usable

WORDS = {
    "gpt": ("--layers", "2", "--tensor-parallel"),
    "moe": ("--layers", "2", "--experts", "6"),
}
TABLE = """\
version: 1
rules:
  - {kind: all_reduce, bytes: 0..4KiB, backend: gloo}
  - {kind: all_reduce, bytes: 4KiB.., backend: "msccl:ring"}
"""


@pytest.mark.long
@pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
@pytest.mark.parametrize("example", WORDS)
def test_examples_have_the_same_losses_over_libraries_and_tables(example: str, tmp_path: Path) -> None:
    (tmp_path / "tuned.yaml").write_text(TABLE)
    table = [{"select": {"table": "tuned.yaml"}}, {"dispatch": {}}]
    ways: dict[str, dict[str, Any]] = {
        **{name: {"backends": [name]} for name in ("msccl", "gloo", "mpi")},
        "table": {"backends": ["msccl", "gloo"], "pipeline": table},
        "fast": {"backends": ["gloo"], "numerics": {"sums": "fast"}},
    }
    losses: dict[str, Any] = {}
    for name, config in ways.items():
        file, path = tmp_path / f"{name}.yaml", tmp_path / f"{name}.json"
        file.write_text(json.dumps({"version": 1, "numerics": {"sums": "fixed"}, **config}))
        given = (*TINY, "--hidden", 18, "--heads", 3, *WORDS[example], "--config", file, "--json", path)
        done = launch(example, *given, ranks=3)
        assert done.returncode == 0, done.stdout + done.stderr
        losses[name] = json.loads(path.read_text())["train_loss"]["steps"]
    assert len(losses["msccl"]) == 6
    assert [name for name in losses if losses[name] != losses["msccl"]] == ["fast"]
