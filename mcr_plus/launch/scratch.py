"""Folders of a job: accessible only to their owner, and removed with the job, however it ends.

A job has one folder in the temporary directory and one in shared memory, with the same name, which contains
the launcher's pid. The launcher holds a lock on both as long as it lives. The kernel releases the locks when
the launcher dies, however it dies, so the user's next launcher can distinguish stale folders from folders in
use. Locks also work between containers that share a folder but cannot see each other's processes. They may
not work between hosts that share a folder (NFS). So the name ends with the id of the running kernel, and
folders of other kernels are left alone.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from mcr_plus.core.deadline import Deadline
from mcr_plus.core.proc import boot_id, read_stat
from mcr_plus.errors import LaunchError

JOB_VARIABLE = "MCR_JOB_ID"

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "mcr-job"
# MPICH and UCX choose the names of their segments; the folder cannot be configured.
_FOREIGN_SEGMENT = re.compile(r"mpich_shm_|mpich_shar_|ucx_shm_posix_|Intel_MPI_|fi_shm|shm-\w+-\w+$")
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY
_SETTLE_S = 0.05
_KILL_DEADLINE_S = 5.0


@dataclass(slots=True)
class Scratch:
    """The folders of one job; a context manager that removes them and kills the job's remaining processes."""

    root: Path
    shm: Path
    locks: tuple[int, ...]  # descriptors

    @property
    def name(self) -> str:
        """Return the name of the job: the value of MCR_JOB_ID in all its processes."""
        return self.root.name

    def __enter__(self) -> Scratch:
        """Return the folders."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove all leftovers of the job."""
        kill_job(self.name)
        remove_orphaned_segments()
        _remove(self.root, self.shm)
        for lock in self.locks:
            os.close(lock)


def create() -> Scratch:
    """Remove folders of jobs with dead launchers, then create the folders of a new job.

    Raises `LaunchError`, and leaves no folder, if they cannot be created, for example on a full disk.
    """
    remove_stale()
    name = f"{_PREFIX}-{os.getuid()}-{os.getpid()}-{time.monotonic_ns():x}-{kernel()}"
    root, shm = Path(tempfile.gettempdir(), name), _shm_folder(name)
    locks: list[int] = []
    try:
        for folder in dict.fromkeys((root, shm)):
            lock = _create_locked(folder)
            locks.append(lock)
    except BaseException as error:
        _remove(root, shm)
        for lock in locks:
            os.close(lock)
        if isinstance(error, OSError):
            raise LaunchError(
                f"the job's folders {root} and {shm} cannot be made: {error}; free space or files there, or "
                "set TMPDIR to another folder"
            ) from error
        raise
    return Scratch(root, shm, tuple(locks))


def kernel() -> str:
    """Return the suffix of the folder names of launchers under this running kernel."""
    return hashlib.blake2b(boot_id().encode(), digest_size=4).hexdigest()


def remove_stale() -> None:
    """Remove folders and kill processes left here by dead launchers of this user."""
    name = f"{_PREFIX}-{os.getuid()}-*-{kernel()}"
    stale = [_remove_if_stale(root) for root in Path(tempfile.gettempdir()).glob(name)]
    # Jobs with another temporary directory. Their processes may be about to clean up there.
    stale += [_remove_if_stale(shm) for shm in _SHARED_MEMORY.glob(name) if _is_abandoned(shm.name)]
    if any(stale):
        remove_orphaned_segments()


def processes_of(job: str) -> list[int]:
    """Return the live processes with the job's MCR_JOB_ID in their environment, except this one."""
    mark = f"{JOB_VARIABLE}={job}".encode()
    return [pid for pid in _own_processes() if mark in _read(pid, "environ").split(b"\0")]


def kill_job(job: str) -> None:
    """Kill every process of a job with SIGKILL, and wait until none is left."""
    deadline = Deadline(_KILL_DEADLINE_S)
    while (pids := processes_of(job)) and not deadline.passed():
        for pid in pids:
            _kill(pid)
        time.sleep(0.01)


def remove_orphaned_segments() -> None:
    """Remove shared-memory files of MPICH and UCX that belong to this user and are not in use.

    Files are listed twice, because a job maps a file a moment after creating it.
    """
    orphans = _orphaned_segments()
    if orphans:
        time.sleep(_SETTLE_S)
        for path in orphans & _orphaned_segments():
            path.unlink(missing_ok=True)


def _shm_folder(name: str) -> Path:
    """Return the folder for the job's shared memory; in the temporary directory without /dev/shm."""
    return (_SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())) / name


def _create_locked(folder: Path) -> int:
    """Create a folder and lock it; return the descriptor that holds the lock."""
    while True:
        folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # before the folder is locked, another launcher may remove it
            lock = os.open(folder, _OPEN | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:  # on some cluster file systems, locks must be enabled
                os.close(lock)
                raise LaunchError(
                    f"the job's folder {folder} cannot be locked: {error.strerror}; set TMPDIR to a folder "
                    "on a disk of this host, such as /tmp"
                ) from error
            if folder.exists():
                return lock
            os.close(lock)


def _is_abandoned(job: str) -> bool:
    """Return whether a job has neither processes nor a launcher. Older versions lock only `root`."""
    launcher = read_stat(job.split("-")[3])
    return (launcher is None or launcher[0] in "ZX") and not processes_of(job)


def _remove_if_stale(folder: Path) -> bool:
    """Remove the folders and processes of a job if the lock of its folder `folder` is free."""
    try:
        descriptor = os.open(folder, _OPEN)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        opened = os.fstat(descriptor)
        # If another launcher has removed the folder, the owner may have created and locked a new folder.
        if not _is_at(folder, opened):
            return False
        if opened.st_uid == os.getuid():
            kill_job(folder.name)
            _remove(folder, _shm_folder(folder.name))
        return True
    finally:
        os.close(descriptor)


def _is_at(folder: Path, opened: os.stat_result) -> bool:
    """Return whether an open folder still has this path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(folder.lstat(), opened)
    return False


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _orphaned_segments() -> set[Path]:
    if not _SHARED_MEMORY.is_dir():
        return set()
    ours = {path for path in _SHARED_MEMORY.iterdir() if _FOREIGN_SEGMENT.match(path.name) and _is_ours(path)}
    if not ours:
        return set()
    mapped = b"".join(_read(pid, "maps") for pid in _own_processes())
    return {path for path in ours if os.fsencode(path) not in mapped and not _is_open(path)}


def _is_open(path: Path) -> bool:
    """Return whether a process has a file of this user open for writing, or mapped writable.

    Includes processes whose maps are unreadable: processes of another user, or of a container with its own
    processes that shares this memory. False if the kernel does not tell.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return error.errno == errno.EAGAIN  # another launcher checks the same file
    try:
        # A process that opens the file meanwhile waits until this process closes it. The kernel notifies this
        # process, by default with SIGIO, which would kill it. So choose a signal that this process ignores.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    finally:
        os.close(descriptor)
    return False


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _own_processes() -> list[int]:
    me = os.getpid()
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != me]


def _read(pid: int, name: str) -> bytes:
    """Return the content of a file in /proc; empty if the process has exited or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
