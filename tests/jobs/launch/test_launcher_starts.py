"""A launcher that fails by itself before it has started any rank: the job is started once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import RanksFailed, run_ranks

import mcr_plus as mcr
from mcr_plus.launch import commands
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

pytestmark = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
TEXT = "The PMIx server's listener thread failed to start. We cannot continue."
SCRIPT = f"""
echo start >> "$0"
if [ $(wc -l < "$0") -le "$1" ]; then
    echo "{TEXT}" >&2
    exit 1
fi
shift
exec "$@"
"""


def world() -> int:
    with mcr.init() as comm:
        return comm.size


def failing(monkeypatch: pytest.MonkeyPatch, starts: Path, times: int) -> None:
    """Let the launcher fail so often; each of its starts is a line of `starts`."""
    usual = commands.mpi_command

    def command(*arguments: Any) -> list[str]:
        return ["sh", "-c", SCRIPT, str(starts), str(times), *usual(*arguments)]

    monkeypatch.setattr(commands, "mpi_command", command)


def test_a_launcher_that_has_not_started_any_rank_is_started_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, tmp_path / "starts", 1)
    assert [result.value for result in run_ranks(world, 2)] == [2, 2]
    assert (tmp_path / "starts").read_text() == "start\n" * 2


def test_a_launcher_that_fails_again_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, tmp_path / "starts", 9)
    with pytest.raises(RanksFailed, match="listener thread failed to start"):
        run_ranks(world, 2)
    assert (tmp_path / "starts").read_text() == "start\n" * 2
