"""Run a program as ranks of a simulated job: each rank in a forked process, one after another."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import resource
import runpy
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed

from mcr_plus.bucketing.live_bytes import LiveBytes
from mcr_plus.errors import BackendError
from mcr_plus.rendezvous.world import World
from mcr_plus.simulate.recorder import CallRecorder, EnoughSteps
from mcr_plus.simulate.records import RecordedRank
from mcr_plus.simulate.world import SimulatedCluster

MEASURED_FROM: Final = 2  # steps in which memory is measured, which takes time
_TRIES: Final = 8  # failures of a rank for lack of other ranks' values
_SHARED: Final = ("torch.", "mcr_plus.", "numpy.", "numba.")


@dataclass
class SimulatedProgram:
    """A program with its arguments, on so many ranks.

    Attributes:
        hosts: host of each rank. steps: number of steps of each rank; 0: to the program's end.
        memory: measure the peak of tensors. jobs: number of processes at a time.
        timeout: seconds after which a rank is ended.
        values: what ranks that have run have sent, by place in the program.
    """

    script: Path
    arguments: Sequence[str]
    hosts: tuple[str, ...]
    steps: int = 4
    memory: bool = True
    jobs: int = 2
    timeout: float = 300.0
    values: dict[Any, Any] = field(default_factory=dict)
    ran: dict[int, RecordedRank] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    def run(self, ranks: Iterable[int]) -> None:
        """Run ranks that have not run, several at a time. Raises `BackendError` if one fails.

        A rank that fails for lack of a value from a rank that has not run is run again after that rank.
        """
        todo = [rank for rank in dict.fromkeys(ranks) if rank not in self.ran]
        if not self.ran and len(todo) > 1:  # what it sends is for the others
            self.run([todo.pop(0)])
        failed, needs = Counter[int](), dict[int, int]()
        running: dict[int, tuple[int, frozenset[int]]] = {}  # with the ranks that had run before
        with tempfile.TemporaryDirectory(prefix="mcr-simulate-") as folder:
            try:
                while todo or running:
                    now = {rank for rank, _ in running.values()}
                    ready = [rank for rank in todo if needs.get(rank) not in now]
                    for rank in ready[: self.jobs - len(running)]:
                        todo.remove(rank)
                        running[self._fork(rank, Path(folder))] = rank, frozenset(self.ran)
                    process, status = os.wait()
                    if process in running:
                        rank, before = running.pop(process)
                        record = self._read(rank, status, Path(folder))
                        needed = record.missing if record.failure else None
                        failed[rank] += bool(record.failure)
                        if record.failure and (needed is None or needed in before or failed[rank] > _TRIES):
                            raise BackendError(_failure(record))
                        self._keep(record)
                        if needed is not None:
                            needs[rank] = needed
                            others = {*self.ran, *(each for each, _ in running.values())}
                            todo = [*dict.fromkeys([*({needed} - others), rank, *todo])]
            finally:
                for process in running:
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)

    def _keep(self, record: RecordedRank) -> None:
        """Keep what a rank has sent, and its record if it has not failed."""
        for channel, values in record.values.items():
            if channel[0] == record.rank or channel not in self.values:
                self.values[channel] = values
        if not record.failure:
            self.ran[record.rank] = record
            for name in record.modules if len(self.ran) == 1 else ():  # once for all later ranks
                with contextlib.suppress(Exception):
                    importlib.import_module(name)

    def _read(self, rank: int, status: int, folder: Path) -> RecordedRank:
        """Return the record that a process has left."""
        path = folder / str(rank)
        output = (folder / f"{rank}.out").read_text(errors="replace")
        if not path.exists():
            code = os.waitstatus_to_exitcode(status)
            said = output.partition('  File "<frozen runpy>')[0][-4000:]  # then come frames that started it
            raise BackendError(f"rank {rank}: the program has ended with status {code}\n{said}")
        record: RecordedRank = pickle.loads(path.read_bytes())
        path.unlink()
        record.output = output
        return record

    def _fork(self, rank: int, folder: Path) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process:
            return process
        code = 1
        try:
            into = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(into, 1)
            os.dup2(into, 2)
            faulthandler.dump_traceback_later(self.timeout, exit=True, file=2)
            record = self._be(rank)
            sys.stdout.flush()
            sys.stderr.flush()
            (folder / f"{rank}.part").write_bytes(pickle.dumps(record))
            (folder / f"{rank}.part").rename(folder / str(rank))
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _be(self, rank: int) -> RecordedRank:
        """Run the program as this rank, in a process of its own."""
        host = self.hosts[rank]
        local = sum(each == host for each in self.hosts[:rank])
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.hosts.count(host)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
            "GROUP_RANK": str(sorted(set(self.hosts)).index(host)),
        }  # fmt: skip
        torch.set_num_threads(1)
        recorder = CallRecorder(rank, self.values, self.steps)
        world = World(rank, self.size, self.hosts, 300.0, None)
        SimulatedCluster(recorder, world).install()
        tensors = LiveBytes() if self.memory else None
        if tensors is not None:
            recorder.on_step = lambda step: tensors.stop() if step == MEASURED_FROM else None
            tensors.start()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        loaded = {*sys.modules}
        sys.argv = [str(self.script), *self.arguments]
        sys.path[0] = str(self.script.absolute().parent)
        record = recorder.record
        recorder.resume()
        try:
            runpy.run_path(str(self.script.absolute()), run_name="__main__")
        except EnoughSteps:
            pass
        except SystemExit as ended:
            if ended.code not in (None, 0):
                record.failure = f"it ended with status {ended.code}\n"
        except BaseException as error:
            record.failure = _of_program(error)
        if tensors is not None:
            tensors.stop()
            record.peak = tensors.peak
        record.modules = [name for name in sys.modules if name not in loaded and name.startswith(_SHARED)]
        record.resident = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        return record


def _failure(record: RecordedRank) -> str:
    return f"rank {record.rank}: the program has failed\n{record.output[-2000:]}{record.failure}"


def _of_program(error: BaseException) -> str:
    """Return the traceback of an error, from the program's first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
