"""The codec delta on real ranks: every kind, several ranks and libraries, damage, nodes."""

from __future__ import annotations

from statistics import mean

import delta_jobs as jobs
import pytest
from ranks import run_ranks

import mcr_plus as mcr


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "backends", [["gloo"], ["mpi"], ["msccl", "gloo"]], ids=["gloo", "mpi", "shared memory"]
)
def test_every_kind_brings_all_bits(backends: list[str], ranks: int) -> None:
    for result in run_ranks(jobs.every_kind, ranks, args=[backends], timeout=120):
        value = result.value
        assert value["wrong"] == []
        shares = value["shares"]
        assert all(share <= 1.02 for each in shares.values() for share in each)
        assert all(mean(shares[f"broadcast {call}"]) < 0.05 for call in (1, 2, 3))


@pytest.mark.parametrize("kind", ["broadcast", "all_gather"])
def test_damage_raises_in_its_call_and_the_next_one_repairs_it(kind: str) -> None:
    results = [each.value for each in run_ranks(jobs.damaged, 3, args=[kind])]
    for rank, (raised, wrong) in enumerate(results):
        assert wrong == []
        assert [bool(text) for text in raised] == [rank == 1 and call == 1 for call in range(5)]
    assert any("was not received as it was sent" in text or "delta payload" in text for text in results[1][0])


def test_what_it_is_not_for_is_refused() -> None:
    for result in run_ranks(jobs.refusals, 2):
        untagged, summed, scattered, message, dtype = result.value
        assert "codec delta needs the tensor's identity from call to call; expected tag=" in untagged
        assert "codec delta is for all_gather, all_gather_v, broadcast" in summed
        assert "codec delta is for all_gather, all_gather_v, broadcast" in scattered
        assert "codec delta is for all_gather, all_gather_v, broadcast" in message
        assert "codec delta takes float32, bfloat16" in dtype


@pytest.mark.parametrize("inter", [True, False], ids=["between nodes", "everywhere"])
def test_between_nodes(inter: bool) -> None:
    for result in run_ranks(jobs.hierarchical, 4, args=[inter]):
        assert result.value["same"] == 4
        for group, codec, nbytes, wire in result.value["records"]:
            if "across" in group or not inter:
                assert codec in ("delta", ""), result.value
                if codec == "delta":
                    assert wire < nbytes / 10, result.value
            else:
                assert codec == "", result.value


def test_explain_says_what_travels() -> None:
    config = {
        "version": 1,
        "pipeline": [{"compress": {}}, {"select": {}}, {"dispatch": {}}],
        "rules": [{"match": {"tag": "policy"}, "compress": {"codec": "delta"}}],
    }
    text = str(mcr.explain("broadcast", 1 << 20, dtype="bfloat16", ranks=2, config=config, tag="policy"))
    assert "codec delta: what changed, moved, applied" in text
    assert "at most" in text
    plain = str(mcr.explain("broadcast", 1 << 20, dtype="bfloat16", ranks=2, config=config, tag="other"))
    assert "what changed" not in plain
