"""All names of c10d's groups, handles and functions over mcr: each works, or is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from jobs.torch_backend import torch_names as names
from ranks import run_ranks

HOOKS = pytest.mark.skipif(not names.HOOKS, reason="this torch has no hooks of groups (before 2.14)")


def test_no_name_of_torch_is_unknown() -> None:
    known = {*names.OPERATIONS, *names.QUERIES, *names.ELSEWHERE}
    assert set(names.names("ProcessGroup", "Backend")) - known == set()
    assert set(names.names("Work")) - set(names.WORKS) - set(names.ELSEWHERE) == set()
    assert set(names.functions()) - set(names.FUNCTIONS) - set(names.COVERED.split()) == set()


def problems(name: str, rank: int, mcr: names.Outcome, gloo: names.Outcome = ("not called", "")) -> list[str]:
    kind, text = mcr
    if kind == "value":
        same = gloo[0] != "value" or text == gloo[1] or name in names.MORE
        return [] if same else [f"rank {rank}: {name}: {text}, gloo {gloo[1]}"]
    refusal = kind == "Unsupported" and "\n" not in text and len(text) < 200
    if refusal and name in names.refused() | {"_new_window"}:
        return []
    if name == "_time_estimator" and kind == gloo[0] == "NotImplementedError":
        return []  # in torch's words
    return [f"rank {rank}: {name}: {kind}: {text}"]


def test_every_method_works_or_is_refused() -> None:
    results = run_ranks(names.outcomes_of_groups, 2, via="torch", timeout=100)
    found = [
        problem
        for result in results
        for name, outcomes in result.value.items()
        for problem in problems(name, result.rank, *outcomes)
    ]
    assert not found, "\n".join(found)
    gathered = results[1].value.get("gather_single")
    assert gathered is None or gathered[0] == ["value", "[[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]]"]


def test_every_method_of_a_handle_works_or_is_refused() -> None:
    for result in run_ranks(names.outcomes_of_works, 2, via="torch", timeout=100):
        for name, (mcr, gloo) in result.value.items():
            if name in names.OF_TORCH:
                assert names.OF_TORCH[name] in mcr[1]
            elif name.endswith("source_rank"):
                assert mcr == ["value", "-1"]  # gloo raises
            elif "Unable to convert function return value" in gloo[1]:
                assert mcr == ["value", "None"]  # torch 2.6 cannot return exceptions to Python
            else:
                assert mcr == gloo, name


def test_every_function_works_or_is_refused() -> None:
    for result in run_ranks(names.outcomes_of_functions, 2, via="torch", timeout=100):
        for name, (mcr, gloo) in result.value.items():
            if name == "split_group" and "No device associated" in gloo[1]:
                assert mcr == gloo  # torch itself refuses groups without a device (before 2.15)
            else:
                assert problems(name, result.rank, mcr, gloo) == []


@HOOKS
def test_hooks_see_what_they_see_over_gloo() -> None:
    for result in run_ranks(names.calls_of_hooks, 2, args=[False], via="torch", timeout=100):
        assert result.value["kind"] == "McrProcessGroup"
        assert result.value["mcr"] == result.value["gloo"]
        assert len(result.value["mcr"]) > 80
    masked = run_ranks(
        names.calls_of_hooks, 2, args=[True], via="torch", timeout=100, env={"MCR_MASQUERADE": "gloo"}
    )
    for rank, other in enumerate(masked):
        assert other.value["kind"] == "_AsGloo"
        assert other.value["mcr"][0][:2] == [1, "ALLREDUCE"], rank


@HOOKS
def test_errors_of_hooks() -> None:
    for result in run_ranks(names.errors_of_hooks, 2, via="torch", timeout=100):
        found: list[Any] = result.value
        error, untouched, plain, *others = found
        own = result.rank + 1.0
        assert error == ["KeyError", "'no'"]
        assert (untouched, plain) == ([own] * 3, True)
        total, plain_again, wrong, recorder = others[-4:]
        assert others[:-4] == ["called"] * 2, "a hook that hooks register is called from then on"
        assert (total, plain_again) == ([6.0] * 3, True)
        assert wrong == ["TypeError", "hook: expected a function of one argument, got 5"]
        assert recorder[0] == "Unsupported"
        assert "mcr_plus.dump" in recorder[1]


@HOOKS
@pytest.mark.parametrize("masked", [False, True])
def test_nan_is_refused_as_over_gloo(masked: bool) -> None:
    check = {"TORCH_DIST_NAN_CHECK": "1"}
    over = {"MCR_MASQUERADE": "gloo", **check} if masked else check
    expected = run_ranks(names.nan_checks, 2, args=["gloo"], via="torch", timeout=100, env=check)
    found = run_ranks(
        names.nan_checks, 2, args=["gloo" if masked else "mcr"], via="torch", timeout=100, env=over
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.value == theirs.value
        for name, (kind, text) in ours.value.items():
            expected_kind = "value" if name.startswith("passes") else "RuntimeError"
            assert kind == expected_kind, f"{name}: {text}"


@HOOKS
def test_nan_in_sparse_tensors() -> None:
    """Over gloo the check has no kernel for them."""
    for result in run_ranks(names.sparse_nan, 2, via="torch", timeout=100, env={"TORCH_DIST_NAN_CHECK": "1"}):
        assert result.value == [["value", "None"], ["RuntimeError", "NaN found in input tensor."]]


def test_timeouts_of_splits() -> None:
    results: list[Any] = [
        result.value for result in run_ranks(names.timeouts_of_splits, 2, via="torch", timeout=100)
    ]
    for rank, (kept, given, named, outside, twice, pipeline) in enumerate(results):
        assert (kept, given, named) == (60.0, 20.0, 40.0)  # a pipeline that names one has it
        assert outside == (rank == 1)
        assert twice == ["InvalidArgument", "new_ranks: expected different ranks of 0 to 1, got [0, 0]"]
        assert pipeline[0] == "Unsupported"
