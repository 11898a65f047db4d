"""torchft's process group over mcr_plus, without torchft: tests/clients has torchft's own tests."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs.torch_backend import torchft_jobs as jobs
from ranks import nursery, run_ranks


def test_a_group_that_is_configured_again() -> None:
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    results = run_ranks(jobs.configured_again, 3, via="torch", check=False, env=env, timeout=90)
    first, killed, last = results
    assert killed.returncode == -9
    for value in (first.value, last.value):
        assert value is not None, first.stderr + last.stderr
        assert (value["name"], value["fine"]) == ("torchft-mcr", None)
        assert value["lost"].startswith("BackendError: Connection closed by peer: ")
        assert value["errored"].startswith("the group is aborted: ")
        assert "rank 1 has died" in value["errored"]
    assert first.value["sums"] == [3.0, 2.0]
    assert first.value["late"].startswith("CommTimeout: timed out after 0:00:00.500000: ")
    assert last.value["sums"] == [3.0, 2.0, 1.0]
    assert last.value["left"]


@pytest.mark.skipif(find_spec("torchft") is not None, reason="torchft is installed")
def test_without_torchft_it_says_what_to_install(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from mcr_plus.torchft import ProcessGroupMcr\nProcessGroupMcr()\n")
    command = [nursery().python, str(program)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=nursery().environ)
    assert "ImportError: mcr_plus.torchft needs torchft: pip install torchft-nightly" in run.stderr
