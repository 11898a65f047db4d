"""The `mcr-plus` command, in this process or a separate one, for tests of its output and exit status."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
from ranks import nursery

from mcr_plus.cli.main import main


class Answer(NamedTuple):
    """Output and exit status of a command."""

    returncode: int
    stdout: str
    stderr: str


def mcr_plus(*words: object) -> Answer:
    """Run the command in this process, which has imported torch already."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["mcr-plus", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
    return Answer(code, out.getvalue(), err.getvalue())


def mcr_plus_process(*words: str, cwd: Path | None = None) -> Answer:
    """Run the command in a separate process, forked from one that has imported torch."""
    command = [nursery().python, "-m", "mcr_plus.cli.main", *words]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, stdin=subprocess.DEVNULL,
        env=nursery().environ,
    )  # fmt: skip
    return Answer(answer.returncode, answer.stdout, answer.stderr)
