"""The `mcr-plus` command in this process, for tests of what it prints and ends with."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import pytest

from mcr_plus.cli.main import main


class Answer(NamedTuple):
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def mcr_plus(*words: object) -> Answer:
    """Run the command here: torch is imported once."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["mcr-plus", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
    return Answer(code, out.getvalue(), err.getvalue())
