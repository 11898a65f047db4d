"""Folders that `mcr.record(path)` writes on ranks, against their logs, and the page that is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command import mcr_plus
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.observe.record import Log
from mcr_plus.observe.record_file import file_of, load_recording

STEPS = 6


def failing(folder: str) -> Log:
    """A block that ends with an exception: what was recorded is written all the same."""
    logs: list[Log] = []
    try:
        with mcr.record(f"{folder}/failed") as log:
            logs.append(log)
            mcr.barrier()
            raise RuntimeError("of the program")
    except RuntimeError:
        return logs[0]


def train(folder: str) -> dict[str, Any]:
    """Runs on ranks: steps of a small model, with operations of all sorts."""
    torch.set_num_threads(1)
    rules = [{"match": {"kind": "all_to_all"}, "backend": "gloo"}]
    with mcr.init({"version": 1, "rules": rules}) as comm:
        with pytest.raises(mcr.InvalidArgument, match="record: cannot write into"), mcr.record("/proc/none"):
            raise AssertionError
        model, optimizer = mcr.wrap(
            linear := torch.nn.Linear(64, 3), torch.optim.SGD(linear.parameters(), lr=0.1)
        )
        with mcr.record(folder) as log:
            for _ in range(STEPS):
                mcr.all_to_all_single(torch.empty(2048), torch.ones(2048), tag="tokens")
                model(torch.ones(5, 64)).sum().backward()
                optimizer.step()
                mcr.all_reduce(torch.ones(3000), compress="bf16")
        mcr.all_reduce(torch.ones(8))  # not recorded
        other = failing(folder)
        return {
            "bytes": [record.bytes for record in log.records],
            "issued": [record.t_issue for record in log.records],
            "kinds": [record.kind for record in log.records],
            "rank": comm.rank,
            "other": len(other.records),
        }


def test_folders_have_what_ranks_recorded(tmp_path: Path) -> None:
    for value in (result.value for result in run_ranks(train, 2, args=[str(tmp_path)])):
        found = load_recording(file_of(tmp_path, value["rank"]))
        assert found.columns["bytes"].tolist() == value["bytes"]
        assert found.columns["t_issue"].tolist() == value["issued"]
        assert [found.about["names"]["kind"][number] for number in found.columns["kind"]] == value["kinds"]
        assert len(found.steps) == STEPS
        assert (found.steps[1:] > found.steps[:-1]).all()
        assert found.about["began"] <= min(value["issued"]) <= max(value["issued"]) <= found.about["ended"]
        assert found.about["size"] == 2
        assert found.about["job"] == load_recording(file_of(tmp_path, 0)).about["job"] != ""
        assert found.about["config"]["rules"][0]["backend"] == "gloo"
        assert load_recording(file_of(tmp_path / "failed", value["rank"])).count == value["other"] == 1
    choices = load_recording(file_of(tmp_path, 0)).about["choices"]
    (tokens,) = [row for row in choices if row["tag"] == "tokens"]
    assert (tokens["kind"], tokens["backend"], tokens["count"], tokens["bytes"]) == (
        "all_to_all",
        "gloo",
        STEPS,
        8192,
    )
    assert tokens["usual"]["alternatives"]["msccl"] < tokens["usual"]["alternatives"]["gloo"]
    assert load_recording(file_of(tmp_path, 1)).about["choices"] == []

    answer = mcr_plus("report", str(tmp_path), "-o", str(tmp_path / "report.html"))
    assert answer.returncode == 0, answer.stderr
    page = (tmp_path / "report.html").read_text()
    assert f"{STEPS - 1} steps" in page
    assert "<b>all_to_all</b> tokens<small>gloo</small>" in page
    file_of(tmp_path, 0).unlink()
    answer = mcr_plus("report", str(tmp_path), "-o", str(tmp_path / "report.html"))
    assert "no recording of rank 0" in answer.stderr
    answer = mcr_plus("report", str(tmp_path / "none"))
    assert answer.returncode == 2
    assert "no such folder" in answer.stderr
