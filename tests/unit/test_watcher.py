"""What the thread of dumps leaves to a program: its descriptors after a fork, and its handler of SIGUSR2."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ranks import nursery

FORK = """
import os, mcr_plus as mcr
with mcr.init():
    pass
pipes = [*os.pipe(), *os.pipe(), *os.pipe()]  # numbers that were the job's
child = os.fork()
if not child:
    for each in pipes:
        os.fstat(each)  # raises if it is closed
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
HANDLER = """
import os, signal, mcr_plus as mcr
hits = []
mcr.init()
signal.signal(signal.SIGUSR2, lambda *_: hits.append(1))
os.kill(os.getpid(), signal.SIGUSR2)
mcr.reset()
os.kill(os.getpid(), signal.SIGUSR2)
mcr.finalize()
os.kill(os.getpid(), signal.SIGUSR2)
assert len(hits) == 3, hits
"""


def _run(path: Path, program: str) -> None:
    path.write_text(program)
    command = [nursery().python, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=nursery().environ)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_fork_after_the_job_leaves_descriptors_alone(tmp_path: Path) -> None:
    _run(tmp_path / "program.py", FORK)


def test_a_handler_that_is_set_during_the_job_stays(tmp_path: Path) -> None:
    _run(tmp_path / "program.py", HANDLER)
