"""Parent process of one rank: the launcher starts `python wrapper.py COMMAND…` once per rank.

The wrapper connects the rank's output to pipes of `mcr-plus run`, which keeps the output of ranks separate
under any MPI. It also reports the exit of the rank, and makes the rank die with the launcher. It uses only
the standard library and is run by path, in an interpreter without site-packages, so that it starts within
milliseconds.

`python wrapper.py --launcher PID COMMAND…` replaces itself by the launcher (mpiexec), which gets SIGTERM when
process PID dies.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from types import FrameType

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_PR_SET_PDEATHSIG = 1
_COMMAND_NOT_FOUND = 127
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Run the command of this rank, and exit with its status or signal."""
    if sys.argv[1] == "--launcher":
        _die_with(int(sys.argv[2]), signal.SIGTERM)
        os.execvp(sys.argv[3], sys.argv[3:])
    rank = next(int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ)
    folder = os.environ["MCR_JOB_FOLDER"]
    _die_with(os.getppid(), signal.SIGKILL)
    status = os.open(f"{folder}/status", os.O_WRONLY | os.O_CLOEXEC)
    _attach(folder, rank)
    _set_torchrun_variables(rank)
    child = _spawn(sys.argv[1:], f"{folder}/error.{rank}")
    _forward_signals(child)
    _report(status, rank, child, None)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _report(status, rank, child, code)
    return _end_like(code)


def _die_with(parent: int, number: int) -> None:
    """Make the kernel send signal `number` when this process's parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _attach(folder: str, rank: int) -> None:
    """Replace stdout and stderr by the pipes of this rank; rank 0 may get the terminal as stdout."""
    terminal = os.environ.get("MCR_JOB_TERMINAL") if rank == 0 else None
    for target, path in ((1, terminal or f"{folder}/out.{rank}"), (2, f"{folder}/err.{rank}")):
        channel = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        os.dup2(channel, target)
        os.close(channel)


def _set_torchrun_variables(rank: int) -> None:
    """Set RANK and WORLD_SIZE under MPI too: `init_process_group` does not read MPI's own variables."""
    size = next((os.environ[name] for name in _SIZE_VARIABLES if name in os.environ), None)
    if size is not None:  # all ranks are on this host
        for name, value in (("RANK", str(rank)), ("WORLD_SIZE", size)):
            os.environ[name] = os.environ[f"LOCAL_{name}"] = value


def _spawn(command: list[str], errors: str) -> int:
    """Start the rank; `errors` is the pipe for its uncaught exception, if there is one."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        if os.path.exists(errors):
            os.environ["MCR_JOB_ERRORS"] = f"{os.getpid()}:{errors}"
        try:
            _die_with(parent, signal.SIGKILL)
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(_COMMAND_NOT_FOUND)
    return child


def _forward_signals(child: int) -> None:
    def forward(number: int, _frame: FrameType | None) -> None:
        try:
            os.kill(child, number)
        except ProcessLookupError:
            pass

    for number in _FORWARDED:
        signal.signal(number, forward)


def _report(status: int, rank: int, pid: int, code: int | None) -> None:
    """Write one line, short enough for an atomic write, since all ranks share the pipe."""
    # JSON by hand: every rank of every job would import `json`, which takes as long as Python's own start.
    ended = "null" if code is None else str(code)
    line = f'{{"rank": {rank}, "pid": {pid}, "code": {ended}, "time": {time.monotonic()}}}'
    try:
        os.write(status, line.encode() + b"\n")
    except OSError:
        pass  # the launcher has died, and this process will be killed next


def _end_like(code: int) -> int:
    """Return the exit status of the rank, or die of the same signal, which MPI's own launcher reports."""
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # avoid a second core file
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


if __name__ == "__main__":
    sys.exit(main())
