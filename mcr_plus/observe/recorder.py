"""The Flight Recorder of a job in one process: dumps on failures, on SIGUSR2, and on request."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.engine.hook import Noted, OperationHook
from mcr_plus.errors import McrError
from mcr_plus.hosts.dump_request import EVERYBODY, SAME_FAILURE, ask
from mcr_plus.observe.dump_watcher import DumpWatcher
from mcr_plus.observe.files import default_folder, files_of, make_private, write_dump
from mcr_plus.observe.options import dump_folder_of
from mcr_plus.observe.snapshot import frames_for, take_snapshot

if TYPE_CHECKING:
    from mcr_plus.config.schema import Config
    from mcr_plus.engine.engine import Engine
    from mcr_plus.engine.work import IssuedWork
    from mcr_plus.observe.snapshot import Snapshot
    from mcr_plus.rendezvous.world import World

_log = logging.getLogger("mcr_plus")
_CONSISTENT: Final = 0.05  # seconds to wait for the engine's lock, so that the dump is consistent
_TEXT: Final = 500  # characters of an error that other ranks are told
_BY_SIGNAL: Final = "SIGUSR2"
_SAME_DEMAND: Final = 1.0  # seconds; signals to several ranks within this time are one demand


class Recorder(OperationHook):
    """Writes dumps of this process's operations.

    Attributes:
        folder: the folder for dumps; None if none is configured, then failures write no dumps.
        dumped: `reason` of the last dump (except `mcr.dump`), and its `file` or a `problem`; under the
            numbers of ranks that could not write, the files that this rank wrote for them.
    """

    def __init__(self, engine: Engine, world: World, config: Config) -> None:
        self._engine, self._world = engine, world
        folder, _ = dump_folder_of(config)
        self.folder = None if folder is None else os.path.abspath(folder)
        self._lock = threading.Lock()
        self._asked: set[str] = set()  # groups whose failure another rank has reported
        self._failures: dict[str, float] = {}  # group → when a dump for its failure was begun or written
        self._problems: set[str] = set()
        self._demanded = -_SAME_DEMAND  # when a user last demanded a dump
        self._passed_on = -_SAME_DEMAND  # when another rank last reported a signal
        self.dumped: dict[str, str] = {}
        self._watcher = DumpWatcher(self._on_signal, self._on_request)
        engine.add_hook(self)

    def stop(self) -> None:
        """Stop at the end of the job."""
        self._engine.remove_hook(self)
        self._watcher.stop()

    def abandon(self) -> None:
        """Release the parent's resources in a forked child."""
        self._engine.remove_hook(self)
        self._watcher.abandon()

    # -- the engine's reports ---------------------------------------------------------------------

    def waits_long(self, work: IssuedWork) -> None:
        """See `OperationHook`."""
        try:
            self._note(work)
        except Exception as error:
            self._complain(f"no frames of a long wait: {type(error).__name__}: {error}")

    def fails(self, work: IssuedWork, error: BaseException) -> Callable[[], None] | None:
        """Dump the first error of a group, on all ranks; see `OperationHook`."""
        try:
            return self._report(work, error)
        except Exception as problem:
            self._complain(f"no dump: {type(problem).__name__}: {problem}")
            return None

    def _report(self, work: IssuedWork, error: BaseException) -> Callable[[], None] | None:
        text = self._note(work).error = f"{type(error).__name__}: {error}"
        name = work.operation.state.group.name
        # If another rank failed first, the dump of that moment says more.
        if self.folder is None or work.operation.state.failure is not None or name in self._asked:
            return None
        self._failures[name] = time.monotonic()
        self._ask_others(name, f"rank {self._world.rank}: {text[:_TEXT]}")
        snapshot = take_snapshot(self._engine, text, error)
        return partial(self._hand_over, snapshot, self.folder)

    def _note(self, work: IssuedWork) -> Noted:
        if work.noted is None:
            now = time.time_ns()
            began = next((wait.began for wait in list(self._engine.waits) if wait.work is work), now)
            work.noted = Noted(work.sequence, frames_for(self._engine, work), began)
            work.operation.state.notes.append(work.noted)
        return work.noted

    # -- dumps ------------------------------------------------------------------------------------

    def dump(self, path: str | os.PathLike[str]) -> str:
        """Write the dump of `mcr.dump`."""
        files = files_of(path, self._world.rank)
        record = self._record(take_snapshot(self._engine, "mcr.dump"))
        try:
            with self._lock:
                write_dump(files, record)
        except OSError as error:
            raise McrError(
                f"dump: {str(files.record)!r} cannot be written: {error.strerror or error}"
            ) from error
        return str(files.record)

    def _ask_others(self, name: str, reason: str) -> None:
        """Ask all other ranks for their dumps; see `mcr_plus.hosts.dump_request`."""
        peers, text = self._engine.peers, f"{name}\0{reason}"
        ask(peers.beside(), text)
        peers.ask_elsewhere(text)

    def _on_signal(self) -> None:
        # A launcher sends a signal to all ranks, one after another: each rank answers the first signal,
        # received itself or reported by another rank, and ignores the rest.
        if time.monotonic() - self._passed_on < _SAME_DEMAND:
            return
        self._demanded = time.monotonic()
        self._ask_others("", f"{_BY_SIGNAL} to rank {self._world.rank}")
        self._try_to_write_for(_BY_SIGNAL)
        self._demanded = time.monotonic()  # the dump may have taken long, and requests have arrived meanwhile

    def _on_request(self, text: str) -> None:
        name, _, reason = text.partition("\0")
        if name in ("", EVERYBODY):
            self._on_demand(reason, passes_on=name == EVERYBODY)
        elif self.folder is not None:
            self._asked.add(name)
            # Ranks that fail at the same time all ask all others.
            if time.monotonic() - self._failures.get(name, -SAME_FAILURE) >= SAME_FAILURE:
                self._try_to_write_for(reason)
                self._failures[name] = time.monotonic()

    def _on_demand(self, reason: str, *, passes_on: bool) -> None:
        """Write a dump that a user has demanded, of this or another process."""
        now, by_signal = time.monotonic(), reason.startswith(_BY_SIGNAL)
        answered = by_signal and now - self._demanded < _SAME_DEMAND
        if answered or self.dumped.get("reason") == reason:
            return
        self._demanded = now
        if passes_on:
            self._ask_others("", reason)
        self._try_to_write_for(reason)
        self._demanded = time.monotonic()
        if by_signal:
            self._passed_on = self._demanded

    def _write_for(self, reason: str) -> None:
        """Write a dump of the present moment, in the watcher's thread."""
        # Between two steps of the program if possible; but a hanging program may hold the lock.
        locked = self._engine.lock.acquire(timeout=_CONSISTENT)
        try:
            snapshot = take_snapshot(self._engine, reason)
        finally:
            if locked:
                self._engine.lock.release()
        self._write(snapshot, self.folder)

    def _try_to_write_for(self, reason: str) -> None:
        try:
            self._write_for(reason)
        except Exception as error:  # a job that is ending may raise anything
            self._complain(f"no dump for {reason}: {type(error).__name__}: {error}")

    def _hand_over(self, snapshot: Snapshot, folder: str) -> None:
        if not self._watcher.do(partial(self._write, snapshot, folder)):
            self._complain(f"{folder!r} responds slowly: the dump may be missing")

    def _write(self, snapshot: Snapshot, folder: str | None) -> None:
        """Write a dump, and dumps of ranks that cannot. Log an error once; one error hides no other."""
        try:
            if folder is None:
                folder = default_folder()
                make_private(folder)
            with self._lock:
                files = files_of(os.path.join(folder, ""), self._world.rank)
                record = self._record(snapshot)
                write_dump(files, record)
                instead = {}
                from mcr_plus.observe.proxy_dumps import substitutes  # needed only for dumps

                for rank, other in substitutes(record, self._engine, self._world, folder).items():
                    theirs = files_of(os.path.join(folder, ""), rank)
                    write_dump(theirs, other)
                    instead[str(rank)] = str(theirs.text)
        except Exception as error:
            what = error.strerror if isinstance(error, OSError) and error.strerror else f"{error}"
            self._complain(f"no dump in {folder!r}: {what}")
            self.dumped = {"reason": snapshot.reason, "problem": f"no dump in {folder!r}: {what}"}
            return
        self.dumped = {"reason": snapshot.reason, "file": str(files.text), **instead}
        if time.monotonic() - self._demanded < _SAME_DEMAND:
            _log.warning("rank %d: dump for %s in %s", self._world.rank, snapshot.reason, files.record)

    def _complain(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.add(problem)
            _log.warning("rank %d: %s", self._world.rank, problem)

    def _record(self, snapshot: Snapshot) -> dict[str, Any]:
        world, peers = self._world, self._engine.peers
        lost = {rank: peers.status(rank) for rank in range(world.size) if rank != world.rank}
        from mcr_plus.observe.flight_record import flight_record

        return flight_record(
            snapshot,
            {
                "job": self._job(),
                "rank": world.rank,
                "world_size": world.size,
                "host": world.hosts[world.rank],
                "hosts": list(world.hosts),
                "pid": os.getpid(),
                "written_by": world.rank,
                "processes": {str(rank): status for rank, status in lost.items()},
            },
        )

    def _job(self) -> str:
        """Return a unique name of this world, the same on all ranks."""
        text = json.dumps([list(process) for process in self._engine.peers.processes] or [os.getpid()])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
