"""torchft's process group over mcr_plus."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

SUITE: Final = Path(__file__).parents[1] / "torch_suite" / "torchft_suite.py"


@pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")
def test_torchfts_own() -> None:
    run = subprocess.run([sys.executable, str(SUITE)], capture_output=True, text=True, timeout=500)
    told = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"test"')]
    assert len(told) > 20, run.stderr[-2000:]
    assert [f"{each['test']}: {each['why'][-1500:]}" for each in told if each["outcome"] != "pass"] == []
