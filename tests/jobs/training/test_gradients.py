"""Codecs on gradients and in fused buckets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jobs.training.gradients import decided_one_by_one, losses, neighbours, repeated, trained, wrapped
from ranks import run_ranks

LOUD, QUIET = "loud.weight", "quiet.weight"


@pytest.mark.parametrize("codec", ["int8_block", "int4_block"])
def test_blocks_hold_one_member_of_a_fused_bucket_each(codec: str) -> None:
    for result in run_ranks(neighbours, 2, args=[codec]):
        for kind, (fused, *offs) in result.value.items():
            assert fused == [[4, codec]], kind
            assert max(offs) < (0.01 if codec == "int8_block" else 0.15), (kind, offs)


def test_the_codec_of_a_fused_operation_depends_on_its_own_size() -> None:
    for result in run_ranks(decided_one_by_one, 2):
        found = result.value
        assert found["exempt"] == [None, 8]
        assert found["not exempt"] == ["int8_block", 8]
        assert found["ruled"] == [None, 8]
        assert max(found["coalesced"]) < 0.01


@pytest.mark.long
def test_gaps_between_gradients_do_not_change_results() -> None:
    codecs = [{"codec": "sign1"}, {"codec": "int4_block", "hadamard": True}]
    for result in run_ranks(repeated, 2, args=[codecs, 12]):
        assert result.value == [0.0, 0.0]


def test_blocks_hold_one_gradient_each() -> None:
    for result in run_ranks(wrapped, 2, args=[{"codec": "int8_block"}, [], 3]):
        found = result.value
        assert found["equal"]
        assert found["codecs"] == ["int8_block"]
        for offs in found["offs"]:
            assert 1e-5 < offs[LOUD] < 0.02
            assert 1e-5 < offs[QUIET] < 0.02


@pytest.mark.parametrize(
    ("compress", "rules", "exact"),
    [
        ({"exempt": {"max_ndim": 1}}, [], ["loud.bias", "quiet.bias", "spare.bias"]),
        (
            {"exempt": {"params": ["quiet.*", "*.bias"]}},
            [],
            ["quiet.weight", "quiet.bias", "loud.bias", "spare.bias"],
        ),
        ({"exempt": {"below": "1KiB"}}, [], ["spare.weight", "spare.bias", "loud.bias", "quiet.bias"]),
        (
            {},
            [
                {"match": {"param": "*.bias"}, "compress": {"codec": "none"}},
                {"match": {"param": "quiet.*"}, "compress": {"codec": "bf16"}, "backend": "gloo"},
            ],
            ["loud.bias", "quiet.bias", "spare.bias"],
        ),
    ],
)
def test_exempt_gradients_are_not_compressed(
    compress: dict[str, Any], rules: list[dict[str, Any]], exact: list[str]
) -> None:
    options = {"codec": "int8_block", **compress}
    for result in run_ranks(wrapped, 2, args=[options, rules, 2]):
        found = result.value
        assert found["codecs"][-1] == "int8_block"
        assert ("bf16" in found["codecs"]) == bool(rules)
        for offs in found["offs"]:
            for name, off in offs.items():
                if name in exact:
                    assert off < 1e-6, name
                else:
                    assert 1e-5 < off < 0.05, name


@pytest.mark.long
def test_error_feedback_sends_the_residuals_of_gradients_later() -> None:
    compress = {"codec": "int4_block", "error_feedback": True}
    for result in run_ranks(wrapped, 3, args=[compress, [], 8]):
        found = result.value
        got, true = found["sums"]
        assert max(found["offs"][0].values()) < 1e-6  # the first pass, after which buckets change
        assert found["offs"][1][LOUD] > 1e-3
        assert abs(got + found["left"] - true) < 1e-5 * abs(true)
        assert all("+" in name for name in found["names"])  # called after the bucket's parameters


@pytest.mark.long
@pytest.mark.parametrize("via", ["wrap", "ddp"])
def test_training_with_codecs(via: str) -> None:
    ways: list[dict[str, Any]] = [
        {"codec": "none"},
        {"codec": "int8_block", "audit_every": 7},
        {"codec": "topk", "ratio": 0.05, "error_feedback": True, "audit_every": 7},
        {"codec": "powersgd", "rank": 2, "error_feedback": True},
    ]
    for result in run_ranks(trained, 2, args=[ways, via]):
        plain = result.value[0]["loss"]
        for compress, found in zip(ways[1:], result.value[1:], strict=True):
            keeps = compress["codec"] != "int8_block"
            assert found["equal"]
            assert found["loss"] < plain * 1.15 + 0.01
            assert [True, compress["codec"]] in found["codecs"]
            assert ([False, "None"] in found["codecs"]) == keeps
            assert bool(found["kept"]) == keeps


@pytest.mark.long
def test_feedback_and_exemptions_keep_the_loss_of_uncompressed_training() -> None:
    sign1, int4 = {"codec": "sign1"}, {"codec": "int4_block"}
    ways = [
        {"codec": "none"},
        sign1,
        {**sign1, "exempt": {"max_ndim": 1}},
        int4,
        {**int4, "error_feedback": True},
    ]
    for result in run_ranks(losses, 2, args=[ways, 200]):
        true, *others = map(np.array, result.value)
        off = [float(np.mean(abs(each - true) / true)) for each in others]
        assert 0 < off[1] < 0.75 * off[0]
        assert 0 < off[3] < 0.2 * off[2] < 0.01
