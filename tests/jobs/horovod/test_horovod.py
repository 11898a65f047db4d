"""`mcr_plus.horovod` on real ranks; their programs are in `horovod_jobs`."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs.horovod import horovod_jobs
from ranks import run_ranks

from mcr_plus.errors import InvalidArgument
from mcr_plus.horovod import Compression, ProcessSet
from mcr_plus.horovod.request import OperationRequest, disagreement
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")


@needs_mpi
def test_two_ranks(tmp_path: Path) -> None:
    names = [section.__name__ for section in horovod_jobs.SECTIONS]
    for result in run_ranks(horovod_jobs.everything, 2, args=[str(tmp_path)]):
        assert result.value == names


@pytest.mark.long
def test_three_ranks(tmp_path: Path) -> None:
    names = [section.__name__ for section in horovod_jobs.SECTIONS]
    for result in run_ranks(horovod_jobs.everything, 3, args=[str(tmp_path)], via="torch", timeout=240):
        assert result.value == names


def test_one_rank(tmp_path: Path) -> None:
    for result in run_ranks("jobs.horovod.horovod_jobs:alone", 1, args=[str(tmp_path)], via="torch"):
        assert result.value == ["alone"]


@pytest.mark.long
def test_fused_operations_complete_when_the_program_exits_without_shutdown(tmp_path: Path) -> None:
    for result in run_ranks(horovod_jobs.fused, 2, args=[str(tmp_path)], via="torch"):
        assert result.value == ["fused"]


def test_error_feedback_belongs_to_names(tmp_path: Path) -> None:
    for result in run_ranks(horovod_jobs.feedback, 2, args=[str(tmp_path)], via="torch"):
        assert result.value == ["feedback"]


@pytest.mark.long
def test_ranks_that_have_not_started_an_operation_are_named(tmp_path: Path) -> None:
    told = run_ranks(horovod_jobs.late, 2, args=[str(tmp_path)], via="torch")[0].value
    assert told == "'wanted': not started by ranks [1] within 3 s"


def test_requests_round_trip_through_text() -> None:
    request = OperationRequest(
        'new\nline "é"', "alltoall", ("float32",), ((2, 3),), numbers=(1, 2**40), before=0.1, codec='"fp16"'
    )
    assert "\n" not in request.text
    assert OperationRequest.read(request.text) == request
    assert disagreement({0: request, 3: request}) == ""


def test_request_without_gradient_matches_dense_or_sparse_requests() -> None:
    absent = OperationRequest("w", "allreduce", ("float32",), ((6, 2),), absent=True)
    sparse = OperationRequest("w", "sparse", ("float32",), ((6, 2),), numbers=(3, 1))
    dense = OperationRequest("w", "allreduce", ("float32",), ((6, 2),))
    assert disagreement({0: absent, 1: sparse}) == ""
    assert disagreement({0: absent, 1: dense}) == ""
    assert "sparse on rank 1" in disagreement({0: dense, 1: sparse})


def test_arguments() -> None:
    with pytest.raises(InvalidArgument, match="expected integers"):
        ProcessSet([0, True])
    assert ProcessSet([2, 0]).ranks == [0, 2]
    assert Compression.codec("topk", ratio=0.1).codec == '{"codec": "topk", "ratio": 0.1}'
