"""The verdict of the benchmark of lost hosts on the files of ranks, without hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import lost_hosts
import pytest


def job(folder: Path) -> lost_hosts._Job:
    return lost_hosts._Job(cast("Any", None), folder, 2, "cable")


def test_a_rank_that_ends_between_two_looks_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a rank once counted as one that had not given up."""
    looks = Path.exists

    def exists(path: Path) -> bool:
        found = looks(path)
        if path.name == "end.1":
            path.touch()
        return found

    (tmp_path / "end.0").touch()
    monkeypatch.setattr(Path, "exists", exists)
    assert job(tmp_path)._missing("end", [0, 1]) == []


def test_a_rank_that_has_ended_without_a_word_is_missing(tmp_path: Path) -> None:
    for name in ("shrunk.0", "end.1"):
        (tmp_path / name).touch()
    assert job(tmp_path)._missing("shrunk", [0, 1]) == [1]


def test_a_rank_that_hangs_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_hosts, "HANGS", 0.0)
    (tmp_path / "end.0").touch()
    assert job(tmp_path)._missing("end", [0, 1]) == [1]
