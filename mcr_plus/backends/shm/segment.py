"""Shared memory of the ranks of a group on one host, and its layout.

One rank creates a file in /dev/shm, all ranks map it, and then it is unlinked, so that later crashes leave no
file behind. The next job removes the file of a job that was killed earlier. The file's blocks are reserved at
creation, so that a full /dev/shm is an error at once, not a SIGBUS in the middle of an operation.

    lines        one per rank: counters of `collectives`
    queues       one line per end and queue: number of filled slots, with tags; number of emptied slots
    areas        a ring of slots per rank, for `collectives`
    slots        slots of the queues, for every (source, target, channel)
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mcr_plus.backends.shm.readable import Probe
from mcr_plus.errors import BackendUnavailable, LaunchError, McrError

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store
    from mcr_plus.core.group import Group

LINE: Final = 128
"""Bytes between counters of different writers: two cache lines, because cores fetch them in pairs."""
_PAGE: Final = 4096
_FOLDER: Final = Path("/dev/shm")
_NAME: Final = re.compile(r"mcr-msccl-(\d+)-(\d+)-(\d+)-(\d+)-\d+$")  # user, PID namespace, pid, start time
_FAILED: Final = "failed: "
_log = logging.getLogger("mcr_plus")


@dataclass(frozen=True)
class Shape:
    """Sizes of a segment; equal on all ranks.

    Attributes:
        ranks: number of ranks of the group.
        channels: number of queues from one rank to another.
        depth: slots of a queue, 2 to 7: with one slot, rings deadlock; the tags of 7 fit a cache line.
        slot: bytes of a queue's slot, a multiple of 64.
        cells: slots of a pair's first queue, for messages; 0 for `depth`. A core writes slowly to memory that
            its peer has just read, so these are many.
        cell: bytes of such a slot, a multiple of 64; 0 for `slot`.
        ring: slots of a rank's area in `collectives`, 2 to 5: the tags of 5 fit a cache line.
        area: bytes of a slot of an area, a multiple of 64 × ranks.
    """

    ranks: int
    channels: int = 1
    depth: int = 4
    slot: int = 128 << 10
    cells: int = 0
    cell: int = 0
    ring: int = 2
    area: int = 768 << 10

    def __post_init__(self) -> None:
        if not 2 <= self.depth <= 7 or not 2 <= self.ring <= 5:
            raise ValueError(f"expected depth 2 to 7 and ring 2 to 5, got {self.depth} and {self.ring}")
        if self.slot % 64 or self.cell % 64 or self.area % (64 * self.ranks):
            raise ValueError(
                f"slot={self.slot}, cell={self.cell} and area={self.area} must be multiples of 64, "
                "area per rank"
            )

    @property
    def lines(self) -> int:
        """Offset of the ranks' lines."""
        return 0

    @property
    def queues(self) -> int:
        """Offset of the queues' counters."""
        return self.lines + self.ranks * LINE

    @property
    def areas(self) -> int:
        """Offset of the ranks' areas."""
        return _aligned(self.queues + 2 * LINE * self._count)

    @property
    def slots(self) -> int:
        """Offset of the queues' slots."""
        return _aligned(self.areas + self.ranks * self.ring * self.area)

    @property
    def nbytes(self) -> int:
        """Total bytes."""
        return _aligned(self.slots_of(self.ranks, 0, 0))

    @property
    def _count(self) -> int:
        return self.ranks * (self.ranks - 1) * self.channels

    @property
    def first(self) -> tuple[int, int]:
        """Number of slots of a pair's first queue, and their bytes."""
        return self.cells or self.depth, self.cell or self.slot

    def queue(self, source: int, target: int, channel: int) -> int:
        """Return the number of a queue."""
        return (source * (self.ranks - 1) + target - (target > source)) * self.channels + channel

    def slots_of(self, source: int, target: int, channel: int) -> int:
        """Return the offset of a queue's slots."""
        number, nbytes = self.queue(source, target, channel), self.depth * self.slot
        firsts = number // self.channels + (channel > 0)
        return self.slots + firsts * math.prod(self.first) + (number - firsts) * nbytes


class Segment:
    """Mapped memory. `base` is the address in this process.

    `bells`: `Wakeups.table` of the job, 0 without bells. `probe`: see `readable`; kept, since peers read it.
    """

    def __init__(
        self, shape: Shape, rank: int, memory: mmap.mmap, bells: int = 0, probe: Probe | None = None
    ) -> None:
        self.shape, self.rank, self.bells, self.probe = shape, rank, bells, probe
        self._memory = memory
        self._anchor = ctypes.c_char.from_buffer(memory)
        self.base = ctypes.addressof(self._anchor)

    def close(self) -> None:
        """Unmap the memory. No compiled code may use it afterwards."""
        if self.base:
            self.base = 0
            del self._anchor
            self._memory.close()


@cache  # groups of a job have the same problem
def _say_copies(problem: str) -> None:
    _log.info("backend msccl: ranks copy large data twice, as %s", problem)


def open_segment(store: Store, group: Group, shape: Shape, timeout: float, bells: int = 0) -> Segment:
    """Create and map the segment of `group`; collective over its ranks, which must share a host.

    Raises:
        BackendUnavailable: a rank has failed; raised on all ranks, with the failure of that rank.
        LaunchError: ranks have not joined within `timeout` seconds, or the store does not answer.
        PeerLost: a rank has been lost, if `store` ends its waits then (`JobStore`).
    """
    opening = _Opening(store, group, shape, timeout)
    try:
        opening.take_part()
        if problem := opening.meet():
            raise BackendUnavailable(
                f"backend msccl: {shape.nbytes >> 20} MiB of shared memory cannot be allocated: {problem}; "
                "enlarge /dev/shm (docker run --shm-size) or use another backend"
            )
        assert opening.probe is not None
        if problem := opening.probe.run():
            _say_copies(problem)
        return Segment(shape, group.rank, opening.memory_taken(), bells, opening.probe)
    except McrError:
        raise
    except RuntimeError as error:
        raise LaunchError(
            f"group '{group.name}': memory of backend msccl: the job's store does not answer: {error}"
        ) from error
    finally:
        opening.end()


class _Opening:
    """Opens the same memory on all ranks: the first rank creates and publishes it, and all ranks confirm."""

    def __init__(self, store: Store, group: Group, shape: Shape, timeout: float) -> None:
        self._memory: mmap.mmap | None = None
        self.probe: Probe | None = None
        self._store, self._group, self._shape, self._timeout = store, group, shape, timeout
        self._nbytes = shape.nbytes
        self._path: Path | None = None
        self._began = time.monotonic()
        key = f"msccl/{group.name}"
        self._file, self._problem = f"{key}/file", f"{key}/problem"
        self._seen = {rank: f"{key}/seen/{rank}" for rank in range(group.size)}

    def take_part(self) -> None:
        """Create or map the memory; publish a failure of this rank."""
        rank, shape, problem = self._group.rank, self._shape, ""
        try:
            if rank == 0:
                remove_stale()
                self._path, self._memory = _create(self._nbytes)
            else:
                self._wait({0: self._file})
                self._map_theirs(self._store.get(self._file).decode())
            if self._memory is not None:
                self.probe = Probe(
                    self._memory, rank, [shape.lines + each * LINE for each in range(shape.ranks)]
                )
        # Not only OSError: a file or address space may not support the size.
        except (OSError, OverflowError, ValueError) as error:
            reason, place = getattr(error, "strerror", None) or error, getattr(error, "filename", None)
            problem = f"{self._group.named(rank)}: {reason} ({place or _FOLDER})"
            self._store.set(self._problem, problem)
        if rank == 0:
            self._store.set(self._file, f"{_FAILED}{problem}" if problem else f"{self._nbytes} {self._path}")
        self._store.set(self._seen[rank], "1")

    def _map_theirs(self, published: str) -> None:
        if published.startswith(_FAILED):
            return
        size, _, name = published.partition(" ")
        self._path = Path(name)
        if int(size) != self._nbytes:
            raise OSError(
                0, f"expected {self._nbytes} bytes, {self._group.named(0)} has created {size}", name
            )
        self._memory = _map(self._path, self._nbytes)

    def meet(self) -> str:
        """Wait for all ranks; return the failure of a rank, or ''."""
        self._wait(self._seen)
        if self._store.check([self._problem]):
            return self._store.get(self._problem).decode()
        return ""

    def _wait(self, keys: Mapping[int, str]) -> None:
        """Wait for keys of ranks; raises `LaunchError`, which names the missing ranks."""
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=self._timeout))
        except McrError:  # a lost rank is not a late one
            raise
        except RuntimeError as error:
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            if missing:
                raise LaunchError(
                    f"group '{self._group.name}': memory of backend msccl was not open after "
                    f"{time.monotonic() - self._began:.1f} s without {self._group.named(*missing)}"
                ) from error

    def memory_taken(self) -> mmap.mmap:
        """Return the memory, which the caller then owns."""
        memory, self._memory = self._memory, None
        assert memory is not None
        return memory

    def end(self) -> None:
        """Unlink the file, and unmap memory that the caller has not taken."""
        if self._memory is not None:
            self._memory.close()
        if self._path is not None:  # unlinked by the first rank here, since the creator may have died
            self._path.unlink(missing_ok=True)
        else:  # the creator died before it could publish the path
            with contextlib.suppress(OSError):
                remove_stale()


def remove_stale() -> None:
    """Remove files of this user whose creator died before it could unlink them."""
    for path, pid, start in _files():
        if _start_of(pid) != start:
            path.unlink(missing_ok=True)


def _create(nbytes: int) -> tuple[Path, mmap.mmap]:
    pid = os.getpid()
    stem = f"mcr-msccl-{os.getuid()}-{_namespace()}-{pid}-{_start_of(pid)}"
    path = _FOLDER / f"{stem}-{time.monotonic_ns()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return path, mmap.mmap(descriptor, nbytes)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _map(path: Path, nbytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(descriptor, nbytes)
    except ValueError as error:  # too short: not created by a rank of this job
        raise OSError(0, str(error), str(path)) from error
    finally:
        os.close(descriptor)


def _files() -> Iterator[tuple[Path, int, int]]:
    """Yield the files of this user and PID namespace, with pid and start time of their creators."""
    if not _FOLDER.is_dir():
        return
    for path in _FOLDER.iterdir():
        found = _NAME.match(path.name)
        if found is None:
            continue
        user, namespace, pid, start = map(int, found.groups())
        try:
            ours = user == os.getuid() == path.lstat().st_uid
        except OSError:
            continue
        if ours and namespace == _namespace():
            yield path, pid, start


def _start_of(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if it does not exist."""
    try:
        # The process name, in parentheses, may contain spaces; the 22nd field is the 20th after the name.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def _namespace() -> int:
    """Return the PID namespace, because containers with different pids may share /dev/shm."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
