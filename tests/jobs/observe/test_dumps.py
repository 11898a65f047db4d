"""Flight Recorder dumps of jobs with a fault: what torch's analysis and ours make of them."""

from __future__ import annotations

import gc
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from jobs.observe import dump_jobs
from jobs.observe.dump_jobs import VICTIM, line_of
from jobs.operations.test_faults import _has_fault_tolerance
from ranks import run_ranks

from mcr_plus.observe.diagnosis import WaitingPlace, diagnose
from mcr_plus.observe.dumps import read_folder
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

libraries = pytest.mark.parametrize(
    "library",
    [
        "gloo",
        "msccl",
        pytest.param(
            "mpi", marks=pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
        ),
    ],
)

RAISED = {
    "missing": "CommTimeout",
    "slow": "CommTimeout",
    "group": "CommTimeout",
    "message": "CommTimeout",
    "late": "",
}
"""The error on rank 0; `OrderMismatch` for the others."""
TORCH_SAYS = {
    "missing": f"missing ranks: {{{VICTIM}}}",
    "slow": f"missing ranks: {{{VICTIM}}}",
    "group": f"missing ranks: {{{VICTIM}}}",
    "message": f"missing ranks: {{{VICTIM}}}",
    "kind": f"Culprit rank {VICTIM}; Error type: COLLECTIVE_TYPE_MISMATCH",
    "size": f"Culprit rank {VICTIM}; Error type: SIZE_OR_SYNTAX_MISMATCH",
    "order": f"Culprit rank {VICTIM}; Error type: COLLECTIVE_TYPE_MISMATCH",
}
"""What its format can express: neither reduce op nor root, nor times of operations that are complete."""
APART = ("missing", "kind", "slow", "group", "message")
"""Faults at which the two ranks are at different lines."""


def _lines(fault: str) -> tuple[str, str]:
    """Where the rank with the fault is, and the other one, as patterns of `file:line` or of parts of it."""
    marks = (f"{fault} away", f"{fault} waits") if fault in APART else (fault, fault)
    if fault == "late":
        return "", f"dump_jobs.py:{line_of('late waits')}"  # where the late one is by now is of no interest
    if fault == "order":
        return "dump_jobs.py", "dump_jobs.py"  # at a start or at a wait
    away, waits = (f"dump_jobs.py:{line_of(mark)}" for mark in marks)
    return away, waits


def _at(places: list[WaitingPlace]) -> str:
    (place,) = places
    return "" if place.frame is None else f"{place.rank} {place.frame.filename}:{place.frame.line}"


def _torch_says(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    from torch.distributed.flight_recorder import fr_trace

    caplog.clear()
    with caplog.at_level("INFO", "Flight Recorder"):
        try:
            fr_trace.main([str(folder)])
        finally:
            gc.enable()  # which it disables
    return caplog.text


@pytest.mark.long
@libraries
def test_faults_are_explained(library: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    via: Any = "mpi" if library == "mpi" else "torch"
    raised, _ = (
        result.value for result in run_ranks(dump_jobs.faults, 2, args=[library, str(tmp_path)], via=via)
    )
    for fault in dump_jobs.FAULTS:
        assert raised[fault] == RAISED.get(fault, "OrderMismatch"), fault
        away, waits = _lines(fault)
        said = _torch_says(tmp_path / fault, caplog)
        if fault in TORCH_SAYS:
            assert TORCH_SAYS[fault] in said, fault
            assert waits in said, (fault, said)
        elif fault == "late":
            assert not said
        read = read_folder(tmp_path / fault)
        assert (sorted(read.dumps), read.problems, read.absent) == ([0, 1], [], []), fault
        finding, *others = diagnose(read)
        assert (finding.fault, finding.ranks) == (fault, (VICTIM,)), fault
        assert not others, (fault, others)
        assert re.match(f"0 .*{waits}", _at(finding.waiting)), (fault, finding)
        assert re.match(f"{VICTIM} .*{away}", _at(finding.at)), (fault, finding)


@libraries
@pytest.mark.parametrize("fault", ["stopped", "dead"])
def test_lost_ranks_are_explained(
    fault: str, library: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if library == "mpi" and not _has_fault_tolerance():
        pytest.skip("needs Open MPI 5 or later")
    via: Any = "ulfm" if library == "mpi" else "torch"
    results = run_ranks(
        dump_jobs.losing, 2, args=[fault, library, str(tmp_path)], via=via, check=False, teardown=False
    )
    assert results[0].value == "PeerLost"
    said, waits = _torch_says(tmp_path / fault, caplog), line_of("losing waits")
    assert f"missing ranks: {{{VICTIM}}}" in said
    assert f"dump_jobs.py:{waits}" in said
    (finding,) = diagnose(read_folder(tmp_path / fault))
    assert (finding.fault, finding.ranks) == (fault, (VICTIM,))
    assert _at(finding.waiting).endswith(f"dump_jobs.py:{waits}")
    # Its status page is the last that is seen of a stopped rank; that of a dead one is gone.
    assert re.fullmatch(
        rf"{VICTIM} .*/(dump_jobs|ranks)\.py:\d+" if fault == "stopped" else "", _at(finding.at)
    )


def test_signals_and_full_disks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    results = [result.value for result in run_ranks(dump_jobs.signals, 2, args=[str(tmp_path)], via="torch")]
    (finding,) = diagnose(read_folder(tmp_path / "hang"))
    assert finding.fault in ("behind", "missing")  # rank 0 may have waited for less than a second
    assert finding.ranks == (VICTIM,)
    assert _at(finding.waiting).endswith(f"dump_jobs.py:{line_of('signal waits')}")
    assert f"missing ranks: {{{VICTIM}}}" in _torch_says(tmp_path / "hang", caplog)
    for rank, result in enumerate(results):
        assert result["error"] == "OrderMismatch"  # the original error
        assert result["left"] == []
        assert [text for text in result["complaints"] if "dump" in text] == [
            f"rank {rank}: no dump in '{tmp_path}/full': File too large"
        ]
        assert result["own"] == [signal.SIGUSR2]
        assert result["after"] is False


def test_the_launcher_passes_the_signal_on(tmp_path: Path) -> None:
    run_ranks(dump_jobs.asked_through_the_launcher, 2, args=[os.getpid(), str(tmp_path)])
    reasons = [dump.reason for dump in read_folder(tmp_path).dumps.values()]
    assert len(reasons) == 2
    # Ranks that get the signal pass it on, which may be faster than the launcher.
    assert all(each.startswith("SIGUSR2") for each in reasons), reasons
