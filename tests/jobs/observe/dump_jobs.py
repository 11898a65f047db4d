"""Twelve faults, one at a time, in jobs that dump. Lines at which ranks then are end with `# at: NAME`."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from ranks import has_come, meet, stop_until, wait_for_files, wait_for_ranks

import mcr_plus as mcr
from mcr_plus.core.proc import handles
from mcr_plus.core.stacks import frames_of
from mcr_plus.hosts.page import page_of
from mcr_plus.job.init import current
from mcr_plus.observe.hook import current_recorder

Group = mcr.Communicator
DEADLINE_S: Final = 2.0
LONG_S: Final = 90.0  # of jobs in which no deadline shall pass
LATE_S: Final = 1.5  # above the second after which a wait is remembered
SLOW_S: Final = 0.06
VICTIM: Final = 1


@dataclass(frozen=True)
class Job:
    """What a fault is made of on a rank."""

    library: str
    group: Group
    other: Group  # of the same ranks
    folder: Path  # of the dumps

    @property
    def mine(self) -> bool:
        """Whether this is the rank with the fault."""
        return self.group.rank == VICTIM

    def value(self, numel: int = 4) -> torch.Tensor:
        return torch.full((numel,), self.group.rank + 1.0)


def missing(job: Job) -> None:
    if job.mine:
        while not (job.folder / "rank_1").exists():
            time.sleep(0.01)  # at: missing away
    else:
        job.group.all_reduce(job.value(), backend=job.library)  # at: missing waits


def other_kind(job: Job) -> None:
    if job.mine:
        job.group.broadcast(job.value(), 0, backend=job.library)  # at: kind away
    else:
        job.group.all_reduce(job.value(), backend=job.library)  # at: kind waits


def other_size(job: Job) -> None:
    numel = 5 if job.mine else 4
    job.group.all_reduce(job.value(numel), backend=job.library)  # at: size


def other_order(job: Job) -> None:
    def reduced() -> mcr.Work | None:
        return job.group.all_reduce(job.value(), async_op=True, backend=job.library)

    def sent() -> mcr.Work | None:
        return job.group.broadcast(job.value(), 0, async_op=True, backend=job.library)

    with current().engine.lock:  # otherwise a thread might fail the first before the second is issued
        works = [start() for start in ((sent, reduced) if job.mine else (reduced, sent))]
    for work in works:
        assert work is not None
        work.wait()


def slow(job: Job) -> None:
    for _ in range(12):
        if job.mine:
            time.sleep(SLOW_S)
        job.group.all_reduce(job.value(), backend=job.library)
    if job.mine:
        while not (job.folder / "rank_1").exists():
            time.sleep(0.01)  # at: slow away
    job.group.all_reduce(job.value(), backend=job.library)  # at: slow waits


def late(job: Job) -> None:
    if job.mine:
        wait_for_ranks("late", 1)
        time.sleep(LATE_S)
    else:
        has_come("late")
    job.group.all_reduce(job.value(), backend=job.library)  # at: late waits
    mcr.dump(f"{job.folder}/")


def other_root(job: Job) -> None:
    root = 1 if job.mine else 0
    job.group.broadcast(job.value(), root, backend=job.library)  # at: root


def other_reduce_op(job: Job) -> None:
    op: Any = mcr.MAX if job.mine else mcr.SUM
    job.group.all_reduce(job.value(), op, backend=job.library)  # at: reduce op


def other_group(job: Job) -> None:
    if job.mine:
        job.other.all_reduce(job.value(), backend=job.library)  # at: group away
    else:
        job.group.all_reduce(job.value(), backend=job.library)  # at: group waits


def message(job: Job) -> None:
    if job.mine:
        while not (job.folder / "rank_1").exists():
            time.sleep(0.01)  # at: message away
    else:
        job.group.recv(job.value(), VICTIM, 3, backend=job.library)  # at: message waits


FAULTS: Final[dict[str, Callable[[Job], None]]] = {
    "missing": missing,
    "kind": other_kind,
    "size": other_size,
    "order": other_order,
    "slow": slow,
    "late": late,
    "root": other_root,
    "reduce op": other_reduce_op,
    "group": other_group,
    "message": message,
}
"""Those after which a job goes on, each in groups of its own."""


def faults(library: str, folder: str) -> dict[str, str]:
    """Runs on two ranks: each fault, with its dumps in a folder of its name; what was raised."""
    raised = {}
    for deadline in (DEADLINE_S, LONG_S):
        with _begun(library, deadline):
            for name in FAULTS:
                if (name == "late") == (deadline == LONG_S):
                    raised[name] = _raised(library, Path(folder, name))
    return raised


def _raised(library: str, folder: Path) -> str:
    """What a fault raises, once it is dumped."""
    group, other = mcr.new_group([0, 1]), mcr.new_group([0, 1])
    job = Job(library, group, other, folder)
    for each in (group, other):
        each.all_reduce(job.value(), backend=library)
        each.broadcast(job.value(), 0, backend=library)
    meet(f"before {folder.name}", group.size)
    current_recorder().folder = str(folder)
    raised = ""
    try:
        FAULTS[folder.name](job)
    except mcr.McrError as error:
        raised = type(error).__name__
    wait_for_files(folder / f"rank_{group.rank}")
    current_recorder().folder = None
    meet(f"after {folder.name}", group.size)
    for each in (group, other):
        current().leave(each, clean=False)
    return raised


def losing(name: str, library: str, folder: str) -> str:
    """Runs on two ranks, of which one dies or is stopped; what the other one has raised."""
    comm = _begun(library, LONG_S)
    comm.all_reduce(torch.ones(4), backend=library)
    current_recorder().folder = f"{folder}/{name}"
    meet("before the loss", comm.size)
    if comm.rank == VICTIM:
        _is_drawn()
        stop_until("told", 1, "KILL") if name == "stopped" else os.kill(os.getpid(), signal.SIGKILL)
    raised = ""
    try:
        comm.all_reduce(torch.ones(4), backend=library)  # at: losing waits
    except mcr.McrError as error:
        raised = type(error).__name__
    has_come("told")
    return raised


def _is_drawn() -> None:
    """Wait until the status page of this rank shows it here."""
    while (page := page_of(os.getpid())) is None or not any(
        frame[0] == _is_drawn.__name__ for frame in page.picture.get("frames", ())
    ):
        time.sleep(0.01)


def _begun(library: str, deadline: float) -> mcr.Communicator:
    torch.set_num_threads(1)
    config = {"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": f"{deadline}s"}}]}
    return mcr.init(config, backends=list(dict.fromkeys([library, "gloo"])), timeout=60)


def line_of(mark: str) -> int:
    """The line of this file that is marked `# at: MARK`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# at: {mark}")]
    return number


def signals(folder: str) -> dict[str, Any]:
    """Runs on two ranks: SIGUSR2 in a hang and many at once, dumps that cannot be written, own handlers."""
    found: dict[str, Any] = {}
    complaints: list[str] = []
    logging.getLogger("mcr_plus").addHandler(_Listener(complaints))
    with _begun("msccl", LONG_S) as comm:
        comm.barrier()
        current_recorder().folder = f"{folder}/hang"
        waits, asked, answered = (Path(folder, name) for name in ("waits", "asked", "answered"))
        beside = threading.Thread(target=_asks_as_well, args=(waits, asked, answered))
        if comm.rank == VICTIM:
            wait_for_files(waits)
            for _ in range(50):
                os.kill(os.getpid(), signal.SIGUSR2)
            wait_for_files(Path(folder, "hang", "rank_0"), Path(folder, "hang", "rank_1"))
            _settle()
            asked.touch()
            wait_for_files(answered)
        work = comm.all_reduce(torch.ones(4), async_op=True)
        assert work is not None
        if comm.rank != VICTIM:
            beside.start()
        work.wait()  # at: signal waits
        _settle()  # no dump of this demand goes to the next folder
        comm.barrier()
        found["signals"] = len(complaints)

        # A failure whose dump fails: a limit of the process stands for a full disk.
        current_recorder().folder = f"{folder}/full"
        groups = mcr.new_group([0, 1]), mcr.new_group([0, 1])
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for _ in range(300):  # of which dumps are larger than the limit
            comm.all_reduce(torch.ones(4))
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        for each in groups:
            try:
                each.all_reduce(torch.ones(4 + comm.rank))
            except mcr.McrError as error:
                found["error"] = type(error).__name__
            comm.barrier()
        for _ in range(2):  # each has asked the other one for its dump
            _settle()
            comm.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        found["left"] = sorted(os.listdir(f"{folder}/full"))
        found["complaints"] = complaints[found["signals"] :]
        current_recorder().folder = None
        comm.barrier()

    # Handlers of the program stay, and there is none of ours after the end.
    found["after"] = handles(os.getpid(), signal.SIGUSR2)
    seen: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    with _begun("msccl", LONG_S) as comm:
        os.kill(os.getpid(), signal.SIGUSR2)
        comm.barrier()
    found["own"] = seen
    return found


def _asks_as_well(waits: Path, asked: Path, answered: Path) -> None:
    """A signal to this process, which waits; then everything that the other one has asked for is answered."""
    here, main = line_of("signal waits"), threading.main_thread().ident or 0
    ends = time.monotonic() + LONG_S
    while here not in (frame.line for frame in frames_of(main)) and time.monotonic() < ends:
        time.sleep(0.01)
    time.sleep(0.1)  # it only has to enter its wait
    waits.touch()
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)  # delivered before this returns
    wait_for_files(asked)
    _settle()
    answered.touch()


def _settle() -> None:
    """Return when what had come for the thread that writes dumps has been answered."""
    # The thread takes these before the signals and requests that woke it together with them.
    for _ in range(2):
        current_recorder()._watcher.do(lambda: None)


def asked_through_the_launcher(launcher: int, folder: str) -> None:
    """Runs on two ranks: SIGUSR2 to the process that has started them."""
    with _begun("msccl", LONG_S) as comm:
        current_recorder().folder = folder
        comm.barrier()
        if comm.rank == VICTIM:
            os.kill(launcher, signal.SIGUSR2)
        wait_for_files(*(Path(folder, f"rank_{rank}") for rank in range(comm.size)))


class _Listener(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())
