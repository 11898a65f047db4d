"""The codec delta on real ranks: every kind, several ranks and libraries, damage, nodes."""

from __future__ import annotations

from statistics import mean

import pytest
from jobs.operations import delta_jobs as jobs
from ranks import run_ranks

import mcr_plus as mcr


@pytest.mark.short("shared memory-2")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "backends", [["gloo"], ["mpi"], ["msccl", "gloo"]], ids=["gloo", "mpi", "shared memory"]
)
def test_every_kind_brings_all_bits(backends: list[str], ranks: int) -> None:
    for result in run_ranks(jobs.every_kind, ranks, args=[backends]):
        value = result.value
        assert value["wrong"] == []
        shares = value["shares"]
        assert all(share <= 1.02 for each in shares.values() for share in each)
        for kind in ("broadcast", "send"):
            assert all(mean(shares[f"{kind} {call}"]) < 0.05 for call in (1, 2))


@pytest.mark.parametrize("kind", ["broadcast", "all_gather", "scatter", "recv"])
def test_damage_raises_in_its_call_and_the_next_one_repairs_it(kind: str) -> None:
    results = [each.value for each in run_ranks(jobs.damaged, 3, args=[kind])]
    for rank, (raised, wrong) in enumerate(results):
        assert wrong == []
        assert [bool(text) for text in raised] == [rank == 1 and call == 1 for call in range(5)]
    assert any("was not received as it was sent" in text or "delta payload" in text for text in results[1][0])


def test_a_receiver_with_other_values_gets_all_values_at_once() -> None:
    found = run_ranks(jobs.another_base, 2)[1].value
    assert [bits for bits, _ in found] == [True] * 4
    assert [share < 0.1 for _, share in found] == [False, True, False, True]
    assert all(share <= 1.02 for _, share in found)


@pytest.mark.short("2")
@pytest.mark.parametrize("ranks", [2, 3])
def test_kept_versions_are_bounded_and_dropped_ones_are_sent_whole(ranks: int) -> None:
    results = run_ranks(jobs.bounded, ranks, args=[100_000, 7])
    for result in results:
        value = result.value
        assert (value["wrong"], value["in flight"]) == ([], 0)
        # A call keeps all copies that it needs: at most the values that a rank sends and the parts of all
        # ranks.
        assert 0 < value["most"] <= 100_000 + (1 + ranks) * value["bytes"]
        assert result.stderr.count("the least recently used are dropped") == 1
    for result in run_ranks(jobs.bounded, 2, args=[10_000_000, 3]):
        assert result.value["wrong"] == []
        assert "least recently used" not in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("kind", ["broadcast", "all_gather", "scatter", "recv"])
def test_a_rank_may_drop_its_copy_alone(kind: str) -> None:
    shares = []
    for result in run_ranks(jobs.dropped_by_one, 3, args=[kind]):
        assert result.value["wrong"] == []
        shares.append(result.value["shares"])
    most = [max(each) for each in zip(*shares, strict=True)]
    parts = 3 if kind in ("all_gather", "scatter") else 1
    for call, share in enumerate(most):
        whole = call in (0, 2, 4)
        assert (share > 0.5) == whole, (call, most)
        assert share < 1.02 * parts if whole else share < 0.06 * parts, (call, most)


@pytest.mark.parametrize("codec", ["delta", "exp_window"])
def test_inference_mode_may_change_between_calls(codec: str) -> None:
    assert [each.value for each in run_ranks(jobs.in_inference_mode, 2, args=[codec])] == [[], []]


def test_delta_refuses_unsuitable_operations() -> None:
    kinds = "codec delta is for all_gather, all_gather_v, broadcast, recv, scatter, scatter_v, send"
    for result in run_ranks(jobs.refusals, 2):
        untagged, summed, gathered, scattered, from_any, tag = result.value
        assert "codec delta needs the tensor's identity from call to call; expected tag=" in untagged
        assert kinds in summed
        assert kinds in gathered
        assert "expected tag=" in scattered
        assert "codec delta: a receive from any rank; expected src=" in from_any
        assert "codec delta: tag 2097152; expected less than 2097152" in tag


@pytest.mark.long
@pytest.mark.parametrize("inter", [True, False], ids=["between nodes", "everywhere"])
def test_between_nodes_a_payload_is_encoded_once_and_forwarded(inter: bool) -> None:
    values = [each.value for each in run_ranks(jobs.hierarchical, 4, args=[inter])]
    assert [value["encoded"] for value in values] == [0, 4, 0, 0]
    for rank, value in enumerate(values):
        assert value["same"] == value["applied"] == 4
        steps = {group: (codec, nbytes, wire) for group, codec, nbytes, wire in value["records"] if codec}
        across = {group for group in steps if "across" in group}
        assert across == ({"world/across1"} if rank % 2 else set())
        assert set(steps) - across == {f"world/node{rank // 2}/back"}
        for _, nbytes, wire in steps.values():
            assert nbytes == 80_002
            assert 0 < wire < nbytes / 20
    assert len({wire for value in values for _, codec, _, wire in value["records"] if codec}) == 1


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
