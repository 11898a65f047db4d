"""Payloads that change on their way or in memory: real libraries on real ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.reliability import verify_jobs as jobs
from ports import free_ports
from ranks import run_ranks

import mcr_plus as mcr

LIBRARIES = ["gloo", "msccl", "mpi"]
HERE = Path(__file__).parent


def values(target: Any, ranks: int, backend: str, *args: Any, **options: Any) -> list[Any]:
    results = run_ranks(
        target, ranks, via="mpi" if backend == "mpi" else "torch", args=[backend, *args], **options
    )
    return [each.value for each in results]


@pytest.mark.short("2-msccl")
@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_flipped_bit_is_found_on_all_ranks_alike(backend: str, ranks: int) -> None:
    every = list(zip(*values(jobs.many_flips, ranks, backend, 17 + ranks, 150), strict=True))
    flips = 0
    for each in every:
        kind, raised = each[0][0], [one[5] for one in each]
        if any(one[4] for one in each):
            flips += 1
            (operation, source, rank, library, block) = raised[0]
            assert all(one == raised[0] for one in raised), each
            assert (operation, library) == (kind, backend)
            assert 0 <= source < ranks
            assert 0 <= rank < ranks
            assert block is not None
        else:
            assert not any(raised), each
    assert flips > 50


@pytest.mark.long
@pytest.mark.parametrize("backend", ["gloo", "msccl"])
def test_bits_that_flip_in_any_piece_of_a_large_operation_are_found(backend: str) -> None:
    every = list(zip(*values(jobs.flips_in_pieces, 3, backend, 23, 60), strict=True))
    flips, blocks = 0, set()
    for each in every:
        raised = [one[5] for one in each]
        assert all(one == raised[0] for one in raised), each
        assert bool(raised[0]) == any(one[4] for one in each), each
        if raised[0]:
            flips += 1
            blocks.add(raised[0][4])
    assert flips > 15
    assert len(blocks) > 2


@pytest.mark.long
@pytest.mark.parametrize("backend", ["gloo", "msccl"])
def test_operations_in_pieces_have_the_right_results(backend: str) -> None:
    for right in values(jobs.in_pieces, 3, backend):
        assert right == [True] * 80


@pytest.mark.parametrize("backend", LIBRARIES)
def test_damaged_messages_are_found_by_their_receivers(backend: str) -> None:
    found = values(jobs.many_messages, 2, backend, 5, 60)
    assert sum(flips for _, flips in found) > 20
    for received, _ in found:
        for place, source, rank, raised in received:
            assert raised == ([source, rank, backend] if place in ("sent", "arrived") else []), place


# Messages of up to 1024 values carry their checksum over MPI.
@pytest.mark.long
@pytest.mark.parametrize(("sent", "wanted"), [(4, 5), (4, 5000), (1026, 1024)])
def test_a_message_of_another_size_is_told(sent: int, wanted: int) -> None:
    _, (error, text) = values(jobs.mismatched_message, 2, "mpi", sent, wanted)
    assert error == "OrderMismatch"
    assert f"rank 0 issued send float32[{sent}] ({4 * sent} bytes)" in text
    assert f"recv float32[{wanted}]" in text


@pytest.mark.long
@pytest.mark.parametrize("backend", LIBRARIES)
def test_calls_of_a_program_raise_the_same_error(backend: str) -> None:
    first, second = values(jobs.through_the_api, 2, backend)
    for mine, theirs in zip(first, second, strict=True):
        name, error, rank, source, library, block, group, text = theirs
        assert mine[:7] == theirs[:7]
        assert (error, rank, library, group) == ("DataCorrupted", 1, backend, "world"), name
        assert source in (0, 1)
        assert f"block {block} " in text


@pytest.mark.parametrize("backend", LIBRARIES)
def test_every_third_operation_of_a_signature_is_verified(backend: str) -> None:
    for found in values(jobs.one_in_three, 2, backend):
        assert found == {"collectives": [3, 6, 9], "messages": [3, 6, 9], "off by rule": [], "sums": True}


def test_ranks_of_several_hosts_exchange_checksums_by_the_library() -> None:
    for found in values(jobs.on_two_hosts, 2, "gloo"):
        assert found["rows"] == ["LibraryRows"]
        assert found["raised"] == ["", "", "DataCorrupted", "checksums"]


@pytest.mark.parametrize("backend", LIBRARIES)
def test_different_operations_are_no_damaged_data(backend: str) -> None:
    for error, text in values(jobs.other_roots, 2, backend):
        assert error == "OrderMismatch"
        assert "root=0" in text
        assert "root=1" in text


@pytest.mark.long
def test_bits_that_flip_on_the_wire_are_found(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler, for a library that changes what gloo sends")
    library, log = tmp_path / "flip.so", tmp_path / "flips"
    source = HERE / "flip_on_wire.c"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    env = {
        **os.environ, "LD_PRELOAD": str(library), "FLIP_AFTER": "5", "FLIP_LOG": str(log), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    words = [sys.executable, str(HERE / "verify_on_wire.py"), "78", str(log)]
    ranks = [
        subprocess.Popen(
            words, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    outputs = [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]
    assert outputs[0] == outputs[1]
    assert sum(flips for _, flips, _ in outputs[0]) >= 10
    for kind, flips, raised in outputs[0]:
        assert bool(raised) == bool(flips), (kind, flips, raised)


def test_ranks_that_verify_meet_none_that_do_not() -> None:
    results = run_ranks(jobs.configured_unlike, 2, via="torch", check=False)
    for each in results:
        assert each.value is not None, each.stderr[-2000:]
        assert each.value[0] == "ConfigError", each.value
        assert "differs between ranks: rank 0 and ranks [1]" in each.value[1]
        assert re.search(r"in pipeline\[\d\]\.dispatch\.verify: '\w+' and '\w+'; all", each.value[1])


def test_an_algorithm_that_moves_data_runs_as_it_is() -> None:
    for found in values(jobs.by_an_algorithm, 2, "msccl"):
        assert found == [["ring"], [1.0] * 3 + [2.0] * 3]


@pytest.mark.parametrize("backend", ["gloo", "msccl"])
def test_a_dead_rank_is_told_as_ever(backend: str) -> None:
    results = run_ranks(jobs.after_a_death, 3, via="torch", args=[backend], check=False)
    assert [each.value for each in results] == [[[2]], [[2]], None]


@pytest.mark.parametrize("value", ["always", -1, 1.5, True])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(mcr.ConfigError, match="expected every, off or a number") as caught:
        mcr.explain("all_reduce", "1MiB", config=jobs.config("gloo", verify=value))
    assert ("got True (true, yes or on in YAML)" in str(caught.value)) == (value is True)


def test_failover_is_refused_beside_it() -> None:
    with pytest.raises(mcr.ConfigError, match="cannot be used with `failover: true`"):
        mcr.explain("all_reduce", "1MiB", config=jobs.config("gloo", "msccl", failover=True))


def test_explain_names_it() -> None:
    told = str(mcr.explain("all_reduce", "1MiB", config=jobs.config("gloo"))["steps"])
    assert "every verified by checksums" in told
    assert "as exchange, local reduction and gathering" in told
    told = str(mcr.explain("broadcast", "1MiB", config=jobs.config("gloo", verify=20))["steps"])
    assert "1 in 20 verified by checksums of sent and received data" in told
    assert "verified" not in str(
        mcr.explain("broadcast", "1MiB", config=jobs.config("gloo", verify="off"))["steps"]
    )


def test_nothing_is_bound_while_it_is_off() -> None:
    assert values(jobs.channels_without, 2, "gloo") == [["GlooChannel", True, 0]] * 2


def test_errors_of_other_ranks_keep_their_facts() -> None:
    error = mcr.DataCorrupted("text: with a colon", "all_reduce SUM", 2, 1, "gloo", 7, "world")
    again = mcr.DataCorrupted.relayed(error.passed_on, "relayed")
    assert again is not None
    assert vars(again) | {"passed_on": ""} == vars(error) | {"passed_on": ""}
    assert mcr.DataCorrupted.relayed(error.passed_on[:20], "cut") is not None
    assert mcr.DataCorrupted.relayed("OrderMismatch: something", "") is None
    assert torch.equal(torch.tensor(again.rank), torch.tensor(2))
