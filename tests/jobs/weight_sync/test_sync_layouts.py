"""`mcr.sync` between ranks that hold parts of tensors in different layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs.weight_sync import sync_layout_jobs as jobs
from ranks import run_ranks


@pytest.mark.long
@pytest.mark.parametrize("history", [1.0, 0.0])
def test_three_sources_and_two_receivers_at_their_own_pace(history: float) -> None:
    values = [each.value for each in run_ranks(jobs.at_their_own_pace, 5, args=[30, history])]
    for value in values[3:]:
        assert value["wrong"] == []
        assert value["pulled"] == sorted(value["pulled"])
        assert value["pulled"][-1] == 30
        assert value["stats"]["bytes"] > 0
        if not history:  # with one, the last message may have the changes of several versions
            assert value["stats"]["bytes"] < value["stats"]["dense_bytes"] * 1.1
    assert sum(value["stats"]["dense_bytes"] for value in values[:3]) < sum(
        value["stats"]["dense_bytes"] for value in values[3:]
    ), "what both receivers hold is encoded once"


@pytest.mark.long
def test_damage_and_broken_connections_affect_one_receiver() -> None:
    values = [each.value for each in run_ranks(jobs.damaged_and_broken, 5, args=[24])]
    assert values[3]["good"] == values[4]["good"] == 24
    assert values[3]["stats"]["refused"] > 4
    assert values[3]["stats"]["anchors"] == values[3]["stats"]["refused"]
    assert (values[4]["stats"]["refused"], values[4]["stats"]["anchors"]) == (0, 0)


@pytest.mark.long
def test_a_receiver_with_other_weights_gets_all_of_its_own_alone() -> None:
    values = [each.value for each in run_ranks(jobs.started_again, 5)]
    assert values[3]["good"] == values[4]["good"] == 2
    assert values[3]["stats"]["anchors"] == 0
    assert values[4]["stats"]["anchors"] == 3, "one from each source"
    assert values[3]["stats"]["bytes"] < values[3]["stats"]["dense_bytes"] / 5


@pytest.mark.short("1")
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_death_is_reported_by_rank(tmp_path: Path, victim: int) -> None:
    results = run_ranks(jobs.death, 3, args=[victim, str(tmp_path)], via="torch", check=False)
    concerned = [2] if victim < 2 else [0, 1]
    for rank in concerned:
        value = results[rank].value
        assert value is not None, results[rank].stderr
        assert (value["raised"], value["lost"]) == ("PeerLost", [victim])


def test_bad_input_is_refused_on_all_ranks() -> None:
    values = [each.value for each in run_ranks(jobs.refusals, 3)]
    assert values[0][0] == values[1][0] == values[2][0] == "accepted"
    for texts in values:
        assert all("accepted" not in text for text in texts[1:]), texts
        assert "'w' of shape [6, 4], float32: no rank of src=[0] holds all" in texts[1]
        assert "gives rank 1 a tensor of shape [3, 4], and its local tensor has shape [2, 4]" in texts[2]
        assert "gives rank 1 no part, and its local tensor has shape [3, 4]" in texts[3]
        assert "gives rank 1 a part, but there is no tensor 'w'; tensors: ['v']" in texts[4]
        assert "layout: expected a mapping of names to mcr.Layout" in texts[5]
        assert "layout['w']: expected an mcr.Layout, got 'S0'" in texts[6]
        assert "an addend of a sum" in texts[7]
        assert "rank 2 has 'w' of shape [6, 4], bfloat16, as whole tensors" in texts[8]
        assert "src=[0, 0]; expected one of the group's ranks [0, 1, 2], or several" in texts[9]
        assert "src=[]" in texts[10]
        assert "rank 0 has 'w' of shape [3, 4], float32, rank 2 has 'w' of shape [6, 4], float32" in texts[11]


@pytest.mark.long
def test_fsdp_over_tensor_parallel_layers_to_other_dtensors_and_a_whole_model() -> None:
    values = [each.value for each in run_ranks(jobs.fsdp_to_tensor_parallel, 7, args=[3], via="torch")]
    assert [value["good"] for value in values[4:]] == [3, 3, 3]
    whole = values[6]["dense_bytes"]
    assert sum(value["dense_bytes"] for value in values[:4]) == whole, "each element is sent by one rank"
    assert max(value["dense_bytes"] for value in values[:4]) < 0.5 * whole
    assert values[4]["dense_bytes"] < 0.7 * whole
    for value in values:
        assert "addend of a sum" in value["refused"]
