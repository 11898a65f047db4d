"""Supervisor: starts ranks, and restarts failed ones.

    python -m mcr_plus.launch.supervisor RANKS MIN_RANKS RESTARTS FOLDER COMMAND…

mpiexec ends all ranks when one fails, and torchrun's agent restarts all of them; the supervisor leaves the
other ranks alone. It serves one host, and is a separate process, so that `mcr-plus run` monitors it like
mpiexec and the agent. The supervisor holds the job's store, which therefore lives as long as the job,
whichever rank dies.

A restarted rank waits in `mcr.elastic` for ranks that train. If a rank is lost before any rank has reached
`mcr.elastic`, its peers fail during the program's set-up, and no rank can admit restarted ranks. So once no
process of the first generation is left, all ranks start again with a new store.

A program without `mcr.elastic` admits no ranks, even if it continues with `mcr.shrink`: a restarted rank then
runs alone. Once all other ranks have ended, for any reason, the job ends as failed, and no rank is restarted.

Exit status: 0 if all ranks ended with 0, except for ranks without which the job continued, 1 if fewer than
MIN_RANKS were left, 128 + the signal number after SIGTERM or SIGINT.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from mcr_plus.core.deadline import Deadline, until
from mcr_plus.core.environment import LOOPBACK
from mcr_plus.launch import scratch
from mcr_plus.launch.channels import signal_name
from mcr_plus.rendezvous.arrivals import have_met, have_trained, note_end, takes_in
from mcr_plus.rendezvous.store_connections import served

_POLL_S = 0.02
_SHORTEST_LIFE_S = 1.0  # seconds; a rank that fails sooner is restarted only after this time
_TERMINATE_S = 3.0
_IN_VAIN = (
    "the job ends: nobody is left to take in ranks that were started again, as none had come to mcr.elastic"
)


@dataclass(slots=True)
class _Rank:
    """One rank. A rank without process and code waits for its restart."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    code: int | None = None  # exit status, or minus a signal, of a rank that is not restarted
    restarts: int = 0
    is_substitute: bool = False  # its process was started after the ranks had met
    began: float = 0.0
    due: float = 0.0  # time of the next start


class Supervisor:
    """The ranks of a job on this host."""

    def __init__(
        self, ranks: int, min_ranks: int, restarts: int, folder: str, command: Sequence[str]
    ) -> None:
        """Open the store; `folder` has the pipe from which `mcr-plus run` reads the fate of ranks."""
        self._ranks = [_Rank(number) for number in range(ranks)]
        self._min_ranks = min_ranks
        self._limit, self._used = restarts, 0
        self._command = command
        self._status = os.open(f"{folder}/status", os.O_WRONLY | os.O_CLOEXEC)
        self._store = served()
        self._signal: int | None = None

    def run(self) -> int:
        """Start the ranks and watch them until the job ends; return the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        try:
            return self._watch()
        finally:
            self._end()

    def _watch(self) -> int:
        while self._signal is None:
            for rank in self._ranks:
                self._look_after(rank)
            if self._left() < self._min_ranks:
                return 1
            if all(rank.code is not None for rank in self._ranks):
                return 0
            time.sleep(_POLL_S)
        return 128 + self._signal

    def _look_after(self, rank: _Rank) -> None:
        if rank.code is not None:
            return
        if rank.process is None:
            if time.monotonic() >= rank.due:
                self._start(rank)
        elif (code := rank.process.poll()) == 0:
            rank.code = 0
            self._note_end(rank, 0)
            if self._nobody_takes_in():
                self._report(rank, 0, _IN_VAIN)
        elif code is not None:
            self._judge(rank, code)

    def _start(self, rank: _Rank) -> None:
        rank.began = time.monotonic()
        rank.is_substitute = self._have_met()
        rank.process = subprocess.Popen(self._command, env=self._environment(rank))

    def _judge(self, rank: _Rank, code: int) -> None:
        """Decide the consequences of a failed rank for the job, and report them."""
        again = self._used < self._limit
        if again:
            self._used += 1
            self._replace(rank)
            verdict = f"started again ({self._used} of {self._limit})"
            if self._nobody_trains():
                self._begin_anew()
                verdict += ", and all others with it: none had come to mcr.elastic"
        else:
            rank.code = code
            self._note_end(rank, code)
            left = self._left()
            ranks = f"{left} rank{'' if left == 1 else 's'}"
            if left >= self._min_ranks:
                verdict = f"the job goes on with {ranks}, no restarts are left"
            else:
                verdict = f"the job ends: {ranks} left, at least {self._min_ranks} needed"
        if self._nobody_takes_in():
            verdict, again = _IN_VAIN, False
        self._report(rank, code, verdict, again=again)

    def _report(self, rank: _Rank, code: int, verdict: str, *, again: bool = False) -> None:
        report = {"rank": rank.number, "code": code, "time": time.monotonic(), "verdict": verdict}
        try:
            os.write(self._status, json.dumps(report | {"again": again}).encode() + b"\n")
        except OSError:
            pass  # `mcr-plus run` has been killed, and SIGTERM follows

    def _replace(self, rank: _Rank) -> None:
        rank.restarts += 1
        rank.process, rank.due = None, rank.began + _SHORTEST_LIFE_S

    def _have_met(self) -> bool:
        with contextlib.suppress(RuntimeError):  # the store is in this process
            return have_met(self._store)
        return False

    def _nobody_trains(self) -> bool:
        """Return whether all processes that had met failed before any of them reached `mcr.elastic`."""
        if any(rank.code is not None or (rank.process and not rank.is_substitute) for rank in self._ranks):
            return False
        with contextlib.suppress(RuntimeError):
            return have_met(self._store) and not have_trained(self._store)
        return False

    def _begin_anew(self) -> None:
        """Start all ranks again."""
        self._stop([rank.process for rank in self._ranks if rank.process is not None])
        self._store = served()
        for rank in self._ranks:
            if rank.process is not None:
                self._replace(rank)

    def _note_end(self, rank: _Rank, code: int) -> None:
        """Tell ranks that wait for `rank` in `mcr.init` that it will not arrive."""
        how = f"exited with status {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
        with contextlib.suppress(RuntimeError):  # the store is in this process
            note_end(self._store, rank.number, how)

    def _left(self) -> int:
        """Return the number of ranks that run, will run, or ended with 0; 0 if no rank can admit others."""
        return 0 if self._nobody_takes_in() else sum(not rank.code for rank in self._ranks)

    def _nobody_takes_in(self) -> bool:
        """Return whether restarts are useless: all ranks that had met have ended, without `mcr.elastic`.

        This includes ranks that ended with 0: a rank alone would compute a different result.
        """
        again = [rank for rank in self._ranks if rank.process is None or rank.is_substitute]
        if all(rank.code for rank in again) or any(
            rank.code is None for rank in self._ranks if rank not in again
        ):
            return False
        with contextlib.suppress(RuntimeError):  # the store is in this process
            return have_met(self._store) and not takes_in(self._store)
        return False

    def _environment(self, rank: _Rank) -> dict[str, str]:
        """Return the variables that torchrun's agent sets, and the number of this rank's restarts."""
        number, size = str(rank.number), str(len(self._ranks))
        return {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            **os.environ,
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), number),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "rank",
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RUN_ID": os.environ.get(scratch.JOB_VARIABLE, "mcr_plus"),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(rank.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self._limit),
            "MCR_RESTARTS": str(rank.restarts),
        }

    def _end(self) -> None:
        self._stop([rank.process for rank in self._ranks if rank.process is not None])

    @staticmethod
    def _stop(running: Sequence[subprocess.Popen[bytes]]) -> None:
        """End processes by SIGTERM, which they may handle, and then by SIGKILL."""
        for process in running:
            process.terminate()
        until(lambda: None not in [each.poll() for each in running], Deadline(_TERMINATE_S), _POLL_S)
        for process in running:
            process.kill()

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number


def main() -> int:
    """Run a job; remove its folders if `mcr-plus run` was killed and cannot remove them."""
    ranks, min_ranks, restarts = (int(word) for word in sys.argv[1:4])
    try:
        return Supervisor(ranks, min_ranks, restarts, sys.argv[4], sys.argv[5:]).run()
    finally:
        scratch.remove_stale()


if __name__ == "__main__":
    sys.exit(main())
