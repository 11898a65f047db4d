"""The thread of dumps and a program's own descriptors after a fork and handler of SIGUSR2."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from ranks import nursery

from mcr_plus.observe.dump_watcher import DumpWatcher

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


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_signal_that_is_read_in_pieces_is_answered_once(pieces: int) -> None:
    written = b"Stack (most recent call first):\n", b'  File "a.py", line 3\n', b'  File "a.py", line 9\n'
    hits: list[int] = []
    watcher = DumpWatcher(lambda: hits.append(1), lambda _: None)
    try:
        assert watcher._pipe is not None
        for _ in range(2):
            for piece in written if pieces == 3 else (b"".join(written),):
                os.write(watcher._pipe, piece)
                for _ in range(2):  # these are taken before what has woken the thread together with them
                    watcher.do(lambda: None)
        assert len(hits) == 2
        # faulthandler's output begins in the same way. A signal to a thread arrives before this returns.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
        for _ in range(2):
            watcher.do(lambda: None)
        assert len(hits) == 3
    finally:
        watcher.stop()
