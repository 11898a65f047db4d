"""`mcr.sync` on real ranks: the bits of the source, whatever happens to a receiver."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs.weight_sync import sync_jobs as jobs
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.weight_sync.receiver import AHEAD


@pytest.mark.short("gloo")
@pytest.mark.parametrize("backends", [["gloo"], ["mpi"], ["msccl"]], ids=["gloo", "mpi", "shared memory"])
def test_every_version_arrives_bit_for_bit(backends: list[str]) -> None:
    values = [each.value for each in run_ranks(jobs.in_turns, 3, args=[backends, 6])]
    source = values[0]
    assert source["versions"] == [1, 2, 3, 4, 5, 6]
    for value in values:
        assert value["seen"] == source["seen"]
        assert value["versions"] == source["versions"]
        assert value["stats"]["version"] == 6
        assert value["stats"]["anchors"] == 0, "all began with the same weights"
        assert 0 < value["stats"]["density"] < 0.03
        assert value["stats"]["bytes"] < value["stats"]["dense_bytes"] / 10
        assert "closed" in value["closed"]
        assert all(f"`{key}`" in str(mcr.WeightSync.stats.__doc__) for key in value["stats"])
    assert len({str(each) for each in source["seen"]}) == 6


def test_groups_tags_and_versions() -> None:
    values = [each.value for each in run_ranks(jobs.of_a_group, 3)]
    assert values[1]["pulled"] == [None, None]
    assert values[2]["pulled"] == [7, 100]
    assert values[2]["state"] == values[1]["state"]
    assert values[2]["state"] == {"b": [0, 2, 4, 6, 8, 10], "a": [1, 1, 1]}
    assert "version 100; expected an integer above 100" in values[1]["refused"]


@pytest.mark.long
def test_a_receiver_that_is_late_or_idle_costs_the_source_nothing() -> None:
    results = run_ranks(jobs.late_and_idle, 3)
    source, late, idle = (each.value for each in results)
    assert source["version"] == late["version"] == 40
    assert late["bits"] == source["bits"]
    assert source["most"] <= 0.5 * source["stats"]["dense_bytes"]
    assert late["stats"]["versions_behind"] == 0
    assert idle["version"] == 0
    assert idle["unused"] == AHEAD, "what a program that pulls nothing is sent of 40 versions"
    assert results[2].stderr.count("which has pulled none of them") == 1


def test_a_receiver_far_behind_gets_what_is_there_sooner() -> None:
    _, late = (each.value for each in run_ranks(jobs.far_behind, 2, args=[4_000_037, 7]))
    assert late["wrong"] == 0
    assert late["anchors"] == [1, 1, 1, 2], "at the beginning, and where a version costs a second"
    assert late["costs"][0] == 0, "the time of a version is not known yet"
    assert late["costs"][1] > 0


@pytest.mark.long
def test_damage_is_detected_and_affects_nobody_else() -> None:
    source, damaged, other = (each.value for each in run_ranks(jobs.corrupted, 3, args=[30]))
    assert source["same"] == damaged["same"] == other["same"] == 30
    assert damaged["stats"]["refused"] > 5
    assert damaged["stats"]["anchors"] == damaged["stats"]["refused"]
    assert (other["stats"]["refused"], other["stats"]["anchors"]) == (0, 0)


def test_a_new_sync_sends_changes_where_the_weights_are_those_of_the_source() -> None:
    source, kept, new = (each.value for each in run_ranks(jobs.restarted, 3))
    assert source["bits"] == kept["bits"] == new["bits"]
    assert (kept["stats"]["anchors"], new["stats"]["anchors"]) == (0, 1)
    assert kept["stats"]["bytes"] < new["stats"]["bytes"] / 5


@pytest.mark.long
def test_a_broken_connection_is_made_again() -> None:
    source, first, second = (each.value for each in run_ranks(jobs.reconnected, 3))
    assert source["bits"] == first["bits"] == second["bits"]
    assert first["stats"]["anchors"] == second["stats"]["anchors"] == 0
    assert source["stats"]["lost"] == []


@pytest.mark.short("3-2")
@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (2, 1), (3, 0), (3, 2)])
def test_a_death_is_reported_to_affected_ranks(tmp_path: Path, ranks: int, victim: int) -> None:
    results = run_ranks(jobs.death, ranks, args=[victim, str(tmp_path)], via="torch", check=False)
    left = [each.value for each in results if each.rank != victim]
    assert all(value is not None for value in left), [each.stderr for each in results]
    for value in left:
        assert value["seconds"] < 15
        if victim == 0 or ranks == 2:
            assert value["raised"] == "PeerLost", value
            assert value["lost"] == [victim]
    if ranks == 3 and victim == 2:
        assert left[0]["stats"]["lost"] == [2]
        assert left[0]["raised"] == ""


def test_bad_input_is_refused_on_all_ranks() -> None:
    source, other = (each.value for each in run_ranks(jobs.refusals, 2))
    for here, there in zip(source[:10], other[:10], strict=True):  # a rank's own mistake lacks its number
        assert re.sub(r": rank \d: sync", ": sync", here) == re.sub(r": rank \d: sync", ": sync", there)
    assert "rank 0 has 'a' of shape [3], bfloat16, rank 1 has 'a' of shape [3], float32" in source[0]
    assert "rank 0 has 'b' of shape [2], float32, rank 1 has no more tensors" in source[1]
    assert "'a' is 3; expected tensors alone" in source[2]
    assert "dict has no tensors" in source[3]
    assert "expected a module or a mapping of tensors, got 5" in source[4]
    assert "src=5; expected one of the group's ranks [0, 1]" in source[5]
    assert "tag=''; expected a name" in source[6]
    assert "history=-1" in source[7]
    assert "rank 0: sync: receivers cannot connect to 127.0.0.1: Cannot assign" in other[8]
    assert "tag 'policy' is in use in group 'world'" in source[9]
    assert "version 0; expected an integer above 0" in source[10]
    assert "timeout=-1; expected seconds" in other[10]
    assert "version '1'" in source[11]
    assert other[11].startswith("CommTimeout: sync 'policy' of group 'world': no version newer than 0")
    expected = "at mcr.sync it had 'b' of shape [2], float32, now it has 'b' of shape "
    assert f"{expected}[5], float32" in source[12]
    assert f"{expected}[2], bfloat16" in other[12]


@pytest.mark.long
def test_finalize_ends_the_threads() -> None:
    assert [each.value for each in run_ranks(jobs.threads_after_the_job, 2)] == [[], []]
