"""`log.stragglers()` for groups across hosts: network namespaces, one of which has a clock of its own.

The clock of the second host is an hour ahead, by a time namespace.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs.observe.late_on_hosts import DELAY_S, STEPS
from two_hosts import TwoHosts, why_not

PROGRAM = str(Path(__file__).with_name("late_on_hosts.py"))
LATER = 'case $(hostname) in mcr-b-*) exec unshare --time --monotonic 3600 "$@" ;; esac; exec "$@"'


def missing() -> str | None:
    """What keeps this machine from having hosts with clocks of their own; None if nothing does."""
    if (reason := why_not(mpi=False)) is not None:
        return reason
    words = ["unshare", "--time", "--monotonic", "3600", "true"]
    works = (
        shutil.which("unshare") and subprocess.run(words, capture_output=True, check=False).returncode == 0
    )
    return None if works else "no time namespaces"


REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"hosts: {REASON}")


@pytest.mark.long
@pytest.mark.parametrize(("per_host", "members"), [(1, [0, 1]), (2, [1, 2]), (2, [0, 1, 3])])
def test_the_rank_that_sleeps_in_its_backward_pass_is_named_on_all_hosts(
    tmp_path: Path, per_host: int, members: list[int]
) -> None:
    words = ["bash", "-c", LATER, "rank", sys.executable, PROGRAM]
    with TwoHosts(None) as hosts:
        hosts.torchrun([*words, str(tmp_path), ",".join(map(str, members))], per_host=per_host, timeout=240)
    for rank in range(2 * per_host):
        found = json.loads((tmp_path / f"found.{rank}").read_text())
        if rank not in members:
            assert found == []
            continue
        assert [each["victim"] for each in found] == [None, *members]
        for each in found:
            victim = each["victim"]
            assert each["named"] == ([] if victim is None else [victim]), each["text"]
            assert each["left_out"] == 0, each["text"]
            assert each["compared"] >= STEPS
            assert 0 < each["error"] < DELAY_S / 2, each["text"]
            if victim is not None:
                assert each["mean"][0] == pytest.approx(DELAY_S, rel=0.5)
                assert each["tags"] == ["gradients"]
                assert each["sites"][0].startswith(f"{PROGRAM}:")
                assert each["sites"][0].endswith(", in step")
                assert "clocks of hosts compared to" in each["text"]
