"""Log lines while ranks wait for others, and in processes that are not ranks of one job."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.core.c10d import FileStore, HashStore, PrefixStore
from mcr_plus.core.environment import LaunchEnvironment
from mcr_plus.core.group import Group
from mcr_plus.core.job_store import JobStore
from mcr_plus.errors import LaunchError
from mcr_plus.job import init
from mcr_plus.rendezvous import store, wait_messages
from mcr_plus.rendezvous.store_connections import place_of
from mcr_plus.rendezvous.store_namespaces import unused_part


def test_ranks_that_wait_say_who_has_come_and_who_is_awaited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_messages, "_FIRST", 0.2)
    meeting = HashStore()

    def come(rank: int) -> None:
        with pytest.raises(LaunchError, match="did not call init"):
            unused_part(meeting, rank, 4, 3.0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (2, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.5)
    for thread in threads:
        thread.join()
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("rank 2 of 4 has come to ") and "waits for rank 0" in line for line in said)
    assert any("ranks 0, 2 of 4 arrived at" in line and "awaited: ranks 1, 3, for" in line for line in said)
    assert 2 <= len(said) <= 12  # with growing pauses


def test_ranks_that_meet_in_a_file_say_in_which(tmp_path: Path) -> None:
    file = str(tmp_path / "meeting")
    assert place_of(JobStore(PrefixStore("job", FileStore(file, 1)))) == file
    assert place_of(JobStore(HashStore())) == "the job's store"


def test_ranks_that_open_a_group_say_who_is_awaited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_messages, "_FIRST", 0.1)
    meeting, ranks = JobStore(HashStore(), timeout=60.0, lost=lambda: None), (4, 2, 7)

    def come(rank: int) -> None:
        group = Group("pair", ranks, rank)
        assert store.exchange(meeting, rank, 3, "opened", str(rank), 60.0, group=group) == ["0", "1", "2"]

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (1, 0, 2)]
    for thread in threads:
        thread.start()
        time.sleep(0.4)
    for thread in threads:
        thread.join()
    said = [record.getMessage() for record in caplog.records]
    where = "waits in the opening of group 'pair' for"
    assert said[0].startswith(f"rank 2 {where} ranks 4, 7, for 0 s")
    assert any(line.startswith(f"rank 4 {where} rank 7, for") for line in said)
    assert not any(line.startswith("rank 7") for line in said)


@pytest.mark.parametrize(("backend", "call"), [("shm", "new_group"), ("gloo", "sync")])
def test_ranks_that_set_up_say_who_is_awaited(backend: str, call: str) -> None:
    first, second = run_ranks(setting_up, 2, args=[backend, call], via="torch")
    assert any(line.startswith(f"rank 0 waits in {call} for rank 1, for") for line in first.value)
    assert second.value == []


def setting_up(backend: str, call: str) -> list[str]:
    """Run on ranks: rank 1 comes late to `new_group` or `sync`."""
    comm = mcr.init(backends=[backend])
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcr_plus").addHandler(handler)
    with mock.patch.object(wait_messages, "_FIRST", 0.2 if comm.rank == 0 else 60.0):
        time.sleep(2.0 * comm.rank)
        if call == "sync":
            mcr.sync({"w": torch.ones(3)}, src=0)
        else:
            mcr.new_group([1, 0])
    mcr.finalize()
    return [line for line in said if " waits in " in line]


def test_a_rank_that_finds_no_store_says_where_it_looks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, unused_port: int
) -> None:
    monkeypatch.setattr(wait_messages, "_FIRST", 0.2)
    place = LaunchEnvironment(1, 2, 1, 2, "env", "127.0.0.1", unused_port, False)
    with pytest.raises(LaunchError):
        store.open_plain_store(place, 2.0)
    assert f"rank 1 of 2 cannot connect to 127.0.0.1:{unused_port}, where rank 0 should listen" in caplog.text


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_a_process_of_multiprocessing_without_a_rank_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = LaunchEnvironment(0, 1, 0, 1, "single", None, None, False)
    init._warn_of_siblings(single)
    assert caplog.text == ""
    monkeypatch.setattr("multiprocessing.process.parent_process", lambda: object())
    init._warn_of_siblings(LaunchEnvironment(0, 1, 0, 1, "torchrun", None, None, False))
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        init._warn_of_siblings(single)
    assert "is a job of one rank: no RANK and WORLD_SIZE are set" in caplog.text


@pytest.mark.parametrize(("nodes", "told"), [("1", False), ("2", True), ("1:4", True)])
def test_a_process_in_one_of_several_pods_without_a_rank_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, nodes: str, told: bool
) -> None:
    monkeypatch.setenv("PET_NNODES", nodes)
    with caplog.at_level(logging.WARNING):
        init._warn_of_siblings(LaunchEnvironment(0, 1, 0, 1, "single", None, None, False))
        init._warn_of_siblings(LaunchEnvironment(0, 1, 0, 1, "torchrun", None, None, False))
    assert caplog.text.count(f"PET_NNODES={nodes}, but this is a job of one rank") == int(told)
