"""The backend `msccl` on a library with NCCL's ABI: simulated, for there is no GPU to run one on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msccl_samples as samples
import pytest
import torch
from unit.devices.fake_nccl import FakeStreams, Simulator

from mcr_plus import registry
from mcr_plus.backends import msccl as choice
from mcr_plus.backends.nccl import NcclBackend
from mcr_plus.backends.nccl.abi import Nccl
from mcr_plus.backends.nccl.msccl_library import MscclLibraryBackend
from mcr_plus.backends.shm.backend import MscclBackend
from mcr_plus.config.reader import load
from mcr_plus.core.c10d import HashStore
from mcr_plus.core.group import Group
from mcr_plus.core.job_store import JobStore
from mcr_plus.core.message import Message, Signature
from mcr_plus.errors import BackendUnavailable, ConfigError
from mcr_plus.msccl import catalog
from mcr_plus.msccl.writer import write_algorithm
from mcr_plus.rendezvous.world import World
from mcr_plus.selection.checks import use_algorithms

SUM = Signature("all_reduce", torch.float32, (4,), 16, "world", 2, device="cuda", reduce_op="SUM")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MSCCL_ALGO_DIR", "")  # the setting is undone
    monkeypatch.delenv("MSCCL_ALGO_DIR")
    write_algorithm(samples.ring(2), tmp_path / "mine.xml")
    yield tmp_path
    catalog.use([])


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MCR_MSCCL_LIBRARY", raising=False)
    assert choice.chosen() is MscclBackend
    monkeypatch.setenv("MCR_MSCCL_LIBRARY", "/nowhere/librccl.so")
    assert choice.chosen() is MscclLibraryBackend


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MscclLibraryBackend, "library", "/nowhere/librccl.so")
    with pytest.raises(BackendUnavailable, match=r"/nowhere/librccl\.so"):
        MscclLibraryBackend.library_version()


def test_beside_nccl_in_one_job(folder: Path) -> None:
    catalog.use([folder / "mine.xml"])
    store, simulator = JobStore(HashStore()), Simulator()

    def run(rank: int) -> list[torch.Tensor]:
        streams = FakeStreams(simulator)
        world, group = World(rank, 2, ("host",) * 2, 5.0, store), Group("world", (0, 1), rank)
        results = []
        for kind in (NcclBackend, MscclLibraryBackend):
            backend = kind(world, nccl=Nccl(simulator.library()), streams=lambda: streams)
            value = torch.full((4,), float(rank + 1))
            backend.open(group).bind(SUM)(Message(SUM, (value,), (value,)))
            results.append(value)
        return results

    with ThreadPoolExecutor(2) as pool:
        found = [each for results in pool.map(run, range(2)) for each in results]
    simulator.run()
    assert [value.tolist() for value in found] == [[3.0] * 4] * 4
    assert os.environ["MSCCL_ALGO_DIR"] == str(folder.resolve())


def test_algorithms_in_two_folders(folder: Path) -> None:
    (folder / "more").mkdir()
    write_algorithm(samples.all_pairs(2), folder / "more" / "other.xml")
    catalog.use([folder / "mine.xml", folder / "more" / "other.xml"])
    with pytest.raises(ConfigError, match=r"one folder.*more"):
        MscclLibraryBackend(World(0, 1, ("host",), 5.0), nccl=Nccl(Simulator().library()))


def test_algorithms_of_the_library_cannot_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"rules": [{"match": {"kind": "all_reduce"}, "backend": "msccl:nope"}]}
    with catalog.kept():
        with pytest.raises(ConfigError, match="unknown algorithm 'nope'"):
            use_algorithms(load(named))
        monkeypatch.setitem(registry.BACKENDS, "msccl", MscclLibraryBackend)
        use_algorithms(load(named))


def test_the_library_chooses_its_algorithms() -> None:
    assert MscclLibraryBackend.supports(SUM)
    assert "picks its own" in MscclLibraryBackend.supports(SUM.replace(algorithm="ring")).how
