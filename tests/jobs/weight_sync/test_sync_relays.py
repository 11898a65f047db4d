"""Receivers behind one slow link, in processes of their own, which relay weights, are killed or stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sync_relays import receivers_of
from two_hosts import TwoHosts, why_not

REASON = why_not(mpi=False)
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"hosts: {REASON}")
NUMEL = 8_000_000
WITHIN = 120.0


def until(is_done: Callable[[], bool]) -> None:
    """Wait."""
    ends = time.monotonic() + WITHIN
    while not is_done():
        assert time.monotonic() < ends
        time.sleep(0.01)


def told(folder: Path, version: int) -> set[int]:
    """Return the receivers that have pulled a version."""
    return {int(path.stem.split("-")[1]) for path in folder.glob(f"{version}-*.json")}


@pytest.mark.long
def test_one_message_crosses_the_link(tmp_path: Path) -> None:
    with (
        TwoHosts("100mbit") as hosts,
        receivers_of(hosts, tmp_path, 5, NUMEL, 3, alone=False) as (source, _),
    ):
        assert source.wait(WITHIN) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 3
    for number, row in enumerate(rows, 1):
        assert row["relayed"] == 4 * number
        assert row["link"] < 1.15 * row["payload"]


@pytest.mark.long
@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_receivers_go_on_without_relays_that_are_gone(tmp_path: Path, way: signal.Signals) -> None:
    """In the middle of the first version, all of which travels for seconds."""
    with (
        TwoHosts("10mbit") as hosts,
        receivers_of(hosts, tmp_path, 4, NUMEL, 3, alone=False) as (source, receivers),
    ):
        until(lambda: (tmp_path / "policy.sync").exists())
        figure = f"/sys/class/net/{hosts.links[0]}/statistics/tx_bytes"
        counter = ["ip", "netns", "exec", hosts.names[0], "cat", figure]
        until(lambda: int(subprocess.check_output(counter)) > 500_000)
        gone = 1
        os.kill(receivers[gone].pid, way)
        for version in (1, 2, 3):
            until(lambda: told(tmp_path, version) >= {0, 2, 3})  # noqa: B023
            for kind in ("json", "same"):  # the source waits for all
                (tmp_path / f"{version}-{gone}.{kind}").write_text("0")
        assert source.wait(WITHIN) == 0
        for number in (0, 2, 3):
            assert receivers[number].wait(WITHIN) == 0
