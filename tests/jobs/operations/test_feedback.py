"""The residuals between compressed calls, and the decisions of a running job."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from codec_exam import f64
from jobs.operations.feedback import (
    FED_BACK,
    SHAPE,
    a_bad_step,
    a_bad_step_of_ef21,
    between_peers,
    by_name,
    corrected_momentum,
    decisions,
    drawn,
    estimates,
    goes_on,
    goes_on_with_failover,
    in_flight,
    lengths_known_late,
    mean_of,
    misunderstandings,
    nothing_is_lost,
    off,
    refusals,
    saves,
    tags_in_another_order,
)
from ranks import run_ranks

CODECS = [str(config["codec"]) for config in FED_BACK]


@pytest.mark.short("2-AVG")
@pytest.mark.parametrize(("ranks", "op"), [(2, "AVG"), (3, "SUM")])
def test_error_feedback_recovers_the_compression_error(ranks: int, op: str) -> None:
    for result in run_ranks(nothing_is_lost, ranks, args=[op, 12]):
        assert sorted(result.value) == sorted(CODECS)
        for codec, (with_rest, without, disagreeing) in result.value.items():
            # The library's rounding of bfloat16 sums is lost for good.
            assert with_rest < (5e-3 if codec == "bf16" else 2e-4), codec
            assert disagreeing == 0, codec
            assert codec in ("bf16", "int8_block", "int_shared") or without > 1e-3, (
                codec
            )  # there was something


@pytest.mark.parametrize("warmup", [0, 2])
def test_messages_have_a_residual_for_each_peer(warmup: int) -> None:
    steps = 12
    level = 4.5 / 7  # of int4_block; no value of `drawn` is larger than 4.5
    for result in run_ranks(between_peers, 3, args=[steps, warmup]):
        for peer, missing in result.value.items():
            assert 0 < missing <= 2 * level, (result.rank, peer)


@pytest.mark.parametrize("warmup", [0, 2])
def test_messages_have_a_residual_for_each_tag(warmup: int) -> None:
    level = 4.5 / 256  # of bf16; no value of `drawn` is larger than 4.5
    assert all(result.value <= 2 * level for result in run_ranks(tags_in_another_order, 2, args=[warmup]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, list[float]]]:
    """Return a checkpoint of four ranks, and the sums of their results until then."""
    path = str(tmp_path_factory.mktemp("state") / "state.pt")
    return path, run_ranks(saves, 4, args=[path, 5])[0].value


@pytest.mark.long
@pytest.mark.parametrize("late", [False, True])
def test_residuals_survive_a_restart_with_fewer_ranks(
    saved: tuple[str, dict[str, list[float]]], late: bool
) -> None:
    path, before = saved
    for result in run_ranks(goes_on, 2, args=[path, [5, 9], late]):
        for codec, (after, left) in result.value.items():
            got = np.array(before[codec]) + np.array(after) + np.array(left)
            expected = mean_of(4, range(5)) + mean_of(2, range(5, 9))
            assert off(got, expected) < (5e-3 if codec == "bf16" else 2e-4), codec
            lost = np.array(before[codec]) + np.array(after)
            if codec != "bf16":
                assert off(got, expected) < off(lost, expected) / 5, codec  # the test could fail


def test_residuals_survive_a_restart_with_failover() -> None:
    for result in run_ranks(goes_on_with_failover, 2):
        kept, lost = result.value
        assert kept < 2e-4 < lost / 5


def test_ef21_estimate_converges() -> None:
    first = run_ranks(estimates, 3, args=[40])
    for result in first:
        assert result.value == first[0].value
        for codec, offs in result.value.items():
            assert offs[0] > 1e-2, codec
            assert offs[-1] < (0.15 if codec == "sign1" else 1e-3) * offs[0], codec  # the slower, the coarser


@pytest.mark.long
def test_concurrent_calls_give_the_results_of_sequential_ones() -> None:
    for result in run_ranks(in_flight, 3, args=[6]):
        for name, (same, agreed, wrong) in result.value.items():
            assert same, name
            assert agreed, name
            assert wrong < 1.5, name


def test_momentum_correction_is_that_of_deep_gradient_compression() -> None:
    steps, ratio, momentum, numel = 8, 0.1, 0.8, math.prod(SHAPE)
    velocity, rest = np.zeros((2, numel)), np.zeros((2, numel))
    for step, got in enumerate(run_ranks(corrected_momentum, 2, args=[steps, ratio, momentum])[0].value):
        expected = np.zeros(numel)
        for rank in range(2):
            velocity[rank] = momentum * velocity[rank] + f64(drawn(rank, step))
            rest[rank] += velocity[rank]
            sent = np.argsort(-np.abs(rest[rank]), kind="stable")[: math.ceil(ratio * numel)]
            expected[sent] += rest[rank][sent] / 2
            velocity[rank][sent] = rest[rank][sent] = 0
        np.testing.assert_allclose(np.array(got), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_non_finite_values_reach_all_ranks_and_leave_no_residual() -> None:
    for result in run_ranks(a_bad_step, 2):
        assert result.value.keys() == set(CODECS)
        for codec, finite in result.value.items():
            expected = [True, codec == "randk", True, True]  # which sends but some of the values
            assert finite in (expected, [True, False, True, True]), codec


@pytest.mark.long
def test_ef21_resets_after_non_finite_values() -> None:
    for result in run_ranks(a_bad_step_of_ef21, 3):
        assert result.value == {codec: [True, False, True, True] for codec in ("int8_block", "topk", "bf16")}


@pytest.mark.long
def test_state_belongs_to_tag_codec_and_options() -> None:
    results = [result.value for result in run_ranks(by_name, 4, args=[10])]
    for found in results:
        plain, fed, plain_again = found["off"]
        assert fed < plain / 2
        assert plain_again == plain
        assert found["changed"] == 0
        assert len(found["groups"]) == 3  # the world and two halves, on all ranks
        before, after = found["again"]
        assert before == after
    (line,) = results[0]["lines"]
    assert re.match(r"state: \d+ loaded operations were never issued, for example in group '", line), line
    assert not any(found["lines"] for found in results[1:])


def test_different_codecs_between_ranks_raise() -> None:
    for result in run_ranks(misunderstandings, 2):
        for text, part in zip(result.value, ("fp8_block", "fp8_block", "randk", "int8_block"), strict=True):
            assert f"encoding={part}" in text


@pytest.mark.parametrize("ranks", [2, 3])
def test_variable_payload_lengths_are_no_mismatch(ranks: int) -> None:
    for result in run_ranks(lengths_known_late, ranks):
        assert result.value == 15


def test_never_slower_warmup_exemption_and_audit() -> None:
    results = [result.value for result in run_ranks(decisions, 2)]
    for found in results:
        assert found["never slower"][:16].count("sluggish") == 8
        assert found["never slower"][16:] == [None] * 24
        assert any("codec sluggish takes" in line and line.endswith("off") for line in found["lines"])
        assert found["warm"] == [None, None, None, "int8_block", "int8_block"]
        assert found["exempt"] == [None]
        assert found["not exempt"] == ["int8_block"]
        assert found["audited"] == ["bf16"] * 4
        for part in ("SUM float32[3000] tag=bent", "codec crooked", "call 6", "rank 1 of group", "'world'"):
            assert part in found["bent"]
    assert results[0]["never slower"] == results[1]["never slower"]


def test_impossible_options_are_refused_on_all_ranks() -> None:
    expected = (
        "error_feedback needs the tensor's identity from call to call; expected tag=",
        "error_feedback is for all_reduce, reduce, reduce_scatter, send, recv",
        "ef21 is for all_reduce",
        "codec powersgd is for matrices, and none of the shapes (600,) has two dimensions",
        "momentum_correction with codec 'int8_block'; known: topk",
        "error_feedback and ef21 exclude each other",
        "compress.error_feedback.decay",
        "compress.warmup",
        "codec int8_block allows the reduce ops SUM, AVG",
    )
    for result in run_ranks(refusals, 2):
        assert len(result.value) == len(expected)
        for text, part in zip(result.value, expected, strict=True):
            assert part in text
